"""Copies between pages and blocks, whatever order the engine keeps its axes in."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from kvcairn.adapters.vllm.pages import PageMemory, copy_layer, runs
from kvcairn.errors import LayoutError, UnsupportedError

PAGES, HEADS, TOKENS, CONTENT, LAYERS, ROWS = 20, 3, 4, 6, 2, 4
# Names are vLLM's: L layers, B pages, H heads, N tokens, C content of a token and head.
ORDERS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


def views(order: str, dtype: torch.dtype = torch.float32, ratio: int = 1) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the whole memory, and a view (pages, heads, tokens, content) of each layer."""
    sizes = {"L": LAYERS, "B": PAGES * ratio, "H": HEADS, "N": TOKENS, "C": CONTENT}
    memory = torch.arange(LAYERS * PAGES * ratio * HEADS * TOKENS * CONTENT, dtype=torch.float64).to(dtype)
    memory = memory.view(*(sizes[axis] for axis in order))
    logical = memory.permute(*(order.index(axis) for axis in "LBHNC"))
    return memory, [logical[layer] for layer in range(LAYERS)]


def offsets(block_bytes: int, blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return (64 + np.arange(blocks) * (block_bytes + 32)).astype(np.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("order", ORDERS)
def test_what_is_stored_comes_back(order: str, dtype: torch.dtype) -> None:
    _, layers = views(order, dtype)
    memory = PageMemory(layers, PAGES, ROWS)
    arena = memoryview(bytearray(1 << 16))
    pages = np.array([[3, 9, 1, 12], [2, 19, 5, 7]], dtype=np.int64)
    at = offsets(memory.layer_bytes * LAYERS, 2)
    before = [layer.clone() for layer in layers]
    memory.store(arena, at, pages)
    for layer in layers:
        layer.zero_()
    memory.load(arena, at, pages)
    for layer, old in zip(layers, before, strict=True):
        for page in range(PAGES):
            wanted = old[page] if page in pages else torch.zeros_like(old[page])
            assert torch.equal(layer[page], wanted), page


def test_a_block_is_layer_by_layer_page_by_page() -> None:
    _, layers = views("LBHNC")
    memory = PageMemory(layers, PAGES, ROWS)
    arena = bytearray(1 << 14)
    pages = np.array([[3, 9, 1, 12]], dtype=np.int64)
    memory.store(memoryview(arena), np.array([128], dtype=np.int64), pages)
    wanted = b"".join(layer[page].contiguous().numpy().tobytes() for layer in layers for page in pages[0])
    assert bytes(arena[128 : 128 + len(wanted)]) == wanted
    assert not any(arena[:128]) and not any(arena[128 + len(wanted) :])


@pytest.mark.parametrize("order", ORDERS)
def test_pages_that_are_to_be_left_alone_are(order: str) -> None:
    """The first pages of a load are the engine's own, those before a window are not there."""
    _, layers = views(order)
    memory = PageMemory(layers, PAGES, ROWS)
    arena = memoryview(bytearray(1 << 16))
    at = offsets(memory.layer_bytes * LAYERS, 3)
    whole = np.arange(1, 13, dtype=np.int64).reshape(3, 4)
    before = [layer.clone() for layer in layers]
    memory.store(arena, at, whole)
    for layer in layers:
        layer.fill_(-1)
    wanted = np.array([[0, 0, 3, 4], [5, 6, 7, 8], [9, 0, 11, 0]], dtype=np.int64)
    memory.load(arena, at, wanted)
    for layer, old in zip(layers, before, strict=True):
        for page in range(PAGES):
            assert torch.equal(layer[page], old[page] if page in wanted[wanted > 0] else torch.full_like(old[page], -1))


def test_a_page_may_be_several_blocks_of_the_kernel() -> None:
    _, layers = views("LBHNC", ratio=2)
    memory = PageMemory(layers, PAGES, ROWS)
    assert memory.page_bytes == 2 * HEADS * TOKENS * CONTENT * 4
    arena = bytearray(1 << 14)
    memory.store(memoryview(arena), np.zeros(1, dtype=np.int64), np.array([[5, 2, 8, 9]], dtype=np.int64))
    first = layers[0][10:12].contiguous().numpy().tobytes()
    assert bytes(arena[: len(first)]) == first


@pytest.mark.parametrize("order", ORDERS)
def test_the_way_over_a_device_moves_the_same_bytes(order: str) -> None:
    _, layers = views(order)
    memory = PageMemory(layers, PAGES, ROWS)
    pages = np.array([[3, 9, 1, 12], [2, 19, 5, 7]], dtype=np.int64)
    size = ROWS * HEADS * TOKENS * CONTENT * 4
    host = torch.zeros(4 * size, dtype=torch.uint8)
    copy_layer(layers[1], pages, host, [0, 2 * size], is_store=True)
    wanted = [layers[1][torch.from_numpy(row)].contiguous().view(torch.uint8).reshape(-1) for row in pages]
    assert torch.equal(host[:size], wanted[0]) and torch.equal(host[2 * size : 3 * size], wanted[1])
    before = layers[1].clone()
    layers[1].zero_()
    copy_layer(layers[1], pages, host, [0, 2 * size], is_store=False)
    for page in range(PAGES):
        assert torch.equal(layers[1][page], before[page] if page in pages else torch.zeros_like(before[page]))
    assert memory.layer_bytes == size


def test_what_cannot_be_copied_is_refused() -> None:
    _, layers = views("LBHNC")
    with pytest.raises(LayoutError, match="do not make 7 pages"):
        PageMemory(layers, 7, ROWS)
    with pytest.raises(LayoutError, match="differ in the size of a page"):
        PageMemory([layers[0], layers[1][:, :2]], PAGES, ROWS)
    with pytest.raises(UnsupportedError, match="lie 2 apart"):
        PageMemory([layers[0][..., ::2]], PAGES, ROWS)


@pytest.mark.parametrize("blocks", [0, 1, 5])
def test_runs_cover_every_page_once(blocks: int) -> None:
    tables = itertools.product(range(16), repeat=blocks) if blocks < 3 else [(0, 15, 5, 6, 9), (1, 1, 15, 0, 8)]
    for patterns in tables:
        table = np.zeros((blocks, 4), dtype=np.int64)
        for block, bits in enumerate(patterns):
            for row in range(4):
                table[block, row] = (1 + block * 4 + row) if bits >> row & 1 else 0
        seen: dict[tuple[int, int], int] = {}
        for run in runs(table):
            for block, pages in zip(run.blocks.tolist(), run.pages.tolist(), strict=True):
                for row, page in enumerate(pages, run.low):
                    assert (block, row) not in seen
                    seen[block, row] = page
        assert seen == {(b, r): table[b, r] for b in range(blocks) for r in range(4) if table[b, r]}
