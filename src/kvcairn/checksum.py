"""xxh3-128 over the bytes of a block."""

from __future__ import annotations

from kvcairn.copying import checksum as checksum

CHECKSUM_BYTES = 16
