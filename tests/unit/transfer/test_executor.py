from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvcairn.clock import MonotonicClock, VirtualClock
from kvcairn.errors import TierError, TierFull, TierTimeout, TierUnavailable
from kvcairn.transfer.executor import InlineExecutor, ThreadExecutor
from kvcairn.transfer.task import Task, TaskState

LONG_S = 60.0  # nothing here takes that long; a test that fails does


class Call:
    """One task whose run is in the test's hand, and all that became of it."""

    def __init__(self, *, tier: str = "t", priority: int = 0, timeout_s: float = LONG_S, result: Any = None) -> None:
        self.result = result
        self.entered, self.gate = threading.Event(), threading.Event()
        self.ended, self.returned = threading.Event(), threading.Event()
        self.outcomes: list[tuple[Any, TierError | None]] = []
        self.lates = 0
        self.task = Task(tier, "read", self._run, self._done, self._late, priority, timeout_s)

    @property
    def error(self) -> TierError | None:
        (outcome,) = self.outcomes
        return outcome[1]

    def _run(self) -> Any:
        self.entered.set()
        assert self.gate.wait(LONG_S)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    def _done(self, value: Any, error: TierError | None) -> None:
        self.outcomes.append((value, error))
        self.ended.set()

    def _late(self) -> None:
        self.lates += 1
        self.returned.set()


def open_call(**options: Any) -> Call:
    """A call that runs through."""
    call = Call(**options)
    call.gate.set()
    return call


