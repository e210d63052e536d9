"""What clients told of blocks: columns beside those of the tree."""

from __future__ import annotations

from kvcairn.index.arrays import Rows, column, grown

PRIORITY = 50  # where no hint says otherwise
SHARED = 0xFFFF_FFFF  # named by several sessions: the end of one says nothing of the block


class Hinted:
    """One element a row.

    `priority` is 0 to 100; `session` a number, 0 where none was named and SHARED where several were; `expires_s` a
    time, 0 for never.
    """

    def __init__(self, rows: int) -> None:
        """Nothing is hinted."""
        self.priority = column("u1", rows, PRIORITY)
        self.session = column("u4", rows)
        self.expires_s = column("f8", rows)

    def grow(self, rows: int) -> None:
        """Follow the tree."""
        self.priority, self.session = grown(self.priority, rows, PRIORITY), grown(self.session, rows)
        self.expires_s = grown(self.expires_s, rows)

    def clear(self, row: int | Rows) -> None:
        """Forget what was hinted for rows."""
        self.priority[row], self.session[row], self.expires_s[row] = PRIORITY, 0, 0
