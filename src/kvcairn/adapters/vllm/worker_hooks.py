"""The hooks that vLLM's workers call."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorTransferResults

from kvcairn.adapters.vllm.identity import describe, one_spec
from kvcairn.adapters.vllm.metrics import Counts
from kvcairn.adapters.vllm.pages import PageMemory
from kvcairn.adapters.vllm.settings import ConnectorOptions, Settings
from kvcairn.adapters.vllm.steps import SpaceOffer, StepPlan, StepReport
from kvcairn.adapters.vllm.transfers import Transfers
from kvcairn.adapters.vllm.worker import Worker
from kvcairn.cache import Cache


class WorkerHooks(KVConnectorBase_V1):
    """Turns hooks into calls of `Worker`, which exists once the engine's memory does.

    Nothing is done layer by layer, so that CUDA graphs may be whole.
    """

    _settings: Settings[ConnectorOptions]
    cache: Cache
    _counts: Counts
    _worker: Worker | None = None
    _offer: SpaceOffer | None = None
    _failed_pages: set[int]
    _failed_requests: set[str]

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's memory: a view of each layer."""
        config, options = self._kv_cache_config, self._settings.options
        memories = [
            PageMemory(
                [kv_caches[name] for name in group.layer_names],
                config.num_blocks,
                options.block_tokens // one_spec(group.kv_cache_spec).block_size,
            )
            for group in config.kv_cache_groups
        ]
        descriptor = describe(self._vllm_config, config, options)
        space = self.cache.space(descriptor)
        rank = 0 if descriptor.rank is None else self._vllm_config.parallel_config.rank
        self._worker = Worker(Transfers(self.cache, space, memories, rank, options.load_timeout_s, self._counts))
        self._offer = SpaceOffer(descriptor)
        self._failed_pages, self._failed_requests = set(), set()

    @property
    def worker(self) -> Worker:
        """The worker side, behind these hooks."""
        assert self._worker is not None, "the engine's memory is not registered yet"
        return self._worker

    def get_handshake_metadata(self) -> SpaceOffer | None:
        """Return the space of this worker, for the scheduler."""
        return self._offer

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Before anything of the step: begin its stores, and wait for those whose pages it overwrites."""
        self.worker.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads; none of them is for this step's own requests."""
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        self.worker.start_loads(plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: requests wait for their whole load."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are stored whole, in the step behind."""

    def wait_for_save(self) -> None:
        """Nothing: stores go on beside the engine, and a step that overwrites their pages waits."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the loads that ended. With one layer group their bad pages are told one by one."""
        results = KVConnectorTransferResults()
        for loaded in self.worker.ended_loads():
            results.finished_recving.add(loaded.request)
            if loaded.is_whole:
                continue
            self._failed_requests.add(loaded.request)
            if len(loaded.failed_pages) == 1:
                self._failed_pages |= loaded.failed_pages[0]
            else:
                results.failed_recving.add(loaded.request)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the pages that hold nothing of use, of loads that ended in this step."""
        failed, self._failed_pages = self._failed_pages, set()
        return failed

    def build_connector_worker_meta(self) -> StepReport | None:
        """Return what ended in this worker."""
        failed, self._failed_requests = self._failed_requests, set()
        report = StepReport(self.worker.stored(), self.worker.transfers.taken(), failed)
        return report if report != StepReport() else None

    def close_worker(self) -> None:
        """Wait for copies that run."""
        if self._worker is not None:
            self._worker.close()
