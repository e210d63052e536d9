"""The demo's second process: knows nothing but a folder on disk, loads from it, and reports one line of JSON.

python -m kvcairn.demo.worker TASK      (a JSON object with the fields of `Task`)
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from kvcairn.demo.process import in_new_process


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is told.

    Attributes:
        weights: folder of the model's weights, None for the small random one.
        disk: folder of the disk tier.
    """

    weights: str | None
    disk: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What it reports: seconds to the first token, the new tokens, and the reused ones by tier."""

    ttft_s: float
    tokens: list[int]
    reused_tokens: dict[str, int]


def start(task: Task) -> Result:
    """Run the task in a new process and wait for it.

    Raises:
        KVCairnError: the process failed.
    """
    printed = in_new_process("kvcairn.demo.worker", msgspec.json.encode(task).decode())
    return msgspec.json.decode(printed.splitlines()[-1], type=Result)


def main(argument: str) -> None:
    """Do the task of the command line."""
    from kvcairn.demo.measure import cached, open_cache, quiet, timed
    from kvcairn.demo.weights import load

    quiet()
    task = msgspec.json.decode(argument, type=Task)
    demo = load(Path(task.weights) if task.weights else None)
    with open_cache(Path(task.disk), demo) as cache:
        model = cached(demo, cache)
        result = timed(demo, model.generate)
        report = Result(ttft_s=result.ttft_s, tokens=result.tokens, reused_tokens=model.last_reuse.by_tier)
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
