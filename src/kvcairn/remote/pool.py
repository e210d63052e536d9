"""The connections of one session with one run of the daemon."""

from __future__ import annotations

import os
import socket
import struct
import threading
from contextlib import suppress
from typing import Final

from kvcairn import requests as rq
from kvcairn.errors import ConfigError, KVCairnError, UnsupportedError
from kvcairn.host import started_ticks
from kvcairn.remote.arena import SharedArena
from kvcairn.remote.protocol import (
    PROTOCOL,
    Answer,
    Channel,
    Goodbye,
    Hello,
    Notify,
    ProtocolError,
    Refused,
    Welcome,
)

CONNECT_S: Final = 5.0
ANSWER_S: Final = 5.0  # a daemon that takes longer is taken for gone
BROKEN: Final = (OSError, EOFError, ProtocolError)
_SCHEME: Final = "unix:"
_SLOW: Final = (rq.AddTier, rq.DetachTier)  # wait for a tier's storage
_TIMEVAL: Final = struct.Struct("ll")


class Pool:
    """The connections of one session. Any thread.

    Each call has a connection for itself, so that requests need no numbers: a reply follows its request. What is told,
    not asked, has no answer; the next call on the same connection is handled after it.
    """

    def __init__(self, address: str, client: str) -> None:
        """Open a session with its first connection; raises as `Remote`."""
        self.address, self._client = address, client
        self._guard = threading.Lock()
        self._idle: list[Channel[Answer]] = []
        self._busy: set[Channel[Answer]] = set()
        self._is_closed = False
        started = started_ticks(os.getpid()) or 0
        channel, self.welcome, fds = self._open(Hello(PROTOCOL, client, started=started))
        if len(fds) != 2:
            channel.close()
            for fd in fds:
                os.close(fd)
            raise ConfigError("address", "the daemon did not hand over its arena", address)
        self.eventfd = fds[1]
        self.arena = SharedArena(fds[0], self.welcome.arena_bytes)
        if self.welcome.is_prefaulted:
            self.arena.prefault()
        self._idle.append(channel)

    def ask(self, request: object) -> Answer:
        """Send a request and return its answer; a connection that fails is given up.

        Raises:
            OSError, EOFError, ProtocolError: the daemon is gone, or does not answer.
        """
        channel = self._take()
        is_whole = False
        try:
            if isinstance(request, _SLOW):
                _limit(channel, 0.0)
            channel.send(request)
            answer = channel.receive()
            channel.has_told = False
            if isinstance(request, _SLOW):
                _limit(channel, ANSWER_S)
            is_whole = True
            return answer
        finally:
            self._give_back(channel, is_whole)

    def tell(self, request: object) -> None:
        """Send a request that has no answer; raises as `ask`."""
        channel = self._take()
        is_whole = False
        try:
            channel.send(request)
            channel.has_told = True
            is_whole = True
        finally:
            self._give_back(channel, is_whole)

    def settle(self) -> None:
        """Wait until all that was told is done; raises as `ask`."""
        with self._guard:
            told = [channel for channel in self._idle if channel.has_told]
            self._idle = [channel for channel in self._idle if not channel.has_told]
            self._busy.update(told)
        for channel in told:
            is_whole = False
            try:
                channel.send(Notify())
                channel.receive()
                channel.has_told = False
                is_whole = True
            finally:
                self._give_back(channel, is_whole)

    def rejoin(self) -> bool:
        """Drop all connections that nobody is using and try to open a new one; return whether that could be done."""
        with self._guard:
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()
        try:
            channel = self._take()
        except BROKEN:
            return False
        self._give_back(channel, True)
        return True

    def close(self) -> None:
        """Say goodbye and end all connections; calls that wait for an answer fail. The arena stays. Idempotent."""
        with self._guard:
            was_closed, is_reachable = self._is_closed, bool(self._idle or self._busy)
        if was_closed:
            return
        if is_reachable:
            with suppress(*BROKEN):
                self.settle()
                self.ask(Goodbye())
        with self._guard:
            self._is_closed = True
            channels = [*self._idle, *self._busy]
            self._idle.clear()
        for channel in channels:
            channel.close()
        os.close(self.eventfd)

    def _give_back(self, channel: Channel[Answer], is_whole: bool) -> None:
        with self._guard:
            self._busy.discard(channel)
            is_kept = is_whole and not self._is_closed
            if is_kept:
                self._idle.append(channel)
        if not is_kept:
            channel.close()

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
        if not self.address.startswith(_SCHEME) or not self.address[len(_SCHEME) :]:
            raise ConfigError("address", "a daemon's address is unix:PATH", self.address)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        channel: Channel[Answer] = Channel(sock, Answer)
        try:
            sock.settimeout(CONNECT_S)
            sock.connect(self.address[len(_SCHEME) :])
            channel.send(hello)
            answer, fds = channel.receive_fds()
            sock.settimeout(None)
            _limit(channel, ANSWER_S)
        except BROKEN as error:
            sock.close()
            why = f"no daemon answers there: {str(error) or 'it closed the connection'}"
            raise ConfigError("address", why, self.address, "is `kvcairn serve` running?") from error
        if isinstance(answer.reply, Welcome):
            return channel, answer.reply, fds
        sock.close()
        raise answer.reply.error() if isinstance(answer.reply, Refused) else UnsupportedError("this is no daemon")


def _limit(channel: Channel[Answer], seconds: float) -> None:
    """Have the kernel end a wait for an answer after that time; 0 is never."""
    timeval = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
    channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
