"""The contract of an eviction policy: an order over the resident nodes of one tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.intp]


class EvictionPolicy(ABC):
    """Keeps the order in which the nodes of one tier should go. Constructed without arguments, one per tier.

    Nodes are named by their row in the index, a small whole number that is used again after `remove`. Calls come
    from one thread at a time and never block. A policy does not know about leases and children: its caller passes
    over candidates that may not go, and takes them out with `remove` when they do.

    Each array of rows is part of one chain, root side first. Where the order leaves a choice, a later row of the
    same call goes before an earlier one, so that leaves go before their parents.
    """

    @abstractmethod
    def add(self, rows: Rows, now_s: float) -> None:
        """Nodes became resident on the tier. None of them is resident already."""

    @abstractmethod
    def touch(self, rows: Rows, now_s: float) -> None:
        """Nodes were used. Those that are not resident are passed over."""

    @abstractmethod
    def remove(self, rows: Rows) -> None:
        """Nodes left the tier. Those that are not resident are passed over."""

    @abstractmethod
    def candidates(self) -> Iterator[int]:
        """Yield every resident row once, the first to go first. Changes no order; stop reading before the next call."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of resident nodes."""
