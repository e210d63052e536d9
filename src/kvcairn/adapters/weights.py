"""Fingerprint of the weight files in a folder, for every adapter that is given a folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

_EDGE_BYTES = 64 * 1024
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")


def folder_fingerprint(folder: Path) -> str:
    """Return 64 hexadecimal digits over names, sizes, first and last 64 KiB of the weight files; "" without any.

    The first 64 KiB hold the header of a file: names, shapes and dtypes of its tensors.
    """
    files = sorted(file for pattern in _WEIGHT_FILES for file in folder.glob(pattern))
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as f:
            size = f.seek(0, 2)
            f.seek(0)
            digest.update(f"{file.name}{size}".encode() + f.read(_EDGE_BYTES))
            f.seek(max(0, size - _EDGE_BYTES))
            digest.update(f.read(_EDGE_BYTES))
    return digest.hexdigest() if files else ""
