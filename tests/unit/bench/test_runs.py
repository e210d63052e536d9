"""The benches run against the real cache, in small."""

from __future__ import annotations

import importlib.util

import msgspec
import pytest

import kvcairn as kv
from kvcairn.bench import Figure, run_engine, run_lookup, run_memory
from kvcairn.bench.pages import PAGE_KIB

SMALL_BLOCKS = 8192


@pytest.fixture(scope="module")
def lookup() -> dict[str, Figure]:
    return {figure.name: figure for figure in run_lookup(blocks=SMALL_BLOCKS, pairs=9)}


@pytest.fixture(scope="module")
def memory() -> dict[str, Figure]:
    return {figure.name: figure for figure in run_memory(block_tokens=4, pairs=9, gil_runs=2, page_bytes=16 << 20)}


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
    moves = [f"{name}_{kib}k{threads}" for name in ("gather", "scatter") for kib in PAGE_KIB for threads in ("", "_2")]
    moves += ["copy_checksum", "copy_checksum_2"]
    assert list(memory) == ["store", "load", "store_call", "load_call", "gil_hold", "import_s", *moves]
    assert [memory[name].unit for name in list(memory)[:6]] == ["GB/s", "GB/s", "us", "us", "ms", "s"]
    assert {memory[name].unit for name in moves} == {"GB/s"}
    assert all(figure.value > 0 for figure in memory.values())
    assert all(memory[name].ratio for name in moves)
    assert all(memory[name].ratio for name in ("store", "load", "gil_hold"))


def test_a_figure_is_a_line_of_json(memory: dict[str, Figure]) -> None:
    line = msgspec.json.decode(msgspec.json.encode(memory["store"]))
    assert {"bench", "name", "value", "unit", "reference", "ratio", "runs"} <= set(line)


def test_an_engine_that_is_not_there_is_named() -> None:
    with pytest.raises(kv.ConfigError, match="expected one of"):
        list(run_engine("tgi"))
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(kv.UnsupportedError, match="needs vLLM: pip install"):
            list(run_engine("vllm"))
