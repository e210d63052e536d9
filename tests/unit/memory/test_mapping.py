from __future__ import annotations

import gc
import mmap
import os
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvcairn.memory.mapping import HUGE_BYTES, map_shared, touch_pages
from kvcairn.units import PAGE_BYTES

NBYTES = 3 * HUGE_BYTES + 5 * PAGE_BYTES


@pytest.fixture
def fd() -> Iterator[int]:
    file = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(file, NBYTES)
    yield file
    os.close(file)


def mappings() -> int:
    with open("/proc/self/maps") as lines:
        return sum("memfd:test" in line for line in lines)


def test_a_mapping_begins_where_huge_pages_do_and_is_the_file(fd: int) -> None:
    view = map_shared(fd, NBYTES, in_forks=True)
    memory = np.frombuffer(view, dtype=np.uint8)
    assert (view.nbytes, view.format, view.readonly, view.ndim) == (NBYTES, "B", False, 1)
    assert memory.ctypes.data % HUGE_BYTES == 0
    view[NBYTES - 3 :] = b"end"
    assert os.pread(fd, 3, NBYTES - 3) == b"end"


def test_it_ends_with_the_last_that_was_cut_from_it(fd: int) -> None:
    view = map_shared(fd, NBYTES, in_forks=True)
    part = np.frombuffer(view[PAGE_BYTES : 2 * PAGE_BYTES], dtype=np.uint8)
    del view
    gc.collect()
    part[:] = 7
    assert mappings() == 1
    del part
    gc.collect()
    assert mappings() == 0


@pytest.mark.parametrize(
    ("begin", "nbytes"), [(0, NBYTES), (PAGE_BYTES, HUGE_BYTES), (HUGE_BYTES, HUGE_BYTES), (0, PAGE_BYTES), (0, 0)]
)
def test_touching_changes_nothing(fd: int, begin: int, nbytes: int) -> None:
    view = map_shared(fd, NBYTES, in_forks=True)
    memory = np.frombuffer(view, dtype=np.uint8)
    memory[:] = np.arange(NBYTES) % 251
    wanted = memory.copy()
    touch_pages(memory, begin, nbytes)
    assert (memory == wanted).all()


def test_touching_beside_a_writer_loses_none_of_its_bytes(fd: int) -> None:
    view = map_shared(fd, NBYTES, in_forks=True)
    memory, is_over = np.frombuffer(view, dtype=np.uint8), threading.Event()
    seen: list[bool] = []

    def write() -> None:
        turn = 0
        while not is_over.is_set():
            turn = turn % 250 + 1
            memory[:] = turn
            seen.append(bool((memory == turn).all()))

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(20):
        touch_pages(memory, 0, NBYTES)
    is_over.set()
    writer.join()
    assert seen and all(seen)


def test_a_child_has_it_only_where_it_may(fd: int) -> None:
    for in_forks in (True, False):
        view = map_shared(fd, NBYTES, in_forks=in_forks)
        begin = np.frombuffer(view, dtype=np.uint8).ctypes.data
        child = os.fork()
        if child == 0:
            with open("/proc/self/maps") as lines:
                os._exit(0 if any(line.startswith(f"{begin:x}-") for line in lines) == in_forks else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_cannot_be_mapped_is_refused_and_leaves_nothing(fd: int, tmp_path: object) -> None:
    with pytest.raises(ValueError, match="are to be mapped"):
        map_shared(fd, NBYTES + PAGE_BYTES, in_forks=True)
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    with pytest.raises(PermissionError):
        map_shared(read_only, NBYTES, in_forks=True)
    os.close(read_only)
    assert mappings() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages of shared memory are Linux")
def test_an_empty_array_is_no_matter() -> None:
    touch_pages(np.empty(0, dtype=np.uint8), 0, mmap.PAGESIZE)
