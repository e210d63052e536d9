from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvcairn.config import Config
from kvcairn.core.open import close_core, open_core
from kvcairn.errors import ConfigError, TierUnavailable
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.dict_tier import DictTier
from kvcairn.testing.faulty import Fault, FaultKind, FaultyTier
from kvcairn.testing.rig import PAGE_BYTES, Rig, Setup
from kvcairn.tiers.base import Tier
from tests.unit.conftest import MakeRig
from tests.unit.core.kit import chain, full, is_closed_under_parents, rows_of, sliding, space_of, state, store


def config(folder: Path, *more: dict[str, Any]) -> Config:
    disk = {"type": "disk", "name": "disk", "path": str(folder), "capacity": "4 MiB"}
    return Config.from_dict({"tiers": [{"type": "memory", "capacity": "1 MiB"}, disk, *more]})


@pytest.mark.parametrize("below", ["dict", "disk"])
def test_what_was_written_is_there_after_reopening(make_rig: MakeRig, below: str) -> None:
    rig = make_rig(below=below)
    blocks = Blocks(rig)
    keys, other = blocks.keys(1, 6), blocks.keys(2, 2)
    blocks.put(keys)
    blocks.put(other)
    rig.reopen()
    rig.core.check()
    assert blocks.space.lookup(keys).by_tier == {"disk": 6}
    rows = rows_of(rig.core, blocks.space, keys)
    assert [rig.core.state.tree.parent_key(row) for row in rows.tolist()] == [None, *keys[:-1]]
    assert blocks.read(keys, deadline_s=5.0) == 6
    assert blocks.read(other, deadline_s=5.0) == 2
    assert_idle(rig)


