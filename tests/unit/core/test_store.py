from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcairn import requests as rq
from kvcairn.errors import LayoutError, LeaseError
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.rig import PAGE_BYTES, Rig, Setup
from kvcairn.types import UNKNOWN, Hints, MissReason
from tests.unit.conftest import MakeRig
from tests.unit.core.kit import chain, full, rows_of, sliding, space_of, state, states, store


def test_only_what_is_absent_is_reserved(rig: Rig) -> None:
    space = rig.space()
    keys = chain(space, 4)
    store(space, keys[:2])
    with space.reserve(keys) as slots:
        assert (slots.keys, slots.in_flight, slots.reason, len(slots)) == (keys[2:], [], None, 2)
        assert states(rig.core, space, keys) == ["READY", "READY", "RESERVED", "RESERVED"]
        assert rig.cache.stats().open_reservations == 1
        assert rig.cache.stats().tiers["memory"].in_flight == 2
        slots.commit()
    assert states(rig.core, space, keys) == ["READY"] * 4
    assert_idle(rig)


def test_nothing_absent_is_an_empty_reservation(rig: Rig) -> None:
    space = rig.space()
    keys = chain(space, 2)
    store(space, keys)
    for wanted in (keys, []):
        with space.reserve(wanted) as slots:
            assert (slots.keys, slots.in_flight, slots.reason) == ([], [], None)
            slots.commit()
    assert_idle(rig)


def test_what_another_writes_is_left_out_and_named(rig: Rig) -> None:
    space = rig.space()
    keys = chain(space, 4)
    with space.reserve(keys[:2]) as first, space.reserve(keys) as second:
        assert (second.keys, second.in_flight) == (keys[2:], keys[:2])
        first.commit()
        second.commit()
    assert space.contains(keys) == 4
    assert_idle(rig)


def test_start_leaves_the_blocks_before_it_alone(rig: Rig) -> None:
    space = rig.space()
    keys = chain(space, 5)
    with space.reserve(keys, start=3) as slots:
        assert slots.keys == keys[3:]
        slots.commit()
    assert states(rig.core, space, keys)[3:] == ["READY", "READY"]
    assert space.lookup(keys).blocks == 0
    assert space.lookup(keys, start=3).blocks == 2
    store(space, keys[:3])
    assert space.lookup(keys).blocks == 5
    assert rig.core.state.tree.parent_key(int(rows_of(rig.core, space, keys)[3])) == keys[2]
    rig.core.check()


def test_a_reservation_is_shorter_when_there_is_no_room(make_rig: MakeRig) -> None:
    rig = make_rig(memory_blocks=4)
    space = rig.space()
    keys = chain(space, 6)
    with space.reserve(keys) as slots:
        assert (slots.keys, slots.reason) == (keys[:4], MissReason.NO_ROOM)
        with space.reserve(chain(space, 1, 1)) as none:
            assert (none.keys, none.reason) == ([], MissReason.NO_ROOM)
        slots.commit()
    assert space.contains(keys) == 4
    assert_idle(rig)


def test_a_block_of_several_groups_is_reserved_whole_or_not(make_rig: MakeRig) -> None:
    rig = make_rig(memory_blocks=7)
    space = space_of(rig, full(), sliding(1), state())
    keys = chain(space, 4)
    with space.reserve(keys) as slots:
        assert (slots.keys, slots.reason) == (keys[:2], MissReason.NO_ROOM)
        assert [int(slots.offsets(g).min()) >= 0 for g in range(3)] == [True] * 3
        assert rig.cache.stats().tiers["memory"].used_bytes == 6 * PAGE_BYTES
    assert_idle(rig)
    assert rig.cache.stats().tiers["memory"].used_bytes == 0


def test_parts_name_the_groups_of_each_block(make_rig: MakeRig) -> None:
    rig = make_rig()
    space = space_of(rig, full(), state())
    keys = chain(space, 3)
    with space.reserve(keys, parts=[[0], [0, 1], []]) as slots:
        assert slots.keys == keys[:2]
        assert slots.offsets(0).min() >= 0
        assert (slots.offsets(1) >= 0).tolist() == [False, True]
        with pytest.raises(LayoutError, match="no copy of group 1"):
            slots.part(0, 1)
        slots.commit()
    assert space.lookup(keys).boundaries == (2,)
    with space.reserve(keys) as slots:
        assert slots.keys == [keys[0], keys[2]]
        assert slots.offsets(0).tolist()[0] == -1
        slots.commit()
    assert space.lookup(keys).boundaries == (1, 2, 3)
    assert_idle(rig)


