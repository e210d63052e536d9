"""The disk tier: the contract of every tier, and what is its own."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcairn.clock import VirtualClock
from kvcairn.config import DiskTierOptions
from kvcairn.errors import TierError, TierFull, TierUnavailable
from kvcairn.testing.tier_tests import TierTests
from kvcairn.tiers.base import Read, Slot, Tier, TierContext
from kvcairn.tiers.disk import DiskTier
from kvcairn.types import MissReason
from tests.unit.tiers.disk.kit import (
    PAGE,
    SPACE,
    MiB,
    block,
    blocks,
    drop,
    found,
    listed,
    opened,
    read,
    segment_files,
    slots,
    stored,
    taken_bytes,
    tier_over,
)


class TestContract(TierTests):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        self.folder = tmp_path
        return tier_over(tmp_path)

    def another(self, tier: Tier) -> Tier:
        return tier_over(self.folder)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 70_000), st.integers(0, 3)), min_size=1, max_size=12),
    durability=st.sampled_from(["none", "data", "full"]),
)
def test_any_size_and_group_comes_back_after_a_restart(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int]], durability: str
) -> None:
    folder = tmp_path_factory.mktemp("tier")
    maker = slots()
    writes = [block(maker.cut(nbytes), n, nbytes, group) for n, (nbytes, group) in enumerate(sizes)]
    with opened(folder, durability=durability) as tier:  # type: ignore[arg-type]
        assert tier.write(writes) == [None] * len(writes)
        assert read(tier, writes) == [None] * len(writes)
    assert sorted(found(folder), key=lambda s: s.block.key) == [stored(w) for w in writes]
    with opened(folder) as tier:
        assert read(tier, writes) == [None] * len(writes)


def test_several_threads_store_read_and_drop_over_the_same_segments(tmp_path: Path) -> None:
    maker = slots()
    writes = blocks(maker, range(160), 9000)
    failures: list[BaseException] = []
    with opened(tmp_path) as tier:
        assert tier.write(writes[:40]) == [None] * 40

        def store(share: int) -> None:
            try:
                for i in range(40 + share, 160, 3):
                    assert tier.write([writes[i]]) == [None]
                    if i % 5 == 0:
                        drop(tier, [writes[i]])
            except (AssertionError, TierError) as error:
                failures.append(error)

        def load() -> None:
            try:
                for _ in range(15):
                    assert read(tier, writes[:40]) == [None] * 40
            except (AssertionError, TierError) as error:
                failures.append(error)

        threads = [threading.Thread(target=store, args=(n,)) for n in range(3)]
        threads += [threading.Thread(target=load) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        kept = [w for i, w in enumerate(writes) if i < 40 or i % 5]
        assert read(tier, kept) == [None] * len(kept)
    assert {s.block for s in found(tmp_path)} == {w.block for w in kept}


def test_a_slot_in_use_again_while_its_old_block_is_dropped_keeps_the_new_one(tmp_path: Path) -> None:
    maker = slots()
    old = blocks(maker, range(8))
    with opened(tmp_path) as tier:
        for turn in range(30):
            assert tier.write(old) == [None] * 8
            reused = [maker.reuse(w.slot) for w in old if w.slot]
            new = [block(slot, 1000 + turn * 8 + n, 5000) for n, slot in enumerate(reused)]
            dropping = threading.Thread(target=drop, args=(tier, old))
            dropping.start()
            assert tier.write(new) == [None] * 8
            dropping.join()
            assert read(tier, new) == [None] * 8
            old = new
    assert found(tmp_path) == [stored(w) for w in new]


def test_a_slot_that_cannot_be_is_refused_and_the_others_are_stored(tmp_path: Path) -> None:
    good, bad = blocks(slots(), range(2))
    assert bad.slot is not None
    impossible = [
        None,
        replace(bad.slot, slot_bytes=PAGE),
        replace(bad.slot, offset_bytes=bad.slot.offset_bytes + 1),
        replace(bad.slot, offset_bytes=bad.slot.segment_bytes),
        replace(bad.slot, segment=-1),
    ]
    with opened(tmp_path) as tier:
        for slot in impossible:
            ours, theirs = tier.write([good, replace(bad, slot=slot)])
            assert ours is None
            assert isinstance(theirs, TierError)
        key = tier.write([replace(bad, block=replace(bad.block, key=b"short"))])[0]
        assert isinstance(key, TierError)
    assert found(tmp_path) == [stored(good)]


def test_a_read_of_another_length_or_generation_is_no_hit(tmp_path: Path) -> None:
    (write,) = blocks(slots(), [0])
    assert write.slot is not None
    with opened(tmp_path) as tier:
        tier.write([write])
        short, long = memoryview(bytearray(4999)), memoryview(bytearray(5001))
        stale = replace(write, slot=replace(write.slot, generation=write.slot.generation + 1))
        assert (
            tier.read([Read(write.block, write.slot, short), Read(write.block, write.slot, long)])
            == [MissReason.CORRUPT] * 2
        )
        assert read(tier, [stale]) == [MissReason.CORRUPT]


def test_files_are_named_by_number_alone_and_wholly_preallocated(tmp_path: Path) -> None:
    maker = slots()
    writes = [*blocks(maker, range(9), 5000), *blocks(maker, range(20, 21), 100)]
    with opened(tmp_path) as tier:
        tier.write(writes)
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"lock", "folder", "index.sqlite", "index.sqlite-wal", "seg-1.kv", "seg-2.kv", "seg-3.kv"}
        for write in writes:
            assert write.slot is not None
            status = (tmp_path / f"seg-{write.slot.segment}.kv").stat()
            assert status.st_size == write.slot.segment_bytes
            assert status.st_blocks * 512 >= write.slot.segment_bytes
            assert status.st_mode & 0o077 == 0


def test_a_retired_segment_gives_its_bytes_back(tmp_path: Path) -> None:
    writes = blocks(slots(), range(16))
    with opened(tmp_path) as tier:
        tier.write(writes)
        assert segment_files(tmp_path) == ["seg-1.kv", "seg-2.kv"]
        tier.retire([1, 77])
        assert segment_files(tmp_path) == ["seg-2.kv"]
        assert read(tier, writes[:8]) == [MissReason.VANISHED] * 8
        assert read(tier, writes[8:]) == [None] * 8
    assert found(tmp_path) == [stored(w) for w in writes[8:]]


SINCE_1970_NS = 1_800_000_000 * 10**9  # where generations are after a rebuild: they take most bytes in a row


@pytest.mark.parametrize("capacity_bytes", [256 * 1024, MiB, 16 * MiB])
def test_all_files_together_stay_below_the_capacity(tmp_path: Path, capacity_bytes: int) -> None:
    """The worst case for the index: the smallest slots, all in use, each used several times over."""
    with opened(tmp_path, capacity_bytes) as tier:
        usable_bytes = capacity_bytes - tier.overhead_bytes
        assert usable_bytes >= capacity_bytes * (0.5 if capacity_bytes < MiB else 0.84)
        assert tier.region_bytes
        region, slot_bytes = tier.region_bytes, 2 * PAGE
        region_slots = max(1, region // slot_bytes)
        segment_bytes = max(region, slot_bytes)
        places = [
            (segment, n * slot_bytes) for segment in range(usable_bytes // segment_bytes) for n in range(region_slots)
        ]
        most = 0
        # Backwards one by one is what leaves the most gaps in the index.
        for turn, (order, at_once) in enumerate(
            [(places[::-1], 1), (places[::2] + places[1::2], 256), (places[::-1], 1), (places, 256)]
        ):
            for begin in range(0, len(order), at_once):
                part = [
                    block(
                        Slot(s, at, slot_bytes, segment_bytes, SINCE_1970_NS + turn * 10**6 + begin + n), begin + n, 100
                    )
                    for n, (s, at) in enumerate(order[begin : begin + at_once])
                ]
                assert tier.write(part) == [None] * len(part)
                most = max(most, taken_bytes(tmp_path))
                if turn == 1:
                    drop(tier, part[::2])
        for segment in range(0, places[-1][0] + 1, 2):
            tier.retire([segment])
            most = max(most, taken_bytes(tmp_path))
    assert max(most, taken_bytes(tmp_path)) <= capacity_bytes


def test_what_else_lies_in_the_folder_is_counted(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        empty_bytes = tier.overhead_bytes
    (tmp_path / "notes").write_bytes(bytes(10_000))
    with opened(tmp_path) as tier:
        assert tier.overhead_bytes >= empty_bytes + 10_000
    assert (tmp_path / "notes").exists()


def test_regions_stay_when_the_capacity_changes(tmp_path: Path) -> None:
    writes = blocks(slots(), range(20))
    with opened(tmp_path, 64 * MiB) as tier:
        tier.write(writes)
        assert tier.region_bytes == MiB
    smaller = tier_over(tmp_path, 2 * MiB)
    assert [s.block for s in smaller.open()] == [w.block for w in writes]
    assert smaller.region_bytes == MiB
    smaller.close()


def test_a_capacity_below_one_region_brings_smaller_regions(tmp_path: Path) -> None:
    with opened(tmp_path, 64 * MiB) as tier:
        tier.write(blocks(slots(), range(20)))
    with opened(tmp_path, MiB) as smaller:
        assert smaller.region_bytes == MiB // 64


def test_what_was_cleared_stays_away_whatever_comes_late(tmp_path: Path) -> None:
    maker = slots()
    old, late, new = (blocks(maker, numbers) for numbers in (range(8), range(8, 12), range(12, 16)))
    last = late[-1].slot
    assert last is not None
    with opened(tmp_path) as tier:
        assert tier.write(old) == [None] * 8
        tier.clear(SPACE, last.generation)
        assert tier.write(late) == [MissReason.CLEARED] * 4
        assert tier.write(new) == [None] * 4
        assert tier.probe([w.block for w in (*old, *late, *new)]) == [False] * 12 + [True] * 4
    assert found(tmp_path) == [stored(w) for w in new]
    for path in tmp_path.glob("index.sqlite*"):
        path.unlink()
    again = tier_over(tmp_path)
    assert listed(again) == [stored(w) for w in new]  # their headers are there, and dead
    assert again.last_generation >= last.generation
    again.close()


def test_a_damaged_list_of_what_was_cleared_is_made_anew(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.clear(SPACE, 3)
    (tmp_path / "epochs").write_bytes(b"\x01" * 56)
    with opened(tmp_path) as tier:
        assert tier.last_generation == 0
        tier.clear(SPACE, 4)
    with opened(tmp_path) as tier:
        assert tier.last_generation == 4


def test_an_index_damaged_while_it_is_open_is_made_anew(tmp_path: Path) -> None:
    maker = slots()
    old, new = blocks(maker, range(12)), blocks(maker, range(12, 20))
    with opened(tmp_path) as tier:
        assert tier.write(old) == [None] * 12
        index = tier._books()._opened
        index._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        content = (tmp_path / "index.sqlite").read_bytes()
        (tmp_path / "index.sqlite").write_bytes(content[:100] + b"\xa5" * (len(content) - 100))
        index._db.execute("PRAGMA shrink_memory")
        assert tier.write(new) == [None] * 8
        assert read(tier, [*old, *new]) == [None] * 20
        assert tier.probe([w.block for w in (*old, *new)]) == [True] * 20
    assert set(found(tmp_path)) == {stored(w) for w in (*old, *new)}


def test_the_reserve_of_the_device_is_left_alone(tmp_path: Path) -> None:
    free_bytes = shutil.disk_usage(tmp_path).free
    options = DiskTierOptions(path=str(tmp_path), capacity_bytes=64 * MiB, reserve_bytes=free_bytes)
    tier = DiskTier(options, TierContext(VirtualClock()))
    tier.open()
    try:
        assert all(isinstance(outcome, TierFull) for outcome in tier.write(blocks(slots(), range(4))))
        assert segment_files(tmp_path) == []
    finally:
        tier.close()


def test_a_closed_tier_is_unavailable(tmp_path: Path) -> None:
    tier = tier_over(tmp_path)
    with pytest.raises(TierUnavailable):
        tier.write(blocks(slots(), [0]))
    tier.open()
    tier.close()
    with pytest.raises(TierUnavailable):
        tier.retire([1])


def test_nothing_is_touched_before_open(tmp_path: Path) -> None:
    tier: DiskTier = tier_over(tmp_path)
    assert tier.region_bytes is None
    assert list(tmp_path.iterdir()) == []
