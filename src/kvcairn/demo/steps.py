"""The demo from the first to the last row."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvcairn.demo.rows import Row
from kvcairn.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from kvcairn.demo.measure import Measured
    from kvcairn.demo.weights import DemoModel

_NEEDED = ("torch", "transformers")
_NEEDED_BYTES = 2 << 30
_DISK_PREFIX = "demo-disk-"
_LEFT_BEHIND_S = 3600  # no run takes that long


def run(emit: Callable[[Row], None], *, workdir: Path | None = None, console: Console | None = None) -> list[Row]:
    """Run the demo; blocks for one to four minutes.

    Args:
        emit: called with each row as soon as it is known, on the calling thread.
        workdir: where the converted weights are kept (540 MB) and the disk tier lies while the demo runs (at most
            600 MB); default is `share/kvcairn` in the Python environment.
        console: for progress and remarks; default is standard error.

    Returns:
        The rows `recompute`, `memory`, `disk`, `damaged`. It is for the caller to look at `identical`.

    Raises:
        UnsupportedError: torch or transformers is not installed.
        ConfigError: the working folder cannot be written.
        KVCairnError: the second process failed.
    """
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise UnsupportedError(f"the demo needs {' and '.join(missing)}: in a clone: pip install '.[demo]'")
    console = console or Console(stderr=True)
    folder = working_folder(workdir, lambda line: console.print(line, highlight=False))
    rows: list[Row] = []

    def take(row: Row) -> None:
        rows.append(row)
        emit(row)

    with tempfile.TemporaryDirectory(dir=folder, prefix=_DISK_PREFIX) as disk:
        _Demo(folder, Path(disk), console).run(take)
    return rows


class _Demo:
    """One run: the model, the disk tier's folder, and the tokens that all rows have to repeat."""

    def __init__(self, folder: Path, disk: Path, console: Console) -> None:
        from kvcairn.demo import measure, weights

        self._measure, self._disk, self._console = measure, disk, console
        measure.quiet()
        with self._step("Preparing the model (converting its weights takes half a minute the first time)"):
            self._weights = weights.prepare(folder, console.print)
            self._demo: DemoModel = weights.load(self._weights)
        self._expected: list[int] = []

    def run(self, take: Callable[[Row], None]) -> None:
        """Make the four rows, in order."""
        keys = self._in_this_process(take)
        with self._step("Loading from disk in a new process"):
            row = self._in_new_process("disk")
        take(row)
        damaged = len(keys) // 2
        with self._step(f"Damaging block {damaged} of {len(keys)} on disk, and loading in a new process"):
            self._damage(keys[damaged])
            row = self._in_new_process("damaged", damaged)
        take(row)

    def _in_this_process(self, take: Callable[[Row], None]) -> list[bytes]:
        """Compute the prompt with transformers alone, store its KV, load it back; return the block keys."""
        from transformers import DynamicCache

        from kvcairn.adapters.transformers.anatomy import generate_cache_argument

        demo, measure = self._demo, self._measure
        pasts: list[Any] = []

        def plain(*args: object, **kwargs: object) -> object:
            pasts[:] = [DynamicCache(config=demo.model.config)]
            return demo.model.generate(*args, **kwargs, **{generate_cache_argument(): pasts[0]})

        with self._step(f"Computing {len(demo.prompt):,} tokens without a cache"):
            measured = measure.timed(demo, plain)
        self._expected = measured.tokens
        take(self._row("recompute", measured, {}))
        with measure.open_cache(self._disk, demo) as cache:
            model = measure.cached(demo, cache)
            with self._step("Storing, in memory and on disk"):
                model.store(demo.prompt, pasts.pop())
                cache.drain()
            with self._step("Loading from memory"):
                measured = measure.timed(demo, model.generate)
            take(self._row("memory", measured, model.last_reuse.by_tier))
            return list(model.space.keys(demo.prompt))

    def _in_new_process(self, name: str, damaged_block: int | None = None) -> Row:
        from kvcairn.demo.worker import Task, start

        result = start(Task(weights=str(self._weights) if self._weights else None, disk=str(self._disk)))
        measured = self._measure.Measured(result.ttft_s, result.tokens)
        return self._row(name, measured, result.reused_tokens, damaged_block)

    def _damage(self, key: bytes) -> None:
        from kvcairn.demo.damage import flip_bit

        flip_bit(self._disk, key)

    def _row(self, name: str, measured: Measured, reused: dict[str, int], damaged_block: int | None = None) -> Row:
        return Row(
            row=name,
            ttft_s=round(measured.ttft_s, 4),
            prompt_tokens=len(self._demo.prompt),
            reused_tokens=reused,
            identical=measured.tokens == self._expected,
            model=self._demo.name,
            new_tokens=len(measured.tokens),
            damaged_block=damaged_block,
            answer=self._demo.decode(measured.tokens),
        )

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        """Show what is going on, moving where somebody looks, else as a line."""
        if not self._console.is_terminal:
            self._console.print(f"{what} ...", highlight=False)
            yield
            return
        with self._console.status(f"{what} ..."):
            yield


def working_folder(workdir: Path | None, remark: Callable[[str], None]) -> Path:
    """Return the folder to work in: made, writable, with room, and without what a killed run left in it.

    One that is named is made, and that is said, where its parent is there: a mistyped path is none that was meant.

    Raises:
        ConfigError: its parent is missing, it cannot be written, or has less than 2 GiB free.
    """
    folder = workdir or Path(sys.prefix) / "share" / "kvcairn"
    if workdir is not None and not workdir.exists():
        if not workdir.absolute().parent.is_dir():
            reason = f"there is no folder {workdir.absolute().parent} to make it in"
            raise ConfigError("workdir", reason, str(workdir), "name an existing folder")
        remark(f"Making the folder {workdir.absolute()}; the model's weights stay in it (540 MB).")
    if folder.exists() and not folder.is_dir():
        raise ConfigError("workdir", "not a folder", str(folder), "name a folder")
    try:
        folder.mkdir(parents=workdir is None, exist_ok=True)
        for left in (*folder.glob(f"{_DISK_PREFIX}*"), *folder.glob("converting-*")):
            if time.time() - left.stat().st_mtime > _LEFT_BEHIND_S:
                shutil.rmtree(left, ignore_errors=True)
        free_bytes = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = f"cannot be written: {error.strerror}"
        raise ConfigError("workdir", reason, str(folder), "name another folder") from error
    if free_bytes < _NEEDED_BYTES:
        reason = f"has {free_bytes >> 20} MiB free, and the demo needs {_NEEDED_BYTES >> 20}"
        raise ConfigError("workdir", reason, str(folder), "name another folder")
    return folder
