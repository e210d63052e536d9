"""What happens to the files of a folder while no cache has it open is told as the reason of the miss."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvcairn import Cache, Config, KVLayout, MissReason, SpaceDescriptor

BLOCKS = 10
DESCRIPTOR = SpaceDescriptor(
    model="m",
    weights="w",
    layout=KVLayout.full(layers=4, kv_heads=2, head_dim=64, dtype="float32"),
    block_tokens=16,
)


def cut(segment: Path) -> None:
    os.truncate(segment, segment.stat().st_size // 8)


def opened(folder: Path) -> Cache:
    tiers = [{"type": "memory", "capacity": "8 MiB"}, {"type": "disk", "path": folder, "capacity": "64 MiB"}]
    return Cache.open(Config.from_dict({"tiers": tiers}))


@pytest.mark.parametrize("harm", [cut, Path.unlink])
def test_a_file_cut_or_removed_while_closed(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    with opened(tmp_path) as cache:
        space = cache.space(DESCRIPTOR)
        keys = space.keys(np.arange(16 * BLOCKS))
        blocks = [bytes([number]) * space.block_bytes for number in range(BLOCKS)]
        assert all(space.put(keys, blocks))
    for segment in tmp_path.glob("seg-*"):
        harm(segment)
    with opened(tmp_path) as cache:
        space = cache.space(DESCRIPTOR)
        found = space.get(keys)
        assert found == blocks[: len(found)]
        assert len(found) < BLOCKS
        assert cache.stats().misses_by_reason == {MissReason.VANISHED: BLOCKS - len(found)}
        assert all(space.put(keys, blocks)), "and is repaired by the next store"
        assert cache.drain(timeout_s=60.0)
    with opened(tmp_path) as cache:
        assert cache.space(DESCRIPTOR).get(keys) == blocks
