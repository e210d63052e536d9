"""SGLang's page hashes as block keys."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvcairn.keys import KEY_BYTES

_HEX_DIGITS = 2 * KEY_BYTES


def block_keys(hashes: Sequence[str]) -> list[bytes]:
    """Return SGLang's page hashes as block keys; a key of another form is hashed."""
    try:
        data = bytes.fromhex("".join(hashes))
    except ValueError:
        data = b""
    if len(data) == KEY_BYTES * len(hashes) and all(len(each) == _HEX_DIGITS for each in hashes):
        return [data[begin : begin + KEY_BYTES] for begin in range(0, len(data), KEY_BYTES)]
    return [hashlib.sha256(b"\0name\0" + each.encode()).digest() for each in hashes]
