"""What an earlier run left on a managed tier, as columns: many copies are not as many objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcairn.tiers.base import BlockRef, Slot, Stored

Numbers = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False, slots=True)
class Inventory:
    """Copies, one element of every column each. Iterating yields them as `Stored`.

    `place` has five numbers for each: segment, offset, slot bytes, segment bytes, generation. `checksum` has 16 bytes.
    `distinct`: there are no two copies of one block. `lost` names blocks (space id, key) whose bytes are gone.
    """

    space_id: list[bytes]
    key: list[bytes]
    group: Numbers
    parent: list[bytes | None]
    place: Numbers
    nbytes: Numbers
    checksum: npt.NDArray[np.uint8]
    distinct: bool = False
    lost: tuple[tuple[bytes, bytes], ...] = ()

    @classmethod
    def of(cls, copies: Iterable[Stored]) -> Inventory:
        """Return the columns of these copies; an inventory is returned as it is."""
        if isinstance(copies, Inventory):
            return copies
        items = list(copies)
        slots = [item.slot for item in items]
        place = [(s.segment, s.offset_bytes, s.slot_bytes, s.segment_bytes, s.generation) for s in slots]
        return cls(
            [item.block.space_id for item in items],
            [item.block.key for item in items],
            np.array([item.block.group for item in items], dtype=np.int64),
            [item.parent for item in items],
            np.array(place, dtype=np.int64).reshape(-1, 5),
            np.array([item.nbytes for item in items], dtype=np.int64),
            np.frombuffer(b"".join(item.checksum for item in items), dtype=np.uint8).reshape(-1, 16),
        )

    @classmethod
    def joined(cls, parts: Sequence[Inventory]) -> Inventory:
        """Return the copies of all parts, one part behind the other."""
        if not parts:
            return cls.of(())
        return cls(
            [each for part in parts for each in part.space_id],
            [each for part in parts for each in part.key],
            np.concatenate([part.group for part in parts]),
            [each for part in parts for each in part.parent],
            np.concatenate([part.place for part in parts]),
            np.concatenate([part.nbytes for part in parts]),
            np.concatenate([part.checksum for part in parts]),
        )

    def __len__(self) -> int:
        """Number of copies."""
        return len(self.key)

    def __iter__(self) -> Iterator[Stored]:
        """Yield every copy."""
        places, nbytes, groups = self.place.tolist(), self.nbytes.tolist(), self.group.tolist()
        for i, place in enumerate(places):
            block = BlockRef(self.space_id[i], self.key[i], groups[i])
            yield Stored(block, self.parent[i], Slot(*place), nbytes[i], self.checksum[i].tobytes())

    def take(self, chosen: Places) -> Inventory:
        """Return those at the given positions, in that order."""
        if chosen.size == len(self) and (np.diff(chosen) == 1).all():
            return self
        at = chosen.tolist()
        return Inventory(
            [self.space_id[i] for i in at],
            [self.key[i] for i in at],
            self.group[chosen],
            [self.parent[i] for i in at],
            self.place[chosen],
            self.nbytes[chosen],
            self.checksum[chosen],
            self.distinct,
        )

    def spaces(self) -> list[tuple[bytes, Places]]:
        """Return each space id with the positions of its copies."""
        numbers = {space_id: i for i, space_id in enumerate(dict.fromkeys(self.space_id))}
        if len(numbers) == 1:
            return [(self.space_id[0], np.arange(len(self), dtype=np.intp))]
        codes = np.fromiter(map(numbers.__getitem__, self.space_id), np.int64, len(self))
        return [(space_id, np.flatnonzero(codes == i)) for space_id, i in numbers.items()]

    def outdated(self) -> Flags:
        """Say which copies have a twin of the same block with a higher generation (or an earlier place)."""
        is_old: Flags = np.zeros(len(self), dtype=np.bool_)
        if self.distinct:
            return is_old
        starts = np.frombuffer(b"".join(self.key), dtype="<u8")[::4]
        if np.diff(np.sort(starts)).all():
            return is_old
        best: dict[tuple[bytes, bytes, int], int] = {}
        generation = self.place[:, 4].tolist()
        for i, block in enumerate(zip(self.space_id, self.key, self.group.tolist(), strict=True)):
            j = best.setdefault(block, i)
            if j != i:
                older = i if generation[i] <= generation[j] else j
                is_old[older] = True
                best[block] = i + j - older
        return is_old
