"""One shared mapping that all blocks in memory lie in."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from kvcairn.errors import ClosedError

POISON = 0xDB
_MADV_POPULATE_WRITE = 23  # Linux 5.14


class Arena:
    """A memfd, mapped: other processes can map it too and register it with a driver.

    `view` is a flat writable memoryview of bytes, `array` the same as numpy. What was cut from them stays valid as
    long as anyone refers to it, also after `close`.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Map `capacity_bytes`, a multiple of 4,096; no page is touched yet.

        Raises:
            OSError: the system refuses the mapping.
        """
        self.capacity_bytes = capacity_bytes
        self.fd = _memory_file(capacity_bytes)
        self._map = mmap.mmap(self.fd, capacity_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # of use where the host lets shared memory have huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self._guard = threading.Lock()
        self._readers = 0  # of the file, whose number must not name another one before they are done
        self._is_closed = False

    def prefault(self, offset_bytes: int, nbytes: int) -> None:
        """Touch pages without changing them, so that the first store does not pay for it. Blocks, without the GIL."""
        touch_pages(self.array, offset_bytes, nbytes)

    def read(self, offset_bytes: int, nbytes: int) -> bytes:
        """Return a copy. Through the file, since making bytes from a view would hold the GIL.

        Raises:
            ClosedError: the arena is closed.
        """
        with self._guard:
            if self._is_closed:
                raise ClosedError("the cache is closed")
            self._readers += 1
        try:
            return os.pread(self.fd, nbytes, offset_bytes)
        finally:
            with self._guard:
                self._readers -= 1
                self._close_file()

    def poison(self, offset_bytes: int, nbytes: int) -> None:
        """Overwrite freed bytes, so that a reader of a freed slot cannot mistake them for a block."""
        self.array[offset_bytes : offset_bytes + nbytes] = POISON

    def close(self) -> None:
        """Let go: the file goes with its last reader, the mapping with the last view anybody has. Idempotent."""
        with self._guard:
            if self._is_closed:
                return
            self._is_closed = True
            self._close_file()
        self.array = np.empty(0, dtype=np.uint8)
        self.view = memoryview(b"")
        with suppress(BufferError):
            self._map.close()
        del self._map

    def _close_file(self) -> None:
        if self._is_closed and not self._readers and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def touch_pages(memory: npt.NDArray[np.uint8], offset_bytes: int, nbytes: int) -> None:
    """Have pages of a mapping made, and mapped, without changing them. Blocks, without the GIL."""
    if not memory.size:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # A kernel that does not know it touches pages on demand.
    libc.madvise(memory.ctypes.data + offset_bytes, nbytes, _MADV_POPULATE_WRITE)


def _memory_file(capacity_bytes: int) -> int:
    fd = os.memfd_create("kvcairn-arena", os.MFD_CLOEXEC)
    os.ftruncate(fd, capacity_bytes)
    return fd
