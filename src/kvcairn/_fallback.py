"""What `_native` does, in numpy: the same functions, arguments, results and errors, on one thread.

It is what a host without a compiler uses, and what the native core is compared with, bit for bit.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

PIECE_BYTES = 1 << 20  # the hash keeps the GIL: 1 MiB is a tenth of a millisecond

Addresses = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview | Bytes


def instruction_set() -> str:
    """Return what the copies are made with."""
    return "numpy"


def gather(
    bases: Addresses,
    pool_bytes: int,
    indices: Indices,
    stride_bytes: int,
    page_bytes: int,
    out: Buffer,
    offsets: Indices,
    threads: int = 1,
) -> None:
    """Copy pages into `out`; see `kvcairn.copying`."""
    memory = _bytes(out)
    if not memory.flags.writeable:
        raise BufferError("out is read-only")
    rows, block_bytes = _check_pages(memory, bases, pool_bytes, indices, stride_bytes, page_bytes, offsets)
    for number, base in enumerate(bases.tolist()):
        pages = _pages(base, pool_bytes, stride_bytes, page_bytes)
        for wanted, offset in zip(indices.reshape(-1, rows), offsets.tolist(), strict=False):
            block = memory[offset : offset + block_bytes].reshape(rows, bases.size, page_bytes)
            block[:, number] = pages[wanted]


def scatter(
    bases: Addresses,
    pool_bytes: int,
    indices: Indices,
    stride_bytes: int,
    page_bytes: int,
    source: Buffer,
    offsets: Indices,
    threads: int = 1,
) -> None:
    """Copy `source` into pages; see `kvcairn.copying`."""
    memory = _bytes(source)
    rows, block_bytes = _check_pages(memory, bases, pool_bytes, indices, stride_bytes, page_bytes, offsets)
    for number, base in enumerate(bases.tolist()):
        pages = _pages(base, pool_bytes, stride_bytes, page_bytes)
        for wanted, offset in zip(indices.reshape(-1, rows), offsets.tolist(), strict=False):
            block = memory[offset : offset + block_bytes].reshape(rows, bases.size, page_bytes)
            pages[wanted] = block[:, number]


def copy(targets: Addresses, sources: Addresses, sizes: Indices, threads: int = 1) -> None:
    """Copy pieces; see `kvcairn.copying`."""
    _check_moves(targets, sources, sizes)
    for target, source, nbytes in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        if nbytes:
            np.copyto(_at(target, nbytes), _at(source, nbytes))


def copy_hashed(
    targets: Addresses, sources: Addresses, sizes: Indices, threads: int = 1, counts: Indices | None = None
) -> bytes:
    """Copy pieces and return their checksums; see `kvcairn.copying`."""
    if counts is not None and ((counts < 0).any() or counts.sum() != sizes.size):
        raise ValueError("the counts must add up to the pieces")
    copy(targets, sources, sizes, threads)
    ends = np.cumsum(counts) if counts is not None else np.arange(1, sizes.size + 1)
    pieces = [_at(source, nbytes) for source, nbytes in zip(sources.tolist(), sizes.tolist(), strict=True) if nbytes]
    there = np.concatenate([[0], np.cumsum(sizes > 0)])[np.concatenate([[0], ends]).astype(np.intp)].tolist()
    return b"".join(_checksum(pieces[begin:end]) for begin, end in itertools.pairwise(there))


def checksum(data: Buffer) -> bytes:
    """Return the xxh3-128 of `data`; holds the GIL for a piece of 1 MiB at a time."""
    return _checksum([_bytes(data)])


def _checksum(pieces: Sequence[Bytes]) -> bytes:
    state = xxhash.xxh3_128()
    for piece in pieces:
        view = piece.data.cast("B")
        for begin in range(0, len(view), PIECE_BYTES):
            state.update(view[begin : begin + PIECE_BYTES])
    return state.digest()


def _check_pages(
    memory: Bytes,
    bases: Addresses,
    pool_bytes: int,
    indices: Indices,
    stride_bytes: int,
    page_bytes: int,
    offsets: Indices,
) -> tuple[int, int]:
    """Check everything; return how many indices a block has, at least one, and how many bytes."""
    if page_bytes <= 0:
        raise ValueError("page_bytes must be positive")
    if stride_bytes < page_bytes:
        raise ValueError("stride_bytes must be at least page_bytes")
    if pool_bytes < 0:
        raise ValueError("pool_bytes must not be negative")
    for number, base in enumerate(bases.tolist()):
        if base == 0 or base + pool_bytes >= 1 << 64:
            raise ValueError(f"base {number} is no address of a pool")
    _check_places("index", indices, _page_count(pool_bytes, stride_bytes, page_bytes))
    if not indices.size:
        return 1, 0
    if not offsets.size or indices.size % offsets.size:
        raise ValueError("each block must have the same number of indices")
    rows = indices.size // offsets.size
    block_bytes = rows * bases.size * page_bytes
    _check_places("offset", offsets, memory.size - block_bytes + 1)
    return rows, block_bytes


def _check_places(what: str, values: Indices, count: int) -> None:
    for value in values[(values < 0) | (values >= count)].tolist():
        raise IndexError(f"{what} {value} is not below {max(0, count)}")


def _page_count(pool_bytes: int, stride_bytes: int, page_bytes: int) -> int:
    return (pool_bytes - page_bytes) // stride_bytes + 1 if pool_bytes >= page_bytes else 0


def _check_moves(targets: Addresses, sources: Addresses, sizes: Indices) -> None:
    if not targets.size == sources.size == sizes.size:
        raise ValueError("targets, sources and sizes must have one length")
    for number, (target, source, nbytes) in enumerate(
        zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)
    ):
        if nbytes < 0:
            raise ValueError("a size is negative")
        if nbytes and (min(target, source) == 0 or max(target, source) + nbytes >= 1 << 64):
            raise ValueError(f"piece {number} has no address")


def _bytes(data: Buffer) -> Bytes:
    return data if isinstance(data, np.ndarray) else np.frombuffer(data, dtype=np.uint8)


def _at(address: int, nbytes: int) -> Bytes:
    """Memory of this process. The caller vouches for the address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _pages(base: int, pool_bytes: int, stride_bytes: int, page_bytes: int) -> npt.NDArray[np.uint8]:
    count = _page_count(pool_bytes, stride_bytes, page_bytes)
    pool = _at(base, pool_bytes)
    return np.lib.stride_tricks.as_strided(pool, (count, page_bytes), (stride_bytes, 1))
