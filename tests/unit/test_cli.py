from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvcairn import Cache, Config, ConfigError, KVLayout, SpaceDescriptor
from kvcairn.cli import app

GOOD = '[[tiers]]\ntype = "memory"\ncapacity = "16 MiB"\n'


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    file = tmp_path / "kvcairn.toml"
    file.write_text(GOOD)
    return file


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout.split()[0]) == (0, "kvcairn")


def test_config_check_for_people(settings: Path) -> None:
    result = run("config", "check", str(settings))
    assert result.exit_code == 0
    assert ["tiers[0].capacity", "16", "MiB", "file"] in [line.split() for line in result.stdout.splitlines()]


def test_config_check_as_lines(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCAIRN_VERIFY_MEMORY", "always")
    result = run("config", "check", str(settings), "--json")
    rows = {row["path"]: row for row in map(json.loads, result.stdout.splitlines())}
    source = "KVCAIRN_VERIFY_MEMORY"
    assert rows["verify_memory"] == {"path": "verify_memory", "value": "always", "source": source, "unit": None}
    assert (rows["tiers[0].capacity"]["value"], rows["tiers[0].capacity"]["unit"]) == (16 << 20, "bytes")
    assert result.stderr == ""


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_refused_setting_is_one_line_and_status_2(settings: Path, as_json: list[str]) -> None:
    settings.write_text(GOOD.replace("capacity", "capasity"))
    result = run("config", "check", str(settings), *as_json)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "kvcairn: tiers[0].capasity: no such setting; did you mean 'capacity'?",
    ]


