"""Which copies were cleared: of a space or of all, those up to a generation. They are dead wherever they turn up."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Final

import xxhash

from kvcairn.memory.slots import PAGE_BYTES
from kvcairn.tiers.base import ALL_SPACES
from kvcairn.tiers.disk.files import replace_file
from kvcairn.tiers.disk.format import ID_BYTES

logger = logging.getLogger(__name__)

EPOCHS_NAME: Final = "epochs"
_RECORD_BYTES: Final = ID_BYTES + 8
_DIGEST_BYTES: Final = 16
_MOST: Final = (PAGE_BYTES - _DIGEST_BYTES) // _RECORD_BYTES  # the file takes a page


class Epochs:
    """The file of that name. Any thread.

    It has room for 102 spaces. Beyond that the space that was cleared longest ago is forgotten: its rows are gone, and
    only an index that is made anew could find what is left of it.
    """

    def __init__(self, folder: Path) -> None:
        """Look at nothing yet."""
        self._path = folder / EPOCHS_NAME
        self._guard = threading.Lock()
        self._of: dict[bytes, int] = {}

    def load(self) -> None:
        """Read the file; a damaged one counts as empty."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("%s cannot be read: %s", self._path, error)
            return
        records, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if len(records) % _RECORD_BYTES or xxhash.xxh3_128_digest(records) != digest:
            logger.warning("%s is damaged and is made anew", self._path)
            return
        for at in range(0, len(records), _RECORD_BYTES):
            record = records[at : at + _RECORD_BYTES]
            self._of[record[:ID_BYTES]] = int.from_bytes(record[ID_BYTES:], "little")

    def of(self, space_id: bytes) -> int:
        """Return the generation up to which copies of a space are dead; -1 where it was never cleared."""
        return max(self._of.get(space_id, -1), self._of.get(ALL_SPACES, -1))

    @property
    def has_any(self) -> bool:
        """Whether anything was cleared."""
        return bool(self._of)

    @property
    def highest(self) -> int:
        """The highest generation of all."""
        return max(self._of.values(), default=0)

    def advance(self, space_id: bytes, generation: int) -> None:
        """Declare copies up to a generation dead, and make that last.

        Raises:
            OSError: it could not be written; it holds for this process all the same.
        """
        with self._guard:
            generation = max(generation, self._of.pop(space_id, 0))
            if space_id == ALL_SPACES:
                self._of = {space: at for space, at in self._of.items() if at > generation}
            self._of[space_id] = generation
            while len(self._of) > _MOST:
                del self._of[next(space for space in self._of if space != ALL_SPACES)]
            records = b"".join(space + at.to_bytes(8, "little") for space, at in self._of.items())
            replace_file(self._path, records + xxhash.xxh3_128_digest(records))
