"""What a request of serving is answered with where the daemon is gone: a miss, never an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvcairn import requests as rq
from kvcairn.types import Hit, JobState, MissReason

_GONE = "the daemon is gone"
_DOWN = MissReason.TIER_DOWN

_ANSWERS: Final[dict[type, Callable[[Any, int], Any]]] = {
    rq.Lookup: lambda request, groups: rq.HitReply(Hit(blocks=0, block_tokens=1, reason=_DOWN)),
    rq.LookupAll: lambda request, groups: rq.HitReply(Hit(blocks=0, block_tokens=1, reason=_DOWN)),
    rq.AcquireAll: lambda request, groups: rq.LeasedAll(
        [rq.Leased(0, 0, _DOWN, [[]] * groups) for _ in request.spaces], _DOWN
    ),
    rq.Probe: lambda request, groups: rq.HitReply(Hit(blocks=0, block_tokens=1, reason=_DOWN)),
    rq.Acquire: lambda request, groups: rq.Leased(0, 0, _DOWN, [[]] * groups),
    rq.JobLease: lambda request, groups: rq.Leased(0, 0, _DOWN, [[]] * groups),
    rq.Prefetch: lambda request, groups: rq.JobStatus(0, JobState.FAILED, 0, 0, _GONE),
    rq.JobInfo: lambda request, groups: rq.JobStatus(request.job, JobState.FAILED, 0, 0, _GONE),
    rq.Reserve: lambda request, groups: rq.Reserved(0, [], [[]] * groups, [], _DOWN, True),
    rq.Contains: lambda request, groups: rq.Value(0),
    rq.Hint: lambda request, groups: rq.Value(0),
    rq.Readable: lambda request, groups: rq.Flags([False] * len(request.keys)),
    **{
        kind: lambda request, groups: rq.Value(None)
        for kind in (rq.Commit, rq.Abort, rq.Release, rq.Damaged, rq.JobCancel, rq.JobClose, rq.Touch, rq.ReportPrefill)
    },
}


def missed(request: object, groups: int) -> Any:
    """Return the answer that makes a request a miss; None where it is none of serving.

    `groups` is the largest number of layer groups of any space that the client has opened.
    """
    answer = _ANSWERS.get(type(request))
    return None if answer is None else answer(request, groups)
