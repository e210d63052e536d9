"""T15: ten times the capacity is written and the folder never takes more than its limit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvcairn as kv
from kvcairn.host import folder_bytes
from kvcairn.layout import KVLayout, LayerGroup, SpaceDescriptor
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.rig import Rig, Setup
from tests.torture.support import MakeRig

MIB = 1 << 20


LARGE = SpaceDescriptor(
    model="m",
    weights="w",
    layout=KVLayout(groups=(LayerGroup.full(16, MIB // 2 // 16 // 16),), dtype="float16"),
    block_tokens=16,
)


@pytest.mark.slow
def test_ten_times_the_capacity(make_rig: MakeRig, tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    rig = make_rig(folder=folder, below="disk", threads=True, memory_blocks=16384, below_blocks=64 * MIB // 8192)
    limit = rig.cache.stats().tiers["disk"].capacity_bytes
    assert limit <= 64 * MIB
    sampled: list[int] = []

    def write(writer: int) -> None:
        blocks = Blocks(rig, descriptor=LARGE)
        for turn in range(40):
            blocks.put(blocks.keys(1000 * writer + turn, 8))
            rig.cache.drain("disk", timeout_s=60)
            sampled.append(folder_bytes(folder))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert max(sampled) <= 64 * MIB
    stats = assert_idle(rig)
    assert stats.tiers["disk"].used_bytes <= limit
    assert stats.tiers["disk"].used_bytes > limit // 2, "the room there is gets used"


def test_only_one_owner(make_rig: MakeRig, tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    make_rig(folder=folder, below="disk")
    for _ in range(3):
        with pytest.raises(kv.ConfigError, match=r"own|lock|another"):
            Rig(Setup(below="disk"), folder)


def test_what_an_earlier_run_left_counts(make_rig: MakeRig, tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    big = make_rig(folder=folder, below="disk", below_blocks=512)
    blocks = Blocks(big)
    for prompt in range(20):
        blocks.put(blocks.keys(prompt, 16))
    assert_idle(big)
    big.cache.close()
    small = make_rig(folder=folder, below="disk", below_blocks=64)
    stats = assert_idle(small)
    assert stats.tiers["disk"].capacity_bytes == 64 * 8192
    assert folder_bytes(folder) <= stats.tiers["disk"].capacity_bytes
    again = Blocks(small)
    for prompt in range(20):
        again.put(again.keys(100 + prompt, 16))
        assert folder_bytes(folder) <= stats.tiers["disk"].capacity_bytes


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_no_tier_without_a_bound(tmp_path: Path, kind: str) -> None:
    tiers: list[dict[str, object]] = [{"type": "memory", "capacity": "16 MiB"}, {"type": "disk", "path": str(tmp_path)}]
    if kind == "memory":
        tiers = [{"type": "memory"}]
    with pytest.raises(kv.ConfigError, match="capacity"):
        kv.Config.from_dict({"tiers": tiers})
