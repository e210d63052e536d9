from __future__ import annotations

import pytest

from kvcairn import requests as rq
from kvcairn.errors import LeaseError
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.rig import PAGE_BYTES, Rig
from kvcairn.types import Hints, MissReason
from tests.unit.conftest import MakeRig
from tests.unit.core.kit import chain, full, sliding, space_of, state, store


def half(make_rig: MakeRig, blocks: int = 8) -> Rig:
    """A cache of which one client may pin half."""
    return make_rig(memory_blocks=blocks, settings=(("max_lease_fraction", 0.5),))


def leased(rig: Rig) -> int:
    return rig.cache.stats().tiers["memory"].leased_bytes // PAGE_BYTES


def test_what_is_leased_is_pinned_until_its_last_lease_ends(rig: Rig) -> None:
    space = rig.space()
    keys = chain(space, 3)
    store(space, keys)
    one, two = space.acquire(keys), space.acquire(keys[:2])
    assert (leased(rig), rig.cache.stats().open_leases) == (3, 2)
    one.release()
    one.release()
    assert leased(rig) == 2
    two.release()
    assert_idle(rig)


def test_start_pins_what_is_behind_it(rig: Rig) -> None:
    space = rig.space()
    keys = chain(space, 4)
    store(space, keys)
    with space.acquire(keys, start=3) as lease:
        assert (lease.count, leased(rig)) == (1, 1)
    with space.acquire(keys, start=4) as lease:
        assert (lease.count, lease.reason) == (0, None)
    assert_idle(rig)


def test_no_client_pins_more_than_its_share(make_rig: MakeRig) -> None:
    rig = half(make_rig)
    space = rig.space()
    keys, other = chain(space, 5, 1), chain(space, 3, 2)
    store(space, keys)
    store(space, other)
    with space.acquire(keys) as lease:
        assert (lease.count, lease.reason) == (4, MissReason.NO_ROOM)
        with space.acquire(other) as none:
            assert (none.count, none.reason) == (0, MissReason.NO_ROOM)
        with space.acquire(keys) as again:
            assert again.count == 4, "what is pinned already costs nothing"
        assert leased(rig) == 4
    with space.acquire(other) as lease:
        assert lease.count == 3
    stats = assert_idle(rig)
    assert stats.misses_by_reason == {"no_room": 1 + 3 + 1}


def test_one_block_is_always_affordable(make_rig: MakeRig) -> None:
    rig = half(make_rig, 1)
    space = rig.space()
    keys = chain(space, 1)
    store(space, keys)
    with space.acquire(keys) as lease:
        assert lease.count == 1
    assert_idle(rig)


def test_the_cap_falls_on_a_boundary(make_rig: MakeRig) -> None:
    """A length that cannot be restored is no use: the lease shrinks to the next one that can."""
    rig = half(make_rig, 16)
    space = space_of(rig, full(), state())
    keys = chain(space, 8)
    with space.reserve(keys, parts=[[0, 1] if i in (1, 5, 7) else [0] for i in range(8)]) as slots:
        slots.commit()
    assert space.lookup(keys).boundaries == (2, 6, 8)
    with space.acquire(keys) as lease:
        assert (lease.count, lease.reason) == (6, MissReason.NO_ROOM)
        assert leased(rig) == 6 + 1
    assert_idle(rig)


def test_only_what_the_length_needs_is_pinned(make_rig: MakeRig) -> None:
    rig = make_rig()
    space = space_of(rig, full(), sliding(2), state())
    keys = chain(space, 5)
    store(space, keys)
    with space.acquire(keys) as lease:
        assert leased(rig) == 5 + 2 + 1
        assert (lease.offsets(0) >= 0).tolist() == [True] * 5
        assert (lease.offsets(1) >= 0).tolist() == [False] * 3 + [True] * 2
        assert (lease.offsets(2) >= 0).tolist() == [False] * 4 + [True]
    assert_idle(rig)


def test_a_lease_ends_once(rig: Rig) -> None:
    space = rig.space()
    keys = chain(space, 1)
    store(space, keys)
    reply = rig.core.call(rq.Acquire(space.frame.space, keys))
    for _ in range(3):
        rig.core.call(rq.Release(reply.lease))
    assert_idle(rig)
    with pytest.raises(LeaseError):
        rig.core.call(rq.Damaged(reply.lease, 0))


