"""Facts of nodes that a test makes up."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcairn.policy.eviction.base import Names, Rows


class PlainFacts:
    """Facts for a policy that is tested alone: what a test sets here, and defaults for all else.

    Attributes:
        parent: by row.
        priority: hinted, by row.
        session: number of the hinted session, by row.
    """

    def __init__(self) -> None:
        """No parents, nothing hinted."""
        self.parent: dict[int, int] = {}
        self.priority: dict[int, int] = {}
        self.session: dict[int, int] = {}

    def names(self, rows: Rows) -> Names:
        """Return one name a row, well spread: a row always stands for the same block here."""
        names: Names = (rows.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        return names ^ (names >> np.uint64(29))

    def parents(self, rows: Rows) -> Rows:
        """Return the parents set, -1 elsewhere."""
        return np.array([self.parent.get(row, -1) for row in rows.tolist()], dtype=np.intp)

    def priorities(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """Return the priorities set, 50 elsewhere."""
        return np.array([self.priority.get(row, 50) for row in rows.tolist()], dtype=np.uint8)

    def sessions(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """Return the sessions set, 0 elsewhere."""
        return np.array([self.session.get(row, 0) for row in rows.tolist()], dtype=np.uint32)
