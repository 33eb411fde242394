"""FUSE over io_uring: the same filesystem by another transport. `pytest tests/posix --rings` asserts all of the lane of
it; here are the transport's own promises, and a selection of the lane."""

import contextlib
import errno
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from helpers import (
    REPOSITORY,
    URING_PARAMETER,
    Pool,
    assert_same,
    content,
    read_file,
    requires_io_uring,
    rings_decided,
    run,
    wait_until,
    write_file,
)

from kvfs.frontend.asking import ControlClient

MIB = 1 << 20
ENTRIES = 32  # of a queue: DEPTH_MAX of native/src/fuse/fuse_uring.c


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(files=4, size="1G", rings=True) as made:
        yield made


def by_ring(pool: Pool) -> int:
    """Requests that have come by a ring."""
    if pool.rings:
        requires_io_uring()
    with ControlClient(pool.path) as client:
        return cast(int, cast(dict[str, Any], client.call("status"))["counters"]["ring_requests"])


def miss(pool: Pool, count: int = 1) -> None:
    """Requests that nobody caches."""
    for i in range(count):
        with pytest.raises(FileNotFoundError):
            os.stat(pool.mount / f"missing-{i}")


@contextlib.contextmanager
def on_cpu(*cpus: int) -> Iterator[None]:
    """This thread on these CPUs, and the processes that it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cpus))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def load(pool: Pool, writers: int) -> Iterator[list[int]]:
    """Threads that store and look up until the block ends; yields the errnos they have met."""
    stop, errors = threading.Event(), list[int]()

    def body(number: int) -> None:
        for i in range(1 << 30):
            if stop.is_set():
                return
            try:
                path = pool.mount / f"load-{number}"
                write_file(path, content(256 * 1024, number))
                os.rename(path, pool.mount / f"load-{number}-{i % 8}")
                os.statvfs(pool.mount)
            except OSError as error:
                errors.append(error.errno or 0)
                return

    with ThreadPoolExecutor(writers) as threads:
        ends = [threads.submit(body, number) for number in range(writers)]
        try:
            yield errors
        finally:
            stop.set()
            for end in ends:
                end.result(timeout=60)


@pytest.mark.smoke
def test_requests_come_by_rings_where_the_kernel_offers_them(pool: Pool) -> None:
    before = by_ring(pool)
    miss(pool, 100)
    assert by_ring(pool) >= before + 100


def test_a_mount_that_was_offered_no_rings_uses_the_device(own_pool: Callable[..., Pool]) -> None:
    with rings_decided() if URING_PARAMETER.exists() else contextlib.nullcontext():
        if URING_PARAMETER.exists() and URING_PARAMETER.read_text().strip() == "Y":
            pytest.skip(f"{URING_PARAMETER} is Y")
        plain = own_pool(files=2, size="128M")
    miss(plain, 10)
    assert by_ring(plain) == 0


def test_every_cpu_has_its_queue(pool: Pool) -> None:
    for cpu in os.sched_getaffinity(0):
        with on_cpu(cpu):
            before = by_ring(pool)
            miss(pool, 10)
            assert by_ring(pool) >= before + 10


def test_large_and_odd_sizes_come_back_as_they_were_written(pool: Pool) -> None:
    for size in (0, 1, 4095, 4097, 65537, 512 * 1024, MIB - 1, MIB, MIB + 1, 9 * MIB + 77):
        path = pool.mount / f"size-{size}"
        write_file(path, content(size, size))
        assert_same(read_file(path), content(size, size), f"{size} bytes")
        os.unlink(path)


def test_requests_that_python_answers_work(pool: Pool) -> None:
    place = pool.mount / "forwarded"
    place.mkdir()
    (place / "a").mkdir()
    (place / "link").symlink_to("x" * 3000)
    assert os.readlink(place / "link") == "x" * 3000
    os.setxattr(place / "a", "user.note", b"v" * 2000)
    assert os.getxattr(place / "a", "user.note") == b"v" * 2000
    names = {f"{i:04}-" + "n" * 200 for i in range(500)}  # a listing of several answers
    for name in names:
        (place / "a" / name).symlink_to("t")
    assert set(os.listdir(place / "a")) == names
    os.rename(place / "a", place / "b")
    assert os.statvfs(place).f_bsize == 4096
    with pytest.raises(OSError) as caught:
        os.rmdir(place / "b")
    assert caught.value.errno == errno.ENOTEMPTY


def test_more_callers_on_a_cpu_than_its_queue_has_entries_all_end(pool: Pool) -> None:
    callers = 3 * ENTRIES

    def store(number: int) -> None:
        path = pool.mount / f"crowd-{number}"
        write_file(path, content(300_000, number))
        assert_same(read_file(path), content(300_000, number), path.name)

    with on_cpu(min(os.sched_getaffinity(0))), ThreadPoolExecutor(callers) as threads:
        for end in [threads.submit(store, number) for number in range(callers)]:
            end.result(timeout=120)


def test_a_daemon_that_may_use_one_cpu_serves_the_queues_of_all(own_pool: Callable[..., Pool]) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip(f"needs two CPUs, has {cpus}")
    with on_cpu(cpus[0]):
        confined = own_pool(files=2, size="256M", rings=True)
    for thread in os.listdir(f"/proc/{confined.pid()}/task"):
        assert os.sched_getaffinity(int(thread)) == {cpus[0]}
    for cpu in cpus:
        with on_cpu(cpu):
            before = by_ring(confined)
            miss(confined, 10)
            assert by_ring(confined) >= before + 10


def test_a_killed_daemon_ends_its_callers_and_the_pool_mounts_again(own_pool: Callable[..., Pool]) -> None:
    killed = own_pool(files=2, size="512M", rings=True)
    write_file(killed.mount / "kept", content(MIB, 1))
    with load(killed, 8) as errors:
        wait_until(lambda: by_ring(killed) > 500, "load")
        killed.kill()
        wait_until(lambda: len(errors) == 8, "every caller's error", timeout_s=30)
    # ECANCELED: the kernel was about to hand a request to a ring whose process ended.
    assert set(errors) <= {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.ECANCELED}
    killed.remount()
    assert_same(read_file(killed.mount / "kept"), content(MIB, 1), "kept")
    before = by_ring(killed)
    miss(killed, 10)
    assert by_ring(killed) >= before + 10


def test_an_unmount_under_load_ends_the_daemon(own_pool: Callable[..., Pool]) -> None:
    busy = own_pool(files=2, size="512M", rings=True)
    pid = busy.pid()
    with load(busy, 4):
        wait_until(lambda: by_ring(busy) > 200, "load")
        run("umount", "--lazy", busy.mount)
        wait_until(lambda: not pathlib.Path(f"/proc/{pid}").exists(), "the daemon's end", timeout_s=60)


def test_an_aborted_connection_ends_the_daemon(own_pool: Callable[..., Pool]) -> None:
    aborted = own_pool(files=2, size="512M", rings=True)
    pid, minor = aborted.pid(), os.minor(os.stat(aborted.mount).st_dev)
    with load(aborted, 4) as errors:
        wait_until(lambda: by_ring(aborted) > 200, "load")
        pathlib.Path(f"/sys/fs/fuse/connections/{minor}/abort").write_text("1")
        wait_until(lambda: len(errors) == 4, "every caller's error", timeout_s=30)
    wait_until(lambda: not pathlib.Path(f"/proc/{pid}").exists(), "the daemon's end", timeout_s=60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_selection_of_the_posix_lane_holds_over_rings() -> None:
    files = ["create", "directory", "mmap", "read", "rename", "slab", "storm", "write", "xattr"]
    words = [f"tests/posix/test_{name}.py" for name in files]
    # As often as in the ordinary tier: the lane itself has the numbers.
    environment = {name: value for name, value in os.environ.items() if name != "KVFS_RUN_SLOW"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--rings", *words],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=850, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
