from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcairn.cache import Cache
from kvcairn.config import Config
from kvcairn.core.link import Direct
from kvcairn.core.open import open_core
from kvcairn.daemon.server import Server
from kvcairn.daemon.web import Web
from kvcairn.errors import ConfigError
from kvcairn.layout import KVLayout, SpaceDescriptor

DESCRIPTOR = SpaceDescriptor(
    model="toy", weights="0", layout=KVLayout.full(layers=1, kv_heads=1, head_dim=32, dtype="float16"), block_tokens=4
)
LONG_S = 60.0


class Daemon:
    """A daemon in this process, with its pages."""

    def __init__(self, folder: Path) -> None:
        memory = {"type": "memory", "capacity": "4 MiB", "prefault": False}
        self.link = Direct(open_core(Config.from_dict({"tiers": [memory]})))
        self.server = Server(self.link, folder / "socket")
        self.server.start()
        self.web = Web("127.0.0.1:0", self.link, self.server)
        self.address = f"unix:{folder / 'socket'}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.web.port}{path}", timeout=LONG_S) as answer:
            text: str = answer.read().decode()
            return text

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Return each sample by its name and the values of its labels."""
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(self.get("/metrics"))
            for sample in family.samples
        }

    def close(self) -> None:
        self.web.close()
        self.server.close()
        self.link.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    yield made
    made.close()


def test_metrics_are_the_statistics(daemon: Daemon) -> None:
    with Cache.connect(daemon.address) as cache:
        space = cache.space(DESCRIPTOR)
        keys = space.keys(range(16))
        space.put(keys[:3], [bytes(space.block_bytes)] * 3)
        with space.acquire(keys):
            metrics, stats = daemon.metrics(), cache.stats()
        memory = stats.tiers["memory"]
        assert metrics["kvcairn_tier_blocks", "memory"] == memory.blocks == 3
        assert metrics["kvcairn_tier_leased_bytes", "memory"] == memory.leased_bytes > 0
        assert metrics["kvcairn_tier_capacity_bytes", "memory"] == 4 << 20
        assert metrics["kvcairn_asked_blocks_total",] == 4
        assert metrics["kvcairn_hit_blocks_total", "memory"] == 3
        assert metrics["kvcairn_missed_blocks_total", "never_stored"] == 1
        assert metrics["kvcairn_open_holds", "lease"] == 1
        assert metrics["kvcairn_clients",] == 1
        assert metrics["kvcairn_failed_requests_total",] == 0


def test_every_number_of_a_tier_is_a_metric(daemon: Daemon) -> None:
    names = {name.removeprefix("kvcairn_tier_") for name, *_ in daemon.metrics() if name.startswith("kvcairn_tier_")}
    with Cache.connect(daemon.address) as cache:
        fields = cache.stats().tiers["memory"].__struct_fields__
    renamed = {"read_latency_s": "read_latency_seconds", "read_bytes_per_s": "read_bytes_per_second"}
    gauges = {renamed.get(field, field) for field in fields} - {"writes_dropped", "errors"}  # none yet of those
    assert names == gauges


def test_health_says_which_tiers_are_down_and_that_it_stops(daemon: Daemon) -> None:
    assert json.loads(daemon.get("/healthz")) == {"status": "ok", "tiers_down": []}
    breaker = daemon.link.core.state.memory.breaker
    while not breaker.is_open(daemon.link.now()):
        breaker.failed(daemon.link.now())
    assert json.loads(daemon.get("/healthz")) == {"status": "degraded", "tiers_down": ["memory"]}
    daemon.link.close()
    with pytest.raises(urllib.error.HTTPError, match="503"):
        daemon.get("/healthz")


def test_other_paths_are_not_there(daemon: Daemon) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        daemon.get("/")


def test_one_that_asks_and_does_not_read_holds_up_nobody(daemon: Daemon) -> None:
    with socket.create_connection(("127.0.0.1", daemon.web.port)):
        assert json.loads(daemon.get("/healthz"))["status"] == "ok"


@pytest.mark.parametrize("address", ["", "here", "127.0.0.1:99999999", "127.0.0.1:x", "203.0.113.1:0"])
def test_where_nobody_can_listen_is_refused(daemon: Daemon, address: str) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match="cannot listen"):
        Web(address, daemon.link, daemon.server)
    assert threading.active_count() == before
