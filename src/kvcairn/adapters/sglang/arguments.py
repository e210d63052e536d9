"""Looks at the arguments that an SGLang server is started with, and says what fights with what. Needs no SGLang."""

from __future__ import annotations

import argparse
import json
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from kvcairn.adapters.sglang.settings import NAME, Settings, read_settings
from kvcairn.errors import ConfigError
from kvcairn.units import format_size, parse_size

MODULE, DOOR, LINKER = "kvcairn.adapters.sglang", "KVCairnStorage", "KVCairnLinker"
_GB = 10**9  # what SGLang counts --hicache-size in
_GOOD_PAGE_TOKENS = 16
_DOOR_LINE = (
    "--enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config "
    f'\'{{"backend_name": "kvcairn", "module_path": "{MODULE}", "class_name": "{DOOR}", "interface_v1": 1, '
    f'"{NAME}": {{...}}}}\''
)
_LINKER_FLAG = "--unified-cache-external-linker-config"
_LINKER_LINE = (
    f"--enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic {_LINKER_FLAG} "
    f'\'{{"linker": "{LINKER}", "linker_module_path": "{MODULE}", "linker_extra_config": {{"{NAME}": {{...}}}}}}\''
)


class Finding(NamedTuple):
    """One thing that was looked at, as `kvcairn doctor` prints it."""

    name: str
    status: Literal["ok", "warn", "fail"]
    value: str
    remedy: str = ""


def check_arguments(line: str) -> Iterator[Finding]:
    """Yield what there is to say about the arguments of `python -m sglang.launch_server`, given as one line.

    Raises:
        ConfigError: it cannot be read as a command line.
    """
    given = _parse(line)
    if given.linker and not given.hicache:
        yield from _check_linker(given)
        return
    extra: dict[str, Any] | Finding = _extra(given.hicache_storage_backend_extra_config)
    if isinstance(extra, Finding):
        yield extra
        return
    yield from _check_door(given, extra)
    yield from _check_rivals(given)
    yield from _check_pages(given)
    yield from _check_policies(given)
    try:
        settings = read_settings(extra)
    except ConfigError as error:
        yield Finding("sglang settings", "fail", str(error), "see docs/guides/sglang.md")
        return
    yield from _check_memory(given, settings)
    yield _check_ranks(given, settings)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError("--sglang-args", message)


def _parse(line: str) -> argparse.Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--enable-hierarchical-cache", "--enable-hicache", action="store_true", dest="hicache")
    for name in (
        "--enable-lmcache",
        "--enable-flexkv",
        "--disable-radix-cache",
    ):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--enable-unified-cache-external-linker", action="store_true", dest="linker")
    parser.add_argument("--unified-cache-external-linker-backend", dest="linker_backend")
    parser.add_argument(_LINKER_FLAG, dest="linker_config")
    for name in ("--hicache-storage-backend", "--hicache-storage-backend-extra-config", "--radix-cache-backend"):
        parser.add_argument(name)
    parser.add_argument("--hicache-mem-layout", default="page_first")
    parser.add_argument("--hicache-io-backend", default="kernel")
    parser.add_argument("--hicache-write-policy", default="write_through")
    parser.add_argument("--hicache-storage-prefetch-policy", default="timeout")
    parser.add_argument("--hicache-host-memory-mode", default="cache")
    parser.add_argument("--hicache-size", type=float, default=0)
    parser.add_argument("--page-size", type=int, default=1)
    for name in ("tp", "pp"):
        parser.add_argument(f"--{name}-size", f"--{name}", type=int, default=1, dest=name)
    try:
        return parser.parse_known_args(shlex.split(line))[0]
    except ValueError as error:
        raise ConfigError("--sglang-args", f"not a command line: {error}", line) from error


def _extra(text: str | None) -> dict[str, Any] | Finding:
    """Return HiCache's extra configuration, as SGLang reads it."""
    if not text:
        return {}
    try:
        if not text.startswith("@"):
            found = json.loads(text)
        else:
            content = Path(text[1:]).read_text(encoding="utf-8")
            found = tomllib.loads(content) if text.endswith(".toml") else json.loads(content)
    except (OSError, ValueError) as error:
        reason = f"--hicache-storage-backend-extra-config cannot be read: {error}"
        return Finding("sglang storage", "fail", reason, "give JSON, or @FILE.json, or @FILE.toml")
    if not isinstance(found, dict):
        return Finding("sglang storage", "fail", "--hicache-storage-backend-extra-config is no table")
    return found


def _check_door(given: argparse.Namespace, extra: Mapping[str, Any]) -> Iterator[Finding]:
    name = "sglang storage"
    if given.disable_radix_cache:
        yield Finding(name, "fail", "--disable-radix-cache: nothing is ever reused", "leave it out")
    if not given.hicache:
        yield Finding(name, "fail", "HiCache is off, so no storage is asked for", f"add {_DOOR_LINE}")
    elif given.hicache_storage_backend != "dynamic":
        found = f"HiCache's storage is {given.hicache_storage_backend or 'off'}, not kvcairn"
        yield Finding(name, "fail", found, f"use {_DOOR_LINE}")
    elif (extra.get("module_path"), extra.get("class_name")) != (MODULE, DOOR) or "backend_name" not in extra:
        found = f"the dynamic storage is {extra.get('module_path')}.{extra.get('class_name')}"
        yield Finding(name, "fail", found, f"use {_DOOR_LINE}")
    elif not extra.get("interface_v1"):
        found = "without interface_v1 SGLang copies every page once more"
        yield Finding(name, "warn", found, 'add "interface_v1": 1 to the extra configuration')
    else:
        yield Finding(name, "ok", f"{DOOR}, straight from and to the host pool")


