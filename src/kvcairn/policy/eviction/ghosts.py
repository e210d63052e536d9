"""Names of blocks that left: what a policy remembers of them to learn from their return."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from kvcairn.policy.eviction.base import Names

_WAYS = 8
_MOST_LOAD = 3  # names a bucket, on average
_FIRST_BUCKETS = 64
_GROWTH = 2
_TRIMMED_AT_ONCE = 16_384  # stamps


class GhostQueue:
    """Names in the order in which they came, the oldest of which can be let go.

    A list of tables, the oldest first. When the last one is full a larger one is begun, and those before it empty
    as their names are let go, so that no call has to move what is here to another place.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._tables = [_Table(_FIRST_BUCKETS)]

    def __len__(self) -> int:
        """Number of names."""
        return sum(table.count for table in self._tables)

    def holds(self, names: Names) -> npt.NDArray[np.bool_]:
        """Say of each name whether it is here."""
        found = np.zeros(names.size, dtype=np.bool_)
        for table in self._tables:
            if table.count:
                found |= table.holds(names)
        return found

    def push(self, names: Names) -> None:
        """Enter names that are not here, the first as the oldest of them."""
        last = self._tables[-1]
        if last.count + names.size > _MOST_LOAD * last.buckets:
            buckets = last.buckets
            while last.count + names.size > _MOST_LOAD * buckets:
                buckets *= _GROWTH
            last = _Table(buckets)
            self._tables.append(last)
        last.push(names)

    def discard(self, names: Names) -> None:
        """Let names go; those that are not here are passed over."""
        for table in self._tables:
            if table.count:
                table.discard(names)

    def trim(self, count: int) -> None:
        """Let the oldest go until at most `count` are left; where that is very many, the rest at the next calls."""
        excess = len(self) - max(0, count)
        left = _TRIMMED_AT_ONCE
        while excess > 0 and left > 0:
            if len(self._tables) > 1 and self._tables[0].count == 0:
                del self._tables[0]
                continue
            stamps = min(excess, left)
            excess -= self._tables[0].drop_oldest(stamps)
            left -= stamps


class _Table:
    """Names by bucket with their stamps, and by stamp in a ring: typed arrays, nothing for the garbage collector.

    A bucket that is full forgets its oldest name: at the load that is kept that happens to about one in a thousand.
    """

    def __init__(self, buckets: int) -> None:
        self.count = 0
        self._last = self._first = 0  # the youngest stamp, and the one before the oldest
        self._mask = np.uint64(buckets - 1)
        self._names: Names = _zeros(buckets * _WAYS).reshape(buckets, _WAYS)
        self._stamps = _zeros(buckets * _WAYS).view(np.int64).reshape(buckets, _WAYS)  # 0: nothing there
        self._ring: Names = _zeros(buckets * _WAYS)

    @property
    def buckets(self) -> int:
        return int(self._names.shape[0])

    def holds(self, names: Names) -> npt.NDArray[np.bool_]:
        bucket = (names & self._mask).astype(np.intp)
        found: npt.NDArray[np.bool_]
        found = ((self._names[bucket] == names[:, None]) & (self._stamps[bucket] > 0)).any(axis=1)
        return found

    def push(self, names: Names) -> None:
        for name in names:
            bucket = int(name & self._mask)
            way = int(self._stamps[bucket].argmin())
            self.count += int(self._stamps[bucket, way] == 0)
            self._last += 1
            self._names[bucket, way], self._stamps[bucket, way] = name, self._last
            self._ring[self._last % self._ring.size] = name
            if self._last - self._first >= self._ring.size:
                self.drop_oldest(1)

    def discard(self, names: Names) -> None:
        for name in names[self.holds(names)]:
            bucket = int(name & self._mask)
            self._stamps[bucket][(self._names[bucket] == name) & (self._stamps[bucket] > 0)] = 0
            self.count -= 1

    def drop_oldest(self, stamps: int) -> int:
        """Go so many stamps on; let those names go that have these stamps still, and return how many."""
        dropped = np.arange(self._first + 1, min(self._first + stamps, self._last) + 1)
        self._first += dropped.size
        names = self._ring[dropped % self._ring.size]
        bucket = (names & self._mask).astype(np.intp)
        which, way = np.nonzero((self._names[bucket] == names[:, None]) & (self._stamps[bucket] == dropped[:, None]))
        self._stamps[bucket[which], way] = 0
        self.count -= which.size
        return which.size


def _zeros(count: int) -> Names:
    """Return zeros whose memory is taken page by page as it is written.

    numpy asks for huge pages for large arrays; the first names of a large table would wait for much of it to be zeroed.
    """
    return np.frombuffer(mmap.mmap(-1, 8 * count), dtype=np.uint64)
