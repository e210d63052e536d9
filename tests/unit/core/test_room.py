from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcairn.core.room import LOOKED_AT_ONCE, Room
from kvcairn.policy.eviction.lru import LRU
from kvcairn.testing import PlainFacts
from kvcairn.testing.rig import PAGE_BYTES, Rig, Setup
from kvcairn.types import Hints, MissReason
from tests.unit.conftest import MakeRig
from tests.unit.core.kit import (
    chain,
    full,
    is_closed_under_parents,
    rows_of,
    sliding,
    space_of,
    state,
    states,
    store,
)


def room(rig: Rig) -> Room:
    return rig.core.state.memory.room(rig.core.state.spaces)


def used(rig: Rig) -> int:
    return rig.cache.stats().tiers["memory"].used_bytes // PAGE_BYTES


def test_what_is_free_is_used_before_anything_leaves(make_rig: MakeRig) -> None:
    rig = make_rig(memory_blocks=4)
    space = rig.space()
    store(space, chain(space, 2))
    assert room(rig).make(PAGE_BYTES, 2) == 2
    assert used(rig) == 2


def test_the_least_recently_used_leave_leaf_first(make_rig: MakeRig) -> None:
    rig = make_rig(memory_blocks=6)
    space = rig.space()
    one, two = chain(space, 3, 1), chain(space, 3, 2)
    store(space, one)
    store(space, two)
    space.get(one)
    assert room(rig).make(PAGE_BYTES, 2) == 2
    assert states(rig.core, space, one) == ["READY"] * 3
    assert space.contains(two) == 1
    assert room(rig).make(PAGE_BYTES, 4) == 4
    assert (space.contains(one), space.contains(two)) == (2, 0)
    rig.core.check()


def test_no_more_leave_than_are_needed(make_rig: MakeRig) -> None:
    rig = make_rig(memory_blocks=8)
    space = rig.space()
    store(space, chain(space, 8))
    for wanted in range(1, 9):
        room(rig).make(PAGE_BYTES, wanted)
        assert used(rig) == 8 - wanted


def test_what_is_held_never_leaves(make_rig: MakeRig) -> None:
    rig = make_rig(memory_blocks=6)
    space = rig.space()
    leased, pinned, free = chain(space, 2, 1), chain(space, 1, 2), chain(space, 2, 3)
    for keys in (leased, pinned, free):
        store(space, keys)
    assert space.hint(pinned, Hints(pin=True)) == 1
    with space.acquire(leased), space.reserve(chain(space, 1, 4)):
        assert room(rig).make(PAGE_BYTES, 6) == 2
        assert space.contains(free) == 0
        assert (space.contains(leased), space.contains(pinned)) == (2, 1)
        assert room(rig).make(PAGE_BYTES, 3) == 2
    assert space.lookup(free).reason is MissReason.EVICTED
    rig.core.check()


def test_the_parents_of_what_is_held_stay_too(make_rig: MakeRig) -> None:
    rig = make_rig(memory_blocks=4)
    space = rig.space()
    keys = chain(space, 4)
    store(space, keys)
    with space.acquire(keys[:4], start=2):
        assert room(rig).make(PAGE_BYTES, 4) == 0
    assert space.contains(keys) == 4


def test_with_no_room_at_all_nothing_changes(make_rig: MakeRig) -> None:
    rig = make_rig(memory_blocks=4)
    space = rig.space()
    keys = chain(space, 4)
    store(space, keys)
    with space.acquire(keys):
        before = rig.cache.stats()
        assert room(rig).make(PAGE_BYTES, 1) == 0
        with space.reserve(chain(space, 2, 1)) as slots:
            assert (slots.keys, slots.reason) == ([], MissReason.NO_ROOM)
        after = rig.cache.stats()
        assert after.tiers == before.tiers


def test_a_slot_larger_than_the_tier_evicts_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(memory_blocks=4)
    space = rig.space()
    store(space, chain(space, 4))
    assert room(rig).make(5 * PAGE_BYTES, 1) == 0
    assert used(rig) == 4


def test_another_size_is_emptied_only_as_far_as_needed(make_rig: MakeRig) -> None:
    rig = make_rig(memory_blocks=16)
    space = rig.space()
    old, new = chain(space, 8, 1), chain(space, 8, 2)
    store(space, old)
    store(space, new)
    assert room(rig).make(2 * PAGE_BYTES, 1) == 1
    left = used(rig)
    segment = max(s.slots for s in rig.core.state.memory.residency.allocator.segments.values())
    assert left >= 16 - 2 * max(2, segment)
    assert space.contains(new) == 8, "the least recently used leave"
    assert is_closed_under_parents(rig.core, 0)
    rig.core.check()


def test_a_held_copy_keeps_its_segment(make_rig: MakeRig) -> None:
    rig = make_rig(memory_blocks=4)
    space = rig.space()
    keys = [chain(space, 1, prompt) for prompt in range(4)]
    for key in keys:
        store(space, key)
    with space.acquire(keys[1]), space.acquire(keys[3]):
        assert room(rig).make(2 * PAGE_BYTES, 1) == 0
        assert used(rig) == 4, "a plan that fails lets nothing go"
    with space.acquire(keys[0]), space.acquire(keys[1]):
        assert room(rig).make(2 * PAGE_BYTES, 1) == 1
        assert space.contains(keys[0]) == space.contains(keys[1]) == 1


