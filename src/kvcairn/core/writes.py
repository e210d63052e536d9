"""Copies blocks from memory down to one slower tier, in the background, parents before children.

What waits in the queue holds nothing: a block that leaves memory before its turn is dropped and counted, so a slow
tier never holds up a store. Nothing is retried from the queue: a block is asked for again when it is next touched.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcairn.checksum import checksum
from kvcairn.core.drops import Drops
from kvcairn.core.hung import HungCall
from kvcairn.core.level import Level, submit
from kvcairn.core.spaces import SpaceInfo
from kvcairn.core.state import State
from kvcairn.errors import TierError, TierFull
from kvcairn.index.arrays import Rows
from kvcairn.memory.slots import PAGE_BYTES
from kvcairn.tiers.base import BlockRef, Delete, Slot, Write
from kvcairn.transfer.task import Task, TaskState
from kvcairn.types import CopyState, MissReason, add_to

WRITE_PRIORITY = 100
BATCH_BYTES = 16 << 20
BATCH_BLOCKS = 64
ASK_AGAIN_S = 1.0
MOST_TASKS = 4
READY, ABSENT, EVICTING = int(CopyState.READY), int(CopyState.ABSENT), int(CopyState.EVICTING)


@dataclass(slots=True, eq=False)
class Item:
    """One copy to be written down; the parent's copy on the tier is held until the end, -1: there is none."""

    row: int
    group: int
    parent: int
    space: SpaceInfo
    write: Write


@dataclass(slots=True, eq=False)
class Batch:
    """One write task."""

    items: list[Item]
    nbytes: int
    hung: HungCall
    task: Task | None = None
    retired: list[int] = field(default_factory=list)  # segments whose space is given back before the write


