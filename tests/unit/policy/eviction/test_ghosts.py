from __future__ import annotations

import random
from collections import OrderedDict

from kvcairn.policy.eviction.ghosts import _TRIMMED_AT_ONCE, GhostQueue
from tests.unit.policy.eviction.kit import names


def test_the_oldest_are_let_go_first() -> None:
    ghosts = GhostQueue()
    ghosts.push(names(range(10)))
    ghosts.trim(4)
    assert ghosts.holds(names(range(10))).tolist() == [False] * 6 + [True] * 4
    assert len(ghosts) == 4


def test_a_name_that_came_back_is_as_young_as_its_last_coming() -> None:
    ghosts = GhostQueue()
    ghosts.push(names([1, 2]))
    ghosts.discard(names([1, 7]))
    ghosts.push(names([1]))
    ghosts.trim(1)
    assert ghosts.holds(names([1, 2])).tolist() == [True, False]


def test_what_is_here_stays_while_it_grows() -> None:
    ghosts = GhostQueue()
    for first in range(0, 20_000, 32):
        ghosts.push(names(range(first, first + 32)))
    assert ghosts.holds(names(range(20_000))).mean() > 0.99
    assert ghosts.holds(names(range(20_000, 40_000))).sum() == 0
    assert len(ghosts) == int(ghosts.holds(names(range(20_000))).sum())


def test_the_small_tables_of_the_beginning_go_once_their_names_have() -> None:
    ghosts = GhostQueue()
    for first in range(0, 60_000, 32):
        ghosts.push(names(range(first, first + 32)))
        ghosts.trim(5_000)
    assert len(ghosts._tables) == 1
    assert ghosts.holds(names(range(56_000, 60_000))).mean() > 0.99


def test_very_many_are_let_go_in_several_calls() -> None:
    ghosts = GhostQueue()
    ghosts.push(names(range(3 * _TRIMMED_AT_ONCE)))
    before = len(ghosts)
    ghosts.trim(0)
    assert before - _TRIMMED_AT_ONCE <= len(ghosts) < before
    for _ in range(5):
        ghosts.trim(0)
    assert len(ghosts) == 0


def test_a_random_life_against_an_ordered_dict() -> None:
    draw, ghosts, model = random.Random(3), GhostQueue(), OrderedDict[int, None]()
    for _ in range(3_000):
        some = draw.sample(range(60), draw.randint(1, 5))
        if draw.random() < 0.6:
            new = [name for name in some if name not in model]
            ghosts.push(names(new))
            model.update(dict.fromkeys(new))
        elif draw.random() < 0.7:
            ghosts.discard(names(some))
            for name in some:
                model.pop(name, None)
        else:
            count = draw.randint(0, 40)
            ghosts.trim(count)
            while len(model) > count:
                model.popitem(last=False)
        assert ghosts.holds(names(range(60))).tolist() == [name in model for name in range(60)]
        assert len(ghosts) == len(model)
