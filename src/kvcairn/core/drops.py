"""Takes copies out of the index on purpose, and tells their tier, so that they do not come back after a restart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvcairn.core.hints import Pins
from kvcairn.core.level import Level, submit
from kvcairn.core.residency import READY, WRITING
from kvcairn.core.spaces import SpaceInfo
from kvcairn.core.state import State
from kvcairn.errors import TierError
from kvcairn.index.arrays import Rows
from kvcairn.tiers.base import ALL_SPACES, Delete, Tier
from kvcairn.transfer.task import Task
from kvcairn.types import MissReason

CLEAR_PRIORITY = 0
DELETE_PRIORITY = 200  # behind reads and writes
MOST_CLEARINGS = 1024  # remembered for those who ask
MOST_DELETES = 1024  # of one task, so that each ends well before the tier's deadline


@dataclass(slots=True)
class Clearing:
    """One clear: how many tiers have still to make it last, and whether one could not."""

    open: int = 0
    failed: bool = False


class Drops:
    """Forget, clear, expire, and the loss of damaged copies."""

    def __init__(self, state: State, pins: Pins) -> None:
        """Work on that state; what is dropped from memory loses its pins."""
        self._state, self.pins = state, pins
        self._clearings: dict[int, Clearing] = {}
        self._last_clearing = 0

    def rows(self, space: SpaceInfo, rows: Rows, reason: MissReason, levels: list[Level] | None = None) -> None:
        """Drop all copies of rows of one space, on all tiers or the given ones."""
        for level in self._state.levels if levels is None else levels:
            for group in range(len(level.residency.copies)):
                self.copies(level, space, group, rows, reason)

    def copies(self, level: Level, space: SpaceInfo, group: int, rows: Rows, reason: MissReason) -> None:
        """Drop copies on one tier. The tier deletes them behind what it still has to do."""
        if group >= len(level.residency.copies):
            return
        here = rows[level.residency.copies[group].state[rows] != 0]
        if here.size == 0:
            return
        if level.tier is not None:
            self.delete(level, level.deletes(space, group, here))
        else:
            self.pins.unpin(here)
        level.residency.drop(group, here, reason)

    def expired(self, space: SpaceInfo, keys: list[bytes]) -> None:
        """Drop those of the keys whose time to live is over."""
        if self._state.walker.has_expiry:
            rows = self._state.tree.find(space.rows, keys)
            expires = self._state.tree.nodes.hinted.expires_s[rows]
            over = rows[(rows >= 0) & (expires > 0) & (expires <= self._state.now())]
            for level in self._state.levels:
                for group, copies in enumerate(level.residency.copies):
                    state = copies.state[over]  # a reservation is a new block that only has not got its bytes yet
                    stale = over[(state == READY) | (state == WRITING)]
                    self.copies(level, space, group, stale, MissReason.EXPIRED)

    def forget(self, space: SpaceInfo, keys: list[bytes]) -> None:
        """Drop all copies of these blocks, those too that a rebuild has still to find."""
        rows = self._state.tree.find(space.rows, keys)
        self.rows(space, np.unique(rows[rows >= 0]), MissReason.CLEARED)
        for level in self._state.lower:
            level.unscanned.forget(space.rows.space_id, keys)

    def clear(self, space: SpaceInfo | None, levels: list[Level]) -> int:
        """Drop all copies of a space, or of every space, on these tiers; return a number for `is_cleared`."""
        number = self._last_clearing = self._last_clearing + 1
        clearing = self._clearings[number] = Clearing()
        while len(self._clearings) > MOST_CLEARINGS:
            del self._clearings[next(iter(self._clearings))]
        space_id = ALL_SPACES if space is None else space.rows.space_id
        for level in levels:
            level.unscanned.clear(space_id, level.residency.allocator.last_generation)
            if level.tier is not None and level.tier.clears:
                self._clear(level, level.tier, space_id, clearing)
            for each in self._state.spaces if space is None else (space,):
                rows = each.rows.rows.rows()
                if level.tier is None or not level.tier.clears:
                    self.rows(each, rows, MissReason.CLEARED, [level])
                    continue
                for group in range(len(level.residency.copies)):
                    level.residency.drop(group, rows, MissReason.CLEARED)
        return number

    def is_cleared(self, number: int) -> bool | None:
        """Say, once, whether what was cleared stays away for good; None while that is being made so."""
        clearing = self._clearings.get(number)
        if clearing is not None and clearing.open:
            return None
        self._clearings.pop(number, None)
        return clearing is not None and not clearing.failed

    def _clear(self, level: Level, tier: Tier, space_id: bytes, clearing: Clearing) -> None:
        """Have a tier forget a space, with what is still being written of it."""
        generation = level.residency.allocator.last_generation
        clearing.open += 1

        def ended(error: TierError | None) -> None:
            clearing.open -= 1
            clearing.failed = clearing.failed or error is not None

        self._submit(level, "clear", lambda: tier.clear(space_id, generation), CLEAR_PRIORITY, ended)

    def delete(self, level: Level, deletes: list[Delete]) -> None:
        """Have a tier forget copies that the index has dropped or never took up."""
        tier = level.tier
        if tier is not None:
            for begin in range(0, len(deletes), MOST_DELETES):
                part = deletes[begin : begin + MOST_DELETES]
                self._submit(level, "delete", partial(tier.delete, part), DELETE_PRIORITY)

    def _submit(
        self,
        level: Level,
        op: str,
        run: Callable[[], Any],
        priority: int,
        ended: Callable[[TierError | None], None] = lambda error: None,
    ) -> None:
        def done(_: Any, error: TierError | None) -> None:
            with self._state.changed:
                level.tasks -= 1
                ended(error)
                if error is not None:  # that it worked says nothing about reads and writes
                    level.note(error, self._state.now())
                self._state.notify()

        task = Task(level.name, op, run, done, lambda: None, priority, level.timeout_s)
        submit(level, self._state.executor, task)
