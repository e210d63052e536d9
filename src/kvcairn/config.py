"""Every setting, and the only reader of settings files and of the environment. Layer 1.

Settings come as a TOML file or as the same tree in a dict. An environment variable lays over one of them:
`KVCAIRN_TIERS__0__CAPACITY=1GiB` is `tiers[0].capacity`. The result is one frozen tree; nothing changes
after load. A setting is called in the file as people write it (`capacity = "8 GiB"`) and in the code with
its unit (`capacity_bytes`).
"""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvcairn import kinds, limits
from kvcairn.errors import ConfigError
from kvcairn.host import Host
from kvcairn.options import (
    BUILT_IN_EVICTIONS,
    BUILT_IN_TIERS,
    Bytes,
    DiskTierOptions,
    ManagedTierOptions,
    MemoryTierOptions,
    PrefetchOptions,
    Preset,
    TierOptions,
)
from kvcairn.plain import find, join, lay, leaves, near
from kvcairn.units import parse_duration, parse_size

__all__ = [
    "BUILT_IN_EVICTIONS",
    "BUILT_IN_TIERS",
    "Bytes",
    "Config",
    "ConfigReader",
    "DiskTierOptions",
    "ManagedTierOptions",
    "MemoryTierOptions",
    "PrefetchOptions",
    "Setting",
    "TierOptions",
    "read_toml",
]

logger = logging.getLogger(__name__)

