from __future__ import annotations

from itertools import islice

from kvcairn.policy import eviction
from kvcairn.policy.eviction.s3fifo import _PASSED_AT_ONCE, S3FIFO
from kvcairn.testing import PlainFacts
from tests.unit.policy.eviction.kit import rows

COUNT = 8 * _PASSED_AT_ONCE


def make() -> S3FIFO:
    policy = eviction.create("s3fifo", PlainFacts())
    assert isinstance(policy, S3FIFO)
    return policy


def hot(count: int) -> S3FIFO:
    """Rows that were all used often."""
    policy = make()
    policy.add(rows(range(count)), 0.0)
    for turn in range(4):
        policy.touch(rows(range(count)), float(turn))
    return policy


def passed(policy: S3FIFO) -> int:
    """Rows met and passed for the candidates read last."""
    return sum(walk.passed().size for walk in policy._walks)


def test_a_block_used_once_does_not_pass_the_small_queue() -> None:
    policy = make()
    policy.add(rows(range(20)), 0.0)
    policy.touch(rows([19, 18]), 1.0)
    policy.touch(rows([19]), 2.0)  # two uses more: on to the main queue
    first = next(policy.candidates())
    assert first == 18
    policy.evict(rows([first]))
    order = list(policy.candidates())
    assert order[:16] == list(range(17, 1, -1)), "down to a tenth of what there was"
    assert order[16:] == [19, 1, 0]


def test_where_all_are_used_an_eviction_looks_at_a_bounded_number() -> None:
    policy = hot(COUNT)
    met = []
    for _ in range(20):
        gone = rows(islice(policy.candidates(), 32))
        met.append(passed(policy))
        assert gone.size == 32
        policy.evict(gone)
    assert max(met) <= 2 * _PASSED_AT_ONCE, "of each queue"


def test_what_was_passed_is_not_met_again_by_the_next_eviction() -> None:
    policy = hot(COUNT)
    seen: set[int] = set()
    for _ in range(3):
        gone = rows(islice(policy.candidates(), 1))
        met = set(policy._walks[0].passed().tolist())
        assert met and not met & seen
        seen |= met
        policy.evict(gone)


def test_each_is_yielded_once_however_many_windows_it_takes() -> None:
    policy = hot(COUNT + 17)
    assert sorted(policy.candidates()) == list(range(COUNT + 17))


def test_the_least_used_of_those_passed_goes_first() -> None:
    policy = hot(2 * _PASSED_AT_ONCE)
    policy._uses[5_000] = 2
    assert next(policy.candidates()) == 5_000
