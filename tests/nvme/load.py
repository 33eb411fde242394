"""Shared by the tests with pools on enclosures: files to serve, URLs, contents, and load."""

import contextlib
import functools
import os
import pathlib
import random
import threading
import time

import kvfs
from kvfs.errors import KvfsError

DEADLINE_MS = 1500  # of the daemon's device I/O, in tests of faults
DEADLINE_S = DEADLINE_MS / 1000
# A read that took less is of no interest to who looks for long ones.
LONG_S = 0.2


@contextlib.contextmanager
def files(count, size=256 << 20):
    """Sparse files in memory, for an enclosure to serve."""
    base = pathlib.Path("/dev/shm") / f"kvfs-test-nvme-{os.getpid()}-{random.randrange(1 << 32):x}"
    base.mkdir()
    try:
        paths = [base / str(index) for index in range(count)]
        for path in paths:
            path.touch()
            os.truncate(path, size)
        yield paths
    finally:
        for path in base.iterdir():
            path.unlink()
        base.rmdir()


def urls(port, nqn, count, options=""):
    return [f"nvme-tcp://127.0.0.1:{port}/{nqn}?nsid={nsid}{options}" for nsid in range(1, count + 1)]


@functools.cache
def content(number, size):
    return random.Random(number).randbytes(size)


def states(pool):
    return [device["state"] for device in pool.status()["devices"]]


@contextlib.contextmanager
def running(*threads):
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.halt.set()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "a call hangs"
        for thread in threads:
            if getattr(thread, "error", None):
                raise thread.error


class Load(threading.Thread):
    """Stores blocks and reads them back, until told to stop."""

    SIZE = 300_000
    CONTENTS = 300  # so many different ones
    READS = 3

    def __init__(self, pool, which, deadline_s=DEADLINE_S):
        super().__init__()
        self.pool, self.deadline_s = pool, deadline_s
        self.first, self.random = which * 1_000_000, random.Random(which)
        self.halt, self.error = threading.Event(), None
        self.good, self.failed, self.longest, self.wrong = 0, 0, [], []

    def run(self):
        try:
            with self.opened():
                number = self.first
                while not self.halt.is_set():
                    number += 1
                    with contextlib.suppress(OSError, KvfsError):
                        self.store(number, content(number % self.CONTENTS, self.SIZE))
                    for _ in range(self.READS):
                        self._check(self.random.randrange(max(self.first + 1, number - 200), number + 1))
        except BaseException as error:
            self.error = error

    def _check(self, number):
        try:
            data = self.load(number)
        except (OSError, KvfsError):
            data = None
        if data is None:
            self.failed += 1
            time.sleep(0.001)
        elif not self.right(data, content(number % self.CONTENTS, self.SIZE)):
            self.wrong.append(number)
        else:
            self.good += len(data) == self.SIZE

    @contextlib.contextmanager
    def timed(self):
        began = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            if ended - began > LONG_S:
                self.longest.append((began, ended))


class MountLoad(Load):
    STEP = 128 * 1024  # the kernel's read-ahead: a request, so a read

    def opened(self):
        return contextlib.nullcontext()

    def store(self, number, data):
        (self.pool.mount / f"n{number}").write_bytes(data)

    def load(self, number):
        fd = os.open(self.pool.mount / f"n{number}", os.O_RDONLY)
        try:
            pieces, at = [b" "], 0
            while pieces[-1]:
                with self.timed():
                    pieces.append(os.pread(fd, self.STEP, at))
                at += len(pieces[-1])
            return b"".join(pieces[1:])
        finally:
            os.close(fd)

    def right(self, data, wanted):
        return data == wanted[: len(data)]  # a write that failed leaves a shorter file or none


class NativeLoad(Load):
    READS = 8

    @contextlib.contextmanager
    def opened(self):
        with kvfs.connect(str(self.pool.mount), namespace="n", timeout_s=self.deadline_s) as self.client:
            self.target = self.client.buffer(self.SIZE)
            yield

    def store(self, number, data):
        self.client.put([(number.to_bytes(8, "big"), data)])

    def load(self, number):
        with self.timed():
            (size,) = self.client.get_into([(number.to_bytes(8, "big"), self.target)])
        return None if size is None else self.target[:size]

    def right(self, data, wanted):
        return data == wanted
