"""A client's troubles: no mount, no daemon, another pool, a fork, a device that gives no answer."""

import contextlib
import copy
import errno
import gc
import os
import pathlib
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest
from helpers import (
    MIB,
    REPOSITORY,
    Pool,
    assert_same,
    content,
    in_child,
    loop_devices,
    run,
    slowness,
    wait_until,
)

import kvfs
from kvfs.errors import (
    BusyBufferError,
    ClientError,
    DeadlineError,
    ForkError,
    NoSpaceError,
    NotMountedError,
    PoolChangedError,
    PutError,
    VersionError,
)
from kvfs.frontend.wire import VERSIONS

NOBODY = 65534


def blocks(count, size=50_000):
    return {f"key {i}".encode(): content(size + i, i) for i in range(count)}


def assert_reads(client, expected):
    destinations = {key: bytearray(len(data)) for key, data in expected.items()}
    assert client.get_into(destinations.items()) == [len(data) for data in expected.values()]
    for key, data in expected.items():
        assert_same(destinations[key], data, repr(key))


# --- connect ---------------------------------------------------------------------------------------------------


def test_a_path_that_is_no_directory_of_a_kvfs_mount(tmp_path, directory):
    file = directory / "file"
    file.write_bytes(b"data")
    for path, number, words in (
        (tmp_path, errno.EINVAL, "not on a kvfs mount"),
        ("/dev/shm", errno.EINVAL, "not on a kvfs mount: it lies on tmpfs"),
        ("/proc", errno.EINVAL, "not on a kvfs mount: it lies on proc"),
        (tmp_path / "none", errno.ENOENT, "none: No such file"),
        (directory / "none", errno.ENOENT, "none: No such file"),
        (file, errno.ENOTDIR, "file: not a directory"),
        ("/" + "x" * 5000, errno.ENAMETOOLONG, "path of 5001 bytes"),
    ):
        with pytest.raises(ClientError, match=words) as caught:
            kvfs.connect(path, gpu=None)
        assert caught.value.errno == number


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": 0}, {"timeout_s": -1}, {"timeout_s": 4000}, {"depth": 0}, {"depth": 65}, {"staging_size": 0},
        {"staging_size": 1 << 42}, {"gpu": "fast"}, {"namespace": "zero\0byte"},
    ],
)  # fmt: skip
def test_an_option_out_of_its_range_is_named(directory, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        kvfs.connect(directory, **options)


def test_a_user_whom_the_pool_does_not_know_may_not_connect(directory):
    def connect():
        with pytest.raises(ClientError, match=r"may not connect|user") as caught:
            kvfs.connect(directory, gpu=None)
        return caught.value.errno

    assert in_child(connect, user=NOBODY) in (errno.EACCES, errno.EPERM)


class FakeDaemon:
    """A test double of a daemon: one answer to whoever connects to the pool's socket, and as often."""

    def __init__(self, pool, answer):
        self.path = pool.path / "control.sock"
        self.answer = answer

    def __enter__(self):
        self.path.rename(self.path.with_suffix(".real"))
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.path))
        self.listener.listen()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()
        return self

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                with connection:
                    connection.recv(24)
                    if self.answer is None:
                        self.stop.wait(30)
                    else:
                        connection.sendall(self.answer)

    def __exit__(self, *_):
        self.stop.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(30)
        self.path.unlink()
        self.path.with_suffix(".real").rename(self.path)


def frame(kind, payload, status=0):
    return struct.pack("<IHHiI", len(payload), kind, 0, status, 0) + payload


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (
            frame(1, struct.pack("<II", 99, 1) + bytes(64)),
            VersionError,
            f"the daemon speaks version 99, this library {VERSIONS[-1]}",
        ),
        (frame(1, b"version 1 of the protocol, you speak 9", -errno.EPROTO), VersionError, "version 1 of the protocol"),
        (frame(1, b"user 7 is not welcome", -errno.EACCES), ClientError, "user 7 is not welcome"),
        (frame(1, struct.pack("<II", VERSIONS[-1], 1) + bytes(12)), VersionError, "welcome has 20 bytes"),
        (b'{"ok": false, "error": "no command"}\n', VersionError, r"no frame|sense|protocol|version|frame"),
        (b"", NotMountedError, "hung up"),
        (frame(1, bytes(100))[:40], NotMountedError, "broke off"),
        (None, DeadlineError, "no answer in 300 ms"),
    ],
)
def test_a_daemon_that_answers_otherwise(own_pool, answer, kind, words):
    pool = own_pool(files=1, size="64M")
    with FakeDaemon(pool, answer):
        before = time.monotonic()
        with pytest.raises(kind, match=words):
            kvfs.connect(pool.mount, timeout_s=20 if answer else 0.3, gpu=None)
        assert time.monotonic() - before < 15 * slowness()
    with kvfs.connect(pool.mount, gpu=None) as client:
        assert client.exists([b"key"]) == [False]


