"""`CachedModel`: a transformers model whose prompts are loaded from a `kvcairn.Cache` as far as they are known."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import index
from typing import Any

import torch
from transformers import DynamicCache

from kvcairn.adapters.transformers.anatomy import accepts, cache_argument, examine, generate_cache_argument
from kvcairn.adapters.transformers.blocks import LayerKV
from kvcairn.adapters.transformers.fingerprint import fingerprint, model_name
from kvcairn.adapters.transformers.prefill import timed_prefills
from kvcairn.adapters.transformers.prefix import Prefixes, Row
from kvcairn.adapters.transformers.request import Request, read_request
from kvcairn.adapters.transformers.reuse import Reuse, RowReuse
from kvcairn.cache import Cache
from kvcairn.errors import KVCairnError, LayoutError
from kvcairn.layout import SpaceDescriptor
from kvcairn.units import seconds

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Naming:
    """What identifies the model in the cache, where the defaults do not do.

    Attributes:
        model: name; default is the hub name or the folder's.
        weights: fingerprint; default is one over origin, configuration and samples of all weights.
        tenant: tenants never share blocks.
    """

    model: str | None = None
    weights: str | None = None
    tenant: str = ""


class CachedModel:
    """Wraps a decoder-only model; `generate` takes and returns what the model's own `generate` does.

    The model is examined once, here: it runs on a few tokens, and its weights are sampled for the fingerprint.
    Wrap it again after changing weights (another LoRA, training): blocks are found by what the weights were.

    Attributes:
        model: the wrapped model.
        space: the space in the cache that its blocks live in.
        block_tokens: tokens of a stored block; shorter prompts are never found.

    Args:
        model: any transformers causal model that keeps its KV in a plain `DynamicCache`.
        cache: an open cache; it must outlive the wrapper's use.
        block_tokens: tokens of one block.
        naming: model name, fingerprint and tenant, where the defaults do not do.
        load_timeout_s: longest wait for loading, per call; what has not come by then is computed.
        store_generated: store the blocks of generated tokens too, not of prompts alone.

    Raises:
        TypeError: `cache` is no cache, `model` no model, or `naming` no `Naming`.
        UnsupportedError: the model's KV cannot be reused by prefix; the message says why.
        ConfigError: the memory tier's write policy is `back`: there is no KV of an engine's to write back.

    Thread: any, several calls at once. Blocks: while it computes and copies.
    """

    def __init__(
        self,
        model: Any,
        cache: Cache,
        *,
        block_tokens: int = 64,
        naming: Naming | None = None,
        load_timeout_s: float = 10.0,
        store_generated: bool = True,
    ) -> None:
        _check_arguments(model, cache, naming)
        naming = naming or Naming()
        self.model = model
        self.block_tokens = block_tokens
        self._anatomy = examine(model)
        self.space = cache.space(
            SpaceDescriptor(
                model=naming.model or model_name(model),
                weights=naming.weights or fingerprint(model),
                layout=self._anatomy.layout,
                block_tokens=block_tokens,
                tenant=naming.tenant,
            )
        )
        self.space.check_write_policy("through", "selective", "none")  # `back` needs to know what is about to go
        self._prefixes = Prefixes(self.space, self._anatomy, block_tokens, seconds(load_timeout_s, "load_timeout_s"))
        self._store_generated = store_generated
        self._last = threading.local()

    @property
    def last_reuse(self) -> Reuse:
        """What the last `generate` of this thread took from the cache."""
        return getattr(self._last, "reuse", Reuse())

    def generate(self, inputs: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Generate as the wrapped model does, loading what is known of each prompt and storing what is new.

        Args:
            inputs: token ids, shape (batch, length), padded on the left; or `input_ids=`.
            **kwargs: as for the model's own `generate`, passed on unchanged.

        Returns:
            What the model's own `generate` returns. A call that the cache cannot serve (embeddings as input, another
            KV cache, assisted decoding) is handed through; `last_reuse` says why.

        Raises:
            TypeError: the inputs are no tensor.
            ValueError: a prompt is empty, or the inputs are no batch.
            What the model's own `generate` raises. A failing tier costs its blocks and nothing else.
        """
        self._last.reuse = Reuse()  # should this call fail, nobody takes the last one's for its own
        request = read_request(self.model, inputs, kwargs)
        if isinstance(request, str):
            self._last.reuse = Reuse((RowReuse(prompt_tokens=0, reason=request),))
            return self.model.generate(inputs, **kwargs)
        past, reused = self._load_batch(request)
        kwargs["attention_mask"] = request.mask
        with timed_prefills(self.model, self.block_tokens, self._report_prefill):
            result = self.model.generate(inputs, **kwargs, **{generate_cache_argument(): past})
        stored = self._store_batch(request, getattr(result, "sequences", result), past)
        rows = zip(reused, stored, strict=True)
        self._last.reuse = Reuse(tuple(replace(row, stored_blocks=n) for row, n in rows))
        return result

    def load(self, token_ids: Sequence[int] | torch.Tensor) -> tuple[DynamicCache, RowReuse]:
        """Load the longest known prefix of one sequence, for a generation loop of your own.

        Args:
            token_ids: the prompt, shape (length,) or (1, length).

        Returns:
            A `DynamicCache` of batch size 1 that holds the KV of the first `reuse.tokens` tokens, always fewer than
            `token_ids`, and the report. With nothing found it is empty.
        """
        layers, (reuse,) = self._prefixes.load((Row(_token_list(token_ids)),))
        return self._past(layers), reuse

    def store(self, token_ids: Sequence[int] | torch.Tensor, past: DynamicCache) -> int:
        """Store the full blocks of one sequence.

        Args:
            token_ids: the tokens whose KV `past` holds, shape (length,) or (1, length). The last generated token has
                no KV yet: leave it out.
            past: the model's cache after computing them, batch size 1, no padding.

        Returns:
            The number of blocks that were new. Those known already are left as they are.

        Raises:
            LayoutError: `past` is not a cache of this model, or holds fewer tokens; nothing was stored.
        """
        tokens = _token_list(token_ids)
        if wrong := self._anatomy.mismatch(past):
            raise LayoutError(f"cannot store from this cache: {wrong}")
        if len(tokens) > past.get_seq_length():
            raise LayoutError(f"{len(tokens)} tokens given, but the cache holds {past.get_seq_length()}")
        return self._prefixes.store(Row(tokens), [(layer.keys, layer.values) for layer in past.layers], 0)

    def _report_prefill(self, tokens: int, seconds: float) -> None:
        with suppress(KVCairnError):  # a cache that is closed costs its blocks and nothing else
            self.space.report_prefill(tokens, seconds)

    def _load_batch(self, request: Request) -> tuple[DynamicCache, tuple[RowReuse, ...]]:
        """Return a cache that all rows fill up to the column of the best one, and what was reused of each."""
        layers, rows = self._prefixes.load(request.rows)
        for number, (row, reused) in enumerate(zip(request.rows, rows, strict=True)):
            self._catch_up(layers, number, row, reused.tokens)
        past = self._past(layers)
        if request.expand > 1 and past.get_seq_length():
            past.batch_repeat_interleave(request.expand)
        return past, rows

    @torch.no_grad()
    def _catch_up(self, layers: Sequence[LayerKV], number: int, row: Row, known: int) -> None:
        """Compute what one row lacks before the last column, so that no row loses its hit to another's miss."""
        begin, columns = row.padding + known, layers[0][0].shape[2]
        if begin >= columns:
            return
        own = [
            (keys[number, None, :, row.padding : begin], values[number, None, :, row.padding : begin])
            for keys, values in layers
        ]
        past = self._past(own)
        ids = torch.tensor([row.tokens[known : columns - row.padding]], device=self.model.device)
        last_logits = {"logits_to_keep": 1} if accepts(self.model, "logits_to_keep") else {}
        self.model(input_ids=ids, use_cache=True, **last_logits, **{cache_argument(self.model.forward): past})
        for (keys, values), layer in zip(layers, past.layers, strict=True):
            keys[number, :, begin:] = layer.keys[0, :, known:]
            values[number, :, begin:] = layer.values[0, :, known:]

    def _store_batch(self, request: Request, sequences: torch.Tensor, past: DynamicCache) -> list[int]:
        """Store each prompt and, where the KV follows the sequences, what was generated; return blocks by prompt."""
        if wrong := self._anatomy.mismatch(past):
            logger.warning("not stored, the model changed its cache: %s", wrong)
            return [0] * len(request.rows)
        layers = [(layer.keys, layer.values) for layer in past.layers]
        stored = []
        for number, row in enumerate(request.rows):
            first = number * request.expand
            followed = self._store_generated and request.follows_rows
            last = first + (request.expand if followed else 1)
            stored.append(
                sum(
                    self._prefixes.store(self._grown(request, row, sequences[i], past) if followed else row, layers, i)
                    for i in range(first, last)
                )
            )
        return stored

    @staticmethod
    def _grown(request: Request, row: Row, sequence: torch.Tensor, past: DynamicCache) -> Row:
        """The row with the generated tokens that have KV, up to its end token."""
        tokens = sequence[row.padding : past.get_seq_length()].tolist()
        prompt = len(row.tokens)
        ends = (i + 1 for i in range(prompt, len(tokens)) if tokens[i] in request.end_ids)
        return Row(tokens[: next(ends, len(tokens))], row.padding)

    def _past(self, layers: Sequence[LayerKV]) -> DynamicCache:
        """Wrap layer tensors as a transformers cache, without a copy."""
        past = DynamicCache(config=self.model.config)
        if layers[0][0].shape[2]:
            for layer, (keys, values) in zip(past.layers, layers, strict=True):
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys, values
        return past


