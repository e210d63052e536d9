"""What an object takes: the bytes of all that it refers to, and what the process takes from the system."""

from __future__ import annotations

import gc
import mmap
import sys
import types
from pathlib import Path
from typing import Any, Final

import numpy as np

_CODE: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType)
_ARENA: Final = (mmap.mmap, memoryview)
_ROUNDING_BYTES: Final = 16  # the allocator's, for small objects


def held_bytes(root: object) -> int:
    """Sum the sizes of everything reachable from `root`, as allocated; code, modules and mappings are left out.

    Any thread; takes about a second for a million objects and as much memory again.
    """
    seen: set[int] = set()
    stack: list[Any] = [root]
    total = 0
    while stack:
        found = stack.pop()
        if id(found) in seen or isinstance(found, (*_CODE, *_ARENA)):
            continue
        seen.add(id(found))
        total += -(-sys.getsizeof(found) // _ROUNDING_BYTES) * _ROUNDING_BYTES
        if isinstance(found, np.ndarray):
            stack.append(found.base)  # numpy shows the collector nothing; a view's bytes are its base's
        else:
            stack.extend(gc.get_referents(found))
    return total


def resident_bytes() -> int:
    """Memory of this process that is its own: not files, and not the arena, which is shared memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "RssAnon":
            return int(value.split()[0]) << 10
    raise OSError("/proc/self/status does not say RssAnon")


def collector_objects() -> int:
    """Number of objects that a full garbage collection walks."""
    gc.collect()
    return len(gc.get_objects())
