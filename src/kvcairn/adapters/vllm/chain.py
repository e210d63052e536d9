"""The block keys of one request, made once and kept up as it generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvcairn.adapters.weights import folder_fingerprint
from kvcairn.keys import block_keys

_canonical = msgspec.msgpack.Encoder(order="deterministic")


class LoraNames:
    """Identities of LoRA adapters: the fingerprint of their weights, read once for each."""

    def __init__(self) -> None:
        """Know none yet."""
        self._known: dict[tuple[str, str], str] = {}

    def identity(self, lora_request: Any) -> str | None:
        """Return what distinguishes the adapter of a request from all others; None without one."""
        if lora_request is None:
            return None
        name, place = str(lora_request.lora_name), str(lora_request.lora_path)
        if (name, place) not in self._known:
            weights = folder_fingerprint(Path(place)) if Path(place).is_dir() else ""
            self._known[name, place] = weights or f"{name}\0{place}"
        return self._known[name, place]


class Chain:
    """Keys of the full blocks of one request. What is not in the tokens enters as `extra`.

    Attributes:
        request: the engine's request.
        keys: of the blocks known so far; grows with `extend`.
    """

    def __init__(self, request: Any, block_tokens: int, lora: str | None) -> None:
        """Begin with the prompt's blocks."""
        self.request = request
        self.keys: list[bytes] = []
        self._block_tokens, self._lora = block_tokens, lora
        self.extend()

    def extend(self) -> list[bytes]:
        """Add the keys of blocks that have become full, and return all."""
        done, full = len(self.keys), self.request.num_tokens // self._block_tokens
        if full > done:
            tokens = self.request.all_token_ids[done * self._block_tokens : full * self._block_tokens]
            parent = self.keys[-1] if self.keys else None
            extra = {block - done: content for block in range(done, full) if (content := self._extra(block))}
            self.keys += block_keys(tokens, self._block_tokens, parent=parent, extra=extra)
        return self.keys

    def _extra(self, block: int) -> bytes | None:
        """Return what distinguishes a block from others with the same tokens."""
        begin = block * self._block_tokens
        content: dict[str, Any] = {}
        if block == 0:
            content = {"salt": self.request.cache_salt, "lora": self._lora}
        content["mm"] = [
            (feature.identifier, feature.mm_position.offset - begin)
            for feature in self.request.mm_features
            if feature.mm_position.offset < begin + self._block_tokens
            and feature.mm_position.offset + feature.mm_position.length > begin
        ]
        content = {name: value for name, value in content.items() if value}
        return _canonical.encode(content) if content else None


def is_cacheable(request: Any) -> bool:
    """Whether tokens say all about the KV of a request: not where embeddings are its prompt, or it may be rewritten."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None and not request.resumable
