from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvcairn import requests as rq
from kvcairn.buffers import Buffers
from kvcairn.core.direct import memory_at, span, spread
from kvcairn.requests import Region
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
    addresses, sizes = (np.asarray(each).tolist() for each in target.buffers)
    regions = [[Region(a, n) for a, n in zip(*pair, strict=True)] for pair in zip(addresses, sizes, strict=True)]
    return rq.ReadInto(blocks.space.frame.space, keys, 0, None, regions)


def test_a_part_of_a_block_goes_to_the_regions_it_overlaps() -> None:
    regions = [Region(1000, 10), Region(5000, 0), Region(2000, 5), Region(3000, 20)]
    assert span(regions, 0, 35) == [regions[0], regions[2], regions[3]]
    assert span(regions, 4, 12) == [Region(1004, 6), Region(2000, 2)]
    assert span(regions, 10, 15) == [Region(2000, 5)]
    assert span(regions, 7, 7) == []


def test_bytes_are_spread_in_order() -> None:
    target = Target(1, 3, 1, 4)
    addresses, sizes = (np.asarray(each).tolist() for each in target.buffers)
    regions = [Region(a, n) for a, n in zip(addresses[0], sizes[0], strict=True)]
    spread(memoryview(b"abcdefgh"), regions)
    assert target.content(0) == b"abcdefgh"
    assert bytes(memory_at(regions[2])) == b"efgh"


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


def test_buffers_belong_to_the_job_while_the_tier_may_write_to_them(make_rig: MakeRig) -> None:
    """Closing the cache does not end the job under a read that still runs."""
    rig = make_rig(below="dict", threads=True)
    blocks, keys = below_only(rig, 2)
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=FaultKind.HANG, ops=frozenset(["read"])),)
    target = Target(2, blocks.space.block_bytes)
    job = blocks.space.load_into(keys, target.buffers, LONG_S)
    read, ended_before = rig.faulty.inner.read, list[bool]()

    def recorded(reads: Sequence[Read]) -> list[Outcome]:
        ended_before.append(job.query())
        return read(reads)

    rig.faulty.inner.read = recorded  # type: ignore[method-assign]
    while not rig.faulty.calls["read"]:
        time.sleep(0.001)
    closer = threading.Thread(target=lambda: rig.cache.close(drain=False))
    closer.start()
    for _ in range(100):  # the job is given every chance to end too early
        if job.query():
            break
        time.sleep(0.002)
    rig.faulty.release()
    closer.join(LONG_S)
    assert ended_before == [False]
    assert job.wait(LONG_S)
