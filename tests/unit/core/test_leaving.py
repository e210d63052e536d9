"""Write policies over several tiers: what is written when it is seen, when it leaves, and at the end."""

from __future__ import annotations

import pytest

from kvcairn.core.writes import ASK_AGAIN_S, MOST_TASKS
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.rig import PAGE_BYTES, Rig
from kvcairn.types import TierStats
from tests.unit.conftest import MakeRig
from tests.unit.core.kit import is_closed_under_parents, states

Keys = list[bytes]


def tier(rig: Rig, name: str = "disk") -> TierStats:
    return rig.cache.stats().tiers[name]


def fill(blocks: Blocks, prompts: range, length: int = 4) -> list[Keys]:
    """Store prompts one after the other, each written where a policy wants it."""
    chains = [blocks.keys(prompt, length) for prompt in prompts]
    for keys in chains:
        assert all(blocks.put(keys))
        blocks.rig.cache.drain()
    return chains


# --- selective


def test_selective_writes_at_the_second_sight(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", write_policy="selective")
    blocks = Blocks(rig)
    keys = blocks.keys(1, 4)
    blocks.put(keys)
    rig.cache.drain()
    assert tier(rig).blocks == 0
    assert blocks.read(keys[:2]) == 2
    rig.cache.drain()
    assert states(rig.core, blocks.space, keys, 1) == ["READY", "READY", "ABSENT", "ABSENT"]
    blocks.put(keys)  # of what is there: a sight as well
    rig.cache.drain()
    assert states(rig.core, blocks.space, keys, 1) == ["READY"] * 4
    assert_idle(rig)


def test_a_row_that_is_used_again_starts_with_no_sights(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", write_policy="selective")
    blocks = Blocks(rig)
    keys = blocks.keys(1, 1)
    for _ in range(3):
        blocks.put(keys)
        rig.cache.drain()
        assert tier(rig).blocks == 0
        blocks.space.forget(keys)


def test_ancestors_go_with_a_block_that_is_wanted(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", write_policy="selective")
    blocks = Blocks(rig)
    keys = blocks.keys(1, 4)
    blocks.put(keys)
    blocks.space.touch(keys[3:])
    rig.cache.drain()
    assert states(rig.core, blocks.space, keys, 1) == ["READY"] * 4


# --- back


def test_back_writes_nothing_while_there_is_room(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", memory_blocks=64, write_policy="back")
    blocks = Blocks(rig)
    fill(blocks, range(8))
    assert (tier(rig).blocks, tier(rig, "memory").dirty_bytes) == (0, 32 * PAGE_BYTES)


def test_back_writes_what_would_leave_next_before_it_does(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", memory_blocks=64, write_policy="back")
    blocks = Blocks(rig)
    chains = fill(blocks, range(40))
    assert tier(rig).writes_dropped == {}, "the tier keeps up, so nothing is lost"
    assert [blocks.space.contains(keys) for keys in chains] == [4] * 40
    assert is_closed_under_parents(rig.core, 1)
    found = [blocks.space.lookup(keys).by_tier for keys in chains]
    assert found[:24] == [{"disk": 4}] * 24
    assert_idle(rig)


def test_ancestors_are_copied_down_and_stay(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", memory_blocks=16, write_policy="back")
    blocks = Blocks(rig)
    keys = blocks.keys(1, 12)
    blocks.put(keys)
    rig.cache.drain()
    blocks.put(blocks.keys(2, 4))
    rig.cache.drain()
    assert states(rig.core, blocks.space, keys, 1) == ["READY"] * 12, "with the leaf, all above it"
    assert states(rig.core, blocks.space, keys, 0) == ["READY"] * 12
    assert_idle(rig)


def test_a_store_does_not_wait_for_a_tier_that_stands_still(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", memory_blocks=64, write_policy="back")
    blocks = Blocks(rig)
    for prompt in range(64):  # nothing is ever stepped: no write ends
        assert all(blocks.put(blocks.keys(prompt, 4), deadline_s=0))
    dropped = tier(rig).writes_dropped
    assert set(dropped) == {"back_pressure"}
    rig.cache.drain()
    kept = sum(blocks.space.contains(blocks.keys(prompt, 4)) for prompt in range(64))
    dropped = tier(rig).writes_dropped
    assert kept + sum(dropped.values()) >= 64 * 4, "what is not there is counted"
    assert is_closed_under_parents(rig.core, 1)
    assert_idle(rig)


def test_a_tier_that_is_down_costs_what_leaves_and_is_counted_so(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", memory_blocks=16, write_policy="back")
    blocks = Blocks(rig)
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=FaultKind.ERROR, ops=frozenset(["write"])),)
    for prompt in range(40):
        assert all(blocks.put(blocks.keys(prompt, 2), deadline_s=0))
        rig.step(10)
    dropped = tier(rig).writes_dropped
    assert tier(rig).is_down
    assert dropped["tier_error"] >= 3
    assert dropped["tier_down"] > 40
    rig.faulty.heal()
    rig.clock.advance(100.0)
    fill(blocks, range(100, 110), 2)
    assert tier(rig).blocks > 0
    assert_idle(rig)


def test_the_end_of_a_cache_writes_back_what_memory_alone_has(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", memory_blocks=64, write_policy="back")
    blocks = Blocks(rig)
    chains = fill(blocks, range(10))
    rig.reopen()
    assert [blocks.read(keys) for keys in chains] == [4] * 10


def test_without_drain_it_does_not(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", memory_blocks=64, write_policy="back")
    blocks = Blocks(rig)
    (keys,) = fill(blocks, range(1))
    rig.reopen(drain=False)
    assert blocks.space.contains(keys) == 0


# --- several tiers


def test_through_goes_to_every_tier_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", lower_tiers=3)
    blocks = Blocks(rig)
    (keys,) = fill(blocks, range(1))
    assert [states(rig.core, blocks.space, keys, level) for level in (1, 2, 3)] == [["READY"] * 4] * 3
    assert [tier(rig, name).dirty_bytes for name in ("memory", "disk", "disk2", "disk3")] == [0] * 4


def test_one_tier_that_stands_still_holds_up_no_other(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", lower_tiers=3, threads=True)
    blocks = Blocks(rig)
    rig.tiers["disk"].faults = (Fault(kind=FaultKind.HANG, ops=frozenset(["write"])),)
    keys = blocks.keys(1, 8)
    blocks.put(keys)
    assert rig.cache.drain("disk2", timeout_s=30)
    assert rig.cache.drain("disk3", timeout_s=30)
    assert states(rig.core, blocks.space, keys, 3) == ["READY"] * 8
    assert tier(rig).blocks == 0
    rig.tiers["disk"].heal()
    assert_idle(rig)


def test_back_passes_on_from_tier_to_tier(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", lower_tiers=3, memory_blocks=16, below_blocks=16, write_policy="back")
    blocks = Blocks(rig)
    chains = fill(blocks, range(20), 2)
    assert rig.cache.stats().tiers["disk"].writes_dropped == {}
    there = {name for keys in chains for name in blocks.space.lookup(keys).by_tier}
    assert there == {"memory", "disk", "disk2"}
    assert [blocks.space.contains(keys) for keys in chains] == [2] * 20, "nothing is lost on the way"
    for level in (1, 2):
        assert is_closed_under_parents(rig.core, level)
    assert blocks.read(chains[0]) == 2, "with the right bytes"
    assert_idle(rig)


def test_a_demotion_takes_no_slot_in_memory(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", lower_tiers=3, memory_blocks=16, below_blocks=16, write_policy="back")
    blocks = Blocks(rig)
    fill(blocks, range(10), 2)
    before = rig.cache.stats().tiers["memory"]
    blocks.space.touch(blocks.keys(999, 1))
    rig.cache.drain()
    assert rig.cache.stats().tiers["memory"] == before


@pytest.mark.parametrize("kind", [FaultKind.ERROR, FaultKind.BLOCK_ERROR, FaultKind.CORRUPT, FaultKind.ALTERED])
def test_what_cannot_be_read_is_not_passed_on(make_rig: MakeRig, kind: FaultKind) -> None:
    rig = make_rig(below="dict", lower_tiers=2, memory_blocks=8, below_blocks=16, write_policy="back")
    blocks = Blocks(rig)
    rig.tiers["disk"].faults = (Fault(kind=kind, ops=frozenset(["read"])),)
    chains = fill(blocks, range(16), 2)
    assert tier(rig, "disk2").blocks == 0
    dropped = tier(rig, "disk2").writes_dropped
    assert sum(dropped.values()) > 0
    assert set(dropped) <= {"tier_error", "parent_missing", "back_pressure"}
    rig.tiers["disk"].heal()
    rig.clock.advance(100.0)
    for keys in chains:
        blocks.read(keys)
    assert_idle(rig)


def test_a_through_tier_in_between_is_what_feeds_the_next(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", lower_tiers=2, memory_blocks=16, below_blocks=16)
    rig.core.state.levels[2].write_policy = "back"
    blocks = Blocks(rig)
    chains = fill(blocks, range(12), 2)
    assert [blocks.space.contains(keys) for keys in chains] == [2] * 12
    assert tier(rig, "disk2").blocks < 24, "only what leaves the first"
    assert tier(rig, "disk2").blocks > 0
    assert_idle(rig)


def test_the_fastest_working_tier_is_read(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", lower_tiers=3)
    blocks = Blocks(rig)
    (keys,) = fill(blocks, range(1))
    rig.cache.clear(tier="memory")
    assert blocks.space.lookup(keys).by_tier == {"disk": 4}
    rig.cache.clear(tier="disk")
    assert blocks.space.lookup(keys).by_tier == {"disk2": 4}
    assert blocks.read(keys) == 4
    assert assert_idle(rig).hits_by_tier == {"disk2": 4}


def test_at_most_so_many_writes_are_under_way_for_each_tier(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", lower_tiers=2, memory_blocks=2048)
    blocks = Blocks(rig)
    blocks.put(blocks.keys(1, 1000))
    assert [level.tasks for level in rig.core.state.lower] == [MOST_TASKS] * 2
    rig.cache.drain()
    rig.clock.advance(ASK_AGAIN_S)
    assert_idle(rig)
