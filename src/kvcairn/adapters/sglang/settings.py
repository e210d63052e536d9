"""Settings of the SGLang adapter: the table `kvcairn` in the extra configuration of HiCache's storage backend.

Beside the adapter's own settings it holds those of the cache: either `config`, the path of a settings file, or the
same tree in place (`tiers`, `prefetch`, ...). With `connect` the cache is a daemon's, and has its own settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvcairn.cache import Cache
from kvcairn.config import Config, read_toml
from kvcairn.errors import ConfigError
from kvcairn.memory.slots import round_up
from kvcairn.plain import near
from kvcairn.units import parse_duration

NAME = "kvcairn"
BUFFER_SHARE = 20  # a write buffer takes a twentieth of the host pool
LEAST_BUFFER_BLOCKS = 16
LEAST_BUFFER_BYTES = 16 << 20


class AdapterOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapter's own settings.

    Attributes:
        model: Name of the model; the engine's served name unless given.
        weights: Fingerprint of the weights; a hash over the weight files unless given.
        tenant: Tenants never share pages.
        timeout_base: Longest time one call may take, whatever it moves.
        timeout_per_1024_tokens: What each 1,024 tokens of a call add to it.
        lookup_wait: How long the linker lets a request wait for pages that are not in memory but on a slower tier.
    """

    model: str | None = None
    weights: str | None = None
    tenant: str = ""
    timeout_base: float | str = 1.0
    timeout_per_1024_tokens: float | str = 0.25
    lookup_wait: float | str = 0.2

    def timeout_s(self, tokens: int) -> float:
        """Return the longest time that a call for so many tokens may take."""
        return parse_duration(self.timeout_base) + parse_duration(self.timeout_per_1024_tokens) * tokens / 1024

    def lookup_wait_s(self) -> float:
        """Return how long a lookup may wait for slower tiers."""
        return parse_duration(self.lookup_wait)


class Settings(msgspec.Struct, frozen=True):
    """What one engine was given: its own settings, and where its cache is.

    Attributes:
        options: the adapter's own settings.
        tree: settings of a cache of this process, as read; None with `connect`.
        connect: address of a daemon.
    """

    options: AdapterOptions
    tree: dict[str, Any] | None
    connect: str | None

    @property
    def has_memory_tier(self) -> bool:
        """Whether the settings name a memory tier; a daemon has one."""
        tiers = (self.tree or {}).get("tiers")
        return self.tree is None or (
            isinstance(tiers, list)
            and any(isinstance(tier, Mapping) and tier.get("type") == "memory" for tier in tiers)
        )

    def open_cache(self, pool_bytes: int, block_bytes: int) -> Cache:
        """Open the cache, or connect to it. In one process all who open it with equal settings get the same one.

        Where the settings name no memory tier it gets a write buffer, bounded by a twentieth of the host pool.

        Raises:
            ConfigError: a tier cannot be opened as the settings say.
            UnsupportedError: this version has no such cache.
        """
        if self.connect is not None:
            return Cache.connect(self.connect)
        assert self.tree is not None
        tree, tiers = dict(self.tree), self.tree.get("tiers")
        if isinstance(tiers, list) and not self.has_memory_tier:
            least_bytes = max(LEAST_BUFFER_BYTES, LEAST_BUFFER_BLOCKS * round_up(block_bytes))
            buffer_bytes = max(pool_bytes // BUFFER_SHARE, least_bytes)
            tree["tiers"] = [{"type": "memory", "capacity": buffer_bytes}, *tiers]
        return Cache.open(Config.from_dict(tree))


_OWN = frozenset(AdapterOptions.__struct_fields__)
_TREE = frozenset(Config.__struct_fields__)


def read_settings(extra: Mapping[str, Any] | None) -> Settings:
    """Return the checked settings of an engine's extra configuration.

    Raises:
        ConfigError: one is unknown or malformed; the path begins with `kvcairn`.
    """
    given = (extra or {}).get(NAME)
    if not isinstance(given, Mapping):
        remedy = 'as in {"kvcairn": {"config": "/etc/kvcairn.toml"}, ...}'
        raise ConfigError(NAME, "the extra configuration has no such table", given, remedy)
    known = {*_OWN, *_TREE, "config", "connect"}
    for name in given:
        if name not in known:
            remedy = near(str(name), known) or f"settings here: {', '.join(sorted(known))}"
            raise ConfigError(f"{NAME}.{name}", "no such setting", remedy=remedy)
    try:
        options = msgspec.convert({k: v for k, v in given.items() if k in _OWN}, AdapterOptions)
        options.timeout_s(0), options.lookup_wait_s()  # read to be checked
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(NAME, str(error)) from error
    return Settings(options, *_cache(given))


def _cache(given: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    tree = {k: v for k, v in given.items() if k in _TREE}
    ways = {"config": given.get("config"), "connect": given.get("connect"), "tiers": tree}
    named = [name for name, value in ways.items() if value]
    if len(named) != 1:
        found = " and ".join(named) or "neither"
        remedy = 'as in {"config": "/etc/kvcairn.toml"}'
        raise ConfigError(NAME, f"one of config, connect and tiers is needed, got {found}", remedy=remedy)
    if ways["connect"]:
        return None, str(ways["connect"])
    return (read_toml(str(ways["config"])) if ways["config"] else tree), None
