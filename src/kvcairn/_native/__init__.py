"""The C++ core. Importing it raises ImportError where it was not built; `kvcairn.copying` is the door to it."""

from kvcairn._native._core import checksum, copy, copy_hashed, gather, instruction_set, scatter

__all__ = ["checksum", "copy", "copy_hashed", "gather", "instruction_set", "scatter"]
