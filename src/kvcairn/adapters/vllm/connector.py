"""`KVCairnConnector`: the full door. vLLM makes one for its scheduler and one for each worker."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvcairn.adapters.vllm.compatibility import check_engine
from kvcairn.adapters.vllm.metrics import ConnectorMetrics, ConnectorStats, Counts
from kvcairn.adapters.vllm.scheduler_hooks import SchedulerHooks
from kvcairn.adapters.vllm.settings import ConnectorOptions, read_settings
from kvcairn.adapters.vllm.worker_hooks import WorkerHooks


class KVCairnConnector(SchedulerHooks, WorkerHooks):
    """The connector that vLLM is given by `kv_connector_module_path="kvcairn.adapters.vllm"`.

    Attributes:
        cache: what it loads from and stores to.

    Raises:
        ConfigError: a setting is refused.
        UnsupportedError: this engine, or the way it runs, is not served.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = read_settings(self._kv_transfer_config.kv_connector_extra_config, ConnectorOptions)
        check_engine(vllm_config, kv_cache_config, self._settings)
        self._counts = Counts()
        self._is_closed = False
        self.cache = self._settings.open_cache()

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that does not happen is a miss later, and never an error."""
        return False

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what this side has counted since the last call."""
        counted = self._counts.take()
        return ConnectorStats(data=counted) if counted else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Return counters that came over the wire."""
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorMetrics:
        """Register the counters with Prometheus."""
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Let go of everything; waits for copies that run, and with the last user for writes. Idempotent."""
        self.close_scheduler()
        self.close_worker()
        if not self._is_closed:
            self._is_closed = True
            self.cache.close()
