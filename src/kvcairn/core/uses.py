"""Blocks were used: eviction policies learn of it, and blocks are written where a policy wants them.

One use of a block for each request that names it.
"""

from __future__ import annotations

import numpy as np

from kvcairn.core.holds import Hold
from kvcairn.core.leaving import Writes
from kvcairn.core.state import State
from kvcairn.index.arrays import Rows


def named(state: State, writes: Writes, rows: Rows) -> None:
    """A request named these blocks, -1 where one is not known: they become more recent everywhere."""
    rows = rows[rows >= 0]
    for level in state.levels:
        level.residency.policy.touch(rows, state.now())
    writes.seen(rows)


def stored(state: State, writes: Writes, hold: Hold, published: Rows) -> None:
    """A reservation was committed.

    What it published has its first use already, and what lies before its start was used when it was acquired; what it
    found there is used once more.
    """
    is_all = published.size == len(hold.keys) and len(hold.space.groups) == 1  # then in the order of the keys
    rows = published if is_all else state.tree.find(hold.space.rows, hold.keys)
    there = rows[hold.start :]
    there = there[:0] if is_all else there[(there >= 0) & ~np.isin(there, published)]
    rows = rows[rows >= 0]
    now = state.now()
    for level in state.levels:
        policy = level.residency.policy
        if there.size:
            policy.touch(there, now)
        policy.refresh(rows, now)
    writes.seen(rows)
