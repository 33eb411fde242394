"""Nodes of a pod that die, stand still, are cloned or retired, and that recycle what others still know.

Real mounts, a real redis-server. Each test is a row of the pod's table of faults, as in test_pod_faults.py."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import pathlib
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from helpers import CommandError, often, opened, requires_fuse, requires_root, run, slow, wait_until
from podmounts import Node, Pod, block, found, missing, settle, timed

import kvfs
from kvfs.errors import KvfsError

BACK_S = 30.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Pod]:
    requires_root()
    requires_fuse()
    with Pod(nodes=3) as started:
        yield started


@pytest.fixture
def pod(shared: Pod) -> Pod:
    """A pod in which all is well."""
    for node in shared.nodes:
        if not node.mount.is_mount():
            node.remount()
    settle(shared.nodes)
    return shared


@pytest.fixture
def here(pod: Pod, request: pytest.FixtureRequest) -> str:
    """The name of a directory that all nodes know."""
    name = request.node.name.replace("[", "-").replace("]", "")
    (pod.nodes[0].mount / name).mkdir()
    for node in pod.nodes[1:]:
        wait_until((node.mount / name).is_dir, f"{name} at node {node.number}", timeout_s=30)
    return name


def sealed(path: pathlib.Path, data: bytes) -> None:
    """Store it, and return once it is on the devices."""
    with path.open("wb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())


# ---- killed ----


def test_a_node_that_is_killed_and_comes_back(pod: Pod, here: str) -> None:
    a, b, c = pod.nodes
    for i in range(40):
        sealed(a.mount / here / str(i), block(i, 65536))
    for node in (b, c):
        for i in range(40):
            wait_until((node.mount / here / str(i)).exists, f"{i} at node {node.number}", timeout_s=20)
    a.kill()
    for node in (b, c):  # read for the first time
        for i in range(40):
            with timed(5, f"a read of a dead node's block {i}"):
                assert (node.mount / here / str(i)).read_bytes() == block(i, 65536)
    sealed(b.mount / here / "mine", block(50))
    a.remount()
    for i in range(40):
        assert (a.mount / here / str(i)).read_bytes() == block(i, 65536)
    found(a.mount / here / "mine", block(50), BACK_S)
    sealed(a.mount / here / "new", block(51))
    for node in (b, c):
        found(node.mount / here / "new", block(51), BACK_S)
        for i in range(40):
            assert (node.mount / here / str(i)).read_bytes() == block(i, 65536)


def test_news_that_were_lost_with_their_node_are_found_when_it_starts_again(pod: Pod, here: str) -> None:
    a, b, _ = pod.nodes
    sealed(a.mount / here / "gone", block(0))
    found(b.mount / here / "gone", block(0))
    with pod.redis.stopped():
        sealed(a.mount / here / "lost", block(1))
        (a.mount / here / "d").mkdir()
        sealed(a.mount / here / "d" / "lost", block(2))
        (a.mount / here / "gone").unlink()
        with opened(a.mount, os.O_RDONLY | os.O_DIRECTORY) as directory:
            os.fsync(directory)  # a removal, too
        a.kill()
    # The other may have read this flash meanwhile; as a rule it has not heard of it.
    with contextlib.suppress(FileNotFoundError):
        assert (b.mount / here / "lost").read_bytes() == block(1)
    a.remount()
    assert (a.mount / here / "lost").read_bytes() == block(1)
    found(b.mount / here / "lost", block(1), BACK_S)
    found(b.mount / here / "d" / "lost", block(2), BACK_S)
    assert not (a.mount / here / "gone").exists()
    missing(b.mount / here / "gone", BACK_S)


def test_a_node_that_starts_while_the_owner_is_dead_reads_its_flash(pod: Pod, here: str) -> None:
    a, b, _ = pod.nodes
    for i in range(20):
        sealed(a.mount / here / str(i), block(i, 65536))
    found(b.mount / here / "19", block(19, 65536))
    a.kill()
    b.umount()
    b.start()
    for i in range(20):
        found(b.mount / here / str(i), block(i, 65536), BACK_S)
    a.remount()
    settle(pod.nodes)


@pytest.mark.parametrize("restarted", [False, slow(True)], ids=["", "remover-restarted"])
def test_a_dead_nodes_block_that_is_removed_stays_removed(pod: Pod, here: str, restarted: bool) -> None:
    a, b, c = pod.nodes
    names = [f"{here}/{i}" for i in range(10)]
    for i, name in enumerate(names):
        sealed(a.mount / name, block(i, 65536))
    for node in (b, c):
        for i, name in enumerate(names):
            found(node.mount / name, block(i, 65536))
    a.kill()
    for name in names[:5]:
        (b.mount / name).unlink()
        assert not (b.mount / name).exists()
    if restarted:
        b.umount()  # at once: what it has removed in this moment is remembered too
    for name in names[:5]:
        missing(c.mount / name)
    if restarted:
        b.start()
        settle((b, c))
    for node in (b, c):
        for i, name in enumerate(names):
            if i < 5:
                assert not (node.mount / name).exists()
            else:
                found(node.mount / name, block(i, 65536), BACK_S)
    a.remount()
    for name in names[:5]:
        missing(a.mount / name, BACK_S)
    settle(pod.nodes)
    for node in pod.nodes:
        for i, name in enumerate(names):
            if i < 5:
                missing(node.mount / name)
            else:
                assert (node.mount / name).read_bytes() == block(i, 65536)
    # Also once it starts again.
    a.umount()
    a.start()
    settle(pod.nodes)
    for node in pod.nodes:
        for name in names[:5]:
            assert not (node.mount / name).exists()


def test_a_dead_nodes_block_that_was_replaced_and_removed_stays_removed(pod: Pod, here: str) -> None:
    a, b, _ = pod.nodes
    names = [f"{here}/{i}" for i in range(6)]
    for i, name in enumerate(names):
        sealed(a.mount / name, block(i, 65536))
        for node in pod.nodes[1:]:
            found(node.mount / name, block(i, 65536))
    a.kill()
    for i, name in enumerate(names):
        sealed(b.mount / name, block(100 + i, 65536))
    wait_until(functools.partial(_is, pod.nodes[2].mount / names[5], block(105, 65536)), "the news", timeout_s=20)
    for name in names[:3]:
        (b.mount / name).unlink()
    b.umount()
    b.start()
    a.remount()
    settle(pod.nodes)
    for node in pod.nodes:
        for i, name in enumerate(names):
            if i < 3:
                missing(node.mount / name, BACK_S)
            else:
                wait_until(functools.partial(_is, node.mount / name, block(100 + i, 65536)), name, timeout_s=BACK_S)


def _is(path: pathlib.Path, data: bytes) -> bool:
    return path.exists() and path.read_bytes() == data


# ---- standing still ----


@pytest.mark.parametrize("seconds", [4, pytest.param(90, marks=pytest.mark.slow)])
def test_a_node_that_stands_still(pod: Pod, here: str, seconds: float) -> None:
    a, b, c = pod.nodes
    sealed(a.mount / here / "before", block(1))
    for node in (b, c):
        wait_until((node.mount / here / "before").exists, "the block", timeout_s=20)
    began = time.monotonic()
    with a.stopped():
        with kvfs.connect(b.path, timeout_s=20.0) as client, contextlib.suppress(KvfsError):
            client.fresh()  # may name slot 0
        turn = 0
        while time.monotonic() - began < seconds:
            with timed(5, "calls of the others"):
                sealed(b.mount / here / f"b{turn}", block(turn, 4096))
                found(c.mount / here / f"b{turn}", block(turn, 4096))
                assert (c.mount / here / "before").read_bytes() == block(1)
                assert not (b.mount / here / "none").exists()
            turn += 1
            time.sleep(0.1)
        with kvfs.connect(b.path, timeout_s=20.0) as client:
            client.fresh()  # waits for the living
    for i in range(turn):
        found(a.mount / here / f"b{i}", block(i, 4096), BACK_S)
    sealed(a.mount / here / "after", block(2))
    for node in (b, c):
        found(node.mount / here / "after", block(2), BACK_S)


# ---- clones ----


def test_a_cloned_node_is_refused_or_makes_the_first_stop(pod: Pod, here: str) -> None:
    _, b, _ = pod.nodes
    b.umount()
    clone = Node(pod, 10)
    shutil.copytree(b.path, clone.path)
    b.start()
    try:
        with pytest.raises(CommandError, match="in use by another kvfs: slot 1"):
            clone.start()
        sealed(b.mount / here / "a", block(1))
        pid = b.pid()
        clone.start("--force")
        b.wait_dead(pid)
        said = b.log_tail()
        assert "in use by another kvfs" in said and "slot 1" in said, said
        found(clone.mount / here / "a", block(1), BACK_S)
        sealed(clone.mount / here / "b", block(2))
        found(pod.nodes[0].mount / here / "b", block(2), BACK_S)
    finally:
        clone.stop()
        b.remount()
    found(b.mount / here / "a", block(1), BACK_S)
    found(b.mount / here / "b", block(2), BACK_S)


# ---- retired ----


def _retire(pod: Pod, slot: int, watch_s: float | None) -> None:
    if watch_s is None:
        pod.kvfs("pod", "retire", pod.nodes[0].path, str(slot))
        return
    code = (
        "import sys, pathlib, kvfs.pool.joining as joining; joining.RETIRE_WATCH_S = float(sys.argv[3]); "
        "joining.retire(pathlib.Path(sys.argv[1]), int(sys.argv[2]))"
    )
    run(sys.executable, "-c", code, str(pod.nodes[0].path), str(slot), str(watch_s))


_WRITE_ON = """
import contextlib, pathlib, sys
with contextlib.suppress(OSError):
    for i in range(1_000_000):
        (pathlib.Path(sys.argv[1]) / f"w{sys.argv[2]}-{i % 50}").write_bytes(bytes(65536))
