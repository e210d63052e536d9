from __future__ import annotations

import numpy as np
import pytest

from kvcairn.core.events import Readers
from kvcairn.core.residency import Counts, Fastest, Residency
from kvcairn.core.spaces import SpaceInfo, Spaces
from kvcairn.index.arrays import Rows
from kvcairn.index.tree import ROOT, Tree
from kvcairn.layout import KVLayout, SpaceDescriptor
from kvcairn.memory.slots import PAGE_BYTES, Addresses, SlotAllocator
from kvcairn.policy.eviction.lru import LRU
from kvcairn.testing import PlainFacts
from kvcairn.types import CopyState, MissReason

LAYOUT = KVLayout.full(layers=1, kv_heads=1, head_dim=64, dtype="int8")


class Tier:
    """Tiers with slots of a page, over a tree of their own."""

    def __init__(self, *names: str) -> None:
        self.tree = Tree()
        self.fastest = Fastest(self.tree)
        self.facts = PlainFacts()
        self.levels = [
            Residency(
                name, self.tree, SlotAllocator(64 * PAGE_BYTES), LRU(self.facts), self.fastest, Readers(self.tree)
            )
            for name in names or ("memory",)
        ]
        self.fastest.set_levels(self.levels)
        self.spaces = Spaces(self.tree)
        descriptor = SpaceDescriptor(model="m", weights="w", layout=LAYOUT, block_tokens=1)
        self.space: SpaceInfo = self.spaces.open(descriptor, 1 << 30)

    @property
    def one(self) -> Residency:
        return self.levels[0]

    @property
    def used(self) -> int:
        """Slots given out by the first tier."""
        return self.one.allocator.used_bytes // PAGE_BYTES

    def rows(self, *numbers: int) -> Rows:
        return self.tree.ensure(self.space.rows, [bytes([n]) * 32 for n in numbers], ROOT)

    def claim(self, rows: Rows, level: int = 0) -> Addresses:
        addresses = self.levels[level].allocator.take(PAGE_BYTES, rows.size)
        self.levels[level].claim(self.space, 0, rows, addresses, CopyState.RESERVED)
        return addresses

    def store(self, rows: Rows, level: int = 0) -> None:
        self.claim(rows, level)
        self.levels[level].publish(0, rows, 0.0)

    def check(self) -> None:
        self.tree.check()
        for level in self.levels:
            level.check()


@pytest.fixture
def tier() -> Tier:
    return Tier()


def test_the_life_of_a_copy(tier: Tier) -> None:
    rows = tier.rows(1, 2)
    tier.claim(rows)
    tier.check()
    assert (tier.one.counts.in_flight, tier.one.counts.blocks) == (2, 0)
    assert tier.fastest.of(0)[rows].tolist() == [0, 0]
    tier.one.publish(0, rows, 0.0)
    tier.check()
    assert (tier.one.counts.in_flight, tier.one.counts.blocks, len(tier.one.policy)) == (0, 2, 2)
    assert tier.fastest.of(0)[rows].tolist() == [1, 1]
    assert tier.one.copies[0].children[rows].tolist() == [1, 0]
    tier.one.drop(0, rows, MissReason.EVICTED)
    tier.check()
    assert (tier.one.counts.blocks, tier.one.allocator.used_bytes, len(tier.one.policy)) == (0, 0, 0)
    assert len(tier.tree) == 0


def test_a_dropped_copy_that_is_read_goes_when_the_transfer_ends(tier: Tier) -> None:
    rows = tier.rows(1)
    tier.store(rows)
    tier.one.copies[0].busy[rows] += 1
    for reason in (MissReason.CLEARED, MissReason.EVICTED):
        tier.one.drop(0, rows, reason)
        tier.check()
    assert tier.one.copies[0].state[rows].tolist() == [CopyState.EVICTING]
    assert (tier.used, tier.one.counts.blocks, tier.fastest.of(0)[rows].tolist()) == (1, 0, [0])
    assert tier.tree.why_gone(tier.space.rows, bytes([1]) * 32, int(rows[0])) is MissReason.CLEARED
    tier.one.let_go(0, rows)
    assert (tier.used, len(tier.tree)) == (0, 0)
    tier.check()


@pytest.mark.parametrize("is_read", [False, True])
def test_the_slot_of_a_dropped_copy_belongs_to_those_that_pin_it(tier: Tier, is_read: bool) -> None:
    rows = tier.rows(1)
    tier.store(rows)
    addresses = tier.one.copies[0].slot[rows].copy()
    for _ in range(2):
        tier.one.pin(tier.space, 0, rows)
    tier.one.copies[0].busy[rows] += is_read
    tier.one.drop(0, rows, MissReason.CLEARED)
    if is_read:
        tier.one.let_go(0, rows)
    tier.check()
    again = tier.rows(1)
    tier.store(again)
    assert tier.one.copies[0].slot[again].tolist() != addresses.tolist(), "the block is stored anew beside it"
    tier.check()
    for left in (2, 1):
        assert tier.used == 2
        tier.one.unpin(tier.space, 0, rows, addresses)
        tier.check()
        assert tier.one.counts.pinned_bytes == (left - 1) * PAGE_BYTES
    assert (tier.used, tier.one.orphans) == (1, {})


