from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcairn.memory.slots import (
    DEFAULT_REGIONS,
    MAX_REGIONS_PER_SEGMENT,
    PAGE_BYTES,
    Addresses,
    SlotAllocator,
    default_region_bytes,
    round_up,
)

SIZES = (1, 2, 3, 5, 8, 13, 40)  # slots, in pages


def taken_all(allocator: SlotAllocator, slot_bytes: int) -> Addresses:
    return allocator.take(slot_bytes, 1 << 20)


def obtainable(allocator: SlotAllocator, slot_bytes: int) -> int:
    """All slots that can be had; the allocator stops counting when it has enough."""
    everything = allocator.obtainable(slot_bytes, 1 << 30)
    for enough in (0, 1, everything, everything + 1):
        assert min(allocator.obtainable(slot_bytes, enough), enough) == min(everything, enough)
    return everything


def pages(addresses: Addresses, slot_bytes: int) -> list[int]:
    return [int(a) + i for a in addresses for i in range(slot_bytes // PAGE_BYTES)]


@given(st.integers(0, 1 << 40), st.sampled_from([1, 512, PAGE_BYTES]))
def test_rounding_up(nbytes: int, unit: int) -> None:
    rounded = round_up(nbytes, unit)
    assert rounded % unit == 0
    assert nbytes <= rounded < nbytes + unit


@given(st.integers(PAGE_BYTES, 1 << 42))
def test_the_default_region_is_whole_pages(capacity: int) -> None:
    region = default_region_bytes(capacity)
    assert region % PAGE_BYTES == 0
    assert PAGE_BYTES <= region <= max(PAGE_BYTES, capacity // DEFAULT_REGIONS)


@pytest.mark.parametrize("capacity", [0, 1, PAGE_BYTES - 1])
def test_less_than_a_page_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="hold no region"):
        SlotAllocator(capacity)


def test_a_region_larger_than_all_is_refused() -> None:
    with pytest.raises(ValueError, match="hold no region"):
        SlotAllocator(PAGE_BYTES * 3, PAGE_BYTES * 4)


def test_one_page_is_one_slot() -> None:
    allocator = SlotAllocator(PAGE_BYTES + 100)
    assert allocator.largest_slot_bytes() == PAGE_BYTES
    assert allocator.take(PAGE_BYTES, 5).tolist() == [0]
    assert allocator.take(PAGE_BYTES, 1).size == 0
    assert allocator.used_bytes == PAGE_BYTES
    allocator.give(np.array([0], dtype=np.int32))
    assert (allocator.used_bytes, obtainable(allocator, PAGE_BYTES)) == (0, 1)


def test_a_slot_larger_than_all_is_never_given() -> None:
    allocator = SlotAllocator(8 * PAGE_BYTES, PAGE_BYTES)
    too_large = allocator.largest_slot_bytes() + PAGE_BYTES
    assert obtainable(allocator, too_large) == 0
    assert allocator.take(too_large, 1).size == 0
    assert allocator.room_in(set(), too_large) is None
    allocator.check()


@pytest.mark.parametrize("regions", [1, 2, 7, 16, 17, 64])
def test_a_slot_may_be_as_large_as_the_whole(regions: int) -> None:
    allocator = SlotAllocator(regions * 2 * PAGE_BYTES, 2 * PAGE_BYTES)
    assert allocator.take(allocator.largest_slot_bytes(), 2).tolist() == [0]
    assert allocator.used_bytes == allocator.capacity_bytes


def test_nothing_is_asked_for() -> None:
    allocator = SlotAllocator(8 * PAGE_BYTES)
    assert allocator.take(PAGE_BYTES, 0).size == 0
    allocator.give(np.empty(0, dtype=np.int32))
    allocator.bind(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.intp))
    assert allocator.segments == {}


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([1, 2, 7, 16]))
def test_what_is_promised_is_given(capacity_pages: int, slot_pages: int, region_pages: int) -> None:
    assume(region_pages <= capacity_pages)
    allocator = SlotAllocator(capacity_pages * PAGE_BYTES, region_pages * PAGE_BYTES)
    promised = obtainable(allocator, slot_pages * PAGE_BYTES)
    assert taken_all(allocator, slot_pages * PAGE_BYTES).size == promised
    assert obtainable(allocator, slot_pages * PAGE_BYTES) == 0
    if slot_pages * PAGE_BYTES <= allocator.largest_slot_bytes():
        assert promised >= 1


