"""Slots on their way to and from a file: neighbours in one call, every piece aligned as direct I/O wants it.

Whole pages of a caller's buffer go to the device from where they lie, unless the system wants them to lie otherwise.
The last, partial page of a payload, and what may not lie where it does, go through memory of our own.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from kvcairn.memory.slots import PAGE_BYTES, round_up
from kvcairn.tiers.base import Read, Slot
from kvcairn.tiers.disk import format as disk_format

RUN_SLOTS: Final = 128  # two or three pieces each: a call with over 512 pieces is slower
RUN_BYTES: Final = 8 << 20
_KEPT_BYTES: Final = 1 << 20

_own = threading.local()
_Whole = Callable[[memoryview], int]  # leading bytes of a buffer that are moved from where they lie


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
    """Write neighboring slots, each given as header page and payload, with zeros to the end of the last page."""

    def write(whole: _Whole) -> None:
        room = _Room(sum(disk_format.HEADER_BYTES + round_up(len(data) - whole(data)) for _, data in copies))
        parts: list[memoryview] = []
        for header, data in copies:
            page, own = room.take(disk_format.HEADER_BYTES), whole(data)
            page[:] = header
            parts.append(page)
            if own:
                parts.append(data[:own])
            if own < len(data):
                rest = room.take(round_up(len(data) - own))
                _copy(rest, data[own:])
                rest[len(data) - own :] = bytes(len(rest) - len(data) + own)
                parts.append(rest)
        write_all(fd, parts, offset)

    _in_place_first(write, direct)


def read_run(fd: int, reads: Sequence[Read], offset: int, *, direct: bool) -> list[memoryview]:
    """Read neighboring slots, payloads into their buffers; return the header pages, valid until the next run.

    Raises:
        EOFError: the file ends before the last slot does.
    """
    pages: list[memoryview] = []

    def read_slots(whole: _Whole) -> None:
        room = _Room(sum(disk_format.HEADER_BYTES + round_up(len(read.out) - whole(read.out)) for read in reads))
        parts: list[memoryview] = []
        copied: list[tuple[memoryview, memoryview]] = []
        pages.clear()
        for read in reads:
            pages.append(room.take(disk_format.HEADER_BYTES))
            parts.append(pages[-1])
            own, nbytes = whole(read.out), len(read.out)
            if own:
                parts.append(read.out[:own])
            if own < nbytes:
                parts.append(room.take(round_up(nbytes - own)))
                copied.append((read.out[own:], parts[-1][: nbytes - own]))
        read_all(fd, parts, offset)
        for out, rest in copied:
            _copy(out, rest)

    _in_place_first(read_slots, direct)
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


def _in_place_first(move: Callable[[_Whole], None], direct: bool) -> None:
    """Move buffers as they lie in memory; where the system refuses that, through memory of our own."""
    try:
        move(_whole_pages)
    except OSError as error:
        if not direct or error.errno != errno.EINVAL:
            raise
        move(_nothing)


def _whole_pages(data: memoryview) -> int:
    return len(data) // PAGE_BYTES * PAGE_BYTES


def _nothing(data: memoryview) -> int:
    return 0


def _copy(to: memoryview, source: memoryview) -> None:
    """Copy bytes; large ones without holding the interpreter lock."""
    np.copyto(np.frombuffer(to, dtype=np.uint8)[: len(source)], np.frombuffer(source, dtype=np.uint8))


def _behind(parts: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the parts behind their first `done` bytes."""
    if done == sum(map(len, parts)):
        return []
    for i, part in enumerate(parts):
        if done < len(part):
            return [part[done:], *parts[i + 1 :]]
        done -= len(part)
    return []
