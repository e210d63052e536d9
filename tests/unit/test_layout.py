from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcairn.errors import LayoutError
from kvcairn.layout import DTYPE_BYTES, KVLayout, LayerGroup, SpaceDescriptor
from kvcairn.types import RankSlice

LAYOUT = KVLayout.full(layers=2, kv_heads=3, head_dim=4, dtype="float16")
SPACE = SpaceDescriptor(model="m", weights="w", layout=LAYOUT, block_tokens=16)
MIXED = KVLayout(
    groups=(
        LayerGroup.full((0, 2), 10), LayerGroup.sliding((3, 1), 6, window=20), LayerGroup.state((4, 5), 100)
    ),
    dtype="float32",
)  # fmt: skip


def test_bytes_of_a_plain_block_are_k_and_v_of_all_layers() -> None:
    assert LAYOUT.part_bytes(0, 16) == 2 * 2 * 3 * 4 * 2 * 16
    assert (LAYOUT.kv_heads, LAYOUT.head_dim, len(LAYOUT.groups)) == (3, 4, 1)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_every_dtype_counts_its_own_bytes(dtype: str) -> None:
    layout = KVLayout.full(layers=1, kv_heads=1, head_dim=8, dtype=dtype)
    assert layout.part_bytes(0, 1) == 16 * DTYPE_BYTES[dtype]


@given(st.integers(1, 64))
def test_the_layers_of_a_part_lie_one_behind_the_other(block_tokens: int) -> None:
    for number, group in enumerate(MIXED.groups):
        end = 0
        for layer in group.layers:
            offset, nbytes = MIXED.layer_range(layer, number, block_tokens=block_tokens)
            assert (offset, nbytes > 0) == (end, True)
            end += nbytes
        assert end == MIXED.part_bytes(number, block_tokens)


def test_a_state_does_not_grow_with_the_block() -> None:
    assert MIXED.part_bytes(2, 1) == MIXED.part_bytes(2, 99) == 200
    assert MIXED.layer_range(5, 2, block_tokens=99) == (100, 100)


@pytest.mark.parametrize(
    ("group", "block_tokens", "back"),
    [(0, 4, None), (1, 4, 5), (1, 20, 1), (1, 19, 2), (1, 1000, 1), (1, 1, 20), (2, 4, 1), (2, 1, 1)],
)
def test_how_far_back_a_boundary_looks(group: int, block_tokens: int, back: int | None) -> None:
    assert MIXED.groups[group].blocks_back(block_tokens) == back


def test_no_such_group_or_layer() -> None:
    for group in (-1, 3):
        with pytest.raises(LayoutError, match="no group"):
            MIXED.part_bytes(group, 1)
        with pytest.raises(LayoutError, match="no group"):
            MIXED.layer_range(0, group)
    with pytest.raises(LayoutError, match="layer 1 is not in group 0"):
        MIXED.layer_range(1)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "full", "layers": ()},
        {"kind": "full", "layers": (1, 1), "bytes_per_token": 1},
        {"kind": "full", "layers": (-1,), "bytes_per_token": 1},
        {"kind": "full", "layers": (0,)},
        {"kind": "full", "layers": (0,), "bytes_per_token": -4},
        {"kind": "full", "layers": (0,), "bytes_per_token": 1, "window": 1},
        {"kind": "full", "layers": (0,), "bytes_per_token": 1, "bytes_per_state": 1},
        {"kind": "sliding", "layers": (0,), "bytes_per_token": 1},
        {"kind": "sliding", "layers": (0,), "bytes_per_token": 1, "window": -1},
        {"kind": "sliding", "layers": (0,), "window": 1},
        {"kind": "state", "layers": (0,), "bytes_per_token": 1},
        {"kind": "state", "layers": (0,), "bytes_per_state": 1, "window": 2},
        {"kind": "other", "layers": (0,), "bytes_per_token": 1},
    ],
    ids=repr,
)
def test_a_group_that_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        LayerGroup(**fields)


