"""Load or recompute, as requests see it."""

from __future__ import annotations

import pytest

from kvcairn.policy.planner import MIB, patience_s
from kvcairn.space import Space
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.rig import Rig
from kvcairn.types import MissReason
from tests.unit.conftest import MakeRig
from tests.unit.core.kit import chain, full, sliding, space_of, store

AUTO = (("planner", "auto"),)


def on_disk(rig: Rig, space: Space, blocks: int, prompt: int = 0) -> list[bytes]:
    """Store a chain that is on the tier below only."""
    keys = chain(space, blocks, prompt)
    store(space, keys)
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    assert space.lookup(keys).by_tier == {"disk": blocks}
    return keys


def make_slow(rig: Rig, seconds_a_block: float, space: Space, name: str = "disk") -> None:
    level = rig.core.level(name)
    level.speed.last_s = rig.clock.now()
    level.speed.mib_s = seconds_a_block / (space.block_bytes / MIB)


def slow_rig(make_rig: MakeRig, **more: object) -> tuple[Rig, Space]:
    rig = make_rig(below="dict", settings=AUTO, **more)
    return rig, rig.space()


def test_while_nothing_is_known_everything_is_loaded(make_rig: MakeRig) -> None:
    rig, space = slow_rig(make_rig)
    keys = on_disk(rig, space, 20)
    make_slow(rig, 10.0, space)
    assert space.lookup(keys).blocks == 20, "the engine's speed is not known"
    rig.core.level("disk").speed.last_s = None
    space.report_prefill(1000, 0.001)
    assert space.lookup(keys).blocks == 20, "the tier's speed is not known"
    with space.acquire(keys, deadline_s=5) as lease:
        assert lease.count == 20


def test_what_would_take_longer_to_load_is_computed_and_the_reason_says_so(make_rig: MakeRig) -> None:
    rig, space = slow_rig(make_rig)
    keys = on_disk(rig, space, 20)
    make_slow(rig, 1.0, space)
    space.report_prefill(20 * space.descriptor.block_tokens, 2.0)
    hit = space.lookup(keys)
    assert (hit.blocks, hit.reason) == (0, MissReason.TOO_SLOW)
    assert hit.too_slow is not None and (hit.too_slow.tier, hit.too_slow.blocks) == ("disk", 20)
    assert [hit.too_slow.load_s, hit.too_slow.compute_s] == pytest.approx([20.0, 2.0])
    with space.acquire(keys, deadline_s=60) as lease:
        assert (lease.count, lease.reason) == (0, MissReason.TOO_SLOW)
    stats = rig.cache.stats()
    assert stats.misses_by_reason == {"too_slow": 20}
    assert stats.blocks_asked == 20
    assert rig.step() == 0, "nothing was read for it"


def test_what_is_in_memory_is_taken_all_the_same(make_rig: MakeRig) -> None:
    rig, space = slow_rig(make_rig)
    keys = on_disk(rig, space, 20)
    with space.acquire(keys[:8], deadline_s=60):
        pass
    make_slow(rig, 1.0, space)
    space.report_prefill(1000, 0.01)
    assert (space.lookup(keys).blocks, space.lookup(keys).by_tier) == (8, {"memory": 8})
    with space.acquire(keys, deadline_s=60) as lease:
        assert (lease.count, lease.reason) == (8, MissReason.TOO_SLOW)


