"""The link over a socket: the same calls as inside the process, handled by a daemon."""

from __future__ import annotations

import os
import socket
import threading
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from kvcairn import requests as rq
from kvcairn.errors import ClosedError, ConfigError, KVCairnError, TierError, UnsupportedError
from kvcairn.host import started_ticks
from kvcairn.remote.arena import SharedArena
from kvcairn.remote.missed import missed
from kvcairn.remote.protocol import (
    PROTOCOL,
    Answer,
    Await,
    Channel,
    Goodbye,
    Hello,
    Notify,
    ProtocolError,
    Refused,
    Welcome,
)
from kvcairn.transfer.executor import Executor, ThreadExecutor
from kvcairn.transfer.task import Task
from kvcairn.types import Completion

CONNECT_S: Final = 5.0
SLICE_S: Final = 0.25  # of one wait at the daemon
_LANE: Final = "client"
_SCHEME: Final = "unix:"
_BROKEN = (OSError, EOFError, ProtocolError)


class Remote:
    """Speaks to a daemon. Any thread; a call that waits holds up no other.

    Each call has a connection of the pool for itself, so that requests need no numbers: a reply follows its request.
    Where the daemon is gone, calls of serving are misses (`tier_down`), others raise ClosedError.
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
        self._pool = Pool(address)
        self.boot_id, self.prefetch = self._pool.welcome.boot_id, self._pool.welcome.prefetch
        self._arena = self._pool.arena
        self._state = State()
        self._executor: Executor = executor or ThreadExecutor()
        if executor is None:
            self._executor.start(lambda now_s: None)
        self._has_executor = executor is None
        _open_links.add(self)

    @property
    def arena(self) -> memoryview:
        """The arena as flat writable bytes."""
        self.check_open()
        return self._arena.view

    def read(self, begin: int, nbytes: int) -> bytes:
        """Return a copy of bytes of the arena."""
        self.check_open()
        return self._arena.read(begin, nbytes)

    def reads_into_buffers(self) -> bool:
        """Whether tiers can read into memory of this process: a daemon's cannot."""
        return False

    def call(self, request: Any) -> Any:
        """Handle one request."""
        self.check_open()
        try:
            answer = self._pool.ask(request)
        except _BROKEN as error:
            if (reply := missed(request, self._state.groups)) is not None:
                return reply
            raise ClosedError(
                f"the daemon at {self._pool.address} is gone: {str(error) or 'it closed the connection'}"
            ) from error
        self._state.note(answer)
        if isinstance(answer.reply, Refused):
            raise answer.reply.error()
        if isinstance(request, rq.OpenSpace):
            self._state.groups = max(self._state.groups, len(request.descriptor.layout.groups))
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
        """Return the eventfd, which the daemon writes to."""
        self.check_open()
        return self._pool.eventfd

    def now(self) -> float:
        """Return the time, which is the daemon's as well."""
        return self._executor.clock.now()

    def close(self) -> None:
        """End this session; the daemon goes on. What is still held stays so until this process ends."""
        if not self._state.end():
            return
        if self._has_executor:
            self._executor.close()
        self._pool.close()
        self._arena.close()

    def abandon(self) -> None:
        """This process is a fork: the session belongs to the parent."""
        self._state = State(is_open=False)

    def check_open(self) -> None:
        """Raise ClosedError unless the link is open, in this very process."""
        if not self._state.is_open:
            raise ClosedError("the cache is closed, or was opened by the parent of this process")


class State:
    """What the last replies said, and whether the link is open. Any thread."""

    def __init__(self, is_open: bool = True) -> None:
        """Know nothing yet."""
        self.version, self.has_lower_tiers, self.groups, self.is_open = 0, True, 1, is_open
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
        self._link.call(Await(self.seen, SLICE_S if timeout is None else min(timeout, SLICE_S)))


class Pool:
    """The connections of one session. Any thread."""

    def __init__(self, address: str) -> None:
        """Open a session with its first connection; raises as `Remote`."""
        if not address.startswith(_SCHEME) or not address[len(_SCHEME) :]:
            raise ConfigError("address", "a daemon's address is unix:PATH", address)
        self.address = address
        self._client = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._guard = threading.Lock()
        self._idle: list[Channel[Answer]] = []
        self._busy: set[Channel[Answer]] = set()
        self._is_closed = False
        channel, self.welcome, fds = self._open(Hello(PROTOCOL, self._client, started=started_ticks(os.getpid()) or 0))
        if len(fds) != 2:
            raise ConfigError("address", "the daemon did not hand over its arena", address)
        self.eventfd = fds[1]
        self.arena = SharedArena(fds[0], self.welcome.arena_bytes)
        if self.welcome.is_prefaulted:
            self.arena.prefault()
        self._idle.append(channel)

    def ask(self, request: object) -> Answer:
        """Send a request and return its answer; a connection that fails is given up."""
        channel = self._take()
        is_whole = False
        try:
            channel.send(request)
            answer = channel.receive()
            is_whole = True
            return answer
        finally:
            with self._guard:
                self._busy.discard(channel)
                is_kept = is_whole and not self._is_closed
                if is_kept:
                    self._idle.append(channel)
            if not is_kept:
                channel.close()

    def close(self) -> None:
        """Say goodbye and end all connections; calls that wait for an answer fail."""
        with suppress(*_BROKEN):
            self.ask(Goodbye())
        with self._guard:
            self._is_closed = True
            channels = [*self._idle, *self._busy]
            self._idle.clear()
        for channel in channels:
            channel.close()
        os.close(self.eventfd)
        self.eventfd = -1

    def _take(self) -> Channel[Answer]:
        with self._guard:
            if self._is_closed:
                raise EOFError
            if self._idle:
                channel = self._idle.pop()
                self._busy.add(channel)
                return channel
        try:
            channel, _, _ = self._open(Hello(PROTOCOL, self._client, self.welcome.session, self.welcome.secret))
        except KVCairnError as error:
            raise ConnectionError(str(error)) from error
        with self._guard:
            self._busy.add(channel)
        return channel

    def _open(self, hello: Hello) -> tuple[Channel[Answer], Welcome, list[int]]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        channel: Channel[Answer] = Channel(sock, Answer)
        try:
            sock.settimeout(CONNECT_S)
            sock.connect(self.address[len(_SCHEME) :])
            channel.send(hello)
            answer, fds = channel.receive_fds()
            sock.settimeout(None)
        except _BROKEN as error:
            sock.close()
            why = f"no daemon answers there: {str(error) or 'it closed the connection'}"
            raise ConfigError("address", why, self.address, "is `kvcairn serve` running?") from error
        if isinstance(answer.reply, Welcome):
            return channel, answer.reply, fds
        sock.close()
        raise answer.reply.error() if isinstance(answer.reply, Refused) else UnsupportedError("this is no daemon")


_open_links: weakref.WeakSet[Remote] = weakref.WeakSet()


def _abandon_all() -> None:
    for link in list(_open_links):
        link.abandon()


os.register_at_fork(after_in_child=_abandon_all)
