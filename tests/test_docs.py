"""The documentation is true: its code runs, its commands exist, its links lead somewhere, its tables match the code."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

import kvcairn as kv
from kvcairn import bench, cache, config, demo
from kvcairn.adapters import vllm
from kvcairn.adapters.sglang.arguments import check_arguments
from kvcairn.adapters.sglang.versions import check_version
from kvcairn.adapters.vllm.controls import Controls
from kvcairn.adapters.vllm.settings import ConnectorOptions
from kvcairn.cli import app
from kvcairn.core import batches, detaching, events, hints, leaving, promote, rebuild, writes
from kvcairn.doctor import Check
from kvcairn.memory import slots
from kvcairn.testing import PolicyTests
from kvcairn.tiers import breaker
from kvcairn.tiers.disk import inspect

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
COMMAND = typer.main.get_command(app)
# Sizes that suit a server, and what stands for them here.
SMALLER = {"100 GiB": "512 MiB", "10 GiB": "512 MiB", "8 GiB": "256 MiB", "2 GiB": "64 MiB"}
# Pages that show lines out of a larger program: each block begins with these names anew.
LOOSE = {DOCS / "guides" / "transformers.md"}
# Pages whose lines take a model and a prompt as given.
WITH_MODEL = {ROOT / "README.md", ROOT / "README.zh.md", *LOOSE}


@dataclass(frozen=True)
class Fence:
    """A code block: its language, its text, and the number of its first line."""

    language: str
    text: str
    line: int


def fences(page: Path, language: str | None = None) -> list[Fence]:
    text = page.read_text()
    found = [
        Fence(match[1], match[2], text[: match.start()].count("\n") + 2)
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    ]
    return [fence for fence in found if language in (None, fence.language)]


def table_rows(page: Path, under: str = "") -> list[list[str]]:
    """Cells of all table rows of a page, or of those under one heading; titles and rulers are left out."""
    text = page.read_text()
    if under:
        text = re.split(rf"^#+ {re.escape(under)}$", text, flags=re.M)[1]
        text = re.split(r"^#", text, maxsplit=1, flags=re.M)[0]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def first_names(rows: list[list[str]]) -> list[str]:
    """The names in backquotes of the first column."""
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def with_fences(language: str) -> list[Any]:
    return [pytest.param(page, id=name_of(page)) for page in PAGES if fences(page, language)]


# --- code


def shrunk(text: str, folder: Path) -> str:
    for large, small in SMALLER.items():
        text = text.replace(f'"{large}"', f'"{small}"')
    return text.replace("/var/lib/kvcairn", str(folder / "disk")).replace("/var/tmp/kvcairn", str(folder / "disk"))


def given(page: Path, folder: Path) -> dict[str, Any]:
    """What the code of a page finds: nothing, or a tiny random model, a prompt, and settings in a file."""
    if page not in WITH_MODEL:
        return {}
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from kvcairn.adapters.transformers import CachedModel, Naming
    from tests.engines import transformers_kit as kit

    model, ids = kit.build(kit.llama), kit.prompt(200, seed=1)
    names = {"hf_model": model, "input_ids": ids, "token_ids": range(256), "blocks": [bytes(65536)] * 4}
    settings = shrunk(fences(ROOT / "README.md", "toml")[0].text, folder)
    (folder / "kvcairn.toml").write_text(settings)
    if page in LOOSE:
        loaded = kv.Config.from_dict(tomllib.loads(settings))
        cache = kv.Cache.open(loaded)
        cached = CachedModel(model, cache)
        cached.generate(ids, max_new_tokens=2)
        names |= {"kv": kv, "CachedModel": CachedModel, "Naming": Naming, "config": loaded, "cache": cache}
        names |= {"model": cached, "all_ids": torch.cat([ids, torch.tensor([[5]])], dim=1)}
    return names | {"use": lambda blocks, reason: None}


def run(page: Path, fence: Fence, names: dict[str, Any], folder: Path) -> None:
    code = "\n" * (fence.line - 1) + shrunk(fence.text, folder)
    exec(compile(code, str(page), "exec"), names)


def close_caches(names: dict[str, Any]) -> None:
    for value in names.values():
        if isinstance(value, kv.Cache):
            value.close(drain=False)


# The guide shows the argument that every supported version takes, and says that later ones warn.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("page", with_fences("python"))
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk").mkdir()
    names: dict[str, Any] = {}
    try:
        for number, fence in enumerate(fences(page, "python")):
            if number == 0 or page in LOOSE:
                close_caches(names)
                names = {"__name__": "page"} | given(page, tmp_path)
            run(page, fence, names, tmp_path)
    finally:
        close_caches(names)


def test_the_policy_of_the_guide_passes_the_suite(tmp_path: Path) -> None:
    guide = fences(DOCS / "extend" / "write-a-policy.md", "python")
    (tmp_path / "test_guide.py").write_text("\n".join(fence.text for fence in guide))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_guide.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    count = sum(name.startswith("test_") for name in dir(PolicyTests)) + 1
    assert f"{count} passed" in done.stdout


def test_the_tier_of_the_guide_passes_the_suite(tmp_path: Path) -> None:
    guide = fences(DOCS / "extend" / "write-a-tier.md", "python")
    (tmp_path / "test_guide.py").write_text("\n".join(fence.text for fence in guide))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_guide.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d\d passed", done.stdout)


def test_settings_that_the_core_reads_of_any_tier_are_listed() -> None:
    rows = table_rows(DOCS / "extend" / "write-a-tier.md", "Its settings")
    known = msgspec.structs.fields(config.ManagedTierOptions)
    assert set(first_names(rows)) == {each.encode_name for each in known} - {"name"}
    spelled = {name for row in rows for name in re.findall(r"`([^`]+)`", row[1])}
    assert spelled == {each.name for each in known if each.name != each.encode_name}


def test_the_whole_program_of_the_guide_prints_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    program = fences(DOCS / "guides" / "transformers.md", "python")[0].text
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == program.rstrip().rpartition("  # ")[2]
    assert len(program.splitlines()) <= 14


def test_the_rows_of_the_demo_are_called_as_they_are_printed() -> None:
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `")][:4]
    printed = demo.table([demo_row(name) for name in ("recompute", "memory", "disk", "damaged")])
    assert [re.findall(r"`([^`]+)`", row)[0] for row in rows] == list(printed.columns[0].cells)
    assert all("yes" in row for row in rows)


def demo_row(name: str) -> demo.Row:
    return demo.Row(
        row=name, ttft_s=1.0, prompt_tokens=1, reused_tokens={}, identical=True, model="m", new_tokens=1
    )  # fmt: skip


def test_the_readme_reuses_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk").mkdir()
    names = given(ROOT / "README.md", tmp_path)
    first, second = fences(ROOT / "README.md", "python")
    seen: list[tuple[int, object]] = []
    names["use"] = lambda blocks, reason: seen.append((len(blocks), reason))
    try:
        run(ROOT / "README.md", first, names, tmp_path)
        assert names["model"].last_reuse.by_tier == {}
        names["model"].generate(names["input_ids"], max_new_tokens=2)
        assert names["model"].last_reuse.by_tier == {"memory": 192}
        run(ROOT / "README.md", second, names, tmp_path)
        assert seen == [(4, None)]
    finally:
        close_caches(names)


@pytest.mark.parametrize("page", with_fences("toml"))
def test_settings_are_accepted(page: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    for fence in fences(page, "toml"):
        kv.Config.from_dict(tomllib.loads(shrunk(fence.text, tmp_path)))


@pytest.mark.parametrize("page", with_fences("json"))
def test_json_is_json(page: Path) -> None:
    for fence in fences(page, "json"):
        assert json.loads(fence.text)


# --- commands


def leaves(command: Any, path: str = "kvcairn") -> Iterator[str]:
    """Names of all commands; a group has `commands`, and typer does not say of what type it is."""
    children = getattr(command, "commands", None)
    if children is None:
        yield path
    for name, child in (children or {}).items():
        yield from leaves(child, f"{path} {name}")


def check_kvcairn(words: list[str]) -> None:
    command: Any = COMMAND
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no command {words[0]!r}"
        command = command.commands[words.pop(0)]
    known = {"--help"} | {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if re.fullmatch(r"--?[\w-]+", word)} <= known


def check_vllm(words: list[str]) -> None:
    """The engine's JSON says what the connector needs; that vLLM takes it is tested with vLLM."""
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer.keys() == {
        "kv_connector", "kv_connector_module_path", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config",
    }  # fmt: skip
    assert transfer["kv_connector"] in vllm.__all__
    assert transfer["kv_connector_module_path"] == vllm.__name__
    assert transfer["kv_load_failure_policy"] == "recompute"
    several = "--tensor-parallel-size" in words  # workers of their own processes share a daemon
    assert transfer["kv_connector_extra_config"].keys() == {"connect" if several else "config"}


