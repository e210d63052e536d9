"""When a block is written to a tier below memory: one write policy each, and the budget of a day. Pure.

The policies carry the names of SGLang's HiCache (`--hicache-write-policy`): write_through, write_through_selective,
write_back. Times and counts are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Sights = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]

MOST_SIGHTS = 255  # a count of sights stays there
DAY_S = 86_400


class Admission(Protocol):
    """A write policy of one tier."""

    @property
    def takes_leavers(self) -> bool:
        """Whether a block is written when it is about to leave the faster tier that holds it."""
        ...

    @property
    def counts_sights(self) -> bool:
        """Whether it looks at the number of sights."""
        ...

    def at_sight(self, sights: Sights) -> Flags:
        """Say which of the blocks just seen are to be written, from how often each has been seen, this time included.

        Storing a block is its first sight; each hit, touch and further store is one more.
        """
        ...


@dataclass(frozen=True, slots=True)
class Through:
    """Written as soon as it is seen."""

    takes_leavers: bool = False
    counts_sights: bool = False

    def at_sight(self, sights: Sights) -> Flags:
        """All."""
        return np.ones(sights.size, dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class Selective:
    """Written once it has been seen `min_touches` times."""

    min_touches: int = 2
    takes_leavers: bool = False
    counts_sights: bool = True

    def at_sight(self, sights: Sights) -> Flags:
        """Those that were seen often enough."""
        return np.asarray(sights >= self.min_touches)


@dataclass(frozen=True, slots=True)
class Back:
    """Written when it is about to leave the faster tier."""

    takes_leavers: bool = True
    counts_sights: bool = False

    def at_sight(self, sights: Sights) -> Flags:
        """None."""
        return np.zeros(sights.size, dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class Nothing:
    """Never written."""

    takes_leavers: bool = False
    counts_sights: bool = False

    def at_sight(self, sights: Sights) -> Flags:
        """None."""
        return np.zeros(sights.size, dtype=np.bool_)


def admission(write_policy: str, min_touches: int = 2) -> Admission:
    """Return the write policy of that name.

    Raises:
        ValueError: there is none.
    """
    if write_policy == "selective":
        return Selective(min_touches)
    known: dict[str, Admission] = {"through": Through(), "back": Back(), "none": Nothing()}
    if write_policy not in known:
        raise ValueError(f"unknown write policy {write_policy!r}; there are through, selective, back, none")
    return known[write_policy]


@dataclass(slots=True)
class DayBudget:
    """How many bytes may still be written to a tier today.

    Attributes:
        limit_bytes: of a day; None for no limit.
        day: number of the day (UTC, since 1970) that `used_bytes` counts.
        used_bytes: spent on it.
    """

    limit_bytes: int | None = None
    day: int = 0
    used_bytes: int = 0

    def allows(self, nbytes: int, unix_s: float) -> bool:
        """Whether so many bytes more may be written; changes nothing but the day."""
        if self.limit_bytes is None:
            return True
        self._turn(unix_s)
        return self.used_bytes + nbytes <= self.limit_bytes

    def spend(self, nbytes: int, unix_s: float) -> None:
        """Count bytes that are about to be written."""
        self._turn(unix_s)
        self.used_bytes += nbytes

    def _turn(self, unix_s: float) -> None:
        """Begin a new day with nothing spent. A clock that was set back does not give the budget anew."""
        if (day := int(unix_s // DAY_S)) > self.day:
            self.day, self.used_bytes = day, 0
