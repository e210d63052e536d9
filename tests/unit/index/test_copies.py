from __future__ import annotations

import numpy as np
import pytest

from kvcairn.index.arrays import column, grown
from kvcairn.index.copies import NO_SLOT, Copies


@pytest.mark.parametrize(("dtype", "fill"), [("i4", -1), ("u1", 0), ("f8", 3)])
def test_a_column_has_one_more_element_for_no_row(dtype: str, fill: int) -> None:
    array = column(dtype, 4, fill)
    assert array.dtype == np.dtype(dtype)
    assert array.tolist() == [fill] * 5


def test_growing_keeps_what_is_there_and_the_element_for_no_row_stays_last() -> None:
    array = column("i4", 2, -1)
    array[:2] = [5, 6]
    assert grown(array, 4, -1).tolist() == [5, 6, -1, -1, -1]
    assert array.tolist() == [5, 6, -1]
    table = np.arange(6).reshape(3, 2)
    assert grown(table, 3).tolist() == [[0, 1], [2, 3], [0, 0], [0, 0]]


def test_there_are_no_copies_at_first() -> None:
    copies = Copies(3)
    copies.grow(6)
    assert copies.slot.tolist() == [NO_SLOT] * 7
    for array in (copies.state, copies.pins, copies.busy, copies.children):
        assert array.tolist() == [0] * 7
    assert copies.checksum.shape == (7, 16)
    assert not copies.checksum.any()
