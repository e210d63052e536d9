"""Settings out of the engine's JSON, and the versions that are served."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

import kvcairn as kv
from kvcairn.adapters import vllm
from kvcairn.adapters.vllm import versions
from kvcairn.adapters.vllm.settings import ConnectorOptions, TierOptions, read_settings

MEMORY = [{"type": "memory", "capacity": "64 MiB"}]


def test_settings_in_place_and_in_a_file_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "kvcairn.toml").write_text('[[tiers]]\ntype = "memory"\ncapacity = "64 MiB"\n')
    in_place = read_settings({"tiers": MEMORY, "block_tokens": 128, "load_timeout": "500 ms"}, ConnectorOptions)
    in_file = read_settings(
        {"config": str(tmp_path / "kvcairn.toml"), "block_tokens": 128, "load_timeout": 0.5}, ConnectorOptions
    )
    assert in_place.config == in_file.config
    assert in_place.options.block_tokens == in_file.options.block_tokens == 128
    assert in_place.options.load_timeout_s == in_file.options.load_timeout_s == 0.5


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({}, "one of config, connect and tiers is needed, got neither"),
        ({"tiers": MEMORY, "config": "x"}, "got config and tiers"),
        ({"tiers": MEMORY, "block_tokn": 1}, r"block_tokn: no such setting; did you mean 'block_tokens'"),
        ({"tiers": MEMORY, "block_tokens": 0}, "block_tokens"),
        ({"tiers": MEMORY, "load_timeout": "soon"}, "soon"),
        ({"tiers": MEMORY, "prefetch": {"policy": "no"}}, "prefetch.policy"),
        ({"config": "/nowhere.toml"}, "/nowhere.toml"),
    ],
)
def test_what_is_wrong_is_named(extra: dict[str, Any], why: str) -> None:
    with pytest.raises(kv.ConfigError, match=why):
        read_settings(extra, ConnectorOptions)


def test_a_tier_has_no_block_size_of_its_own() -> None:
    assert read_settings({"tiers": MEMORY, "tenant": "a"}, TierOptions).options.tenant == "a"
    with pytest.raises(kv.ConfigError, match=r"secondary_tiers\.block_tokens: no such setting"):
        read_settings({"tiers": MEMORY, "block_tokens": 128}, TierOptions, "secondary_tiers")


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "v0.32.5.post1"])
def test_versions_in_the_range_are_served(version: str) -> None:
    assert versions.RANGE in versions.check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "dev"])
def test_another_version_is_refused_with_a_sentence(version: str) -> None:
    with pytest.raises(kv.UnsupportedError, match=f"vLLM {version} is not supported.*works with vLLM >=0.32,<0.33"):
        versions.check_version(version)


def test_the_doors_are_refused_under_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: "0.40.1")
    with pytest.raises(kv.UnsupportedError, match=r"vLLM 0.40.1 is not supported"):
        vllm.KVCairnConnector  # noqa: B018 - asked for as vLLM does
    with pytest.raises(AttributeError):
        vllm.Nothing  # noqa: B018


def test_a_missing_engine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(kv.UnsupportedError, match="needs vLLM: pip install"):
        versions.installed_version()
