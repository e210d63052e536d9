"""One timed generation, in whatever process: the time to the first token, and the tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import kvcairn as kv
from kvcairn.adapters.transformers import CachedModel
from kvcairn.demo.prompt import UNRELATED
from kvcairn.demo.weights import DemoModel

BLOCK_TOKENS = 64
NEW_TOKENS = 24
LOAD_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Measured:
    """A generation over the demo's prompt."""

    ttft_s: float
    tokens: list[int]


class FirstToken:
    """A streamer for `generate` that notes when the first new token is known; the prompt is announced before it."""

    def __init__(self) -> None:
        self._announced = 0
        self.at_s = 0.0

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then each token."""
        self._announced += 1
        if self._announced == 2:
            self.at_s = time.perf_counter()

    def end(self) -> None:
        """Nothing is left to do."""


def quiet() -> None:
    """Keep transformers' own progress bars and advice out of the demo's output."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def open_cache(folder: Path, demo: DemoModel) -> kv.Cache:
    """Open a cache with room for the prompt in memory and on disk; what lies in `folder` is found again."""
    config = demo.model.config
    prompt_bytes = len(demo.prompt) * 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    memory = {"name": "memory", "type": "memory", "capacity": max(64 << 20, 3 * prompt_bytes)}
    disk = {"name": "disk", "type": "disk", "path": str(folder), "capacity": max(256 << 20, 2 * prompt_bytes)}
    return kv.Cache.open(kv.Config.from_dict({"tiers": [memory, disk | {"write_policy": "through"}]}))


def cached(demo: DemoModel, cache: kv.Cache) -> CachedModel:
    """Put the cache before the model."""
    return CachedModel(demo.model, cache, block_tokens=BLOCK_TOKENS, load_timeout_s=LOAD_TIMEOUT_S)


def timed(demo: DemoModel, generate: Callable[..., Any]) -> Measured:
    """Run `generate` on an unrelated text, which warms it up, then on the prompt."""
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": demo.model.config.pad_token_id}
    generate(torch.tensor([demo.encode(UNRELATED)]), **settings)
    prompt = torch.tensor([demo.prompt])
    first = FirstToken()
    begin_s = time.perf_counter()
    ids = generate(prompt, streamer=first, **settings)
    return Measured(first.at_s - begin_s, ids[0, prompt.shape[1] :].tolist())
