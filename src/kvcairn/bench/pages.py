"""Bench `memory`, its second half: the copy core alone, beside one plain copy of as many bytes by one thread."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcairn import copying
from kvcairn.bench.figures import Contender, Figure, Time, measure, rate, timed

PAIRS: Final = 21
TOTAL_BYTES: Final = 128 << 20  # no processor's cache holds it
LAYERS: Final = 32
PAGE_KIB: Final = (4, 16, 64, 256)
BLOCK_BYTES: Final = 32 << 20
_LEAST: Final = {1: 0.7, 2: 1.2}  # of one plain copy, from 16 KiB on
_LEAST_HASHED: Final = {1: 0.6, 2: 0.85}  # of the same copy without a checksum
_BENCH: Final = "memory"


def run_pages(total_bytes: int = TOTAL_BYTES, pairs: int = PAIRS) -> Iterator[Figure]:
    """Yield the figures of gather, scatter, and copy with checksum, on one thread and on two (`_2`).

    Blocks for about ten seconds; takes twice `total_bytes`.
    """
    mover = Mover(total_bytes)
    for name, move in (("gather", mover.gather), ("scatter", mover.scatter)):
        for kib, threads in itertools.product(PAGE_KIB, (1, 2)):
            timings = measure(move(kib << 10, threads), mover.plain(), pairs=pairs, by_cpu=threads == 1)
            limit = _LEAST[threads] if kib >= 16 else None
            yield rate(_BENCH, f"{name}_{kib}k{_suffix(threads)}", total_bytes, limit, timings)
    for threads in (1, 2):
        timings = measure(mover.hashed(threads), mover.copy(threads), pairs=pairs, by_cpu=threads == 1)
        yield rate(_BENCH, f"copy_checksum{_suffix(threads)}", total_bytes, _LEAST_HASHED[threads], timings)


class Mover:
    """Random pages of 32 layers, each layer a pool, and a block that holds them all. All memory is touched before."""

    def __init__(self, total_bytes: int) -> None:
        """Make the memory; `total_bytes` is a multiple of 32 times 256 KiB."""
        self._pools, self._block = _touched(total_bytes), _touched(total_bytes)
        self._layer_bytes = total_bytes // LAYERS
        self._bases = np.array(
            [self._pools.ctypes.data + layer * self._layer_bytes for layer in range(LAYERS)], dtype=np.uint64
        )
        self._random = np.random.default_rng(0)

    def gather(self, page_bytes: int, threads: int) -> Contender:
        """Pages into the block."""
        return self._contender(copying.gather, page_bytes, threads)

    def scatter(self, page_bytes: int, threads: int) -> Contender:
        """The block into pages."""
        return self._contender(copying.scatter, page_bytes, threads)

    def plain(self) -> Contender:
        """One memcpy of as many bytes."""
        to, from_, nbytes = self._block.ctypes.data, self._pools.ctypes.data, self._pools.size
        return lambda: timed(lambda: ctypes.memmove(to, from_, nbytes))

    def copy(self, threads: int) -> Contender:
        """Blocks of 32 MiB."""
        moves = self._moves()
        return lambda: timed(lambda: copying.copy(*moves, threads))

    def hashed(self, threads: int) -> Contender:
        """The same blocks, with a checksum of each."""
        moves = self._moves()
        return lambda: timed(lambda: copying.copy_hashed(*moves, threads))

    def _contender(self, move: Callable[..., None], page_bytes: int, threads: int) -> Contender:
        pages = self._random.permutation(self._layer_bytes // page_bytes)
        shape = (self._bases, self._layer_bytes, pages, page_bytes, page_bytes)
        start = np.zeros(1, dtype=np.int64)

        def run() -> Time:
            return timed(lambda: move(*shape, self._block, start, threads))

        return run

    def _moves(self) -> copying.Moves:
        to, from_, total = self._block.ctypes.data, self._pools.ctypes.data, self._pools.size
        step = min(BLOCK_BYTES, total // 2)
        return copying.moves([(to + at, from_ + at, min(step, total - at)) for at in range(0, total, step)])


def _touched(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory that begins with a page, as arenas and engines' tensors do."""
    page_bytes = 4096
    whole = np.ones(nbytes + page_bytes, dtype=np.uint8)
    begin = -whole.ctypes.data % page_bytes
    return whole[begin : begin + nbytes]


def _suffix(threads: int) -> str:
    return f"_{threads}" if threads > 1 else ""
