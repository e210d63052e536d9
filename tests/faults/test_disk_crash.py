"""The disk tier killed at every kind of call it makes, after power loss at any moment, and with calls that fail."""

from __future__ import annotations

import errno
import random
import re
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from kvcairn.errors import TierError
from kvcairn.tiers.base import Write
from tests.faults.iolog import Call, build, environment, prefixes, read_log
from tests.faults.test_disk_kill import CAPACITY, ROOT, command, verify
from tests.unit.tiers.disk.kit import blocks, found, opened, read, slots, stored

SEED = 3
POWER_STEPS, LONG_POWER_STEPS = 24, 150


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled library."""
    return build(tmp_path_factory.mktemp("iolog"))


def calls_of(library: Path, folder: Path, *more: str) -> list[Call]:
    """Run a child to its end in a new folder and return its calls."""
    (folder / "tier").mkdir(parents=True)
    env = environment(library, folder / "tier", file=folder / "log")
    subprocess.run(command(folder / "tier", SEED, *more), cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE)
    return read_log(folder / "log")


@pytest.fixture(scope="session")
def calls(library: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """Every call of a child that works its script through."""
    made = calls_of(library, tmp_path_factory.mktemp("calls"), "data")
    return [call for call in made if call.op != "said"]


def kill_at(library: Path, folder: Path, number: int, part: int) -> list[str]:
    """Let a child die at a call; return what it had said."""
    env = environment(library, folder, kill=number, part=part)
    done = subprocess.run(
        command(folder, SEED, "data"), cwd=ROOT, env=env, check=False, stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == -signal.SIGKILL
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1, 2], ids=["before", "half", "after"])
def test_a_kill_at_every_kind_of_call_loses_nothing(
    library: Path, calls: list[Call], tmp_path: Path, part: int, seed: int
) -> None:
    kinds: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for number, call in enumerate(calls):
        kinds[call.op, re.sub("[0-9]+", "", call.name)].append(number)
    assert {("write", "seg-.kv"), ("sync", "seg-.kv"), ("reserve", "seg-.kv"), ("write", "index.sqlite-wal")} <= set(
        kinds
    )
    rng = random.Random(seed)
    for place, (kind, numbers) in enumerate(kinds.items()):
        folder = tmp_path / str(place)
        folder.mkdir()
        lines = kill_at(library, folder, rng.choice(numbers), part)
        try:
            verify(folder, SEED, lines)
        except AssertionError as error:
            raise AssertionError(f"killed at {kind}") from error


@pytest.mark.long
@pytest.mark.parametrize("part", range(10))
def test_a_kill_at_any_of_500_calls_loses_nothing(
    library: Path, calls: list[Call], tmp_path: Path, part: int, seed: int
) -> None:
    rng = random.Random(seed + part)
    for turn in range(50):
        folder = tmp_path / str(turn)
        folder.mkdir()
        number, part = rng.randrange(len(calls)), rng.randrange(3)
        verify(folder, SEED, kill_at(library, folder, number, part))


def lose_power_everywhere(calls: list[Call], folder: Path, rng: random.Random) -> None:
    most = 0
    for turn, (device, said) in enumerate(prefixes(calls)):
        for kept in ("none", "all", "some"):
            place = folder / f"{turn}-{kept}"
            place.mkdir()
            for name, content in device.after_power_loss(kept, rng).items():
                (place / name).write_bytes(content)
            try:
                most = max(most, verify(place, SEED, said))
            except AssertionError as error:
                raise AssertionError(f"after call {turn}, {kept} of the unsynced calls kept") from error
            for path in place.iterdir():
                path.unlink()
            place.rmdir()
    assert most > 40  # so that there was something to lose


@pytest.mark.slow
def test_power_loss_at_any_call_loses_nothing_acknowledged(library: Path, tmp_path: Path, seed: int) -> None:
    calls = calls_of(library, tmp_path, "data", str(POWER_STEPS))
    lose_power_everywhere(calls, tmp_path, random.Random(seed))


@pytest.mark.long
def test_power_loss_at_any_call_of_a_long_run(library: Path, tmp_path: Path, seed: int) -> None:
    calls = calls_of(library, tmp_path, "data", str(LONG_POWER_STEPS))
    lose_power_everywhere(calls, tmp_path, random.Random(seed))


def endure(folder: Path) -> None:
    """Store until all is stored, whatever fails for a while; what was acknowledged stays readable."""
    maker, held = slots(), list[Write]()
    with opened(folder, CAPACITY, "data") as tier:
        for turn in range(20):
            left = blocks(maker, range(4 * turn, 4 * turn + 4))
            for _ in range(20):
                try:
                    outcomes = tier.write(left)
                except TierError as error:
                    outcomes = [error] * len(left)
                assert all(outcome is None or isinstance(outcome, TierError) for outcome in outcomes)
                held += [w for w, outcome in zip(left, outcomes, strict=True) if outcome is None]
                left = [w for w, outcome in zip(left, outcomes, strict=True) if outcome is not None]
                assert read(tier, held) == [None] * len(held)
                if not left:
                    break
            assert not left


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_calls_that_fail_for_a_while_cost_only_the_while(library: Path, tmp_path: Path, code: int, seed: int) -> None:
    rng = random.Random(seed)
    for turn in range(4):
        folder = tmp_path / str(turn)
        folder.mkdir()
        env = environment(library, folder, fail=rng.randrange(60, 100), times=rng.choice([1, 3, 12]), errno=code)
        arguments = [sys.executable, "-m", "tests.faults.test_disk_crash", str(folder)]
        done = subprocess.run(arguments, cwd=ROOT, env=env, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert {stored(w) for w in blocks(slots(), range(80))} == set(found(folder))


if __name__ == "__main__":
    endure(Path(sys.argv[1]))
