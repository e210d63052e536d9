"""The seeded driver: 200,000 operations in the normal run, ten million in the long one."""

from __future__ import annotations

import pytest

from kvcairn.testing.driver import ALL_SETUPS, SETUPS, drive

pytestmark = pytest.mark.filterwarnings("ignore:eviction 'lfu'")

NORMAL_OPS, LONG_OPS = 200_000, 10_000_000


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_driver(name: str, fixed_seed: int) -> None:
    drive(name, -(-NORMAL_OPS // len(SETUPS)), fixed_seed)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ALL_SETUPS)
def test_driver_long(name: str, seed: int) -> None:
    drive(name, -(-LONG_OPS // len(ALL_SETUPS)), seed)
