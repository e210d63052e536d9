"""Blocks were used: eviction policies learn of it, and blocks are written where a policy wants them."""

from __future__ import annotations

import numpy as np

from kvcairn.core.holds import Hold
from kvcairn.core.leaving import Writes
from kvcairn.core.state import State
from kvcairn.index.arrays import Rows


class Uses:
    """One use of a block for each request that names it."""

    def __init__(self, state: State, writes: Writes) -> None:
        """Tell the tiers of that state."""
        self._state, self._writes = state, writes

    def seen(self, rows: Rows) -> None:
        """A request named these blocks, -1 where one is not known: they become more recent everywhere."""
        rows = rows[rows >= 0]
        for level in self._state.levels:
            level.residency.policy.touch(rows, self._state.now())
        self._writes.seen(rows)

    def stored(self, hold: Hold, published: Rows) -> None:
        """A reservation was committed.

        What it published has its first use already, and what lies before its start was used when it was acquired; what
        it found there is used once more.
        """
        rows = self._state.tree.find(hold.space.rows, hold.keys)
        there = rows[hold.start :]
        there = there[(there >= 0) & ~np.isin(there, published)]
        rows = rows[rows >= 0]
        now = self._state.now()
        for level in self._state.levels:
            policy = level.residency.policy
            if there.size:
                policy.touch(there, now)
            policy.refresh(rows, now)
        self._writes.seen(rows)
