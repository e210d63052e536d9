"""A whole cache over a disk tier: what was cleared or forgotten stays away after a kill, and capacities may shrink."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvcairn as kv
from kvcairn.space import Space
from tests.unit.tiers.disk.kit import MiB, taken_bytes

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = kv.KVLayout.full(layers=2, kv_heads=2, head_dim=64, dtype="bfloat16")
DESCRIPTOR = kv.SpaceDescriptor(model="m", weights="w", layout=LAYOUT, block_tokens=64)
CHAIN = 20


def cache_over(folder: Path, capacity_bytes: int = 64 * MiB) -> kv.Cache:
    disk = {"type": "disk", "path": str(folder), "capacity": capacity_bytes}
    return kv.Cache.open(kv.Config.from_dict({"tiers": [{"type": "memory", "capacity": 32 * MiB}, disk]}))


def put_chain(space: Space, number: int) -> list[bytes]:
    keys = space.keys(np.full(CHAIN * DESCRIPTOR.block_tokens, number))
    assert space.put(keys, [payload(space, number)] * CHAIN) == [True] * CHAIN
    return keys


def payload(space: Space, number: int) -> bytes:
    return bytes([number % 251]) * space.block_bytes


def child(folder: Path, what: str) -> None:
    """Store two chains, drop one or both, and die without closing."""
    with cache_over(folder) as cache:
        space = cache.space(DESCRIPTOR)
        gone, _ = put_chain(space, 1), put_chain(space, 2)
        assert cache.drain(timeout_s=30)
        if what in ("clear", "clear_space"):
            assert cache.clear(space if what == "clear_space" else None)
            os.kill(os.getpid(), signal.SIGKILL)  # what `clear` says holds without `drain`
        elif what == "clear_at_once":
            put_chain(space, 3)
            assert cache.clear()
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            space.forget(gone)
        assert cache.drain(timeout_s=30)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("index", ["there", "lost"])
@pytest.mark.parametrize(("what", "left"), [("clear", []), ("clear_space", []), ("clear_at_once", []), ("forget", [2])])
def test_what_was_dropped_stays_away_after_a_kill(tmp_path: Path, what: str, left: list[int], index: str) -> None:
    command = [sys.executable, "-m", "tests.faults.test_disk_cache", str(tmp_path), what]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=120).returncode == -signal.SIGKILL
    if index == "lost":
        for path in tmp_path.glob("index.sqlite*"):
            path.unlink()
    with cache_over(tmp_path) as cache:
        assert cache.drain(timeout_s=30)
        space = cache.space(DESCRIPTOR)
        for number in (1, 2, 3):
            keys = space.keys(np.full(CHAIN * DESCRIPTOR.block_tokens, number))
            assert space.contains(keys) == (CHAIN if number in left else 0)
        keys = put_chain(space, 4)
        assert cache.drain(timeout_s=30)
    with cache_over(tmp_path) as cache:  # what is stored after a clear is alive
        space = cache.space(DESCRIPTOR)
        assert space.get(keys) == [payload(space, 4)] * CHAIN


@pytest.mark.parametrize("capacity_bytes", [16 * MiB, 8 * MiB, 3 * MiB])
def test_a_smaller_capacity_is_trimmed_to_and_keeps_the_newest(tmp_path: Path, capacity_bytes: int) -> None:
    with cache_over(tmp_path) as cache:
        space = cache.space(DESCRIPTOR)
        chains = []
        for number in range(60):
            chains.append(put_chain(space, number))
            assert cache.drain(timeout_s=30)
        assert taken_bytes(tmp_path) > 32 * MiB
    for _ in range(2):
        with cache_over(tmp_path, capacity_bytes) as cache:
            assert taken_bytes(tmp_path) <= capacity_bytes
            space = cache.space(DESCRIPTOR)
            blocks = cache.stats().tiers["disk"].blocks
            assert 0 < blocks * space.block_bytes <= capacity_bytes
            if capacity_bytes > 4 * MiB:  # below that the head of the newest chain may be among what went
                assert space.contains(chains[-1]) > 0
            assert space.contains(chains[0]) == 0
            there = space.contains(chains[-1])
            assert space.get(chains[-1][:there]) == [payload(space, 59)] * there
            chains.append(put_chain(space, 59))
            assert cache.drain(timeout_s=30)
            assert taken_bytes(tmp_path) <= capacity_bytes


if __name__ == "__main__":
    child(Path(sys.argv[1]), sys.argv[2])
