"""Runs tasks: on threads, or step by step on the caller's thread.

The one place with broad `except`: whatever a tier does, it becomes the outcome of a task.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from kvcairn.clock import Clock, MonotonicClock, VirtualClock
from kvcairn.errors import TierError, TierTimeout, TierUnavailable
from kvcairn.transfer.task import Task, TaskState
from kvcairn.types import Completion

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HEARTBEAT_S = 0.5
_POLL_S = 0.001  # between two looks at events that somebody waits for


class Changes(Protocol):
    """What `pause` sleeps on: a `threading.Condition`, or what stands for one behind a socket."""

    def __enter__(self) -> Any:
        """Take the lock."""
        ...

    def __exit__(self, *raised: Any) -> Any:
        """Give the lock back."""
        ...

    def wait(self, timeout: float | None = None) -> Any:
        """Sleep until something changed, or the timeout; may wake for nothing."""
        ...


class Executor(Protocol):
    """Runs tasks by tier and priority."""

    @property
    def clock(self) -> Clock:
        """The time that tasks and deadlines go by."""
        ...

    def start(self, tick: Callable[[float], float | None]) -> None:
        """Begin; `tick(now)` is called whenever it is due and says when it is due again (None: not before `wake`)."""
        ...

    def submit(self, task: Task) -> None:
        """Queue a task; never blocks."""
        ...

    def cancel(self, task: Task) -> bool:
        """Take a task out of the queue; False if it runs or has run. `done` is not called for it."""
        ...

    def hurry(self, task: Task, priority: int) -> None:
        """Let a queued task go before others, as if it had been submitted with that priority; never after."""
        ...

    def pause(self, changed: Changes, done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until `done()`, asked again after every notification of `changed`, or the timeout; return `done()`."""
        ...

    def when(self, event: Completion, then: Callable[[], None]) -> None:
        """Call `then` once `event.query()` is true; never, where it raises."""
        ...

    def wake(self) -> None:
        """Have `tick` called soon."""
        ...

    def close(self) -> None:
        """Stop. Queued tasks end with TierUnavailable; running ones are waited for, hung ones are left alone."""
        ...


def _tell(end: Callable[[], None]) -> None:
    """Tell of the end of a task; a thread survives whatever that raises."""
    try:
        end()
    except Exception:
        logger.exception("the end of a task could not be noted")


def _tick(tick: Callable[[float], float | None], now_s: float) -> float | None:
    """Call `tick`; the watch survives whatever it raises."""
    try:
        return tick(now_s)
    except Exception:
        logger.exception("housekeeping failed; it is tried again")
        return now_s + _HEARTBEAT_S


