"""What goes over the socket: frames of bounded size, each one msgpack struct; see `docs/concepts/protocol.md`."""

from __future__ import annotations

import array
import socket
import struct
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

import msgspec

from kvcairn import requests as rq
from kvcairn.config import PrefetchOptions
from kvcairn.errors import (
    ClosedError,
    ConfigError,
    CorruptBlock,
    KVCairnError,
    LayoutError,
    LeaseError,
    TierError,
    TierFull,
    TierTimeout,
    TierUnavailable,
    UnsupportedError,
)
from kvcairn.requests import AnyReply, AnyRequest, Request

PROTOCOL: Final = 1
SLICE_S: Final = 0.25  # of one wait at the daemon
MOST_BYTES: Final = 16 << 20  # of one frame
MOST_HELLO_BYTES: Final = 4096
_LENGTH: Final = struct.Struct("<I")
_AT_ONCE_BYTES: Final = 1 << 16
_MOST_FDS: Final = 4

T = TypeVar("T")


class Hello(Request, frozen=True):
    """The first message on a connection. Its first two elements keep their place in every version.

    With `session` and `secret`, as in the `Welcome` of the first one, it is one more connection of that session.
    `started` is when the process was started, in the kernel's ticks.
    """

    protocol: int
    client: str
    session: int = 0
    secret: bytes = b""
    started: int = 0


class Await(Request, frozen=True):
    """Answer once the cache is beyond `version`, or after `timeout_s`, at most a quarter of a second."""

    version: int
    timeout_s: float


class Notify(Request, frozen=True):
    """Have those who wait ask again."""


class LostCommits(Request, frozen=True):
    """Count reservations of an earlier run that committed to nothing."""

    commits: int


class Goodbye(Request, frozen=True):
    """The client closes its session. What it still holds stays held until its process ends."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Hello`. The one to a new session carries two descriptors: the arena, and an eventfd.

    Holds and readers of this run have numbers above `first`, those of earlier runs have lower ones.
    """

    session: int
    secret: bytes
    boot_id: bytes
    first: int
    arena_bytes: int
    is_prefaulted: bool
    prefetch: PrefetchOptions


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request raised an error: its kind, its message, and what else its class is made from."""

    kind: str
    message: str
    parts: list[str | None] = []
    key: bytes | None = None

    @classmethod
    def of(cls, error: Exception) -> Refused:
        """Describe an error."""
        parts: list[str | None] = []
        if isinstance(error, ConfigError):
            value = None if error.value is None else str(error.value)
            parts = [error.path, error.reason, value, error.remedy]
        if isinstance(error, TierError):
            return cls(type(error).__name__, str(error), [error.tier, error.op, error.reason], error.key)
        return cls(type(error).__name__, str(error), parts)

    def error(self) -> Exception:
        """Return the error again; what is not known here becomes a `KVCairnError`."""
        kind = _ERRORS.get(self.kind, KVCairnError)
        if issubclass(kind, TierError):
            tier, op, reason = (part or "" for part in self.parts)
            return kind(tier, op, reason, self.key)
        return kind(*(self.parts or [self.message]))


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """A reply, and what a client wants to know at any time: the version before it was made, and the tiers."""

    version: int
    has_lower_tiers: bool
    reply: AnyReply | Welcome | Refused


Message = AnyRequest | Await | Notify | LostCommits | Goodbye
NAMES: Final[dict[type, str]] = {  # requests that name a hold or a reader: the field
    rq.Release: "lease",
    rq.Damaged: "lease",
    rq.Commit: "reservation",
    rq.Abort: "reservation",
    rq.JobInfo: "job",
    rq.JobLease: "job",
    rq.JobCancel: "job",
    rq.JobClose: "job",
    rq.Events: "reader",
    rq.Unsubscribe: "reader",
}
_ERRORS: Final[dict[str, type[Exception]]] = {
    kind.__name__: kind
    for kind in (
        ClosedError, ConfigError, CorruptBlock, LayoutError, LeaseError, TierError, TierFull, TierTimeout,
        TierUnavailable, UnsupportedError, ValueError, TypeError,
    )
}  # fmt: skip


TOLD: Final = (rq.Release, LostCommits)  # have no answer


class ProtocolError(Exception):
    """What came is no message of this protocol; the connection ends."""


class Channel(Generic[T]):
    """One end of a connection. One thread at a time.

    Args:
        sock: connected, blocking.
        kind: what comes in.
    """

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        self.sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._rest = b""
        self.has_told = False  # something without an answer, after the last answer

    def send(self, message: object, fds: tuple[int, ...] = ()) -> None:
        """Send a message, with descriptors. Blocks while the peer does not read.

        Raises:
            OSError: the connection is broken.
            ProtocolError: the message is larger than a frame may be; nothing was sent.
        """
        body = self._encoder.encode(message)
        if len(body) > MOST_BYTES:
            raise ProtocolError(f"a message of {len(body)} bytes; at most {MOST_BYTES} fit")
        frame = _LENGTH.pack(len(body)) + body
        if fds:
            sent = self.sock.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
            frame = frame[sent:]
        self.sock.sendall(frame)

    def receive(self) -> T:
        """Wait for a message and return it.

        Raises:
            EOFError: the peer has closed.
            OSError: the connection is broken.
            ProtocolError: it is no message of the kind.
        """
        frame = self.receive_bytes(MOST_BYTES)
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(str(error)) from error

    def receive_bytes(self, most_bytes: int) -> bytes:
        """Wait for a frame and return what is in it."""
        data = self._rest or self._read()
        while len(data) < _LENGTH.size:
            data += self._read()
        nbytes = _LENGTH.unpack_from(data)[0]
        if nbytes > most_bytes:
            raise ProtocolError(f"a frame of {nbytes} bytes; at most {most_bytes} may come")
        end = _LENGTH.size + nbytes
        pieces, size = [data], len(data)
        while size < end:
            pieces.append(self._read())
            size += len(pieces[-1])
        data = b"".join(pieces) if len(pieces) > 1 else data
        self._rest = data[end:]
        return data[_LENGTH.size : end]

    def receive_fds(self) -> tuple[T, list[int]]:
        """Wait for a message that may carry descriptors; the caller closes them."""
        data, ancillary, _, _ = self.sock.recvmsg(
            _AT_ONCE_BYTES, socket.CMSG_SPACE(4 * _MOST_FDS), socket.MSG_CMSG_CLOEXEC
        )
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        if not data:
            raise EOFError
        self._rest += data
        return self.receive(), list(fds)

    def close(self) -> None:
        """End the connection; the peer sees it at once, even where a fork has a copy of the socket."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _read(self) -> bytes:
        data = self.sock.recv(_AT_ONCE_BYTES)
        if not data:
            raise EOFError
        return data
