"""A tier and a policy of another package, found by their entry points, serve a whole cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcairn import Cache, Config, ConfigError, KVLayout, SpaceDescriptor, plugins

MODULE = """
from msgspec import field
from kvcairn.config import Bytes, TierOptions
from kvcairn.policy.eviction.lru import LRU
from kvcairn.testing import DictTier


class ShelfOptions(TierOptions, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="shelf"):
    capacity_bytes: Bytes = field(name="capacity")
    eviction: str = "lru"
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
