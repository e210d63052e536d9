"""Who is at the other end of a Unix socket, and how to learn of its end."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

from kvcairn.errors import KVCairnError
from kvcairn.host import started_ticks

SO_PEERPIDFD: Final = 77  # Linux 6.5; the socket module has no name for it
_CREDENTIALS: Final = struct.Struct("3i")


def check_user(sock: socket.socket) -> None:
    """Do nothing where the peer is a process of this user, or of root.

    Raises:
        KVCairnError: it is neither.
    """
    _, uid, _ = credentials(sock)
    if uid not in (os.geteuid(), 0):
        raise KVCairnError(f"user {uid} may not use the daemon of user {os.geteuid()}")


def open_pidfd(sock: socket.socket, started: int, by_socket: bool = True) -> int:
    """Return a descriptor that becomes readable when the process that connected has ended.

    Args:
        sock: connected to it.
        started: when it was started, as it says itself; compared where the kernel has only the number to go by, which
            another process may have been given since.
        by_socket: ask the socket for the process, as Linux 6.5 can.

    Raises:
        KVCairnError: the process has ended, or cannot be watched.
    """
    if by_socket:
        try:
            return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        except OSError:  # an older kernel, or the process has been reaped: then the number leads nowhere either
            pass
    pid, _, _ = credentials(sock)
    try:
        pidfd = os.pidfd_open(pid)
    except (OSError, ValueError) as error:
        raise KVCairnError(f"cannot watch process {pid} for its end: {error}") from error
    if started_ticks(pid) != started:
        os.close(pidfd)
        raise KVCairnError(f"process {pid} is not the one that connected")
    return pidfd


def credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group of the peer, as they were when it connected."""
    pid, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid
