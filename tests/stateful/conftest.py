"""The seed of the random tests here: the same in every run unless another is asked for."""

from __future__ import annotations

import pytest

DEFAULT_SEED = 20_261_201


@pytest.fixture
def fixed_seed(pytestconfig: pytest.Config) -> int:
    given: int | None = pytestconfig.getoption("--seed")
    return DEFAULT_SEED if given is None else given
