"""The contract of an eviction policy as tests: inherit from `PolicyTests`, say how to make the policy, run pytest."""

# The name of a test is its sentence.
# ruff: noqa: D102

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from kvcairn.policy.eviction.base import EvictionPolicy, Facts, Rows
from kvcairn.testing.plain_facts import PlainFacts


def rows(*numbers: int) -> Rows:
    """Return numbers as a policy is given them."""
    return np.array(numbers, dtype=np.intp)


class PolicyTests:
    """What every order of eviction has in common, whatever it prefers.

    Inherit from it in a test module, under a name that begins with `Test`, and override the fixture `make_policy`.
    """

    @pytest.fixture
    def make_policy(self) -> Callable[[Facts], EvictionPolicy]:
        """Return the class of the policy, or another function that makes an empty one."""
        raise NotImplementedError("override the fixture `make_policy`")

    @pytest.fixture
    def policy(self, make_policy: Callable[[Facts], EvictionPolicy]) -> EvictionPolicy:
        """Return an empty policy."""
        return make_policy(PlainFacts())

    def expect(self, policy: EvictionPolicy, resident: Iterable[int]) -> None:
        """Expect each of these rows once, and no other."""
        wanted = sorted(resident)
        assert sorted(policy.candidates()) == wanted
        assert len(policy) == len(wanted)

    def test_it_begins_empty(self, policy: EvictionPolicy) -> None:
        self.expect(policy, [])

    def test_each_resident_row_is_a_candidate_once(self, policy: EvictionPolicy) -> None:
        policy.add(rows(4, 7, 9), 0.0)
        policy.add(rows(1), 1.0)
        self.expect(policy, [1, 4, 7, 9])
        policy.touch(rows(7, 4, 1), 2.0)
        self.expect(policy, [1, 4, 7, 9])

    def test_no_rows_change_nothing(self, policy: EvictionPolicy) -> None:
        policy.add(rows(1), 0.0)
        policy.add(rows(), 1.0)
        policy.touch(rows(), 1.0)
        policy.remove(rows())
        self.expect(policy, [1])

    def test_what_was_removed_is_no_candidate(self, policy: EvictionPolicy) -> None:
        policy.add(rows(1, 2, 3), 0.0)
        policy.remove(rows(2))
        self.expect(policy, [1, 3])

    def test_absent_rows_are_passed_over(self, policy: EvictionPolicy) -> None:
        policy.add(rows(1, 2), 0.0)
        policy.touch(rows(1, 5, 1_000_000), 1.0)
        policy.remove(rows(2, 5, 1_000_000))
        policy.remove(rows(2))
        policy.touch(rows(2), 2.0)
        self.expect(policy, [1])

    def test_a_row_is_used_again(self, policy: EvictionPolicy) -> None:
        for turn in range(5):
            policy.add(rows(3), float(turn))
            self.expect(policy, [3])
            policy.remove(rows(3))
            self.expect(policy, [])

    def test_within_a_call_the_leaf_goes_before_its_parent(self, policy: EvictionPolicy) -> None:
        policy.add(rows(5, 2, 8, 1), 0.0)
        assert list(policy.candidates()) == [1, 8, 2, 5]
        policy.touch(rows(5, 2, 8, 1), 1.0)
        assert list(policy.candidates()) == [1, 8, 2, 5]

    def test_reading_the_candidates_changes_no_order(self, policy: EvictionPolicy) -> None:
        for row in range(20):
            policy.add(rows(row), float(row))
        policy.touch(rows(3, 4), 30.0)
        first = list(policy.candidates())
        part = policy.candidates()
        assert [next(part), next(part)] == first[:2]
        assert list(policy.candidates()) == first

    def test_two_policies_share_nothing(self, make_policy: Callable[[Facts], EvictionPolicy]) -> None:
        one, two = make_policy(PlainFacts()), make_policy(PlainFacts())
        one.add(rows(1), 0.0)
        self.expect(two, [])
        two.add(rows(2), 0.0)
        self.expect(one, [1])

    def test_large_rows_and_many_touches(self, policy: EvictionPolicy) -> None:
        policy.add(rows(2_000_000), 0.0)
        policy.add(np.arange(3_000, dtype=np.intp), 1.0)
        for turn in range(50):
            policy.touch(np.arange(turn, 3_000, 50, dtype=np.intp), 2.0 + turn)
        self.expect(policy, [*range(3_000), 2_000_000])

    def test_a_random_life_against_a_set(self, policy: EvictionPolicy) -> None:
        draw, resident = random.Random(11), set[int]()
        for turn in range(3_000):
            chain = draw.sample(range(200), draw.randint(1, 8))
            now_s = float(turn)
            choice = draw.random()
            if choice < 0.45:
                new = [row for row in chain if row not in resident]
                policy.add(rows(*new), now_s)
                resident.update(new)
            elif choice < 0.8:
                policy.touch(rows(*chain), now_s)
            elif choice < 0.9:
                leave = policy.remove if choice < 0.85 else policy.evict
                leave(rows(*chain))
                resident.difference_update(chain)
            elif choice < 0.93:
                policy.refresh(rows(*chain), now_s)
            elif choice < 0.96:
                policy.defer(rows(*chain))
            else:
                policy.hint(rows(*chain), draw.random() < 0.3, now_s)
            if turn % 50 == 0:
                self.expect(policy, resident)
        self.expect(policy, resident)
