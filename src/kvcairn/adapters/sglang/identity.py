"""What makes the bytes of an engine's pages reusable: the space of each of its pools."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from kvcairn.adapters.sglang.settings import NAME, AdapterOptions
from kvcairn.adapters.sglang.versions import installed_version
from kvcairn.adapters.weights import folder_fingerprint
from kvcairn.errors import ConfigError, UnsupportedError
from kvcairn.layout import DTYPE_BYTES, KVLayout, LayerGroup, SpaceDescriptor
from kvcairn.types import RankSlice

_WHOLE_ON_EVERY_RANK = ("MLA", "DSA", "DeepSeekV4", "QSA")  # beginnings of the names of host pools


def weights_fingerprint(options: AdapterOptions, server_args: Any) -> str:
    """Return what changes with the weights and with every setting of the engine that shapes their KV.

    Args:
        options: the adapter's own settings.
        server_args: the engine's arguments; the model is loaded.

    Raises:
        ConfigError: the weights cannot be found, and no fingerprint is given.
    """
    if options.weights is not None:
        return options.weights
    folder = _folder(str(server_args.model_path), server_args.revision)
    origin = folder_fingerprint(folder) if folder else ""
    if server_args.load_format == "dummy":
        origin = f"dummy {server_args.random_seed}"
    if not origin:
        reason = f"no weight files of {server_args.model_path!r} were found on this host"
        raise ConfigError(f"{NAME}.weights", reason, None, 'name them yourself: "weights": "<revision>"')
    config = folder / "config.json" if folder else None
    shaping = {
        "config": config.read_text(encoding="utf-8") if config and config.is_file() else "",
        "overrides": str(server_args.json_model_override_args),
        "quantization": server_args.quantization,
        "dtype": server_args.dtype,
    }
    digest = hashlib.sha256(json.dumps(shaping, sort_keys=True, default=str).encode())
    digest.update(b"\0" + origin.encode())
    return digest.hexdigest()


def describe(
    pool: Any, name: str, block_bytes: int, storage_config: Any, model: tuple[str, str, str]
) -> SpaceDescriptor:
    """Return the space of one pool's pages: a host pool's, or the device's own.

    Bytes are opaque: how they lie depends on the engine's release, the pool and its layout, and these are in the name.

    Args:
        pool: the pool.
        name: what SGLang calls it: `kv`, `swa`, `mamba`, ...
        block_bytes: bytes of one of its pages.
        storage_config: SGLang's description of this rank.
        model: name, fingerprint of the weights, tenant.

    Raises:
        UnsupportedError: its element type has no name here.
    """
    dtype = str(pool.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedError(f"the SGLang adapter does not serve KV of {pool.dtype}")
    tokens = int(pool.page_size)
    first = int(getattr(pool, "start_layer", 0) or 0)
    end = int(getattr(pool, "end_layer", 0) or 0)
    layers = range(first, max(end, first + 1))
    tag = getattr(pool, "storage_format_tag", None) or ""
    place = f"layers {first}-{end}", f"page {tokens}"
    packing = (
        f"sglang-{installed_version()}",
        name,
        type(pool).__name__,
        str(getattr(pool, "layout", "device")),
        str(tag),
        *place,
    )
    if block_bytes % (len(layers) * tokens):  # no whole number of bytes for a token of a layer: counted as one piece
        layers, tokens = range(1), 1
    group = LayerGroup.full(layers, block_bytes // (len(layers) * tokens))
    layout = KVLayout(
        groups=(group,),
        dtype=dtype,
        name="/".join(packing),
        kv_heads=int(getattr(pool, "head_num", 0) or 0),
        head_dim=int(getattr(pool, "head_dim", 0) or 0),
    )
    name_, weights, tenant = model
    return SpaceDescriptor(
        model=name_,
        weights=weights,
        layout=layout,
        block_tokens=tokens,
        rank=_rank(pool, storage_config),
        tenant=tenant,
        key_scheme=f"sglang-{installed_version()}",
    )


def model_name(options: AdapterOptions, storage_config: Any) -> str:
    """Return the model's name: the given one, or the engine's, of a folder the last part."""
    name = str(storage_config.model_name or "")
    return options.model or (Path(name).name if Path(name).is_dir() else name)


def _rank(pool: Any, storage_config: Any) -> RankSlice | Literal["replicated"] | None:
    """Return which part of the model the pool holds; MLA's is the same on all ranks, and stored once."""
    cp, cp_size = storage_config.attn_cp_rank, storage_config.attn_cp_size
    pp, pp_size = storage_config.pp_rank, storage_config.pp_size
    tp, tp_size = storage_config.tp_rank, storage_config.tp_size
    is_whole = storage_config.is_mla_model and type(pool).__name__.startswith(_WHOLE_ON_EVERY_RANK)
    if is_whole and cp_size == 1:
        return "replicated"  # of a pipeline each stage has layers of its own, which the layout names
    if tp_size == pp_size == cp_size == 1:
        return None
    if is_whole:
        tp, tp_size = 0, 1
    return RankSlice(tp=tp, tp_size=tp_size, pp=pp, pp_size=pp_size, cp=cp, cp_size=cp_size)


def _folder(model_path: str, revision: str | None) -> Path | None:
    """Return where the weights of a model lie: a folder, or the hub's copy on this host."""
    if Path(model_path).is_dir():
        return Path(model_path)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model_path, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
