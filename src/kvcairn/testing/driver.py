"""Millions of random operations on a cache, as fast as they go: `python -m kvcairn.testing.driver --ops N --seed S`."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvcairn.config import BUILT_IN_EVICTIONS
from kvcairn.testing.faulty import Fault, FaultKind
from kvcairn.testing.operations import OPERATIONS
from kvcairn.testing.rig import BelowKind, LinkKind, Rig, Setup
from kvcairn.testing.table import Table, check, finish

CHECKED_EACH: Final = 50  # operations between two checks of the whole books
FINISHED_EACH: Final = 20_000  # operations between two moments at which nothing may be held
SIZES: Final = {"ample": (2048, 4096), "tight": (24, 40), "faulty": (24, 200)}  # blocks in memory, and below
FAULTS: Final = (
    Fault(kind=FaultKind.BLOCK_ERROR, rate=0.03, block_rate=0.3),
    Fault(kind=FaultKind.ALTERED, rate=0.03, block_rate=0.3),
    Fault(kind=FaultKind.SWAPPED, rate=0.03, block_rate=0.5),
    Fault(kind=FaultKind.SHORT, rate=0.03, block_rate=0.3),
    Fault(kind=FaultKind.LOST_ACK, rate=0.03, block_rate=0.3),
    Fault(kind=FaultKind.FALSE_ACK, rate=0.03, block_rate=0.3),
    Fault(kind=FaultKind.CORRUPT, ops=frozenset(["read"]), rate=0.03, block_rate=0.3),
    Fault(kind=FaultKind.LATE_ERROR, rate=0.01),
    Fault(kind=FaultKind.EMPTY_OUTCOMES, rate=0.01),
    Fault(kind=FaultKind.BUG, rate=0.01),
)


Case = tuple[str, BelowKind, bool, LinkKind]  # size, below, hybrid, link
Policy = tuple[str, int, str]  # write policy, number of tiers below memory, promotion

_BELOW: Final[tuple[BelowKind, ...]] = ("none", "dict", "disk")
_LINKS: Final[tuple[LinkKind, ...]] = ("direct", "loopback", "socket")
POLICIES: Final[tuple[Policy, ...]] = (
    ("through", 1, "keep"), ("back", 3, "keep"), ("selective", 1, "bypass"), ("back", 1, "move"),
    ("through", 3, "bypass"), ("none", 1, "keep"), ("selective", 3, "keep"), ("back", 3, "move"),
    ("back", 1, "keep"), ("none", 3, "keep"),
)  # fmt: skip
_CASES: Final[tuple[Case, ...]] = tuple(
    (size, below, hybrid, link)
    for size in SIZES
    for below in (_BELOW[1:] if size == "faulty" else _BELOW)
    for hybrid in (False, True)
    for link in _LINKS
)


def _setup(case: Case, policy: Policy, eviction: str) -> tuple[str, Setup]:
    """Return a cache, and its name."""
    size, below, hybrid, link = case
    write_policy, lower_tiers, promotion = policy
    tiers = "none" if below == "none" else f"{below}{lower_tiers}-{write_policy}-{promotion}"
    memory_blocks, below_blocks = SIZES[size]
    setup = Setup(
        link=link, below=below, hybrid=hybrid, memory_blocks=memory_blocks, below_blocks=below_blocks,
        faults=FAULTS if size == "faulty" else (), write_policy=write_policy, lower_tiers=lower_tiers,
        promotion=promotion, eviction=eviction,
    )  # fmt: skip
    return f"{size}-{tiers}-{eviction}-{'hybrid' if hybrid else 'plain'}-{link}", setup


def in_turn(number: int) -> tuple[Policy, str]:
    """Return what case `number` of a normal run is played with: write policies and eviction policies take turns."""
    return POLICIES[number % len(POLICIES)], BUILT_IN_EVICTIONS[number % len(BUILT_IN_EVICTIONS)]


# Each case with one pair of policies in turn, and for the long run each with all pairs.
SETUPS: Final = dict(_setup(case, *in_turn(number)) for number, case in enumerate(_CASES))
ALL_SETUPS: Final = dict(
    _setup(case, policy, eviction) for case in _CASES for policy in POLICIES for eviction in BUILT_IN_EVICTIONS
)


@dataclass(frozen=True, slots=True)
class RandomDraw:
    """Draws parameters from a seeded generator."""

    random: random.Random

    def integer(self, low: int, high: int) -> int:
        """Return a number from `low` to `high`, both included."""
        return low + int(self.random.random() * (high - low + 1))


class Report:
    """Adds to whatever goes wrong inside `with`: where it was, and how to repeat it.

    Args:
        table: whose last operations are shown.
        name: of the setup.
        ops: how many operations were to be played.
        seed: of the draws.
    """

    def __init__(self, table: Table, name: str, ops: int, seed: int) -> None:
        self.number = 0
        self._table, self._name, self._ops, self._seed = table, name, ops, seed

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            lines = "\n  ".join(self._table.log)
            error.add_note(
                f"{self._name}: operation {self.number} of {self._ops}; the last ones were\n  {lines}\n"
                f"repeat with: python -m kvcairn.testing.driver --setup {self._name} --ops {self._ops} "
                f"--seed {self._seed}"
            )


def drive(name: str, ops: int, seed: int) -> None:
    """Play `ops` random operations on the cache called `name` in `ALL_SETUPS`.

    Raises:
        AssertionError: something does not hold. This and any other error carries a note with the seed, the number of
            the operation and the last ones.
    """
    setup, is_ample = ALL_SETUPS[name], name.startswith("ample")
    draw = RandomDraw(random.Random(f"{seed} {name}"))
    operations = list(OPERATIONS.values())
    weights = [operation.weight for operation in operations]
    with tempfile.TemporaryDirectory(prefix="kvcairn-driver-") as folder, Rig(setup, Path(folder)) as rig:
        table = Table(rig, letters=2, depth=5 if is_ample else 8, is_ample=is_ample)
        with Report(table, name, ops, seed) as report:
            for report.number in range(1, ops + 1):
                operation = draw.random.choices(operations, weights)[0]
                if operation.is_possible(table):
                    operation.play(table, draw)
                if report.number % CHECKED_EACH == 0:
                    check(table, every_lease=False)
                if report.number % FINISHED_EACH == 0:
                    finish(table)
            finish(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Drive every chosen setup; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvcairn.testing.driver", description=__doc__)
    parser.add_argument("--ops", type=int, default=200_000, help="operations in all, shared by the setups")
    parser.add_argument("--seed", type=int, default=None, help="of all draws; printed, and random where not given")
    parser.add_argument(
        "--setup",
        action="append",
        choices=sorted(ALL_SETUPS),
        help="one; by default each size, tier, layout and link once",
    )
    options = parser.parse_args(arguments)
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    names = options.setup or list(SETUPS)
    for name in names:
        sys.stderr.write(f"{name}: {options.ops // len(names)} operations with seed {seed}\n")
        drive(name, options.ops // len(names), seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
