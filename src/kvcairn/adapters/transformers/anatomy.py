"""What a model's KV looks like, found by running it on a few tokens, and which models are refused."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicLayer

from kvcairn.errors import UnsupportedError
from kvcairn.layout import DTYPE_BYTES, KVLayout, LayerGroup

_PROBE_TOKENS = 8


@dataclass(frozen=True)
class Anatomy:
    """Shape of the KV of one token, the same in every layer, and the device of each layer."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.devices)

    @property
    def layout(self) -> KVLayout:
        """The same for the cache. Keys and values of unequal width are part of the layout's name."""
        name = str(self.dtype).removeprefix("torch.")
        if self.key_dim == self.value_dim:
            return KVLayout.full(layers=self.layers, kv_heads=self.kv_heads, head_dim=self.key_dim, dtype=name)
        token_bytes = self.kv_heads * (self.key_dim + self.value_dim) * DTYPE_BYTES[name]
        return KVLayout(
            groups=(LayerGroup.full(self.layers, token_bytes),),
            dtype=name,
            name=f"canonical-k{self.key_dim}-v{self.value_dim}",
            kv_heads=self.kv_heads,
            head_dim=self.key_dim,
        )

    def mismatch(self, past: Any) -> str | None:
        """Return why `past` is not a cache of this model, or None."""
        layers = getattr(past, "layers", ())
        if len(layers) != self.layers or not all(type(layer) is DynamicLayer for layer in layers):
            return f"not a DynamicCache with full attention in {self.layers} layers"
        for number, layer in enumerate(layers):
            if not layer.is_initialized:
                return f"layer {number} is empty"
            for tensor, dim in ((layer.keys, self.key_dim), (layer.values, self.value_dim)):
                shape = tuple(tensor.shape)
                if (shape[1], shape[3]) != (self.kv_heads, dim) or tensor.dtype != self.dtype:
                    return f"layer {number} holds {shape} of {tensor.dtype}"
        return None


def cache_argument(function: Any) -> str:
    """Name of the argument through which this transformers version takes a cache."""
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"


def generate_cache_argument() -> str:
    """The same for `generate`, which takes it among its free keywords."""
    return cache_argument(GenerationMixin.prepare_inputs_for_generation)


def accepts(model: Any, argument: str) -> bool:
    """Whether the model's forward call takes the argument."""
    return argument in inspect.signature(model.forward).parameters


def examine(model: Any) -> Anatomy:
    """Return the anatomy of `model`; runs it on two inputs of eight tokens.

    Raises:
        UnsupportedError: the KV of a prefix could not be reused, or is not kept in a plain `DynamicCache`.
    """
    _refuse_by_config(model)
    first, second = (_run(model, [0] + [other] * (_PROBE_TOKENS - 1)) for other in (1, 2))
    keys, values = first.layers[0].keys, first.layers[0].values
    anatomy = Anatomy(
        kv_heads=keys.shape[1],
        key_dim=keys.shape[3],
        value_dim=values.shape[3],
        dtype=keys.dtype,
        devices=tuple(layer.keys.device for layer in first.layers),
    )
    if str(anatomy.dtype).removeprefix("torch.") not in DTYPE_BYTES:
        _refuse(model, f"its KV is of {anatomy.dtype}")
    if wrong := anatomy.mismatch(first):
        _refuse(model, f"its layers differ in the shape of their KV ({wrong})")
    if any(layer.keys.shape[2] != _PROBE_TOKENS for layer in first.layers):
        _refuse(model, "it does not keep one entry for each token")
    if not all(_same_first_token(a, b) for a, b in zip(first.layers, second.layers, strict=True)):
        _refuse(model, "the KV of a token changes with the tokens behind it, so prefixes cannot be reused")
    return anatomy


def _refuse(model: Any, why: str) -> None:
    raise UnsupportedError(f"{type(model).__name__} is not supported by the transformers adapter: {why}")


def _refuse_by_config(model: Any) -> None:
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        _refuse(model, "it is an encoder-decoder model")
    chosen = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if chosen not in (None, "dynamic", "dynamic_full"):
        _refuse(model, f"its generation config asks for cache_implementation={chosen!r}")
    for number, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is not DynamicLayer:
            _refuse(model, f"layer {number} uses {type(layer).__name__}, not full attention")
    text = config.get_text_config(decoder=True)
    if kind := _length_dependent_rope(getattr(text, "rope_parameters", None)):
        _refuse(model, f"rope_type={kind!r} changes the keys of a prefix with the length of the whole prompt")


def _length_dependent_rope(parameters: Any) -> str | None:
    if not isinstance(parameters, dict):
        return None
    kind = str(parameters.get("rope_type", ""))
    if "dynamic" in kind or kind == "longrope":
        return kind
    return next((k for p in parameters.values() if (k := _length_dependent_rope(p))), None)


@torch.no_grad()
def _run(model: Any, tokens: list[int]) -> Any:
    past = DynamicCache(config=model.config)
    ids = torch.tensor([tokens], device=model.device)
    was_training = model.training
    model.eval()
    try:
        model(input_ids=ids, use_cache=True, **{cache_argument(model.forward): past})
    finally:
        model.train(was_training)
    if not past.layers or not all(layer.is_initialized for layer in past.layers):
        _refuse(model, "it does not fill the DynamicCache that it is given")
    return past


def _same_first_token(one: Any, other: Any) -> bool:
    """Whether the KV of the first token is equal but for rounding (experts may be grouped in another order)."""
    drift = max(1e-5, 4 * torch.finfo(one.keys.dtype).eps)
    pairs = ((one.keys, other.keys), (one.values, other.values))
    return all(
        torch.allclose(a[:, :, 0].float(), b[:, :, 0].float(), rtol=drift, atol=drift * float(a.abs().max()))
        for a, b in pairs
    )
