"""The benches run against the real cache, in small."""

from __future__ import annotations

import msgspec
import pytest

from kvcairn.bench import Figure, run_lookup, run_memory

SMALL_BLOCKS = 8192


@pytest.fixture(scope="module")
def lookup() -> dict[str, Figure]:
    return {figure.name: figure for figure in run_lookup(blocks=SMALL_BLOCKS, pairs=9)}


@pytest.fixture(scope="module")
def memory() -> dict[str, Figure]:
    return {figure.name: figure for figure in run_memory(block_tokens=4, pairs=9, gil_runs=2)}


def test_lookup_yields_its_figures(lookup: dict[str, Figure]) -> None:
    assert list(lookup) == ["bytes_per_block", "gc_objects", "hash_lookup_64k", "lookup_256_of_1m"]
    assert {figure.bench for figure in lookup.values()} == {"lookup"}
    assert [figure.unit for figure in lookup.values()] == ["bytes", "objects", "ms", "us"]
    assert all(figure.value > 0 for name, figure in lookup.items() if name != "gc_objects")


def test_a_block_takes_memory_but_adds_nothing_to_collect(lookup: dict[str, Figure]) -> None:
    assert lookup["gc_objects"].value < 1000
    # The key alone is 32 bytes; beyond the promise of 450 would be objects for each block.
    assert 32 < lookup["bytes_per_block"].value <= 450


def test_lookups_are_compared_with_what_they_consist_of(lookup: dict[str, Figure]) -> None:
    for name in ("hash_lookup_64k", "lookup_256_of_1m"):
        figure = lookup[name]
        assert figure.reference is not None and figure.ratio is not None
        assert figure.runs == 9


def test_memory_yields_its_figures(memory: dict[str, Figure]) -> None:
    assert list(memory) == ["store", "load", "store_call", "load_call", "gil_hold"]
    assert [figure.unit for figure in memory.values()] == ["GB/s", "GB/s", "us", "us", "ms"]
    assert all(figure.value > 0 for figure in memory.values())
    assert all(memory[name].ratio for name in ("store", "load", "gil_hold"))


def test_a_figure_is_a_line_of_json(memory: dict[str, Figure]) -> None:
    line = msgspec.json.decode(msgspec.json.encode(memory["store"]))
    assert {"bench", "name", "value", "unit", "reference", "ratio", "runs"} <= set(line)
