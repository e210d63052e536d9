"""How bytes are moved: by the native core where it was built, else by numpy. Any thread, without the GIL.

- `gather(bases, pool_bytes, indices, stride_bytes, page_bytes, out, offsets, threads=1)` copies scattered pages into
  blocks. Page (i, p) begins at address `bases[p] + indices[i] * stride_bytes` and lies in a pool of `pool_bytes`. Each
  block begins at one of `offsets` in `out` and takes as many indices as the others: the blocks together are the array
  (offsets, indices / offsets, bases, page_bytes).
- `scatter(..., source, offsets, threads=1)` copies such blocks back into pages; an index stands in it once.
- `copy(targets, sources, sizes, threads=1)` copies pieces of memory between addresses.
- `copy_hashed(..., counts=None)` does the same and returns the xxh3-128 of the pieces, 16 bytes each, read only once;
  a piece is hashed by one thread. With `counts`, of the first `counts[0]` pieces one behind the other, of the next
  `counts[1]`, and so on; ValueError where these do not add up.
- `checksum(data)` returns the xxh3-128 of a buffer.
- `instruction_set()` says what moves them: `avx512`, `avx2`, `sse2`, `neon`, `plain` or `numpy`.

Addresses are arrays of uint64, indices and sizes of int64, blocks anything with the buffer protocol, in one piece.
Nothing that is written overlaps anything else. All is checked before the first byte moves: IndexError for an index or
an offset that is outside, ValueError for what does not fit together. Nobody can check an address: the caller vouches
for the memory, and keeps it alive.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcairn._fallback import Buffer

try:
    from kvcairn._native import checksum, copy, copy_hashed, gather, instruction_set, scatter
except ImportError:
    from kvcairn._fallback import checksum, copy, copy_hashed, gather, instruction_set, scatter

Moves = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.int64]]

__all__ = [
    "IS_NATIVE",
    "Moves",
    "THREADS",
    "address_of",
    "checksum",
    "copy",
    "copy_bytes",
    "copy_hashed",
    "gather",
    "instruction_set",
    "moves",
    "scatter",
]

IS_NATIVE = instruction_set() != "numpy"
"""Whether the native core was built."""

THREADS = min(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
"""Threads for a large copy: two reach what the memory can give, and leave the other cores to the engine."""

_SMALL_BYTES = 1 << 20  # below it numpy is as fast


def address_of(data: Buffer) -> int:
    """Return the address of the first byte of a buffer, which the caller keeps alive."""
    return int(_array(data).ctypes.data)


def moves(pieces: Sequence[tuple[int, int, int]]) -> Moves:
    """Return (target, source, nbytes) of some pieces as `copy` takes them: targets, sources, sizes."""
    targets, sources, sizes = zip(*pieces, strict=True) if pieces else ((), (), ())
    return np.array(targets, np.uint64), np.array(sources, np.uint64), np.array(sizes, np.int64)


def copy_bytes(source: Buffer, target: Buffer) -> None:
    """Copy one buffer over another of the same size.

    Raises:
        ValueError: the sizes differ, or `target` is read-only.
    """
    from_, to = _array(source), _array(target)
    if from_.size < _SMALL_BYTES or from_.size != to.size or not to.flags.writeable:
        np.copyto(to, from_)
    else:
        copy(*moves([(to.ctypes.data, from_.ctypes.data, to.size)]), THREADS)


def _array(data: Buffer) -> npt.NDArray[np.uint8]:
    return data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)
