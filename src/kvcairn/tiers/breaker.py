"""Switches a tier off after repeated failure, and lets a call through now and then to see whether it is back."""

from __future__ import annotations

FAILURES_TO_OPEN = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class Breaker:
    """Closed (all calls pass) until three failures in a row; then open for a pause that doubles with each failed try.

    Pure: the time is an argument. Owner thread only.
    """

    def __init__(self) -> None:
        """Start closed."""
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._retry_at_s = 0.0

    def is_open(self, now_s: float) -> bool:
        """Whether the tier counts as down; False once the pause is over, so that the next call tries it."""
        return self._failures >= FAILURES_TO_OPEN and now_s < self._retry_at_s

    def failed(self, now_s: float) -> None:
        """Note a failed call."""
        self._failures += 1
        if self._failures >= FAILURES_TO_OPEN and now_s >= self._retry_at_s:
            self._retry_at_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def succeeded(self) -> None:
        """Note a call that worked: the tier is back."""
        self._failures, self._pause_s, self._retry_at_s = 0, FIRST_PAUSE_S, 0.0
