"""X4: a setting that is misspelt, misplaced or impossible stops the start and names its path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import kvcairn as kv
from kvcairn.config import ConfigReader

MEMORY = {"type": "memory", "capacity": "16 MiB"}


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"tiers": [MEMORY], "planer": "off"}, "planer"),
        ({"tiers": [MEMORY | {"capacty": 1}]}, "tiers[0].capacty"),
        ({"tiers": [MEMORY | {"capacity": "8 XiB"}]}, "tiers[0].capacity"),
        ({"tiers": [MEMORY | {"capacity": -1}]}, "tiers[0].capacity"),
        ({"tiers": [MEMORY | {"eviction": "belady"}]}, "tiers[0].eviction"),
        ({"tiers": [MEMORY, {"type": "disk", "path": "/nowhere/at/all", "capacity": "1 MiB"}]}, "tiers[1].path"),
        ({"tiers": [MEMORY, {"type": "tape", "capacity": "1 MiB"}]}, "tiers[1].type"),
        ({"tiers": [MEMORY], "prefetch": {"policy": "hasty"}}, "prefetch.policy"),
        ({"tiers": []}, "tiers"),
    ],
)
def test_refused(settings: Mapping[str, Any], path: str) -> None:
    with pytest.raises(kv.ConfigError) as caught:
        kv.Config.from_dict(settings)
    assert caught.value.path == path
    assert path in str(caught.value)


def test_a_misspelt_variable() -> None:
    with pytest.raises(kv.ConfigError, match="KVCAIRN_PLANER"):
        ConfigReader({"KVCAIRN_PLANER": "off"}).read({"tiers": [MEMORY]})


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(kv.ConfigError, match=r"missing\.toml"):
        kv.Config.from_toml(tmp_path / "missing.toml")


def test_effective_settings_and_their_source() -> None:
    reader = ConfigReader({"KVCAIRN_PLANNER": "off"})
    settings = {setting.path: setting for setting in reader.explain(reader.read({"tiers": [MEMORY]}))}
    assert (settings["planner"].value, settings["planner"].source) == ("off", "KVCAIRN_PLANNER")
    assert settings["tiers[0].capacity"].source == "file"
    assert settings["verify_memory"].source == "default"
