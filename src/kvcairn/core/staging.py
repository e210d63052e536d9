"""Reads what is to be written to a slower tier and lies on another tier than memory: the way of a demotion.

It takes no slot in memory, so that a demotion evicts nothing. The bytes pass through buffers of their own, as many as
there are writes under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcairn.core.drops import Drops
from kvcairn.core.level import Level, submit
from kvcairn.core.promote import verified
from kvcairn.core.spaces import SpaceInfo
from kvcairn.core.state import State
from kvcairn.errors import TierError
from kvcairn.index.arrays import Rows
from kvcairn.tiers.base import BlockRef, Read
from kvcairn.transfer.task import Task
from kvcairn.types import MissReason

STAGE_PRIORITY = 100  # behind every read that somebody waits for

Staged = dict[tuple[int, int], memoryview | None]
"""By (group, row): the bytes that were read, None where they could not be. What is in memory is not named."""


class Staging:
    """Reads for the writes of one tier."""

    def __init__(self, state: State, drops: Drops) -> None:
        """Read from that state's tiers."""
        self._state, self._drops = state, drops

    def start(
        self, space: SpaceInfo, sources: list[tuple[int, Level, Rows]], staged: Staged, then: Callable[[], None]
    ) -> None:
        """Read the rows of each (group, tier) that is not memory into `staged`, and call `then`, the lock held.

        The caller holds the copies until it has ended.
        """
        below = [(group, level, rows) for group, level, rows in sources if level.tier is not None and rows.size]
        left = len(below)

        def one_done() -> None:
            nonlocal left
            left -= 1
            if not left:
                then()

        if not below:
            then()
        for group, level, rows in below:
            self._read(space, group, level, rows, staged, one_done)

    def _read(
        self, space: SpaceInfo, group: int, level: Level, rows: Rows, staged: Staged, then: Callable[[], None]
    ) -> None:
        tier, copies = level.tier, level.residency.copies[group]
        assert tier is not None
        reads = []
        for row in rows.tolist():
            block = BlockRef(space.rows.space_id, self._state.tree.key(row), group)
            known = copies.checksum[row].tobytes()
            out = memoryview(bytearray(space.part_bytes[group]))
            reads.append(Read(block, level.slot(int(copies.slot[row])), out, known if any(known) else b""))

        def done(outcomes: Any, error: TierError | None) -> None:
            with self._state.changed:
                level.tasks -= 1
                if error is None and (not isinstance(outcomes, list) or len(outcomes) != len(reads)):
                    error = TierError(level.name, "read", "the tier returned no outcome for each block")
                each = outcomes if error is None else [error] * len(reads)
                level.note(next((o for o in each if isinstance(o, TierError)), None), self._state.now())
                for at, (row, read, outcome) in enumerate(zip(rows.tolist(), reads, each, strict=True)):
                    staged[group, row] = read.out.toreadonly() if outcome is None else None
                    if isinstance(outcome, MissReason):
                        self._drops.copies(level, space, group, rows[at : at + 1], outcome)
                then()

        run = lambda: verified(reads, tier.read(reads))  # noqa: E731
        task = Task(level.name, "read", run, done, lambda: None, STAGE_PRIORITY, level.timeout_s)
        submit(level, self._state.executor, task)
