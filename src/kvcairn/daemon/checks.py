"""What a request must be like before the core sees it: the core trusts its callers, a daemon does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, get_args, get_type_hints

from kvcairn import requests as rq
from kvcairn.checksum import CHECKSUM_BYTES
from kvcairn.core.core import Core
from kvcairn.errors import UnsupportedError
from kvcairn.keys import KEY_BYTES

MOST_KEYS: Final = 1 << 17  # of one request
MOST_SPACES: Final = 256
MOST_NUMBER: Final = 1 << 62
_LOCAL: Final = (rq.ReadInto, rq.ReadStatus, rq.ReadCancel)


class Refusal(Exception):
    """A request that no client of ours sends; its connection has to end."""


def check(request: Any, core: Core) -> None:
    """Do nothing where a request can be handled.

    Raises:
        Refusal: it cannot.
        UnsupportedError: it is for a cache in the client's own process.
    """
    if isinstance(request, _LOCAL):
        raise UnsupportedError("a daemon cannot read into memory of another process")
    for name in _NUMBERS[type(request)]:
        value = getattr(request, name)
        if value is not None and not (-MOST_NUMBER < value < MOST_NUMBER or value == math.inf):  # NaN is neither
            raise Refusal(f"{name} is out of range")
    if isinstance(request, rq.Chain):
        _check_space(request.space, core)
        _check_keys(request, core)
    if (further := _FURTHER.get(type(request))) is not None:
        further(request, core)


def _check_space(number: int | None, core: Core, must_be_open: bool = True) -> None:
    if number is None:
        return
    spaces = core.state.spaces
    if not 0 <= number < len(spaces) or (must_be_open and spaces[number].descriptor is None):
        raise Refusal("there is no such space")


def _check_all(request: rq.LookupAll | rq.AcquireAll, core: Core) -> None:
    if not 0 < len(request.spaces) <= MOST_SPACES:
        raise Refusal(f"{len(request.spaces)} spaces; 1 to {MOST_SPACES} go into one request")
    for number in request.spaces:
        _check_space(number, core)
    _check_keys(request, core)


def _check_keys(request: rq.Chain | rq.LookupAll | rq.AcquireAll, core: Core) -> None:
    parent = request.parent if isinstance(request, rq.Chain) else None
    if len(request.keys) > MOST_KEYS:
        raise Refusal(f"{len(request.keys)} keys; at most {MOST_KEYS} go into one request")
    if not 0 <= request.start <= len(request.keys):
        raise Refusal("start is outside of the keys")
    if any(len(key) != KEY_BYTES for key in request.keys) or (parent and len(parent) != KEY_BYTES):
        raise Refusal(f"a key has {KEY_BYTES} bytes")


def _check_reserve(request: rq.Reserve, core: Core) -> None:
    groups = len(core.state.spaces[request.space].groups)
    parts = request.parts
    if parts is not None and len(parts) != len(request.keys) - request.start:
        raise Refusal("parts has another length than the keys")
    if any(not 0 <= group < groups for chosen in parts or () for group in chosen):
        raise Refusal("parts names a group that there is not")


def _check_commit(request: rq.Commit, core: Core) -> None:
    hold = core.state.ledger.find(request.reservation, "reservation")
    if request.checksums is None or hold is None:
        return
    is_short = len(request.checksums) != len(hold.space.groups)
    if is_short or any(len(sums) > len(hold.keys) for sums in request.checksums):
        raise Refusal("checksums are not those of the reservation")
    if any(len(each) not in (0, CHECKSUM_BYTES) for sums in request.checksums for each in sums):
        raise Refusal(f"a checksum has {CHECKSUM_BYTES} bytes")


def _check_damaged(request: rq.Damaged, core: Core) -> None:
    hold = core.state.ledger.find(request.lease, "lease")
    if request.block < 0 or (hold is not None and request.block >= len(hold.keys)):
        raise Refusal("there is no such block")


def _check_job_lease(request: rq.JobLease, core: Core) -> None:
    if request.count is not None and request.count < 0:
        raise Refusal("count is negative")


def _check_write_back(request: rq.WriteBack, core: Core) -> None:
    if request.begin < 0:
        raise Refusal("begin is negative")


def _check_report(request: rq.ReportPrefill, core: Core) -> None:
    _check_space(request.space, core)
    if request.tokens < 0 or not 0 <= request.seconds < math.inf:
        raise Refusal("no engine computes that")


_NUMBERS: Final[dict[type, list[str]]] = {  # the fields that are numbers, or may be
    kind: [name for name, hint in get_type_hints(kind).items() if hint in (int, float, int | None, float | None)]
    for kind in get_args(rq.AnyRequest)
}
_FURTHER: Final[dict[type, Callable[[Any, Core], None]]] = {
    rq.LookupAll: _check_all,
    rq.AcquireAll: _check_all,
    rq.ReportPrefill: _check_report,
    rq.Reserve: _check_reserve,
    rq.Commit: _check_commit,
    rq.Damaged: _check_damaged,
    rq.JobLease: _check_job_lease,
    rq.WriteBack: _check_write_back,
    rq.Clear: lambda request, core: _check_space(request.space, core, must_be_open=False),
}
