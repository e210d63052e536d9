"""Where SGLang's pages lie on the device, and how their bytes get from there to blocks and back, layer by layer.

A block holds what the pool's tensors hold of a page, one tensor behind the other: all of K, layer by layer, then all
of V. On a CPU bytes move by address. Anywhere else they go through pinned memory: one copy a tensor, and the device
itself gathers and scatters the pages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvcairn import copying
from kvcairn.adapters.sglang.pages import Addresses, Places
from kvcairn.errors import UnsupportedError

Rows = npt.NDArray[np.int64]
"""First row of each page in the pool's tensors."""


class _Where(NamedTuple):
    """Of each tensor: where it begins, bytes from row to row, bytes of a page, and where these begin in a block."""

    bases: Addresses
    strides: Addresses
    sizes: npt.NDArray[np.int64]
    offsets: Addresses


class DevicePages:
    """The pages of one device pool. Used from one thread at a time for each direction.

    Attributes:
        block_bytes: bytes of one page.
        tokens: indices of one page.
    """

    def __init__(self, entry: Any, layers: int, *, by_address: bool | None = None) -> None:
        """Look at a pool.

        Args:
            entry: SGLang's `DevicePoolEntry`.
            layers: layers that a load is counted in.
            by_address: whether bytes move by address; by default where the pool is in the host's memory.

        Raises:
            UnsupportedError: a tensor does not lie in one piece, or no layer's load would bring it.
        """
        self._entry, self._tensors = entry, list(entry.kv_buffer)
        meta = [each for component in entry.buffer_meta for each in component]
        sizes = np.array([size for _, _, size in meta], dtype=np.int64)
        self._where = _Where(
            np.array([base for base, _, _ in meta], dtype=np.uint64),
            np.array([stride for _, stride, _ in meta], dtype=np.uint64),
            sizes,
            (np.cumsum(sizes) - sizes).astype(np.uint64),
        )
        self._of_layer = [_numbers(entry, layer) for layer in range(layers)]
        if not all(tensor.is_contiguous() for tensor in self._tensors):
            raise UnsupportedError(f"pool {entry.name} has tensors that do not lie in one piece")
        if sorted(number for numbers in self._of_layer for number in numbers) != list(range(len(meta))):
            raise UnsupportedError(f"pool {entry.name} has tensors outside of its {layers} layers")
        self.device = self._tensors[0].device
        self.tokens = int(entry.page_size)
        self.block_bytes = int(sizes.sum())
        self._by_address = self.device.type == "cpu" if by_address is None else by_address

    def rows(self, indices: torch.Tensor, pages: int) -> Rows:
        """Return the row at which each page begins; waits for the device where the indices are there.

        Raises:
            ValueError: there are not `tokens` indices for each page, or they are not whole pages of the pool.
        """
        rows = np.array(self._entry.prepare_locations(indices), dtype=np.int64)
        if rows.size != pages:
            raise ValueError(f"{indices.numel()} indices for {pages} pages of {self.tokens} tokens")
        return rows

    def sources(self, rows: Rows) -> tuple[Places, object]:
        """Return where pages can be read from, and what must be kept alive meanwhile."""
        if self._by_address:
            places = self._where.bases + rows.astype(np.uint64)[:, None] * self._where.strides
            return (places, np.broadcast_to(self._where.sizes, places.shape)), None
        staging = self._staging(rows.size, self.block_bytes)
        for number, pages in enumerate(self._paged(rows)):
            begin = int(self._where.offsets[number])
            staging[:, begin : begin + int(self._where.sizes[number])] = pages.to("cpu")
        starts = np.uint64(staging.data_ptr()) + np.arange(rows.size, dtype=np.uint64) * np.uint64(self.block_bytes)
        return (starts[:, None], np.full((rows.size, 1), self.block_bytes, dtype=np.int64)), staging

    def fill(self, layer: int, rows: Rows, blocks: Addresses) -> None:
        """Copy one layer of blocks, which begin at these addresses, over the pages. It is there on return."""
        for number in self._of_layer[layer]:
            begins, nbytes = blocks + self._where.offsets[number], int(self._where.sizes[number])
            sizes = np.full(rows.size, nbytes, dtype=np.int64)
            if self._by_address:
                targets = self._where.bases[number] + rows.astype(np.uint64) * self._where.strides[number]
                copying.copy(targets, begins, sizes, copying.THREADS)
                continue
            staging = self._staging(rows.size, nbytes)
            starts = np.uint64(staging.data_ptr()) + np.arange(rows.size, dtype=np.uint64) * np.uint64(nbytes)
            copying.copy(starts, begins, sizes, copying.THREADS)
            self._pages(number)[self._page_numbers(number, rows)] = staging.to(self.device)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).current_stream(self.device).synchronize()

    def _paged(self, rows: Rows) -> list[torch.Tensor]:
        numbers = range(len(self._tensors))
        return [self._pages(number)[self._page_numbers(number, rows)] for number in numbers]

    def _pages(self, number: int) -> torch.Tensor:
        """Return a tensor of the pool as (pages, bytes)."""
        nbytes = int(self._where.sizes[number])
        flat: torch.Tensor = self._tensors[number].view(torch.uint8).view(-1)
        return flat[: flat.numel() // nbytes * nbytes].view(-1, nbytes)

    def _page_numbers(self, number: int, rows: Rows) -> torch.Tensor:
        rows_of_page = int(self._where.sizes[number]) // int(self._where.strides[number])
        numbers: torch.Tensor = torch.from_numpy(rows // rows_of_page)
        return numbers.to(self.device)

    def _staging(self, pages: int, nbytes: int) -> torch.Tensor:
        return torch.empty((pages, nbytes), dtype=torch.uint8, pin_memory=self.device.type != "cpu")


def _numbers(entry: Any, layer: int) -> list[int]:
    """Return which of the pool's tensors, counted over all components, hold a layer."""
    mapped = entry.layer_mapping.get(layer)
    chosen = [] if mapped is None else [mapped] if isinstance(mapped, int) else list(mapped)
    numbers, first = [], 0
    for component in entry.buffer_meta:
        numbers += [first + each for each in chosen]
        first += len(component)
    return numbers
