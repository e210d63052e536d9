"""Moves blocks between the cache's arena and a model's KV tensors: whole layers, runs of blocks.

Tensors in the host's memory are moved by the native core, all others, and all where there is none, by torch.

A block's part holds for each layer K `[token][head][dim]`, then V. A layer tensor is `[row, head, column, dim]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcairn import copying
from kvcairn.adapters.transformers.anatomy import Anatomy

LayerKV = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Run:
    """Blocks that follow one another in the sequence and lie at equal distances in the arena.

    Attributes:
        block: number of the first block.
        count: how many.
        offset_bytes: where the first lies.
        stride_bytes: distance from one to the next.
    """

    block: int
    count: int
    offset_bytes: int
    stride_bytes: int


def runs(blocks: Sequence[int], offsets: Sequence[int]) -> Iterator[Run]:
    """Cut blocks and their offsets into runs, so that a run is copied by one call."""
    start = 0
    while start < len(blocks):
        end, stride = start + 1, 0
        while end < len(blocks) and blocks[end] == blocks[end - 1] + 1:
            step = offsets[end] - offsets[end - 1]
            if step <= 0 or (stride and step != stride):
                break
            stride, end = step, end + 1
        yield Run(blocks[start], end - start, offsets[start], stride)
        start = end


class BlockMover:
    """Copies blocks of one space. Any thread; holds no buffer between calls."""

    def __init__(self, anatomy: Anatomy, block_tokens: int) -> None:
        self._anatomy = anatomy
        self._block_tokens = block_tokens
        self._layout = anatomy.layout

    @torch.no_grad()
    def load(self, arena: Any, found: Sequence[Run], layers: Sequence[LayerKV], row: int, column: int) -> None:
        """Copy runs of blocks into `layers`; block 0 begins at `column` of `row`."""
        if self._is_in_host_memory(layers):
            self._move(copying.scatter, arena, found, layers, row, column)
            return
        for stored, computed in self._pairs(arena, found, layers, row, column):
            computed.copy_(stored)

    @torch.no_grad()
    def store(self, arena: Any, wanted: Sequence[Run], layers: Sequence[LayerKV], row: int, column: int) -> None:
        """Copy runs of blocks from `layers` into the arena; returns when the bytes are there."""
        if self._is_in_host_memory(layers):
            self._move(copying.gather, arena, wanted, layers, row, column)
            return
        for stored, computed in self._pairs(arena, wanted, layers, row, column):
            stored.copy_(computed)

    def _is_in_host_memory(self, layers: Sequence[LayerKV]) -> bool:
        """Whether the native core is there and can reach the tensors, byte by byte as they are stored."""
        return copying.IS_NATIVE and all(
            tensor.device.type == "cpu"
            and tensor.dtype == self._anatomy.dtype
            and tensor.stride(3) == 1
            and tensor.stride(2) >= tensor.shape[3]
            for pair in layers
            for tensor in pair
        )

    def _move(
        self,
        copy: Callable[..., None],
        arena: Any,
        wanted: Sequence[Run],
        layers: Sequence[LayerKV],
        row: int,
        column: int,
    ) -> None:
        """Copy each layer's K, then V, by one call: the heads are its pools, the tokens its pages."""
        if not wanted:
            return
        begins = np.concatenate([run.offset_bytes + run.stride_bytes * np.arange(run.count) for run in wanted])
        blocks = np.concatenate([run.block + np.arange(run.count) for run in wanted])
        tokens = np.arange(self._block_tokens)
        columns = (column + blocks[:, None] * self._block_tokens + tokens).reshape(-1)
        for number, pair in enumerate(layers):
            offset, _ = self._layout.layer_range(number, block_tokens=self._block_tokens)
            for tensor in pair:
                heads, stride_bytes, page_bytes = _heads(tensor, row)
                pool_bytes = (tensor.shape[2] - 1) * stride_bytes + page_bytes
                copy(heads, pool_bytes, columns, stride_bytes, page_bytes, arena, begins + offset, copying.THREADS)
                offset += heads.size * self._block_tokens * page_bytes

    def _pairs(
        self, arena: Any, wanted: Sequence[Run], layers: Sequence[LayerKV], row: int, column: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (part of the arena, part of a layer tensor), both as (head, block, token, dim)."""
        if not wanted:
            return
        elements = torch.frombuffer(arena, dtype=self._anatomy.dtype)
        for number, (keys, values) in enumerate(layers):
            offset, _ = self._layout.layer_range(number, block_tokens=self._block_tokens)
            for run in wanted:
                first = run.offset_bytes + offset
                yield self._stored(elements, run, first, keys.shape[3]), self._computed(keys, run, row, column)
                first += keys.shape[1] * keys.shape[3] * self._block_tokens * keys.element_size()
                yield self._stored(elements, run, first, values.shape[3]), self._computed(values, run, row, column)

    def _stored(self, elements: torch.Tensor, run: Run, first_bytes: int, dim: int) -> torch.Tensor:
        size, heads, tokens = elements.element_size(), self._anatomy.kv_heads, self._block_tokens
        shape = (heads, run.count, tokens, dim)
        strides = (dim, run.stride_bytes // size, heads * dim, 1)
        return elements.as_strided(shape, strides, first_bytes // size)

    def _computed(self, tensor: torch.Tensor, run: Run, row: int, column: int) -> torch.Tensor:
        begin = column + run.block * self._block_tokens
        part = tensor[row, :, begin : begin + run.count * self._block_tokens]
        return part.view(-1, run.count, self._block_tokens, tensor.shape[3])


def _heads(tensor: torch.Tensor, row: int) -> tuple[npt.NDArray[np.uint64], int, int]:
    """Return where each head of a row begins, how far its tokens lie apart, and the bytes of a token."""
    size = tensor.element_size()
    first, apart = tensor.data_ptr() + row * tensor.stride(0) * size, tensor.stride(1) * size
    heads = np.uint64(first) + np.uint64(apart) * np.arange(tensor.shape[1], dtype=np.uint64)
    return heads, tensor.stride(2) * size, tensor.shape[3] * size
