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
_PASSED_AT_ONCE = 4096  # used rows in a row, after which the least used of them has to do
_NONE: Rows = np.zeros(0, dtype=np.intp)


class S3FIFO(EvictionPolicy):
    """Quick demotion: a block that is not used again while it is in the small queue goes.

    J. Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023, section 4, algorithm 1. The size of
    the cache is the number of blocks that it held when it last had to let one go, since tiers are bounded by bytes.
    Where the algorithm would go round the whole main queue to find a block without uses, the least used of the next
    4,096 is taken; all of them have one use less then, so the next eviction looks at others.
    """

    def __init__(self, facts: Facts) -> None:
        """Start empty."""
        super().__init__(facts)
        self._queues = RowQueues(2)
        self._ghosts = GhostQueue()
        self._uses: npt.NDArray[np.uint8] = np.zeros(1024, dtype=np.uint8)  # by row: uses since it came or moved
        self._capacity = 0
        self._walks: tuple[_Walk, ...] = ()  # to the candidates read last

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
        walks, self._walks = self._walks, ()
        for walk in walks:
            self._move_on(self._queues.here(walk.passed()))

    def defer(self, rows: Rows) -> None:
        """Put them at the end of the queue that they lie in."""
        here = self._queues.here(rows)
        self._queues.push_each(self._queues.queue_of(here), here)

    def candidates(self) -> Iterator[int]:
        """Yield unused ones from the small queue while it is too large, else from the main one; then the used ones."""
        small = _Walk(self._queues.chunks(_SMALL), self._uses, 1)
        main = _Walk(self._queues.chunks(_MAIN), self._uses, 0)
        self._walks = (small, main)
        size, least = self._queues.sizes[_SMALL], int(_SMALL_FRACTION * self._capacity)
        while size - small.met > least and (row := next(small.rows, None)) is not None:
            yield row
        yield from main.rows
        yield from small.rows
        yield from small.left()
        yield from main.left()

    def __len__(self) -> int:
        """Number of resident nodes."""
        return len(self._queues)

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


class _Walk:
    """A walk along one queue: yields the rows with at most so many uses, and remembers which others it passed.

    Attributes:
        rows: to be read from.
        met: rows yielded and passed.
    """

    def __init__(self, chunks: Iterator[Rows], uses: npt.NDArray[np.uint8], most: int) -> None:
        self._uses, self._most = uses, most
        self._passed: list[Rows] = []
        self._skipped: list[Rows] = []  # those of them that were not yielded
        self.met = 0
        self.rows = self._walk(chunks)

    def passed(self) -> Rows:
        """Return the rows with more uses that were met, in order."""
        return np.concatenate([_NONE, *self._passed])

    def left(self) -> Iterator[int]:
        """Yield those that were passed and not yielded, the least used first."""
        skipped = np.concatenate([_NONE, *self._skipped])
        self._skipped = []
        yield from skipped[np.argsort(self._uses[skipped], kind="stable")].tolist()

    def _walk(self, chunks: Iterator[Rows]) -> Iterator[int]:
        in_a_row = 0
        for chunk in chunks:
            begin = 0
            for at in np.flatnonzero(self._uses[chunk] <= self._most).tolist():
                self._pass(chunk[begin:at])
                begin, in_a_row = at + 1, 0
                self.met += 1
                yield int(chunk[at])
            self._pass(chunk[begin:])
            in_a_row += chunk.size - begin
            if in_a_row >= _PASSED_AT_ONCE:
                yield from self.left()
                in_a_row = 0

    def _pass(self, rows: Rows) -> None:
        if rows.size:
            self._passed.append(rows)
            self._skipped.append(rows)
            self.met += rows.size
