"""Stores of new files do not pass Python one by one: it hears of segments and of commits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from helpers import KIB, MIB, Pool, content

THREADS = 4
FILES = 250  # of each thread
SIZE = 64 * KIB
# Of events, completions and calls together: some five for each segment.
MOST = 0.05
# A look at each of the four devices and a summary by the timer come by the second, not by the block. An idle mount has
# 3.6 a second.
A_SECOND = 5.0


def store(pool: Pool, thread: int) -> None:
    directory = pool.mount / f"{thread}"
    for index in range(FILES):
        made = directory / f"tmp-{index}"
        descriptor = os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        os.write(descriptor, content(SIZE, (thread, index)))
        os.close(descriptor)
        made.rename(directory / f"block-{index}")


def counters(pool: Pool) -> tuple[dict[str, int], float]:
    return pool.status()["counters"], time.monotonic()


def handed_each(before: tuple[dict[str, int], float], after: tuple[dict[str, int], float]) -> float:
    """How much reached Python for each file, without what comes by the second."""
    handed = after[0]["handed"] - before[0]["handed"] - A_SECOND * (after[1] - before[1])
    return max(0.0, handed) / (THREADS * FILES)


def run(pool: Pool) -> tuple[float, float]:
    """How much reached Python for each store, and which share of the files was sealed without it."""
    for thread in range(THREADS):
        (pool.mount / f"{thread}").mkdir()
        (pool.mount / f"{thread}" / "first").touch()  # from then on its directory is in memory
    before = counters(pool)
    threads = [threading.Thread(target=store, args=(pool, thread)) for thread in range(THREADS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    after = counters(pool)
    return handed_each(before, after), (after[0]["flushes_sealed"] - before[0]["flushes_sealed"]) / (THREADS * FILES)


def test_a_stored_block_hardly_reaches_python(own_pool: Callable[..., Pool]) -> None:
    pool = own_pool(size="256M", format_args=("--segment-size", "16M"))
    handed, sealed = run(pool)
    assert handed <= MOST, f"{handed:.3f} events, completions and calls a store; {sealed:.2f} of the files sealed in C"
    assert sealed > 0.95


def test_a_pin_elsewhere_changes_nothing(own_pool: Callable[..., Pool]) -> None:
    pool = own_pool(size="256M", format_args=("--segment-size", "16M"))
    (pool.mount / "kept").mkdir()
    os.setxattr(pool.mount / "kept", "user.kvfs.pin", b"1")
    handed, sealed = run(pool)
    assert handed <= MOST and sealed > 0.95
    (pool.mount / "kept" / "file").write_bytes(content(SIZE, "kept"))
    assert pool.status()["space"]["pinned"] >= SIZE


def test_renames_and_removals_of_new_files_hardly_reach_python(own_pool: Callable[..., Pool]) -> None:
    pool = own_pool(size="256M", format_args=("--segment-size", "16M"))
    run(pool)
    before = counters(pool)
    for thread in range(THREADS):
        for index in range(FILES):
            (pool.mount / f"{thread}" / f"block-{index}").unlink()
    after = counters(pool)
    assert handed_each(before, after) <= MOST
    assert (after[0]["forwarded"] - before[0]["forwarded"]) / (THREADS * FILES) <= MOST
    assert all(os.listdir(pool.mount / f"{thread}") == ["first"] for thread in range(THREADS))


def test_blocks_that_go_on_in_a_second_segment_hardly_reach_python(own_pool: Callable[..., Pool]) -> None:
    """Of three files in segments of 8 MiB one lies in two. The daemon is killed, and all are there."""
    pool = own_pool(size="256M", format_args=("--segment-size", "8M"))
    before, count, size = counters(pool), 60, 3 * MIB
    for index in range(count):
        (pool.mount / f"{index}.tmp").write_bytes(content(size, index))
        (pool.mount / f"{index}.tmp").rename(pool.mount / f"{index}")
    after = counters(pool)
    assert after[0]["flushes_sealed"] - before[0]["flushes_sealed"] >= 0.95 * count
    assert after[0]["sealed_blocks"] - before[0]["sealed_blocks"] == count
    pool.kill()
    pool.start()
    for index in range(count):  # a rename of the last second may be undone
        path = pool.mount / f"{index}"
        found = path if path.exists() else path.with_suffix(".tmp")
        assert found.read_bytes() == content(size, index)
    pool.umount()
    assert "nothing is damaged" in pool.command("fsck", str(pool.path)).stdout
