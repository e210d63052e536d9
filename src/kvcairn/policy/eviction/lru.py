"""Least recently used, leaf before parent."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvcairn.policy.eviction.base import EvictionPolicy, Rows

_CHUNK = 256


class LRU(EvictionPolicy):
    """Least recently used first.

    A queue of (row, stamp) to which every touch appends; an entry counts only while its stamp is the row's latest.
    So a touch of any number of rows is a few array operations, and entries that have gone stale are dropped when
    the queue is full (amortised constant time for each touch). Within one touch the deepest block gets the oldest
    stamp.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._rows: npt.NDArray[np.int32] = np.zeros(1024, dtype=np.int32)
        self._stamps: npt.NDArray[np.int64] = np.zeros(1024, dtype=np.int64)
        self._head = self._tail = 0
        self._latest: npt.NDArray[np.int64] = np.zeros(1024, dtype=np.int64)  # by row; 0: not resident
        self._last_stamp = 0
        self._resident = 0

    def add(self, rows: Rows, now_s: float) -> None:
        """Append the rows as the most recent ones."""
        if rows.size == 0:
            return
        highest = int(rows.max())
        if highest >= self._latest.size:
            more = max(highest + 1, self._latest.size * 5 // 4) - self._latest.size
            self._latest = np.concatenate([self._latest, np.zeros(more, dtype=np.int64)])
        self._resident += rows.size
        self._append(rows)

    def touch(self, rows: Rows, now_s: float) -> None:
        """Make the resident ones among the rows the most recent ones."""
        known = rows[rows < self._latest.size]
        self._append(known[self._latest[known] > 0])

    def remove(self, rows: Rows) -> None:
        """Forget the rows; their entries in the queue go stale."""
        known = rows[rows < self._latest.size]
        resident = known[self._latest[known] > 0]
        self._latest[resident] = 0
        self._resident -= resident.size

    def candidates(self) -> Iterator[int]:
        """Yield rows from the oldest entry on, passing over stale ones."""
        at = self._head
        while at < self._tail:
            end = min(at + _CHUNK, self._tail)
            rows, stamps = self._rows[at:end], self._stamps[at:end]
            fresh = rows[self._latest[rows] == stamps]
            if fresh.size == 0 and at == self._head:
                self._head = end
            yield from fresh.tolist()
            at = end

    def __len__(self) -> int:
        """Number of resident nodes."""
        return self._resident

    def _append(self, rows: Rows) -> None:
        count = rows.size
        if self._tail + count > self._rows.size:
            self._make_space(count)
        stamps = np.arange(self._last_stamp + 1, self._last_stamp + count + 1)
        self._last_stamp += count
        self._rows[self._tail : self._tail + count] = rows[::-1]
        self._stamps[self._tail : self._tail + count] = stamps
        self._tail += count
        self._latest[rows[::-1]] = stamps

    def _make_space(self, count: int) -> None:
        """Drop stale entries; grow only when more than two thirds of the queue is alive."""
        rows, stamps = self._rows[self._head : self._tail], self._stamps[self._head : self._tail]
        fresh = self._latest[rows] == stamps
        rows, stamps = rows[fresh], stamps[fresh]
        size = max(self._rows.size, (rows.size + count) * 3 // 2)
        self._rows, self._stamps = np.zeros(size, dtype=np.int32), np.zeros(size, dtype=np.int64)
        self._rows[: rows.size], self._stamps[: rows.size] = rows, stamps
        self._head, self._tail = 0, rows.size
