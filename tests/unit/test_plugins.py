"""A tier and a policy of another package, found by their entry points, serve a whole cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcairn import Cache, Config, ConfigError, KVLayout, SpaceDescriptor, plugins
from tests.unit.conftest import Install

MODULE = """
from kvcairn.config import ManagedTierOptions
from kvcairn.policy.eviction.lru import LRU
from kvcairn.testing import DictTier


class ShelfOptions(ManagedTierOptions, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="shelf"):
    drawer: str = "top"


class ShelfTier(DictTier):
    options = ShelfOptions

    def __init__(self, options, context):
        super().__init__(options.name)
        self.drawer = options.drawer


class ForeignTier(ShelfTier):
    managed = False


class Newest(LRU):
    pass
"""
ENTRY_POINTS = """
[kvcairn.tiers]
shelf = shelf_package:ShelfTier

[kvcairn.policies]
newest = shelf_package:Newest
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "shelf_package.py").write_text(MODULE)
    info = tmp_path / "shelf_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("shelf_package", None)


def config(**shelf: object) -> Config:
    tier = {"type": "shelf", "name": "shelf", "capacity": "1 MiB", **shelf}
    return Config.from_dict({"tiers": [{"type": "memory", "capacity": "1 MiB"}, tier]})


@pytest.mark.usefixtures("package")
def test_a_tier_and_a_policy_of_another_package_serve_a_cache() -> None:
    assert plugins.names(plugins.TIERS) >= {"shelf"}
    layout = KVLayout.full(layers=1, kv_heads=1, head_dim=8, dtype="float32")
    with Cache.open(config(eviction="newest", drawer="bottom")) as cache:
        space = cache.space(SpaceDescriptor(model="m", weights="w", layout=layout, block_tokens=4))
        keys = space.keys(np.arange(16))
        blocks = [bytes([number]) * space.block_bytes for number in range(4)]
        assert all(space.put(keys, blocks))
        assert cache.drain(timeout_s=60.0)
        cache.clear(tier="memory")
        assert space.lookup(keys).by_tier == {"shelf": 4}
        assert space.get(keys) == blocks


@pytest.mark.usefixtures("package")
def test_its_settings_are_checked_like_any_other() -> None:
    with pytest.raises(ConfigError, match=r"tiers\[1\].draw"):
        config(draw="top")
    with pytest.raises(ConfigError, match=r"tiers\[1\].eviction"):
        config(eviction="oldest")


def test_a_foreign_tier_is_refused(package: Path) -> None:
    points = package / "shelf_package-1.0.dist-info" / "entry_points.txt"
    points.write_text(ENTRY_POINTS.replace("ShelfTier", "ForeignTier"))
    with pytest.raises(ConfigError, match="not available in this version"):
        Cache.open(config())


def test_without_the_package_its_type_is_unknown() -> None:
    with pytest.raises(ConfigError, match=r"tiers\[1\].type"):
        config()


# --- plug-ins that are broken

