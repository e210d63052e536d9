"""The contract of an eviction policy: an order over the resident nodes of one tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.intp]
Names = npt.NDArray[np.uint64]


class Facts(Protocol):
    """What a policy may know of nodes beyond what it is told: arrays, one element for each row asked about."""

    def names(self, rows: Rows) -> Names:
        """Return 64 bits that stand for each block, the same ones when it comes again under another row."""
        ...

    def parents(self, rows: Rows) -> Rows:
        """Return the row of the block before each one, negative where there is none or it is not known."""
        ...

    def priorities(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """Return the hinted priorities, 0 (goes first) to 100, 50 where nothing was hinted."""
        ...

    def sessions(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """Return a number for the hinted session of each block, 0 where nothing was hinted."""
        ...


class EvictionPolicy(ABC):
    """Keeps the order in which the nodes of one tier should go. One for each tier, made as `Policy(facts)`.

    Nodes are named by their row in the index, a small whole number that is used again after `remove`. Calls come
    from one thread at a time and never block. A policy does not know about leases and children: its caller passes
    over candidates that may not go, and takes them out with `evict` when they do.

    Each array of rows is part of one chain, root side first, no row twice. Where the order leaves a choice, a later
    row of the same call goes before an earlier one, so that leaves go before their parents.

    Args:
        facts: about nodes, true at any moment.
    """

    def __init__(self, facts: Facts) -> None:
        """Start empty."""
        self._facts = facts

    @abstractmethod
    def add(self, rows: Rows, now_s: float) -> None:
        """Nodes became resident on the tier. None of them is resident already. This is their first use."""

    @abstractmethod
    def touch(self, rows: Rows, now_s: float) -> None:
        """Nodes were used once more. Those that are not resident are passed over."""

    def refresh(self, rows: Rows, now_s: float) -> None:
        """The last use of these nodes goes on: more recent, but no further use. Nothing, unless overridden."""
        del rows, now_s

    def hint(self, rows: Rows, ends_session: bool, now_s: float) -> None:
        """The hints of these nodes changed, and their session may have ended. Nothing, unless overridden."""
        del rows, ends_session, now_s

    @abstractmethod
    def remove(self, rows: Rows) -> None:
        """Nodes left the tier for a reason of their own. Those that are not resident are passed over."""

    def evict(self, rows: Rows) -> None:
        """Nodes left because there was no room. The same as `remove`, unless overridden."""
        self.remove(rows)

    def defer(self, rows: Rows) -> None:
        """Candidates that were met and may not go now. To be overridden by moving them to where they are met later.

        Without that each eviction would meet all of them again. Those that are not resident are passed over.
        """
        del rows

    @abstractmethod
    def candidates(self) -> Iterator[int]:
        """Yield every resident row once, the first to go first. Changes no order; stop reading before the next call."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of resident nodes."""
