from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest

from kvcairn.errors import ClosedError, LayoutError, LeaseError
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.rig import Rig
from kvcairn.transfer.job import CopyJob, Job
from kvcairn.types import JobState, MissReason
from tests.unit.conftest import MakeRig

LONG_S = 60.0


def below_only(rig: Rig, count: int) -> tuple[Blocks, list[bytes]]:
    blocks = Blocks(rig)
    keys = blocks.keys(1, count)
    blocks.put(keys)
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    return blocks, keys


@pytest.fixture(params=["direct", "loopback", "socket"])
def rig(make_rig: MakeRig, request: pytest.FixtureRequest) -> Rig:
    return make_rig(link=request.param, below="dict", memory_blocks=64)


def test_a_job_ends_once_and_remembers_how_it_stood(rig: Rig) -> None:
    blocks, keys = below_only(rig, 3)
    job = blocks.space.prefetch(keys)
    assert job.wait(LONG_S)
    assert job.query()
    job.close()
    job.close()
    job.cancel()
    assert (job.state, job.ready, job.query()) == (JobState.READY, 3, True)
    with pytest.raises(LeaseError, match="ended"):
        job.lease()
    assert_idle(rig)


def test_taking_over_ends_a_job(rig: Rig) -> None:
    blocks, keys = below_only(rig, 3)
    job = blocks.space.prefetch(keys)
    job.wait(LONG_S)
    lease = job.lease()
    with pytest.raises(LeaseError):
        job.lease()
    job.close()
    assert (job.state, job.ready, job.error) == (JobState.READY, 3, None)
    assert lease.count == 3
    lease.release()
    assert_idle(rig)


def test_with_closes_it(rig: Rig) -> None:
    blocks, keys = below_only(rig, 3)
    with pytest.raises(KeyError), blocks.space.prefetch(keys):
        raise KeyError
    assert_idle(rig)


def test_what_has_been_damaged_in_memory_is_not_handed_over(rig: Rig) -> None:
    blocks, keys = below_only(rig, 3)
    job = blocks.space.prefetch(keys)
    job.wait(LONG_S)
    with blocks.space.acquire(keys) as lease:
        at = int(lease.offsets()[1])
    blocks.space.arena[at] ^= 1
    with job.lease() as lease:
        assert lease.count < 2
        assert lease.reason is MissReason.CORRUPT
        assert lease.offsets().size == lease.count
    rig.core.check()
    assert_idle(rig)


def test_a_shared_job_lives_until_both_have_let_go(rig: Rig) -> None:
    blocks, keys = below_only(rig, 3)
    job = blocks.space.prefetch(keys)
    other = rig.cache.adopt(job.ticket())
    assert isinstance(other, Job)
    assert other.number == job.number
    job.close()
    assert other.wait(LONG_S)
    with other.lease() as lease:
        assert lease.count == 3
    with pytest.raises(LeaseError):
        rig.cache.adopt(msgspec.msgpack.encode((rig.core.boot_id, "job", job.number)))
    assert_idle(rig)


def test_another_runs_ticket_is_refused(rig: Rig) -> None:
    blocks, keys = below_only(rig, 1)
    with blocks.space.prefetch(keys) as job:
        ticket = msgspec.msgpack.encode((bytes(16), "job", job.number))
        with pytest.raises(LeaseError, match="another run"):
            rig.cache.adopt(ticket)


def test_store_from_gathers_regions(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 3)
    regions = [np.frombuffer(blocks.content(key), dtype=np.uint8).copy() for key in keys]
    half = blocks.space.block_bytes // 2
    addresses = [[r.ctypes.data, r.ctypes.data + half] for r in regions]
    job = blocks.space.store_from(keys, (addresses, [[half, blocks.space.block_bytes - half]] * 3))
    assert job.wait(LONG_S)
    assert (job.ok, job.ready, job.state, job.error) == ([True] * 3, 3, JobState.READY, None)
    assert blocks.read(keys) == 3
    assert_idle(rig)


@pytest.mark.parametrize("sizes", [[[1]], [[-1, 129]], [[2**40]], [[64, 63]], [[]]])
def test_regions_must_add_up(rig: Rig, sizes: list[list[int]]) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 1)
    addresses = [[0] * len(sizes[0])]
    for call in (blocks.space.load_into, blocks.space.store_from):
        with pytest.raises(LayoutError):
            call(keys, (addresses, sizes))
    with pytest.raises(LayoutError):
        blocks.space.load_into(blocks.keys(1, 2), ([0, 0, 0], [1, 1, 1]))


def test_no_blocks_are_copied_at_once(rig: Rig) -> None:
    job = rig.space().load_into([], ([], []))
    assert job.wait(LONG_S)
    assert (job.ok, job.ready, job.state) == ([], 0, JobState.READY)


def test_a_copy_that_is_cancelled_before_it_begins_copies_nothing(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 2)
    blocks.put(keys)
    target = np.zeros((2, blocks.space.block_bytes), dtype=np.uint8)
    job = blocks.space.load_into(keys, ([t.ctypes.data for t in target], [t.size for t in target]))
    job.cancel()
    job.close()
    assert (job.state, job.ok) == (JobState.CANCELLED, [False, False])
    assert not target.any()
    assert_idle(rig)


def test_a_copy_after_close_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig(threads=True)
    blocks = Blocks(rig)
    space, keys = blocks.space, blocks.keys(1, 1)
    rig.cache.close()
    buffers = ([0], [space.block_bytes])
    for call in (space.load_into, space.store_from):
        with pytest.raises(ClosedError):
            call(keys, buffers)


def test_a_copy_whose_work_fails_says_why(rig: Rig) -> None:
    def broken(job: CopyJob) -> None:
        raise LayoutError("no such layout")

    def wrong(job: CopyJob) -> None:
        raise ZeroDivisionError

    for work, why in ((broken, "no such layout"), (wrong, "ZeroDivisionError")):
        job = CopyJob(rig.space().frame, 1, work)
        assert job.wait(LONG_S), "whatever the work does, the job ends"
        assert job.state is JobState.FAILED
        assert job.error is not None
        assert why in job.error


def test_those_who_wait_are_told_when_the_cache_closes(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", threads=True)
    blocks, keys = below_only(rig, 2)
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=FaultKind.HANG, ops=frozenset(["read"])),)
    job = blocks.space.prefetch(keys)
    ends: list[object] = []

    def wait() -> None:
        try:
            ends.append(job.wait(LONG_S))
        except ClosedError as error:
            ends.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    closer = threading.Thread(target=lambda: rig.cache.close(drain=False))
    closer.start()
    waiter.join(LONG_S)
    assert not waiter.is_alive()
    rig.faulty.release()
    closer.join(LONG_S)
    assert isinstance(ends[0], ClosedError)
