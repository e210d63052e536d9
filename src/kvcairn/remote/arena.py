"""The arena of a daemon, as a client maps it."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Final

import numpy as np

from kvcairn.errors import ClosedError
from kvcairn.memory.mapping import map_shared, touch_pages

_STEP_BYTES: Final = 64 << 20


class SharedArena:
    """The arena of another process. A fork of this one has no part in it. It goes with the last who refers to it.

    `view` is flat writable bytes; what was cut from it stays valid as long as anyone refers to it.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map the file; `fd` belongs to this object from here on.

        Raises:
            OSError, ValueError: it cannot be mapped, or is smaller than that.
        """
        self._fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)
        # Not in forks: a child must not write to slots that its parent gave back.
        self.view = map_shared(fd, nbytes, in_forks=False)
        self._guard = threading.Lock()
        self._readers = 0
        self._is_closed = False

    def prefault(self) -> None:
        """Map all pages, on a thread, so that the first copies do not pay for it. For an arena whose pages are made."""
        threading.Thread(target=self._touch, name="kvcairn-prefault", daemon=True).start()

    def _touch(self) -> None:
        memory = np.frombuffer(self.view, dtype=np.uint8)  # keeps the mapping
        for begin in range(0, memory.size, _STEP_BYTES):
            if self._is_closed:
                return
            touch_pages(memory, begin, min(_STEP_BYTES, memory.size - begin))

    def read(self, begin: int, nbytes: int) -> bytes:
        """Return a copy, without the GIL.

        Raises:
            ClosedError: the link is closed.
        """
        with self._guard:
            if self._is_closed:
                raise ClosedError("the connection to the daemon is closed")
            self._readers += 1
        try:
            return os.pread(self._fd, nbytes, begin)
        finally:
            with self._guard:
                self._readers -= 1
                self._close_file()

    def close(self) -> None:
        """Let go: the mapping goes with the last view anybody has. Idempotent."""
        with self._guard:
            if self._is_closed:
                return
            self._is_closed = True
            self._close_file()
        self.view = memoryview(b"")

    def _close_file(self) -> None:
        if self._is_closed and not self._readers:
            self._close_fd()
