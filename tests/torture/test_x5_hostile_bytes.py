"""X5: hostile bytes in files and names are refused or harmless; nothing of them is executed."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcairn.errors import KVCairnError
from kvcairn.layout import SpaceDescriptor
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.rig import PLAIN, LinkKind
from tests.torture.support import MakeRig

BLOCKS = 8
Damage = Callable[[bytearray, random.Random, bytes], None]


class Bomb:
    """A pickle of this makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize(
    "name",
    ["../../evil", "/etc/passwd", "a/b", "nul\0byte", "..", "x" * 5000],
)
def test_names_never_become_paths(make_rig: MakeRig, link: LinkKind, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "deep" / "tier"
    folder.parent.mkdir()
    rig = make_rig(folder=folder, link=link, below="disk")
    descriptor = SpaceDescriptor(model=name, weights=name, layout=PLAIN, block_tokens=4, tenant=name)
    space = rig.cache.space(descriptor)
    keys = space.keys(list(range(16)), extra={0: name.encode()})
    blocks = Blocks(rig)
    content = [blocks.oracle.part(descriptor, key, 0, space.block_bytes) for key in keys]
    assert all(space.put(keys, content))
    rig.reopen()
    assert rig.cache.space(descriptor).get(keys, deadline_s=10.0) == content
    assert {path.name for path in tmp_path.iterdir()} <= {"deep", "tier1"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["tier"]
    assert not any("evil" in path.name or "passwd" in path.name for path in folder.rglob("*"))


def plant_pickles(data: bytearray, draw: random.Random, bomb: bytes) -> None:
    for at in range(0, len(data), 4096):
        data[at : at + len(bomb)] = bomb[: len(data) - at]


def make_noise(data: bytearray, draw: random.Random, bomb: bytes) -> None:
    for _ in range(max(1, len(data) // 512)):
        data[draw.randrange(len(data))] = draw.randrange(256)


def zero(data: bytearray, draw: random.Random, bomb: bytes) -> None:
    data[:] = bytes(len(data))


def cut(data: bytearray, draw: random.Random, bomb: bytes) -> None:
    del data[len(data) // 2 :]


def swap_halves(data: bytearray, draw: random.Random, bomb: bytes) -> None:
    half = len(data) // 2 // 4096 * 4096
    data[:half], data[half : 2 * half] = data[half : 2 * half], data[:half]


def damage(folder: Path, how: Damage, seed: int, bomb: bytes) -> None:
    draw = random.Random(seed)
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size:
            data = bytearray(path.read_bytes())
            how(data, draw, bomb)
            path.write_bytes(data)


@pytest.mark.parametrize("how", [plant_pickles, make_noise, zero, cut, swap_halves])
def test_hostile_files(make_rig: MakeRig, link: LinkKind, tmp_path: Path, how: Damage, seed: int) -> None:
    folder = tmp_path / "tier"
    rig = make_rig(folder=folder, link=link, below="disk", below_blocks=256)
    blocks = Blocks(rig)
    chains = [blocks.keys(prompt, BLOCKS) for prompt in range(4)]
    for keys in chains:
        assert all(blocks.put(keys))
    assert_idle(rig)
    rig.cache.close()
    damage(folder, how, seed, pickle.dumps(Bomb(tmp_path / "executed")))
    try:
        again = make_rig(folder=folder, link=link, below="disk", below_blocks=256)
    except KVCairnError:
        return  # a clear refusal is an answer too
    blocks = Blocks(again)
    for keys in chains:
        assert blocks.read(keys, deadline_s=10.0) <= BLOCKS  # every byte of it right
        assert all(blocks.put(keys))
        assert blocks.read(keys, deadline_s=10.0) == BLOCKS
    assert_idle(again)
    assert not (tmp_path / "executed").exists()
