"""Looks at this host and says what will work here, what will be slow, and what to do about it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import mmap
import os
import platform
import shlex
import sqlite3
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from kvcairn import copying, kinds, plugins
from kvcairn.adapters.sglang.arguments import check_arguments
from kvcairn.errors import ConfigError
from kvcairn.host import Host, free_bytes, making
from kvcairn.options import BUILT_IN_EVICTIONS, BUILT_IN_TIERS
from kvcairn.tiers.disk.folder import foreign_names, is_folder_of_ours, is_owned
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
    yield from _plugins()
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
            yield Check(name, "warn", "not installed", f"in a clone: pip install '.[{extra}]' to use this engine")


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
        remedy = "install a C++17 compiler, then in a clone: pip install --force-reinstall --no-deps ."
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


def _plugins() -> Iterator[Check]:
    """Import what other packages offer; a broken one is harmless until a setting names it."""
    for plugin in plugins.installed(plugins.TIERS):
        yield _plugin(plugin, "tier", BUILT_IN_TIERS, kinds.load_tier)
    for plugin in plugins.installed(plugins.POLICIES):
        yield _plugin(plugin, "eviction policy", BUILT_IN_EVICTIONS, kinds.load_eviction)


def _plugin(
    plugin: plugins.Plugin, noun: str, built_in: Container[str], load: Callable[[str, str], object | None]
) -> Check:
    name = f"plug-in {noun} {plugin.name}"
    if plugin.name in built_in:
        remedy = "the built-in one of that name is used: it needs another name"
        return Check(name, "warn", f"from {plugin.package}", remedy)
    try:
        load(plugin.name, noun)
    except ConfigError as error:
        return Check(name, "fail", error.reason, error.remedy)
    return Check(name, "ok", f"from {plugin.package} ({plugin.target})")


def _folder(folder: Path) -> Iterator[Check]:
    if folder.exists() and not folder.is_dir():
        yield Check("folder", "fail", f"{folder}: a file, not a folder", "name a folder")
        return
    if not folder.is_dir():
        yield Check("folder", "fail", f"{folder}: no such folder", making(folder))
        return
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        yield Check("folder", "fail", f"{folder}: not writable by this user", f"chown it to uid {os.geteuid()}")
        return
    yield Check("folder", "ok", f"{folder}: {format_size(free_bytes(folder))} free")
    yield _content(folder)
    yield _mode(folder)
    yield _direct(folder)


def _content(folder: Path) -> Check:
    """Say what lies in a folder, and whether a cache could take it now."""
    foreign = foreign_names(folder)
    some = ", ".join(foreign[:3]) + (" ..." if len(foreign) > 3 else "")
    if is_owned(folder):
        remedy = "one process owns a folder at a time: close that cache, or give this one a folder of its own"
        return Check("folder content", "warn", "a running cache owns it", remedy)
    if foreign and not is_folder_of_ours(folder):
        remedy = f"give the tier a folder of its own: {making(folder / 'kvcairn')}"
        return Check("folder content", "warn", f"files of something else: {some}", remedy)
    if foreign:
        remedy = "it counts against the tier's capacity: move it elsewhere"
        return Check("folder content", "warn", f"a disk tier, and other files: {some}", remedy)
    return Check("folder content", "ok", "a disk tier" if is_folder_of_ours(folder) else "empty")


def _mode(folder: Path) -> Check:
    """Say who else can get at a folder: blocks are what people asked the model."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    value, remedy = f"mode {mode:04o}", f"chmod 700 {shlex.quote(str(folder))}"
    if mode & 0o022 and not mode & stat.S_ISVTX:
        return Check("folder access", "warn", f"{value}: other users can replace files in it", remedy)
    if mode & 0o077:
        return Check("folder access", "warn", f"{value}: other users can see which files are in it", remedy)
    return Check("folder access", "ok", f"{value}: this user alone")


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
