from __future__ import annotations

import pytest

from kvcairn import requests as rq
from kvcairn.errors import LeaseError
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.rig import PAGE_BYTES, Rig
from kvcairn.types import JobState, MissReason
from tests.unit.conftest import MakeRig
from tests.unit.core.kit import chain, full, sliding, space_of, state, states, store

READS = frozenset(["read"])


def below_only(rig: Rig, blocks: int, prompt: int = 1) -> tuple[Blocks, list[bytes]]:
    """Blocks that are on the tier below memory and nowhere else."""
    one = Blocks(rig)
    keys = one.keys(prompt, blocks)
    assert all(one.put(keys))
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    assert one.space.lookup(keys).by_tier == {"disk": blocks}
    return one, keys


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    return make_rig(below="dict", memory_blocks=256)


def test_a_job_brings_blocks_and_hands_them_over(rig: Rig) -> None:
    blocks, keys = below_only(rig, 5)
    job = blocks.space.prefetch(keys)
    assert (job.state, job.ready, job.error, job.query()) == (JobState.LOADING, 0, None, False)
    assert rig.cache.stats().open_jobs == 1
    rig.step()
    assert (job.state, job.ready) == (JobState.READY, 5)
    assert rig.cache.stats().tiers["memory"].leased_bytes == 5 * PAGE_BYTES
    with job.lease() as lease:
        assert (lease.count, lease.reason) == (5, None)
        assert (job.state, job.ready) == (JobState.READY, 5), "what it was at its end"
        blocks.oracle.check(lease.part(4), blocks.descriptor, keys[4])
        assert rig.cache.stats().open_jobs == 0
    stats = assert_idle(rig)
    assert (stats.blocks_asked, stats.hits_by_tier) == (5, {"disk": 5})
    assert blocks.space.lookup(keys).by_tier == {"memory": 5}


def test_what_is_in_memory_is_ready_at_once(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 3)
    blocks.put(keys)
    with blocks.space.prefetch(keys) as job:
        assert (job.state, job.ready) == (JobState.READY, 3)
    assert_idle(rig)


def test_nothing_to_bring_fails_with_its_reason(rig: Rig) -> None:
    blocks = Blocks(rig)
    with blocks.space.prefetch(blocks.keys(1, 3)) as job:
        assert (job.state, job.ready, job.error) == (JobState.FAILED, 0, "never_stored")
        assert job.wait()
    assert_idle(rig)


def test_only_the_run_that_is_there_is_brought(rig: Rig) -> None:
    blocks, keys = below_only(rig, 3)
    more = blocks.keys(1, 5)
    with blocks.space.prefetch(more, start=1) as job:
        rig.step()
        assert (job.state, job.ready) == (JobState.READY, 2)
        lease = job.lease(count=9)
        assert (lease.count, lease.reason) == (2, MissReason.NEVER_STORED)
        lease.release()
    assert more[:3] == keys
    assert_idle(rig)


def test_less_than_has_arrived_may_be_taken_over(rig: Rig) -> None:
    blocks, keys = below_only(rig, 4)
    job = blocks.space.prefetch(keys)
    rig.step()
    with job.lease(count=2) as lease:
        assert lease.count == 2
        assert rig.cache.stats().tiers["memory"].leased_bytes == 2 * PAGE_BYTES
    assert_idle(rig)


@pytest.mark.parametrize("end", ["close", "cancel", "leave"])
def test_reads_that_have_not_begun_are_taken_back(rig: Rig, end: str) -> None:
    blocks, keys = below_only(rig, 3)
    with blocks.space.prefetch(keys) as job:
        if end == "cancel":
            job.cancel()
            job.cancel()
            assert (job.state, job.ready) == (JobState.CANCELLED, 0)
        elif end == "close":
            job.close()
            job.close()
    assert rig.faulty is not None
    assert rig.faulty.calls["read"] == 0
    assert states(rig.core, blocks.space, keys) == ["ABSENT"] * 3
    assert assert_idle(rig).tiers["memory"].used_bytes == 0
    assert rig.faulty.calls["read"] == 0
    assert blocks.read(keys) == 3


