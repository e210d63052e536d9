"""What is done when a folder is opened: rows that cannot be right go, files without rows go, lost rows come back."""

from __future__ import annotations

import errno
import logging
import sqlite3

from kvcairn.tiers.disk.folder import Folder
from kvcairn.tiers.disk.index import Index, is_damage
from kvcairn.tiers.disk.segments import Segments

logger = logging.getLogger(__name__)


def recover(folder: Folder, segments: Segments, synchronous: str) -> Index:
    """Return the index of an owned folder, in agreement with the files. Blocks; longest where headers are scanned.

    Raises:
        sqlite3.Error: the disk failed, or has no room.
        OSError: the same.
    """
    try:
        index = _opened(folder, segments, synchronous)
    except (sqlite3.Error, UnicodeDecodeError) as error:  # a message of SQLite's that quotes damaged bytes
        if isinstance(error, sqlite3.Error) and not is_damage(error):
            raise
        folder.set_aside(str(error))
        index = _opened(folder, segments, synchronous)
    if not folder.indexes_set_aside:
        folder.forget_damaged()
    return index


def _opened(folder: Folder, segments: Segments, synchronous: str) -> Index:
    index = folder.open_index(synchronous)
    try:
        _settle(index, segments)
    except (sqlite3.Error, UnicodeDecodeError, OSError):
        index.close()
        raise
    return index


def _settle(index: Index, segments: Segments) -> None:
    file_bytes = segments.sizes()
    is_complete = index.is_complete
    if not is_complete:
        for segment in sorted(file_bytes):
            _rebuild(index, segments, segment)
    dropped = index.settle(file_bytes)
    if dropped:
        logger.warning("%d rows of %s fit no file and are dropped", dropped, index.path)
    if not is_complete:
        index.complete()
    orphans = file_bytes.keys() - index.segments()
    for segment in orphans:
        segments.remove(segment)
    if orphans:
        logger.warning("%d segment files that hold no known block are removed: %s", len(orphans), sorted(orphans))


def _rebuild(index: Index, segments: Segments, segment: int) -> None:
    try:
        index.insert(segments.scan(segment))
    except (OSError, EOFError) as error:
        # A medium that cannot be read gives back nothing later either; any other cause may pass.
        if isinstance(error, OSError) and error.errno != errno.EIO:
            raise
        logger.warning("headers of %s cannot be read to the end: %s", segments.path(segment), error)
