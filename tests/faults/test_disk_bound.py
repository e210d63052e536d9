"""What `du` says of a folder is within the capacity at any moment: stores, drops, restarts, rebuilds."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvcairn import Cache, Config, KVLayout, SpaceDescriptor
from kvcairn.space import Space

MiB = 1 << 20
LAYOUT = KVLayout.full(layers=2, kv_heads=1, head_dim=64, dtype="float16")  # slots as small as can be: most rows
DESCRIPTOR = SpaceDescriptor(model="m", weights="w", layout=LAYOUT, block_tokens=8)
LENGTH, BATCH = 16, 8


def du_bytes(folder: Path) -> int:
    """What all of it takes on the device; files that go while it looks are passed over."""
    done = subprocess.run(["du", "-s", "--block-size=1", str(folder)], capture_output=True, text=True, check=False)
    return int(done.stdout.split()[0])


@contextmanager
def sampled(folder: Path) -> Iterator[list[int]]:
    """Look at the folder again and again."""
    samples, is_over = list[int](), threading.Event()

    def look() -> None:
        while not is_over.is_set():
            samples.append(du_bytes(folder))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()


def opened(folder: Path, capacity: int) -> Cache:
    memory = {"type": "memory", "capacity": 2 * MiB}
    return Cache.open(Config.from_dict({"tiers": [memory, {"type": "disk", "path": folder, "capacity": capacity}]}))


def store(cache: Cache, space: Space, numbers: range) -> int:
    """Store chains and drop every third of them; return the most bytes that were in use."""
    used = 0
    for begin in range(numbers.start, numbers.stop, BATCH):
        chains = [space.keys(np.full(LENGTH * DESCRIPTOR.block_tokens, n)) for n in range(begin, begin + BATCH)]
        for keys in chains:
            space.put(keys, [bytes(space.block_bytes)] * LENGTH)
        assert cache.drain("disk", timeout_s=60)
        used = max(used, cache.stats().tiers["disk"].used_bytes)
        for keys in chains[::3]:
            space.forget(keys)
    return used


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [MiB // 2, 6 * MiB])
def test_du_never_says_more_than_the_capacity(tmp_path: Path, capacity: int) -> None:
    if shutil.which("du") is None:
        pytest.skip("no du")
    folder = tmp_path / "tier"
    folder.mkdir()
    own_bytes = du_bytes(folder)  # the folder's own entry, which is no file
    chains = 2 * capacity // (8192 * LENGTH) + 2 * BATCH  # written over twice, and more
    with sampled(folder) as samples:
        for turn in range(4):
            with opened(folder, capacity) as cache:
                space = cache.space(DESCRIPTOR)
                used = store(cache, space, range(1000 * turn, 1000 * turn + chains))
                assert used > capacity // 3, "the room there is gets used"
                if turn == 2:
                    assert cache.clear()
                    store(cache, space, range(5000, 5000 + chains))
            for file in folder.glob("index.sqlite*") if turn % 2 else ():
                file.unlink()
            with opened(folder, capacity) as cache:  # closed again in the middle of the rebuild, if there is one
                store(cache, cache.space(DESCRIPTOR), range(9000, 9000 + BATCH))
    assert len(samples) > 20
    assert max(samples) <= capacity + own_bytes
