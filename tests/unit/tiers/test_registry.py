from __future__ import annotations

from pathlib import Path

import pytest

from kvcairn import plugins
from kvcairn.clock import VirtualClock
from kvcairn.config import DiskTierOptions, ManagedTierOptions
from kvcairn.errors import ConfigError
from kvcairn.tiers import registry
from kvcairn.tiers.base import Tier, TierContext
from kvcairn.tiers.disk import DiskTier
from tests.unit.conftest import Install

CONTEXT = TierContext(VirtualClock())


TEXT = """
from kvcairn.config import ManagedTierOptions
from kvcairn.testing import DictTier
class NamedOptions(ManagedTierOptions, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="named"):
    pass
class Named(DictTier):
    options = NamedOptions
    def __init__(self, options, context):
        super().__init__(options.name)
        self.context = context
class Foreign(Named):
    managed = False
"""


class NamedOptions(ManagedTierOptions, frozen=True, kw_only=True, tag="named"):
    """The settings of a plug-in."""


NAMED = NamedOptions(name="mine", capacity_bytes=1 << 20)


def test_the_disk_tier_is_built_in_and_not_opened(tmp_path: Path) -> None:
    options = DiskTierOptions(name="disk", path=str(tmp_path), capacity_bytes=1 << 20)
    tier = registry.create(options, CONTEXT, "tiers[1]")
    assert type(tier) is DiskTier
    assert tier.name == "disk"
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_type_is_refused_by_path() -> None:
    with pytest.raises(ConfigError, match="named") as caught:
        registry.create(NAMED, CONTEXT, "tiers[2]")
    assert caught.value.path == "tiers[2].type"


def test_a_plug_in_is_made_from_options_and_context(install: Install) -> None:
    install("kvt_named", TEXT, plugins.TIERS, "named = kvt_named:Named")
    tier = registry.create(NAMED, CONTEXT, "tiers[1]")
    assert isinstance(tier, Tier)
    assert tier.name == "mine"
    assert tier.context is CONTEXT  # type: ignore[attr-defined]


def test_a_foreign_plug_in_is_refused(install: Install) -> None:
    install("kvt_foreign", TEXT, plugins.TIERS, "named = kvt_foreign:Foreign")
    with pytest.raises(ConfigError, match="not available") as caught:
        registry.create(NAMED, CONTEXT, "tiers[1]")
    assert caught.value.path == "tiers[1].type"
