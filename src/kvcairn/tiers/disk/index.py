"""The index file: one row for each acknowledged copy, in SQLite. Never read on the serving path."""

from __future__ import annotations

import ctypes
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from kvcairn.checksum import CHECKSUM_BYTES
from kvcairn.memory.slots import PAGE_BYTES
from kvcairn.tiers.base import ALL_SPACES, BlockRef, Slot, Stored
from kvcairn.tiers.disk.format import HEADER_BYTES, ID_BYTES
from kvcairn.tiers.inventory import Inventory

APPLICATION_ID: Final = 0x6B764361  # "kvCa"
INDEX_VERSION: Final = 1
_UNFINISHED: Final = 0  # the version that a new SQLite file has

# A row takes about 145 bytes. Where slots are filled backwards, the pages of the tree stay half empty: measured 292
# bytes of file a row, and 164 over a random refill.
_ROW_BYTES: Final = 320
_BASE_PAGES: Final = 4
# So many rows change in one commit at most: each may touch a page of its own, and the log holds all of them.
ROWS_PER_COMMIT: Final = 128
ROWS_AT_ONCE: Final = 1024  # of neighbors, which share pages
_LOG_PAGES: Final = (8, 64)
_LOG_PAGE_BYTES: Final = PAGE_BYTES + 24

_SCHEMA: Final = """
CREATE TABLE copies (
    segment INTEGER NOT NULL, offset_bytes INTEGER NOT NULL,
    slot_bytes INTEGER NOT NULL, segment_bytes INTEGER NOT NULL, generation INTEGER NOT NULL,
    space_id BLOB NOT NULL, key BLOB NOT NULL, layer_group INTEGER NOT NULL, parent BLOB,
    nbytes INTEGER NOT NULL, checksum BLOB NOT NULL,
    PRIMARY KEY (segment, offset_bytes)
) WITHOUT ROWID, STRICT
"""
_COLUMNS: Final = (
    "segment, offset_bytes, slot_bytes, segment_bytes, generation, space_id, key, layer_group, parent, nbytes, checksum"
)
# All slots of a segment are of one size, so that what overlaps starts less than a slot before or behind.
_DELETE_OVERLAP: Final = (
    "DELETE FROM copies WHERE segment = ? AND offset_bytes > ? AND offset_bytes < ? AND offset_bytes + slot_bytes > ?"
)
_DELETE_COPY: Final = (
    "DELETE FROM copies WHERE segment = ? AND offset_bytes = ? AND generation = ?"
    " AND space_id = ? AND key = ? AND layer_group = ?"
)
_DELETE_PLACE: Final = "DELETE FROM copies WHERE segment = ? AND offset_bytes = ?"
_DELETE_BEFORE: Final = "DELETE FROM copies WHERE segment = ? AND offset_bytes < ?"
_INSERT: Final = f"INSERT OR REPLACE INTO copies ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_SELECT_SPACE: Final = "SELECT segment, offset_bytes FROM copies WHERE space_id = ? AND generation <= ?"
_SELECT_EARLIER: Final = "SELECT segment, offset_bytes FROM copies WHERE generation <= ?"
_SELECT_ALL: Final = f"SELECT {_COLUMNS} FROM copies ORDER BY segment, offset_bytes"
_NTH_OFFSET: Final = "SELECT offset_bytes FROM copies WHERE segment = ? ORDER BY offset_bytes LIMIT 1 OFFSET ?"
_EXISTS: Final = "SELECT 1 FROM copies WHERE space_id = ? AND key = ? AND layer_group = ? LIMIT 1"

