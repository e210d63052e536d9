"""What lies on one tier: slots, states, holds and the order of leaving. Bookkeeping only, no bytes are moved.

A copy is claimed (RESERVED or WRITING, with its writer counted in `busy`), published (READY) and dropped. A copy that
is dropped while a transfer still reads or writes it turns EVICTING: nobody finds it any more, and it goes when the
transfer ends. A slot that a lease or a reservation still holds then outlives its copy as an *orphan*: it belongs to
its holders alone, and the block can be stored anew.
"""

from __future__ import annotations

import numpy as np
import numpy.ma  # np.unique loads it at its first call otherwise: some 10 ms in the middle of a store

from kvcairn.core.events import Readers
from kvcairn.core.spaces import SpaceInfo
from kvcairn.index.arrays import column, grown
from kvcairn.index.copies import NO_SLOT, Copies
from kvcairn.index.tree import Rows, Tree
from kvcairn.memory.slots import Addresses, SlotAllocator
from kvcairn.policy.eviction.base import EvictionPolicy
from kvcairn.types import CopyState, MissReason

ABSENT, RESERVED, WRITING = int(CopyState.ABSENT), int(CopyState.RESERVED), int(CopyState.WRITING)
READY, EVICTING = int(CopyState.READY), int(CopyState.EVICTING)


