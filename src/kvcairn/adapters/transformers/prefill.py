"""How fast the model computes prompts, told to the cache, so that it loads only what comes sooner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Mark = Callable[[], float]
"""Returns a time in seconds; on a GPU it waits for the work before it."""


@contextmanager
def timed_prefills(model: Any, least_tokens: int, report: Callable[[int, float], None]) -> Iterator[None]:
    """Report (tokens, seconds) of each forward of this thread that computes at least `least_tokens`.

    Few tokens say more about what a forward costs in any case than about computing.
    """
    me, begun, ended = threading.get_ident(), list[Mark](), list[tuple[int, Mark, Mark]]()

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == me:
            begun.append(_mark(module))

    def after(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if threading.get_ident() == me and begun:
            begin, ids = begun.pop(), kwargs.get("input_ids", args[0] if args else None)
            if isinstance(ids, torch.Tensor) and ids.numel() >= least_tokens:
                ended.append((ids.numel(), begin, _mark(module)))

    hooks = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for tokens, begin, end in ended:
        if (seconds := end() - begin()) > 0:
            report(tokens, seconds)


def _mark(model: Any) -> Mark:
    """Note this moment in the order of the model's work."""
    if model.device.type != "cuda":
        now_s = time.perf_counter()
        return lambda: now_s
    start = _first_event(model.device)
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(model.device))

    def seconds() -> float:
        event.synchronize()
        return float(start.elapsed_time(event)) / 1000

    return seconds


_FIRST: dict[torch.device, torch.cuda.Event] = {}


def _first_event(device: torch.device) -> torch.cuda.Event:
    """Return the event that times on a GPU count from."""
    if device not in _FIRST:
        first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        first.record(torch.cuda.current_stream(device))
        _FIRST[device] = first
    return _FIRST[device]
