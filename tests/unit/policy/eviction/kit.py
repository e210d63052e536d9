"""What the tests of eviction policies share."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvcairn.policy.eviction.base import Names, Rows


def rows(numbers: Iterable[int]) -> Rows:
    return np.array(list(numbers), dtype=np.intp)


def names(numbers: Iterable[int]) -> Names:
    """Names well spread over buckets, one for each number."""
    spread = np.array(list(numbers), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return spread ^ (spread >> np.uint64(29))
