"""By hinted priority, then least recently used."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvcairn.policy.eviction.base import EvictionPolicy, Facts, Rows
from kvcairn.policy.eviction.queues import RowQueues

_LEVELS = 101  # priorities 0 to 100


class Priority(EvictionPolicy):
    """The lowest priority first; among equals the least recently used. Without hints it is `lru`.

    A block before others is worth as much as the best of them, so a child never outlives its parent for its own
    priority: the caller's rule that leaves go first sees to that.
    """

    def __init__(self, facts: Facts) -> None:
        """Start empty."""
        super().__init__(facts)
        self._queues = RowQueues(_LEVELS)

    def add(self, rows: Rows, now_s: float) -> None:
        """Append the rows as the most recent ones of their priority."""
        priorities = np.minimum(self._facts.priorities(rows), _LEVELS - 1).astype(np.int16)
        self._queues.push_each(priorities, rows)

    def touch(self, rows: Rows, now_s: float) -> None:
        """Make the resident ones the most recent ones of their priority."""
        self.add(self._queues.here(rows), now_s)

    def refresh(self, rows: Rows, now_s: float) -> None:
        """The same: a use is recency here."""
        self.touch(rows, now_s)

    def hint(self, rows: Rows, ends_session: bool, now_s: float) -> None:
        """Move the resident ones to their new priority."""
        self.touch(rows, now_s)

    def remove(self, rows: Rows) -> None:
        """Forget the rows."""
        self._queues.remove(rows)

    def defer(self, rows: Rows) -> None:
        """Put them behind those of the same priority."""
        here = self._queues.here(rows)
        self._queues.push_each(self._queues.queue_of(here), here)

    def candidates(self) -> Iterator[int]:
        """Yield rows by priority, the least recently used first among equals."""
        for queue, size in enumerate(self._queues.sizes):
            if size:
                yield from self._queues.oldest(queue)

    def __len__(self) -> int:
        """Number of resident nodes."""
        return len(self._queues)