ENVIRONMENT_PREFIX: Final = "KVCAIRN_"


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a cache: frozen, hashable, and equal when every setting is.

    Attributes:
        preset: Where the defaults of the rest come from.
        max_lease_fraction: Most of the memory tier that one client may pin.
        planner: Whether loads that would take longer than computing are left out.
        verify_memory: Which copies in memory are checked against their checksum when read.
        tiers: Settings of each tier, fastest first; the first is the memory tier.
        prefetch: Settings of prefetching.
    """

    preset: Preset = "unified"
    max_lease_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.5
    planner: Literal["auto", "off"] = "auto"
    verify_memory: Literal["never", "sample", "always"] = "sample"
    tiers: tuple[TierOptions, ...] = ()
    prefetch: PrefetchOptions = PrefetchOptions()

    @property
    def memory(self) -> MemoryTierOptions:
        """The settings of the memory tier."""
        first = self.tiers[0]
        assert isinstance(first, MemoryTierOptions), "checked at load"
        return first

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Config:
        """Return the checked settings of a plain tree, with the environment laid over it.

        Blocks for a walk of the disk tiers' folders. The given tree is not changed.

        Raises:
            ConfigError: An unknown, malformed or impossible setting; names its path and the remedy.
        """
        reader = ConfigReader()
        config = reader.read(settings)
        reader.log_warnings()
        return config

    @classmethod
    def from_toml(cls, path: str | Path) -> Config:
        """Return the checked settings of a TOML file; otherwise as `from_dict`.

        Raises:
            ConfigError: Also where the file cannot be read or is not TOML.
        """
        return cls.from_dict(read_toml(path))


class Setting(Struct, frozen=True):
    """One effective setting and where its value came from.

    Attributes:
        path: Its name as in a settings file, such as `tiers[0].capacity`.
        value: The value in bytes, seconds, or as written.
        source: `default`, `file`, or the name of an environment variable.
        unit: `bytes`, `seconds`, or None for a value without a unit.
    """

    path: str
    value: str | float | bool | None
    source: str
    unit: str | None = None


_NOTHING: Final = object()
# An environment variable is a text whatever the setting is; these read it.
_LENIENT: Final[Mapping[type[msgspec.inspect.Type], type]] = {
    msgspec.inspect.IntType: int,
    msgspec.inspect.FloatType: float,
    msgspec.inspect.BoolType: bool,
}
AnyStruct = TypeVar("AnyStruct", bound=Struct)


def _as_read(value: Any) -> Any:
    """Return a copy of a tree as a file would give it: a path becomes its text."""
    if isinstance(value, Mapping):
        return {key: _as_read(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_read(each) for each in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


class ConfigReader:
    """Turns plain trees into checked settings.

    Not thread-safe: one reader for each load.

    Args:
        environment: Variables laid over the settings; those of this process by default.
        host: The machine whose limits the capacities must respect.

    Attributes:
        warnings: What was accepted and will probably disappoint, one line for each thing.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, host: Host | None = None) -> None:
        self.warnings: list[str] = []
        self._environment = os.environ if environment is None else environment
        self._host = host or Host()
        self._variables: dict[str, str] = {}
        self._given: set[str] = set()

    def read(self, settings: Mapping[str, Any]) -> Config:
        """Return the settings of a tree; see `Config.from_dict`."""
        root = self._overlay(settings)
        tables = root.pop("tiers", [])
        config = self._struct(root, Config, "")
        if isinstance(tables, str) or not isinstance(tables, Sequence):
            self._fail("tiers", "expected a list of tables", tables, "write each tier under [[tiers]]")
        tiers = {f"tiers[{i}]": self._tier(table, f"tiers[{i}]") for i, table in enumerate(tables)}
        self._check_order(tiers)
        self._check_tiers(tiers)
        return msgspec.structs.replace(config, tiers=tuple(tiers.values()))

    def read_tier(self, table: Mapping[str, Any]) -> TierOptions:
        """Return the checked settings of a single tier, as for `Cache.add_tier`.

        The environment does not apply. What concerns several tiers (unique names, one memory tier) is for
        the caller to check.

        Raises:
            ConfigError: As `read`; paths begin with `tier`.
        """
        tier = self._tier(_as_read(table), "tier")
        self._check_tiers({"tier": tier})
        return tier

    def log_warnings(self) -> None:
        """Say what is to be warned of in the log, for those who read settings in code."""
        for warning in self.warnings:
            logger.warning("%s", warning)

    def explain(self, config: Config) -> list[Setting]:
        """List every setting of what this reader has read, with the source of its value."""
        units = dict(_units(config))
        return [
            Setting(
                path,
                value,
                self._variables.get(path) or ("file" if path in self._given else "default"),
                None if value is None else units.get(path),
            )
            for path, value in leaves(msgspec.to_builtins(config))
        ]

    # -- the environment

    def _overlay(self, settings: object) -> dict[str, Any]:
        if not isinstance(settings, Mapping):
            self._fail("settings", "expected a table", settings, "Config.from_toml reads a file")
        root: dict[str, Any] = _as_read(settings)
        for variable, text in sorted(self._environment.items()):
            if variable.startswith(ENVIRONMENT_PREFIX):
                parts = variable.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
                try:
                    self._variables[lay(root, parts, text)] = variable
                except ValueError as error:
                    self._fail(variable, str(error), text)
        return root

    # -- from text to values

    def _struct(self, table: object, kind: type[AnyStruct], path: str) -> AnyStruct:
        values = self._table(table, msgspec.inspect.type_info(kind), path)
        try:
            return msgspec.convert(values, kind)
        except msgspec.ValidationError as error:
            reason, _, where = str(error).partition(" - at `$")
            where = join(path, where.rstrip("`").lstrip(".")) if where else path
            self._fail(where, _sentence(reason), find(values, where.removeprefix(path).lstrip("."), _NOTHING))

    def _table(self, table: object, kind: msgspec.inspect.Type, path: str) -> dict[str, object]:
        assert isinstance(kind, msgspec.inspect.StructType)
        if not isinstance(table, Mapping):
            self._fail(path or "settings", "expected a table", table)
        fields = {known.encode_name: known for known in kind.fields}
        if kind.tag_field is not None:
            table = {name: value for name, value in table.items() if name != kind.tag_field}
        for name in table:
            if name not in fields:
                self._unknown(join(path, str(name)), str(name), fields)
        for name, known in fields.items():
            if known.required and name not in table:
                self._missing(join(path, name), name)
        return {name: self._value(value, fields[name].type, join(path, name)) for name, value in table.items()}

    def _value(self, value: object, kind: msgspec.inspect.Type, path: str) -> object:
        kind, extra = _plain(kind)
        if isinstance(kind, msgspec.inspect.StructType):
            return self._table(value, kind, path)
        self._given.add(path)
        if value is None:
            return None
        try:
            if extra.get("unit") == "bytes":
                return _at_least_one(parse_size(value))
            if extra.get("unit") == "seconds":
                return parse_duration(value)
            if isinstance(kind, msgspec.inspect.LiteralType):
                return _choice(value, kind.values, extra.get("built", kind.values))
            if path in self._variables and type(kind) in _LENIENT:
                return msgspec.convert(value, _LENIENT[type(kind)], strict=False)
        except ValueError as error:
            self._fail(path, _sentence(error), value)
        return value

    def _tier(self, table: object, path: str) -> TierOptions:
        if not isinstance(table, Mapping):
            self._fail(path, "expected a table", table)
        if "type" not in table:
            self._fail(f"{path}.type", "missing", remedy=f"set it to one of: {', '.join(kinds.tier_names())}")
        name = str(table["type"])
        kind = kinds.tier_options(name, f"{path}.type")
        if kind is None:
            self._fail(f"{path}.type", "no such kind of tier", table["type"], _one_of(name, kinds.tier_names()))
        self._given.add(f"{path}.type")
        return self._struct(table, kind, path)

    # -- what must hold between settings, and on this machine

    def _check_tiers(self, tiers: Mapping[str, TierOptions]) -> None:
        for path, tier in tiers.items():
            if isinstance(tier, ManagedTierOptions | MemoryTierOptions):
                self._check_write_policy(path, tier)
            eviction = getattr(tier, "eviction", None)
            if eviction is not None:
                self._check_eviction(f"{path}.eviction", eviction)
        self._check_host(tiers)

    def _check_eviction(self, path: str, name: str) -> None:
        if name not in BUILT_IN_EVICTIONS and kinds.load_eviction(name, path) is None:
            self._fail(path, "no such eviction policy", name, _one_of(name, kinds.eviction_names()))

    def _check_write_policy(self, path: str, tier: ManagedTierOptions | MemoryTierOptions) -> None:
        if isinstance(tier, ManagedTierOptions) and tier.promotion == "move" and tier.write_policy != "back":
            reason = "what is loaded leaves the tier, and this tier's write policy would write it there again"
            self._fail(f"{path}.promotion", reason, "move", f"set {path}.write_policy = 'back'")
        if f"{path}.min_touches" in self._given and tier.write_policy != "selective":
            self.warnings.append(
                f"{path}.min_touches: has no effect with write_policy = {tier.write_policy!r}; "
                f"set {path}.write_policy = 'selective', or leave min_touches out"
            )

    def _check_order(self, tiers: Mapping[str, TierOptions]) -> None:
        if not tiers:
            self._fail("tiers", "a cache has at least the memory tier", remedy="add [[tiers]], type = 'memory'")
        names: dict[str, str] = {}
        for number, (path, tier) in enumerate(tiers.items()):
            if isinstance(tier, MemoryTierOptions) != (number == 0):
                self._fail(f"{path}.type", "the first tier is the memory tier, and the only one", _tag(tier))
            if tier.name in names:
                self._fail(f"{path}.name", f"{names[tier.name]} has this name", tier.name, "choose another")
            names[tier.name] = path

    def _check_host(self, tiers: Mapping[str, TierOptions]) -> None:
        try:
            for path, tier in tiers.items():
                if isinstance(tier, MemoryTierOptions):
                    self.warnings += limits.check_memory(path, tier, self._host)
            limits.check_disks({path: tier for path, tier in tiers.items() if isinstance(tier, DiskTierOptions)})
        except ConfigError as error:
            self._fail(error.path, error.reason, _NOTHING if error.value is None else error.value, error.remedy)

    # -- errors

    def _missing(self, path: str, name: str) -> NoReturn:
        if name == "capacity":
            self._fail(path, "missing: a tier without a bound is refused", remedy="set it, as in '8 GiB'")
        self._fail(path, "missing", remedy="set it; 'kvcairn config schema' says what it may be")

    def _unknown(self, path: str, name: str, known: Collection[str]) -> NoReturn:
        variables = [v for place, v in self._variables.items() if f"{place}.".startswith(f"{path}.")]
        origin = f" (set by {variables[0]})" if variables else ""
        remedy = near(name, known) or f"settings here: {', '.join(sorted(known))}"
        raise ConfigError(path, f"no such setting{origin}", remedy=remedy)

    def _fail(self, path: str, reason: str, value: object = _NOTHING, remedy: str = "") -> NoReturn:
        variable = self._variables.get(path)
        reason = f"{reason} (set by {variable})" if variable else reason
        if value is _NOTHING:
            raise ConfigError(path, reason, remedy=remedy)
        raise ConfigError(path, reason, value, remedy)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the plain tree of a TOML file, unchecked.

    Raises:
        ConfigError: The file cannot be read or is not TOML; the path is the file's.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), error.strerror or str(error), remedy="name a readable file") from error
    except ValueError as error:
        raise ConfigError(str(path), f"not valid TOML: {error}") from error


