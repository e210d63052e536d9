"""Engines in processes of their own, prompts, and settings of the cache."""

from __future__ import annotations

import json
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcairn import Cache, Config
from kvcairn.core.link import Direct
from kvcairn.core.open import open_core
from kvcairn.testing.faulty import Fault, FaultyTier
from kvcairn.tiers.base import Tier

ROOT = Path(__file__).parents[3]
MODELS = ROOT / ".venv-vllm" / "models"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in the engine's process, as it does on a GPU
}
BLOCK = 256
ANSWER_S = 300.0


class RemoteEngine:
    """Calls the methods of `engine.Engine` in another process."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        def call(**arguments: Any) -> Any:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"do": name} | arguments) + "\n")
            self._process.stdin.flush()
            return self.answer()

        return call

    def answer(self) -> Any:
        """Return the next answer; the end of the log where there is none."""
        try:
            line = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            raise AssertionError(f"the engine does not answer:\n{self.log()[-4000:]}") from None
        assert line, f"the engine has ended:\n{self.log()[-6000:]}"
        return json.loads(line)

    def tokens(self, *prompts: list[int], **arguments: Any) -> list[list[int]]:
        """Return greedy tokens."""
        tokens: list[list[int]] = self.generate(prompts=list(prompts), **arguments)["tokens"]
        return tokens

    def cached(self, *prompts: list[int], **arguments: Any) -> list[int]:
        """Return how many tokens of each prompt were not computed."""
        cached: list[int] = self.generate(prompts=list(prompts), **arguments)["cached"]
        return cached

    def log(self) -> str:
        """Return what the engine has logged."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._process.stdout.close()
        self._answers.put("")


@contextmanager
def engine(folder: Path, model: str = "tiny", block_size: int = 32, **settings: Any) -> Iterator[RemoteEngine]:
    """Run an engine; it is closed at the end of the `with`, as vLLM closes it."""
    arguments = {"model": str(MODELS / model), "block_size": block_size} | settings
    command = [sys.executable, "-m", "tests.engines.vllm.engine", json.dumps(arguments)]
    log = folder / f"engine-{len(list(folder.glob('engine-*')))}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
        )
    remote = RemoteEngine(process, log)
    try:
        assert remote.answer() == {"ready": True}
        yield remote
        if process.poll() is None:
            remote.close()
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(timeout=ANSWER_S) == 0, remote.log()[-4000:]
    finally:
        if process.poll() is None:
            remote.kill()


def cache(folder: Path | None = None, memory: str = "256 MiB", **settings: Any) -> dict[str, Any]:
    """Return settings of a cache in memory, and on disk where a folder is given."""
    tiers: list[dict[str, Any]] = [{"type": "memory", "capacity": memory}]
    if folder is not None:
        folder.mkdir(exist_ok=True)
        tiers.append({"type": "disk", "path": str(folder), "capacity": "512 MiB"})
    return {"tiers": tiers} | settings


@contextmanager
def faulty_disk(settings: dict[str, Any], *faults: Fault) -> Iterator[FaultyTier]:
    """Open the cache beforehand, with a disk tier that fails; an engine in this process finds it open, and joins."""
    config = Config.from_dict({name: value for name, value in settings.items() if name in Config.__struct_fields__})
    wrapped: list[FaultyTier] = []

    def wrap(tier: Tier) -> Tier:
        wrapped.append(FaultyTier(tier, faults))
        return wrapped[-1]

    with Cache(Direct(open_core(config, wrap=wrap)), config) as opened:
        Cache._opened[config] = opened
        try:
            yield wrapped[0]
        finally:
            wrapped[0].heal()


def prompt(length: int, seed: int, vocabulary: int = 500) -> list[int]:
    """Token ids, none of them special."""
    return random.Random(seed).choices(range(3, vocabulary), k=length)
