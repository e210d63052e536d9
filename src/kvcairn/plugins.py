"""Plug-ins: classes that other packages offer under an entry point group. Layer 0.

What is installed is listed without an import; a module is imported only when a setting names what it offers.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final

from kvcairn.errors import ConfigError, KVCairnError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

TIERS = "kvcairn.tiers"
POLICIES = "kvcairn.policies"

# What a group's classes derive from, by name: it lies in a higher layer, and is imported when a plug-in is.
_BASES: Final = {TIERS: "kvcairn.tiers.base:Tier", POLICIES: "kvcairn.policy.eviction.base:EvictionPolicy"}
_ARGUMENTS: Final = {TIERS: ("options", "context"), POLICIES: ("facts",)}
# Whatever the body of somebody's module may raise.
_FAILURES: Final = (
    ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, KVCairnError, LookupError, MemoryError,
    NameError, OSError, RuntimeError, SyntaxError, TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plugin:
    """A class that an installed package offers; not imported yet.

    Attributes:
        group: the entry point group, `TIERS` or `POLICIES`.
        name: what settings call it.
        package: the package that offers it.
        target: where the class is, as `module:Class`.
    """

    group: str
    name: str
    package: str
    target: str

    def load(self, path: str) -> type:
        """Import the class and check that it is what the group asks for.

        Raises:
            ConfigError: it cannot be imported, or is no such class; names `path`, the package, and what is wrong.
        """
        module, _, name = self.target.partition(":")
        try:
            found = import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except _FAILURES as error:
            raise self.refusal(path, f"cannot be imported: {type(error).__name__}: {error}") from error
        if wrong := self._mismatch(found):
            raise self.refusal(path, wrong)
        assert isinstance(found, type)
        return found

    def refusal(self, path: str, wrong: str) -> ConfigError:
        """Return the error that says what is wrong with this plug-in, and what to do."""
        reason = f"the plug-in {self.name!r} of package {self.package} ({self.target}) {wrong}"
        return ConfigError(path, reason, remedy=f"mend or update {self.package}, or use another {_NOUNS[self.group]}")

    def _mismatch(self, found: object) -> str:
        """Return what keeps an object from being a plug-in of this group, or an empty text."""
        module, _, name = _BASES[self.group].partition(":")
        base = getattr(import_module(module), name)
        if not (isinstance(found, type) and issubclass(found, base)):
            return f"is no {name}: its class must derive from {module}.{name}"
        if missing := sorted(getattr(found, "__abstractmethods__", ())):
            return f"lacks {', '.join(f'{method}()' for method in missing)}"
        arguments = _ARGUMENTS[self.group]
        try:
            inspect.signature(found).bind(*arguments)
        except TypeError as error:
            return f"cannot be made as {found.__name__}({', '.join(arguments)}): {error}"
        return ""


_NOUNS: Final = {TIERS: "type of tier", POLICIES: "eviction policy"}


def installed(group: str) -> list[Plugin]:
    """Return what installed packages offer in a group, by name. Imports nothing."""
    import importlib.metadata  # a tenth of what `import kvcairn` takes, and needed only when settings are read

    found = {_plugin(point) for point in importlib.metadata.entry_points(group=group)}
    return sorted(found, key=lambda plugin: (plugin.name, plugin.package))


def names(group: str) -> set[str]:
    """Return the names that installed packages offer in a group. Imports nothing."""
    return {plugin.name for plugin in installed(group)}


def find(group: str, name: str, path: str) -> Plugin | None:
    """Return the plug-in of that name, or None. Imports nothing.

    Raises:
        ConfigError: several packages offer it; names `path`.
    """
    found = [plugin for plugin in installed(group) if plugin.name == name]
    if len(found) > 1:
        packages = " and ".join(plugin.package for plugin in found)
        raise ConfigError(path, f"packages {packages} both offer {name!r}", remedy="uninstall all of them but one")
    return found[0] if found else None


def _plugin(point: EntryPoint) -> Plugin:
    package = point.dist.name if point.dist is not None else "(unknown)"
    return Plugin(point.group, point.name, package, point.value.partition("[")[0].strip())
