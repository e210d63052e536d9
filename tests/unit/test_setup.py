"""`scripts/setup` looks at the interpreter before it makes anything, and at the environment that is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# Says that it is 3.10, as an interpreter of that version does; makes no environment.
OLD = """#!/bin/sh
case "$2" in *"< (3, 11)"*) exit 1 ;; *) echo 3.10 ;; esac
"""
# A real interpreter, but what it makes an environment from installs nothing.
NEW = f"""#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then
    mkdir -p "$3/bin"
    printf '#!/bin/sh\\n[ "$1 $2" = "-m pip" ] || exec {sys.executable} "$@"\\n' >"$3/bin/python"
    chmod +x "$3/bin/python"
else
    exec {sys.executable} "$@"
fi
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What the script reads of a clone."""
    place = tmp_path / "clone"
    for name in ("scripts/setup", "pyproject.toml", "native/CMakeLists.txt", "native/third_party/xxhash/xxhash.h"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place / name)
    shutil.copytree(ROOT / "native" / "src", place / "native" / "src")
    return place


def interpreter(place: Path, text: str) -> str:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    place.chmod(0o755)
    return str(place)


def setup(clone: Path, python: str | None = None, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path or os.environ["PATH"]} | ({"PYTHON": python} if python is not None else {})
    command = [str(clone / "scripts" / "setup")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("is_set_up", [False, True])
def test_an_interpreter_that_is_not_there_is_one_clear_line(clone: Path, is_set_up: bool) -> None:
    if is_set_up:
        assert setup(clone, interpreter(clone / "bin" / "new", NEW)).returncode == 0
    done = setup(clone, "/nowhere/python3.12")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "setup: PYTHON=/nowhere/python3.12 is no Python that runs; set it to one of 3.11 or newer, or leave it out"
    ]
    assert (clone / ".venv").exists() == is_set_up


def test_an_interpreter_that_is_too_old_makes_nothing(clone: Path) -> None:
    old = interpreter(clone / "bin" / "python3.10", OLD)
    done = setup(clone, old)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"setup: PYTHON={old} is Python 3.10; 3.11 or newer is needed"]
    assert not (clone / ".venv").exists()


def test_an_environment_of_an_old_python_is_made_anew(clone: Path) -> None:
    new = interpreter(clone / "bin" / "new", NEW)
    interpreter(clone / ".venv" / "bin" / "python", OLD)
    (clone / ".venv" / "left").touch()
    done = setup(clone, new)
    assert done.returncode == 0, done.stderr
    assert ".venv is of Python 3.10, it is made anew" in done.stderr
    assert not (clone / ".venv" / "left").exists()
    assert (clone / ".venv" / ".setup-stamp").exists()


def test_what_is_set_up_is_left_alone(clone: Path) -> None:
    new = interpreter(clone / "bin" / "new", NEW)
    assert setup(clone, new).returncode == 0
    (clone / ".venv" / "left").touch()
    again = setup(clone, new)
    assert (again.returncode, again.stderr) == (0, "")
    assert (clone / ".venv" / "left").exists()


def test_without_any_python_that_will_do_it_says_so(clone: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "env", "dirname", "flock", "cat", "sha256sum", "cut"):
        found = shutil.which(name)
        assert found
        (tools / name).symlink_to(found)
    interpreter(tools / "python3", OLD)
    done = setup(clone, path=str(tools))
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["setup: no Python 3.11 or newer found; install one, or set PYTHON to it"]
