"""Copies between an engine's pages and the cache's blocks, for one layer group.

An engine's page is `page_tokens` tokens of one layer. A stored block holds, layer by layer, its pages in the order of
the tokens; each page is copied as it is. Memory of the host is copied by `kvcairn.copying`, memory of a device by torch
on a stream of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcairn import copying
from kvcairn.errors import LayoutError, UnsupportedError

Numbers = npt.NDArray[np.int64]
NO_PAGE = 0  # the engine's null block, which holds nothing: leave it alone


@dataclass(frozen=True)
class Run:
    """Pages [low, high) of each of some blocks, all of which are there.

    Attributes:
        blocks: which blocks.
        pages: numbers of their pages, shape (blocks, high - low).
        low: first page of each block.
    """

    blocks: Numbers
    pages: Numbers
    low: int


def runs(pages: Numbers) -> Iterator[Run]:
    """Cut a table of page numbers, shape (blocks, pages of a block), into runs; `NO_PAGE` is left out."""
    patterns, which = np.unique(pages != NO_PAGE, axis=0, return_inverse=True)
    for number, pattern in enumerate(patterns):
        blocks = np.flatnonzero(which.reshape(-1) == number)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], pattern.astype(np.int8), [0]))))
        for low, high in edges.reshape(-1, 2).tolist():
            yield Run(blocks, pages[blocks, low:high], low)


class PageMemory:
    """The pages of one layer group in one worker.

    Attributes:
        page_bytes: bytes of one page of one layer.
        pages_per_block: pages of a stored block.
        page_count: pages of each layer.
    """

    def __init__(self, layers: Sequence[torch.Tensor], page_count: int, pages_per_block: int) -> None:
        """Look at the layers' memory, which stays the engine's.

        Args:
            layers: for each layer a view of shape (pages times a constant, ...), any strides.
            page_count: pages of each layer.
            pages_per_block: how many make a stored block.

        Raises:
            LayoutError: the layers differ in the size of a page.
            UnsupportedError: their elements lie further apart than one behind the other.
        """
        self._layers = [_by_page(layer, page_count) for layer in layers]
        self.page_bytes = self._layers[0][0].numel() * self._layers[0].element_size()
        self.pages_per_block, self.page_count = pages_per_block, page_count
        if any(layer[0].numel() * layer.element_size() != self.page_bytes for layer in self._layers):
            raise LayoutError("the layers of one group differ in the size of a page")
        self._pools = _joined([_pieces(layer) for layer in self._layers])
        self._is_host = self._layers[0].device.type == "cpu"
        self._stream = None if self._is_host else torch.cuda.Stream(self._layers[0].device)  # type: ignore[no-untyped-call]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in a block."""
        return self.page_bytes * self.pages_per_block

    def mark(self) -> Any:
        """Return a mark in the engine's work on its device; a copy that waits for it comes behind that work."""
        return None if self._is_host else torch.cuda.current_stream(self._layers[0].device).record_event()

    def store(self, arena: memoryview, offsets: Numbers, pages: Numbers, after: Any = None) -> None:
        """Copy pages into blocks; returns when the bytes are there.

        Args:
            arena: the cache's memory.
            offsets: where each block's part begins in it.
            pages: page numbers, shape (blocks, pages_per_block).
            after: a mark that the copies wait for.
        """
        if self._is_host:
            self._move(copying.gather, arena, offsets, pages)
        else:
            self._on_device(arena, offsets, pages, after, is_store=True)

    def load(self, arena: memoryview, offsets: Numbers, pages: Numbers, after: Any = None) -> None:
        """Copy blocks into pages; returns when the bytes are there. Pages that are `NO_PAGE` are left out."""
        if self._is_host:
            self._move(copying.scatter, arena, offsets, pages)
        else:
            self._on_device(arena, offsets, pages, after, is_store=False)

    def _move(self, copy: Any, arena: memoryview, offsets: Numbers, pages: Numbers) -> None:
        for run in runs(pages):
            begins, layer = offsets[run.blocks] + run.low * self.page_bytes, 0
            for pool in self._pools:
                layers = np.arange(layer, layer + pool.first.size)
                numbers = np.ascontiguousarray(pool.first[:, None] + run.pages[:, None]).reshape(-1)
                at = (begins[:, None] + layers * self.layer_bytes).reshape(-1)
                bases, stride = pool.pieces.bases, pool.pieces.stride_bytes
                copy(bases, pool.nbytes, numbers, stride, pool.pieces.nbytes, arena, at, copying.THREADS)
                layer += pool.first.size

    def _on_device(self, arena: memoryview, offsets: Numbers, pages: Numbers, after: Any, is_store: bool) -> None:
        host = torch.frombuffer(arena, dtype=torch.uint8)
        with torch.cuda.stream(self._stream):
            if after is not None:
                torch.cuda.current_stream().wait_event(after)
            for run in runs(pages):
                begins = offsets[run.blocks] + run.low * self.page_bytes
                for number, layer in enumerate(self._layers):
                    slots = [int(begin) + number * self.layer_bytes for begin in begins]
                    copy_layer(layer, run.pages, host, slots, is_store=is_store)
            torch.cuda.current_stream().synchronize()


