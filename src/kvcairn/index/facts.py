"""What an eviction policy may know of nodes: columns of the tree, one element for each row asked about."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcairn.index.arrays import Rows
from kvcairn.index.hinted import SHARED
from kvcairn.index.tree import Tree

_SPREAD = np.uint64(0x9E3779B97F4A7C15)


class NodeFacts:
    """The facts of one tree, as they are now."""

    def __init__(self, tree: Tree) -> None:
        """Read from that tree."""
        self._tree = tree

    def names(self, rows: Rows) -> npt.NDArray[np.uint64]:
        """Return 64 bits of each key, mixed with the space: two spaces may hold the same key."""
        nodes = self._tree.nodes
        words: npt.NDArray[np.uint64] = nodes.key[rows, :8].copy().view("<u8").ravel()
        spaces = nodes.space[rows].astype(np.uint64)
        return words ^ (spaces * _SPREAD)

    def parents(self, rows: Rows) -> Rows:
        """Return the row of each parent, negative where there is none."""
        return self._tree.nodes.parent[rows].astype(np.intp)

    def priorities(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """Return the hinted priorities."""
        found: npt.NDArray[np.uint8] = self._tree.nodes.hinted.priority[rows]
        return found

    def sessions(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """Return the numbers of the hinted sessions, 0 where there was none or several."""
        found: npt.NDArray[np.uint32] = self._tree.nodes.hinted.session[rows]
        return np.where(found == SHARED, np.uint32(0), found)