def test_all_groups_and_spaces_come_back(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    made = {}
    for tenant in ("a", "b"):
        space = space_of(rig, full(), sliding(1), state(), tenant=tenant)
        made[tenant] = keys = chain(space, 4)
        store(space, keys, [[0, 1, 2], [0], [0, 1, 2], [0]] if tenant == "a" else None)
    rig.reopen()
    rig.core.check()
    assert rig.cache.stats().tiers["disk"].blocks == 8 + 12
    for tenant, boundaries in (("a", (1, 3)), ("b", (1, 2, 3, 4))):
        space = space_of(rig, full(), sliding(1), state(), tenant=tenant)
        assert space.lookup(made[tenant]).boundaries == boundaries
    assert_idle(rig)


def test_blocks_of_a_space_that_nobody_opens_leave_like_others(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", below_blocks=4)
    old = space_of(rig, full(), tenant="old")
    store(old, chain(old, 4))
    rig.reopen()
    assert rig.cache.stats().tiers["disk"].used_bytes == 4 * PAGE_BYTES
    blocks = Blocks(rig)
    keys = blocks.keys(1, 3)
    blocks.put(keys)
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    assert blocks.read(keys, deadline_s=5.0) == 3
    rig.core.check()
    assert assert_idle(rig).tiers["disk"].used_bytes <= 4 * PAGE_BYTES
    assert is_closed_under_parents(rig.core, 1)


@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_smaller_tier_takes_up_what_fits(make_rig: MakeRig, left: int) -> None:
    rig = make_rig(below="dict", below_blocks=8)
    blocks = Blocks(rig)
    keys = blocks.keys(1, 6)
    blocks.put(keys)
    rig.cache.drain()
    object.__setattr__(rig.setup, "below_blocks", left)
    rig.__dict__.pop("config", None)
    rig.reopen()
    rig.core.check()
    stats = rig.cache.stats().tiers["disk"]
    assert stats.used_bytes <= stats.capacity_bytes == left * PAGE_BYTES
    rig.cache.drain()
    assert len(rig.content.slots) <= left, "what does not fit is deleted"
    assert_idle(rig)


def test_two_copies_of_a_block_are_one_the_newer(make_rig: MakeRig) -> None:
    """As after a death between the writing of a copy and the deletion of the old one."""
    rig = make_rig(below="dict")
    blocks = Blocks(rig)
    keys = blocks.keys(1, 1)
    blocks.put(keys)
    rig.cache.drain()
    old = dict(rig.content.slots)
    blocks.space.forget(keys)
    blocks.put(blocks.keys(2, 1))
    blocks.put(keys)
    rig.cache.drain()
    for place, (stored, content) in old.items():
        if place not in rig.content.slots:
            rig.content.slots[place] = (stored, bytes(len(content)))
    rig.reopen()
    rig.core.check()
    assert blocks.read(keys, deadline_s=5.0) == 1
    rig.cache.drain()
    assert_idle(rig)


def test_generations_go_on(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    blocks = Blocks(rig)
    blocks.put(blocks.keys(1, 3))
    rig.reopen()
    before = max(stored.slot.generation for stored, _ in rig.content.slots.values())
    blocks.put(blocks.keys(2, 1))
    rig.cache.drain()
    newest = max((stored.slot.generation, stored.block.key) for stored, _ in rig.content.slots.values())
    assert newest[0] > before
    assert newest[1] == blocks.keys(2, 1)[0]


def open_descriptors() -> int:
    gc.collect()  # a mapping goes with the last reference to it
    return len(os.listdir("/proc/self/fd"))


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("kvcairn")}


def test_when_a_tier_cannot_be_opened_nothing_stays_open(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    second = {"type": "disk", "name": "second", "path": str(two), "capacity": "4 MiB"}
    settings = config(one, second)

    def wrap(tier: Tier) -> Tier:
        faults = (Fault(kind=FaultKind.ERROR, ops=frozenset(["open"]), error=TierUnavailable),)
        return FaultyTier(tier, faults) if tier.name == "second" else tier

    before = open_descriptors()
    for _ in range(3):
        with pytest.raises(ConfigError, match=r"tiers\[2\]"):
            open_core(settings, wrap=wrap)
    assert open_descriptors() == before
    assert threads() == set()


def use_and_close(folder: Path) -> None:
    with Rig(Setup(below="disk", threads=True), folder) as rig:
        blocks = Blocks(rig)
        blocks.put(blocks.keys(1, 3))
        blocks.read(blocks.keys(1, 3))


def test_a_core_that_is_closed_leaves_nothing(tmp_path: Path) -> None:
    use_and_close(tmp_path)
    before = open_descriptors()
    for _ in range(3):
        use_and_close(tmp_path)
    assert open_descriptors() == before
    assert threads() == set()


@pytest.mark.parametrize("capacity", [1, 100, PAGE_BYTES - 1])
def test_memory_holds_at_least_a_page(capacity: int) -> None:
    with pytest.raises(ConfigError, match="capacity"):
        open_core(Config.from_dict({"tiers": [{"type": "memory", "capacity": capacity}]}))


@pytest.mark.parametrize("region", [1, 1000, 5000, 10_000_000])
def test_a_region_is_refused_or_harmless(region: int, make_rig: MakeRig) -> None:
    settings = {"tiers": [{"type": "memory", "capacity": 64_000_000, "region": region, "prefault": False}]}
    try:
        rig = make_rig(settings=tuple(settings.items()))
    except ConfigError as error:
        assert error.path == "tiers[0].region"
        return
    blocks = Blocks(rig)
    keys = blocks.keys(1, 50)
    blocks.put(keys)
    assert blocks.read(keys) == 50


def test_memory_is_touched_before_it_is_used(tmp_path: Path) -> None:
    core = open_core(Config.from_dict({"tiers": [{"type": "memory", "capacity": "2 MiB"}]}))
    try:
        view = core.state.arena.view
        assert view.nbytes == 2 << 20
        assert core.state.memory.stats(core.state.spaces, 0.0, []).used_bytes == 0
    finally:
        close_core(core)


def test_the_kit_wraps_every_tier_below(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    assert isinstance(rig, Rig)
    assert rig.core.state.levels[1].tier is rig.faulty
    assert rig.faulty is not None
    assert isinstance(rig.faulty.inner, DictTier)
