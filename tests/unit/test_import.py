"""What `import kvcairn` brings along: little, for every engine process pays for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = "import sys, kvcairn; print(*sys.modules)"
ENGINES = {"torch", "transformers", "safetensors", "accelerate", "gguf", "vllm", "sglang"}
TOOLS = {"typer", "click", "rich", "prometheus_client", "pytest", "hypothesis"}
SERVERS = {"asyncio", "http", "socket", "socketserver", "sqlite3"}  # what only the disk or the daemon needs
PACKAGES = {"importlib.metadata", "email", "zipfile"}  # needed to look for plug-ins
OURS = {
    f"kvcairn.{name}"
    for name in ("adapters", "bench", "cli", "daemon", "demo", "doctor", "remote", "testing", "tiers.disk")
}


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


def test_settings_of_what_is_built_in_look_for_no_plug_ins() -> None:
    settings = {"tiers": [{"type": "memory", "capacity": "1 MiB", "eviction": "arc"}]}
    program = (
        f"import sys, kvcairn; kvcairn.Cache.open(kvcairn.Config.from_dict({settings})).close(); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert not PACKAGES & set(done.stdout.split())


@pytest.mark.parametrize(
    "heavy", [ENGINES, TOOLS, SERVERS, PACKAGES, OURS], ids=["engines", "tools", "servers", "packages", "ours"]
)
def test_importing_loads_nothing_that_most_do_not_need(loaded: set[str], heavy: set[str]) -> None:
    assert "kvcairn.cache" in loaded and "numpy" in loaded
    assert not heavy & loaded
