"""Where the bytes of SGLang's host pages lie: addresses and sizes that blocks are stored from and loaded into.

A page's bytes are stored in the order in which its pool names their places. For `layer_first` that is layer by layer,
K before V; for `page_first`, `page_first_direct` and `page_head` it is K of all layers and then V, each as it lies in
the pool. A pool that names no places hands its pages out as flat tensors, and these are stored as they are.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Addresses = npt.NDArray[np.uint64]
Sizes = npt.NDArray[np.int64]
Places = tuple[Addresses, Sizes]
"""Address and size of each region of each page: two arrays of shape (pages, regions)."""

_NOT_NAMED = (AttributeError, NotImplementedError, ValueError)  # what a pool raises that cannot name its places


class Pages(Protocol):
    """The pages of one host pool.

    Attributes:
        block_bytes: bytes of one page.
        tokens: indices of one page.
    """

    block_bytes: int
    tokens: int

    def sources(self, indices: torch.Tensor, pages: int) -> tuple[Places, object]:
        """Return where the pages are read from, and what must be kept alive meanwhile.

        Raises:
            ValueError: there are not `tokens` indices for each page.
        """
        ...

    def targets(self, indices: torch.Tensor, pages: int) -> Target:
        """Return where the pages are written to; raises as `sources`."""
        ...

    def flat(self, tensors: list[torch.Tensor]) -> Places:
        """Return the places of flat copies of pages, each in one piece."""
        ...


class Target:
    """Where pages are written to. Here they are the pool's own places."""

    def __init__(self, places: Places, kept: object = None) -> None:
        """Write there; `kept` is what holds the memory."""
        self.places, self._kept = places, kept

    def finish(self, pages: int) -> None:
        """The first `pages` have been written."""


def bare_pool(pool: Any) -> Any:
    """Return the pool that holds the KV, of a group of pools too."""
    return pool.anchor_entry.host_pool if hasattr(pool, "anchor_entry") else pool


def pages_of(pool: Any) -> Pages:
    """Return the pages of a bare host pool.

    Raises:
        AttributeError, NotImplementedError, ValueError: it neither names places nor hands out flat pages.
    """
    if pool.size_per_token == 0:
        return MarkPages(pool)
    try:
        places = _places(pool, torch.arange(pool.page_size))
    except _NOT_NAMED:
        return FlatPages(pool)
    return PlacedPages(pool, *places)


class PlacedPages:
    """Pages of a pool that says where they lie."""

    def __init__(self, pool: Any, first: Addresses, sizes: Sizes) -> None:
        """Take the places of page 0, and see whether the others follow from them."""
        self._pool, self._first, self._sizes = pool, first[0], sizes[0]
        self.tokens = int(pool.page_size)
        self.block_bytes = int(self._sizes.sum())
        self._step = self._find_step()

    def sources(self, indices: torch.Tensor, pages: int) -> tuple[Places, object]:
        """Return the places of the pages; the pool keeps them alive."""
        return self._buffers(indices, pages), None

    def targets(self, indices: torch.Tensor, pages: int) -> Target:
        """Return the places of the pages."""
        return Target(self._buffers(indices, pages))

    def flat(self, tensors: list[torch.Tensor]) -> Places:
        """Return the places of the same regions in flat copies of pages: there they follow the pool's addresses."""
        order = np.argsort(self._first, kind="stable") if _is_one_buffer(self._pool) else np.arange(self._first.size)
        offsets = np.empty(order.size, dtype=np.uint64)
        offsets[order] = np.concatenate([[0], np.cumsum(self._sizes[order])[:-1]])
        starts = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64)
        return starts[:, None] + offsets, np.broadcast_to(self._sizes, (starts.size, order.size))

    def _buffers(self, indices: torch.Tensor, pages: int) -> Places:
        _check(indices, pages, self.tokens)
        if self._step is None:
            return _places(self._pool, indices)
        numbers = indices[:: self.tokens].numpy().astype(np.uint64) // np.uint64(self.tokens)
        return self._first + numbers[:, None] * self._step, np.broadcast_to(self._sizes, (pages, self._sizes.size))

    def _find_step(self) -> Addresses | None:
        """Return the distance from page to page of each region; None where it differs, or pages may move."""
        last = int(self._pool.page_num) - 1 if hasattr(self._pool, "page_num") else 0
        if last < 2 or getattr(self._pool, "shared_allocation_domain", None) is not None:
            return None
        chosen = torch.cat([torch.arange(self.tokens) + page * self.tokens for page in (1, last)])
        places, sizes = _places(self._pool, chosen)
        step = places[0] - self._first
        is_even = (sizes == self._sizes).all() and (self._first + np.uint64(last) * step == places[1]).all()
        return step if is_even else None