@pytest.mark.parametrize("what", ["layers", "kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_a_count_that_is_no_positive_number_is_refused(what: str, value: Any) -> None:
    fields: dict[str, Any] = {"layers": 1, "kv_heads": 1, "head_dim": 1, "dtype": "int8"} | {what: value}
    with pytest.raises(LayoutError, match=what):
        KVLayout.full(**fields)


def test_a_layout_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(LayoutError, match="dtype"):
        KVLayout.full(layers=1, kv_heads=1, head_dim=1, dtype="float12")
    with pytest.raises(LayoutError, match="at least one"):
        KVLayout(groups=(), dtype="int8")
    with pytest.raises(LayoutError, match="two attention groups"):
        KVLayout(groups=(LayerGroup.full(2, 1), LayerGroup.sliding((1,), 1, window=1)), dtype="int8")


def test_a_layer_may_have_both_attention_and_a_state() -> None:
    KVLayout(groups=(LayerGroup.full(2, 1), LayerGroup.state((1,), 1)), dtype="int8")


@pytest.mark.parametrize("tokens", [0, -1, 1.5, True, "16", None])
def test_a_block_has_a_positive_number_of_tokens(tokens: Any) -> None:
    with pytest.raises(LayoutError, match="block_tokens"):
        SpaceDescriptor(model="m", weights="w", layout=LAYOUT, block_tokens=tokens)


OTHERS: list[dict[str, Any]] = [
    {"model": "n"},
    {"weights": "v"},
    {"block_tokens": 17},
    {"tenant": "t"},
    {"key_scheme": "sglang-0.5.23"},
    {"rank": "replicated"},
    {"rank": RankSlice()},
    {"rank": RankSlice(tp=1, tp_size=2)},
    {"rank": RankSlice(layers=(0, 1))},
    {"layout": KVLayout.full(layers=2, kv_heads=3, head_dim=4, dtype="bfloat16")},
    {"layout": KVLayout.full(layers=2, kv_heads=4, head_dim=3, dtype="float16")},
    {"layout": KVLayout.full(layers=2, kv_heads=3, head_dim=4, dtype="float16", name="opaque")},
    {"layout": MIXED},
    {"model": "mw", "weights": ""},
    {"model": "", "weights": "mw"},
]


def test_whatever_differs_makes_another_space() -> None:
    ids = [SPACE.space_id, *(msgspec.structs.replace(SPACE, **fields).space_id for fields in OTHERS)]
    assert len(set(ids)) == len(ids)
    assert {len(space_id) for space_id in ids} == {32}


def test_the_id_of_a_space_never_changes() -> None:
    assert msgspec.structs.replace(SPACE).space_id == SPACE.space_id
    code = (
        "from kvcairn.layout import *; "
        "l = KVLayout.full(layers=2, kv_heads=3, head_dim=4, dtype='float16'); "
        "print(SpaceDescriptor(model='m', weights='w', layout=l, block_tokens=16).space_id.hex())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == SPACE.space_id.hex() == SPACE_ID


SPACE_ID = "186283b3adbce16583b17e3fabdfe82cfb1474380ce60f062b4b66524c217e2b"


@pytest.mark.parametrize("fields", [{}, *OTHERS], ids=repr)
def test_a_descriptor_survives_the_wire(fields: dict[str, Any]) -> None:
    sent = msgspec.structs.replace(SPACE, **fields)
    got = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=SpaceDescriptor)
    assert (got, got.space_id) == (sent, sent.space_id)


@pytest.mark.parametrize(
    ("dtype", "meant"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("Float32", "float32"), ("fp8", "float8_e4m3fn"),
     ("torch.bfloat16", "bfloat16"), ("flot16", "float16"), ("floatt32", "float32")],
)  # fmt: skip
def test_a_dtype_as_others_write_it_is_recognized(dtype: str, meant: str) -> None:
    with pytest.raises(LayoutError, match=f"unknown dtype '{dtype}'; did you mean '{meant}'. known: float64, ") as one:
        KVLayout.full(layers=1, kv_heads=1, head_dim=8, dtype=dtype)
    with pytest.raises(LayoutError) as other:
        KVLayout(groups=(LayerGroup.full(1, 32),), dtype=dtype)
    assert str(one.value) == str(other.value)


@pytest.mark.parametrize("dtype", ["complex64", None, 16, ["float16"]])
def test_a_dtype_that_is_none_names_those_that_are(dtype: Any) -> None:
    with pytest.raises(LayoutError, match=r"unknown dtype .* known: float64, float32, bfloat16"):
        KVLayout.full(layers=1, kv_heads=1, head_dim=8, dtype=dtype)