def _outcome(task: Task) -> tuple[Any, TierError | None]:
    """Run a task; an error of any kind becomes a TierError."""
    try:
        return task.run(), None
    except TierError as error:
        return None, error
    except Exception as error:
        wrapped = TierUnavailable(task.tier, task.op, f"{type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return None, wrapped


def outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Run work of somebody else's; return what it returned, or what it raised."""
    try:
        return work(), None
    except Exception as error:
        return None, error


class Watched:
    """Events that somebody waits for, and what is to be done when they have ended. Any thread."""

    def __init__(self) -> None:
        """Nothing is waited for."""
        self._guard = threading.Lock()
        self._waiting: list[tuple[Completion, Callable[[], None]]] = []

    def __len__(self) -> int:
        """Number of events."""
        return len(self._waiting)

    def add(self, event: Completion, then: Callable[[], None]) -> None:
        """Wait for one more."""
        with self._guard:
            self._waiting.append((event, then))

    def poll(self) -> None:
        """Do what is due. An event that raises is given up: what waits for it stays held, and nothing else suffers."""
        with self._guard:
            watched, self._waiting = self._waiting, []
        for event, then in watched:
            try:
                if event.query():
                    then()
                else:
                    self.add(event, then)
            except Exception:
                logger.exception("an event cannot be waited for: %r; its slots stay held", event)


class Lane:
    """The queue and the threads of one tier. Every field is guarded by `changed`."""

    def __init__(self, tier: str, threads: int, clock: Clock) -> None:
        """No thread is started before there is work."""
        self.tier, self.threads, self.clock = tier, threads, clock
        self.changed = threading.Condition()  # its lock may be taken twice
        self.queue: list[tuple[int, int, Task]] = []
        self.running: set[Task] = set()
        self.workers = 0
        self.idle = 0
        self.lost = 0  # workers inside a call that was given up
        self.is_closed = False

    @property
    def _most_workers(self) -> int:
        """Threads there may be with the lost ones: each can be replaced once."""
        return 2 * self.threads

    def add(self, task: Task, order: int) -> bool:
        """Queue a task, and start a thread where one is missing; False where the lane is closed."""
        with self.changed:
            if self.is_closed:
                return False
            heapq.heappush(self.queue, (task.priority, order, task))
            self._staff()
            self.changed.notify()
            return True

    def remove(self, task: Task) -> bool:
        """Take a queued task out."""
        with self.changed:
            if task.state is not TaskState.QUEUED:
                return False
            task.state = TaskState.DONE
            return True

    def hurry(self, task: Task, priority: int, order: int) -> None:
        """Queue a task once more, further ahead; where it stands as well it is passed over by its state."""
        with self.changed:
            if task.state is TaskState.QUEUED and priority < task.priority and not self.is_closed:
                task.priority = priority
                heapq.heappush(self.queue, (priority, order, task))

    def expire(self, now_s: float) -> tuple[list[Task], float]:
        """Give up calls past their deadline, and what waits while every thread hangs; say when to look again."""
        with self.changed:
            expired = [t for t in self.running if t.state is TaskState.RUNNING and t.deadline_s <= now_s]
            for task in expired:
                task.state = TaskState.GIVEN_UP
                self.running.discard(task)
                self.lost += 1
            if self.lost and self.workers == self.lost >= self._most_workers:
                for _, _, task in self.queue:
                    if task.state is TaskState.QUEUED:
                        task.state = TaskState.DONE
                        expired.append(task)
                self.queue.clear()
            self._staff()
            return expired, min((t.deadline_s for t in self.running), default=now_s + _HEARTBEAT_S)

    def close(self) -> list[Task]:
        """Stop the threads; return what was still queued."""
        with self.changed:
            self.is_closed = True
            left = list(dict.fromkeys(t for _, _, t in self.queue if t.state is TaskState.QUEUED))
            for task in left:
                task.state = TaskState.DONE
            self.queue.clear()
            self.changed.notify_all()
            return left

    def join(self) -> None:
        """Wait for running tasks, as long as their deadlines let them run; not for those that have none."""
        with self.changed:
            while self.is_busy():
                self.changed.wait(_HEARTBEAT_S)

    def is_busy(self) -> bool:
        """Whether a task with a deadline runs."""
        with self.changed:
            return any(math.isfinite(task.deadline_s) for task in self.running)

    def _staff(self) -> None:
        """Start threads while there is more work than idle ones; lost ones are replaced, up to the same number."""
        starting = 0
        while not self.is_closed and len(self.queue) > self.idle + starting:
            if self.workers - self.lost >= self.threads or self.workers >= self._most_workers:
                return
            self.workers += 1
            starting += 1
            threading.Thread(target=self._work, name=f"kvcairn-{self.tier}", daemon=True).start()

    def _next(self) -> Task | None:
        """Wait for a task; None when the lane is closed."""
        while True:
            while self.queue:
                task = heapq.heappop(self.queue)[2]
                if task.state is TaskState.QUEUED:
                    task.state = TaskState.RUNNING
                    task.deadline_s = self.clock.now() + task.timeout_s
                    self.running.add(task)
                    return task
            if self.is_closed:
                return None
            self.idle += 1
            self.changed.wait()
            self.idle -= 1

    def _work(self) -> None:
        while True:
            with self.changed:
                task = self._next()
                if task is None:
                    self.workers -= 1
                    self.changed.notify_all()
                    return
            value, error = _outcome(task)
            with self.changed:
                is_late = task.state is TaskState.GIVEN_UP
                if not is_late:
                    task.state = TaskState.DONE
                else:
                    self.lost -= 1
            if is_late:
                _tell(task.late)
            else:
                _tell(lambda: task.done(value, error))  # noqa: B023 - called at once
            with self.changed:
                self.running.discard(task)
                self.changed.notify_all()
            del task, value, error  # an idle thread keeps no buffer alive


class ThreadExecutor:
    """A few threads for each tier, so that a hung tier holds up no other, and one that watches deadlines."""

    def __init__(self, threads: dict[str, int] | None = None, clock: Clock | None = None) -> None:
        """`threads` gives the number for each tier, 4 where none is named."""
        self.clock: Clock = clock or MonotonicClock()
        self._threads = threads or {}
        self._lanes: dict[str, Lane] = {}
        self._order = itertools.count()
        self._guard = threading.Lock()
        self._wakeup = threading.Event()
        self._watch: threading.Thread | None = None
        self._watched = Watched()
        self._is_closed = False

    def start(self, tick: Callable[[float], float | None]) -> None:
        """Start the thread that watches deadlines and calls `tick`."""
        self._watch = threading.Thread(target=self._watch_deadlines, args=(tick,), name="kvcairn-watch", daemon=True)
        self._watch.start()

    def submit(self, task: Task) -> None:
        """Queue a task on its tier's lane; the watch learns of its deadline when it starts."""
        with self._guard:
            is_closed = self._is_closed
            lane = self._lanes.get(task.tier)
            if lane is None:
                lane = self._lanes[task.tier] = Lane(task.tier, self._threads.get(task.tier, 4), self.clock)
        if is_closed or not lane.add(task, next(self._order)):
            task.state = TaskState.DONE
            task.done(None, TierUnavailable(task.tier, task.op, "the cache is closed"))

    def cancel(self, task: Task) -> bool:
        """Take a queued task out of its lane."""
        lane = self._lanes.get(task.tier)
        return lane is not None and lane.remove(task)

    def hurry(self, task: Task, priority: int) -> None:
        """Move a queued task ahead in its lane."""
        lane = self._lanes.get(task.tier)
        if lane is not None:
            lane.hurry(task, priority, next(self._order))

    def pause(self, changed: Changes, done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Sleep on `changed`, whose lock `done` may take again."""
        deadline_s = None if timeout_s is None else self.clock.now() + timeout_s
        with changed:
            while not done():
                left = None if deadline_s is None else deadline_s - self.clock.now()
                if left is not None and left <= 0:
                    return False
                changed.wait(None if left is None else min(left, threading.TIMEOUT_MAX))
        return True

    def when(self, event: Completion, then: Callable[[], None]) -> None:
        """Have the watch poll the event."""
        self._watched.add(event, then)
        self._wakeup.set()

    def wake(self) -> None:
        """Call `tick` at once."""
        self._wakeup.set()

    def close(self) -> None:
        """Stop all lanes, then the watch."""
        with self._guard:
            if self._is_closed:
                return
            self._is_closed = True
            lanes = list(self._lanes.values())
        for lane in lanes:
            for task in lane.close():
                task.done(None, TierUnavailable(task.tier, task.op, "the cache is closed"))
        for lane in lanes:
            lane.join()
        self._wakeup.set()
        if self._watch is not None and self._watch is not threading.current_thread():
            self._watch.join()

    def _watch_deadlines(self, tick: Callable[[float], float | None]) -> None:
        while True:
            now = self.clock.now()
            with self._guard:
                lanes, is_closed = list(self._lanes.values()), self._is_closed
            next_s = now + _HEARTBEAT_S
            for lane in lanes:
                expired, look_again_s = lane.expire(now)
                next_s = min(next_s, look_again_s)
                for task in expired:
                    late = TierTimeout(task.tier, task.op, f"no answer within {task.timeout_s:g} s")
                    _tell(lambda: task.done(None, late))  # noqa: B023 - called at once
            if is_closed and not any(lane.is_busy() for lane in lanes):
                return
            self._watched.poll()
            due_s = None if is_closed else _tick(tick, now)
            if self._watched:
                next_s = min(next_s, now + _POLL_S)
            self._wakeup.wait(max(0.0, min(next_s, due_s if due_s is not None else next_s) - self.clock.now()))
            self._wakeup.clear()


class InlineExecutor:
    """Runs one task for each `step`, on the caller's thread: for replay, and for tests that interleave by hand.

    A task that waits (`pause`) runs what is queued, and where nothing is, moves the virtual clock on to what is due
    next. Not thread-safe.
    """

    def __init__(self, clock: VirtualClock | None = None) -> None:
        """Start empty."""
        self.clock: VirtualClock = clock or VirtualClock()
        self._queue: list[tuple[int, int, Task]] = []
        self._order = itertools.count()
        self._tick: Callable[[float], float | None] = lambda _: None
        self._watched = Watched()

    def start(self, tick: Callable[[float], float | None]) -> None:
        """Remember `tick`; it is called with every step."""
        self._tick = tick

    def submit(self, task: Task) -> None:
        """Queue a task."""
        heapq.heappush(self._queue, (task.priority, next(self._order), task))

    def cancel(self, task: Task) -> bool:
        """Take a queued task out."""
        if task.state is not TaskState.QUEUED:
            return False
        task.state = TaskState.DONE
        return True

    def hurry(self, task: Task, priority: int) -> None:
        """Move a queued task ahead."""
        if task.state is TaskState.QUEUED and priority < task.priority:
            task.priority = priority
            heapq.heappush(self._queue, (priority, next(self._order), task))

    def step(self) -> bool:
        """Run the next task; False if there is none."""
        self.wake()
        while self._queue:
            task = heapq.heappop(self._queue)[2]
            if task.state is TaskState.QUEUED:
                task.state = TaskState.RUNNING
                value, error = _outcome(task)
                task.state = TaskState.DONE
                task.done(value, error)
                return True
        return False

    def run(self) -> None:
        """Run until nothing is queued."""
        while self.step():
            pass

    def pause(self, changed: Changes, done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Step until `done()`, or until the time has passed: where nothing is left to run it goes on to what is due."""
        until_s = self.clock.now() + (math.inf if timeout_s is None else timeout_s)
        while not done():
            if self.step():
                continue
            now_s = self.clock.now()
            due_s = self._tick(now_s)
            next_s = until_s if due_s is None or due_s <= now_s else min(due_s, until_s)
            if math.isfinite(next_s):
                self.clock.advance(next_s - now_s)
            self.wake()
            if next_s >= until_s:
                return done()
        return True

    def when(self, event: Completion, then: Callable[[], None]) -> None:
        """Poll the event with every step."""
        self._watched.add(event, then)
        self._watched.poll()

    def wake(self) -> None:
        """Tick, and poll events, at once."""
        self._watched.poll()
        self._tick(self.clock.now())

    def close(self) -> None:
        """End what is queued."""
        for _, _, task in self._queue:
            if task.state is TaskState.QUEUED:
                task.state = TaskState.DONE
                task.done(None, TierUnavailable(task.tier, task.op, "the cache is closed"))
        self._queue.clear()
