from __future__ import annotations

import gc
import mmap
import os

import numpy as np
import pytest

from kvcairn.memory.arena import POISON, Arena

PAGE = 4096


def test_view_array_and_file_are_the_same_bytes() -> None:
    arena = Arena(4 * PAGE)
    assert (arena.view.nbytes, arena.array.size, arena.view.readonly) == (4 * PAGE, 4 * PAGE, False)
    arena.view[5:8] = b"abc"
    arena.array[PAGE] = 7
    assert os.pread(arena.fd, 3, 5) == b"abc"
    with mmap.mmap(arena.fd, 4 * PAGE) as other:
        assert other[PAGE] == 7
        other[2 * PAGE] = 9
    assert arena.view[2 * PAGE] == 9
    arena.close()


def test_prefault_changes_nothing() -> None:
    arena = Arena(8 * PAGE)
    arena.view[PAGE : PAGE + 2] = b"xy"
    arena.prefault(0, 8 * PAGE)
    arena.prefault(PAGE, PAGE)
    arena.prefault(0, 0)
    assert bytes(arena.view) == bytes(PAGE) + b"xy" + bytes(7 * PAGE - 2)
    arena.close()


def test_poison_covers_exactly_its_bytes() -> None:
    arena = Arena(3 * PAGE)
    arena.poison(PAGE, PAGE)
    assert np.flatnonzero(arena.array == POISON).tolist() == list(range(PAGE, 2 * PAGE))
    arena.close()


def test_the_file_is_not_inherited_by_programs() -> None:
    arena = Arena(PAGE)
    assert not os.get_inheritable(arena.fd)
    arena.close()


def test_bytes_outlive_the_file_as_long_as_somebody_looks_at_them() -> None:
    arena = Arena(2 * PAGE)
    view, fd = arena.view[PAGE:], arena.fd
    arena.view[PAGE] = 42
    arena.close()
    arena.close()
    os.fstat(fd)  # its number names no other file while somebody may still ask for it
    del arena
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert view[0] == 42
    view[0] = 43
    assert view[0] == 43


def test_an_impossible_size_is_refused() -> None:
    with pytest.raises((OSError, OverflowError)):
        Arena(1 << 62)
