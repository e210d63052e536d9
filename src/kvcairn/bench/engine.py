"""Bench `engine`: a real engine with and without the cache. The engine runs in processes of its own."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Final

from kvcairn.bench.figures import MOST_SPREAD, Figure, quartiles, spread
from kvcairn.errors import ConfigError, KVCairnError

ENGINES: Final = ("vllm",)
PROMPT_TOKENS: Final = 2060  # eight blocks of 256, and 12 tokens
PAIRS: Final = 5
COPY_PAIRS: Final = 21
# Under each write policy of the memory tier: prompts by number, in an engine whose own memory holds four of them. Two
# come back at once, two when the engine has forgotten them.
WORKLOAD: Final = (0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 0, 2)
WORKLOAD_TOKENS: Final = 1036  # four blocks, and 12 tokens
WORKLOAD_PAGES: Final = 136
_BENCH: Final = "engine"
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker in the scheduler's process, so that both can be timed
}


class Remote:
    """An engine in another process; every method asks it and waits for the answer."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        """Wait until it has started."""
        self._process, self._log = process, log
        self.ask(None)

    def ask(self, command: dict[str, Any] | None) -> Any:
        """Send a command; return the answer.

        Raises:
            KVCairnError: the engine has ended; the message ends with the end of its log.
        """
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        if command is not None:
            asked.write(json.dumps(command) + "\n")
            asked.flush()
        line = answers.readline()
        if not line:
            last = self._log.read_text(errors="replace").strip().splitlines()[-3:]
            raise KVCairnError(f"the engine has ended: {' / '.join(last)}")
        return json.loads(line)

    def run(self, seed: int, new: int = 1, tokens: int = PROMPT_TOKENS) -> Any:
        """Run the prompt that follows from `seed`."""
        return self.ask({"do": "run", "tokens": tokens, "seed": seed, "new": new})

    def first_s(self, seed: int, cached: int) -> float:
        """Return the time to the first token of a prompt.

        Raises:
            KVCairnError: not as many tokens as expected came from a cache.
        """
        answer = self.run(seed)
        if answer["cached"] != cached:
            raise KVCairnError(f"{cached} tokens should have been loaded, {answer['cached']} were")
        return float(answer["first_s"])

    def forget(self, tier: str | None = None) -> None:
        """Forget the engine's own cache, and what is on one tier."""
        self.ask({"do": "forget", "tier": tier})


@contextmanager
def started(engine: str, folder: Path, settings: dict[str, Any]) -> Iterator[Remote]:
    """Start an engine; it is closed at the end."""
    variables = [f"{name}={value}" for name, value in _ENVIRONMENT.items()]
    program = [sys.executable, "-m", f"kvcairn.adapters.{engine}.measured", json.dumps(settings)]
    log = folder / f"engine-{len(list(folder.glob('*.log')))}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            ["env", *variables, *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
        )
    try:
        remote = Remote(process, log)
        yield remote
        remote.ask({"do": "close"})
    finally:
        for pipe in (process.stdin, process.stdout):
            _close(pipe)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_engine(engine: str, model: str | None = None, pairs: int = PAIRS) -> Iterator[Figure]:
    """Yield the figures of one engine as they are measured. Blocks for minutes; takes about 5 GiB of memory.

    Args:
        engine: one of `ENGINES`.
        model: folder or hub name; random weights in the shape of SmolLM2-135M unless given.
        pairs: of each figure.

    Raises:
        ConfigError: there is no such engine.
        UnsupportedError: it is not installed, or is none of the supported versions.
    """
    if engine not in ENGINES:
        raise ConfigError("engine", f"expected one of: {', '.join(ENGINES)}", engine)
    importlib.import_module(f"kvcairn.adapters.{engine}.versions").check_version()
    with tempfile.TemporaryDirectory(prefix="kvcairn-bench-") as name:
        folder = Path(name)
        (folder / "disk").mkdir()
        (folder / "model").mkdir()
        cache = {
            "tiers": [
                {"type": "memory", "capacity": "2 GiB"},
                {"type": "disk", "path": str(folder / "disk"), "capacity": "4 GiB"},
            ],
        }
        settings: dict[str, Any] = {"model": model, "folder": str(folder / "model"), "cache": cache}
        settings |= {"dtype": "auto" if model else "float32", "block_size": 32, "kv_bytes": 1 << 29}
        if model is None:
            cache["weights"] = "random"  # type: ignore[assignment]
        yield from _first_tokens(engine, folder, settings, pairs)
        yield from _costs(engine, folder, settings, pairs)
        yield from _copied(engine, folder, settings)


