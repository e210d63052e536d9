"""One tier as the core sees it: what lies there, how it is reached, and whether it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvcairn.core.budget import BudgetFile
from kvcairn.core.residency import Residency
from kvcairn.core.room import Room
from kvcairn.core.spaces import SpaceInfo, Spaces
from kvcairn.core.unscanned import Unscanned
from kvcairn.errors import TierError, TierFull
from kvcairn.index.arrays import Rows
from kvcairn.memory.slots import PAGE_BYTES, Addresses
from kvcairn.policy.admission import Admission, DayBudget, admission
from kvcairn.policy.planner import MIB, ReadSpeed, Sample
from kvcairn.tiers.base import BlockRef, Delete, Slot, Tier
from kvcairn.tiers.breaker import Breaker
from kvcairn.transfer.executor import Executor
from kvcairn.transfer.task import Task
from kvcairn.types import CopyState, TierStats, add_to


@dataclass(eq=False)
class Level:
    """A tier. `tier` is None for memory."""

    name: str
    residency: Residency
    tier: Tier | None = None
    write_policy: str = "none"
    min_touches: int = 2
    promotion: str = "keep"
    budget: DayBudget = field(default_factory=DayBudget)
    budget_file: BudgetFile | None = None
    timeout_s: float = 5.0
    capacity_bytes: int = 0
    breaker: Breaker = field(default_factory=Breaker)
    errors: dict[str, int] = field(default_factory=dict)
    writes_dropped: dict[str, int] = field(default_factory=dict)
    tasks: int = 0  # submitted and not yet ended
    is_leaving: bool = False  # being detached: nothing new comes here
    speed: ReadSpeed = field(default_factory=ReadSpeed)
    unscanned: Unscanned = field(default_factory=Unscanned)
    evicting: Callable[[Level, int, Rows], None] = lambda level, group, rows: None  # before copies are evicted

    @property
    def admission(self) -> Admission:
        """The write policy."""
        return admission(self.write_policy, self.min_touches)

    def slot(self, address: int) -> Slot:
        """Name a slot as the tier knows it."""
        segment, number = self.residency.allocator.locate(address)
        return Slot(
            segment=segment.number,
            offset_bytes=number * segment.slot_bytes,
            slot_bytes=segment.slot_bytes,
            segment_bytes=segment.regions * self.residency.allocator.region_bytes,
            generation=int(segment.generation[number]),
        )

    def is_busy(self, but_rebuilds: bool) -> bool:
        """Whether tasks are open, those that make an index anew counted or not."""
        return self.tasks > 0 or (self.unscanned.scans > 0 and not but_rebuilds)

    def note(self, error: TierError | None, now_s: float) -> None:
        """Count the end of a call; failures in a row switch the tier off."""
        if error is None:
            self.breaker.succeeded()
            return
        add_to(self.errors, type(error).__name__)
        if not isinstance(error, TierFull):
            self.breaker.failed(now_s)

    def measured(self, sample: Sample, error: TierError | None, now_s: float) -> None:
        """Learn from a read how fast the tier is; one that failed says nothing, and the breaker looks after those."""
        if error is None:
            self.speed.end(sample, now_s)
        else:
            self.speed.forget(sample)

    def room(self, spaces: Spaces) -> Room:
        """Return what makes room here."""
        return Room(self.residency, spaces, partial(self.evicting, self))

    def quarantine(self, addresses: Addresses) -> Callable[[], None]:
        """Keep slots from being given out; return what frees them."""
        nbytes = sum(self.slot(int(a)).slot_bytes for a in addresses)
        self.residency.counts.quarantined_bytes += nbytes

        def free() -> None:
            self.residency.counts.quarantined_bytes -= nbytes
            self.residency.allocator.give(addresses)

        return free

    def stats(self, spaces: Spaces, now_s: float, slower: list[Level]) -> TierStats:
        """Return the numbers of this moment; `slower` are the tiers below."""
        residency = self.residency
        padding = sum(
            count * (residency.slot_bytes(spaces[space], group) - spaces[space].part_bytes[group])
            for (space, group), count in residency.counts.copies.items()
        )
        return TierStats(
            capacity_bytes=self.capacity_bytes,
            used_bytes=residency.allocator.used_bytes,
            leased_bytes=residency.counts.pinned_bytes,
            quarantined_bytes=residency.counts.quarantined_bytes,
            rounding_bytes=padding,
            blocks=residency.counts.blocks,
            in_flight=residency.counts.in_flight,
            writes_dropped=dict(self.writes_dropped),
            errors=dict(self.errors),
            is_down=self.breaker.is_open(now_s),
            unscanned_bytes=self.unscanned.nbytes,
            dirty_bytes=self._dirty_bytes(spaces, slower) if slower else 0,
            read_latency_s=self.speed.latency_s,
            read_bytes_per_s=MIB / self.speed.mib_s if self.speed.mib_s else 0.0,
        )

    def _dirty_bytes(self, spaces: Spaces, slower: list[Level]) -> int:
        """Add up what lies here and on none of the slower tiers."""
        total = 0
        for group, copies in enumerate(self.residency.copies):
            is_dirty = copies.state[:-1] == CopyState.READY
            for level in slower:
                is_dirty &= level.residency.of(group).state[:-1] != CopyState.READY
            numbers = self.residency.tree.nodes.space[:-1][is_dirty]
            for number in np.flatnonzero(np.bincount(numbers)).tolist() if numbers.size else []:
                count = int((numbers == number).sum())
                total += count * self.residency.slot_bytes(spaces[number], group)
        return total

    def deletes(self, space: SpaceInfo, group: int, rows: Rows) -> list[Delete]:
        """Describe the copies of these rows for the tier, while they still have slots."""
        copies, tree = self.residency.copies[group], self.residency.tree
        return [
            Delete(BlockRef(space.rows.space_id, tree.key(row), group), self.slot(int(copies.slot[row])))
            for row in rows.tolist()
        ]


def submit(level: Level, executor: Executor, task: Task) -> None:
    """Hand a task to the executor and count it as open; whoever ends it must subtract it."""
    level.tasks += 1
    executor.submit(task)


__all__ = ["PAGE_BYTES", "Level", "submit"]
