"""Every eviction policy against the contract, and what each prefers."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable

import pytest

from kvcairn.policy.eviction.base import EvictionPolicy
from kvcairn.policy.eviction.lru import LRU
from kvcairn.testing.policy_tests import PolicyTests, rows


class TestLRU(PolicyTests):
    @pytest.fixture
    def make_policy(self) -> Callable[[], EvictionPolicy]:
        return LRU

    def test_the_least_recently_used_goes_first(self, policy: EvictionPolicy) -> None:
        draw, order = random.Random(5), OrderedDict[int, None]()
        for turn in range(2_000):
            chain = draw.sample(range(300), draw.randint(1, 10))
            new = [row for row in chain if row not in order]
            policy.add(rows(*new), float(turn))
            policy.touch(rows(*chain), float(turn))
            for row in reversed(chain):
                order[row] = None
                order.move_to_end(row)
            if turn % 3 == 0:
                oldest, _ = order.popitem(last=False)
                assert next(policy.candidates()) == oldest
                policy.remove(rows(oldest))
        assert list(policy.candidates()) == list(order)
