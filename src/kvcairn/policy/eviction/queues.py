"""Queues of rows in typed arrays: what every order of eviction is made of."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvcairn.policy.eviction.base import Rows

_CHUNK = 256
_FIRST_ENTRIES = 1024


class RowQueues:
    """A fixed number of first-in, first-out queues; a row lies in one of them or in none.

    Each queue is an array of (row, stamp) to which every push appends; an entry counts only while its stamp is the
    row's latest. So pushing any number of rows is a few array operations, a row that moves on leaves a stale entry
    behind, and those are dropped when the array is full: amortised constant time for each push.

    Args:
        count: of queues, at most 32,767.
    """

    def __init__(self, count: int) -> None:
        """Start empty."""
        self.sizes = [0] * count
        self._entries: list[_Entries | None] = [None] * count
        self._latest: npt.NDArray[np.int64] = np.zeros(_FIRST_ENTRIES, dtype=np.int64)  # by row; 0: in no queue
        self._where: npt.NDArray[np.int16] = np.zeros(_FIRST_ENTRIES, dtype=np.int16)
        self._last_stamp = 0

    def __len__(self) -> int:
        """Rows in all queues."""
        return sum(self.sizes)

    def here(self, rows: Rows) -> Rows:
        """Return those of the rows that lie in a queue."""
        known = rows[rows < self._latest.size]
        return known[self._latest[known] > 0]

    def queue_of(self, rows: Rows) -> npt.NDArray[np.int16]:
        """Return the number of the queue of each of these rows; they must be `here`."""
        return self._where[rows]

    def push(self, queue: int, rows: Rows) -> None:
        """Put rows, each given once, at the end of a queue, wherever they lie now; the last of them first."""
        count = rows.size
        if count == 0:
            return
        self._grow(int(rows.max()) + 1)
        self._count_out(rows)
        entries = self._entries[queue]
        if entries is None:
            entries = self._entries[queue] = _Entries()
        stamps = np.arange(self._last_stamp + 1, self._last_stamp + count + 1)
        self._last_stamp += count
        entries.append(rows[::-1], stamps, self._latest)
        self._latest[rows[::-1]] = stamps
        self._where[rows] = queue
        self.sizes[queue] += count

    def push_each(self, queues: npt.NDArray[np.int16], rows: Rows) -> None:
        """Put each row at the end of the queue named for it; of those for one queue the last of them first."""
        for queue in np.unique(queues).tolist():
            self.push(queue, rows[queues == queue])

    def remove(self, rows: Rows) -> None:
        """Take rows out; those that are in no queue are passed over."""
        here = self.here(rows)
        self._count_out(here)
        self._latest[here] = 0

    def oldest(self, queue: int) -> Iterator[int]:
        """Yield the rows of a queue, the first to have come first. Stop reading before the next change."""
        entries = self._entries[queue]
        return iter(()) if entries is None else entries.alive(self._latest)

    def _count_out(self, rows: Rows) -> None:
        here = rows[self._latest[rows] > 0]
        if here.size == 0:
            return
        if len(self.sizes) == 1:
            self.sizes[0] -= here.size
            return
        for queue, count in zip(*np.unique(self._where[here], return_counts=True), strict=True):
            self.sizes[int(queue)] -= int(count)

    def _grow(self, rows: int) -> None:
        if rows > self._latest.size:
            more = max(rows, self._latest.size * 5 // 4) - self._latest.size
            self._latest = np.concatenate([self._latest, np.zeros(more, dtype=np.int64)])
            self._where = np.concatenate([self._where, np.zeros(more, dtype=np.int16)])


class _Entries:
    """The array of one queue; `latest` has the stamp that counts, by row."""

    def __init__(self) -> None:
        self._rows: npt.NDArray[np.int32] = np.zeros(_FIRST_ENTRIES, dtype=np.int32)
        self._stamps: npt.NDArray[np.int64] = np.zeros(_FIRST_ENTRIES, dtype=np.int64)
        self._head = self._tail = 0

    def append(self, rows: Rows, stamps: npt.NDArray[np.int64], latest: npt.NDArray[np.int64]) -> None:
        count = rows.size
        if self._tail + count > self._rows.size:
            self._make_space(count, latest)
        self._rows[self._tail : self._tail + count] = rows
        self._stamps[self._tail : self._tail + count] = stamps
        self._tail += count

    def alive(self, latest: npt.NDArray[np.int64]) -> Iterator[int]:
        at = self._head
        while at < self._tail:
            end = min(at + _CHUNK, self._tail)
            rows = self._rows[at:end]
            fresh = rows[latest[rows] == self._stamps[at:end]]
            if fresh.size == 0 and at == self._head:
                self._head = end
            yield from fresh.tolist()
            at = end

    def _make_space(self, count: int, latest: npt.NDArray[np.int64]) -> None:
        """Drop stale entries; grow only when more than two thirds of the array are alive."""
        rows, stamps = self._rows[self._head : self._tail], self._stamps[self._head : self._tail]
        fresh = latest[rows] == stamps
        rows, stamps = rows[fresh], stamps[fresh]
        size = max(_FIRST_ENTRIES, (rows.size + count) * 3 // 2, min(self._rows.size, (rows.size + count) * 4))
        self._rows, self._stamps = np.zeros(size, dtype=np.int32), np.zeros(size, dtype=np.int64)
        self._rows[: rows.size], self._stamps[: rows.size] = rows, stamps
        self._head, self._tail = 0, rows.size
