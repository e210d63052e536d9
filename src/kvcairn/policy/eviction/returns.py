"""When sessions come back: a log of requests, and what it says a block is worth that has waited so long."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvcairn.policy.eviction.base import Names

Table = npt.NDArray[np.float64]  # shape (TURNS, AGES)

TURNS: Final = 6  # the first turn, the second, ... the sixth and all later ones
AGE_EDGES_S: Final = np.array(
    [0, 2, 4, 8, 12, 18, 25, 35, 50, 70, 100, 140, 200, 280, 400, 560, 800, 1100, 1600, 2300, 3300], dtype=np.float64
)
AGES: Final = AGE_EDGES_S.size
_LAST_AGE_S = 3600.0  # the last class has no end; so long it counts
_KEPT = 16_384  # requests remembered
_WAYS = 8
_PRIOR_S = 5_000.0  # seconds of waiting that the mean of all turns is worth beside what one turn has seen


class Returns:
    """The last requests: when each came, which turn of its session it was, and when the next turn followed.

    A session is found again by the names of the last blocks of its latest request. All in typed arrays; the number
    of a request grows for ever, and what is too old is as if it had never been.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.latest = 0  # number of the latest request; 0 stands for none
        self._began_s = np.zeros(_KEPT)
        self._turn = np.zeros(_KEPT, dtype=np.int64)
        self._gap_s = np.full(_KEPT, np.inf)
        self._names: Names = np.zeros((_KEPT, _WAYS), dtype=np.uint64)
        self._requests = np.zeros((_KEPT, _WAYS), dtype=np.int64)

    def find(self, names: Names) -> npt.NDArray[np.int64]:
        """Return for each name the request that ended with it, 0 where none is known."""
        bucket = (names & np.uint64(_KEPT - 1)).astype(np.intp)
        found: npt.NDArray[np.int64]
        found = np.where(self._names[bucket] == names[:, None], self._requests[bucket], 0).max(axis=1, initial=0)
        found[found <= self.latest - _KEPT] = 0
        return found

    def mark(self, names: Names, request: int) -> None:
        """Say that a request ended with these blocks."""
        for name in names:
            bucket = int(name & np.uint64(_KEPT - 1))
            same = np.flatnonzero(self._names[bucket] == name)
            way = int(same[0]) if same.size else int(self._requests[bucket].argmin())
            self._names[bucket, way], self._requests[bucket, way] = name, request

    def start(self, now_s: float, follows: int) -> int:
        """Note a request, the next turn after request `follows` (0: of a new session); return its number."""
        self.latest += 1
        at = self.latest % _KEPT
        self._began_s[at], self._turn[at], self._gap_s[at] = now_s, 1, np.inf
        self.follow(self.latest, follows, now_s)
        return self.latest

    def follow(self, request: int, follows: int, now_s: float) -> None:
        """Note that a request is the next turn after `follows`."""
        if follows and follows != request:
            before = follows % _KEPT
            self._turn[request % _KEPT] = self._turn[before] + 1
            self._gap_s[before] = min(self._gap_s[before], now_s - self._began_s[before])

    def turn(self, request: int) -> int:
        """Return which turn of its session a request is, counted from 1."""
        return int(self._turn[request % _KEPT])

    def began_s(self, request: int) -> float:
        """Return when a request came."""
        return float(self._began_s[request % _KEPT])

    def worth(self, now_s: float) -> Table:
        """Return returns per second of keeping, for a session after each turn that has waited for each time.

        The rate of returns by turn and age is events over exposure (E. L. Kaplan and P. Meier, 1958, as a piecewise
        constant hazard), drawn towards the rate of all turns. What keeping is worth is the largest ratio, over all
        times to give up, of the chance that the session returns by then to the time that it is expected to be kept
        (the index of J. C. Gittins, 1979).
        """
        kept = np.arange(max(1, self.latest - _KEPT + 1), self.latest + 1) % _KEPT
        turn = np.minimum(self._turn[kept], TURNS) - 1
        gap_s = self._gap_s[kept]
        has_returned = np.isfinite(gap_s)
        waited_s = np.minimum(gap_s, now_s - self._began_s[kept])
        edges_s = np.append(AGE_EDGES_S, np.inf)
        width_s = np.append(np.diff(AGE_EDGES_S), _LAST_AGE_S)
        events, exposure_s = np.zeros((TURNS, AGES)), np.zeros((TURNS, AGES))
        for k in range(TURNS):
            waited = waited_s[turn == k]
            events[k] = np.histogram(waited[has_returned[turn == k]], edges_s)[0]
            exposure_s[k] = np.clip(waited[:, None] - AGE_EDGES_S, 0, width_s).sum(axis=0)
        pooled = events.sum(axis=0) / np.maximum(exposure_s.sum(axis=0), 1e-9)
        rate = (events + pooled * _PRIOR_S) / (exposure_s + _PRIOR_S)
        return np.array([_index(each, width_s) for each in rate])


def _index(rate: npt.NDArray[np.float64], width_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the largest chance of return per expected second of keeping, for each age to begin at."""
    left = np.exp(-np.concatenate([[0.0], np.cumsum(rate * width_s)]))  # waiting still at each edge
    decline = left[:-1] - left[1:]
    kept_s = np.where(rate * width_s > 1e-9, decline / np.maximum(rate, 1e-12), left[:-1] * width_s)
    return np.array([(np.cumsum(decline[age:]) / np.cumsum(kept_s[age:])).max() for age in range(rate.size)])
