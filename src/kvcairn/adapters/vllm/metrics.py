"""Numbers that the connector gives to vLLM: in its log line, and at its Prometheus endpoint."""

from __future__ import annotations

import threading
from typing import Any

from prometheus_client import Counter as PrometheusCounter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "stored_blocks": "Blocks copied from the engine's memory into the cache.",
    "stored_bytes": "Bytes copied from the engine's memory into the cache.",
    "not_stored_blocks": "Blocks that found no room in the cache's memory, or came while too many copies waited.",
    "loaded_blocks": "Blocks copied from the cache into the engine's memory.",
    "loaded_bytes": "Bytes copied from the cache into the engine's memory.",
    "failed_blocks": "Blocks that were promised and did not come; the engine computed them.",
}
HIT = "hit_tokens:"


class Counts:
    """Counters that any thread adds to, taken and reset by one."""

    def __init__(self) -> None:
        """Begin at nothing."""
        self._guard = threading.Lock()
        self._values: dict[str, int] = {}

    def add(self, name: str, count: int) -> None:
        """Add to a counter."""
        if count:
            with self._guard:
                self._values[name] = self._values.get(name, 0) + count

    def take(self) -> dict[str, int]:
        """Return what was counted since the last call."""
        with self._guard:
            values, self._values = self._values, {}
        return values


class ConnectorStats(KVConnectorStats):
    """Counters of an interval by name; `hit_tokens:<tier>` by tier."""

    def reset(self) -> None:
        """Begin at nothing."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counters of another worker or step."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's log line shows."""
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """The same counters for Prometheus, with vLLM's own labels: `kvcairn:stored_bytes_total` and so on."""

    def __init__(self, vllm_config: Any, metric_types: Any, labels: list[str], values: dict[int, list[object]]) -> None:
        """Register the counters."""
        super().__init__(vllm_config, metric_types, labels, values)
        make = metric_types[PrometheusCounter]
        self._values = values
        self._plain = {
            name: make(name=f"kvcairn:{name}", documentation=text, labelnames=labels) for name, text in COUNTERS.items()
        }
        self._hits = make(
            name="kvcairn:hit_tokens", documentation="Tokens loaded instead of computed.", labelnames=[*labels, "tier"]
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what one step counted."""
        labels = self._values[engine_idx]
        for name, count in transfer_stats_data.items():
            if name.startswith(HIT):
                self._hits.labels(*labels, name.removeprefix(HIT)).inc(count)
            elif name in self._plain:
                self._plain[name].labels(*labels).inc(count)
