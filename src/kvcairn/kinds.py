"""Kinds of tier and eviction policies that settings may name: built in, or from an installed package. Layer 1."""

from __future__ import annotations

from typing import Any

import msgspec

from kvcairn import plugins
from kvcairn.options import BUILT_IN_EVICTIONS, BUILT_IN_TIERS, ManagedTierOptions, TierOptions
from kvcairn.plugins import Plugin

__all__ = ["eviction_names", "load_eviction", "load_tier", "tier_names", "tier_options"]


def tier_names() -> list[str]:
    """Return every `type` of tier that there is. Imports nothing."""
    return [*BUILT_IN_TIERS, *sorted(plugins.names(plugins.TIERS) - BUILT_IN_TIERS.keys())]


def eviction_names() -> list[str]:
    """Return the name of every eviction policy that there is. Imports nothing."""
    return sorted({*BUILT_IN_EVICTIONS, *plugins.names(plugins.POLICIES)})


def tier_options(name: str, path: str) -> type[TierOptions] | None:
    """Return the type of the settings of a tier by its `type`; None where there is no such tier.

    Imports a plug-in that has that name, and no other.

    Raises:
        ConfigError: the plug-in is broken, or not made as it must be; names `path`.
    """
    if name in BUILT_IN_TIERS:
        return BUILT_IN_TIERS[name]
    found = load_tier(name, path)
    return None if found is None else found.options


def load_tier(name: str, path: str) -> Any:
    """Return the class of a plug-in tier, checked together with the type of its settings; None where there is none.

    Raises:
        ConfigError: as `tier_options`.
    """
    plugin = plugins.find(plugins.TIERS, name, path)
    if plugin is None:
        return None
    found: Any = plugin.load(path)
    if wrong := _mismatch(plugin, found):
        raise plugin.refusal(path, wrong)
    return found


def load_eviction(name: str, path: str) -> type | None:
    """Return the class of a plug-in policy; None where there is none.

    Raises:
        ConfigError: the plug-in is broken, or no eviction policy; names `path`.
    """
    plugin = plugins.find(plugins.POLICIES, name, path)
    return None if plugin is None else plugin.load(path)


def _mismatch(plugin: Plugin, tier: Any) -> str:
    """Return what is wrong with the settings of a tier's class, or an empty text."""
    options = getattr(tier, "options", None)
    base = ManagedTierOptions if tier.managed else TierOptions
    if not (isinstance(options, type) and issubclass(options, base)):
        kind = "managed" if tier.managed else "foreign"
        return f"has no settings: its class attribute `options` must be a kvcairn.config.{base.__name__} ({kind} tier)"
    config = options.__struct_config__
    if config.tag != plugin.name:
        return f"calls itself {config.tag!r}: write tag={plugin.name!r} in {options.__name__}, as in its entry point"
    if not config.frozen:
        return f"has settings that can be changed: write frozen=True in {options.__name__}"
    try:
        msgspec.inspect.type_info(options)
    except (NameError, TypeError) as error:
        return f"has settings of a type that cannot be read, in {options.__name__}: {error}"
    return ""
