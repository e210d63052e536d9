"""How long a cache takes to open over many blocks: after a clean close, after a kill, without an index."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvcairn.bench.figures import Figure, quartiles
from kvcairn.cache import Cache
from kvcairn.checksum import checksum
from kvcairn.clock import MonotonicClock
from kvcairn.config import Config, DiskTierOptions
from kvcairn.errors import KVCairnError
from kvcairn.memory.slots import default_region_bytes
from kvcairn.tiers.base import BlockRef, Slot, TierContext, Write
from kvcairn.tiers.disk import DiskTier

BLOCKS: Final = 100_000
_SLOT_BYTES: Final = 8192  # a header page and 4 KiB
_CAPACITY_BYTES: Final = 2 << 30
_CHAIN: Final = 50
_BATCH: Final = 500
_RUNS: Final = 9
_KILLS: Final = 5
_LIMIT_S: Final = 1.0


def reopen_100k(folder: Path, blocks: int = BLOCKS) -> Iterator[Figure]:
    """Yield the times to open a cache over the folder, which is made and filled. Blocks for a minute."""
    folder.mkdir()
    _fill_and_die(folder, 0, blocks)
    killed, _ = _times(folder, blocks, runs=1)
    yield _figure("reopen_100k", _times(folder, blocks, runs=_RUNS)[0], _LIMIT_S)
    for _ in range(_KILLS - 1):
        _fill_and_die(folder, 0, min(blocks, 2 * _BATCH))
        killed += _times(folder, blocks, runs=1)[0]
    yield _figure("reopen_100k_killed", killed, _LIMIT_S)
    opened, rebuilt = list[float](), list[float]()
    for _ in range(2):
        for file in folder.glob("index.sqlite*"):
            file.unlink()
        times = _times(folder, blocks, runs=1)
        opened, rebuilt = opened + times[0], rebuilt + times[1]
    yield _figure("reopen_100k_no_index", opened, _LIMIT_S)
    yield _figure("rebuild_100k", rebuilt, None)


def _fill_and_die(folder: Path, first: int, end: int) -> None:
    code = "import sys; from kvcairn.bench.reopen import fill; fill(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))"
    done = subprocess.run([sys.executable, "-c", code, str(folder), str(first), str(end)], check=False)
    if done.returncode != -signal.SIGKILL:
        raise KVCairnError(f"the process that stores ended with {done.returncode}")


def fill(folder: str, first: int, end: int) -> None:
    """Store numbered blocks in chains, each in its own place, and die before the tier is closed."""
    options = DiskTierOptions(path=folder, capacity_bytes=_CAPACITY_BYTES)
    tier = DiskTier(options, TierContext(MonotonicClock()))
    tier.open()
    region = default_region_bytes(_CAPACITY_BYTES) if tier.region_bytes is None else tier.region_bytes
    slots = region // _SLOT_BYTES
    data = memoryview(bytes(range(256)) * 16)
    digest = checksum(data)
    for begin in range(first, end, _BATCH):
        writes = []
        for n in range(begin, min(begin + _BATCH, end)):
            segment, slot = divmod(n, slots)
            place = Slot(segment, slot * _SLOT_BYTES, _SLOT_BYTES, region, n + 1)
            parent = _key(n - 1) if n % _CHAIN else None
            writes.append(Write(BlockRef(b"\x07" * 32, _key(n), 0), parent, place, data, digest))
        if any(tier.write(writes)):
            raise KVCairnError("a block could not be written")
    os.kill(os.getpid(), signal.SIGKILL)


def _key(number: int) -> bytes:
    return checksum(memoryview(number.to_bytes(8, "little"))) * 2


def _times(folder: Path, blocks: int, runs: int) -> tuple[list[float], list[float]]:
    """Return how long it took until the cache was open, and until it knew all that lies there, in seconds."""
    disk = {"type": "disk", "path": str(folder), "capacity": _CAPACITY_BYTES}
    config = Config.from_dict({"tiers": [{"type": "memory", "capacity": "64 MiB"}, disk]})
    opened, complete = list[float](), list[float]()
    for _ in range(runs):
        begin = time.perf_counter()
        with Cache.open(config) as cache:
            opened.append(time.perf_counter() - begin)
            cache.drain("disk")
            complete.append(time.perf_counter() - begin)
            found = cache.stats().tiers["disk"].blocks
        if found != blocks:
            raise KVCairnError(f"{blocks} blocks were stored, {found} are there")
    return opened, complete


def _figure(name: str, times: list[float], limit: float | None) -> Figure:
    low, value, high = quartiles(times) if len(times) > 1 else (times[0],) * 3
    return Figure(bench="disk", name=name, value=value, unit="s", runs=len(times), limit=limit, low=low, high=high)
