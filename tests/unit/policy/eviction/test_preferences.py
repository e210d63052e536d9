from __future__ import annotations

import pytest

from kvcairn.policy import eviction
from kvcairn.testing import PlainFacts
from kvcairn.testing.policy_tests import rows


def test_lfu_warns_at_the_start_with_what_was_measured() -> None:
    with pytest.warns(UserWarning, match=r"13\.4 % .* 10,000 blocks where 'lru' serves 21\.6 %"):
        eviction.create("lfu", PlainFacts())


@pytest.mark.filterwarnings("ignore:eviction 'lfu'")
def test_lfu_lets_the_least_used_go_first() -> None:
    policy = eviction.create("lfu", PlainFacts())
    policy.add(rows(1, 2, 3), 0.0)
    policy.touch(rows(3), 1.0)
    policy.touch(rows(3, 2), 2.0)
    assert list(policy.candidates()) == [1, 2, 3]


def test_fifo_does_not_care_for_use() -> None:
    policy = eviction.create("fifo", PlainFacts())
    policy.add(rows(1), 0.0)
    policy.add(rows(2), 1.0)
    policy.touch(rows(1), 2.0)
    assert list(policy.candidates()) == [1, 2]


def test_priority_goes_before_recency_and_follows_a_new_hint() -> None:
    facts = PlainFacts()
    facts.priority = {1: 100, 3: 0}
    policy = eviction.create("priority", facts)
    for row in (1, 2, 3, 4):
        policy.add(rows(row), float(row))
    assert list(policy.candidates()) == [3, 2, 4, 1]
    facts.priority[1] = 10
    policy.hint(rows(1), False, 5.0)
    assert list(policy.candidates()) == [3, 1, 2, 4]


def test_blocks_of_an_ended_session_go_first_until_they_are_used_again() -> None:
    policy = eviction.create("session", PlainFacts())
    policy.add(rows(1, 2), 0.0)
    policy.add(rows(5, 6), 10.0)
    policy.hint(rows(5, 6), True, 11.0)
    assert list(policy.candidates()) == [6, 5, 2, 1]
    policy.touch(rows(5, 6), 12.0)
    assert list(policy.candidates()) == [2, 1, 6, 5]


@pytest.mark.parametrize("name", ["arc", "s3fifo"])
def test_what_comes_back_soon_outlives_what_is_new(name: str) -> None:
    policy = eviction.create(name, PlainFacts())
    policy.add(rows(*range(20)), 0.0)
    policy.evict(rows(19))
    policy.add(rows(19), 1.0)  # remembered, so into the queue of what was used again
    policy.add(rows(*range(30, 40)), 2.0)
    order = list(policy.candidates())
    assert order.index(39) < order.index(19)
