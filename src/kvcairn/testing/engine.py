"""An engine without a model: a pool of plain bytes, and tokens that depend on every byte of what was cached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvcairn.errors import LayoutError
from kvcairn.layout import KVLayout, LayerGroup

if TYPE_CHECKING:
    from kvcairn.memory.lease import Lease
    from kvcairn.space import Space

POISON: Final = 0xA7

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request gave.

    Attributes:
        tokens: the generated ones.
        reused_tokens: tokens of the prompt whose KV came from the cache.
        computed_tokens: tokens of the prompt that were computed.
    """

    tokens: list[int]
    reused_tokens: int
    computed_tokens: int


@dataclass(slots=True)
class Running:
    """One running request: its tokens, its pages, and its recurrent state."""

    tokens: list[int]
    pages: list[int]
    states: dict[int, Bytes]  # by group
    snapshots: dict[tuple[int, int], Bytes] = field(default_factory=dict)  # by group and length in tokens
    filled: int = 0
    reused: int = 0


class ToyModel:
    """A deterministic decoder: the KV of a token, and the next token, follow from all bytes that it attends to.

    Args:
        layout: attention groups take an even number of bytes for each token, half of them K.
        vocabulary: token ids are below it.
        seed: of the weights, so to speak.
    """

    def __init__(self, layout: KVLayout, vocabulary: int = 251, seed: int = 0) -> None:
        for group in layout.groups:
            if group.bytes_per_token % 2:
                raise LayoutError(f"K and V are halves of a token's bytes, got {group.bytes_per_token}")
        self.groups = layout.groups
        self.vocabulary = vocabulary
        self._seed = seed.to_bytes(8, "little")
        sizes = (len(g.layers) * (g.bytes_per_token or g.bytes_per_state) for g in layout.groups)
        words = -(-max(sizes) // 8)
        self._weights = np.random.Generator(np.random.Philox(key=seed)).integers(
            0, 1 << 64, size=words, dtype=np.uint64
        )

    def expand(self, context: bytes, token: int, group: int) -> Bytes:
        """Return the bytes of one token in a group, or a group's new state, shape (layers * bytes,)."""
        layers = self.groups[group]
        nbytes = len(layers.layers) * (layers.bytes_per_token or layers.bytes_per_state)
        name = self._seed + context + token.to_bytes(4, "little") + group.to_bytes(2, "little")
        factor, addend = (np.uint64(xxhash.xxh3_64_intdigest(name, seed)) for seed in (1, 2))
        words = self._weights[: -(-nbytes // 8)] * (factor | np.uint64(1))
        words += addend
        return words.view(np.uint8)[:nbytes]

    def next_token(self, context: bytes) -> int:
        """Return the greedy choice behind what `context` digests."""
        return xxhash.xxh3_64_intdigest(self._seed + context, 3) % self.vocabulary


class FakeEngine:
    """Prefills, decodes, loads and stores as an engine's adapter does, one request at a time. One thread.

    Its device pool is a numpy array for each attention group, of shape (pages, layers, 2, page_tokens, bytes of K or
    V); a free page is full of poison. Tokens do not change when bytes come from the cache, unless the bytes are wrong.

    Args:
        space: where to load and store; None for an engine without a cache.
        layout: of the model.
        block_tokens: of the space, a multiple of `page_tokens`.
        page_tokens: tokens of one page of the device.
        pages: in the pool.
        state_every: blocks between two stored snapshots of recurrent state.
    """

    def __init__(
        self,
        space: Space | None,
        layout: KVLayout,
        block_tokens: int,
        page_tokens: int,
        pages: int = 256,
        state_every: int = 1,
    ) -> None:
        if block_tokens % page_tokens:
            raise LayoutError(f"pages of {page_tokens} tokens do not divide blocks of {block_tokens}")
        self.space = space
        self.model = ToyModel(layout)
        self.pool = {
            g: np.full((pages, len(group.layers), 2, page_tokens, group.bytes_per_token // 2), POISON, dtype=np.uint8)
            for g, group in enumerate(layout.groups)
            if group.kind != "state"
        }
        self.free_pages = list(range(pages))
        self._block_tokens, self._page_tokens = block_tokens, page_tokens
        self._state_every = state_every

    def generate(
        self, prompt: Sequence[int], new_tokens: int, deadline_s: float = 1.0, prefetch: bool = False
    ) -> Generation:
        """Run one request: load what is cached, compute the rest, decode, store every full block.

        Args:
            prompt: token ids, at least one.
            new_tokens: how many to generate.
            deadline_s: how long to wait for blocks.
            prefetch: load through a job, as an engine with a queue does, instead of waiting in `acquire`.
        """
        with self._sequence(prompt, new_tokens) as seq:
            if self.space is not None:
                self._load(self.space, seq, deadline_s, prefetch)
            seq.reused = seq.filled
            hashers = self._attend(seq)
            for position in range(seq.filled, len(prompt) + new_tokens):
                context = self._context(seq, hashers)
                if position == len(seq.tokens):
                    seq.tokens.append(self.model.next_token(context))
                self._compute(seq, hashers, context)
            if self.space is not None:
                self._store(self.space, seq)
            return Generation(seq.tokens[len(prompt) :], seq.reused, len(prompt) - seq.reused)

    # -- the device

    @contextmanager
    def _sequence(self, prompt: Sequence[int], new_tokens: int) -> Iterator[Running]:
        needed = -(-(len(prompt) + new_tokens) // self._page_tokens)
        pages = [self.free_pages.pop() for _ in range(needed)]
        states = {
            g: np.zeros(len(group.layers) * group.bytes_per_state, dtype=np.uint8)
            for g, group in enumerate(self.model.groups)
            if group.kind == "state"
        }
        try:
            yield Running(list(prompt), pages, states)
        finally:
            for array in self.pool.values():
                array[pages] = POISON
            self.free_pages.extend(pages)

    def _token(self, group: int, seq: Running, position: int) -> Bytes:
        """Return the bytes of one token in one group as a writable view, shape (layers, 2, bytes of K or V)."""
        page, slot = seq.pages[position // self._page_tokens], position % self._page_tokens
        return self.pool[group][page, :, :, slot, :]

    def _attend(self, seq: Running) -> dict[int, xxhash.xxh3_64]:
        """Digest what is on the device already, for each group that attends to everything."""
        hashers = {g: xxhash.xxh3_64() for g, group in enumerate(self.model.groups) if group.kind == "full"}
        for g, hasher in hashers.items():
            for position in range(seq.filled):
                hasher.update(self._token(g, seq, position).tobytes())
        return hashers

    def _context(self, seq: Running, hashers: dict[int, xxhash.xxh3_64]) -> bytes:
        """Digest all that the token at `seq.filled` attends to."""
        context = xxhash.xxh3_128()
        for g, group in enumerate(self.model.groups):
            if group.kind == "full":
                context.update(hashers[g].digest())
            elif group.kind == "state":
                context.update(seq.states[g].tobytes())
            else:
                for position in range(max(0, seq.filled - group.window), seq.filled):
                    context.update(self._token(g, seq, position).tobytes())
        return context.digest()

    def _compute(self, seq: Running, hashers: dict[int, xxhash.xxh3_64], context: bytes) -> None:
        """Compute the token at `seq.filled`."""
        position, token = seq.filled, seq.tokens[seq.filled]
        for g, group in enumerate(self.model.groups):
            data = self.model.expand(context, token, g)
            if group.kind == "state":
                seq.states[g] = data
                seq.snapshots[g, position + 1] = data
                continue
            place = self._token(g, seq, position)
            place[:] = data.reshape(place.shape)
            if group.kind == "full":
                hashers[g].update(data.tobytes())
        seq.filled += 1

    # -- the cache

    def _load(self, space: Space, seq: Running, deadline_s: float, prefetch: bool) -> None:
        """Load the longest prefix that leaves a token to compute."""
        keys = space.keys(seq.tokens)[: (len(seq.tokens) - 1) // self._block_tokens]
        if not keys:
            return
        if prefetch:
            with space.prefetch(keys, deadline_s=deadline_s) as job:
                job.wait(deadline_s)
                with job.lease() as lease:
                    self._copy_in(seq, lease)
        else:
            with space.acquire(keys, deadline_s=deadline_s) as lease:
                self._copy_in(seq, lease)

    def _copy_in(self, seq: Running, lease: Lease) -> None:
        for g, group in enumerate(self.model.groups):
            back = group.blocks_back(self._block_tokens)
            first = 0 if back is None else max(0, lease.count - back)
            for block in range(first, lease.count):
                data = np.frombuffer(lease.part(block, g), dtype=np.uint8)
                if group.kind == "state":
                    seq.states[g] = data.copy()
                else:
                    self._scatter(g, seq, block, data)
        seq.filled = lease.count * self._block_tokens

    def _store(self, space: Space, seq: Running) -> None:
        """Store every full block that is on the device and not in the cache."""
        keys = space.keys(seq.tokens[: seq.filled])
        number = {key: block for block, key in enumerate(keys)}
        stored_from = seq.reused // self._block_tokens
        with space.reserve(keys, start=stored_from, parts=self._parts(stored_from, len(keys))) as reservation:
            for i, key in enumerate(reservation.keys):
                for g, group in enumerate(self.model.groups):
                    if int(reservation.offsets(g)[i]) >= 0:
                        self._copy_out(g, group, seq, number[key], reservation.part(i, g))
            reservation.commit()

    def _parts(self, first: int, blocks: int) -> list[list[int]] | None:
        """Which groups to store of each block from `first` on; None for all."""
        if self._state_every == 1:
            return None
        kinds = [group.kind for group in self.model.groups]
        return [
            [g for g, kind in enumerate(kinds) if kind != "state" or (block + 1) % self._state_every == 0]
            for block in range(first, blocks)
        ]

    def _copy_out(self, g: int, group: LayerGroup, seq: Running, block: int, out: memoryview) -> None:
        data = np.frombuffer(out, dtype=np.uint8)
        if group.kind == "state":
            data[:] = seq.snapshots[g, (block + 1) * self._block_tokens]
        else:
            pages = self._pages(seq, block)
            gathered = self.pool[g][pages].transpose(1, 2, 0, 3, 4)
            data[:] = np.ascontiguousarray(gathered).reshape(-1)

    def _scatter(self, g: int, seq: Running, block: int, data: Bytes) -> None:
        pages = self._pages(seq, block)
        _, layers, two, tokens, half = self.pool[g].shape
        shaped = data.reshape(layers, two, len(pages), tokens, half)
        self.pool[g][pages] = shaped.transpose(2, 0, 1, 3, 4)

    def _pages(self, seq: Running, block: int) -> list[int]:
        each = self._block_tokens // self._page_tokens
        return seq.pages[block * each : (block + 1) * each]
