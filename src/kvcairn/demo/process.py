"""Runs a module of the demo in a new Python process and waits for it."""

from __future__ import annotations

import subprocess
import sys

from kvcairn.errors import KVCairnError

_TIMEOUT_S = 1800


def in_new_process(module: str, *arguments: str) -> str:
    """Run `python -m MODULE ARGUMENTS` and return what it printed.

    Raises:
        KVCairnError: it failed, or took half an hour; the message ends with the last thing that it said.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise KVCairnError(f"{module} took more than {_TIMEOUT_S} s") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing was said"]
        raise KVCairnError(f"{module} ended with status {done.returncode}: {said[-1]}")
    return done.stdout