# --- the daemon goes, and comes back ---------------------------------------------------------------------------


def test_reads_go_on_after_the_daemon_was_killed_and_puts_when_it_is_back(own_pool):
    pool = own_pool(files=2, size="256M")
    old = blocks(50)
    with kvfs.connect(pool.mount, "space", gpu=None, timeout_s=20) as client:
        client.put(old.items())
        assert_reads(client, old)
        run("sync", "-f", pool.mount)
        pool.kill()
        assert_reads(client, old)
        assert client.exists([*old, b"none"]) == [True] * 50 + [False]
        wait_until(lambda: not client.information().connected, "the end of the daemon's last thread")
        for call in (
            lambda: client.put([(b"new", b"data")]),
            lambda: client.delete([b"key 1"]),
            lambda: list(client.list()),
        ):
            before = time.monotonic()
            with pytest.raises(NotMountedError, match=r"daemon is gone|no daemon answers"):
                call()
            assert time.monotonic() - before < 10 * slowness(), "it waits for its deadline"
        assert_reads(client, old)
        pool.remount()
        client.put([(b"new", b"data")])
        assert client.information().connected
        assert client.statistics().reconnects == 1
        assert_reads(client, {**old, b"new": b"data"})
        assert sorted(client.list()) == sorted([*old, b"new"])


def test_nobody_connects_to_a_daemon_that_was_killed(own_pool):
    pool = own_pool(files=1, size="64M")
    pool.kill()
    with pytest.raises(ClientError) as caught:
        kvfs.connect(pool.mount, gpu=None)
    assert caught.value.errno == errno.ENOTCONN


@pytest.mark.slow
def test_an_unmounted_pool_is_said_so_and_is_used_again_when_it_is_mounted_again(own_pool):
    pool = own_pool(files=2, size="256M")
    old = blocks(20)
    with kvfs.connect(pool.mount, "space", gpu=None) as client:
        client.put(old.items())
        for cycle in range(1, 3):
            pool.umount()
            for call in (
                lambda: client.put([(b"new", b"data")]),
                lambda: client.exists([b"new"]),
                lambda: client.sizes([b"new"]),
                lambda: client.get(b"key 1"),
                lambda: client.get_into([(b"key 1", bytearray(MIB))]),
                lambda: client.delete([b"key 1"]),
                lambda: client.prestage([b"key 1"]),
                lambda: list(client.list()),
            ):
                with pytest.raises(NotMountedError, match="unmounted"):
                    call()
            with pytest.raises(ClientError, match="not on a kvfs mount"):
                kvfs.connect(pool.mount, gpu=None)
            pool.start()
            assert_reads(client, old)
            client.put([(b"new", content(cycle))])
            assert bytes(client.get(b"new")) == content(cycle)
            assert client.statistics().reconnects == cycle


def test_a_daemon_that_hangs_stops_no_read_and_no_close(own_pool):
    pool = own_pool(files=2, size="256M")
    old = blocks(10)
    client = kvfs.connect(pool.mount, "space", gpu=None, timeout_s=20)
    client.put(old.items())
    os.kill(pool.pid(), signal.SIGSTOP)
    try:
        for _ in range(100):
            assert_reads(client, old)
            assert client.exists([*old, b"none"]) == [True] * 10 + [False]
        before = time.monotonic()
        client.close()
        assert time.monotonic() - before < 10 * slowness(), "it waits for the daemon"
    finally:
        os.kill(pool.pid(), signal.SIGCONT)


