"""Looks at this host and says what will work here, what will be slow, and what to do about it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import mmap
import os
import platform
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from kvcairn import copying
from kvcairn.adapters.sglang.arguments import check_arguments
from kvcairn.host import Host, free_bytes
from kvcairn.units import format_size

_OLDEST_PYTHON: Final = (3, 11)
_OPTIONAL: Final = {"torch": "transformers", "transformers": "transformers"}
_LITTLE_MEMORY_BYTES: Final = 512 << 20
# Half of what a core without SHA instructions reaches; below it hashing a long prompt shows.
_SLOW_SHA256_BYTES_PER_S: Final = 150e6
_SAMPLE_BYTES: Final = 4 << 20


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at.

    Attributes:
        name: What it is.
        status: `ok`, `warn` (works, with a drawback) or `fail` (something will not work).
        value: What was found.
        remedy: What to do about it; empty where there is nothing to do.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    value: str
    remedy: str = ""


def examine(folder: Path | None = None, host: Host | None = None, sglang_args: str | None = None) -> Iterator[Check]:
    """Yield one check after the other; takes about a second.

    Args:
        folder: Where a disk tier would lie; its file system is tried with one small file that is removed.
        host: The machine to look at; this one by default.
        sglang_args: Arguments of an SGLang server to look at, as one line.

    Raises:
        ConfigError: `sglang_args` is no command line.
    """
    host = host or Host()
    yield _python()
    yield from _packages()
    yield _memory(host)
    yield _limit(host)
    yield _cores()
    yield _memfd()
    yield _native()
    yield from _hashing()
    if folder is not None:
        yield from _folder(folder)
    if sglang_args is not None:
        yield from (Check(*finding) for finding in check_arguments(sglang_args))


def _python() -> Check:
    version = platform.python_version()
    if sys.version_info < _OLDEST_PYTHON:
        return Check("python", "fail", version, "use Python 3.11 or newer")
    return Check("python", "ok", f"{version} on {platform.system()} {platform.machine()}")


def _packages() -> Iterator[Check]:
    for name in ("kvcairn", "numpy", "msgspec", "xxhash"):
        yield Check(name, "ok", importlib.metadata.version(name))
    yield Check("sqlite", "ok", sqlite3.sqlite_version)
    for name, extra in _OPTIONAL.items():
        try:
            yield Check(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, "warn", "not installed", f"pip install 'kvcairn[{extra}]' to use this engine")


def _memory(host: Host) -> Check:
    total, available = host.memory_bytes(), host.available_bytes()
    if total is None or available is None:
        return Check("memory", "warn", "unknown", f"capacities are not checked: cannot read {host.proc / 'meminfo'}")
    value = f"{format_size(total)}, {format_size(available)} available"
    if available < _LITTLE_MEMORY_BYTES:
        return Check("memory", "warn", value, "a memory tier would push out other programs: free some memory")
    return Check("memory", "ok", value)


def _limit(host: Host) -> Check:
    limit = host.cgroup_limit_bytes()
    if limit is None:
        return Check("control group", "ok", "no memory limit")
    status: Literal["ok", "warn"] = "warn" if limit < _LITTLE_MEMORY_BYTES else "ok"
    remedy = "raise the container's memory limit" if status == "warn" else ""
    return Check("control group", status, f"memory limit {format_size(limit)}", remedy)


def _cores() -> Check:
    count = len(os.sched_getaffinity(0))
    if count == 1:
        return Check("cores", "warn", "1", "transfers share the core with the engine: give this process two")
    return Check("cores", "ok", str(count))


def _memfd() -> Check:
    try:
        os.close(os.memfd_create("kvcairn-doctor"))
    except (AttributeError, OSError) as error:
        return Check("memfd", "fail", str(error), "the memory tier needs Linux 3.17 or newer with memfd_create")
    return Check("memfd", "ok", "available")


def _native() -> Check:
    if not copying.IS_NATIVE:
        remedy = "install a C++17 compiler, then: pip install --force-reinstall --no-deps kvcairn"
        return Check("copy core", "warn", "numpy (the native core was not built): copies are slower", remedy)
    return Check("copy core", "ok", f"native ({copying.instruction_set()})")


def _hashing() -> Iterator[Check]:
    sample = bytes(_SAMPLE_BYTES)
    started = time.perf_counter()
    hashlib.sha256(sample).digest()
    sha_bytes_per_s = _SAMPLE_BYTES / (time.perf_counter() - started)
    started = time.perf_counter()
    copying.checksum(sample)
    xxh_bytes_per_s = _SAMPLE_BYTES / (time.perf_counter() - started)
    value = f"{sha_bytes_per_s / 1e6:.0f} MB/s"
    if sha_bytes_per_s < _SLOW_SHA256_BYTES_PER_S:
        yield Check("sha-256", "warn", value, "no SHA instructions, or a busy host: keys of long prompts are slow")
    else:
        yield Check("sha-256", "ok", value)
    yield Check("xxh3-128", "ok", f"{xxh_bytes_per_s / 1e9:.1f} GB/s")


def _folder(folder: Path) -> Iterator[Check]:
    if not folder.is_dir():
        yield Check("folder", "fail", f"{folder}: no such folder", f"mkdir -p {folder}")
        return
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        yield Check("folder", "fail", f"{folder}: not writable by this user", f"chown it to uid {os.geteuid()}")
        return
    yield Check("folder", "ok", f"{folder}: {format_size(free_bytes(folder))} free")
    yield _direct(folder)


def _direct(folder: Path) -> Check:
    handle, name = tempfile.mkstemp(prefix=".kvcairn-doctor-", dir=folder)
    os.close(handle)
    try:
        handle = os.open(name, os.O_RDWR | os.O_DIRECT)
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                os.pwrite(handle, page, 0)
        finally:
            os.close(handle)
    except OSError as error:
        reason = f"refused: {error.strerror}"
        return Check("direct I/O", "warn", reason, "reads go through the page cache, which takes memory of its own")
    finally:
        os.unlink(name)
    return Check("direct I/O", "ok", "available")
