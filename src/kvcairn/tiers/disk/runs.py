"""Slots on their way to and from a file: neighbours in one call, every piece aligned as direct I/O wants it.

Pieces of a caller's buffer that lie on pages go to the device as they are. The last, partial page of a payload and
whole buffers that do not begin on a page go through memory of our own.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from kvcairn.memory.slots import PAGE_BYTES, round_up
from kvcairn.tiers.base import Read, Slot
from kvcairn.tiers.disk import format as disk_format

RUN_SLOTS: Final = 128  # two or three pieces each: a call with over 512 pieces is slower
RUN_BYTES: Final = 8 << 20
_KEPT_BYTES: Final = 1 << 20

_own = threading.local()


def neighbours(slots: Sequence[tuple[Slot, int]]) -> Iterator[list[int]]:
    """Cut slots of one segment, given with their payload's length, into runs that one call can move.

    Yields positions in `slots`. Slots given twice are in different runs, the later one last.
    """
    run: list[int] = []
    end = run_bytes = 0
    for at in sorted(range(len(slots)), key=lambda i: slots[i][0].offset_bytes):
        slot, nbytes = slots[at]
        if run and (slot.offset_bytes != end or len(run) >= RUN_SLOTS or run_bytes >= RUN_BYTES):
            yield run
            run, run_bytes = [], 0
        run.append(at)
        run_bytes += slot.slot_bytes
        end = slot.offset_bytes + disk_format.HEADER_BYTES + round_up(nbytes)
    if run:
        yield run


def write_run(fd: int, copies: Sequence[tuple[bytes, memoryview]], offset: int, *, direct: bool) -> None:
    """Write neighbouring slots, each given as header page and payload, with zeros to the end of the last page."""
    room = _Room(sum(_own_bytes(data, direct) for _, data in copies))
    parts: list[memoryview] = []
    for header, data in copies:
        page = room.take(disk_format.HEADER_BYTES)
        page[:] = header
        parts.append(page)
        whole = _whole(data, direct)
        if whole:
            parts.append(data[:whole])
        if whole < len(data):
            rest = room.take(round_up(len(data) - whole))
            _copy(rest, data[whole:])
            rest[len(data) - whole :] = bytes(len(rest) - len(data) + whole)
            parts.append(rest)
    write_all(fd, parts, offset)


def read_run(fd: int, reads: Sequence[Read], offset: int, *, direct: bool) -> list[memoryview]:
    """Read neighbouring slots, payloads into their buffers; return the header pages, valid until the next run.

    Raises:
        EOFError: the file ends before the last slot does.
    """
    room = _Room(sum(_own_bytes(read.out, direct) for read in reads))
    parts: list[memoryview] = []
    pages: list[memoryview] = []
    copied: list[tuple[memoryview, memoryview]] = []
    for read in reads:
        pages.append(room.take(disk_format.HEADER_BYTES))
        parts.append(pages[-1])
        whole, nbytes = _whole(read.out, direct), len(read.out)
        if whole:
            parts.append(read.out[:whole])
        if whole < nbytes:
            parts.append(room.take(round_up(nbytes - whole)))
            copied.append((read.out[whole:], parts[-1][: nbytes - whole]))
    read_all(fd, parts, offset)
    for out, rest in copied:
        _copy(out, rest)
    return pages


def page() -> memoryview:
    """Return a page of the calling thread, aligned; what it holds is unknown."""
    return _Room(PAGE_BYTES).take(PAGE_BYTES)


def write_all(fd: int, parts: Sequence[memoryview], offset: int) -> None:
    """Write all parts one after another from `offset` on, however often the system stops short."""
    rest = [part for part in parts if len(part)]
    while rest:
        done = os.pwritev(fd, rest, offset)
        if done == 0:
            raise OSError(errno.EIO, "nothing was written")
        offset += done
        rest = _behind(rest, done)


def read_all(fd: int, parts: Sequence[memoryview], offset: int) -> None:
    """Fill all parts from `offset` on, however often the system stops short.

    Raises:
        EOFError: the file ends before that.
    """
    rest = list(parts)
    while rest:
        done = os.preadv(fd, rest, offset)
        if done == 0:
            raise EOFError
        offset += done
        rest = _behind(rest, done)


class _Room:
    """Aligned memory of the calling thread, handed out piece by piece; kept for the next run unless it is large."""

    def __init__(self, nbytes: int) -> None:
        if nbytes <= _KEPT_BYTES:
            if not hasattr(_own, "kept"):
                _own.kept = memoryview(mmap.mmap(-1, _KEPT_BYTES))
            self._view: memoryview = _own.kept
        else:
            self._view = memoryview(mmap.mmap(-1, nbytes))
        self._used = 0

    def take(self, nbytes: int) -> memoryview:
        begin, self._used = self._used, self._used + nbytes
        return self._view[begin : self._used]


def _whole(data: memoryview, direct: bool) -> int:
    """Leading bytes of a buffer that can be moved as they are."""
    if direct and np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0] % PAGE_BYTES:
        return 0
    return len(data) // PAGE_BYTES * PAGE_BYTES


def _own_bytes(data: memoryview, direct: bool) -> int:
    """Bytes of our own memory that a slot needs: its header, and what of the payload is not moved as it is."""
    return disk_format.HEADER_BYTES + round_up(len(data) - _whole(data, direct))


def _copy(to: memoryview, source: memoryview) -> None:
    """Copy bytes; large ones without holding the interpreter lock."""
    np.copyto(np.frombuffer(to, dtype=np.uint8)[: len(source)], np.frombuffer(source, dtype=np.uint8))


def _behind(parts: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the parts behind their first `done` bytes."""
    for i, part in enumerate(parts):
        if done < len(part):
            return [part[done:], *parts[i + 1 :]]
        done -= len(part)
    return []
