"""Tests on a real vLLM: `scripts/setup-vllm` makes the environment that they run in."""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.engines.vllm.kit import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