def test_a_cancelled_job_keeps_what_has_arrived(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", memory_blocks=256)
    blocks, keys = below_only(rig, 100)  # two tasks
    job = blocks.space.prefetch(keys)
    rig.step()
    job.cancel()
    assert (job.state, job.ready) == (JobState.CANCELLED, 64)
    with job.lease() as lease:
        assert lease.count == 64
    assert_idle(rig)


def test_a_job_that_ended_cannot_be_used(rig: Rig) -> None:
    blocks, keys = below_only(rig, 2)
    job = blocks.space.prefetch(keys)
    job.close()
    with pytest.raises(LeaseError):
        job.lease()
    with pytest.raises(LeaseError):
        rig.core.call(rq.JobLease(job.number))
    for request in (rq.JobClose(job.number), rq.JobCancel(job.number), rq.JobInfo(job.number)):
        rig.core.call(request)
    assert rig.core.call(rq.JobInfo(12345)).state is JobState.CANCELLED


def test_nobody_took_it_over(rig: Rig) -> None:
    blocks, keys = below_only(rig, 2)
    job = blocks.space.prefetch(keys)
    rig.step()
    version = rig.core.state.version
    rig.clock.advance(rig.config.prefetch.time_to_live_s)
    rig.step()
    assert rig.core.state.version > version, "those who wait are told"
    with pytest.raises(LeaseError):
        job.lease()
    assert_idle(rig)


def test_after_its_deadline_a_job_asks_for_no_more(rig: Rig) -> None:
    blocks, keys = below_only(rig, 2)
    job = blocks.space.prefetch(keys, deadline_s=2.0)
    version = rig.core.state.version
    rig.clock.advance(2.0)
    rig.step()
    assert (job.state, job.ready) == (JobState.CANCELLED, 0)
    assert rig.core.state.version > version, "those who wait are told"
    with job.lease() as lease:
        assert (lease.count, lease.reason) == (0, MissReason.DEADLINE)
    stats = assert_idle(rig)
    assert stats.misses_by_reason == {"deadline": 2}


@pytest.mark.parametrize("how", ["deadline", "cancel", "close", "expire"])
def test_another_job_for_the_same_blocks_goes_on(rig: Rig, how: str) -> None:
    blocks, keys = below_only(rig, 3)
    first = blocks.space.prefetch(keys, deadline_s=1.0 if how == "deadline" else None)
    if how == "expire":
        rig.clock.advance(rig.config.prefetch.time_to_live_s / 2)
    second = blocks.space.prefetch(keys)
    assert second.state is JobState.LOADING
    if how == "cancel":
        first.cancel()
    elif how == "close":
        first.close()
    else:
        rig.clock.advance(1.0 if how == "deadline" else rig.config.prefetch.time_to_live_s / 2)
        rig.core.tick(rig.clock.now())
    assert rig.executor is not None
    rig.executor.run()
    assert (second.state, second.ready) == (JobState.READY, 3)
    for job in (first, second):
        job.close()
    assert_idle(rig)


def test_two_jobs_for_the_same_blocks_read_them_once(rig: Rig) -> None:
    blocks, keys = below_only(rig, 3)
    jobs = [blocks.space.prefetch(keys), blocks.space.prefetch(keys)]
    assert rig.executor is not None
    rig.executor.run()
    assert [job.ready for job in jobs] == [3, 3]
    assert rig.faulty is not None
    assert rig.faulty.calls["read"] == 1
    for job in jobs:
        job.close()
    assert_idle(rig)


def test_without_room_a_job_stalls_and_goes_on_when_there_is(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", memory_blocks=8)
    blocks, keys = below_only(rig, 6)
    other = blocks.keys(2, 5)
    blocks.put(other)
    rig.cache.drain()
    lease = blocks.space.acquire(other)
    job = blocks.space.prefetch(keys)
    assert rig.executor is not None
    rig.executor.run()
    assert (job.state, job.ready) == (JobState.LOADING, 3)
    assert rig.core.call(rq.JobInfo(job.number)).stalled
    with blocks.space.acquire(keys, deadline_s=5.0) as short:
        assert (short.count, short.reason) == (3, MissReason.NO_ROOM)
    lease.release()
    rig.executor.run()
    assert (job.state, job.ready) == (JobState.READY, 6)
    job.close()
    assert_idle(rig)


def test_the_cap_on_leases_holds_for_jobs(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", memory_blocks=8, settings=(("max_lease_fraction", 0.5),))
    blocks, keys = below_only(rig, 7)
    job = blocks.space.prefetch(keys)
    assert rig.executor is not None
    rig.executor.run()
    assert job.ready == 4
    assert rig.cache.stats().tiers["memory"].leased_bytes == 4 * PAGE_BYTES
    with job.lease() as lease:
        assert (lease.count, lease.reason) == (4, MissReason.NO_ROOM)
    assert_idle(rig)


@pytest.mark.parametrize("kind", [FaultKind.VANISHED, FaultKind.CORRUPT, FaultKind.ALTERED, FaultKind.SHORT])
def test_a_copy_that_is_lost_ends_the_run_there_and_is_dropped(rig: Rig, kind: FaultKind) -> None:
    blocks, keys = below_only(rig, 5)
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=kind, ops=READS, keys=frozenset(keys[2:3])),)
    reason = MissReason.VANISHED if kind is FaultKind.VANISHED else MissReason.CORRUPT
    with blocks.space.acquire(keys, deadline_s=5.0) as lease:
        assert (lease.count, lease.reason) == (2, reason)
    hit = blocks.space.lookup(keys)
    assert (hit.blocks, hit.reason) == (2, reason)
    stats = assert_idle(rig)
    assert stats.misses_by_reason == {reason.value: 3}
    rig.faulty.heal()
    blocks.put(keys[:3])
    assert blocks.read(keys) == 5, "what lies behind the hole counts again"


@pytest.mark.parametrize("kind", [FaultKind.ERROR, FaultKind.LATE_ERROR, FaultKind.BUG])
def test_a_call_that_fails_drops_nothing(rig: Rig, kind: FaultKind) -> None:
    blocks, keys = below_only(rig, 3)
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=kind, ops=READS, calls=frozenset([1])),)
    with blocks.space.acquire(keys, deadline_s=5.0) as lease:
        assert (lease.count, lease.reason) == (0, MissReason.TIER_DOWN)
    assert assert_idle(rig).tiers["disk"].errors == {"TierUnavailable": 1}
    assert blocks.read(keys) == 3