def _check_arguments(model: Any, cache: Any, naming: Any) -> None:
    if isinstance(model, Cache):
        raise TypeError("the model comes first: CachedModel(model, cache)")
    if not isinstance(cache, Cache):
        raise TypeError(f"CachedModel(model, cache) needs an open kvcairn.Cache, got {type(cache).__qualname__}")
    if not callable(getattr(model, "generate", None)) or not hasattr(model, "config"):  # wrappers of models have both
        raise TypeError(f"CachedModel(model, cache) needs a transformers model, got {type(model).__qualname__}")
    if naming is not None and not isinstance(naming, Naming):
        raise TypeError(f"naming is a Naming(model=..., weights=..., tenant=...), got {naming!r}")


def _token_list(token_ids: Sequence[int] | torch.Tensor) -> list[int]:
    if not isinstance(token_ids, torch.Tensor):
        try:
            return [index(token) for token in token_ids]
        except TypeError as error:
            raise ValueError(f"token ids are whole numbers: {error}") from error
    if token_ids.dim() == 2 and token_ids.shape[0] == 1:
        token_ids = token_ids[0]
    if token_ids.dim() != 1 or token_ids.is_floating_point():
        raise ValueError(f"one sequence of token ids expected, got {token_ids.dtype} of shape {tuple(token_ids.shape)}")
    return [int(t) for t in token_ids.tolist()]
