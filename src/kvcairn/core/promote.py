"""Reads from a slower tier into memory slots, in batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcairn.checksum import checksum
from kvcairn.core.drops import Drops
from kvcairn.core.hung import HungCall
from kvcairn.core.level import Level, submit
from kvcairn.core.moves import Moves
from kvcairn.core.spaces import SpaceInfo
from kvcairn.core.state import State
from kvcairn.core.walk import Levels
from kvcairn.errors import CorruptBlock, TierError, TierTimeout
from kvcairn.index.arrays import Rows
from kvcairn.memory.slots import PAGE_BYTES
from kvcairn.policy.planner import Sample
from kvcairn.tiers.base import BlockRef, Outcome, Read
from kvcairn.transfer.task import Task, TaskState
from kvcairn.types import CopyState, MissReason

BATCH_BYTES = 16 << 20
BATCH_BLOCKS = 64


@dataclass(slots=True, eq=False)
class Promotion:
    """One read task: rows of one group from one tier, already claimed in memory."""

    source: Level
    space: SpaceInfo
    group: int
    rows: Rows
    hung: HungCall
    task: Task | None = None
    sample: Sample | None = None


class Promotions:
    """Starts and ends reads. What could not be read is told to `lost(rows, group, reason)`, each end to `ended()`."""

    def __init__(
        self, state: State, drops: Drops, lost: Callable[[Rows, int, MissReason], None], ended: Callable[[], None]
    ) -> None:
        """Work on that state."""
        self._state, self._drops, self._lost, self._ended = state, drops, lost, ended
        self.moves = Moves(state, drops)

    def start(self, space: SpaceInfo, group: int, rows: Rows, sources: Levels, priority: int) -> list[Promotion]:
        """Claim memory for as many leading rows as there is room for, and read them; return the reads."""
        memory = self._state.memory
        slot_bytes = memory.residency.slot_bytes(space, group)
        room = memory.room(self._state.spaces).make(slot_bytes, rows.size)
        addresses = memory.residency.allocator.take(slot_bytes, min(room, rows.size))
        rows, sources = rows[: addresses.size], sources[: addresses.size]
        if rows.size == 0:
            return []
        memory.residency.claim(space, group, rows, addresses, CopyState.WRITING)
        step = max(1, min(BATCH_BLOCKS, BATCH_BYTES // slot_bytes))
        started = []
        for number in np.unique(sources).tolist():
            mine = rows[sources == number]
            for begin in range(0, mine.size, step):
                part, source = mine[begin : begin + step], self._state.levels[number - 1]
                promotion = Promotion(source, space, group, part, HungCall(self._state))
                self._submit(promotion, priority)
                started.append(promotion)
        return started

    def hurry(self, promotions: list[Promotion], rows: Rows, priority: int) -> None:
        """Let those of these reads go ahead that bring one of the rows."""
        for promotion in promotions:
            if promotion.task is not None and np.isin(promotion.rows, rows).any():
                self._state.executor.hurry(promotion.task, priority)

    def cancel(self, promotions: list[Promotion]) -> None:
        """Take reads back that have not begun."""
        for promotion in promotions:
            if promotion.task is not None and self._state.executor.cancel(promotion.task):
                promotion.source.tasks -= 1
                if promotion.sample is not None:
                    promotion.source.speed.forget(promotion.sample)
                self._finish(promotion, [MissReason.PENDING] * promotion.rows.size, None, is_cancelled=True)

    def _submit(self, promotion: Promotion, priority: int) -> None:
        source, group, rows = promotion.source, promotion.group, promotion.rows
        copies = source.residency.copies[group]
        copies.busy[rows] += 1
        tier = source.tier
        assert tier is not None, "memory is never promoted from"
        reads = self._reads(promotion)
        task = Task(
            source.name,
            "read",
            run=lambda: verified(reads, tier.read(reads)),
            done=lambda outcomes, error: self._done(promotion, outcomes, error),
            late=promotion.hung.returned,
            priority=priority,
            timeout_s=source.timeout_s,
        )
        promotion.task = task
        promotion.sample = source.speed.begin(rows.size * promotion.space.part_bytes[group], self._state.now())
        submit(source, self._state.executor, task)

    def _reads(self, promotion: Promotion) -> list[Read]:
        state, group, space = self._state, promotion.group, promotion.space
        here, there = state.memory.residency.of(group), promotion.source.residency.of(group)
        nbytes = space.part_bytes[group]
        reads = []
        for row in promotion.rows.tolist():
            begin = int(here.slot[row]) * PAGE_BYTES
            block = BlockRef(space.rows.space_id, state.tree.key(row), group)
            slot = promotion.source.slot(int(there.slot[row]))
            wanted = there.checksum[row].tobytes()
            reads.append(Read(block, slot, state.arena.view[begin : begin + nbytes], wanted if any(wanted) else b""))
        return reads

    def _done(self, promotion: Promotion, outcomes: Any, error: TierError | None) -> None:
        """A read ended, on a transfer thread."""
        source = promotion.source
        with self._state.changed:
            source.tasks -= 1
            if error is None and (not isinstance(outcomes, list) or len(outcomes) != promotion.rows.size):
                error = CorruptBlock(source.name, "read", "the tier returned no outcome for each block")
            failed = next((o for o in outcomes if isinstance(o, TierError)), None) if error is None else error
            source.note(failed, self._state.now())
            if promotion.sample is not None:
                source.measured(promotion.sample, failed, self._state.now())
            self._finish(promotion, [error] * promotion.rows.size if error else outcomes, error)
            self._ended()
            self._state.notify()

    def _finish(
        self, promotion: Promotion, outcomes: list[Outcome], error: TierError | None, *, is_cancelled: bool = False
    ) -> None:
        memory, source, group = self._state.memory.residency, promotion.source, promotion.group
        rows = promotion.rows
        good = rows[np.array([outcome is None for outcome in outcomes], dtype=np.bool_)]
        is_open = memory.of(group).state[good] == int(CopyState.WRITING)
        arrived, unwanted = good[is_open], good[~is_open]
        memory.of(group).checksum[arrived] = source.residency.of(group).checksum[arrived]
        memory.publish(group, arrived, self._state.now())
        self.moves.loaded(source, arrived)
        memory.let_go(group, unwanted)
        bad = [(row, o) for row, o in zip(rows.tolist(), outcomes, strict=True) if o is not None]
        lost = np.array([row for row, _ in bad], dtype=np.intp)
        if promotion.task is not None and promotion.task.state is TaskState.GIVEN_UP:
            addresses = memory.abandon(group, lost, None)  # the call may still write to them
            promotion.hung.leave(self._state.memory.quarantine(addresses))
        elif lost.size:
            memory.drop(group, lost, MissReason.UNKNOWN)
            memory.let_go(group, lost)
        source.residency.let_go(group, rows)
        for row, outcome in bad:
            if isinstance(outcome, MissReason) and not is_cancelled:
                self._drops.copies(source, promotion.space, group, np.array([row], dtype=np.intp), outcome)
        if lost.size and not is_cancelled:
            self._lost(lost, group, _reason(bad[0][1], error))


def verified(reads: list[Read], outcomes: Any) -> Any:
    """Return the outcomes of a read, with CORRUPT where the bytes are not those of the commit, whatever the tier says.

    Args:
        reads: what was asked for, with checksums where they are known.
        outcomes: what the tier answered.
    """
    if not isinstance(outcomes, list) or len(outcomes) != len(reads):
        return outcomes
    return [
        MissReason.CORRUPT if outcome is None and read.checksum and checksum(read.out) != read.checksum else outcome
        for read, outcome in zip(reads, outcomes, strict=True)
    ]


def _reason(outcome: Outcome, error: TierError | None) -> MissReason:
    if isinstance(outcome, MissReason):
        return outcome
    return MissReason.DEADLINE if isinstance(outcome or error, TierTimeout) else MissReason.TIER_DOWN
