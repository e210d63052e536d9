"""What the cases share beside the fixtures."""

from __future__ import annotations

from collections.abc import Callable

from kvcairn.testing.rig import Rig

MakeRig = Callable[..., Rig]
