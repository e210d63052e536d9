"""Segment files: preallocated, named by number, read and written by slot.

A file is opened anew for each call. That costs a few microseconds and means that a file which somebody removed,
replaced or cut is noticed at once, and that no descriptor outlives its file.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kvcairn.host import default_reserve_bytes
from kvcairn.memory.slots import PAGE_BYTES
from kvcairn.tiers.base import Slot, Stored
from kvcairn.tiers.disk import format as disk_format
from kvcairn.tiers.disk import runs

_NAME: Final = re.compile(r"seg-(0|[1-9][0-9]{0,17})\.kv")
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FALLOCATE: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_WINDOW_BYTES: Final = 1 << 20
_NO_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)
# A link or a pipe in the place of a segment is neither followed nor waited for.
_SAFE: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def segment_number(name: str) -> int | None:
    """Return the number of the segment whose file is called so, or None for another file."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class Segments:
    """The segment files of one folder. Any thread; every method blocks on the disk and may raise OSError.

    Attributes:
        durability: what a written block survives, as in the settings.
        direct: whether files are opened for direct I/O, past the page cache; `probe` finds out.
    """

    def __init__(self, folder: Path, *, durability: str = "none", reserve_bytes: int | None = None) -> None:
        """Look at nothing yet.

        Args:
            folder: where they lie.
            durability: as in the settings; with `full` a new file survives power loss before it is written to.
            reserve_bytes: make no file where less would stay free; None: a twentieth of the device, at most 1 GiB.
        """
        self._reserve_bytes = reserve_bytes
        self._folder = folder
        self.durability = durability
        self._growing = threading.Lock()
        self._stopped = threading.Event()
        self.direct = False

    def name(self, segment: int) -> str:
        """Return the file name of a segment, which is made of its number and of nothing else."""
        return f"seg-{segment}.kv"

    def path(self, segment: int) -> Path:
        """Return where the file of a segment lies, or would lie."""
        return self._folder / self.name(segment)

    def probe(self, path: Path) -> None:
        """Find out whether the file system has direct I/O, by reading that small file so."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT | _SAFE)
        except OSError:
            return
        try:
            self.direct = os.preadv(fd, [runs.page()], 0) > 0
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
        finally:
            os.close(fd)

    def sizes(self) -> dict[int, int]:
        """Return the size in bytes of each segment file that is there."""
        found = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                number = segment_number(entry.name)
                if number is not None and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):  # given up while we look
                        found[number] = entry.stat(follow_symlinks=False).st_size
        return found

    def latest_ns(self, segments: Iterable[int]) -> int:
        """Return a generation above those of all copies in these segments: now, or when one was last written to.

        In a folder that has lost its index once, generations are nanoseconds, and far fewer slots are used than pass.
        """
        written_ns = [self.path(segment).stat().st_mtime_ns for segment in segments]
        return max(time.time_ns(), *written_ns) if written_ns else 0

    @contextmanager
    def to_read(self, segment: int) -> Iterator[int]:
        """Open a segment for reading; FileNotFoundError where it is not there."""
        with self._opened(segment, os.O_RDONLY) as fd:
            yield fd

    @contextmanager
    def to_wipe(self, segment: int) -> Iterator[int]:
        """Open a segment to change what is there; FileNotFoundError where it is not there."""
        with self._opened(segment, os.O_RDWR) as fd:
            yield fd

    @contextmanager
    def to_write(self, segment: int, segment_bytes: int) -> Iterator[int]:
        """Open a segment for writing; make or lengthen its file first, all its space taken.

        Where there is no room for the whole file nothing is left of what was added.
        """
        with self._opened(segment, os.O_RDWR | os.O_CREAT) as fd:
            if os.fstat(fd).st_size < segment_bytes:
                self._grow(fd, segment, segment_bytes)
            yield fd

    def sync_folder(self) -> None:
        """Make created and removed files survive power loss."""
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, segment: int) -> None:
        """Remove the file of a segment; passed over where there is none."""
        self.path(segment).unlink(missing_ok=True)

    def wipe(self, fd: int, slot: Slot) -> None:
        """Make a slot hold nothing, for a reader that comes late and for a scan."""
        page = runs.page()
        page[:] = bytes(disk_format.HEADER_BYTES)
        runs.write_all(fd, [page], slot.offset_bytes)

    def stop(self) -> None:
        """Have every scan end in an error, now and from now on."""
        self._stopped.set()

    def scan(self, segment: int) -> Iterator[Stored]:
        """Find the copies of a segment by their headers; what is no header, or out of place, is passed over."""
        with self.to_read(segment) as fd:
            size = os.fstat(fd).st_size
            window = _Window(fd, size)
            offset = _next_data(fd, 0, PAGE_BYTES)
            stride = PAGE_BYTES
            while offset + PAGE_BYTES <= size:
                if self._stopped.is_set():
                    raise OSError(errno.ECANCELED, "the scan was stopped")
                stored = disk_format.decode(window.page(offset, stride))
                if stored and _in_place(stored, segment, offset, size):
                    # All slots of a segment are of one size and lie side by side from its start.
                    stride = stored.slot.slot_bytes
                    yield stored
                offset = _next_data(fd, offset - offset % stride + stride, stride)

    @contextmanager
    def _opened(self, segment: int, flags: int) -> Iterator[int]:
        fd = os.open(self.path(segment), flags | _SAFE | (os.O_DIRECT if self.direct else 0), 0o600)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a regular file", str(self.path(segment)))
            yield fd
        finally:
            os.close(fd)

    def _grow(self, fd: int, segment: int, segment_bytes: int) -> None:
        with self._growing:
            found = os.fstat(fd)
            before = found.st_size
            if before >= segment_bytes:
                return
            if found.st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "removed while it was being opened")
            try:
                self._must_have_room(fd, segment_bytes - found.st_blocks * 512)
                _preallocate(fd, segment_bytes)
                if self.durability == "full":
                    self.sync_folder()
            except OSError:
                os.ftruncate(fd, before)
                if before == 0:
                    self.remove(segment)
                raise

    def _must_have_room(self, fd: int, nbytes: int) -> None:
        device = os.fstatvfs(fd)
        reserve = self._reserve_bytes
        if reserve is None:
            reserve = default_reserve_bytes(device.f_blocks * device.f_frsize)
        if device.f_bavail * device.f_frsize - nbytes < reserve:
            raise OSError(errno.ENOSPC, f"less than {reserve} bytes would stay free")


class _Window:
    """Pages of a file, read ahead while one looks at many of them."""

    def __init__(self, fd: int, file_bytes: int) -> None:
        self._fd, self._file_bytes = fd, file_bytes
        self._view = memoryview(mmap.mmap(-1, _WINDOW_BYTES))
        self._begin = self._end = 0

    def page(self, offset: int, stride: int) -> memoryview:
        """Return the page at an offset; `stride` is how far the next one may be."""
        if not self._begin <= offset <= self._end - PAGE_BYTES:
            self._read(offset, _WINDOW_BYTES if stride <= _WINDOW_BYTES // 16 else PAGE_BYTES)
        return self._view[offset - self._begin :][:PAGE_BYTES]

    def _read(self, offset: int, nbytes: int) -> None:
        nbytes = min(nbytes, (self._file_bytes - offset) // PAGE_BYTES * PAGE_BYTES)
        try:
            runs.read_all(self._fd, [self._view[:nbytes]], offset)
        except OSError:
            nbytes = PAGE_BYTES  # a part that cannot be read costs only the headers in it
            runs.read_all(self._fd, [self._view[:nbytes]], offset)
        self._begin, self._end = offset, offset + nbytes


def is_full(error: OSError) -> bool:
    """Whether the device, the quota or the file system's limits are at their end."""
    return error.errno in _NO_ROOM


def _preallocate(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
        os.ftruncate(fd, nbytes)


def _in_place(stored: Stored, segment: int, offset: int, file_bytes: int) -> bool:
    slot = stored.slot
    return (
        (slot.segment, slot.offset_bytes) == (segment, offset)
        and offset + slot.slot_bytes <= file_bytes
        and disk_format.payload_fits(stored.nbytes, slot)
    )


def _next_data(fd: int, offset: int, stride: int) -> int:
    """The first multiple of `stride` from `offset` on that may hold more than zeros never written."""
    try:
        found = os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # nothing but a hole up to the end
            return os.fstat(fd).st_size
        return offset
    return max(offset, found - found % stride)
