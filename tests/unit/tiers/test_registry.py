from __future__ import annotations

from pathlib import Path

import pytest

from kvcairn import plugins
from kvcairn.clock import VirtualClock
from kvcairn.config import DiskTierOptions, TierOptions
from kvcairn.errors import ConfigError
from kvcairn.tiers import registry
from kvcairn.tiers.base import Tier, TierContext
from kvcairn.tiers.disk import DiskTier
from tests.unit.conftest import Install

CONTEXT = TierContext(VirtualClock())


class NamedOptions(TierOptions, frozen=True, kw_only=True, tag="named"):
    """The settings of a plug-in."""


def test_the_disk_tier_is_built_in_and_not_opened(tmp_path: Path) -> None:
    options = DiskTierOptions(name="disk", path=str(tmp_path), capacity_bytes=1 << 20)
    tier = registry.create(options, CONTEXT, "tiers[1]")
    assert type(tier) is DiskTier
    assert tier.name == "disk"
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_type_is_refused_by_path() -> None:
    with pytest.raises(ConfigError, match="named") as caught:
        registry.create(NamedOptions(name="x"), CONTEXT, "tiers[2]")
    assert caught.value.path == "tiers[2].type"


TEXT = """
from kvcairn.testing import DictTier
class Named(DictTier):
    def __init__(self, options, context):
        super().__init__(options.name)
        self.context = context
class Foreign(Named):
    managed = False
class Nothing:
    def __init__(self, options, context): pass
"""


def test_a_plug_in_is_made_from_options_and_context(install: Install) -> None:
    install("kvt_named", TEXT, plugins.TIERS, "named = kvt_named:Named")
    tier = registry.create(NamedOptions(name="mine"), CONTEXT, "tiers[1]")
    assert isinstance(tier, Tier)
    assert tier.name == "mine"
    assert tier.context is CONTEXT  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "why"), [("Nothing", "is no kvcairn Tier"), ("Foreign", "not available")])
def test_a_plug_in_of_another_kind_is_refused(install: Install, kind: str, why: str) -> None:
    module = f"kvt_{kind.lower()}"
    install(module, TEXT, plugins.TIERS, f"named = {module}:{kind}")
    with pytest.raises(ConfigError, match=why) as caught:
        registry.create(NamedOptions(name="mine"), CONTEXT, "tiers[1]")
    assert caught.value.path == "tiers[1].type"
