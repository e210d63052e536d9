"""Reads from a slower tier into memory of a client in this process: nothing takes a slot."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcairn.core.drops import Drops
from kvcairn.core.hung import HungCall
from kvcairn.core.level import Level, submit
from kvcairn.core.promote import verified
from kvcairn.core.spaces import SpaceInfo
from kvcairn.core.state import State
from kvcairn.core.walk import Levels, renumber
from kvcairn.errors import TierError
from kvcairn.index.arrays import Rows
from kvcairn.policy.planner import Sample
from kvcairn.requests import JobStatus, ReadInto
from kvcairn.tiers.base import BlockRef, Outcome, Read
from kvcairn.transfer.task import Task, TaskState
from kvcairn.types import JobState, MissReason

READ_PRIORITY = 0


@dataclass(slots=True, eq=False)
class Part:
    """One copy on its way: read into `out`, which is the client's."""

    block: int
    group: int
    row: int
    level: Level
    out: memoryview


@dataclass(slots=True, eq=False)
class Call:
    """One read task."""

    task: Task
    parts: list[Part]
    hung: HungCall
    sample: Sample


@dataclass(slots=True, eq=False)
class DirectRead:
    """The reads of one call. It has ended when no tier can touch the memory any more."""

    space: SpaceInfo
    levels: Levels  # by block: number of the tier that it comes from, plus one
    ok: list[bool]
    tasks: dict[int, Call] = field(default_factory=dict)  # those that may still touch the memory
    is_wanted: bool = True  # else nothing of it counts as a hit


class DirectReads:
    """All open direct reads."""

    def __init__(self, state: State, drops: Drops) -> None:
        """Read from that state's tiers."""
        self._state, self._drops = state, drops
        self._open: dict[int, DirectRead] = {}
        self._next = 0

    def start(self, space: SpaceInfo, keys: list[bytes], request: ReadInto) -> JobStatus:
        """Read the leading run of `keys` that lies on slower tiers only; `total` of the reply is its length."""
        state = self._state
        rows = state.tree.find(space.rows, keys)
        usable = [state.walker.usable(group, rows, state.now()) for group in range(len(space.groups))]
        below = np.all([levels > 1 for levels in usable], axis=0)
        count = below.size if below.all() else int(below.argmin())
        read = DirectRead(space, np.max(usable, axis=0)[:count], [True] * count)
        self._next += 1
        self._open[self._next] = read
        for level, parts in self._parts(read, rows, usable, request).items():
            self._submit(read, level, parts)
        return self.status(self._next)

    def status(self, number: int) -> JobStatus:
        """Return how far a direct read is; once it has ended it is counted and forgotten."""
        read = self._open.get(number)
        if read is None:
            return JobStatus(number, JobState.CANCELLED, 0, 0)
        good = read.ok.index(False) if False in read.ok else len(read.ok)
        if read.tasks:
            return JobStatus(number, JobState.LOADING, 0, len(read.ok))
        del self._open[number]
        if read.is_wanted:
            self._state.count(good, read.levels[:good], None)
        return JobStatus(number, JobState.READY, good, len(read.ok), None, read.ok)

    def renumber(self, gone: int) -> None:
        """A tier was taken away; see `walk.renumber`."""
        for read in self._open.values():
            renumber(read.levels, gone)

    def cancel(self, number: int) -> None:
        """Take reads back that have not begun."""
        read = self._open.get(number)
        for call in list(read.tasks.values()) if read else []:
            if read is not None:
                read.is_wanted = False
            if read is not None and self._state.executor.cancel(call.task):
                failed = TierError(call.task.tier, "read", "cancelled")
                call.parts[0].level.speed.forget(call.sample)
                self._end(read, call.task, call.parts, [failed] * len(call.parts))

    def _parts(self, read: DirectRead, rows: Rows, usable: list[Levels], request: ReadInto) -> dict[Level, list[Part]]:
        """Say what is read from which tier."""
        parts: dict[Level, list[Part]] = {}
        for block in range(len(read.ok)):
            begin = request.addresses[block]
            for group, nbytes in read.space.part_bytes.items():
                level = self._state.levels[int(usable[group][block]) - 1]
                parts.setdefault(level, []).append(
                    Part(block, group, int(rows[block]), level, memory_at(begin, nbytes))
                )
                begin += nbytes
        return parts

    def _submit(self, read: DirectRead, level: Level, parts: list[Part]) -> None:
        tier = level.tier
        assert tier is not None
        tree, residency = self._state.tree, level.residency
        reads = []
        for part in parts:
            copies = residency.copies[part.group]
            copies.busy[part.row] += 1
            block = BlockRef(read.space.rows.space_id, tree.key(part.row), part.group)
            digest = copies.checksum[part.row].tobytes()
            wanted = digest if any(digest) else b""
            reads.append(Read(block, level.slot(int(copies.slot[part.row])), part.out, wanted))

        def run() -> Any:
            return verified(reads, tier.read(reads))

        hung = HungCall(self._state)
        task = Task(
            level.name,
            "read",
            run,
            done=lambda outcomes, error: self._done(read, task, level, parts, outcomes, error),
            late=hung.returned,
            priority=READ_PRIORITY,
            timeout_s=level.timeout_s,
        )
        sample = level.speed.begin(sum(len(part.out) for part in parts), self._state.now())
        read.tasks[id(task)] = Call(task, parts, hung, sample)
        submit(level, self._state.executor, task)

    def _done(
        self, read: DirectRead, task: Task, level: Level, parts: list[Part], outcomes: Any, error: TierError | None
    ) -> None:
        with self._state.changed:
            if error is None and (not isinstance(outcomes, list) or len(outcomes) != len(parts)):
                error = TierError(level.name, "read", "the tier returned no outcome for each block")
            results = [error] * len(parts) if error is not None else outcomes
            failed = next((o for o in results if isinstance(o, TierError)), None)
            level.note(failed, self._state.now())
            level.measured(read.tasks[id(task)].sample, failed, self._state.now())
            self._end(read, task, parts, results)
            self._state.notify()

    def _end(self, read: DirectRead, task: Task, parts: list[Part], outcomes: list[Outcome]) -> None:
        """A task has its outcomes; the memory is free unless it was given up and its call still runs."""
        call = read.tasks[id(task)]
        parts[0].level.tasks -= 1
        for part, outcome in zip(parts, outcomes, strict=True):
            one = np.array([part.row], dtype=np.intp)
            part.level.residency.let_go(part.group, one)
            if outcome is not None:
                read.ok[part.block] = False
                if isinstance(outcome, MissReason):
                    self._drops.copies(part.level, read.space, part.group, one, outcome)
        if task.state is TaskState.GIVEN_UP:
            call.hung.leave(lambda: read.tasks.__delitem__(id(task)))
        else:
            del read.tasks[id(task)]


def memory_at(address: int, nbytes: int) -> memoryview:
    """Return memory of this process as writable bytes. The caller vouches for the address."""
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")
