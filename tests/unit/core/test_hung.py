"""Calls that hang, on real threads: nobody gets what such a call may still touch, until it returns."""

from __future__ import annotations

import threading

import pytest

from kvcairn.core.hung import HungCall
from kvcairn.core.state import State
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.rig import PAGE_BYTES, Rig
from kvcairn.types import JobState, MissReason
from tests.unit.conftest import MakeRig

LONG_S = 60.0
SOON_S = 0.05  # the tier's deadline here


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    rig = make_rig(below="dict", threads=True, memory_blocks=64)
    rig.core.state.levels[1].timeout_s = SOON_S
    return rig


def hang(rig: Rig, op: str, kind: FaultKind = FaultKind.HANG) -> None:
    assert rig.faulty is not None
    rig.faulty.hold()
    rig.faulty.faults = (Fault(kind=kind, ops=frozenset([op])),)


def quarantined(rig: Rig, tier: str) -> int:
    return rig.cache.stats().tiers[tier].quarantined_bytes // PAGE_BYTES


def heal_and_wait(rig: Rig) -> None:
    assert rig.faulty is not None
    rig.faulty.heal()
    assert rig.cache._link.wait(lambda: not (quarantined(rig, "memory") or quarantined(rig, "disk")), LONG_S)


def below_only(rig: Rig, count: int) -> tuple[Blocks, list[bytes]]:
    blocks = Blocks(rig)
    keys = blocks.keys(1, count)
    blocks.put(keys)
    assert rig.cache.drain(timeout_s=LONG_S)
    rig.cache.clear(tier="memory")
    return blocks, keys


@pytest.mark.parametrize("kind", [FaultKind.HANG, FaultKind.HANG_FAIL])
def test_slots_that_a_hung_read_may_write_to_are_quarantined(rig: Rig, kind: FaultKind) -> None:
    blocks, keys = below_only(rig, 4)
    hang(rig, "read", kind)
    with blocks.space.acquire(keys, deadline_s=LONG_S) as lease:
        assert (lease.count, lease.reason) == (0, MissReason.DEADLINE)
    assert quarantined(rig, "memory") == 4
    rig.core.check()
    other = blocks.keys(2, 64)
    with blocks.space.reserve(other) as slots:
        assert len(slots) == 60
        before = {int(offset) for offset in slots.offsets()}
    heal_and_wait(rig)
    stats = assert_idle(rig)
    assert stats.tiers["disk"].errors == {"TierTimeout": 1}
    assert stats.tiers["memory"].used_bytes == 0
    with blocks.space.reserve(other) as slots:
        assert len(slots) == 64
        assert before < {int(offset) for offset in slots.offsets()}
    assert blocks.read(keys, deadline_s=LONG_S) == 4


def test_a_hung_read_that_is_forgotten_meanwhile(rig: Rig) -> None:
    blocks, keys = below_only(rig, 3)
    hang(rig, "read")
    job = blocks.space.prefetch(keys)
    blocks.space.forget(keys)
    assert job.wait(LONG_S)
    job.close()
    rig.core.check()
    heal_and_wait(rig)
    assert assert_idle(rig).tiers["memory"].used_bytes == 0


def test_slots_that_a_hung_write_may_write_to_are_quarantined(rig: Rig) -> None:
    blocks = Blocks(rig)
    keys = blocks.keys(1, 3)
    hang(rig, "write")
    blocks.put(keys)
    assert rig.cache.drain(timeout_s=LONG_S)
    stats = rig.cache.stats()
    assert stats.tiers["disk"].writes_dropped == {"tier_error": 3}
    assert quarantined(rig, "disk") == 3
    rig.core.check()
    assert blocks.read(keys) == 3, "a hung tier holds up nothing that memory has"
    blocks.space.forget(keys)
    rig.core.check()
    assert rig.cache.stats().tiers["memory"].used_bytes == 3 * PAGE_BYTES, "the call may still read them"
    heal_and_wait(rig)
    stats = assert_idle(rig)
    assert (stats.tiers["memory"].used_bytes, stats.tiers["disk"].used_bytes) == (0, 0)
    assert rig.content.slots == {}, "what it wrote late is deleted"