Row = tuple[int, int, int, int, int, bytes, bytes, int, bytes | None, int, bytes]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class IndexSize:
    """How large the index of a folder can become; its bound, not an estimate.

    Attributes:
        pages: most pages of the file.
        log_pages: pages of the log after which it is folded into the file.
    """

    pages: int
    log_pages: int

    @classmethod
    def of(cls, capacity_bytes: int) -> IndexSize:
        """Return the size for a folder full of the smallest slots there can be."""
        rows = capacity_bytes // (HEADER_BYTES + PAGE_BYTES)
        pages = _BASE_PAGES + -(-rows * _ROW_BYTES // PAGE_BYTES)
        return cls(pages, min(max(pages // 4, _LOG_PAGES[0]), _LOG_PAGES[1]))

    @property
    def log_bytes(self) -> int:
        """Most bytes of the log: what may wait in it, and one commit more."""
        commit_pages = min(self.pages, 3 * ROWS_PER_COMMIT + 8)
        return PAGE_BYTES + (self.log_pages + commit_pages) * _LOG_PAGE_BYTES

    @property
    def total_bytes(self) -> int:
        """Most bytes of file and log together."""
        return self.pages * PAGE_BYTES + self.log_bytes


class Index:
    """The rows of one folder. Any thread: one connection, one lock, small transactions.

    Every method may raise `sqlite3.Error`; a transaction that fails leaves no trace.
    """

    def __init__(self, path: Path, size: IndexSize, *, synchronous: str) -> None:
        """Open or make the file; `is_complete` says whether its rows can be relied on.

        Raises:
            sqlite3.Error: it cannot be read, or is none of ours.
        """
        self.path = path
        self._lock = threading.Lock()
        _make_private(path)
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)
        _connected.add(self)
        try:
            self._prepare(size, synchronous)
        except (sqlite3.Error, UnicodeDecodeError):
            self._db.close()
            raise

    def leak(self) -> None:
        """Keep the connection from ever being closed, even as the interpreter ends."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._db))

    def _prepare(self, size: IndexSize, synchronous: str) -> None:
        # Exclusive: the folder has one owner anyway, and no file for shared memory is needed.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        found, version = self._pragma("application_id"), self._pragma("user_version")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA synchronous = {synchronous}")
        self._db.execute(f"PRAGMA wal_autocheckpoint = {size.log_pages:d}")
        self._db.execute(f"PRAGMA journal_size_limit = {size.log_bytes:d}")
        self._db.execute(f"PRAGMA max_page_count = {size.pages:d}")
        if (found, version) == (0, 0) and not self._pragma("schema_version"):
            with self._change():
                self._db.execute(f"PRAGMA application_id = {APPLICATION_ID:d}")
                self._db.execute(_SCHEMA)
        elif found != APPLICATION_ID or version not in (_UNFINISHED, INDEX_VERSION):
            raise sqlite3.DatabaseError("the file is none of ours")
        self._db.execute(f"{_SELECT_ALL} LIMIT 1")  # the table is there, and has our columns
        answer = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]  # 20 ms for 100,000 rows
        if answer != "ok":
            raise sqlite3.DatabaseError(answer)

    @property
    def is_complete(self) -> bool:
        """Whether all rows that ought to be there are: false between making the file and `complete`."""
        with self._lock:
            return self._pragma("user_version") == INDEX_VERSION

    def complete(self) -> None:
        """Declare that all rows are there."""
        with self._lock:
            self._db.execute(f"PRAGMA user_version = {INDEX_VERSION:d}")

    def file_bytes(self) -> int:
        """Return the size of the file with all that waits in the log."""
        with self._lock:
            return self._pragma("page_count") * PAGE_BYTES

    def load(self) -> Inventory:
        """Return every row, by segment and offset.

        Raises:
            sqlite3.DatabaseError: there are rows that no store has written; the file is damaged.
        """
        parts: list[Inventory] = []
        with self._lock:
            cursor = self._db.execute(_SELECT_ALL)
            while rows := cursor.fetchmany(ROWS_AT_ONCE):  # few enough to stay in the processor's cache
                part = _inventory(rows)
                if part is None:
                    raise sqlite3.DatabaseError("there are malformed rows")
                parts.append(part)
        return Inventory.joined(parts)

    def drop(self, places: Iterable[Sequence[int]]) -> None:
        """Delete the rows at these (segment, offset)."""
        for part in _parts(places, ROWS_PER_COMMIT):
            with self._lock, self._change():
                self._db.executemany(_DELETE_PLACE, part)

    def of_space(self, space_id: bytes, generation: int) -> list[tuple[int, int]]:
        """Return (segment, offset) of all copies of a space, or of all spaces, up to a generation."""
        with self._lock:
            if space_id == ALL_SPACES:
                return self._db.execute(_SELECT_EARLIER, (generation,)).fetchall()
            return self._db.execute(_SELECT_SPACE, (space_id, generation)).fetchall()

    def insert(self, copies: Iterable[Stored]) -> None:
        """Add rows; with at most 128 in one commit."""
        for part in _parts(copies, ROWS_PER_COMMIT):
            with self._lock, self._change():
                self._db.executemany(_INSERT, [_row(stored) for stored in part])

    def insert_neighbors(self, copies: Iterable[Stored]) -> None:
        """Add rows of a segment, by offset: with more of them in one commit, since many share a page."""
        for part in _parts(copies, ROWS_AT_ONCE):
            with self._lock, self._change():
                self._db.executemany(_INSERT, [_row(stored) for stored in part])

    def empty(self) -> None:
        """Delete all rows."""
        with self._lock, self._change():
            self._db.execute("DELETE FROM copies")

    def clear(self, slots: Iterable[Slot]) -> None:
        """Delete whatever lies in these slots, before they are overwritten."""
        for part in _parts(slots, ROWS_PER_COMMIT):
            with self._lock, self._change():
                self._db.executemany(
                    _DELETE_OVERLAP,
                    [(segment, begin - slot_bytes, end, begin) for segment, slot_bytes, begin, end in _stretches(part)],
                )

    def delete(self, copies: Iterable[tuple[BlockRef, Slot]]) -> Iterator[Slot]:
        """Delete the rows of these copies; yield the slots that held them, each after its commit.

        A slot that holds another block by now, or the same one written again, keeps its row.
        """
        for part in _parts(copies, ROWS_PER_COMMIT):
            with self._lock, self._change():
                held = [slot for block, slot in part if self._delete_row(block, slot)]
            yield from held

    def delete_segment(self, segment: int) -> None:
        """Delete all rows of a segment, as many neighbours in a commit as the log has room for."""
        more = True
        while more:
            with self._lock, self._change():
                row = self._db.execute(_NTH_OFFSET, (segment, ROWS_AT_ONCE)).fetchone()
                more = row is not None
                self._db.execute(_DELETE_BEFORE, (segment, row[0] if row else (1 << 63) - 1))

    def contains(self, block: BlockRef) -> bool:
        """Whether a copy of the block has a row. Walks all rows where there is none."""
        with self._lock:
            found = self._db.execute(_EXISTS, (block.space_id, block.key, block.group)).fetchone()
        return found is not None

    def close(self) -> None:
        """Fold the log into the file and let go."""
        with self._lock:
            self._db.close()

    def _delete_row(self, block: BlockRef, slot: Slot) -> bool:
        place = (slot.segment, slot.offset_bytes, slot.generation)
        done = self._db.execute(_DELETE_COPY, (*place, block.space_id, block.key, block.group))
        return done.rowcount > 0

    @contextmanager
    def _change(self) -> Iterator[None]:
        """One transaction; the caller holds the lock."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _pragma(self, name: str) -> int:
        value: int = self._db.execute(f"PRAGMA {name}").fetchone()[0]
        return value


_connected: Final[weakref.WeakSet[Index]] = weakref.WeakSet()


def _make_private(path: Path) -> None:
    """Have the file be its owner's alone, and with it the log that SQLite makes beside it; also one made before."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return  # SQLite says what is wrong with it
    try:
        os.fchmod(fd, 0o600)
    finally:
        os.close(fd)


def _leak_inherited() -> None:
    """Leave the file alone in a forked child: by closing it, the child would remove the log of its parent."""
    for index in list(_connected):
        index.leak()


os.register_at_fork(after_in_child=_leak_inherited)


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file itself is at fault, rather than the disk, its room or its rights."""
    code = getattr(error, "sqlite_errorcode", None)  # absent on what Python or this module raises
    if code is None or code == sqlite3.SQLITE_IOERR_SHORT_READ:
        return True
    return code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_FORMAT)


def is_full(error: sqlite3.Error) -> bool:
    """Whether the device, or the index itself, has no room."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL


def _row(stored: Stored) -> Row:
    block, slot = stored.block, stored.slot
    return (
        slot.segment, slot.offset_bytes, slot.slot_bytes, slot.segment_bytes, slot.generation,
        block.space_id, block.key, block.group, stored.parent, stored.nbytes, stored.checksum,
    )  # fmt: skip


def _inventory(rows: list[Row]) -> Inventory | None:
    """Return rows as columns; None where one of them cannot be, as on a damaged page."""
    columns = list(zip(*rows, strict=True))
    numbers, space_ids, keys, parents, checksums = [*columns[:5], columns[7], columns[9]], *_blobs(columns)
    if any(set(map(type, column)) != {int} for column in numbers):
        return None
    if not (_have(space_ids, ID_BYTES) and _have(keys, ID_BYTES) and _have(checksums, CHECKSUM_BYTES)):
        return None
    if not _have([parent for parent in parents if parent is not None], ID_BYTES):
        return None
    place, group, nbytes = (np.array(c, dtype=np.int64) for c in (numbers[:5], numbers[5], numbers[6]))
    segment, offset, slot_bytes, segment_bytes, _ = place
    is_right = (
        (segment >= 0) & (group >= 0) & (group < 1 << 32) & (slot_bytes > 0) & (slot_bytes % PAGE_BYTES == 0)
        & (nbytes > 0) & (nbytes <= slot_bytes - HEADER_BYTES)
        & (offset >= 0) & (offset % np.maximum(slot_bytes, 1) == 0) & (offset <= segment_bytes - slot_bytes)
    )  # fmt: skip
    if not is_right.all():
        return None
    digests = np.frombuffer(b"".join(checksums), dtype=np.uint8).reshape(-1, CHECKSUM_BYTES)
    return Inventory(list(space_ids), list(keys), group, list(parents), place.T.copy(), nbytes, digests)


def _blobs(columns: list[Any]) -> tuple[Any, Any, Any, Any]:
    return columns[5], columns[6], columns[8], columns[10]


def _have(column: Sequence[Any], nbytes: int) -> bool:
    """Whether all are bytes of that length."""
    return set(map(type, column)) <= {bytes} and set(map(len, column)) <= {nbytes}


def _stretches(slots: list[Slot]) -> Iterator[tuple[int, int, int, int]]:
    """Put neighbors of equal size together: (segment, slot_bytes, begin, end)."""
    first, end = slots[0], slots[0].offset_bytes
    for slot in slots:
        alike = (slot.segment, slot.slot_bytes, slot.offset_bytes) == (first.segment, first.slot_bytes, end)
        if not alike:
            yield first.segment, first.slot_bytes, first.offset_bytes, end
            first = slot
        end = slot.offset_bytes + slot.slot_bytes
    yield first.segment, first.slot_bytes, first.offset_bytes, end


def _parts(items: Iterable[Item], length: int) -> Iterator[list[Item]]:
    rest = iter(items)
    while part := list(islice(rest, length)):
        yield part
