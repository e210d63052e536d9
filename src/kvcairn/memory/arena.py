"""One shared mapping that all blocks in memory lie in."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from kvcairn.errors import ClosedError

POISON = 0xDB
_MADV_POPULATE_WRITE = 23  # Linux 5.14


class Arena:
    """A memfd, mapped: other processes can map it too and register it with a driver.

    `view` is a flat writable memoryview of bytes, `array` the same as numpy. Both stay valid as long as anyone
    refers to them, also after `close`.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Map `capacity_bytes`, a multiple of 4,096; no page is touched yet.

        Raises:
            OSError: the system refuses the mapping.
        """
        self.capacity_bytes = capacity_bytes
        self.fd = _memory_file(capacity_bytes)
        weakref.finalize(self, os.close, self.fd)  # not before: its number must not name another file meanwhile
        self._is_closed = False
        self._map = mmap.mmap(self.fd, capacity_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # of use where the host lets shared memory have huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def prefault(self, offset_bytes: int, nbytes: int) -> None:
        """Touch pages without changing them, so that the first store does not pay for it. Blocks, without the GIL."""
        address = self.array.ctypes.data + offset_bytes
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        libc.madvise(address, nbytes, _MADV_POPULATE_WRITE)  # a kernel that does not know it touches pages on demand

    def read(self, offset_bytes: int, nbytes: int) -> bytes:
        """Return a copy. Through the file, since making bytes from a view would hold the GIL.

        Raises:
            ClosedError: the arena is closed.
        """
        if self._is_closed:
            raise ClosedError("the cache is closed")
        return os.pread(self.fd, nbytes, offset_bytes)

    def poison(self, offset_bytes: int, nbytes: int) -> None:
        """Overwrite freed bytes, so that a reader of a freed slot cannot mistake them for a block."""
        self.array[offset_bytes : offset_bytes + nbytes] = POISON

    def close(self) -> None:
        """Refuse further reads; mapping and file go with the last view. Idempotent."""
        self._is_closed = True


def _memory_file(capacity_bytes: int) -> int:
    fd = os.memfd_create("kvcairn-arena", os.MFD_CLOEXEC)
    os.ftruncate(fd, capacity_bytes)
    return fd