@given(st.integers(1, 40))
def test_little_is_lost_to_rounding(slot_pages: int) -> None:
    allocator = SlotAllocator(64 * 10 * PAGE_BYTES, 10 * PAGE_BYTES)
    count = taken_all(allocator, slot_pages * PAGE_BYTES).size
    assert count >= 0.9 * (640 // slot_pages)
    assert max(segment.regions for segment in allocator.segments.values()) <= MAX_REGIONS_PER_SEGMENT


def test_a_segment_whose_slots_are_free_serves_another_size() -> None:
    allocator = SlotAllocator(4 * PAGE_BYTES, PAGE_BYTES)
    small = taken_all(allocator, PAGE_BYTES)
    assert obtainable(allocator, 2 * PAGE_BYTES) == 0
    allocator.give(small[1:3])
    assert obtainable(allocator, 2 * PAGE_BYTES) == 1
    assert pages(allocator.take(2 * PAGE_BYTES, 9), 2 * PAGE_BYTES) == [1, 2]
    assert len(allocator.retired) == 2
    assert not set(allocator.retired) & set(allocator.segments)
    allocator.check()


def test_numbers_of_segments_are_never_used_twice() -> None:
    allocator, seen = SlotAllocator(4 * PAGE_BYTES, PAGE_BYTES), list[int]()
    for turn in range(20):
        size = (1 + turn % 2) * PAGE_BYTES
        held = taken_all(allocator, size)
        seen += allocator.segments
        allocator.give(held)
    assert len(set(seen)) == len(seen)


def test_generations_grow_with_every_use() -> None:
    allocator, last = SlotAllocator(3 * PAGE_BYTES, PAGE_BYTES), 0
    for _ in range(5):
        held = allocator.take(PAGE_BYTES, 3)
        generations = [int(s.generation[n]) for s, n in map(allocator.locate, held.tolist())]
        assert min(generations) > last
        assert len(set(generations)) == 3
        last = max(generations)
        allocator.give(held)


def test_the_node_of_a_slot_is_noted_until_it_is_given_back() -> None:
    allocator = SlotAllocator(64 * PAGE_BYTES, 8 * PAGE_BYTES)
    held = np.concatenate([allocator.take(PAGE_BYTES, 9), allocator.take(4 * PAGE_BYTES, 4)])
    allocator.bind(held, np.arange(100, 113, dtype=np.intp))
    found = [int(segment.row[slot]) for segment, slot in map(allocator.locate, held.tolist())]
    assert found == list(range(100, 113))
    allocator.give(held[3:7])
    found = [int(segment.row[slot]) for segment, slot in map(allocator.locate, held.tolist())]
    assert found == [100, 101, 102, -1, -1, -1, -1, *range(107, 113)]


def test_the_segments_that_make_room_are_named() -> None:
    allocator = SlotAllocator(6 * PAGE_BYTES, PAGE_BYTES)
    held = taken_all(allocator, PAGE_BYTES)
    owner = {int(a): allocator.locate(a)[0].number for a in held.tolist()}
    assert allocator.room_in({owner[4], owner[5]}, 2 * PAGE_BYTES) == {owner[4], owner[5]}
    assert allocator.room_in({owner[0], owner[2]}, 2 * PAGE_BYTES) is None
    allocator.give(held[1:2])
    assert allocator.room_in({owner[0], owner[4]}, 2 * PAGE_BYTES) == {owner[0]}, "beside one that is vacant"
    assert allocator.room_in(set(), 2 * PAGE_BYTES) is None, "what is vacant already is no news"


def restored(earlier: SlotAllocator, held: Addresses, later: SlotAllocator) -> list[int | None]:
    """Restore into `later` what `earlier` holds, the highest generation first, as a reopened tier does."""
    places = [
        (s.number, n * s.slot_bytes, s.slot_bytes, s.regions * earlier.region_bytes, int(s.generation[n]))
        for s, n in (earlier.locate(address) for address in held.tolist())
    ]
    ordered = sorted(places, key=lambda place: -place[4])
    found = later.restore(np.array(ordered, dtype=np.int64).reshape(-1, 5))
    return [None if address < 0 else address for address in found.tolist()]


@given(st.lists(st.tuples(st.sampled_from(SIZES), st.integers(1, 9)), max_size=12), st.randoms(use_true_random=False))
def test_a_later_run_takes_up_all_of_an_earlier_one(wanted: list[tuple[int, int]], draw: random.Random) -> None:
    earlier, later = (SlotAllocator(200 * PAGE_BYTES, 5 * PAGE_BYTES) for _ in range(2))
    parts = [earlier.take(size * PAGE_BYTES, count) for size, count in wanted]
    held = np.concatenate([np.empty(0, dtype=np.int32), *parts])
    keep = held[[draw.random() < 0.7 for _ in range(held.size)]]
    earlier.give(np.setdiff1d(held, keep).astype(np.int32))
    addresses = restored(earlier, keep, later)
    assert None not in addresses
    assert len(set(addresses)) == len(addresses)
    assert later.used_bytes == earlier.used_bytes
    later.check()
    fresh = later.take(PAGE_BYTES, 1)
    if fresh.size and keep.size:
        newest = max(int(s.generation[n]) for s, n in map(earlier.locate, keep.tolist()))
        segment, slot = later.locate(int(fresh[0]))
        assert int(segment.generation[slot]) > newest
        numbers = {earlier.locate(a)[0].number for a in keep.tolist()}
        assert segment.number in numbers or segment.number > max(numbers)


@pytest.mark.parametrize(
    ("number", "segment_pages", "slot_pages", "offset_pages"),
    [
        (0, 4, 2, 0),  # given out already
        (0, 4, 4, 4),  # another slot size in a known segment
        (0, 4, 2, 1),  # between two slots
        (0, 4, 2, 4),  # behind the last slot
        (0, 4, 2, -2),  # before the first
        (1, 3, 1, 0),  # no whole number of regions
        (1, 2, 4, 0),  # larger than its segment
        (1, 64, 1, 0),  # larger than the range
        (1, 2, 1, 2),  # outside of its segment
    ],
)
def test_a_slot_that_does_not_fit_is_not_restored(
    number: int, segment_pages: int, slot_pages: int, offset_pages: int
) -> None:
    allocator = SlotAllocator(16 * PAGE_BYTES, 2 * PAGE_BYTES)
    assert allocator.restore(np.array([(0, 0, 2 * PAGE_BYTES, 4 * PAGE_BYTES, 7)])).tolist() == [0]
    segment_bytes, slot_bytes, offset = (n * PAGE_BYTES for n in (segment_pages, slot_pages, offset_pages))
    assert allocator.restore(np.array([(number, offset, slot_bytes, segment_bytes, 9)])).tolist() == [-1]
    assert allocator.used_bytes == 2 * PAGE_BYTES
    allocator.check()


class AllocatorMachine(RuleBasedStateMachine):
    """The allocator against a dictionary of what was given out."""

    @initialize(capacity=st.integers(1, 120), region=st.integers(1, 9))
    def begin(self, capacity: int, region: int) -> None:
        self.allocator = SlotAllocator(capacity * PAGE_BYTES, min(region, capacity) * PAGE_BYTES)
        self.held: dict[int, int] = {}

    @rule(size=st.sampled_from(SIZES), count=st.integers(0, 12))
    def take(self, size: int, count: int) -> None:
        before = obtainable(self.allocator, size * PAGE_BYTES)
        got = self.allocator.take(size * PAGE_BYTES, count)
        assert got.size == min(count, before)
        assert not set(got.tolist()) & set(self.held)
        self.held |= dict.fromkeys(got.tolist(), size)

    @rule(draw=st.randoms(use_true_random=False), share=st.floats(0, 1))
    def give(self, draw: random.Random, share: float) -> None:
        chosen = [address for address in self.held if draw.random() < share]
        draw.shuffle(chosen)
        for address in chosen:
            del self.held[address]
        self.allocator.give(np.array(chosen, dtype=np.int32))

    @rule(size=st.sampled_from(SIZES))
    def empty_what_makes_room(self, size: int) -> None:
        segments = self.allocator.segments
        used = {n for n, s in segments.items() if s.slot_bytes != size * PAGE_BYTES and s.free_slots < s.slots}
        chosen = self.allocator.room_in(used, size * PAGE_BYTES)
        if chosen is None:
            return
        assert chosen
        assert chosen <= used
        leaving = [a for a in self.held if self.allocator.locate(a)[0].number in chosen]
        for address in leaving:
            del self.held[address]
        self.allocator.give(np.array(leaving, dtype=np.int32))
        assert obtainable(self.allocator, size * PAGE_BYTES) >= 1

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "allocator"):
            return
        self.allocator.check()
        used = [address + i for address, size in self.held.items() for i in range(size)]
        assert len(set(used)) == len(used), "two slots overlap"
        assert not used or 0 <= min(used) <= max(used) < self.allocator.capacity_bytes // PAGE_BYTES
        assert self.allocator.used_bytes == len(used) * PAGE_BYTES <= self.allocator.capacity_bytes
        for address, size in self.held.items():
            segment, _ = self.allocator.locate(address)
            assert segment.slot_bytes == size * PAGE_BYTES


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("region_bytes", [1, 1000, PAGE_BYTES + 1, 10_000_000])
def test_a_region_is_whole_pages(region_bytes: int) -> None:
    try:
        allocator = SlotAllocator(64_000_000, region_bytes)
    except ValueError:
        return
    assert allocator.region_bytes % PAGE_BYTES == 0


def test_a_size_uses_what_is_vacant() -> None:
    allocator = SlotAllocator(64 * PAGE_BYTES, 8 * PAGE_BYTES)
    assert allocator.take(PAGE_BYTES, 9).size == 9
    assert allocator.take(3 * PAGE_BYTES, 4).size == 4


@pytest.mark.parametrize("slot_pages", [65, 67, 130, 300])
def test_one_slot_of_another_size_costs_few_regions(slot_pages: int) -> None:
    allocator = SlotAllocator(64 << 20)
    taken_all(allocator, PAGE_BYTES)
    chosen = allocator.room_in(set(allocator.segments), slot_pages * PAGE_BYTES)
    assert chosen is not None
    needed = -(-slot_pages * PAGE_BYTES // allocator.region_bytes)
    assert sum(allocator.segments[number].regions for number in chosen) <= 4 * needed
