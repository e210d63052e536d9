"""The command line. Every command prints for people, or one JSON object a line with `--json`.

Exit status: 0 done; 1 something failed; 2 bad usage or a refused setting; 3 a measurement was too noisy to
count. Errors go to standard error in one line that names the setting or tier and the remedy.
"""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import json
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from kvcairn.config import Config, ConfigReader, Setting, read_toml
from kvcairn.daemon.serve import serve as serve_until_stopped
from kvcairn.doctor import Check, examine
from kvcairn.errors import ConfigError, KVCairnError, UnsupportedError
from kvcairn.schema import config_schema
from kvcairn.tiers import registry
from kvcairn.tiers.disk import inspect
from kvcairn.units import format_duration, format_size


class Exit(IntEnum):
    """What a command's exit status says."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOISY = 3


class Commands(TyperGroup):
    """A group that turns the package's own errors into one line and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what the package or the system refuses ends in one line on standard error, no traceback."""
        try:
            return super().invoke(ctx)
        except KVCairnError as error:
            typer.echo(f"kvcairn: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(Exit.USAGE if isinstance(error, ConfigError) else Exit.FAILED) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of our output has gone
                raise
            typer.echo(f"kvcairn: {error}", err=True)
            raise typer.Exit(Exit.FAILED) from error


_HELP = """A tiered KV cache for LLM serving.

Exit status: 0 done, 1 failed, 2 bad usage or a refused setting, 3 too noisy to count.
"""
app = typer.Typer(cls=Commands, help=_HELP, no_args_is_help=True, pretty_exceptions_enable=False)
config_app = typer.Typer(help="Check settings and show their schema.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure this host with the real cache.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
BenchPath = Annotated[
    Path | None,
    typer.Option(
        "--path", exists=True, file_okay=False, writable=True, help="Existing folder on the file system to measure."
    ),
]
Workdir = Annotated[
    Path | None,
    typer.Option(help="Folder for converted weights and the demo's disk tier; made unless there. Its parent exists."),
]


def print_lines(rows: Iterable[object]) -> None:
    """Print each row as one JSON object on a line of standard output, as it comes."""
    for row in rows:
        typer.echo(msgspec.json.encode(row))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvcairn {importlib.metadata.version('kvcairn')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


@config_app.command("check")
def config_check(file: Path, as_json: Json = False) -> None:
    """Check a settings file against this host and print what is in force, and where it came from."""
    reader, config = _read(file)
    for number, tier in enumerate(config.tiers[1:], start=1):
        registry.check(tier, f"tiers[{number}]")
    settings = reader.explain(config)
    if as_json:
        print_lines(settings)
    else:
        _print_table(("setting", "value", "source"), [(s.path, _for_people(s), s.source) for s in settings])


@config_app.command("schema")
def config_schema_command(as_json: Json = False) -> None:
    """Print the JSON Schema of the settings; with --json on one line."""
    typer.echo(json.dumps(config_schema(), indent=None if as_json else 2))


@app.command()
def doctor(
    path: Annotated[Path | None, typer.Option(help="Folder of a disk tier to try.")] = None,
    sglang_args: Annotated[str | None, typer.Option(help="Arguments of an SGLang server, as one text.")] = None,
    as_json: Json = False,
) -> None:
    """Look at this host and say what will work, what will be slow, and what to do about it."""
    checks = list(examine(path, sglang_args=sglang_args))
    if as_json:
        print_lines(checks)
    else:
        _print_table(("check", "status", "found", "remedy"), [_check_row(check) for check in checks])
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(Exit.FAILED)


@bench_app.command("lookup")
def bench_lookup(as_json: Json = False) -> None:
    """Hashing of a long prompt, lookups among a million blocks, memory for each."""
    _bench("run_lookup", as_json)


@bench_app.command("memory")
def bench_memory(as_json: Json = False) -> None:
    """Store to and load from the memory tier, against a plain copy in the same run."""
    _bench("run_memory", as_json)


@bench_app.command("disk")
def bench_disk(path: BenchPath = None, as_json: Json = False) -> None:
    """Write to and read from a disk tier, against plain direct I/O in the same run; reopening of 100,000 blocks."""
    _bench("run_disk", as_json, path)


@bench_app.command("hierarchy")
def bench_hierarchy(as_json: Json = False) -> None:
    """Store into a full memory tier while the tier below stands still, against the same with it running."""
    _bench("run_hierarchy", as_json)


@bench_app.command("evict")
def bench_evict(as_json: Json = False) -> None:
    """Let 32 blocks go among a million, against the same among ten thousand, for every eviction policy."""
    _bench("run_evict", as_json)


@bench_app.command("daemon")
def bench_daemon(as_json: Json = False) -> None:
    """Acquire, store and load through a daemon, by one client and by two at once, against plain copies."""
    _bench("run_daemon", as_json)


@bench_app.command("engine")
def bench_engine(
    engine: Annotated[Literal["vllm", "sglang"], typer.Option(help="Which engine.")],
    model: Annotated[str | None, typer.Option(help="vLLM: folder or hub name; random weights unless given.")] = None,
    path: BenchPath = None,
    as_json: Json = False,
) -> None:
    """Time to the first token and copies of vLLM, or a storage behind SGLang beside its own. Needs the engine."""
    if engine == "sglang":
        _bench("run_sglang", as_json, path)
    else:
        _bench("run_engine", as_json, engine, model)


@app.command()
def serve(
    config: Annotated[Path, typer.Option("--config", help="Settings file.")],
    socket: Annotated[Path, typer.Option("--socket", help="Unix socket that clients connect to.")],
    http: Annotated[str | None, typer.Option(help="HOST:PORT of /metrics and /healthz.")] = None,
    as_json: Json = False,
) -> None:
    """Serve one cache to all engines of this host, until SIGTERM; prints a line once clients can connect."""

    def ready(http_port: int | None) -> None:
        if as_json:
            print_lines([{"event": "ready", "address": f"unix:{socket}", "http_port": http_port}])
        else:
            typer.echo(f"kvcairn: serving at unix:{socket}")

    if not serve_until_stopped(_read(config)[1], socket, ready, http):
        raise typer.Exit(Exit.FAILED)


@app.command("ls")
def list_folder(path: Path, as_json: Json = False) -> None:
    """List the spaces in the folder of a disk tier: blocks, bytes, age. Its owner may be running."""
    rows = inspect.list_spaces(path)
    if as_json:
        print_lines(rows)
    else:
        _print_table(("space", "blocks", "payload", "on disk", "last written"), map(inspect.describe, rows))


@app.command()
def scrub(path: Path, as_json: Json = False) -> None:
    """Read all that lies in the folder of a disk tier, and drop what is damaged. Nobody else may own it meanwhile."""
    with Console(stderr=True).status("reading ...") as status:
        found = inspect.scrub(path, lambda done, total: status.update(f"read {done} of {total} blocks ..."))
    if as_json:
        print_lines([found])
    else:
        _print_table(found.__struct_fields__, [[_short(getattr(found, name)) for name in found.__struct_fields__]])
    if found.dropped or found.failed:
        raise typer.Exit(Exit.FAILED)


@app.command()
def demo(as_json: Json = False, workdir: Workdir = None) -> None:
    """Run a real model over a long document: recompute, memory, disk, and disk after damage."""
    module = _optional("kvcairn.demo", "demo")
    rows = module.run(lambda row: print_lines([row.as_json()]) if as_json else None, workdir=workdir)
    if not as_json:
        Console().print(module.table(rows))
    if not all(row.identical for row in rows):
        raise typer.Exit(Exit.FAILED)


def _read(file: Path) -> tuple[ConfigReader, Config]:
    """Read settings, and say what is to be warned of."""
    reader = ConfigReader()
    config = reader.read(read_toml(file))
    for warning in reader.warnings:
        typer.echo(f"kvcairn: warning: {warning}", err=True)
    return reader, config


def _bench(function: str, as_json: bool, *arguments: Any) -> None:
    figures: list[Any] = []
    with Console(stderr=True).status("measuring ...") as status:
        for figure in getattr(_optional("kvcairn.bench", "bench"), function)(*arguments):
            status.update(f"measured {figure.name}, going on ...")
            figures.append(figure)
            if as_json:
                print_lines([figure])
    if not as_json:
        columns = ("name", "value", "unit", "reference", "ratio", "runs")
        _print_table(columns, [[_short(getattr(figure, name)) for name in columns] for figure in figures])
    if noisy := [figure.name for figure in figures if figure.noisy]:
        typer.echo(f"kvcairn: noisy, does not count: {', '.join(noisy)}; repeat on a quieter host", err=True)
        raise typer.Exit(Exit.NOISY)


def _optional(module: str, command: str) -> Any:
    """Import what only one command needs, so that the others start fast and without it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"{command}: no module {error.name!r}; in a clone: pip install '.[demo]'") from error


def _print_table(columns: Iterable[str], rows: Iterable[Iterable[str | Text]]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        # As Text, so that brackets in a path are not taken for markup.
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    Console().print(table)


def _check_row(check: Check) -> tuple[str | Text, ...]:
    style = {"ok": "green", "warn": "yellow", "fail": "red"}[check.status]
    return check.name, Text(check.status, style), check.value, check.remedy


def _for_people(setting: Setting) -> str:
    if setting.unit == "bytes" and isinstance(setting.value, int):
        return format_size(setting.value)
    if setting.unit == "seconds" and isinstance(setting.value, int | float):
        return format_duration(setting.value)
    return "-" if setting.value is None else _short(setting.value)


def _short(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
