from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcairn.keys import KEY_BYTES, MAX_TOKEN, PART_TOKENS, block_keys

VECTORS = json.loads((Path(__file__).parent / "key_vectors.json").read_text())

TOKENS = st.lists(st.integers(0, MAX_TOKEN), max_size=40)


def plain(
    tokens: Sequence[int], block_tokens: int, parent: bytes = b"", extra: dict[int, bytes] | None = None
) -> list[bytes]:
    """The chain as its documentation says, one token at a time."""
    keys = []
    for block in range(len(tokens) // block_tokens):
        digest = hashlib.sha256(parent)
        for token in tokens[block * block_tokens : (block + 1) * block_tokens]:
            digest.update(struct.pack("<I", token))
        if extra is not None and block in extra:
            digest.update(b"\x01" + struct.pack("<Q", len(extra[block])) + extra[block])
        parent = digest.digest()
        keys.append(parent)
    return keys


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_keys_are_those_of_the_file_for_ever(vector: dict[str, Any]) -> None:
    extra = {int(block): bytes.fromhex(content) for block, content in vector["extra"].items()}
    parent = bytes.fromhex(vector["parent"]) if vector["parent"] else None
    keys = block_keys(vector["tokens"], vector["block_tokens"], parent=parent, extra=extra)
    assert [key.hex() for key in keys] == vector["keys"]


@given(TOKENS, st.integers(1, 8), st.none() | st.binary(min_size=32, max_size=32))
def test_keys_are_the_documented_chain(tokens: list[int], block_tokens: int, parent: bytes | None) -> None:
    assert block_keys(tokens, block_tokens, parent=parent) == plain(tokens, block_tokens, parent or b"")


@given(TOKENS, st.dictionaries(st.integers(0, 5), st.none() | st.binary(max_size=9)))
def test_extra_enters_its_block_and_all_behind_it(tokens: list[int], extra: dict[int, bytes | None]) -> None:
    keys, bare = block_keys(tokens, 4, extra=extra), block_keys(tokens, 4)
    given_extra = {block: content for block, content in extra.items() if content is not None}
    assert keys == plain(tokens, 4, extra=given_extra)
    first = min(given_extra, default=len(bare))
    assert [a == b for a, b in zip(keys, bare, strict=True)] == [i < first for i in range(len(bare))]


@given(TOKENS, st.integers(1, 5), st.integers(0, 40))
def test_a_chain_can_be_continued_anywhere(tokens: list[int], block_tokens: int, cut: int) -> None:
    whole = block_keys(tokens, block_tokens)
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else None
    assert whole[:cut] + block_keys(tokens[cut * block_tokens :], block_tokens, parent=parent) == whole


def test_none_and_empty_extra_differ() -> None:
    assert block_keys([1, 2], 2, extra={0: None}) == block_keys([1, 2], 2)
    assert block_keys([1, 2], 2, extra={0: b""}) != block_keys([1, 2], 2)


def test_extra_cannot_imitate_tokens() -> None:
    content = struct.pack("<I", 7)
    assert block_keys([1], 1, extra={0: content}) != block_keys([1, 7], 2)
    assert block_keys([1], 1, extra={0: b"ab"}) != block_keys([1], 1, extra={0: b"ab\x00"})


@pytest.mark.parametrize("dtype", ["u1", "i2", "<u4", ">u4", "<i4", ">i4", "<i8", ">i8", "<u8", ">u8"])
def test_the_dtype_of_the_ids_makes_no_difference(dtype: str) -> None:
    tokens = [0, 1, 2, 100, 7, 99, 3, 127]
    assert block_keys(np.array(tokens, dtype=dtype), 4) == block_keys(tokens, 4)
    assert block_keys(tuple(tokens), 4) == block_keys(range(0), 4) + block_keys(tokens, 4)


def test_strided_and_reversed_arrays_are_read_in_their_order() -> None:
    ids = np.arange(64, dtype=np.uint32)
    assert block_keys(ids[::2], 4) == block_keys(list(range(0, 64, 2)), 4)
    assert block_keys(ids[::-1], 4) == block_keys(list(range(63, -1, -1)), 4)


@pytest.mark.parametrize("count", [PART_TOKENS - 1, PART_TOKENS, PART_TOKENS + 5, 3 * PART_TOKENS])
def test_long_prompts_are_converted_in_parts_without_a_seam(count: int) -> None:
    ids = np.arange(count, dtype=np.int64) * 7 % 50_000
    assert block_keys(ids, 1024) == block_keys(ids.astype("<u4"), 1024)


@pytest.mark.parametrize("bad", [-1, MAX_TOKEN + 1, 1 << 63, 1 << 64, -(1 << 70)])
@pytest.mark.parametrize("at", [0, 3, 4])
def test_an_id_outside_u32_is_refused_wherever_it_stands(bad: int, at: int) -> None:
    tokens = [1, 2, 3, 4]
    tokens.insert(at, bad)
    with pytest.raises(ValueError, match="token id"):
        block_keys(tokens, 4)


def test_an_id_outside_u32_is_refused_in_a_later_part() -> None:
    ids = np.zeros(2 * PART_TOKENS, dtype=np.int64)
    ids[-1] = -1
    with pytest.raises(ValueError, match="-1 is outside"):
        block_keys(ids, 16)
    ids[-1] = MAX_TOKEN + 1
    with pytest.raises(ValueError, match="4294967296 is outside"):
        block_keys(ids, 16)


@pytest.mark.parametrize(
    "bad",
    [
        [1.0, 2.0], [1, 2.5], [True, False], ["1", "2"], [None, 1], [[1, 2], [3, 4]], [[1], [2, 3]], 7, "ab",
        np.array([1.0]), np.array([True]), np.zeros((2, 2), dtype=np.int64), np.array(3), np.array([1], dtype=object),
        [1, b"2"], [object()],
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_row_of_whole_numbers_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="token ids"):
        block_keys(bad, 1)


@pytest.mark.parametrize("tokens", [[], (), range(0), np.array([], dtype=np.int64), [1], [1, 2, 3]])
def test_tokens_that_fill_no_block_have_no_key(tokens: Any) -> None:
    assert block_keys(tokens, 4) == []


@pytest.mark.parametrize("parent", [b"", b"short", bytes(31), bytes(33), bytearray(32), "x" * 32, 5])
def test_a_parent_that_is_no_key_is_refused(parent: Any) -> None:
    with pytest.raises(ValueError, match=f"key of {KEY_BYTES} bytes"):
        block_keys([1], 1, parent=parent)


@pytest.mark.parametrize("extra", [{-1: b""}, {"0": b""}, {True: b""}, {0.0: b""}, {0: "text"}, {0: bytearray(b"x")}])
def test_extra_that_fits_no_block_is_refused(extra: Any) -> None:
    with pytest.raises(ValueError, match="extra"):
        block_keys([1, 2], 1, extra=extra)
