"""A process that stores is killed at any moment: what it acknowledged is there, and nothing else is served."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import pytest

from kvcairn.tiers.base import Write
from kvcairn.types import MissReason
from tests.unit.tiers.disk.kit import MiB, block, drop, listed, opened, read, slots, stored, taken_bytes, tier_over

CAPACITY = 16 * MiB
KILLS = 50
ROOT = Path(__file__).resolve().parents[2]


def script(seed: int) -> list[tuple[str, list[Write]]]:
    """What a child does with a seed, so that its parent knows it: stores, drops, and slots used again."""
    rng = random.Random(seed)
    maker = slots()
    steps: list[tuple[str, list[Write]]] = []
    held: list[Write] = []
    for number in range(0, 400, 4):
        nbytes = rng.choice([100, 5000, 30_000])
        batch = [block(maker.cut(nbytes), number + n, nbytes, n % 2) for n in range(4)]
        steps.append(("store", batch))
        held += batch
        if len(held) > 24:
            gone = [held.pop(rng.randrange(len(held))) for _ in range(4)]
            if rng.random() < 0.5:
                steps.append(("drop", gone))
            again = [
                block(maker.reuse(w.slot), 10_000 + 4 * number + n, w.data.nbytes) for n, w in enumerate(gone) if w.slot
            ]
            steps.append(("store", again))
            held += again
    return steps


def child(folder: Path, seed: int, durability: Literal["none", "data", "full"] = "none", steps: int = 1000) -> None:
    """Work the script through, telling the parent before and after each step."""
    say(folder, "start")
    with opened(folder, CAPACITY, durability) as tier:
        for number, (what, writes) in enumerate(script(seed)[:steps]):
            say(folder, f"begin {number}")
            if what == "drop":
                drop(tier, writes)
            else:
                assert tier.write(writes) == [None] * len(writes)
            say(folder, f"end {number}")
    say(folder, "closed")


def say(folder: Path, line: str) -> None:
    """Tell the parent; where all writes are logged, the log too."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    if logged := os.environ.get("IOLOG_FILE"):
        with open(logged, "ab") as file:
            file.write(f"said {line.replace(' ', ':')} 0 0\n".encode())


def command(folder: Path, seed: int, *more: str) -> list[str]:
    """How to start a child."""
    return [sys.executable, "-m", "tests.faults.test_disk_kill", str(folder), str(seed), *more]


def run_and_kill(folder: Path, seed: int, delay_s: float) -> list[str]:
    """Let a child work for a while after its first step, kill it, and return the lines it has written."""
    with subprocess.Popen(command(folder, seed), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        lines = [process.stdout.readline(), process.stdout.readline()]
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
    return [line.strip() for line in lines if line.endswith("\n")]


def verify(folder: Path, seed: int, lines: list[str]) -> int:
    """Open what a child left that said these lines: all acknowledged blocks are there, and nothing wrong is served."""
    steps = script(seed)
    acknowledged: dict[tuple[int, int], Write] = {}
    doubtful: set[tuple[int, int]] = set()
    for line in lines:
        word, _, number = line.partition(" ")
        if not number:
            continue
        what, writes = steps[int(number)]
        for write in writes:
            assert write.slot is not None
            place = (write.slot.segment, write.slot.offset_bytes)
            if word == "begin":
                doubtful.add(place)
            else:
                doubtful.discard(place)
                acknowledged.pop(place, None)
                if what == "store":
                    acknowledged[place] = write

    tier = tier_over(folder, CAPACITY)
    rows = listed(tier)
    try:
        expected = {stored(w) for place, w in acknowledged.items() if place not in doubtful}
        assert expected <= set(rows)
        assert {(s.slot.segment, s.slot.offset_bytes) for s in rows} <= acknowledged.keys() | doubtful
        outcomes = dict(zip(rows, read(tier, rows), strict=True))
        assert not any(outcomes[row] for row in expected)
        assert set(outcomes.values()) <= {None, MissReason.CORRUPT, MissReason.VANISHED}
        assert taken_bytes(folder) <= CAPACITY
    finally:
        tier.close()
    return len(expected)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(KILLS))
def test_what_was_acknowledged_survives_a_kill(tmp_path: Path, number: int, seed: int) -> None:
    rng = random.Random(seed + number)
    lines = run_and_kill(tmp_path, number, rng.random() * 0.2)
    verify(tmp_path, number, lines)


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_what_was_acknowledged_survives_500_kills(tmp_path: Path, part: int, seed: int) -> None:
    for number in range(50 * part, 50 * part + 50):
        rng = random.Random(seed + number)
        folder = tmp_path / str(number)
        folder.mkdir()
        verify(folder, number, run_and_kill(folder, number, rng.random() * 0.4))
        shutil.rmtree(folder)


FORK = """
import os, sys
from pathlib import Path
from typing import Literal
from tests.faults.test_disk_kill import CAPACITY, script, tier_over
folder = Path(sys.argv[1])
tier = tier_over(folder, CAPACITY)
tier.open()
tier.write(script(1)[0][1])
if os.fork() == 0:
    sys.exit(0)  # an ordinary end, in which everything is closed that can be
os.wait()
tier.write(script(1)[1][1])
os._exit(0)
"""


def test_the_end_of_a_forked_child_costs_its_parent_nothing(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORK, str(tmp_path)], cwd=ROOT, check=True, timeout=120)
    tier = tier_over(tmp_path, CAPACITY)
    assert set(tier.open()) == {stored(w) for _, writes in script(1)[:2] for w in writes}
    tier.close()


def test_a_child_that_is_let_finish_holds_what_its_script_says(tmp_path: Path) -> None:
    """So that the kills above are known to hit real work."""
    subprocess.run(
        command(tmp_path, 1),
        cwd=ROOT, check=True, stdout=subprocess.PIPE, timeout=120,
    )  # fmt: skip
    with opened(tmp_path, CAPACITY) as tier:
        places: dict[tuple[int, int], Write] = {}
        for what, writes in script(1):
            for w in writes:
                assert w.slot is not None
                places[w.slot.segment, w.slot.offset_bytes] = w
                if what == "drop":
                    del places[w.slot.segment, w.slot.offset_bytes]
        assert len(places) == 400
        assert read(tier, list(places.values())) == [None] * 400


if __name__ == "__main__":
    child(Path(sys.argv[1]), int(sys.argv[2]), *(sys.argv[3:4] or ["none"]), *map(int, sys.argv[4:]))  # type: ignore[arg-type]
