"""The caches that every case runs over, and what every case does with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvcairn.testing.rig import BelowKind, LinkKind, Rig, Setup
from tests.torture.support import MakeRig


@pytest.fixture(params=["direct", "loopback", "socket"])
def link(request: pytest.FixtureRequest) -> LinkKind:
    chosen: LinkKind = request.param
    return chosen


@pytest.fixture(params=["none", "disk"])
def below(request: pytest.FixtureRequest) -> BelowKind:
    chosen: BelowKind = request.param
    return chosen


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    """Open caches that are closed at the end; arguments are those of `Setup`, and `folder`."""
    with ExitStack() as stack:
        count = 0

        def make(folder: Path | None = None, **options: Any) -> Rig:
            nonlocal count
            count += 1
            place = folder or tmp_path / f"tier{count}"
            place.mkdir(exist_ok=True)
            return stack.enter_context(Rig(Setup(**options), place))

        yield make


HIERARCHIES: list[dict[str, Any]] = [
    {"write_policy": "back"},
    {"write_policy": "selective", "promotion": "bypass"},
    {"write_policy": "none"},
    {"lower_tiers": 3},
    {"write_policy": "back", "lower_tiers": 3, "promotion": "move"},
]


@pytest.fixture(params=HIERARCHIES, ids=lambda each: "-".join(map(str, each.values())))
def hierarchy(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of `Setup` for the tiers below memory: one or three, under each write policy."""
    chosen: dict[str, Any] = request.param
    return {"below": "dict", **chosen}
