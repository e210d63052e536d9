"""Reservations: slots for blocks that are not in memory, published by their writer or given back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcairn.core.admitted import Admitted
from kvcairn.core.drops import Drops
from kvcairn.core.holds import Hold
from kvcairn.core.residency import READY
from kvcairn.core.spaces import SpaceInfo
from kvcairn.core.state import State
from kvcairn.index.arrays import NO_ROWS, Rows
from kvcairn.index.tree import ROOT, UNKNOWN_PARENT
from kvcairn.memory.slots import PAGE_BYTES, Addresses
from kvcairn.policy.admission import Sights
from kvcairn.requests import Commit, Reserve, Reserved
from kvcairn.types import CopyState, MissReason

Flags = npt.NDArray[np.bool_]
NO_SLOTS: Addresses = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class Part:
    """One group of a reservation: `at[j]` is the number, within the reservation, of the block in `rows[j]`."""

    at: Rows
    rows: Rows
    addresses: Addresses


class Store:
    """Reserve, then commit or abort."""

    def __init__(self, state: State, drops: Drops) -> None:
        """Store into that state's memory tier."""
        self._state, self._drops, self._admitted = state, drops, Admitted(state)
        self._parts: dict[int, tuple[list[int], list[Part]]] = {}  # by hold: block numbers, groups

    def reserve(self, request: Reserve) -> Reserved:
        """Take slots for what is absent of `keys[start:]`; shorter where there is no room."""
        state = self._state
        space = state.spaces[request.space]
        keys = request.keys
        if len(set(keys)) < len(keys):
            raise ValueError("a key stands twice in one call")
        self._drops.expired(space, keys)
        rows = state.tree.find(space.rows, keys)
        above = keys[request.start - 1] if request.start else request.parent
        hold = state.ledger.add(Hold("reservation", space, keys, start=request.start))
        # Eviction is leaf-first: with its nearest ancestor pinned none of those above can leave.
        if above and not request.start:
            self._pin_ready(hold, np.append(state.tree.find(space.rows, [above]), rows))
        else:
            self._pin_ready(hold, rows)
        wanted = rows[request.start :]
        absent = [self._absent(space, group, wanted, request.parts) for group in range(len(space.groups))]
        seen = self._admit(space, request, absent)
        taken, limit = self._take(space, absent)
        blocks = np.logical_or.reduce(absent)[:limit].nonzero()[0]
        in_flight = self._in_flight(space, wanted)
        linked = self._link(request, space, wanted, int(blocks[-1]) + 1 if blocks.size else 0)
        if seen is not None:
            state.tree.nodes.sights[linked] = np.maximum(state.tree.nodes.sights[linked], seen[: linked.size])
        parts = [self._claim(space, g, linked, absent[g][:limit], blocks, slots) for g, slots in enumerate(taken)]
        if not blocks.size:
            state.ledger.unpin(hold)
        self._parts[hold.number] = ((blocks + request.start).tolist(), parts)
        return self._reply(hold, in_flight, None if limit >= wanted.size else MissReason.NO_ROOM, request.start)

    def describe(self, hold: Hold) -> Reserved:
        """Return an open reservation as a reply, for a process that adopts it."""
        return self._reply(hold, [], None, 0)

    def commit(self, request: Commit) -> Rows:
        """Publish the blocks that are `ok`, give the others back; return the rows published."""
        state, memory, now = self._state, self._state.memory.residency, self._state.now()
        hold = state.ledger.get(request.reservation, "reservation")
        if request.ok is not None and len(request.ok) != len(self._parts[hold.number][0]):
            raise ValueError(
                f"ok has {len(request.ok)} elements for {len(self._parts[hold.number][0])} reserved blocks"
            )
        blocks, parts = self._parts.pop(hold.number)
        self._drops.expired(hold.space, hold.keys)  # a group that is new gives the old ones no new life
        ok = np.ones(len(blocks), dtype=np.bool_) if request.ok is None else np.array(request.ok, dtype=np.bool_)
        published = NO_ROWS
        for group, part in enumerate(parts):
            is_ours = memory.of(group).slot[part.rows] == part.addresses  # else forgotten or cleared meanwhile
            good = ok[part.at] & is_ours
            rows = part.rows[good]
            if request.checksums is not None and rows.size:
                sums = [request.checksums[group][at] or bytes(16) for at in part.at[good].tolist()]
                memory.of(group).checksum[rows] = np.frombuffer(b"".join(sums), dtype=np.uint8).reshape(-1, 16)
            state.tree.nodes.hinted.expires_s[rows] = 0
            memory.publish(group, rows, now)
            published = np.union1d(published, rows) if published.size else rows
            if rows.size < part.rows.size:
                self._discard(group, part, is_ours & ~good, ~is_ours)
        hold.shares = 1
        state.ledger.end(hold)
        return published

    def abort(self, number: int) -> None:
        """Give the slots back. A handle that others share only leaves."""
        hold = self._state.ledger.find(number, "reservation")
        if hold is None or not self._state.ledger.end(hold):
            return
        for group, part in enumerate(self._parts.pop(number)[1]):
            is_ours = self._state.memory.residency.of(group).slot[part.rows] == part.addresses
            self._discard(group, part, is_ours, ~is_ours)

    def check(self) -> None:
        """Raise AssertionError where open reservations and the books disagree."""
        assert set(self._parts) == {h.number for h in self._state.ledger.open_holds() if h.kind == "reservation"}

    def _discard(self, group: int, part: Part, unwritten: Flags, orphaned: Flags) -> None:
        """Give slots back: of copies that are still ours, and of those that are gone already."""
        memory = self._state.memory.residency
        memory.drop(group, part.rows[unwritten], MissReason.NOT_WRITTEN)
        memory.let_orphans_go(part.addresses[unwritten | orphaned])

    def _pin_ready(self, hold: Hold, rows: Rows) -> None:
        memory = self._state.memory.residency
        known = rows[rows >= 0]
        if known.size == 0:
            return
        for group in range(len(hold.space.groups)):
            ready = known[memory.of(group).state[known] == READY]
            self._state.ledger.pin(hold, memory, group, ready)

    def _absent(self, space: SpaceInfo, group: int, wanted: Rows, parts: list[list[int]] | None) -> Flags:
        """Which of the wanted blocks have no copy of this group in memory, in any state."""
        flags = self._state.memory.residency.of(group).state[wanted] == 0
        if parts is not None:
            flags &= np.array([group in chosen for chosen in parts[: wanted.size]], dtype=np.bool_)
        return np.asarray(flags, dtype=np.bool_)

    def _admit(self, space: SpaceInfo, request: Reserve, absent: list[Flags]) -> Sights | None:
        """Take from what is absent what memory's write policy does not want; return the sights before this one."""
        if self._state.memory.write_policy == "through":
            return None
        keys, anything = request.keys[request.start :], np.logical_or.reduce(absent)
        wanted, sights = self._admitted.choose(space, keys, anything, request.is_again)
        for flags in absent:
            flags &= wanted
        return np.where(sights, sights - 1, 0).astype(np.uint8)

    def _in_flight(self, space: SpaceInfo, wanted: Rows) -> list[int]:
        flags = np.zeros(wanted.size, dtype=np.bool_)
        for group in range(len(space.groups)):
            state = self._state.memory.residency.of(group).state[wanted]
            flags |= (state != 0) & (state != READY)
        in_flight: list[int] = flags.nonzero()[0].tolist()
        return in_flight

    def _take(self, space: SpaceInfo, absent: list[Flags]) -> tuple[list[Addresses], int]:
        """Take slots for the leading blocks, as many as get all they want; return them and the number of blocks.

        Groups take turns over runs of blocks, so that the first one does not leave nothing for the others.
        """
        groups, total = range(len(absent)), absent[0].size
        taken: list[list[Addresses]] = [[] for _ in groups]
        done, step = 0, total
        while done < total and step:
            wants = [int(flags[done : done + step].sum()) for flags in absent]
            run = [self._take_group(space, group, wants[group]) for group in groups]
            if len(absent) == 1:
                short = np.flatnonzero(absent[0])[run[0].size :]
                return run, int(short[0]) if short.size else total
            if any(slots.size < want for slots, want in zip(run, wants, strict=True)):
                for slots in run:
                    self._state.memory.residency.allocator.give(slots)
                step //= 2
                continue
            for group in groups:
                taken[group].append(run[group])
            done += step
            step = min(step, total - done)
        return [np.concatenate(slots) if slots else NO_SLOTS for slots in taken], done

    def _take_group(self, space: SpaceInfo, group: int, count: int) -> Addresses:
        memory = self._state.memory
        if count == 0:
            return NO_SLOTS
        slot_bytes = memory.residency.slot_bytes(space, group)
        room = memory.room(self._state.spaces).make(slot_bytes, count)
        return memory.residency.allocator.take(slot_bytes, min(room, count))

    def _link(self, request: Reserve, space: SpaceInfo, wanted: Rows, reserved: int) -> Rows:
        """Make rows for the first `reserved` blocks wanted; link them, and known ones right behind; return them."""
        behind = (wanted[reserved:] < 0).nonzero()[0]
        last = reserved + (int(behind[0]) if behind.size else wanted.size - reserved)
        chain = request.keys[request.start : request.start + last]
        parent = self._parent_row(space, request, request.keys) if reserved else UNKNOWN_PARENT
        found = wanted[:last] if parent < 0 else None  # the row of a parent may be new
        return self._state.tree.ensure(space.rows, chain, parent, found)

    def _claim(self, space: SpaceInfo, group: int, rows: Rows, absent: Flags, blocks: Rows, slots: Addresses) -> Part:
        """Give the slots to the absent copies of one group."""
        chosen = absent.nonzero()[0]
        self._state.memory.residency.claim(space, group, rows[chosen], slots, CopyState.RESERVED)
        return Part(np.searchsorted(blocks, chosen), rows[chosen], slots)

    def _parent_row(self, space: SpaceInfo, request: Reserve, keys: list[bytes]) -> int:
        """Return the row before the first block wanted, made if the block is not known."""
        above = keys[request.start - 1] if request.start else request.parent
        if not above:
            return ROOT if above is None else UNKNOWN_PARENT
        return int(self._state.tree.ensure(space.rows, [above], UNKNOWN_PARENT)[0])

    def _reply(self, hold: Hold, in_flight: list[int], reason: MissReason | None, start: int) -> Reserved:
        blocks, parts = self._parts[hold.number]
        counts = self._state.memory.residency.counts
        others = counts.pinned_bytes or counts.in_flight or counts.quarantined_bytes or self._state.memory.tasks
        is_final = reason is not None and not blocks and not in_flight and not others
        offsets = np.full((len(hold.space.groups), len(blocks)), -1, dtype=np.int64)
        for group, part in enumerate(parts):
            offsets[group][part.at] = part.addresses.astype(np.int64) * PAGE_BYTES
        writing = [start + i for i in in_flight]
        return Reserved(hold.number, blocks, offsets.tolist(), writing, reason, is_final)
