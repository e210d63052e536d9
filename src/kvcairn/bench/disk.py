"""Bench `disk`: a disk tier beside plain direct I/O on the same file system; reopening of a hundred thousand blocks."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from kvcairn.bench.figures import Contender, Figure, Time, measure, rate, timed
from kvcairn.bench.reopen import reopen_100k
from kvcairn.checksum import checksum
from kvcairn.clock import MonotonicClock
from kvcairn.config import DiskTierOptions
from kvcairn.errors import KVCairnError
from kvcairn.memory.arena import Arena
from kvcairn.tiers.base import BlockRef, Read, Slot, TierContext, Write
from kvcairn.tiers.disk import DiskTier

MiB: Final = 1 << 20
THREADS: Final = 4  # as many as the executor gives a tier
TURN_BYTES: Final = 256 * MiB
SIZES: Final = {"4m": 4 * MiB, "8m": 8 * MiB, "16m": 16 * MiB, "32m": 32 * MiB}
RUN_BLOCKS: Final = 64  # of 64 KiB; one call of the cache moves as many
PAIRS: Final = 9
_BENCH: Final = "disk"


def run_disk(path: Path | None = None, *, turn_bytes: int = TURN_BYTES, pairs: int = PAIRS) -> Iterator[Figure]:
    """Yield the figures of the disk tier as they are measured. Blocks for minutes; takes two GiB below `path`.

    Args:
        path: folder on the file system to measure; the one for temporary files unless given.
        turn_bytes: bytes of one measurement.
        pairs: measurements of each figure.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvcairn-bench-", dir=path))
    try:
        for name, nbytes in SIZES.items():
            yield from _pair_of_rates(folder / name, f"_{name}", nbytes, 1, (turn_bytes, pairs), 0.85)
        yield from _pair_of_rates(folder / "64k", "_64k", 64 << 10, RUN_BLOCKS, (turn_bytes, pairs), 0.6)
        yield from reopen_100k(folder / "reopen")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pair_of_rates(
    folder: Path, suffix: str, nbytes: int, run: int, effort: tuple[int, int], limit: float
) -> Iterator[Figure]:
    turn_bytes, pairs = effort
    folder.mkdir()
    calls = max(THREADS, turn_bytes // (nbytes * run))
    buffers = Buffers(nbytes * run, calls)
    ours = Ours(folder, nbytes, run, buffers)
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for _ in range(2):  # every page of every file written before, so that none is a first time
                _all(pool, ours.write, calls)()
            plain = Plain(folder, buffers)
            figures = measure(_all(pool, ours.write, calls), _all(pool, plain.write, calls), pairs=pairs)
            yield rate(_BENCH, f"write{suffix}", calls * run * nbytes, limit, figures)
            _all(pool, ours.write, calls)()
            figures = measure(_all(pool, ours.read, calls), _all(pool, plain.read, calls), pairs=pairs)
            yield rate(_BENCH, f"read{suffix}", calls * run * nbytes, limit, figures)
            plain.close()
        finally:
            ours.close()
            buffers.arena.close()
    shutil.rmtree(folder)


def _all(pool: ThreadPoolExecutor, move: Callable[[int], None], calls: int) -> Contender:
    """Make all calls on the threads of the pool and wait for the last."""

    def run() -> Time:
        return timed(lambda: list(pool.map(move, range(calls))))

    return run


class Buffers:
    """What is written and where it is read to, the same for both: how memory lies matters to the device."""

    def __init__(self, nbytes: int, calls: int) -> None:
        """Touch all of it."""
        self.arena = Arena((calls + THREADS) * nbytes)
        words = np.random.default_rng(1).integers(0, 1 << 63, self.arena.array.size // 8, dtype=np.int64)
        np.copyto(self.arena.array.view(np.int64), words)
        views = [self.arena.view[i * nbytes : (i + 1) * nbytes] for i in range(calls + THREADS)]
        self.data, self.out = views[:THREADS], views[THREADS:]


class Ours:
    """Runs of blocks to and from a disk tier, hashed on the way in and compared on the way out, as the cache does."""

    def __init__(self, folder: Path, nbytes: int, run: int, buffers: Buffers) -> None:
        """Open a tier in a new folder."""
        slot_bytes = DiskTier.header_bytes + nbytes
        self._segment_bytes = run * slot_bytes
        options = DiskTierOptions(
            path=str(folder), capacity_bytes=2 * len(buffers.out) * self._segment_bytes + 64 * MiB
        )
        self._tier = DiskTier(options, TierContext(MonotonicClock()))
        self._tier.open()
        self._run, self._nbytes, self._slot_bytes = run, nbytes, slot_bytes
        self._generation = itertools.count(1)
        self._data, self._out = buffers.data, buffers.out
        self._reads: dict[int, list[Read]] = {}

    def write(self, call: int) -> None:
        """Store one run over the run of the turn before."""
        source = self._data[call % THREADS]
        pieces = [source[i * self._nbytes : (i + 1) * self._nbytes] for i in range(self._run)]
        writes = []
        for i, piece in enumerate(pieces):
            place = i * self._slot_bytes, self._slot_bytes, self._segment_bytes, next(self._generation)
            block = BlockRef(bytes(32), (call * self._run + i).to_bytes(32, "little"), 0)
            writes.append(Write(block, None, Slot(call, *place), piece, checksum(piece)))
        if any(self._tier.write(writes)):
            raise KVCairnError("a block could not be written")
        out = self._out[call]
        self._reads[call] = [
            Read(w.block, w.slot, out[i * self._nbytes : (i + 1) * self._nbytes], w.checksum)
            for i, w in enumerate(writes)
        ]

    def read(self, call: int) -> None:
        """Load one run and compare it with its checksums."""
        reads = self._reads[call]
        outcomes = self._tier.read(reads)
        if any(outcomes) or any(checksum(read.out) != read.checksum for read in reads):
            raise KVCairnError("a block could not be read")

    def close(self) -> None:
        """Close the tier."""
        self._tier.close()


class Plain:
    """As many bytes to and from the same places on the device, with nothing but `os.pwritev` and `os.preadv`."""

    def __init__(self, folder: Path, buffers: Buffers) -> None:
        """Open the segment files of the tier."""
        flags = os.O_RDWR | getattr(os, "O_DIRECT", 0)
        self._files = [os.open(folder / f"seg-{call}.kv", flags) for call in range(len(buffers.out))]
        self._data, self._out = buffers.data, buffers.out

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            os.close(file)

    def write(self, call: int) -> None:
        """Write one run."""
        _must(os.pwritev(self._files[call], [self._data[call % THREADS]], 0), self._data[0])

    def read(self, call: int) -> None:
        """Read one run."""
        _must(os.preadv(self._files[call], [self._out[call]], 0), self._out[0])


def _must(done: int, data: Sequence[int]) -> None:
    if done != len(data):
        raise KVCairnError(f"{done} of {len(data)} bytes were moved")
