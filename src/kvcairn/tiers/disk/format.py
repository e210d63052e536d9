"""The bytes of a slot on disk: a header page, the payload, zeros up to the end of its last page.

Every byte is described in `docs/concepts/disk-format.md`; change both or neither.
"""

from __future__ import annotations

import struct
from typing import Final

import xxhash

from kvcairn.checksum import CHECKSUM_BYTES, checksum
from kvcairn.memory.slots import PAGE_BYTES
from kvcairn.tiers.base import BlockRef, Read, Slot, Stored

FORMAT_VERSION: Final = 1
MAGIC: Final = b"KVCAIRN\x00"
HEADER_BYTES: Final = PAGE_BYTES
ID_BYTES: Final = 32

_FIELDS: Final = struct.Struct("<8sII32s32s32sIIqqqqqq16s")
_CHECKED_BYTES: Final = HEADER_BYTES - CHECKSUM_BYTES
_HAS_PARENT: Final = 1
_NO_PARENT: Final = bytes(ID_BYTES)


def encode(stored: Stored) -> bytes:
    """Return the header page of a copy.

    Raises:
        ValueError: a key, an id or a checksum has the wrong length, or a number does not fit its field.
    """
    block, slot = stored.block, stored.slot
    parent = _NO_PARENT if stored.parent is None else stored.parent
    if not len(block.space_id) == len(block.key) == len(parent) == ID_BYTES:
        raise ValueError(f"keys and space ids have {ID_BYTES} bytes")
    if len(stored.checksum) != CHECKSUM_BYTES:
        raise ValueError(f"a checksum has {CHECKSUM_BYTES} bytes")
    try:
        fields = _FIELDS.pack(
            MAGIC, FORMAT_VERSION, HEADER_BYTES,
            block.space_id, block.key, parent, 0 if stored.parent is None else _HAS_PARENT, block.group,
            stored.nbytes, slot.generation, slot.segment, slot.offset_bytes, slot.slot_bytes, slot.segment_bytes,
            stored.checksum,
        )  # fmt: skip
    except struct.error as error:
        raise ValueError(f"a number does not fit the header: {error}") from error
    checked = fields.ljust(_CHECKED_BYTES, b"\x00")
    return checked + xxhash.xxh3_128_digest(checked)


def decode(page: bytes | bytearray | memoryview) -> Stored | None:
    """Return what a header page says, or None where it is none of this version, or damaged."""
    view = memoryview(page)
    if len(view) != HEADER_BYTES or bytes(view[: len(MAGIC)]) != MAGIC:
        return None
    if xxhash.xxh3_128_digest(view[:_CHECKED_BYTES]) != bytes(view[_CHECKED_BYTES:]):
        return None
    (
        _, version, header_bytes, space_id, key, parent, flags, group,
        nbytes, generation, segment, offset_bytes, slot_bytes, segment_bytes, checksum,
    ) = _FIELDS.unpack_from(view)  # fmt: skip
    if (version, header_bytes) != (FORMAT_VERSION, HEADER_BYTES):
        return None
    return Stored(
        block=BlockRef(space_id, key, group),
        parent=parent if flags & _HAS_PARENT else None,
        slot=Slot(segment, offset_bytes, slot_bytes, segment_bytes, generation),
        nbytes=nbytes,
        checksum=checksum,
    )


def holds(page: memoryview, read: Read) -> bool:
    """Whether a header page is of the copy that is asked for; the payload is hashed where the caller will not do it."""
    slot = read.slot
    if slot is None or xxhash.xxh3_128_digest(page[:_CHECKED_BYTES]) != page[_CHECKED_BYTES:]:
        return False
    found = _FIELDS.unpack_from(page)
    wanted = (MAGIC, FORMAT_VERSION, HEADER_BYTES, read.block.space_id, read.block.key)
    place = (slot.generation, slot.segment, slot.offset_bytes, slot.slot_bytes, slot.segment_bytes)
    if found[:5] != wanted or found[7:14] != (read.block.group, len(read.out), *place):
        return False
    return bool(found[14] == (read.checksum or checksum(read.out)))


def payload_fits(nbytes: int, slot: Slot) -> bool:
    """Whether a payload of that length fits into the slot, and the slot into its segment."""
    return (
        0 < nbytes <= slot.slot_bytes - HEADER_BYTES
        and slot.slot_bytes % PAGE_BYTES == 0
        and slot.segment >= 0
        and slot.offset_bytes % slot.slot_bytes == 0
        and 0 <= slot.offset_bytes <= slot.segment_bytes - slot.slot_bytes
    )