def test_the_planner_can_be_switched_off(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    space = rig.space()
    keys = on_disk(rig, space, 20)
    make_slow(rig, 1.0, space)
    space.report_prefill(1000, 0.01)
    assert space.lookup(keys).blocks == 20
    with space.acquire(keys, deadline_s=60) as lease:
        assert lease.count == 20


@pytest.mark.parametrize(("policy", "ready"), [("best_effort", 20), ("wait_complete", 0), ("timeout", 0)])
def test_a_prefetch_that_nobody_waits_for_brings_what_there_is(make_rig: MakeRig, policy: str, ready: int) -> None:
    rig, space = slow_rig(make_rig)
    keys = on_disk(rig, space, 20)
    make_slow(rig, 1.0, space)
    space.report_prefill(1000, 0.01)
    job = space.prefetch(keys, policy=policy)
    rig.step(100)
    assert job.ready == ready
    with job.lease() as lease:
        assert (lease.count, lease.reason) == (ready, None if ready else MissReason.TOO_SLOW)


def test_a_tier_found_too_slow_is_tried_again_after_a_while(make_rig: MakeRig) -> None:
    rig, space = slow_rig(make_rig)
    keys = on_disk(rig, space, 20)
    make_slow(rig, 1.0, space)
    space.report_prefill(20 * space.descriptor.block_tokens, 2.0)
    assert space.lookup(keys).blocks == 0
    rig.clock.advance(120)
    assert space.lookup(keys).blocks == 20


def test_of_two_tiers_only_the_slow_one_is_left_out(make_rig: MakeRig) -> None:
    rig, space = slow_rig(make_rig, lower_tiers=2)
    keys = chain(space, 20)
    store(space, keys)
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    rig.core.state.levels[1].residency.of(0)
    rig.cache.clear(tier="disk")
    store(space, keys[:12])
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    assert space.lookup(keys).by_tier == {"disk": 12, "disk2": 8}
    make_slow(rig, 0.001, space, "disk")
    make_slow(rig, 10.0, space, "disk2")
    space.report_prefill(20 * space.descriptor.block_tokens, 2.0)
    hit = space.lookup(keys)
    assert (hit.blocks, hit.by_tier) == (12, {"disk": 12})
    assert hit.too_slow is not None and (hit.too_slow.tier, hit.too_slow.blocks) == ("disk2", 8)


def test_windows_are_cut_where_they_can_be_restored(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", settings=AUTO)
    space = space_of(rig, full(), sliding(2))
    keys = on_disk(rig, space, 12)
    make_slow(rig, 5.0, space)
    space.report_prefill(1000, 0.01)
    hit = space.lookup(keys)
    assert (hit.blocks, hit.reason, hit.boundaries) == (0, MissReason.TOO_SLOW, ())


def test_reads_are_measured_as_they_end(make_rig: MakeRig) -> None:
    rig, space = slow_rig(make_rig)
    keys = on_disk(rig, space, 20)
    before = rig.cache.stats().tiers["disk"]
    assert (before.read_latency_s, before.read_bytes_per_s) == (0, 0)
    job = space.prefetch(keys)
    rig.clock.advance(2.0)
    rig.step(10)
    assert job.ready == 20
    after = rig.cache.stats().tiers["disk"]
    assert after.read_latency_s + 20 * space.block_bytes / max(after.read_bytes_per_s, 1e-9) == pytest.approx(2.0)
    assert rig.core.level("disk").speed.outstanding_bytes == 0
    job.close()


def test_reads_that_fail_or_are_taken_back_are_no_measurement(make_rig: MakeRig) -> None:
    rig, space = slow_rig(make_rig, faults=(Fault(kind=FaultKind.ERROR, ops=frozenset(["read"])),))
    keys = on_disk(rig, space, 4)
    rig.clock.advance(1)
    job = space.prefetch(keys)
    rig.step(10)
    job.close()
    assert rig.faulty is not None
    rig.faulty.heal()
    other = on_disk(rig, space, 4, prompt=1)
    job = space.prefetch(other)
    job.cancel()
    job.close()
    speed = rig.core.level("disk").speed
    assert (speed.last_s, speed.outstanding_bytes) == (None, 0)


def test_a_load_is_given_up_after_a_bounded_multiple_of_computing(make_rig: MakeRig) -> None:
    """The tier was fast when it was measured and hangs now: nobody waits for it as long as the deadline allows."""
    rig, space = slow_rig(make_rig)
    keys = on_disk(rig, space, 20)
    space.report_prefill(20 * space.descriptor.block_tokens, 2.0)
    begin_s = rig.clock.now()
    assert rig.executor is not None
    rig.executor.step = lambda: False  # type: ignore[method-assign]  # the tier does not answer
    with space.acquire(keys, deadline_s=60) as lease:
        assert (lease.count, lease.reason) == (0, MissReason.TOO_SLOW)
    assert rig.clock.now() - begin_s == pytest.approx(patience_s(2.0))


def test_prefills_that_say_nothing_are_refused(rig: Rig) -> None:
    for tokens, seconds in ((0, 1.0), (-1, 1.0), (10, 0.0), (10, float("inf")), (10, float("nan"))):
        with pytest.raises(ValueError, match="above 0"):
            rig.space().report_prefill(tokens, seconds)
    rig.space().report_prefill(1000, 0.5)
    assert list(rig.cache.stats().prefill_tokens_per_s.values()) == [pytest.approx(2000)]


def test_a_prefetch_below_the_threshold_brings_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", settings=(("prefetch", {"min_tokens": 40}),))
    space = rig.space()
    keys = on_disk(rig, space, 12)
    for blocks, ready in ((9, 0), (10, 10)):
        job = space.prefetch(keys[:blocks])
        rig.step(10)
        with job.lease() as lease:
            assert (lease.count, lease.reason) == (ready, None if ready else MissReason.TOO_SLOW)


def test_open_prefetches_share_a_part_of_memory(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", memory_blocks=100, settings=(("prefetch", {"max_memory_fraction": 0.2}),))
    space = rig.space()
    chains = [on_disk(rig, space, 15, prompt) for prompt in range(3)]
    jobs = [space.prefetch(keys) for keys in chains]
    rig.step(20)
    assert [job.ready for job in jobs] == [15, 5, 0]
    assert [job.is_stalled for job in jobs] == [False, True, True]
    jobs[0].close()
    rig.step(20)
    assert [job.ready for job in jobs[1:]] == [15, 5]
    jobs[1].close()
    rig.step(20)
    assert jobs[2].ready == 15
    with space.acquire(chains[0], deadline_s=1) as lease:
        assert lease.count == 15, "an acquire has no share"
    jobs[2].close()


def test_waiting_has_a_cap(make_rig: MakeRig) -> None:
    rig = make_rig(settings=(("prefetch", {"base": 1.0, "per_1024_tokens": 1.0, "cap": 3.0}),))
    options = rig.config.prefetch
    assert [options.wait_s("timeout", tokens) for tokens in (0, 1024, 1 << 20)] == [1.0, 2.0, 3.0]


def test_open_prefetches_leave_room_under_the_cap_on_leases(make_rig: MakeRig) -> None:
    """With the defaults of both settings."""
    rig = make_rig(below="dict", memory_blocks=100, settings=(("prefetch", {}), ("max_lease_fraction", 0.5)))
    space = rig.space()
    first, second = on_disk(rig, space, 60), on_disk(rig, space, 20, prompt=1)
    job = space.prefetch(first)
    rig.step(10)
    with space.acquire(second, deadline_s=5) as lease:
        assert lease.count == 20
    job.close()
