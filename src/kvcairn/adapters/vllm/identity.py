"""What makes the KV of an engine reusable: its space. Both doors name their blocks by it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvcairn.adapters.vllm.settings import ConnectorOptions, TierOptions
from kvcairn.adapters.vllm.versions import installed_version, release_of
from kvcairn.adapters.weights import folder_fingerprint
from kvcairn.errors import ConfigError, UnsupportedError
from kvcairn.layout import DTYPE_BYTES, KVLayout, LayerGroup, SpaceDescriptor
from kvcairn.types import RankSlice

_NOT_KV = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"})


def model_name(name: str, options: TierOptions) -> str:
    """Return the model's name: the given one, the hub's, or the last part of a folder's path."""
    return options.model or (Path(name).name if Path(name).is_dir() else name)


def weights_fingerprint(vllm_config: Any, options: TierOptions) -> str:
    """Return what changes with the weights and with every setting that shapes their KV."""
    if options.weights is not None:
        return options.weights
    model = vllm_config.model_config
    config = {k: v for k, v in model.hf_config.to_dict().items() if k not in _NOT_KV}
    folder = Path(str(model.model))
    origin = folder_fingerprint(folder) if folder.is_dir() else ""
    origin = origin or str(getattr(model.hf_config, "_commit_hash", None) or model.revision or "")
    if not origin:
        remedy = 'name it yourself: "weights": "<revision>"'
        raise ConfigError("kv_connector_extra_config.weights", f"no revision of {model.model} is known", None, remedy)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(f"\0{origin}\0{model.quantization}\0{model.dtype}".encode())
    return digest.hexdigest()


def layer_groups(kv_cache_config: KVCacheConfig) -> tuple[LayerGroup, ...]:
    """Return the engine's KV cache groups as layer groups, in the engine's order.

    Raises:
        UnsupportedError: a group is of a kind that is not served.
    """
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    numbers = {name: number for number, name in enumerate(sorted(names, key=_by_number))}
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        spec = one_spec(group.kv_cache_spec)
        token_bytes, rest = divmod(spec.unpadded_page_size_bytes, spec.block_size)
        if rest:
            raise UnsupportedError(f"pages of {spec.unpadded_page_size_bytes} bytes for {spec.block_size} tokens")
        layers = [numbers[name] for name in group.layer_names]
        if type(spec) is SlidingWindowSpec:
            groups.append(LayerGroup.sliding(layers, token_bytes, spec.sliding_window))
        elif type(spec) in (FullAttentionSpec, MLAAttentionSpec):
            groups.append(LayerGroup.full(layers, token_bytes))
        else:
            raise UnsupportedError(f"the connector does not serve layers with {type(spec).__name__} yet")
    return tuple(groups)


def one_spec(spec: Any) -> Any:
    """Return the spec that all layers of a group share.

    Raises:
        UnsupportedError: they differ.
    """
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return spec
    specs = list(spec.kv_cache_specs.values())
    if any(each != specs[0] for each in specs):
        raise UnsupportedError("the connector does not serve a group whose layers differ in the size of their KV")
    return specs[0]


def describe(vllm_config: Any, kv_cache_config: KVCacheConfig, options: ConnectorOptions) -> SpaceDescriptor:
    """Return the space of this worker's KV; the model is loaded.

    Bytes are opaque: how the engine packs them depends on its release, the attention backend, the order of axes, the
    instruction set and the engine's block size, and all of these are in the name of the layout.
    """
    spec = one_spec(kv_cache_config.kv_cache_groups[0].kv_cache_spec)
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedError(f"the connector does not serve KV of {spec.dtype}")
    sizes = "-".join(str(group.kv_cache_spec.block_size) for group in kv_cache_config.kv_cache_groups)
    packing = (
        f"vllm-{release_of(installed_version())}",
        *_backends(vllm_config),
        vllm_config.cache_config.cache_dtype,
        str(kv_cache_config.kv_cache_layout or vllm_config.cache_config.kv_cache_layout),
        sizes,
    )
    layout = KVLayout(
        groups=layer_groups(kv_cache_config),
        dtype=dtype,
        name="/".join(packing),
        kv_heads=getattr(spec, "num_kv_heads", 0),
        head_dim=getattr(spec, "head_size", 0),
    )
    return SpaceDescriptor(
        model=model_name(str(vllm_config.model_config.model), options),
        weights=weights_fingerprint(vllm_config, options),
        layout=layout,
        block_tokens=options.block_tokens,
        rank=_rank(vllm_config),
        tenant=options.tenant,
    )


def describe_chunks(config: Any, options: TierOptions, group: int, chunk_bytes: int) -> SpaceDescriptor:
    """Return the space of one layer group's chunks, whose bytes are vLLM's own."""
    parallel, cache = config.parallel, config.cache
    packing = (
        f"vllm-{release_of(installed_version())}",
        f"chunks-{group}",
        f"{current_platform.device_type}-{current_platform.get_device_name()}",
        config.model.dtype,
        str(config.kv_cache_layout),
        f"tp{parallel.tp_size}-pp{parallel.pp_size}-pcp{parallel.pcp_size}-dcp{parallel.dcp_size}",
        f"{config.groups[group].tokens_per_block}x{cache.blocks_per_chunk}",
        "canonical" if config.canonical_layout else "direct",
    )
    return SpaceDescriptor(
        model=model_name(config.model.name, options),
        weights=options.weights or _weights_of(config.model.name),
        layout=KVLayout(groups=(LayerGroup.full(1, chunk_bytes),), dtype="uint8", name="/".join(packing)),
        block_tokens=1,  # this door knows keys, not tokens
        tenant=options.tenant,
        key_scheme=f"vllm-{release_of(installed_version())}",
    )


def _backends(vllm_config: Any) -> list[str]:
    """Names of the attention backends in use, each with the instruction set where it has chosen one."""
    found = set()
    for layer in vllm_config.compilation_config.static_forward_context.values():
        if hasattr(layer, "get_attn_backend"):
            name = layer.get_attn_backend().get_name()
            found.add(f"{name}-{layer.isa}" if hasattr(layer, "isa") else name)
    return sorted(found)


def _rank(vllm_config: Any) -> RankSlice | None:
    size = vllm_config.parallel_config.tensor_parallel_size
    if size == 1:
        return None
    from vllm.distributed.parallel_state import get_tp_group

    return RankSlice(tp=get_tp_group().rank_in_group, tp_size=size)


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sort key that takes digits for numbers: layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _weights_of(name: str) -> str:
    """Return the fingerprint of a model that is known by name alone: its files, or the revision in the hub's cache."""
    folder = Path(name)
    if folder.is_dir() and (files := folder_fingerprint(folder)):
        config = folder / "config.json"
        digest = hashlib.sha256(config.read_bytes() if config.is_file() else b"")
        digest.update(files.encode())
        return digest.hexdigest()
    found = try_to_load_from_cache(name, "config.json")
    if isinstance(found, str):
        return Path(found).parent.name
    raise ConfigError(
        "secondary_tiers.weights", f"no revision of {name} is known", None, 'name it: "weights": "<revision>"'
    )
