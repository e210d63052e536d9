"""What this machine has: memory, the limit of its control group, room on its file systems. Layer 0."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# Version 1 says "no limit" with the largest multiple of the page size, version 2 with the word "max".
_UNLIMITED_BYTES: Final = 1 << 60
_MOST_RESERVE_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Host:
    """Reads facts of the machine when asked; nothing is kept.

    Both folders can be replaced, so that a test describes a machine by a few files.

    Attributes:
        proc: Where the proc file system is mounted.
        cgroups: Where the control groups are mounted, version 1 or 2.
    """

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")

    def memory_bytes(self) -> int | None:
        """Return the machine's memory, or None where it cannot be read."""
        for line in _lines(self.proc / "meminfo"):
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
        return None

    def available_bytes(self) -> int | None:
        """Return the memory that new work could take now, or None where it cannot be read."""
        for line in _lines(self.proc / "meminfo"):
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return None

    def cgroup_limit_bytes(self) -> int | None:
        """Return the lowest memory limit of this process's control groups, or None without one."""
        limits = [limit for path in self._limit_files() if (limit := _limit(path)) is not None]
        return min(limits, default=None)

    def _limit_files(self) -> Iterator[Path]:
        # A limit on any group above ours binds too. Inside a container the path may name groups of
        # the outside that are not mounted here; the mount's own root is then the container's.
        for line in _lines(self.proc / "self" / "cgroup"):
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                base, name = self.cgroups, "memory.max"
            elif "memory" in controllers.split(","):
                base, name = self.cgroups / "memory", "memory.limit_in_bytes"
            else:
                continue
            parts = [part for part in group.split("/") if part and part != ".."]
            for depth in range(len(parts), -1, -1):
                yield base.joinpath(*parts[:depth], name)


def started_ticks(pid: int) -> int | None:
    """Return when a process was started, in the kernel's ticks since boot; None where there is no such process."""
    lines = _lines(Path("/proc", str(pid), "stat"))
    return int(lines[0].rpartition(")")[2].split()[19]) if lines else None


def folder_bytes(folder: Path) -> int:
    """Return the bytes that the files below a folder take on disk. Files that vanish count as nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def default_reserve_bytes(total_bytes: int) -> int:
    """Return what is left free of a file system of that size where nothing else is said."""
    return min(total_bytes // 20, _MOST_RESERVE_BYTES)


def device_bytes(folder: Path) -> int:
    """Return the size of the folder's file system."""
    return shutil.disk_usage(folder).total


def making(folder: Path) -> str:
    """Return the command that makes a folder which nobody else can read."""
    return f"mkdir -m 700 -p {shlex.quote(str(folder))}"


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user could still write on the folder's file system."""
    return shutil.disk_usage(folder).free


def _limit(path: Path) -> int | None:
    for line in _lines(path):
        if line.isdecimal() and int(line) < _UNLIMITED_BYTES:
            return int(line)
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
