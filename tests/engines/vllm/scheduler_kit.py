"""The real Scheduler of vLLM with both sides of the connector, and a model that needs no weights.

The model's KV of a token is a hash of all tokens up to it, and what it says next is a hash of all the KV that it
reads: a page with wrong bytes changes its answer.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvcairn.adapters.vllm import KVCairnConnector
from tests.engines.vllm.kit import MODELS

KV_FLOATS = 8  # of one token in one layer
VOCABULARY = 500


class HashModel:
    """Computes like a model runner: keeps each request's tokens and page tables, writes KV into pages, reads them."""

    def __init__(self, memory: dict[str, torch.Tensor], groups: Sequence[tuple[list[str], int, int | None]]) -> None:
        self.memory, self.groups = memory, groups
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[list[int]]] = {}

    def run(self, output: Any, wanted: set[str]) -> dict[str, int]:
        """Carry out one step; return the next token of the requests in `wanted`."""
        for rid in output.finished_req_ids:
            self.tokens.pop(rid, None)
            self.tables.pop(rid, None)
        starts = {}
        for new in output.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prompt_token_ids)
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, rid in enumerate(cached.req_ids):
            if rid in cached.resumed_req_ids:
                self.tokens[rid] = list(cached.all_token_ids[rid])
                self.tables[rid] = [list(ids) for ids in cached.new_block_ids[i]]
            elif cached.new_block_ids[i]:
                for table, ids in zip(self.tables[rid], cached.new_block_ids[i], strict=True):
                    table.extend(ids)
            starts[rid] = cached.num_computed_tokens[i]
        sampled = {}
        for rid, count in output.num_scheduled_tokens.items():
            self._write(rid, starts[rid], starts[rid] + count)
            if rid in wanted:
                sampled[rid] = self._next(rid, starts[rid] + count)
                self.tokens[rid].append(sampled[rid])
        return sampled

    def _write(self, rid: str, start: int, end: int) -> None:
        hashes = prefix_hashes(self.tokens[rid][:end])
        for (layers, page_tokens, _), table in zip(self.groups, self.tables[rid], strict=True):
            for layer in layers:
                for at in range(start, end):
                    page = table[at // page_tokens]
                    assert page, "a write to the null page"
                    self.memory[layer][page, 0, at % page_tokens] = kv_of(hashes[at], layer)

    def _next(self, rid: str, end: int) -> int:
        seen = hashlib.sha256()
        for (layers, page_tokens, window), table in zip(self.groups, self.tables[rid], strict=True):
            for layer in layers:
                low = 0 if window is None else max(0, end - window)
                for first in range(low // page_tokens * page_tokens, end, page_tokens):
                    begin, stop = max(low, first) - first, min(end - first, page_tokens)
                    seen.update(self.memory[layer][table[first // page_tokens], 0, begin:stop].numpy().tobytes())
        return 3 + int.from_bytes(seen.digest()[:4], "little") % (VOCABULARY - 3)


def prefix_hashes(tokens: Sequence[int]) -> list[bytes]:
    """Return for each token a hash of all up to it."""
    running, hashes = b"", []
    for token in tokens:
        running = hashlib.blake2b(running + token.to_bytes(4, "little"), digest_size=16).digest()
        hashes.append(running)
    return hashes


def kv_of(prefix: bytes, layer: str) -> torch.Tensor:
    """Return the KV of one token in one layer."""
    digest = hashlib.blake2b(prefix + layer.encode(), digest_size=KV_FLOATS * 2).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.int16).float()


class Engine:
    """Steps the scheduler and the workers' hooks in the order in which vLLM does.

    Args:
        cache: `kv_connector_extra_config`.
        pages: pages of the engine's memory.
        page_tokens: tokens of a page.
        window: with a number there is a second layer group, of sliding windows.
        full: whether there is one of full attention.
        overlapped: a step is planned before the one ahead of it is accounted for.
        budget: most tokens of a step.
        policy: `kv_load_failure_policy`.
        events: publish KV events; they are collected in `events`.
    """

    def __init__(
        self,
        cache: dict[str, Any] | None,
        pages: int = 64,
        page_tokens: int = 32,
        window: int | None = None,
        full: bool = True,
        overlapped: bool = False,
        budget: int = 2048,
        policy: str = "recompute",
        events: bool = False,
    ) -> None:
        transfer = None
        if cache is not None:
            transfer = KVTransferConfig(
                kv_connector="KVCairnConnector",
                kv_connector_module_path="kvcairn.adapters.vllm",
                kv_role="kv_both",
                kv_load_failure_policy=policy,
                kv_connector_extra_config=cache,
            )
        self.config = VllmConfig(
            model_config=ModelConfig(model=str(MODELS / "tiny"), dtype="float32", seed=0, skip_tokenizer_init=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=budget,
                max_model_len=4096,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                async_scheduling=overlapped,
            ),
            cache_config=CacheConfig(block_size=page_tokens, enable_prefix_caching=True),
            kv_transfer_config=transfer,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if events else None,
            device_config=DeviceConfig("cpu"),
        )
        self.config.cache_config.kv_cache_layout = "LBHNC"
        self.config.cache_config.num_gpu_blocks = pages
        shape = {"block_size": page_tokens, "num_kv_heads": 1, "head_size": KV_FLOATS // 2, "dtype": torch.float32}
        groups: list[Any] = []
        windows: list[int | None] = []
        if full:
            groups.append(KVCacheGroupSpec(["layers.0", "layers.1"], FullAttentionSpec(**shape)))
            windows.append(None)
        if window is not None:
            sliding = SlidingWindowSpec(**shape, sliding_window=window)
            groups.append(KVCacheGroupSpec(["layers.2", "layers.3"], sliding))
            windows.append(window)
        self.kv = KVCacheConfig(num_blocks=pages, kv_cache_tensors=[], kv_cache_groups=groups)
        self.kv.kv_cache_layout = "LBHNC"
        layers = [name for group in groups for name in group.layer_names]
        self.memory = {name: torch.zeros(pages, 1, page_tokens, KV_FLOATS) for name in layers}
        self.model = HashModel(
            self.memory, [(g.layer_names, page_tokens, w) for g, w in zip(groups, windows, strict=True)]
        )
        self.worker: Any = None
        if transfer is not None:
            self.worker = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, self.kv)
            self.worker.register_kv_caches(self.memory)
        kind = AsyncScheduler if overlapped else Scheduler
        self.scheduler = kind(
            vllm_config=self.config,
            kv_cache_config=self.kv,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=page_tokens,
            hash_block_size=page_tokens,
        )
        self.connector: Any = self.scheduler.connector
        if self.connector is not None:
            assert isinstance(self.connector, KVCairnConnector)
            self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})
        init_none_hash(sha256)
        self.scheduler.kv_event_publisher.publish = lambda batch: self.events.extend(batch.events)
        self._hasher = get_request_block_hasher(page_tokens, sha256)
        self._depth = 2 if overlapped else 1
        self._in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.answers: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.reasons: dict[str, str] = {}
        self.events: list[Any] = []
        self.stats: list[Any] = []

    def add(
        self,
        rid: str,
        prompt: list[int],
        new: int = 4,
        salt: str | None = None,
        lora: LoRARequest | None = None,
        image: tuple[str, int, int] | None = None,
        params: dict[str, Any] | None = None,
    ) -> Request:
        """Add a request; `image` is an identifier, an offset and a length."""
        extra = {"kv_transfer_params": {"kvcairn": params}} if params is not None else None
        sampling = SamplingParams(max_tokens=new, extra_args=extra, output_kind=RequestOutputKind.DELTA)
        sampling.update_from_generation_config({}, 2)
        sampling.ignore_eos = True
        features = []
        if image is not None:
            name, offset, length = image
            place = PlaceholderRange(offset=offset, length=length)
            features = [MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=place)]
        request = Request(
            request_id=rid,
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            cache_salt=salt,
            lora_request=lora,
            mm_features=features,
        )
        self.answers[rid] = []
        self.scheduler.add_request(request)
        return request

    def step(self) -> Any:
        """Plan a step, carry it out, and account for the oldest that is not accounted for."""
        output = self.scheduler.schedule()
        self._in_flight.append((output, self._execute(output)))
        if len(self._in_flight) >= self._depth:
            self._account()
        return output

    def run(self, steps: int = 3000) -> None:
        """Step until every request has its answer and nothing is left to be stored."""
        for _ in range(steps):
            if not self.scheduler.has_requests() and not self._in_flight:
                return
            output = self.step()
            if not output.total_num_scheduled_tokens:
                time.sleep(0.001)
                if not self.scheduler.has_requests():
                    while self._in_flight:
                        self._account()
        raise AssertionError(f"requests do not end: {[(r, q.status) for r, q in self.scheduler.requests.items()]}")

    def answer(self, rid: str, prompt: list[int], **how: Any) -> list[int]:
        """Run one request to its end; return its tokens."""
        self.add(rid, prompt, **how)
        self.run()
        return self.answers[rid]

    def settle(self) -> None:
        """Wait for stores, and let the scheduler know of their end."""
        until_s = time.monotonic() + 60
        while self.worker.worker.open_count and time.monotonic() < until_s:
            self.step()
            time.sleep(0.001)
        while self._in_flight:
            self._account()
        assert self.worker.worker.open_count == 0
        self.connector.cache.drain(timeout_s=60)

    def reset(self) -> None:
        """Forget the engine's own prefix cache."""
        self.settle()
        assert self.scheduler.reset_prefix_cache()

    def status(self, rid: str) -> RequestStatus:
        """Return where a request stands."""
        status: RequestStatus = self.scheduler.requests[rid].status
        return status

    def assert_nothing_is_open(self) -> None:
        """Nothing is held by anybody once all requests are over."""
        self.settle()
        pool = self.scheduler.kv_cache_manager.block_pool
        stats = self.connector.cache.stats()
        assert self.scheduler.requests == {}
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert (stats.open_leases, stats.open_reservations, stats.open_jobs) == (0, 0, 0)
        assert self.connector.scheduler.lookups.open_count == 0
        assert self.connector.scheduler.stores.open_count == 0
        assert self.worker.worker.open_count == 0

    def close(self) -> None:
        """End both sides, as vLLM does."""
        self.scheduler.shutdown()
        if self.worker is not None:
            self.worker.shutdown()

    def _execute(self, output: Any) -> ModelRunnerOutput:
        """Do what a model runner does, with vLLM's own code for the hooks."""
        planned = list(output.num_scheduled_tokens)
        wanted = {rid for rid in planned if not self.scheduler.requests[rid].is_prefill_chunk}
        if self.worker is None:
            return self._result(planned, self.model.run(output, wanted), None)
        self.worker.handle_preemptions(output.kv_connector_metadata)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        try:
            with (
                set_forward_context(None, self.config),
                KVConnectorModelRunnerMixin._get_kv_connector_output(output) as done,
            ):
                sampled = self.model.run(output, wanted)
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None
        return self._result(planned, sampled, None if done.is_empty() else done)

    def _result(self, planned: list[str], sampled: dict[str, int], done: Any) -> ModelRunnerOutput:
        return ModelRunnerOutput(
            req_ids=planned,
            req_id_to_index={rid: i for i, rid in enumerate(planned)},
            sampled_token_ids=[[sampled[rid]] if rid in sampled else [] for rid in planned],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=done,
        )

    def _account(self) -> None:
        output, result = self._in_flight.popleft()
        for outputs in self.scheduler.update_from_output(output, result).values():
            if outputs.scheduler_stats is not None:
                self.stats.append(outputs.scheduler_stats)
            for each in outputs.outputs:
                self.answers[each.request_id] += each.new_token_ids
                if each.prefill_stats is not None:
                    self.cached[each.request_id] = each.prefill_stats.num_cached_tokens
                if each.finish_reason is not None:
                    self.reasons[each.request_id] = str(each.finish_reason)


@contextmanager
def engine(cache: dict[str, Any] | None, **settings: Any) -> Iterator[Engine]:
    """Make an engine; it is closed at the end."""
    made = Engine(cache, **settings)
    try:
        yield made
    finally:
        made.close()


def expected(prompt: list[int], new: int = 4, **settings: Any) -> list[int]:
    """Return the answer of an engine without a cache."""
    alone = Engine(None, **settings)
    return alone.answer("alone", prompt, new=new)


def folder_of(path: Path, name: str) -> str:
    """Make a folder; return its path."""
    (path / name).mkdir(exist_ok=True)
    return str(path / name)
