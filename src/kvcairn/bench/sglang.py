"""Bench `engine` for SGLang: its own tree, controller and host pool, with HiCacheFile and our storage behind them."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvcairn.adapters.sglang import rig
from kvcairn.adapters.sglang.arguments import DOOR, MODULE
from kvcairn.adapters.sglang.keys import block_keys
from kvcairn.adapters.sglang.settings import NAME
from kvcairn.bench.figures import Figure, Time, latency, measure, rate, timed
from kvcairn.cache import Cache
from kvcairn.config import Config
from kvcairn.errors import KVCairnError
from kvcairn.layout import KVLayout, SpaceDescriptor
from kvcairn.memory.arena import Arena
from kvcairn.types import UNKNOWN

MiB: Final = 1 << 20
PAIRS: Final = 9
PAGE_TOKENS: Final = 64
HEADS, HEAD_DIM = 8, 128  # of Llama-3.1-8B
CALL_PAGES: Final = 128  # SGLang's own limit
ASKED_KEYS: Final = 4096
PIECE_BYTES: Final = 16 * MiB
THREADS: Final = 4
_BENCH: Final = "engine"


def run_sglang(
    path: Path | None = None, *, layers: int = 32, tokens: int = 2048, pairs: int = PAIRS, known: int = 1_000_000
) -> Iterator[Figure]:
    """Yield the figures of SGLang's storage as they are measured. Blocks for minutes; takes some GiB below `path`.

    Args:
        path: folder on the file system to measure; the one for temporary files unless given.
        layers: layers of the model, of eight heads of 128 in bfloat16.
        tokens: tokens of one measurement, in pages of 64.
        pairs: measurements of each figure.
        known: stored pages among which 4,096 are asked for.

    Raises:
        UnsupportedError: there is no SGLang that the adapter works with.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvcairn-bench-", dir=path))
    with ExitStack() as at_end:
        at_end.callback(shutil.rmtree, folder, ignore_errors=True)
        at_end.enter_context(rig.one_rank())
        ours = Ours(folder / "ours", layers, tokens)
        at_end.callback(ours.close)
        file = HiCacheFile(folder / "file", layers, tokens)
        at_end.callback(file.close)
        raw = Raw(folder / "raw", ours.nbytes)
        at_end.callback(raw.close)
        for name, limit, other in (("", 1.5, file), ("_device", 0.8, raw)):
            yield rate(_BENCH, f"l3_write{name}", ours.nbytes, limit, measure(ours.write, other.write, pairs=pairs))
            ours.write()
            other.write()
            yield rate(_BENCH, f"l3_read{name}", ours.nbytes, limit, measure(ours.read, other.read, pairs=pairs))
        yield from _in_memory(layers, tokens, pairs)
    yield _exists(known, pairs)


class Side:
    """A tree with its controller and host pool, and a storage behind it that is called as the controller does."""

    def __init__(self, folder: Path, layers: int, tokens: int, storage: tuple[str, dict[str, Any]]) -> None:
        """Make a host pool that holds the tokens twice, full of random bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.controller = rig.controller(_shape(layers, tokens), *storage)
        self._pages = tokens // PAGE_TOKENS
        pool = self.controller.mem_pool_host.anchor_entry.host_pool
        page_bytes = sum(pool.get_page_buffer_meta(rig.indices(0, 1, PAGE_TOKENS))[1])
        self.nbytes = page_bytes * self._pages
        words = rig.words(pool.kv_buffer)
        words[:] = np.random.default_rng(1).integers(0, 1 << 63, words.size, dtype=np.int64)
        self._turn = 0

    def keys(self) -> list[str]:
        """Return the page hashes of this turn."""
        return [hashlib.sha256(f"{self._turn} {page}".encode()).hexdigest() for page in range(self._pages)]

    def set_pages(self) -> None:
        """Store the pages of this turn, in calls as SGLang makes them.

        Raises:
            KVCairnError: one was not stored.
        """
        keys = self.keys()
        for begin in range(0, len(keys), CALL_PAGES):
            part = keys[begin : begin + CALL_PAGES]
            if not self.controller.page_set_func(part, rig.indices(begin, len(part), PAGE_TOKENS)):
                raise KVCairnError("a page was not stored")

    def get_pages(self) -> None:
        """Load the pages of this turn; raises as `set_pages`."""
        keys = self.keys()
        for begin in range(0, len(keys), CALL_PAGES):
            part = keys[begin : begin + CALL_PAGES]
            if self.controller.page_get_func(_Request(), part, rig.indices(begin, len(part), PAGE_TOKENS)) != len(part):
                raise KVCairnError("a page was not loaded")

    def write(self) -> Time:
        """Store new pages until they are on the device."""
        self.forget()
        self._turn += 1

        def store() -> None:
            self.set_pages()
            self.finish()
            _each_file(self.folder, os.fdatasync)

        return timed(store)

    def read(self) -> Time:
        """Load them, with nothing of them in the system's cache."""
        self.drop()
        _each_file(self.folder, lambda file: os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED))
        return timed(self.get_pages)

    def finish(self) -> None:
        """Wait until what was stored has been written."""

    def drop(self) -> None:
        """Forget what is in memory."""

    def forget(self) -> None:
        """Forget all that was stored."""
        self.controller.storage_backend.clear()

    def close(self) -> None:
        """End the storage and its threads."""
        self.controller.detach_storage_backend()


