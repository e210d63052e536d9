"""Bytes that tell where they belong: every word of a block follows from its space, key, group and offset."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvcairn.copying import copy_bytes
from kvcairn.layout import SpaceDescriptor

_WORD_BYTES: Final = 8
_REMEMBERED: Final = 1 << 16
_SEARCHED: Final = 64  # blocks whose every offset is compared when a word is traced

Words = npt.NDArray[np.uint64]
Buffer = memoryview | npt.NDArray[np.uint8] | bytearray | bytes
Name = tuple[bytes, bytes, int]


class WrongBytes(AssertionError):
    """Bytes are not those of the block they were read for.

    Attributes:
        offset: first wrong byte, counted from the start of the part.
    """

    def __init__(self, message: str, offset: int) -> None:
        self.offset = offset
        super().__init__(message)


class ByteOracle:
    """Makes and checks the content of blocks.

    Word `w` of a part is `table[w] * factor + addend` modulo 2**64, where the table is one fixed random sequence and
    factor and addend are a hash of (space, key, group). A word from another block, layer or offset is therefore
    another word, and a wrong one can be traced to its owner among the blocks that this oracle has filled. Any thread.

    Args:
        seed: of the random sequence; two oracles agree where their seeds do.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._table: Words = np.empty(0, dtype=np.uint64)
        self._filled: OrderedDict[Name, None] = OrderedDict()

    def fill(self, view: Buffer, space: SpaceDescriptor | bytes, key: bytes, group: int = 0) -> None:
        """Write the content of a block's part over all of `view`, which is writable and of any length."""
        out = _as_bytes(view)
        name = (_space_id(space), key, group)
        copy_bytes(self._content(name, out.size), out)
        self._filled[name] = None
        if len(self._filled) > _REMEMBERED:
            self._filled.popitem(last=False)

    def part(self, space: SpaceDescriptor | bytes, key: bytes, group: int, nbytes: int) -> bytes:
        """Return the content of a block's part of `nbytes` bytes."""
        out = np.empty(nbytes, dtype=np.uint8)
        self.fill(out, space, key, group)
        return out.tobytes()

    def is_right(self, view: Buffer, space: SpaceDescriptor | bytes, key: bytes, group: int = 0) -> bool:
        """Return whether all of `view` is the content of that part."""
        got = _as_bytes(view)
        return np.array_equal(got, self._content((_space_id(space), key, group), got.size))

    def check(self, view: Buffer, space: SpaceDescriptor | bytes, key: bytes, group: int = 0) -> None:
        """Compare all of `view` with the content of that part.

        Raises:
            WrongBytes: with the first wrong offset, and whose bytes stand there if that can be told.
        """
        got = _as_bytes(view)
        wanted = self._content((_space_id(space), key, group), got.size)
        if np.array_equal(got, wanted):
            return
        wrong = np.flatnonzero(got != wanted)
        first = int(wrong[0])
        raise WrongBytes(
            f"block {key.hex()[:16]} group {group}: {wrong.size} of {got.size} bytes are wrong, the first at offset "
            f"{first}; {self._owner(got, first)}",
            first,
        )

    def _content(self, name: Name, nbytes: int) -> npt.NDArray[np.uint8]:
        words = -(-nbytes // _WORD_BYTES)
        factor, addend = _constants(name)
        content = self._sequence(words) * factor
        content += addend
        return content.view(np.uint8)[:nbytes]

    def _sequence(self, words: int) -> Words:
        table = self._table
        if table.size < words:
            # A counter-based generator gives the same beginning at every length.
            generator = np.random.Generator(np.random.Philox(key=self._seed))
            table = generator.integers(0, 1 << 64, size=max(words, 2 * table.size), dtype=np.uint64)
            self._table = table
        return table[:words]

    def _owner(self, got: npt.NDArray[np.uint8], offset: int) -> str:
        """Describe what stands at `offset`, looking at the whole word behind it."""
        word = -(-offset // _WORD_BYTES)
        rest = got[offset:]
        if rest.size > 1 and bool((rest == rest[0]).all()):
            return f"from there on all bytes are 0x{int(rest[0]):02x}"
        if (word + 1) * _WORD_BYTES > got.size:
            return "too few bytes to tell whose they are"
        found = got[word * _WORD_BYTES : (word + 1) * _WORD_BYTES].copy().view(np.uint64)
        names = list(reversed(self._filled))
        for table, candidates in ((self._table[word : word + 1], names), (self._table, names[:_SEARCHED])):
            for name in candidates:
                factor, addend = _constants(name)
                at = np.flatnonzero(table * factor + addend == found)
                if at.size:
                    place = word if table.size == 1 else int(at[0])
                    return (
                        f"they are those of block {name[1].hex()[:16]} group {name[2]} of space "
                        f"{name[0].hex()[:16]} from offset {place * _WORD_BYTES - (word * _WORD_BYTES - offset)}"
                    )
        return "they belong to no block that was filled here"


def _constants(name: Name) -> tuple[np.uint64, np.uint64]:
    space_id, key, group = name
    digest = xxhash.xxh3_128_digest(space_id + key + group.to_bytes(4, "little"))
    low, high = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
    return np.uint64(low | 1), np.uint64(high)


def _space_id(space: SpaceDescriptor | bytes) -> bytes:
    return space.space_id if isinstance(space, SpaceDescriptor) else space


def _as_bytes(view: Buffer) -> npt.NDArray[np.uint8]:
    return np.frombuffer(view, dtype=np.uint8)