def test_a_store_and_a_hit_in_memory_go_on_while_everything_below_hangs(rig: Rig) -> None:
    blocks, keys = below_only(rig, 2)
    assert rig.faulty is not None
    hang(rig, "read")
    rig.faulty.faults = (Fault(kind=FaultKind.HANG),)
    for prompt in range(2, 8):
        some = blocks.keys(prompt, 3)
        assert blocks.put(some) == [True] * 3
        assert blocks.read(some) == 3
    with blocks.space.acquire(keys, deadline_s=SOON_S) as lease:
        assert lease.count == 0
    heal_and_wait(rig)
    assert rig.cache.drain(timeout_s=LONG_S)
    rig.core.check()


def test_a_hung_delete_holds_up_nothing(rig: Rig) -> None:
    blocks, keys = below_only(rig, 2)
    hang(rig, "delete")
    blocks.space.forget(keys)
    assert rig.cache.drain(timeout_s=LONG_S)
    assert blocks.put(keys) == [True, True]
    heal_and_wait(rig)
    assert_idle(rig)


def test_an_acquire_gives_up_at_its_own_deadline(rig: Rig) -> None:
    blocks, keys = below_only(rig, 2)
    rig.core.state.levels[1].timeout_s = LONG_S
    hang(rig, "read")
    with blocks.space.acquire(keys, deadline_s=SOON_S) as lease:
        assert (lease.count, lease.reason) == (0, MissReason.DEADLINE)
    heal_and_wait(rig)
    assert rig.cache.drain(timeout_s=LONG_S)
    assert blocks.read(keys, deadline_s=LONG_S) == 2
    assert_idle(rig)


def test_a_job_that_is_closed_while_its_read_hangs(rig: Rig) -> None:
    blocks, keys = below_only(rig, 2)
    hang(rig, "read")
    job = blocks.space.prefetch(keys)
    assert rig.faulty is not None
    assert rig.cache._link.wait(lambda: job.state is not JobState.QUEUED, LONG_S)
    job.close()
    rig.cache._link.wait(lambda: quarantined(rig, "memory") == 2, 10 * SOON_S)
    heal_and_wait(rig)
    assert rig.cache.drain(timeout_s=LONG_S)
    assert_idle(rig)


def test_detaching_a_tier_that_hangs(rig: Rig) -> None:
    blocks, keys = below_only(rig, 2)
    hang(rig, "read")
    job = blocks.space.prefetch(keys)
    rig.cache.detach_tier("disk", drain=False)
    assert job.state in (JobState.CANCELLED, JobState.FAILED)
    job.close()
    rig.core.check()
    assert blocks.put(keys) == [True, True] or quarantined(rig, "memory")
    assert rig.faulty is not None
    rig.faulty.heal()
    assert rig.cache._link.wait(lambda: not quarantined(rig, "memory"), LONG_S)
    rig.core.check()


def test_closing_while_a_call_hangs(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict", threads=True)
    rig.core.state.levels[1].timeout_s = SOON_S
    blocks = Blocks(rig)
    hang(rig, "write")
    blocks.put(blocks.keys(1, 2))
    rig.cache.close()
    heal = threading.Timer(SOON_S, rig.faulty.heal if rig.faulty else None)  # type: ignore[arg-type]
    heal.start()
    heal.join()


@pytest.mark.parametrize("order", ["leave first", "return first"])
def test_the_giving_up_and_the_return_meet_in_either_order(rig: Rig, order: str) -> None:
    state: State = rig.core.state
    freed: list[int] = []
    call = HungCall(state)
    steps = [lambda: call.leave(lambda: freed.append(1)), call.returned]
    for step in steps if order == "leave first" else steps[::-1]:
        assert freed == []
        with state.changed:
            step()
    call.returned()
    assert freed == [1]
