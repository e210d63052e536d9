from __future__ import annotations

import hashlib

import numpy as np

from kvcairn.policy.sights import LEAST_PLACES, SightTable


def keys(first: int, count: int) -> list[bytes]:
    return [hashlib.sha256(str(n).encode()).digest() for n in range(first, first + count)]


def test_sights_are_counted_by_key() -> None:
    table = SightTable(1 << 16)
    assert table.see(keys(0, 3)).tolist() == [1, 1, 1]
    assert table.see(keys(1, 3)).tolist() == [2, 2, 1]
    assert table.seen(keys(0, 5)).tolist() == [1, 2, 2, 1, 0]
    assert table.seen(keys(0, 5)).tolist() == [1, 2, 2, 1, 0]


def test_a_count_stays_at_its_highest() -> None:
    table = SightTable(LEAST_PLACES)
    for _ in range(300):
        last = table.see(keys(0, 1))
    assert last.tolist() == [255]


def test_what_was_seen_long_ago_is_forgotten_and_nothing_is_mistaken_for_another() -> None:
    table = SightTable(LEAST_PLACES)
    table.see(keys(0, 100))
    assert (table.see(keys(1000, 20 * LEAST_PLACES)) == 1).all()
    assert table.seen(keys(0, 100)).tolist() == [0] * 100


def test_about_as_many_are_remembered_as_there_are_places() -> None:
    table = SightTable(1 << 14)
    table.see(keys(0, 1000))
    table.see(keys(1000, 1 << 12))  # a quarter as many as places: most stay
    assert np.count_nonzero(table.seen(keys(0, 1000))) > 700
