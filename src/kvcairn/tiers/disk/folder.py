"""The folder of a disk tier: who owns it, what it is, and what lies in it beside the segments."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import sqlite3
import weakref
from pathlib import Path
from typing import Final, NoReturn

import msgspec
import xxhash

from kvcairn.errors import ConfigError
from kvcairn.host import making
from kvcairn.memory.slots import PAGE_BYTES, default_region_bytes
from kvcairn.tiers.base import BUDGET_NAME
from kvcairn.tiers.disk.epochs import EPOCHS_NAME
from kvcairn.tiers.disk.files import replace_file
from kvcairn.tiers.disk.format import FORMAT_VERSION
from kvcairn.tiers.disk.index import Index, IndexSize, is_damage
from kvcairn.tiers.disk.segments import Segments, segment_number

logger = logging.getLogger(__name__)

LOCK_NAME: Final = "lock"
META_NAME: Final = "folder"
INDEX_NAME: Final = "index.sqlite"
_COMPANIONS: Final = ("-wal", "-shm", "-journal")
_OURS: Final = {
    LOCK_NAME,
    META_NAME,
    EPOCHS_NAME,
    BUDGET_NAME,
    INDEX_NAME,
    *(INDEX_NAME + companion for companion in _COMPANIONS),
}
_SMALL_FILES: Final = 3  # description, epochs, and the draft of one of them; the lock is empty
_REFUSED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


# Made by file systems and people, and in nobody's way.
_TOLERATED: Final = re.compile(r"\.|lost\+found$")
_DRAFT: Final = ".new"


def foreign_names(path: Path) -> list[str]:
    """Return what lies in a folder and is none of a disk tier's files, sorted; blocks."""
    return sorted(name for name in os.listdir(path) if not _is_ours(name) and not _TOLERATED.match(name))


def is_folder_of_ours(path: Path) -> bool:
    """Return whether a disk tier has used a folder; blocks."""
    return any(_is_ours(name) and name != LOCK_NAME for name in os.listdir(path))


