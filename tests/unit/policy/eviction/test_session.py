from __future__ import annotations

from kvcairn.policy import eviction
from kvcairn.policy.eviction.session import _AGED_AT_ONCE, Session
from kvcairn.testing import PlainFacts
from tests.unit.policy.eviction.kit import rows


def make() -> tuple[Session, PlainFacts]:
    facts = PlainFacts()
    policy = eviction.create("session", facts)
    assert isinstance(policy, Session)
    return policy, facts


def teach(policy: Session) -> float:
    """Conversations of two turns, ten seconds apart; then it is learned that nobody comes a third time."""
    now_s = 0.0
    for number in range(300):
        now_s = 30.0 * number
        row = 10_000 + number
        policy.add(rows([row]), now_s)
        policy.touch(rows([row]), now_s + 10.0)
        policy.remove(rows([row]))
    return now_s + 30.0


def test_who_will_be_back_outlives_who_will_not() -> None:
    policy, _ = make()
    now_s = teach(policy)
    policy.add(rows([1]), now_s)
    policy.touch(rows([1]), now_s + 8.0)  # the second turn, and the last
    policy.add(rows([2]), now_s + 5.0)  # the first turn, used before that
    assert list(policy.candidates()) == [1, 2]


def test_where_the_shadow_is_better_the_order_is_that_of_an_lru() -> None:
    policy, _ = make()
    now_s = teach(policy)
    policy.add(rows([1]), now_s)
    policy.touch(rows([1]), now_s + 8.0)
    policy.add(rows([2]), now_s + 5.0)
    policy._shadow.is_better = True
    assert list(policy.candidates()) == [2, 1]


def test_a_hinted_session_goes_on_though_no_block_of_it_comes_again() -> None:
    policy, facts = make()
    facts.session = {1: 7, 2: 7}
    policy.add(rows([1]), 0.0)
    policy.hint(rows([1]), False, 0.0)
    policy.add(rows([2]), 20.0)
    turn = policy._returns.turn
    assert (turn(int(policy._request[1])), turn(int(policy._request[2]))) == (1, 2)


def test_blocks_that_follow_a_block_just_used_are_of_the_same_request() -> None:
    policy, facts = make()
    facts.parent = {2: 1, 3: 2}
    policy.add(rows([1]), 0.0)
    policy.add(rows([2]), 0.5)
    policy.add(rows([3]), 100.0)
    requests = policy._request[[1, 2, 3]].tolist()
    assert requests[0] == requests[1] != requests[2]


def test_so_many_rows_age_in_one_call_and_the_others_in_the_next() -> None:
    policy, _ = make()
    count = 3 * _AGED_AT_ONCE
    policy.add(rows(range(count)), 0.0)
    for call in range(1, 4):
        policy.touch(rows([0]), 1000.0 + call / 10)
        assert policy._queues.sizes[0] == max(1, count - call * _AGED_AT_ONCE)
    assert max(policy._queues.sizes) == count - 1, "all in the one class that they have grown into"


def test_looking_for_candidates_moves_nothing() -> None:
    policy, _ = make()
    policy.add(rows(range(2_000)), 0.0)
    policy.touch(rows([5_000]), 5_000.0)
    assert list(policy.candidates()) == list(policy.candidates())


def test_a_row_that_grows_old_keeps_its_place_among_the_old() -> None:
    policy, _ = make()
    for row in range(40):
        policy.add(rows([row]), float(row * 3))
    policy.touch(rows([39]), 120.0)
    order = list(policy.candidates())
    assert order == sorted(order)
