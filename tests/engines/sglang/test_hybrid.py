"""KVCairnStorage with models of several pools: SGLang's own fixtures for sliding windows and recurrent states."""

from __future__ import annotations

import json
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix, node_device_value
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

from tests.engines.sglang.kit import one_rank, settings


class Case(UnifiedRadixCacheStorageFixtures, unittest.TestCase):  # type: ignore[misc]
    """SGLang's fixtures, with our backend in the place of its file backend."""

    __test__ = False  # the tests below call what they need

    def runTest(self) -> None:
        """Nothing; unittest wants it."""

    def _init_hicache(self, cache: Any, *, storage_dir: str, storage_backend: str, prefetch_threshold: int) -> None:
        args = ServerArgs(
            model_path="dummy",
            page_size=self.cfg.page_size,
            hicache_io_backend="kernel",
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(settings(Path(storage_dir))),
            hicache_storage_prefetch_policy="wait_complete",
        )
        args._mamba_cache_chunk_size = max(64, self.cfg.page_size)
        set_global_server_args_for_scheduler(args)
        cache.init_hicache(args, cache.cache_init_params)
        cache.write_through_threshold = 1 << 30
        cache.load_back_threshold = 0
        cache.cache_controller.prefetch_capacity_limit = 1 << 40


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_sliding_windows_come_back_with_the_kv(tmp_path: Path, page_size: int) -> None:
    case = Case()
    case.cfg = CacheConfig(
        page_size=page_size,
        components=(ComponentType.FULL, ComponentType.SWA),
        sliding_window_size=page_size * 2,
        kv_size=max(512, page_size * 32),
        max_context_len=max(512, page_size * 32),
    )

    def content(tree: Any, allocator: Any, places: torch.Tensor) -> list[torch.Tensor]:
        pools = allocator.get_kvcache()
        last = allocator.translate_loc_from_full_to_swa(places[-page_size * 2 :])
        return _rows(pools.full_kv_pool, places) + _rows(pools.swa_kv_pool, last)

    _come_back(case, tmp_path, content)


@pytest.mark.parametrize("page_size", [1, 64])
def test_recurrent_states_come_back_with_the_kv(tmp_path: Path, page_size: int) -> None:
    case = Case()
    case.cfg = CacheConfig(
        page_size=page_size,
        components=(ComponentType.FULL, ComponentType.MAMBA),
        enable_mamba_extra_buffer=page_size > 1,
        mamba_cache_size=60,
        kv_size=1024,
        max_context_len=1024,
    )

    def content(tree: Any, allocator: Any, places: torch.Tensor) -> list[torch.Tensor]:
        node = match_prefix(tree, case._make_seq(1, 8)).last_device_node
        slot = node_device_value(tree, node, ComponentType.MAMBA)
        states = tree.req_to_token_pool.mamba_pool.mamba_cache
        return [
            *_rows(allocator.get_kvcache().full_kv_pool, places),
            *[each[:, slot].clone() for each in (states.temporal, *states.conv)],
        ]

    _come_back(case, tmp_path, content)


def _come_back(case: Case, folder: Path, content: Callable[[Any, Any, torch.Tensor], list[torch.Tensor]]) -> None:
    """Compute and store a prompt, then load it in an engine that has nothing; compare what it has on the device."""
    with one_rank():
        tree, allocator, requests = build_fixture(case.cfg)
        case._init_hicache(tree, storage_dir=str(folder), storage_backend="", prefetch_threshold=1)
        tokens = case._make_seq(1, 8)
        _fill(allocator.get_kvcache())
        _fill(getattr(requests, "mamba_pool", None))
        case._insert(tree, allocator, requests, tokens)
        leaf = match_prefix(tree, tokens).last_device_node
        computed = content(tree, allocator, tree.path_device_indices(leaf))
        case._backup_node(tree, leaf)
        case._write_path_to_l3(tree, leaf)
        case._flush_l3_backups(tree)
        tree.cache_controller.detach_storage_backend()

        tree, allocator, requests = build_fixture(case.cfg)
        case._init_hicache(tree, storage_dir=str(folder), storage_backend="", prefetch_threshold=1)
        case._consume_prefetch(tree, tokens, CacheRequestHandle("request", 0))
        found = match_prefix(tree, tokens)
        assert found.host_hit_length == len(tokens)
        assert tree.load_back(found.best_match_node)
        tree.ready_to_load_host_cache()
        case._pump_hicache_until(tree, lambda: not tree.ongoing_load_back, "the load back")
        places = tree.path_device_indices(match_prefix(tree, tokens).last_device_node)
        loaded = content(tree, allocator, places)
        assert all(each.float().abs().sum() > 0 for each in computed)
        assert all(torch.equal(a, b) for a, b in zip(loaded, computed, strict=True))
        tree.cache_controller.detach_storage_backend()


def _fill(pool: Any) -> None:
    """Put random numbers into every tensor of a device pool."""
    for name in ("full_kv_pool", "swa_kv_pool"):
        inner = getattr(pool, name, None)
        for buffer in (*inner.k_buffer, *inner.v_buffer) if inner is not None else ():
            buffer.copy_(torch.randn(buffer.shape).to(buffer.dtype))
    states = getattr(pool, "mamba_cache", None)
    for state in (states.temporal, *states.conv) if states is not None else ():
        state.copy_(torch.randn(state.shape).to(state.dtype))


def _rows(pool: Any, places: torch.Tensor) -> list[torch.Tensor]:
    return [buffer[places].clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]
