"""Reads the arguments of a `generate` call: what the cache may do for it, and for which tokens."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from kvcairn.adapters.transformers.anatomy import accepts
from kvcairn.adapters.transformers.prefix import Row

_PLAIN_MODES = ("greedy_search", "sample")
_BEAM_MODES = ("beam_search", "beam_sample")
_INPUTS = frozenset({"input_ids", "attention_mask"})
_GENERATE_ARGUMENTS = frozenset({
    "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus",
    "assistant_model", "streamer", "negative_prompt_ids", "negative_prompt_attention_mask", "custom_generate",
    "tokenizer", "trust_remote_code",
})  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A `generate` call that the cache can serve.

    Attributes:
        rows: the prompts.
        mask: the attention mask of the batch, as given or as transformers would infer it.
        expand: sequences for each prompt (beams, or returned samples).
        follows_rows: row i of the KV belongs to sequence i of the result all along (not so for beams).
        end_ids: ids that end a sequence.
    """

    rows: tuple[Row, ...]
    mask: torch.Tensor
    expand: int
    follows_rows: bool
    end_ids: frozenset[int]


def read_request(model: Any, inputs: Any, kwargs: dict[str, Any]) -> Request | str:
    """Return the request, or one sentence saying why the cache keeps out of it.

    Raises:
        TypeError: the inputs are no tensor.
        ValueError: a prompt is empty, or the inputs are no batch.
    """
    ids = inputs if inputs is not None else kwargs.get("input_ids")
    if ids is not None and kwargs.get("inputs_embeds") is None:
        _check_ids(ids)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
        return "the prompt is not a batch of token ids"
    settings, others = _settings(model, kwargs)
    if why := _refusal(model, settings, kwargs, others):
        return why
    mask = kwargs.get("attention_mask")
    mask = _inferred_mask(ids, settings) if mask is None else mask
    if mask.shape != ids.shape or not _is_left_padded(mask):
        return "the attention mask has gaps or padding on the right"
    paddings = (mask.shape[1] - mask.sum(dim=1)).tolist()
    if any(paddings) and not accepts(model, "position_ids"):
        return "the batch is padded and the model counts positions by column"
    rows = tuple(Row(row[pad:], pad) for row, pad in zip(ids.tolist(), map(int, paddings), strict=True))
    return Request(
        rows=rows,
        mask=mask,
        expand=max(settings.num_beams or 1, settings.num_return_sequences or 1),
        follows_rows=str(settings.get_generation_mode().value) in _PLAIN_MODES,
        end_ids=_ids(settings.eos_token_id),
    )


def _check_ids(ids: Any) -> None:
    """Say in one sentence what `generate` would otherwise fail at somewhere inside the model."""
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"token ids are a tensor of shape (batch, length), got {type(ids).__name__}")
    if ids.dim() == 1:
        raise ValueError(f"token ids are a tensor of shape (batch, length), got {tuple(ids.shape)}: give ids[None]")
    if ids.dim() == 2 and not ids.shape[1]:
        raise ValueError("the prompt is empty: give at least one token id")


def _settings(model: Any, kwargs: dict[str, Any]) -> tuple[GenerationConfig, dict[str, Any]]:
    """Merge the settings as `generate` does: keywords, then the given config, then the model's own."""
    settings = copy.deepcopy(kwargs.get("generation_config") or GenerationConfig())
    settings.update(**model.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    return settings, settings.update(**{k: v for k, v in kwargs.items() if k not in _GENERATE_ARGUMENTS})


def _refusal(model: Any, settings: Any, kwargs: dict[str, Any], others: dict[str, Any]) -> str | None:
    """What could make the KV of these tokens another one, or the result one of another shape."""
    if extra := sorted(k for k, v in others.items() if k not in _INPUTS and v is not None):
        return f"the model is given {', '.join(extra)} beside the token ids"
    if model.training:
        return "the model is in training mode"
    if kwargs.get("custom_generate") is not None or settings.token_healing:
        return "a custom or healing generation changes the prompt"
    if settings.use_cache is False or settings.cache_implementation not in (None, "dynamic", "dynamic_full", "hybrid"):
        return "another KV cache is asked for"
    if settings.output_attentions or settings.output_hidden_states:
        return "attentions or hidden states of the whole prompt are asked for"
    mode = str(settings.get_generation_mode(kwargs.get("assistant_model")).value)
    if mode not in _PLAIN_MODES + _BEAM_MODES:
        return f"the generation mode is {mode}"
    return None


def _inferred_mask(ids: torch.Tensor, settings: Any) -> torch.Tensor:
    """The mask that `generate` infers: padding is masked where a pad token is known and is no end token."""
    pads = _ids(settings.pad_token_id)
    if not pads or pads & _ids(settings.eos_token_id):
        return torch.ones_like(ids)
    return ids.ne(next(iter(pads))).to(ids.dtype)


def _is_left_padded(mask: torch.Tensor) -> bool:
    steps = mask[:, 1:] - mask[:, :-1]
    return bool((steps >= 0).all()) and bool(((mask == 0) | (mask == 1)).all())


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, (list, tuple)) else frozenset({int(value)})
