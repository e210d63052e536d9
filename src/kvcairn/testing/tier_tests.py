"""The contract of a tier as tests: inherit from `TierTests`, say how to make the tier, run pytest."""

# The name of a test is its sentence.
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import xxhash

from kvcairn.memory.slots import PAGE_BYTES
from kvcairn.testing.oracle import ByteOracle
from kvcairn.tiers.base import BlockRef, Delete, Outcome, Read, Slot, Stored, Tier, Write
from kvcairn.types import MissReason

SPACE, OTHER_SPACE = b"\x01" * 32, b"\x02" * 32


class SlotMaker:
    """Cuts segments of equal slots, as the index above a managed tier does.

    Args:
        header_bytes: of the tier, counted in every slot.
        slots: in one segment.
    """

    def __init__(self, header_bytes: int, slots: int = 64) -> None:
        self._header_bytes, self._slots = header_bytes, slots
        self._segments: dict[int, tuple[int, int]] = {}
        self._generation = 0

    def cut(self, payload_bytes: int, segment: int | None = None) -> Slot:
        """Return a slot never given out before, of the size that the payload needs."""
        slot_bytes = self._header_bytes + -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES
        if segment is None:
            full = self._slots
            free = (n for n, (size, used) in self._segments.items() if size == slot_bytes and used < full)
            segment = next(free, len(self._segments) + 1)
        used = self._segments.get(segment, (slot_bytes, 0))[1]
        self._segments[segment] = (slot_bytes, used + 1)
        self._generation += 1
        return Slot(segment, used * slot_bytes, slot_bytes, self._slots * slot_bytes, self._generation)

    def reuse(self, slot: Slot) -> Slot:
        """Return the same place with a new generation."""
        self._generation += 1
        return replace(slot, generation=self._generation)


class TierSuite:
    """What the suites share: making blocks, storing them, and saying what is expected."""

    sizes: Sequence[int] = (1, 100, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES, 65_536)

    @pytest.fixture
    def tier(self, **_: Any) -> Tier:
        """Return a tier that is not open, over an empty place."""
        raise NotImplementedError("override the fixture `tier`")

    def another(self, tier: Tier) -> Tier:
        """Return a second, unopened tier over the same place as `tier`."""
        raise NotImplementedError("override `another`: what is stored must be found by the next process")

    @pytest.fixture
    def opened(self, tier: Tier) -> Iterator[Tier]:
        """Open the tier and close it at the end, whatever the test did to it."""
        list(tier.open())
        self.slots = SlotMaker(tier.header_bytes)
        self.oracle = ByteOracle(7)
        yield tier
        tier.close()

    # -- making and asking

    def make(self, number: int, nbytes: int = PAGE_BYTES, group: int = 0, space: bytes = SPACE) -> Write:
        """Return a write of a block that is known by its number."""
        key = xxhash.xxh3_128_digest(number.to_bytes(4, "little")) * 2
        data = self.oracle.part(space, key, group, nbytes)
        parent = bytes(32) if number % 2 else None
        checksum = xxhash.xxh3_128_digest(data)
        slot = self.slots.cut(nbytes)
        return Write(BlockRef(space, key, group), parent, slot, memoryview(data), checksum)

    def given(self, tier: Tier, write: Write) -> Write:
        """Leave the slot out for a foreign tier."""
        return write if tier.managed else replace(write, slot=None)

    def store(self, tier: Tier, *writes: Write) -> None:
        """Write, and expect every block to be acknowledged."""
        outcomes = tier.write([self.given(tier, write) for write in writes])
        assert outcomes == [None] * len(writes)

    def load(self, tier: Tier, *writes: Write) -> tuple[list[Outcome], list[bytearray]]:
        """Read what these writes stored, into buffers that begin full of a pattern."""
        outs = [bytearray(b"\xa5" * write.data.nbytes) for write in writes]
        reads = [
            Read(write.block, write.slot if tier.managed else None, memoryview(out))
            for write, out in zip(writes, outs, strict=True)
        ]
        return tier.read(reads), outs

    def drop(self, tier: Tier, *writes: Write) -> None:
        """Delete what these writes stored."""
        tier.delete([Delete(write.block, write.slot if tier.managed else None) for write in writes])

    def expect(self, tier: Tier, *writes: Write) -> None:
        """Expect every block to be there, byte for byte."""
        outcomes, outs = self.load(tier, *writes)
        assert outcomes == [None] * len(writes)
        for write, out in zip(writes, outs, strict=True):
            self.oracle.check(out, write.block.space_id, write.block.key, write.block.group)

    def expect_missing(self, tier: Tier, *writes: Write) -> None:
        """Expect every block to be a miss with a reason that makes the caller drop the copy."""
        outcomes, _ = self.load(tier, *writes)
        assert len(outcomes) == len(writes)
        assert set(outcomes) <= {MissReason.VANISHED, MissReason.CORRUPT}

    def managed_only(self, tier: Tier) -> None:
        """Skip a test that means nothing for a tier which is asked by key."""
        if not tier.managed:
            pytest.skip("a foreign tier has no slots")

    def reopened(self, tier: Tier) -> list[Stored]:
        """Return what a second tier finds in the place of the first, which is closed."""
        second = self.another(tier)
        try:
            return list(second.open())
        finally:
            second.close()


