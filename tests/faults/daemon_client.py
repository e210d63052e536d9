"""A parent of clients that are killed: for each line on standard input it forks one, and prints its number.

A client connects to the daemon, then stores, reads and reserves without end. Each block is its key, repeated; one that
reads anything else says so in a file.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import kvcairn as kv

DESCRIPTOR = kv.SpaceDescriptor(
    model="toy",
    weights="0",
    layout=kv.KVLayout.full(layers=1, kv_heads=4, head_dim=64, dtype="float16"),
    block_tokens=16,
)


def content(key: bytes) -> bytes:
    return key * (DESCRIPTOR.layout.part_bytes(0, DESCRIPTOR.block_tokens) // len(key))


def use(space: kv.Space, rng: random.Random) -> None:
    prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 7))]
    keys = space.keys([letter for letter in prompt for _ in range(DESCRIPTOR.block_tokens)])
    act = rng.randrange(4)
    if act == 0:
        space.put(keys, [content(key) for key in keys], deadline_s=0.0)
    elif act == 1:
        with space.reserve(keys) as slots:
            for number, key in enumerate(slots.keys):
                slots[number][:] = content(key)
            if rng.random() < 0.7:
                slots.commit()
    elif act == 2:
        with space.prefetch(keys) as job, job.lease() as lease:
            assert all(bytes(lease[n]) == content(keys[n]) for n in range(lease.count)), "wrong bytes"
    else:
        with space.acquire(keys, deadline_s=0.05) as lease:
            assert all(bytes(lease[n]) == content(keys[n]) for n in range(lease.count)), "wrong bytes"


def be_client(address: str, seed: int, wrong: Path) -> None:
    rng = random.Random(seed)
    try:
        space = kv.Cache.connect(address).space(DESCRIPTOR)
        while True:
            use(space, rng)
    except AssertionError as error:
        wrong.write_text(str(error))


def main() -> None:
    address, wrong = sys.argv[1], Path(sys.argv[2])
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                be_client(address, int(line), wrong)
            finally:
                os._exit(1)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        sys.stdin.readline()  # the child was killed
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
