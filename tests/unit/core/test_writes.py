from __future__ import annotations

from pathlib import Path

import pytest

from kvcairn.core.writes import ASK_AGAIN_S, BATCH_BLOCKS, MOST_TASKS
from kvcairn.errors import TierFull
from kvcairn.layout import KVLayout, SpaceDescriptor
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.rig import PAGE_BYTES, Rig
from kvcairn.tiers.breaker import FAILURES_TO_OPEN
from kvcairn.types import Hints, MissReason, TierStats
from tests.unit.conftest import MakeRig
from tests.unit.core.kit import TOKENS, chain, full, is_closed_under_parents, space_of, state, states, store

WRITES = frozenset(["write"])


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig(below="dict", memory_blocks=512)


def disk(rig: Rig) -> TierStats:
    return rig.cache.stats().tiers["disk"]


def fail(rig: Rig, kind: FaultKind, **options: object) -> None:
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=kind, ops=WRITES, **options),)  # type: ignore[arg-type]


def written_in_order(rig: Rig) -> list[bytes]:
    """Keys below memory, in the order in which they were written."""
    stored = sorted((s for s, _ in rig.content.slots.values()), key=lambda s: s.slot.generation)
    return [s.block.key for s in stored]


def test_what_is_stored_is_written_down_parents_first(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 100)
    blocks.put(keys)
    assert disk(rig).blocks == 0
    assert disk(rig).in_flight > 0
    rig.cache.drain()
    assert written_in_order(rig) == keys
    parents = {stored.block.key: stored.parent for stored, _ in rig.content.slots.values()}
    assert [parents[key] for key in keys] == [None, *keys[:-1]]
    assert assert_idle(rig).tiers["disk"].blocks == 100
    rig.cache.clear(tier="memory")
    assert blocks.read(keys) == 100


def test_a_task_carries_a_bounded_number_of_blocks(rig: Rig) -> None:
    blocks = Blocks(rig)
    blocks.put(blocks.keys(1, 2 * BATCH_BLOCKS + 1))
    rig.cache.drain()
    assert rig.faulty is not None
    assert rig.faulty.calls["write"] == 3


def test_what_is_there_is_not_written_again(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 4)
    blocks.put(keys)
    rig.cache.drain()
    blocks.space.touch(keys)
    blocks.put(keys)
    blocks.read(keys)
    rig.cache.drain()
    assert rig.faulty is not None
    assert rig.faulty.calls["write"] == 1


