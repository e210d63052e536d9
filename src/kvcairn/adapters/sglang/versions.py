"""Which SGLang this adapter works with. Its interfaces change from release to release, so the range is pinned."""

from __future__ import annotations

import importlib.metadata
import re

from kvcairn.errors import UnsupportedError

FIRST, BEFORE = (0, 5, 23), (0, 5, 24)
RANGE = f">={'.'.join(map(str, FIRST))},<{'.'.join(map(str, BEFORE))}"


def installed_version() -> str:
    """Return the version of the installed SGLang.

    Raises:
        UnsupportedError: there is none.
    """
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise UnsupportedError(f"the SGLang adapter needs SGLang: pip install 'sglang{RANGE}'") from error


def check_version(version: str | None = None) -> str:
    """Return one sentence on the supported range.

    Raises:
        UnsupportedError: `version`, by default the installed one, is outside of it.
    """
    supported = f"kvcairn {importlib.metadata.version('kvcairn')} works with SGLang {RANGE}"
    version = version or installed_version()
    release = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    if release is None or not FIRST <= tuple(int(number) for number in release.groups()) < BEFORE:
        raise UnsupportedError(
            f"SGLang {version} is not supported: {supported}; pip install 'sglang{RANGE}', "
            "or a kvcairn made for that SGLang"
        )
    return supported
