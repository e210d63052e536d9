"""The same chain in several rank spaces: what all of them have counts, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcairn.requests import Acquire, AcquireAll, HitReply, Leased, LeasedAll, Lookup, LookupAll
from kvcairn.types import Hit


def lookup_all(request: LookupAll | AcquireAll, lookup: Callable[[Lookup], HitReply]) -> Hit:
    """Return what can be restored in every space: the boundaries that they have in common."""
    hits = [lookup(Lookup(space, request.keys, request.start)).hit for space in request.spaces]
    return in_common(hits, len(request.keys) - request.start)


def acquire_all(
    request: AcquireAll, lookup: Callable[[Lookup], HitReply], acquire: Callable[[Acquire], Leased]
) -> LeasedAll:
    """Acquire in every space what can be restored in all of them; loads begin in all of them at once."""
    hit = lookup_all(request, lookup)
    keys = request.keys[: request.start + hit.blocks]
    leases = [acquire(Acquire(space, keys, request.start, None, request.wait_s)) for space in request.spaces]
    return LeasedAll(leases, hit.reason)


def in_common(hits: Sequence[Hit], asked: int) -> Hit:
    """Return the hit of several ranks, of `asked` blocks, from that of each."""
    common = sorted(set(hits[0].boundaries).intersection(*(hit.boundaries for hit in hits[1:])))
    length = common[-1] if common else 0
    shortest = min(hits, key=lambda hit: hit.blocks)
    by_tier = dict(shortest.by_tier) if shortest.blocks == length else {}
    return Hit(
        blocks=length,
        block_tokens=hits[0].block_tokens,
        by_tier=by_tier,
        pending=max(hit.pending for hit in hits),
        reason=None if length == asked else shortest.reason,
        sparse=tuple(common),
    )
