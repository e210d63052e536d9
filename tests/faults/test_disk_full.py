"""A device that is full or fails: counted outcomes, nothing half there, and writing resumes by itself."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvcairn import Cache, Config, KVLayout, SpaceDescriptor
from kvcairn.errors import TierError, TierFull, TierUnavailable
from kvcairn.types import MissReason
from tests.unit.tiers.disk.kit import PAGE, MiB, block, blocks, found, opened, read, segment_files, slots, stored


@pytest.fixture
def small_device(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "device"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_device_costs_new_blocks_and_keeps_the_old(small_device: Path) -> None:
    writes = blocks(slots(), range(64), 300_000)  # 2.4 MiB a segment
    with opened(small_device, 64 * MiB) as tier:
        outcomes = [tier.write([w])[0] for w in writes]
        assert outcomes[:8] == [None] * 8
        assert all(isinstance(outcome, TierFull) for outcome in outcomes[8:])
        assert segment_files(small_device) == ["seg-1.kv"]
        assert read(tier, writes[:8]) == [None] * 8
        assert set(read(tier, writes[8:])) == {MissReason.VANISHED}

        tier.retire([1])
        assert tier.write(writes[8:16]) == [None] * 8
        assert read(tier, writes[8:16]) == [None] * 8
    assert found(small_device) == [stored(w) for w in writes[8:16]]


def test_no_room_for_a_row_means_no_acknowledgement(small_device: Path) -> None:
    maker = slots()
    old, new = blocks(maker, range(8), 5000), [block(maker.cut(100), 100 + n, 100) for n in range(400)]
    with opened(small_device, 64 * MiB) as tier:
        assert tier.write(old) == [None] * 8
        # Leave the room of the segments, and none for the index.
        for first in range(0, 400, 8):
            new_segment = small_device / f"seg-{new[first].slot.segment}.kv"  # type: ignore[union-attr]
            new_segment.write_bytes(b"\x01" * new[first].slot.segment_bytes)  # type: ignore[union-attr]
        with open(small_device / "ballast", "wb") as file:
            with pytest.raises(OSError, match="No space"):
                while True:
                    file.write(bytes(1024))
                    file.flush()
            failed: list[object] = []
            for begin in range(0, 400, 8):
                try:
                    failed += tier.write(new[begin : begin + 8])
                except TierError as error:
                    failed += [error] * 8
            assert any(isinstance(outcome, TierFull) for outcome in failed)
            os.ftruncate(file.fileno(), 0)
        acknowledged = [w for w, outcome in zip(new, failed, strict=True) if outcome is None]
        assert read(tier, old + acknowledged) == [None] * (8 + len(acknowledged))
        assert tier.write(new) == [None] * 400
        assert read(tier, new) == [None] * 400
    assert set(found(small_device)) == {stored(w) for w in old + new}


def leave_free(ballast: Path, nbytes: int) -> None:
    """Fill the file system that the file is on until only so many bytes are free."""
    with open(ballast, "wb", buffering=0) as file:
        with suppress(OSError):
            while file.write(bytes(PAGE)):
                pass
        os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size - nbytes)


def test_a_device_that_fills_up_within_a_write(small_device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test double writes here: the device takes a part of a block, then nothing, as it has no room for the rest.

    So it goes where space cannot be reserved in advance.
    """
    folder, ballast = small_device / "tier", small_device / "ballast"
    folder.mkdir()
    real, told = os.pwritev, list[tuple[int, int]]()

    def noted(fd: int, parts: Sequence[memoryview], offset: int) -> int:
        asked = sum(map(len, parts))
        try:
            told.append((asked, real(fd, parts, offset)))
        except OSError as error:
            told.append((asked, -(error.errno or 0)))
            raise
        return told[-1][1]

    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "pwritev", noted)
    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    tiers: list[dict[str, object]] = [
        {"type": "memory", "capacity": "2 MiB"},
        {"type": "disk", "path": folder, "capacity": "3 MiB", "reserve": 1},
    ]
    layout = KVLayout.full(layers=2, kv_heads=5, head_dim=64, dtype="float16")
    with Cache.open(Config.from_dict({"tiers": tiers})) as cache:
        space = cache.space(SpaceDescriptor(model="m", weights="w", layout=layout, block_tokens=16))
        assert space.block_bytes == 10 * PAGE
        old, lost, new = (space.keys(np.arange(16 * count) + 1000 * count) for count in (4, 3, 5))
        content = {key: bytes([n]) * space.block_bytes for n, key in enumerate((*old, *lost, *new))}

        def put(keys: list[bytes]) -> None:
            assert all(space.put(keys, [content[key] for key in keys])), "memory serves whatever the disk does"
            assert cache.drain("disk", timeout_s=60)
            assert space.get(keys) == [content[key] for key in keys]

        put(old)
        assert cache.stats().tiers["disk"].blocks == 4
        leave_free(ballast, 5 * PAGE)
        told.clear()
        put(lost)
        (asked, short), (rest, refused) = told[:2]
        assert (short, rest, refused) == (5 * PAGE, asked - short, -errno.ENOSPC), "a short write first, then no room"
        stats = cache.stats().tiers["disk"]
        assert stats.blocks == 4 and not stats.is_down
        assert stats.writes_dropped == {"tier_full": 3}
        assert stats.errors == {"TierFull": 1}

        ballast.unlink()
        put(new)
        until_s = time.monotonic() + 60
        while cache.stats().tiers["disk"].blocks < 12 and time.monotonic() < until_s:
            space.touch(lost)
            assert cache.drain("disk", timeout_s=60)
        cache.clear(tier="memory")
        for keys in (old, lost, new):
            assert space.lookup(keys).by_tier == {"disk": len(keys)}
            assert space.get(keys) == [content[key] for key in keys]


