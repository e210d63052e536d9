"""Byte arithmetic: what one block of a model consists of, and what makes bytes reusable.

A block is `block_tokens` tokens of all layers of one space. Inside a block, group by group, the order is
layer, then (for KV) K and V, then token: `layer_range` gives the bytes of one layer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Literal

import msgspec

from kvcairn.errors import LayoutError
from kvcairn.plain import near
from kvcairn.types import RankSlice

DTYPE_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1,
}  # fmt: skip
# What people and engines also write; torch's own types say `torch.bfloat16`.
_ALIASES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "f16": "float16", "fp32": "float32", "f32": "float32",
    "float": "float32", "fp64": "float64", "f64": "float64", "double": "float64", "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip
KEY_SCHEME = "kvcairn-1"

GroupKind = Literal["full", "sliding", "state"]


class LayerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that are stored, restored and evicted by one rule.

    Attributes:
        kind: `full` needs every block of the prefix, `sliding` those of its last `window` tokens, `state` one
            snapshot at the end of the prefix.
        layers: the model's layer numbers, in the order in which they lie in the block.
        bytes_per_token: bytes of one token in one layer (K and V together); 0 for `state`.
        bytes_per_state: bytes of one layer's snapshot; 0 for the other kinds.
        window: attention window in tokens, for `sliding`.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    bytes_per_token: int = 0
    bytes_per_state: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        """Refuse what no block can be cut from."""
        if not self.layers or len(set(self.layers)) != len(self.layers) or min(self.layers) < 0:
            raise LayoutError(f"layer group needs distinct layer numbers from 0 up, got {self.layers}")
        if self.kind not in ("full", "sliding", "state"):
            raise LayoutError(f"unknown kind of layer group {self.kind!r}; there are full, sliding, state")
        names = ("bytes_per_token", "bytes_per_state", "window")
        wanted = {"full": (1, 0, 0), "sliding": (1, 0, 1), "state": (0, 1, 0)}[self.kind]
        given = (self.bytes_per_token, self.bytes_per_state, self.window)
        if any((g > 0) != bool(w) or g < 0 for g, w in zip(given, wanted, strict=True)):
            raise LayoutError(
                f"a {self.kind} group takes positive "
                + ", ".join(n for n, w in zip(names, wanted, strict=True) if w)
                + f" and nothing else, got bytes_per_token, bytes_per_state, window = {given}"
            )

    @classmethod
    def full(cls, layers: int | Iterable[int], bytes_per_token: int) -> LayerGroup:
        """Return a group of full attention layers; `layers` is a count or the numbers."""
        return cls(kind="full", layers=_numbers(layers), bytes_per_token=bytes_per_token)

    @classmethod
    def sliding(cls, layers: int | Iterable[int], bytes_per_token: int, window: int) -> LayerGroup:
        """Return a group of layers that attend to the last `window` tokens."""
        return cls(kind="sliding", layers=_numbers(layers), bytes_per_token=bytes_per_token, window=window)

    @classmethod
    def state(cls, layers: int | Iterable[int], bytes_per_state: int) -> LayerGroup:
        """Return a group of recurrent layers, of which a block stores the state behind its last token."""
        return cls(kind="state", layers=_numbers(layers), bytes_per_state=bytes_per_state)

    def layer_bytes(self, block_tokens: int) -> int:
        """Bytes of one layer in one block."""
        return self.bytes_per_state or self.bytes_per_token * block_tokens

    def blocks_back(self, block_tokens: int) -> int | None:
        """How many blocks before a boundary must be there to restore it; None for all of them."""
        if self.kind == "full":
            return None
        return 1 if self.kind == "state" else math.ceil(self.window / block_tokens)


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How the bytes of a block are made up; part of the space, so different layouts never meet.

    Attributes:
        groups: layer groups; their numbers are the `group` arguments of leases and reservations.
        dtype: element type of the KV, one of `DTYPE_BYTES`.
        name: `canonical`, or the name of an engine's own packing with its backend and instruction set.
        kv_heads: heads of K and V held by this rank; 0 where that has no meaning.
        head_dim: elements of one head.
    """

    groups: tuple[LayerGroup, ...]
    dtype: str
    name: str = "canonical"
    kv_heads: int = 0
    head_dim: int = 0

    def __post_init__(self) -> None:
        """Refuse a layout without groups, or with a layer in two groups."""
        _check_dtype(self.dtype)
        if not self.groups:
            raise LayoutError("a layout needs at least one layer group")
        layers = [layer for group in self.groups for layer in group.layers]
        attended = [layer for g in self.groups if g.kind != "state" for layer in g.layers]
        if len(set(attended)) != len(attended) or not layers:
            raise LayoutError("a layer stands in two attention groups")

    @classmethod
    def full(cls, *, layers: int, kv_heads: int, head_dim: int, dtype: str, name: str = "canonical") -> KVLayout:
        """Return the layout of a plain decoder: one group of `layers` full attention layers.

        Raises:
            LayoutError: a number is not positive, or the dtype is unknown.
        """
        for what, n in (("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim)):
            if isinstance(n, bool) or not isinstance(n, int) or n < 1:
                raise LayoutError(f"{what} must be a positive whole number, got {n!r}")
        _check_dtype(dtype)
        group = LayerGroup.full(layers, 2 * kv_heads * head_dim * DTYPE_BYTES[dtype])
        return cls(groups=(group,), dtype=dtype, name=name, kv_heads=kv_heads, head_dim=head_dim)

    def part_bytes(self, group: int, block_tokens: int) -> int:
        """Bytes of one group in one block."""
        chosen = self._group(group)
        return len(chosen.layers) * chosen.layer_bytes(block_tokens)

    def layer_range(self, layer: int, group: int = 0, *, block_tokens: int = 1) -> tuple[int, int]:
        """Return (offset, nbytes) of the model's layer `layer` inside the part of `group`.

        Both grow in proportion to `block_tokens` for attention groups: with the default of 1 they are bytes per
        token, and a block's are `block_tokens` times that. `Space.layer_range` gives them for the space's blocks.

        Raises:
            LayoutError: there is no such group, or no such layer in it.
        """
        chosen = self._group(group)
        if layer not in chosen.layers:
            raise LayoutError(f"layer {layer} is not in group {group}, which has layers {chosen.layers}")
        nbytes = chosen.layer_bytes(block_tokens)
        return chosen.layers.index(layer) * nbytes, nbytes

    def _group(self, group: int) -> LayerGroup:
        if not 0 <= group < len(self.groups):
            raise LayoutError(f"there is no group {group}; the layout has {len(self.groups)}")
        return self.groups[group]


class SpaceDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """All that must match for bytes to be reusable. Two spaces never share bytes.

    Attributes:
        model: name of the model.
        weights: fingerprint of its weights: a hub revision, or a hash over the weight files.
        layout: how a block is made up.
        block_tokens: tokens of one block.
        rank: None for a whole model, `"replicated"` where all ranks hold the same (MLA), or a `RankSlice`.
        tenant: tenants never share bytes; a salt per user belongs into `extra` of block 0 instead.
        key_scheme: who makes the keys: `"kvcairn-1"`, or an engine's own such as `"sglang-0.5.23"`.
    """

    model: str
    weights: str
    layout: KVLayout
    block_tokens: int
    rank: RankSlice | Literal["replicated"] | None = None
    tenant: str = ""
    key_scheme: str = KEY_SCHEME

    def __post_init__(self) -> None:
        """Refuse what no engine means: a wrong type would silently be another space."""
        for name in ("model", "weights", "tenant", "key_scheme"):
            if not isinstance(getattr(self, name), str):
                raise LayoutError(f"{name} must be a text, got {getattr(self, name)!r}")
        if not isinstance(self.layout, KVLayout):
            raise LayoutError(f"layout must be a KVLayout, got {self.layout!r}")
        if self.rank not in (None, "replicated") and not isinstance(self.rank, RankSlice):
            raise LayoutError(f'rank must be None, "replicated" or a RankSlice, got {self.rank!r}')
        tokens = self.block_tokens
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise LayoutError(f"block_tokens must be a positive whole number, got {tokens!r}")

    @property
    def space_id(self) -> bytes:
        """SHA-256 of the canonical msgpack of all fields, 32 bytes."""
        return hashlib.sha256(msgspec.msgpack.encode(self, order="deterministic")).digest()


def _check_dtype(dtype: object) -> None:
    if isinstance(dtype, str) and dtype in DTYPE_BYTES:
        return
    name = str(dtype).rpartition(".")[2].lower()
    meant = _ALIASES.get(name) or (name if name in DTYPE_BYTES else None)
    guess = f"did you mean {meant!r}?" if meant else near(name, DTYPE_BYTES)
    raise LayoutError(" ".join(filter(None, [f"unknown dtype {dtype!r};", guess, f"known: {', '.join(DTYPE_BYTES)}"])))


def _numbers(layers: int | Iterable[int]) -> tuple[int, ...]:
    return tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
