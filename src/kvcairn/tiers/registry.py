"""Finds the class of a tier by the `type` of its settings; built-ins and plug-ins come in by the same door."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from kvcairn.config import TierOptions
from kvcairn.errors import ConfigError
from kvcairn.tiers.base import Tier, TierContext

GROUP = "kvcairn.tiers"
_BUILT_IN = {"disk": "kvcairn.tiers.disk:DiskTier"}


def create(options: TierOptions, context: TierContext, path: str) -> Tier:
    """Return a new tier for these settings, not opened yet.

    Raises:
        ConfigError: no installed tier has that type; names the setting `path`.
    """
    kind = str(options.__struct_config__.tag)
    for point in entry_points(group=GROUP, name=kind):
        tier = point.load()(options, context)
        assert isinstance(tier, Tier), f"{point.value} is no Tier"
        return tier
    if kind not in _BUILT_IN:
        raise ConfigError(f"{path}.type", f"no installed tier is called {kind!r}")
    module, name = _BUILT_IN[kind].split(":")
    tier = getattr(import_module(module), name)(options, context)
    assert isinstance(tier, Tier)
    return tier
