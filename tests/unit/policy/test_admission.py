from __future__ import annotations

import numpy as np
import pytest

from kvcairn.policy.admission import DAY_S, DayBudget, admission


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("through", [True] * 4), ("selective", [False, False, True, True]), ("back", [False] * 4), ("none", [False] * 4)],
)
def test_what_is_written_at_sight(name: str, wanted: list[bool]) -> None:
    policy = admission(name, min_touches=3)
    assert policy.at_sight(np.array([1, 2, 3, 255], dtype=np.uint8)).tolist() == wanted


def test_only_back_takes_what_leaves() -> None:
    assert [name for name in ("through", "selective", "back", "none") if admission(name).takes_leavers] == ["back"]


def test_unknown() -> None:
    with pytest.raises(ValueError, match="there are through, selective, back, none"):
        admission("around")


def test_a_budget_is_spent_and_comes_anew_with_the_day() -> None:
    budget = DayBudget(100)
    assert budget.allows(100, 10 * DAY_S)
    budget.spend(60, 10 * DAY_S + 5)
    assert budget.allows(40, 11 * DAY_S - 1)
    assert not budget.allows(41, 11 * DAY_S - 1)
    assert budget.allows(100, 11 * DAY_S)
    budget.spend(100, 11 * DAY_S)
    assert not budget.allows(1, 10 * DAY_S), "a clock set back gives nothing anew"


def test_no_limit() -> None:
    budget = DayBudget()
    budget.spend(1 << 60, 0.0)
    assert budget.allows(1 << 60, 0.0)
