from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kvcairn as kv

LONG_S = 60.0
DESCRIPTOR = kv.SpaceDescriptor(
    model="toy",
    weights="0",
    layout=kv.KVLayout.full(layers=1, kv_heads=1, head_dim=32, dtype="float16"),
    block_tokens=4,
)


@contextmanager
def serving(config: Path, socket: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A daemon in a process of its own, and its address; killed at the end where it has not stopped."""
    command = [sys.executable, "-c", "from kvcairn.cli import app; app()", "serve"]
    options = ["--config", str(config), "--socket", str(socket), "--json"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
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