def check_pip(targets: list[str]) -> None:
    # Not `kvcairn[...]`: no registry has it before the first release.
    extra = re.fullmatch(r"\.(?:\[(\w+)\])?", targets[0])
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extra and (extra[1] is None or extra[1] in known)
    for engine in targets[1:]:
        name, _, wanted = engine.partition("==")
        assert name == "sglang"
        check_version(wanted)


def check_line(line: str) -> None:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_0-9]+=\S*", words[0]):
        words.pop(0)
    match words:
        case ["kvcairn" | ".venv/bin/kvcairn", *rest]:
            check_kvcairn(rest)
        case ["python", "-m", "sglang.launch_server", *arguments]:
            findings = list(check_arguments(shlex.join(arguments)))
            assert {finding.status for finding in findings} == {"ok"}, findings
        case ["vllm", "serve", "MODEL", *rest] | ["python", "-m", "vllm.entrypoints.openai.api_server", *rest]:
            check_vllm(rest)
        case ["mkdir", "-m", "700", "-p", _]:
            pass
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module)
        case ["pip", "install", *targets]:
            check_pip(targets)
        case [script, *_] if "scripts/" in script:
            assert os.access(ROOT / script, os.X_OK)
        case []:
            pass
        case _:
            raise AssertionError(f"nobody knows how to check {line!r}")


