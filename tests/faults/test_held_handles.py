"""Handles of before a take-over: what was sealed reads on, also without a name."""

from __future__ import annotations

import os
import signal

import pytest
from helpers import KIB, content, tell, wait_until
from test_held_mounts import HeldPool, in_thread, meanwhile, pool  # noqa: F401


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

    go_on = meanwhile(pool.base, begin, end)
    pool.take_over(number)
    pool.take_over(number)
    seen = go_on()
    assert [x if isinstance(x, int) else len(x) for x in seen] == [len(data)] * 2
    assert seen == [data, data[::-1]]


def _used(pool: HeldPool) -> int:  # noqa: F811
    return int(pool.status()["space"]["used"])


def test_a_file_that_loses_its_name_after_the_take_over_reads_on_until_it_is_closed(pool: HeldPool) -> None:  # noqa: F811
    """The daemon does not know who has it open. The kernel does, and forgets the inode after the last close."""
    data = content(300 * KIB, 1)
    for name in ("a", "b", "closed"):
        (pool.mount / name).write_bytes(data)
    (pool.mount / "c").write_bytes(b"c")

    def begin() -> tuple[int, int]:
        os.close(os.open(pool.mount / "closed", os.O_RDONLY))
        return os.open(pool.mount / "a", os.O_RDONLY), os.open(pool.mount / "b", os.O_RDONLY)

    def read(found: object) -> object:
        (pool.mount / "a").unlink()
        (pool.mount / "closed").unlink()
        (pool.mount / "c").rename(pool.mount / "b")
        os.sync()
        seen = []
        for fd in found:  # type: ignore[attr-defined]
            for _ in range(2):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                seen.append(os.pread(fd, len(data), 0) == data)
        tell(pool.base / "seen", str(seen))
        wait_until((pool.base / "close").exists, "the step that closes")
        for fd in found:  # type: ignore[attr-defined]
            os.close(fd)
        return None

    go_on = meanwhile(pool.base, begin, read)
    pool.take_over(signal.SIGKILL)
    before = _used(pool)
    result = in_thread(go_on)
    wait_until((pool.base / "seen").exists, "the reads")
    assert (pool.base / "seen").read_text() == str([True] * 4)
    size = 300 * KIB
    wait_until(lambda: size <= before - _used(pool) < 2 * size, "the block that nobody has open goes")
    (pool.base / "close").touch()
    result()
    wait_until(lambda: before - _used(pool) > 3 * size, "the blocks that were closed go")
