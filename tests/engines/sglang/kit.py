"""SGLang's own tree, controller and host pools on CPU tensors, with a storage backend behind them."""

from __future__ import annotations

import contextlib
import json
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
PAGE_SIZES = (1, 16, 64, 256)


def settings(folder: Path, interface_v1: bool = True, **more: Any) -> dict[str, Any]:
    """Return HiCache's extra configuration for our backend with a disk tier in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    disk = {"type": "disk", "path": str(folder), "capacity": "256 MiB", "reserve": "1 MiB"}
    return {
        "backend_name": "kvcairn",
        "module_path": "kvcairn.adapters.sglang",
        "class_name": "KVCairnStorage",
        "interface_v1": int(interface_v1),
        "prefetch_threshold": 1,
        "kvcairn": {"tiers": [disk], "model": "test", "weights": "one", "timeout_base": 30} | more,
    }


@dataclass(frozen=True)
class Shape:
    """The KV of one rank."""

    kind: str = "mha"
    layout: str = "page_first"
    page_size: int = 16
    layers: int = 3
    heads: int = 2
    dim: int = 16
    tokens: int = 1024


class Side:
    """One engine's cache: device pool, allocator, tree, controller, host pool and storage."""

    opened: ClassVar[list[Side]] = []

    def __init__(self, shape: Shape, extra: dict[str, Any] | None, backend: str | None = "dynamic") -> None:
        """Attach that backend, with `extra` as its configuration; none at all without `extra`."""
        self.shape = shape
        backend = backend if extra is not None else None
        args = server_args(shape, backend, extra)
        set_global_server_args_for_scheduler(args)
        size = shape.tokens + 2 * max(shape.page_size, 64)
        self.pool = self._device_pool(size)
        self.allocator = TokenToKVPoolAllocator(
            size=size, dtype=torch.bfloat16, device="cpu", kvcache=self.pool, need_sort=False
        )
        requests = ReqToTokenPool(size=4, max_context_len=128, device="cpu", enable_memory_saver=False)
        params = CacheInitParams(
            req_to_token_pool=requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=shape.page_size,
            disable=False,
            tree_components=(ComponentType.FULL,),
        )
        self.tree = UnifiedRadixCache(params)
        self.tree.init_hicache(args, params)
        self.controller = self.tree.cache_controller
        self.controller.prefetch_capacity_limit = 1 << 40
        Side.opened.append(self)

    @property
    def storage(self) -> Any:
        """The backend, inside of SGLang's fault injector where that is on."""
        backend = self.controller.storage_backend
        return getattr(backend, "_backend", backend)

    @property
    def host_pool(self) -> Any:
        """The host pool with the KV."""
        return self.controller.mem_pool_host.anchor_entry.host_pool

    def insert(self, tokens: array[int], seed: int = 0) -> torch.Tensor:
        """Put random KV of some tokens into device pool and tree; return it after it has reached the storage."""
        places = self.allocator.alloc(len(tokens))
        generator = torch.Generator().manual_seed(seed)
        for buffer in self.buffers():
            noise = torch.randn((len(tokens), *buffer.shape[1:]), generator=generator)
            buffer[places] = noise.to(buffer.dtype)
        self.tree.insert(InsertParams(key=RadixKey(tokens), value=places))
        self.pump(lambda: not self.tree.ongoing_write_through, "the copy to the host pool")
        self.pump(lambda: not self.tree.ongoing_backup, "the write to the storage")
        return self.kv(places)

    def prefetch(self, tokens: array[int], name: str = "request") -> int:
        """Prefetch from the storage; return how many tokens the host pool has of the prompt then."""
        handle = CacheRequestHandle(name, 0)
        self.tree.prefetch_from_storage(handle, self.tree.root_node_handle(), tokens, None, None)
        self.pump(lambda: self.tree.check_prefetch_progress(handle), "the prefetch")
        return int(self.match(tokens).host_hit_length)

    def load_back(self, tokens: array[int]) -> torch.Tensor:
        """Bring what the host pool has of a prompt to the device; return all KV that is there then."""
        found = self.match(tokens)
        assert self.tree.load_back(found.best_match_node)
        self.tree.ready_to_load_host_cache()
        self.pump(lambda: not self.tree.ongoing_load_back, "the load back")
        return self.kv(self.tree.path_device_indices(self.match(tokens).last_device_node))

    def match(self, tokens: array[int]) -> Any:
        """Return what the tree knows of a prompt."""
        return self.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))

    def kv(self, places: torch.Tensor) -> torch.Tensor:
        """Return the bytes of some tokens in the device pool: (buffers, tokens, bytes)."""
        return torch.stack([buffer[places].reshape(len(places), -1).view(torch.uint8) for buffer in self.buffers()])

    def buffers(self) -> list[torch.Tensor]:
        """Return the device pool's tensors, one of a layer or two."""
        if self.shape.kind == "mla":
            return list(self.pool.kv_buffer)
        return [*self.pool.k_buffer, *self.pool.v_buffer]

    def pump(self, is_done: Callable[[], object], what: str) -> None:
        """Do what the scheduler does between two steps, until something has happened."""
        until_s = time.monotonic() + 120
        while time.monotonic() < until_s:
            self.tree.check_hicache_events()
            if is_done():
                return
            time.sleep(0.001)
        raise AssertionError(f"waited in vain for {what}")

    def close(self) -> None:
        """End the storage and its threads."""
        if self.controller.enable_storage:
            self.controller.detach_storage_backend()

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


def server_args(shape: Shape, backend: str | None, extra: dict[str, Any] | None) -> Any:
    """Return the arguments of an engine with HiCache on."""
    return ServerArgs(
        model_path="dummy",
        page_size=shape.page_size,
        hicache_io_backend="direct" if shape.layout == "page_first_direct" else "kernel",
        hicache_mem_layout=shape.layout,
        hicache_write_policy="write_through",
        hicache_storage_backend=backend,
        hicache_ratio=1.5,
        hicache_storage_backend_extra_config=json.dumps(extra) if extra else None,
        hicache_storage_prefetch_policy="wait_complete",
    )


def prompt(tokens: int, seed: int = 1) -> array[int]:
    """Return random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return array("q", torch.randint(0, 128_000, (tokens,), generator=generator).tolist())


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Have SGLang see itself as the only rank."""
    with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1):
        yield
