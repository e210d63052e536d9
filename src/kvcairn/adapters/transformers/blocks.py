"""Moves blocks between the cache's arena and a model's KV tensors: whole layers, runs of blocks, torch copies.

A block's part holds for each layer K `[token][head][dim]`, then V. A layer tensor is `[row, head, column, dim]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
        for stored, computed in self._pairs(arena, found, layers, row, column):
            computed.copy_(stored)

    @torch.no_grad()
    def store(self, arena: Any, wanted: Sequence[Run], layers: Sequence[LayerKV], row: int, column: int) -> None:
        """Copy runs of blocks from `layers` into the arena; returns when the bytes are there."""
        for stored, computed in self._pairs(arena, wanted, layers, row, column):
            stored.copy_(computed)

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
