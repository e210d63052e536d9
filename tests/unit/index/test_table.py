from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kvcairn.index.table import MOST_LOAD, WAYS, KeyTable

MakeKey = Callable[[int], bytes]

STYLES: dict[str, MakeKey] = {
    "hashes": lambda i: hashlib.sha256(str(i).encode()).digest(),
    "big-endian": lambda i: i.to_bytes(32, "big"),  # all in one bucket, all with one fingerprint
    "little-endian": lambda i: i.to_bytes(32, "little"),  # the fingerprint is always 0, as in an empty place
    "same-print": lambda i: hashlib.sha256(str(i).encode()).digest()[:4] + b"prnt" + i.to_bytes(24, "little"),
}


class Rows:
    """Rows with keys, a table of them, and the dictionary that it must agree with."""

    def __init__(self, make_key: MakeKey, rows: int, draw: random.Random) -> None:
        self.key, self.draw = make_key, draw
        self.column: npt.NDArray[np.uint8] = np.zeros((rows + 1, 32), dtype=np.uint8)
        self.table = KeyTable(lambda: self.column)
        self.model: dict[bytes, int] = {}
        self.free = list(range(rows))
        self.made = 0

    def add(self, count: int) -> None:
        keys = [self.key(self.made + i) for i in range(count)]
        self.made += count
        rows = np.array([self.free.pop(self.draw.randrange(len(self.free))) for _ in keys], dtype=np.intp)
        if keys:
            self.column[rows] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)
        self.table.add(keys, rows)
        self.model.update(zip(keys, rows.tolist(), strict=True))

    def discard(self, key: bytes) -> None:
        row = self.model.pop(key)
        self.table.discard(key, row)
        self.free.append(row)
        if self.draw.random() < 0.5:
            self.column[row] = 0

    def compare(self, keys: list[bytes]) -> None:
        assert self.table.find(keys).tolist() == [self.model.get(key, -1) for key in keys]

    def compare_all(self) -> None:
        self.compare(list(self.model))
        assert len(self.table) == len(self.model)
        assert sorted(self.table.rows().tolist()) == sorted(self.model.values())


@pytest.mark.parametrize("style", STYLES)
def test_a_random_life_against_a_dict(style: str, seed: int) -> None:
    draw = random.Random(seed)
    rows = Rows(STYLES[style], 6000, draw)
    for turn in range(600):
        if draw.random() < 0.6 and len(rows.free) > 60:
            rows.add(draw.randrange(60))
        else:
            for key in draw.sample(sorted(rows.model), min(len(rows.model), draw.randrange(60))):
                rows.discard(key)
        rows.compare([STYLES[style](draw.randrange(rows.made + 5)) for _ in range(draw.randrange(40))])
        if turn % 60 == 0:
            rows.compare_all()
    rows.compare_all()


@pytest.mark.parametrize("style", STYLES)
def test_it_grows_and_forgets_nothing(style: str) -> None:
    rows = Rows(STYLES[style], 6000, random.Random(1))
    while rows.free:
        rows.add(min(1000, len(rows.free)))
        rows.compare_all()
    assert len(rows.table) == 6000
    assert rows.table._prints.shape[0] * MOST_LOAD >= 6000


@pytest.mark.parametrize("style", STYLES)
def test_everything_can_leave_again(style: str) -> None:
    rows = Rows(STYLES[style], 500, random.Random(2))
    for _ in range(3):
        rows.add(500)
        for key in list(rows.model):
            rows.discard(key)
        rows.compare_all()
        rows.compare([STYLES[style](i) for i in range(rows.made)])


@pytest.mark.parametrize("at_once", [100, 20_000])
def test_keys_that_are_hashes_need_hardly_any_dict(at_once: int) -> None:
    rows = Rows(STYLES["hashes"], 20_000, random.Random(3))
    for _ in range(20_000 // at_once):
        rows.add(at_once)
    assert len(rows.table._spilled) < 20_000 / 100


def test_a_bucket_holds_its_places_and_the_rest_is_found_all_the_same() -> None:
    rows = Rows(STYLES["big-endian"], 64, random.Random(4))
    rows.add(64)
    assert len(rows.table._spilled) == 64 - WAYS
    rows.compare_all()


def test_a_key_may_be_asked_for_twice() -> None:
    rows = Rows(STYLES["hashes"], 10, random.Random(5))
    rows.add(3)
    known = list(rows.model)
    rows.compare([known[1], known[1], bytes(32), known[0], known[1]])


def test_nothing_is_found_in_nothing() -> None:
    rows = Rows(STYLES["hashes"], 4, random.Random(6))
    rows.compare([])
    rows.compare([bytes(32), b"\xff" * 32])
    rows.add(0)
    rows.compare_all()


def test_the_key_of_zeros_is_a_key() -> None:
    rows = Rows(lambda i: bytes(32), 4, random.Random(7))
    rows.add(1)
    rows.compare([bytes(32), b"\x01" + bytes(31)])
    rows.discard(bytes(32))
    rows.compare([bytes(32)])


def test_a_key_of_zeros_is_a_key_like_any_other() -> None:
    column = np.zeros((20, 32), dtype=np.uint8)
    table = KeyTable(lambda: column)
    keys = [number.to_bytes(32, "big") for number in range(10)]  # all in one bucket: two of them lie beside it
    rows = np.array([5, 4, 3, 2, 1, 0, 9, 8, 7, 6], dtype=np.intp)
    column[rows[::-1]] = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(-1, 32)
    table.add(keys, rows[::-1])
    assert table.find(keys).tolist() == rows[::-1].tolist()
    assert table.find(keys[:1]).tolist() == rows[-1:].tolist()
