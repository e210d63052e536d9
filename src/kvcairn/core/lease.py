"""Leases: blocks in memory that a client reads."""

from __future__ import annotations

import numpy as np

from kvcairn.core.drops import Drops
from kvcairn.core.holds import Hold
from kvcairn.core.spaces import SpaceInfo
from kvcairn.core.state import State
from kvcairn.core.walk import Levels, renumber
from kvcairn.index.arrays import Rows
from kvcairn.memory.lease import SAMPLED
from kvcairn.memory.slots import PAGE_BYTES
from kvcairn.requests import Leased
from kvcairn.types import MissReason


class Leases:
    """Make, share and end leases."""

    def __init__(self, state: State, drops: Drops) -> None:
        """Work on that state."""
        self._state, self._drops = state, drops
        self._open: dict[int, tuple[Rows, Leased]] = {}  # by lease: rows of its blocks, and what the client knows
        self._counted: dict[int, tuple[int, Levels, MissReason | None]] = {}  # by lease

    def make(
        self,
        space: SpaceInfo,
        keys: list[bytes],
        rows: Rows,
        lengths: tuple[int, ...] | range,
        reason: MissReason | None,
        exempt: Hold | None = None,
    ) -> Leased:
        """Lease the longest run that memory and the cap allow.

        Args:
            space: of the blocks.
            keys: the blocks asked for.
            rows: row of each key.
            lengths: those that can be restored from memory, ascending.
            reason: why no more are wanted.
            exempt: a hold whose pins the lease takes over, and which do not count against the cap.
        """
        memory = self._state.memory.residency
        length = lengths[-1] if lengths else 0
        if length and exempt is None:
            affordable = self._affordable(space, rows, lengths)
            reason = MissReason.NO_ROOM if affordable < length else reason
            length = affordable
        hold = self._state.ledger.add(Hold("lease", space, keys))
        for group, (low, high) in enumerate(space.ranges(length)):
            self._state.ledger.pin(hold, memory, group, rows[low:high])
        leased = self._describe(hold, rows[:length], reason if length < len(keys) else None)
        self._open[hold.number] = rows[:length], leased
        return leased

    def describe(self, hold: Hold) -> Leased:
        """Return an open lease, for a process that adopts it."""
        return self._open[hold.number][1]

    def _describe(self, hold: Hold, rows: Rows, reason: MissReason | None) -> Leased:
        """Say where the blocks of a lease lie, and which checksums are to be verified."""
        space = hold.space
        offsets, checksums = [], []
        verify = self._state.config.verify_memory
        for group, (low, high) in enumerate(space.ranges(rows.size)):
            copies = self._state.memory.residency.of(group)
            places = np.full(rows.size, -1, dtype=np.int64)
            places[low:high] = copies.slot[rows[low:high]].astype(np.int64) * PAGE_BYTES
            offsets.append(places.tolist())
            if verify != "never":
                checksums.append([self._checksum(group, int(row), verify) for row in rows.tolist()])
        return Leased(hold.number, rows.size, reason, offsets, checksums or None)

    def release(self, number: int) -> None:
        """End a lease. Idempotent."""
        hold = self._state.ledger.find(number, "lease")
        if hold is None or not self._state.ledger.end(hold):
            return
        rows, _ = self._open.pop(number)
        self._counted.pop(number, None)
        self._state.memory.residency.policy.refresh(rows, self._state.now())

    def damaged(self, number: int, block: int) -> None:
        """Drop a copy that failed its checksum, and undo the lease with all that it counted."""
        hold = self._state.ledger.get(number, "lease")
        rows, leased = self._open[number]
        row = rows[block : block + 1]
        for group in range(len(hold.space.groups)):
            slot = self._state.memory.residency.of(group).slot[row]
            if int(slot[0]) * PAGE_BYTES == leased.offsets[group][block]:  # else it is gone already
                self._drops.copies(self._state.memory, hold.space, group, row, MissReason.CORRUPT)
        asked, levels, reason = self._counted.pop(number)
        self._state.count(asked, levels, reason, times=-1)
        hold.shares = 1
        self.release(number)

    def renumber(self, gone: int) -> None:
        """A tier was taken away; see `walk.renumber`."""
        for _, levels, _ in self._counted.values():
            renumber(levels, gone)

    def count(self, leased: Leased, asked: int, levels: Levels) -> None:
        """Count what a lease served (with the tier each block came from) and missed."""
        self._counted[leased.lease] = asked, levels.copy(), leased.reason
        self._state.count(asked, levels, leased.reason)

    def within_cap(self, space: SpaceInfo, group: int, blocks: Rows, rows: Rows) -> Rows:
        """Return the leading ones of `blocks` (numbers into `rows`) that may still be pinned in one group."""
        memory = self._state.memory.residency
        size = memory.slot_bytes(space, group)
        costs = np.where(memory.of(group).pins[rows[blocks]] == 0, size, 0)
        return blocks[np.cumsum(costs) <= max(self._budget(), 0 if memory.counts.pinned_bytes else size)]

    def _budget(self) -> int:
        """Bytes that may still be pinned."""
        memory = self._state.memory.residency
        cap = int(self._state.config.max_lease_fraction * memory.allocator.capacity_bytes)
        return cap - memory.counts.pinned_bytes

    def _affordable(self, space: SpaceInfo, rows: Rows, lengths: tuple[int, ...] | range) -> int:
        """Return the longest of the lengths that the cap allows; a single block is allowed while nothing is pinned."""
        memory = self._state.memory.residency
        budget = max(self._budget(), 0 if memory.counts.pinned_bytes else self._block_bytes(space))
        if lengths[-1] * self._block_bytes(space) <= budget:
            return lengths[-1]
        costs = []  # by group: bytes that pinning blocks 0..i would add
        for group in range(len(space.groups)):
            unpinned = memory.of(group).pins[rows[: lengths[-1]]] == 0
            costs.append(np.concatenate(([0], np.cumsum(unpinned) * memory.slot_bytes(space, group))))
        for length in reversed(lengths):
            if (
                sum(cost[high] - cost[low] for cost, (low, high) in zip(costs, space.ranges(length), strict=True))
                <= budget
            ):
                return length
        return 0

    def _block_bytes(self, space: SpaceInfo) -> int:
        return sum(self._state.memory.residency.slot_bytes(space, group) for group in range(len(space.groups)))

    def _checksum(self, group: int, row: int, verify: str) -> bytes:
        """Return the checksum to verify a block against, b"" where it need not be."""
        if verify == "sample" and self._state.tree.nodes.key[row, 0] >= SAMPLED:
            return b""
        checksum = self._state.memory.residency.of(group).checksum[row]
        return checksum.tobytes() if checksum.any() else b""
