"""Adaptive replacement cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvcairn.policy.eviction.base import EvictionPolicy, Facts, Names, Rows
from kvcairn.policy.eviction.ghosts import GhostQueue
from kvcairn.policy.eviction.queues import RowQueues

_RECENT, _FREQUENT = 0, 1


class ARC(EvictionPolicy):
    """Balances what was used once against what was used again, by the returns of what it let go.

    N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, section 3, figure 4.
    T1 and T2 are queues of rows, B1 and B2 of names. Two things differ. Room is made before the new blocks are known,
    so REPLACE does not look at whether the next one is in B2. The size of the cache is the number of blocks that it
    held when it last had to let one go, since tiers are bounded by bytes.
    """

    def __init__(self, facts: Facts) -> None:
        """Start empty."""
        super().__init__(facts)
        self._queues = RowQueues(2)  # T1, T2
        self._ghosts = (GhostQueue(), GhostQueue())  # B1, B2
        self._target = 0.0  # p: how large T1 should be
        self._capacity = 0  # c

    def add(self, rows: Rows, now_s: float) -> None:
        """Append new ones to T1, those that left not long ago to T2; these adapt the target."""
        names = self._facts.names(rows)
        back = [ghosts.holds(names) if len(ghosts) else np.zeros(rows.size, dtype=np.bool_) for ghosts in self._ghosts]
        for which in (_RECENT, _FREQUENT):
            if back[which].any():
                self._adapt(which, names[back[which]])
        known = back[_RECENT] | back[_FREQUENT]
        self._queues.push(_FREQUENT, rows[known])
        self._queues.push(_RECENT, rows[~known])

    def touch(self, rows: Rows, now_s: float) -> None:
        """Move the resident ones to T2."""
        self._queues.push(_FREQUENT, self._queues.here(rows))

    def refresh(self, rows: Rows, now_s: float) -> None:
        """Make them the most recent ones of the queue that they lie in."""
        self.defer(rows)

    def remove(self, rows: Rows) -> None:
        """Forget the rows."""
        self._queues.remove(rows)

    def evict(self, rows: Rows) -> None:
        """Forget the rows and remember their names."""
        here = self._queues.here(rows)
        self._capacity = len(self._queues)
        queues = self._queues.queue_of(here)
        names = self._facts.names(here)
        self._queues.remove(here)
        for which, ghosts in enumerate(self._ghosts):
            ghosts.push(names[queues == which])
        self._ghosts[_RECENT].trim(self._capacity - self._queues.sizes[_RECENT])
        self._ghosts[_FREQUENT].trim(2 * self._capacity - len(self._queues) - len(self._ghosts[_RECENT]))

    def defer(self, rows: Rows) -> None:
        """Put them at the end of the queue that they lie in."""
        here = self._queues.here(rows)
        self._queues.push_each(self._queues.queue_of(here), here)

    def candidates(self) -> Iterator[int]:
        """Yield from T1 while it is larger than its target, else from T2."""
        recent, frequent = (self._queues.oldest(queue) for queue in (_RECENT, _FREQUENT))
        for _ in range(self._queues.sizes[_RECENT] - int(self._target)):
            yield next(recent)
        yield from frequent
        yield from recent

    def __len__(self) -> int:
        """Number of resident nodes."""
        return len(self._queues)

    def _adapt(self, which: int, names: Names) -> None:
        """Blocks of B1 (B2) came back: T1 should have been larger (smaller)."""
        sizes = [max(1, len(ghosts)) for ghosts in self._ghosts]
        step = max(1.0, sizes[1 - which] / sizes[which]) * names.size
        self._target += step if which == _RECENT else -step
        self._target = min(max(self._target, 0.0), float(self._capacity))
        self._ghosts[which].discard(names)
