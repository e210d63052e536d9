from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvcairn import buffers
from kvcairn import requests as rq
from kvcairn.buffers import Buffers
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.rig import Rig
from kvcairn.tiers.base import Outcome, Read
from kvcairn.types import JobState
from tests.unit.conftest import MakeRig

Bytes = npt.NDArray[np.uint8]
LONG_S = 60.0


class Target:
    """Buffers of some blocks, cut into regions of the given sizes, each region somewhere else."""

    def __init__(self, blocks: int, *sizes: int) -> None:
        self.memory: list[list[Bytes]] = [[np.zeros(n, dtype=np.uint8) for n in sizes] for _ in range(blocks)]

    @property
    def buffers(self) -> Buffers:
        return (
            [[region.ctypes.data for region in block] for block in self.memory],
            [[region.size for region in block] for block in self.memory],
        )

    def content(self, block: int) -> bytes:
        return b"".join(region.tobytes() for region in self.memory[block])


def below_only(rig: Rig, blocks: int, prompt: int = 1) -> tuple[Blocks, list[bytes]]:
    """Blocks that are on the tier below memory and nowhere else."""
    chain = Blocks(rig)
    keys = chain.keys(prompt, blocks)
    assert all(chain.put(keys))
    rig.cache.drain()
    rig.cache.clear(tier="memory")
    return chain, keys


def read_into(blocks: Blocks, keys: list[bytes], target: Target) -> rq.ReadInto:
    return rq.ReadInto(blocks.space.frame.space, keys, 0, None, [block[0].ctypes.data for block in target.memory])


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("cut", [[], [1], [100], [128, 200]])
def test_bytes_arrive_in_the_regions_and_take_no_room_in_memory(
    make_rig: MakeRig, hybrid: bool, cut: list[int]
) -> None:
    rig = make_rig(below="dict", hybrid=hybrid)
    blocks, keys = below_only(rig, 5)
    whole = blocks.space.block_bytes
    target = Target(5, *np.diff([0, *cut, whole]).tolist())
    job = blocks.space.load_into(keys, target.buffers, LONG_S)
    assert job.wait(LONG_S)
    assert (job.ok, job.state, job.error, job.ready) == ([True] * 5, JobState.READY, None, 5)
    assert [target.content(i) for i in range(5)] == [blocks.content(key) for key in keys]
    stats = assert_idle(rig)
    assert stats.tiers["memory"].used_bytes == 0
    assert (stats.blocks_asked, stats.hits_by_tier) == (5, {"disk": 5})


def test_what_is_in_memory_is_copied_and_the_rest_is_read(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    blocks, keys = below_only(rig, 6)
    blocks.put(keys[2:4])
    target = Target(7, blocks.space.block_bytes)
    job = blocks.space.load_into([*keys, *blocks.keys(9, 1)], target.buffers, LONG_S)
    assert job.wait(LONG_S)
    assert job.ok == [True] * 6 + [False]
    assert [target.content(i) for i in range(6)] == [blocks.content(key) for key in keys]
    assert target.content(6) == bytes(blocks.space.block_bytes)
    stats = assert_idle(rig)
    assert (stats.blocks_asked, stats.hits_by_tier) == (7, {"memory": 2, "disk": 4})
    assert stats.misses_by_reason == {"never_stored": 1}


@pytest.mark.parametrize("kind", [FaultKind.VANISHED, FaultKind.CORRUPT, FaultKind.ALTERED, FaultKind.BLOCK_ERROR])
def test_a_block_that_is_lost_ends_the_run(make_rig: MakeRig, kind: FaultKind) -> None:
    rig = make_rig(below="dict")
    blocks, keys = below_only(rig, 5)
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=kind, ops=frozenset(["read"]), keys=frozenset(keys[2:3])),)
    target = Target(5, blocks.space.block_bytes)
    job = blocks.space.load_into(keys, target.buffers, LONG_S)
    assert job.wait(LONG_S)
    assert job.ok == [True, True, False, False, False]
    rig.faulty.heal()
    stats = assert_idle(rig)
    assert (stats.blocks_asked, stats.hits_by_tier) == (5, {"disk": 2})
    lost = kind is not FaultKind.BLOCK_ERROR
    assert blocks.space.contains(keys) == (2 if lost else 5)


def test_a_read_that_was_taken_back_is_no_failure_of_the_tier(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    blocks, keys = below_only(rig, 2)
    for _ in range(4):
        status = rig.core.call(read_into(blocks, keys, Target(2, blocks.space.block_bytes)))
        assert status.state is JobState.LOADING
        rig.core.call(rq.ReadCancel(status.job))
        assert rig.core.call(rq.ReadStatus(status.job)).ready == 0
    tier = assert_idle(rig).tiers["disk"]
    assert (tier.errors, tier.is_down) == ({}, False)
    assert blocks.space.lookup(keys).blocks == 2


def test_nothing_below_is_nothing_to_read(make_rig: MakeRig) -> None:
    rig = make_rig(below="dict")
    blocks = Blocks(rig)
    keys = blocks.keys(1, 2)
    status = rig.core.call(read_into(blocks, keys, Target(2, blocks.space.block_bytes)))
    assert (status.state, status.ready, status.total) == (JobState.READY, 0, 0)
    assert rig.core.call(rq.ReadStatus(77)).state is JobState.CANCELLED
    rig.core.call(rq.ReadCancel(77))
    assert_idle(rig)


def test_many_reads_at_a_time_arrive_in_order(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "READ_BLOCKS", 2)
    rig = make_rig(below="dict", threads=True)
    blocks, keys = below_only(rig, 11)
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=FaultKind.DELAY, ops=frozenset(["read"]), delay_s=0.01, rate=0.5),)
    target = Target(11, 64, blocks.space.block_bytes - 64)
    job = blocks.space.load_into(keys, target.buffers, LONG_S)
    assert job.wait(LONG_S)
    assert job.ok == [True] * 11
    assert [target.content(i) for i in range(11)] == [blocks.content(key) for key in keys]
    assert rig.faulty.calls["read"] == 6
    assert assert_idle(rig).hits_by_tier == {"disk": 11}


@pytest.mark.parametrize("closes", [False, True])
def test_a_job_ends_in_time_and_a_tier_that_hangs_never_writes_to_its_buffers(make_rig: MakeRig, closes: bool) -> None:
    rig = make_rig(below="dict", threads=True)
    blocks, keys = below_only(rig, 2)
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=FaultKind.HANG, ops=frozenset(["read"])),)
    nbytes = blocks.space.block_bytes
    target = Target(2, nbytes)
    job = blocks.space.load_into(keys, target.buffers, 0.2)
    assert job.wait(LONG_S)
    assert job.ok == [False, False]
    returned = threading.Event()
    read = rig.faulty.inner.read

    def recorded(reads: Sequence[Read]) -> list[Outcome]:
        outcomes = read(reads)
        returned.set()
        return outcomes

    rig.faulty.inner.read = recorded  # type: ignore[method-assign]
    closer = threading.Thread(target=lambda: rig.cache.close(drain=False))
    if closes:
        closer.start()
    rig.faulty.release()
    assert returned.wait(LONG_S), "the call did go on, into memory that is not the caller's"
    assert [target.content(i) for i in range(2)] == [bytes(nbytes)] * 2
    if closes:
        closer.join(LONG_S)
    else:
        rig.faulty.heal()
        stats = assert_idle(rig)
        assert (stats.blocks_asked, stats.hits_by_tier) == (2, {})
