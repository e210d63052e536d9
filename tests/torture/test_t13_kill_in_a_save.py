"""T13: killed at any instant, the next process opens, serves nothing damaged, and has what was acknowledged."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcairn.host import folder_bytes
from kvcairn.testing.blocks import Blocks
from tests.torture.support import MakeRig

RESTARTS, BLOCKS_EACH, CAPACITY_BLOCKS = 25, 6, 4096

CHILD = """
import sys
from pathlib import Path
from kvcairn.testing.blocks import Blocks
from kvcairn.testing.rig import Rig, Setup

folder, first, count, capacity = Path(sys.argv[1]), *map(int, sys.argv[2:5])
rig = Rig(Setup(below="disk", threads=True, below_blocks=capacity), folder)
blocks = Blocks(rig)
prompt = first
print("ready", flush=True)
while True:
    assert all(blocks.put(blocks.keys(prompt, count)))
    assert rig.cache.drain(timeout_s=60)
    print(prompt, flush=True)
    prompt += 1
"""


def save_until_killed(folder: Path, first: int, after_s: float) -> list[int]:
    """Return the prompts that the child has acknowledged."""
    command = [sys.executable, "-c", CHILD, str(folder), str(first), str(BLOCKS_EACH), str(CAPACITY_BLOCKS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(after_s)
        child.send_signal(signal.SIGKILL)
        lines = child.stdout.read().splitlines()
    return [int(line) for line in lines if line.isdecimal()]


@pytest.mark.slow
def test_kill_in_a_save(make_rig: MakeRig, tmp_path: Path, seed: int) -> None:
    folder, draw = tmp_path / "tier", random.Random(seed)
    folder.mkdir()
    acknowledged: list[int] = []
    for turn in range(RESTARTS):
        done = save_until_killed(folder, 10_000 * (turn + 1), draw.random() * 0.2)
        # The last line may have been cut in two by the kill.
        acknowledged += [prompt for prompt in done if prompt // 10_000 == turn + 1]
    assert acknowledged
    rig = make_rig(folder=folder, below="disk", threads=True, below_blocks=CAPACITY_BLOCKS)
    blocks = Blocks(rig)
    for prompt in acknowledged[-500:]:
        assert blocks.read(blocks.keys(prompt, BLOCKS_EACH), deadline_s=30.0) == BLOCKS_EACH
    for turn in range(RESTARTS):  # what was cut off is there in full, in part or not at all, and never wrong
        started = [prompt for prompt in acknowledged if prompt // 10_000 == turn + 1]
        assert blocks.read(blocks.keys(max(started, default=0) + 1, BLOCKS_EACH), deadline_s=30.0) <= BLOCKS_EACH
    capacity = rig.cache.stats().tiers["disk"].capacity_bytes
    assert folder_bytes(folder) <= capacity
