"""Load or recompute: how fast tiers are read and an engine computes, and how much of a hit is worth loading. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.float64]
Lengths = npt.NDArray[np.intp]

MIB = 1 << 20
STEP = 0.3  # of the filter
HALF_LIFE_TOKENS = 4096  # after so many more, what was reported about computing before counts half
LEAST_GAIN_S = 0.05  # a cut that would save less than that, or a tenth of computing, is not made
LEAST_PART = 0.1
FRESH_S = 10.0  # after so long without a sample the belief that a tier is slow halves, again and again
PATIENCE = 2.0  # times what computing would take; the bound of ski rental, with a constant for small loads
PATIENCE_S = 0.25


@dataclass(frozen=True, slots=True)
class Sample:
    """A read on its way: bytes ahead of its end, itself included, and when it began."""

    nbytes: int
    ahead_bytes: int
    begin_s: float


@dataclass(slots=True)
class ReadSpeed:
    """How long reads of one tier take: latency + bytes outstanding * seconds a byte, so that the queue is in it.

    A normalized least-mean-squares filter with two weights (Haykin, Adaptive Filter Theory, chapter 6): it follows a
    tier that changes, and no old measurement weighs on it for ever.

    Attributes:
        latency_s: of a read, however small.
        mib_s: seconds a MiB.
        outstanding_bytes: asked for and not there yet.
        last_s: time of the last sample; None while nothing is measured.
    """

    latency_s: float = 0.0
    mib_s: float = 0.0
    outstanding_bytes: int = 0
    last_s: float | None = None

    def begin(self, nbytes: int, now_s: float) -> Sample:
        """A read of so many bytes was asked for."""
        self.outstanding_bytes += nbytes
        return Sample(nbytes, self.outstanding_bytes, now_s)

    def end(self, sample: Sample, now_s: float) -> None:
        """It has ended, with its bytes."""
        self.forget(sample)
        size, took_s = sample.ahead_bytes / MIB, max(0.0, now_s - sample.begin_s)
        step = 1.0 if self.last_s is None else STEP
        wrong_s = step * (took_s - self.latency_s - size * self.mib_s) / (1 + size * size)
        self.latency_s = max(0.0, self.latency_s + wrong_s)
        self.mib_s = max(0.0, self.mib_s + wrong_s * size)
        self.last_s = now_s

    def forget(self, sample: Sample) -> None:
        """It was taken back, or failed: that says nothing about the speed."""
        self.outstanding_bytes -= sample.nbytes

    def estimate_s(self, nbytes: Bytes, now_s: float) -> Bytes:
        """Return how long reads of so many bytes, asked for now, would take; 0 where nothing is read or known."""
        if self.last_s is None:
            return np.zeros_like(nbytes)
        belief = 0.5 ** max(0.0, (now_s - self.last_s) / FRESH_S - 1)
        took_s = self.latency_s + (self.outstanding_bytes + nbytes) / MIB * self.mib_s
        return np.where(nbytes > 0, belief * took_s, 0.0)


@dataclass(slots=True)
class PrefillSpeed:
    """How fast an engine computes KV: decayed sums of what it reported."""

    tokens: float = 0.0
    seconds: float = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """So many tokens were computed in so many seconds."""
        decay = 0.5 ** (tokens / HALF_LIFE_TOKENS)
        self.tokens = decay * self.tokens + tokens
        self.seconds = decay * self.seconds + seconds

    def compute_s(self, tokens: int) -> float:
        """Return how long computing so many tokens takes."""
        return self.seconds / self.tokens * tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of a hit is loaded.

    Attributes:
        length: blocks.
        tier: that would take longest for all of the hit.
        load_s: how long loading all of it would take.
        compute_s: how long computing what is left out takes.
    """

    length: int
    tier: str
    load_s: float
    compute_s: float


def plan(lengths: Lengths, reads: Mapping[str, tuple[ReadSpeed, Bytes]], block_s: float, now_s: float) -> Plan | None:
    """Choose the length that is there first: what is loaded comes from all tiers at once, the rest is computed then.

    Args:
        lengths: that can be restored, ascending, 0 the first.
        reads: by tier its speed, and the bytes that each length reads from it.
        block_s: time to compute one block.
        now_s: the time.

    Returns:
        None where all of it is worth loading.
    """
    by_tier = {name: speed.estimate_s(nbytes, now_s) for name, (speed, nbytes) in reads.items()}
    loads = np.maximum.reduce(list(by_tier.values()))
    ends = loads + (lengths[-1] - lengths) * block_s
    best = int(ends.size - 1 - ends[::-1].argmin())
    compute_s = float(lengths[-1] - lengths[best]) * block_s
    if ends[-1] - ends[best] <= max(LEAST_GAIN_S, LEAST_PART * compute_s):
        return None
    slowest = max(by_tier, key=lambda name: float(by_tier[name][-1]))
    return Plan(int(lengths[best]), slowest, float(loads[-1]), compute_s)


def patience_s(compute_s: float) -> float:
    """Return how long a load that would save `compute_s` is waited for, whatever was expected of it.

    As in ski rental, one that is given up costs a bounded multiple of what computing at once would have cost.
    """
    return PATIENCE_S + PATIENCE * compute_s
