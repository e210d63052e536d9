"""Queues of rows in typed arrays: what every order of eviction is made of."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvcairn.policy.eviction.base import Rows

_FIRST_ROWS = 1024
_CHUNK = 256  # entries looked at first; twice as many each time after that
_SEGMENT = 4096  # entries
_FIRST_SEGMENT = 256
_TIDIED_EACH = 2  # entries looked at for each one that is pushed


class RowQueues:
    """A fixed number of first-in, first-out queues; a row lies in one of them or in none.

    Each queue is a list of arrays of (row, stamp) to which every push appends; an entry counts only while its stamp
    is the row's latest. So pushing any number of rows is a few array operations, and a row that moves on leaves a
    stale entry behind. Each push looks for stale entries in proportion to what it appends, so that no call has to
    look at the whole queue, and a queue has at most about twice as many entries as rows.

    Args:
        count: of queues, at most 32,767.
    """

    def __init__(self, count: int) -> None:
        """Start empty."""
        self.sizes = [0] * count
        self._entries: list[_Entries | None] = [None] * count
        self._latest: npt.NDArray[np.int64] = np.zeros(_FIRST_ROWS, dtype=np.int64)  # by row; 0: in no queue
        self._where: npt.NDArray[np.int16] = np.zeros(_FIRST_ROWS, dtype=np.int16)
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
        self._latest[rows[::-1]] = stamps
        entries.append(rows[::-1], stamps, self._latest)
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
        for chunk in self.chunks(queue):
            yield from chunk.tolist()

    def chunks(self, queue: int) -> Iterator[Rows]:
        """Yield the same rows as arrays, small ones first. Stop reading before the next change."""
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
    """The entries of one queue, in segments; `latest` has the stamp that counts, by row."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._tidied = 0  # number of the segment to be looked at next
        self._owed = 0  # entries to be looked at

    def __len__(self) -> int:
        return sum(segment.end - segment.begin for segment in self._segments)

    def append(self, rows: Rows, stamps: npt.NDArray[np.int64], latest: npt.NDArray[np.int64]) -> None:
        done = 0
        while done < rows.size:
            if not self._segments or self._segments[-1].space == 0:
                self._segments.append(_Segment(_SEGMENT if self._segments else _FIRST_SEGMENT))
            done += self._segments[-1].fill(rows[done:], stamps[done:])
        self._owed += _TIDIED_EACH * rows.size
        while self._owed >= _SEGMENT:
            self._owed -= max(self._tidy(latest), _SEGMENT // 2)

    def alive(self, latest: npt.NDArray[np.int64]) -> Iterator[Rows]:
        size, is_head = _CHUNK, True
        for segment in tuple(self._segments):
            at = segment.begin
            while at < segment.end:
                end = min(at + size, segment.end)
                rows = segment.rows[at:end]
                fresh = rows[latest[rows] == segment.stamps[at:end]]
                if fresh.size:
                    is_head = False
                    yield fresh.astype(np.intp)
                elif is_head:
                    segment.begin = end
                at, size = end, min(2 * size, _SEGMENT)
            if is_head and self._segments[:1] == [segment]:
                self._drop(0)

    def _tidy(self, latest: npt.NDArray[np.int64]) -> int:
        """Drop the stale entries of one segment; put what is left into the one before where it fits.

        Returns the number of entries looked at.
        """
        number = self._tidied if self._tidied < len(self._segments) else 0
        self._tidied = number + 1
        segment = self._segments[number]
        looked_at = segment.end - segment.begin
        segment.keep(latest)
        before = self._segments[number - 1] if number else None
        if segment.begin == segment.end or (before is not None and before.takes(segment)):
            self._drop(number)
        return looked_at

    def _drop(self, number: int) -> None:
        del self._segments[number]
        self._tidied -= number < self._tidied


class _Segment:
    """Entries in an array, from `begin` to `end`."""

    __slots__ = ("begin", "end", "rows", "stamps")

    def __init__(self, size: int) -> None:
        self.rows: npt.NDArray[np.int32] = np.empty(size, dtype=np.int32)
        self.stamps: npt.NDArray[np.int64] = np.empty(size, dtype=np.int64)
        self.begin = self.end = 0

    @property
    def space(self) -> int:
        return self.rows.size - self.end

    def fill(self, rows: npt.NDArray[np.signedinteger], stamps: npt.NDArray[np.int64]) -> int:
        """Append as many as there is space for; return how many."""
        count = min(rows.size, self.space)
        self.rows[self.end : self.end + count] = rows[:count]
        self.stamps[self.end : self.end + count] = stamps[:count]
        self.end += count
        return count

    def keep(self, latest: npt.NDArray[np.int64]) -> None:
        """Move the entries that count to the beginning, and forget the others."""
        rows, stamps = self.rows[self.begin : self.end], self.stamps[self.begin : self.end]
        fresh = latest[rows] == stamps
        rows, stamps = rows[fresh], stamps[fresh]
        self.begin = self.end = 0
        self.fill(rows, stamps)

    def takes(self, other: _Segment) -> bool:
        """Append all of another one if there is space for it."""
        if self.space < other.end - other.begin:
            return False
        self.fill(other.rows[other.begin : other.end], other.stamps[other.begin : other.end])
        return True
