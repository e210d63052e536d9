"""Three queues: a small one that new blocks must pass, a main one, and names of those that did not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvcairn.policy.eviction.base import EvictionPolicy, Facts, Rows
from kvcairn.policy.eviction.ghosts import GhostQueue
from kvcairn.policy.eviction.queues import RowQueues

_SMALL, _MAIN = 0, 1
_SMALL_FRACTION = 0.1
_MOST_USES = 3


class S3FIFO(EvictionPolicy):
    """Quick demotion: a block that is not used again while it is in the small queue goes.

    J. Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023, section 4, algorithm 1. The size of
    the cache is the number of blocks that it held when it last had to let one go, since tiers are bounded by bytes.
    """

    def __init__(self, facts: Facts) -> None:
        """Start empty."""
        super().__init__(facts)
        self._queues = RowQueues(2)
        self._ghosts = GhostQueue()
        self._uses: npt.NDArray[np.uint8] = np.zeros(1024, dtype=np.uint8)  # by row: uses since it came or moved
        self._capacity = 0
        self._met: list[int] = []  # passed on the way to the candidates read last, in order

    def add(self, rows: Rows, now_s: float) -> None:
        """Append new ones to the small queue, those that left it not long ago to the main one."""
        if rows.size == 0:
            return
        self._grow(int(rows.max()) + 1)
        self._uses[rows] = 0
        names = self._facts.names(rows)
        known = self._ghosts.holds(names)
        self._ghosts.discard(names[known])
        self._queues.push(_MAIN, rows[known])
        self._queues.push(_SMALL, rows[~known])

    def touch(self, rows: Rows, now_s: float) -> None:
        """Count a use; no queue changes."""
        here = self._queues.here(rows)
        self._uses[here] = np.minimum(self._uses[here] + 1, _MOST_USES)

    def remove(self, rows: Rows) -> None:
        """Forget the rows."""
        self._queues.remove(rows)

    def evict(self, rows: Rows) -> None:
        """Forget the rows, remember the names of those from the small queue, and move what was passed on the way."""
        here = self._queues.here(rows)
        self._capacity = len(self._queues)
        self._ghosts.push(self._facts.names(here[self._queues.queue_of(here) == _SMALL])[::-1])
        self._ghosts.trim(self._capacity - int(_SMALL_FRACTION * self._capacity))
        self._queues.remove(here)
        met, self._met = np.array(self._met, dtype=np.intp), []
        self._move_on(self._queues.here(met))

    def defer(self, rows: Rows) -> None:
        """Put them at the end of the queue that they lie in."""
        here = self._queues.here(rows)
        self._queues.push_each(self._queues.queue_of(here), here)

    def candidates(self) -> Iterator[int]:
        """Yield unused ones from the small queue while it is too large, else from the main one; then the used ones."""
        met: list[int] = []
        self._met = met
        small = self._unused(_SMALL, 1, met)
        main = self._unused(_MAIN, 0, met)
        left, least = self._queues.sizes[_SMALL], int(_SMALL_FRACTION * self._capacity)
        while left - len(met) > least and (row := next(small, None)) is not None:
            yield row
            left -= 1
        yield from main
        yield from small
        used = np.array(met, dtype=np.intp)
        yield from used[np.argsort(self._uses[used], kind="stable")].tolist()

    def __len__(self) -> int:
        """Number of resident nodes."""
        return len(self._queues)

    def _unused(self, queue: int, most: int, met: list[int]) -> Iterator[int]:
        """Yield rows of a queue with at most so many uses; put the others on the list."""
        for row in self._queues.oldest(queue):
            if self._uses[row] <= most:
                yield row
            else:
                met.append(row)

    def _move_on(self, met: Rows) -> None:
        """Those of the small queue go over to the main one; those of the main one are queued again for one use."""
        if met.size:
            from_main = self._queues.queue_of(met) == _MAIN
            self._uses[met] = np.where(from_main, self._uses[met] - 1, 0)
            self._queues.push(_MAIN, met[::-1])

    def _grow(self, rows: int) -> None:
        if rows > self._uses.size:
            more = max(rows, self._uses.size * 5 // 4) - self._uses.size
            self._uses = np.concatenate([self._uses, np.zeros(more, dtype=np.uint8)])
