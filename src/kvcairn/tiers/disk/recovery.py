"""What is done when a folder is opened: rows that cannot be right go, files without rows go, lost rows come back."""

from __future__ import annotations

import errno
import logging
import sqlite3
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat

import numpy as np

from kvcairn.tiers.base import Stored
from kvcairn.tiers.disk.epochs import Epochs
from kvcairn.tiers.disk.folder import Folder
from kvcairn.tiers.disk.index import Index, is_damage
from kvcairn.tiers.disk.segments import Segments
from kvcairn.tiers.inventory import Flags, Inventory

logger = logging.getLogger(__name__)

_THREADS = 4
_TELL_S = 2.0


def recover(folder: Folder, segments: Segments, epochs: Epochs, synchronous: str) -> tuple[Index, Inventory]:
    """Return the index of an owned folder, in agreement with the files, and what it holds.

    Blocks; longest where headers are scanned.

    Raises:
        sqlite3.Error: the disk failed, or has no room.
        OSError: the same.
    """
    try:
        opened = _opened(folder, segments, epochs, synchronous)
    except (sqlite3.Error, UnicodeDecodeError) as error:  # a message of SQLite's that quotes damaged bytes
        if isinstance(error, sqlite3.Error) and not is_damage(error):
            raise
        folder.set_aside(str(error))
        opened = _opened(folder, segments, epochs, synchronous)
    if not folder.indexes_set_aside:
        folder.forget_damaged()
    return opened


def _opened(folder: Folder, segments: Segments, epochs: Epochs, synchronous: str) -> tuple[Index, Inventory]:
    index = folder.open_index(synchronous)
    try:
        found = _settle(index, segments, epochs)
    except (sqlite3.Error, UnicodeDecodeError, OSError):
        index.close()
        raise
    return index, found


def _settle(index: Index, segments: Segments, epochs: Epochs) -> Inventory:
    file_bytes = segments.sizes()
    is_complete = index.is_complete
    if not is_complete:
        _rebuild(index, segments, sorted(file_bytes))
    found = index.load()
    lost = _lost(found, file_bytes)
    fits = _fitting(found, file_bytes, epochs) if len(found) else np.ones(0, dtype=np.bool_)
    if not fits.all():
        index.drop(found.place[~fits, :2].tolist())
        logger.warning("%d rows of %s fit no file and are dropped", int((~fits).sum()), index.path)
        found = found.take(np.flatnonzero(fits))
    if not is_complete:
        index.complete()
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
    for number in np.unique(segment).tolist():
        mine = np.flatnonzero(segment == number)
        shapes = found.place[mine, 2:4]
        alike = (shapes == shapes[0]).all(axis=1)
        if not alike.all():
            distinct, counts = np.unique(shapes, axis=0, return_counts=True)
            alike = (shapes == distinct[counts.argmax()]).all(axis=1)
        fits[mine] = alike & (offset[mine] + slot_bytes[mine] <= file_bytes.get(number, 0))
    for space_id, mine in found.spaces():
        fits[mine] &= found.place[mine, 4] > epochs.of(space_id)
    kept = np.flatnonzero(fits)
    fits[kept] = ~found.take(kept).outdated() if kept.size < fits.size else ~found.outdated()
    return fits


def remove_orphans(segments: Segments, found: Inventory) -> None:
    """Remove the segment files that hold no known block."""
    orphans = sorted(segments.sizes().keys() - set(found.place[:, 0].tolist()))
    for segment in orphans:
        segments.remove(segment)
    if orphans:
        logger.warning("%d segment files that hold no known block are removed: %s", len(orphans), orphans)


def _rebuild(index: Index, segments: Segments, numbers: Sequence[int]) -> None:
    """Make rows of all headers, several segments at a time."""
    if numbers:
        logger.warning("%s is made anew from the headers of %d segments", index.path, len(numbers))
    told_s = time.monotonic()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="kvcairn-rebuild") as pool:
        for done, copies in enumerate(pool.map(lambda number: _scan(segments, number), numbers), start=1):
            index.insert(copies)
            if time.monotonic() - told_s >= _TELL_S:
                told_s = time.monotonic()
                logger.warning("%s: %d of %d segments are done", index.path, done, len(numbers))


def _scan(segments: Segments, number: int) -> list[Stored]:
    found: list[Stored] = []
    try:
        found.extend(segments.scan(number))
    except (OSError, EOFError) as error:
        # A medium that cannot be read gives back nothing later either; any other cause may pass.
        if isinstance(error, OSError) and error.errno != errno.EIO:
            raise
        logger.warning("headers of %s cannot be read to the end: %s", segments.path(number), error)
    return found
