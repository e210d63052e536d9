"""vLLM's own offloading on a machine without a GPU: its spec refuses such a machine, all behind it runs there."""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies between the engine's memory and vLLM's shared region, at once."""

    def __init__(self, caches: Any, region: Any) -> None:
        self._engine = [t.tensor.view(torch.int8).view(-1, t.page_size_bytes) for t in caches.tensors]
        self._host = [region.create_next_worker_view(t.page_size_bytes) for t in caches.tensors]
        self._region = region
        self._done: list[Any] = []

    def submit_store(self, job: Any, source: Any, target: Any) -> bool:
        return self._copy(job, source, target, self._engine, self._host)

    def submit_load(self, job: Any, source: Any, target: Any) -> bool:
        return self._copy(job, source, target, self._host, self._engine)

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Any) -> None:
        """Every copy is done when it was asked for."""

    def shutdown(self) -> None:
        self._engine.clear()
        self._host.clear()
        self._region.cleanup()

    def _copy(self, job: Any, source: Any, target: Any, from_: list[Any], to: list[Any]) -> bool:
        begin_s, moved = time.perf_counter(), 0
        rows = torch.from_numpy(source.block_ids.astype("int64"))
        places = torch.from_numpy(target.block_ids.astype("int64"))
        for a, b in zip(from_, to, strict=True):
            b[places] = a[rows]
            moved += a.shape[1] * len(rows)
        self._done.append(TransferResult(job, True, moved, time.perf_counter() - begin_s))
        return True


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """The tiering of vLLM with a worker that needs no GPU."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, region)
        return self._worker
