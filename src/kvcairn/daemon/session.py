"""One client: what it holds, and the end of that."""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from typing import Any, Final

from kvcairn import requests as rq
from kvcairn.core.link import Direct
from kvcairn.daemon.checks import check
from kvcairn.errors import ClosedError, KVCairnError, LeaseError
from kvcairn.remote.protocol import NAMES
from kvcairn.types import JobState

Held = tuple[str, int]  # kind, number

_ENDING: Final = frozenset({rq.Release, rq.Damaged, rq.Commit, rq.Abort, rq.JobLease, rq.JobClose, rq.Unsubscribe})
_MUST_BE_OPEN: Final = (rq.Damaged, rq.Commit, rq.JobLease)
_OPENING: Final = frozenset({rq.Acquire, rq.AcquireAll, rq.Reserve, rq.Prefetch, rq.JobLease, rq.Subscribe, rq.Adopt})
_TIER_CHANGES: Final = frozenset({rq.AddTier, rq.DetachTier})


class Session:
    """Everything that one client process holds belongs to its session, whatever connection it came over.

    It ends when the process has ended, so that nobody can still write to its slots, or with a goodbye where nothing is
    held any more. Any thread.
    """

    def __init__(self, number: int, link: Direct, client: str, pidfd: int) -> None:
        """Serve `client` by `link`; the descriptor of its process belongs to the session."""
        self.number, self.client, self.pidfd = number, client, pidfd
        self.secret = os.urandom(16)
        self.eventfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._link = link
        self._held: dict[Held, int] = {}
        self._ended: deque[rq.JobStatus] = deque(maxlen=1 << 16)
        self._guard = threading.Lock()
        self._is_open = True

    def call(self, request: Any) -> Any:
        """Handle one request, and note what it opened or ended.

        Raises:
            KVCairnError, ValueError: as the core; the session goes on.
            Refusal: no client of ours sends that; the connection has to end.
        """
        check(request, self._link.core)
        kind = type(request)
        if kind in _TIER_CHANGES:  # waits for storage, and opens nothing that is owned
            return self._link.call(request)
        with self._guard:
            if not self._is_open:
                raise ClosedError("the session has ended")
            if kind is rq.Ended:
                ended, self._ended = list(self._ended), deque(maxlen=self._ended.maxlen)
                return rq.JobBatch(ended)
            field = NAMES.get(kind)
            named = None if field is None else (field, getattr(request, field))
            if named is not None and named not in self._held:
                return _unknown(request, named)
            reply = self._link.call(request)
            if named is not None and kind in _ENDING:
                self._drop(named)
            for opened in _opened(request, reply) if kind in _OPENING else ():
                self._held[opened] = self._held.get(opened, 0) + 1
            return reply

    def job_ended(self, status: rq.JobStatus) -> bool:
        """Tell the client of the end of a job if it is one of its own; return whether it is."""
        with self._guard:
            if not self._is_open or ("job", status.job) not in self._held:
                return False
            self._ended.append(status)
            with suppress(BlockingIOError):
                os.eventfd_write(self.eventfd, 1)
            return True

    def leave(self) -> bool:
        """The client says goodbye: end if nothing is held that it could still touch; return whether it ended."""
        with self._guard:
            for kind, number in [held for held in self._held if held[0] in ("job", "reader")]:
                self._end(kind, number)
            if self._held:
                return False
            self._close()
            return True

    def end(self) -> int:
        """The process has ended: let go of everything; return how many holds there were. Idempotent."""
        with self._guard:
            if not self._is_open:
                return 0
            held = [held for held, count in self._held.items() for _ in range(count)]
            for kind, number in held:
                self._end(kind, number)
            self._close()
            return len(held)

    def close(self) -> None:
        """The daemon stops: nothing is let go, for the process may still touch it. Idempotent."""
        with self._guard:
            if self._is_open:
                self._close()

    def _drop(self, held: Held) -> None:
        self._held[held] -= 1
        if self._held[held] <= 0:
            del self._held[held]

    def _end(self, kind: str, number: int) -> None:
        request = {"lease": rq.Release, "reservation": rq.Abort, "job": rq.JobClose, "reader": rq.Unsubscribe}[kind]
        with suppress(KVCairnError):  # ended by itself, by its time to live
            self._link.call(request(number))
        self._drop((kind, number))

    def _close(self) -> None:
        self._is_open = False
        os.close(self.eventfd)
        os.close(self.pidfd)


def _unknown(request: Any, named: Held) -> Any:
    """Answer a request that names what this client does not hold: as for what has ended already."""
    if isinstance(request, _MUST_BE_OPEN):
        raise LeaseError(f"{named[0]} {named[1]} is not open")
    if isinstance(request, rq.JobInfo):
        return rq.JobStatus(request.job, JobState.CANCELLED, 0, 0)
    return rq.EventBatch([], True) if isinstance(request, rq.Events) else rq.Value(None)


def _opened(request: Any, reply: Any) -> list[Held]:
    """Return what a request opened."""
    if isinstance(reply, rq.Leased):
        return [("job", reply.job) if reply.job is not None else ("lease", reply.lease)]
    if isinstance(reply, rq.LeasedAll):
        return [held for leased in reply.leases for held in _opened(request, leased)]
    if isinstance(reply, rq.Reserved):
        return [("reservation", reply.reservation)]
    if isinstance(request, rq.Prefetch):
        return [("job", reply.job)]
    if isinstance(request, rq.Subscribe):
        return [("reader", reply.value)]
    if isinstance(reply, rq.Adopted):
        opened = reply.lease or reply.reservation or reply.job
        return _opened(rq.Prefetch(0, []) if reply.kind == "job" else request, opened)
    return []
