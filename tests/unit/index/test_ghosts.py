from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcairn.index.ghosts import Ghosts
from kvcairn.types import MissReason

REASONS = [MissReason.EVICTED, MissReason.CORRUPT, MissReason.CLEARED]


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_what_was_never_here_was_never_stored() -> None:
    assert Ghosts().recall(0, key(1)) is MissReason.NEVER_STORED


def test_the_last_reason_counts() -> None:
    ghosts = Ghosts(8)
    ghosts.remember(0, key(1), MissReason.EVICTED)
    ghosts.remember(0, key(1), MissReason.CORRUPT)
    assert ghosts.recall(0, key(1)) is MissReason.CORRUPT


def test_the_last_reason_counts_across_generations() -> None:
    ghosts = Ghosts(4)
    for number in (1, 2, 1):
        ghosts.remember(0, key(number), MissReason.EVICTED)
    ghosts.remember(0, key(1), MissReason.CLEARED)
    assert ghosts.recall(0, key(1)) is MissReason.CLEARED


def test_after_forgetting_nothing_is_guessed() -> None:
    ghosts = Ghosts(4)
    for number in range(3):
        ghosts.remember(0, key(number), MissReason.EVICTED)
    assert ghosts.recall(0, key(9)) is MissReason.NEVER_STORED
    for number in range(3, 8):
        ghosts.remember(0, key(number), MissReason.EVICTED)
    assert ghosts.recall(0, key(0)) is MissReason.UNKNOWN
    assert ghosts.recall(0, key(99)) is MissReason.UNKNOWN
    assert ghosts.recall(0, key(7)) is MissReason.EVICTED


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 15), st.sampled_from(REASONS)), max_size=60))
def test_a_reason_is_right_or_unknown_and_memory_bounded(limit: int, life: list[tuple[int, MissReason]]) -> None:
    ghosts, last = Ghosts(limit), dict[int, MissReason]()
    for number, reason in life:
        ghosts.remember(0, key(number), reason)
        last[number] = reason
    answers = {number: ghosts.recall(0, key(number)) for number in range(16)}
    remembered = [n for n, reason in answers.items() if reason not in (MissReason.UNKNOWN, MissReason.NEVER_STORED)]
    assert len(remembered) <= max(limit, 2)
    for number, reason in answers.items():
        assert reason in (last.get(number, MissReason.NEVER_STORED), MissReason.UNKNOWN)
    recent = {number for number, _ in life[-max(1, limit // 2) :]}
    assert recent <= set(remembered), "at least half of the limit is remembered"
