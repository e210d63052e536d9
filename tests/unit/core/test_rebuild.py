"""A disk whose index is lost is open at once, serves, and finds again what lies on it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from kvcairn import requests as rq
from kvcairn.errors import TierUnavailable
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.rig import Rig
from kvcairn.tiers.base import Stored, Write
from kvcairn.tiers.disk import DiskTier
from kvcairn.types import BlockStored
from tests.unit.conftest import MakeRig
from tests.unit.tiers.disk.kit import opened

PROMPTS, LENGTH = 13, 16  # of 64 slots a segment: the last one is not full


def lose_index(rig: Rig) -> None:
    """Close the cache, remove the index, and open the cache anew."""
    rig.cache.close()
    files = list(rig.folder.glob("index.sqlite*"))
    assert files
    for file in files:
        file.unlink()
    rig._open()


def unscanned(rig: Rig) -> int:
    return rig.cache.stats().tiers["disk"].unscanned_bytes


def filled(make_rig: MakeRig, **setup: object) -> tuple[Rig, Blocks, list[list[bytes]]]:
    """A rig whose disk holds several chains in several segments, its index lost."""
    rig = make_rig(below="disk", **setup)
    blocks = Blocks(rig)
    chains = [blocks.keys(prompt, LENGTH) for prompt in range(PROMPTS)]
    for keys in chains:
        assert all(blocks.put(keys))
        rig.cache.drain()
    lose_index(rig)
    return rig, Blocks(rig), chains


def test_it_is_open_at_once_and_finds_segment_by_segment(make_rig: MakeRig) -> None:
    rig, blocks, chains = filled(make_rig)
    events = rig.cache.events(timeout_s=0.0)
    stats = rig.cache.stats().tiers["disk"]
    files = [path.stat().st_size for path in rig.folder.glob("seg-*")]
    assert len(files) == 4
    assert stats.blocks == 0 and stats.unscanned_bytes == stats.used_bytes == sum(files)
    hit = blocks.space.lookup(chains[0])
    assert (hit.blocks, hit.reason) == (0, "unknown"), "nobody can say yet that it was never stored"
    found = [0]
    while unscanned(rig):
        left = unscanned(rig)
        while unscanned(rig) == left:
            assert rig.step()
        rig.core.check()
        found.append(rig.cache.stats().tiers["disk"].blocks)
        there = blocks.space.contains(chains[-1])
        assert blocks.read(chains[-1][:there], deadline_s=5.0) == there, "what was found is served at once"
    assert found == sorted(set(found)) and found[-1] == PROMPTS * LENGTH
    stored = [event for event in events.poll() if isinstance(event, BlockStored) and event.tier == "disk"]
    assert sorted(event.key for event in stored) == sorted(key for keys in chains for key in keys)
    for keys in chains:
        assert blocks.read(keys, deadline_s=5.0) == LENGTH
    assert blocks.space.lookup(blocks.keys(99, 3)).reason == "never_stored"
    rig.reopen()
    assert not unscanned(rig), "the index is whole"
    assert rig.cache.stats().tiers["disk"].blocks == PROMPTS * LENGTH
    assert_idle(rig)


def test_what_is_stored_meanwhile_lies_elsewhere_and_stays(make_rig: MakeRig) -> None:
    rig, blocks, chains = filled(make_rig)
    old = {path.name: path.read_bytes() for path in rig.folder.glob("seg-*")}
    new = [blocks.keys(100 + prompt, LENGTH) for prompt in range(3)]
    for keys in new:
        assert all(blocks.put(keys))
    while rig.cache.stats().tiers["disk"].blocks < 3 * LENGTH:
        assert rig.step()
    assert {name: (rig.folder / name).read_bytes() for name in old} == old, "nothing is written to what is not read"
    assert unscanned(rig)
    assert rig.cache.drain()
    rig.core.check()
    rig.reopen()
    blocks = Blocks(rig)
    for keys in (*chains, *new):
        assert blocks.read(keys, deadline_s=5.0) == LENGTH
    assert_idle(rig)


def test_a_block_that_was_stored_anew_is_there_once(make_rig: MakeRig) -> None:
    rig, blocks, chains = filled(make_rig)
    assert all(blocks.put(chains[0]))
    assert rig.cache.drain()
    rig.core.check()
    assert rig.cache.stats().tiers["disk"].blocks == PROMPTS * LENGTH
    lose_index(rig)
    assert rig.cache.drain()
    assert rig.cache.stats().tiers["disk"].blocks == PROMPTS * LENGTH, (
        "the other copy was deleted, or lost to the newer"
    )
    assert Blocks(rig).read(chains[0], deadline_s=5.0) == LENGTH
    assert_idle(rig)


@pytest.mark.parametrize("how", ["forget", "clear", "clear_space", "clear_tier"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_what_was_dropped_unseen_is_not_found(make_rig: MakeRig, how: str, after: int) -> None:
    rig, blocks, chains = filled(make_rig)
    rig.step(after)
    gone = chains if how != "forget" else chains[3:9]
    if how == "forget":
        for keys in gone:
            blocks.space.forget(keys)
    else:
        space = blocks.space if how == "clear_space" else None
        assert rig.cache.clear(space, "disk" if how == "clear_tier" else None)
    assert all(blocks.put(chains[4]))
    assert rig.cache.drain()
    rig.core.check()
    for turn in range(2):
        for keys in chains:
            alive = keys not in gone or keys == chains[4]
            assert blocks.space.contains(keys) == (LENGTH if alive else 0), turn
        rig.reopen()
        blocks = Blocks(rig)
    lose_index(rig)
    assert rig.cache.drain()
    blocks = Blocks(rig)
    for keys in chains:
        alive = keys not in gone or keys == chains[4]
        assert blocks.read(keys, deadline_s=5.0) == (LENGTH if alive else 0)
    assert_idle(rig)


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_cleared_while_it_is_being_read_is_not_taken_up(make_rig: MakeRig, whole: bool) -> None:
    rig, blocks, chains = filled(make_rig)
    assert rig.faulty is not None and isinstance(rig.faulty.inner, DiskTier)
    tier, space = rig.faulty.inner, blocks.space.frame.space
    scan = tier.scan

    def scan_and_clear(segment: int) -> Iterable[Stored]:
        found = scan(segment)
        rig.core.call(rq.Clear(None if whole else space, None))
        return found

    tier.scan = scan_and_clear  # type: ignore[method-assign]
    assert rig.step()
    assert rig.cache.stats().tiers["disk"].blocks == 0
    tier.scan = scan  # type: ignore[method-assign]
    assert rig.cache.drain()
    rig.core.check()
    for keys in chains:
        assert blocks.space.contains(keys) == 0
    rig.reopen()
    assert rig.cache.stats().tiers["disk"].blocks == 0
    assert_idle(rig)


def test_of_two_copies_the_one_of_the_higher_generation_stays_whichever_is_found_first(make_rig: MakeRig) -> None:
    rig = make_rig(below="disk")
    blocks = Blocks(rig)
    keys = blocks.keys(1, 8)
    assert all(blocks.put(keys))
    rig.cache.close()
    capacity = rig.setup.below_blocks * 8192
    with opened(rig.folder, capacity) as tier:
        held = listed_again(tier)
        data = {copy.block.key: memoryview(blocks.content(copy.block.key)) for copy in held}
        twins = [
            Write(
                copy.block,
                copy.parent,
                replace(copy.slot, segment=77, generation=copy.slot.generation + 1000),
                data[copy.block.key],
                copy.checksum,
            )
            for copy in held
        ]
        assert tier.write(twins) == [None] * 8
    for file in rig.folder.glob("index.sqlite*"):
        file.unlink()
    older = rig.folder / f"seg-{held[0].slot.segment}.kv"
    for copy in held:  # so that it shows which one is read
        patch(older, copy.slot.offset_bytes + 4096, b"\xee" * 64)
    os.utime(older, (4e9, 4e9))  # read first
    rig._open()
    assert rig.cache.drain()
    rig.core.check()
    assert rig.cache.stats().tiers["disk"].blocks == 8
    assert Blocks(rig).read(keys, deadline_s=5.0) == 8
    assert_idle(rig)


def listed_again(tier: DiskTier) -> list[Stored]:
    """Return what the rows of an open tier say."""
    return list(tier._books().load())


def patch(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_other_spaces_survive_the_clearing_of_one(make_rig: MakeRig) -> None:
    rig = make_rig(below="disk")
    made = {tenant: Blocks(rig, tenant=tenant) for tenant in ("a", "b")}
    keys = {tenant: blocks.keys(1, 5) for tenant, blocks in made.items()}
    for tenant, blocks in made.items():
        assert all(blocks.put(keys[tenant]))
    lose_index(rig)
    made = {tenant: Blocks(rig, tenant=tenant) for tenant in ("a", "b")}
    assert rig.cache.clear(made["a"].space)
    assert rig.cache.drain()
    assert [made[tenant].space.contains(keys[tenant]) for tenant in ("a", "b")] == [0, 5]
    assert made["b"].read(keys["b"], deadline_s=5.0) == 5


def test_a_full_disk_takes_nothing_before_something_is_found(make_rig: MakeRig) -> None:
    rig = make_rig(below="disk", below_blocks=64)
    blocks = Blocks(rig)
    for prompt in range(12):
        assert all(blocks.put(blocks.keys(prompt, 8)))
        rig.cache.drain()
    full = rig.cache.stats().tiers["disk"].blocks
    lose_index(rig)
    blocks = Blocks(rig)
    new = blocks.keys(50, 2)
    assert all(blocks.put(new))
    while not rig.cache.stats().tiers["disk"].writes_dropped:
        assert rig.step()
    assert rig.cache.stats().tiers["disk"].writes_dropped == {"rebuilding": 2}
    assert rig.cache.drain()
    assert rig.cache.stats().tiers["disk"].blocks == full
    rig.clock.advance(60.0)
    blocks.space.touch(new)
    assert rig.cache.drain()
    rig.cache.clear(tier="memory")
    assert blocks.read(new, deadline_s=5.0) == 2, "then room is made as ever"
    assert_idle(rig)


def test_a_segment_that_cannot_be_read_now_is_tried_again(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    rig, blocks, chains = filled(make_rig)
    assert rig.faulty is not None
    rig.faulty.faults = (
        Fault(kind=FaultKind.ERROR, ops=frozenset(["scan"]), calls=frozenset([1, 2]), error=TierUnavailable),
    )
    assert rig.cache.drain(), "nothing can be done before some time has passed"
    left = rig.cache.stats().tiers["disk"]
    assert left.unscanned_bytes and left.errors == {"TierUnavailable": 2} and not left.is_down
    assert all(blocks.put(blocks.keys(70, 4)))
    rig.clock.advance(10.0)
    rig.step()
    assert rig.cache.drain()
    assert not unscanned(rig)
    for keys in chains:
        assert blocks.read(keys, deadline_s=5.0) == LENGTH
    assert "tried again" in caplog.text
    assert_idle(rig)


def test_closed_before_all_is_found(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    rig, blocks, chains = filled(make_rig)
    for turn in range(4):
        rig.step(turn)
        assert all(blocks.put(blocks.keys(200 + turn, 4)))
        rig.reopen()
        blocks = Blocks(rig)
        assert unscanned(rig)
    assert rig.cache.drain()
    assert "complete again" in caplog.text
    for keys in chains:
        assert blocks.read(keys, deadline_s=5.0) == LENGTH
    for turn in range(4):
        assert blocks.read(blocks.keys(200 + turn, 4), deadline_s=5.0) == 4
    assert_idle(rig)


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_detached_before_all_is_found(make_rig: MakeRig, after: int, drain: bool) -> None:
    rig, _, chains = filled(make_rig)
    rig.step(after)
    assert rig.faulty is not None
    scans = rig.faulty.calls["scan"]
    rig.cache.detach_tier("disk", drain=drain)
    assert rig.faulty.calls["scan"] == scans == after, "the rest is not waited for"
    assert rig.executor is not None
    rig.executor.run()
    rig.core.check()
    path = str(rig.folder)
    rig.cache.add_tier({"type": "disk", "name": "again", "path": path, "capacity": 4096 * 8192})
    assert rig.cache.drain()
    blocks = Blocks(rig)
    for keys in chains:
        assert blocks.read(keys, deadline_s=5.0) == LENGTH
    rig.core.check()


def test_what_does_not_fit_a_smaller_capacity_goes_at_once(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(below="disk", below_blocks=512)
    blocks = Blocks(rig)
    chains = [blocks.keys(prompt, 8) for prompt in range(40)]
    for keys in chains:
        assert all(blocks.put(keys))
        rig.cache.drain()
    object.__setattr__(rig.setup, "below_blocks", 128)
    rig.__dict__.pop("config", None)
    lose_index(rig)
    capacity = 128 * 8192
    assert sum(path.stat().st_size for path in rig.folder.iterdir()) <= capacity
    stats = rig.cache.stats().tiers["disk"]
    assert 0 < stats.unscanned_bytes <= stats.used_bytes <= capacity
    assert rig.cache.drain()
    rig.core.check()
    assert 0 < rig.cache.stats().tiers["disk"].blocks * 8192 <= capacity
    assert_idle(rig)
