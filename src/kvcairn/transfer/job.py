"""The handle of one asynchronous transfer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from kvcairn.errors import ClosedError, KVCairnError, LeaseError
from kvcairn.memory.lease import Frame, Lease, first_damaged, quietly
from kvcairn.requests import Damaged, JobCancel, JobClose, JobInfo, JobLease, JobStatus
from kvcairn.types import FINAL, Completion, JobState, MissReason
from kvcairn.units import seconds


class Job:
    """A prefetch. It owns what it has brought and what is still to come, until `lease`, `close` or its time to live.

    Any thread. Only `wait` waits.
    """

    def __init__(self, frame: Frame, status: JobStatus, wait_s: float | None) -> None:
        """Wrap what `prefetch` returned; `wait_s` is how long its policy lets `wait` take."""
        self._frame, self._number, self._wait_s = frame, status.job, wait_s
        self._last = status
        self._is_open = True

    @property
    def number(self) -> int:
        """The job's number, unique in one run of the cache."""
        return self._number

    @property
    def state(self) -> JobState:
        """Where the job stands: queued, loading, or one of the final states ready, cancelled, failed."""
        return self._status().state

    @property
    def ready(self) -> int:
        """Leading blocks, from `start`, that are in memory."""
        return self._status().ready

    @property
    def error(self) -> str | None:
        """Why a failed job failed."""
        return self._status().error

    @property
    def is_stalled(self) -> bool:
        """Whether nothing more can arrive until somebody else lets go of memory."""
        return self._status().stalled

    def query(self) -> bool:
        """Return whether the job has ended; never waits."""
        return self.state in FINAL

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the job, by default as long as the prefetch policy says; return whether it ended."""
        limit_s = self._wait_s if timeout_s is None else seconds(timeout_s, "timeout_s")
        return self._frame.link.wait(self.query, limit_s)

    def cancel(self) -> None:
        """Bring nothing more. What has arrived stays owned. Idempotent."""
        if self._is_open:
            self._frame.link.call(JobCancel(self._number))

    def lease(self, count: int | None = None) -> Lease:
        """Take over the leading blocks that have arrived, at most `count`, and end the job. Never waits.

        Raises:
            LeaseError: the job was closed, or its time to live is over.
            ValueError: `count` is negative; the job goes on.
        """
        if not self._is_open:
            raise LeaseError("this job has ended")
        if count is not None and count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        self._finish()
        leased = self._frame.link.call(JobLease(self._number, count, MissReason.PENDING))
        damaged = first_damaged(self._frame, leased)
        if damaged is None:
            return Lease(self._frame, leased)
        self._frame.link.call(Damaged(leased.lease, damaged))
        none: list[list[int]] = [[] for _ in leased.offsets]
        return Lease(self._frame, msgspec.structs.replace(leased, count=0, reason=MissReason.CORRUPT, offsets=none))

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        if self._is_open:
            quietly(self._finish)
            self._is_open = False
            quietly(lambda: self._frame.link.call(JobClose(self._number)))

    def ticket(self) -> bytes:
        """Return a token with which `Cache.adopt`, in another process of the same engine, shares this job."""
        return msgspec.msgpack.encode((self._frame.link.boot_id, "job", self._number))

    def __enter__(self) -> Self:
        """Return the job."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _status(self) -> JobStatus:
        if self._is_open:
            self._last = self._frame.link.call(JobInfo(self._number))
        return self._last

    def _finish(self) -> None:
        self._status()
        self._is_open = False


class CopyJob:
    """A copy between blocks and buffers of the caller, on a transfer thread.

    Attributes:
        ok: for each key whether it was copied; complete once the job has ended.
    """

    def __init__(self, frame: Frame, keys: int, work: Callable[[CopyJob], Completion | None]) -> None:
        """Start `work`, which sets `ok`, looks at `is_cancelled`, and returns what is kept until it has ended."""
        self._frame = frame
        self.ok: list[bool] = [False] * keys
        self.is_cancelled = False
        self.error: str | None = None
        self._ended = threading.Event()
        frame.link.run(lambda: self._work(work), self._fail)

    @property
    def state(self) -> JobState:
        """Where the job stands."""
        if not self._ended.is_set():
            return JobState.LOADING
        return JobState.FAILED if self.error else JobState.CANCELLED if self.is_cancelled else JobState.READY

    @property
    def ready(self) -> int:
        """Leading blocks that were copied."""
        return self.ok.index(False) if False in self.ok else len(self.ok)

    def query(self) -> bool:
        """Return whether the job has ended; never waits."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; return whether it came. The buffers belong to the job until then."""
        limit_s = None if timeout_s is None else seconds(timeout_s, "timeout_s")
        return self.query() or self._frame.link.wait(self.query, limit_s)

    def cancel(self) -> None:
        """Stop before the next block. The buffers belong to the job until it has ended."""
        self.is_cancelled = True

    def close(self) -> None:
        """Cancel, and wait until the buffers are free."""
        self.cancel()
        self.wait()

    def _work(self, work: Callable[[CopyJob], Completion | None]) -> None:
        try:
            left = work(self)
        except KVCairnError as error:
            self._fail(str(error))
            return
        self._end()
        if left is None:
            return
        try:
            self._frame.link.when(left, lambda: None)
        except ClosedError:  # nobody polls any more; this thread is what keeps it
            self._frame.link.wait(left.query, None)

    def _fail(self, why: str) -> None:
        self.error = why
        self._end()

    def _end(self) -> None:
        self._ended.set()
        self._frame.link.notify()
