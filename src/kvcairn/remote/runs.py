"""A client's session with one run of the daemon, and the way from one run to the next."""

from __future__ import annotations

import logging
import os
import select
import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import Any, Final

import msgspec

from kvcairn import requests as rq
from kvcairn.errors import KVCairnError, LeaseError
from kvcairn.layout import SpaceDescriptor
from kvcairn.remote.arena import SharedArena
from kvcairn.remote.pool import BROKEN, Pool
from kvcairn.remote.protocol import NAMES, TOLD, Answer, LostCommits

logger = logging.getLogger(__name__)

FIRST_RETRY_S: Final = 0.05
LAST_RETRY_S: Final = 1.0
_ENDS: Final = (rq.Release, rq.Damaged, rq.Commit, rq.Abort, rq.JobClose)


class Run:
    """One run of the daemon: its connections, and the numbers that it gave to the spaces of this client."""

    def __init__(self, address: str, client: str) -> None:
        """Open a session; raises as `Remote`."""
        self.pool = Pool(address, client)
        self.is_lost = False
        self._put_off: deque[Any] = deque()
        self._numbers: dict[int, int] = {}  # of the daemon, by those of the client

    @property
    def first(self) -> int:
        """Holds of this run have numbers above that one, holds of earlier runs up to it."""
        return self.pool.welcome.first

    def ask(self, request: Any) -> Answer:
        """Send a request and return its answer.

        Raises:
            OSError, EOFError, ProtocolError: the daemon is gone, or does not answer.
            LookupError: it does not have the space.
        """
        answer = self.pool.ask(self._translated(request))
        if isinstance(answer.reply, rq.Adopted):
            theirs = answer.reply.space
            ours = next((ours for ours, number in self._numbers.items() if number == theirs), -1)
            return msgspec.structs.replace(answer, reply=msgspec.structs.replace(answer.reply, space=ours))
        return answer

    def put_off(self, request: Any) -> None:
        """Keep what ends a hold until the connection to this run is there again."""
        if isinstance(request, _ENDS):
            self._put_off.append(request)

    def rejoin(self) -> bool:
        """Try to connect to this very run again, and end what has ended meanwhile; return whether that could be done.

        What was sent before the connection broke is not sent twice: it may have been handled, and another handle may
        share the hold. What it was to end is held until this process ends.
        """
        if not self.pool.rejoin():
            return False
        try:
            while self._put_off:
                request = self._put_off[0]
                (self.pool.tell if isinstance(request, TOLD) else self.pool.ask)(request)
                self._put_off.popleft()
        except BROKEN:
            return False
        self.is_lost = False
        return True

    def lost_commits(self) -> int:
        """Count the commits that were put off and will never be made, where this run has ended."""
        return sum(isinstance(request, rq.Commit) for request in self._put_off)

    def open_space(self, number: int, request: rq.OpenSpace) -> Answer:
        """Open a space that the client calls `number`."""
        answer = self.pool.ask(request)
        if isinstance(answer.reply, rq.SpaceOpened):
            self._numbers[number] = answer.reply.space
        return answer

    def _translated(self, request: Any) -> Any:
        """Return a request with the daemon's number of its space."""
        if isinstance(request, rq.LookupAll | rq.AcquireAll):
            return msgspec.structs.replace(request, spaces=[self._numbers[ours] for ours in request.spaces])
        ours = request.space if isinstance(request, rq.Chain | rq.Clear | rq.ReportPrefill) else None
        if ours is None or (theirs := self._numbers[ours]) == ours:
            return request
        return msgspec.structs.replace(request, space=theirs)


