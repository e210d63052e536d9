"""The daemon: one core behind a socket. A thread for each connection; one more looks for new ones and dead clients."""

from __future__ import annotations

import hmac
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from kvcairn import requests as rq
from kvcairn.core.link import Direct
from kvcairn.daemon.checks import Refusal
from kvcairn.daemon.peers import check_user, open_pidfd
from kvcairn.daemon.session import Session
from kvcairn.errors import ConfigError, KVCairnError
from kvcairn.remote.protocol import (
    MOST_HELLO_BYTES,
    PROTOCOL,
    SLICE_S,
    TOLD,
    Answer,
    Await,
    Channel,
    Goodbye,
    Hello,
    LostCommits,
    Message,
    Notify,
    ProtocolError,
    Refused,
    Welcome,
)
from kvcairn.transfer.executor import outcome

logger = logging.getLogger(__name__)

MOST_CONNECTIONS: Final = 1024
HELLO_S: Final = 5.0  # a connection that says nothing ends after that
SEND_S: Final = 10.0  # so does one that takes no answers
_TICK_S: Final = 0.25
_BROKEN: Final = (OSError, EOFError, ProtocolError)


@dataclass(slots=True)
class Counts:
    """What happened since the start.

    Attributes:
        failures: requests that failed for no fault of their client: each is logged, and its connection goes on.
        refusals: connections that were ended for what they sent.
        lost_commits: reservations of earlier runs that their clients committed to nothing.
    """

    failures: int = 0
    refusals: int = 0
    lost_commits: int = 0