class WritesDown:
    """The queue of one tier."""

    def __init__(self, state: State, level: Level, drops: Drops) -> None:
        """Write to that tier."""
        self._state, self._level, self._drops = state, level, drops
        self._queue: deque[tuple[int, int]] = deque()  # row, serial
        self._queued: set[tuple[int, int]] = set()
        self._not_before: dict[tuple[int, int], float] = {}  # (row, serial) of blocks whose write failed
        self._leaving: set[tuple[int, int]] = set()  # asked for while a forgotten copy was still on its way out
        self._tasks = self._in_flight_bytes = 0
        self._is_retiring = False  # a batch is giving space back, which others must not count on before it is done

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or being written."""
        return not self._queue and not self._tasks

    def ask(self, rows: Rows) -> None:
        """Queue those rows of a chain that memory has and the tier lacks, with what it lacks of their ancestors."""
        if self._level.write_policy != "through" or not rows.size:
            return
        lacking = rows[self._lacks(rows)]
        if lacking.size:
            above = [r for r in self._state.tree.ancestors(int(lacking[0])) if self._lacks(np.array([r]))[0]]
            for row in (*reversed(above), *lacking.tolist()):
                self._enqueue(row)
        self._leaving.update(
            (row, int(self._state.tree.nodes.serial[row])) for row in rows[self._leaves(rows)].tolist()
        )
        self._ask_again()
        self.pump()

    def pump(self) -> None:
        """Start writes while there is something to write and a thread to do it."""
        limit = max(self._state.memory.residency.allocator.capacity_bytes // 2, 1)
        while self._queue and self._tasks < MOST_TASKS and self._in_flight_bytes < limit and not self._is_retiring:
            if self._level.breaker.is_open(self._state.now()):
                self._drop_all(MissReason.TIER_DOWN.value)
                return
            batch = self._next_batch(limit - self._in_flight_bytes)
            if batch.items:
                self._submit(batch)

    def forget(self) -> None:
        """Empty the queue: the tier is going."""
        self._drop_all("detached")

    def _lacks(self, rows: Rows) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which rows memory has in some group that this tier has not."""
        lacks = np.zeros(rows.size, dtype=np.bool_)
        for group, copies in enumerate(self._state.memory.residency.copies):
            lacks |= (copies.state[rows] == READY) & (self._level.residency.of(group).state[rows] == ABSENT)
        return lacks

    def _leaves(self, rows: Rows) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which rows memory has while this tier's copy was forgotten and is not gone yet."""
        leaves = np.zeros(rows.size, dtype=np.bool_)
        for group, copies in enumerate(self._state.memory.residency.copies):
            leaves |= (copies.state[rows] == READY) & (self._level.residency.of(group).state[rows] == EVICTING)
        return leaves

    def _ask_again(self) -> None:
        """Queue what was asked for too early. What still cannot be written when all writes have ended is given up."""
        leaving, self._leaving = self._leaving, set()
        for row, serial in leaving:
            if int(self._state.tree.nodes.serial[row]) != serial:
                continue
            if not self._leaves(np.array([row]))[0]:
                self._enqueue(row)
            elif self._tasks:
                self._leaving.add((row, serial))
            else:
                self._dropped("held", row)

    def _enqueue(self, row: int) -> None:
        serial = int(self._state.tree.nodes.serial[row])
        if (row, serial) in self._queued or self._not_before.get((row, serial), 0.0) > self._state.now():
            return
        self._not_before.pop((row, serial), None)
        self._queued.add((row, serial))
        self._queue.append((row, serial))

    def _next_batch(self, most_bytes: int) -> Batch:
        """Take from the queue what can be written in one task; what cannot be written is dropped and counted."""
        batch = Batch([], 0, HungCall(self._state))
        while self._queue and len(batch.items) < BATCH_BLOCKS and batch.nbytes < min(BATCH_BYTES, most_bytes):
            row, serial = self._queue.popleft()
            self._queued.discard((row, serial))
            if int(self._state.tree.nodes.serial[row]) != serial:
                self._dropped("back_pressure", None)
                continue
            if not self._lacks(np.array([row]))[0]:
                self._count_skipped(row)
                continue
            if not self._parent_is_there(row):
                self._dropped(MissReason.PARENT_MISSING.value, row)
                continue
            self._claim(row, batch)
        return batch

    def _count_skipped(self, row: int) -> None:
        """Nothing can be written of a row: count it unless the tier has it, or gets it."""
        states = [int(copies.state[row]) for copies in self._level.residency.copies]
        if EVICTING in states:
            self._dropped("held", row)
        elif not any(states):
            self._dropped("back_pressure", row)

    def _is_here(self, row: int) -> bool:
        """Whether the tier has a copy of the row, or gets one."""
        return any(copies.state[row] != ABSENT for copies in self._level.residency.copies)

    def _parent_is_there(self, row: int) -> bool:
        """Whether the block is of use there: with its parent, unless no layer group needs a whole prefix."""
        parent = int(self._state.tree.nodes.parent[row])
        space = self._state.spaces[int(self._state.tree.nodes.space[row])]
        return parent < 0 or self._is_here(parent) or not any(space.is_full(group) for group in space.part_bytes)

    def _claim(self, row: int, batch: Batch) -> None:
        """Give a row slots on the tier, and add its copies to the batch."""
        memory, residency = self._state.memory.residency, self._level.residency
        space = self._state.spaces[int(self._state.tree.nodes.space[row])]
        one = np.array([row], dtype=np.intp)
        for group, copies in enumerate(memory.copies):
            if copies.state[row] != READY or residency.of(group).state[row] != ABSENT:
                if residency.of(group).state[row] == EVICTING:
                    self._dropped("held", row)  # its forgotten copy is still being read
                continue
            copies.busy[one] += 1  # before room is made: neither the block nor its parent may leave for it
            parent = self._hold_parent(row, group)
            slot_bytes = residency.slot_bytes(space, group)
            self._level.room(self._state.spaces).make(slot_bytes, 1)
            addresses = residency.allocator.take(slot_bytes, 1)
            if not addresses.size:
                self._let_go(row, group, parent)
                self._dropped(MissReason.NO_ROOM.value, row)
                return
            residency.claim(space, group, one, addresses, CopyState.WRITING)
            batch.items.append(self._item(space, row, group, parent, self._level.slot(int(addresses[0]))))
            batch.nbytes += slot_bytes

    def _hold_parent(self, row: int, group: int) -> int:
        """Keep the parent's copy on the tier from leaving, if there is one; return its row."""
        parent, copies = int(self._state.tree.nodes.parent[row]), self._level.residency.of(group)
        if parent < 0 or copies.state[parent] in (ABSENT, EVICTING):
            return -1
        copies.busy[parent] += 1
        return parent

    def _let_go(self, row: int, group: int, parent: int) -> None:
        """Let a block in memory, and its parent on the tier, go."""
        self._state.memory.residency.let_go(group, np.array([row], dtype=np.intp))
        if parent >= 0:
            self._level.residency.let_go(group, np.array([parent], dtype=np.intp))

    def _item(self, space: SpaceInfo, row: int, group: int, parent: int, slot: Slot) -> Item:
        copies, tree = self._state.memory.residency.copies[group], self._state.tree
        begin = int(copies.slot[row]) * PAGE_BYTES
        data = self._state.arena.view[begin : begin + space.part_bytes[group]].toreadonly()
        checksum = copies.checksum[row].tobytes() if copies.checksum[row].any() else b""
        block = BlockRef(space.rows.space_id, tree.key(row), group)
        return Item(row, group, parent, space, Write(block, tree.parent_key(row), slot, data, checksum))

    def _submit(self, batch: Batch) -> None:
        tier = self._level.tier
        assert tier is not None
        allocator = self._level.residency.allocator
        batch.retired, allocator.retired = allocator.retired, []

        def run() -> tuple[list[bytes], Any]:
            if batch.retired:  # first: the batch needs their space
                tier.retire(batch.retired)
            writes = [with_checksum(item.write) for item in batch.items]
            return [w.checksum for w in writes], tier.write(writes)

        batch.task = Task(
            self._level.name,
            "write",
            run,
            done=lambda value, error: self._done(batch, value, error),
            late=batch.hung.returned,
            priority=WRITE_PRIORITY,
            timeout_s=self._level.timeout_s,
        )
        self._tasks += 1
        self._is_retiring = bool(batch.retired)
        self._in_flight_bytes += batch.nbytes
        submit(self._level, self._state.executor, batch.task)

    def _done(self, batch: Batch, value: Any, error: TierError | None) -> None:
        """A write ended, on a transfer thread."""
        with self._state.changed:
            self._level.tasks -= 1
            self._tasks -= 1
            self._in_flight_bytes -= batch.nbytes
            if batch.retired:
                self._is_retiring = False
                if error is not None:
                    self._level.residency.allocator.retired += batch.retired
            checksums, outcomes = value if error is None else ([], [error] * len(batch.items))
            if error is None and (not isinstance(outcomes, list) or len(outcomes) != len(batch.items)):
                error = TierError(self._level.name, "write", "the tier returned no outcome for each block")
                outcomes = [error] * len(batch.items)
            failed = next((o for o in outcomes if isinstance(o, TierError)), None)
            self._level.note(failed, self._state.now())
            for item, digest in zip(batch.items, checksums, strict=False):
                self._state.memory.residency.copies[item.group].checksum[item.row] = np.frombuffer(digest, np.uint8)
            if batch.task is not None and batch.task.state is TaskState.GIVEN_UP:
                self._leave(batch)
            else:
                self._finish(batch, outcomes)
            self._ask_again()
            self.pump()
            self._state.notify()

    def _finish(self, batch: Batch, outcomes: list[Any]) -> None:
        memory, residency = self._state.memory.residency, self._level.residency
        unwanted: list[Delete] = []
        for item, outcome in zip(batch.items, outcomes, strict=True):
            one = np.array([item.row], dtype=np.intp)
            residency.copies[item.group].checksum[one] = memory.copies[item.group].checksum[one]
            is_wanted = residency.copies[item.group].state[item.row] == int(CopyState.WRITING)
            if outcome is None and is_wanted:
                residency.publish(item.group, one, self._state.now())
            else:
                if not isinstance(outcome, TierFull):  # also where it failed: it may be there all the same
                    unwanted.append(Delete(item.write.block, item.write.slot))
                if outcome is not None:
                    self._dropped("tier_full" if isinstance(outcome, TierFull) else "tier_error", item.row)
                residency.drop(item.group, one, MissReason.NOT_WRITTEN)
                residency.let_go(item.group, one)
            self._let_go(item.row, item.group, item.parent)
        self._drops.delete(self._level, unwanted)

    def _leave(self, batch: Batch) -> None:
        """The call hangs: nobody gets the slots that it may write to, or read from, before it returns."""
        residency = self._level.residency
        frees = []
        for item in batch.items:
            one = np.array([item.row], dtype=np.intp)
            frees.append(self._level.quarantine(residency.abandon(item.group, one, None)))
            self._dropped("tier_error", item.row)

        def free() -> None:
            for item, give_back in zip(batch.items, frees, strict=True):
                give_back()
                self._let_go(item.row, item.group, item.parent)
            self._drops.delete(self._level, [Delete(i.write.block, i.write.slot) for i in batch.items])

        batch.hung.leave(free)

    def _dropped(self, reason: str, row: int | None) -> None:
        """Count a write that was given up, and do not ask for it again at once."""
        add_to(self._level.writes_dropped, reason)
        if row is not None:
            if len(self._not_before) > 1 << 16:
                self._not_before.clear()
            self._not_before[row, int(self._state.tree.nodes.serial[row])] = self._state.now() + ASK_AGAIN_S

    def _drop_all(self, reason: str) -> None:
        for row, _ in self._queue:
            self._dropped(reason, row)
        self._queue.clear()
        self._queued.clear()


def with_checksum(write: Write) -> Write:
    """Return the write with its checksum computed, if it was not yet."""
    if write.checksum:
        return write
    return Write(write.block, write.parent, write.slot, write.data, checksum(write.data))
