"""Time as an argument: the monotonic clock, and a virtual one for tests and replay."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from an arbitrary start, never going back."""

    def now(self) -> float:
        """Return the present in seconds."""
        ...


class MonotonicClock:
    """The clock of the operating system."""

    def now(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to. Not thread-safe: for single-threaded tests and replay."""

    def __init__(self, start_s: float = 0.0) -> None:
        """Start at `start_s` seconds."""
        self._now = start_s

    def now(self) -> float:
        """Return the virtual present in seconds."""
        return self._now

    def advance(self, by_s: float) -> None:
        """Move on by `by_s` seconds.

        Raises:
            ValueError: `by_s` is negative; the clock stays where it was.
        """
        if by_s < 0:
            raise ValueError(f"a clock cannot go back by {-by_s} s")
        self._now += by_s