class Server:
    """Serves one core at a Unix socket, to processes of the same user.

    `close` ends connections and sessions, not the core.

    Attributes:
        counts: what happened since the start.
    """

    def __init__(self, link: Direct, path: Path) -> None:
        """Listen at `path`; nothing is served before `start`.

        Raises:
            ConfigError: another daemon serves there, or the socket cannot be made.
        """
        self._link = link
        self._listener = _listen(path)
        self._sessions: dict[int, Session] = {}
        self._channels: dict[Channel[Any], threading.Thread] = {}
        self._guard = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._is_closing = False
        self.counts = Counts()
        self._first = int(time.time() * 1e3) << 20
        link.core.state.number_from(self._first)
        self._thread = threading.Thread(target=self._watch, name="kvcairn-serve", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._link.fileno(), selectors.EVENT_READ, self._tell_of_jobs)
        self._thread.start()

    def sessions(self) -> list[Session]:
        """Return the open sessions."""
        with self._guard:
            return list(self._sessions.values())

    def close(self) -> None:
        """Stop: take no more connections, end those there are. Idempotent.

        What clients hold that are still alive stays held: they may still read and write it.
        """
        with self._guard:
            if self._is_closing:
                return
            self._is_closing = True
        self._thread.join()
        self._selector.close()
        path = Path(self._listener.getsockname())
        self._listener.close()
        with suppress(FileNotFoundError):
            path.unlink()
        with self._guard:
            open_channels = dict(self._channels)
        for channel in open_channels:
            channel.close()
        for thread in open_channels.values():
            thread.join()
        for session in self.sessions():
            session.close()

    # --- the watching thread -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select(_TICK_S):
                act: Callable[[], None] = key.data
                act()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the client has gone again, or there are no descriptors left: it is asked again
            return
        channel: Channel[Any] = Channel(sock, Message)
        thread = threading.Thread(target=self._serve, args=(channel,), name="kvcairn-client", daemon=True)
        with self._guard:
            is_full = len(self._channels) >= MOST_CONNECTIONS
            if not is_full:
                self._channels[channel] = thread
        if is_full:
            channel.close()
            return
        thread.start()

    def _tell_of_jobs(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._link.fileno())
        batch: rq.JobBatch = self._link.call(rq.Ended())
        for status in batch.jobs:
            for session in self.sessions():
                session.job_ended(status)

    def _bury(self, session: Session) -> None:
        """The process of a session has ended."""
        with self._guard:
            if session.number not in self._sessions:  # it has said goodbye
                return
            self._selector.unregister(session.pidfd)
        held = session.end()
        with self._guard:
            del self._sessions[session.number]
        if held:
            logger.info("client %s ended with %d leases, reservations and jobs open", session.client, held)

    # --- threads of connections --------------------------------------------------------------------------------

    def _serve(self, channel: Channel[Any]) -> None:
        try:
            channel.sock.settimeout(HELLO_S)
            session = self._greet(channel)
            if session is not None:
                channel.sock.settimeout(None)
                channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(SEND_S))
                self._answer_all(channel, session)
        except _BROKEN as error:
            logger.debug("a connection ended: %s", error)
        except Refusal as error:
            self.counts.refusals += 1
            logger.warning("a connection was ended for what it sent: %s", error)
        finally:
            channel.close()
            with self._guard:
                self._channels.pop(channel, None)

    def _answer_all(self, channel: Channel[Any], session: Session) -> None:
        state = self._link.core.state
        while True:
            request = channel.receive()
            version = state.version
            if isinstance(request, Goodbye):
                self._say_goodbye(session)
                channel.send(Answer(version, len(state.levels) > 1, rq.Value(None)))
                return
            reply = self._handle(request, session)
            if isinstance(request, TOLD):
                continue
            version = state.version if isinstance(request, Await) else version
            channel.send(Answer(version, len(state.levels) > 1, reply))

    def _handle(self, request: Any, session: Session) -> Any:
        """Return the reply to a request, or the error that it raised."""
        reply, error = outcome(lambda: self._reply(request, session))
        if error is None:
            return reply
        if isinstance(error, Refusal):
            raise error
        if not isinstance(error, KVCairnError | ValueError):
            self.counts.failures += 1
            logger.error("%s of client %s failed", type(request).__name__, session.client, exc_info=error)
        return Refused.of(error)

    def _reply(self, request: Any, session: Session) -> Any:
        if isinstance(request, Await):
            state = self._link.core.state
            limit_s = min(max(0.0, request.timeout_s), SLICE_S)
            self._link.wait(lambda: state.version > request.version or state.is_closing, limit_s)
            return rq.Value(None)
        if isinstance(request, Notify):
            self._link.notify()
            return rq.Value(None)
        if isinstance(request, LostCommits):
            self.counts.lost_commits += max(0, request.commits)
            return rq.Value(None)
        return session.call(request)

    def _greet(self, channel: Channel[Any]) -> Session | None:
        """Answer the first message; None where the client is refused."""
        state = self._link.core.state
        try:
            hello = _hello(channel.receive_bytes(MOST_HELLO_BYTES))
            session = self._join(hello) if hello.session else self._open(channel.sock, hello)
        except KVCairnError as error:
            channel.send(Answer(0, False, Refused.of(error)))
            return None
        welcome = Welcome(
            session=session.number,
            secret=session.secret,
            boot_id=self._link.boot_id,
            first=self._first,
            arena_bytes=state.arena.capacity_bytes,
            is_prefaulted=state.config.memory.prefault,
            prefetch=state.config.prefetch,
        )
        fds = () if hello.session else (state.arena.fd, session.eventfd)
        channel.send(Answer(state.version, len(state.levels) > 1, welcome), fds)
        return session

    def _join(self, hello: Hello) -> Session:
        with self._guard:
            session = self._sessions.get(hello.session)
        if session is None or not hmac.compare_digest(session.secret, hello.secret):
            raise KVCairnError("there is no such session")
        return session

    def _open(self, sock: socket.socket, hello: Hello) -> Session:
        check_user(sock)
        pidfd = open_pidfd(sock, hello.started)
        with self._guard:
            number = max(self._sessions, default=0) + 1
            session = Session(number, self._link, hello.client, pidfd)
            self._sessions[number] = session
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._bury(session))
        return session

    def _say_goodbye(self, session: Session) -> None:
        pidfd = session.pidfd
        with self._guard:
            if session.number not in self._sessions:
                return
            self._selector.unregister(pidfd)
            if session.leave():
                del self._sessions[session.number]
            else:
                self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._bury(session))


def _hello(frame: bytes) -> Hello:
    """Decode the first message; its head is the same in every version.

    Raises:
        ProtocolError: it is no hello.
        KVCairnError: it is one of another version.
    """
    try:
        head = msgspec.msgpack.decode(frame)
        if not isinstance(head, list) or len(head) < 2 or head[0] != "Hello" or not isinstance(head[1], int):
            raise ProtocolError("a connection begins with a hello")
        if head[1] != PROTOCOL:
            raise KVCairnError(f"this daemon speaks version {PROTOCOL} of the protocol, the client version {head[1]}")
        return msgspec.msgpack.decode(frame, type=Hello)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(str(error)) from error


def _listen(path: Path) -> socket.socket:
    """Return a listening socket that only this user may connect to; one that nobody serves any more is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                try:
                    other.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()
                else:
                    raise ConfigError("socket", "another daemon serves there", str(path))
        former = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(former)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError("socket", f"cannot listen there: {error.strerror or error}", str(path)) from error
    except ConfigError:
        listener.close()
        raise
    return listener


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