def is_owned(path: Path) -> bool:
    """Return whether a cache owns a folder now, without taking it; blocks."""
    try:
        fd = os.open(path / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _is_ours(name: str) -> bool:
    return name.removesuffix(_DRAFT) in _OURS or segment_number(name) is not None


def least_overhead_bytes(capacity_bytes: int) -> int:
    """Return the most that index, lock and description of a folder of that capacity can take."""
    return IndexSize.of(capacity_bytes).total_bytes + _SMALL_FILES * PAGE_BYTES


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """What the first line of `folder` holds.

    Attributes:
        format_version: of the whole folder.
        region_bytes: size of the regions that its segments were cut from; stays when the capacity changes.
    """

    format_version: int
    region_bytes: int


class Lock:
    """Sole ownership of a folder, until `release` or the end of the process. Not inherited by a fork."""

    _held: Final[weakref.WeakSet[Lock]] = weakref.WeakSet()

    def __init__(self, setting: str, folder: Path) -> None:
        """Take the lock.

        Raises:
            ConfigError: another owner has it, or the folder is missing or not writable.
            OSError: the disk failed.
        """
        try:
            self._fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(setting, "no such folder", str(folder), making(folder)) from error
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            remedy = f"let uid {os.geteuid()} write to it"
            raise ConfigError(setting, f"not writable: {error.strerror}", str(folder), remedy) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            reason = "another cache owns this folder"
            remedy = "one process owns a folder at a time: close the other cache, or give this one a folder of its own"
            raise ConfigError(setting, reason, str(folder), remedy) from error
        self._held.add(self)

    def release(self) -> None:
        """Let the next owner in. Idempotent."""
        if self in self._held:
            # By name: a child that another thread has just forked, and that runs no program yet, has the file open too.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.forget()

    def forget(self) -> None:
        """Close the file and leave the lock to whoever else has it open."""
        self._held.discard(self)
        os.close(self._fd)

    @classmethod
    def forget_all(cls) -> None:
        """Drop what a fork has inherited: the lock is the parent's, and must end with the parent."""
        for lock in list(cls._held):
            lock.forget()


os.register_at_fork(after_in_child=Lock.forget_all)


class Folder:
    """A folder, once it is owned. Owner thread only; every method blocks on the disk.

    Attributes:
        path: where it is.
    """

    def __init__(self, setting: str, path: Path, capacity_bytes: int) -> None:
        """Look at nothing yet; `setting` is how errors call the path."""
        self.path = path
        self._setting, self._capacity_bytes = setting, capacity_bytes
        self._size = IndexSize.of(capacity_bytes)
        self._lock: Lock | None = None

    def check(self) -> None:
        """Warn where something else lies here, and no disk tier ever did. Nothing is changed."""
        if self.path.is_dir() and (foreign := foreign_names(self.path)) and not is_folder_of_ours(self.path):
            some = ", ".join(foreign[:3]) + (" ..." if len(foreign) > 3 else "")
            remedy = f"give the tier a folder of its own: {making(self.path / 'kvcairn')}"
            logger.warning("%s: something else lies in this folder: %s; %s", self._setting, some, remedy)

    def own(self) -> None:
        """Take the lock; errors as of `Lock`."""
        self.check()
        self._lock = Lock(self._setting, self.path)

    def release(self) -> None:
        """Let the next owner in. Idempotent."""
        if self._lock is not None:
            self._lock.release()

    def region_bytes(self) -> int:
        """Return the size of the folder's regions.

        A folder that cannot say it, or whose capacity is now less than one region, is given the size of a new one.

        Raises:
            ConfigError: it is of a later format. Nothing in it was changed.
        """
        found = self._read_meta()
        room = self._capacity_bytes - least_overhead_bytes(self._capacity_bytes)
        if found is None or found.region_bytes > room:
            found = Meta(format_version=FORMAT_VERSION, region_bytes=default_region_bytes(self._capacity_bytes))
            line = msgspec.json.encode(found)
            replace_file(self.path / META_NAME, b"%s\n%s\n" % (line, _digest(line)))
        return found.region_bytes

    def overhead_bytes(self, index: Index, segments: Segments) -> int:
        """Return what may come to lie here beside the segments, and what lies here that is none of ours."""
        least = least_overhead_bytes(self._capacity_bytes)
        index_excess = max(0, index.file_bytes() - self._size.pages * PAGE_BYTES)
        return least + index_excess + self._foreign_bytes({segments.name(number) for number in segments.sizes()})

    def open_index(self, synchronous: str) -> Index:
        """Open the index, or remove a damaged one and begin a new one.

        Raises:
            sqlite3.Error: the disk failed, or has no room.
        """
        path = self.path / INDEX_NAME
        try:
            return Index(path, self._size, synchronous=synchronous)
        except sqlite3.Error as error:
            if not is_damage(error) and path.is_file() and not path.is_symlink():
                raise
            self.discard_index(str(error))
        return Index(path, self._size, synchronous=synchronous)

    def discard_index(self, reason: str) -> None:
        """Remove the index, whose place and bytes the new one needs; whatever lies in its place."""
        logger.warning("the index of %s is made anew: %s", self.path, reason)
        index = self.path / INDEX_NAME
        if index.is_dir() and not index.is_symlink():
            shutil.rmtree(index)
        else:
            index.unlink(missing_ok=True)
        for companion in _COMPANIONS:  # a log that is left behind would be replayed into the new file
            index.with_name(INDEX_NAME + companion).unlink(missing_ok=True)

    def _foreign_bytes(self, segment_names: set[str]) -> int:
        total = 0
        for parent, _, files in os.walk(self.path):
            known = (_OURS - {BUDGET_NAME}) | segment_names if Path(parent) == self.path else set()
            for name in set(files) - known:
                with contextlib.suppress(FileNotFoundError):
                    found = os.lstat(os.path.join(parent, name))
                    total += max(found.st_size, found.st_blocks * 512)
        return total

    def _read_meta(self) -> Meta | None:
        path = self.path / META_NAME
        try:
            line, digest = path.read_bytes().splitlines()
            if digest != _digest(line):
                raise ValueError("the checksum is wrong")
            version = msgspec.json.decode(line, type=_Versioned).format_version
            if version > FORMAT_VERSION:
                self._refuse(version)
            return msgspec.json.decode(line, type=Meta)
        except FileNotFoundError:
            return None
        except ConfigError:
            raise
        except ValueError as error:  # those of msgspec included
            logger.warning("%s cannot be read and is made anew: %s", path, error)
            return None

    def _refuse(self, version: int) -> NoReturn:
        raise ConfigError(
            self._setting,
            f"the folder has format {version}, this version reads up to {FORMAT_VERSION}",
            str(self.path),
            "use the version that wrote it, or another folder",
        )


class _Versioned(msgspec.Struct):
    """What every version of the file has."""

    format_version: int


def _digest(line: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(line).encode()
