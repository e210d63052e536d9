"""Looks after what leaves a faster tier for a `back` tier below: written ahead of its turn, or counted as lost.

No store waits for a slower tier: when room is needed the first in the order of eviction go, written down or not. So
that they normally are, those next in that order are written while there is still room. The idea is that of a page
cleaner in a database's buffer pool.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from kvcairn.core.drops import Drops
from kvcairn.core.level import Level
from kvcairn.core.residency import ABSENT, EVICTING, READY
from kvcairn.core.state import State
from kvcairn.core.writes import WritesDown
from kvcairn.index.arrays import Rows
from kvcairn.policy.admission import MOST_SIGHTS
from kvcairn.types import MissReason

HIGH_WATERMARK = 0.75  # of a tier's capacity: above it what leaves next is written ahead
CLEAN_FRACTION = 1 / 8  # of its blocks, first in the order of eviction
MOST_CLEANED = 4096  # blocks looked at in one go
PIECE = 1024  # rows looked at for a write-back of everything


class Leaving:
    """What leaves the tiers of one cache towards slower ones."""

    def __init__(self, state: State, writes: dict[str, WritesDown]) -> None:
        """Ask the queues in `writes`, by tier name, for what is to be written."""
        self._state, self._writes = state, writes
        self._moved: dict[str, int] = {}  # blocks that came or left since the last look, by tier

    def target(self, number: int) -> int | None:
        """Return the number of the first tier below that takes what leaves tier `number`; None where there is none."""
        levels = self._state.levels
        below = range(number + 1, len(levels))
        return next((n for n in below if levels[n].admission.takes_leavers and not levels[n].is_leaving), None)

    def evicted(self, level: Level, group: int, rows: Rows) -> None:
        """Copies are about to leave `level` for want of room: count those that a tier below should have got."""
        number = self._state.levels.index(level) if level in self._state.levels else -1
        target = None if number < 0 else self.target(number)
        if target is None:
            return
        self._moved[level.name] = self._moved.get(level.name, 0) + rows.size
        is_last = self._state.fastest.of(group)[rows] == number + 1  # what a faster tier has may still be written
        lost = rows[is_last & self._due(number, target, group, rows)]
        if lost.size:
            below = self._state.levels[target]
            is_down = below.breaker.is_open(self._state.now())
            self._writes[below.name].lost(lost, MissReason.TIER_DOWN.value if is_down else "back_pressure")

    def look_ahead(self, seen: int = 0) -> None:
        """Have written what would leave next, wherever a tier is nearly full; `seen` blocks were just used."""
        for number in range(len(self._state.levels) - 1):
            target = self.target(number)
            if target is None:
                return
            level = self._state.levels[number]
            moved = self._moved.get(level.name, 0) + seen
            allocator, window = level.residency.allocator, self._window(level)
            is_full = allocator.used_bytes >= HIGH_WATERMARK * allocator.capacity_bytes
            self._moved[level.name] = moved
            if is_full and moved * 4 >= window and window:
                self._moved[level.name] = 0
                self._clean(number, target, window)

    def write_back(self, begin: int) -> int | None:
        """Ask for what memory alone has, of a piece of the index from row `begin` on; return where the next begins.

        For the end of a cache: under `back` it would be lost. None when there is nothing left to ask for.
        """
        rows = np.arange(begin, min(begin + PIECE, self._state.tree.nodes.rows))
        target = self.target(0)
        if target is None or not rows.size:
            return None
        self._ask(0, target, rows)
        return begin + PIECE

    def _window(self, level: Level) -> int:
        """How many blocks, first in the order of eviction, are kept clean."""
        return min(MOST_CLEANED, int(-(-len(level.residency.policy) * CLEAN_FRACTION // 1)))

    def _clean(self, number: int, target: int, window: int) -> None:
        candidates = self._state.levels[number].residency.policy.candidates()
        self._ask(number, target, np.fromiter(islice(candidates, window), dtype=np.intp))

    def _ask(self, number: int, target: int, rows: Rows) -> None:
        due = np.zeros(rows.size, dtype=np.bool_)
        for group in range(len(self._state.levels[number].residency.copies)):
            due |= self._due(number, target, group, rows)
        if due.any():
            self._writes[self._state.levels[target].name].ask_each(rows[due])

    def _due(self, number: int, target: int, group: int, rows: Rows) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of the rows tier `number` has, and none below it down to `target`."""
        levels = self._state.levels
        due = np.asarray(levels[number].residency.of(group).state[rows] == READY)
        for level in levels[number + 1 : target + 1]:
            state = level.residency.of(group).state[rows]
            due &= (state == ABSENT) | (state == EVICTING)
        return due


class Writes:
    """The writes to all tiers below memory. Owner thread only."""

    def __init__(self, state: State, drops: Drops) -> None:
        """No tiers yet."""
        self._state, self._drops = state, drops
        self._queues: dict[str, WritesDown] = {}
        self._leaving = Leaving(state, self._queues)
        state.memory.evicting = self._leaving.evicted

    def attach(self, level: Level) -> None:
        """Write to one more tier, the slowest."""
        self._queues[level.name] = WritesDown(self._state, level, self._drops, self._leaving.look_ahead)
        level.evicting = self._leaving.evicted

    def detach(self, level: Level) -> None:
        """Write to a tier no more; what waits is dropped and counted."""
        self._queues.pop(level.name).forget()

    def seen(self, rows: Rows) -> None:
        """Rows of a chain were stored or used: have them written where a policy wants them."""
        if any(level.admission.counts_sights for level in self._state.lower):
            sights = self._state.tree.nodes.sights
            sights[rows] += sights[rows] < MOST_SIGHTS
        for queue in self._queues.values():
            queue.ask(rows)
        self._leaving.look_ahead(rows.size)

    def write_back(self, begin: int) -> int | None:
        """See `Leaving.write_back`."""
        return self._leaving.write_back(begin)

    def pump(self) -> None:
        """Start what can be started now."""
        for queue in self._queues.values():
            queue.pump()

    def is_idle(self, levels: list[Level]) -> bool:
        """Whether nothing is queued or being written for these tiers."""
        return all(self._queues[level.name].is_idle for level in levels if level.name in self._queues)
