from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvcairn.daemon.peers import check_user, credentials, open_pidfd
from kvcairn.errors import KVCairnError
from kvcairn.host import started_ticks

LONG_S = 60.0


@pytest.fixture
def peer(tmp_path: object) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """A process that has connected to a socket of ours, and that socket."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/socket")
        listener.listen()
        script = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.stdin.read()"
        with subprocess.Popen([sys.executable, "-c", script, f"{tmp_path}/socket"], stdin=subprocess.PIPE) as process:
            sock, _ = listener.accept()
            with sock:
                yield sock, process
            process.kill()


@pytest.mark.parametrize("by_socket", [True, False])
def test_the_descriptor_becomes_readable_at_the_end_of_the_process(
    peer: tuple[socket.socket, subprocess.Popen[bytes]], by_socket: bool
) -> None:
    sock, process = peer
    check_user(sock)
    assert credentials(sock) == (process.pid, os.getuid(), os.getgid())
    pidfd = open_pidfd(sock, started_ticks(process.pid) or 0, by_socket)
    assert select.select([pidfd], [], [], 0)[0] == []
    process.kill()
    assert select.select([pidfd], [], [], LONG_S)[0] == [pidfd]
    os.close(pidfd)


def test_a_process_that_took_over_the_number_is_not_watched_instead(
    peer: tuple[socket.socket, subprocess.Popen[bytes]],
) -> None:
    sock, process = peer
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KVCairnError, match="not the one that connected"):
        open_pidfd(sock, (started_ticks(process.pid) or 0) - 1, by_socket=False)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_is_gone_cannot_be_watched(peer: tuple[socket.socket, subprocess.Popen[bytes]]) -> None:
    sock, process = peer
    started = started_ticks(process.pid) or 0
    process.kill()
    process.wait(LONG_S)
    with pytest.raises(KVCairnError, match="cannot watch"):
        open_pidfd(sock, started, by_socket=False)
    assert started_ticks(process.pid) is None
