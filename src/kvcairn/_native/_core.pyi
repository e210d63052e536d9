"""The C++ core. Everything in it runs without the GIL; `kvcairn.copying` describes the functions."""

import numpy as np
import numpy.typing as npt

Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

def instruction_set() -> str: ...
def gather(
    bases: npt.NDArray[np.uint64],
    pool_bytes: int,
    indices: npt.NDArray[np.int64],
    stride_bytes: int,
    page_bytes: int,
    out: Buffer,
    offsets: npt.NDArray[np.int64],
    threads: int = 1,
) -> None: ...
def scatter(
    bases: npt.NDArray[np.uint64],
    pool_bytes: int,
    indices: npt.NDArray[np.int64],
    stride_bytes: int,
    page_bytes: int,
    source: Buffer,
    offsets: npt.NDArray[np.int64],
    threads: int = 1,
) -> None: ...
def copy(
    targets: npt.NDArray[np.uint64], sources: npt.NDArray[np.uint64], sizes: npt.NDArray[np.int64], threads: int = 1
) -> None: ...
def copy_hashed(
    targets: npt.NDArray[np.uint64],
    sources: npt.NDArray[np.uint64],
    sizes: npt.NDArray[np.int64],
    threads: int = 1,
    counts: npt.NDArray[np.int64] | None = None,
) -> bytes: ...
def checksum(data: Buffer) -> bytes: ...
