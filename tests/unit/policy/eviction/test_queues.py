from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from kvcairn.policy.eviction.queues import _SEGMENT, RowQueues
from tests.unit.policy.eviction.kit import rows

CHAINS = st.lists(st.integers(0, 30), max_size=6, unique=True)


def entries(queues: RowQueues, queue: int) -> int:
    found = queues._entries[queue]
    return 0 if found is None else len(found)


def test_a_row_lies_in_the_queue_that_it_was_pushed_to_last() -> None:
    queues = RowQueues(3)
    queues.push(0, rows([1, 2, 3]))
    queues.push(2, rows([2]))
    assert [list(queues.oldest(queue)) for queue in range(3)] == [[3, 1], [], [2]]
    assert (queues.sizes, len(queues)) == ([2, 0, 1], 3)
    assert queues.queue_of(queues.here(rows([1, 2, 9]))).tolist() == [0, 2]


def test_each_is_pushed_to_its_own() -> None:
    queues = RowQueues(2)
    queues.push_each(rows([1, 0, 1]).astype("i2"), rows([5, 6, 7]))
    assert (list(queues.oldest(0)), list(queues.oldest(1))) == ([6], [7, 5])


def test_chunks_are_the_same_rows_in_the_same_order() -> None:
    queues = RowQueues(1)
    queues.push(0, rows(range(10_000)))
    queues.remove(rows(range(0, 10_000, 3)))
    chunks = list(queues.chunks(0))
    assert [row for chunk in chunks for row in chunk.tolist()] == list(queues.oldest(0))
    assert chunks[0].size <= 256 and max(chunk.size for chunk in chunks) <= _SEGMENT


def test_there_are_never_many_more_entries_than_rows() -> None:
    queues = RowQueues(1)
    queues.push(0, rows(range(40_000)))
    for turn in range(400):
        queues.push(0, rows(range(turn % 40, 40_000, 40)))
        assert entries(queues, 0) <= 2 * 40_000 + 4 * _SEGMENT
    assert sorted(queues.oldest(0)) == list(range(40_000))


def test_reading_lets_go_of_what_is_stale_at_the_head() -> None:
    queues = RowQueues(1)
    queues.push(0, rows(range(100_000)))
    queues.remove(rows(range(10, 100_000)))
    queues.push(0, rows(range(10)))
    assert list(queues.oldest(0)) == list(range(9, -1, -1))
    assert entries(queues, 0) < _SEGMENT


def test_two_readers_do_not_disturb_each_other() -> None:
    queues = RowQueues(1)
    queues.push(0, rows(range(20_000)))
    queues.remove(rows(range(9_000, 20_000)))
    one, two = queues.oldest(0), queues.oldest(0)
    assert [next(one), next(two)] == [8_999, 8_999]
    assert list(one) == list(two)


@given(st.lists(st.tuples(st.sampled_from(["push", "remove", "look"]), st.integers(0, 2), CHAINS), max_size=60))
def test_exactly_first_in_first_out(life: list[tuple[str, int, list[int]]]) -> None:
    queues, model = RowQueues(3), [OrderedDict[int, None]() for _ in range(3)]
    for action, queue, chain in life:
        if action == "look":
            next(queues.oldest(queue), None)
            continue
        for row in chain:
            for each in model:
                each.pop(row, None)
        if action == "push":
            queues.push(queue, rows(chain))
            model[queue].update(dict.fromkeys(reversed(chain)))
        else:
            queues.remove(rows(chain))
        assert [list(queues.oldest(number)) for number in range(3)] == [list(each) for each in model]
        assert queues.sizes == [len(each) for each in model]
