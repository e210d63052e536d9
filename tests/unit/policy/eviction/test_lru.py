from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcairn.policy.eviction.base import Rows
from kvcairn.policy.eviction.lru import LRU
from kvcairn.testing import PlainFacts

CHAINS = st.lists(st.integers(0, 30), max_size=6, unique=True)


def rows(numbers: Iterable[int]) -> Rows:
    return np.array(list(numbers), dtype=np.intp)


def order(lru: LRU) -> list[int]:
    return list(lru.candidates())


def test_the_oldest_goes_first_and_the_leaf_before_its_parent() -> None:
    lru = LRU(PlainFacts())
    lru.add(rows([1, 2, 3]), 0.0)
    lru.add(rows([7, 8]), 0.0)
    assert order(lru) == [3, 2, 1, 8, 7]
    lru.touch(rows([1, 2]), 0.0)
    assert order(lru) == [3, 8, 7, 2, 1]


def test_a_row_named_twice_in_a_touch_counts_once() -> None:
    lru = LRU(PlainFacts())
    lru.add(rows([1, 2]), 0.0)
    lru.touch(rows([1, 1, 1]), 0.0)
    assert (order(lru), len(lru)) == ([2, 1], 2)


def test_a_row_that_is_used_again_begins_as_the_most_recent() -> None:
    lru = LRU(PlainFacts())
    lru.add(rows([1, 2]), 0.0)
    lru.remove(rows([1]))
    lru.touch(rows([1]), 0.0)
    assert order(lru) == [2]
    lru.add(rows([1]), 0.0)
    assert order(lru) == [2, 1]


def test_the_queue_stays_short_whatever_is_touched() -> None:
    lru = LRU(PlainFacts())
    lru.add(rows(range(700)), 0.0)
    for _ in range(2000):
        lru.touch(rows(range(0, 700, 3)), 0.0)
    entries = lru._queues._entries[0]
    assert entries is not None and len(entries) <= 4 * 1024 + 4096
    assert sorted(order(lru)) == list(range(700))


def test_one_call_may_be_longer_than_the_queue() -> None:
    lru = LRU(PlainFacts())
    lru.add(rows(range(5000)), 0.0)
    lru.touch(rows(range(5000)), 0.0)
    assert order(lru) == list(range(4999, -1, -1))


def test_rows_may_be_removed_while_their_entries_are_stale() -> None:
    lru = LRU(PlainFacts())
    lru.add(rows([5]), 0.0)
    for _ in range(10):
        lru.touch(rows([5]), 0.0)
    lru.remove(rows([5]))
    assert (order(lru), len(lru)) == ([], 0)


@given(st.lists(st.tuples(st.sampled_from(["add", "touch", "remove", "look"]), CHAINS), max_size=60))
def test_exactly_least_recently_used(life: list[tuple[str, list[int]]]) -> None:
    lru, model = LRU(PlainFacts()), OrderedDict[int, None]()
    for action, chain in life:
        if action == "add":
            fresh = [row for row in chain if row not in model]
            lru.add(rows(fresh), 0.0)
            model.update(dict.fromkeys(reversed(fresh)))
        elif action == "touch":
            lru.touch(rows(chain), 0.0)
            for row in reversed(chain):
                if row in model:
                    model.move_to_end(row)
        elif action == "remove":
            lru.remove(rows(chain))
            for row in chain:
                model.pop(row, None)
        else:
            next(lru.candidates(), None)  # moves the head over stale entries
        assert (order(lru), len(lru)) == (list(model), len(model))