def test_window_and_state_copies_go_at_any_depth(make_rig: MakeRig) -> None:
    rig = make_rig(memory_blocks=12)
    space = space_of(rig, full(), sliding(1), state())
    keys = chain(space, 4)
    store(space, keys)
    assert used(rig) == 12
    with space.acquire(keys):  # holds every full copy, and the last of the others
        assert room(rig).make(PAGE_BYTES, 12) == 6
        assert space.lookup(keys).boundaries == (4,)
    assert is_closed_under_parents(rig.core, 0)
    rig.core.check()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 24), st.randoms(use_true_random=False), st.booleans())
def test_whatever_happens_chains_stay_closed_and_the_bound_holds(
    tmp_path_factory: pytest.TempPathFactory, capacity: int, draw: random.Random, hybrid: bool
) -> None:
    with Rig(Setup(memory_blocks=capacity), tmp_path_factory.mktemp("rig")) as rig:
        groups = (full(), sliding(1), state()) if hybrid else (full(),)
        spaces = [space_of(rig, *groups, tenant=tenant) for tenant in "ab"]
        held = []
        for _ in range(12):
            space = draw.choice(spaces)
            keys = chain(space, draw.randint(1, 5), draw.randint(0, 4))
            action = draw.random()
            if action < 0.5:
                with space.reserve(keys) as slots:
                    slots.commit()
            elif action < 0.7:
                held.append(space.acquire(keys, deadline_s=0))
            elif action < 0.8 and held:
                held.pop(draw.randrange(len(held))).release()
            else:
                pages = draw.randint(1, 3)
                made = room(rig).make(pages * PAGE_BYTES, draw.randint(1, 4))
                assert made >= 0
            assert used(rig) <= capacity
            assert is_closed_under_parents(rig.core, 0)
            rig.core.check()
        for lease in held:
            lease.release()
        assert room(rig).make(PAGE_BYTES, capacity) == capacity
        assert used(rig) == 0


class Counted(LRU):
    """Counts the candidates that its reader was given."""

    read = 0

    def candidates(self) -> Iterator[int]:
        for row in super().candidates():
            self.read += 1
            yield row


def counted(rig: Rig) -> Counted:
    """Put a counting policy where there is nothing in memory yet."""
    policy = rig.core.state.memory.residency.policy = Counted(PlainFacts())
    return policy


def test_ten_thousand_held_blocks_at_the_head_are_met_once(make_rig: MakeRig) -> None:
    held, free = 10_100, 200
    rig = make_rig(memory_blocks=held + free)
    policy, space = counted(rig), rig.space()
    keys = chain(space, held, 1)
    store(space, keys)
    for prompt in range(2, 2 + free):
        store(space, chain(space, 1, prompt))
    with space.acquire(keys) as lease:
        assert lease.count >= 10_000, "some made room, since segments are whole"
        policy.defer(rows_of(rig.core, space, [chain(space, 1, prompt)[0] for prompt in range(1 + free, 1, -1)]))
        assert next(policy.candidates()) in rows_of(rig.core, space, keys)
        policy.read = 0
        assert room(rig).make(PAGE_BYTES, 1) == 1
        assert lease.count < policy.read <= lease.count + LOOKED_AT_ONCE
        for wanted in range(2, 100):
            policy.read = 0
            assert room(rig).make(PAGE_BYTES, wanted) == wanted
            assert policy.read == 1, "those that are held were put where they are met later"


def test_what_a_write_reads_is_passed_over_together(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that stands still holds the sources of its writes, the first in the order: no store looks at each."""
    rig = make_rig(memory_blocks=500)
    policy, space = counted(rig), rig.space()
    keys = [chain(space, 1, prompt) for prompt in range(500)]
    for one in keys:
        store(space, one)
    rows = np.concatenate([rows_of(rig.core, space, one) for one in keys[:200]])
    rig.core.state.memory.residency.of(0).busy[rows] += 1
    looked_at: list[int] = []
    real = Room._groups_to_go

    def groups_to_go(self: Room, row: int, gone: dict[tuple[int, int], int]) -> list[int]:
        looked_at.append(row)
        return real(self, row, gone)

    monkeypatch.setattr(Room, "_groups_to_go", groups_to_go)
    assert room(rig).make(PAGE_BYTES, 1) == 1
    assert policy.read < 200 + LOOKED_AT_ONCE
    assert len(looked_at) == 2
    rig.core.state.memory.residency.of(0).busy[rows] -= 1


def test_where_nothing_can_leave_it_is_asked_once(make_rig: MakeRig) -> None:
    rig = make_rig(memory_blocks=100)
    policy, space = counted(rig), rig.space()
    keys = chain(space, 100)
    store(space, keys)
    with space.acquire(keys):
        assert room(rig).make(PAGE_BYTES, 1) == 0
        first, policy.read = policy.read, 0
        assert first >= 100
        assert room(rig).make(PAGE_BYTES, 1) == 0
        assert policy.read == 0, "nothing was let go of since"
    assert room(rig).make(PAGE_BYTES, 1) == 1