@pytest.mark.parametrize("unit", [1, PAGE])
def test_a_write_that_stops_short_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: int) -> None:
    real = os.pwritev
    calls = 0

    def short(fd: int, parts: Sequence[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        return real(fd, [parts[0][: max(unit, calls * 977 % len(parts[0]) // unit * unit)]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    writes = blocks(slots(), range(4), 30_000)
    with opened(tmp_path) as tier:
        tier._segments.direct = tier._segments.direct and unit == PAGE  # direct I/O stops at whole pages only
        assert tier.write(writes) == [None] * 4
        assert calls > 12
        assert read(tier, writes) == [None] * 4


@pytest.mark.parametrize("unit", [1, PAGE])
def test_a_read_that_stops_short_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: int) -> None:
    real = os.preadv

    def short(fd: int, parts: Sequence[memoryview], offset: int) -> int:
        return real(fd, [parts[0][: max(unit, len(parts[0]) // 3 // unit * unit)]], offset)

    writes = blocks(slots(), range(4), 30_000)
    with opened(tmp_path) as tier:
        tier._segments.direct = tier._segments.direct and unit == PAGE
        tier.write(writes)
        monkeypatch.setattr(os, "preadv", short)
        assert read(tier, writes) == [None] * 4


@pytest.mark.parametrize("call", ["pwritev", "fdatasync", "preadv"])
def test_an_io_error_is_an_outcome_and_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    maker = slots()
    old, new = blocks(maker, range(2)), blocks(maker, range(2, 6))
    with opened(tmp_path, durability="data") as tier:
        tier.write(old)
        with monkeypatch.context() as patched:
            patched.setattr(os, call, broken)
            outcomes = read(tier, old) if call == "preadv" else tier.write(new)
            assert all(isinstance(outcome, TierUnavailable) for outcome in outcomes)
        assert caplog.text.count("failed") == 1
        if call != "preadv":
            assert {s.block for s in tier._books().load()} == {w.block for w in old}
        assert read(tier, old) == [None] * 2
        assert tier.write(new) == [None] * 4
        assert read(tier, new) == [None] * 4


def test_a_limit_on_file_size_is_a_full_device(tmp_path: Path) -> None:
    writes = blocks(slots(), range(8), 250_000)
    small = blocks(slots(), range(20, 21), 100)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with opened(tmp_path) as tier:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MiB, before[1]))
        try:
            outcomes = tier.write(writes)
            assert all(isinstance(outcome, TierFull) for outcome in outcomes)
            assert tier.write(small) == [None]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
        assert read(tier, small) == [None]


def test_a_folder_that_is_gone_takes_no_writes_and_breaks_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    writes = blocks(slots(), range(4))
    with opened(folder) as tier:
        tier.write(writes[:2])
        folder.rename(tmp_path / "elsewhere")
        assert set(read(tier, writes[:2])) == {MissReason.VANISHED}
        assert all(isinstance(outcome, TierUnavailable) for outcome in tier.write(writes[2:]))
        (tmp_path / "elsewhere").rename(folder)
        assert read(tier, writes[:2]) == [None] * 2
        assert tier.write(writes[2:]) == [None] * 2