@pytest.mark.parametrize("page", with_fences("sh"))
def test_commands_exist(page: Path) -> None:
    for fence in fences(page, "sh"):
        for line in whole_lines(fence.text):
            check_line(line.replace("@kvcairn-sglang.json", shlex.quote("".join(f.text for f in fences(page, "json")))))


def whole_lines(text: str) -> Iterator[str]:
    """Lines as a shell reads them: those that end in a backslash or within quotes go on."""
    line = ""
    for part in text.splitlines():
        line += part.removesuffix("\\")
        try:
            shlex.split(line, comments=True)
        except ValueError:
            line += "\n"
            continue
        if not part.endswith("\\"):
            yield line
            line = ""
    assert not line


def test_every_command_is_listed_and_none_that_is_missing() -> None:
    page = DOCS / "reference" / "cli.md"
    assert sorted(first_names(table_rows(page))) == sorted(leaves(COMMAND))
    missing = page.read_text().split("Not there yet:")[1]
    names = [f"kvcairn {name}" for name in re.findall(r"`([a-z ]+)`", missing)]
    assert names and not {"kvcairn bench"}.symmetric_difference(names) & set(leaves(COMMAND))


# --- links


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\s-]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.is_file(), f"{target}: there is no such file"
        assert not anchor or anchor in anchors(there), f"{target}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_are_there(page: Path) -> None:
    text = page.read_text()
    assert [name for name in re.findall(r"`(tests/[\w/.]+)`", text) if not (ROOT / name).exists()] == []
    source = re.findall(r"`((?:core|index|memory|policy|tiers|transfer)/[\w/]*(?:\.py)?)`", text)
    assert [name for name in source if not (ROOT / "src" / "kvcairn" / name).exists()] == []


# --- both languages


def test_the_chinese_readme_is_the_same() -> None:
    english, chinese = ROOT / "README.md", ROOT / "README.zh.md"

    def code(page: Path) -> list[tuple[str, str]]:
        return [(fence.language, re.sub(r" *#.*", "", fence.text)) for fence in fences(page)]

    def links(page: Path) -> set[str]:
        return set(re.findall(r"\]\(([a-zA-Z/.-]+\.md)", page.read_text())) - {"README.md", "README.zh.md"}

    def shape(page: Path) -> list[str]:
        return re.findall(r"^(?:#+|\d\.|\|)(?= )", page.read_text(), re.M)

    assert code(chinese) == code(english)
    assert links(chinese) == links(english)
    assert shape(chinese) == shape(english)

    def names(page: Path) -> list[str]:
        return sorted(re.findall(r"`[^`\n]+`", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)))

    assert names(chinese) == names(english)


# --- tables


def test_every_reason_is_explained() -> None:
    text = (DOCS / "concepts" / "misses.md").read_text()
    reasons = text.split("## Writes that were given up", maxsplit=1)[0]
    assert re.findall(r"^\| `(\w+)`", reasons, re.M) == [reason.value for reason in kv.MissReason]


def test_dropped_writes_are_explained() -> None:
    explained = set(first_names(table_rows(DOCS / "concepts" / "misses.md", "Writes that were given up")))
    source = Path(writes.__file__).read_text() + Path(batches.__file__).read_text()
    given = set(re.findall(r'_drop(?:ped|_all)\("(\w+)"', source)) | set(re.findall(r'"(tier_\w+)" if', source))
    given |= {kv.MissReason[name].value for name in re.findall(r"MissReason\.(\w+)\.value", source)}
    assert explained == given


