"""What is done when a folder is opened: rows that cannot be right go, files without rows go, lost rows come back."""

from __future__ import annotations

import errno
import logging
import sqlite3
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np

from kvcairn.memory.slots import PAGE_BYTES
from kvcairn.tiers.base import Stored
from kvcairn.tiers.disk.epochs import Epochs
from kvcairn.tiers.disk.folder import Folder
from kvcairn.tiers.disk.index import Index, is_damage
from kvcairn.tiers.disk.segments import Segments
from kvcairn.tiers.inventory import Flags, Inventory

logger = logging.getLogger(__name__)

_THREADS = 4


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was found in a folder.

    Attributes:
        index: open, and in agreement with the files.
        found: what it holds.
        unlisted: segments, and their bytes, of which it says nothing yet, those written last first; none where it
            is complete.
    """

    index: Index
    found: Inventory
    unlisted: dict[int, int]


def recover(folder: Folder, segments: Segments, epochs: Epochs, synchronous: str) -> Recovered:
    """Open the index of an owned folder and bring it into agreement with the files. Blocks, but reads no headers.

    Raises:
        sqlite3.Error: the disk failed, or has no room.
        OSError: the same.
    """
    try:
        return _opened(folder, segments, epochs, synchronous)
    except (sqlite3.Error, UnicodeDecodeError) as error:  # a message of SQLite's that quotes damaged bytes
        if isinstance(error, sqlite3.Error) and not is_damage(error):
            raise
        folder.discard_index(str(error))
        return _opened(folder, segments, epochs, synchronous)


def remake(folder: Folder, segments: Segments, epochs: Epochs, synchronous: str) -> Index:
    """Return a new index, made from the headers of all segments, several at a time. Blocks for as long as that takes.

    Raises:
        sqlite3.Error: the disk failed, or has no room.
        OSError: the same.
    """
    index = folder.open_index(synchronous)
    try:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="kvcairn-remake") as pool:
            for found in pool.map(lambda number: scan(segments, number, epochs), sorted(segments.sizes())):
                index.insert_neighbors(found)
        index.complete()
    except (sqlite3.Error, OSError):
        index.close()
        raise
    return index


def scan(segments: Segments, number: int, epochs: Epochs) -> Inventory:
    """Return the copies of a segment by their headers: those that can be right and were not cleared.

    Raises:
        OSError: it could not be read to the end, for a cause that may pass.
    """
    copies: list[Stored] = []
    try:
        copies.extend(segments.scan(number))
    except (OSError, EOFError) as error:
        # A medium that cannot be read gives back nothing later either; any other cause may pass.
        if isinstance(error, OSError) and error.errno not in (errno.EIO, errno.ENOENT):
            raise
        logger.warning("headers of %s cannot be read to the end: %s", segments.path(number), error)
    if not copies:
        return Inventory.of(())
    found = Inventory.of(copies)
    return found.take(np.flatnonzero(_fitting(found, segments.sizes(), epochs)))


def _opened(folder: Folder, segments: Segments, epochs: Epochs, synchronous: str) -> Recovered:
    index = folder.open_index(synchronous)
    try:
        if index.is_complete:
            return Recovered(index, _settle(index, segments, epochs), {})
        index.empty()  # what an earlier run had found so far is found again
        unlisted = _by_age(segments)
        if not unlisted:
            index.complete()
        return Recovered(index, Inventory.of(()), unlisted)
    except (sqlite3.Error, UnicodeDecodeError, OSError):
        index.close()
        raise


def _by_age(segments: Segments) -> dict[int, int]:
    """Return the bytes of the segments in which a slot can lie, those written last first."""
    sizes = {number: nbytes for number, nbytes in segments.sizes().items() if nbytes >= PAGE_BYTES}
    return dict(sorted(sizes.items(), key=lambda each: -segments.path(each[0]).stat().st_mtime_ns))


def _settle(index: Index, segments: Segments, epochs: Epochs) -> Inventory:
    file_bytes = segments.sizes()
    found = index.load()
    lost = _lost(found, file_bytes)
    fits = _fitting(found, file_bytes, epochs) if len(found) else np.ones(0, dtype=np.bool_)
    if not fits.all():
        index.drop(found.place[~fits, :2].tolist())
        logger.warning("%d rows of %s fit no file and are dropped", int((~fits).sum()), index.path)
        found = found.take(np.flatnonzero(fits))
    return replace(found, distinct=True, lost=lost)


def _lost(found: Inventory, file_bytes: Mapping[int, int]) -> tuple[tuple[bytes, bytes], ...]:
    """Name the blocks whose file was removed or cut."""
    ends = (found.place[:, 1] + found.place[:, 2]).tolist()
    sizes = map(file_bytes.get, found.place[:, 0].tolist(), repeat(0))
    gone = [i for i, (end, size) in enumerate(zip(ends, sizes, strict=True)) if end > size]
    return tuple((found.space_id[i], found.key[i]) for i in gone)


def _fitting(found: Inventory, file_bytes: Mapping[int, int], epochs: Epochs) -> Flags:
    """Say which rows can be right.

    These are, of each segment, those of the shape that most have and that lie within its file; that were not
    cleared; of each block the copy of the highest generation.
    """
    fits: Flags = np.zeros(len(found), dtype=np.bool_)
    segment, offset, slot_bytes = found.place[:, :3].T
    order = np.argsort(segment, kind="stable")
    for mine in np.split(order, np.flatnonzero(np.diff(segment[order])) + 1):
        number = int(segment[mine[0]])
        shapes = found.place[mine, 2:4]
        alike = (shapes == shapes[0]).all(axis=1)
        if not alike.all():
            distinct, counts = np.unique(shapes, axis=0, return_counts=True)
            alike = (shapes == distinct[counts.argmax()]).all(axis=1)
        fits[mine] = alike & (offset[mine] + slot_bytes[mine] <= file_bytes.get(number, 0))
    for space_id, mine in found.spaces() if epochs.has_any else ():
        fits[mine] &= found.place[mine, 4] > epochs.of(space_id)
    kept = np.flatnonzero(fits)
    fits[kept] = ~found.take(kept).outdated() if kept.size < fits.size else ~found.outdated()
    return fits


def remove_orphans(segments: Segments, known: Collection[int]) -> None:
    """Remove the segment files that hold no known block."""
    orphans = sorted(segments.sizes().keys() - set(known))
    for segment in orphans:
        segments.remove(segment)
    if orphans:
        logger.warning("%d segment files that hold no known block are removed: %s", len(orphans), orphans)