def test_leases_and_jobs_are_not_taken_for_each_other(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    space = rig.space()
    keys = chain(space, 2)
    store(space, keys)
    reply = rig.core.call(rq.Acquire(space.frame.space, keys))
    rig.core.call(rq.JobClose(reply.lease))
    rig.core.call(rq.Abort(reply.lease))
    assert rig.cache.stats().open_leases == 1
    for request in (rq.JobLease(reply.lease), rq.Commit(reply.lease)):
        with pytest.raises(LeaseError):
            rig.core.call(request)
    rig.core.call(rq.Release(reply.lease))
    rig.cache.drain()
    assert_idle(rig)


@pytest.mark.parametrize("how", ["forget", "clear"])
def test_a_leased_copy_that_is_dropped_stays_readable(rig: Rig, how: str) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 3)
    blocks.put(keys)
    with blocks.space.acquire(keys) as lease:
        blocks.space.forget(keys) if how == "forget" else rig.cache.clear()
        assert blocks.space.contains(keys) == 0
        rig.core.check()
        blocks.put(blocks.keys(2, 900))
        for i, key in enumerate(keys):
            blocks.oracle.check(lease[i], blocks.descriptor, key)
        with blocks.space.reserve(keys) as slots:
            assert (slots.keys, slots.in_flight) == (keys, [])
            assert not set(slots.offsets().tolist()) & set(lease.offsets().tolist())
    blocks.space.forget(blocks.keys(2, 900))
    assert assert_idle(rig).tiers["memory"].used_bytes == 0


def test_a_damaged_copy_is_a_counted_miss(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 4)
    blocks.put(keys)
    with blocks.space.acquire(keys) as lease:
        at = int(lease.offsets()[2])
    blocks.space.arena[at + 1] ^= 1
    with blocks.space.acquire(keys) as lease:
        assert (lease.count, lease.reason) == (2, MissReason.CORRUPT)
    stats = assert_idle(rig)
    assert stats.blocks_asked == 8
    assert stats.hits_by_tier == {"memory": 4 + 2}
    assert stats.misses_by_reason == {"corrupt": 2}
    assert blocks.put(keys) == [True] * 4
    assert blocks.read(keys) == 4


def test_a_damaged_copy_comes_from_the_tier_below(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    blocks = Blocks(rig)
    keys = blocks.keys(1, 4)
    blocks.put(keys)
    rig.cache.drain()
    with blocks.space.acquire(keys) as lease:
        at = int(lease.offsets()[1])
    blocks.space.arena[at] ^= 0x80
    assert blocks.read(keys, deadline_s=5.0) == 4
    assert assert_idle(rig).hits_by_tier["disk"] == 1


def test_a_pinned_copy_that_is_damaged_can_be_stored_again(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 1)
    blocks.put(keys)
    assert blocks.space.hint(keys, Hints(pin=True)) == 1
    with blocks.space.acquire(keys) as lease:
        at = int(lease.offsets()[0])
    blocks.space.arena[at] ^= 1
    assert blocks.read(keys) == 0
    assert blocks.put(keys, deadline_s=0) == [True]
    assert blocks.read(keys) == 1
    assert_idle(rig)


def test_numbers_add_up(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    blocks = Blocks(rig)
    keys = blocks.keys(1, 5)
    blocks.put(keys[:3])
    rig.cache.drain()
    for asked in (keys, keys[:2], blocks.keys(9, 2), []):
        blocks.space.get(asked)
    blocks.space.lookup(keys)
    with blocks.space.acquire(keys, start=2, deadline_s=0):
        pass
    stats = assert_idle(rig)
    assert stats.blocks_asked == 5 + 2 + 2 + 0 + 3
    assert stats.hits_by_tier == {"memory": 3 + 2 + 1}
    assert stats.misses_by_reason == {"never_stored": 2 + 2 + 2}


def test_without_waiting_only_memory_is_asked(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    blocks = Blocks(rig)
    keys = blocks.keys(1, 4)
    blocks.put(keys)
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    blocks.put(keys[:1])
    with blocks.space.acquire(keys, deadline_s=0) as lease:
        assert (lease.count, lease.reason) == (1, MissReason.DEADLINE)
    assert rig.faulty is not None
    assert rig.faulty.calls["read"] == 0
    assert_idle(rig)
