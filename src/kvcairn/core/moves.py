"""What becomes of a block on two tiers once it was loaded: the promotion settings `move` and `bypass`.

`keep` needs nothing. With `move` the copy on the slower tier goes, with `bypass` the one in memory, and neither as
long as somebody holds it or a child of it lies on the same tier.
"""

from __future__ import annotations

import numpy as np

from kvcairn.core.drops import Drops
from kvcairn.core.level import Level
from kvcairn.core.residency import READY
from kvcairn.core.spaces import SpaceInfo
from kvcairn.core.state import State
from kvcairn.index.arrays import Rows
from kvcairn.types import MissReason


class Moves:
    """Blocks that were loaded and have still to leave one of their tiers. Owner thread only."""

    def __init__(self, state: State, drops: Drops) -> None:
        """Nothing was loaded."""
        self._state, self._drops = state, drops
        self._loaded: dict[tuple[int, int], Level] = {}  # by row and serial: where it came from

    def loaded(self, source: Level, rows: Rows) -> None:
        """Copies have come into memory from a tier."""
        if source.promotion != "keep":
            serials = self._state.tree.nodes.serial[rows].tolist()
            self._loaded.update(dict.fromkeys(zip(rows.tolist(), serials, strict=True), source))

    def settle(self) -> None:
        """Something was let go: drop what may leave by now, the last blocks of prompts first.

        What nobody holds and still may not leave, since other blocks begin with it, stays on both tiers.
        """
        while self._loaded:
            before, is_held = len(self._loaded), False
            for (row, serial), source in reversed(list(self._loaded.items())):
                level = source if source.promotion == "move" else self._state.memory
                if self._is_over(row, serial, source):
                    del self._loaded[row, serial]
                elif self._is_held(level, row):
                    is_held = True
                elif not self._has_children(level, row):
                    del self._loaded[row, serial]
                    space = self._state.spaces[int(self._state.tree.nodes.space[row])]
                    self._drops.rows(space, np.array([row], dtype=np.intp), MissReason.EVICTED, [level])
            if len(self._loaded) == before:
                if not is_held:
                    self._loaded.clear()
                return

    def _is_over(self, row: int, serial: int, source: Level) -> bool:
        """Whether the block or its tier is gone, or one of the two copies."""
        is_known = int(self._state.tree.nodes.serial[row]) == serial and source in self._state.levels
        return not is_known or not self._is_twice(row, source)

    def _is_twice(self, row: int, source: Level) -> bool:
        """Whether every copy that memory has is on the tier too, so that none is lost."""
        pairs = zip(self._state.memory.residency.copies, source.residency.copies, strict=False)
        both = [(here.state[row] == READY, there.state[row] == READY) for here, there in pairs]
        return any(here and there for here, there in both) and all(here == there for here, there in both)

    def _is_held(self, level: Level, row: int) -> bool:
        return any(copies.pins[row] or copies.busy[row] for copies in level.residency.copies)

    def _has_children(self, level: Level, row: int) -> bool:
        """Whether blocks behind it are on the tier."""
        space: SpaceInfo = self._state.spaces[int(self._state.tree.nodes.space[row])]
        return any(space.is_full(g) and bool(c.children[row]) for g, c in enumerate(level.residency.copies))
