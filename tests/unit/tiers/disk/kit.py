"""What the tests of the disk tier share: tiers over a folder, blocks, and a look at the files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from kvcairn.checksum import checksum
from kvcairn.clock import VirtualClock
from kvcairn.config import DiskTierOptions
from kvcairn.testing.oracle import ByteOracle
from kvcairn.testing.tier_tests import SlotMaker
from kvcairn.tiers.base import BlockRef, Delete, Outcome, Read, Slot, Stored, TierContext, Write
from kvcairn.tiers.disk import DiskTier
from kvcairn.tiers.inventory import Inventory

PAGE = 4096
MiB = 1 << 20
SPACE = b"\x01" * 32
ORACLE = ByteOracle(11)


def tier_over(
    folder: Path, capacity_bytes: int = 64 * MiB, durability: Literal["none", "data", "full"] = "none"
) -> DiskTier:
    """Return an unopened tier."""
    options = DiskTierOptions(path=str(folder), capacity_bytes=capacity_bytes, durability=durability)
    return DiskTier(options, TierContext(clock=VirtualClock()))


@contextmanager
def opened(
    folder: Path, capacity_bytes: int = 64 * MiB, durability: Literal["none", "data", "full"] = "none"
) -> Iterator[DiskTier]:
    """Open a tier whose folder's rows are not looked at."""
    tier = tier_over(folder, capacity_bytes, durability)
    tier.open()
    try:
        yield tier
    finally:
        tier.close()


def slots() -> SlotMaker:
    """Return a maker of slots with 8 slots a segment."""
    return SlotMaker(PAGE, slots=8)


def key_of(number: int) -> bytes:
    """Return the key of a numbered block."""
    return number.to_bytes(4, "big") * 8


def block(slot: Slot, number: int, nbytes: int, group: int = 0) -> Write:
    """Return a write of a numbered block whose bytes follow from its name."""
    ref = BlockRef(SPACE, key_of(number), group)
    data = memoryview(ORACLE.part(SPACE, ref.key, group, nbytes))
    parent = None if number == 0 else key_of(number - 1)
    return Write(ref, parent, slot, data, checksum(data))


def blocks(maker: SlotMaker, numbers: Iterable[int], nbytes: int = 5000) -> list[Write]:
    """Return writes of numbered blocks in slots of their own."""
    return [block(maker.cut(nbytes), number, nbytes) for number in numbers]


def stored(write: Write) -> Stored:
    """Return what a tier should say of a write after a restart."""
    assert write.slot is not None
    return Stored(write.block, write.parent, write.slot, write.data.nbytes, write.checksum)


def read(tier: DiskTier, writes: Sequence[Write | Stored]) -> list[Outcome]:
    """Read blocks back; every outcome None was compared byte for byte."""
    outs = [bytearray(w.nbytes if isinstance(w, Stored) else w.data.nbytes) for w in writes]
    outcomes = tier.read([Read(w.block, w.slot, memoryview(o)) for w, o in zip(writes, outs, strict=True)])
    for write, out, outcome in zip(writes, outs, outcomes, strict=True):
        if outcome is None:
            ORACLE.check(out, write.block.space_id, write.block.key, write.block.group)
    return outcomes


def drop(tier: DiskTier, writes: Iterable[Write]) -> None:
    """Delete blocks."""
    tier.delete([Delete(write.block, write.slot) for write in writes])


def listed(tier: DiskTier) -> list[Stored]:
    """Open a tier and return what the cache takes up: with what it has to scan for, of each block the newest copy."""
    copies = list(tier.open())
    for segment in tier.unlisted:
        copies += tier.scan(segment)
    found = Inventory.of(copies)
    return list(found.take(np.flatnonzero(~found.outdated())))


def found(folder: Path) -> list[Stored]:
    """Return what a new tier finds, in the order of the slots."""
    tier = tier_over(folder)
    try:
        return sorted(listed(tier), key=lambda copy: (copy.slot.segment, copy.slot.offset_bytes))
    finally:
        tier.close()


def segment_files(folder: Path) -> list[str]:
    """Return the names of the segment files."""
    return sorted(path.name for path in folder.glob("seg-*.kv"))


def taken_bytes(folder: Path) -> int:
    """Return what the files of a folder take: blocks on disk or length, whichever is more."""
    return sum(max(s.st_size, s.st_blocks * 512) for s in (os.lstat(p) for p in folder.iterdir()))


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
