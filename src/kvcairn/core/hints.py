"""Hints: what eviction policies are told, times to live, and pins that keep blocks from eviction under a cap."""

from __future__ import annotations

import numpy as np

from kvcairn.core.spaces import SpaceInfo
from kvcairn.core.state import State
from kvcairn.index.arrays import Rows
from kvcairn.index.hinted import SHARED
from kvcairn.types import CopyState, Hints

PIN_FRACTION = 0.25  # of the memory tier
SESSIONS = 1 << 16  # names remembered


class Sessions:
    """Numbers for the names of sessions, from 1; of many the oldest half is forgotten, and numbered anew if named."""

    def __init__(self) -> None:
        """Start empty."""
        self._young: dict[str, int] = {}
        self._old: dict[str, int] = {}
        self._last = 0

    def number(self, name: str) -> int:
        """Return the number of a session."""
        number = self._young.get(name) or self._old.get(name)
        if number is None:
            self._last = number = self._last % (SHARED - 1) + 1
        if len(self._young) >= SESSIONS // 2:
            self._old, self._young = self._young, {}
        self._young[name] = number
        return number


class Pins:
    """Blocks pinned by hint. A pin is not a lease: it keeps a copy in memory, and gives nobody its bytes."""

    def __init__(self, state: State) -> None:
        """Nothing is pinned."""
        self._state = state
        self._pinned: dict[tuple[int, int], SpaceInfo] = {}  # by (row, group)
        self._bytes = 0
        self._sessions = Sessions()

    def hint(self, space: SpaceInfo, rows: Rows, hints: Hints) -> int:
        """Note hints; return the number of blocks that are pinned now, of those the call names.

        A pin beyond the cap, or of a block that is not in memory, is refused: the number is smaller then.
        """
        self._note(rows, hints)
        if hints.ttl_s is not None:
            self._state.tree.nodes.hinted.expires_s[rows] = self._state.now() + hints.ttl_s
            self._state.walker.has_expiry = True
        if not hints.pin:
            self.unpin(rows)
            return 0
        return sum(self._pin(space, row) for row in rows.tolist())

    def _note(self, rows: Rows, hints: Hints) -> None:
        """Tell the eviction policies of all tiers what was hinted."""
        hinted = self._state.tree.nodes.hinted
        hinted.priority[rows] = hints.priority
        if hints.session is not None:
            number, known = self._sessions.number(hints.session), hinted.session[rows]
            hinted.session[rows] = np.where((known == 0) | (known == number), np.uint32(number), np.uint32(SHARED))
        is_shared = hinted.session[rows] == SHARED
        for level in self._state.levels:
            policy, now_s = level.residency.policy, self._state.now()
            if hints.ends_session and is_shared.any():  # others may come back to these
                policy.hint(rows[is_shared], False, now_s)
                policy.hint(rows[~is_shared], True, now_s)
            else:
                policy.hint(rows, hints.ends_session, now_s)

    def unpin(self, rows: Rows) -> None:
        """End the pins of rows."""
        if self._pinned:
            for row in rows.tolist():
                for group in range(len(self._state.memory.residency.copies)):
                    self._end(row, group)

    def _pin(self, space: SpaceInfo, row: int) -> bool:
        memory = self._state.memory.residency
        cap = PIN_FRACTION * memory.allocator.capacity_bytes
        for group in range(len(space.groups)):
            size = memory.slot_bytes(space, group)
            if (row, group) in self._pinned:
                continue
            if memory.of(group).state[row] != int(CopyState.READY) or self._bytes + size > cap:
                self.unpin(np.array([row], dtype=np.intp))
                return False
            memory.pin(space, group, np.array([row], dtype=np.intp))
            self._pinned[row, group] = space
            self._bytes += size
        return True

    def _end(self, row: int, group: int) -> None:
        space = self._pinned.pop((row, group), None)
        if space is not None:
            memory = self._state.memory.residency
            self._bytes -= memory.slot_bytes(space, group)
            rows = np.array([row], dtype=np.intp)
            memory.unpin(space, group, rows, memory.of(group).slot[rows].copy())