def test_a_disk_too_small_to_open_is_refused_with_the_least_that_is_not(settings: Path, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()

    def check(capacity: int) -> Result:
        settings.write_text(f'{GOOD}[[tiers]]\ntype = "disk"\npath = "{folder}"\ncapacity = {capacity}\n')
        return run("config", "check", str(settings))

    refused = check(20_000)
    assert refused.exit_code == 2
    found = re.search(r"tiers\[1\]\.capacity: .* at least ([0-9]+) bytes", refused.stderr)
    assert found, refused.stderr
    least = int(found[1])
    assert check(least - 1).exit_code == 2
    with pytest.raises(ConfigError, match=str(least)):
        Cache.open(Config.from_toml(settings))
    assert check(least).exit_code == 0
    layout = KVLayout.full(layers=2, kv_heads=1, head_dim=64, dtype="float16")
    with Cache.open(Config.from_toml(settings)) as cache:
        space = cache.space(SpaceDescriptor(model="m", weights="w", layout=layout, block_tokens=8))
        assert space.block_bytes == 4096
        keys = space.keys(range(8))
        assert space.put(keys, [bytes(4096)]) == [True]
        assert cache.drain("disk", timeout_s=60)
        assert cache.stats().tiers["disk"].blocks == 1, "there is room for a block"


def test_missing_file_is_named(tmp_path: Path) -> None:
    result = run("config", "check", str(tmp_path / "none.toml"))
    assert result.exit_code == 2
    assert str(tmp_path / "none.toml") in result.stderr


def test_schema_is_json() -> None:
    result = run("config", "schema")
    assert json.loads(result.stdout)["$defs"]["Config"]["type"] == "object"


def test_doctor(tmp_path: Path) -> None:
    result = run("doctor", "--json", "--path", str(tmp_path))
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 0
    assert {"name", "status", "value", "remedy"} == set(rows[0])
    assert "direct I/O" in [row["name"] for row in rows]


def test_doctor_fails_on_a_missing_folder(tmp_path: Path) -> None:
    result = run("doctor", "--path", str(tmp_path / "missing"))
    assert result.exit_code == 1
    assert "mkdir" in result.stdout


@pytest.mark.parametrize("arguments", [["bogus"], ["config", "check"], ["doctor", "--nope"], ["bench", "nothing"]])
def test_bad_usage_is_status_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_installed_command_shows_no_traceback(settings: Path) -> None:
    settings.write_text("tiers = 3\n")
    command = [str(Path(sys.executable).parent / "kvcairn"), "config", "check", str(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("kvcairn: tiers: expected a list of tables")
    assert done.stderr.count("\n") == 1


def test_completion_script_names_the_command() -> None:
    command = [str(Path(sys.executable).parent / "kvcairn")]
    environment = {"_KVCAIRN_COMPLETE": "source_bash", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    assert "complete" in done.stdout
    assert "kvcairn" in done.stdout


def with_disk(settings: Path, folder: Path, **disk: object) -> Path:
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in disk.items())
    settings.write_text(f'{GOOD}[[tiers]]\ntype = "disk"\npath = "{folder}"\ncapacity = "16 MiB"\n{lines}')
    return settings


def test_config_check_shows_units(settings: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with_disk(settings, tmp_path / "disk", reserve="1.5 MiB", deadline="250 ms", max_write_bytes_per_day="2 TiB")
    shown = run("config", "check", str(settings)).stdout
    found = {line.split()[0]: " ".join(line.split()[1:-1]) for line in shown.splitlines()}
    assert found["tiers[1].reserve"] == "1.5 MiB"
    assert found["tiers[1].deadline"] == "250 ms"
    assert found["tiers[1].max_write_bytes_per_day"] == "2 TiB"
    assert found["tiers[1].capacity"] == "16 MiB"
    assert found["prefetch.time_to_live"] == "30 s"


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_config_check_warns_beside_the_table(settings: Path, tmp_path: Path, as_json: list[str]) -> None:
    (tmp_path / "disk").mkdir()
    with_disk(settings, tmp_path / "disk", min_touches=3)
    result = run("config", "check", str(settings), *as_json)
    assert result.exit_code == 0
    assert result.stderr.startswith("kvcairn: warning: tiers[1].min_touches: has no effect")
    assert result.stderr.count("\n") == 1
    assert "warning" not in result.stdout


def test_serve_warns_of_the_same(settings: Path, tmp_path: Path) -> None:
    settings.write_text(GOOD + "min_touches = 3\n")
    result = run("serve", "--config", str(settings), "--socket", str(tmp_path / "missing" / "socket"))
    assert result.exit_code == 2
    warning, refusal = result.stderr.splitlines()
    assert warning.startswith("kvcairn: warning: tiers[0].min_touches: has no effect")
    assert refusal.startswith("kvcairn: socket: ")


def test_config_check_sees_a_folder_of_something_else(
    settings: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "thesis.pdf").touch()
    result = run("config", "check", str(with_disk(settings, folder)))
    assert result.exit_code == 0
    assert "tiers[1].path: something else lies in this folder: thesis.pdf" in result.stderr + caplog.text
    assert [path.name for path in folder.iterdir()] == ["thesis.pdf"]


def test_config_check_may_run_beside_a_cache(settings: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with Cache.open(Config.from_toml(with_disk(settings, tmp_path / "disk"))):
        assert run("config", "check", str(settings)).exit_code == 0


@pytest.mark.parametrize("as_json", [[], ["--json"]])
@pytest.mark.parametrize(
    "command",
    [("bench", "disk", "--path"), ("bench", "engine", "--engine", "sglang", "--path"), ("demo", "--workdir"),
     ("ls",), ("scrub",), ("config", "check")],
    ids=" ".join,
)  # fmt: skip
def test_a_mistyped_path_is_named_and_makes_nothing(
    tmp_path: Path, command: tuple[str, ...], as_json: list[str]
) -> None:
    for missing in (tmp_path / "typo" / "below", tmp_path / "file" / "below"):
        (tmp_path / "file").touch()
        result = run(*command, str(missing), *as_json)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "Traceback" not in result.stderr
        assert missing.name in "".join(line.strip(" │") for line in result.stderr.splitlines())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("command", [("ls",), ("scrub",), ("doctor", "--path")], ids=" ".join)
def test_what_the_system_refuses_is_one_line(command: tuple[str, ...]) -> None:
    result = run(*command, "x" * 300)
    assert result.exit_code == 1
    assert re.fullmatch(r"kvcairn: \[Errno 36\] File name too long: 'x+(/folder)?'\n", result.stderr)


@pytest.mark.parametrize(
    ("words", "offered"),
    [("kvcairn be", {"bench"}), ("kvcairn config ", {"check", "schema"}), ("kvcairn doctor --sg", {"--sglang-args"}),
     ("kvcairn bench engine --engine ", {"vllm", "sglang"})],
)  # fmt: skip
def test_a_shell_completes_commands_options_and_values(words: str, offered: set[str]) -> None:
    environment = {"_KVCAIRN_COMPLETE": "complete_bash", "COMP_WORDS": words, "PATH": "/usr/bin:/bin"}
    environment["COMP_CWORD"] = str(len(words.split(" ")) - 1)
    command = [str(Path(sys.executable).parent / "kvcairn")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert offered <= set(done.stdout.split())
