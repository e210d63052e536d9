"""SGLang's own tree and device pool on CPU tensors, with our linker behind them and no host pool."""

from __future__ import annotations

import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from kvcairn.adapters.sglang import KVCairnLinker
from tests.engines.sglang.kit import Shape


def linker_settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Return the linker's configuration with a memory and a disk tier."""
    folder.mkdir(parents=True, exist_ok=True)
    disk = {"type": "disk", "path": str(folder), "capacity": "256 MiB", "reserve": "1 MiB"}
    memory = {"type": "memory", "capacity": "64 MiB"}
    own = {"tiers": [memory, disk], "model": "test", "weights": "one", "timeout_base": 30, "lookup_wait": 30}
    return {"kvcairn": own | more}


class LinkerSide:
    """One engine's cache: device pool, allocator, tree and linker."""

    opened: ClassVar[list[LinkerSide]] = []

    def __init__(self, shape: Shape, extra: dict[str, Any], components: Any = (ComponentType.FULL,)) -> None:
        """Link that pool, with `extra` as the linker's configuration."""
        self.shape = shape
        args = ServerArgs(model_path="dummy", page_size=shape.page_size)
        set_global_server_args_for_scheduler(args)
        size = shape.tokens + 2 * max(shape.page_size, 64)
        self.pool = self._device_pool(size)
        self.allocator = TokenToKVPoolAllocator(
            size=size, dtype=torch.bfloat16, device="cpu", kvcache=self.pool, need_sort=False
        )
        params = CacheInitParams(
            req_to_token_pool=ReqToTokenPool(size=4, max_context_len=128, device="cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=shape.page_size,
            disable=False,
            tree_components=components,
        )
        self.tree = UnifiedRadixCache(params)
        self.linker = KVCairnLinker(args, params, components=set(components), extra_config=extra, forward_stream=None)
        self.tree.init_cache_linker(self.linker)
        self._next = shape.page_size
        self.pool.register_layer_transfer_counter(self.linker.layer_done_counter)
        LinkerSide.opened.append(self)

    def insert(self, tokens: array[int], seed: int = 0) -> torch.Tensor:
        """Put random KV of some tokens into device pool and tree; return it after it has been offloaded."""
        places = self.places(len(tokens))
        generator = torch.Generator().manual_seed(seed)
        for buffer in self.buffers():
            noise = torch.randn((len(tokens), *buffer.shape[1:]), generator=generator)
            buffer[places] = noise.to(buffer.dtype)
        self.tree.insert(InsertParams(key=RadixKey(tokens), value=places))
        self.pump()
        return self.kv(places)

    def match(self, tokens: array[int], name: str = "request") -> int:
        """Return how many tokens the tree promises a request from us."""
        request: Any = SimpleNamespace(rid=name, session=None)
        return int(self.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens), req=request)).host_hit_length)

    def load(self, tokens: array[int], name: str = "request") -> torch.Tensor | None:
        """Load all pages of a prompt into other slots, as a forward waits for them; None where it did not land."""
        places = self.places(len(tokens))
        if not self.linker.load(name, [self.transfer(tokens, places)]):
            return None
        index = self.linker.start_layer_wise_loading()
        self.linker.layer_done_counter.set_consumer(index)
        layers = [self.layer(layer, places) for layer in range(self.shape.layers)]
        if not self.linker.finish_layer_wise_loading(index):
            return None
        loaded = self.kv(places)
        assert torch.equal(
            torch.cat([layers[0], layers[-1]]), torch.cat([self.layer(0, places), self.layer(-1, places)])
        )
        return loaded

    def layer(self, layer: int, places: torch.Tensor) -> torch.Tensor:
        """Return what a layer of the model reads, as soon as it is there."""
        keys: torch.Tensor = self.pool.get_key_buffer(layer % self.shape.layers)
        return keys[places].clone()

    def transfer(self, tokens: array[int], places: torch.Tensor | None = None) -> PoolTransfer:
        """Return all pages of a prompt as SGLang hands them over."""
        keys = get_storage_hash_str(RadixKey(tokens), None, page_size=self.shape.page_size)
        return PoolTransfer(name=PoolName.KV, keys=list(keys), device_indices=places)

    def places(self, tokens: int) -> torch.Tensor:
        """Return slots for so many tokens, in whole pages, in turn; SGLang keeps the first page for padding."""
        if self._next + tokens > self.allocator.size:
            self._next = self.shape.page_size  # what lay there has been offloaded
        first, self._next = self._next, self._next + tokens
        return torch.arange(first, first + tokens)

    def kv(self, places: torch.Tensor) -> torch.Tensor:
        """Return the bytes of some tokens in the device pool: (buffers, tokens, bytes)."""
        return torch.stack([buffer[places].reshape(len(places), -1).view(torch.uint8) for buffer in self.buffers()])

    def buffers(self) -> list[torch.Tensor]:
        """Return the device pool's tensors, one of a layer or two."""
        if self.shape.kind == "mla":
            return list(self.pool.kv_buffer)
        return [*self.pool.k_buffer, *self.pool.v_buffer]

    def pump(self) -> None:
        """Do what the scheduler does between two steps, until nothing is being offloaded."""
        until_s = time.monotonic() + 120
        while self.tree.linker.pending_offloads:
            assert time.monotonic() < until_s, "waited in vain for the offload"
            self.tree.check_hicache_events()
            time.sleep(0.001)

    def close(self) -> None:
        """End the linker and its threads."""
        self.linker.close()

    def _device_pool(self, size: int) -> Any:
        shape = self.shape
        common = {
            "size": size,
            "page_size": shape.page_size,
            "dtype": torch.bfloat16,
            "layer_num": shape.layers,
            "device": "cpu",
            "enable_memory_saver": False,
        }
        if shape.kind == "mla":
            return MLATokenToKVPool(kv_lora_rank=shape.dim * 2, qk_rope_head_dim=shape.dim, **common)
        return MHATokenToKVPool(head_num=shape.heads, head_dim=shape.dim, **common)
