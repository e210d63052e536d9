from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest

from kvcairn import requests as rq
from kvcairn.core.core import Core
from kvcairn.layout import KVLayout, SpaceDescriptor
from kvcairn.testing.rig import Rig
from kvcairn.types import BlockStored, Hints, Hit, JobState, MissReason, RankSlice

KEY = bytes(range(32))
DESCRIPTOR = SpaceDescriptor(
    model="m", weights="w", layout=KVLayout.full(layers=1, kv_heads=1, head_dim=2, dtype="int8"), block_tokens=1,
    rank=RankSlice(tp=1, tp_size=2),
)  # fmt: skip
LEASED = rq.Leased(5, 2, MissReason.PENDING, [[0, 4096], [-1, 8192]], [[b"", b"x" * 16], [b"", b""]])

REQUESTS: list[rq.Request] = [
    rq.OpenSpace(DESCRIPTOR), rq.Lookup(1, [KEY], 1, b""), rq.Probe(1, [KEY], deadline_s=0.5),
    rq.LookupAll([1, 2], [KEY], 1), rq.AcquireAll([1], [KEY], 0, 0.5),
    rq.Acquire(1, [KEY, KEY], 1, KEY, 2.5), rq.Prefetch(1, [], priority=-5, deadline_s=None),
    rq.Reserve(1, [KEY], parts=[[0, 2]]), rq.Commit(1, [True, False], [[b"", b"y" * 16]]), rq.Abort(1),
    rq.Release(2), rq.Damaged(2, 0), rq.JobInfo(3), rq.JobLease(3, 2, MissReason.DEADLINE), rq.JobCancel(3),
    rq.JobClose(3), rq.Contains(1, [KEY]), rq.Readable(1, [KEY]), rq.Touch(1, [KEY]), rq.Forget(1, [KEY]),
    rq.Hint(1, [KEY], 0, None, Hints(ttl_s=1.5, pin=True)), rq.GetStats(), rq.IsIdle("disk"),
    rq.AddTier({"type": "disk", "capacity": 5}), rq.DetachTier("disk", False), rq.Clear(None, "memory"),
    rq.IsCleared(4), rq.WriteBack(3), rq.ReportPrefill(1, 512, 0.5),
    rq.ReadInto(1, [KEY], 0, None, [4096]), rq.ReadStatus(1), rq.ReadCancel(1),
    rq.Subscribe(), rq.Unsubscribe(1), rq.Events(1), rq.Ended(), rq.Adopt(b"ticket"),
]  # fmt: skip
REPLIES: list[Any] = [
    rq.SpaceOpened(0, "always", "through"), LEASED, rq.Reserved(1, [0, 2], [[0, 4096]], [1], MissReason.NO_ROOM),
    rq.JobStatus(1, JobState.LOADING, 0, 3, None, [True], True), rq.Adopted("lease", 0, [KEY], lease=LEASED),
    rq.Value(None), rq.Value(True), rq.Value(7), rq.Flags([True, False]), rq.LeasedAll([LEASED], None),
    rq.EventBatch([BlockStored("memory", KEY, KEY, None)], True), rq.HitReply(Hit(blocks=0, block_tokens=1)),
]  # fmt: skip


def kinds(union: Any) -> set[type]:
    return set(typing.get_args(union))


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_a_request_survives_the_wire(request_: rq.Request) -> None:
    data = msgspec.msgpack.encode(request_)
    got = msgspec.msgpack.Decoder(rq.AnyRequest).decode(data)
    assert got == request_
    assert type(got) is type(request_)


@pytest.mark.parametrize("reply", REPLIES, ids=lambda r: type(r).__name__)
def test_a_reply_survives_the_wire(reply: Any) -> None:
    got = msgspec.msgpack.Decoder(rq.AnyReply).decode(msgspec.msgpack.encode(reply))
    assert got == reply
    assert type(got) is type(reply)


def test_every_kind_of_request_is_tested_here() -> None:
    assert {type(request) for request in REQUESTS} == kinds(rq.AnyRequest)


def test_the_core_or_the_link_handles_every_request(rig: Rig) -> None:
    core: Core = rig.core
    assert set(core._handlers) | {rq.AddTier, rq.DetachTier} == kinds(rq.AnyRequest)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", b"\x91\xa3xyz", b"\x92\xa7Release\xa1x", b"\x81\xa1a\x01"])
def test_what_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        msgspec.msgpack.Decoder(rq.AnyRequest).decode(data)
