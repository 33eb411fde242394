"""Handles of before a take-over: what was sealed reads on, also without a name."""

from __future__ import annotations

import os
import signal

import pytest
from helpers import KIB, content
from test_held_mounts import HeldPool, meanwhile, pool  # noqa: F401


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_sealed_file_without_a_name_reads_on(pool: HeldPool, number: int) -> None:  # noqa: F811
    data = content(300 * KIB, 1)
    (pool.mount / "a").write_bytes(data)
    (pool.mount / "b").write_bytes(data[::-1])

    def begin() -> tuple[int, int]:
        fds = os.open(pool.mount / "a", os.O_RDONLY), os.open(pool.mount / "b", os.O_RDONLY)
        (pool.mount / "a").unlink()
        (pool.mount / "c").write_bytes(b"c")
        (pool.mount / "c").rename(pool.mount / "b")
        return fds

    def end(found: object) -> list[bytes | int]:
        seen: list[bytes | int] = []
        for fd in found:  # type: ignore[attr-defined]
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            try:
                seen.append(os.pread(fd, len(data), 0))
                os.fstat(fd)
            except OSError as error:
                seen.append(error.errno or -1)
        return seen

    go_on = meanwhile(pool, begin, end)
    pool.take_over(number)
    pool.take_over(number)
    seen = go_on()
    assert [x if isinstance(x, int) else len(x) for x in seen] == [len(data)] * 2
    assert seen == [data, data[::-1]]
