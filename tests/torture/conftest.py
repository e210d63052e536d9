"""The caches that every case runs over, and what every case does with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvcairn.testing.rig import BelowKind, LinkKind, Rig, Setup
from tests.torture.support import MakeRig


@pytest.fixture(params=["direct", "loopback"])
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