def test_the_slot_of_a_dropped_reservation_belongs_to_its_writer(tier: Tier) -> None:
    rows = tier.rows(1, 2)
    addresses = tier.claim(rows)
    tier.one.drop(0, rows, MissReason.CLEARED)
    tier.check()
    assert (tier.used, tier.one.counts.in_flight, len(tier.tree)) == (2, 0, 0)
    tier.one.let_orphans_go(addresses)
    assert (tier.used, tier.one.counts.pinned_bytes) == (0, 0)
    tier.check()


def test_pins_are_counted_once_in_bytes(tier: Tier) -> None:
    rows = tier.rows(1, 2)
    tier.store(rows)
    addresses = tier.one.copies[0].slot[rows].copy()
    tier.one.pin(tier.space, 0, rows)
    tier.one.pin(tier.space, 0, rows[:1])
    assert tier.one.counts.pinned_bytes == 2 * PAGE_BYTES
    tier.one.unpin(tier.space, 0, rows, addresses)
    assert tier.one.counts.pinned_bytes == PAGE_BYTES
    tier.one.unpin(tier.space, 0, rows[:1], addresses[:1])
    assert tier.one.counts.pinned_bytes == 0
    tier.check()


def test_abandoned_slots_stay_given_out(tier: Tier) -> None:
    rows = tier.rows(1, 2)
    addresses = tier.claim(rows)
    got = tier.one.abandon(0, rows, MissReason.UNKNOWN)
    assert got.tolist() == addresses.tolist()
    assert (tier.used, tier.one.counts.in_flight, len(tier.tree)) == (2, 0, 0)
    tier.tree.check()
    tier.one.allocator.give(got)
    assert tier.used == 0
    tier.check()


def test_the_fastest_tier_counts() -> None:
    tier = Tier("memory", "disk", "store")
    rows = tier.rows(1, 2, 3)
    tier.store(rows, 2)
    tier.store(rows[:2], 1)
    tier.store(rows[:1], 0)
    assert tier.fastest.of(0)[rows].tolist() == [1, 2, 3]
    tier.levels[0].drop(0, rows[:1], MissReason.EVICTED)
    assert tier.fastest.of(0)[rows].tolist() == [2, 2, 3]
    tier.fastest.set_levels([tier.levels[0], tier.levels[2]])
    assert tier.fastest.of(0)[rows].tolist() == [2, 2, 2]
    tier.tree.check()


def test_columns_follow_the_tree(tier: Tier) -> None:
    first = tier.rows(1)
    tier.store(first)
    keys = [n.to_bytes(32, "big") for n in range(1 << 20, (1 << 20) + 3000)]
    rows = tier.tree.ensure(tier.space.rows, keys, ROOT)
    assert tier.fastest.of(0)[first].tolist() == [1]
    assert tier.fastest.of(0)[rows].max() == 0
    assert tier.fastest.of(0).size == tier.tree.nodes.rows + 1
    tier.one.drop(0, first, MissReason.EVICTED)


def test_the_last_reason_is_that_of_the_last_copy() -> None:
    tier = Tier("memory", "disk")
    rows = tier.rows(1)
    tier.store(rows, 0)
    tier.store(rows, 1)
    tier.levels[0].drop(0, rows, MissReason.EVICTED)
    tier.levels[1].drop(0, rows, MissReason.CORRUPT)
    assert tier.tree.why_gone(tier.space.rows, bytes([1]) * 32, -1) is MissReason.CORRUPT


def test_a_write_that_fails_is_no_reason_while_another_copy_is_there() -> None:
    tier = Tier("memory", "disk")
    rows = tier.rows(1)
    tier.store(rows, 0)
    tier.claim(rows, 1)
    tier.levels[1].drop(0, rows, MissReason.NOT_WRITTEN)
    tier.levels[1].let_go(0, rows)
    tier.levels[0].drop(0, rows, MissReason.EVICTED)
    assert tier.tree.why_gone(tier.space.rows, bytes([1]) * 32, -1) is MissReason.EVICTED
    tier.check()


def test_counters_by_space_and_group() -> None:
    counts = Counts()
    counts.add(np.array([0, 0, 1], dtype=np.int32), 2, 1)
    counts.add(np.array([1], dtype=np.int32), 2, 1)
    counts.add(np.array([0, 0], dtype=np.int32), 2, -1)
    counts.add(np.array([], dtype=np.int32), 0, 1)
    assert counts.copies == {(0, 2): 0, (1, 2): 2}
