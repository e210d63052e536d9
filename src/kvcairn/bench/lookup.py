"""Bench `lookup`: a million indexed blocks, what they take, and how fast a chain of them is found."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcairn.bench.figures import Figure, Time, latency, measure, timed
from kvcairn.bench.footprint import collector_objects, held_bytes, resident_bytes
from kvcairn.cache import Cache
from kvcairn.config import Config, MemoryTierOptions
from kvcairn.errors import KVCairnError
from kvcairn.keys import KEY_BYTES
from kvcairn.layout import KVLayout, SpaceDescriptor
from kvcairn.space import Space

BLOCKS: Final = 1_000_000
BLOCK_TOKENS: Final = 256
CHAIN_BLOCKS: Final = 256  # 65,536 tokens
TURN_BLOCKS: Final = 32  # chains grow in turns, so that the blocks of one lie apart as they do after hours of serving
SLOT_BYTES: Final = 4096
VOCABULARY: Final = 151_936
_BENCH: Final = "lookup"

Tokens = npt.NDArray[np.int64]


def run_lookup(blocks: int = BLOCKS, pairs: int = 400) -> Iterator[Figure]:
    """Yield the figures of the index with at least `blocks` blocks, as they are measured.

    Blocks for about half a minute. The arena is mapped but never touched.
    """
    chains = -(-blocks // CHAIN_BLOCKS)
    with Cache.open(_config(chains * CHAIN_BLOCKS)) as cache:
        index = FilledIndex(cache, chains)
        yield from index.fill()
        drawn = random.Random(0)
        yield _hash_and_lookup(index, drawn, pairs)
        yield _lookup(index, drawn, pairs)


class FilledIndex:
    """A space whose chains are all in memory, as far as the index knows."""

    def __init__(self, cache: Cache, chains: int) -> None:
        """Open the space; nothing is stored yet."""
        self.cache, self.chains = cache, chains
        self.space: Space = cache.space(_descriptor())

    def tokens(self, chain: int) -> Tokens:
        """Return the tokens of a chain, the same each time."""
        turns = range(CHAIN_BLOCKS // TURN_BLOCKS)
        return np.concatenate([_turn_tokens(chain, turn) for turn in turns])

    def keys(self, chain: int) -> list[bytes]:
        """Return the keys of a chain: new objects, as a caller has them, never those that the index holds."""
        return self.space.keys(self.tokens(chain))

    def fill(self) -> Iterator[Figure]:
        """Store every chain, turn by turn, and yield what that took."""
        self._store([self.chains])  # so that what is made once is not counted,
        np.unique(np.zeros(1))  # nor the modules that numpy imports when it is first asked for this
        objects, resident, held = collector_objects(), resident_bytes(), held_bytes(self.cache)
        self._store(range(self.chains))
        objects, resident = collector_objects() - objects, resident_bytes() - resident
        held = held_bytes(self.cache) - held
        blocks = self.chains * CHAIN_BLOCKS
        yield Figure(
            bench=_BENCH, name="bytes_per_block", value=held / blocks, unit="bytes",
            reference=resident / blocks, ratio=held / resident if resident > 0 else None, runs=blocks, limit=450,
        )  # fmt: skip
        yield Figure(bench=_BENCH, name="gc_objects", value=objects, unit="objects", runs=blocks, limit=1000)

    def _store(self, chains: Iterable[int]) -> None:
        last: dict[int, bytes | None] = dict.fromkeys(chains)
        for turn in range(CHAIN_BLOCKS // TURN_BLOCKS):
            for chain, parent in last.items():
                keys = self.space.keys(_turn_tokens(chain, turn), parent=parent)
                with self.space.reserve(keys, parent=parent) as reservation:
                    reservation.commit()
                last[chain] = keys[-1]


def _hash_and_lookup(index: FilledIndex, drawn: random.Random, pairs: int) -> Figure:
    """65,536 tokens to a hit; beside it SHA-256 of the same bytes and nothing else."""

    def ours() -> Time:
        tokens = index.tokens(drawn.randrange(index.chains))
        return timed(lambda: _expect(index.space.lookup(index.space.keys(tokens)).blocks))

    def bare() -> Time:
        data = index.tokens(drawn.randrange(index.chains)).astype("<u4").tobytes()
        return timed(lambda: _bare_chain(data))

    return latency(_BENCH, "hash_lookup_64k", "ms", 1.0, measure(ours, bare, pairs=pairs, by_cpu=True))


def _lookup(index: FilledIndex, drawn: random.Random, pairs: int) -> Figure:
    """A chain of 256 known keys; beside it as many gets from a plain dict of as many keys."""
    chains = itertools.cycle([index.keys(drawn.randrange(index.chains)) for _ in range(pairs)])
    blocks = index.chains * CHAIN_BLOCKS
    packed = np.random.default_rng(0).bytes(blocks * KEY_BYTES)
    table = {_key(packed, number): number for number in range(blocks)}
    asked = itertools.cycle(
        [[_key(packed, drawn.randrange(blocks)) for _ in range(CHAIN_BLOCKS)] for _ in range(pairs)]
    )

    def ours() -> Time:
        chain = next(chains)
        return timed(lambda: _expect(index.space.lookup(chain).blocks))

    def bare() -> Time:
        keys = next(asked)
        return timed(lambda: np.fromiter(map(table.get, keys), np.intp, len(keys)))

    return latency(_BENCH, "lookup_256_of_1m", "us", 60.0, measure(ours, bare, pairs=pairs, by_cpu=True))


def _key(packed: bytes, number: int) -> bytes:
    return packed[number * KEY_BYTES : (number + 1) * KEY_BYTES]


def _expect(blocks: int) -> None:
    if blocks != CHAIN_BLOCKS:
        raise KVCairnError(f"a chain of {CHAIN_BLOCKS} blocks was stored, {blocks} were found")


def _bare_chain(data: bytes) -> bytes:
    key = b""
    for at in range(0, len(data), BLOCK_TOKENS * 4):
        key = hashlib.sha256(key + data[at : at + BLOCK_TOKENS * 4]).digest()
    return key


def _turn_tokens(chain: int, turn: int) -> Tokens:
    return np.random.default_rng((chain, turn)).integers(0, VOCABULARY, TURN_BLOCKS * BLOCK_TOKENS)


def _config(blocks: int) -> Config:
    # Not from_dict, which would ask for the memory of an arena that is mapped here but never written.
    memory = MemoryTierOptions(capacity_bytes=(blocks + 2 * CHAIN_BLOCKS) * SLOT_BYTES, prefault=False)
    return Config(tiers=(memory,), verify_memory="never")


def _descriptor() -> SpaceDescriptor:
    layout = KVLayout.full(layers=1, kv_heads=1, head_dim=2, dtype="float32")  # one slot of 4 KiB for 256 tokens
    return SpaceDescriptor(model="bench", weights="none", layout=layout, block_tokens=BLOCK_TOKENS)
