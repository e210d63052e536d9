"""Slots cut from a bounded range of bytes: the same bookkeeping for the arena in memory and for files on disk.

The range is cut into *regions* of equal size. A *segment* is a run of neighbouring regions that serves one slot
size at a time; a segment whose slots are all free may be given to another size. An address is a number of 4 KiB
pages from the start of the range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcairn.units import PAGE_BYTES as PAGE_BYTES

MAX_REGIONS_PER_SEGMENT = 16
DEFAULT_REGIONS = 64
ACCEPTED_WASTE = 1 / 32  # of the whole range, for a shorter segment
TOLERATED_WASTE = 1 / 8  # of one segment, for fewer regions to be emptied

Addresses = npt.NDArray[np.int32]


def round_up(nbytes: int, unit: int = PAGE_BYTES) -> int:
    """Round `nbytes` up to a multiple of `unit`."""
    return -(-nbytes // unit) * unit


def default_region_bytes(capacity_bytes: int) -> int:
    """Size of a region where nothing else is asked for: a 64th of the range, in whole pages."""
    return max(PAGE_BYTES, capacity_bytes // DEFAULT_REGIONS // PAGE_BYTES * PAGE_BYTES)


@dataclass(slots=True)
class Segment:
    """A run of regions cut into slots of one size; arrays have one element a slot."""

    number: int
    first_region: int
    regions: int
    slot_bytes: int
    slots: int
    row: npt.NDArray[np.int32] = field(init=False)  # which node lies there, -1: none
    generation: npt.NDArray[np.int64] = field(init=False)
    free: npt.NDArray[np.int32] = field(init=False)  # stack of free slots
    free_slots: int = field(init=False)

    def __post_init__(self) -> None:
        self.row = np.full(self.slots, -1, dtype=np.int32)
        self.generation = np.zeros(self.slots, dtype=np.int64)
        self.free = np.arange(self.slots - 1, -1, -1, dtype=np.int32)
        self.free_slots = self.slots


class SlotAllocator:
    """Gives out slots of any size below one bound. Owner thread only; never blocks.

    A slot that was given out stays so until `give` takes it back, whatever its holder does with it.
    """

    def __init__(self, capacity_bytes: int, region_bytes: int | None = None) -> None:
        """Cut `capacity_bytes` into regions of `region_bytes` (a multiple of 4,096).

        Raises:
            ValueError: not even one region fits, or its size is no multiple of a page.
        """
        self.region_bytes = region_bytes or default_region_bytes(capacity_bytes)
        if self.region_bytes % PAGE_BYTES:
            raise ValueError(f"a region must be a multiple of {PAGE_BYTES} bytes, got {self.region_bytes}")
        regions = capacity_bytes // self.region_bytes
        if regions < 1:
            raise ValueError(f"{capacity_bytes} bytes hold no region of {self.region_bytes}")
        self.capacity_bytes = capacity_bytes
        self.segments: dict[int, Segment] = {}
        self.used_bytes = 0
        self.retired: list[int] = []  # segments given up since the owner last looked
        self.on_free: Callable[[Addresses], None] = lambda addresses: None
        self._owner = np.full(regions, -1, dtype=np.int64)  # segment number of each region
        self._next_segment = 0
        self._generation = 0

    @property
    def last_generation(self) -> int:
        """The highest generation given out so far."""
        return self._generation

    def go_on_from(self, generation: int) -> None:
        """Give out higher generations only."""
        self._generation = max(self._generation, generation)

    def largest_slot_bytes(self) -> int:
        """Size of the largest slot that can be cut."""
        return self._owner.size * self.region_bytes // PAGE_BYTES * PAGE_BYTES

    def obtainable(self, slot_bytes: int, enough: int) -> int:
        """Slots of that size that `take` can give without anything being evicted; not counted beyond `enough`."""
        own = sum(s.free_slots for s in self.segments.values() if s.slot_bytes == slot_bytes)
        if own >= enough:
            return own
        runs = [run for _, run in self._vacant_runs(slot_bytes)]
        if not runs:
            return own
        length = self._regions_for(slot_bytes)
        whole = sum(run // length for run in runs) * self._slots_in(length, slot_bytes)
        return own + whole + sum(self._slots_in(run % length, slot_bytes) for run in runs)

    def take(self, slot_bytes: int, count: int) -> Addresses:
        """Give out up to `count` slots; fewer where there is no room. Their generations are new."""
        taken: list[Addresses] = []
        missing = count
        while missing:
            segment = self._segment_with_room(slot_bytes)
            if segment is None:
                break
            got = min(missing, segment.free_slots)
            slots = segment.free[segment.free_slots - got : segment.free_slots][::-1]
            segment.free_slots -= got
            segment.generation[slots] = np.arange(self._generation + 1, self._generation + got + 1)
            self._generation += got
            self.used_bytes += got * slot_bytes
            taken.append(self._base(segment) + slots * np.int32(slot_bytes // PAGE_BYTES))
            missing -= got
        return np.concatenate(taken) if taken else np.empty(0, dtype=np.int32)

    def give(self, addresses: Addresses) -> None:
        """Take slots back. Each must have been given out. Neighbours given back together are given out together."""
        self.on_free(addresses)
        for segment, slots in self._by_segment(addresses):
            segment.row[slots] = -1
            slots = np.sort(slots)[::-1]
            segment.free[segment.free_slots : segment.free_slots + slots.size] = slots
            segment.free_slots += slots.size
            self.used_bytes -= slots.size * segment.slot_bytes

    def bind(self, addresses: Addresses, rows: npt.NDArray[np.intp]) -> None:
        """Note which nodes lie in these slots."""
        for segment, slots, chosen in self._by_segment_with_index(addresses):
            segment.row[slots] = rows[chosen]

    def locate(self, address: int) -> tuple[Segment, int]:
        """Return the segment of an address and the slot's number in it."""
        segment = self.segments[int(self._owner[int(address) * PAGE_BYTES // self.region_bytes])]
        return segment, (int(address) - int(self._base(segment))) * PAGE_BYTES // segment.slot_bytes

    def keep(self, number: int, nbytes: int) -> bool:
        """Keep the room of a segment of an earlier run whose slots are not known yet; False where it fits no more."""
        length = -(-nbytes // self.region_bytes)
        run = self._vacant_run(length, length * self.region_bytes)
        self._next_segment = max(self._next_segment, number + 1)
        if run is None:
            return False
        segment = self._cut(run, length, length * self.region_bytes, number)  # one slot, which is taken
        segment.free_slots = 0
        self.used_bytes += segment.slot_bytes
        return True

    def let_go(self, number: int) -> None:
        """Undo `keep`: the slots are known now, and can be restored."""
        segment = self.segments.pop(number)
        self.used_bytes -= segment.slot_bytes
        self._owner[self._owner == number] = -1

    def restore(self, places: npt.NDArray[np.int64]) -> Addresses:
        """Mark slots of an earlier run as given out and return their addresses, -1 where one fits no more.

        Args:
            places: segment, offset, slot bytes, segment bytes and generation of each; those that come first are
                taken first where not all fit.
        """
        addresses = np.full(len(places), -1, dtype=np.int32)
        if len(places):
            self._next_segment = max(self._next_segment, int(places[:, 0].max()) + 1)  # a number is never used twice
            self.go_on_from(int(places[:, 4].max()))
        numbers, first = np.unique(places[:, 0], return_index=True)
        for number in numbers[np.argsort(first)].tolist():
            mine = np.flatnonzero(places[:, 0] == number)
            addresses[mine] = self._restore_segment(number, places[mine])
        return addresses

    def _restore_segment(self, number: int, places: npt.NDArray[np.int64]) -> Addresses:
        addresses = np.full(len(places), -1, dtype=np.int32)
        slot_bytes, segment_bytes = places[0, 2:4].tolist()
        segment = self.segments.get(number) or self._cut_again(number, slot_bytes, segment_bytes)
        if segment is None or (segment.slot_bytes, segment.regions * self.region_bytes) != (slot_bytes, segment_bytes):
            return addresses
        _, offset, size, whole, generation = places.T
        slots, free = offset // slot_bytes, segment.free[: segment.free_slots]
        fits = (size == slot_bytes) & (whole == segment_bytes) & (offset % slot_bytes == 0)
        fits &= (slots >= 0) & (slots < segment.slots)
        wanted = np.flatnonzero(fits)[::-1]  # backwards, so that of several for one slot the first stays
        who = np.full(segment.slots, -1, dtype=np.intp)
        who[slots[wanted]] = wanted
        taken = np.sort(who[free][who[free] >= 0])
        left, slots = free[who[free] < 0], slots[taken]
        segment.free[: left.size], segment.free_slots = left, left.size
        segment.generation[slots] = generation[taken]
        self.used_bytes += taken.size * slot_bytes
        addresses[taken] = int(self._base(segment)) + slots * (slot_bytes // PAGE_BYTES)
        return addresses

    def _cut_again(self, number: int, slot_bytes: int, segment_bytes: int) -> Segment | None:
        """Cut a segment of an earlier run; None where it fits no more."""
        length = segment_bytes // self.region_bytes
        if length * self.region_bytes != segment_bytes or not PAGE_BYTES <= slot_bytes <= segment_bytes:
            return None
        run = self._vacant_run(length, slot_bytes)
        return None if run is None else self._cut(run, length, slot_bytes, number)

    def room_in(self, emptied: set[int], slot_bytes: int) -> set[int] | None:
        """Return those of the `emptied` segments that make room for a segment of this size, with what is vacant beside.

        `emptied` are segments whose slots would all be free. None where they do not suffice.
        """
        length = self._fewest_regions(slot_bytes)
        vacant = {n for n, s in self.segments.items() if s.free_slots == s.slots and s.slot_bytes != slot_bytes}
        for first in range(self._owner.size - length + 1):
            owners = {int(o) for o in self._owner[first : first + length]} - {-1}
            if owners & emptied and owners <= emptied | vacant:
                return owners & emptied
        return None

    def check(self) -> None:
        """Raise AssertionError where the books do not balance."""
        used = 0
        for number, segment in self.segments.items():
            free = segment.free[: segment.free_slots]
            assert np.unique(free).size == free.size, f"segment {number}: a slot is free twice"
            assert (segment.row[free] == -1).all(), f"segment {number}: a free slot has an owner"
            assert int((self._owner == number).sum()) == segment.regions
            used += (segment.slots - segment.free_slots) * segment.slot_bytes
        assert used == self.used_bytes <= self.capacity_bytes

    def _fewest_regions(self, slot_bytes: int) -> int:
        """Return the length of the shortest segment that loses little to rounding, where room is hard to come by."""
        first = max(1, -(-slot_bytes // self.region_bytes))
        lengths = range(first, min(int(self._owner.size), max(first, MAX_REGIONS_PER_SEGMENT)) + 1)
        waste = {n: n * self.region_bytes % slot_bytes / (n * self.region_bytes) for n in lengths}
        return next((n for n in lengths if waste[n] <= TOLERATED_WASTE), first)

    def _regions_for(self, slot_bytes: int) -> int:
        """Return the length of segments with which the range holds nearly most slots: the shortest such.

        What is left of the range at the end is cut into a shorter segment.
        """
        regions = int(self._owner.size)
        first = max(1, -(-slot_bytes // self.region_bytes))
        lengths = range(first, min(regions, max(first, MAX_REGIONS_PER_SEGMENT)) + 1)
        held = {
            n: regions // n * self._slots_in(n, slot_bytes) + self._slots_in(regions % n, slot_bytes) for n in lengths
        }
        enough = max(held.values(), default=0) * (1 - ACCEPTED_WASTE)
        return next((n for n in lengths if held[n] >= enough), regions + 1)

    def _slots_in(self, regions: int, slot_bytes: int) -> int:
        return regions * self.region_bytes // slot_bytes

    def _base(self, segment: Segment) -> np.int32:
        return np.int32(segment.first_region * (self.region_bytes // PAGE_BYTES))

    def _segment_with_room(self, slot_bytes: int) -> Segment | None:
        for segment in self.segments.values():
            if segment.slot_bytes == slot_bytes and segment.free_slots:
                return segment
        length, runs = self._regions_for(slot_bytes), self._vacant_runs(slot_bytes)
        for first, run in [each for each in runs if each[1] >= length] or runs:
            regions = min(run, length)
            if self._slots_in(regions, slot_bytes):
                return self._cut(first, regions, slot_bytes, self._next_segment)
        return None

    def _vacant_runs(self, slot_bytes: int) -> list[tuple[int, int]]:
        """Runs of regions that are free, or belong to an empty segment of another size: (first, length)."""
        empty = [n for n, s in self.segments.items() if s.free_slots == s.slots and s.slot_bytes != slot_bytes]
        vacant = self._owner < 0
        if not empty and not vacant.any():
            return []
        for number in empty:
            vacant |= self._owner == number
        edges = np.flatnonzero(np.diff(np.concatenate(([False], vacant, [False])).astype(np.int8)))
        return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]

    def _vacant_run(self, length: int, slot_bytes: int) -> int | None:
        return next((first for first, run in self._vacant_runs(slot_bytes) if run >= length), None)

    def _cut(self, first: int, length: int, slot_bytes: int, number: int) -> Segment:
        for old in {int(o) for o in self._owner[first : first + length]} - {-1}:
            del self.segments[old]
            self.retired.append(old)
            self._owner[self._owner == old] = -1
        segment = Segment(number, first, length, slot_bytes, self._slots_in(length, slot_bytes))
        self.segments[number] = segment
        self._owner[first : first + length] = number
        self._next_segment = max(self._next_segment, number + 1)
        return segment

    def _by_segment(self, addresses: Addresses) -> list[tuple[Segment, npt.NDArray[np.intp]]]:
        return [(segment, slots) for segment, slots, _ in self._by_segment_with_index(addresses)]

    def _by_segment_with_index(
        self, addresses: Addresses
    ) -> list[tuple[Segment, npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
        if addresses.size == 0:
            return []
        owners = self._owner[addresses.astype(np.int64) * PAGE_BYTES // self.region_bytes]
        found = []
        is_one = bool((owners == owners[0]).all())
        for number in owners[:1] if is_one else np.unique(owners):
            segment = self.segments[int(number)]
            chosen = (owners == number).nonzero()[0]
            pages = addresses[chosen].astype(np.int64) - int(self._base(segment))
            found.append((segment, pages * PAGE_BYTES // segment.slot_bytes, chosen))
        return found
