"""Any sequence of operations against a plain dictionary, through the direct call and the serialising loopback.

20,000 steps in the normal run, shared by all setups.
"""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

from kvcairn.config import BUILT_IN_EVICTIONS
from kvcairn.testing.driver import POLICIES, Policy, in_turn
from kvcairn.testing.machine import CacheMachine
from kvcairn.testing.rig import BelowKind, LinkKind, Setup

pytestmark = pytest.mark.filterwarnings("ignore:eviction 'lfu'")

STEPS = 20_000
LONG_STEPS = 200  # of each case with each pair of policies
STEPS_PER_EXAMPLE = 50
LINKS: tuple[LinkKind, ...] = ("direct", "loopback", "socket")
BELOW: tuple[BelowKind, ...] = ("none", "dict", "disk")
CASES = [
    (size, below, hybrid, link)
    for size in ("ample", "tight")
    for below in BELOW
    for hybrid in (False, True)
    for link in LINKS
]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)))
def test_machine(number: int, fixed_seed: int) -> None:
    """Each case, with the write policies, numbers of tiers and eviction policies in turn."""
    play(*CASES[number], *in_turn(number), STEPS // len(CASES), fixed_seed)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("eviction", BUILT_IN_EVICTIONS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("size", "below", "hybrid", "link"), [case for case in CASES if case[1] != "none"])
def test_machine_long(
    size: str, below: BelowKind, hybrid: bool, link: LinkKind, policy: Policy, eviction: str, seed: int
) -> None:
    play(size, below, hybrid, link, policy, eviction, LONG_STEPS, seed)


def play(
    size: str, below: BelowKind, hybrid: bool, link: LinkKind, policy: Policy, eviction: str, steps: int, seed: int
) -> None:
    is_tight = size == "tight"
    chosen = Setup(
        link=link,
        below=below,
        hybrid=hybrid,
        memory_blocks=16 if is_tight else 1024,
        below_blocks=24 if is_tight else 1024,
        write_policy=policy[0],
        lower_tiers=policy[1],
        promotion=policy[2],
        eviction=eviction,
    )

    class Machine(CacheMachine):
        setup = chosen
        is_ample = not is_tight
        depth = 7 if is_tight else 5

    settings = hypothesis.settings(
        max_examples=2 * steps // STEPS_PER_EXAMPLE,  # some end before they have all their steps
        stateful_step_count=STEPS_PER_EXAMPLE,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    seeded = hypothesis.seed(seed)
    run_state_machine_as_test(seeded(Machine), settings=settings)
    assert Machine.steps >= steps
