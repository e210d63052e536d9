"""The package as a whole: its public names, what an import brings along, its layers and budgets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvcairn
from scripts import budgets

ROOT = Path(__file__).parent.parent
ENGINES = ("torch", "transformers", "vllm", "sglang", "triton")


def test_public_names_are_sorted_and_there() -> None:
    assert kvcairn.__all__ == sorted(kvcairn.__all__)
    assert [name for name in kvcairn.__all__ if not hasattr(kvcairn, name)] == []


def test_public_names_are_documented() -> None:
    classes = [value for name in kvcairn.__all__ if isinstance(value := getattr(kvcairn, name), type)]
    assert [kind.__name__ for kind in classes if not kind.__doc__] == []


@pytest.mark.parametrize("module", ["kvcairn", "kvcairn.cli", "kvcairn.testing"])
def test_import_loads_no_engine(module: str) -> None:
    program = f"import sys, {module}; print([m for m in {ENGINES!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_layers_hold() -> None:
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [str(linter), "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kept, 0 broken" in done.stdout


def test_budgets_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert budgets.main(ROOT / "src" / "kvcairn") == 0, capsys.readouterr().out
