"""The native core and its numpy twin do the same, bit for bit; and what both promise."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvcairn import _fallback, copying

try:
    import kvcairn._native as _native

    CORES: list[ModuleType] = [_native, _fallback]
except ImportError:
    CORES = [_fallback]

FUNCTIONS = ["checksum", "copy", "copy_hashed", "gather", "scatter"]
GUARD = 0xA5  # what stands around everything that is written
STREAMED_BYTES = 1 << 20  # from here on the native core uses other instructions, and threads

Bytes = npt.NDArray[np.uint8]
core = pytest.mark.parametrize("core", CORES, ids=lambda module: module.__name__.rpartition(".")[2])


@st.composite
def page_cases(draw: st.DrawFn, large: bool = False) -> dict[str, Any]:
    """Pools, indices that appear once, blocks at offsets that do not overlap; everything at odd addresses."""
    pools, blocks, rows = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    page = draw(st.sampled_from([1, 63, 64, 256, 257, 4096, 5000]))
    if large:
        rows = -(-STREAMED_BYTES // (page * pools * blocks)) if page >= 4096 else rows
    stride, spare = page + draw(st.integers(0, 65)), draw(st.integers(0, 3))
    count = rows * blocks + spare
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    gap = draw(st.integers(0, 65))
    block = rows * pools * page
    return {
        "pools": pools, "page": page, "stride": stride, "shift": draw(st.integers(0, 65)), "gap": gap,
        "pool_bytes": (count - 1) * stride + page,
        "indices": random.permutation(count)[: rows * blocks].astype(np.int64),
        "offsets": (random.permutation(blocks) * (block + gap)).astype(np.int64),
        "nbytes": blocks * (block + gap), "random": random, "threads": draw(st.integers(1, 3)),
    }  # fmt: skip


def odd(case: dict[str, Any], nbytes: int, content: bool) -> Bytes:
    """Return memory that begins `shift` bytes behind a boundary: random, or all guard."""
    whole = np.full(nbytes + 128, GUARD, dtype=np.uint8)
    begin = -whole.ctypes.data % 64 + case["shift"]
    if content:
        whole[:] = case["random"].integers(0, 256, whole.size, dtype=np.uint8)
    return whole[begin : begin + nbytes]


def address(arrays: list[Bytes]) -> npt.NDArray[np.uint64]:
    return np.array([array.ctypes.data for array in arrays], dtype=np.uint64)


def plain_gather(case: dict[str, Any], pools: list[Bytes], out: Bytes) -> None:
    """What is meant, page by page."""
    rows = len(case["indices"]) // len(case["offsets"])
    for number, index in enumerate(case["indices"].tolist()):
        for p, pool in enumerate(pools):
            at = case["offsets"][number // rows] + (number % rows * len(pools) + p) * case["page"]
            out[at : at + case["page"]] = pool[index * case["stride"] :][: case["page"]]


def check_there_and_back(case: dict[str, Any]) -> None:
    pools = [odd(case, case["pool_bytes"], content=True) for _ in range(case["pools"])]
    wanted = odd(case, case["nbytes"], content=False)
    plain_gather(case, pools, wanted)
    shape = (case["pool_bytes"], case["indices"], case["stride"], case["page"])
    restored = []
    for module in CORES:
        out = odd(case, case["nbytes"], content=False)
        module.gather(address(pools), *shape, out, case["offsets"], case["threads"])
        assert np.array_equal(out, wanted)
        back = [odd(case, case["pool_bytes"], content=False) for _ in pools]
        module.scatter(address(back), *shape, out.data.toreadonly(), case["offsets"], case["threads"])
        again = odd(case, case["nbytes"], content=False)
        plain_gather(case, back, again)
        assert np.array_equal(again, wanted)
        restored.append(back)
    for back in restored[1:]:  # between the pages nothing was written
        assert all(np.array_equal(a, b) for a, b in zip(back, restored[0], strict=True))


@given(page_cases())
def test_pages_go_into_blocks_and_back(case: dict[str, Any]) -> None:
    check_there_and_back(case)


@pytest.mark.slow
@given(page_cases(large=True))
def test_many_pages_go_into_blocks_and_back(case: dict[str, Any]) -> None:
    check_there_and_back(case)


SIZES = st.sampled_from([0, 1, 63, 64, 4095, 4097, 70_000, STREAMED_BYTES + 77])


@given(st.lists(st.tuples(SIZES, st.integers(0, 65), st.integers(0, 65)), max_size=5), st.integers(1, 3))
def test_pieces_are_copied_and_hashed(pieces: list[tuple[int, int, int]], threads: int) -> None:
    random = np.random.default_rng(len(pieces))
    sources = [random.integers(0, 256, shift + nbytes, dtype=np.uint8)[shift:] for nbytes, shift, _ in pieces]
    sizes = np.array([nbytes for nbytes, _, _ in pieces], dtype=np.int64)
    digests = b"".join(xxhash.xxh3_128_digest(source.tobytes()) for source in sources)
    for module in CORES:
        for is_hashed in (False, True):
            wholes = [np.full(shift + nbytes + 64, GUARD, dtype=np.uint8) for nbytes, _, shift in pieces]
            targets = [whole[shift : whole.size - 64] for whole, (_, _, shift) in zip(wholes, pieces, strict=True)]
            act = module.copy_hashed if is_hashed else module.copy
            assert act(address(targets), address(sources), sizes, threads) == (digests if is_hashed else None)
            for whole, target, source in zip(wholes, targets, sources, strict=True):
                assert np.array_equal(target, source)
                assert (whole[: whole.size - 64 - target.size] == GUARD).all() and (whole[-64:] == GUARD).all()


@given(st.lists(st.lists(st.tuples(SIZES, st.integers(0, 65)), max_size=3), max_size=4), st.integers(1, 3))
def test_pieces_have_one_checksum_together(groups: list[list[tuple[int, int]]], threads: int) -> None:
    random = np.random.default_rng(len(groups))
    hashed = [
        [random.integers(0, 256, shift + nbytes, dtype=np.uint8)[shift:] for nbytes, shift in pieces]
        for pieces in groups
    ]
    sources = [source for pieces in hashed for source in pieces]
    sizes = np.array([source.size for source in sources], dtype=np.int64)
    counts = np.array([len(pieces) for pieces in groups], dtype=np.int64)
    digests = b"".join(xxhash.xxh3_128_digest(b"".join(each.tobytes() for each in pieces)) for pieces in hashed)
    for module in CORES:
        targets = [np.full(source.size + 64, GUARD, dtype=np.uint8) for source in sources]
        assert module.copy_hashed(address(targets), address(sources), sizes, threads, counts) == digests
        for target, source in zip(targets, sources, strict=True):
            assert np.array_equal(target[: source.size], source)
            assert (target[source.size :] == GUARD).all()


@core
@pytest.mark.parametrize("counts", [[], [1], [3], [-1, 3], [1, 2], [2**63 - 1, 1]])
def test_counts_that_do_not_add_up_move_nothing(core: ModuleType, counts: list[int]) -> None:
    source, target = np.ones(20, dtype=np.uint8), np.zeros(20, dtype=np.uint8)
    places = address([target[:10], target[10:]]), address([source[:10], source[10:]])
    with pytest.raises(ValueError, match="add up"):
        core.copy_hashed(*places, np.array([10, 10], dtype=np.int64), 1, np.array(counts, dtype=np.int64))
    assert not target.any()


def bad_pages(**changes: Any) -> dict[str, Any]:
    return {
        "pool_bytes": 1000,
        "indices": [0, 1],
        "stride_bytes": 100,
        "page_bytes": 100,
        "offsets": [0, 100],
    } | changes


@core
@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"indices": [0, 10]}, IndexError),
        ({"indices": [0, -1]}, IndexError),
        ({"indices": [0, 2**63 - 1]}, IndexError),
        ({"offsets": [0, 101]}, IndexError),
        ({"offsets": [0, -1]}, IndexError),
        ({"pool_bytes": 99}, IndexError),
        ({"offsets": []}, ValueError),
        ({"offsets": [0, 50, 100]}, ValueError),
        ({"stride_bytes": 99}, ValueError),
        ({"page_bytes": 0}, ValueError),
        ({"pool_bytes": -1}, ValueError),
        ({"base": 0}, ValueError),
        ({"base": 2**64 - 1}, ValueError),
    ],
)
def test_what_does_not_fit_moves_nothing(core: ModuleType, changes: dict[str, Any], error: type[Exception]) -> None:
    pool, block = np.full(1000, 1, dtype=np.uint8), np.full(200, 2, dtype=np.uint8)
    case = bad_pages(**changes)
    arguments = (
        np.array([case.get("base", pool.ctypes.data)], dtype=np.uint64), case["pool_bytes"],
        np.array(case["indices"], dtype=np.int64), case["stride_bytes"], case["page_bytes"], block,
        np.array(case["offsets"], dtype=np.int64),
    )  # fmt: skip
    with pytest.raises(error):
        core.gather(*arguments)
    with pytest.raises(error):
        core.scatter(*arguments)
    assert (pool == 1).all() and (block == 2).all()


@core
def test_no_pages_are_nothing_to_do(core: ModuleType) -> None:
    none, pool = np.empty(0, dtype=np.int64), np.ones(64, dtype=np.uint8)
    core.gather(address([pool]), 64, none, 64, 64, bytearray(), none)
    core.scatter(address([]), 64, np.zeros(1, dtype=np.int64), 64, 64, b"", np.zeros(1, dtype=np.int64))
    assert core.copy_hashed(address([]), address([]), none) == b""


@core
def test_a_read_only_block_is_not_written_to(core: ModuleType) -> None:
    pool, block = np.ones(64, dtype=np.uint8), bytes(64)
    zero = np.zeros(1, dtype=np.int64)
    with pytest.raises(BufferError):
        core.gather(address([pool]), 64, zero, 64, 64, block, zero)
    assert block == bytes(64)


@core
@pytest.mark.parametrize("sizes", [[-1], [10, 10], [10]])
def test_pieces_that_cannot_be_are_refused(core: ModuleType, sizes: list[int]) -> None:
    source, target = np.ones(10, dtype=np.uint8), address([np.zeros(10, dtype=np.uint8)])
    here = address([source]) if sizes != [10] else np.zeros(1, dtype=np.uint64)
    for act in (core.copy, core.copy_hashed):
        with pytest.raises(ValueError, match=r"."):
            act(target, here, np.array(sizes, dtype=np.int64))


@given(st.binary(max_size=5000))
def test_checksums_are_those_of_xxhash(content: bytes) -> None:
    for module in CORES:
        assert module.checksum(content) == module.checksum(memoryview(content)) == xxhash.xxh3_128_digest(content)


def test_both_have_the_same_functions() -> None:
    for module in CORES:
        for name in FUNCTIONS:
            assert callable(getattr(module, name))
    assert list(inspect.signature(_fallback.gather).parameters)[-2:] == ["offsets", "threads"]
    assert (len(CORES) == 2) == copying.IS_NATIVE
    assert copying.instruction_set() in ("avx512", "avx2", "sse2", "neon", "plain", "numpy")


@pytest.mark.parametrize("nbytes", [0, 10, STREAMED_BYTES, STREAMED_BYTES + 1])
def test_a_buffer_is_copied_over_another(nbytes: int) -> None:
    source, target = np.arange(nbytes, dtype=np.uint64).view(np.uint8)[:nbytes], bytearray(nbytes)
    copying.copy_bytes(source, target)
    assert bytes(target) == source.tobytes()


def test_a_buffer_of_another_size_or_read_only_is_refused() -> None:
    source = bytes(STREAMED_BYTES)
    for target in (bytearray(STREAMED_BYTES + 1), bytearray(10), bytes(STREAMED_BYTES)):
        with pytest.raises(ValueError, match=r"broadcast|read-only"):
            copying.copy_bytes(source, target)
        assert not any(target)


PROGRAM = """
import sys
sys.modules["kvcairn._native"] = None
from kvcairn import copying
import kvcairn as kv
print(copying.instruction_set(), copying.IS_NATIVE, copying.checksum(b"").hex())
"""


def test_the_package_works_without_the_native_core() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["numpy", "False", "99aa06d3014798d86001c324468d497f"]
