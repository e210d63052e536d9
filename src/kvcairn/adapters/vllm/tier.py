"""`KVCairnTier`: the second door. vLLM's own offloading keeps its CPU tier, and what leaves for storage comes here.

vLLM names its chunks by its own block hashes, so the tier knows keys and no tokens. A chunk is one row of vLLM's
shared host memory, the bytes of all workers; it is copied by address, on the cache's threads.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvcairn.adapters.vllm.identity import describe_chunks
from kvcairn.adapters.vllm.settings import TierOptions, read_settings
from kvcairn.errors import KVCairnError, UnsupportedError
from kvcairn.keys import KEY_BYTES
from kvcairn.space import Space
from kvcairn.transfer.job import CopyJob
from kvcairn.types import UNKNOWN, Parent

logger = logging.getLogger(__name__)

PATH = "secondary_tiers"


@dataclass
class Chunk:
    """One chunk of a job: its key, its layer group, its row in vLLM's memory, and the token that it ends with."""

    offload_key: bytes
    row: int
    end_token: int | None

    @property
    def key(self) -> bytes:
        """The engine's hash of the tokens up to its end."""
        return bytes(get_offload_block_hash(self.offload_key))

    @property
    def group(self) -> int:
        """The layer group."""
        return int(get_offload_group_idx(self.offload_key))


@dataclass
class Running:
    """A job of vLLM's, in one or more runs of chunks; `copies` is empty where it could not begin."""

    job: TransferJob
    runs: list[list[Chunk]]
    copies: list[CopyJob]

    @property
    def is_over(self) -> bool:
        """Whether nothing touches vLLM's memory for it any more."""
        return all(copy.query() for copy in self.copies)

    def result(self, chunk_bytes: int) -> JobResult:
        """Return what has come of it."""
        done = [
            chunk.offload_key
            for run, copy in zip(self.runs, self.copies, strict=False)
            for chunk, ok in zip(run, copy.ok, strict=True)
            if ok
        ]
        return JobResult(
            job_id=self.job.job_id,
            success=len(done) == len(self.job.keys),
            successful_keys=done if self.job.is_promotion else None,
            transfer_bytes=len(done) * chunk_bytes,
        )


class KVCairnTier(SecondaryTierManager):
    """The hierarchy of a kvcairn cache behind vLLM's CPU tier. The scheduler's thread; waits in `drain_jobs` alone.

    Args:
        offloading_spec: vLLM's settings of offloading.
        primary_kv_view: vLLM's host memory, one row a chunk.
        tier_type: its name, as vLLM gives it.
        backpressure_detector: vLLM's own.
        **settings: `config` or `tiers`, and those of `TierOptions`.

    Raises:
        ConfigError: a setting is refused.
        UnsupportedError: vLLM hashes blocks with something else than SHA-256.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        read = read_settings(settings, TierOptions, PATH)
        self._timeout_s = read.options.load_timeout_s
        self._base = int(np.asarray(primary_kv_view).ctypes.data)
        self._cache = read.open_cache()
        config = offloading_spec.config
        self._spaces: list[Space] = [
            self._cache.space(describe_chunks(config, read.options, group, self.block_size_bytes))
            for group in range(len(config.groups))
        ]
        for space in self._spaces:
            space.check_write_policy("through")  # vLLM hands each chunk over once, whatever becomes of it
        self._steps = [group.tokens_per_block * config.cache.blocks_per_chunk for group in config.groups]
        self._running: dict[int, Running] = {}

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Return whether a chunk can be loaded."""
        block_hash = bytes(get_offload_block_hash(key))
        if len(block_hash) != KEY_BYTES:
            raise UnsupportedError(
                f"vLLM's hashes have {len(block_hash)} bytes: the tier needs --prefix-caching-hash-algo sha256"
            )
        try:
            found = self._space(key).contains([block_hash])
        except KVCairnError as error:
            logger.warning("nothing found: %s", error)
            return LookupResult.MISS
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to copy chunks out of vLLM's memory."""

        def start(space: Space, run: list[Chunk], parent: Parent) -> CopyJob:
            return space.store_from([chunk.key for chunk in run], self._buffers(run), self._timeout_s, parent)

        self._start(job_metadata, start)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to copy chunks into vLLM's memory; from slower tiers they go there directly."""

        def start(space: Space, run: list[Chunk], parent: Parent) -> CopyJob:
            return space.load_into([chunk.key for chunk in run], self._buffers(run), self._timeout_s)

        self._start(job_metadata, start)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that ended since the last call."""
        over = [running for running in self._running.values() if running.is_over]
        for running in over:
            del self._running[running.job.job_id]
        return [running.result(self.block_size_bytes) for running in over]

    def has_pending_work(self) -> bool:
        """Whether there are jobs whose end was not told."""
        return bool(self._running)

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """Note that chunks were used."""
        by_group: dict[int, list[bytes]] = {}
        for key in keys:
            by_group.setdefault(get_offload_group_idx(key), []).append(bytes(get_offload_block_hash(key)))
        try:
            for group, hashes in by_group.items():
                self._spaces[group].touch(hashes)
        except KVCairnError as error:
            logger.warning("a use was not noted: %s", error)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Ask for nothing special: chunks are stored as they are computed."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait until no job touches vLLM's memory."""
        for running in self._running.values():
            for copy in running.copies:
                copy.wait()

    def shutdown(self) -> None:
        """Wait for jobs, then let go of the cache; its last user waits for writes."""
        self.drain_jobs()
        self._cache.close()

    def _space(self, key: Any) -> Space:
        return self._spaces[int(get_offload_group_idx(key))]

    def _start(self, job: TransferJob, start: Any) -> None:
        runs = list(self._runs(job))
        running = Running(job, runs, [])
        self._running[job.job_id] = running
        try:
            for run in runs:
                running.copies.append(start(self._spaces[run[0].group], run, self._parent(run[0])))
        except KVCairnError as error:
            logger.warning("job %d was not carried out: %s", job.job_id, error)

    def _runs(self, job: TransferJob) -> Iterator[list[Chunk]]:
        """Cut a job into chains: chunks of one group that follow one another in their request."""
        chunks = [
            Chunk(key, int(row), job.req_context.get_offload_key_position(key))
            for key, row in zip(job.keys, job.chunk_ids, strict=True)
        ]
        chunks.sort(key=lambda chunk: (chunk.group, chunk.end_token or 0))

        def chain_of(numbered: tuple[int, Chunk]) -> tuple[int, bool, int]:
            number, chunk = numbered
            if chunk.end_token is None:
                return chunk.group, False, number  # nobody says what it follows
            return chunk.group, True, chunk.end_token // self._steps[chunk.group] - number

        for _, run in groupby(enumerate(chunks), chain_of):
            yield [chunk for _, chunk in run]

    def _parent(self, chunk: Chunk) -> Parent:
        """Return the parent of a run's first chunk: nothing at the start of a prompt, else one that nobody tells."""
        return None if chunk.end_token == self._steps[chunk.group] else UNKNOWN

    def _buffers(self, run: list[Chunk]) -> tuple[Any, Any]:
        rows = np.array([chunk.row for chunk in run], dtype=np.uint64)
        addresses = np.uint64(self._base) + rows * np.uint64(self.block_size_bytes)
        return addresses, np.full(len(run), self.block_size_bytes, dtype=np.int64)
