"""T11: a full or failing device costs hits, never service; writing resumes by itself."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcairn.errors import TierFull, TierUnavailable
from kvcairn.host import folder_bytes
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.rig import LinkKind
from tests.torture.support import MakeRig

WRITE = frozenset(["write"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_file_system(make_rig: MakeRig, link: LinkKind, small_disk: Path) -> None:
    cache = small_disk / "cache"
    cache.mkdir()
    rig = make_rig(folder=cache, link=link, below="disk", memory_blocks=64, below_blocks=768)  # 6 MiB
    blocks = Blocks(rig)
    first = blocks.keys(0, 8)
    assert all(blocks.put(first))
    assert_idle(rig)
    ballast = small_disk / "ballast"
    free = os.statvfs(small_disk)
    ballast.write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - 65_536)))
    for prompt in range(1, 200):
        assert all(blocks.put(blocks.keys(prompt, 8))), "memory serves whatever the disk does"
    stats = assert_idle(rig)
    assert folder_bytes(cache) <= stats.tiers["disk"].capacity_bytes
    assert blocks.read(first) == 8, "what was written stays readable"
    ballast.unlink()
    rig.clock.advance(3600.0)
    for prompt in range(200, 220):
        assert all(blocks.put(blocks.keys(prompt, 8)))
    assert_idle(rig)
    rig.reopen()
    assert blocks.space.lookup(blocks.keys(219, 8)).by_tier == {"disk": 8}, "writing resumes by itself"
    assert blocks.read(blocks.keys(219, 8)) == 8


@pytest.mark.parametrize("kind", [FaultKind.ERROR, FaultKind.BLOCK_ERROR, FaultKind.BUG, FaultKind.LOST_ACK])
@pytest.mark.parametrize("error", [TierFull, TierUnavailable])
def test_failed_writes_are_misses(
    make_rig: MakeRig, link: LinkKind, kind: FaultKind, error: type[TierFull | TierUnavailable]
) -> None:
    rig = make_rig(link=link, below="disk", memory_blocks=64)
    blocks = Blocks(rig)
    old, lost, new = (blocks.keys(prompt, 8) for prompt in range(3))
    assert all(blocks.put(old))
    assert_idle(rig)
    assert rig.faulty is not None
    rig.faulty.faults = (Fault(kind=kind, ops=WRITE, error=error),)
    assert all(blocks.put(lost))
    stats = assert_idle(rig)
    assert stats.tiers["disk"].blocks == 8
    assert sum(stats.tiers["disk"].errors.values()) + sum(stats.tiers["disk"].writes_dropped.values()) > 0
    assert blocks.read(lost) == 8
    rig.faulty.heal()
    rig.clock.advance(3600.0)
    rig.step(100)
    assert all(blocks.put(new))
    assert_idle(rig)
    rig.reopen()
    assert [blocks.space.lookup(keys).blocks for keys in (old, lost, new)] == [8, 0, 8]
    assert [blocks.read(keys) for keys in (old, lost, new)] == [8, 0, 8]


def test_the_real_error_is_told_from_no_room(small_disk: Path) -> None:
    """What the device says when it is full: the case above is real."""
    with pytest.raises(OSError, match="No space") as caught:
        (small_disk / "big").write_bytes(bytes(9 << 20))
    assert caught.value.errno == errno.ENOSPC