@pytest.mark.parametrize("kind", [FaultKind.NO_OUTCOMES, FaultKind.EMPTY_OUTCOMES, FaultKind.MANY_OUTCOMES])
def test_a_tier_that_answers_nonsense_is_not_believed(rig: Rig, kind: FaultKind) -> None:
    blocks, keys = below_only(rig, 3)
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=kind, ops=READS),)
    assert blocks.read(keys) == 0
    rig.faulty.heal()
    assert_idle(rig)
    assert blocks.read(keys) == 3


@pytest.mark.parametrize("how", ["forget", "clear"])
def test_dropped_while_it_is_read(rig: Rig, how: str) -> None:
    blocks, keys = below_only(rig, 3)
    job = blocks.space.prefetch(keys)
    blocks.space.forget(keys) if how == "forget" else rig.cache.clear()
    rig.core.check()
    assert rig.executor is not None
    rig.executor.run()
    assert (job.ready, job.error) == (0, "cleared")
    job.close()
    assert assert_idle(rig).tiers["memory"].used_bytes == 0
    assert blocks.space.contains(keys) == 0


def test_dropped_and_stored_again_while_it_is_read(rig: Rig) -> None:
    """The rows of a job may have become those of other blocks."""
    blocks, keys = below_only(rig, 3)
    job = blocks.space.prefetch(keys)
    blocks.space.forget(keys)
    other = blocks.keys(2, 6)
    blocks.put(other)
    assert rig.executor is not None
    rig.executor.run()
    with job.lease() as lease:
        assert lease.count == 0
    assert blocks.read(other) == 6
    blocks.put(keys)
    assert blocks.read(keys) == 3
    assert_idle(rig)


