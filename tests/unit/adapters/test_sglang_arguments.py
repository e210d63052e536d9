from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvcairn.adapters.sglang.arguments import check_arguments
from kvcairn.errors import ConfigError

DISK: dict[str, Any] = {"type": "disk", "path": "/var/lib/kvcairn", "capacity": "100 GiB"}


def extra(**more: Any) -> dict[str, Any]:
    names = {"backend_name": "kvcairn", "module_path": "kvcairn.adapters.sglang", "class_name": "KVCairnStorage"}
    return names | {"interface_v1": 1, "kvcairn": {"tiers": [DISK]}} | more


def line(config: dict[str, Any], *more: str) -> str:
    base = ["--model-path", "m", "--enable-hierarchical-cache", "--page-size", "64"]
    storage = ["--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config", json.dumps(config)]
    return shlex.join([*base, *storage, *more])


def found(text: str, status: str) -> list[str]:
    return [f"{each.name}: {each.value} | {each.remedy}" for each in check_arguments(text) if each.status == status]


def test_what_the_guide_says_is_good() -> None:
    assert found(line(extra()), "fail") == found(line(extra()), "warn") == []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--enable-lmcache"], "leave out --enable-lmcache"),
        (["--enable-flexkv"], "leave out --enable-flexkv"),
        (["--enable-unified-cache-external-linker"], "two caches would hold the same pages"),
        (["--radix-cache-backend", "other"], "leave out --radix-cache-backend"),
        (["--disable-radix-cache"], "nothing is ever reused"),
        (["--hicache-storage-backend", "file"], "HiCache's storage is file, not kvcairn"),
        (["--tp-size", "2"], "2 ranks, each a process"),
        (["--tp", "2", "--pp", "2"], "4 ranks, each a process"),
        (["--hicache-storage-backend-extra-config", "{"], "cannot be read"),
        (["--hicache-storage-backend-extra-config", "[]"], "is no table"),
        (["--hicache-storage-backend-extra-config", "@/no/such/file.json"], "cannot be read"),
    ],
)
def test_what_fights_is_refused(more: list[str], says: str) -> None:
    (problem,) = found(line(extra(), *more), "fail")
    assert says in problem


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"class_name": "Other"}, "the dynamic storage is kvcairn.adapters.sglang.Other"),
        ({"kvcairn": None}, "has no such table"),
        ({"kvcairn": {"tirs": []}}, "no such setting"),
        ({"kvcairn": {"tiers": [{"type": "memory", "capacity": "80 GiB"}, DISK]}}, "both hold the same pages"),
    ],
)
def test_settings_that_fight_are_refused(change: dict[str, Any], says: str) -> None:
    (problem,) = found(line(extra(**change), "--hicache-size", "64"), "fail")
    assert says in problem


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--page-size", "1"], "pages of 1 tokens"),
        (["--hicache-mem-layout", "layer_first"], "two pieces for each layer"),
        (["--hicache-mem-layout", "page_first_direct"], "SGLang turns kernel into direct"),
        (["--hicache-io-backend", "direct"], "SGLang turns it into page_first_direct"),
        (["--hicache-write-policy", "write_back"], "only what the GPU had to give up"),
        (["--hicache-storage-prefetch-policy", "best_effort"], "uses nothing from disk"),
    ],
)
def test_what_costs_is_said(more: list[str], says: str) -> None:
    assert any(says in each for each in found(line(extra(), *more), "warn"))
    assert not found(line(extra(), *more), "fail")


def test_memory_and_interface_cost_too() -> None:
    config = extra(interface_v1=0, kvcairn={"tiers": [{"type": "memory", "capacity": "8 GiB"}, DISK]})
    costs = found(line(config, "--hicache-size", "64"), "warn")
    assert len(costs) == 2
    assert not found(line(config, "--hicache-size", "64"), "fail")


def test_without_hicache_the_remedy_is_the_whole_line() -> None:
    problems = found("--model-path m", "fail")
    assert any("--enable-hierarchical-cache --hicache-storage-backend dynamic" in each for each in problems)


def test_a_daemon_serves_several_ranks(tmp_path: Path) -> None:
    file = tmp_path / "extra.json"
    file.write_text(json.dumps(extra(kvcairn={"connect": "unix:/run/kvcairn.sock"})))
    assert not found(line({}, "--hicache-storage-backend-extra-config", f"@{file}", "--tp", "8"), "fail")


def test_no_command_line() -> None:
    for text in ("--page-size x", "'", "--page-size"):
        with pytest.raises(ConfigError, match="--sglang-args"):
            list(check_arguments(text))


MEMORY: dict[str, Any] = {"type": "memory", "capacity": "64 GiB"}


def linked(settings: dict[str, Any], *more: str, linker: str = "KVCairnLinker") -> str:
    config = {"linker": linker, "linker_module_path": "kvcairn.adapters.sglang", "linker_extra_config": settings}
    flags = ["--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "dynamic"]
    return shlex.join(
        ["--page-size", "64", *flags, "--unified-cache-external-linker-config", json.dumps(config), *more]
    )


GOOD: dict[str, Any] = {"kvcairn": {"tiers": [MEMORY, DISK]}}


def test_what_the_guide_says_of_the_linker_is_good() -> None:
    assert found(linked(GOOD), "fail") == found(linked(GOOD), "warn") == []
    assert not found(linked({"kvcairn": {"connect": "unix:/run/kvcairn.sock"}}, "--tp", "2"), "fail")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (linked(GOOD, "--enable-hierarchical-cache", "--hicache-storage-backend", "file"), "two caches would hold"),
        (linked(GOOD, "--hicache-storage-backend", "dynamic"), "SGLang refuses it"),
        (linked(GOOD, "--enable-lmcache"), "leave out --enable-lmcache"),
        (linked(GOOD, "--disable-radix-cache"), "nothing is ever reused"),
        (linked(GOOD, "--unified-cache-external-linker-backend", "mooncake"), "the linker is mooncake"),
        (linked(GOOD, "--unified-cache-external-linker-config", "{"), "is no JSON"),
        (linked(GOOD, linker="Other"), "kvcairn.adapters.sglang.Other"),
        (linked({"kvcairn": {"tiers": [DISK]}}), "the linker's host tier is a memory tier"),
        (linked({"kvcairn": {"tirs": []}}), "no such setting"),
        (linked(GOOD, "--tp", "2"), "2 ranks, each a process"),
    ],
)
def test_what_fights_with_the_linker_is_refused(text: str, says: str) -> None:
    assert any(says in each for each in found(text, "fail"))


def test_what_costs_with_the_linker_is_said() -> None:
    assert any("pages of 1 tokens" in each for each in found(linked(GOOD, "--page-size", "1"), "warn"))
