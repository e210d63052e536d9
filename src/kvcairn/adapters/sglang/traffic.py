"""What was moved between SGLang and the cache, as SGLang's own metrics want it."""

from __future__ import annotations

from collections import deque
from typing import Any

from sglang.srt.observability.metrics_collector import StorageMetrics

_KEPT_CALLS = 4096  # where nobody takes them


class Traffic:
    """Pages and bandwidth of each call since they were last taken. Any thread: a deque needs no lock."""

    def __init__(self) -> None:
        """Nothing moved yet."""
        self._loaded: deque[tuple[int, float]] = deque(maxlen=_KEPT_CALLS)
        self._stored: deque[tuple[int, float]] = deque(maxlen=_KEPT_CALLS)

    def loaded(self, pages: int, page_bytes: int, took_s: float) -> None:
        """Note a load."""
        _note(self._loaded, pages, page_bytes, took_s)

    def stored(self, pages: int, page_bytes: int, took_s: float) -> None:
        """Note a store."""
        _note(self._stored, pages, page_bytes, took_s)

    def take(self) -> Any:
        """Return what was noted, in pages and GB/s, and begin anew."""
        metrics = StorageMetrics()
        for calls, pages, bandwidth in (
            (self._loaded, metrics.prefetch_pgs, metrics.prefetch_bandwidth),
            (self._stored, metrics.backup_pgs, metrics.backup_bandwidth),
        ):
            while calls:
                moved, gb_per_s = calls.popleft()
                pages.append(moved)
                bandwidth.append(gb_per_s)
        return metrics


def _note(calls: deque[tuple[int, float]], pages: int, page_bytes: int, took_s: float) -> None:
    if pages:
        calls.append((pages, pages * page_bytes / 1e9 / max(took_s, 1e-9)))
