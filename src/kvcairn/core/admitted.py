"""Which blocks the memory tier takes of those that an engine has, by its write policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcairn.core.spaces import SpaceInfo
from kvcairn.core.state import State
from kvcairn.policy.admission import Flags, Sights
from kvcairn.policy.sights import SightTable

REMEMBERED = 8  # keys, for each block that memory can hold


class Admitted:
    """The write policy of memory. A block that it does not take has no row in the index."""

    def __init__(self, state: State) -> None:
        """Nothing was seen yet."""
        self._state = state
        self._tables: dict[int, SightTable] = {}

    def choose(self, space: SpaceInfo, keys: Sequence[bytes], absent: Flags, is_again: bool) -> tuple[Flags, Sights]:
        """Say which of the absent blocks are taken, none behind one that is not; and how often each was seen.

        Being asked for here is one sight of each absent block, unless the same call asked before.
        """
        sights = np.zeros(absent.size, dtype=np.uint8)
        where = absent.nonzero()[0]
        policy = self._state.memory.admission
        if policy.counts_sights and where.size:
            table, names = self._table(space), [keys[i] for i in where.tolist()]
            sights[where] = table.seen(names) if is_again else table.see(names)
        if policy.takes_leavers:  # the adapter stores what is about to leave the engine
            return absent, sights
        taken = ~absent
        taken[where] = policy.at_sight(sights[where])
        return absent & np.logical_and.accumulate(taken), sights

    def _table(self, space: SpaceInfo) -> SightTable:
        table = self._tables.get(space.number)
        if table is None:
            blocks = self._state.memory.capacity_bytes // sum(space.part_bytes.values())
            table = self._tables[space.number] = SightTable(REMEMBERED * blocks)
        return table
