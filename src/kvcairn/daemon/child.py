"""A daemon that an engine with several worker processes starts for itself, on a private socket."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kvcairn.config import Config
from kvcairn.daemon.serve import STOPS, serve
from kvcairn.errors import ConfigError, KVCairnError

START_S: Final = 60.0
STOP_S: Final = 70.0  # what it takes at most to write down what is left, and a little
_COMMAND: Final = "from kvcairn.daemon.child import main; main()"


class ChildDaemon:
    """A daemon as a child process. Workers connect to `address`; it outlives each of them, and ends with this process.

    Use as a context manager, or call `close`. However this process ends, the daemon notices, writes down what is to be
    written and stops.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Start it and wait until clients can connect, at most a minute.

        Args:
            settings: as for `Config.from_dict`; what can be written as JSON.

        Raises:
            ConfigError: the settings are refused, or a tier cannot be opened.
            KVCairnError: it does not start.
        """
        Config.from_dict(dict(settings))  # refused here, where the caller sees it
        self._folder = tempfile.TemporaryDirectory(prefix="kvcairn-")
        socket = Path(self._folder.name, "socket")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        orders = {"settings": dict(settings), "socket": str(socket), "parent": os.getpid()}
        try:
            with self._process.stdin as orders_end:
                orders_end.write(json.dumps(orders).encode())
            answer = self._answer()
        except (OSError, ValueError, KVCairnError) as error:
            self.close()
            raise (
                error if isinstance(error, KVCairnError) else KVCairnError(f"the daemon does not start: {error}")
            ) from error
        if answer != "ready":
            self.close()
            raise ConfigError(*answer) if isinstance(answer, list) else KVCairnError(str(answer))
        self.address = f"unix:{socket}"

    @property
    def pid(self) -> int:
        """The number of the daemon's process."""
        return self._process.pid

    def close(self) -> None:
        """Have the daemon stop, and wait until what was to be written down is written. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._folder.cleanup()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], START_S)[0]:
            raise KVCairnError(f"the daemon does not start: it said nothing for {START_S:g} s")
        return json.loads(self._process.stdout.readline() or '"the daemon does not start: it ended at once"')

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def main() -> None:
    """Be the child: read the orders, serve, and stop when told to or when the parent has ended."""
    orders = json.loads(sys.stdin.buffer.read())
    stop_with(orders["parent"])
    try:
        serve(Config.from_dict(orders["settings"]), Path(orders["socket"]), lambda port: _say("ready"))
    except ConfigError as error:
        _say([error.path, error.reason, None if error.value is None else str(error.value), error.remedy])
    except (KVCairnError, OSError) as error:
        _say(str(error))
    with suppress(OSError):  # its parent removes it, where it still can
        Path(orders["socket"]).parent.rmdir()


def stop_with(parent: int) -> None:
    """Have this process told to stop when its parent ends, or has ended already."""
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        sys.exit(0)
    if os.getppid() != parent:
        sys.exit(0)

    # Blocked before there is a second thread: a signal goes to any thread that does not block it, and ends the process.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)

    def watch() -> None:
        select.select([pidfd], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="kvcairn-parent", daemon=True).start()


def _say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()
