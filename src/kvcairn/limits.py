"""Whether tiers fit on this machine, with the arithmetic in every refusal. Layer 1."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvcairn.errors import ConfigError
from kvcairn.host import Host, default_reserve_bytes, device_bytes, folder_bytes, free_bytes, making
from kvcairn.options import DiskTierOptions, MemoryTierOptions
from kvcairn.units import PAGE_BYTES, format_size

# With less beside the memory tier no engine runs, and the machine comes to a stand.
_MOST_OF_MEMORY: Final = 0.9


def check_memory(path: str, tier: MemoryTierOptions, host: Host) -> list[str]:
    """Refuse a memory tier that is no tier, or does not fit; return what is to be warned of.

    Args:
        path: of the tier's table.
        tier: its settings.
        host: whose memory it takes.

    Raises:
        ConfigError: it cannot be; names the setting.
    """
    asked, memory, limit = tier.capacity_bytes, host.memory_bytes(), host.cgroup_limit_bytes()
    if asked < PAGE_BYTES:
        reason = f"{asked} bytes asked; a slot takes at least {PAGE_BYTES}"
        raise ConfigError(f"{path}.capacity", reason, remedy="write the unit, as in '8 GiB'")
    most = min((bound for bound in (memory, limit) if bound is not None), default=None)
    if most is not None and asked > most:
        has = [f"this host has {format_size(memory)}"] if memory is not None else []
        has += [f"the control group may use {format_size(limit)}"] if limit is not None else []
        reason = f"{format_size(asked)} asked; {'; '.join(has)}; {format_size(asked - most)} too much"
        remedy = f"set it to at most {_leaving_room(most)}, which leaves room for the engine"
        raise ConfigError(f"{path}.capacity", reason, asked, remedy)
    region = tier.region_bytes
    if region is not None and region % PAGE_BYTES:
        remedy = f"use {max(1, round(region / PAGE_BYTES)) * PAGE_BYTES}"
        raise ConfigError(f"{path}.region", f"must be a multiple of {PAGE_BYTES} bytes", region, remedy)
    if region is not None and region > asked:
        reason = f"above the capacity of {format_size(asked)}"
        raise ConfigError(f"{path}.region", reason, region, "leave it out, or set it to a fraction of the capacity")
    return _pressure(f"{path}.capacity", asked, most, host.available_bytes())


def _pressure(path: str, asked: int, most: int | None, available: int | None) -> list[str]:
    if most is not None and asked > most * _MOST_OF_MEMORY:
        left = f"{format_size(asked)} of {format_size(most)} leaves {format_size(most - asked)} for everything else"
        return [f"{path}: {left} on this host; set it to at most {_leaving_room(most)}"]
    if available is not None and asked > available:
        found = f"{format_size(asked)} asked; {format_size(available)} are available now"
        return [f"{path}: {found}; stop what takes the rest, or set it to less"]
    return []


def _leaving_room(most: int) -> str:
    return format_size(int(most * _MOST_OF_MEMORY))


def check_disks(disks: Mapping[str, DiskTierOptions]) -> None:
    """Refuse disk tiers whose folders cannot be used, or that do not fit on their file systems together.

    Args:
        disks: the settings of each by the path of its table. Blocks for a walk of their folders.

    Raises:
        ConfigError: names the setting.
    """
    folders: dict[Path, str] = {}
    devices: dict[int, dict[str, DiskTierOptions]] = {}
    for path, tier in disks.items():
        folder = _folder(f"{path}.path", tier.path)
        if folder in folders:
            reason = f"{folders[folder]} uses this folder"
            raise ConfigError(f"{path}.path", reason, tier.path, "give each its own")
        folders[folder] = path
        devices.setdefault(folder.stat().st_dev, {})[path] = tier
    for sharing in devices.values():
        _check_device(sharing)


def _folder(path: str, text: str) -> Path:
    folder = Path(text)
    if not text:
        raise ConfigError(path, "empty", text, "name an existing folder")
    if not folder.exists():
        # Not made silently: where a mount is missing that would fill the file system below it.
        raise ConfigError(path, "no such folder", text, making(folder))
    if not folder.is_dir():
        raise ConfigError(path, "not a folder", text, "name a folder that this tier has for itself")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(path, "not writable by this user", text, f"chown it to uid {os.geteuid()}")
    return folder.resolve()


def _check_device(disks: Mapping[str, DiskTierOptions]) -> None:
    asked = sum(tier.capacity_bytes for tier in disks.values())
    used = sum(folder_bytes(Path(tier.path)) for tier in disks.values())
    path, last = list(disks.items())[-1]
    folder = Path(last.path)
    free, default = free_bytes(folder), default_reserve_bytes(device_bytes(folder))
    reserve = max(default if tier.reserve_bytes is None else tier.reserve_bytes for tier in disks.values())
    room = free + used - reserve
    if asked > room:
        each = [f"{name} {format_size(tier.capacity_bytes)}" for name, tier in disks.items()]
        reason = (
            f"{format_size(asked) if len(each) == 1 else ' + '.join(each)} asked; the file system has "
            f"{format_size(free)} free and {format_size(used)} here in use, and {format_size(reserve)} stay free "
            f"(reserve): {format_size(asked - room)} too much"
        )
        remedy = f"at most {format_size(room)} in all, or free some space" if room > 0 else "free some space"
        raise ConfigError(f"{path}.capacity", reason, last.capacity_bytes, remedy)