class Watch:
    """A clock that the test moves, under the threads that look at it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def now(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Watch:
    return Watch()


@pytest.fixture
def calls() -> list[Call]:
    """Calls that are let go at the end of the test."""
    return []


@pytest.fixture
def executor(clock: Watch, calls: list[Call], request: pytest.FixtureRequest) -> Any:
    executor = ThreadExecutor({"t": 2, "one": 1}, clock)
    executor.start(lambda now_s: None)
    yield executor
    for call in calls:
        call.gate.set()
    executor.close()


def hang(executor: ThreadExecutor, calls: list[Call], count: int = 1, **options: Any) -> list[Call]:
    """Submit calls that do not return before the test ends, and see them begin."""
    hanging = [Call(**options) for _ in range(count)]
    for call in hanging:
        calls.append(call)
        executor.submit(call.task)
    for call in hanging:
        assert call.entered.wait(LONG_S)
    return hanging


def pass_deadline(executor: ThreadExecutor, clock: Watch, hanging: list[Call]) -> None:
    clock.now_s += 1000
    executor.wake()
    for call in hanging:
        assert call.ended.wait(LONG_S)


OUTCOMES: list[tuple[Any, type[TierError] | None]] = [
    (5, None),
    (None, None),
    (TierFull("t", "read"), TierFull),
    (OSError("no"), TierUnavailable),
    (AssertionError("bug"), TierUnavailable),
]


@pytest.mark.parametrize(("result", "kind"), OUTCOMES, ids=repr)
def test_whatever_a_call_does_becomes_its_outcome(result: Any, kind: type[TierError] | None) -> None:
    call, executor = open_call(result=result), InlineExecutor()
    executor.submit(call.task)
    executor.run()
    ((value, error),) = call.outcomes
    assert (value, type(error)) == ((None, kind) if kind else (result, type(None)))
    assert call.task.state is TaskState.DONE


@pytest.mark.parametrize(("result", "kind"), OUTCOMES, ids=repr)
def test_so_it_does_on_a_thread(executor: ThreadExecutor, result: Any, kind: type[TierError] | None) -> None:
    call = open_call(result=result)
    executor.submit(call.task)
    assert call.ended.wait(LONG_S)
    ((value, error),) = call.outcomes
    assert (value, type(error)) == ((None, kind) if kind else (result, type(None)))
    after = open_call()
    executor.submit(after.task)
    assert after.ended.wait(LONG_S), "the thread lives on"


class TestInline:
    def test_one_task_a_step_the_most_urgent_first_then_in_order(self) -> None:
        executor, ran = InlineExecutor(), list[str]()
        for name, priority in (("a", 5), ("b", 0), ("c", 5), ("d", -1)):
            executor.submit(
                Task("t", name, lambda name=name: ran.append(name), lambda *_: None, lambda: None, priority)  # type: ignore[misc]
            )
        assert executor.step()
        assert ran == ["d"]
        executor.run()
        assert ran == ["d", "b", "a", "c"]
        assert not executor.step()

    def test_only_what_is_queued_can_be_cancelled(self) -> None:
        executor, one, two = InlineExecutor(), open_call(), open_call()
        executor.submit(one.task)
        executor.submit(two.task)
        assert executor.cancel(one.task)
        assert not executor.cancel(one.task)
        executor.run()
        assert not executor.cancel(two.task)
        assert (one.outcomes, len(two.outcomes)) == ([], 1)

    def test_a_wait_runs_what_is_queued_and_no_more_than_needed(self) -> None:
        executor, one, two = InlineExecutor(), open_call(), open_call()
        executor.submit(one.task)
        executor.submit(two.task)
        changed = threading.Condition()
        assert executor.pause(changed, one.ended.is_set, None)
        assert two.outcomes == []
        assert executor.clock.now() == 0.0

    def test_a_wait_for_nothing_moves_the_clock(self) -> None:
        executor = InlineExecutor(VirtualClock(7.0))
        assert not executor.pause(threading.Condition(), lambda: False, 2.5)
        assert executor.clock.now() == 9.5
        assert executor.pause(threading.Condition(), lambda: executor.clock.now() >= 12, 2.5)

    def test_time_passes_for_the_core_with_every_step(self) -> None:
        executor, ticks = InlineExecutor(VirtualClock(1.0)), list[float]()
        executor.start(lambda now_s: ticks.append(now_s))
        executor.step()
        executor.clock.advance(2)
        executor.wake()
        assert ticks == [1.0, 3.0]

    def test_closing_ends_what_is_queued(self) -> None:
        executor, one, two = InlineExecutor(), open_call(), open_call()
        executor.submit(one.task)
        executor.submit(two.task)
        executor.cancel(two.task)
        executor.close()
        assert isinstance(one.error, TierUnavailable)
        assert two.outcomes == []
        assert not executor.step()


class TestThreads:
    def test_the_most_urgent_goes_first(self, executor: ThreadExecutor, calls: list[Call]) -> None:
        (first,) = hang(executor, calls, tier="one")
        order: list[int] = []
        queued = [open_call(tier="one", priority=priority) for priority in (3, 1, 2, 1)]
        for number, call in enumerate(queued):
            call.task.run = lambda number=number: order.append(number)  # type: ignore[misc]
            executor.submit(call.task)
        first.gate.set()
        assert all(call.ended.wait(LONG_S) for call in queued)
        assert order == [1, 3, 2, 0]

    def test_as_many_calls_as_threads_run_at_once(self, executor: ThreadExecutor, calls: list[Call]) -> None:
        hang(executor, calls, 2)
        third = open_call()
        executor.submit(third.task)
        assert third.task.state is TaskState.QUEUED
        calls[0].gate.set()
        assert third.ended.wait(LONG_S)

    def test_two_tasks_wake_two_threads(self, executor: ThreadExecutor, calls: list[Call]) -> None:
        warm = open_call()
        executor.submit(warm.task)
        assert warm.ended.wait(LONG_S)
        lane = executor._lanes["t"]
        with lane.changed:
            lane.changed.wait_for(lambda: lane.idle == 1, LONG_S)
            hanging = [Call(), Call()]
            calls.extend(hanging)
            for call in hanging:
                executor.submit(call.task)
            assert lane.workers == 2, "one idle thread is not two"

    def test_a_hung_tier_holds_up_no_other(self, executor: ThreadExecutor, calls: list[Call]) -> None:
        hang(executor, calls, 2)
        other = open_call(tier="other")
        executor.submit(other.task)
        assert other.ended.wait(LONG_S)

    def test_what_is_queued_is_cancelled_and_what_runs_is_not(
        self, executor: ThreadExecutor, calls: list[Call]
    ) -> None:
        (running,) = hang(executor, calls, tier="one")
        queued, other = open_call(tier="one"), open_call(tier="never heard of")
        executor.submit(queued.task)
        assert executor.cancel(queued.task)
        assert not executor.cancel(queued.task)
        assert not executor.cancel(running.task)
        assert not executor.cancel(other.task)
        running.gate.set()
        assert running.ended.wait(LONG_S)
        assert not executor.cancel(running.task)
        after = open_call(tier="one")
        executor.submit(after.task)
        assert after.ended.wait(LONG_S)
        assert queued.outcomes == []

    def test_a_call_past_its_deadline_is_given_up_once_and_returns_once(
        self, executor: ThreadExecutor, clock: Watch, calls: list[Call]
    ) -> None:
        (hung,) = hang(executor, calls)
        pass_deadline(executor, clock, [hung])
        assert isinstance(hung.error, TierTimeout)
        assert hung.task.state is TaskState.GIVEN_UP
        assert hung.lates == 0
        hung.gate.set()
        assert hung.returned.wait(LONG_S)
        pass_deadline(executor, clock, [])
        assert (len(hung.outcomes), hung.lates) == (1, 1)

    def test_a_call_that_returns_in_time_is_never_late(
        self, executor: ThreadExecutor, clock: Watch, calls: list[Call]
    ) -> None:
        (call,) = hang(executor, calls)
        clock.now_s += LONG_S - 1
        executor.wake()
        call.gate.set()
        assert call.ended.wait(LONG_S)
        assert (call.error, call.lates) == (None, 0)

    def test_threads_that_hang_are_replaced(self, executor: ThreadExecutor, clock: Watch, calls: list[Call]) -> None:
        hung = hang(executor, calls, 2)
        waiting = open_call()
        executor.submit(waiting.task)
        pass_deadline(executor, clock, hung)
        assert waiting.ended.wait(LONG_S)
        assert waiting.error is None

    def test_time_in_the_queue_does_not_count(self, executor: ThreadExecutor, clock: Watch, calls: list[Call]) -> None:
        (running,) = hang(executor, calls, tier="one", timeout_s=1e9)
        waiting = open_call(tier="one", timeout_s=1.0)
        executor.submit(waiting.task)
        clock.now_s += 1000
        executor.wake()
        running.gate.set()
        assert waiting.ended.wait(LONG_S)
        assert waiting.error is None

    def test_where_every_thread_hangs_what_waits_is_given_up(
        self, executor: ThreadExecutor, clock: Watch, calls: list[Call]
    ) -> None:
        hung = hang(executor, calls, 2)
        pass_deadline(executor, clock, hung)
        hung += hang(executor, calls, 2)
        waiting = open_call()
        executor.submit(waiting.task)
        pass_deadline(executor, clock, [*hung, waiting])
        assert isinstance(waiting.error, TierTimeout)
        assert not waiting.entered.is_set()
        hung[0].gate.set()
        assert hung[0].returned.wait(LONG_S)
        after = open_call()
        executor.submit(after.task)
        assert after.ended.wait(LONG_S)
        assert after.error is None

    def test_closing_ends_what_waits_and_waits_for_what_runs(self, executor: ThreadExecutor, calls: list[Call]) -> None:
        (running,) = hang(executor, calls, tier="one")
        waiting = open_call(tier="one")
        executor.submit(waiting.task)
        closer = threading.Thread(target=executor.close)
        closer.start()
        assert waiting.ended.wait(LONG_S)
        assert isinstance(waiting.error, TierUnavailable)
        assert closer.is_alive()
        running.gate.set()
        closer.join(LONG_S)
        assert not closer.is_alive()
        assert (running.error, waiting.entered.is_set()) == (None, False)

    def test_closing_leaves_a_hung_call_alone(self, executor: ThreadExecutor, clock: Watch, calls: list[Call]) -> None:
        (hung,) = hang(executor, calls)
        pass_deadline(executor, clock, [hung])
        executor.close()
        executor.close()
        hung.gate.set()
        assert hung.returned.wait(LONG_S)

    def test_after_closing_a_task_ends_at_once(self, executor: ThreadExecutor) -> None:
        executor.close()
        call = open_call()
        executor.submit(call.task)
        assert isinstance(call.error, TierUnavailable)

    def test_a_wait_ends_with_the_condition_or_with_its_time(self, executor: ThreadExecutor, clock: Watch) -> None:
        changed, done = threading.Condition(), threading.Event()
        waiter = threading.Thread(target=lambda: executor.pause(changed, done.is_set, None))
        waiter.start()
        done.set()
        with changed:
            changed.notify_all()
        waiter.join(LONG_S)
        assert not waiter.is_alive()
        assert not executor.pause(changed, lambda: False, 0.0)
        assert not executor.pause(changed, lambda: False, -1.0)
        assert executor.pause(changed, lambda: True, 0.0)

    @pytest.mark.parametrize("timeout_s", [float("inf"), 1e12])
    def test_a_wait_may_be_as_long_as_it_likes(self, executor: ThreadExecutor, timeout_s: float) -> None:
        changed, answers = threading.Condition(), iter([False, False, True])

        def wake_up() -> None:
            with changed:
                changed.notify_all()

        timers = [threading.Timer(0.01 * (i + 1), wake_up) for i in range(5)]
        for timer in timers:
            timer.start()
        assert executor.pause(changed, lambda: next(answers, True), timeout_s)
        for timer in timers:
            timer.join()


def ticking(tick: Callable[[float], float | None]) -> ThreadExecutor:
    executor = ThreadExecutor(clock=MonotonicClock())
    executor.start(tick)
    return executor


def test_the_core_is_called_when_it_asked_for_it() -> None:
    called = threading.Event()
    count = 0

    def tick(now_s: float) -> float | None:
        nonlocal count
        count += 1
        if count > 3:
            called.set()
            return None
        return now_s

    executor = ticking(tick)
    assert called.wait(LONG_S)
    executor.close()


def test_an_event_that_raises_stops_nothing(executor: ThreadExecutor) -> None:
    class Bad:
        def query(self) -> bool:
            raise RuntimeError("the device is gone")

    class Good:
        def query(self) -> bool:
            return True

    bad, good, broken, late = (threading.Event() for _ in range(4))

    def fail() -> None:
        broken.set()
        raise OSError

    executor.when(Bad(), bad.set)
    executor.when(Good(), fail)
    executor.when(Good(), good.set)
    assert good.wait(LONG_S)
    assert broken.is_set()
    executor.when(Good(), late.set)
    assert late.wait(LONG_S)
    assert not bad.is_set()


def test_a_hurried_task_goes_before_others_and_runs_once() -> None:
    executor = ThreadExecutor({"t": 1})
    executor.start(lambda _: None)
    running, ahead, hurried = Call(), open_call(priority=5), open_call(priority=50)
    executor.submit(running.task)
    assert running.entered.wait(LONG_S)
    order: list[str] = []
    for name, call in (("ahead", ahead), ("hurried", hurried)):
        call.task.run = lambda name=name: order.append(name)  # type: ignore[misc]
        executor.submit(call.task)
    executor.hurry(hurried.task, 0)
    executor.hurry(hurried.task, 20)  # never back
    running.gate.set()
    assert ahead.ended.wait(LONG_S) and hurried.ended.wait(LONG_S)
    executor.close()
    assert order == ["hurried", "ahead"]
    assert len(hurried.outcomes) == 1


def test_a_hurried_task_that_never_ran_ends_once() -> None:
    executor = ThreadExecutor({"t": 1})
    executor.start(lambda _: None)
    running, waiting = Call(), open_call(priority=50)
    executor.submit(running.task)
    assert running.entered.wait(LONG_S)
    executor.submit(waiting.task)
    executor.hurry(waiting.task, 0)
    threading.Timer(0.1, running.gate.set).start()
    executor.close()
    assert len(waiting.outcomes) == 1
    executor.hurry(waiting.task, 0)
