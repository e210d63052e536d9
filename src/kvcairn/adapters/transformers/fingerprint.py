"""Fingerprint of a model: two models share blocks only where this is equal.

Weight files (or the hub revision) alone would miss what was done to the weights after loading, such as a merged LoRA,
and weights alone would miss a changed rotary base. So all three go in: where the weights come from, the configuration,
and samples of every tensor in memory.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from kvcairn.adapters.weights import folder_fingerprint

_SAMPLES = 256
_NOT_KV = frozenset({  # what changes no KV: versions, names, the dtype (in the layout), how results are returned
    "_attn_implementation", "_attn_implementation_internal", "_commit_hash", "_name_or_path", "architectures",
    "dtype", "output_attentions", "output_hidden_states", "return_dict", "torch_dtype", "transformers_version",
    "use_cache",
})  # fmt: skip


def model_name(model: Any) -> str:
    """Return the hub name, the last part of a local folder's path, or the class."""
    name = str(getattr(model, "name_or_path", "") or "")
    return (Path(name).name if Path(name).is_dir() else name) or type(model).__name__


def fingerprint(model: Any) -> str:
    """Return 64 hexadecimal digits that change with the weights or with any setting that shapes the KV."""
    digest = hashlib.sha256()
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_KV}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(_origin(model).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"\0{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(_sample(tensor))
    return digest.hexdigest()


def _origin(model: Any) -> str:
    """Hub revision, or a hash over sizes, first and last 64 KiB of the weight files (their headers among them)."""
    if revision := getattr(model.config, "_commit_hash", None):
        return str(revision)
    folder = Path(str(getattr(model, "name_or_path", "") or "."))
    return folder_fingerprint(folder) if folder.name else ""


def _sample(tensor: torch.Tensor) -> bytes:
    """Bytes of elements spread over the whole tensor; nothing for a tensor that is not in memory."""
    if tensor.is_meta or not tensor.numel():
        return b""
    flat = tensor.detach().reshape(-1)
    picked = flat[:: max(1, flat.numel() // _SAMPLES)].cpu().contiguous()
    return picked.view(torch.uint8).numpy().tobytes()
