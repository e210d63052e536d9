"""Every eviction policy against the contract, and what each prefers."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable

import pytest

from kvcairn.policy.eviction.arc import ARC
from kvcairn.policy.eviction.base import EvictionPolicy, Facts
from kvcairn.policy.eviction.fifo import FIFO
from kvcairn.policy.eviction.lfu import LFU
from kvcairn.policy.eviction.lru import LRU
from kvcairn.policy.eviction.priority import Priority
from kvcairn.policy.eviction.s3fifo import S3FIFO
from kvcairn.policy.eviction.session import Session
from kvcairn.testing.policy_tests import PolicyTests, rows


class TestLRU(PolicyTests):
    @pytest.fixture
    def make_policy(self) -> Callable[[Facts], EvictionPolicy]:
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


class TestFIFO(PolicyTests):
    @pytest.fixture
    def make_policy(self) -> Callable[[Facts], EvictionPolicy]:
        return FIFO


class TestARC(PolicyTests):
    @pytest.fixture
    def make_policy(self) -> Callable[[Facts], EvictionPolicy]:
        return ARC


class TestPriority(PolicyTests):
    @pytest.fixture
    def make_policy(self) -> Callable[[Facts], EvictionPolicy]:
        return Priority


class TestS3FIFO(PolicyTests):
    @pytest.fixture
    def make_policy(self) -> Callable[[Facts], EvictionPolicy]:
        return S3FIFO


class TestSession(PolicyTests):
    @pytest.fixture
    def make_policy(self) -> Callable[[Facts], EvictionPolicy]:
        return Session


@pytest.mark.filterwarnings("ignore:eviction 'lfu'")
class TestLFU(PolicyTests):
    @pytest.fixture
    def make_policy(self) -> Callable[[Facts], EvictionPolicy]:
        return LFU
