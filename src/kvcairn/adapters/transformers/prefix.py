"""Loads and stores the prefixes of sequences, as rows of layer tensors, through one space of the cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcairn.adapters.transformers.anatomy import Anatomy
from kvcairn.adapters.transformers.blocks import BlockMover, LayerKV, runs
from kvcairn.adapters.transformers.reuse import RowReuse, leading_blocks
from kvcairn.errors import ClosedError, TierError
from kvcairn.types import MissReason

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One sequence of a batch: its token ids, and the columns of padding before them."""

    tokens: list[int]
    padding: int = 0


class Prefixes:
    """The stored prefixes of one model. Any thread; waits for loading at most `load_timeout_s` a call.

    A tier that fails makes the blocks concerned misses, with a line in the log; nothing is raised for it.
    """

    def __init__(self, space: Any, anatomy: Anatomy, block_tokens: int, load_timeout_s: float) -> None:
        self._space = space
        self._anatomy = anatomy
        self._block_tokens = block_tokens
        self._load_timeout_s = load_timeout_s
        self._mover = BlockMover(anatomy, block_tokens)

    def load(self, rows: Sequence[Row]) -> tuple[list[LayerKV], tuple[RowReuse, ...]]:
        """Return layer tensors with the longest known prefix of each row in place, and what that was.

        The tensors end at the column that the best row reaches; what other rows lack before it is left undefined.
        At least one token of each row is left out, so that there is something to compute.
        """
        end_s = time.monotonic() + self._load_timeout_s
        keys = [self._prompt_keys(row) for row in rows]
        hits = [self._probe(k, end_s) for k in keys]
        found = [hit.blocks if hit else 0 for hit in hits]
        layers = self._allocate(rows, self._reach(rows, found))
        reused = []
        for number, (row, hit) in enumerate(zip(rows, hits, strict=True)):
            count, reason = self._load_row(keys[number][: found[number]], layers, number, row.padding, end_s)
            by_tier = leading_blocks(hit.by_tier, count, self._block_tokens) if hit else {}
            if count == found[number]:
                reason = hit.reason if hit else "the cache failed"
            reused.append(RowReuse(prompt_tokens=len(row.tokens), by_tier=by_tier, reason=reason))
            found[number] = count
        columns = self._reach(rows, found)
        return [(k[:, :, :columns], v[:, :, :columns]) for k, v in layers], tuple(reused)

    def store(self, row: Row, layers: Sequence[LayerKV], number: int) -> int:
        """Store the full blocks of `row`, which is row `number` of `layers`; return how many were new.

        Of a chain that is longer than the memory tier the beginning is stored.
        """
        stored = 0
        try:
            keys = self._space.keys(row.tokens)
            start = 0
            while start < len(keys):
                with self._space.reserve(keys, start=start) as reservation:
                    blocks = _positions(keys, start, reservation.keys)
                    if not blocks:
                        break
                    offsets = [int(o) for o in reservation.offsets()]
                    self._mover.store(reservation.arena, list(runs(blocks, offsets)), layers, number, row.padding)
                    reservation.commit()
                stored += len(blocks)
                start = blocks[-1] + 1
        except (TierError, ClosedError) as error:
            logger.warning("not stored: %s", error)
        return stored

    def _prompt_keys(self, row: Row) -> list[bytes]:
        whole = max(0, len(row.tokens) - 1) // self._block_tokens
        return list(self._space.keys(row.tokens[: whole * self._block_tokens]))

    def _probe(self, keys: list[bytes], end_s: float) -> Any:
        try:
            return self._space.probe(keys, deadline_s=max(0.0, end_s - time.monotonic()))
        except (TierError, ClosedError) as error:
            logger.warning("computed instead of loaded: %s", error)
            return None

    def _load_row(
        self, keys: list[bytes], layers: Sequence[LayerKV], number: int, column: int, end_s: float
    ) -> tuple[int, str | None]:
        """Copy the blocks of `keys` to `column` onwards; return how many there were and why no more.

        A chain that does not fit into the memory tier at once comes in windows.
        """
        done, reason = 0, None
        try:
            while done < len(keys):
                left_s = max(0.0, end_s - time.monotonic())
                with self._space.acquire(keys, start=done, deadline_s=left_s) as lease:
                    count, reason = lease.count, lease.reason
                    offsets = [int(o) for o in lease.offsets()[:count]]
                    blocks = range(done, done + count)
                    self._mover.load(lease.arena, list(runs(blocks, offsets)), layers, number, column)
                done += count
                if not count or reason is not MissReason.NO_ROOM:
                    break
        except (TierError, ClosedError) as error:
            logger.warning("computed instead of loaded: %s", error)
            reason = str(error)
        return done, reason

    def _reach(self, rows: Sequence[Row], found: Sequence[int]) -> int:
        """Column that the best row reaches with `found` blocks; 0 when none has any."""
        return max((row.padding + n * self._block_tokens for row, n in zip(rows, found, strict=True) if n), default=0)

    def _allocate(self, rows: Sequence[Row], columns: int) -> list[LayerKV]:
        """One tensor a layer for keys and one for values; padding is zero, for a masked NaN would still be a NaN."""
        a = self._anatomy
        layers = []
        for device in a.devices:
            shape = (len(rows), a.kv_heads, columns)
            keys = torch.empty((*shape, a.key_dim), dtype=a.dtype, device=device)
            values = torch.empty((*shape, a.value_dim), dtype=a.dtype, device=device)
            for number, row in enumerate(rows):
                keys[number, :, : row.padding] = 0
                values[number, :, : row.padding] = 0
            layers.append((keys, values))
        return layers


def _positions(keys: Sequence[bytes], start: int, wanted: Sequence[bytes]) -> list[int]:
    """Numbers of the blocks that `wanted`, a subsequence of keys[start:], stands for."""
    where = {key: start + i for i, key in enumerate(keys[start:])}
    return [where[key] for key in wanted]
