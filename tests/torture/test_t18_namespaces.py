"""T18: salts, adapters, images and tenants never meet; the same ones do, on every tier and after a restart."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from pathlib import Path

from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.oracle import ByteOracle
from kvcairn.testing.rig import BelowKind, LinkKind
from tests.torture.support import MakeRig

SALT = b"a-secret-salt-of-user-17"
IMAGE_A, IMAGE_B = bytes(30) + b"\x12\x34", b"\x01" + bytes(29) + b"\x12\x34"  # equal in the low 16 bits
LORA_OLD, LORA_NEW = (hashlib.sha256(weights).digest() for weights in (b"weights 1", b"weights 2"))
NAMESPACES: dict[str, Mapping[int, bytes | None] | None] = {
    "plain": None,
    "empty salt": {0: b""},
    "salt None as text": {0: b"None"},
    "salt": {0: SALT},
    "adapter": {0: LORA_OLD},
    "adapter, new weights": {0: LORA_NEW},
    "adapter and salt": {0: LORA_OLD + SALT},
    "image": {1: IMAGE_A},
    "other image": {1: IMAGE_B},
    "image later": {2: IMAGE_A},
}
BLOCKS = 4


def test_no_cross_hit_anywhere(make_rig: MakeRig, link: LinkKind, below: BelowKind, tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    rig = make_rig(folder=folder, link=link, below=below)
    blocks = Blocks(rig)
    chains = {name: blocks.keys(1, BLOCKS, extra=extra) for name, extra in NAMESPACES.items()}
    for (name, keys), (other, others) in itertools.combinations(chains.items(), 2):
        shared = set(keys) & set(others)
        first = min([*(NAMESPACES[name] or {0: None}), *(NAMESPACES[other] or {0: None})], default=0)
        if "image" not in name or "image" not in other:
            assert not shared or first >= 1 or {name, other} & {"plain"}
        assert keys[-1] != others[-1]
    stored: set[bytes] = set()
    for keys in chains.values():
        fresh = [key for key in keys if key not in stored]
        assert blocks.space.lookup(keys).blocks == BLOCKS - len(fresh)
        assert all(blocks.put(keys))
        stored.update(keys)
        assert blocks.read(keys) == BLOCKS, "the same namespace hits"
    if below == "disk":
        assert_idle(rig)
        rig.reopen()
        for keys in chains.values():
            assert blocks.read(keys) == BLOCKS
        written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
        names = "".join(str(path) for path in folder.rglob("*"))
        assert SALT not in written
        assert SALT.decode() not in names


def test_tenants_and_models_never_share(make_rig: MakeRig, link: LinkKind, below: BelowKind) -> None:
    rig = make_rig(link=link, below=below)
    oracle = ByteOracle(9)
    tenants = [Blocks(rig, tenant, oracle) for tenant in ("", "a", "b", "None")]
    keys = tenants[0].keys(1, BLOCKS)
    for number, mine in enumerate(tenants):
        assert mine.keys(1, BLOCKS) == keys
        assert [other.space.lookup(keys).blocks for other in tenants] == [BLOCKS] * number + [0] * (4 - number)
        assert all(mine.put(keys))
    for turn in range(2):
        for mine in tenants:
            assert mine.read(keys) == BLOCKS
        if turn == 0 and below == "disk":
            rig.reopen()
    tenants[1].space.forget(keys)
    assert [mine.space.lookup(keys).blocks for mine in tenants] == [BLOCKS, 0, BLOCKS, BLOCKS]
    rig.cache.clear(space=tenants[2].space)
    assert [mine.space.lookup(keys).blocks for mine in tenants] == [BLOCKS, 0, 0, BLOCKS]
    if below == "disk":
        rig.reopen()
        assert [mine.space.lookup(keys).blocks for mine in tenants] == [BLOCKS, 0, 0, BLOCKS]