def facts_of(kind: type[msgspec.Struct]) -> dict[str, tuple[str, str]]:
    """Default and unit of each setting, as the tables write them."""
    described = msgspec.inspect.type_info(kind)
    assert isinstance(described, msgspec.inspect.StructType)
    found = {}
    for known in described.fields:
        inner = known.type
        if isinstance(inner, msgspec.inspect.UnionType):
            inner = next(each for each in inner.types if isinstance(each, msgspec.inspect.Metadata))
        extra = inner.extra or {} if isinstance(inner, msgspec.inspect.Metadata) else {}
        default = "required" if known.required else "none" if known.default is None else f"`{_toml(known.default)}`"
        found[known.encode_name] = default, extra.get("unit", "")
    return found


def _toml(value: object) -> str:
    return json.dumps(value)


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("A memory tier", config.MemoryTierOptions),
        ("A disk tier", config.DiskTierOptions),
        ("Prefetch", config.PrefetchOptions),
    ],
)
def test_settings_tables(title: str, kind: type[msgspec.Struct]) -> None:
    rows = {row[0].strip("`"): (row[1], row[2]) for row in table_rows(DOCS / "guides" / "settings.md", title)}
    if issubclass(kind, config.TierOptions):
        assert rows.pop("type") == ("required", "")
    assert rows == facts_of(kind)


def test_top_level_settings() -> None:
    rows = {row[0].strip("`"): row[1] for row in table_rows(DOCS / "guides" / "settings.md", "Top level")}
    assert rows.keys() == {known.encode_name for known in msgspec.structs.fields(config.Config)}
    for name in ("preset", "max_lease_fraction", "planner", "verify_memory"):
        assert rows[name] == f"`{_toml(getattr(config.Config(), name))}`"


@pytest.mark.parametrize(("title", "kind"), [("setting", ConnectorOptions), ("control", Controls)])
def test_settings_of_the_vllm_connector(title: str, kind: type[msgspec.Struct]) -> None:
    text = (DOCS / "guides" / "vllm.md").read_text().split(f"| {title} | default | what it says |")[1]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text.split("\n\n")[0], re.M))
    defaults = {known.encode_name: known.default for known in msgspec.structs.fields(kind)}
    assert rows == {name: "none" if value is None else f"`{_toml(value)}`" for name, value in defaults.items()}


def test_statistics_are_explained() -> None:
    rows = first_names(table_rows(DOCS / "guides" / "operate.md", "Watching"))
    assert rows == [*kv.Stats.__struct_fields__, *kv.TierStats.__struct_fields__]


def test_errors_are_explained() -> None:
    rows = {row[0].strip("`"): row[1].strip("`") for row in table_rows(DOCS / "reference" / "errors.md")}
    errors = {name: kind for name, kind in vars(kv).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert rows.keys() == errors.keys()
    for name, kind in errors.items():
        others = {base.__name__ for base in kind.__mro__[1:] if not issubclass(base, kv.KVCairnError)}
        assert not rows[name] or rows[name] in others
        assert bool(rows[name]) == bool(others & {"ValueError", "TimeoutError"})


def test_every_method_has_its_cost() -> None:
    kinds = (kv.Cache, kv.Space, kv.Job, kv.CopyJob, kv.Lease, kv.Reservation, kv.EventStream)
    internal = {"Cache.join", "Cache.forget_all"}
    methods = {
        f"{kind.__name__}.{name}"
        for kind in kinds
        for base in kind.__mro__[:-1]
        for name, value in vars(base).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, classmethod))
    }
    methods |= {"Config.from_dict", "Config.from_toml", "lookup_all", "acquire_all"}
    listed = first_names(table_rows(DOCS / "reference" / "api.md", "Threads, waiting, cost"))
    assert len(listed) == len(set(listed))
    assert set(listed) == methods - internal


def test_every_public_name_is_documented() -> None:
    text = (DOCS / "reference" / "api.md").read_text()
    documented = set(re.findall(r"^::: kvcairn\.(\w+)$", text, re.M))
    documented |= set(first_names(table_rows(DOCS / "reference" / "errors.md")))
    assert set(kv.__all__) - documented == {"UNKNOWN"}
    assert "kvcairn.UNKNOWN" in text


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("`kvcairn demo --json`", [field.name for field in fields(demo.Row)]),
        (
            "`kvcairn bench lookup --json`, `kvcairn bench memory --json`, `kvcairn bench disk --json`, "
            "`kvcairn bench hierarchy --json`, `kvcairn bench evict --json`, `kvcairn bench engine --json`",
            list(bench.Figure.__struct_fields__),
        ),
        ("`kvcairn ls PATH --json`", list(inspect.SpaceRow.__struct_fields__)),
        ("`kvcairn scrub PATH --json`", list(inspect.Scrubbed.__struct_fields__)),
        ("`kvcairn config check FILE --json`", list(config.Setting.__struct_fields__)),
        ("`kvcairn doctor --json`", list(Check.__struct_fields__)),
    ],
)
def test_json_fields(title: str, names: list[str]) -> None:
    assert first_names(table_rows(DOCS / "reference" / "json.md", title)) == names


