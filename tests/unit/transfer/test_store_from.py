"""`store_from` makes checksums while it copies: what is read back from a slower tier must match them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvcairn as kv
from kvcairn.layout import LayerGroup


@pytest.mark.parametrize("cuts", [[], [1], [6000], [4096, 6000, 6001]])
@pytest.mark.parametrize("groups", [1, 2])
def test_what_several_regions_gave_comes_back_verified(tmp_path: Path, cuts: list[int], groups: int) -> None:
    layers = [LayerGroup.full(range(2), 256), LayerGroup.full(range(2, 4), 128)][:groups]
    layout = kv.KVLayout(groups=tuple(layers), dtype="bfloat16", name="test")
    tiers = [
        {"type": "memory", "capacity": "4 MiB"},
        {"type": "disk", "path": str(tmp_path), "capacity": "16 MiB", "reserve": "1 MiB"},
    ]
    with kv.Cache.open(kv.Config.from_dict({"tiers": tiers, "verify_memory": "always"})) as cache:
        space = cache.space(kv.SpaceDescriptor(model="m", weights="w", layout=layout, block_tokens=16))
        keys = space.keys(list(range(16 * 5)))
        blocks = np.random.default_rng(1).integers(0, 256, (5, space.block_bytes), dtype=np.uint8)
        ends = [*cuts, space.block_bytes]
        begins = [0, *cuts]
        addresses = [[row.ctypes.data + begin for begin in begins] for row in blocks]
        sizes = [[end - begin for begin, end in zip(begins, ends, strict=True)]] * 5
        job = space.store_from(keys, (addresses, sizes), deadline_s=10)
        assert job.wait() and job.ok == [True] * 5
        assert space.get(keys) == [row.tobytes() for row in blocks], "memory verifies each"
        assert cache.drain(timeout_s=10)
        cache.clear(tier="memory")
        assert space.get(keys, deadline_s=10) == [row.tobytes() for row in blocks]
        assert "corrupt" not in cache.stats().misses_by_reason