@pytest.mark.slow
def test_a_pool_that_was_formatted_again_is_said_so(own_pool):
    pool = own_pool(files=1, size="64M")
    with kvfs.connect(pool.mount, gpu=None) as client:
        client.put([(b"key", b"data")])
        pool.umount()
        shutil.rmtree(pool.path)
        pool.format()
        pool.start()
        for _ in range(2):
            with pytest.raises(PoolChangedError, match="another pool"):
                client.get(b"key")
            with pytest.raises(PoolChangedError, match="another pool"):
                client.put([(b"key", b"data")])
    with kvfs.connect(pool.mount, gpu=None) as client:
        assert client.exists([b"key"]) == [False]


@pytest.mark.slow
def test_what_a_killed_writer_had_reserved_comes_back(own_pool):
    pool = own_pool(files=2, size="128M")
    script = (
        "import kvfs, sys\n"
        "client = kvfs.connect(sys.argv[1], gpu=None)\n"
        "block = bytes(4 << 20)\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    try:\n"
        "        client.put((f'{i}', block) for i in range(8))\n"
        "    except kvfs.errors.PutError:\n"
        "        pass  # what the one before had reserved is not back yet\n"
    )
    for _ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", script, pool.mount], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout.readline() == "ready\n"
        wait_until(lambda: pool.status()["counters"]["reserved_bytes"] > 0, "a reservation", interval_s=0)
        writer.send_signal(signal.SIGKILL)
        writer.wait(10)
        writer.stdout.close()
    with kvfs.connect(pool.mount, gpu=None) as client:
        for i in range(16):
            client.put([(b"large", content(16 * MIB, i))])
            assert_same(client.get(b"large"), content(16 * MIB, i), f"round {i}")
    pool.umount()
    assert pool.command("fsck", str(pool.path)).returncode == 0


def test_a_block_that_no_segment_holds_is_an_error_of_its_key(own_pool):
    pool = own_pool(files=1, size="64M")
    with kvfs.connect(pool.mount, gpu=None) as client:
        with pytest.raises(PutError, match="key b'huge', 134217728 bytes: ") as caught:
            client.put([(b"small", b"data"), (b"huge", bytes(128 * MIB))])
        assert list(caught.value.failed) == [b"huge"]
        assert caught.value.failed[b"huge"].errno in (errno.EFBIG, errno.ENOSPC)
        assert bytes(client.get(b"small")) == b"data"


@pytest.mark.slow
def test_a_pool_that_is_full_of_pinned_blocks_says_so(own_pool):
    pool = own_pool(files=2, size="64M")
    (pool.mount / "space").mkdir()
    pool.command("pin", str(pool.mount / "space"))
    stored = 0
    with kvfs.connect(pool.mount, "space", gpu=None) as client:
        with pytest.raises(NoSpaceError, match=r"key b'\d+', 1048576 bytes: no room: all .* is pinned") as caught:
            for stored in range(200):
                client.put([(f"{stored}", content(MIB, stored))])
        assert isinstance(caught.value, PutError)
        assert list(caught.value.failed) == [f"{stored}".encode()]
        assert isinstance(caught.value.failed[f"{stored}".encode()], NoSpaceError)
        assert stored > 30
        assert_reads(client, {f"{i}".encode(): content(MIB, i) for i in range(stored)})
        assert client.delete([f"{i}" for i in range(20)]) == [True] * 20


# --- the process -----------------------------------------------------------------------------------------------


def test_a_forked_child_is_told_to_connect_again(client, directory):
    client.put([(b"key", b"data")])

    def child():
        said = []
        for call in (
            lambda: client.exists([b"key"]),
            lambda: client.get(b"key"),
            lambda: client.put([(b"key", b"child")]),
            lambda: client.statistics(),
            lambda: list(client.list()),
        ):
            with pytest.raises(ForkError, match=r"connected by process \d+; after a fork, connect again") as caught:
                call()
            said.append(caught.value.errno)
        client.close()
        with kvfs.connect(directory, "llama", gpu=None) as own:
            said.append(bytes(own.get(b"key")))
            own.put([(b"child", b"its own")])
        return said

    assert in_child(child) == [errno.ECHILD] * 5 + [b"data"]
    assert bytes(client.get(b"child")) == b"its own"
    client.put([(b"key", b"parent")])
    assert bytes(client.get(b"key")) == b"parent"


