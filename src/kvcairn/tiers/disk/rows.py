"""The rows of an open folder: the index, made anew when it turns out damaged, and what was cleared."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from kvcairn.tiers.base import BlockRef, Slot, Stored
from kvcairn.tiers.disk import recovery
from kvcairn.tiers.disk.epochs import Epochs
from kvcairn.tiers.disk.folder import Folder
from kvcairn.tiers.disk.index import Index, is_damage
from kvcairn.tiers.disk.segments import Segments
from kvcairn.tiers.inventory import Inventory

Result = TypeVar("Result")


class Rows:
    """What is known of a folder's copies. Any thread; every method blocks and may raise `sqlite3.Error` and `OSError`.

    Attributes:
        epochs: what was cleared.
        unlisted: segments, and their bytes, of which there are no rows yet; the index is complete once there are none.
    """

    def __init__(self, folder: Folder, segments: Segments, synchronous: str) -> None:
        """Look at nothing yet; `open` comes once the folder is owned."""
        self.epochs = Epochs(folder.path)
        self._folder, self._segments, self._synchronous = folder, segments, synchronous
        self._index: Index | None = None
        self._healing = threading.Lock()
        self._is_closed = False
        self.unlisted: dict[int, int] = {}

    def open(self) -> Inventory:
        """Bring rows and files into agreement and return what there is, but for the unlisted segments."""
        self.epochs.load()
        recovered = recovery.recover(self._folder, self._segments, self.epochs, self._synchronous)
        self._index, self.unlisted = recovered.index, dict(recovered.unlisted)
        found = recovered.found
        recovery.remove_orphans(self._segments, set(found.place[:, 0].tolist()) | self.unlisted.keys())
        return found

    def close(self) -> None:
        """Fold the log into the index, and let the folder go."""
        self._is_closed = True
        try:
            if self._index:
                self._index.close()
        finally:
            self._folder.release()

    def overhead_bytes(self) -> int:
        """Return what may come to lie in the folder beside the segments."""
        return self._folder.overhead_bytes(self._opened, self._segments)

    def load(self) -> Inventory:
        """Return every row."""
        return self._with(Index.load)

    def insert(self, copies: Sequence[Stored]) -> None:
        """Add rows."""
        self._with(lambda index: index.insert(copies))

    def scan(self, segment: int) -> Inventory:
        """Return the copies of a segment by their headers."""
        return recovery.scan(self._segments, segment, self.epochs)

    def insert_neighbors(self, copies: Inventory) -> None:
        """Add rows of a segment, by offset."""
        self._with(lambda index: index.insert_neighbors(copies))

    def listed(self, segment: int) -> None:
        """Note that a segment has all its rows, or is gone; with the last one the index is complete."""
        if self.unlisted.pop(segment, None) is not None and not self.unlisted:
            self._with(Index.complete)

    def vacate(self, slots: Sequence[Slot]) -> None:
        """Delete whatever lies in these slots, before they are overwritten."""
        self._with(lambda index: index.clear(slots))

    def delete(self, copies: Sequence[tuple[BlockRef, Slot]]) -> list[Slot]:
        """Delete the rows of these copies; return the slots that held them."""
        return self._with(lambda index: list(index.delete(copies)))

    def delete_segment(self, segment: int) -> None:
        """Delete all rows of a segment."""
        self._with(lambda index: index.delete_segment(segment))

    def delete_space(self, space_id: bytes, generation: int) -> None:
        """Delete all rows of a space up to a generation."""
        self._with(lambda index: index.drop(index.of_space(space_id, generation)))

    def contain(self, blocks: Sequence[BlockRef]) -> list[bool]:
        """Say for each block whether a copy of it has a row."""
        return self._with(lambda index: [index.contains(block) for block in blocks])

    @property
    def _opened(self) -> Index:
        assert self._index is not None, "open comes first"
        return self._index

    def _with(self, work: Callable[[Index], Result]) -> Result:
        """Work on the index; one that turns out damaged is made anew from the headers first."""
        index = self._opened
        try:
            return work(index)
        except sqlite3.Error as error:
            if self._is_closed or not is_damage(error):
                raise
            self._heal(index, error)
        return work(self._opened)

    def _heal(self, damaged: Index, error: sqlite3.Error) -> None:
        with self._healing:
            if self._index is not damaged:
                return  # another thread was here
            with suppress(sqlite3.Error):
                damaged.close()
            self._folder.discard_index(str(error))
            self._index = recovery.remake(self._folder, self._segments, self.epochs, self._synchronous)