def _plain(kind: msgspec.inspect.Type) -> tuple[msgspec.inspect.Type, dict[str, Any]]:
    """Strip what msgspec wraps around a type: constraints with our own notes, and `| None`."""
    if isinstance(kind, msgspec.inspect.UnionType):
        some = [each for each in kind.types if not isinstance(each, msgspec.inspect.NoneType)]
        if len(some) > 1:
            return kind, {}
        kind = some[0]
    if isinstance(kind, msgspec.inspect.Metadata):
        return kind.type, kind.extra or {}
    return kind, {}


def _units(struct: Struct, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and unit of every setting that has one."""
    described = msgspec.inspect.type_info(type(struct))
    assert isinstance(described, msgspec.inspect.StructType)
    for known in described.fields:
        place, value = join(path, known.encode_name), getattr(struct, known.name)
        if unit := _plain(known.type)[1].get("unit"):
            yield place, unit
        elif isinstance(value, Struct):
            yield from _units(value, place)
        elif isinstance(value, tuple):
            for number, each in enumerate(value):
                if isinstance(each, Struct):
                    yield from _units(each, f"{place}[{number}]")


def _one_of(name: str, known: Collection[str]) -> str:
    """Return the names that there are, and first the one that was probably meant."""
    return " ".join(filter(None, [near(name, known), f"use one of: {', '.join(known)}"]))


def _at_least_one(size_bytes: int) -> int:
    if size_bytes == 0:
        raise ValueError("zero is no bound; a size is above zero")
    return size_bytes


def _choice(value: object, known: Collection[object], built: Collection[object]) -> object:
    if value not in known:
        expected = f"expected one of: {', '.join(map(str, known))}"
        guess = near(str(value), [str(name) for name in known])
        raise ValueError(f"{expected}; {guess}" if guess else expected)
    if value not in built:
        raise ValueError(f"not available in this version; available: {', '.join(map(str, built))}")
    return value


def _sentence(reason: object) -> str:
    text = str(reason)
    return text[:1].lower() + text[1:]


def _tag(tier: TierOptions) -> str:
    return str(tier.__struct_config__.tag)


def notify_socket() -> str | None:
    """Return where the service manager wants to hear how far this process is, None where there is none."""
    return os.environ.get("NOTIFY_SOCKET") or None
