from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvcairn._fallback import PIECE_BYTES
from kvcairn.checksum import CHECKSUM_BYTES, checksum

SIZES = [0, 1, 4096, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 3 * PIECE_BYTES + 7]


@pytest.mark.parametrize("nbytes", SIZES)
def test_the_pieces_make_the_hash_of_the_whole(nbytes: int) -> None:
    data = bytes(i * 7 % 251 for i in range(min(nbytes, 10_000))) * (nbytes // 10_000 + 1)
    got = checksum(memoryview(data)[:nbytes])
    assert got == xxhash.xxh3_128_digest(data[:nbytes])
    assert len(got) == CHECKSUM_BYTES


@given(st.binary(min_size=1, max_size=200), st.data())
def test_one_changed_bit_shows(content: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(content) * 8 - 1))
    other = bytearray(content)
    other[at // 8] ^= 1 << at % 8
    assert checksum(memoryview(content)) != checksum(memoryview(other))


def test_read_only_and_writable_views_give_the_same() -> None:
    data = bytearray(b"kv" * 5000)
    assert checksum(memoryview(data)) == checksum(memoryview(data).toreadonly()) == checksum(memoryview(bytes(data)))
