"""T16: keys are the same in every process, and the next process hits what the first stored."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvcairn as kv
from kvcairn.keys import block_keys
from kvcairn.layout import SpaceDescriptor
from kvcairn.testing.blocks import Blocks
from kvcairn.testing.rig import PLAIN
from tests.torture.support import MakeRig

VECTORS = Path(__file__).with_name("key_vectors.json")
EXTRAS: list[dict[int, bytes | None] | None] = [None, {}, {0: None}, {0: b""}, {0: b"salt"}, {1: b"image"}]


def make_vectors() -> list[str]:
    """Return keys and a space id as text; what they are made of is the same in every process."""
    keys = [key.hex() for extra in EXTRAS for key in block_keys(list(range(12)), 4, extra=extra)]
    descriptor = SpaceDescriptor(model="toy", weights="0", layout=PLAIN, block_tokens=4, tenant="t")
    return [*keys, descriptor.space_id.hex()]


def test_against_fixed_vectors() -> None:
    assert make_vectors() == json.loads(VECTORS.read_text())


@pytest.mark.parametrize("hash_seed", [None, "0", "random", "4711"])
def test_in_other_processes(hash_seed: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    code = (
        "import json; from tests.torture.test_t16_same_keys_everywhere import make_vectors as m; print(json.dumps(m()))"
    )
    folder = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=folder, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == make_vectors()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_forked_and_spawned(method: str) -> None:
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        assert pool.apply(make_vectors) == make_vectors()


def test_absent_extra_is_no_extra_and_empty_is_one() -> None:
    plain, empty, none, blank = (block_keys(range(12), 4, extra=extra) for extra in EXTRAS[:4])
    assert plain == empty == none
    assert set(plain).isdisjoint(blank)


@pytest.mark.parametrize("token", [-1, 1 << 32, 1 << 64, 1.5, "7"])
def test_ids_outside_the_range_are_refused(make_rig: MakeRig, token: object) -> None:
    with pytest.raises(ValueError, match="token id"):
        make_rig().space().keys([1, 2, 3, token])  # type: ignore[list-item]


def test_no_full_block_is_no_key(make_rig: MakeRig) -> None:
    space = make_rig().space()
    assert space.keys([]) == space.keys([1, 2, 3]) == []
    assert space.lookup([]).blocks == 0
    assert space.lookup([]).reason is None
    with space.acquire([]) as lease:
        assert lease.count == 0


def test_the_second_process_hits(make_rig: MakeRig, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kvcairn.testing.blocks import Blocks; "
        "from kvcairn.testing.rig import Rig, Setup; rig = Rig(Setup(below='disk', threads=True), Path(sys.argv[1])); "
        "blocks = Blocks(rig); assert all(blocks.put(blocks.keys(1, 8))); rig.cache.close()"
    )
    folder = tmp_path / "tier"
    folder.mkdir()
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
    blocks = Blocks(make_rig(folder=folder, below="disk", threads=True))
    assert blocks.space.lookup(blocks.keys(1, 8)).by_tier == {"disk": 8}
    assert blocks.read(blocks.keys(1, 8), deadline_s=30.0) == 8


def test_a_forked_child_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig(threads=True)
    keys = Blocks(rig).keys(1, 1)
    space = rig.space()
    child = os.fork()
    if child == 0:
        try:
            space.lookup(keys)
        except kv.ClosedError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert space.lookup(keys).blocks == 0
