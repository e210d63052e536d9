"""How long a thread keeps the others from running, seen by the clock of another thread."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

SWITCH_S: Final = 1e-5


class Watch:
    """A thread that reads the clock over and over; its longest gap is how long it was not let run."""

    def __init__(self) -> None:
        """Start and wait until it ticks."""
        self._longest_ns = 0
        self._is_asked = True  # the thread answers by setting it to False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="kvcairn-bench-watch", daemon=True)
        self._thread.start()
        self._ask()

    def longest_gap_ns(self, work: Callable[[], object]) -> int:
        """Run `work` and return the longest gap meanwhile."""
        self._ask()
        made = work()
        longest_ns = self._ask()
        del made  # to free it takes long, and is no part of the work
        return longest_ns

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._thread.join()

    def _ask(self) -> int:
        """Return the longest gap since the last time."""
        self._is_asked = True
        while self._is_asked:
            time.sleep(0)
        return self._longest_ns

    def _run(self) -> None:
        last, longest_ns = time.perf_counter_ns(), 0
        while not self._stopped:
            is_asked = self._is_asked  # before the clock, so that the gap that ends now is in the answer
            now = time.perf_counter_ns()
            longest_ns = max(longest_ns, now - last)
            last = now
            if is_asked:
                self._longest_ns, longest_ns = longest_ns, 0
                self._is_asked = False


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Give a watch, with the interpreter asked to switch threads every 0.01 ms.

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


@contextlib.contextmanager
def first_in_line() -> Iterator[None]:
    """Let this thread, and those that it starts, run before all ordinary ones; as before where that is not allowed.

    Left out on a single processor, where two such threads would only wait for each other.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    if len(os.sched_getaffinity(0)) > 1:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)
