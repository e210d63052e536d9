"""How long a thread keeps the others from running, seen by the clock of another thread."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

SWITCH_S: Final = 1e-4


class Watch:
    """A thread that reads the clock over and over; its longest gap is how long it was not let run."""

    def __init__(self) -> None:
        """Start and wait until it ticks."""
        self._longest_ns = self._ticks = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="kvcairn-bench-watch", daemon=True)
        self._thread.start()
        while not self._ticks:
            time.sleep(0.001)

    def longest_gap_ns(self, work: Callable[[], object]) -> int:
        """Run `work` and return the longest gap meanwhile."""
        self._wait_for_tick()
        self._longest_ns = 0
        made = work()
        self._wait_for_tick()
        longest_ns = self._longest_ns
        del made  # to free it takes long, and is no part of the work
        return longest_ns

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._thread.join()

    def _wait_for_tick(self) -> None:
        ticks = self._ticks
        while self._ticks == ticks:
            time.sleep(0)

    def _run(self) -> None:
        last = time.perf_counter_ns()
        while not self._stopped:
            now = time.perf_counter_ns()
            self._longest_ns = max(self._longest_ns, now - last)
            last = now
            self._ticks += 1


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Give a watch, with the interpreter asked to switch threads every 0.1 ms.

    At that interval a gap beyond it is one call that did not let go, not merely a thread that was computing.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    watch = Watch()
    try:
        yield watch
    finally:
        watch.stop()
        sys.setswitchinterval(before)