class Fastest:
    """For each layer group, the number of the fastest tier with a READY copy of each row, plus one; 0 for none."""

    def __init__(self, tree: Tree) -> None:
        """No groups yet."""
        self._tree = tree
        self._levels: list[Residency] = []
        self._columns: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []

    def set_levels(self, levels: list[Residency]) -> None:
        """Tell which tiers there are, the fastest first, and count anew."""
        self._levels = levels
        for level in levels:
            for group in range(len(level.copies)):
                self.recount(group, np.flatnonzero(self._tree.nodes.space[:-1] >= 0))

    def remove(self, number: int) -> None:
        """Tell that tier `number`, which has no READY copy any more, is gone: those behind it move up."""
        del self._levels[number]
        for numbers in self._columns:
            numbers -= numbers > number + 1  # one byte a row: far below a millisecond for a million

    def of(self, group: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return the column of a group, as long as the tree."""
        while group >= len(self._columns):
            self._columns.append(column("u1", self._tree.nodes.rows))
        if self._columns[group].size != self._tree.nodes.rows + 1:
            self._columns[group] = grown(self._columns[group], self._tree.nodes.rows)
        return self._columns[group]

    def recount(self, group: int, rows: Rows) -> None:
        """Find the fastest tier anew, after copies of these rows came or went."""
        best = np.zeros(rows.size, dtype=np.uint8)
        for number in range(len(self._levels) - 1, -1, -1):
            copies = self._levels[number].copies
            if group < len(copies):
                best[copies[group].state[rows] == READY] = number + 1
        self.of(group)[rows] = best


class Residency:
    """One tier's part of the index. Owner thread only."""

    def __init__(
        self,
        name: str,
        tree: Tree,
        allocator: SlotAllocator,
        policy: EvictionPolicy,
        fastest: Fastest,
        readers: Readers,
    ) -> None:
        """Start empty."""
        self.name, self.tree, self.allocator, self.policy = name, tree, allocator, policy
        self.fastest, self.readers = fastest, readers
        self.copies: list[Copies] = []
        self.orphans: dict[int, int] = {}  # holders by address
        self.counts = Counts()
        self.header_bytes = 0

    def of(self, group: int) -> Copies:
        """Return the columns of a group, made if need be."""
        while group >= len(self.copies):
            self.copies.append(self.tree.add_copies())
        return self.copies[group]

    def slot_bytes(self, space: SpaceInfo, group: int) -> int:
        """Size of a slot for one copy here."""
        return space.slot_bytes(group, self.header_bytes)

    def claim(self, space: SpaceInfo, group: int, rows: Rows, addresses: Addresses, state: CopyState) -> None:
        """Give slots to copies that are about to be written."""
        copies = self.of(group)
        copies.slot[rows], copies.state[rows] = addresses, int(state)
        copies.busy[rows] += 1
        self.tree.nodes.copies[rows] += 1
        self.allocator.bind(addresses, rows)
        self.counts.in_flight += rows.size
        self.counts.add(self.tree.nodes.space[rows], group, 1)

    def restore(self, group: int, rows: Rows, addresses: Addresses) -> None:
        """Take up READY copies of an earlier run; the caller adds them to the policy, in its own order."""
        copies = self.of(group)
        copies.slot[rows], copies.state[rows] = addresses, READY
        self.tree.nodes.copies[rows] += 1
        self.allocator.bind(addresses, rows)
        self.counts.add(self.tree.nodes.space[rows], group, 1)
        self.counts.let_go += 1  # what was found may leave
        self.counts.blocks += rows.size
        self._count_children(group, rows, 1)

    def publish(self, group: int, rows: Rows, now_s: float) -> None:
        """Make written copies READY, and their writer let go."""
        copies = self.copies[group]
        is_new = ~self.resident(rows)
        copies.state[rows] = READY
        copies.busy[rows] -= 1
        self.counts.let_go += 1
        self.counts.in_flight -= rows.size
        self.counts.blocks += rows.size
        self._count_children(group, rows, 1)
        self.fastest.recount(group, rows)
        self.policy.add(rows[is_new], now_s)
        self.readers.stored(self.name, rows[is_new])

    def drop(self, group: int, rows: Rows, reason: MissReason) -> None:
        """Make copies unreadable now, and free their slots: at once, or when the last that holds them lets go."""
        copies = self.copies[group]
        state = copies.state[rows]
        alive = (state != 0) & (state != EVICTING)
        rows, state = rows[alive], state[alive]
        ready = rows[state == READY]
        copies.state[rows] = EVICTING
        self.counts.in_flight -= rows.size - ready.size
        self.counts.blocks -= ready.size
        if ready.size:
            self._count_children(group, ready, -1)
            self.fastest.recount(group, ready)
            gone = ready[~self.resident(ready)]
            if reason is MissReason.EVICTED:
                self.policy.evict(gone)
            else:
                self.policy.remove(gone)
            self.tree.note_gone(ready, reason)
            self.readers.removed(self.name, gone)
        if ready.size < rows.size:
            written = rows[state != READY]
            self.tree.note_gone(written[self.tree.nodes.copies[written] == 1], reason)
            self._leave_to_writer(group, rows[state == RESERVED])
        self.free_unheld(group, rows)

    def abandon(self, group: int, rows: Rows, reason: MissReason | None) -> Addresses:
        """Take copies that were being written out of the index; return their slots, which stay given out."""
        copies = self.copies[group]
        self.counts.in_flight -= int((copies.state[rows] != EVICTING).sum())
        addresses: Addresses = copies.slot[rows].copy()
        if reason is not None:
            self.tree.note_gone(rows[self.tree.nodes.copies[rows] == 1], reason)
        copies.busy[rows] = 0
        self._vacate(group, rows)
        return addresses

    def let_go(self, group: int, rows: Rows) -> None:
        """A reader or writer counted in `busy` is done."""
        self.copies[group].busy[rows] -= 1
        self.counts.let_go += 1
        self.free_unheld(group, rows)

    def pin(self, space: SpaceInfo, group: int, rows: Rows) -> None:
        """Hold READY copies."""
        pins = self.copies[group].pins
        self.counts.pinned_bytes += int((pins[rows] == 0).sum()) * self.slot_bytes(space, group)
        pins[rows] += 1

    def unpin(self, space: SpaceInfo, group: int, rows: Rows, addresses: Addresses) -> None:
        """End a hold of copies that lay at `addresses` when it began."""
        copies = self.copies[group]
        is_there = copies.slot[rows] == addresses
        here = rows[is_there]
        copies.pins[here] -= 1
        self.counts.let_go += 1
        self.counts.pinned_bytes -= int((copies.pins[here] == 0).sum()) * self.slot_bytes(space, group)
        self.let_orphans_go(addresses[~is_there])
        self.free_unheld(group, here)

    def let_orphans_go(self, addresses: Addresses) -> None:
        """A holder of slots that outlived their copies is done."""
        for address in addresses.tolist():
            self.orphans[address] -= 1
            if not self.orphans[address]:
                del self.orphans[address]
                self.counts.pinned_bytes -= self.allocator.locate(address)[0].slot_bytes
                self.allocator.give(np.array([address], dtype=np.int32))

    def free_unheld(self, group: int, rows: Rows) -> None:
        """Take EVICTING copies that no transfer touches out; free their slots, or leave them to those that pin them."""
        copies = self.copies[group]
        rows = rows[(copies.state[rows] == EVICTING) & (copies.busy[rows] == 0)]
        if rows.size == 0:
            return
        self.counts.let_go += 1
        addresses: Addresses = copies.slot[rows].copy()
        pins = copies.pins[rows].copy()
        copies.pins[rows] = 0
        self._vacate(group, rows)
        self.orphans.update(zip(addresses[pins > 0].tolist(), pins[pins > 0].tolist(), strict=True))
        self.allocator.give(addresses[pins == 0])

    def check(self) -> None:
        """Raise AssertionError where columns and counters disagree."""
        self.allocator.check()
        ready = in_flight = 0
        for group, copies in enumerate(self.copies):
            held = np.flatnonzero(copies.state[:-1] != 0)
            assert (self.tree.nodes.space[held] >= 0).all(), f"{self.name}: copies of blocks that the tree forgot"
            slots = copies.slot[held]
            assert np.unique(slots).size == slots.size and (slots >= 0).all(), f"{self.name}: a slot has two owners"
            assert (copies.slot[:-1][copies.state[:-1] == 0] == NO_SLOT).all()
            assert (copies.pins[:-1] >= 0).all() and (copies.pins[:-1][copies.state[:-1] == 0] == 0).all()
            is_ready = np.flatnonzero(copies.state[:-1] == READY)
            parents = self.tree.nodes.parent[is_ready]
            counts = np.bincount(parents[parents >= 0], minlength=self.tree.nodes.rows + 1)
            assert (counts == copies.children).all(), f"{self.name}: group {group}: children are miscounted"
            ready += is_ready.size
            in_flight += int(np.isin(copies.state[held], (CopyState.RESERVED, CopyState.WRITING)).sum())
        taken = {int(slot) for copies in self.copies for slot in copies.slot[copies.slot != NO_SLOT]}
        assert not taken & self.orphans.keys() and all(pins > 0 for pins in self.orphans.values())
        assert (ready, in_flight) == (self.counts.blocks, self.counts.in_flight), f"{self.name}: counters are off"
        assert self.allocator.used_bytes <= self.allocator.capacity_bytes

    def _leave_to_writer(self, group: int, rows: Rows) -> None:
        """Take reserved copies out of the index; their slots belong to the reservation until it ends."""
        if rows.size:
            addresses = self.abandon(group, rows, None)
            self.orphans.update(dict.fromkeys(addresses.tolist(), 1))
            self.counts.pinned_bytes += sum(self.allocator.locate(a)[0].slot_bytes for a in addresses.tolist())

    def _vacate(self, group: int, rows: Rows) -> None:
        copies = self.copies[group]
        self.counts.add(self.tree.nodes.space[rows], group, -1)
        copies.slot[rows], copies.state[rows], copies.checksum[rows] = NO_SLOT, 0, 0
        self.tree.nodes.copies[rows] -= 1
        self.tree.prune(rows)

    def resident(self, rows: Rows) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which rows have a READY copy of any group here."""
        found = np.zeros(rows.size, dtype=np.bool_)
        for copies in self.copies:
            found |= copies.state[rows] == READY
        return found

    def _count_children(self, group: int, rows: Rows, by: int) -> None:
        parents = self.tree.nodes.parent[rows]
        np.add.at(self.copies[group].children, parents[parents >= 0], by)


class Counts:
    """Counters of one tier."""

    def __init__(self) -> None:
        """All zero."""
        self.blocks = self.in_flight = self.pinned_bytes = self.quarantined_bytes = 0
        self.let_go = 0  # grows whenever a copy may have become free to leave
        self.stuck: dict[int | None, int] = {}  # by slot size: `let_go` when nothing could leave
        self.copies: dict[tuple[int, int], int] = {}  # slots in use by (space, group)

    def add(self, spaces: np.ndarray[tuple[int], np.dtype[np.int32]], group: int, by: int) -> None:
        """Count slots taken or freed, one for each element of `spaces`."""
        if spaces.size == 0:
            return
        if spaces.size == 1 or (spaces == spaces[0]).all():
            numbers, counts = spaces[:1], np.array([spaces.size])
        else:
            numbers, counts = np.unique(spaces, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self.copies[number, group] = self.copies.get((number, group), 0) + by * count
