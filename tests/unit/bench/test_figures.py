"""Medians, quartiles and what makes a measurement void, on timings that are given."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest

from kvcairn.bench.figures import Pairs, Time, alternate, cost, latency, measure, quartiles, rate, spread, timed


def contender(nanoseconds: Iterable[int], wall_factor: int = 1) -> Callable[[], Time]:
    """A contender whose timings are the given ones, over and over."""
    times = itertools.cycle(nanoseconds)

    def run() -> Time:
        cpu_ns = next(times)
        return Time(cpu_ns, wall_factor * cpu_ns)

    return run


def test_spread_is_that_of_the_quartiles() -> None:
    assert quartiles([1, 2, 3, 4, 5]) == (2, 3, 4)
    assert spread([10, 10, 10, 10]) == 0
    assert spread([1, 2, 3, 4, 5]) == pytest.approx(2 / 3)


def test_one_disturbed_run_does_not_void_a_measurement() -> None:
    assert not Pairs([100.0] * 9, [100.0] * 8 + [9000.0]).is_void
    assert Pairs([100.0] * 9, [100.0, 100.0, 100.0, 150.0, 200.0, 200.0, 200.0, 200.0, 150.0]).is_void


def test_an_unsteady_candidate_alone_voids_nothing() -> None:
    assert not Pairs([1.0, 100.0, 1.0, 100.0], [5.0, 5.0, 5.0, 5.0]).is_void


def test_ratios_are_taken_pair_by_pair() -> None:
    assert Pairs([2.0, 30.0], [1.0, 10.0]).ratios == [2.0, 3.0]


def test_who_goes_first_changes() -> None:
    order: list[str] = []

    def named(name: str) -> Callable[[], Time]:
        def run() -> Time:
            order.append(name)
            return Time(1, 1)

        return run

    timings = alternate(named("ours"), named("reference"), 3)
    assert len(timings) == 3
    assert order == ["ours", "reference", "reference", "ours", "ours", "reference"]


def test_a_void_measurement_is_repeated_until_it_is_steady() -> None:
    unsteady, steady = [100, 300] * 5, [100] * 10
    reference = contender([*unsteady, *unsteady, *steady])
    pairs, _ = measure(contender([50]), reference, pairs=10)
    assert (pairs.attempts, pairs.is_void, len(pairs.ours)) == (3, False, 10)


def test_the_steadiest_of_void_measurements_is_kept_and_stays_void() -> None:
    reference = contender([100, 900] * 5 + [100, 300] * 5 + [100, 900] * 5)
    measured = measure(contender([50]), reference, pairs=10, attempts=3)
    assert (measured[0].attempts, measured[0].is_void) == (2, True)
    assert latency("b", "n", "us", 1.0, measured).noisy
    assert rate("b", "n", 1, 0.9, measured).noisy


def test_the_clock_that_counts_is_the_one_asked_for() -> None:
    by_cpu = measure(contender([100], wall_factor=3), contender([100], wall_factor=3), pairs=9, by_cpu=True)
    by_wall = measure(contender([100], wall_factor=3), contender([100], wall_factor=3), pairs=9)
    assert (by_cpu[0].ours[0], by_cpu[1].ours[0], by_wall[0].ours[0]) == (100, 300, 300)


def test_a_latency_is_told_in_its_unit() -> None:
    measured = measure(contender([40_000], 2), contender([20_000], 2), pairs=9, by_cpu=True)
    figure = latency("lookup", "found", "us", 60.0, measured)
    assert (figure.value, figure.reference, figure.ratio, figure.wall) == (40, 20, 2, 80)
    assert (figure.low, figure.high, figure.spread, figure.runs, figure.limit) == (40, 40, 0, 9, 60)
    assert not figure.noisy
    assert latency("lookup", "found", "ms", 1.0, measured).value == pytest.approx(0.04)


def test_a_rate_is_better_when_it_is_higher() -> None:
    figure = rate("memory", "store", 8000, 0.9, measure(contender([2000]), contender([1000]), pairs=9))
    assert (figure.value, figure.reference, figure.ratio, figure.unit) == (4, 8, 0.5, "GB/s")


def test_timed_runs_the_work_once_and_reads_both_clocks() -> None:
    runs: list[int] = []
    time = timed(lambda: runs.append(sum(range(20_000))))
    assert len(runs) == 1
    assert time.wall_ns > 0
    assert time.cpu_ns > 0


def test_what_a_call_costs_is_cpu_time() -> None:
    figure = cost("memory", "store_call", [Time(cpu, 2 * cpu) for cpu in (1000, 2000, 3000, 4000, 5000)])
    assert (figure.low, figure.value, figure.high, figure.wall, figure.unit) == (2, 3, 4, 6, "us")
    assert (figure.reference, figure.ratio, figure.noisy) == (None, None, False)
