"""What an earlier run left on a tier and could not be listed yet, and what of it was dropped unseen meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvcairn.tiers.base import ALL_SPACES
from kvcairn.tiers.inventory import Flags, Inventory, Places


@dataclass(slots=True)
class Unscanned:
    """Owner thread only.

    Attributes:
        segments: bytes of those that are still to be taken up.
        scans: how many are being read now.
    """

    segments: dict[int, int] = field(default_factory=dict)
    scans: int = 0
    _dead: dict[bytes, int] = field(default_factory=dict)  # by space, up to a generation
    _forgotten: set[tuple[bytes, bytes]] = field(default_factory=set)

    def __bool__(self) -> bool:
        """Whether there is such a part."""
        return bool(self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes still to be taken up."""
        return sum(self.segments.values())

    def forget(self, space_id: bytes, keys: Iterable[bytes]) -> None:
        """Note that these blocks are not wanted."""
        if self.segments:
            self._forgotten.update((space_id, key) for key in keys)

    def clear(self, space_id: bytes, generation: int) -> None:
        """Note that nothing up to a generation is wanted, of one space or of `ALL_SPACES`."""
        if self.segments:
            self._dead[space_id] = generation

    def is_unwanted(self, space_id: bytes, found: Inventory, mine: Places) -> Flags:
        """Say which of the found copies at these places, all of one space, were dropped meanwhile."""
        dead: Flags = found.place[mine, 4] <= max(self._dead.get(space_id, -1), self._dead.get(ALL_SPACES, -1))
        if self._forgotten:
            dead |= np.array([(space_id, found.key[i]) in self._forgotten for i in mine.tolist()], dtype=np.bool_)
        return dead

    def taken_up(self, segment: int) -> None:
        """Note that a segment is like any other now."""
        del self.segments[segment]
        if not self.segments:
            self._dead.clear()
            self._forgotten.clear()