OF_A_TIER = """
from kvcairn.config import ManagedTierOptions, TierOptions, Bytes
from kvcairn.testing import DictTier
from kvcairn.tiers.base import Tier
class Options(ManagedTierOptions, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="bad"):
    pass
class Unbounded(TierOptions, frozen=True, kw_only=True, tag="bad"):
    pass
class Other(ManagedTierOptions, frozen=True, kw_only=True, tag="other"):
    pass
class Untagged(ManagedTierOptions, frozen=True, kw_only=True):
    pass
class Unreadable(ManagedTierOptions, frozen=True, kw_only=True, tag="bad"):
    size: "Byts" = 1
class Good(DictTier):
    options = Options
    def __init__(self, options, context):
        super().__init__(options.name)
"""
WITHOUT_METHODS = "lacks close(), delete(), open(), probe(), read(), retire(), write()"
NO_ARGUMENTS = "class Bad(DictTier):\n    options = Options\n    def __init__(self): pass"
BROKEN_TIERS = [
    ("import nothing_is_called_so", "cannot be imported: ModuleNotFoundError: No module named 'nothing_is_called_so'"),
    ("1 / 0", "cannot be imported: ZeroDivisionError"),
    ("def (", "cannot be imported: SyntaxError"),
    ("", "cannot be imported: AttributeError"),
    ("Bad = 7", "is no Tier: its class must derive from kvcairn.tiers.base.Tier"),
    (f"{OF_A_TIER}\nclass Bad: options = Options", "is no Tier"),
    (f"{OF_A_TIER}\nclass Bad(Tier): options = Options", WITHOUT_METHODS),
    (f"{OF_A_TIER}\n{NO_ARGUMENTS}", "cannot be made as Bad("),
    (f"{OF_A_TIER}\nclass Bad(Good): options = None", "`options` must be a kvcairn.config.ManagedTierOptions"),
    (f"{OF_A_TIER}\nclass Bad(Good): options = dict", "`options` must be a kvcairn.config.ManagedTierOptions"),
    (f"{OF_A_TIER}\nclass Bad(Good): options = Unbounded", "`options` must be a kvcairn.config.ManagedTierOptions"),
    (f"{OF_A_TIER}\nclass Bad(Good): options = Other", "calls itself 'other': write tag='bad' in Other"),
    (f"{OF_A_TIER}\nclass Bad(Good): options = Untagged", "calls itself 'Untagged': write tag='bad'"),
    (f"{OF_A_TIER}\nclass Bad(Good): options = Unreadable", "of a type that cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BROKEN_TIERS)))
def test_a_broken_tier_is_refused_as_settings_are_read(install: Install, number: int) -> None:
    text, said = BROKEN_TIERS[number]
    module = f"kvt_broken_{number}"
    install(module, text, plugins.TIERS, f"bad = {module}:Bad")
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"tiers": [{"type": "memory", "capacity": "1 MiB"}, {"type": "bad", "name": "x"}]})
    error = caught.value
    assert error.path == "tiers[1].type"
    assert said in error.reason
    assert f"the plug-in 'bad' of package {module} ({module}:Bad)" in error.reason
    assert f"mend or update {module}" in error.remedy
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nothing_is_called_so", "cannot be imported: ModuleNotFoundError"),
        ("class Bad: pass", "is no EvictionPolicy"),
        ("from kvcairn.policy.eviction.base import EvictionPolicy\nclass Bad(EvictionPolicy): pass", "lacks "),
    ],
    ids=["import", "class", "abstract"],
)
def test_a_broken_policy_is_refused_as_settings_are_read(
    install: Install, text: str, said: str, request: pytest.FixtureRequest
) -> None:
    module = f"kvp_broken_{request.node.callspec.id}"
    install(module, text, plugins.POLICIES, f"bad = {module}:Bad")
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"tiers": [{"type": "memory", "capacity": "1 MiB", "eviction": "bad"}]})
    assert caught.value.path == "tiers[0].eviction"
    assert said in caught.value.reason
    assert f"of package {module}" in caught.value.reason


def test_what_no_setting_names_is_not_imported(install: Install) -> None:
    for group in (plugins.TIERS, plugins.POLICIES):
        module = f"kv_unused_{group.rpartition('.')[2]}"
        install(module, "raise SystemExit('imported')", group, f"unused = {module}:Bad")
    config = {"tiers": [{"type": "memory", "capacity": "1 MiB"}]}
    with Cache.open(Config.from_dict(config)) as cache:
        assert cache.stats().tiers["memory"].blocks == 0
    with pytest.raises(ConfigError, match="use one of: memory, disk, unused"):
        Config.from_dict({"tiers": [*config["tiers"], {"type": "redis"}]})


def test_a_tier_under_another_name_is_refused_before_it_is_opened(install: Install) -> None:
    text = f"{OF_A_TIER}\nclass Bad(DictTier): options = Options"  # takes the options for its name
    install("kvt_nameless", text, plugins.TIERS, "bad = kvt_nameless:Bad")
    tier = {"type": "bad", "name": "x", "capacity": "1 MiB"}
    with pytest.raises(ConfigError, match=r"tiers\[1\].name: .*must be options.name"):
        Cache.open(Config.from_dict({"tiers": [{"type": "memory", "capacity": "1 MiB"}, tier]}))


def test_two_packages_with_one_name_are_named(install: Install) -> None:
    for module in ("kvt_one", "kvt_two"):
        install(module, OF_A_TIER, plugins.TIERS, f"bad = {module}:Good")
    with pytest.raises(ConfigError, match="packages kvt_one and kvt_two both offer 'bad'"):
        Config.from_dict({"tiers": [{"type": "memory", "capacity": "1 MiB"}, {"type": "bad", "name": "x"}]})
