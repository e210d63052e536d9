"""`KVCairnLinker`: what lies behind the device pool of an engine without HiCache's host pool."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_parallel

from kvcairn.adapters.sglang.devicepages import DevicePages
from kvcairn.adapters.sglang.guard import never_raises
from kvcairn.adapters.sglang.moves import Loads, Offloads, recorded
from kvcairn.adapters.sglang.promises import Promises
from kvcairn.adapters.sglang.rank import Rank
from kvcairn.adapters.sglang.settings import NAME, Settings, read_settings
from kvcairn.adapters.sglang.store import PlacedStore
from kvcairn.errors import ConfigError, KVCairnError, UnsupportedError

logger = logging.getLogger(__name__)


class KVCairnLinker(UnifiedCacheLinker):
    """A UnifiedCacheLinker whose host tier is the cache's memory tier.

    A failed load aborts the request here, so a hit is promised only for pages that are in memory, verified as
    `verify_memory` says, and pinned from the lookup until they are on the device. `lookup` and what else the
    scheduler's thread calls never raises: a failure is a miss. Bytes move on two threads, one for each direction.

    Attributes:
        pools: SGLang's device pools by name.
        layer_done_counter: what the model's layers wait on.
        cache: what it stores in.

    Args:
        server_args: the engine's arguments.
        params: SGLang's parameters of the tree.
        components: SGLang's tree components of the model.
        extra_config: `linker_extra_config`; its table `kvcairn` holds our settings.
        forward_stream: the stream that writes the pool.

    Raises:
        ConfigError: a setting is refused, or there is no memory tier.
        UnsupportedError: the model has more than one pool.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        self.forward_stream = forward_stream
        settings = _settings(extra_config)
        pool, layers = _device_pool(params, components)
        pages = DevicePages(pool, layers)
        self.pools = {PoolName.KV: pool}
        config = _storage_config(params, pool.device_pool, server_args)
        self._is_writer: bool = config.is_storage_writer
        self._rank = Rank(settings, config, server_args)
        self.cache = settings.open_cache(0, 0)
        try:
            space = self._rank.space(self.cache, pool.device_pool, "kv", pages.block_bytes)
        except KVCairnError:
            self.cache.close()
            raise
        self._promises = Promises(space, settings.options.lookup_wait_s())
        self._loads = Loads(pages, layers)
        self._offloads = Offloads(PlacedStore(space), pages)
        self.layer_done_counter = self._loads.counter
        self._is_closed = False
        logger.info("kvcairn serves the device pool: pages of %d bytes", space.block_bytes)

    @never_raises(lambda *_: [])
    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Return all lengths of the prefix that can be loaded, and keep them so until the load.

        Microseconds where all is in memory or nowhere; up to `lookup_wait` where a slower tier has some of it.
        """
        return list(range(1, self._promises.make(rid, _kv(transfers).keys) + 1))

    @never_raises(lambda *_: False)
    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queue what was promised to a request; False, so that it computes, where that is no longer in memory."""
        transfer = _kv(transfers)
        lease = self._promises.take(rid, transfer.keys)
        if lease is not None:
            self._loads.queue(rid, lease, transfer.device_indices, len(transfer.keys))
        return lease is not None

    def start_layer_wise_loading(self) -> int:
        """Start what is queued; return the number of the batch, -1 where there is none."""
        return self._loads.start()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until a batch writes nothing more to the device; return whether all of it landed."""
        return self._loads.finish(counter_index)

    @never_raises(lambda *_: False)
    def cancel_queued_load(self, rid: str) -> bool:
        """Take a load back that has not started; return whether there was one."""
        self._promises.drop(rid)
        return self._loads.cancel(rid)

    @never_raises(lambda *_, **__: False)
    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Queue pages to be stored."""
        transfer = _kv(transfers)
        if not self._is_writer:
            self._offloads.pass_over()
            return True
        streams = [] if self.forward_stream is None else [self.forward_stream]
        ready = recorded(transfer.device_indices.device, *streams)
        timeout_s = self._rank.timeout_s(transfer.device_indices.numel())
        self._offloads.queue(transfer.keys, transfer.device_indices, ready, timeout_s)
        return True

    def num_completed_offloads(self) -> int:
        """Return how many offloads have ended, in the order of their queue."""
        return self._offloads.completed()

    def pop_completed_offload(self) -> bool:
        """Return whether all pages of the oldest one are stored."""
        return self._offloads.pop()

    def reset(self) -> None:
        """Wait until nothing moves any more; what is stored stays."""
        self._promises.drop_all()
        self._loads.quiesce()
        self._offloads.quiesce()

    def close(self) -> None:
        """Store what was handed over, wait until nothing moves any more, and let go of the cache. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._promises.drop_all()
        self._loads.close()
        self._offloads.close()
        self.cache.close()


def _settings(extra_config: dict[str, Any] | None) -> Settings:
    settings = read_settings(extra_config)
    if not settings.has_memory_tier:
        remedy = 'put {"type": "memory", "capacity": "8 GiB"} first'
        raise ConfigError(f"{NAME}.tiers", "the linker's host tier is a memory tier, and there is none", None, remedy)
    return settings


def _kv(transfers: list[Any]) -> Any:
    return next(transfer for transfer in transfers if transfer.name == PoolName.KV)


def _device_pool(params: Any, components: Any) -> tuple[DevicePoolEntry, int]:
    """Return the one pool of a model with plain attention, and its layers.

    Raises:
        UnsupportedError: the model has other pools too, or one whose tensors are not known here.
    """
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    drafts = [*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools]
    # A pool derived from these has tensors beside theirs, as scales or an indexer's.
    if set(components) != {ComponentType.FULL} or type(pool) not in (MHATokenToKVPool, MLATokenToKVPool) or drafts:
        names = ", ".join(
            [type(pool).__name__, *sorted(each.name for each in components), *(["draft"] if drafts else [])]
        )
        raise UnsupportedError(f"the linker serves one pool of plain MHA or MLA, not {names}: use KVCairnStorage")
    is_mla = type(pool) is MLATokenToKVPool
    entry = DevicePoolEntry(
        name=PoolName.KV,
        indices_from_pool=PoolName.KV,
        device_pool=pool,
        components=[pool.kv_buffer] if is_mla else [pool.k_buffer, pool.v_buffer],
        layer_mapping={layer: layer for layer in range(pool.layer_num)},
        page_size=params.page_size,
        rows_are_pages=False,
    )
    return entry, int(pool.layer_num)


def _storage_config(params: Any, pool: Any, server_args: Any) -> HiCacheStorageConfig:
    """Describe this rank as SGLang does for a storage."""
    parallel = get_parallel()
    return HiCacheStorageConfig(
        tp_rank=parallel.tp_rank,
        tp_size=parallel.tp_size,
        pp_rank=params.pp_rank,
        pp_size=params.pp_size,
        attn_cp_rank=params.attn_cp_rank,
        attn_cp_size=params.attn_cp_size,
        is_mla_model=type(pool) is MLATokenToKVPool,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=server_args.served_model_name or server_args.model_path,
    )
