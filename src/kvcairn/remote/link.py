"""The link over a socket: the same calls as inside the process, handled by a daemon."""

from __future__ import annotations

import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from kvcairn import requests as rq
from kvcairn.errors import ClosedError, TierError
from kvcairn.remote.arena import SharedArena
from kvcairn.remote.missed import missed
from kvcairn.remote.pool import BROKEN
from kvcairn.remote.protocol import SLICE_S, Answer, Await, Notify, Refused
from kvcairn.remote.runs import FIRST_RETRY_S, Run, Runs
from kvcairn.transfer.executor import Executor, ThreadExecutor
from kvcairn.transfer.task import Task
from kvcairn.types import Completion

_LANE: Final = "client"


class Remote:
    """Speaks to a daemon. Any thread; a call that waits holds up no other.

    Where the daemon is gone, calls of serving are misses (`tier_down`), others raise ClosedError, and a thread looks
    for the daemon, or the next one, until it is there again. What an earlier run of the daemon had given out has ended
    with it: leases stay readable, reservations commit to nothing.
    """

    def __init__(self, address: str, executor: Executor | None = None) -> None:
        """Connect.

        Args:
            address: `unix:PATH` of the daemon's socket.
            executor: who runs transfers of this client; threads unless given.

        Raises:
            ConfigError: there is no daemon at that address, or it is none that can be spoken to.
            UnsupportedError: it speaks another version of the protocol, or refuses this client.
        """
        self._address = address
        self._runs = Runs(address, f"{os.getpid()}-{uuid.uuid4().hex[:8]}")
        self.prefetch = self._runs.now.pool.welcome.prefetch
        self._state = State()
        self._executor: Executor = executor or ThreadExecutor()
        if executor is None:
            self._executor.start(lambda now_s: None)
        self._has_executor = executor is None
        _open_states.add(self._state)

    @property
    def boot_id(self) -> bytes:
        """Names the present run of the daemon."""
        return self._runs.now.pool.welcome.boot_id

    def memory(self, hold: int = 0) -> SharedArena:
        """Return the arena of a hold, or the present one."""
        self.check_open()
        return self._runs.memory(hold)

    def reads_into_buffers(self) -> bool:
        """Whether tiers can read into memory of this process: a daemon's cannot."""
        return False

    def call(self, request: Any) -> Any:
        """Handle one request."""
        self.check_open()
        if self._runs.is_former(request):
            return self._runs.end_former(request, missed(request, self._state.groups))
        run = self._runs.now
        if run.is_lost:
            run.put_off(request)
            return self._missed(request, None)
        try:
            if isinstance(request, rq.Release):
                run.pool.tell(request)
                return rq.Value(None)
            answer = self._ask(run, request)
        except BROKEN as error:
            self._runs.lose(run)
            return self._missed(request, error)
        except LookupError:
            return self._missed(request, None)
        self._state.note(answer)
        if isinstance(answer.reply, Refused):
            raise answer.reply.error()
        return answer.reply

    def wait(self, done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait for `done()`."""
        changes = Changes(self)

        def is_done() -> bool:
            changes.seen = self._state.version
            return done()

        return self._executor.pause(changes, is_done, timeout_s)

    def run(self, work: Callable[[], None], failed: Callable[[str], None]) -> None:
        """Run `work` on a transfer thread."""
        self.check_open()

        def done(_: Any, error: TierError | None) -> None:
            if error is not None:
                failed(error.reason)

        self._executor.submit(Task(_LANE, "run", work, done, lambda: None, timeout_s=float("inf")))

    def has_lower_tiers(self) -> bool:
        """Whether there was a tier below memory at the last reply."""
        return self._state.has_lower_tiers

    def version(self) -> int:
        """Return the number of changes up to the last reply."""
        return self._state.version

    def notify(self) -> None:
        """Have those who wait ask again."""
        with suppress(ClosedError):
            self.call(Notify())

    def when(self, event: Completion, then: Callable[[], None]) -> None:
        """Call `then` once the event has ended."""
        self.check_open()
        self._executor.when(event, then)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when jobs end; the same one for all runs of the daemon."""
        self.check_open()
        return self._runs.ready.fileno()

    def take_ended(self) -> bool:
        """Return whether it was readable, and make it not so."""
        self.check_open()
        return self._runs.take_ended()

    def now(self) -> float:
        """Return the time, which is the daemon's as well."""
        return self._executor.clock.now()

    def close(self) -> None:
        """End this session; the daemon goes on. What is still held stays so until this process ends."""
        if not self._state.end():
            return
        if self._has_executor:
            self._executor.close()
        self._runs.close()

    def check_open(self) -> None:
        """Raise ClosedError unless the link is open, in this very process."""
        if not self._state.is_open:
            raise ClosedError("the cache is closed, or was opened by the parent of this process")

    def _ask(self, run: Run, request: Any) -> Answer:
        if isinstance(request, rq.OpenSpace):
            self._state.groups = max(self._state.groups, len(request.descriptor.layout.groups))
            return self._runs.open_space(request)
        return run.ask(request)

    def _missed(self, request: Any, error: Exception | None) -> Any:
        if (reply := missed(request, self._state.groups)) is not None:
            return reply
        raise ClosedError(
            f"the daemon at {self._address} is gone: {str(error or '') or 'it does not answer'}"
        ) from error


class State:
    """What the last replies said, and whether the link is open. Any thread."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self.version, self.has_lower_tiers, self.groups, self.is_open = 0, True, 1, True
        self._guard = threading.Lock()

    def note(self, answer: Answer) -> None:
        """Take over what came with a reply; of two, the later one counts."""
        if answer.version > self.version:
            with self._guard:
                self.version = max(self.version, answer.version)
        self.has_lower_tiers = answer.has_lower_tiers

    def end(self) -> bool:
        """Mark as closed; False where it was."""
        with self._guard:
            was_open, self.is_open = self.is_open, False
        return was_open


class Changes:
    """Stands for the condition of a core: to wait on it is to ask the daemon whether it is beyond a version."""

    def __init__(self, link: Remote) -> None:
        """Wait for changes behind that link."""
        self._link, self.seen = link, 0

    def __enter__(self) -> Self:
        """Nothing is locked here."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is locked here."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait for a change, at most `timeout` seconds, and never longer than the daemon makes anybody wait."""
        wait_s = SLICE_S if timeout is None else min(timeout, SLICE_S)
        try:
            self._link.call(Await(self.seen, wait_s))
        except ClosedError:
            self._link.check_open()
            time.sleep(min(wait_s, FIRST_RETRY_S))  # the daemon is gone, and may come back


_open_states: weakref.WeakSet[State] = weakref.WeakSet()


def _abandon_all() -> None:
    """This process is a fork: its parent's sessions are none of its business."""
    for state in list(_open_states):
        state.is_open = False


os.register_at_fork(after_in_child=_abandon_all)