def _first_tokens(engine: str, folder: Path, settings: dict[str, Any], pairs: int) -> Iterator[Figure]:
    """Time to the first token: computed, from memory, from disk; then in a new process."""
    loaded = PROMPT_TOKENS // 256 * 256
    computed, memory, disk = [], [], []
    with started(engine, folder, settings) as e:
        e.run(seed=0)  # unrelated, for what is made at first use
        for pair in range(1, pairs + 1):
            computed.append(e.first_s(pair, 0))
            e.forget()
            memory.append(e.first_s(pair, loaded))
            e.forget("memory")
            disk.append(e.first_s(pair, loaded))
            e.forget()
        copies = e.ask({"do": "copy", "runs": COPY_PAIRS})
    yield _seconds("ttft_recompute", computed, computed, None)
    yield _seconds("ttft_memory", memory, computed, 0.1)
    yield _seconds("ttft_disk", disk, computed, 0.15)
    again = []
    with started(engine, folder, settings) as e:
        e.run(seed=1000)
        for pair in range(1, pairs + 1):
            again.append(e.first_s(pair, loaded))
            e.forget()
    yield _seconds("ttft_disk_new_process", again, computed, None)
    yield _copy("copy", "store", copies)
    yield _copy("copy_back", "load", copies)


def _costs(engine: str, folder: Path, settings: dict[str, Any], pairs: int) -> Iterator[Figure]:
    """CPU time of requests that find nothing, with the cache and without; and the share of our hooks in a step."""
    ours: list[float] = []
    alone: list[float] = []
    shares: list[float] = []
    with ExitStack() as stack:
        with_cache = stack.enter_context(started(engine, folder, settings))
        without = stack.enter_context(started(engine, folder, settings | {"cache": None}))
        for turn in range(pairs + 1):
            order = (with_cache, without) if turn % 2 else (without, with_cache)
            for each in order:
                answer = each.run(seed=2000 + turn, new=4)
                if turn == 0:
                    continue
                (ours if each is with_cache else alone).append(answer["cpu_s"])
                if each is with_cache:
                    shares.append(answer["hooks_s"] / answer["steps_s"])
    yield _seconds("cpu_no_hit", ours, alone, 1.05)
    low, value, high = quartiles(shares)
    yield Figure(
        bench=_BENCH, name="hooks", value=100 * value, unit="%", runs=len(shares), limit=2.0,
        low=100 * low, high=100 * high,
    )  # fmt: skip


def _copied(engine: str, folder: Path, settings: dict[str, Any]) -> Iterator[Figure]:
    """Bytes that each write policy of the memory tier copies out of the engine's memory, on one workload."""
    copied: dict[str, float] = {}
    for policy in ("through", "selective", "back"):
        memory = {"type": "memory", "capacity": "2 GiB", "write_policy": policy}
        more = {"cache": settings["cache"] | {"tiers": [memory]}, "pages": WORKLOAD_PAGES}
        with started(engine, folder, settings | more) as e:
            for seed in WORKLOAD:
                e.run(seed, tokens=WORKLOAD_TOKENS)
            copied[policy] = e.ask({"do": "copied"}) / (1 << 20)
        through = copied["through"]
        yield Figure(
            bench=_BENCH, name=f"copied_{policy}", value=copied[policy], unit="MiB", reference=through,
            ratio=copied[policy] / through, runs=len(WORKLOAD),
        )  # fmt: skip


def _seconds(name: str, values: list[float], reference: list[float], limit: float | None) -> Figure:
    low, value, high = quartiles(values)
    return Figure(
        bench=_BENCH,
        name=name,
        value=value,
        unit="s",
        reference=statistics.median(reference),
        ratio=statistics.median(a / b for a, b in zip(values, reference, strict=True)),
        runs=len(values),
        limit=limit,
        low=low,
        high=high,
        spread=spread(reference),
        noisy=spread(reference) > MOST_SPREAD,
    )


def _copy(name: str, way: str, copies: dict[str, Any]) -> Figure:
    nbytes, ours, plain = copies["bytes"], copies["ns"][way], copies["ns"]["plain"]
    low, value, high = quartiles([nbytes / ns for ns in ours])
    return Figure(
        bench=_BENCH,
        name=name,
        value=value,
        unit="GB/s",
        reference=statistics.median(nbytes / ns for ns in plain),
        ratio=statistics.median(b / a for a, b in zip(ours, plain, strict=True)),
        runs=len(ours),
        limit=0.9,
        low=low,
        high=high,
        spread=spread(plain),
        noisy=spread(plain) > MOST_SPREAD,
    )


def _close(pipe: IO[str] | None) -> None:
    try:
        if pipe is not None:
            pipe.close()
    except BrokenPipeError:  # it has ended before it read all
        return
