"""The contract of a tier below memory: it moves bytes, and decides nothing.

Which block lies in which slot, what is evicted and when, is decided above (`core/`). A *managed* tier holds exactly
what the index says; a *foreign* one loses and gains blocks by itself and is asked by key. Every method runs on a
transfer thread, may block, and is called from several threads at once. A tier never raises for a single block: it
returns an outcome for each, and raises a `TierError` when the whole call failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from kvcairn.clock import Clock
from kvcairn.config import TierOptions
from kvcairn.errors import TierError
from kvcairn.types import MissReason

ALL_SPACES = bytes(32)
"""In `Tier.clear`: every space. No space has this id."""

BUDGET_NAME = "written-today.json"
"""What the core keeps of the day's budget, in the folder of a tier that has one."""

Outcome = None | MissReason | TierError
"""None for done; a reason (`vanished`, `corrupt`) for a block that is not there any more; an error for a failed try."""


@dataclass(frozen=True, slots=True)
class BlockRef:
    """Names one copy on any tier: (space, key, layer group)."""

    space_id: bytes
    key: bytes
    group: int


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a copy lies on a managed tier.

    Attributes:
        segment: number of the segment, never used twice in the life of the folder.
        offset_bytes: first byte of the slot inside the segment, a multiple of 4,096.
        slot_bytes: whole slot, header and padding included, a multiple of 4,096.
        segment_bytes: size of the whole segment.
        generation: grows with each use of the slot; the higher one wins.
    """

    segment: int
    offset_bytes: int
    slot_bytes: int
    segment_bytes: int
    generation: int


@dataclass(frozen=True, slots=True)
class Write:
    """One copy to be written. `data` is read-only, stable until the call returns, `checksum` is xxh3-128 of it."""

    block: BlockRef
    parent: bytes | None
    slot: Slot | None
    data: memoryview
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Read:
    """One copy to be read into `out`, which is exactly as long as what was written.

    `checksum` is given by a caller that hashes what arrives and compares it himself: a tier then need not hash it too.
    """

    block: BlockRef
    slot: Slot | None
    out: memoryview
    checksum: bytes = b""


@dataclass(frozen=True, slots=True)
class Delete:
    """One copy to be dropped."""

    block: BlockRef
    slot: Slot | None


@dataclass(frozen=True, slots=True)
class Stored:
    """One copy that an earlier run left behind, as `open` reports it."""

    block: BlockRef
    parent: bytes | None
    slot: Slot
    nbytes: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class TierContext:
    """What a tier is given beside its own options; the same for every kind of tier.

    Attributes:
        clock: the time.
        path: where its options stand in the settings, as in `tiers[1]`: how errors name them.
    """

    clock: Clock
    path: str = "tier"


class Tier(ABC):
    """One storage level below memory. Constructed as `cls(options, context)`; does no I/O before `open`."""

    options: ClassVar[type[TierOptions]]
    """Type of the settings; its `tag` is the tier's `type`. Must have `capacity_bytes` where the tier is managed."""
    managed: ClassVar[bool] = True
    header_bytes: ClassVar[int] = 0
    """Bytes of a slot before the payload, a multiple of 4,096; counted in the slot."""
    clears: ClassVar[bool] = False
    """Whether `clear` is there; otherwise the blocks of a space are deleted one by one."""
    overhead_bytes: int = 0
    """Part of the capacity that the tier needs for its own books; final after `open`."""
    last_generation: int = 0
    """A generation that new ones must exceed, whatever `open` returns; final after `open`."""
    region_bytes: int | None = None
    """Size of the pieces that segments are cut from, where the tier has fixed one; final after `open`."""
    unlisted: Mapping[int, int] = MappingProxyType({})
    """Segments, and their bytes, whose copies `open` could not list: those that count most first; final after `open`.

    `scan` finds out what lies in them. Until then nothing is written to them.
    """

    name: str

    def check(self) -> None:
        """Look at the place without taking or changing it: may a tier of these settings be opened there? Optional.

        That another process owns it now is no reason to refuse.

        Raises:
            ConfigError: it may not, whoever asks and whenever.
        """
        return

    @abstractmethod
    def open(self) -> Iterable[Stored]:
        """Take ownership and return what is there (managed tiers; foreign ones return nothing).

        Raises:
            ConfigError: the place cannot be used: missing, owned by another process, of a newer format.
            TierUnavailable: it cannot be reached now.
        """

    def scan(self, segment: int) -> Iterable[Stored]:
        """Return the copies of an unlisted segment; from then on the tier knows them. Takes long; may be repeated.

        Raises:
            TierUnavailable: it could not be read, or not to the end; what it holds is not known yet.
        """
        raise NotImplementedError

    @abstractmethod
    def write(self, writes: Sequence[Write]) -> list[Outcome]:
        """Store each block; None means acknowledged: it will be there after a restart as far as durability says.

        Before a slot is overwritten, whatever the tier's own index says of it is deleted. A block whose outcome
        is not None is not there afterwards, and what its slot held before may be gone.
        """

    @abstractmethod
    def read(self, reads: Sequence[Read]) -> list[Outcome]:
        """Fill each `out` with exactly what was written under that block, or say why not.

        What arrives is verified here, but for the payloads of reads that carry a checksum: those the caller compares.

        After an outcome other than None the content of that `out` is undefined. `MissReason.CORRUPT` means that the
        copy is damaged or another one, `MissReason.VANISHED` that there is nothing; both make the caller drop it.
        """

    @abstractmethod
    def delete(self, deletes: Sequence[Delete]) -> None:
        """Forget each block, so that it does not come back after a restart. Absent ones are passed over."""

    def clear(self, space_id: bytes, generation: int) -> None:
        """Forget all copies of a space up to a generation, for good: those too whose write ends only later.

        `ALL_SPACES` for a space stands for every one, known or not.
        """
        raise NotImplementedError

    @abstractmethod
    def retire(self, segments: Sequence[int]) -> None:
        """Give the space of whole segments back; nobody asks for their blocks again. Unknown ones are passed over."""

    @abstractmethod
    def probe(self, blocks: Sequence[BlockRef]) -> list[bool]:
        """Ask whether each block is there now: a hint for foreign tiers, since it may be gone at the next moment."""

    @abstractmethod
    def close(self) -> None:
        """Flush and let go. Idempotent; no other method is called afterwards."""