class Runs:
    """The present run of the daemon; where that ends, a thread looks for the next one. Any thread."""

    def __init__(self, address: str, client: str) -> None:
        """Open a session; raises as `Remote`."""
        self.now = Run(address, client)
        self.ready = select.epoll()
        self._address, self._client = address, client
        self._spaces: list[SpaceDescriptor] = []
        self._arenas: weakref.WeakValueDictionary[int, SharedArena] = weakref.WeakValueDictionary()
        self._alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._guard = threading.Lock()
        self._closing = threading.Event()
        self.ready.register(self._alarm, select.EPOLLIN)
        self._take_up(self.now)

    def is_former(self, request: Any) -> bool:
        """Whether a request names what an earlier run had given out."""
        field = NAMES.get(type(request))
        return field is not None and 0 < getattr(request, field) <= self.now.first

    def memory(self, hold: int) -> SharedArena:
        """Return the arena of a hold, of the present run where it is 0."""
        if not hold or hold > self.now.first:
            return self.now.pool.arena
        for first in sorted(self._arenas, reverse=True):
            arena = self._arenas.get(first)
            if hold > first and arena is not None:
                return arena
        raise LeaseError("the daemon has been restarted since")

    def end_former(self, request: Any, reply: Any) -> Any:
        """Answer a request that names what an earlier run had given out, as if that had ended."""
        if isinstance(request, rq.Commit):
            self._count_lost(1)
        if reply is not None:
            return reply
        return rq.EventBatch([], True) if isinstance(request, rq.Events) else rq.Value(None)

    def open_space(self, request: rq.OpenSpace) -> Answer:
        """Open a space, now and in every run to come; the reply has the client's number."""
        with self._guard:
            if request.descriptor not in self._spaces:
                self._spaces.append(request.descriptor)
            number = self._spaces.index(request.descriptor)
        answer = self.now.open_space(number, request)
        if not isinstance(answer.reply, rq.SpaceOpened):
            return answer
        return msgspec.structs.replace(answer, reply=msgspec.structs.replace(answer.reply, space=number))

    def lose(self, run: Run) -> None:
        """A run does not answer: look for it, or the next one, until there is one."""
        with self._guard:
            if run.is_lost or run is not self.now or self._closing.is_set():
                return
            run.is_lost = True
        os.eventfd_write(self._alarm, 1)  # its jobs have failed
        threading.Thread(target=self._look, args=(run,), name="kvcairn-reconnect", daemon=True).start()

    def take_ended(self) -> bool:
        """Return whether `ready` is readable, and make it not so."""
        was_readable = False
        for fd in (self._alarm, self.now.pool.eventfd):
            try:
                was_readable = os.eventfd_read(fd) > 0 or was_readable
            except BlockingIOError:
                continue
        return was_readable

    def close(self) -> None:
        """End the session. Idempotent."""
        self._closing.set()
        with self._guard:
            self.now.pool.close()
            self.ready.close()
            os.close(self._alarm)
            for arena in self._arenas.values():
                arena.close()

    def _look(self, run: Run) -> None:
        delay_s = FIRST_RETRY_S
        while not self._closing.wait(delay_s):
            if run.rejoin():
                return
            if self._has_found():
                return
            delay_s = min(2 * delay_s, LAST_RETRY_S)

    def _has_found(self) -> bool:
        """Try to open a session with another run, and everything that the client had opened; return whether it is."""
        try:
            found = Run(self._address, self._client)
        except KVCairnError as error:
            logger.debug("no daemon yet: %s", error)
            return False
        try:
            for number, descriptor in enumerate(self._spaces):
                found.open_space(number, rq.OpenSpace(descriptor))
        except BROKEN:
            found.pool.close()
            return False
        with self._guard:
            if self._closing.is_set():
                found.pool.close()
                return True
            former, self.now = self.now, found
            self.ready.unregister(former.pool.eventfd)
            self._take_up(found)
        former.pool.close()
        if lost := former.lost_commits():
            self._count_lost(lost)
        logger.info("connected to another run of the daemon at %s", self._address)
        return True

    def _count_lost(self, commits: int) -> None:
        """Tell the present run of reservations that committed to nothing."""
        logger.warning("%d reservations of an earlier run of the daemon commit to nothing", commits)
        with suppress(*BROKEN):
            self.now.pool.tell(LostCommits(commits))

    def _take_up(self, run: Run) -> None:
        self._arenas[run.first] = run.pool.arena
        self.ready.register(run.pool.eventfd, select.EPOLLIN)
