"""`KVCairnStorage`: what lies behind HiCache's host pool, `--hicache-storage-backend dynamic`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolTransferResult

from kvcairn.adapters.sglang.guard import never_raises
from kvcairn.adapters.sglang.hostpools import KV, HostPools
from kvcairn.adapters.sglang.pages import Places
from kvcairn.adapters.sglang.store import PoolStore
from kvcairn.errors import LayoutError


class KVCairnStorage(HostPools):
    """A HiCacheStorage of all three generations: generic, v1 zero-copy, v2 pool transfers.

    Keys are SGLang's page hashes; each host pool has a space of its own. A key is published when all of its bytes are
    there and verified, or not at all. Methods that SGLang calls from its storage threads never raise, and block for
    `timeout_base` and `timeout_per_1024_tokens` at most.

    Args:
        storage_config: SGLang's description of this rank; its `extra_config["kvcairn"]` holds our settings.
        kwargs: not used; SGLang passes it.

    Raises:
        ConfigError: a setting is refused.
    """

    # --- all generations ------------------------------------------------------------------------------------------

    @never_raises(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Return whether the page of a key can be loaded."""
        return self._stores[KV].contains([key]) == 1

    @never_raises(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many of the keys, from the first on without a gap, can be loaded."""
        return self._stores[KV].contains(keys)

    # --- generic --------------------------------------------------------------------------------------------------

    @never_raises(lambda *_, **__: None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Load one page into a flat tensor; None where it is not there."""
        return self._load_flat([key], [target_location])[0]

    @never_raises(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Load pages into flat tensors; None for those from the first missing one on."""
        return self._load_flat(keys, target_locations)

    @never_raises(lambda *_, **__: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store one page from a flat tensor; True where it is stored now."""
        return self._store_flat([key], [value])

    @never_raises(lambda *_, **__: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store pages from flat tensors; True where all are stored now."""
        return self._store_flat(keys, values)

    # --- v1: to and from the host pool ----------------------------------------------------------------------------

    @never_raises(lambda keys, *_, **__: [False] * len(keys))
    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Load pages into the host pool; False for those from the first missing one on."""
        return self._load(self._stores[KV], keys, host_indices)

    @never_raises(lambda keys, *_, **__: [False] * len(keys))
    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool; True for those that are stored now."""
        return self._save(self._stores[KV], keys, host_indices)

    # --- v2: several pools ----------------------------------------------------------------------------------------

    @never_raises(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Return which lengths of a prefix all pools can restore."""
        pages = self._stores[KV].contains(keys)
        hits = {KV: pages} if pages else {}
        lengths = list(range(1, pages + 1))
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # another form of the same pages: no condition, and without a verdict it counts as not there
            restorable = self._restorable(keys[:pages], transfer)
            if restorable:
                hits[transfer.name] = restorable[-1]
            lengths = sorted(set(lengths).intersection(restorable))
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Load pages into several pools; for each pool False from the first missing page on."""
        return {each.name: self._transfer(each, is_load=True) for each in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several pools; True for those that are stored now."""
        return {each.name: self._transfer(each, is_load=False) for each in transfers}

    # --- what they share ------------------------------------------------------------------------------------------

    @never_raises(lambda transfer, **_: [False] * len(transfer.keys or []))
    def _transfer(self, transfer: Any, *, is_load: bool) -> list[bool]:
        """Move the pages of one pool."""
        store, keys = self._stores[str(transfer.name)], list(transfer.keys or [])
        return (self._load if is_load else self._save)(store, keys, transfer.host_indices)

    def _restorable(self, keys: list[str], transfer: Any) -> list[int]:
        """Return the lengths of a prefix that one pool can restore, ascending."""
        flags = self._stores[str(transfer.name)].flags(keys)
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            back = max(1, len(transfer.keys or []))
            return [length for length in range(1, len(flags) + 1) if all(flags[max(0, length - back) : length])]
        return list(range(1, 1 + (flags.index(False) if False in flags else len(flags))))

    def _load_flat(self, keys: list[str], tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
        store = self._stores[KV]
        ok = store.load_into(keys, self._flat(store, tensors), self._timeout_s(store, len(keys)))
        return [tensor if is_there else None for tensor, is_there in zip(tensors, ok, strict=True)]

    def _store_flat(self, keys: list[str], tensors: list[torch.Tensor]) -> bool:
        store = self._stores[KV]
        copies = [tensor.contiguous() for tensor in tensors]
        return all(store.store_from(keys, self._flat(store, copies), self._timeout_s(store, len(keys))))

    @staticmethod
    def _flat(store: PoolStore, tensors: list[torch.Tensor]) -> Places:
        """Return the places of flat pages.

        Raises:
            LayoutError: one has another size than a page, or does not lie in one piece in the host's memory.
        """
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            if nbytes != store.pages.block_bytes or tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise LayoutError(f"a flat page has {store.pages.block_bytes} bytes in one piece, got {nbytes}")
        return store.pages.flat(tensors)
