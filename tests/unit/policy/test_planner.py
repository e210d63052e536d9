from __future__ import annotations

import random

import numpy as np
import pytest

from kvcairn.policy.planner import MIB, PATIENCE, PATIENCE_S, PrefillSpeed, ReadSpeed, patience_s, plan


def measured(latency_s: float, mib_s: float, now_s: float = 0.0) -> ReadSpeed:
    return ReadSpeed(latency_s=latency_s, mib_s=mib_s, last_s=now_s)


def reads(speed: ReadSpeed, blocks: int, nbytes: int = MIB) -> dict[str, tuple[ReadSpeed, np.ndarray]]:
    return {"disk": (speed, np.arange(blocks + 1) * float(nbytes))}


def estimate(speed: ReadSpeed, mib: float, now_s: float = 0.0) -> float:
    return float(speed.estimate_s(np.array([mib * MIB]), now_s)[0])


@pytest.mark.parametrize(("latency_s", "mib_s"), [(0.01, 0.001), (0.2, 0.05), (0.0, 0.5), (1.0, 0.0)])
def test_latency_and_rate_are_learnt_from_reads_of_any_size(latency_s: float, mib_s: float) -> None:
    rng, speed, now_s = random.Random(1), ReadSpeed(), 0.0
    for _ in range(2000):
        mib = rng.choice([1, 2, 4, 8, 16])
        sample = speed.begin(mib * MIB, now_s)
        now_s += latency_s + mib * mib_s
        speed.end(sample, now_s)
    for mib in (1, 16):
        assert estimate(speed, mib, now_s) == pytest.approx(latency_s + mib * mib_s, rel=0.05, abs=1e-4)


def test_a_tier_that_becomes_slower_is_believed_soon() -> None:
    speed, now_s = ReadSpeed(), 0.0
    for turn in range(40):
        sample = speed.begin(4 * MIB, now_s)
        now_s += 0.01 if turn < 20 else 1.0
        speed.end(sample, now_s)
        if turn == 19:
            assert estimate(speed, 4, now_s) == pytest.approx(0.01, rel=0.05)
    assert estimate(speed, 4, now_s) == pytest.approx(1.0, rel=0.05)


def test_what_waits_before_it_counts() -> None:
    speed = measured(0.0, 0.01)
    idle = estimate(speed, 1)
    first = speed.begin(9 * MIB, 0.0)
    assert estimate(speed, 1) == pytest.approx(10 * idle)
    speed.forget(first)
    assert (estimate(speed, 1), speed.outstanding_bytes) == (idle, 0)


def test_nothing_is_expected_of_a_tier_that_was_never_read_and_belief_fades() -> None:
    assert estimate(ReadSpeed(), 100) == 0
    speed = measured(1.0, 0.0, now_s=0.0)
    assert estimate(speed, 1, now_s=5.0) == 1.0
    assert estimate(speed, 1, now_s=30.0) == pytest.approx(0.25)
    assert estimate(speed, 0, now_s=0.0) == 0, "what reads nothing waits for nothing"


def test_recent_reports_of_computing_count_most() -> None:
    prefill = PrefillSpeed()
    for seconds in [1.0] * 30 + [0.1] * 30:
        prefill.note(1000, seconds)
    assert prefill.compute_s(1000) == pytest.approx(0.1, rel=0.1)
    prefill.note(1, 1.0)
    assert prefill.compute_s(1000) < 0.5, "one token is no measurement to forget others for"


def test_all_is_loaded_where_that_is_faster() -> None:
    assert plan(np.arange(101), reads(measured(0.01, 0.001), 100), 0.1, 0.0) is None


def test_nothing_is_loaded_where_computing_is_faster() -> None:
    chosen = plan(np.arange(101), reads(measured(0.5, 0.1), 100), 0.01, 0.0)
    assert chosen is not None and (chosen.length, chosen.tier) == (0, "disk")
    assert [chosen.load_s, chosen.compute_s] == pytest.approx([10.5, 1.0])


def test_what_comes_from_a_fast_tier_is_loaded_and_what_lies_behind_on_a_slow_one_computed() -> None:
    lengths = np.arange(101)
    fast = measured(0.0, 0.001), np.minimum(lengths, 60) * float(MIB)
    slow = measured(5.0, 0.5), np.maximum(lengths - 60, 0) * float(MIB)
    chosen = plan(lengths, {"fast": fast, "slow": slow}, 0.05, 0.0)
    assert chosen is not None and (chosen.length, chosen.tier) == (60, "slow")


def test_only_lengths_that_can_be_restored_are_chosen() -> None:
    lengths = np.array([0, 16, 32])
    blocks = {"disk": (measured(0.0, 0.5), lengths * float(MIB)), "fast": (measured(0.0, 0.0), lengths * 0.0)}
    blocks["disk"][1][1] = 0.0
    chosen = plan(lengths, blocks, 0.01, 0.0)
    assert chosen is not None and chosen.length == 16


@pytest.mark.parametrize(("load_s", "is_cut"), [(1.04, False), (1.09, False), (1.2, True)])
def test_a_gain_that_is_small_is_left_alone(load_s: float, is_cut: bool) -> None:
    chosen = plan(np.arange(11), reads(measured(load_s, 0.0), 10), 0.1, 0.0)
    assert (chosen is not None) == is_cut


def test_the_choice_is_the_best_of_all_lengths() -> None:
    rng = random.Random(7)
    for _ in range(200):
        blocks = rng.randrange(1, 60)
        speeds = [measured(rng.random(), rng.random() / 20) for _ in range(2)]
        home = np.array([rng.randrange(2) for _ in range(blocks)])
        nbytes = [np.concatenate([[0.0], np.cumsum(home == tier) * float(MIB)]) for tier in range(2)]
        block_s = rng.random() / 10
        chosen = plan(np.arange(blocks + 1), {str(t): (speeds[t], nbytes[t]) for t in range(2)}, block_s, 0.0)
        ends = [
            max(speeds[t].latency_s + nbytes[t][k] / MIB * speeds[t].mib_s if nbytes[t][k] else 0 for t in range(2))
            + (blocks - k) * block_s
            for k in range(blocks + 1)
        ]
        length = blocks if chosen is None else chosen.length
        assert ends[length] <= min(ends) + max(0.05, 0.1 * (blocks - int(np.argmin(ends))) * block_s) + 1e-9
        if chosen is not None:
            assert ends[length] == pytest.approx(min(ends))


def test_patience_is_a_multiple_of_what_would_be_saved() -> None:
    assert patience_s(3.0) == PATIENCE_S + PATIENCE * 3.0
