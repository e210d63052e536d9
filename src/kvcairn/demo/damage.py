"""Damages one block on disk, as a failing drive would: a single flipped bit in the middle of its payload."""

from __future__ import annotations

from pathlib import Path

from kvcairn.errors import KVCairnError
from kvcairn.tiers.disk.format import HEADER_BYTES
from kvcairn.tiers.disk.segments import Segments


def flip_bit(folder: Path, key: bytes) -> None:
    """Flip a bit of the block `key` in a disk tier's folder, which no cache may have open.

    Raises:
        KVCairnError: the block is not there.
    """
    segments = Segments(folder)
    for number in segments.sizes():
        for stored in segments.scan(number):
            if stored.block.key == key:
                _flip(segments.path(number), stored.slot.offset_bytes + HEADER_BYTES + stored.nbytes // 2)
                return
    raise KVCairnError(f"block {key.hex()[:16]} is not on disk in {folder}")


def _flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))
