"""KV events: what is stored and removed on which tier, as routers that listen to vLLM expect it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent

from kvcairn import types
from kvcairn.adapters.vllm.chain import Chain
from kvcairn.cache import EventStream

MOST_BLOCKS = 65_536  # whose tokens are remembered


@dataclass(frozen=True)
class Content:
    """What a router wants to know of a block beside its key."""

    token_ids: list[int]
    lora_id: int | None
    lora_name: str | None
    session: str | None


class Events:
    """Translates the cache's events. The scheduler's thread only.

    The cache knows keys and no tokens, so those of requests seen here are remembered, up to a bound. A block of which
    they are not known any more is told when it is removed, and not when it is stored.
    """

    def __init__(self, stream: EventStream, space_id: bytes, block_tokens: int, memory: str) -> None:
        """Tell what happens in one space; `memory` is the name of the tier in the host's memory."""
        self._stream, self._space_id, self._block_tokens, self._memory = stream, space_id, block_tokens, memory
        self._known: OrderedDict[bytes, Content] = OrderedDict()

    def note(self, chain: Chain, start: int = 0) -> None:
        """Remember the blocks of a request, from number `start` on."""
        request, size = chain.request, self._block_tokens
        for block, key in enumerate(chain.keys[start:], start):
            if key in self._known:
                self._known.move_to_end(key)
                continue
            lora = request.lora_request
            self._known[key] = Content(
                token_ids=list(request.all_token_ids[block * size : (block + 1) * size]),
                lora_id=lora.lora_int_id if lora else None,
                lora_name=lora.lora_name if lora else None,
                session=request.session_id,
            )
        while len(self._known) > MOST_BLOCKS:
            self._known.popitem(last=False)

    def take(self) -> Iterator[KVCacheEvent]:
        """Return what has happened since the last call."""
        for event in self._stream.poll():
            if event.space != self._space_id:
                continue
            if isinstance(event, types.BlockRemoved):
                yield BlockRemoved(block_hashes=[event.key], medium=self._medium(event.tier), ownership=event.tier)
            elif (content := self._known.get(event.key)) is not None:
                yield self._stored(event, content)

    def close(self) -> None:
        """Listen no more."""
        self._stream.close()

    def _stored(self, event: types.BlockStored, content: Content) -> BlockStored:
        return BlockStored(
            block_hashes=[event.key],
            parent_block_hash=event.parent,
            token_ids=content.token_ids,
            block_size=self._block_tokens,
            lora_id=content.lora_id,
            medium=self._medium(event.tier),
            lora_name=content.lora_name,
            ownership=event.tier,
            session_id=content.session,
        )

    def _medium(self, tier: str) -> str:
        return str(MEDIUM_CPU if tier == self._memory else MEDIUM_STORAGE)
