"""Columns of one tier and one layer group: where the copy of each block lies, in which state, held by how many."""

from __future__ import annotations

import numpy as np

from kvcairn.index.arrays import column, grown

NO_SLOT = -1


class Copies:
    """One element a row of the tree.

    `slot` is an address in the tier, `state` a `CopyState`, `pins` the leases, reservations and jobs that hold the
    copy, `busy` its writer and the transfers that read it, `children` the READY copies of children on the same tier,
    `checksum` xxh3-128 of the bytes (zeros: not computed yet).
    """

    def __init__(self, rows: int) -> None:
        """No copies yet."""
        self.slot = column("i4", rows, NO_SLOT)
        self.state = column("u1", rows)
        self.pins = column("i4", rows)
        self.busy = column("u2", rows)
        self.children = column("i4", rows)
        self.checksum = np.zeros((rows + 1, 16), dtype=np.uint8)

    def grow(self, rows: int) -> None:
        """Follow the tree."""
        self.slot, self.state = grown(self.slot, rows, NO_SLOT), grown(self.state, rows)
        self.pins, self.busy = grown(self.pins, rows), grown(self.busy, rows)
        self.children, self.checksum = grown(self.children, rows), grown(self.checksum, rows)
