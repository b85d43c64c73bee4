"""What real ranks do to test a link: python -m tests.support.link_ranks OUT FRAMEWORK."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hvdtrain.comm.connect import connect
from hvdtrain.compression import Link
from hvdtrain.compression.choose import parse
from hvdtrain.world import World
from tests.compression.test_compressors import NAMES, bucket, gradients, joined


def collectives(link: Link) -> None:
    size, rank = link.size, link.rank
    for count in (1, 1000, 2_000_003):  # the last one takes more pieces than a ring awaits at once
        array = np.arange(count, dtype=np.float32) % 256 + rank
        link.sum(array)
        np.testing.assert_array_equal(array, np.arange(count) % 256 * size + sum(range(size)))
    for dtype in (np.uint16, np.int32, np.float32):
        parts = (np.arange(5) + 100 * rank + 10 * np.arange(size)[:, None]).astype(dtype)
        got = link.alltoall(parts)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, np.arange(5) + 100 * np.arange(size)[:, None] + 10 * rank)
        row = (np.arange(6).reshape(2, 3) + 10 * rank).astype(dtype)
        everyone = link.allgather(row)
        assert everyone.dtype == dtype
        np.testing.assert_array_equal(everyone, np.arange(6).reshape(2, 3) + 10 * np.arange(size)[:, None, None])


def compressed(link: Link) -> dict[str, np.ndarray]:
    results = {}
    for name in NAMES:
        compressor = parse(name)
        assert compressor is not None
        for step in gradients(3, link.size):
            tensors = bucket(step[link.rank])
            compressor.exchange("b", tensors, link)
        results[name] = joined(tensors)
        compressor.settle(link)
    return results


def main() -> None:
    out, framework = Path(sys.argv[1]), sys.argv[2]
    comm = connect(World.from_env(), framework)
    first, second = comm.link(), comm.link()
    with ThreadPoolExecutor(1) as pool:  # as an adapter does it
        pool.submit(collectives, first).result(60)
        results = pool.submit(compressed, second).result(60)
    np.savez(out / f"rank-{comm.world.rank}.npz", **results)
    comm.close()


if __name__ == "__main__":
    main()
