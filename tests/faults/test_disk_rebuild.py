"""A process that finds again what lies on its disk, after the index was lost, is killed in the middle of it."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from kvcairn import requests as rq
from kvcairn.testing.blocks import Blocks, assert_idle
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.rig import Rig, Setup

ROOT = Path(__file__).resolve().parents[2]
SLOW_SCANS = Fault(kind=FaultKind.DELAY, ops=frozenset(["scan"]), delay_s=0.3)
SETUP: Final = Setup(below="disk", threads=True)
SLOW: Final = Setup(below="disk", threads=True, faults=(SLOW_SCANS,))
OLD, LENGTH, KILLS = 60, 16, 6  # 15 segments


def has_written(rig: Rig) -> bool:
    """Wait until all writes are acknowledged, and not for the rebuild."""
    core = rig.core
    return core.state.executor.pause(
        core.state.changed, lambda: bool(core.call(rq.IsIdle(but_rebuilds=True)).value), 60.0
    )


def child(folder: Path, first: int) -> None:
    """Store while the rebuild goes on, no more than there is room for beside all that has not been found yet."""
    rig = Rig(SLOW, folder)
    blocks = Blocks(rig)
    say("open", rig.cache.stats().tiers["disk"].unscanned_bytes)
    for prompt in range(first, first + 40):
        assert all(blocks.put(blocks.keys(prompt, 4)))
        assert has_written(rig)
        say("stored", prompt)
    signal.pause()


def say(word: str, number: int) -> None:
    sys.stdout.write(f"{word} {number}\n")
    sys.stdout.flush()


def run_and_kill(folder: Path, first: int, after_s: float) -> tuple[int, list[int]]:
    """Return the bytes that were to be scanned at the beginning, and the chains that the child acknowledged."""
    command = [sys.executable, "-m", "tests.faults.test_disk_rebuild", str(folder), str(first)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        word, nbytes = process.stdout.readline().split()
        assert word == "open"
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
        lines = [line.split() for line in process.stdout if line.endswith("\n")]
    return int(nbytes), [int(number) for _, number in lines]


def lose_index(folder: Path) -> None:
    for path in folder.glob("index.sqlite*"):
        path.unlink()


@pytest.mark.slow
def test_kills_in_the_middle_lose_nothing(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    with Rig(SETUP, tmp_path) as rig:
        blocks = Blocks(rig)
        for prompt in range(OLD):
            assert all(blocks.put(blocks.keys(prompt, LENGTH)))
            assert rig.cache.drain(timeout_s=60)
    lose_index(tmp_path)
    acknowledged: list[int] = []
    for turn in range(KILLS):
        unscanned, stored = run_and_kill(tmp_path, 1000 * (turn + 1), draw.random() * 0.8)
        assert unscanned, "none of the runs before lived to the end of it"
        acknowledged += stored
        if turn == KILLS // 2:
            lose_index(tmp_path)
    assert acknowledged
    with Rig(SETUP, tmp_path) as rig:
        blocks = Blocks(rig)
        assert rig.cache.drain(timeout_s=60)
        assert rig.cache.stats().tiers["disk"].unscanned_bytes == 0
        for prompt in range(OLD):
            assert blocks.read(blocks.keys(prompt, LENGTH), deadline_s=30.0) == LENGTH
        for prompt in acknowledged:
            assert blocks.read(blocks.keys(prompt, 4), deadline_s=30.0) == 4
        assert_idle(rig)
    with Rig(SETUP, tmp_path) as rig:
        assert rig.cache.stats().tiers["disk"].unscanned_bytes == 0


def test_close_does_not_wait_for_a_scan(tmp_path: Path) -> None:
    with Rig(SETUP, tmp_path) as rig:
        blocks = Blocks(rig)
        for prompt in range(10):
            assert all(blocks.put(blocks.keys(prompt, LENGTH)))
            assert rig.cache.drain(timeout_s=60)
    lose_index(tmp_path)
    for _ in range(3):
        hanging = Setup(below="disk", threads=True, faults=(Fault(kind=FaultKind.HANG, ops=frozenset(["scan"])),))
        with Rig(hanging, tmp_path) as rig:
            assert rig.cache.stats().tiers["disk"].unscanned_bytes
            blocks = Blocks(rig)
            assert all(blocks.put(blocks.keys(99, 4)))
            assert not rig.cache.drain(timeout_s=0.05), "a rebuild is background work"
            rig.cache.close()
    with Rig(SETUP, tmp_path) as rig:
        assert rig.cache.drain(timeout_s=60)
        blocks = Blocks(rig)
        for prompt, length in [*((prompt, LENGTH) for prompt in range(10)), (99, 4)]:
            assert blocks.read(blocks.keys(prompt, length), deadline_s=30.0) == length


if __name__ == "__main__":
    child(Path(sys.argv[1]), int(sys.argv[2]))
