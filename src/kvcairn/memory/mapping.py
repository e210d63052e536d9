"""Shared memory mapped so that it can have huge pages, whatever the host's setting for shared memory says.

A block then costs the processor a translation for each 2 MiB instead of each 4 KiB: copies to and from such memory are
some tenths faster. The kernel makes huge pages of shared memory on demand (`MADV_COLLAPSE`, Linux 6.1) where file and
address lie alike within 2 MiB, which Python's own `mmap` does not see to.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvcairn.units import PAGE_BYTES

HUGE_BYTES: Final = 2 << 20
_MAP_FIXED: Final = 0x10
_MADV_DONTFORK: Final = 10
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MADV_COLLAPSE: Final = 25  # Linux 6.1
_FAILED: Final = ctypes.c_void_p(-1).value


def map_shared(fd: int, nbytes: int, *, in_forks: bool) -> memoryview:
    """Map the first `nbytes` of a file, a multiple of 4,096, at a multiple of `HUGE_BYTES`; no page is touched yet.

    Args:
        fd: the file, which may be closed afterwards.
        nbytes: how much of it.
        in_forks: whether a child of this process has the mapping too.

    Returns:
        Flat writable bytes. The mapping ends with the last that was cut from them.

    Raises:
        OSError: the system refuses the mapping.
        ValueError: the file is smaller.
    """
    if os.fstat(fd).st_size < nbytes:
        raise ValueError(f"the file has {os.fstat(fd).st_size} bytes, {nbytes} are to be mapped")
    libc = _libc()
    whole = nbytes + HUGE_BYTES
    reserved = libc.mmap(None, whole, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    begin = -(-reserved // HUGE_BYTES) * HUGE_BYTES
    mapped = libc.mmap(begin, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if mapped == _FAILED:
        errno = ctypes.get_errno()
        libc.munmap(reserved, whole)
        raise OSError(errno, os.strerror(errno))
    if begin > reserved:
        libc.munmap(reserved, begin - reserved)
    libc.munmap(begin + nbytes, reserved + whole - begin - nbytes)
    if not in_forks:
        libc.madvise(begin, nbytes, _MADV_DONTFORK)
    memory = (ctypes.c_uint8 * nbytes).from_address(begin)
    # Not at the interpreter's end: threads may still copy then, and the process takes its mappings along.
    weakref.finalize(memory, libc.munmap, begin, nbytes).atexit = False
    return memoryview(memory).cast("B")


def touch_pages(memory: npt.NDArray[np.uint8], offset_bytes: int, nbytes: int) -> None:
    """Have pages of a mapping made, huge where they can be, without changing them. Blocks, without the GIL."""
    if not memory.size or nbytes <= 0:
        return
    libc, begin = _libc(), memory.ctypes.data + offset_bytes
    first, last = -(-begin // HUGE_BYTES) * HUGE_BYTES, (begin + nbytes) // HUGE_BYTES * HUGE_BYTES
    for start in range(first, last, HUGE_BYTES):  # a range of which no page is there is not collapsed
        libc.madvise(start, PAGE_BYTES, _MADV_POPULATE_WRITE)
    if last > first:
        libc.madvise(first, last - first, _MADV_COLLAPSE)
    # Finds what was collapsed in place; a kernel that does not know it makes pages as they are touched.
    libc.madvise(begin, nbytes, _MADV_POPULATE_WRITE)


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
