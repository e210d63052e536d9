"""Takes copies out of the index on purpose, and tells their tier, so that they do not come back after a restart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvcairn.core.hints import Pins
from kvcairn.core.level import Level, submit
from kvcairn.core.residency import READY, WRITING
from kvcairn.core.spaces import SpaceInfo
from kvcairn.core.state import State
from kvcairn.errors import TierError
from kvcairn.index.arrays import Rows
from kvcairn.tiers.base import Delete, Tier
from kvcairn.transfer.task import Task
from kvcairn.types import MissReason

CLEAR_PRIORITY = 0
DELETE_PRIORITY = 200  # behind reads and writes
MOST_DELETES = 1024  # of one task, so that each ends well before the tier's deadline


class Drops:
    """Forget, clear, expire, and the loss of damaged copies."""

    def __init__(self, state: State, pins: Pins) -> None:
        """Work on that state; what is dropped from memory loses its pins."""
        self._state, self.pins = state, pins

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
            expires = self._state.tree.nodes.expires_s[rows]
            over = rows[(rows >= 0) & (expires > 0) & (expires <= self._state.now())]
            for level in self._state.levels:
                for group, copies in enumerate(level.residency.copies):
                    state = copies.state[over]  # a reservation is a new block that only has not got its bytes yet
                    stale = over[(state == READY) | (state == WRITING)]
                    self.copies(level, space, group, stale, MissReason.EXPIRED)

    def everything(self, space: SpaceInfo, levels: list[Level]) -> None:
        """Drop all copies of a space on these tiers."""
        rows = space.rows.rows.rows()
        for level in levels:
            if level.tier is None or not level.tier.clears:
                self.rows(space, rows, MissReason.CLEARED, [level])
                continue
            self._clear(level, level.tier, space)
            for group in range(len(level.residency.copies)):
                level.residency.drop(group, rows, MissReason.CLEARED)

    def _clear(self, level: Level, tier: Tier, space: SpaceInfo) -> None:
        """Have a tier forget a space, with what is still being written of it."""
        space_id, generation = space.rows.space_id, level.residency.allocator.last_generation
        self._submit(level, "clear", lambda: tier.clear(space_id, generation), CLEAR_PRIORITY)

    def delete(self, level: Level, deletes: list[Delete]) -> None:
        """Have a tier forget copies that the index has dropped or never took up."""
        tier = level.tier
        if tier is not None:
            for begin in range(0, len(deletes), MOST_DELETES):
                part = deletes[begin : begin + MOST_DELETES]
                self._submit(level, "delete", partial(tier.delete, part), DELETE_PRIORITY)

    def _submit(self, level: Level, op: str, run: Callable[[], Any], priority: int) -> None:
        def done(_: Any, error: TierError | None) -> None:
            with self._state.changed:
                level.tasks -= 1
                if error is not None:  # that it worked says nothing about reads and writes
                    level.note(error, self._state.now())
                self._state.notify()

        task = Task(level.name, op, run, done, lambda: None, priority, level.timeout_s)
        submit(level, self._state.executor, task)
