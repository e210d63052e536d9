"""Settings of both doors: what stands in `kv_connector_extra_config`, or in the entry of a secondary tier.

Beside a door's own settings it holds those of the cache: either `config`, the path of a settings file, or the
same tree in place (`tiers`, `prefetch`, ...). With `connect` the cache is a daemon's, and has its own settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from kvcairn.cache import Cache
from kvcairn.config import Config, read_toml
from kvcairn.errors import ConfigError
from kvcairn.plain import near
from kvcairn.units import parse_duration

PATH = "kv_connector_extra_config"


class TierOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `KVCairnTier`; the connector has them too.

    Attributes:
        model: Name of the model; the last part of its path unless given.
        weights: Fingerprint of the weights; a hub revision or a hash over the weight files unless given.
        tenant: Tenants never share blocks.
        load_timeout: Longest time one load may take; what has not come by then is computed.
    """

    model: str | None = None
    weights: str | None = None
    tenant: str = ""
    load_timeout: float | str = 10.0

    @property
    def load_timeout_s(self) -> float:
        """`load_timeout` in seconds."""
        return parse_duration(self.load_timeout)


class ConnectorOptions(TierOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `KVCairnConnector`.

    Attributes:
        block_tokens: Tokens of a stored block, a multiple of the engine's block size.
        store_generated: Whether blocks of generated tokens are stored, beside those of prompts.
    """

    block_tokens: Annotated[int, Meta(ge=1)] = 256
    store_generated: bool = True


Options = TypeVar("Options", bound=TierOptions)


class Settings(msgspec.Struct, Generic[Options], frozen=True):
    """What one door was given: its own settings, and where its cache is."""

    options: Options
    config: Config | None
    connect: str | None

    def open_cache(self) -> Cache:
        """Open the cache, or connect to it. In one process all who open it with equal settings get the same one.

        Raises:
            ConfigError: a tier cannot be opened as the settings say.
            UnsupportedError: this version has no such cache.
        """
        if self.connect is not None:
            return Cache.connect(self.connect)
        assert self.config is not None
        return Cache.open(self.config)


_TREE = frozenset(Config.__struct_fields__)


def read_settings(extra: Mapping[str, Any], kind: type[Options], path: str = PATH) -> Settings[Options]:
    """Return the checked settings.

    Raises:
        ConfigError: one is unknown or malformed; its path begins with `path`.
    """
    own = set(kind.__struct_fields__)
    known = {*own, *_TREE, "config", "connect"}
    for name in extra:
        if name not in known:
            remedy = near(name, known) or f"settings here: {', '.join(sorted(known))}"
            raise ConfigError(f"{path}.{name}", "no such setting", remedy=remedy)
    try:
        options = msgspec.convert({k: v for k, v in extra.items() if k in own}, kind)
        options.load_timeout_s  # noqa: B018 - read to be checked
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(path, str(error)) from error
    tree = {k: v for k, v in extra.items() if k in _TREE}
    return Settings(options, *_cache(extra.get("config"), extra.get("connect"), tree, path))


def _cache(file: Any, connect: Any, tree: dict[str, Any], path: str) -> tuple[Config | None, str | None]:
    given = [name for name, value in (("config", file), ("connect", connect), ("tiers", tree)) if value]
    if len(given) != 1:
        found = " and ".join(given) or "neither"
        remedy = 'as in {"config": "/etc/kvcairn.toml"}'
        raise ConfigError(path, f"one of config, connect and tiers is needed, got {found}", remedy=remedy)
    if connect:
        return None, str(connect)
    return Config.from_dict(read_toml(file) if file else tree), None
