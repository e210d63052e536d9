"""Copies blocks from faster tiers down to one slower tier, in the background, parents before children.

What waits in the queue holds nothing: a block that leaves the faster tiers before its turn is dropped and counted, so
a slow tier never holds up a store. Nothing is retried from the queue: a block is asked for again when it is next
touched, or about to leave.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from kvcairn.core.batches import Batch, Batches
from kvcairn.core.drops import Drops
from kvcairn.core.level import Level
from kvcairn.core.residency import ABSENT, EVICTING
from kvcairn.core.state import State
from kvcairn.index.arrays import Rows
from kvcairn.policy.admission import Flags
from kvcairn.types import MissReason, add_to

BATCH_BYTES = 16 << 20
BATCH_BLOCKS = 64
ASK_AGAIN_S = 1.0
MOST_TASKS = 3  # one thread of the tier stays free for reads
MOST_QUEUED = 1 << 16  # blocks that wait; what comes then is dropped


class WritesDown:
    """The queue of one tier."""

    def __init__(self, state: State, level: Level, drops: Drops, written: Callable[[], None]) -> None:
        """Write to that tier; `written()` is told of the end of each write."""
        self._state, self._level, self._written = state, level, written
        self._queue: deque[tuple[int, int]] = deque()  # row, serial
        self._queued: set[tuple[int, int]] = set()
        self._not_before: dict[tuple[int, int], float] = {}  # (row, serial) of blocks whose write failed
        # Asked for while a forgotten copy was still on its way out, parents first: (row, serial).
        self._leaving: dict[tuple[int, int], None] = {}
        self._batches = Batches(state, level, drops, self._dropped, self._batch_ended)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or being written."""
        return not self._queue and not self._batches.tasks

    def ask(self, rows: Rows) -> None:
        """Rows of a chain were seen: queue those that the policy wants and the tier lacks.

        With them go those of their ancestors that the tier lacks and a faster one has.
        """
        if not rows.size:
            return
        wants = self._level.admission.at_sight(self._state.tree.nodes.sights[rows])
        if not wants.any():
            return
        rows = rows[: rows.size - int(wants[::-1].argmax())]  # whatever stands before one that is wanted goes with it
        wanted = rows[self._lacks(rows) | self._leaves(rows)]
        if wanted.size and self._level.breaker.is_open(self._state.now()):
            for row in wanted.tolist():
                if not self._is_put_off(row):
                    self._dropped(MissReason.TIER_DOWN.value, row)
        elif wanted.size:
            self._want(np.concatenate([self._lacking_above(int(wanted[0])), wanted]))
        self._ask_again()
        self.pump()

    def ask_each(self, rows: Rows) -> None:
        """Queue rows that are no chain, such as what is about to leave a faster tier, each with its ancestors."""
        if self._level.breaker.is_open(self._state.now()):
            return
        for row, serial in zip(rows.tolist(), self._state.tree.nodes.serial[rows].tolist(), strict=True):
            if (row, serial) not in self._queued and not self._is_put_off(row):
                self._want(np.concatenate([self._lacking_above(row), np.array([row], dtype=np.intp)]))
        self.pump()

    def lost(self, rows: Rows, reason: str) -> None:
        """Rows leave the last of the faster tiers unwritten: count those that are not counted elsewhere."""
        serials = self._state.tree.nodes.serial[rows].tolist()
        names = zip(rows.tolist(), serials, strict=True)
        free = [row for row, serial in names if (row, serial) not in self._queued and not self._is_put_off(row)]
        add_to(self._level.writes_dropped, reason, len(free))

    def _want(self, chain: Rows) -> None:
        """Queue a chain, parents first."""
        leaves = self._leaves(chain)
        first = int(leaves.argmax()) if leaves.any() else chain.size
        for row in chain[:first].tolist():
            self._enqueue(row)
        for row in chain[first:].tolist():  # with a parent that is leaving, a child has to wait as well
            self._leaving[row, int(self._state.tree.nodes.serial[row])] = None

    def pump(self) -> None:
        """Start writes while there is something to write and a thread to do it."""
        limit = max(self._state.memory.residency.allocator.capacity_bytes // 2, 1)
        batches = self._batches
        while self._queue and batches.tasks < MOST_TASKS and batches.in_flight_bytes < limit:
            if batches.is_retiring:
                return
            if self._level.breaker.is_open(self._state.now()):
                self._drop_all(MissReason.TIER_DOWN.value)
                return
            batch = self._next_batch(min(BATCH_BYTES, limit - batches.in_flight_bytes))
            if batch is not None:
                self._level.budget.spend(batch.nbytes, time.time())
                self._batches.submit(batch)

    def _batch_ended(self) -> None:
        self._ask_again()
        self.pump()
        self._written()

    def forget(self) -> None:
        """Empty the queue: the tier is going."""
        self._drop_all("detached")
        self._leaving.clear()

    def _lacking_above(self, row: int) -> Rows:
        """Return the ancestors that have to be written first, root side first: up to the nearest that the tier has."""
        nodes = self._state.tree.nodes
        above: list[int] = []
        parent = int(nodes.parent[row])
        while parent >= 0 and (parent, int(nodes.serial[parent])) not in self._queued:
            one = np.array([parent], dtype=np.intp)
            if not (self._lacks(one) | self._leaves(one))[0]:
                break
            above.append(parent)
            parent = int(nodes.parent[parent])
        return np.array(above[::-1], dtype=np.intp)

    def _lacks(self, rows: Rows) -> Flags:
        """Which rows a faster tier has in some group that this tier has not."""
        return self._faster_has(rows, ABSENT)

    def _leaves(self, rows: Rows) -> Flags:
        """Which rows a faster tier has while this tier's copy was forgotten and is not gone yet."""
        return self._faster_has(rows, EVICTING)

    def _faster_has(self, rows: Rows, state: int) -> Flags:
        """Which rows a faster tier has in some group whose copy here is in this state."""
        flags = np.zeros(rows.size, dtype=np.bool_)
        for group in range(len(self._state.memory.residency.copies)):
            readable = self._batches.is_faster(group, rows)
            flags |= readable & (self._level.residency.of(group).state[rows] == state)
        return flags

    def _ask_again(self) -> None:
        """Queue what was asked for too early. What still cannot be written when all writes have ended is given up."""
        leaving, self._leaving = self._leaving, {}
        nodes = self._state.tree.nodes
        for row, serial in leaving:
            parent = int(nodes.parent[row])
            waits = (parent, int(nodes.serial[parent])) in self._leaving or bool(self._leaves(np.array([row]))[0])
            if int(nodes.serial[row]) != serial:
                continue
            if not waits:
                self._enqueue(row)
            elif self._batches.tasks:
                self._leaving[row, serial] = None
            else:
                self._dropped("held", row)

    def _is_put_off(self, row: int) -> bool:
        """Whether a write of the row was given up a moment ago."""
        serial = int(self._state.tree.nodes.serial[row])
        return self._not_before.get((row, serial), 0.0) > self._state.now()

    def _enqueue(self, row: int) -> None:
        serial = int(self._state.tree.nodes.serial[row])
        if (row, serial) in self._queued or self._is_put_off(row):
            return
        if len(self._queue) >= MOST_QUEUED:
            self._dropped("back_pressure", row)
            return
        self._not_before.pop((row, serial), None)
        self._queued.add((row, serial))
        self._queue.append((row, serial))

    def _next_batch(self, most_bytes: int) -> Batch | None:
        """Take from the queue what can be written in one task; what cannot be written is dropped and counted."""
        nodes = self._state.tree.nodes
        rows: list[int] = []
        block_bytes, unix_s = 0, time.time()
        while self._queue and len(rows) < BATCH_BLOCKS:
            row, serial = self._queue[0]
            if rows and (nodes.space[row] != nodes.space[rows[0]] or len(rows) * block_bytes >= most_bytes):
                break
            self._queue.popleft()
            self._queued.discard((row, serial))
            if int(nodes.serial[row]) != serial:
                self._dropped("back_pressure", None)
            elif not self._lacks(np.array([row]))[0]:
                self._count_skipped(row)
            elif int(nodes.parent[row]) not in rows and not self._parent_is_there(row):
                self._dropped(MissReason.PARENT_MISSING.value, row)
            elif not self._level.budget.allows(self._bytes_of(row) + len(rows) * block_bytes, unix_s):
                self._dropped("budget", row)
            else:
                rows.append(row)
                block_bytes = self._bytes_of(row)
        return self._batches.claim(rows) if rows else None

    def _bytes_of(self, row: int) -> int:
        space = self._state.spaces[int(self._state.tree.nodes.space[row])]
        return sum(self._level.residency.slot_bytes(space, group) for group in space.part_bytes)

    def _count_skipped(self, row: int) -> None:
        """Nothing can be written of a row: count it unless the tier has it, or gets it."""
        states = [int(copies.state[row]) for copies in self._level.residency.copies]
        if EVICTING in states:
            self._dropped("held", row)
        elif not any(states):
            self._dropped("back_pressure", row)

    def _is_here(self, row: int) -> bool:
        """Whether the tier has a copy of the row, or gets one."""
        return any(copies.state[row] not in (ABSENT, EVICTING) for copies in self._level.residency.copies)

    def _parent_is_there(self, row: int) -> bool:
        """Whether the block is of use there: with its parent, unless no layer group needs a whole prefix."""
        parent = int(self._state.tree.nodes.parent[row])
        space = self._state.spaces[int(self._state.tree.nodes.space[row])]
        return parent < 0 or self._is_here(parent) or not any(space.is_full(group) for group in space.part_bytes)

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