def test_parts_must_fit_the_keys(rig: Rig) -> None:
    space = rig.space()
    keys = chain(space, 3)
    for parts in ([[0]], [[0]] * 4, []):
        with pytest.raises(LayoutError, match="parts"):
            space.reserve(keys, parts=parts)
    assert_idle(rig)


@pytest.mark.parametrize("end", ["abort", "leave", "commit none", "partly"])
def test_what_is_not_committed_is_given_back(rig: Rig, end: str) -> None:
    space = rig.space()
    keys = chain(space, 3)
    with space.reserve(keys) as slots:
        if end == "abort":
            slots.abort()
        elif end == "commit none":
            slots.commit([False] * 3)
        elif end == "partly":
            slots.commit([True, False, True])
    kept = 2 if end == "partly" else 0
    assert assert_idle(rig).tiers["memory"].used_bytes == kept * PAGE_BYTES
    assert space.contains(keys) == (1 if end == "partly" else 0)
    assert space.contains(keys[2:]) == (1 if end == "partly" else 0)
    store(space, keys)
    assert space.contains(keys) == 3


@pytest.mark.parametrize("how", ["clear", "clear space", "clear tier", "forget"])
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_dropped_while_reserved_it_commits_to_nothing(make_rig: MakeRig, how: str, end: str) -> None:
    rig = make_rig(below="dict")
    space = rig.space()
    keys = chain(space, 3)
    slots = space.reserve(keys)
    slots.part(0)[:3] = b"abc"
    if how == "forget":
        space.forget(keys)
    else:
        rig.cache.clear(space if how == "clear space" else None, "memory" if how == "clear tier" else None)
    rig.core.check()
    assert space.contains(keys) == 0
    with space.reserve(keys) as again:
        assert (again.keys, again.in_flight) == (keys, [])
        assert not set(again.offsets().tolist()) & set(slots.offsets().tolist()), "somebody may still write to those"
        slots.part(0)[:3] = b"xyz"
        slots.commit() if end == "commit" else slots.abort()
        assert space.contains(keys) == 0
        rig.core.check()
        again.commit()
    assert space.contains(keys) == 3
    assert assert_idle(rig).tiers["memory"].used_bytes == 3 * PAGE_BYTES


def test_the_ancestors_of_a_reservation_stay(make_rig: MakeRig) -> None:
    rig = make_rig(memory_blocks=4)
    space = rig.space()
    keys = chain(space, 4)
    store(space, keys[:2])
    for wanted, start, parent in ((keys[2:], 0, keys[1]), (keys, 2, None)):
        with space.reserve(wanted, start, parent=parent) as slots:
            assert len(slots) == 2
            store(space, chain(space, 4, 1))
            assert space.contains(keys) == 2
    store(space, chain(space, 4, 2))
    assert space.contains(keys) == 0, "and leave when it has ended"
    assert_idle(rig)


@pytest.mark.parametrize(
    ("keys", "parent"),
    [([0, b"x"], None), ([b"x"], None), ([0, 1], b"short"), ([0, 1], bytes(33)), ([0, 1], b""), ([0, "y" * 32], None)],
)
def test_what_is_no_key_is_refused_and_nothing_is_taken(
    rig: Rig, keys: list[int | bytes], parent: bytes | None
) -> None:
    space = rig.space()
    real = chain(space, 2)
    wrong = [real[each] if isinstance(each, int) else each for each in keys]
    for call in (space.reserve, space.lookup, space.acquire, space.prefetch):
        with pytest.raises(ValueError, match="key"):
            call(wrong, parent=parent)
    assert assert_idle(rig).tiers["memory"].used_bytes == 0


def test_a_key_named_twice_is_one_block(rig: Rig) -> None:
    space = rig.space()
    first, second = chain(space, 2)
    with space.reserve([first, second, first]) as slots:
        assert slots.keys == [first, second]
        slots.commit()
    assert_idle(rig)


def test_a_key_named_twice_in_a_request_is_refused_and_nothing_is_taken(rig: Rig) -> None:
    space = rig.space()
    with pytest.raises(ValueError, match="twice"):
        rig.core.call(rq.Reserve(space.frame.space, chain(space, 2) * 2))
    assert assert_idle(rig).tiers["memory"].used_bytes == 0


def test_a_chain_whose_parent_lies_in_it_makes_no_ring(rig: Rig) -> None:
    space = rig.space()
    keys = chain(space, 3)
    space.reserve(keys, parent=keys[2]).abort()
    with space.reserve(keys[:2], parent=keys[1]) as slots:
        slots.commit()
    space.touch(keys)
    assert space.contains(keys) == 2
    assert_idle(rig)