def test_fixed_numbers() -> None:
    text = (DOCS / "concepts" / "design.md").read_text()
    numbers = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", text.split("## Numbers")[1], re.M))
    half = 1 << 15
    assert numbers == {
        "what": "value",
        "slot and page unit": f"{slots.PAGE_BYTES:,} bytes",
        "regions of a tier": f"{slots.DEFAULT_REGIONS}, unless `region` says otherwise",
        "threads of a tier": "4, with hung ones replaced at most 8",
        "a batch to or from a tier": f"at most {writes.BATCH_BLOCKS} blocks, and {writes.BATCH_BYTES >> 20} MiB "
        "or one block",
        "batches of writes under way for a tier": f"{writes.MOST_TASKS}, and at most half of the memory tier in bytes",
        "a rebuild of a lost index": f"{rebuild.SCANS} segments at a time, {rebuild.BLOCKS_AT_ONCE} blocks taken up "
        f"under one hold of the lock; a segment that cannot be read is tried again "
        f"after {2 * rebuild.FIRST_PAUSE_S:g} s, doubling to {rebuild.LONGEST_PAUSE_S:g} s",
        "a tier that is detached": f"{detaching.ROWS_AT_ONCE:,} rows of the index under one hold of the lock",
        "blocks that wait for a write to one tier": f"{writes.MOST_QUEUED:,}; what comes then is dropped",
        "a `back` tier writes ahead": f"when the tier above is {leaving.HIGH_WATERMARK:.0%} full: "
        f"{leaving.CLEAN_FRACTION:.1%} of its blocks, at most {leaving.MOST_CLEANED:,}, looked at when a quarter as "
        "many have come or gone",
        "a failed write is asked for again": f"after {writes.ASK_AGAIN_S:g} s, when the block is next used",
        "breaker": f"opens after {breaker.FAILURES_TO_OPEN} failed calls in a row, for {breaker.FIRST_PAUSE_S:g} s, "
        f"doubling to {breaker.LONGEST_PAUSE_S:g} s",
        "pins of hints": {0.25: "at most a quarter of the memory tier"}[hints.PIN_FRACTION],
        "remembered reasons": f"{half:,} to {2 * half:,} keys",
        "events kept for a reader": f"{events.MOST_EVENTS:,}; then the oldest are lost",
        "drain in `close()`": f"{cache.CLOSE_DRAIN_S:g} s",
    }
    assert (promote.BATCH_BLOCKS, promote.BATCH_BYTES) == (writes.BATCH_BLOCKS, writes.BATCH_BYTES)


def test_every_module_stands_in_the_house() -> None:
    page, source = DOCS / "concepts" / "design.md", ROOT / "src" / "kvcairn"
    text = page.read_text()
    house = set(re.findall(r"`([\w/.]+)`", text.split("## The house")[1].split("### The index")[0]))
    modules = {path.stem for path in source.glob("*.py")} - {"__init__"}
    folders = {f"{path.name}/" for path in source.iterdir() if (path / "__init__.py").exists()}
    assert modules | folders - {"adapters/"} <= house
    assert {f"core/{path.name}" for path in (source / "core").glob("[a-z]*.py")} <= house


# --- what is said not to be there is not


def test_not_there_yet() -> None:
    row = dict(re.findall(r"^\| ([a-z ]+) \| .*? \| (.*) \|$", (ROOT / "README.md").read_text(), re.M))
    memory = {"type": "memory", "capacity": "1 MiB"}
    for name in re.findall(r"`(\w+)`", row["eviction"]):
        with pytest.raises(kv.ConfigError):
            kv.Config.from_dict({"tiers": [memory | {"eviction": name}]})
    for name in re.findall(r"`(\w+)`", row["write policy"]):
        disk = {"type": "disk", "path": ".", "capacity": "1 MiB", "write_policy": name}
        with pytest.raises(kv.ConfigError, match="not available in this version"):
            kv.Config.from_dict({"tiers": [memory, disk]})
    for name in re.findall(r"`([a-z ]+)`", row["command line"]):
        assert f"kvcairn {name}" not in set(leaves(COMMAND))
