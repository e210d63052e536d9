"""Run a daemon until it is told to stop."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvcairn.cache import CLOSE_DRAIN_S
from kvcairn.config import Config, notify_socket
from kvcairn.core.link import Direct
from kvcairn.core.open import open_core
from kvcairn.daemon.notify import notify
from kvcairn.daemon.server import Server
from kvcairn.daemon.web import Web
from kvcairn.requests import IsIdle, WriteBack

logger = logging.getLogger(__name__)

STOPS: Final = {signal.SIGTERM, signal.SIGINT}


def serve(config: Config, path: Path, ready: Callable[[int | None], None], http: str | None = None) -> bool:
    """Serve a cache at the socket `path` until SIGTERM or SIGINT; main thread only.

    `ready` is called once clients can connect, with the port of `http` where that is given: an address to show metrics
    and health at; systemd is told too. Memory may still be pre-faulted then. At the end no more connections
    are taken, and what was to be written down is written, for at most 60 s; return whether all was.

    Raises:
        ConfigError: a tier or the socket cannot be opened; nothing is left open.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # inherited by every thread made from here on
    try:
        link = Direct(open_core(config))
        try:
            server = Server(link, path)
            server.start()
            web = None if http is None else Web(http, link, server)
            ready(None if web is None else web.port)
            notify(notify_socket(), "READY=1")
            signal.sigwait(STOPS)
            notify(notify_socket(), "STOPPING=1")
            server.close()
            if web is not None:
                web.close()
            is_idle = _write_back(link, link.now() + CLOSE_DRAIN_S)
            if not is_idle:
                logger.warning("stopped with writes left over: a tier did not take them within %g s", CLOSE_DRAIN_S)
            return is_idle
        finally:
            link.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _write_back(link: Direct, until_s: float) -> bool:
    """Have written what memory alone has, piece by piece; return whether nothing is left."""
    begin: int | None = 0
    while begin is not None:
        begin = link.call(WriteBack(begin)).value
        left_s = max(0.0, until_s - link.now())
        if not link.wait(lambda: bool(link.call(IsIdle(but_rebuilds=True)).value), left_s):
            return False
    return True
