from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcairn.config import (
    Config,
    ConfigReader,
    DiskTierOptions,
    MemoryTierOptions,
    PrefetchOptions,
)
from kvcairn.errors import ConfigError
from kvcairn.host import Host
from kvcairn.schema import config_schema

Tree = dict[str, Any]


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVCAIRN_"):
            monkeypatch.delenv(name)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    (tmp_path / "disk").mkdir()
    return {
        "tiers": [
            {"type": "memory", "capacity": "16 MiB"},
            {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "1 MiB"},
        ]
    }


def refusal(tree: Mapping[str, Any], environment: Mapping[str, str] | None = None, **how: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        ConfigReader(environment or {}, **how).read(tree)
    return caught.value


def changed(tree: Tree, path: str, value: object) -> Tree:
    """A copy with one place set, as in `tiers.0.capacity`; None removes it."""
    tree = copy.deepcopy(tree)
    *way, last = path.split(".")
    node: Any = tree
    for name in way:
        node = node[int(name)] if isinstance(node, list) else node.setdefault(name, {})
    if value is None:
        del node[last]
    else:
        node[last] = value
    return tree


def test_smallest_settings_and_their_defaults(tree: Tree) -> None:
    before = copy.deepcopy(tree)
    config = Config.from_dict(tree)
    path = tree["tiers"][1]["path"]
    assert config == Config(
        preset="unified",
        max_lease_fraction=0.5,
        planner="auto",
        verify_memory="sample",
        tiers=(
            MemoryTierOptions(name="memory", capacity_bytes=16 << 20, eviction="lru", prefault=True, poison=False),
            DiskTierOptions(
                name="disk",
                path=path,
                capacity_bytes=1 << 20,
                write_policy="through",
                eviction="lru",
                durability="none",
                min_touches=2,
            ),
        ),
        prefetch=PrefetchOptions(policy="timeout"),
    )
    assert config.memory is config.tiers[0]
    assert tree == before


def test_equal_settings_are_equal_and_hash_alike(tree: Tree) -> None:
    one, other = Config.from_dict(tree), Config.from_dict(changed(tree, "tiers.0.capacity", 16 << 20))
    assert one == other
    assert hash(one) == hash(other)
    assert one != Config.from_dict(changed(tree, "planner", "off"))


def test_settings_are_frozen(tree: Tree) -> None:
    config = Config.from_dict(tree)
    with pytest.raises(AttributeError):
        config.planner = "off"  # type: ignore[misc]


def test_every_setting_from_toml(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    file = tmp_path / "kvcairn.toml"
    file.write_text(f"""
        preset = "unified"
        max_lease_fraction = 0.25
        planner = "off"
        verify_memory = "always"
        [[tiers]]
        name = "ram"
        type = "memory"
        capacity = "64 MiB"
        region = "1 MiB"
        eviction = "lru"
        poison = true
        prefault = false
        [[tiers]]
        name = "ssd"
        type = "disk"
        path = "{tmp_path / "cache"}"
        capacity = "2 MB"
        write_policy = "none"
        min_touches = 3
        eviction = "lru"
        durability = "full"
        deadline = "200 ms"
        [prefetch]
        policy = "wait_complete"
        base = 2
        per_1024_tokens = "50 ms"
        time_to_live = "1 min"
    """)
    assert Config.from_toml(file) == Config(
        max_lease_fraction=0.25,
        planner="off",
        verify_memory="always",
        tiers=(
            MemoryTierOptions(name="ram", capacity_bytes=64 << 20, region_bytes=1 << 20, poison=True, prefault=False),
            DiskTierOptions(
                name="ssd",
                path=str(tmp_path / "cache"),
                capacity_bytes=2_000_000,
                write_policy="none",
                min_touches=3,
                durability="full",
                deadline_s=0.2,
            ),
        ),
        prefetch=PrefetchOptions(policy="wait_complete", base_s=2.0, per_1024_tokens_s=0.05, time_to_live_s=60.0),
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file"), (b"tiers = [", "not valid TOML"), (b"\xff\xfe", "not valid TOML")],
)
def test_unreadable_file_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "kvcairn.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        Config.from_toml(file)
    assert caught.value.path == str(file)


REFUSED: list[tuple[str, object, str, str]] = [
    # what is set, to what, the path that the error names, a part of its text
    ("planer", "auto", "planer", "no such setting; did you mean 'planner'?"),
    ("tiers.0.capasity", "1 MiB", "tiers[0].capasity", "did you mean 'capacity'?"),
    ("tiers.0.capacity_bytes", 1, "tiers[0].capacity_bytes", "did you mean 'capacity'?"),
    ("tiers.1.zzz", 1, "tiers[1].zzz", "settings here: capacity, deadline,"),
    ("prefetch.polcy", "timeout", "prefetch.polcy", "did you mean 'policy'?"),
    ("preset", "hicache", "preset", "not available in this version; available: unified"),
    ("preset", "hi", "preset", "expected one of: "),
    ("planner", "of", "planner", "did you mean 'off'?"),
    ("verify_memory", 3, "verify_memory", "expected one of: "),
    ("max_lease_fraction", 0, "max_lease_fraction", "> 0"),
    ("max_lease_fraction", 1.01, "max_lease_fraction", "<= 1"),
    ("max_lease_fraction", float("nan"), "max_lease_fraction", "> 0"),
    ("max_lease_fraction", True, "max_lease_fraction", "got `bool`"),
    ("max_lease_fraction", "0.5", "max_lease_fraction", "got `str`"),
    ("tiers", "memory", "tiers", "expected a list of tables"),
    ("tiers", {"type": "memory"}, "tiers", "expected a list of tables"),
    ("tiers", [], "tiers", "at least the memory tier"),
    ("tiers", ["memory"], "tiers[0]", "expected a table"),
    ("prefetch", "timeout", "prefetch", "expected a table"),
    ("tiers.1.type", None, "tiers[1].type", "set it to one of: memory, disk"),
    ("tiers.1.type", "dsik", "tiers[1].type", "did you mean 'disk'? use one of: memory, disk"),
    ("tiers.1.type", "redis", "tiers[1].type", "no such kind of tier (given: 'redis'); use one of: memory, disk"),
    ("tiers.0.capacity", 8, "tiers[0].capacity", "8 bytes asked; a slot takes at least 4096; write the unit"),
    ("tiers.0.capacity", None, "tiers[0].capacity", "without a bound"),
    ("tiers.1.capacity", None, "tiers[1].capacity", "without a bound"),
    ("tiers.0.capacity", 0, "tiers[0].capacity", "no bound"),
    ("tiers.0.capacity", "0 GiB", "tiers[0].capacity", "no bound"),
    ("tiers.0.capacity", -1, "tiers[0].capacity", "negative"),
    ("tiers.0.capacity", 1.5, "tiers[0].capacity", "got float"),
    ("tiers.0.capacity", True, "tiers[0].capacity", "got bool"),
    ("tiers.0.capacity", float("inf"), "tiers[0].capacity", "got float"),
    ("tiers.0.capacity", "1 s", "tiers[0].capacity", "unknown unit 's' of size"),
    ("tiers.0.capacity", "unlimited", "tiers[0].capacity", "expected a size"),
    ("tiers.0.region", "17 MiB", "tiers[0].region", "above the capacity of 16 MiB"),
    ("tiers.0.eviction", "lfru", "tiers[0].eviction", "no such eviction policy"),
    ("tiers.1.eviction", "belady", "tiers[1].eviction", "use one of: arc, fifo, lfu, lru"),
    ("tiers.0.poison", 1, "tiers[0].poison", "expected `bool`"),
    ("tiers.0.name", "", "tiers[0].name", "matching regex"),
    ("tiers.0.name", "disk", "tiers[1].name", "tiers[0] has this name"),
    ("tiers.1.promotion", "move", "tiers[1].promotion", "set tiers[1].write_policy = 'back'"),
    ("tiers.1.min_touches", 256, "tiers[1].min_touches", "<= 255"),
    ("tiers.1.write_policy", "thru", "tiers[1].write_policy", "did you mean 'through'?"),
    ("tiers.1.durability", "fsync", "tiers[1].durability", "expected one of: "),
    ("tiers.1.min_touches", 0, "tiers[1].min_touches", ">= 1"),
    ("tiers.1.deadline", "1 GiB", "tiers[1].deadline", "unknown unit 'GiB' of time"),
    ("tiers.1.path", 7, "tiers[1].path", "expected `str`"),
    ("tiers.1.path", "", "tiers[1].path", "empty"),
    ("tiers.1.path", None, "tiers[1].path", "missing"),
    ("prefetch.base", float("nan"), "prefetch.base", "finite"),
    ("prefetch.base", -1, "prefetch.base", "negative"),
    ("prefetch.policy", "best-effort", "prefetch.policy", "did you mean 'best_effort'?"),
]


@pytest.mark.parametrize(("where", "value", "path", "text"), REFUSED)
def test_refused(tree: Tree, where: str, value: object, path: str, text: str) -> None:
    error = refusal(changed(tree, where, value))
    assert error.path == path
    assert text in str(error)
    assert "\n" not in str(error)
    assert "config schema" not in str(error) or error.reason == "missing", "what is complete sends nobody elsewhere"
    assert isinstance(error, ValueError)


def test_settings_that_are_no_table() -> None:
    assert "expected a table" in str(refusal([]))  # type: ignore[arg-type]


def test_memory_is_first_and_alone(tree: Tree) -> None:
    memory, disk = tree["tiers"]
    assert refusal({"tiers": [disk, memory]}).path == "tiers[0].type"
    assert refusal({"tiers": [memory, memory | {"name": "more"}]}).path == "tiers[1].type"


def test_capacity_above_the_machine_shows_the_arithmetic(tree: Tree, tmp_path: Path) -> None:
    host = fake_host(tmp_path, memory_bytes=24 << 30)
    error = refusal(changed(tree, "tiers.0.capacity", "64 GiB"), host=host)
    assert error.path == "tiers[0].capacity"
    assert "64 GiB asked; this host has 24 GiB; 40 GiB too much" in str(error)


def test_capacity_above_the_control_group_shows_the_arithmetic(tree: Tree, tmp_path: Path) -> None:
    host = fake_host(tmp_path, memory_bytes=24 << 30, limit_bytes=16 << 30)
    error = refusal(changed(tree, "tiers.0.capacity", "20 GiB"), host=host)
    assert "20 GiB asked; this host has 24 GiB; the control group may use 16 GiB; 4 GiB too much" in str(error)
    ConfigReader({}, host).read(changed(tree, "tiers.0.capacity", "16 GiB"))


def fake_host(root: Path, memory_bytes: int, limit_bytes: int | None = None) -> Host:
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroups.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: {memory_bytes >> 10} kB\n")
    (proc / "self" / "cgroup").write_text("0::/\n")
    if limit_bytes is not None:
        (cgroups / "memory.max").write_text(f"{limit_bytes}\n")
    return Host(proc, cgroups)


def test_disk_capacity_above_the_file_system_shows_the_arithmetic(tree: Tree) -> None:
    error = refusal(changed(tree, "tiers.1.capacity", "1024 PiB"))
    assert error.path == "tiers[1].capacity"
    assert re.search(r"1024 PiB asked; the file system has .* free and 0 B here in use, .* too much", str(error))
    assert str(error).count("tiers[1].capacity") == 1, "the path stands once"


def test_disk_capacity_counts_what_the_folder_already_holds(tree: Tree) -> None:
    folder = Path(tree["tiers"][1]["path"])
    with (folder / "segment").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 3 << 20)
    assert re.search(r"free and 3(\.0)? MiB here in use", str(refusal(changed(tree, "tiers.1.capacity", "1024 PiB"))))


def test_disks_on_one_file_system_are_added_up(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    free = os.statvfs(tmp_path)
    most = free.f_bavail * free.f_frsize
    half = tree["tiers"][1] | {"capacity": most * 6 // 10}
    tree["tiers"][1:] = [half, half | {"name": "second", "path": str(tmp_path / "other")}]
    error = refusal(tree)
    assert error.path == "tiers[2].capacity"
    assert re.search(r"tiers\[1\] .* \+ tiers\[2\] .* asked", str(error))


def test_what_is_to_stay_free_counts(tree: Tree) -> None:
    device = os.statvfs(tree["tiers"][1]["path"])
    free = device.f_bavail * device.f_frsize
    tree = changed(tree, "tiers.1.reserve", free - (1 << 20))
    error = refusal(changed(tree, "tiers.1.capacity", "256 MiB"))
    assert (error.path, "stay free (reserve)" in error.reason) == ("tiers[1].capacity", True)


def test_capacity_that_an_error_advises_is_accepted(tree: Tree, tmp_path: Path) -> None:
    """Advice is copied into the file as it stands."""
    host = fake_host(tmp_path, memory_bytes=(24 << 30) + (900 << 20))
    for reader, setting in ((ConfigReader({}, host), "tiers.0.capacity"), (ConfigReader({}), "tiers.1.capacity")):
        with pytest.raises(ConfigError) as caught:
            reader.read(changed(tree, setting, "1000 TiB"))
        advised = re.search(r"at most ([0-9.]+ \w+)", caught.value.remedy)
        assert advised, caught.value.remedy
        ConfigReader({}, host).read(changed(tree, setting, advised[1]))


class TestWarnings:
    def read(self, tree: Tree, host: Host | None = None) -> list[str]:
        reader = ConfigReader({}, host)
        reader.read(tree)
        return reader.warnings

    def test_nothing_is_said_of_settings_that_do_what_they_say(self, tree: Tree) -> None:
        assert self.read(tree) == []

    def test_a_memory_tier_that_leaves_nothing_for_the_engine(self, tree: Tree, tmp_path: Path) -> None:
        host = fake_host(tmp_path, memory_bytes=24 << 30)
        (warning,) = self.read(changed(tree, "tiers.0.capacity", "22 GiB"), host)
        assert warning.startswith("tiers[0].capacity: 22 GiB of 24 GiB leaves 2 GiB for everything else")
        assert "at most 21.6 GiB" in warning
        assert self.read(changed(tree, "tiers.0.capacity", "21.6 GiB"), host) == []

    def test_more_memory_than_is_free_now(self, tree: Tree, tmp_path: Path) -> None:
        host = fake_host(tmp_path, memory_bytes=24 << 30)
        (host.proc / "meminfo").write_text(f"MemTotal: {24 << 20} kB\nMemAvailable: {4 << 20} kB\n")
        (warning,) = self.read(changed(tree, "tiers.0.capacity", "6 GiB"), host)
        assert warning.startswith("tiers[0].capacity: 6 GiB asked; 4 GiB are available now")

    def test_a_setting_that_another_makes_useless(self, tree: Tree) -> None:
        (warning,) = self.read(changed(tree, "tiers.1.min_touches", 3))
        assert warning.startswith("tiers[1].min_touches: has no effect with write_policy = 'through'")
        tree = changed(tree, "tiers.1.min_touches", 3)
        assert self.read(changed(tree, "tiers.1.write_policy", "selective")) == []

    def test_so_in_memory(self, tree: Tree) -> None:
        (warning,) = self.read(changed(tree, "tiers.0.min_touches", 3))
        assert warning.startswith("tiers[0].min_touches: has no effect")

    def test_reading_settings_in_code_logs_them(self, tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
        Config.from_dict(changed(tree, "tiers.1.min_touches", 3))
        assert "tiers[1].min_touches" in caplog.text


def test_missing_folder_is_not_made(tree: Tree, tmp_path: Path) -> None:
    missing = tmp_path / "not there"
    error = refusal(changed(tree, "tiers.1.path", str(missing)))
    assert error.path == "tiers[1].path"
    assert error.remedy == f"mkdir -m 700 -p '{missing}'"
    assert not missing.exists()


def test_file_in_place_of_a_folder(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "not a folder" in str(refusal(changed(tree, "tiers.1.path", str(tmp_path / "file"))))


def test_two_disks_on_one_folder(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    tree["tiers"].append(tree["tiers"][1] | {"name": "second", "path": str(tmp_path / "link")})
    error = refusal(tree)
    assert error.path == "tiers[2].path"
    assert "tiers[1] uses this folder" in str(error)


class TestEnvironment:
    def test_lays_over_the_settings(self, tree: Tree) -> None:
        reader = ConfigReader(
            {
                "KVCAIRN_VERIFY_MEMORY": "always",
                "KVCAIRN_TIERS__0__CAPACITY": "1MiB",
                "KVCAIRN_TIERS__0__POISON": "true",
                "KVCAIRN_TIERS__1__MIN_TOUCHES": "4",
                "KVCAIRN_PREFETCH__BASE": "200 ms",
                "KVCAIRN_MAX_LEASE_FRACTION": "0.75",
                "OTHER": "left alone",
            }
        )
        config = reader.read(tree)
        assert config.verify_memory == "always"
        assert (config.memory.capacity_bytes, config.memory.poison) == (1 << 20, True)
        assert isinstance(config.tiers[1], DiskTierOptions)
        assert config.tiers[1].min_touches == 4
        assert (config.prefetch.base_s, config.max_lease_fraction) == (0.2, 0.75)

    def test_applies_to_dict_and_toml(self, tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVCAIRN_PLANNER", "off")
        assert Config.from_dict(tree).planner == "off"
        file = tmp_path / "kvcairn.toml"
        file.write_text('planner = "auto"\n[[tiers]]\ntype = "memory"\ncapacity = 65536\n')
        assert Config.from_toml(file).planner == "off"

    @pytest.mark.parametrize(
        ("variable", "text"),
        [
            ("KVCAIRN_PLANER", "auto"),
            ("KVCAIRN_FOO__BAR", "1"),
            ("KVCAIRN_TIERS__0__CAPASITY", "1 MiB"),
            ("KVCAIRN_TIERS__9__CAPACITY", "1 MiB"),
            ("KVCAIRN_TIERS__X__CAPACITY", "1 MiB"),
            ("KVCAIRN_TIERS__0", "memory"),
            ("KVCAIRN_PLANNER__X", "1"),
            ("KVCAIRN_", "1"),
            ("KVCAIRN_PREFETCH__", "1"),
            ("KVCAIRN_PLANNER", "sometimes"),
            ("KVCAIRN_TIERS__0__CAPACITY", "1 Gb"),
            ("KVCAIRN_TIERS__0__POISON", "maybe"),
            ("KVCAIRN_MAX_LEASE_FRACTION", "nan"),
            ("KVCAIRN_MAX_LEASE_FRACTION", "7"),
        ],
    )
    def test_bad_variable_is_named(self, tree: Tree, variable: str, text: str) -> None:
        tree["planner"] = "auto"
        assert variable in str(refusal(tree, {variable: text}))


def test_explain_names_the_source_of_every_value(tree: Tree) -> None:
    reader = ConfigReader({"KVCAIRN_TIERS__0__CAPACITY": "1 MiB"})
    explained = reader.explain(reader.read(tree))
    settings = {s.path: (s.value, s.source) for s in explained}
    assert settings["tiers[0].capacity"] == (1 << 20, "KVCAIRN_TIERS__0__CAPACITY")
    assert settings["tiers[1].capacity"] == (1 << 20, "file")
    assert settings["tiers[1].type"] == ("disk", "file")
    assert settings["tiers[1].durability"] == ("none", "default")
    assert settings["prefetch.policy"] == ("timeout", "default")
    units = {s.path: s.unit for s in explained if s.unit}
    assert (
        units.items()
        >= {
            "tiers[0].capacity": "bytes",
            "tiers[1].capacity": "bytes",
            "tiers[1].deadline": "seconds",
            "prefetch.base": "seconds",
            "prefetch.per_1024_tokens": "seconds",
            "prefetch.time_to_live": "seconds",
        }.items()
    )
    assert "prefetch.policy" not in units


def test_single_tier(tree: Tree) -> None:
    options = ConfigReader({}).read_tier(tree["tiers"][1])
    assert isinstance(options, DiskTierOptions)
    with pytest.raises(ConfigError) as caught:
        ConfigReader({}).read_tier(tree["tiers"][1] | {"capacity": "8 G"})
    assert caught.value.path == "tier.capacity"


def test_schema_accepts_texts_where_a_unit_is_known() -> None:
    schema = config_schema()
    assert schema["$ref"] == "#/$defs/Config"
    kinds = [kind["$ref"] for kind in schema["$defs"]["Config"]["properties"]["tiers"]["items"]["anyOf"]]
    assert kinds == ["#/$defs/MemoryTierOptions", "#/$defs/DiskTierOptions"]
    capacity = schema["$defs"]["DiskTierOptions"]["properties"]["capacity"]["anyOf"]
    assert [form["type"] for form in capacity] == ["integer", "string"]
    assert schema["$defs"]["DiskTierOptions"]["additionalProperties"] is False
    assert b"x-unit" not in msgspec.json.encode(schema)


def test_a_path_object_stands_for_its_text(tmp_path: Path) -> None:
    def config(path: object) -> Config:
        disk = {"type": "disk", "path": path, "capacity": "1 MiB"}
        return Config.from_dict({"tiers": [{"type": "memory", "capacity": "1 MiB"}, disk]})

    assert config(tmp_path) == config(str(tmp_path))
