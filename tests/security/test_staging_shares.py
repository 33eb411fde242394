"""Memory of files being written: one user cannot hold all of it, however small the files are and however many."""

import mmap
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from helpers import (
    BOTH_WAYS,
    KIB,
    MIB,
    Pool,
    assert_same,
    content,
    in_child,
    opened,
    pool_of_shares,
    read_file,
    wait_until,
    write_file,
)

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("only_root")]

MALLORY, ALICE = 41_001, 41_002
STAGING = 16 * MIB  # the least
SLOT = 64 * KIB  # of a small file

# Keeps files open that it has written to, says how many, and for each line of input writes to all of them once more.
_HOLDER = """
import os, sys
directory, user, count, size = sys.argv[1], *map(int, sys.argv[2:])
os.setgid(user); os.setuid(user)
held = [os.open(f"{directory}/{i}", os.O_CREAT | os.O_RDWR) for i in range(count)]
for turn in range(1 << 30):
    for i, descriptor in enumerate(held):
        data = f"{i:08}".encode() * (size // 8)
        assert os.pwrite(descriptor, data, turn * size) == size
    print(turn, flush=True)
    if not sys.stdin.readline():
        break
"""


@pytest.fixture
def pool(request: pytest.FixtureRequest, own_pool: Callable[..., Pool]) -> Pool:
    return pool_of_shares(request, own_pool, "256M", "--staging", "16M")


