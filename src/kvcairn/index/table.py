"""From key to row, for many keys at once: buckets of fingerprints in typed arrays, checked against the whole key.

A dict of a million keys costs four dependent cache misses a key and 150 bytes; here the misses of all keys of a call
overlap, and nothing is there for the garbage collector. Keys are hashes already, so their own bits choose the bucket.
What fits no bucket (about one key in ten thousand, or keys that are not hashes) lies in a dict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcairn.index.arrays import Rows

WAYS = 8  # one bucket of fingerprints is 32 bytes, half a cache line
MOST_LOAD = 2.5  # rows a bucket, on average; then the table doubles
_FIRST_BUCKETS = 16
_PART_KEYS = 4096


class KeyTable:
    """Rows by key. `column` returns the keys of all rows, shape (rows, 32), as they are now."""

    def __init__(self, column: Any) -> None:
        """Start empty."""
        self._column = column
        self._count = 0
        self._make(_FIRST_BUCKETS)

    def __len__(self) -> int:
        """Number of keys."""
        return self._count

    def find(self, keys: Sequence[bytes]) -> Rows:
        """Return the row of each key, -1 where it is not known."""
        if not keys:
            return np.empty(0, dtype=np.intp)
        joined = b"".join(keys)
        words = np.frombuffer(joined, dtype="<u4").reshape(-1, 8)
        bucket = (words[:, 0] & self._mask).astype(np.intp)
        matches = self._prints.take(bucket, axis=0) == words[:, 1:2]
        at = matches.ravel().nonzero()[0]
        which = at >> 3
        rows: Rows = self._rows.take((bucket.take(which) << 3) + (at & 7)).astype(np.intp)
        stored = self._column().take(rows, axis=0)
        if at.size == len(keys) and int(rows.min()) >= 0 and stored.tobytes() == joined:
            return rows  # in order, as `at` is, so it is one row for each key
        found = np.full(len(keys), -1, dtype=np.intp)
        same = (stored.view("<u4") == words.take(which, axis=0)).all(axis=1) & (rows >= 0)
        found[which[same]] = rows[same]
        if self._spilled:
            for i in np.flatnonzero(found < 0).tolist():
                found[i] = self._spilled.get(keys[i], -1)
        return found

    def add(self, keys: Sequence[bytes], rows: Rows) -> None:
        """Enter new keys, whose rows carry them already."""
        self._count += len(keys)
        buckets = self._prints.shape[0]
        if self._count > MOST_LOAD * buckets:
            while self._count > MOST_LOAD * buckets:
                buckets *= 2
            known = self.rows()
            self._make(buckets)
            for begin in range(0, known.size, _PART_KEYS):
                self._enter(known[begin : begin + _PART_KEYS])
        self._enter(rows)

    def discard(self, key: bytes, row: int) -> None:
        """Forget a key."""
        bucket = int.from_bytes(key[:4], "little") & int(self._mask)
        here = self._rows[bucket * WAYS : (bucket + 1) * WAYS]
        place = (here == row).nonzero()[0]
        if place.size:
            here[place], self._prints[bucket, place] = -1, 0
        else:
            del self._spilled[key]
        self._count -= 1

    def rows(self) -> Rows:
        """Return all rows, in no order."""
        spilled = np.fromiter(self._spilled.values(), np.intp, len(self._spilled))
        return np.concatenate([self._rows[self._rows >= 0].astype(np.intp), spilled])

    def _make(self, buckets: int) -> None:
        self._mask = np.uint32(buckets - 1)
        self._prints = np.zeros((buckets, WAYS), dtype="<u4")
        self._rows = np.full(buckets * WAYS, -1, dtype=np.int32)
        self._spilled: dict[bytes, int] = {}

    def _enter(self, rows: Rows) -> None:
        words = self._column().take(rows, axis=0).view("<u4")
        while rows.size:
            bucket = (words[:, 0] & self._mask).astype(np.intp)
            free = self._rows.reshape(-1, WAYS)[bucket] < 0
            place = bucket * WAYS + free.argmax(axis=1)
            has_room = free.any(axis=1)
            for i in (~has_room).nonzero()[0].tolist():
                self._spilled[words[i].tobytes()] = int(rows[i])
            if rows.size == 1:
                first = has_room.nonzero()[0]
            else:
                _, first = np.unique(np.where(has_room, place, -1), return_index=True)
                first = first[has_room[first]]  # of those that chose the same place, one goes there
            self._rows[place[first]] = rows[first]
            self._prints.ravel()[place[first]] = words[first, 1]
            left = has_room.copy()
            left[first] = False
            rows, words = rows[left], words[left]