"""


@pytest.mark.parametrize("watch_s", [3.0, pytest.param(None, marks=pytest.mark.slow)])
def test_a_retired_node_that_is_alive_stops_and_says_why(watch_s: float | None) -> None:
    requires_root()
    requires_fuse()
    with Pod(nodes=2) as pod:
        a, b = pod.nodes
        settle(pod.nodes)
        for i in range(20):
            sealed(b.mount / f"b{i}", block(i, 65536))
        for i in range(20):
            wait_until((a.mount / f"b{i}").exists, "the block", timeout_s=20)
        with pytest.raises(CommandError, match="slot 1 is alive"):
            _retire(pod, 1, watch_s)
        pid = b.pid()
        # Not threads: a child of this process would wait for the node when it closes what it has inherited.
        writers = [subprocess.Popen([sys.executable, "-c", _WRITE_ON, str(b.mount), str(i)]) for i in range(2)]
        wait_until((b.mount / "w1-5").exists, "the writers", timeout_s=20)
        with b.stopped():
            _retire(pod, 1, watch_s)
            for i in range(20):
                sealed(a.mount / f"a{i}", block(100 + i, 1 << 20))
        b.wait_dead(pid)
        for writer in writers:
            writer.wait(30)
        said = b.log_tail()
        assert "slot 1 was retired" in said, said
        for i in range(20):
            assert (a.mount / f"a{i}").read_bytes() == block(100 + i, 1 << 20)
            assert (a.mount / f"b{i}").read_bytes() == block(i, 65536)
        with pytest.raises(CommandError, match="slot 1 was retired"):
            b.remount()
        a.umount()
        a.start()
        for i in range(20):
            assert (a.mount / f"a{i}").read_bytes() == block(100 + i, 1 << 20)
            found(a.mount / f"b{i}", block(i, 65536), BACK_S)


# ---- small pools: others' segments are recycled ----


@pytest.fixture(scope="module")
def small_shared() -> Iterator[Pod]:
    requires_root()
    requires_fuse()
    with Pod(nodes=2, devices=2, size="20M", create_args=("--segment-size", "1M")) as started:
        yield started


@pytest.fixture
def small(small_shared: Pod) -> Pod:
    settle(small_shared.nodes)
    return small_shared


SMALL_BLOCK = 32768


def tagged(name: int, turn: int, size: int = SMALL_BLOCK) -> bytes:
    return block(name << 32 | turn, size)


def right(data: bytes, name: int, size: int = SMALL_BLOCK) -> bool:
    """One content that was stored under this name at some time."""
    word = int.from_bytes(data[:8], "little")
    return len(data) == size and word >> 32 == name and data == block(word, size)


class Recycler:
    """Stores blocks of a few names on a node, again and again, so that its segments are soon written over."""

    def __init__(self, node: Node, directory: str, names: int = 150) -> None:
        self.node, self.directory, self.names = node, directory, names
        self.turn = 0
        self.error: BaseException | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self.once()
        except BaseException as error:
            self.error = error

    def once(self) -> None:
        self.turn += 1
        for name in range(self.names):
            path = self.node.mount / self.directory / f"r{name}"
            with contextlib.suppress(FileNotFoundError):
                path.write_bytes(tagged(name, self.turn))
            if self._ending.is_set():
                break

    def __enter__(self) -> Recycler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(60)
        assert self.error is None, self.error


def read_one(path: pathlib.Path, name: int, counts: dict[str, int]) -> None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        counts["miss"] += 1
        return
    except OSError as error:
        assert error.errno in (errno.EIO, errno.ESTALE), error
        counts["error"] += 1
        return
    assert right(data, name), f"{path}: {len(data)} bytes that begin with {data[:16].hex()}"
    counts["right"] += 1


def test_a_reader_never_sees_wrong_bytes_while_the_owner_evicts(small: Pod) -> None:
    a, b = small.nodes
    (a.mount / "evict").mkdir()
    wait_until((b.mount / "evict").is_dir, "the directory", timeout_s=20)
    counts = {"right": 0, "miss": 0, "error": 0}
    with Recycler(a, "evict", names=600):
        end = time.monotonic() + often(4.0, 12.0, 600.0)
        dice = random.Random(2)
        while time.monotonic() < end:
            name = dice.randrange(600)
            read_one(b.mount / "evict" / f"r{name}", name, counts)
    assert counts["right"] > 20, counts


def test_recycled_segments_of_an_owner_whose_news_are_held_back(small: Pod) -> None:
    a, b = small.nodes
    (a.mount / "recycle").mkdir()
    wait_until((b.mount / "recycle").is_dir, "the directory", timeout_s=20)
    counts = {"right": 0, "miss": 0, "error": 0}
    native = {"right": 0, "miss": 0}
    dice = random.Random(3)
    with Recycler(a, "recycle") as recycler, kvfs.connect(b.mount, "recycle", paths=True, timeout_s=20.0) as client:
        end = time.monotonic() + often(8.0, 20.0, 1200.0)
        while time.monotonic() < end:
            with small.redis.stopped():
                held, until = recycler.turn, time.monotonic() + 1.0
                while recycler.turn < held + 2 and time.monotonic() < until:
                    name = dice.randrange(recycler.names)
                    if dice.random() < 0.5:
                        read_one(b.mount / "recycle" / f"r{name}", name, counts)
                        continue
                    data = client.get(f"r{name}")
                    native["miss" if data is None else "right"] += 1
                    assert data is None or right(bytes(data), name), f"r{name}: {bytes(data[:16]).hex()}"
            time.sleep(0.3)
    assert counts["right"] > 20 and native["right"] > 20, (counts, native)


def _advise_random(fd: int) -> None:
    ctypes.CDLL(None).posix_fadvise(fd, ctypes.c_long(0), ctypes.c_long(0), 1)


BIG_BLOCK = 512 << 10


def test_a_handle_never_mixes_what_the_kernel_kept_with_a_newer_content(small: Pod) -> None:
    """Its first page is in the kernel's cache from an earlier handle. Its place is written over, and the news of the
    new content come while it is open."""
    a, b = small.nodes
    (a.mount / "mix").mkdir()
    wait_until((b.mount / "mix").is_dir, "the directory", timeout_s=20)
    path = b.mount / "mix" / "a"
    recycled = 0
    for turn in range(often(2, 5, 100)):
        old, new = tagged(999, 2 * turn, BIG_BLOCK), tagged(999, 2 * turn + 1, BIG_BLOCK)
        (a.mount / "mix" / "a").write_bytes(old)
        _wait_begins(path, old)
        with small.redis.stopped():
            fd = os.open(path, os.O_RDONLY)
            _advise_random(fd)
            for i in range(90):  # more than the node's part of the pool: what was there goes
                sealed(a.mount / "mix" / f"c{i}", tagged(i, turn, BIG_BLOCK))
            sealed(a.mount / "mix" / "a", new)
        _wait_begins(path, new)
        try:
            got = os.pread(fd, 4096, 0) + os.pread(fd, 4096, BIG_BLOCK - 65536)
        except OSError as error:
            assert error.errno == errno.EIO
            recycled += 1
        else:
            assert got in (old[:8192], new[:8192]), f"{got[:8].hex()} and {got[4096:4104].hex()} by one handle"
        finally:
            os.close(fd)
        # The name is sound, also for a reader that had the old place.
        found(path, new)
    assert recycled, "no place was written over: this test has shown nothing"


def _wait_begins(path: pathlib.Path, data: bytes) -> None:
    wait_until(lambda: _begins(path, data), f"{path} as stored", timeout_s=BACK_S)


def _begins(path: pathlib.Path, data: bytes) -> bool:
    """Reads one page alone."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        _advise_random(fd)
        return os.pread(fd, 4096, 0) == data[:4096]
    except OSError:
        return False
    finally:
        os.close(fd)