def test_a_block_that_one_job_lost_concerns_no_job_that_does_not_need_it(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", hybrid=True)
    blocks, keys = below_only_hybrid(rig, 5)
    short, long = blocks.space.prefetch(keys[:2]), blocks.space.prefetch(keys)
    for place, (stored, _) in list(rig.content.slots.items()):
        if (stored.block.key, stored.block.group) == (keys[1], 2):
            del rig.content.slots[place]
    assert rig.executor is not None
    rig.executor.run()
    assert (short.ready, long.ready) == (1, 5)
    for job in (short, long):
        job.close()
    assert_idle(rig)


def below_only_hybrid(rig: Rig, count: int) -> tuple[Blocks, list[bytes]]:
    blocks = Blocks(rig)
    keys = blocks.keys(1, count)
    assert all(blocks.put(keys))
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    return blocks, keys


def test_only_what_a_length_needs_is_brought(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    space = space_of(rig, full(), sliding(2), state())
    keys = chain(space, 6)
    store(space, keys)
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    with space.acquire(keys, deadline_s=5.0) as lease:
        assert lease.count == 6
        assert rig.cache.stats().tiers["memory"].used_bytes == (6 + 2 + 1) * PAGE_BYTES
    assert_idle(rig)


def test_sources_are_held_while_they_are_read(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", memory_blocks=64, below_blocks=6)
    blocks, keys = below_only(rig, 6)
    job = blocks.space.prefetch(keys)
    assert rig.cache.stats().tiers["disk"].leased_bytes == 6 * PAGE_BYTES
    blocks.put(blocks.keys(2, 6))
    assert rig.executor is not None
    rig.executor.run()
    assert job.ready == 6
    job.close()
    assert_idle(rig)


def test_the_eventfd_and_poll_tell_what_has_ended(rig: Rig) -> None:
    blocks, keys = below_only(rig, 2)
    assert rig.cache.poll() == []
    jobs = [blocks.space.prefetch(keys) for _ in range(2)]
    assert rig.cache.poll() == []
    rig.step()
    assert sorted(job.number for job in rig.cache.poll()) == sorted(job.number for job in jobs)
    assert rig.cache.poll() == []
    for job in jobs:
        job.close()


def test_wait_takes_as_long_as_the_policy_lets_it(rig: Rig) -> None:
    blocks, keys = below_only(rig, 2)
    with blocks.space.prefetch(keys, policy="best_effort") as job:
        before_s = rig.clock.now()
        job.wait()
        assert rig.clock.now() == before_s
    with blocks.space.prefetch(keys, policy="wait_complete") as job:
        assert job.wait()
        assert job.ready == 2
    with pytest.raises(ValueError, match="policy"):
        blocks.space.prefetch(keys, policy="fast")
    assert_idle(rig)


def test_the_more_urgent_job_is_served_first(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", memory_blocks=256)
    blocks, keys = below_only(rig, 2, 1)
    other = blocks.keys(2, 2)
    blocks.put(other)
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    slow, fast = blocks.space.prefetch(keys, priority=1), blocks.space.prefetch(other, priority=2)
    rig.step()
    assert (slow.ready, fast.ready) == (0, 2)
    for job in (slow, fast):
        job.close()
    assert_idle(rig)


@pytest.mark.parametrize("change", ["release", "forget"])
def test_of_those_that_wait_for_room_the_most_urgent_begins(make_rig: MakeRig, change: str) -> None:
    rig = make_rig(below="dict", memory_blocks=2)
    blocks, keys = below_only(rig, 2, 1)
    other, full = blocks.keys(2, 2), blocks.keys(3, 2)
    for chain_keys in (other, full):
        blocks.put(chain_keys)
        rig.cache.drain()
    lease = blocks.space.acquire(full)
    assert lease.count == 2
    late, soon = blocks.space.prefetch(keys, priority=1), blocks.space.prefetch(other, priority=2)
    assert (late.state, soon.state) == (JobState.QUEUED, JobState.QUEUED)
    lease.release()
    if change == "forget":
        blocks.space.forget(full)
    rig.step()
    assert (late.ready, soon.ready) == (0, 2)
    for job in (late, soon):
        job.close()
    assert_idle(rig)


def test_no_prefetch_goes_before_an_acquire_or_behind_a_write(rig: Rig) -> None:
    blocks, keys = below_only(rig, 1)
    for asked, priority in ((1_000, 1), (49, 1), (0, 50), (-49, 99), (-1_000, 99)):
        with blocks.space.prefetch(keys, priority=asked) as job:
            assert rig.core._loads.get(job.number).priority == priority
    assert_idle(rig)


def test_an_acquire_does_not_wait_behind_the_prefetch_that_reads_its_block(make_rig: MakeRig) -> None:
    """An idle prefetch has asked for the block; others are before it in the queue. The acquire takes it along ahead."""
    rig = make_rig(below="dict")
    space = rig.space()
    chains = [chain(space, 4, prompt) for prompt in range(3)]
    for keys in chains:
        store(space, keys)
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    urgent, idle = space.prefetch(chains[0], priority=10), space.prefetch(chains[1], priority=-40)
    with space.acquire(chains[1], deadline_s=5) as lease:
        assert lease.count == 4
        assert (urgent.ready, idle.ready) == (0, 4), "nothing else was read before"
    rig.step(10)
    assert urgent.ready == 4
    urgent.close()
    idle.close()
