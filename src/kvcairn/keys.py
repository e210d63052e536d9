"""Block keys: a SHA-256 chain over the token prefix, the same in every process and on every machine.

`key_i = SHA-256(key_{i-1} || tokens of block i as little-endian u32)` with an empty `key_{-1}`; with extra content
`SHA-256(key_{i-1} || tokens || 0x01 || length of extra as little-endian u64 || extra)`. At equal block size this is
the chain that SGLang 0.5.23 uses for its pages of plain text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

KEY_BYTES = 32
MAX_TOKEN = 0xFFFFFFFF
PART_TOKENS = 1 << 16  # a long prompt is converted in parts, so that no numpy call holds the GIL for long

TokenIds = Sequence[int] | npt.NDArray[np.integer]


def block_keys(
    token_ids: TokenIds,
    block_tokens: int,
    *,
    parent: bytes | None = None,
    extra: Mapping[int, bytes | None] | None = None,
) -> list[bytes]:
    """Return the keys of the full blocks of `token_ids`; the tail that fills no block has none.

    Args:
        token_ids: shape (tokens,), each 0 to 2**32 - 1.
        block_tokens: tokens of one block.
        parent: key of the block before the first one, None at the start of a prompt.
        extra: block number (within this call) to content that is not in the tokens: an image's hash, a LoRA's
            fingerprint, a salt in block 0. None and b"" differ.

    Raises:
        ValueError: a token id is negative, beyond u32 or not a whole number; an `extra` names no block of this call;
            `parent` is no key. Ids are refused, never wrapped.
    """
    if parent is not None and (not isinstance(parent, bytes) or len(parent) != KEY_BYTES):
        raise ValueError(f"parent must be a key of {KEY_BYTES} bytes, got {parent!r}")
    tokens = _as_u32(token_ids)
    count = tokens.size // block_tokens
    suffixes = _suffixes(extra or {}, count)
    data, step = tokens.tobytes(), block_tokens * 4
    key, keys, sha256 = parent or b"", [], hashlib.sha256
    for i in range(count):
        piece = key + data[i * step : (i + 1) * step]
        key = sha256(piece + suffixes[i] if i in suffixes else piece, usedforsecurity=False).digest()
        keys.append(key)
    return keys


def _suffixes(extra: Mapping[int, bytes | None], count: int) -> dict[int, bytes]:
    """Return what the extra content of each of the first `count` blocks adds to what is hashed."""
    suffixes = {}
    for block, content in extra.items():
        if not isinstance(block, int) or isinstance(block, bool) or block < 0:
            raise ValueError(f"extra[{block!r}] names no block: blocks are numbered from 0")
        if content is None or block >= count:
            continue  # a block beyond the last full one has no key that it could enter
        if not isinstance(content, bytes):
            raise ValueError(f"extra[{block}] must be bytes, got {type(content).__name__}")
        suffixes[block] = b"\x01" + len(content).to_bytes(8, "little") + content
    return suffixes


def _as_u32(token_ids: TokenIds) -> npt.NDArray[np.uint32]:
    """Return the ids as contiguous little-endian u32, refusing what would wrap."""
    try:
        ids = np.asarray(token_ids)
    except (OverflowError, ValueError) as error:
        raise ValueError(f"token ids must be whole numbers in one row: {error}") from error
    if ids.ndim != 1:
        raise ValueError(f"token ids must be one row, got shape {ids.shape}")
    if ids.size == 0:
        return np.empty(0, dtype="<u4")
    if ids.dtype == np.dtype("<u4"):
        return np.ascontiguousarray(ids)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"token ids must be whole numbers from 0 to {MAX_TOKEN}, got dtype {ids.dtype}")
    out = np.empty(ids.size, dtype="<u4")
    for begin in range(0, ids.size, PART_TOKENS):
        part = ids[begin : begin + PART_TOKENS]
        low, high = int(part.min()), int(part.max())
        if low < 0 or high > MAX_TOKEN:
            raise ValueError(f"token id {low if low < 0 else high} is outside 0 to {MAX_TOKEN}")
        out[begin : begin + PART_TOKENS] = part
    return out
