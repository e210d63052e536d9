"""Typed arrays that grow together: one element a row, and one more that stands for "no row"."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.intp]
NO_ROWS: Rows = np.empty(0, dtype=np.intp)


def column(dtype: str, rows: int, fill: int = 0) -> npt.NDArray[Any]:
    """Return an array of `rows` elements and a last one, which row -1 reads."""
    return np.full(rows + 1, fill, dtype=dtype)


def grown(array: npt.NDArray[Any], rows: int, fill: int = 0) -> npt.NDArray[Any]:
    """Return a copy with `rows` elements and a last one; new elements hold `fill`."""
    bigger = np.full((rows + 1, *array.shape[1:]), fill, dtype=array.dtype)
    bigger[: array.shape[0] - 1] = array[:-1]
    return bigger
