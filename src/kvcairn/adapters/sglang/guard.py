"""SGLang's storage threads must live on, whatever happens here: a failure is a miss."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from kvcairn.errors import KVCairnError

logger = logging.getLogger(__name__)

# What pools, torch and the cache raise.
FAILURES = (
    KVCairnError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def never_raises(otherwise: Callable[..., object]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a method return `otherwise(*arguments)` where something failed, and say so in the log."""

    def wrap(method: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(method)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return method(*args, **kwargs)
            except FAILURES as error:
                logger.warning("%s failed, a miss: %s: %s", method.__qualname__, type(error).__name__, error)
                arguments: tuple[Any, ...] = args[1:]
                return cast(_R, otherwise(*arguments, **kwargs))

        return call

    return wrap
