"""Tells systemd how far the daemon is; see sd_notify(3)."""

from __future__ import annotations

import logging
import socket

logger = logging.getLogger(__name__)


def notify(where: str | None, what: str) -> None:
    """Send a state such as `READY=1` to the socket that systemd named; nothing where it named none. Never raises."""
    if not where:
        return
    address = "\0" + where[1:] if where.startswith("@") else where
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(what.encode(), address)
    except OSError as error:
        logger.warning("systemd cannot be told %s: %s", what, error)
