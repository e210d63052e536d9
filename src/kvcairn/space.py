"""The blocks of one model, as a client sees them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from operator import countOf

from kvcairn import requests as rq
from kvcairn.buffers import Block, Buffers, LoadInto, Regions, StoreFrom, bytes_of
from kvcairn.config import PrefetchOptions
from kvcairn.errors import ConfigError, LayoutError
from kvcairn.keys import KEY_BYTES, TokenIds, block_keys
from kvcairn.layout import SpaceDescriptor
from kvcairn.memory.lease import Frame, Lease, Reservation, first_damaged, quietly
from kvcairn.put import put, unique
from kvcairn.transfer.job import CopyJob, Job
from kvcairn.types import FINAL, Hints, Hit, MissReason, Parent, _Unknown
from kvcairn.units import seconds


class Space:
    """All methods are thread-safe; none waits longer than its deadline plus one short lock.

    Numbers of blocks in hits, leases and jobs count from `start`. `parent` is the key before `keys[0]` where the chain
    does not begin at the start of a prompt, `UNKNOWN` where nobody knows it.

    Attributes:
        descriptor: what all blocks here have in common.
        block_bytes: bytes of a block, all groups together.
        write_policy: the memory tier's: when a block that an engine has is stored at all.
    """

    def __init__(
        self,
        link: rq.Link,
        descriptor: SpaceDescriptor,
        prefetch: PrefetchOptions,
        jobs: MutableMapping[int, Job],
    ) -> None:
        """Open the space; `jobs` is where its prefetch jobs are entered.

        Raises:
            LayoutError: its blocks are larger than the memory tier.
        """
        self.descriptor = descriptor
        opened = link.call(rq.OpenSpace(descriptor))
        groups = range(len(descriptor.layout.groups))
        parts = tuple(descriptor.layout.part_bytes(group, descriptor.block_tokens) for group in groups)
        self._frame = Frame(link, opened.space, parts, opened.verify, jobs)
        self.block_bytes = sum(parts)
        self.write_policy = opened.write_policy
        self._prefetch = prefetch

    @property
    def arena(self) -> memoryview:
        """The memory that `offsets` of leases and reservations point into: flat, writable, bytes.

        Raises:
            ClosedError: the cache is closed.
        """
        self._frame.link.check_open()
        return self._frame.link.memory().view

    def part_bytes(self, group: int = 0) -> int:
        """Bytes of one group of a block.

        Raises:
            LayoutError: there is no such group.
        """
        return self.descriptor.layout.part_bytes(group, self.descriptor.block_tokens)

    def layer_range(self, layer: int, group: int = 0) -> tuple[int, int]:
        """Return (offset, nbytes) of one layer inside the part of `group` of this space's blocks.

        Raises:
            LayoutError: there is no such group, or no such layer in it.
        """
        return self.descriptor.layout.layer_range(layer, group, block_tokens=self.descriptor.block_tokens)

    def keys(
        self, token_ids: TokenIds, extra: Mapping[int, bytes | None] | None = None, parent: bytes | None = None
    ) -> list[bytes]:
        """Return the keys of the full blocks of `token_ids`; see `kvcairn.keys.block_keys`.

        Raises:
            ValueError: a token id is outside 0 to 2**32 - 1, or no whole number.
        """
        return block_keys(token_ids, self.descriptor.block_tokens, parent=parent, extra=extra)

    def lookup(self, keys: Sequence[bytes], start: int = 0, parent: Parent = None) -> Hit:
        """Return how much of `keys[start:]` can be restored, from which tiers, and why no more.

        No I/O, changes nothing, counts nothing.
        """
        reply: rq.HitReply = self._frame.link.call(rq.Lookup(self._frame.space, *checked_chain(keys, start, parent)))
        return reply.hit

    def probe(self, keys: Sequence[bytes], start: int = 0, deadline_s: float = 0.1, parent: Parent = None) -> Hit:
        """Return the same as `lookup`, after asking foreign tiers once. Managed tiers are never asked."""
        request = rq.Probe(self._frame.space, *checked_chain(keys, start, parent), seconds(deadline_s))
        reply: rq.HitReply = self._frame.link.call(request)
        return reply.hit

    def prefetch(
        self,
        keys: Sequence[bytes],
        start: int = 0,
        policy: str | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
        parent: Parent = None,
    ) -> Job:
        """Start to bring `keys[start:]` into memory. Never waits.

        Args:
            keys: the chain.
            start: first block wanted.
            policy: `best_effort`, `wait_complete` or `timeout`: how long `job.wait()` waits; the setting by default.
            deadline_s: after that nothing more is asked for.
            priority: the higher goes first, also where several wait for room; beyond -49 and 49 it makes no difference.
            parent: key before the first one.

        Raises:
            ValueError: there is no such policy.
        """
        wait_s = self._prefetch.wait_s(policy, max(0, len(keys) - start) * self.descriptor.block_tokens)
        limit_s = None if deadline_s is None else seconds(deadline_s)
        request = rq.Prefetch(
            self._frame.space, *checked_chain(keys, start, parent), int(priority), limit_s, wait_s != 0
        )
        job = Job(self._frame, self._frame.link.call(request), wait_s)
        self._frame.jobs[job.number] = job
        return job

    def acquire(self, keys: Sequence[bytes], start: int = 0, deadline_s: float = 1.0, parent: Parent = None) -> Lease:
        """Pin the longest run of `keys[start:]` that can be in memory by the deadline.

        With `deadline_s=0` that is what is in memory now; slower tiers are not asked. A shorter lease says why
        (`lease.reason`). Release it, or use it in `with`.
        """
        wait_s = seconds(deadline_s)
        return self._lease(rq.Acquire(self._frame.space, *checked_chain(keys, start, parent), wait_s), wait_s)

    def reserve(
        self,
        keys: Sequence[bytes],
        start: int = 0,
        parts: Sequence[Sequence[int]] | None = None,
        parent: Parent = None,
    ) -> Reservation:
        """Take slots for those of `keys[start:]` that are not in memory; shorter where there is no room. Never waits.

        What the memory tier's write policy does not take (yet) gets none.

        Args:
            keys: the chain.
            start: first block wanted.
            parts: for each key behind `start` the groups to store; all by default.
            parent: key before the first one.
        """
        chain, start, above = checked_chain(keys, start, parent)
        chain = unique(chain)
        wanted = None if parts is None else _parts(parts, len(self._frame.part_bytes), len(chain) - start)
        request = rq.Reserve(self._frame.space, chain, start, above, wanted)
        return Reservation(self._frame, chain, self._frame.link.call(request))

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[Block], deadline_s: float = 1.0, parent: Parent = None
    ) -> list[bool]:
        """Store whole blocks; return for each key whether it is stored now, by this call or before.

        Blocks of several groups are given with their parts one behind the other. What is stored already is not
        written again; what the memory tier's write policy does not take is not stored.

        Raises:
            LayoutError: a block has another size than `block_bytes`, is a float array of another dtype than the layout
                has, or is no bytes at all; or the numbers of keys and blocks differ. Nothing is stored then.
        """
        chain, layout = _list(keys), self.descriptor.layout
        if len(chain) != len(blocks):
            raise LayoutError(f"{len(chain)} keys for {len(blocks)} blocks")
        views = {key: bytes_of(blocks[number], number, layout) for number, key in enumerate(chain)}
        for number, view in enumerate(views.values()):
            if view.nbytes != self.block_bytes:
                raise LayoutError(f"block {number} has {view.nbytes} bytes, blocks here have {self.block_bytes}")
        until_s = self._frame.link.now() + seconds(deadline_s)
        return put(
            self._frame, chain, _wire(parent), until_s, lambda s: s.commit_blocks([views[key] for key in s.keys])
        )

    def get(self, keys: Sequence[bytes], deadline_s: float = 1.0, parent: Parent = None) -> list[bytes]:
        """Return the bytes of the longest run that can be had by the deadline; shorter than `keys` after a miss."""
        with self.acquire(keys, deadline_s=deadline_s, parent=parent) as lease:
            groups = range(len(self._frame.part_bytes))
            offsets = [lease.offsets(group) for group in groups]
            if len(groups) == 1:  # joining would copy once more, with the GIL
                return [lease.copy(block) if offsets[0][block] >= 0 else b"" for block in range(lease.count)]
            return [
                b"".join([lease.copy(block, group) for group in groups if offsets[group][block] >= 0])
                for block in range(lease.count)
            ]

    def load_into(self, keys: Sequence[bytes], buffers: Buffers, deadline_s: float = 1.0) -> CopyJob:
        """Copy blocks into buffers of this process, on a transfer thread; `job.ok` says for each key whether it was.

        What is not in memory is read from its tier, in several calls at a time, and takes no slot. Regions of a block
        are filled in order. The buffers belong to the job until it has ended: soon after its deadline at the latest.

        Raises:
            LayoutError: the regions of a block do not add up to `block_bytes`.
        """
        self._frame.link.check_open()
        chain, regions = _list(keys), Regions(buffers, len(keys), self._frame.part_bytes)

        until_s = self._frame.link.now() + seconds(deadline_s)
        return CopyJob(self._frame, len(chain), LoadInto(self._frame, self._lease, chain, regions, until_s))

    def store_from(
        self, keys: Sequence[bytes], buffers: Buffers, deadline_s: float = 1.0, parent: Parent = None
    ) -> CopyJob:
        """Copy blocks from buffers of this process into the cache, on a transfer thread.

        The buffers belong to the job until it has ended; `job.ok` says for each key whether it is stored.

        Raises:
            LayoutError: the regions of a block do not add up to `block_bytes`.
        """
        self._frame.link.check_open()
        chain, regions = _list(keys), Regions(buffers, len(keys), self._frame.part_bytes)

        until_s, above = self._frame.link.now() + seconds(deadline_s), _wire(parent)

        def store(fill: Callable[[Reservation], None]) -> list[bool]:
            return put(self._frame, chain, above, until_s, fill)

        return CopyJob(self._frame, len(chain), StoreFrom(self._frame, store, chain, regions))

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return the length of the leading run that is readable somewhere, by exact key."""
        reply: rq.Value = self._frame.link.call(rq.Contains(self._frame.space, _list(keys)))
        return int(reply.value or 0)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that the blocks were used, for instance from the engine's own cache."""
        self._frame.link.call(rq.Touch(self._frame.space, _list(keys)))

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop all copies of these blocks, on every tier; leases of them stay readable."""
        self._frame.link.call(rq.Forget(self._frame.space, _list(keys)))

    def hint(self, keys: Sequence[bytes], hints: Hints) -> int:
        """Tell what is known about the future of these blocks; return how many of them are pinned now.

        Raises:
            TypeError: `hints` is no `Hints`.
        """
        if not isinstance(hints, Hints):
            raise TypeError(f"expected kvcairn.Hints, got {hints!r}")
        reply: rq.Value = self._frame.link.call(rq.Hint(self._frame.space, _list(keys), 0, None, hints))
        return int(reply.value or 0)

    def report_prefill(self, tokens: int, seconds: float) -> None:
        """Tell that the engine has computed the KV of `tokens` tokens in `seconds`.

        Recent reports count most. From the first one on the planner leaves out what would take longer to load.

        Raises:
            ValueError: one of them is not above 0.
        """
        if not (tokens > 0 and 0 < seconds < math.inf):
            raise ValueError(f"tokens and seconds must be above 0, got {tokens!r} and {seconds!r}")
        self._frame.link.call(rq.ReportPrefill(self._frame.space, int(tokens), float(seconds)))

    def check_write_policy(self, *possible: str) -> None:
        """Refuse a write policy of the memory tier that an engine's adapter cannot carry out.

        Raises:
            ConfigError: the policy is none of `possible`.
        """
        if self.write_policy not in possible:
            taken = " or ".join(f'"{name}"' for name in possible)
            reason = "the memory tier's write policy needs what this engine does not tell"
            raise ConfigError("tiers[0].write_policy", reason, self.write_policy, f"set it to {taken}")

    @property
    def frame(self) -> Frame:
        """What handles of this space are made with."""
        return self._frame

    def _lease(self, request: rq.Acquire, wait_s: float) -> Lease:
        """Acquire, again and again while copies turn out to be damaged: each of those is dropped."""
        link = self._frame.link
        until_s = link.now() + wait_s
        while True:
            lease = lease_of(self._frame, link.call(request), until_s)
            if lease is not None:
                return lease


def lease_of(frame: Frame, leased: rq.Leased, until_s: float) -> Lease | None:
    """Wait for what `acquire` has to load, and return its lease; None where a copy was damaged and is dropped now."""
    if leased.job is not None:
        leased = _await(frame.link, leased.job, until_s)
    damaged = first_damaged(frame, leased)
    if damaged is None:
        return Lease(frame, leased)
    frame.link.call(rq.Damaged(leased.lease, damaged))
    return None


def _await(link: rq.Link, job: int, until_s: float) -> rq.Leased:
    """Wait for a job of `acquire` and turn it into a lease."""

    def is_over() -> bool:
        status: rq.JobStatus = link.call(rq.JobInfo(job))
        return status.state in FINAL or status.stalled

    leased: rq.Leased | None = None
    try:
        link.wait(is_over, max(0.0, until_s - link.now()))
        leased = link.call(rq.JobLease(job, None, MissReason.DEADLINE))
        return leased
    finally:
        if leased is None:  # interrupted: nobody else would end the job
            quietly(lambda: link.call(rq.JobClose(job)))


def checked_chain(keys: Sequence[bytes], start: int, parent: Parent) -> tuple[list[bytes], int, bytes | None]:
    """Check what names a chain, before anything is done with it."""
    chain = _list(keys)
    if not hasattr(start, "__index__") or not 0 <= start <= len(chain):
        raise ValueError(f"start must be 0 to {len(chain)}, the number of keys, got {start}")
    return chain, start, _wire(parent)


def _parts(parts: Sequence[Sequence[int]], groups: int, blocks: int) -> list[list[int]]:
    """Check which groups of which blocks are named."""
    wanted = [list(each) for each in parts]
    if len(wanted) != blocks:
        raise LayoutError(f"parts names the groups of {len(wanted)} blocks, {blocks} are asked for")
    if any(group not in range(groups) for each in wanted for group in each):
        raise LayoutError(f"parts names a group that there is not: there are 0 to {groups - 1}")
    return wanted


def _wire(parent: Parent) -> bytes | None:
    """Return a parent as requests carry it: b"" for unknown."""
    if isinstance(parent, _Unknown):
        return b""
    if parent is not None and (not isinstance(parent, bytes) or len(parent) != KEY_BYTES):
        raise ValueError(f"parent must be a key of {KEY_BYTES} bytes, None or UNKNOWN, got {parent!r}")
    return parent


def _list(keys: Sequence[bytes]) -> list[bytes]:
    chain = keys if isinstance(keys, list) else list(keys)
    if countOf(map(type, chain), bytes) < len(chain) or countOf(map(len, chain), KEY_BYTES) < len(chain):
        bad = next(key for key in chain if type(key) is not bytes or len(key) != KEY_BYTES)
        raise ValueError(f"a block key is {KEY_BYTES} bytes, got {bad!r}")
    return chain
