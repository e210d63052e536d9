"""The fingerprint of a folder changes with every weight file."""

from __future__ import annotations

from pathlib import Path

from kvcairn.adapters.weights import folder_fingerprint


def test_it_changes_with_names_sizes_and_edges(tmp_path: Path) -> None:
    assert folder_fingerprint(tmp_path) == ""
    seen = set()
    (tmp_path / "a.safetensors").write_bytes(bytes(200_000))
    seen.add(folder_fingerprint(tmp_path))
    (tmp_path / "a.safetensors").write_bytes(b"\1" + bytes(199_999))
    seen.add(folder_fingerprint(tmp_path))
    (tmp_path / "a.safetensors").write_bytes(bytes(199_999) + b"\1")
    seen.add(folder_fingerprint(tmp_path))
    (tmp_path / "a.safetensors").write_bytes(bytes(200_001))
    seen.add(folder_fingerprint(tmp_path))
    (tmp_path / "b.bin").write_bytes(b"more")
    seen.add(folder_fingerprint(tmp_path))
    assert len(seen) == 5
    (tmp_path / "notes.txt").write_text("no weights")
    assert folder_fingerprint(tmp_path) in seen
