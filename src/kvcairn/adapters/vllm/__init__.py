"""vLLM, through both of its doors: `KVCairnConnector` and `KVCairnTier`.

vLLM imports them by the name of this module; the engine is imported only when one of them is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

from kvcairn.errors import UnsupportedError

_DOORS = {
    "KVCairnConnector": "kvcairn.adapters.vllm.connector",
    "KVCairnTier": "kvcairn.adapters.vllm.tier",
}

__all__ = ["KVCairnConnector", "KVCairnTier"]


def __getattr__(name: str) -> Any:
    """Import a door when it is asked for.

    Raises:
        UnsupportedError: this vLLM is none of the supported ones, or there is none.
    """
    if name not in _DOORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvcairn.adapters.vllm.versions import check_version

    check_version()
    try:
        module = importlib.import_module(_DOORS[name])
    except ImportError as error:
        raise UnsupportedError(f"this vLLM lacks what the adapter needs: {error}; {check_version()}") from error
    return getattr(module, name)
