"""The disk tier: where the index above says, in the form that `docs/concepts/disk-format.md` describes."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final

import numpy as np

from kvcairn.config import DiskTierOptions
from kvcairn.errors import ConfigError, TierError, TierFull, TierUnavailable
from kvcairn.plain import join
from kvcairn.tiers.base import BlockRef, Delete, Outcome, Read, Slot, Stored, Tier, TierContext, Write
from kvcairn.tiers.disk import format as disk_format
from kvcairn.tiers.disk import index as disk_index
from kvcairn.tiers.disk import runs
from kvcairn.tiers.disk import segments as disk_segments
from kvcairn.tiers.disk.folder import META_NAME, Folder, least_overhead_bytes
from kvcairn.tiers.disk.index import ROWS_AT_ONCE, ROWS_PER_COMMIT
from kvcairn.tiers.disk.rows import Rows
from kvcairn.tiers.disk.segments import Segments
from kvcairn.types import MissReason

logger = logging.getLogger(__name__)

# An acknowledged block must survive power loss under `data`, and with it the commit of its row.
_SYNCHRONOUS: Final = {"none": "OFF", "data": "FULL", "full": "FULL"}
_QUIET_S: Final = 60.0
_Pending = list[tuple[int, Stored, bytes]]  # number in the call, what the row will say, header page


class DiskTier(Tier):
    """Blocks in the preallocated files of one folder; survives restarts, damage and a full disk.

    Attributes:
        overhead_bytes: of the capacity, what the files beside the segments may take. Exact once the tier is open:
            then with whatever else lies in the folder.
        unlisted: segments, those written last first, whose headers have to be read as the index was lost; see `scan`.
        region_bytes: size of the regions to cut segments from; None before the tier is open. Chosen when the folder
            is first used, and kept.
    """

    managed: ClassVar[bool] = True
    header_bytes: ClassVar[int] = disk_format.HEADER_BYTES
    clears: ClassVar[bool] = True

    def __init__(self, options: DiskTierOptions, context: TierContext) -> None:
        """Look at nothing yet."""
        self.name = options.name
        self.overhead_bytes = least_overhead_bytes(options.capacity_bytes)
        self.region_bytes: int | None = None
        self._folder = Folder(join(context.path, "path"), Path(options.path), options.capacity_bytes)
        self._log = _QuietLog(options.name, context.clock.now)
        self._segments = Segments(
            Path(options.path), durability=options.durability, reserve_bytes=options.reserve_bytes
        )
        # Between the end of one use of a slot and the start of the next: see `delete`.
        self._between_uses = threading.Lock()
        self._rows: Rows | None = None

    def check(self) -> None:
        """Warn of a folder in which something else lies, and which no disk tier ever used."""
        self._folder.check()

    def open(self) -> Iterable[Stored]:
        """Own the folder, settle what an earlier run left, and return it.

        Where the index is missing or damaged that is nothing, and all segments are `unlisted`.

        Raises:
            ConfigError: the folder is missing, not writable, owned by another cache, or of a later format.
            TierUnavailable: the disk failed.
        """
        folder = self._folder
        self._rows = Rows(folder, self._segments, _SYNCHRONOUS[self._segments.durability])
        with self._as_tier_error("open"):
            try:
                folder.own()
                self.region_bytes = folder.region_bytes()
                self._segments.probe(folder.path / META_NAME)
                found = self._rows.open()
                self.overhead_bytes = self._rows.overhead_bytes()
                self.unlisted = MappingProxyType(dict(self._rows.unlisted))
                self.last_generation = max(self._rows.epochs.highest, self._segments.latest_ns(self.unlisted))
            except (OSError, sqlite3.Error, ConfigError):
                self.close()
                raise
        return found

    def scan(self, segment: int) -> Iterable[Stored]:
        """Read a page of every slot of an unlisted segment, and make rows of what lies there. May take minutes.

        Raises:
            TierUnavailable: the segment could not be read to the end, or the rows not be written.
        """
        with self._as_tier_error("scan"):
            found = self._books().scan(segment)
            for begin in range(0, len(found), ROWS_AT_ONCE):
                part = found.take(np.arange(begin, min(begin + ROWS_AT_ONCE, len(found))))
                with self._between_uses:  # a space may be cleared meanwhile
                    alive = [self._books().epochs.of(space_id) for space_id in part.space_id] < part.place[:, 4]
                    self._books().insert_neighbors(part.take(np.flatnonzero(alive)))
            self._books().listed(segment)
        return found

    def write(self, writes: Sequence[Write]) -> list[Outcome]:
        """Store each block. The rows of all are committed together at the end, which acknowledges them.

        Raises:
            TierFull: the index has no room. Nothing was written.
            TierUnavailable: the index cannot be written. Nothing was written.
        """
        outcomes: list[Outcome] = [None] * len(writes)
        pending: defaultdict[int, _Pending] = defaultdict(list)
        for i, write in enumerate(writes):
            slot = write.slot
            if slot is None or not disk_format.payload_fits(write.data.nbytes, slot):
                outcomes[i] = TierError(self.name, "write", f"no such slot: {slot}", write.block.key)
                continue
            stored = Stored(write.block, write.parent, slot, write.data.nbytes, write.checksum)
            try:
                header = disk_format.encode(stored)
                pending[slot.segment].append((i, stored, header))
            except ValueError as error:
                outcomes[i] = TierError(self.name, "write", str(error), write.block.key)
        with self._as_tier_error("write"), self._between_uses:
            slots = [stored.slot for part in pending.values() for _, stored, _ in part]
            self._books().vacate(slots)
        written: _Pending = []
        for part in pending.values():
            written += self._write_segment(part, writes, outcomes)
        self._acknowledge(written, outcomes)
        return outcomes

    def read(self, reads: Sequence[Read]) -> list[Outcome]:
        """Fill each `out` and check header and payload; looks at nothing but the slots."""
        outcomes: list[Outcome] = [MissReason.VANISHED] * len(reads)
        by_segment: defaultdict[int, list[int]] = defaultdict(list)
        for i, read in enumerate(reads):
            if read.slot is not None:
                by_segment[read.slot.segment].append(i)
        for segment, part in by_segment.items():
            try:
                with self._segments.to_read(segment) as fd:
                    self._read_segment(fd, part, reads, outcomes)
            except FileNotFoundError:
                continue
            except OSError as error:
                for i in part:
                    outcomes[i] = self._failure("read", error, reads[i].block.key)
        return outcomes

    def delete(self, deletes: Sequence[Delete]) -> None:
        """Delete the rows and wipe the headers, so that no late reader and no scan finds the blocks.

        Raises:
            TierUnavailable: a row or a header could not be changed; the others were.
        """
        copies = [(delete.block, delete.slot) for delete in deletes if delete.slot is not None]
        failed: OSError | None = None
        # A slot whose row was there has not been given to the next block: `write` clears it under the same lock.
        with self._as_tier_error("delete"), self._between_uses:
            for slot in self._books().delete(copies):
                try:
                    self._wipe(slot)
                except OSError as error:
                    failed = error
            if failed:
                raise failed

    def clear(self, space_id: bytes, generation: int) -> None:
        """Declare all copies of a space up to a generation dead, on disk first; then delete their rows.

        Raises:
            TierUnavailable: that could not be written.
        """
        with self._as_tier_error("clear"):
            with self._between_uses:  # no row of a dead copy is inserted from here on
                self._books().epochs.advance(space_id, generation)
            self._books().delete_space(space_id, generation)

    def retire(self, segments: Sequence[int]) -> None:
        """Delete the rows of whole segments, then their files.

        Raises:
            TierUnavailable: a file could not be removed; the others were.
        """
        failed: OSError | None = None
        with self._as_tier_error("retire"):
            for segment in segments:
                self._books().delete_segment(segment)
                try:
                    self._segments.remove(segment)
                except OSError as error:
                    failed = error
                    continue
                self._books().listed(segment)
            if failed:
                raise failed

    def probe(self, blocks: Sequence[BlockRef]) -> list[bool]:
        """Ask the rows whether each block is there; walks them all for one that is not. Not for serving."""
        with self._as_tier_error("probe"):
            return self._books().contain(blocks)

    def close(self) -> None:
        """Fold the index together and let the folder go; scans end. Idempotent."""
        self._segments.stop()
        rows, self._rows = self._rows, None
        if rows:
            try:
                rows.close()
            except sqlite3.Error as error:
                self._failure("close", error)

    # -- one block, one segment

    def _read_segment(self, fd: int, part: list[int], reads: Sequence[Read], outcomes: list[Outcome]) -> None:
        """Read what lies in one segment, neighbours together."""
        file_bytes = os.fstat(fd).st_size
        slots = [
            (i, slot) for i in part if (slot := reads[i].slot) and slot.offset_bytes + slot.slot_bytes <= file_bytes
        ]
        for run in runs.neighbours([(slot, len(reads[i].out)) for i, slot in slots]):
            chosen = [slots[at] for at in run]
            try:
                self._read_run(fd, chosen, reads, outcomes)
            except (OSError, EOFError):
                for one in chosen:  # what failed costs its own block alone
                    self._read_one(fd, one, reads, outcomes)

    def _read_run(self, fd: int, run: list[tuple[int, Slot]], reads: Sequence[Read], outcomes: list[Outcome]) -> None:
        chosen = [reads[i] for i, _ in run]
        pages = runs.read_run(fd, chosen, run[0][1].offset_bytes, direct=self._segments.direct)
        for (i, _), page in zip(run, pages, strict=True):
            outcomes[i] = None if disk_format.holds(page, reads[i]) else MissReason.CORRUPT

    def _read_one(self, fd: int, one: tuple[int, Slot], reads: Sequence[Read], outcomes: list[Outcome]) -> None:
        try:
            self._read_run(fd, [one], reads, outcomes)
        except EOFError:
            outcomes[one[0]] = MissReason.VANISHED
        except OSError as error:
            outcomes[one[0]] = self._failure("read", error, reads[one[0]].block.key)

    def _write_segment(self, part: _Pending, writes: Sequence[Write], outcomes: list[Outcome]) -> _Pending:
        """Write all blocks of one segment and return those that are safe as far as durability says."""
        slot = part[0][1].slot
        try:
            with self._segments.to_write(slot.segment, slot.segment_bytes) as fd:
                for run in runs.neighbours([(stored.slot, stored.nbytes) for _, stored, _ in part]):
                    self._write_run(fd, [part[at] for at in run], writes, outcomes)
                if self._segments.durability != "none":
                    os.fdatasync(fd)
        except OSError as error:
            for i, stored, _ in part:
                outcomes[i] = outcomes[i] or self._failure("write", error, stored.block.key)
        return [each for each in part if outcomes[each[0]] is None]

    def _write_run(self, fd: int, run: _Pending, writes: Sequence[Write], outcomes: list[Outcome]) -> None:
        try:
            copies = [(header, writes[i].data) for i, _, header in run]
            runs.write_run(fd, copies, run[0][1].slot.offset_bytes, direct=self._segments.direct)
        except OSError as error:
            for i, stored, _ in run:
                outcomes[i] = self._failure("write", error, stored.block.key)

    def _acknowledge(self, written: _Pending, outcomes: list[Outcome]) -> None:
        for begin in range(0, len(written), ROWS_PER_COMMIT):
            part = written[begin : begin + ROWS_PER_COMMIT]
            try:
                with self._between_uses:
                    self._books().insert([stored for _, stored, _ in self._alive(part, outcomes)])
            except sqlite3.Error as error:
                for i, stored, _ in part:
                    outcomes[i] = self._failure("write", error, stored.block.key)

    def _alive(self, part: _Pending, outcomes: list[Outcome]) -> _Pending:
        """Leave out the copies whose space was cleared while they were being written."""
        epochs = self._books().epochs
        dead = [each for each in part if each[1].slot.generation <= epochs.of(each[1].block.space_id)]
        for i, _, _ in dead:
            outcomes[i] = MissReason.CLEARED
        return [each for each in part if each not in dead] if dead else part

    def _wipe(self, slot: Slot) -> None:
        with suppress(FileNotFoundError), self._segments.to_wipe(slot.segment) as fd:
            self._segments.wipe(fd, slot)

    # -- the rest

    def _books(self) -> Rows:
        if self._rows is None:
            raise TierUnavailable(self.name, "use", "the tier is not open")
        return self._rows

    @contextmanager
    def _as_tier_error(self, op: str) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise self._failure(op, error) from error

    def _failure(self, op: str, error: OSError | sqlite3.Error, key: bytes | None = None) -> TierError:
        """What a failed call becomes; said in the log once in a while."""
        self._log.warn(op, error)
        full = disk_index.is_full(error) if isinstance(error, sqlite3.Error) else disk_segments.is_full(error)
        kind = TierFull if full else TierUnavailable
        return kind(self.name, op, str(error), key)


class _QuietLog:
    """Warnings, at most one a minute for each operation and class of error. Any thread."""

    def __init__(self, tier: str, now: Callable[[], float]) -> None:
        self._tier, self._now = tier, now
        self._said: dict[tuple[str, str], float] = {}

    def warn(self, op: str, error: Exception) -> None:
        """Say it, unless the same was said within the last minute."""
        about, now = (op, f"{type(error).__name__} {getattr(error, 'errno', '')}"), self._now()
        if now - self._said.get(about, -_QUIET_S) >= _QUIET_S:
            self._said[about] = now
            logger.warning("tier %s: %s failed: %s (told once a minute)", self._tier, op, error)
