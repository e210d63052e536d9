"""SGLang, through two doors: `KVCairnStorage` behind HiCache's host pool, `KVCairnLinker` straight behind the device's.

SGLang imports it by the name of this module; the engine is imported only when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

from kvcairn.errors import UnsupportedError

_DOORS = {"KVCairnLinker": "kvcairn.adapters.sglang.linker", "KVCairnStorage": "kvcairn.adapters.sglang.storage"}

__all__ = ["KVCairnLinker", "KVCairnStorage"]


def __getattr__(name: str) -> Any:
    """Import a door when it is asked for.

    Raises:
        UnsupportedError: this SGLang is none of the supported ones, or there is none.
    """
    if name not in _DOORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvcairn.adapters.sglang.versions import check_version

    supported = check_version()
    try:
        module = importlib.import_module(_DOORS[name])
    except ImportError as error:
        raise UnsupportedError(f"this SGLang lacks what the adapter needs: {error}; {supported}") from error
    return getattr(module, name)
