from __future__ import annotations

import json
import os
import signal
import socket as sockets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvcairn as kv
from kvcairn.daemon.notify import notify

LONG_S = 60.0
DESCRIPTOR = kv.SpaceDescriptor(
    model="toy",
    weights="0",
    layout=kv.KVLayout.full(layers=1, kv_heads=1, head_dim=32, dtype="float16"),
    block_tokens=4,
)


@contextmanager
def serving(
    config: Path, socket: Path, environment: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A daemon in a process of its own, and its address; killed at the end where it has not stopped."""
    command = [sys.executable, "-c", "from kvcairn.cli import app; app()", "serve"]
    options = ["--config", str(config), "--socket", str(socket), "--json"]
    env = {**os.environ, **(environment or {})}
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert ready["event"] == "ready"
            yield process, ready["address"]
        finally:
            process.kill()


def test_what_a_client_stored_is_there_for_the_next_one_and_after_a_clean_stop(tmp_path: Path) -> None:
    config, socket, disk = tmp_path / "c.toml", tmp_path / "socket", tmp_path / "disk"
    disk.mkdir()
    config.write_text(
        '[[tiers]]\nname = "memory"\ntype = "memory"\ncapacity = "4 MiB"\n'
        f'[[tiers]]\nname = "disk"\ntype = "disk"\npath = "{disk}"\ncapacity = "16 MiB"\n'
    )
    with serving(config, socket) as (process, address):
        with kv.Cache.connect(address) as cache:
            space = cache.space(DESCRIPTOR)
            keys = space.keys(range(40))
            blocks = [bytes([n]) * space.block_bytes for n in range(10)]
            assert all(space.put(keys, blocks))
        with kv.Cache.connect(address) as cache:
            assert cache.space(DESCRIPTOR).get(keys) == blocks
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_S) == 0, "all that was to be written is written"
    assert not socket.exists()
    with serving(config, socket) as (process, address):
        with kv.Cache.connect(address) as cache:
            space = cache.space(DESCRIPTOR)
            assert space.lookup(keys).by_tier == {"disk": 10}
            assert space.get(keys, deadline_s=LONG_S) == blocks
        process.terminate()
        assert process.wait(LONG_S) == 0


@pytest.mark.parametrize("is_abstract", [False, True])
def test_systemd_is_told_when_clients_can_connect_and_when_it_stops(tmp_path: Path, is_abstract: bool) -> None:
    config, where = tmp_path / "c.toml", tmp_path / "notify"
    config.write_text('[[tiers]]\nname = "memory"\ntype = "memory"\ncapacity = "4 MiB"\n')
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM) as manager:
        manager.bind(f"\0{where}" if is_abstract else str(where))
        manager.settimeout(LONG_S)
        named = {"NOTIFY_SOCKET": f"@{where}" if is_abstract else str(where)}
        with serving(config, tmp_path / "socket", named) as (process, address):
            assert manager.recv(100) == b"READY=1"
            with kv.Cache.connect(address) as cache:
                assert cache.stats().open_leases == 0
            process.terminate()
            assert manager.recv(100) == b"STOPPING=1"
            assert process.wait(LONG_S) == 0


def test_a_manager_that_is_gone_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notify(str(tmp_path / "nowhere"), "READY=1")
    assert "cannot be told READY=1" in caplog.text
    notify(None, "READY=1")