class HiCacheFile(Side):
    """SGLang's own storage: a file for each page."""

    def __init__(self, folder: Path, layers: int, tokens: int) -> None:
        """Store in that folder."""
        super().__init__(folder, layers, tokens, ("file", {"file_storage_path": str(folder)}))


class Ours(Side):
    """`KVCairnStorage` with a disk tier, or with other tiers."""

    def __init__(self, folder: Path, layers: int, tokens: int, tiers: list[dict[str, Any]] | None = None) -> None:
        """Store in that folder, with the settings' defaults."""
        folder.mkdir(parents=True, exist_ok=True)
        room = 4 * layers * tokens * 2 * HEADS * HEAD_DIM * 2 + 64 * MiB
        disk = {"type": "disk", "path": str(folder), "capacity": room}
        settings = {"tiers": tiers or [disk], "model": "bench", "weights": "bench", "timeout_base": 60}
        door = {"backend_name": "kvcairn", "module_path": MODULE, "class_name": DOOR, "interface_v1": 1}
        super().__init__(folder, layers, tokens, ("dynamic", door | {NAME: settings}))

    @property
    def cache(self) -> Cache:
        """The cache behind it."""
        cache: Cache = self.controller.storage_backend.cache
        return cache

    def finish(self) -> None:
        """Wait for the disk tier."""
        self.cache.drain(tier="disk")

    def drop(self) -> None:
        """Empty the write buffer."""
        self.cache.clear(tier="memory")


class Raw:
    """As many bytes to and from one file, with nothing but direct I/O on four threads."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        """Write the file once, so that no turn is the first."""
        folder.mkdir()
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0)
        self._file = os.open(folder / "raw", flags, 0o600)
        self._pieces = range(0, -(-nbytes // PIECE_BYTES) * PIECE_BYTES, PIECE_BYTES)
        self._arena = Arena(THREADS * PIECE_BYTES)
        self._arena.array[:] = 7
        self._pool = ThreadPoolExecutor(THREADS)
        self.write()

    def write(self) -> Time:
        """Write all of it, to the device."""

        def write() -> None:
            self._all(os.pwritev)
            os.fdatasync(self._file)

        return timed(write)

    def read(self) -> Time:
        """Read all of it."""
        return timed(lambda: self._all(os.preadv))

    def close(self) -> None:
        """Close the file."""
        self._pool.shutdown()
        os.close(self._file)
        self._arena.close()

    def _all(self, move: Any) -> None:
        def one(begin: int) -> None:
            at = begin // PIECE_BYTES % THREADS * PIECE_BYTES
            if move(self._file, [self._arena.view[at : at + PIECE_BYTES]], begin) != PIECE_BYTES:
                raise KVCairnError("a piece was not moved whole")

        list(self._pool.map(one, self._pieces))


def _shape(layers: int, tokens: int) -> rig.Shape:
    return rig.Shape(layers=layers, heads=HEADS, head_dim=HEAD_DIM, tokens=tokens, page_tokens=PAGE_TOKENS)


class _Request:
    """What `page_get_func` asks of a request."""

    request_id = "bench"

    def is_terminated(self) -> bool:
        return False


def _in_memory(layers: int, tokens: int, pairs: int) -> Iterator[Figure]:
    """What a call of SGLang takes where our memory tier has, or gets, the pages: beside one copy of as many bytes."""
    folder = Path(tempfile.mkdtemp(prefix="kvcairn-bench-"))
    room = layers * tokens * 2 * HEADS * HEAD_DIM * 2
    side = Ours(folder, layers, tokens, [{"type": "memory", "capacity": 3 * room + 64 * MiB}])
    from_, to = np.ones(side.nbytes, np.uint8), np.zeros(side.nbytes, np.uint8)

    def plain() -> Time:
        return timed(lambda: np.copyto(to, from_))

    def store() -> Time:
        side.forget()
        return timed(side.set_pages)

    try:
        store()
        yield rate(_BENCH, "l2_store", side.nbytes, 0.85, measure(store, plain, pairs=pairs))
        yield rate(_BENCH, "l2_load", side.nbytes, 0.85, measure(lambda: timed(side.get_pages), plain, pairs=pairs))
    finally:
        side.close()
        shutil.rmtree(folder, ignore_errors=True)


def _exists(known: int, pairs: int) -> Figure:
    """What `batch_exists` takes among many stored pages, the keys' hexadecimal digits included."""
    memory = {"type": "memory", "capacity": known * 4096 + 64 * MiB, "prefault": False}
    layout = KVLayout.full(layers=1, kv_heads=1, head_dim=8, dtype="bfloat16")
    with Cache.open(Config.from_dict({"tiers": [memory]})) as cache:
        space = cache.space(SpaceDescriptor(model="bench", weights="bench", layout=layout, block_tokens=1))
        data = np.random.default_rng(2).integers(0, 256, (known, 32), dtype=np.uint8)
        keys = [row.tobytes() for row in data]
        for begin in range(0, known, 1 << 14):
            space.reserve(keys[begin : begin + (1 << 14)], parent=UNKNOWN).commit()
        asked = [key.hex() for key in keys[known // 2 : known // 2 + ASKED_KEYS]]
        there = set(asked)

        def ours() -> Time:
            return timed(lambda: space.contains(block_keys(asked)))

        def reference() -> Time:
            return timed(lambda: all(key in there for key in asked))

        return latency(_BENCH, "batch_exists_4096", "ms", 5.0, measure(ours, reference, pairs=pairs, by_cpu=True))


def _each_file(folder: Path, act: Any) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            act(file)
            os.close(file)
