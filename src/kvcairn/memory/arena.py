"""One shared mapping that all blocks in memory lie in."""

from __future__ import annotations

import os
import threading

import numpy as np
import numpy.typing as npt

from kvcairn.errors import ClosedError
from kvcairn.memory.mapping import map_shared, touch_pages

POISON = 0xDB


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
        self.view = map_shared(self.fd, capacity_bytes, in_forks=True)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self.view, dtype=np.uint8)
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

    def _close_file(self) -> None:
        if self._is_closed and not self._readers and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _memory_file(capacity_bytes: int) -> int:
    fd = os.memfd_create("kvcairn-arena", os.MFD_CLOEXEC)
    os.ftruncate(fd, capacity_bytes)
    return fd
