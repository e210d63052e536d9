"""Takes up what a tier could not list when it was opened: one segment after the other, while the tier serves.

The segments keep their room until they have been read: nothing is written to them. What is found is readable at
once. Where a block has been stored anew meanwhile, or was forgotten or cleared, what is found of it is deleted.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np

from kvcairn.core.drops import Drops
from kvcairn.core.level import Level
from kvcairn.core.residency import ABSENT, READY
from kvcairn.core.spaces import SpaceInfo
from kvcairn.core.state import State
from kvcairn.errors import TierError
from kvcairn.index.arrays import Rows
from kvcairn.memory.slots import Addresses
from kvcairn.tiers.base import Delete
from kvcairn.tiers.inventory import Inventory, Places
from kvcairn.transfer.task import Task
from kvcairn.types import MissReason, add_to

logger = logging.getLogger(__name__)

SCANS = 2  # at a time, on threads of their own
SCAN_PRIORITY = 300
BLOCKS_AT_ONCE = 512  # taken up under one hold of the lock
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
TELL_S = 10.0
NEVER_S = float("inf")


class Rebuild:
    """The unlisted segments of one tier. Every method is called with the lock held."""

    def __init__(self, state: State, level: Level, drops: Drops) -> None:
        """Keep the room of those that fit; those that do not are given up, those written longest ago first."""
        self._state, self._level, self._drops = state, level, drops
        self._failures: dict[int, int] = {}
        allocator = level.residency.allocator
        for number, nbytes in level.tier.unlisted.items() if level.tier is not None else ():
            if allocator.keep(number, nbytes):
                level.unscanned.segments[number] = nbytes
            else:
                allocator.retired.append(number)
        self._not_before = dict.fromkeys(level.unscanned.segments, 0.0)
        self._blocks, self._told_s = 0, state.now()
        if level.unscanned:
            segments = len(self._not_before)
            logger.warning("tier %r: the index is made anew from %d segments, while it serves", level.name, segments)

    def pump(self) -> None:
        """Start what can be started now."""
        tier, now = self._level.tier, self._state.now()
        while tier is not None and self._level.unscanned.scans < SCANS:
            number = next((number for number, at_s in self._not_before.items() if at_s <= now), None)
            if number is None:
                return
            del self._not_before[number]
            self._level.unscanned.scans += 1
            # A lane of its own: reading a segment takes long, and must not hold up the tier's calls.
            self._state.executor.submit(
                Task(
                    f"{self._level.name} rebuild",
                    "scan",
                    partial(tier.scan, number),
                    partial(self._done, number),
                    lambda: None,
                    SCAN_PRIORITY,
                    NEVER_S,
                )
            )

    # --- from here on: on a transfer thread, which takes the lock itself

    def _done(self, number: int, value: Any, error: TierError | None) -> None:
        """A segment was read, or could not be."""
        if error is None:
            self._take_up_segment(number, Inventory.of(value))
        with self._state.changed:
            self._level.unscanned.scans -= 1
            if self._is_over:
                return
            if error is None:
                self._level.unscanned.taken_up(number)
                self._tell()
            else:
                self._try_again(number, error)
            self.pump()
            self._state.notify()

    @property
    def _is_over(self) -> bool:
        return self._state.is_closing or self._level.is_leaving

    def _try_again(self, number: int, error: TierError) -> None:
        add_to(self._level.errors, type(error).__name__)
        self._failures[number] = failures = self._failures.get(number, 0) + 1
        self._not_before[number] = self._state.now() + min(FIRST_PAUSE_S * 2 ** min(failures, 9), LONGEST_PAUSE_S)
        logger.warning(
            "tier %r: segment %d could not be read, which is tried again: %s", self._level.name, number, error
        )

    def _tell(self) -> None:
        left, name = len(self._level.unscanned.segments), self._level.name
        if not left:
            logger.warning("tier %r: the index is complete again, with %d blocks found", name, self._blocks)
        elif self._state.now() - self._told_s >= TELL_S:
            self._told_s = self._state.now()
            logger.warning("tier %r: %d segments are still to be read", name, left)

    def _take_up_segment(self, number: int, found: Inventory) -> None:
        allocator = self._level.residency.allocator
        with self._state.changed:
            if self._is_over:
                return
            allocator.let_go(number)
            addresses = allocator.restore(found.place)
            if number not in allocator.segments:
                allocator.retired.append(number)
        deletes = _deletes(found.take(np.flatnonzero(addresses < 0)))
        placed = np.flatnonzero(addresses >= 0)
        for begin in range(0, placed.size, BLOCKS_AT_ONCE):
            part = placed[begin : begin + BLOCKS_AT_ONCE]
            with self._state.changed:
                if self._is_over:
                    return
                deletes += self._take_up(found.take(part), addresses[part])
                self._state.notify()
        with self._state.changed:
            self._drops.delete(self._level, deletes)

    def _take_up(self, found: Inventory, addresses: Addresses) -> list[Delete]:
        """Make copies readable; return those that are not wanted."""
        deletes: list[Delete] = []
        for space_id, mine in found.spaces():
            is_unwanted = self._level.unscanned.is_unwanted(space_id, found, mine)
            alive, refused = mine[~is_unwanted], [mine[is_unwanted]]
            if alive.size:
                space = self._state.spaces.known(space_id)
                refused.append(alive[self._take_up_space(space, found.take(alive), addresses[alive], deletes)])
            for each in refused:
                deletes += _deletes(found.take(each))
                self._level.residency.allocator.give(addresses[each])
        return deletes

    def _take_up_space(self, space: SpaceInfo, found: Inventory, addresses: Addresses, deletes: list[Delete]) -> Places:
        """Take up copies of one space; return the places of those that lost to another copy of their block."""
        tree, residency = self._state.tree, self._level.residency
        parents = dict(zip(found.key, found.parent, strict=True))
        tree.adopt(space.rows, list(parents), list(parents.values()))
        rows, generation = tree.find(space.rows, found.key), found.place[:, 4]
        taken = np.zeros(len(found), dtype=np.bool_)
        for group in np.unique(found.group).tolist():
            newest = np.argsort(-generation, kind="stable")
            newest = newest[found.group[newest] == group]
            _, once = np.unique(rows[newest], return_index=True)
            at = newest[np.sort(once)]
            self._drop_older(space, group, rows[at], generation[at], deletes)
            at = at[residency.of(group).state[rows[at]] == ABSENT]
            if at.size:
                space.part_bytes.setdefault(group, int(found.nbytes[at[0]]))
                is_new = ~residency.resident(rows[at])
                residency.restore(group, rows[at], addresses[at])
                residency.of(group).checksum[rows[at]] = found.checksum[at]
                self._state.fastest.recount(group, rows[at])
                residency.policy.add(rows[at][is_new], self._state.now())
                residency.readers.stored(self._level.name, rows[at][is_new])
                self._blocks += at.size
            taken[at] = True
        tree.prune(np.unique(rows[~taken]))
        return np.flatnonzero(~taken)

    def _drop_older(
        self, space: SpaceInfo, group: int, rows: Rows, generation: np.ndarray[Any, Any], deletes: list[Delete]
    ) -> None:
        """Drop the copies that are there already and are older than what was found."""
        copies = self._level.residency.of(group)
        there = np.flatnonzero(copies.state[rows] == READY)
        held = [self._level.slot(address).generation for address in copies.slot[rows[there]].tolist()]
        older = rows[there[generation[there] > np.array(held, dtype=np.int64)]]
        if older.size:
            deletes += self._level.deletes(space, group, older)
            copies_of = self._state.tree.nodes.copies
            copies_of[older] += 1  # so that the rows stay for what comes in their place
            self._level.residency.drop(group, older, MissReason.EVICTED)
            copies_of[older] -= 1


def _deletes(found: Inventory) -> list[Delete]:
    return [Delete(item.block, item.slot) for item in found]
