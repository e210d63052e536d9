from __future__ import annotations

import numpy as np

from kvcairn.policy.eviction.returns import _KEPT, AGES, TURNS, Returns
from tests.unit.policy.eviction.kit import names


def test_a_request_is_found_by_what_it_ended_with() -> None:
    returns = Returns()
    first = returns.start(0.0, 0)
    returns.mark(names([1, 2]), first)
    second = returns.start(5.0, first)
    returns.mark(names([2]), second)
    assert returns.find(names([1, 2, 3])).tolist() == [first, second, 0]


def test_a_turn_follows_the_one_before() -> None:
    returns = Returns()
    first = returns.start(0.0, 0)
    second = returns.start(7.0, first)
    third = returns.start(9.0, second)
    assert [returns.turn(each) for each in (first, second, third)] == [1, 2, 3]
    assert [returns.began_s(each) for each in (first, second, third)] == [0.0, 7.0, 9.0]


def test_a_request_does_not_follow_itself() -> None:
    returns = Returns()
    first = returns.start(0.0, 0)
    returns.follow(first, first, 1.0)
    assert returns.turn(first) == 1


def test_what_is_too_old_is_as_if_it_had_never_been() -> None:
    returns = Returns()
    first = returns.start(0.0, 0)
    returns.mark(names([1]), first)
    for number in range(_KEPT - 1):
        returns.start(float(number), 0)
    assert returns.find(names([1])).tolist() == [first]
    returns.start(1e6, 0)
    assert returns.find(names([1])).tolist() == [0]


def test_who_comes_back_soon_is_worth_more_than_who_does_not() -> None:
    returns = Returns()
    for number in range(400):
        began_s = 100.0 * number
        first = returns.start(began_s, 0)
        returns.start(began_s + 10.0, first)  # each first turn is followed after 10 s, and no second one
    worth = returns.worth(100.0 * 400)
    assert worth.shape == (TURNS, AGES)
    assert worth[0, 0] > 1.3 * worth[1, 0]
    assert worth[0, 0] > 2 * worth[0, 8], "who has waited for 50 s already will not be back"


def test_with_nothing_learned_all_are_worth_the_same() -> None:
    assert np.ptp(Returns().worth(1.0)) == 0.0