def test_a_child_that_was_forked_during_a_call_does_not_hang(client):
    client.put([(b"key", content(MIB))])
    stop = threading.Event()

    def read():
        while not stop.is_set():
            assert client.get_into([(b"key", bytearray(MIB))]) == [MIB]

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()

    def child():
        try:
            client.exists([b"key"])
        except ForkError:
            client.close()
            return "told"

    try:
        for _ in range(10):
            assert in_child(child, timeout_s=20) == "told"
    finally:
        stop.set()
        for reader in readers:
            reader.join(30)


def test_a_client_is_neither_pickled_nor_copied(client):
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="belongs to its process"):
            call(client)


def test_a_closed_client_says_so_and_is_closed_twice_in_peace(directory):
    client = kvfs.connect(directory, gpu=None)
    client.close()
    client.close()
    for call in (lambda: client.exists([b"key"]), lambda: client.get(b"key"), client.statistics, client.information):
        with pytest.raises(ClientError, match="this client is closed"):
            call()


def test_a_client_that_was_not_closed_is_warned_of(directory):
    descriptors = len(os.listdir("/proc/self/fd"))
    client = kvfs.connect(directory, "llama", gpu=None)
    client.get(b"key")
    with pytest.warns(ResourceWarning, match=r"<kvfs.Client of '.*', namespace 'llama'> was not closed"):
        del client
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_connecting_and_closing_leaves_no_descriptor_no_thread_and_no_mapping_behind(directory):
    def once():
        with kvfs.connect(directory, gpu=None) as client:
            client.put([(b"key", content(MIB))])
            client.prestage([b"key"])
            assert client.get(b"key") is not None

    once()
    descriptors, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    mappings = len(pathlib.Path("/proc/self/maps").read_text().splitlines())
    for _ in range(20):
        once()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    wait_until(lambda: len(os.listdir("/proc/self/task")) <= threads, "the end of its threads")
    assert len(pathlib.Path("/proc/self/maps").read_text().splitlines()) < mappings + 20


def test_importing_kvfs_loads_no_client():
    script = "import sys, kvfs, kvfs.client; assert not {'cffi', 'kvfs._native', 'trio'} & set(sys.modules)"
    run(sys.executable, "-c", f"{script}; kvfs.connect", environment={"KVFS_NATIVE": ""})


# --- a device that gives no answer -----------------------------------------------------------------------------


