"""Tests on a real SGLang: `scripts/setup-sglang` makes the environment that they run in."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

SHIM = Path(__file__).parent / "shim"

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SHIM), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(SHIM))
    import host_copies

    host_copies.install()
