"""Two ways to the core inside one process: by reference, and through serialised bytes as a socket would."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import msgspec

from kvcairn.config import ConfigReader
from kvcairn.core.core import Core
from kvcairn.core.open import add_tier, close_core
from kvcairn.errors import ClosedError, ConfigError, TierError
from kvcairn.memory.arena import Arena
from kvcairn.requests import AddTier, AnyReply, AnyRequest, DetachTier, Events, ReadCancel, ReadStatus, Value
from kvcairn.transfer.task import Task
from kvcairn.types import Completion

_AFTER_CLOSE = (Events, ReadStatus, ReadCancel)  # events are read to the end; buffers are waited for
_LANE = "client"  # transfer threads that work for callers, not for a tier


class Direct:
    """Requests and replies are passed by reference. Any thread."""

    def __init__(self, core: Core) -> None:
        """Speak to that core, which ends with this link."""
        self.core = core
        self.boot_id = core.boot_id
        self._is_open, self._is_fork = True, False
        self._closing = threading.Lock()
        _open_links.add(self)

    def memory(self, hold: int = 0) -> Arena:
        """Return the arena; there is only one."""
        self.check_open()
        return self.core.state.arena

    def call(self, request: Any) -> Any:
        """Handle one request."""
        if self._is_fork or not isinstance(request, _AFTER_CLOSE):
            self.check_open()
        if isinstance(request, AddTier | DetachTier):
            return self._change_tiers(request)
        return self.core.call(request)

    def wait(self, done: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait for `done()`."""
        if self._is_fork:
            self.check_open()
        return self.core.state.executor.pause(self.core.state.changed, done, timeout_s)

    def run(self, work: Callable[[], None], failed: Callable[[str], None]) -> None:
        """Run `work` on a transfer thread."""
        self.check_open()

        def done(_: Any, error: TierError | None) -> None:
            if error is not None:
                failed(error.reason)

        task = Task(_LANE, "run", work, done, lambda: None, timeout_s=float("inf"))
        self.core.state.executor.submit(task)

    def reads_into_buffers(self) -> bool:
        """Whether tiers can read into memory of this process: they run in it."""
        return True

    def has_lower_tiers(self) -> bool:
        """Whether there is a tier below memory now."""
        return len(self.core.state.levels) > 1

    def version(self) -> int:
        """Return the number of changes so far."""
        return self.core.state.version

    def notify(self) -> None:
        """Have those who wait ask again."""
        if self._is_fork:
            return
        with self.core.state.changed:
            self.core.state.notify()

    def when(self, event: Completion, then: Callable[[], None]) -> None:
        """Call `then` once the event has ended."""
        self.check_open()
        self.core.state.executor.when(event, then)

    def fileno(self) -> int:
        """Return the eventfd."""
        self.check_open()
        return self.core.state.eventfd

    def take_ended(self) -> bool:
        """Return whether jobs have ended since the last call."""
        try:
            os.eventfd_read(self.fileno())
        except BlockingIOError:
            return False
        return True

    def now(self) -> float:
        """Return the core's time."""
        return self.core.state.now()

    def close(self) -> None:
        """End the core."""
        with self._closing:
            if not self._is_open:
                return
            self._is_open = False
        close_core(self.core)

    def abandon(self) -> None:
        """This process is a fork: the core, and whatever lock was held, belong to the parent."""
        self._is_open, self._is_fork = False, True

    def check_open(self) -> None:
        """Raise ClosedError unless the cache is open, in this very process."""
        if not self._is_open:
            raise ClosedError("the cache is closed, or was opened by the parent of this process")

    def _change_tiers(self, request: AddTier | DetachTier) -> Value:
        core = self.core
        if isinstance(request, AddTier):
            reader = ConfigReader()
            options = reader.read_tier(request.options)
            reader.log_warnings()
            if any(level.name == options.name for level in core.state.levels):
                raise ConfigError("tier.name", "there is a tier of that name", options.name)
            add_tier(core, options, "tier")
            return Value(None)
        level = core.detach(request.tier)
        if level is None:
            raise ClosedError("the cache was closed while a tier was detached")
        self.wait(lambda: level.tasks == 0, level.timeout_s)
        if level.tier is not None:
            level.tier.close()
        core.forget(level)
        return Value(None)


class Loopback(Direct):
    """Sends every request and reply through msgpack bytes, so that nothing passes that a socket could not carry."""

    def __init__(self, core: Core) -> None:
        """Speak to that core."""
        super().__init__(core)
        self._encoder = msgspec.msgpack.Encoder()
        self._requests = msgspec.msgpack.Decoder(AnyRequest)
        self._replies = msgspec.msgpack.Decoder(AnyReply)

    def call(self, request: Any) -> Any:
        """Encode, decode, handle, encode, decode."""
        reply = super().call(self._requests.decode(self._encoder.encode(request)))
        return self._replies.decode(self._encoder.encode(reply))


_open_links: weakref.WeakSet[Direct] = weakref.WeakSet()


def _abandon_all() -> None:
    for link in list(_open_links):
        link.abandon()


os.register_at_fork(after_in_child=_abandon_all)
