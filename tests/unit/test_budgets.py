"""Each budget is broken once, in a piece of source written for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.budgets import check_source, main


def over(source: str, name: str = "index/tree.py") -> list[str]:
    return [message for _, message in check_source(source, name)]


def with_methods(count: int, name: str = "Tree", decorator: str = "") -> str:
    return f"class {name}:\n" + "".join(f"    {decorator}\n    def m{i}(self): ...\n" for i in range(count))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f():\n" + "    x = 1\n" * 60, "function f: 61 lines, at most 60"),
        ("class A:\n" + "    x = 1\n" * 300, "class A: 301 lines, at most 300"),
        ("x = 1\n" * 501, "file: 501 lines, at most 500"),
        (with_methods(16), "class Tree: 16 public methods, at most 15"),
        (with_methods(21, "Cache"), "class Cache: 21 public methods, at most 20"),
        (with_methods(9, decorator="@abstractmethod"), "class Tree: 9 abstract members, at most 8"),
        ("def f(a, b, c, d, *, e, f, g, h, i): ...", "function f: 9 parameters, at most 8"),
        ("try:\n    f()\nexcept Exception:\n    pass", "broad except outside transfer/executor.py"),
        ("try:\n    f()\nexcept (OSError, BaseException):\n    pass", "broad except outside transfer/executor.py"),
        ("try:\n    f()\nexcept:\n    pass", "broad except outside transfer/executor.py"),
        ("import os\nx = os.environ['A']", "environment read outside config.py"),
        ("import os\nx = os.getenv('A')", "environment read outside config.py"),
        ("from os import environ", "environment read outside config.py"),
        ("import torch", "torch imported outside adapters and demo"),
        ("def f():\n    from transformers import x", "transformers imported outside adapters and demo"),
        ("import kvcairn.testing", "kvcairn.testing imported by the product"),
        ("from kvcairn import testing", "kvcairn.testing imported by the product"),
        ("from kvcairn.testing.oracle import ByteOracle", "kvcairn.testing imported by the product"),
    ],
)
def test_over_budget_is_found(source: str, message: str) -> None:
    assert message in over(source)


def test_attributes_are_counted_over_all_methods() -> None:
    source = "class A:\n"
    for half in range(2):
        source += f"    def m{half}(self):\n" + "".join(f"        self.x{half}{i} = i\n" for i in range(6))
    assert any("class A: 12 attributes, at most 10" in message for message in over(source))
    assert over(source.replace("self.x1", "self.x0")) == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def f():\n" + "    x = 1\n" * 59, "index/tree.py"),
        (with_methods(15), "index/tree.py"),
        (with_methods(20, "Space"), "core/space.py"),
        (with_methods(16).replace("def m", "def _m"), "index/tree.py"),
        ("def f(self, a, b, c, d, e, f, g, h): ...", "index/tree.py"),
        ("try:\n    f()\nexcept Exception:\n    pass", "transfer/executor.py"),
        ("try:\n    f()\nexcept OSError:\n    pass", "tiers/disk/store.py"),
        ("import os\nx = os.environ['A']", "config.py"),
        ("import torch", "adapters/transformers/wrap.py"),
        ("import torchmetrics_like_name", "index/tree.py"),
        ("from kvcairn.testing.oracle import ByteOracle", "testing/__init__.py"),
    ],
)
def test_within_budget(source: str, name: str) -> None:
    assert over(source, name) == []


def test_exit_status_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.py").write_text("def f():\n    return 1\n")
    assert main(tmp_path) == 0
    assert "1 functions, median 2 lines, longest 2; 0 over" in capsys.readouterr().out
    (tmp_path / "bad.py").write_text("import torch\n")
    assert main(tmp_path) == 1
    assert f"{tmp_path / 'bad.py'}:1: torch imported" in capsys.readouterr().out