class FlatPages:
    """Pages of a pool that hands them out and takes them as flat tensors, one at a time."""

    def __init__(self, pool: Any) -> None:
        """Ask the pool for an empty page."""
        self._pool = pool
        page = pool.get_dummy_flat_data_page()
        self._dtype = page.dtype
        self.tokens = int(pool.page_size)
        self.block_bytes = page.numel() * page.element_size()

    def sources(self, indices: torch.Tensor, pages: int) -> tuple[Places, object]:
        """Return copies of the pages, which are what must be kept."""
        copies = [self._pool.get_data_page(index).contiguous() for index in self._starts(indices, pages)]
        return self.flat(copies), copies

    def targets(self, indices: torch.Tensor, pages: int) -> Target:
        """Return memory that is copied to the pool when all is there."""
        return _FlatTarget(self._pool, self._dtype, self._starts(indices, pages), self.block_bytes)

    def flat(self, tensors: list[torch.Tensor]) -> Places:
        """Return the places of flat pages."""
        return _whole(tensors, self.block_bytes)

    def _starts(self, indices: torch.Tensor, pages: int) -> list[int]:
        _check(indices, pages, self.tokens)
        starts: list[int] = indices[:: self.tokens].tolist()
        return starts


class _FlatTarget(Target):
    def __init__(self, pool: Any, dtype: torch.dtype, starts: list[int], block_bytes: int) -> None:
        self._pool, self._starts, self._dtype = pool, starts, dtype
        self._pages = torch.empty((len(starts), block_bytes), dtype=torch.uint8)
        super().__init__(_whole(list(self._pages), block_bytes))

    def finish(self, pages: int) -> None:
        """Copy the first `pages` to the pool."""
        for start, page in zip(self._starts[:pages], self._pages, strict=False):
            self._pool.set_from_flat_data_page(start, page.view(self._dtype))


class MarkPages:
    """Pages of a pool that counts tokens and holds no bytes: all that is stored is that they were computed."""

    block_bytes = 8

    def __init__(self, pool: Any) -> None:
        """Note how many tokens a page has."""
        self.tokens = int(pool.page_size)

    def sources(self, indices: torch.Tensor, pages: int) -> tuple[Places, object]:
        """Return zeros."""
        _check(indices, pages, self.tokens)
        mark = torch.zeros((pages, self.block_bytes), dtype=torch.uint8)
        return self.flat(list(mark)), mark

    def targets(self, indices: torch.Tensor, pages: int) -> Target:
        """Return memory that nobody reads."""
        return Target(*self.sources(indices, pages))

    def flat(self, tensors: list[torch.Tensor]) -> Places:
        """Return the places of marks."""
        return _whole(tensors, self.block_bytes)


def _places(pool: Any, indices: torch.Tensor) -> Places:
    """Ask the pool for addresses and sizes, each of shape (pages, regions)."""
    addresses, sizes = pool.get_page_buffer_meta(indices)
    pages = indices.numel() // int(pool.page_size)
    return np.array(addresses, dtype=np.uint64).reshape(pages, -1), np.array(sizes, dtype=np.int64).reshape(pages, -1)


def _whole(tensors: list[torch.Tensor], nbytes: int) -> Places:
    """Return the places of pages that lie in one piece."""
    addresses = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64).reshape(-1, 1)
    return addresses, np.full(addresses.shape, nbytes, dtype=np.int64)


def _is_one_buffer(pool: Any) -> bool:
    """Whether all of a page lies in one tensor, of which a flat page is a slice."""
    return isinstance(getattr(pool, "kv_buffer", None), torch.Tensor)


def _check(indices: torch.Tensor | None, pages: int, tokens: int) -> None:
    given = 0 if indices is None else indices.numel()
    if given != pages * tokens:
        raise ValueError(f"{given} indices for {pages} pages of {tokens} tokens")
