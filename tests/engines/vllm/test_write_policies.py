"""The memory tier's write policies, where vLLM's own scheduler decides which pages go."""

from __future__ import annotations

from typing import Any

import pytest

from kvcairn.adapters.vllm.held import Held
from kvcairn.adapters.vllm.steps import Store
from tests.engines.vllm.kit import BLOCK, cache, prompt
from tests.engines.vllm.scheduler_kit import engine, expected

OVERLAPPED = pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])


def with_policy(policy: str) -> dict[str, Any]:
    settings = cache()
    settings["tiers"][0]["write_policy"] = policy
    return settings


def stored(e: Any) -> int:
    e.settle()
    return sum((s.kv_connector_stats or {}).get("stored_blocks", 0) for s in e.stats)


@OVERLAPPED
def test_back_stores_what_the_engine_is_about_to_overwrite_and_nothing_else(overlapped: bool) -> None:
    prompts = [prompt(760, 900 + i) for i in range(4)]  # of 24 pages each, and 60 are there
    with engine(with_policy("back"), pages=61, overlapped=overlapped) as e:
        for i, ids in enumerate(prompts[:2]):
            assert e.answer(f"cold {i}", ids, new=2) == expected(ids, new=2)
        assert stored(e) == 0
        assert len(e.connector.scheduler.stores._held) == 4
        for i, ids in enumerate(prompts[2:]):
            assert e.answer(f"more {i}", ids, new=2) == expected(ids, new=2)
        copied = stored(e)
        assert 2 <= copied <= 4
        assert e.answer("again 0", prompts[0], new=2) == expected(prompts[0], new=2)
        assert e.cached["again 0"] == 2 * BLOCK
        e.assert_nothing_is_open()


@OVERLAPPED
@pytest.mark.parametrize("window", [None, 48, 300])
def test_back_gives_the_same_tokens_under_pressure(overlapped: bool, window: int | None) -> None:
    prompts = {str(i): prompt(300 + 37 * i, 950 + i) for i in range(6)}
    how: dict[str, Any] = {"pages": 80, "overlapped": overlapped, "window": window}
    with engine(with_policy("back"), **how) as e:
        for turn in range(3):
            for name, ids in prompts.items():
                e.add(f"{turn} {name}", ids, new=30)
            e.run()
        for turn in range(3):
            for name, ids in prompts.items():
                assert e.answers[f"{turn} {name}"] == expected(ids, new=30, **how), (turn, name)
        assert stored(e) > 0
        e.assert_nothing_is_open()


def test_back_forgets_what_waits_when_everything_is_reset() -> None:
    with engine(with_policy("back"), pages=61) as e:
        e.answer("first", prompt(760, 990))
        assert len(e.connector.scheduler.stores._held) == 2
        assert e.connector.reset_cache()
        assert len(e.connector.scheduler.stores._held) == 0
        e.assert_nothing_is_open()


def test_selective_copies_a_prompt_at_its_second_time() -> None:
    ids = prompt(760, 991)
    with engine(with_policy("selective"), pages=128) as e:
        assert e.answer("first", ids) == expected(ids)
        assert stored(e) == 0
        assert e.answer("second", ids) == expected(ids)  # from the engine's own prefix cache
        assert stored(e) == 2
        e.reset()
        assert e.answer("third", ids) == expected(ids)
        assert e.cached["third"] == 2 * BLOCK
        e.assert_nothing_is_open()


def store(number: int, parent: bytes | None, keys: list[bytes], pages: list[int]) -> Store:
    return Store(number, parent, keys, (pages,))


def test_a_block_goes_with_those_before_it_and_before_them() -> None:
    held, numbers = Held(), iter(range(100, 200))
    held.hold(store(0, None, [b"a", b"b"], [1, 2, 3, 4]))
    held.hold(store(1, b"b", [b"c"], [5, 6]))
    held.hold(store(2, b"b", [b"d"], [7, 8]))
    (due,) = held.due([6], lambda: next(numbers))
    assert (due.keys, due.parent, due.pages) == ([b"a", b"b", b"c"], None, ([1, 2, 3, 4, 5, 6],))
    (due,) = held.due([7, 8], lambda: next(numbers))
    assert (due.keys, due.parent, due.pages) == ([b"d"], b"b", ([7, 8],))
    assert held.due([1, 2, 3], lambda: next(numbers)) == [] and len(held) == 0


def test_of_a_block_that_is_there_twice_the_later_pages_count() -> None:
    held = Held()
    held.hold(store(0, None, [b"a"], [1, 2]))
    held.hold(store(1, None, [b"a"], [3, 4]))
    assert held.due([1, 2], lambda: 9) == []
    (due,) = held.due([4], lambda: 9)
    assert due.pages == ([3, 4],)
