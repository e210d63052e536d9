"""The host pools of an engine, each with a space of its own: opened while SGLang attaches, closed when it detaches."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.runtime_context import get_server_args

from kvcairn.adapters.sglang.guard import never_raises
from kvcairn.adapters.sglang.pages import bare_pool, pages_of
from kvcairn.adapters.sglang.rank import Rank
from kvcairn.adapters.sglang.settings import read_settings
from kvcairn.adapters.sglang.store import PoolStore, WriteBuffer
from kvcairn.adapters.sglang.traffic import Traffic
from kvcairn.cache import Cache
from kvcairn.errors import ClosedError, KVCairnError

logger = logging.getLogger(__name__)

KV = "kv"


class HostPools(HiCacheStorage):
    """What of a HiCacheStorage holds its pools; what moves their pages derives from it."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._storage_config = storage_config
        self._settings = read_settings(storage_config.extra_config)
        self._stores: dict[str, PoolStore] = {}
        self._traffic = Traffic()
        self._cache: Cache | None = None
        self._buffer: WriteBuffer | None = None
        self._rank: Rank | None = None

    @property
    def cache(self) -> Cache:
        """The cache behind it, while attached.

        Raises:
            ClosedError: it is not attached.
        """
        if self._cache is None:
            raise ClosedError("this storage is not attached")
        return self._cache

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the cache, and the space of the pool that holds the KV.

        Raises:
            ConfigError, LayoutError, UnsupportedError: settings or pool cannot be served; nothing is left open.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._rank = Rank(self._settings, self._storage_config, get_server_args())
        pages = pages_of(bare_pool(mem_pool_host))
        pool_bytes = int(mem_pool_host.size) // pages.tokens * pages.block_bytes
        self._cache = self._settings.open_cache(pool_bytes, pages.block_bytes)
        try:
            self._buffer = WriteBuffer(self._cache)
            self._stores[KV] = self._store_of(bare_pool(mem_pool_host), KV)
        except KVCairnError:
            self.close()
            raise

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Open the space of one more pool; the KV's own comes here too.

        Raises:
            LayoutError, UnsupportedError: the pool cannot be served.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) not in self._stores:
            self._stores[str(host_pool_name)] = self._store_of(host_pool, str(host_pool_name))

    def on_host_pools_registered(self) -> None:
        """Say what is served."""
        for name, store in self._stores.items():
            space = store.space.descriptor
            logger.info(
                "kvcairn serves pool %s: %s, pages of %d bytes", name, space.layout.name, store.space.block_bytes
            )

    @never_raises(lambda *_, **__: False)
    def clear(self) -> bool:
        """Drop all pages of this engine's spaces, on every tier."""
        for store in self._stores.values():
            self.cache.clear(store.space)
        return True

    def get_stats(self) -> Any:
        """Return what was moved since the last call: pages and GB/s of each call."""
        return self._traffic.take()

    def close(self) -> None:
        """Write out what is under way, and let go of the cache. Idempotent."""
        cache, self._cache = self._cache, None
        self._stores = {}
        if cache is not None:
            cache.close()

    def _store_of(self, pool: Any, name: str) -> PoolStore:
        assert self._buffer is not None
        assert self._rank is not None
        pages = pages_of(pool)
        return PoolStore(self._rank.space(self.cache, pool, name, pages.block_bytes), pages, self._buffer)

    def _timeout_s(self, store: PoolStore, pages: int) -> float:
        return self._settings.options.timeout_s(pages * store.pages.tokens)

    def _load(self, store: PoolStore, keys: list[str], indices: torch.Tensor) -> list[bool]:
        begin_s = time.monotonic()
        ok = store.load(keys, indices, self._timeout_s(store, len(keys)))
        self._traffic.loaded(sum(ok), store.space.block_bytes, time.monotonic() - begin_s)
        return ok

    def _save(self, store: PoolStore, keys: list[str], indices: torch.Tensor) -> list[bool]:
        begin_s = time.monotonic()
        ok = store.store(keys, indices, self._timeout_s(store, len(keys)))
        self._traffic.stored(sum(ok), store.space.block_bytes, time.monotonic() - begin_s)
        return ok
