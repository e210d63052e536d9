"""Write tasks of one slower tier: runs of blocks get slots, are written, and are published in chain order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcairn.checksum import checksum
from kvcairn.core.drops import Drops
from kvcairn.core.hung import HungCall
from kvcairn.core.level import Level
from kvcairn.core.residency import ABSENT, EVICTING, READY, WRITING
from kvcairn.core.spaces import SpaceInfo
from kvcairn.core.staging import Staging
from kvcairn.core.state import State
from kvcairn.errors import TierError, TierFull
from kvcairn.index.arrays import Rows
from kvcairn.memory.slots import PAGE_BYTES, Addresses
from kvcairn.policy.admission import Flags
from kvcairn.tiers.base import BlockRef, Delete, Tier, Write
from kvcairn.transfer.task import Task, TaskState
from kvcairn.types import CopyState, MissReason

WRITE_PRIORITY = 100


@dataclass(slots=True, eq=False)
class Part:
    """Copies of one layer group to be written down, in chain order.

    Until the end `parents` are held on the tier, and `sources` (rows by the tier that they are read from) there.
    """

    group: int
    rows: Rows
    addresses: Addresses
    parents: Rows
    sources: list[tuple[Level, Rows]]


@dataclass(slots=True, eq=False)
class Batch:
    """One write task: a run of blocks of one space."""

    space: SpaceInfo
    hung: HungCall
    parts: list[Part] = field(default_factory=list)
    nbytes: int = 0
    task: Task | None = None
    retired: list[int] = field(default_factory=list)  # segments whose space is given back before the write
    staged: dict[tuple[int, int], memoryview | None] = field(default_factory=dict)  # see `Staging`


class Batches:
    """Starts and ends the write tasks of one tier.

    Blocks that were not written are told to `dropped(reason, row)`, the end of each task to `ended()`.
    """

    def __init__(
        self,
        state: State,
        level: Level,
        drops: Drops,
        dropped: Callable[[str, int | None], None],
        ended: Callable[[], None],
    ) -> None:
        """Write to that tier."""
        self._state, self._level, self._drops = state, level, drops
        self._dropped, self._ended = dropped, ended
        self.tasks = self.in_flight_bytes = 0
        self.is_retiring = False  # a batch is giving space back, which others must not count on before it is done
        self._staging = Staging(state, drops)

    def is_faster(self, group: int, rows: Rows) -> Flags:
        """Which rows have a readable copy of a group on a faster tier."""
        levels = self._state.levels
        number = levels.index(self._level) if self._level in levels else 0
        fastest = self._state.fastest.of(group)[rows]
        return np.asarray((fastest > 0) & (fastest <= number))

    def claim(self, rows: list[int]) -> Batch | None:
        """Give a run of rows slots on the tier; those that find no room are dropped."""
        space = self._state.spaces[int(self._state.tree.nodes.space[rows[0]])]
        batch = Batch(space, HungCall(self._state))
        for group in space.part_bytes:
            part = self._claim_group(space, group, np.array(rows, dtype=np.intp))
            if part.rows.size:
                batch.parts.append(part)
                batch.nbytes += part.rows.size * self._level.residency.slot_bytes(space, group)
        return batch if batch.parts else None

    def _claim_group(self, space: SpaceInfo, group: int, rows: Rows) -> Part:
        residency = self._level.residency
        there, faster = residency.of(group), self.is_faster(group, rows)
        for row in rows[faster & (there.state[rows] == EVICTING)].tolist():
            self._dropped("held", row)
        rows = rows[faster & (there.state[rows] == ABSENT)]
        sources = self._sources(group, rows)
        for source, mine in sources:  # before room is made: neither the blocks nor their parents may leave for it
            source.residency.of(group).busy[mine] += 1
        parents = self._state.tree.nodes.parent[rows]
        parents = parents[parents >= 0].astype(np.intp)
        parents = parents[there.state[parents] == READY]
        np.add.at(there.busy, parents, 1)
        slot_bytes = residency.slot_bytes(space, group)
        room = self._level.room(self._state.spaces).make(slot_bytes, rows.size) if rows.size else 0
        addresses = residency.allocator.take(slot_bytes, min(room, rows.size))
        left, rows = rows[addresses.size :], rows[: addresses.size]
        for row in left.tolist():
            self._dropped("rebuilding" if self._level.unscanned else MissReason.NO_ROOM.value, row)
        if left.size:
            for source, mine in sources:
                source.residency.let_go(group, mine[np.isin(mine, left)])
            sources = [(source, mine[~np.isin(mine, left)]) for source, mine in sources]
        residency.claim(space, group, rows, addresses, CopyState.WRITING)
        part = Part(group, rows, addresses, parents, sources)
        if not rows.size:
            self._let_parents_go(part)
        return part

    def _sources(self, group: int, rows: Rows) -> list[tuple[Level, Rows]]:
        """Say which rows are read from which tier: the fastest that has them."""
        fastest = self._state.fastest.of(group)[rows]
        if rows.size and (fastest == 1).all():
            return [(self._state.memory, rows)]
        return [(self._state.levels[n - 1], rows[fastest == n]) for n in np.unique(fastest).tolist()]

    def _let_sources_go(self, part: Part) -> None:
        for source, rows in part.sources:
            source.residency.let_go(part.group, rows)

    def _let_parents_go(self, part: Part) -> None:
        """Let the parents on the tier go: once for each child that was written."""
        parents, children = np.unique(part.parents, return_counts=True)
        self._level.residency.of(part.group).busy[parents] -= children.astype(np.uint16)
        self._level.residency.free_unheld(part.group, parents)

    def submit(self, batch: Batch) -> None:
        """Write a batch on a transfer thread; what is not in memory is read first, on threads of the tier it is on."""
        allocator = self._level.residency.allocator
        batch.retired, allocator.retired = allocator.retired, []
        self.tasks += 1
        self._level.tasks += 1
        self.is_retiring = bool(batch.retired)
        self.in_flight_bytes += batch.nbytes
        sources = [(part.group, source, rows) for part in batch.parts for source, rows in part.sources]
        self._staging.start(batch.space, sources, batch.staged, lambda: self._write(batch))

    def _write(self, batch: Batch) -> None:
        tier = self._level.tier
        assert tier is not None

        def run() -> tuple[list[bytes], Any]:
            if batch.retired:  # first: the batch needs their space
                tier.retire(batch.retired)
            if self._level.budget_file is not None:  # before the write: a crash must not give it back
                self._level.budget_file.save(self._level.budget)
            return self._written(batch, tier)

        batch.task = Task(
            self._level.name,
            "write",
            run,
            done=lambda value, error: self._done(batch, value, error),
            late=batch.hung.returned,
            priority=WRITE_PRIORITY,
            timeout_s=self._level.timeout_s,
        )
        self._state.executor.submit(batch.task)

    def _written(self, batch: Batch, tier: Tier) -> tuple[list[bytes], Any]:
        """Write a batch, on a transfer thread; return a checksum and an outcome for each of its copies."""
        writes = self._writes(batch)
        there = [write for write in writes if write is not None]
        if len(there) == len(writes):
            return [write.checksum for write in there], tier.write(there)
        outcomes = tier.write(there) if there else []
        if not isinstance(outcomes, list) or len(outcomes) != len(there):
            return [], outcomes
        each = iter(outcomes)
        return (
            [write.checksum if write else bytes(16) for write in writes],
            [next(each) if write else MissReason.PARENT_MISSING for write in writes],
        )

    def _writes(self, batch: Batch) -> list[Write | None]:
        """Describe the batch for the tier, on a transfer thread: what it names is held, so it needs no lock.

        None stands for a block that could not be read, and for those behind it.
        """
        tree, space, writes = self._state.tree, batch.space, list[Write | None]()
        for part in batch.parts:
            copies, nbytes = self._state.memory.residency.copies[part.group], space.part_bytes[part.group]
            unread: set[int] = set()
            for row, address in zip(part.rows.tolist(), part.addresses.tolist(), strict=True):
                if (part.group, row) in batch.staged:
                    data = batch.staged[part.group, row]
                else:
                    begin = int(copies.slot[row]) * PAGE_BYTES
                    data = self._state.arena.view[begin : begin + nbytes].toreadonly()
                if data is None or (int(tree.nodes.parent[row]) in unread and space.is_full(part.group)):
                    unread.add(row)
                    writes.append(None)
                    continue
                block = BlockRef(space.rows.space_id, tree.key(row), part.group)
                known = self._checksum(part, row) or checksum(data)
                writes.append(Write(block, tree.parent_key(row), self._level.slot(address), data, known))
        return writes

    def _checksum(self, part: Part, row: int) -> bytes:
        """Return what is known of the bytes that are read for a row: empty where that is nothing."""
        for source, _ in part.sources:
            known = source.residency.copies[part.group].checksum[row]
            if known.any():
                return bytes(known.tobytes())
        return b""

    def _done(self, batch: Batch, value: Any, error: TierError | None) -> None:
        """A write ended, on a transfer thread."""
        with self._state.changed:
            self._level.tasks -= 1
            self.tasks -= 1
            self.in_flight_bytes -= batch.nbytes
            if batch.retired:
                self.is_retiring = False
                if error is not None:
                    self._level.residency.allocator.retired += batch.retired
            blocks = sum(part.rows.size for part in batch.parts)
            checksums, outcomes = value if error is None else ([], None)
            if error is None and (not isinstance(outcomes, list) or len(outcomes) != blocks):
                error = TierError(self._level.name, "write", "the tier returned no outcome for each block")
            outcomes = outcomes if error is None else [error] * blocks
            self._level.note(next((o for o in outcomes if isinstance(o, TierError)), None), self._state.now())
            begin = 0
            for part in batch.parts:
                end = begin + part.rows.size
                self._note_checksums(part, checksums[begin:end])
                if batch.task is not None and batch.task.state is TaskState.GIVEN_UP:
                    self._leave(batch, part)
                else:
                    self._finish(batch, part, outcomes[begin:end])
                begin = end
            self._ended()
            self._state.notify()

    def _note_checksums(self, part: Part, checksums: list[bytes]) -> None:
        if checksums:
            sums = np.frombuffer(b"".join(checksums), dtype=np.uint8).reshape(-1, 16)
            for source, rows in part.sources:
                source.residency.copies[part.group].checksum[rows] = sums[np.isin(part.rows, rows)]
            self._level.residency.copies[part.group].checksum[part.rows] = sums

    def _finish(self, batch: Batch, part: Part, outcomes: list[Any]) -> None:
        """Publish what was written, in chain order; drop what was not, or is not wanted any more."""
        residency, group, rows = self._level.residency, part.group, part.rows
        done = np.array([outcome is None for outcome in outcomes], dtype=np.bool_)
        good = done & (residency.copies[group].state[rows] == WRITING)
        residency.publish(group, rows[good], self._state.now())
        if good.any():  # leaves are to go before their parents, which were published before them
            chain = self._state.tree.ancestors(int(rows[good][0]))[::-1]
            residency.policy.refresh(np.concatenate([np.array(chain, dtype=np.intp), rows[good]]), self._state.now())
        deletes = [
            Delete(BlockRef(batch.space.rows.space_id, self._state.tree.key(row), group), self._level.slot(address))
            for row, address, outcome in zip(
                rows[~good].tolist(),
                part.addresses[~good].tolist(),
                np.array(outcomes, dtype=object)[~good],
                strict=True,
            )
            if not isinstance(outcome, TierFull)  # also where it failed: it may be there all the same
        ]
        for row, outcome in zip(rows.tolist(), outcomes, strict=True):
            if outcome is not None:
                self._dropped(_why(outcome), row)
        residency.drop(group, rows[~good], MissReason.NOT_WRITTEN)
        residency.let_go(group, rows[~good])
        self._let_sources_go(part)
        self._let_parents_go(part)
        self._drops.delete(self._level, deletes)

    def _deletes(self, batch: Batch, part: Part, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[Delete]:
        space_id, tree = batch.space.rows.space_id, self._state.tree
        return [
            Delete(BlockRef(space_id, tree.key(row), part.group), self._level.slot(address))
            for row, address in zip(part.rows[chosen].tolist(), part.addresses[chosen].tolist(), strict=True)
        ]

    def _leave(self, batch: Batch, part: Part) -> None:
        """The call hangs: nobody gets the slots that it may write to, or read from, before it returns."""
        deletes = self._deletes(batch, part, np.ones(part.rows.size, dtype=np.bool_))
        give_back = self._level.quarantine(self._level.residency.abandon(part.group, part.rows, None))
        for row in part.rows.tolist():
            self._dropped("tier_error", row)

        def free() -> None:
            give_back()
            self._let_sources_go(part)
            self._let_parents_go(part)
            self._drops.delete(self._level, deletes)

        batch.hung.leave(free)


def _why(outcome: Any) -> str:
    """Name the reason of a write that was dropped."""
    if isinstance(outcome, MissReason):
        return MissReason.PARENT_MISSING.value if outcome is MissReason.PARENT_MISSING else "tier_error"
    return "tier_full" if isinstance(outcome, TierFull) else "tier_error"