def test_a_floating_segment_is_found_by_key_and_attaches_later(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    space = rig.space()
    keys = chain(space, 4)
    blocks = Blocks(rig)
    assert space.put(keys[2:], [blocks.content(k) for k in keys[2:]], parent=UNKNOWN) == [True, True]
    assert (space.contains(keys[2:]), space.lookup(keys).blocks) == (2, 0)
    assert space.put(keys[:3], [blocks.content(k) for k in keys[:3]]) == [True] * 3
    assert rig.core.state.tree.parent_key(int(rows_of(rig.core, space, keys)[2])) == keys[1]
    assert blocks.read(keys) == 4
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    assert blocks.read(keys) == 4
    assert_idle(rig)


def test_an_expired_block_can_be_stored_again(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    blocks = Blocks(rig)
    space, keys = blocks.space, blocks.keys(1, 2)
    blocks.put(keys)
    space.hint(keys, Hints(ttl_s=1.0, pin=True))
    rig.clock.advance(2.0)
    assert space.contains(keys) == 0
    assert blocks.put(keys, deadline_s=5.0) == [True, True]
    rig.clock.advance(100.0)
    assert blocks.read(keys) == 2
    assert_idle(rig)


def test_a_reservation_outlives_the_time_of_what_it_replaces(rig: Rig) -> None:
    blocks = Blocks(rig)
    space, keys = blocks.space, blocks.keys(1, 2)
    blocks.put(keys[:1])
    space.hint(keys, Hints(ttl_s=1.0))
    with space.reserve(keys) as slots:
        rig.clock.advance(2.0)
        space.reserve(keys).abort()
        slots.commit()
    assert space.contains(keys[1:]) == 1
    assert_idle(rig)


def test_commit_wants_a_flag_for_each_block(rig: Rig) -> None:
    space = rig.space()
    slots = space.reserve(chain(space, 2))
    for ok in ([True], [True] * 3, []):
        with pytest.raises(ValueError, match="2 reserved blocks"):
            slots.commit(ok)
    slots.commit([True, True])
    with pytest.raises(LeaseError):
        rig.core.call(rq.Commit(1))
    assert rig.core.call(rq.Abort(1)).value is None
    assert_idle(rig)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.randoms(use_true_random=False), st.booleans())
def test_reservations_of_many_writers_against_a_set(
    tmp_path_factory: pytest.TempPathFactory, capacity: int, draw: random.Random, hybrid: bool
) -> None:
    """Bytes that a writer committed are there, or gone with a reason; and never more than fits."""
    with Rig(Setup(memory_blocks=capacity, hybrid=hybrid), tmp_path_factory.mktemp("rig")) as rig:
        blocks, written = Blocks(rig), set[bytes]()
        space, open_ = blocks.space, []
        for _ in range(15):
            keys = blocks.keys(draw.randint(0, 3), draw.randint(1, 4))
            action = draw.random()
            if action < 0.5:
                slots = space.reserve(keys, start=draw.randint(0, len(keys)))
                for at, key in enumerate(slots.keys):
                    for group in range(len(space.descriptor.layout.groups)):
                        if slots.offsets(group)[at] >= 0:
                            blocks.oracle.fill(slots.part(at, group), space.descriptor, key, group)
                open_.append(slots)
            elif action < 0.8 and open_:
                slots = open_.pop(draw.randrange(len(open_)))
                ok = [draw.random() < 0.8 for _ in slots.keys]
                written |= {key for key, good in zip(slots.keys, ok, strict=True) if good}
                slots.commit(ok)
            elif action < 0.9 and open_:
                open_.pop(draw.randrange(len(open_))).abort()
            elif action < 0.95:
                space.forget(keys)
            else:
                assert blocks.read(keys) <= len(written & set(keys))
            rig.core.check()
        for slots in open_:
            slots.abort()
        assert_idle(rig)


def test_a_new_group_gives_expired_ones_no_new_life(rig: Rig) -> None:
    space = space_of(rig, full(), state())
    keys = chain(space, 2)
    with space.reserve(keys, parts=[[0], [0]]) as slots:
        slots.commit()
    with space.reserve(keys) as slots:  # the states
        space.hint(keys, Hints(ttl_s=1.0))
        rig.clock.advance(2.0)
        slots.commit()
    assert space.contains(keys) == 0
    assert_idle(rig)
