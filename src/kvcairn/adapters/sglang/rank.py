"""One rank of an engine: the cache that serves it, and the space of each of its pools. Both doors open it."""

from __future__ import annotations

from typing import Any

from kvcairn.adapters.sglang.identity import describe, model_name, weights_fingerprint
from kvcairn.adapters.sglang.settings import NAME, Settings
from kvcairn.cache import Cache
from kvcairn.errors import ConfigError
from kvcairn.space import Space


class Rank:
    """What is the same for all pools of a rank.

    Attributes:
        settings: what the engine was given.
        count: ranks of the engine.
    """

    def __init__(self, settings: Settings, storage_config: Any, server_args: Any) -> None:
        """Find out which model it serves.

        Args:
            settings: what the engine was given.
            storage_config: SGLang's description of this rank.
            server_args: the engine's arguments.

        Raises:
            ConfigError: the weights cannot be found; or several processes would each need the same cache.
        """
        options = settings.options
        self.settings, self._config = settings, storage_config
        self.count: int = storage_config.tp_size * storage_config.pp_size * storage_config.attn_cp_size
        if self.count > 1 and settings.connect is None:
            reason = f"{self.count} ranks cannot share a cache that lives in one of them"
            remedy = 'run "kvcairn serve", and give its address as "connect"'
            raise ConfigError(f"{NAME}.connect", reason, None, remedy)
        name = model_name(options, storage_config)
        self._model = (name, weights_fingerprint(options, server_args), options.tenant)

    def space(self, cache: Cache, pool: Any, name: str, block_bytes: int) -> Space:
        """Open the space of one pool.

        Raises:
            ConfigError: the memory tier's write policy cannot be served: SGLang hands a page over once.
            LayoutError: its pages are larger than the memory tier.
            UnsupportedError: its element type has no name here.
        """
        space = cache.space(describe(pool, name, block_bytes, self._config, self._model))
        space.check_write_policy("through")
        return space

    def timeout_s(self, tokens: int) -> float:
        """Return the longest time that a call for so many tokens may take."""
        return self.settings.options.timeout_s(tokens)
