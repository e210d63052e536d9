"""Events for readers: which copy became readable where, and which left."""

from __future__ import annotations

from collections import deque

from kvcairn.index.tree import Rows, Tree
from kvcairn.types import BlockEvent, BlockRemoved, BlockStored

MOST_EVENTS = 1 << 16


class Readers:
    """Queues of events, one for each reader; a reader that does not read loses the oldest."""

    def __init__(self, tree: Tree) -> None:
        """Start without readers."""
        self._tree = tree
        self._queues: dict[int, deque[BlockEvent]] = {}
        self._next = 0

    def number_from(self, first: int) -> None:
        """Give out numbers above `first`, so that those of another run are told from those of this one."""
        self._next = max(self._next, first)

    def add(self) -> int:
        """Return the number of a new reader."""
        self._next += 1
        self._queues[self._next] = deque(maxlen=MOST_EVENTS)
        return self._next

    def remove(self, reader: int) -> None:
        """Forget a reader."""
        self._queues.pop(reader, None)

    def take(self, reader: int) -> list[BlockEvent]:
        """Return and forget what has been collected."""
        queue = self._queues.get(reader)
        if queue is None:
            return []
        events = list(queue)
        queue.clear()
        return events

    def stored(self, tier: str, rows: Rows) -> None:
        """Copies became readable."""
        if self._queues:
            self._tell(BlockStored, tier, rows)

    def removed(self, tier: str, rows: Rows) -> None:
        """Copies left."""
        if self._queues:
            self._tell(BlockRemoved, tier, rows)

    def _tell(self, kind: type[BlockStored] | type[BlockRemoved], tier: str, rows: Rows) -> None:
        tree = self._tree
        for row in rows.tolist():
            event = kind(tier, tree.space_of(row).space_id, tree.key(row), tree.parent_key(row))
            for queue in self._queues.values():
                queue.append(event)