def _check_rivals(given: argparse.Namespace) -> Iterator[Finding]:
    rivals = {
        "--enable-lmcache": given.enable_lmcache,
        "--enable-flexkv": given.enable_flexkv,
        "--radix-cache-backend": given.radix_cache_backend,
        "--enable-unified-cache-external-linker": given.linker and given.hicache,
    }
    for flag in (flag for flag, is_on in rivals.items() if is_on):
        found = (
            f"{flag} takes the place of HiCache's own tree, or of its host pool: two caches would hold the same pages"
        )
        yield Finding("sglang other caches", "fail", found, f"leave out {flag}, or kvcairn")


def _check_pages(given: argparse.Namespace) -> Iterator[Finding]:
    name, page, layout = "sglang pages", given.page_size, given.hicache_mem_layout
    yield from _check_page_size(page)
    if layout == "page_first_direct" and given.hicache_io_backend == "kernel":
        yield Finding(
            name, "warn", "page_first_direct with kernel: SGLang turns kernel into direct", "say which you want"
        )
    elif layout == "page_first" and given.hicache_io_backend == "direct":
        found = "page_first with direct: SGLang turns it into page_first_direct, whose pages are others"
        yield Finding(name, "warn", found, "say --hicache-mem-layout page_first_direct")
    elif layout == "layer_first":
        found = "layer_first: a page lies in two pieces for each layer"
        yield Finding(name, "warn", found, "use --hicache-mem-layout page_first")
    else:
        yield Finding(name, "ok", f"{layout}, pages of {page} tokens")


def _check_page_size(page: int) -> Iterator[Finding]:
    if page < _GOOD_PAGE_TOKENS:
        found = f"pages of {page} tokens: every page is a block with a slot and an entry of its own"
        yield Finding("sglang pages", "warn", found, "add --page-size 64")


def _check_linker(given: argparse.Namespace) -> Iterator[Finding]:
    """Look at a server that goes from the device to us, without a host pool."""
    name = "sglang linker"
    if given.disable_radix_cache:
        yield Finding(name, "fail", "--disable-radix-cache: nothing is ever reused", "leave it out")
    try:
        config = json.loads(given.linker_config or "{}")
    except ValueError as error:
        yield Finding(name, "fail", f"{_LINKER_FLAG} is no JSON: {error}", f"use {_LINKER_LINE}")
        return
    door = (config.get("linker_module_path"), config.get("linker")) if isinstance(config, dict) else (None, None)
    if given.linker_backend != "dynamic" or door != (MODULE, LINKER):
        found = f"the linker is {given.linker_backend or 'none'} ({door[0]}.{door[1]}), not kvcairn"
        yield Finding(name, "fail", found, f"use {_LINKER_LINE}")
        return
    yield Finding(name, "ok", f"{LINKER}, straight from and to the device's pool")
    yield from _check_rivals(given)
    if given.hicache_storage_backend:
        found = "--hicache-storage-backend beside a linker: SGLang refuses it"
        yield Finding("sglang other caches", "fail", found, "leave it out")
    yield from _check_page_size(given.page_size)
    try:
        settings = read_settings(config.get("linker_extra_config"))
    except ConfigError as error:
        yield Finding("sglang settings", "fail", str(error), "see docs/guides/sglang.md")
        return
    if settings.has_memory_tier:
        yield Finding("sglang memory", "ok", "the memory tier is the host tier")
    else:
        remedy = 'put {"type": "memory", "capacity": "64 GiB"} first in tiers'
        yield Finding("sglang memory", "fail", "the linker's host tier is a memory tier, and there is none", remedy)
    yield _check_ranks(given, settings)


def _check_policies(given: argparse.Namespace) -> Iterator[Finding]:
    name = "sglang policies"
    if given.hicache_write_policy == "write_back" and given.hicache_host_memory_mode == "cache":
        found = "write_back: only what the GPU had to give up is ever stored; a restart loses the rest"
        yield Finding(name, "warn", found, "use --hicache-write-policy write_through")
    if given.hicache_storage_prefetch_policy == "best_effort":
        found = "best_effort: a request that starts at once uses nothing from disk"
        yield Finding(name, "warn", found, "use --hicache-storage-prefetch-policy timeout")


def _check_memory(given: argparse.Namespace, settings: Settings) -> Iterator[Finding]:
    name, tiers = "sglang memory", (settings.tree or {}).get("tiers", [])
    memory = next((t for t in tiers if isinstance(t, Mapping) and t.get("type") == "memory"), None)
    pool_bytes = int(given.hicache_size * _GB)
    if memory is None or "capacity" not in memory:
        yield Finding(name, "ok", "a write buffer of a twentieth of HiCache's host pool, which is the memory tier")
        return
    own = parse_size(memory["capacity"])
    found = f"a memory tier of {format_size(own)} beside HiCache's host pool"
    remedy = "leave the memory tier out: a write buffer is made by itself"
    if pool_bytes and own >= pool_bytes:
        yield Finding(name, "fail", f"{found} of {format_size(pool_bytes)}: both hold the same pages", remedy)
    else:
        yield Finding(name, "warn", f"{found}: what is in both is there twice", remedy)


def _check_ranks(given: argparse.Namespace, settings: Settings) -> Finding:
    ranks = given.tp * given.pp
    if ranks > 1 and settings.connect is None:
        found = f"{ranks} ranks, each a process, cannot share a cache that lives in one of them"
        return Finding("sglang ranks", "fail", found, 'run "kvcairn serve" and give its address as "connect"')
    return Finding("sglang ranks", "ok", f"{ranks} rank{'s' if ranks > 1 else ''}")