def test_without_a_write_policy_nothing_is_written(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    rig.core.state.levels[1].write_policy = "none"
    blocks = Blocks(rig)
    blocks.put(blocks.keys(1, 3))
    rig.cache.drain()
    assert disk(rig).blocks == 0
    assert_idle(rig)


def test_a_failed_write_is_counted_and_asked_for_again_after_a_while(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 3)
    fail(rig, FaultKind.ERROR)
    blocks.put(keys)
    rig.cache.drain()
    assert (disk(rig).writes_dropped, disk(rig).errors) == ({"tier_error": 3}, {"TierUnavailable": 1})
    assert (disk(rig).blocks, disk(rig).used_bytes) == (0, 0)
    assert rig.faulty is not None
    rig.faulty.heal()
    blocks.space.touch(keys)
    rig.cache.drain()
    assert disk(rig).blocks == 0, "too early"
    rig.clock.advance(ASK_AGAIN_S)
    blocks.space.touch(keys)
    rig.cache.drain()
    assert assert_idle(rig).tiers["disk"].blocks == 3


def test_some_blocks_of_a_call_may_fail(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 4)
    fail(rig, FaultKind.BLOCK_ERROR, keys=frozenset(keys[2:3]))
    blocks.put(keys)
    rig.cache.drain()
    assert states(rig.core, blocks.space, keys, 1) == ["READY", "READY", "ABSENT", "READY"]
    assert rig.faulty is not None
    rig.faulty.heal()
    rig.clock.advance(ASK_AGAIN_S)
    blocks.space.touch(keys)
    rig.cache.drain()
    assert is_closed_under_parents(rig.core, 1)
    assert_idle(rig)


def test_a_full_device_is_no_broken_one(rig: Rig) -> None:
    blocks = Blocks(rig)
    fail(rig, FaultKind.ERROR, error=TierFull)
    for prompt in range(FAILURES_TO_OPEN + 2):
        blocks.put(blocks.keys(prompt, 1))
        rig.cache.drain()
    assert disk(rig).writes_dropped == {"tier_full": FAILURES_TO_OPEN + 2}
    assert (disk(rig).errors, disk(rig).is_down) == ({"TierFull": FAILURES_TO_OPEN + 2}, False)


def test_while_the_breaker_is_open_writes_are_dropped_and_counted(rig: Rig) -> None:
    blocks = Blocks(rig)
    fail(rig, FaultKind.ERROR)
    for prompt in range(FAILURES_TO_OPEN):
        blocks.put(blocks.keys(prompt, 1))
        rig.cache.drain()
    assert disk(rig).is_down
    assert rig.faulty is not None
    calls = rig.faulty.calls["write"]
    keys = blocks.keys(9, 2)
    blocks.put(keys)
    assert rig.cache.drain()
    assert rig.faulty.calls["write"] == calls
    assert disk(rig).writes_dropped == {"tier_error": FAILURES_TO_OPEN, "tier_down": 2}
    rig.faulty.heal()
    rig.clock.advance(60.0)
    blocks.space.touch(keys)
    rig.cache.drain()
    assert states(rig.core, blocks.space, keys, 1) == ["READY", "READY"]
    assert not disk(rig).is_down
    assert_idle(rig)


def test_a_block_that_left_memory_before_its_turn_is_dropped_and_counted(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", memory_blocks=8)
    blocks = Blocks(rig)
    first = blocks.keys(1, 8)
    blocks.put(first)  # half of memory is being written, the rest waits
    in_flight = disk(rig).in_flight
    assert 0 < in_flight < 8
    second = blocks.keys(2, 8 - in_flight)
    assert all(blocks.put(second, deadline_s=0)), "a slow tier holds up no store"
    rig.cache.drain()
    dropped = disk(rig).writes_dropped
    assert set(dropped) <= {"back_pressure", "parent_missing"}
    assert sum(dropped.values()) + disk(rig).blocks == 8 + len(second)
    assert is_closed_under_parents(rig.core, 1)
    assert_idle(rig)


def test_a_block_whose_parent_can_no_longer_be_read_is_not_written(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    space = rig.space()
    keys = chain(space, 3)
    with space.reserve(keys) as slots:
        slots.commit([True, False, True])
    rig.cache.drain()
    assert states(rig.core, space, keys, 1) == ["READY", "ABSENT", "ABSENT"]
    assert disk(rig).writes_dropped == {"parent_missing": 1}
    store(space, keys)
    rig.clock.advance(ASK_AGAIN_S)
    space.touch(keys)
    rig.cache.drain()
    assert states(rig.core, space, keys, 1) == ["READY"] * 3
    assert_idle(rig)


def test_ancestors_that_the_tier_lacks_are_written_with_a_block(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    space = rig.space()
    keys = chain(space, 4)
    store(space, keys[:2])
    rig.cache.drain()
    rig.cache.clear(tier="disk")
    with space.reserve(keys[2:], parent=keys[1]) as slots:
        slots.commit()
    rig.cache.drain()
    assert states(rig.core, space, keys, 1) == ["READY"] * 4
    assert_idle(rig)


@pytest.mark.parametrize("capacity", [1, 2, 3])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_tier_smaller_than_a_chain_keeps_its_beginning(make_rig: MakeRig, capacity: int, step: int) -> None:
    rig = make_rig(below="dict", below_blocks=capacity)
    blocks = Blocks(rig)
    keys = blocks.keys(1, 5)
    for length in range(step, 6, step):
        blocks.put(keys[:length])
        rig.cache.drain()
        rig.clock.advance(2 * ASK_AGAIN_S)
        assert is_closed_under_parents(rig.core, 1), f"a block without its parent, after {length} blocks"
        assert disk(rig).blocks >= min(capacity, 1)
    rig.cache.clear(tier="memory")
    assert blocks.read(keys) >= 1
    assert_idle(rig)


@pytest.mark.parametrize("how", ["forget", "clear", "clear tier"])
def test_dropped_while_it_is_written(rig: Rig, how: str) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 3)
    blocks.put(keys)
    assert disk(rig).in_flight == 3
    if how == "forget":
        blocks.space.forget(keys)
    else:
        rig.cache.clear(tier="disk" if how == "clear tier" else None)
    rig.core.check()
    rig.cache.drain()
    assert disk(rig).blocks == 0
    assert_idle(rig)
    assert rig.content.slots == {}
    rig.reopen()
    assert blocks.space.contains(keys) == 0


def test_forgotten_and_stored_again_before_the_tier_has_deleted_it(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 3)
    blocks.put(keys)
    rig.cache.drain()
    for _ in range(3):
        blocks.space.forget(keys)
        blocks.put(keys)
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    assert blocks.read(keys) == 3
    rig.reopen()
    assert blocks.read(keys) == 3


def test_all_groups_of_a_block_are_written(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    space = space_of(rig, full(), state())
    keys = chain(space, 3)
    store(space, keys, [[0, 1], [0], [0, 1]])
    rig.cache.drain()
    assert states(rig.core, space, keys, 1, 1) == ["READY", "ABSENT", "READY"]
    store(space, keys)
    rig.cache.drain()
    assert states(rig.core, space, keys, 1, 1) == ["READY"] * 3
    assert_idle(rig)


def test_writes_hold_no_more_than_half_of_memory(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", memory_blocks=64)
    blocks = Blocks(rig)
    blocks.put(blocks.keys(1, 64))
    assert disk(rig).in_flight * PAGE_BYTES <= 64 * PAGE_BYTES // 2
    assert len(blocks.put(blocks.keys(2, 30), deadline_s=0)) == 30
    assert blocks.space.contains(blocks.keys(2, 30)) == 30
    rig.cache.drain()
    assert_idle(rig)


def test_why_nothing_is_there_after_a_dropped_write(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 2)
    fail(rig, FaultKind.ERROR)
    blocks.put(keys)
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    assert blocks.space.lookup(keys).reason is MissReason.CLEARED


def test_many_children_of_one_parent_in_flight(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", memory_blocks=600)
    blocks = Blocks(rig)
    space, (prompt,) = blocks.space, blocks.keys(1, 1)
    blocks.put([prompt])
    rig.cache.drain()
    tokens = [range(9000 + TOKENS * i, 9000 + TOKENS * (i + 1)) for i in range(300)]
    answers = [space.keys(list(some), parent=prompt)[0] for some in tokens]
    for key in answers:
        space.put([key], [blocks.content(key)], parent=prompt)
    rig.step(4)
    assert disk(rig).in_flight == MOST_TASKS * BATCH_BLOCKS
    space.forget([prompt])
    rig.core.check()
    rig.cache.drain()
    assert space.contains(answers) == 300
    assert_idle(rig)


def bytes_below(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("kind", [FaultKind.HANG, FaultKind.ERROR])
def test_a_tier_that_cannot_give_space_back_stays_within_its_bound(make_rig: MakeRig, kind: FaultKind) -> None:
    rig = make_rig(below="disk", threads=True, memory_blocks=3000, below_blocks=400)
    rig.core.state.levels[1].timeout_s = 0.1
    blocks = Blocks(rig)
    keys = blocks.keys(1, 300)
    blocks.put(keys)
    rig.cache.drain()
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=kind, ops=frozenset(["retire"])),)
    blocks.space.forget(keys)
    layout = KVLayout.full(layers=1, kv_heads=1, head_dim=PAGE_BYTES, dtype="int8")
    other = rig.cache.space(SpaceDescriptor(model="large", weights="w", layout=layout, block_tokens=4))
    more = other.keys(range(4 * 90))
    other.put(more, [bytes(other.block_bytes)] * 90)
    rig.cache.drain()
    assert bytes_below(rig.folder) <= rig.core.state.levels[1].capacity_bytes
    rig.faulty.heal()
    rig.cache.drain()
    rig.core.check()


def test_a_child_is_not_written_beside_a_parent_that_is_leaving(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 2)
    blocks.put(keys[:1])
    rig.cache.clear(tier="disk")  # while the first block is being written
    blocks.put(keys)
    rig.cache.drain()
    assert is_closed_under_parents(rig.core, 1)
    rig.clock.advance(ASK_AGAIN_S)
    blocks.space.touch(keys)
    rig.cache.drain()
    assert states(rig.core, blocks.space, keys, 1) == ["READY", "READY"]
    assert_idle(rig)


def test_a_write_that_outlives_its_block_does_not_bring_it_back(rig: Rig) -> None:
    blocks = Blocks(rig)
    space, keys = blocks.space, blocks.keys(1, 1)
    blocks.put(keys)  # the write waits for a step
    space.hint(keys, Hints(ttl_s=1.0))
    rig.clock.advance(2.0)
    space.hint(keys, Hints(ttl_s=50.0))  # too late: it has expired
    rig.cache.drain()
    assert space.lookup(keys).blocks == 0
    assert_idle(rig)
