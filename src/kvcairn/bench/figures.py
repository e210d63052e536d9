"""From timings to figures: alternating pairs, medians, quartiles, and when a measurement is void."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

PAIRS: Final = 41
ATTEMPTS: Final = 5
MOST_SPREAD: Final = 0.30  # of the reference; beyond it the host was too noisy


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured figure.

    Attributes:
        bench: What was run.
        name: What was measured.
        value: The median, in `unit`.
        unit: Unit of `value`, `reference`, `limit`, `low`, `high` and `wall`.
        reference: Median of what it is compared with, measured in the same run; None where there is none.
        ratio: Median over the pairs of value by reference.
        runs: Pairs behind the medians, or repetitions.
        limit: What the project promises: at most that where less is better, for rates the least ratio.
        low: Lower quartile of the value.
        high: Upper quartile of the value.
        spread: Distance of the reference's quartiles, as a part of its median.
        p99: The 99th percentile of the value.
        wall: The value by the clock on the wall, where `value` is CPU time.
        attempts: Measurements made until one was not void.
        noisy: The measurement does not count: the reference itself was not steady.
    """

    bench: str
    name: str
    value: float
    unit: str
    reference: float | None = None
    ratio: float | None = None
    runs: int = 1
    limit: float | None = None
    low: float | None = None
    high: float | None = None
    spread: float | None = None
    p99: float | None = None
    wall: float | None = None
    attempts: int = 1
    noisy: bool = False


class Time(msgspec.Struct, frozen=True):
    """How long something took: CPU time of the calling thread, and time on the wall, in nanoseconds."""

    cpu_ns: int
    wall_ns: int


Contender = Callable[[], Time]
"""Prepares, runs once what is to be measured, and returns how long that alone took."""


class Pairs(msgspec.Struct, frozen=True):
    """Timings of a contender and of its reference, pair by pair; `attempts` says how often it was measured."""

    ours: list[float]
    reference: list[float]
    attempts: int = 1

    @property
    def ratios(self) -> list[float]:
        """Time of ours by time of the reference, pair by pair."""
        return [a / b for a, b in zip(self.ours, self.reference, strict=True)]

    @property
    def spread(self) -> float:
        """Spread of the reference."""
        return spread(self.reference)

    @property
    def is_void(self) -> bool:
        """Whether the reference was not steady enough for anything to be said."""
        return self.spread > MOST_SPREAD


def timed(work: Callable[[], object]) -> Time:
    """Run `work` once and return how long it took."""
    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    work()
    return Time(time.thread_time_ns() - cpu, time.perf_counter_ns() - wall)


def alternate(ours: Contender, reference: Contender, pairs: int) -> list[tuple[Time, Time]]:
    """Time both in turn, `pairs` times; who goes first changes from pair to pair, so that a drift hits both."""
    timings = []
    for number in range(pairs):
        if number % 2:
            theirs, mine = reference(), ours()
        else:
            mine, theirs = ours(), reference()
        timings.append((mine, theirs))
    return timings


def measure(
    ours: Contender, reference: Contender, *, pairs: int = PAIRS, by_cpu: bool = False, attempts: int = ATTEMPTS
) -> tuple[Pairs, Pairs]:
    """Return pairs by the clock that counts, and the same by the wall; repeated while they are void.

    After `attempts` void ones the steadiest is returned, still void.
    """
    best: tuple[Pairs, Pairs] | None = None
    for attempt in range(1, attempts + 1):
        timings = alternate(ours, reference, pairs)
        walls = Pairs([a.wall_ns for a, _ in timings], [b.wall_ns for _, b in timings], attempt)
        counted = Pairs([a.cpu_ns for a, _ in timings], [b.cpu_ns for _, b in timings], attempt) if by_cpu else walls
        if best is None or counted.spread < best[0].spread:
            best = counted, walls
        if not counted.is_void:
            break
    assert best is not None, "at least one attempt"
    return best


def latency(bench: str, name: str, unit: str, limit: float, measured: tuple[Pairs, Pairs]) -> Figure:
    """Return the figure of a duration; `unit` is `ms` or `us`."""
    pairs, walls = measured
    per_unit = {"ms": 1e6, "us": 1e3}[unit]
    low, value, high = quartiles(pairs.ours)
    return Figure(
        bench=bench,
        name=name,
        value=value / per_unit,
        unit=unit,
        reference=statistics.median(pairs.reference) / per_unit,
        ratio=statistics.median(pairs.ratios),
        runs=len(pairs.ours),
        limit=limit,
        low=low / per_unit,
        high=high / per_unit,
        spread=pairs.spread,
        wall=statistics.median(walls.ours) / per_unit,
        attempts=pairs.attempts,
        noisy=pairs.is_void,
    )


def rate(bench: str, name: str, nbytes: int, limit: float | None, measured: tuple[Pairs, Pairs]) -> Figure:
    """Return the figure of a transfer of `nbytes` in GB/s; its ratio is ours to the reference, more is better."""
    pairs, _ = measured
    low, value, high = quartiles([nbytes / ns for ns in pairs.ours])
    return Figure(
        bench=bench,
        name=name,
        value=value,
        unit="GB/s",
        reference=statistics.median(nbytes / ns for ns in pairs.reference),
        ratio=statistics.median(1 / ratio for ratio in pairs.ratios),
        runs=len(pairs.ours),
        limit=limit,
        low=low,
        high=high,
        spread=pairs.spread,
        attempts=pairs.attempts,
        noisy=pairs.is_void,
    )


def cost(bench: str, name: str, times: Sequence[Time]) -> Figure:
    """Return the figure of what a call costs in microseconds of CPU time, compared with nothing."""
    low, value, high = quartiles([time.cpu_ns / 1e3 for time in times])
    wall = statistics.median(time.wall_ns / 1e3 for time in times)
    return Figure(bench=bench, name=name, value=value, unit="us", runs=len(times), low=low, high=high, wall=wall)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile; at least two values."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread(values: Sequence[float]) -> float:
    """Distance of the quartiles as a part of the median: unlike the extremes, one disturbed run does not move it."""
    low, middle, high = quartiles(values)
    return (high - low) / middle if middle else 0.0
