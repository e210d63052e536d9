"""Calls that concern all ranks of an engine at once."""

from __future__ import annotations

from collections.abc import Sequence

from kvcairn import requests as rq
from kvcairn.memory.lease import Lease, quietly
from kvcairn.space import Space, checked_chain, lease_of
from kvcairn.types import Hit, MissReason
from kvcairn.units import seconds


def lookup_all(spaces: Sequence[Space], keys: Sequence[bytes], start: int = 0) -> Hit:
    """Return what can be restored in every one of several rank spaces: the boundaries that they have in common.

    One request, whatever the number of spaces.

    Raises:
        ValueError: there is no space, or they are of several caches.
    """
    link = _link_of(spaces)
    chain, _, _ = checked_chain(keys, start, None)
    numbers = [space.frame.space for space in spaces]
    reply: rq.HitReply = link.call(rq.LookupAll(numbers, chain, start))
    return reply.hit


def acquire_all(spaces: Sequence[Space], keys: Sequence[bytes], start: int = 0, deadline_s: float = 1.0) -> list[Lease]:
    """Pin the same number of blocks in every one of several rank spaces, all or none.

    The count is the longest boundary that all of them can restore by the deadline. One request where all is in memory.

    Raises:
        ValueError: there is no space, or they are of several caches.
    """
    link = _link_of(spaces)
    until_s = link.now() + seconds(deadline_s)
    wanted, _, _ = checked_chain(keys, start, None)
    numbers = [space.frame.space for space in spaces]
    total, reason = len(wanted) - start, None
    while True:
        reply: rq.LeasedAll = link.call(rq.AcquireAll(numbers, wanted, start, max(0.0, until_s - link.now())))
        reason = reason or reply.reason
        leases = _settled(spaces, reply.leases, until_s)
        if leases is None:
            continue  # a damaged copy is gone now
        common = min(lease.count for lease in leases)
        if all(lease.count == common for lease in leases):
            for lease in leases if common < total else []:
                lease.reason = lease.reason or reason or MissReason.UNKNOWN
            return leases
        for lease in leases:
            lease.release()
        wanted = wanted[: start + common]


def _settled(spaces: Sequence[Space], replies: Sequence[rq.Leased], until_s: float) -> list[Lease] | None:
    """Return the leases once all that is to be loaded has come; None, and none held, where a copy was damaged."""
    leases: list[Lease | None] = []
    is_whole = False
    try:
        for space, leased in zip(spaces, replies, strict=True):
            leases.append(lease_of(space.frame, leased, until_s))
        whole = [lease for lease in leases if lease is not None]
        is_whole = len(whole) == len(spaces)
        return whole if is_whole else None
    finally:
        for lease in leases if not is_whole else []:
            if lease is not None:
                lease.release()
        for space, leased in list(zip(spaces, replies, strict=True))[len(leases) + 1 :]:  # interrupted before these
            _let_go(space.frame.link, leased)


def _let_go(link: rq.Link, leased: rq.Leased) -> None:
    quietly(lambda: link.call(rq.Release(leased.lease) if leased.job is None else rq.JobClose(leased.job)))


def _link_of(spaces: Sequence[Space]) -> rq.Link:
    links = {id(space.frame.link): space.frame.link for space in spaces}
    if not links:
        raise ValueError("at least one space is needed")
    if len(links) > 1:
        raise ValueError("the spaces are of several caches")
    return next(iter(links.values()))
