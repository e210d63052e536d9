"""Storing and reading whole chains whose bytes the oracle knows: the steps that most tests are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcairn.layout import SpaceDescriptor
from kvcairn.memory.arena import POISON
from kvcairn.space import Space
from kvcairn.testing.oracle import ByteOracle
from kvcairn.testing.rig import PAGE_BYTES, Rig
from kvcairn.types import Stats


class Blocks:
    """The chains of one space. Any thread.

    Args:
        rig: the cache.
        tenant: whose space.
        oracle: of the bytes.
        descriptor: of another space than the tenant's.
    """

    def __init__(
        self, rig: Rig, tenant: str = "", oracle: ByteOracle | None = None, descriptor: SpaceDescriptor | None = None
    ) -> None:
        self.rig = rig
        self.oracle = oracle or ByteOracle()
        self.descriptor = descriptor or rig.setup.descriptor(tenant)

    @property
    def space(self) -> Space:
        """The space in the cache that is open now."""
        return self.rig.cache.space(self.descriptor)

    def keys(self, prompt: int, blocks: int, extra: Mapping[int, bytes | None] | None = None) -> list[bytes]:
        """Return the keys of prompt number `prompt`, which shares nothing with the others."""
        tokens = self.descriptor.block_tokens * blocks
        return self.space.keys([prompt * 4096 + i for i in range(tokens)], extra=extra)

    def content(self, key: bytes) -> bytes:
        """Return the bytes of a block, its parts one behind the other."""
        layout, tokens = self.descriptor.layout, self.descriptor.block_tokens
        return b"".join(
            self.oracle.part(self.descriptor, key, group, layout.part_bytes(group, tokens))
            for group in range(len(layout.groups))
        )

    def put(self, keys: Sequence[bytes], deadline_s: float = 1.0) -> list[bool]:
        """Store these blocks; return which are stored."""
        return self.space.put(list(keys), [self.content(key) for key in keys], deadline_s=deadline_s)

    def read(self, keys: Sequence[bytes], start: int = 0, deadline_s: float = 1.0) -> int:
        """Lease what is there of `keys[start:]`, check every byte of it, and return how many blocks that was."""
        with self.space.acquire(list(keys), start=start, deadline_s=deadline_s) as lease:
            for group in range(len(self.descriptor.layout.groups)):
                for i, offset in enumerate(lease.offsets(group)):
                    if offset >= 0:
                        self.oracle.check(lease.part(i, group), self.descriptor, keys[start + i], group)
            return int(lease.count)


def assert_idle(rig: Rig) -> Stats:
    """Drain, and see that nothing is held, under way or miscounted.

    Returns:
        the statistics of that moment.
    """
    assert rig.cache.drain(timeout_s=60.0), "the background does not finish"
    rig.core.check()
    stats = rig.cache.stats()
    assert (stats.open_leases, stats.open_reservations, stats.open_jobs) == (0, 0, 0)
    for name, tier in stats.tiers.items():
        held = (tier.leased_bytes, tier.quarantined_bytes, tier.in_flight)
        assert held == (0, 0, 0), f"{name}: leased, quarantined, in flight are {held}"
        assert 0 <= tier.used_bytes <= tier.capacity_bytes
    assert sum(stats.hits_by_tier.values()) + sum(stats.misses_by_reason.values()) == stats.blocks_asked
    return stats


def poison_is_intact(rig: Rig, used: Sequence[int]) -> bool:
    """Return whether every page of the arena but those at the offsets `used` is full of poison, or was never used."""
    arena, taken = rig.space().arena, set(used)
    pages = range(0, rig.setup.memory_blocks * PAGE_BYTES, PAGE_BYTES)
    patterns = (bytes([POISON]) * PAGE_BYTES, bytes(PAGE_BYTES))
    return all(bytes(arena[at : at + PAGE_BYTES]) in patterns for at in pages if at not in taken)