@contextmanager
def holder(pool: Pool, user: int, count: int, size: int) -> Iterator[Callable[[], None]]:
    """A process of `user` with so many files open for writing; each call writes `size` bytes more to all of them."""
    directory = pool.mount / f"of-{user}"
    directory.mkdir()
    os.chown(directory, user, user)
    words = [sys.executable, "-c", _HOLDER, str(directory), str(user), str(count), str(size)]
    with subprocess.Popen(words, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "0\n"

        def again() -> None:
            print(file=process.stdin, flush=True)
            assert process.stdout is not None
            assert int(process.stdout.readline()) > 0

        yield again
        process.communicate("")


def of(pool: Pool, user: int) -> dict[str, Any]:
    return next((entry for entry in pool.status()["users"] if entry["user"] == user), {})


@BOTH_WAYS
def test_a_user_with_small_files_open_holds_up_nobody(pool: Pool) -> None:
    count, size = 1000, 104
    with holder(pool, MALLORY, count, size) as again:
        status = pool.status()
        share = status["staging_share"]
        assert share == STAGING // 4
        assert share <= of(pool, MALLORY)["staged"] <= STAGING - share, "one share is left to others"
        assert status["counters"]["staging_waits"] > 0 and status["counters"]["staging_refusals"] == 0
        [line] = [line for line in pool.command("status", str(pool.path)).stdout.splitlines() if "memory for" in line]
        assert f"user {MALLORY}" in line and "--staging" in line
        (pool.mount / "alices").mkdir()
        os.chown(pool.mount / "alices", ALICE, ALICE)
        waits = pool.status()["counters"]["staging_waits"]
        in_child(lambda: write_file(pool.mount / "alices" / "one", content(MIB, "alice")), user=ALICE, group=ALICE)
        write_file(pool.mount / "root's", content(MIB, "root"))
        assert pool.status()["counters"]["staging_waits"] == waits, "neither had to wait"
        again()  # each file is loaded again, as it has a last page that is not whole
        for i in range(count):
            assert_same(read_file(pool.mount / f"of-{MALLORY}" / f"{i}"), f"{i:08}".encode() * 26, f"file {i}")
    for i in range(count):
        assert_same(read_file(pool.mount / f"of-{MALLORY}" / f"{i}"), f"{i:08}".encode() * 26, f"file {i}, closed")
    pool.umount()
    pool.command("fsck", str(pool.path), "--verify-data")


def test_memory_that_a_file_takes_over_from_its_request_counts(pool: Pool) -> None:
    """Each WRITE of more than 64 KiB comes in memory of its own, which the file keeps."""
    size = 1_000_000
    with holder(pool, 0, 60, size):
        counters = pool.status()["counters"]
        assert counters["staging_waits"] > 0 and counters["staging_refusals"] == 0
        assert STAGING // 2 <= counters["staged_bytes"] <= STAGING
        assert resident(pool) < STAGING * 8, "of the daemon and its Python, with 60 MB open"
        for i in range(60):
            assert_same(read_file(pool.mount / "of-0" / f"{i}"), f"{i:08}".encode() * (size // 8), f"file {i}")
    wait_until(lambda: pool.status()["counters"]["staged_bytes"] == 0, "all memory to come back")


def resident(pool: Pool) -> int:
    for line in pathlib.Path(f"/proc/{pool.pid()}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * KIB
    raise AssertionError


@contextmanager
def short_of_memory(pool: Pool) -> Iterator[None]:
    """So many others are open for writing that what was written before lies on the devices."""
    with ExitStack() as stack:
        for i in range(2 * STAGING // SLOT):
            descriptor = stack.enter_context(opened(pool.mount / f"other-{i}", os.O_CREAT | os.O_WRONLY))
            os.write(descriptor, b"other")
        yield


def _append(descriptor: int, path: pathlib.Path, data: bytearray) -> None:
    os.pwrite(descriptor, b"appended", len(data))
    data += b"appended"


def _append_afar(descriptor: int, path: pathlib.Path, data: bytearray) -> None:
    """The short page is no last one any more, and another chunk has one."""
    at = (len(data) // MIB + 2) * MIB + 7
    os.pwrite(descriptor, b"afar", at)
    data += bytes(at - len(data)) + b"afar"


def _overwrite(descriptor: int, path: pathlib.Path, data: bytearray) -> None:
    os.pwrite(descriptor, b"OVER", 3)
    data[3:7] = b"OVER"


def _cut(descriptor: int, path: pathlib.Path, data: bytearray) -> None:
    os.ftruncate(descriptor, len(data) // 2 - 1)
    del data[len(data) // 2 - 1 :]


def _lengthen(descriptor: int, path: pathlib.Path, data: bytearray) -> None:
    os.ftruncate(descriptor, len(data) + 50)
    data += bytes(50)


def _allocate(descriptor: int, path: pathlib.Path, data: bytearray) -> None:
    os.posix_fallocate(descriptor, 0, len(data) + 5000)
    data += bytes(5000)


def _map(descriptor: int, path: pathlib.Path, data: bytearray) -> None:
    with mmap.mmap(descriptor, len(data)) as mapped:
        mapped[1:4] = b"MAP"
        mapped.flush()
    data[1:4] = b"MAP"


def _sync(descriptor: int, path: pathlib.Path, data: bytearray) -> None:
    os.fsync(descriptor)


def _nothing(descriptor: int, path: pathlib.Path, data: bytearray) -> None: ...


CHANGES = [_nothing, _append, _append_afar, _overwrite, _cut, _lengthen, _allocate, _map, _sync]


@pytest.mark.parametrize("size", [100, 4096, 9_000, 70_000, MIB + 100, 3 * MIB])
def test_a_file_that_was_spilled_is_written_on(pool: Pool, size: int) -> None:
    held = []
    with ExitStack() as stack:
        for change in CHANGES:
            path = pool.mount / change.__name__
            descriptor = stack.enter_context(opened(path, os.O_CREAT | os.O_RDWR))
            data = bytearray(content(size, change.__name__))
            assert os.write(descriptor, data) == size
            held.append((descriptor, path, data, change))
        for turn in ("once", "twice"):
            with short_of_memory(pool):
                for descriptor, path, data, _ in held:
                    assert_same(os.pread(descriptor, len(data) + 1, 0), data, f"{path.name}, spilled, {turn}")
                for descriptor, path, data, change in held:
                    change(descriptor, path, data)
                    assert_same(os.pread(descriptor, len(data) + 1, 0), data, f"{path.name}, changed {turn}")
                    assert os.fstat(descriptor).st_size == len(data)
        os.rename(held[1][1], pool.mount / "renamed")
        os.unlink(held[3][1])
        assert_same(os.pread(held[3][0], len(held[3][2]) + 1, 0), held[3][2], "a file without a name")
    assert_same(read_file(pool.mount / "renamed"), held[1][2], "renamed")
    for _, path, data, _ in held:
        if path.exists():
            assert_same(read_file(path), data, f"{path.name}, closed")
    pool.umount()
    pool.command("fsck", str(pool.path), "--verify-data")


def test_a_daemon_that_dies_with_spilled_files_has_what_was_closed_and_synced(pool: Pool) -> None:
    write_file(pool.mount / "closed", content(100, "closed"))
    with opened(pool.mount / "synced", os.O_CREAT | os.O_WRONLY) as synced:
        os.write(synced, content(100, "synced"))
        with short_of_memory(pool):
            os.fsync(synced)
            with opened(pool.mount, os.O_RDONLY | os.O_DIRECTORY) as directory:
                os.fsync(directory)
            pool.kill()
    pool.remount()
    for name in ("closed", "synced"):
        assert_same(read_file(pool.mount / name), content(100, name), name)
    pool.umount()
    pool.command("fsck", str(pool.path), "--verify-data")


# Writes what it reads to a file, and cuts it when it is told to.
_CUTTER = """
import os, sys
path, size, left = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
assert os.write(descriptor, sys.stdin.buffer.read(size)) == size
print("written", flush=True)
sys.stdin.buffer.read(1)
os.ftruncate(descriptor, left)
os.close(descriptor)
"""


@pytest.mark.parametrize("left", [100, MIB + 100, 3 * MIB + 1])
def test_a_spilled_file_that_is_cut_inside_its_first_chunk_is_sealed(pool: Pool, left: int) -> None:
    """All that is left of it lies on the devices, and has to be read again before it is written with its header."""
    data = content(8 * MIB, left)
    path = pool.mount / "file"
    words = [sys.executable, "-c", _CUTTER, str(path), str(len(data)), str(left)]
    before = pool.status()["counters"]["written_bytes"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(data)
        process.stdin.flush()
        assert process.stdout.readline() == b"written\n"
        wait_until(lambda: pool.status()["counters"]["written_bytes"] - before > MIB, "a spill of the first chunk")
        process.communicate(b"x")
        assert process.returncode == 0
    assert_same(read_file(path), data[:left], "a file that was cut")
