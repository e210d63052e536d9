"""T09: aborted at any stage, and no further traffic: every slot is free, distinct, and written by nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvcairn.testing.blocks import Blocks, assert_idle, poison_is_intact
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.rig import BelowKind, LinkKind, Rig
from tests.torture.support import MakeRig

POOL = 32


def all_slots_are_free_and_distinct(rig: Rig, blocks: Blocks) -> None:
    """Take every slot there is, compare, and give them back."""
    assert_idle(rig)
    rig.cache.clear(tier="memory")
    assert_idle(rig)
    assert poison_is_intact(rig, [])
    with blocks.space.reserve(blocks.keys(999, POOL)) as everything:
        offsets = [int(offset) for offset in everything.offsets()]
        assert len(offsets) == len(set(offsets)) == POOL
    assert_idle(rig)


def leave_reservation(rig: Rig, blocks: Blocks, keys: list[bytes]) -> None:
    with blocks.space.reserve(blocks.keys(50, 4)):
        pass


def fail_inside_reservation(rig: Rig, blocks: Blocks, keys: list[bytes]) -> None:
    with pytest.raises(KeyError), blocks.space.reserve(blocks.keys(50, 4)) as reservation:
        reservation[0][:] = bytes(len(reservation[0]))
        raise KeyError("the engine's own failure")


def commit_nothing(rig: Rig, blocks: Blocks, keys: list[bytes]) -> None:
    with blocks.space.reserve(blocks.keys(50, 4)) as reservation:
        reservation.commit([False] * 4)


def cancel_when_queued(rig: Rig, blocks: Blocks, keys: list[bytes]) -> None:
    job = blocks.space.prefetch(keys)
    job.cancel()
    assert job.state == ("cancelled" if rig.setup.below == "disk" else "ready")
    job.close()


def close_when_queued(rig: Rig, blocks: Blocks, keys: list[bytes]) -> None:
    blocks.space.prefetch(keys).close()


def cancel_half_way(rig: Rig, blocks: Blocks, keys: list[bytes]) -> None:
    job = blocks.space.prefetch(keys)
    rig.step()
    job.cancel()
    job.close()
    job.close()


def close_when_ready(rig: Rig, blocks: Blocks, keys: list[bytes]) -> None:
    job = blocks.space.prefetch(keys)
    assert job.wait(5.0)
    job.close()


def never_close(rig: Rig, blocks: Blocks, keys: list[bytes]) -> None:
    job = blocks.space.prefetch(keys)
    rig.step(10)
    rig.clock.advance(1000.0)  # beyond its time to live
    rig.step(10)
    del job


def forget_while_leased(rig: Rig, blocks: Blocks, keys: list[bytes]) -> None:
    with blocks.space.acquire(keys) as lease:
        blocks.space.forget(keys)
        assert blocks.space.lookup(keys).blocks == 0
        for i in range(lease.count):
            blocks.oracle.check(lease[i], blocks.descriptor, keys[i])


def clear_while_reserved(rig: Rig, blocks: Blocks, keys: list[bytes]) -> None:
    chain = blocks.keys(50, 4)
    with blocks.space.reserve(chain) as reservation:
        rig.cache.clear()
        reservation.commit()
    assert blocks.space.lookup(chain).blocks in (0, 4)
    blocks.space.forget(chain)


STAGES = [
    leave_reservation, fail_inside_reservation, commit_nothing, cancel_when_queued, close_when_queued, cancel_half_way,
    close_when_ready, never_close, forget_while_leased, clear_while_reserved,
]  # fmt: skip


@pytest.mark.parametrize("abort", STAGES)
def test_abort(
    make_rig: MakeRig, link: LinkKind, below: BelowKind, abort: Callable[[Rig, Blocks, list[bytes]], None]
) -> None:
    rig = make_rig(link=link, below=below, memory_blocks=POOL)
    blocks = Blocks(rig)
    keys = blocks.keys(1, 8)
    assert all(blocks.put(keys))
    if below == "disk":
        rig.reopen()
    abort(rig, blocks, keys)
    all_slots_are_free_and_distinct(rig, blocks)


@pytest.mark.parametrize("abort", [cancel_half_way, close_when_queued, forget_while_leased, clear_while_reserved])
def test_abort_over_the_policies(
    make_rig: MakeRig, hierarchy: dict[str, Any], abort: Callable[[Rig, Blocks, list[bytes]], None]
) -> None:
    rig = make_rig(memory_blocks=POOL, below_blocks=POOL, **hierarchy)
    blocks = Blocks(rig)
    keys = blocks.keys(1, 8)
    assert all(blocks.put(keys))
    rig.reopen()
    for prompt in range(2, 8):  # so that blocks are on their way between the tiers
        blocks.put(blocks.keys(prompt, 8), deadline_s=0)
    abort(rig, blocks, keys)
    all_slots_are_free_and_distinct(rig, blocks)


@pytest.mark.parametrize("op", ["read", "write"])
def test_abort_while_the_tier_hangs(make_rig: MakeRig, link: LinkKind, op: str) -> None:
    rig = make_rig(link=link, below="disk", memory_blocks=POOL, threads=True, settings=())
    blocks = Blocks(rig)
    keys = blocks.keys(1, 8)
    if op == "read":
        assert all(blocks.put(keys))
        rig.reopen()
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=FaultKind.HANG, ops=frozenset([op])),)
    if op == "read":
        job = blocks.space.prefetch(keys)
        job.cancel()
        job.close()
    else:
        assert all(blocks.put(keys))
        blocks.space.forget(keys)
    held = blocks.space.reserve(blocks.keys(2, POOL))  # what the hung call may still touch is not given out
    for i, key in enumerate(held.keys):
        blocks.oracle.fill(held[i], blocks.descriptor, key)
    threading.Timer(0.05, rig.faulty.heal).start()
    assert rig.cache.drain(timeout_s=60)
    for i, key in enumerate(held.keys):
        blocks.oracle.check(held[i], blocks.descriptor, key)
    held.commit([False] * len(held.keys))
    all_slots_are_free_and_distinct(rig, blocks)
