"""An honest managed tier in a dictionary: what a tier must do, without the input and output."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import xxhash

from kvcairn.errors import ConfigError
from kvcairn.tiers.base import ALL_SPACES, BlockRef, Delete, Outcome, Read, Slot, Stored, Tier, Write
from kvcairn.types import MissReason

Place = tuple[int, int]


@dataclass(slots=True)
class DictContent:
    """What a `DictTier` holds. It outlives the tier as a folder outlives a process.

    Attributes:
        slots: what lies in each slot, by segment and offset: the copy and its bytes.
        cleared: up to which generation each space was cleared.
        owner: the open tier, if any.
    """

    slots: dict[Place, tuple[Stored, bytes]] = field(default_factory=dict)
    cleared: dict[bytes, int] = field(default_factory=dict)
    owner: DictTier | None = None


class DictTier(Tier):
    """The smallest managed tier. Any thread; no call blocks.

    Args:
        name: of the tier.
        content: what an earlier tier left behind, or None for an empty one.
    """

    clears: ClassVar[bool] = True

    def __init__(self, name: str = "dict", content: DictContent | None = None) -> None:
        self.name = name
        self.content = DictContent() if content is None else content
        self._lock = threading.Lock()

    def open(self) -> Iterable[Stored]:
        """Take ownership and return what is there."""
        with self._lock:
            if self.content.owner not in (None, self):
                raise ConfigError("tiers", f"the content of {self.name!r} is owned by another open tier")
            self.content.owner = self
            self.last_generation = max(self.content.cleared.values(), default=0)
            return [stored for stored, _ in self.content.slots.values() if not self._is_cleared(stored)]

    def write(self, writes: Sequence[Write]) -> list[Outcome]:
        """Store each block."""
        outcomes: list[Outcome] = []
        with self._lock:
            for write in writes:
                slot = _slot(write)
                stored = Stored(write.block, write.parent, slot, write.data.nbytes, write.checksum)
                if self._is_cleared(stored):
                    outcomes.append(MissReason.CLEARED)
                    continue
                self.content.slots[_place(slot)] = (stored, bytes(write.data))
                outcomes.append(None)
        return outcomes

    def read(self, reads: Sequence[Read]) -> list[Outcome]:
        """Fill each `out`."""
        with self._lock:
            return [self._read(read) for read in reads]

    def delete(self, deletes: Sequence[Delete]) -> None:
        """Forget each block."""
        with self._lock:
            for delete in deletes:
                slot = _slot(delete)
                held = self.content.slots.get(_place(slot))
                if held is not None and (held[0].block, held[0].slot) == (delete.block, slot):
                    del self.content.slots[_place(slot)]

    def clear(self, space_id: bytes, generation: int) -> None:
        """From now on what is there, and what is still to come, of that space up to that generation is dead."""
        with self._lock:
            self.content.cleared[space_id] = max(generation, self.content.cleared.get(space_id, 0))

    def retire(self, segments: Sequence[int]) -> None:
        """Drop all slots of these segments."""
        gone = set(segments)
        with self._lock:
            for place in [place for place in self.content.slots if place[0] in gone]:
                del self.content.slots[place]

    def probe(self, blocks: Sequence[BlockRef]) -> list[bool]:
        """Say whether each block is there."""
        with self._lock:
            there = {stored.block for stored, _ in self.content.slots.values() if not self._is_cleared(stored)}
        return [block in there for block in blocks]

    def close(self) -> None:
        """Let go of the content."""
        with self._lock:
            if self.content.owner is self:
                self.content.owner = None

    def _is_cleared(self, stored: Stored) -> bool:
        cleared = self.content.cleared
        return stored.slot.generation <= max(cleared.get(stored.block.space_id, 0), cleared.get(ALL_SPACES, 0))

    def _read(self, read: Read) -> Outcome:
        held = self.content.slots.get(_place(_slot(read)))
        if held is None:
            return MissReason.VANISHED
        if self._is_cleared(held[0]):
            return MissReason.CLEARED
        stored, data = held
        if stored.block != read.block or len(data) != read.out.nbytes:
            return MissReason.CORRUPT
        if xxhash.xxh3_128_digest(data) != stored.checksum:
            return MissReason.CORRUPT
        read.out.cast("B")[:] = data
        return None


def _slot(item: Write | Read | Delete) -> Slot:
    assert item.slot is not None, "a managed tier is given the slot of every copy"
    return item.slot


def _place(slot: Slot) -> Place:
    return slot.segment, slot.offset_bytes