def copy_layer(layer: torch.Tensor, pages: Numbers, host: torch.Tensor, slots: list[int], *, is_store: bool) -> None:
    """Copy the pages of one layer to or from slots of the host's memory, through one tensor on the layer's device.

    Args:
        layer: shape (pages, ...).
        pages: page numbers, shape (blocks, pages of each).
        host: the host's memory, bytes.
        slots: where each block's pages begin in it.
        is_store: from the layer to the host; else the other way.
    """
    where = torch.from_numpy(np.ascontiguousarray(pages.reshape(-1))).to(layer.device)
    shape = (where.numel(), *layer.shape[1:])
    staged = layer.index_select(0, where) if is_store else torch.empty(shape, dtype=layer.dtype, device=layer.device)
    rows = staged.contiguous().view(torch.uint8).view(len(slots), -1)
    for row, begin in zip(rows, slots, strict=True):
        part = host[begin : begin + row.numel()]
        if is_store:
            part.copy_(row, non_blocking=True)
        else:
            row.copy_(part, non_blocking=True)
    if not is_store:
        layer.index_copy_(0, where, staged)


def _by_page(layer: torch.Tensor, page_count: int) -> torch.Tensor:
    """View a layer with pages as its first axis: an attention kernel may cut a page into several blocks."""
    ratio, rest = divmod(layer.shape[0], page_count)
    if rest:
        raise LayoutError(f"{layer.shape[0]} kernel blocks do not make {page_count} pages")
    return layer if ratio == 1 else layer.view(page_count, ratio, *layer.shape[1:])


@dataclass(frozen=True)
class Pieces:
    """Where the pages of one layer lie: in one piece each, or, with heads before pages, in one for each head.

    Attributes:
        bases: addresses of the pieces of page 0.
        span_bytes: from a base to the end of the last page's piece.
        stride_bytes: from a page to the next.
        nbytes: of a piece.
    """

    bases: npt.NDArray[np.uint64]
    span_bytes: int
    stride_bytes: int
    nbytes: int


@dataclass(frozen=True)
class Pool:
    """Layers whose pages can be numbered together, so that one call copies them all.

    Attributes:
        pieces: of the first layer.
        first: number of each layer's page 0.
        nbytes: from the first layer's base to the end of the last page of all.
    """

    pieces: Pieces
    first: Numbers
    nbytes: int


def _joined(layers: list[Pieces]) -> list[Pool]:
    """Put all layers into one pool where each begins whole pages behind the first; else each into its own."""
    head = layers[0]
    steps = [int(each.bases[0]) - int(head.bases[0]) for each in layers]
    fits = all(
        each.bases.size == 1 and each.stride_bytes == head.stride_bytes and step >= 0 and not step % head.stride_bytes
        for each, step in zip(layers, steps, strict=True)
    )
    if not fits:
        return [Pool(each, np.zeros(1, dtype=np.int64), each.span_bytes) for each in layers]
    first = np.array([step // head.stride_bytes for step in steps], dtype=np.int64)
    return [Pool(head, first, max(step + each.span_bytes for each, step in zip(layers, steps, strict=True)))]


def _pieces(layer: torch.Tensor) -> Pieces:
    """Find the pieces of a layer's pages; a page's elements lie one behind the other in each."""
    size, piece, outer = layer.element_size(), 1, []
    for stride, length in sorted(zip(layer.stride()[1:], layer.shape[1:], strict=True)):
        if length == 1:
            continue
        if stride == piece:
            piece *= length
        else:
            outer.append((stride, length))
    if piece == 1 and outer:
        raise UnsupportedError(f"elements of a page lie {outer[0][0]} apart")
    starts = [sum(steps) for steps in itertools.product(*(range(0, s * n, s) for s, n in reversed(outer)))]
    bases = np.array([layer.data_ptr() + start * size for start in starts], dtype=np.uint64)
    stride_bytes = layer.stride(0) * size
    return Pieces(bases, (layer.shape[0] - 1) * stride_bytes + piece * size, stride_bytes, piece * size)
