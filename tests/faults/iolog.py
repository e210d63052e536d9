"""Processes whose every write below a folder is logged, cut short or made to fail, by a library loaded before libc."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("iolog.c")


def build(folder: Path) -> Path:
    """Compile the library; skips the test where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = folder / "iolog.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return library


def environment(library: Path, folder: Path, **settings: object) -> dict[str, str]:
    """Return the environment of a process that is watched; `kill`, `part`, `file`, ... as in the library's source."""
    named = {f"IOLOG_{name.upper()}": str(value) for name, value in settings.items()}
    return {**os.environ, "LD_PRELOAD": str(library), "IOLOG_FOLDER": str(folder), **named}


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a process: write, sync, cut, reserve, unlink, rename, or `said` with a line of its own."""

    op: str
    name: str
    offset: int
    data: bytes


def read_log(path: Path) -> list[Call]:
    """Return the calls of a log."""
    content, at, calls = path.read_bytes(), 0, []
    while at < len(content):
        end = content.index(b"\n", at)
        op, name, offset, nbytes = content[at:end].decode().split(" ")
        at = end + 1 + int(nbytes)
        calls.append(Call(op, name, int(offset), content[end + 1 : at]))
    return calls


@dataclass
class Device:
    """Files as a device holds them that forgets what was not synced."""

    synced: dict[str, bytearray] = field(default_factory=dict)
    waiting: list[Call] = field(default_factory=list)

    def feed(self, call: Call) -> None:
        """Take one call up."""
        if call.op == "sync":
            is_folder = call.name == "."
            mine = [c for c in self.waiting if c.op in ("rename", "unlink") if is_folder] or [
                c for c in self.waiting if c.name == call.name and c.op not in ("rename", "unlink")
            ]
            for each in mine:
                carry_out(self.synced, each)
            self.waiting = [c for c in self.waiting if c not in mine]
        elif call.op != "said":
            self.waiting.append(call)

    def after_power_loss(self, kept: str, rng: random.Random) -> dict[str, bytearray]:
        """Return the files as they are found: `kept` says how many unsynced calls were: none, all, or some."""
        files = {name: bytearray(content) for name, content in self.synced.items()}
        for call in self.waiting:
            if kept == "all" or (kept == "some" and rng.random() < 0.5):
                carry_out(files, call)
        return files


def carry_out(files: dict[str, bytearray], call: Call) -> None:
    """Do to these files what the call did."""
    if call.op == "rename":
        old, new = call.name.split(">")
        if old in files:
            files[new] = files.pop(old)
        return
    if call.op == "unlink":
        files.pop(call.name, None)
        return
    content = files.setdefault(call.name, bytearray())
    if call.op == "write":
        content.extend(bytes(max(0, call.offset + len(call.data) - len(content))))
        content[call.offset : call.offset + len(call.data)] = call.data
    elif call.op == "cut":
        del content[call.offset :]
        content.extend(bytes(call.offset - len(content)))
    elif call.op == "reserve":
        content.extend(bytes(max(0, call.offset - len(content))))


def prefixes(calls: list[Call]) -> Iterator[tuple[Device, list[str]]]:
    """Yield what the device holds, and what the process had said, before the first call and after each."""
    device, said = Device(), list[str]()
    yield device, said
    for call in calls:
        if call.op == "said":
            said.append(call.name.replace(":", " "))
        else:
            device.feed(call)
        yield device, said
