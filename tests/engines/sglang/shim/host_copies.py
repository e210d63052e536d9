"""HiCache's copies between device pool and host pool as torch index copies, for a "device" that is the CPU.

Only the copies are replaced: pools, layouts, controller, tree and storage threads are SGLang's own.
"""

from __future__ import annotations

from typing import Any

import torch


def install() -> None:
    """Replace the copies of MHA, MLA and Mamba host pools, and leave their memory unpinned."""
    from sglang.srt.mem_cache.pool_host import base, common, mamba, mha, mla

    common._cuda_host_register = _nothing
    for module in (base, common, mamba, mha, mla):
        if hasattr(module, "_cuda_host_unregister"):
            module._cuda_host_unregister = _nothing
    _unpin(base.HostKVCache)
    mha.MHATokenToKVPoolHost.backup_from_device_all_layer = _back_up_mha
    mha.MHATokenToKVPoolHost.load_to_device_per_layer = _load_mha
    mla.MLATokenToKVPoolHost.backup_from_device_all_layer = _back_up_mla
    mla.MLATokenToKVPoolHost.load_to_device_per_layer = _load_mla
    mamba.MambaPoolHost._copy_tensor = staticmethod(_copy_states)
    mamba.MambaPoolHost._copy_tensor_pf_lf = staticmethod(_load_states)
    mamba.MambaPoolHost._copy_tensor_all_layers_lf_pf = staticmethod(_back_up_states)


def _nothing(*_: Any, **__: Any) -> None:
    """There is no driver to tell."""


def _unpin(pool_class: Any) -> None:
    original = pool_class.__init__

    def init(self: Any, **kwargs: Any) -> None:
        original(self, **(kwargs | {"pin_memory": False}))

    pool_class.__init__ = init


def _rows(pool: Any, buffer: torch.Tensor, layer: int, indices: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return a view and an index that select one layer of some tokens in a host buffer: (tokens, heads, dim)."""
    page, at = indices // pool.page_size, indices % pool.page_size
    if pool.layout == "layer_first":
        return buffer[layer], indices
    if pool.layout == "page_first":
        return buffer, (indices, layer)
    if pool.layout == "page_first_direct":
        return buffer, (page, layer, at)
    if pool.layout == "page_head":
        return buffer, (page, slice(None), at, layer)
    raise ValueError(f"no copy for layout {pool.layout}")


def _back_up_mha(self: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str) -> None:
    for layer in range(self.layer_num):
        for host, device in ((self.k_buffer, self.device_k_buffers), (self.v_buffer, self.device_v_buffers)):
            view, index = _rows(self, host, layer, host_indices)
            view[index] = device[layer][device_indices]


def _load_mha(
    self: Any,
    device_pool: Any,
    host_indices: Any,
    device_indices: Any,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    if 0 <= layer_id < self.layer_num:
        for host, device in ((self.k_buffer, self.device_k_buffers), (self.v_buffer, self.device_v_buffers)):
            view, index = _rows(self, host, layer_id, host_indices)
            device[layer_id][device_indices] = view[index]


def _back_up_mla(self: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str) -> None:
    for layer in range(self.layer_num):
        view, index = _rows(self, self.kv_buffer, layer, host_indices)
        view[index] = self.device_kv_buffers[layer][device_indices]


def _load_mla(
    self: Any,
    device_pool: Any,
    host_indices: Any,
    device_indices: Any,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    if 0 <= layer_id < self.layer_num:
        view, index = _rows(self, self.kv_buffer, layer_id, host_indices)
        self.device_kv_buffers[layer_id][device_indices] = view[index]


def _copy_states(src: torch.Tensor, dst: torch.Tensor, src_indices: Any, dst_indices: Any, io_backend: str) -> None:
    dst[dst_indices] = src[src_indices]


def _load_states(
    src: torch.Tensor, dst: torch.Tensor, src_indices: Any, dst_indices: Any, layer_id: int, **_: Any
) -> None:
    dst[dst_indices] = src[src_indices, layer_id, 0]


def _back_up_states(
    src_layers: Any, dst: torch.Tensor, src_indices: Any, dst_indices: Any, num_layers: int, **_: Any
) -> None:
    for layer in range(num_layers):
        dst[dst_indices, layer, 0] = src_layers[layer][src_indices]
