"""First in, first out."""

from __future__ import annotations

from collections.abc import Iterator

from kvcairn.policy.eviction.base import EvictionPolicy, Facts, Rows
from kvcairn.policy.eviction.queues import RowQueues


class FIFO(EvictionPolicy):
    """The one that has been here longest first, however often it was used."""

    def __init__(self, facts: Facts) -> None:
        """Start empty."""
        super().__init__(facts)
        self._queues = RowQueues(1)

    def add(self, rows: Rows, now_s: float) -> None:
        """Append the rows."""
        self._queues.push(0, rows)

    def touch(self, rows: Rows, now_s: float) -> None:
        """Do nothing: use does not count."""

    def remove(self, rows: Rows) -> None:
        """Forget the rows."""
        self._queues.remove(rows)

    def defer(self, rows: Rows) -> None:
        """Let them queue once more."""
        self._queues.push(0, self._queues.here(rows))

    def candidates(self) -> Iterator[int]:
        """Yield rows, the first to have come first."""
        return self._queues.oldest(0)

    def __len__(self) -> int:
        """Number of resident nodes."""
        return len(self._queues)
