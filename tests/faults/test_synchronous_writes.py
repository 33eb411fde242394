"""O_SYNC, O_DSYNC and RWF_DSYNC: what write(2) has answered is there after kill -9 of the daemon.

Linux asks for an FSYNC behind such a write only where the file has pages in its cache. Where it has none, the flag in
the WRITE itself says so (fuse_write_in.flags).
"""

from __future__ import annotations

import mmap
import os
import pathlib
import struct
from collections.abc import Callable

import pytest
from front_end import CREATE, INIT, WRITE, Guest
from helpers import KIB, MIB, Pool, assert_same, content, opened, read_file, wait_until, write_file

pytestmark = pytest.mark.timeout(180)

NEW = os.O_CREAT | os.O_EXCL
WAYS = {
    "buffered, O_DSYNC": (NEW | os.O_WRONLY | os.O_DSYNC, 0),
    "buffered, O_SYNC": (NEW | os.O_WRONLY | os.O_SYNC, 0),
    "buffered, O_SYNC, to read and write": (NEW | os.O_RDWR | os.O_SYNC, 0),
    "buffered, O_SYNC, at the end": (NEW | os.O_WRONLY | os.O_APPEND | os.O_SYNC, 0),
    "O_DIRECT, O_DSYNC": (NEW | os.O_WRONLY | os.O_DIRECT | os.O_DSYNC, 0),
    "O_DIRECT, O_SYNC, to read and write": (NEW | os.O_RDWR | os.O_DIRECT | os.O_SYNC, 0),
    "RWF_DSYNC": (NEW | os.O_WRONLY, os.RWF_DSYNC),
    "RWF_SYNC": (NEW | os.O_WRONLY, os.RWF_SYNC),
    "RWF_DSYNC, to read and write": (NEW | os.O_RDWR, os.RWF_DSYNC),
    "O_DIRECT, RWF_DSYNC": (NEW | os.O_WRONLY | os.O_DIRECT, os.RWF_DSYNC),
    "a file that was there, O_DSYNC": (os.O_WRONLY | os.O_DSYNC, 0),
    "a file that was there, RWF_DSYNC": (os.O_WRONLY, os.RWF_DSYNC),
}


@pytest.fixture
def pool(own_pool: Callable[..., Pool]) -> Pool:
    return own_pool(files=2, size="256M")


def put(descriptor: int, data: bytes, offset: int, flags: int) -> None:
    page = mmap.mmap(-1, len(data))  # aligned, for O_DIRECT
    page[:] = data
    assert os.pwritev(descriptor, [page], offset, flags) == len(data)


def kill_while_open(pool: Pool, path: pathlib.Path, flags: int, writes: Callable[[int], None]) -> None:
    """The daemon dies while the file is open, so that no close has sealed it; then the pool is mounted again."""
    with opened(path, flags) as descriptor:
        writes(descriptor)
        pool.kill()
    pool.remount()


@pytest.mark.parametrize("way", WAYS)
def test_a_synchronous_write_outlives_the_daemon(pool: Pool, way: str) -> None:
    flags, each = WAYS[way]
    path = pool.mount / "file"
    first, second = content(64 * KIB, way), content(4 * KIB, way + "2")
    if not flags & os.O_CREAT:
        write_file(path, bytes(64 * KIB + 100))

    def writes(descriptor: int) -> None:
        put(descriptor, first, 0, each)
        put(descriptor, second, len(first), each)

    kill_while_open(pool, path, flags, writes)
    assert_same(read_file(path), first + second, way)


@pytest.mark.parametrize("way", ["O_DIRECT, O_DSYNC", "RWF_DSYNC", "buffered, O_DSYNC"])
def test_a_large_synchronous_write_is_there_and_is_not_written_over_and_over(pool: Pool, way: str) -> None:
    flags, each = WAYS[way]
    size = 16 * MIB
    data = content(size, way)
    written = pool.status()["counters"]["written_bytes"]

    def writes(descriptor: int) -> None:
        nonlocal written
        put(descriptor, data, 0, each)
        written = pool.status()["counters"]["written_bytes"] - written

    kill_while_open(pool, pool.mount / "file", flags, writes)
    assert_same(read_file(pool.mount / "file"), data, way)
    assert written < size * 1.25, "bytes on the devices, headers included"


def test_a_synchronous_writer_beside_one_who_is_not(pool: Pool) -> None:
    """The second opener writes past the kernel's cache because the first one does."""
    data = content(100_000, "beside")
    path = pool.mount / "file"
    with opened(path, NEW | os.O_WRONLY) as first, opened(path, os.O_WRONLY | os.O_DSYNC) as second:
        os.pwrite(first, data[:50_000], 0)
        os.pwrite(second, data[50_000:], 50_000)
        pool.kill()
    pool.remount()
    assert_same(read_file(path), data, "both writers' bytes")


def test_a_store_asks_for_nothing_more_than_before(pool: Pool) -> None:
    """LOOKUP, CREATE, GETATTR, WRITE, FLUSH, RELEASE, and no FSYNC."""
    write_file(pool.mount / "warm", bytes(64 * KIB))
    wait_until(lambda: pool.status()["counters"]["open_handles"] == 0, "the release")
    before = pool.status()["counters"]
    count = 20
    for i in range(count):
        write_file(pool.mount / f"{i}", bytes(64 * KIB))
    wait_until(lambda: pool.status()["counters"]["open_handles"] == 0, "the releases")
    after = pool.status()["counters"]
    assert after["writes"] - before["writes"] == count
    assert after["requests"] - before["requests"] <= 6 * count


def test_a_guests_synchronous_write_outlives_the_daemon(own_pool: Callable[..., Pool]) -> None:
    """By the WRITE's flag where the guest's kernel has no pages of the file. Where it has some, it asks for FSYNC."""
    pool = own_pool(files=2, size="256M", started=False)
    pool.start("--virtiofs", str(pool.base / "guest.sock"))
    data = content(100_000, "guest")
    with Guest(pool.base / "guest.sock") as guest:
        init_ext, direct_io_allow_mmap = 1 << 30, 1 << (36 - 32)
        assert guest.ask(INIT, 0, struct.pack("<IIIII44x", 7, 38, 1 << 20, init_ext, direct_io_allow_mmap))[0] == 0
        for name, flags, uncached in (("plain", os.O_WRONLY, 1), ("cached", os.O_WRONLY | os.O_DSYNC, 0)):
            made = struct.pack("<IIII", flags | os.O_CREAT, 0o100644, 0, 0) + name.encode() + b"\0"
            error, reply = guest.ask(CREATE, 1, made)
            (node,), (handle, open_flags) = struct.unpack_from("<Q", reply), struct.unpack_from("<QI", reply, 128)
            assert error == 0 and open_flags & 1 == uncached
            write = struct.pack("<QQIIQI4x", handle, 0, len(data), 0, 0, os.O_WRONLY | os.O_DSYNC) + data
            assert guest.ask(WRITE, node, write) == (0, struct.pack("<I4x", len(data)))
        pool.kill()
    pool.remount()
    assert_same(read_file(pool.mount / "plain"), data, "what the guest has written")
