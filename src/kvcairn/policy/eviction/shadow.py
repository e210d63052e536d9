"""An LRU that keeps names alone, of a sample of the blocks, to compare a policy with."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvcairn.policy.eviction.base import Names
from kvcairn.policy.eviction.ghosts import GhostQueue

# One block in so many: C. Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015.
_SAMPLED: Final = 16
_WINDOW: Final = 2_048  # sampled uses after which a judgement is made
_MARGIN: Final = 0.01  # of the uses in a window: so much more must the shadow serve
_MOST_WINDOWS: Final = 16


class Shadow:
    """Counts what an LRU of the same size would have served, beside what was served.

    Where it is better over a window of uses, `is_better` is True for the windows that follow: for one after the first
    time, for twice as many after each further one, up to sixteen; a window in which it is not better halves that.
    """

    def __init__(self) -> None:
        """Start empty and not better."""
        self.is_better = False
        self._names = GhostQueue()
        self._limit = 0
        self._uses = self._served = self._own = 0
        self._windows = 0.5  # for how many the shadow's order is taken when it is better the next time, halved
        self._left = 0.0

    def resize(self, blocks: int) -> None:
        """Tell how many blocks the tier holds."""
        self._limit = max(1, blocks // _SAMPLED)

    def use(self, names: Names, is_hit: bool) -> None:
        """Blocks of a chain were used, root first; `is_hit` says whether they were there."""
        sampled = names[(names >> np.uint64(40)) % np.uint64(_SAMPLED) == 0][::-1]
        if sampled.size == 0 or self._limit == 0:
            return
        self._uses += sampled.size
        self._own += sampled.size * is_hit
        self._served += int(self._names.holds(sampled).sum())
        self._names.discard(sampled)
        self._names.push(sampled)
        self._names.trim(self._limit)
        if self._uses >= _WINDOW:
            self._judge()

    def _judge(self) -> None:
        if self.is_better:
            self._left -= 1
            self.is_better = self._left > 0
        elif self._served > self._own + _MARGIN * self._uses:
            self._windows = min(2 * self._windows, _MOST_WINDOWS)
            self._left, self.is_better = self._windows, True
        else:
            self._windows = max(0.5, self._windows / 2)
        self._uses = self._served = self._own = 0
