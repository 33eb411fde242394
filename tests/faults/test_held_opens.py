"""Blocks that are open over a take-over stay, before anything is read of them: the next daemon knows the handles."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator

import pytest
from helpers import KIB, MIB, content, wait_until
from test_held_mounts import HeldPool, _kernel, in_thread, meanwhile  # noqa: F401

SIZE = 1 * MIB


@pytest.fixture
def pool() -> Iterator[HeldPool]:
    with HeldPool(files=2, size="128M", started=False) as made:
        made.hold()
        made.mount_args = ("--allow-other", "--hold", str(made.socket))
        made.start()
        yield made


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_blocks_that_are_open_and_unread_outlive_the_eviction_of_all_others(pool: HeldPool, number: int) -> None:
    count = 8
    for i in range(count):
        (pool.mount / f"kept{i}").write_bytes(content(SIZE, i))

    def begin() -> tuple[list[int], list[mmap.mmap]]:
        fds = [os.open(pool.mount / f"kept{i}", os.O_RDONLY) for i in range(count)]
        return fds, [mmap.mmap(fd, 0, prot=mmap.PROT_READ) for fd in fds[: count // 2]]

    def end(found: object) -> list[object]:
        fds, mapped = found  # type: ignore[misc]
        seen: list[object] = [memory[:] == content(SIZE, i) for i, memory in enumerate(mapped)]
        for i, fd in enumerate(fds):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            try:
                seen.append(os.pread(fd, SIZE, 0) == content(SIZE, i))
            except OSError as error:
                seen.append(error.errno)
        for fd in fds:
            os.close(fd)
        return seen

    go_on = meanwhile(pool.base, begin, end)
    pool.take_over(number)
    pool.take_over(number)
    evicted = int(pool.status()["counters"]["evicted_blocks"])
    wanted = 2 * int(pool.status()["space"]["size"]) // SIZE
    for i in range(wanted):
        (pool.mount / f"new{i}").write_bytes(content(SIZE, 100 + i % 7))
    assert int(pool.status()["counters"]["evicted_blocks"]) - evicted > wanted // 3
    assert go_on() == [True] * (count // 2 + count)


def test_a_block_counts_as_open_until_its_last_close(pool: HeldPool) -> None:
    size = 300 * KIB
    (pool.mount / "a").write_bytes(content(size, 1))

    def begin() -> tuple[int, int]:
        return os.open(pool.mount / "a", os.O_RDONLY), os.open(pool.mount / "a", os.O_RDONLY)

    def end(found: object) -> None:
        first, second = found  # type: ignore[misc]
        os.close(first)
        (pool.base / "once").touch()
        wait_until((pool.base / "again").exists, "the second close")
        os.close(second)

    go_on = meanwhile(pool.base, begin, end)
    pool.take_over(signal.SIGKILL)
    assert int(pool.status()["counters"]["open_handles"]) == 2
    result = in_thread(go_on)
    wait_until((pool.base / "once").exists, "the first close")
    wait_until(lambda: int(pool.status()["counters"]["open_handles"]) == 1, "the first RELEASE")
    pool.take_over(signal.SIGKILL)
    assert int(pool.status()["counters"]["open_handles"]) == 1
    (pool.base / "again").touch()
    result()
    wait_until(lambda: int(pool.status()["counters"]["open_handles"]) == 0, "the last RELEASE")
