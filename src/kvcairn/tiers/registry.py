"""Finds the class of a tier by the `type` of its settings: built in, or offered by an installed package."""

from __future__ import annotations

from importlib import import_module

from kvcairn import kinds
from kvcairn.clock import MonotonicClock
from kvcairn.config import TierOptions
from kvcairn.errors import ConfigError
from kvcairn.memory.slots import PAGE_BYTES
from kvcairn.tiers.base import Tier, TierContext

_BUILT_IN = {"disk": "kvcairn.tiers.disk:DiskTier"}


def create(options: TierOptions, context: TierContext, path: str) -> Tier:
    """Return a new tier for these settings, not opened yet.

    Raises:
        ConfigError: no installed tier has that type, or it is of a kind that is not supported; names `path`.
    """
    kind = str(options.__struct_config__.tag)
    if kind in _BUILT_IN:
        module, name = _BUILT_IN[kind].split(":")
        found = getattr(import_module(module), name)
    else:
        found = kinds.load_tier(kind, f"{path}.type")
    if found is None:
        raise ConfigError(f"{path}.type", f"no installed tier is called {kind!r}")
    if not found.managed:
        raise ConfigError(f"{path}.type", "tiers that evict by themselves are not available in this version", kind)
    tier: Tier = found(options, context)
    if getattr(tier, "name", None) != options.name:
        reason = f"{found.__module__}.{found.__qualname__}.name must be options.name"
        raise ConfigError(f"{path}.name", reason, options.name, "set it in its constructor")
    return tier


def check(options: TierOptions, path: str) -> None:
    """Refuse settings with which a tier could not be opened. Opens nothing.

    Raises:
        ConfigError: as `create`, `check_capacity` and `Tier.check`.
    """
    tier = create(options, TierContext(MonotonicClock(), path), path)
    check_capacity(tier, options, path)
    tier.check()


def check_capacity(tier: Tier, options: TierOptions, path: str) -> None:
    """Refuse a capacity in which not one slot fits beside what the tier needs, or once it is open has, for itself.

    Raises:
        ConfigError: it does not; names the least that does.
    """
    capacity = getattr(options, "capacity_bytes", None)
    least = tier.overhead_bytes + max(tier.region_bytes or 0, tier.header_bytes + PAGE_BYTES)
    if capacity is not None and capacity < least:
        overhead = tier.overhead_bytes
        reason = f"{capacity} bytes asked, {overhead} of them taken by the tier's index and by other files in its place"
        raise ConfigError(f"{path}.capacity", reason, remedy=f"at least {least} bytes, or another folder")
