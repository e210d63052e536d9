from __future__ import annotations

from kvcairn.tiers.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker


def broken(now_s: float = 100.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(now_s)
    return breaker


def test_it_opens_with_the_third_failure_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN - 1):
        breaker.failed(5.0)
        assert not breaker.is_open(5.0)
    breaker.failed(5.0)
    assert breaker.is_open(5.0)


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = Breaker()
    for _ in range(10):
        for _ in range(FAILURES_TO_OPEN - 1):
            breaker.failed(1.0)
        breaker.succeeded()
    assert not breaker.is_open(1.0)


def test_after_the_pause_a_call_passes() -> None:
    breaker = broken(100.0)
    assert breaker.is_open(100.0 + FIRST_PAUSE_S - 0.01)
    assert not breaker.is_open(100.0 + FIRST_PAUSE_S)
    assert not breaker.is_open(1e9)


def test_each_failed_try_doubles_the_pause_up_to_the_longest() -> None:
    breaker, now_s, pauses = broken(0.0), 0.0, []
    for _ in range(12):
        begin_s = now_s
        while breaker.is_open(now_s):
            now_s += 0.5
        pauses.append(now_s - begin_s)
        breaker.failed(now_s)
    assert pauses == [min(FIRST_PAUSE_S * 2**i, LONGEST_PAUSE_S) for i in range(12)]


def test_calls_that_end_badly_while_it_is_open_do_not_prolong_the_pause() -> None:
    breaker = broken(0.0)
    for _ in range(20):
        breaker.failed(FIRST_PAUSE_S / 2)
    assert not breaker.is_open(FIRST_PAUSE_S)


def test_a_success_closes_it_and_forgets_the_pauses() -> None:
    breaker = broken(0.0)
    breaker.failed(FIRST_PAUSE_S)
    breaker.succeeded()
    assert not breaker.is_open(FIRST_PAUSE_S)
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(50.0)
    assert not breaker.is_open(50.0 + FIRST_PAUSE_S)


def test_a_clock_that_begins_anywhere() -> None:
    assert broken(0.0).is_open(0.0)
    assert broken(-1000.0).is_open(-1000.0)
