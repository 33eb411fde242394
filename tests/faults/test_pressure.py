"""Pressure: full pools, open files, pins, a daemon that stops for a while, many clients. Never full, never stuck."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pathlib
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest
from helpers import (
    KIB,
    MIB,
    Pool,
    assert_same,
    content,
    raises_errno,
    read_file,
    requires_root,
    run,
    slowness,
    wait_until,
    write_file,
)
from workload import Child

import kvfs
from kvfs.errors import PutNoSpaceError

PIN = "user.kvfs.pin"
LABELS_AND_START = MIB + 64 * KIB


def put(path: pathlib.Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    write_file(temporary, data)
    os.rename(temporary, path)


def hundred_segments(own_pool: Callable[..., Pool], segment: int) -> Pool:
    """A pool of exactly 100 segments over four devices."""
    size = LABELS_AND_START + 100 * segment // 4
    pool = own_pool(files=4, size=str(size), format_args=("--segment-size", str(segment)))
    assert pool.status()["segments"]["count"] == 100
    return pool


@pytest.mark.slow
@pytest.mark.parametrize(("segment", "block"), [(MIB, 150 * KIB), (4 * MIB, MIB + 100)], ids=["1M", "4M"])
@pytest.mark.timeout(240)
def test_a_pool_of_100_segments_with_64_random_files_open_takes_writes(
    own_pool: Callable[..., Pool], segment: int, block: int
) -> None:
    """Three times the pool is written around 64 open files: no write fails, no open file changes a byte."""
    pool = hundred_segments(own_pool, segment)
    chooser = random.Random(64)
    count = 100 * segment // block
    contents = {}
    for index in range(count * 9 // 10):
        contents[index] = content(block, index)
        put(pool.mount / f"{index}", contents[index])
    alive = [index for index in contents if os.path.exists(pool.mount / f"{index}")]
    held: dict[int, int] = {}
    for index in chooser.sample(alive, len(alive)):
        with contextlib.suppress(FileNotFoundError):  # evicted since
            held[index] = os.open(pool.mount / f"{index}", os.O_RDONLY)
        if len(held) == 64:
            break
    assert len(held) == 64, f"{len(held)} of {len(alive)} files"
    try:
        for index in range(3 * count):
            put(pool.mount / f"new{index}", content(block, ("new", index)))  # ENOSPC here fails the test
            if index % 50 == 0:
                old = chooser.choice(list(held))
                at = chooser.randrange(block)
                assert_same(os.pread(held[old], 65536, at), contents[old][at : at + 65536], f"held file {old}")
        for index, descriptor in held.items():
            assert_same(os.pread(descriptor, 2 * block, 0), contents[index], f"held file {index} at the end")
        others = [index for index in alive if index not in held]
        assert not all(os.path.exists(pool.mount / f"{index}") for index in others), "nothing was evicted"
        last = f"new{3 * count - 1}"
        assert_same(read_file(pool.mount / last), content(block, ("new", 3 * count - 1)), last)
    finally:
        for descriptor in held.values():
            os.close(descriptor)


@pytest.mark.timeout(240)
def test_pins_by_command_and_by_xattr_survive_on_files_and_in_directories(own_pool: Callable[..., Pool]) -> None:
    """Also across a remount and a rename; unpinned, the same files are evicted like others."""
    pool = hundred_segments(own_pool, MIB)
    files = {}

    def fill(directory: str, count: int) -> None:
        (pool.mount / directory).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            name = f"{directory}/{index}"
            files[name] = content(100 * KIB, name)
            put(pool.mount / name, files[name])

    for directory in ("command", "xattr", "tree/below", "loose"):
        fill(directory, 20)
    pool.command("pin", str(pool.mount / "command" / "0"), str(pool.mount / "command" / "1"))
    os.setxattr(pool.mount / "xattr" / "0", PIN, b"1")
    os.setxattr(pool.mount / "tree", PIN, b"1")
    fill("tree/later", 20)
    os.rename(pool.mount / "xattr" / "0", pool.mount / "loose" / "renamed")
    files["loose/renamed"] = files.pop("xattr/0")
    pinned = ["command/0", "command/1", "loose/renamed", *(name for name in files if name.startswith("tree/"))]

    def press(tag: str) -> None:
        for index in range(2 * 100 * 1024 // 200):
            put(pool.mount / f"press-{tag}-{index}", content(200 * KIB, (tag, index)))

    press("one")
    for name in pinned:
        assert_same(read_file(pool.mount / name), files[name], f"{name}, pinned")
    wait_until(
        lambda: pool.status()["space"]["pinned"] >= len(pinned) * 100 * KIB,
        "all pins to be counted",
        timeout_s=10,
        interval_s=0.5,
    )
    pool.umount()
    pool.start()
    press("two")
    pool.command("evict", str(pool.path), "--all")
    for name in pinned:
        assert_same(read_file(pool.mount / name), files[name], f"{name}, pinned, after a remount and evict --all")
    assert not (pool.mount / "loose" / "5").exists()
    pool.command("unpin", str(pool.mount / "command" / "0"), str(pool.mount / "tree"))
    os.removexattr(pool.mount / "loose" / "renamed", PIN)
    pool.command("evict", str(pool.path), "--all")
    left = [name for name in pinned if (pool.mount / name).exists()]
    assert left == ["command/1"], f"still there: {left}"


@pytest.mark.timeout(240)
def test_when_everything_is_pinned_the_write_fails_and_never_only_the_close(own_pool: Callable[..., Pool]) -> None:
    """ENOSPC within a bounded time, from write(2); what was acknowledged stays; unpinning makes room again."""
    pool = hundred_segments(own_pool, MIB)
    (pool.mount / "kept").mkdir()
    os.setxattr(pool.mount / "kept", PIN, b"1")
    block, written, failed = 500 * KIB, 0, None
    for index in range(100 * MIB // block + 10):
        data = content(block, index)
        descriptor = os.open(pool.mount / "kept" / f"{index}", os.O_CREAT | os.O_WRONLY)
        began = time.monotonic()
        try:
            at = 0
            while at < block:
                at += os.pwrite(descriptor, data[at:], at)
        except OSError as error:
            failed = error
            break
        finally:
            os.close(descriptor)  # may not fail: an error here fails the test
            assert time.monotonic() - began < 60 * slowness(), "ENOSPC took too long"
        written += 1
    assert failed is not None, f"{written} pinned blocks of {block} bytes fit into a pool of 100 MiB"
    assert failed.errno == errno.ENOSPC, failed
    assert written * block > 40 * MIB, f"full with only {written} blocks"
    for index in range(written):
        assert_same(read_file(pool.mount / "kept" / f"{index}"), content(block, index), f"pinned block {index}")
    with kvfs.connect(pool.mount / "kept", "native", gpu=None, timeout_s=1) as client, pytest.raises(PutNoSpaceError):
        for index in range(100):
            began = time.monotonic()
            client.put([(f"{index}".encode(), content(block, index))])
    assert time.monotonic() - began < 8 * slowness(), "put looked for room longer than its client waits"
    os.removexattr(pool.mount / "kept", PIN)

    def room() -> bool:
        try:
            write_file(pool.mount / "after", content(block, "after"))
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
            return False
        return True

    wait_until(room, "room after the pins are gone", timeout_s=30, interval_s=0.2)
    assert read_file(pool.mount / "after") == content(block, "after")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_readers_under_eviction_see_right_bytes_or_a_miss_and_stat_agrees(own_pool: Callable[..., Pool]) -> None:
    """open() may be ENOENT; once open, a file reads to its end. After a failed open, stat finds nothing either."""
    pool = hundred_segments(own_pool, MIB)
    block = 120 * KIB
    for index in range(700):  # so that the pool is about full when the readers begin
        put(pool.mount / f"{index % 2}-{index // 2}", content(block, (index % 2, index // 2)))
    deadline = time.monotonic() + 8

    def write(writer: int) -> int:
        index = 350
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):  # evicted before it was renamed
                put(pool.mount / f"{writer}-{index % 600}", content(block, (writer, index % 600)))
            index += 1
        return index - 350

    def read(seed: int) -> tuple[int, int]:
        chooser, hits, misses = random.Random(seed), 0, 0
        while time.monotonic() < deadline:
            writer, index = chooser.randrange(2), chooser.randrange(600)
            path = pool.mount / f"{writer}-{index}"
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                misses += 1
                continue
            try:
                wanted = content(block, (writer, index))
                assert os.fstat(descriptor).st_size == block
                for at in range(0, block, 32 * KIB):
                    assert_same(os.pread(descriptor, 32 * KIB, at), wanted[at : at + 32 * KIB], f"{path} at {at}")
                hits += 1
            finally:
                os.close(descriptor)
        return hits, misses

    children = [Child(functools.partial(write, writer)) for writer in range(2)]
    readers = [Child(functools.partial(read, seed)) for seed in range(6)]
    assert all(child.result() > 0 for child in children)
    outcomes = [reader.result() for reader in readers]
    assert sum(hits for hits, _ in outcomes) > 0
    assert pool.status()["counters"]["evicted_blocks"] > 0
    for writer in range(2):
        for index in range(600):
            path = pool.mount / f"{writer}-{index}"
            there = os.path.exists(path)
            try:
                assert_same(read_file(path), content(block, (writer, index)), path.name)
                assert there, f"{path.name}: open finds what stat did not"
            except FileNotFoundError:
                # It may have been evicted in between.
                assert not there or not os.path.exists(path), f"{path.name}: a stale hit: stat finds it, open does not"


def test_no_stale_hit_after_evict(own_pool: Callable[..., Pool]) -> None:
    """Names and attributes that the kernel has cached a moment ago are gone with the blocks."""
    pool = own_pool(files=4, size="64M")
    names = [f"{index}" for index in range(200)]
    for name in names:
        put(pool.mount / name, content(50 * KIB, name))
    for name in names:
        os.stat(pool.mount / name)
        assert read_file(pool.mount / name) == content(50 * KIB, name)
    pool.command("evict", str(pool.path), "--all")
    for name in names:
        assert not os.path.exists(pool.mount / name), f"a stale hit: {name}"
        with raises_errno(errno.ENOENT):
            os.open(pool.mount / name, os.O_RDONLY)
    assert os.listdir(pool.mount) == []


def test_clients_continue_after_the_daemon_was_stopped_for_two_seconds(own_pool: Callable[..., Pool]) -> None:
    """SIGSTOP and SIGCONT: calls wait, none fails, and nothing that was under way is lost."""
    pool = own_pool(files=4, size="128M")
    done = threading.Event()
    counts = [0] * 6

    failures: list[BaseException] = []

    def client(number: int) -> None:
        try:
            while not done.is_set():
                name = f"{number}-{counts[number]}"
                put(pool.mount / name, content(60 * KIB, name))
                assert read_file(pool.mount / name) == content(60 * KIB, name)
                os.stat(pool.mount)
                counts[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: min(counts) > 3 or failures, "the clients to be at work")
    pid = pool.pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(2)
        stopped = list(counts)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(
        lambda: all(now > before for now, before in zip(counts, stopped, strict=True)) or failures,
        "every client to go on",
    )
    done.set()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    for number, count in enumerate(counts):
        for index in range(max(0, count - 20), count):
            name = f"{number}-{index}"
            assert read_file(pool.mount / name) == content(60 * KIB, name), name


@pytest.mark.timeout(240)
def test_200_clients_at_once(own_pool: Callable[..., Pool]) -> None:
    """20 processes of 10 threads on 2-core machines too: every call succeeds, every byte is right."""
    pool = own_pool(files=4, size="256M")
    rounds, block = 6, 40 * KIB

    def process(number: int) -> int:
        failures: list[BaseException] = []

        def client(thread: int) -> None:
            try:
                directory = pool.mount / f"{number}" / f"{thread}"
                directory.mkdir(parents=True)
                for index in range(rounds):
                    put(directory / f"{index}", content(block, (number, thread, index)))
                for index in range(rounds):
                    assert_same(
                        read_file(directory / f"{index}"),
                        content(block, (number, thread, index)),
                        f"{directory}/{index}",
                    )
                    with raises_errno(errno.ENOENT):
                        os.stat(directory / f"missing-{index}")
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=client, args=(thread,)) for thread in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return len(threads)

    children = [Child(functools.partial(process, number)) for number in range(20)]
    assert sum(child.result() for child in children) == 200
    stored = sum(len(names) for _, _, names in os.walk(pool.mount))
    assert stored == 200 * rounds
    counters = pool.status()["counters"]
    assert counters["forward_timeouts"] == 0, counters


@pytest.mark.timeout(240)
def test_a_name_that_many_clients_replace_always_opens(own_pool: Callable[..., Pool]) -> None:
    """rename over one name by 40 clients: each open finds a whole file, old or new; never ESTALE, never ENOENT."""
    pool = own_pool(files=4, size="128M")
    shared = pool.mount / "shared"
    put(shared, b"first" * 20)

    def process(number: int) -> int:
        for index in range(60):
            mine = pool.mount / f"mine-{number}"
            write_file(mine, b"x" * 100)
            os.rename(mine, shared)
            assert read_file(shared) in (b"x" * 100, b"first" * 20), f"client {number}, round {index}"
        return 60

    children = [Child(functools.partial(process, number)) for number in range(40)]
    assert sum(child.result() for child in children) == 40 * 60


@pytest.mark.timeout(240)
def test_a_full_disk_under_the_index_stops_no_writer_and_brings_nothing_old_back(tmp_path: pathlib.Path) -> None:
    """The index cannot be committed any more. Three times the pool is written all the same, each name many times; after
    a crash the index is made anew from the devices."""
    requires_root()
    small, names = tmp_path / "small", 40
    small.mkdir()
    devices = [tmp_path / f"device{index}" for index in range(4)]
    for device in devices:
        device.touch()
        os.truncate(device, 16 * MIB + LABELS_AND_START)
    run("mount", "-t", "tmpfs", "-o", "size=16M", "tmpfs", str(small))
    try:
        with Pool(devices=[str(device) for device in devices], base=str(small)) as pool:
            with (small / "filler").open("wb") as filler, contextlib.suppress(OSError):
                while True:
                    filler.write(bytes(MIB))
                    filler.flush()
            versions = {}
            for turn in range(12):
                for index in range(names):
                    put(pool.mount / f"{index}", content(400 * KIB, (index, turn)))
                    versions[index] = turn
            failures = pool.status()["counters"]["commit_failures"]
            # A rename of the last second may be undone. A commit and the summaries take turns.
            wait_until(lambda: pool.status()["counters"]["commit_failures"] >= failures + 3, "three commits that fail")
            pool.wait_summaries()
            pool.kill()
            (small / "filler").unlink()
            pool.remount()
            pool.wait_rebuilt()
            found = 0
            for index, turn in versions.items():
                path = pool.mount / f"{index}"
                if path.exists():
                    assert_same(read_file(path), content(400 * KIB, (index, turn)), f"file {index}, version {turn}")
                    found += 1
            assert found > names // 2, f"{found} of {names}"
            put(pool.mount / "after", content(MIB, "after"))
            pool.remount()
            pool.wait_rebuilt()
            assert_same(read_file(pool.mount / "after"), content(MIB, "after"), "a file written later")
            assert not (pool.path / "index/incomplete").exists()
    finally:
        run("umount", "-l", str(small))
