"""Handles to slots, over a real cache."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from kvcairn.errors import ClosedError, LayoutError, LeaseError
from kvcairn.memory.lease import SAMPLED, Lease, Reservation
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.rig import PAGE_BYTES, BelowKind, Rig
from tests.unit.conftest import MakeRig


class Event:
    """Something that ends when the test says so."""

    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done


@pytest.fixture(params=["direct", "loopback", "socket"])
def rig(make_rig: MakeRig, request: pytest.FixtureRequest) -> Rig:
    return make_rig(link=request.param)


def open_lease(rig: Rig, blocks: int = 2) -> Lease:
    chain = Blocks(rig)
    keys = chain.keys(1, blocks)
    chain.put(keys)
    return chain.space.acquire(keys)


def open_reservation(rig: Rig, blocks: int = 2) -> Reservation:
    chain = Blocks(rig)
    return chain.space.reserve(chain.keys(7, blocks))


Open = Callable[[Rig], Lease | Reservation]
BOTH = pytest.mark.parametrize("open_it", [open_lease, open_reservation])


def end(handle: Lease | Reservation) -> None:
    handle.release() if isinstance(handle, Lease) else handle.abort()


@BOTH
def test_it_ends_once_and_cannot_be_used_afterwards(rig: Rig, open_it: Open) -> None:
    handle = open_it(rig)
    end(handle)
    end(handle)
    for use in (
        lambda: handle[0], lambda: handle.part(0), handle.offsets, handle.ticket,
        lambda: handle.release_when(Event()) if isinstance(handle, Lease) else handle.commit_when(Event()),
    ):  # fmt: skip
        with pytest.raises(LeaseError, match="has ended"):
            use()
    assert_idle(rig)


@BOTH
def test_with_ends_it_whatever_happens(rig: Rig, open_it: Open) -> None:
    with pytest.raises(KeyError), open_it(rig):
        raise KeyError
    with open_it(rig) as handle:
        end(handle)
    assert_idle(rig)


@BOTH
def test_views_end_with_their_handle(rig: Rig, open_it: Open) -> None:
    handle = open_it(rig)
    view, other = handle[0], handle.part(1)
    assert view.nbytes == other.nbytes == rig.space().block_bytes
    array = np.frombuffer(other, dtype=np.uint8)
    end(handle)
    for each in (view, other):
        with pytest.raises(ValueError, match="released"):
            each[0]
    assert array.size == rig.space().block_bytes, "an array made from it refers to the arena itself"
    assert_idle(rig)


@BOTH
def test_blocks_and_groups_that_are_not_there(rig: Rig, open_it: Open) -> None:
    with open_it(rig) as handle:
        assert len(handle) == 2
        for block in (2, -3, 99):
            with pytest.raises(IndexError):
                handle[block]
        assert handle[-1].nbytes == handle[1].nbytes
        for group in (1, -1):
            with pytest.raises(LayoutError, match="no group"):
                handle.part(0, group)
            with pytest.raises(LayoutError, match="no group"):
                handle.offsets(group)


def test_leased_bytes_are_read_only_and_reserved_ones_writable(rig: Rig) -> None:
    with open_lease(rig) as lease, open_reservation(rig) as slots:
        assert lease[0].readonly
        with pytest.raises(TypeError):
            lease[0][0] = 1
        assert not slots[0].readonly
        slots[0][:4] = b"abcd"
        at = int(slots.offsets()[0])
        assert bytes(rig.space().arena[at : at + 4]) == b"abcd"


def test_offsets_point_into_the_arena(rig: Rig) -> None:
    blocks = Blocks(rig)
    with open_lease(rig, 3) as lease:
        offsets = lease.offsets()
        assert (str(offsets.dtype), offsets.shape) == ("int64", (3,))
        assert (offsets % PAGE_BYTES == 0).all()
        for i, at in enumerate(offsets.tolist()):
            assert blocks.space.arena[at : at + blocks.space.block_bytes] == lease[i]
        offsets[:] = 0  # a copy: changes nothing
        assert lease.offsets().tolist() != [0, 0, 0]


def test_a_block_of_several_groups_does_not_lie_in_one_piece(make_rig: MakeRig) -> None:
    rig = make_rig(hybrid=True)
    with open_lease(rig) as lease:
        with pytest.raises(LayoutError, match="use part"):
            lease[0]
        sizes = [lease.part(1, group).nbytes for group in range(3)]
        assert sizes == [rig.space().part_bytes(group) for group in range(3)]


def test_a_copy_outlives_the_lease(rig: Rig) -> None:
    blocks = Blocks(rig)
    with open_lease(rig) as lease:
        content = lease.copy(1)
        assert content == bytes(lease[1])
    assert content == blocks.content(blocks.keys(1, 2)[1])


def test_release_when_holds_the_slots_until_the_event(rig: Rig) -> None:
    lease, event = open_lease(rig), Event()
    lease.release_when(event)
    with pytest.raises(LeaseError):
        lease[0]
    lease.release()
    rig.step(3)
    assert rig.cache.stats().tiers["memory"].leased_bytes == 2 * PAGE_BYTES
    event.is_done = True
    rig.step()
    assert_idle(rig)


@pytest.mark.parametrize("ok", [None, [True, False]])
def test_commit_when_publishes_what_is_there_at_the_event(rig: Rig, ok: list[bool] | None) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(7, 2)
    slots, event = open_reservation(rig), Event()
    arena, offsets = blocks.space.arena, slots.offsets().tolist()
    slots.commit_when(event, ok)
    slots.abort()
    rig.step()
    assert blocks.space.contains(keys) == 0
    for key, at in zip(keys, offsets, strict=True):  # as a device would, long after the call
        arena[at : at + blocks.space.block_bytes] = blocks.content(key)
    event.is_done = True
    rig.step()
    assert blocks.read(keys) == (2 if ok is None else 1)
    assert_idle(rig)


def test_commit_when_refuses_wrong_flags_at_once(rig: Rig) -> None:
    slots = open_reservation(rig)
    with pytest.raises(ValueError, match="2 reserved"):
        slots.commit_when(Event(), [True])
    slots.commit()
    assert_idle(rig)


def test_cleared_before_its_event_it_commits_to_nothing(rig: Rig) -> None:
    slots, event = open_reservation(rig), Event()
    slots.commit_when(event)
    rig.cache.clear()
    rig.core.check()
    assert rig.cache.stats().tiers["memory"].used_bytes == 2 * PAGE_BYTES
    event.is_done = True
    rig.step()
    assert assert_idle(rig).tiers["memory"].used_bytes == 0


@BOTH
def test_an_adopted_handle_shares_the_slots(rig: Rig, open_it: Open) -> None:
    handle = open_it(rig)
    other = rig.cache.adopt(handle.ticket())
    assert isinstance(other, type(handle))
    assert other.offsets().tolist() == handle.offsets().tolist()
    end(handle)
    assert other[0].nbytes
    stats = rig.cache.stats()
    assert (stats.open_leases, stats.open_reservations) in ((1, 0), (0, 1))
    end(other)
    with pytest.raises(LeaseError, match="not open"):
        rig.cache.adopt(other_ticket(rig, handle))
    assert_idle(rig)


def other_ticket(rig: Rig, handle: Lease | Reservation) -> bytes:
    kind = "lease" if isinstance(handle, Lease) else "reservation"
    return msgspec.msgpack.encode((rig.core.boot_id, kind, handle._number))


def test_a_shared_reservation_is_committed_once(rig: Rig) -> None:
    blocks = Blocks(rig)
    slots = open_reservation(rig)
    other = rig.cache.adopt(slots.ticket())
    assert isinstance(other, Reservation)
    assert other.keys == slots.keys
    for at, key in enumerate(slots.keys):
        other[at][:] = blocks.content(key)
    slots.commit()
    with pytest.raises(LeaseError):
        other.commit()
    other.abort()
    assert blocks.read(blocks.keys(7, 2)) == 2
    assert_idle(rig)


@pytest.mark.parametrize("ticket", [b"", b"nonsense", b"\x93\xc4\x01a\xa5lease\x01", b"\x92\x01\x02"])
def test_what_is_no_ticket_is_refused(rig: Rig, ticket: bytes) -> None:
    with pytest.raises(LeaseError, match="ticket"):
        rig.cache.adopt(ticket)


@BOTH
def test_after_close_bytes_stay_readable_and_ending_is_no_error(rig: Rig, open_it: Open) -> None:
    handle = open_it(rig)
    content = bytes(handle[0])
    view = handle[0]
    rig.cache.close(drain=False)
    assert bytes(view) == content
    end(handle)
    end(handle)


def test_after_close_nothing_is_committed(rig: Rig) -> None:
    slots = open_reservation(rig)
    rig.cache.close(drain=False)
    with pytest.raises(ClosedError):
        slots.commit()


@BOTH
def test_many_threads_end_it_once(rig: Rig, open_it: Open) -> None:
    for _ in range(20):
        handle = open_it(rig)
        threads = [threading.Thread(target=end, args=(handle,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_idle(rig)


@pytest.mark.parametrize("below", ["none", "dict"])
@pytest.mark.parametrize(
    ("verify", "first_byte", "is_hashed"),
    [("always", 255, True), ("never", 0, False), ("sample", SAMPLED - 1, True), ("sample", SAMPLED, False)],
)
def test_which_copies_are_hashed_in_their_commit(
    make_rig: MakeRig, below: BelowKind, verify: str, first_byte: int, is_hashed: bool
) -> None:
    frame = make_rig(below=below, settings=(("verify_memory", verify),)).space().frame
    assert frame.is_hashed(bytes([first_byte]) * 32) is (is_hashed or below != "none"), "a tier below needs all"


def test_damage_after_the_commit_does_not_get_to_a_slower_tier(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", settings=(("verify_memory", "never"),))
    space, keys = rig.space(), Blocks(rig).keys(1, 2)
    with space.reserve(keys) as slots:
        late = np.frombuffer(slots[1], dtype=np.uint8)
        slots.commit()
    late[3] ^= 1  # a writer that does not know that it is too late
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    assert len(space.get(keys)) == 1
    assert rig.cache.stats().misses_by_reason == {"corrupt": 1}


@pytest.mark.parametrize("verify", ["never", "sample", "always"])
def test_damage_in_memory_is_found_where_it_is_looked_for(make_rig: MakeRig, verify: str) -> None:
    rig = make_rig(settings=(("verify_memory", verify),))
    blocks = Blocks(rig)
    keys = blocks.keys(3, 300)
    blocks.put(keys)
    sampled = [key[0] < SAMPLED for key in keys]
    assert any(sampled)
    first = {"never": 300, "sample": sampled.index(True), "always": 0}[verify]
    with blocks.space.acquire(keys) as lease:
        offsets = lease.offsets().tolist()
    for at in offsets:
        blocks.space.arena[at] ^= 1
    with blocks.space.acquire(keys) as lease:
        assert lease.count == first
    assert_idle(rig)
