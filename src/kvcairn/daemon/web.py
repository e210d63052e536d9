"""What a daemon shows over HTTP: `/metrics` for Prometheus, `/healthz` for whoever restarts it."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import make_wsgi_app
from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcairn import requests as rq
from kvcairn.core.link import Direct
from kvcairn.daemon.server import Server
from kvcairn.errors import ClosedError, ConfigError
from kvcairn.observe.metrics import CacheCollector
from kvcairn.types import Stats

_COUNTS: Final = {
    "failures": ("failed_requests", "Requests that failed for a fault of the daemon."),
    "refusals": ("refused_connections", "Connections that were ended for what they sent."),
    "lost_commits": ("lost_commits", "Reservations of earlier runs that were committed to nothing."),
}


class Web:
    """An HTTP server on threads of its own. `close` ends it."""

    def __init__(self, address: str, link: Direct, server: Server) -> None:
        """Listen at `HOST:PORT`, or at a port of the loopback interface; port 0 takes any.

        Raises:
            ConfigError: that cannot be listened at.
        """
        host, _, port = address.rpartition(":")
        self._link = link
        registry = CollectorRegistry()
        registry.register(CacheCollector(self._stats))
        registry.register(_Daemon(server))
        self._metrics = make_wsgi_app(registry)
        try:
            self._http = make_server(host or "127.0.0.1", int(port), self._answer, _Threads, _Silent)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError("http", f"cannot listen there: {error}", address, "give HOST:PORT") from error
        self._thread = threading.Thread(target=self._http.serve_forever, name="kvcairn-http", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens at."""
        return int(self._http.server_port)

    def close(self) -> None:
        """Stop. Idempotent."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/metrics":
            page: Iterable[bytes] = self._metrics(environ, start)
            return page
        if environ["PATH_INFO"] == "/healthz":
            status, health = self._health()
            start(status, [("Content-Type", "application/json")])
            return [json.dumps(health).encode()]
        start("404 Not Found", [("Content-Type", "text/plain")])
        return [b"there are /metrics and /healthz\n"]

    def _stats(self) -> Stats:
        reply: rq.StatsReply = self._link.call(rq.GetStats())
        return reply.stats

    def _health(self) -> tuple[str, dict[str, Any]]:
        try:
            stats = self._stats()
        except ClosedError:
            return "503 Service Unavailable", {"status": "stopping"}
        down = [name for name, tier in stats.tiers.items() if tier.is_down]
        return "200 OK", {"status": "degraded" if down else "ok", "tiers_down": down}


class _Daemon(Collector):
    """Collects the numbers of the daemon itself."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        clients = GaugeMetricFamily("kvcairn_clients", "Processes that are connected, or still hold something.")
        clients.add_metric([], len(self._server.sessions()))
        yield clients
        for field, (name, text) in _COUNTS.items():
            counter = CounterMetricFamily(f"kvcairn_{name}", text)
            counter.add_metric([], getattr(self._server.counts, field))
            yield counter


class _Threads(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each request, so that one that is slow to read holds up no other."""

    daemon_threads = True


class _Silent(WSGIRequestHandler):
    """Logs no requests."""

    timeout = 10.0

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing."""
