from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvcairn.testing.rig import Rig, Setup

MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    """Make caches on a bench, closed at the end of the test; the arguments are those of `Setup`."""
    with ExitStack() as stack:

        def make(**options: Any) -> Rig:
            folder = tmp_path / f"tier{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            return stack.enter_context(Rig(Setup(**options), folder))

        yield make


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    """A cache with a thousand slots of memory and nothing below."""
    return make_rig()


Install = Callable[[str, str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package of one module that offers one class: (module, its text, entry point group, entry point)."""

    def add(module: str, text: str, group: str, point: str) -> None:
        place = tmp_path / f"site-{module}"
        info = place / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (place / f"{module}.py").write_text(text)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{point}\n")
        monkeypatch.syspath_prepend(str(place))

    return add
