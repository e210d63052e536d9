from __future__ import annotations

import math

import pytest

from kvcairn.clock import MonotonicClock, VirtualClock


def test_the_monotonic_clock_never_goes_back() -> None:
    clock = MonotonicClock()
    seen = [clock.now() for _ in range(100)]
    assert seen == sorted(seen)


def test_a_virtual_clock_moves_only_when_told_to() -> None:
    clock = VirtualClock(5.0)
    assert [clock.now(), clock.now()] == [5.0, 5.0]
    clock.advance(0.25)
    clock.advance(0.0)
    assert clock.now() == 5.25


@pytest.mark.parametrize("by_s", [-1.0, -math.inf])
def test_a_virtual_clock_refuses_to_go_back(by_s: float) -> None:
    clock = VirtualClock(1.0)
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(by_s)
    assert clock.now() == 1.0