class Throttle:
    """Block devices whose reads by this process can be made to wait (blk-throttle, of either cgroup version)."""

    def __enter__(self):
        self.version = 1 if os.path.exists("/sys/fs/cgroup/blkio/blkio.throttle.read_bps_device") else 2
        root = pathlib.Path("/sys/fs/cgroup/blkio" if self.version == 1 else "/sys/fs/cgroup")
        name = "blkio" if self.version == 1 else ""
        lines = [line.split(":", 2) for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines()]
        own = next((path for _, names, path in lines if names == name), None)
        self.group = root / f"kvfs-test-{os.getpid()}"
        self.home = None if own is None else root / own.lstrip("/") / "cgroup.procs"
        try:
            if self.version == 2:
                (root / "cgroup.subtree_control").write_text("+io")
            self.group.mkdir()
            (self.group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            pytest.skip(f"needs a cgroup with blk-throttle: {error}")
        self.devices = []
        return self

    def stop(self, device):
        number = os.stat(device).st_rdev
        self.devices.append(device)
        self._set(f"{os.major(number)}:{os.minor(number)}", 1)

    def go_on(self, device):
        number = os.stat(device).st_rdev
        self.devices.remove(device)
        self._set(f"{os.major(number)}:{os.minor(number)}", 0)

    def _set(self, number, bytes_per_second):
        if self.version == 1:
            (self.group / "blkio.throttle.read_bps_device").write_text(f"{number} {bytes_per_second}")
        else:
            (self.group / "io.max").write_text(f"{number} rbps={bytes_per_second or 'max'}")

    def __exit__(self, *_):
        for device in list(self.devices):
            self.go_on(device)
        self.home.write_text(str(os.getpid()))
        wait_until(self._removed, f"the end of {self.group}")

    def _removed(self):
        with contextlib.suppress(OSError):
            self.group.rmdir()
        return not self.group.exists()


@pytest.fixture
def stoppable(own_pool, tmp_path):
    """A pool on loop devices, and what stops one of them: stoppable(2) -> (pool, devices, throttle)."""
    with contextlib.ExitStack() as stack:

        def make(count):
            devices = stack.enter_context(loop_devices(tmp_path, count, "128M"))
            pool = Pool(devices=devices, format_args=("--stripe-width", "1"))
            return stack.enter_context(pool), devices, stack.enter_context(Throttle())

        yield make


def store(pool, contents):
    """By a client that has the usual time, on a slow machine too."""
    with kvfs.connect(pool.mount, gpu=None) as client:
        client.put(contents.items())


@pytest.mark.timeout(180)
def test_a_stuck_device_is_a_miss_and_keeps_the_memory_until_it_answers(stoppable):
    pool, devices, throttle = stoppable(2)
    old = blocks(40, 1_000_000)
    with kvfs.connect(pool.mount, timeout_s=5, gpu=None) as client:
        client.put(old.items())
        assert_reads(client, old)
        throttle.stop(devices[0])
        destinations = {key: bytearray(len(data)) for key, data in old.items()}
        before = time.monotonic()
        results = client.get_into(destinations.items())
        assert time.monotonic() - before < 20 * slowness(), "one timeout, not one for each block"
        missed = [key for key, result in zip(old, results, strict=True) if result is None]
        assert 0 < len(missed) < 40
        for key, result in zip(old, results, strict=True):
            if result is not None:
                assert_same(destinations[key], old[key], repr(key))
        held = client.library.held
        owed = [key for key in missed if exported(destinations[key])]
        assert 0 < held == len(owed) < len(missed), "what was not begun on the stuck device is not owed"
        assert client.statistics().busy == len(owed) and client.statistics().timeouts > 0
        with pytest.raises(BusyBufferError, match="may still write into it"):
            client.get_into([(b"key 0", destinations[owed[0]])])
        assert client.exists(old) == [True] * 40
        before = time.monotonic()
        assert client.get(owed[0]) is None
        client.get_into((key, bytearray(len(old[key]))) for key in missed)
        assert time.monotonic() - before < 20 * slowness()
        throttle.go_on(devices[0])
        wait_until(lambda: client.library.held == 0, "the device's late answers")
        for destination in destinations.values():
            destination.extend(b"resized")
        assert client.statistics().busy == 0
        wait_until(lambda: all(client.get(key) is not None for key in old), "the device's return")
        assert_reads(client, old)


def exported(destination):
    """Whether somebody holds the memory."""
    try:
        destination.append(0)
        destination.pop()
    except BufferError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_closing_while_a_device_owes_an_answer_neither_hangs_nor_lets_go_of_its_memory(stoppable):
    pool, devices, throttle = stoppable(1)
    store(pool, {b"key": content(100_000)})
    client = kvfs.connect(pool.mount, timeout_s=3, gpu=None)
    destination = bytearray(100_000)
    throttle.stop(devices[0])
    assert client.get_into([(b"key", destination)]) == [None]
    before = time.monotonic()
    client.close()
    assert time.monotonic() - before < 20 * slowness()
    with pytest.raises(BufferError):
        destination.extend(b"resized")
    throttle.go_on(devices[0])
    with pytest.raises(BufferError):
        destination.extend(b"for the process's life")


@pytest.mark.timeout(180)
def test_a_client_that_is_dropped_while_a_device_owes_an_answer_does_not_hang(stoppable):
    pool, devices, throttle = stoppable(1)
    store(pool, {b"key": content(100_000)})
    client = kvfs.connect(pool.mount, timeout_s=3, gpu=None)
    throttle.stop(devices[0])
    assert client.get(b"key") is None
    before = time.monotonic()
    with pytest.warns(ResourceWarning, match="not closed"):
        del client
        gc.collect()
    assert time.monotonic() - before < 20 * slowness()


@pytest.mark.timeout(180)
def test_a_prestaged_block_of_a_stuck_device_is_a_miss(stoppable):
    pool, devices, throttle = stoppable(1)
    store(pool, {b"key": content(100_000)})
    with kvfs.connect(pool.mount, timeout_s=3, gpu=None) as client:
        throttle.stop(devices[0])
        assert client.prestage([b"key"]) == 1
        before = time.monotonic()
        assert client.get(b"key") is None
        assert time.monotonic() - before < 20 * slowness()
        throttle.go_on(devices[0])
        wait_until(lambda: client.get(b"key") is not None, "the device's return")
        assert_same(client.get(b"key"), content(100_000), "the block")