class IdentityTests(TierSuite):
    """What a tier is."""

    def test_it_has_a_name(self, tier: Tier) -> None:
        assert tier.name

    def test_its_header_is_whole_pages(self, tier: Tier) -> None:
        assert tier.header_bytes >= 0
        assert tier.header_bytes % PAGE_BYTES == 0

    def test_constructing_takes_no_ownership(self, opened: Tier) -> None:
        self.managed_only(opened)
        self.another(opened)
        write = self.make(1)
        self.store(opened, write)
        self.expect(opened, write)

    def test_opening_an_empty_place_finds_nothing(self, tier: Tier) -> None:
        assert list(tier.open()) == []
        tier.close()

    def test_close_is_idempotent(self, tier: Tier) -> None:
        list(tier.open())
        tier.close()
        tier.close()


class WritingTests(TierSuite):
    """What was written is read, and nothing else."""

    def test_what_was_written_is_read(self, opened: Tier) -> None:
        for number, nbytes in enumerate(self.sizes):
            write = self.make(number, nbytes)
            self.store(opened, write)
            self.expect(opened, write)

    def test_many_blocks_in_one_call(self, opened: Tier) -> None:
        writes = [self.make(number, self.sizes[number % len(self.sizes)]) for number in range(100)]
        self.store(opened, *writes)
        self.expect(opened, *reversed(writes))

    def test_an_empty_call_has_no_outcomes(self, opened: Tier) -> None:
        assert opened.write([]) == []
        assert opened.read([]) == []
        assert opened.probe([]) == []
        opened.delete([])
        opened.retire([])

    def test_one_outcome_for_each_block_in_order(self, opened: Tier) -> None:
        there = [self.make(number) for number in range(3)]
        absent = [self.make(number) for number in range(3, 6)]
        self.store(opened, *there)
        outcomes, outs = self.load(opened, there[0], absent[0], absent[1], there[1], absent[2], there[2])
        assert [outcome is None for outcome in outcomes] == [True, False, False, True, False, True]
        for write, out in zip(there, (outs[0], outs[3], outs[5]), strict=True):
            self.oracle.check(out, SPACE, write.block.key)

    def test_a_block_never_written_is_missing(self, opened: Tier) -> None:
        self.expect_missing(opened, self.make(1))

    def test_a_block_beside_a_written_one_is_missing(self, opened: Tier) -> None:
        self.store(opened, self.make(1))
        self.expect_missing(opened, self.make(2), self.make(3))

    def test_groups_of_one_key_are_different_blocks(self, opened: Tier) -> None:
        writes = [self.make(1, 100 + group, group) for group in range(3)]
        self.store(opened, *writes)
        self.expect(opened, *writes)
        self.drop(opened, writes[1])
        self.expect(opened, writes[0], writes[2])
        self.expect_missing(opened, writes[1])

    def test_spaces_never_share_bytes(self, opened: Tier) -> None:
        mine, theirs = self.make(1), self.make(1, space=OTHER_SPACE)
        self.store(opened, mine)
        self.expect_missing(opened, theirs)
        self.store(opened, theirs)
        self.expect(opened, mine, theirs)

    def test_another_block_in_the_slot_is_no_hit(self, opened: Tier) -> None:
        self.managed_only(opened)
        write = self.make(1)
        self.store(opened, write)
        for block in (
            replace(write.block, key=b"\x09" * 32),
            replace(write.block, space_id=OTHER_SPACE),
            replace(write.block, group=1),
        ):
            self.expect_missing(opened, replace(write, block=block))
        self.expect(opened, write)

    def test_damaged_bytes_are_not_served(self, opened: Tier) -> None:
        for number, at in enumerate((0, PAGE_BYTES // 2, PAGE_BYTES - 1)):
            write = self.make(number)
            damaged = bytearray(write.data)
            damaged[at] ^= 1
            opened.write([self.given(opened, replace(write, data=memoryview(bytes(damaged))))])
            self.expect_missing(opened, write)

    def test_it_keeps_no_view_of_the_data(self, opened: Tier) -> None:
        write = self.make(1)
        data = bytearray(write.data)
        self.store(opened, replace(write, data=memoryview(data).toreadonly()))
        data[:] = bytes(len(data))
        self.expect(opened, write)

    def test_it_writes_nothing_beside_the_buffer(self, opened: Tier) -> None:
        write = self.make(1, 1000)
        self.store(opened, write)
        frame = bytearray(b"\xee" * 3000)
        slot = write.slot if opened.managed else None
        assert opened.read([Read(write.block, slot, memoryview(frame)[1000:2000])]) == [None]
        self.oracle.check(frame[1000:2000], SPACE, write.block.key)
        assert set(frame[:1000] + frame[2000:]) == {0xEE}


class DeletingTests(TierSuite):
    """What was deleted, overwritten or retired is gone, and nothing else."""

    def test_a_slot_holds_what_was_written_last(self, opened: Tier) -> None:
        self.managed_only(opened)
        old = self.make(1)
        self.store(opened, old)
        assert old.slot is not None
        new = replace(self.make(2), slot=self.slots.reuse(old.slot))
        self.store(opened, new)
        self.expect(opened, new)
        self.expect_missing(opened, old)

    def test_the_same_block_can_be_written_again(self, opened: Tier) -> None:
        write = self.make(1)
        self.store(opened, write)
        again = write
        if write.slot is not None:
            again = replace(write, slot=self.slots.reuse(write.slot))
        self.store(opened, again)
        self.expect(opened, again)

    def test_a_deleted_block_is_missing(self, opened: Tier) -> None:
        writes = [self.make(number) for number in range(4)]
        self.store(opened, *writes)
        self.drop(opened, writes[1], writes[3])
        self.expect(opened, writes[0], writes[2])
        self.expect_missing(opened, writes[1], writes[3])

    def test_deleting_what_is_absent_is_passed_over(self, opened: Tier) -> None:
        write = self.make(1)
        self.drop(opened, write)
        self.store(opened, write)
        self.drop(opened, write)
        self.drop(opened, write, self.make(2))
        self.expect_missing(opened, write)

    def test_deleting_the_old_block_leaves_the_new_one_of_its_slot(self, opened: Tier) -> None:
        self.managed_only(opened)
        old = self.make(1)
        self.store(opened, old)
        assert old.slot is not None
        new = replace(self.make(2), slot=self.slots.reuse(old.slot))
        self.store(opened, new)
        self.drop(opened, old)
        self.expect(opened, new)

    def test_deleting_an_old_copy_leaves_the_new_one_of_its_block(self, opened: Tier) -> None:
        self.managed_only(opened)
        old = self.make(1)
        new = replace(old, slot=self.slots.cut(PAGE_BYTES))
        self.store(opened, old)
        self.store(opened, new)
        self.drop(opened, old)
        self.expect(opened, new)
        opened.close()
        assert [stored.slot for stored in self.reopened(opened)] == [new.slot]

    def test_deleting_an_old_generation_leaves_the_new_one(self, opened: Tier) -> None:
        self.managed_only(opened)
        old = self.make(1)
        self.store(opened, old)
        assert old.slot is not None
        new = replace(old, slot=self.slots.reuse(old.slot))  # the same block came back to the same place
        self.store(opened, new)
        self.drop(opened, old)
        self.expect(opened, new)
        opened.close()
        assert [stored.slot for stored in self.reopened(opened)] == [new.slot]

    def test_a_retired_segment_is_gone_and_the_others_stay(self, opened: Tier) -> None:
        self.managed_only(opened)
        gone, stays = self.make(1, PAGE_BYTES), self.make(2, 10 * PAGE_BYTES)
        assert gone.slot is not None and stays.slot is not None
        assert gone.slot.segment != stays.slot.segment
        self.store(opened, gone, stays)
        opened.retire([gone.slot.segment, 999_999])
        self.expect(opened, stays)
        opened.close()
        assert [stored.block for stored in self.reopened(opened)] == [stays.block]

    def test_probe_answers_for_each_block(self, opened: Tier) -> None:
        writes = [self.make(number) for number in range(4)]
        self.store(opened, writes[0], writes[2])
        self.drop(opened, writes[2])
        assert opened.probe([write.block for write in writes]) == [True, False, False, False]


class ClearingTests(TierSuite):
    """What was cleared is gone, late writes included, and nothing else; for tiers that say that they can."""

    @pytest.fixture
    def clearing(self, opened: Tier) -> Tier:
        """Return the open tier, where it clears."""
        if not opened.clears:
            pytest.skip("the blocks of a space are deleted one by one")
        return opened

    def test_a_cleared_space_is_gone_and_others_stay(self, clearing: Tier) -> None:
        gone = [self.make(number) for number in range(3)]
        other = [self.make(number, space=OTHER_SPACE) for number in range(3)]
        self.store(clearing, *gone, *other)
        clearing.clear(SPACE, max(write.slot.generation for write in gone if write.slot))
        assert clearing.probe([write.block for write in (*gone, *other)]) == [False] * 3 + [True] * 3
        self.expect(clearing, *other)
        clearing.close()
        assert {stored.block for stored in self.reopened(clearing)} == {write.block for write in other}

    def test_what_is_stored_after_a_clear_stays(self, clearing: Tier) -> None:
        old = self.make(1)
        self.store(clearing, old)
        assert old.slot is not None
        clearing.clear(SPACE, old.slot.generation)
        new = self.make(1)
        self.store(clearing, new)
        self.expect(clearing, new)
        clearing.close()
        assert [stored.slot for stored in self.reopened(clearing)] == [new.slot]

    def test_a_write_that_ends_after_the_clear_is_not_there(self, clearing: Tier) -> None:
        late = self.make(1)
        assert late.slot is not None
        clearing.clear(SPACE, late.slot.generation)
        assert clearing.write([late]) == [MissReason.CLEARED]
        clearing.close()
        second = self.another(clearing)
        assert list(second.open()) == []
        assert second.last_generation >= late.slot.generation, "else what is stored next is dead too"
        second.close()


class RestartTests(TierSuite):
    """What the next process finds."""

    def test_a_foreign_tier_reports_nothing_at_open(self, opened: Tier) -> None:
        if opened.managed:
            pytest.skip("a managed tier reports what it holds")
        self.store(opened, self.make(1))
        opened.close()
        assert self.reopened(opened) == []

    def test_all_that_was_acknowledged_is_found(self, opened: Tier) -> None:
        self.managed_only(opened)
        writes = [self.make(number, self.sizes[number % len(self.sizes)], number % 3) for number in range(50)]
        self.store(opened, *writes)
        opened.close()
        found = sorted(self.reopened(opened), key=lambda stored: stored.block.key)
        assert found == [
            Stored(w.block, w.parent, w.slot, w.data.nbytes, w.checksum)
            for w in sorted(writes, key=lambda write: write.block.key)
            if w.slot is not None
        ]

    def test_what_is_found_can_be_read(self, opened: Tier) -> None:
        self.managed_only(opened)
        writes = [self.make(number, self.sizes[number % len(self.sizes)]) for number in range(20)]
        self.store(opened, *writes)
        opened.close()
        second = self.another(opened)
        list(second.open())
        try:
            self.expect(second, *writes)
        finally:
            second.close()

    def test_what_was_deleted_stays_away(self, opened: Tier) -> None:
        self.managed_only(opened)
        writes = [self.make(number) for number in range(10)]
        self.store(opened, *writes)
        self.drop(opened, *writes[:7])
        opened.close()
        assert {stored.block for stored in self.reopened(opened)} == {write.block for write in writes[7:]}

    def test_what_was_overwritten_stays_away(self, opened: Tier) -> None:
        self.managed_only(opened)
        old = [self.make(number) for number in range(4)]
        self.store(opened, *old)
        reused = [self.slots.reuse(write.slot) for write in old if write.slot is not None]
        new = [replace(self.make(10 + n), slot=slot) for n, slot in enumerate(reused)]
        self.store(opened, *new)
        opened.close()
        found = self.reopened(opened)
        assert {stored.block for stored in found} == {write.block for write in new}
        assert {stored.slot for stored in found} == set(reused)


class ThreadTests(TierSuite):
    """Every method is called from several threads at once."""

    def test_calls_from_several_threads(self, opened: Tier) -> None:
        shares = [[self.make(100 * n + number, 5000) for number in range(20)] for n in range(4)]

        def work(share: list[Write]) -> None:
            for done, write in enumerate(share, start=1):
                self.store(opened, write)
                self.expect(opened, *share[:done])
            self.drop(opened, *share[::2])
            self.expect(opened, *share[1::2])
            self.expect_missing(opened, *share[::2])

        with ThreadPoolExecutor(len(shares)) as pool:
            list(pool.map(work, shares))


class TierTests(IdentityTests, WritingTests, DeletingTests, ClearingTests, RestartTests, ThreadTests):
    """One test for each sentence of the contract in `kvcairn.tiers.base`.

    Inherit from it in a test module, under a name that begins with `Test`, and override the fixture `tier`: it
    gives a tier that is not open yet, over an empty place. For a managed tier override `another` as well. Nothing
    here measures time; a tier that hangs is found by the time limit of the test run.
    """
