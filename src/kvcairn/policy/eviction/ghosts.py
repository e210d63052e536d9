"""Names of blocks that left: what a policy remembers of them to learn from their return."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcairn.policy.eviction.base import Names

_WAYS = 8
_MOST_LOAD = 3  # names a bucket, on average
_FIRST_BUCKETS = 64


class GhostQueue:
    """Names in the order in which they came, the oldest of which can be let go.

    A table of buckets holds the stamp of each name, a ring the names by stamp: typed arrays, nothing for the garbage
    collector. A bucket that is full forgets its oldest name: at this load that happens to about one in a thousand.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._count = self._last = self._first = 0  # the youngest stamp, and the one before the oldest
        self._make(_FIRST_BUCKETS)

    def __len__(self) -> int:
        """Number of names."""
        return self._count

    def holds(self, names: Names) -> npt.NDArray[np.bool_]:
        """Say of each name whether it is here."""
        bucket = (names & self._mask).astype(np.intp)
        is_it = (self._names[bucket] == names[:, None]) & (self._stamps[bucket] > 0)
        found: npt.NDArray[np.bool_] = is_it.any(axis=1)
        return found

    def push(self, names: Names) -> None:
        """Enter names that are not here, the first as the oldest of them."""
        if self._count + names.size > _MOST_LOAD * self._names.shape[0]:
            self._grow(self._count + names.size)
        for name in names:
            bucket = int(name & self._mask)
            way = int(self._stamps[bucket].argmin())
            self._count += int(self._stamps[bucket, way] == 0)
            self._last += 1
            self._names[bucket, way], self._stamps[bucket, way] = name, self._last
            self._ring[self._last % self._ring.size] = name
            if self._last - self._first >= self._ring.size:
                self._drop_oldest()

    def discard(self, names: Names) -> None:
        """Let names go; those that are not here are passed over."""
        for name in names[self.holds(names)]:
            bucket = int(name & self._mask)
            self._stamps[bucket][(self._names[bucket] == name) & (self._stamps[bucket] > 0)] = 0
            self._count -= 1

    def trim(self, count: int) -> None:
        """Let the oldest go until at most `count` are left."""
        while self._count > max(0, count):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Go one stamp on; let its name go if that is its stamp still."""
        self._first += 1
        name = self._ring[self._first % self._ring.size]
        bucket = int(name & self._mask)
        is_it = (self._names[bucket] == name) & (self._stamps[bucket] == self._first)
        if is_it.any():
            self._stamps[bucket][is_it] = 0
            self._count -= 1

    def _grow(self, count: int) -> None:
        kept = self._stamps > 0
        names = self._names[kept][np.argsort(self._stamps[kept])]
        buckets = self._names.shape[0]
        while count > _MOST_LOAD * buckets:
            buckets *= 2
        self._make(buckets)
        self._count = self._last = self._first = 0
        self.push(names)

    def _make(self, buckets: int) -> None:
        self._mask = np.uint64(buckets - 1)
        self._names: npt.NDArray[np.uint64] = np.zeros((buckets, _WAYS), dtype=np.uint64)
        self._stamps: npt.NDArray[np.int64] = np.zeros((buckets, _WAYS), dtype=np.int64)  # 0: nothing there
        self._ring: Names = np.zeros(buckets * _WAYS, dtype=np.uint64)
