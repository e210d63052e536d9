"""Least recently used, leaf before parent."""

from __future__ import annotations

from collections.abc import Iterator

from kvcairn.policy.eviction.base import EvictionPolicy, Facts, Rows
from kvcairn.policy.eviction.queues import RowQueues


class LRU(EvictionPolicy):
    """Least recently used first."""

    def __init__(self, facts: Facts) -> None:
        """Start empty."""
        super().__init__(facts)
        self._queues = RowQueues(1)

    def add(self, rows: Rows, now_s: float) -> None:
        """Append the rows as the most recent ones."""
        self._queues.push(0, rows)

    def touch(self, rows: Rows, now_s: float) -> None:
        """Make the resident ones among the rows the most recent ones."""
        self._queues.push(0, self._queues.here(rows))

    def refresh(self, rows: Rows, now_s: float) -> None:
        """The same: recency is all that counts."""
        self.touch(rows, now_s)

    def remove(self, rows: Rows) -> None:
        """Forget the rows."""
        self._queues.remove(rows)

    def defer(self, rows: Rows) -> None:
        """Put them at the end: what is held is in use, and what has children is as recent as they are."""
        self._queues.push(0, self._queues.here(rows))

    def candidates(self) -> Iterator[int]:
        """Yield rows, the least recently used first."""
        return self._queues.oldest(0)

    def __len__(self) -> int:
        """Number of resident nodes."""
        return len(self._queues)
