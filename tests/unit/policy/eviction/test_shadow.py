from __future__ import annotations

from kvcairn.policy.eviction.shadow import _MOST_WINDOWS, _WINDOW, Shadow
from tests.unit.policy.eviction.kit import names

MANY = names(range(200_000))
SAMPLED = MANY[(MANY >> 40) % 16 == 0]


def window(shadow: Shadow, is_hit: bool) -> None:
    """As many uses as one judgement takes, of blocks that an LRU of the size would have."""
    for _ in range(_WINDOW // 64):
        shadow.use(SAMPLED[:64], is_hit)


def filled() -> Shadow:
    shadow = Shadow()
    shadow.resize(16 * 1_000)
    return shadow


def test_it_is_better_where_it_serves_what_was_missed() -> None:
    shadow = filled()
    window(shadow, False)
    assert shadow.is_better


def test_it_is_not_better_where_all_was_served() -> None:
    shadow = filled()
    for _ in range(3):
        window(shadow, True)
    assert not shadow.is_better


def test_it_is_not_better_where_an_lru_of_that_size_would_have_lost_them_too() -> None:
    shadow = Shadow()
    shadow.resize(16 * 100)
    for _ in range(3):
        for at in range(0, 4_096, 64):
            shadow.use(SAMPLED[at : at + 64], False)
        assert not shadow.is_better


def test_it_stays_for_longer_each_time_up_to_a_limit() -> None:
    shadow, stays = filled(), list[int]()
    for _ in range(7):
        while not shadow.is_better:
            window(shadow, False)
        stay = 0
        while shadow.is_better:
            window(shadow, True)
            stay += 1
        stays.append(stay)
    assert stays == sorted(stays) and stays[0] == 1 and stays[-1] == _MOST_WINDOWS


def test_nothing_is_judged_before_the_size_is_known() -> None:
    shadow = Shadow()
    for _ in range(2):
        window(shadow, False)
    assert not shadow.is_better
