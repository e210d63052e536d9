"""Takes the place of SGLang's compiled kernels, which there is no build of for a plain CPU.

Only what the engine touches on the CPU with torch's own attention is here; anything else says so when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_DECLARED = (  # looked up when SGLang is imported, never called by a plain decoder
    "apply_rotary_pos_emb_cpu",
    "conv3d_embed_cpu",
    "flash_attn_varlen_func",
    "fused_dual_residual_rmsnorm_cpu",
    "fused_moe_router_cpu",
    "fused_sigmoid_mul_cpu",
    "rmsnorm_cpu",
)
_library: Any = torch.library.Library("sgl_kernel", "DEF")  # type: ignore[no-untyped-call]
for _operator in _DECLARED:
    _library.define(f"{_operator}(Tensor x) -> Tensor")


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    table: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    places: torch.Tensor,
    _width: int,
) -> None:
    """Write the places of each request's new tokens into its row of the table."""
    done = 0
    for request, begin, end in zip(requests.tolist(), begins.tolist(), ends.tolist(), strict=True):
        table[request, begin:end] = places[done : done + end - begin].to(table.dtype)
        done += end - begin


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"there is no sgl_kernel.{name} on the CPU")

    return missing
