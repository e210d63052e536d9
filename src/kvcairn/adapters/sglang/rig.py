"""SGLang's own tree, controller and host pool without an engine around them, for `kvcairn bench engine`.

The engine is imported when the first of these functions is called.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kvcairn.adapters.sglang.versions import check_version
from kvcairn.errors import UnsupportedError


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The KV of a model with plain attention, in bfloat16, and how much of it there is room for."""

    layers: int
    heads: int
    head_dim: int
    tokens: int
    page_tokens: int


def one_rank() -> AbstractContextManager[Any]:
    """Have SGLang see itself as the only rank.

    Raises:
        UnsupportedError: there is no SGLang that the adapter works with, or it cannot be loaded here.
    """
    supported = check_version()
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError as error:
        raise UnsupportedError(f"SGLang cannot be loaded: {error}; {supported}") from error
    context: AbstractContextManager[Any] = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
    return context


def controller(shape: Shape, backend: str, extra: dict[str, Any]) -> Any:
    """Return a controller with a host pool of layout `page_first` and that storage behind it, inside of `one_rank`."""
    import torch
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
    from sglang.srt.utils import get_device

    args = ServerArgs(
        model_path="dummy",  # SGLang knows it and looks for nothing
        page_size=shape.page_tokens,
        hicache_io_backend="kernel",
        hicache_mem_layout="page_first",
        hicache_storage_backend=backend,
        hicache_ratio=1.5,
        hicache_storage_backend_extra_config=json.dumps(extra),
    )
    set_global_server_args_for_scheduler(args)
    common: dict[str, Any] = {"size": shape.tokens, "dtype": torch.bfloat16, "device": get_device()}
    pool = MHATokenToKVPool(
        page_size=shape.page_tokens,
        head_num=shape.heads,
        head_dim=shape.head_dim,
        layer_num=shape.layers,
        enable_memory_saver=False,
        **common,
    )
    requests = ReqToTokenPool(size=4, max_context_len=128, device=common["device"], enable_memory_saver=False)
    params = CacheInitParams(
        req_to_token_pool=requests,
        token_to_kv_pool_allocator=TokenToKVPoolAllocator(kvcache=pool, need_sort=False, **common),
        page_size=shape.page_tokens,
        disable=False,
        tree_components=(ComponentType.FULL,),
    )
    tree = UnifiedRadixCache(params)
    tree.init_hicache(args, params)
    return tree.cache_controller


def indices(first_page: int, pages: int, page_tokens: int) -> Any:
    """Return the places of some pages in a host pool, as SGLang gives them."""
    import torch

    return torch.arange(first_page * page_tokens, (first_page + pages) * page_tokens)


def words(buffer: Any) -> Any:
    """Return the memory of a tensor as an array of 8-byte words."""
    import torch

    return buffer.view(-1).view(torch.int64).numpy()
