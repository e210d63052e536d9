"""Storing a chain of blocks whole, while room may come."""

from __future__ import annotations

from collections.abc import Callable

from kvcairn import requests as rq
from kvcairn.memory.lease import Frame, Reservation


def put(
    frame: Frame, keys: list[bytes], parent: bytes | None, until_s: float, fill: Callable[[Reservation], None]
) -> list[bool]:
    """Store what is absent, again and again while room may come; say for each key whether it is stored now.

    Args:
        frame: of the space.
        keys: the chain.
        parent: key before the first one, as requests carry it.
        until_s: time of the link at which to give up.
        fill: writes the slots of a reservation and commits them.
    """
    link, chain, is_again = frame.link, unique(keys), False
    while True:
        seen = link.version()
        request = rq.Reserve(frame.space, chain, 0, parent, is_again=is_again)
        with Reservation(frame, chain, link.call(request)) as slots:
            if slots.keys or slots.reason is None:  # where all is there already, this counts as a sight of it
                fill(slots)
        is_again = True
        if slots.is_final or (slots.reason is None and not slots.in_flight):
            break
        if slots.keys and slots.reason is not None:
            continue  # what was just stored may make room
        if not _has_changed(link, seen + 1, until_s):  # the end of the reservation was a change of our own
            break
    flags: rq.Flags = link.call(rq.Readable(frame.space, keys))
    return flags.flags


def unique(keys: list[bytes]) -> list[bytes]:
    """Return the keys in order, each once."""
    return keys if len(set(keys)) == len(keys) else list(dict.fromkeys(keys))


def _has_changed(link: rq.Link, version: int, until_s: float) -> bool:
    """Wait until the cache is beyond `version`; False at the deadline."""
    return link.now() < until_s and link.wait(lambda: link.version() > version, until_s - link.now())
