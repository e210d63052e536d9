"""Looks at a folder for people: what lies in it, and whether it can still be read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from kvcairn.clock import MonotonicClock
from kvcairn.config import DiskTierOptions
from kvcairn.errors import ConfigError, TierError
from kvcairn.tiers.base import Delete, Read, Stored, TierContext
from kvcairn.tiers.disk.epochs import Epochs
from kvcairn.tiers.disk.folder import META_NAME
from kvcairn.tiers.disk.segments import Segments
from kvcairn.tiers.disk.tier import DiskTier
from kvcairn.tiers.inventory import Inventory
from kvcairn.units import format_size

_AT_ONCE_BYTES: Final = 64 << 20
_THREADS: Final = 4
_ANY_CAPACITY: Final = 1 << 44  # nothing is stored


class SpaceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One space of a folder.

    Attributes:
        space: Its id, in hexadecimal digits.
        blocks: Copies, one for each layer group of a block.
        payload_bytes: Their bytes.
        slot_bytes: What they take, headers and padding included.
        written_s: Seconds since a segment with copies of it was last written to.
    """

    space: str
    blocks: int
    payload_bytes: int
    slot_bytes: int
    written_s: float


class Scrubbed(msgspec.Struct, frozen=True, kw_only=True):
    """What a scrub found.

    Attributes:
        path: The folder.
        checked: Copies that were read.
        checked_bytes: Their payload.
        dropped: Copies that were damaged or lost, and are forgotten now.
        failed: Copies that could not be read because the device refused; they stay.
        seconds: How long it took.
    """

    path: str
    checked: int
    checked_bytes: int
    dropped: int
    failed: int
    seconds: float


def list_spaces(path: Path) -> list[SpaceRow]:
    """Return what lies in a folder, by its headers. Takes no lock, so its owner may be running; blocks.

    Raises:
        ConfigError: there is no disk tier at that place.
    """
    segments = _segments(path)
    epochs = Epochs(path)
    epochs.load()
    sizes = segments.sizes()
    with ThreadPoolExecutor(_THREADS) as pool:
        parts = pool.map(lambda segment: list(segments.scan(segment)), sorted(sizes))
        alive = [c for part in parts for c in part if c.slot.generation > epochs.of(c.block.space_id)]
    found = Inventory.of(alive)
    found = found.take(np.flatnonzero(~found.outdated())) if alive else found
    now, rows = time.time(), []
    for space_id, mine in found.spaces() if alive else []:
        files = [segments.path(number) for number in set(found.place[mine, 0].tolist())]
        rows.append(
            SpaceRow(
                space=space_id.hex(),
                blocks=mine.size,
                payload_bytes=int(found.nbytes[mine].sum()),
                slot_bytes=int(found.place[mine, 2].sum()),
                written_s=max(0.0, now - max(os.stat(file).st_mtime for file in files)),
            )
        )
    return sorted(rows, key=lambda row: -row.slot_bytes)


def scrub(path: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Scrubbed:
    """Read every copy of a folder and forget what is damaged. Blocks for as long as reading everything takes.

    `progress` is told how many copies are done, and how many there are.

    Raises:
        ConfigError: there is no disk tier at that place, or another process owns it.
        TierError: the device failed.
    """
    _segments(path)
    begin = time.perf_counter()
    tier = DiskTier(
        DiskTierOptions(path=str(path), capacity_bytes=_ANY_CAPACITY), TierContext(MonotonicClock(), path="")
    )
    copies = list(tier.open())
    for segment in tier.unlisted:
        copies += tier.scan(segment)
    counts = {"checked": 0, "checked_bytes": 0, "dropped": 0, "failed": 0}
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            for part, outcomes in pool.map(lambda part: (part, _look(tier, part)), _parts(copies)):
                bad = [c for c, o in zip(part, outcomes, strict=True) if o is not None and not isinstance(o, TierError)]
                tier.delete([Delete(copy.block, copy.slot) for copy in bad])
                counts["checked"] += len(part)
                counts["checked_bytes"] += sum(copy.nbytes for copy in part)
                counts["dropped"] += len(bad)
                counts["failed"] += sum(isinstance(outcome, TierError) for outcome in outcomes)
                progress(counts["checked"], len(copies))
    finally:
        tier.close()
    return Scrubbed(path=str(path), seconds=time.perf_counter() - begin, **counts)


def describe(row: SpaceRow) -> tuple[str, str, str, str, str]:
    """Return a row for people: the space's first digits, blocks, payload, what it takes, age."""
    sizes = format_size(row.payload_bytes), format_size(row.slot_bytes)
    return row.space[:16], str(row.blocks), *sizes, f"{row.written_s:.0f} s"


def _look(tier: DiskTier, part: list[Stored]) -> list[object]:
    reads = [Read(copy.block, copy.slot, memoryview(bytearray(copy.nbytes))) for copy in part]
    return list(tier.read(reads))


def _parts(copies: list[Stored]) -> Iterator[list[Stored]]:
    part: list[Stored] = []
    nbytes = 0
    for copy in copies:
        part.append(copy)
        nbytes += copy.nbytes
        if nbytes >= _AT_ONCE_BYTES // _THREADS:
            yield part
            part, nbytes = [], 0
    if part:
        yield part


def _segments(path: Path) -> Segments:
    if not (path / META_NAME).is_file():
        raise ConfigError("path", "no disk tier lies here", str(path), "name the folder of a disk tier")
    segments = Segments(path)
    segments.probe(path / META_NAME)
    return segments
