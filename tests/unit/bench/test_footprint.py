"""What objects take, counted."""

from __future__ import annotations

import gc
import sys

import numpy as np

from kvcairn.bench.footprint import collector_objects, held_bytes, resident_bytes


def test_a_dict_of_keys_counts_its_keys_and_values() -> None:
    rows = {number.to_bytes(32, "big"): number + 1000 for number in range(1000)}
    keys, values = 1000 * 80, 1000 * 32  # as allocated: 65 and 28 bytes, rounded up to 16
    assert abs(held_bytes(rows) - (sys.getsizeof(rows) + keys + values)) < 16


def test_what_is_reached_twice_counts_once() -> None:
    key = bytes(1000)
    assert held_bytes([key, key]) < held_bytes([key, bytes(1000)[:999]])


def test_a_view_counts_the_array_that_it_keeps_alive() -> None:
    assert held_bytes([np.zeros(100_000, dtype=np.uint8)[:10]]) > 100_000


def test_mappings_and_modules_do_not_count() -> None:
    assert held_bytes([memoryview(bytes(100_000)), np]) < 1000


def test_objects_of_the_collector_are_those_that_it_walks() -> None:
    before = collector_objects()
    lists: list[list[object]] = [[[]] for _ in range(500)]
    assert collector_objects() - before >= 1000
    del lists
    rows = {number.to_bytes(32, "big"): number for number in range(10_000)}
    gc.collect()
    assert collector_objects() - before < 100
    assert len(rows) == 10_000


def test_resident_memory_grows_with_what_is_touched() -> None:
    before = resident_bytes()
    touched = np.ones(64 << 20, dtype=np.uint8)
    assert resident_bytes() - before > 32 << 20
    assert touched.size
