"""xxh3-128 over the bytes of a block."""

from __future__ import annotations

import xxhash

CHECKSUM_BYTES = 16
PIECE_BYTES = 1 << 20  # the hash keeps the GIL: 1 MiB is a tenth of a millisecond


def checksum(data: memoryview) -> bytes:
    """Return xxh3-128 of the bytes, 16 bytes. Any thread; holds the GIL for a piece of 1 MiB at a time."""
    if len(data) <= PIECE_BYTES:
        return xxhash.xxh3_128_digest(data)
    state = xxhash.xxh3_128()
    for begin in range(0, len(data), PIECE_BYTES):
        state.update(data[begin : begin + PIECE_BYTES])
    return state.digest()
