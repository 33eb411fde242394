"""A mount outlives its daemons by systemd's descriptor store (`kvfs mount --hold systemd`). A double of systemd keeps
the descriptors.
"""

from __future__ import annotations

import errno
import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Iterator

import helpers
import pytest
from helpers import KIB, Pool, content, mount_device, wait_until
from service_manager import ServiceManager
from workload import Child

from kvfs.units import kernel_version


@pytest.fixture(autouse=True)
def _kernel() -> None:
    if kernel_version(os.uname().release) < (6, 9):
        pytest.skip(f"needs Linux 6.9 (FUSE_NOTIFY_RESEND); this is {os.uname().release}")


class Unit(Pool):
    """A pool that a unit mounts."""

    manager: ServiceManager
    threads = 3

    @property
    def words(self) -> tuple[str, ...]:
        return ("mount", str(self.path), str(self.mount), "--foreground", "--allow-other", "--hold", "systemd",
                "--threads", str(self.threads))  # fmt: skip

    def start(self, *extra: str, timeout_s: float = 0) -> None:
        process = self.manager.start(*self.words, *extra, environment=self.environment)
        assert process.poll() is None, self.manager.log()[-3000:]

    def end(self, number: int) -> int:
        process = self.manager.process
        assert process is not None
        process.send_signal(number)
        return process.wait(60 * helpers.slowness())

    def take_over(self, number: int) -> None:
        before = mount_device(self.mount)
        self.end(number)
        assert mount_device(self.mount) == before
        self.start()
        assert mount_device(self.mount) == before

    def fails(self, *extra: str) -> str:
        """The last line of a start that fails."""
        process = self.manager.start(*self.words, *extra, environment=self.environment)
        assert process.wait(60 * helpers.slowness()) == 1
        return self.manager.log().splitlines()[-1]

    def kept(self) -> list[str]:
        return ["kvfs-fuse"] * self.threads + ["kvfs-journal", "kvfs-opens", "kvfs-state", "kvfs-watch", "kvfs-written"]

    def _destroy(self) -> None:
        self.manager.close()
        super()._destroy()


@pytest.fixture
def unit() -> Iterator[Unit]:
    with Unit(files=2, size="512M", started=False) as made:
        made.manager = ServiceManager(made.base)
        yield made


def test_a_mount_is_taken_over_from_systemd_s_store(unit: Unit) -> None:
    unit.start()
    assert unit.manager.names() == unit.kept()
    data = content(300 * KIB, 1)
    (unit.mount / "a").write_bytes(data)
    with (unit.mount / "a").open("rb") as file:
        for turn, number in enumerate((signal.SIGKILL, signal.SIGTERM, signal.SIGKILL), 1):
            waiting = unit.mount / f"new{turn}"
            (unit.mount / "a").rename(unit.mount / f"a{turn}")  # which no commit has
            before = unit.manager.process
            unit.end(number)
            child = Child(lambda waiting=waiting: (waiting.write_bytes(data), waiting.read_bytes() == data)[1])
            wait_until(lambda: (helpers.requests_waiting(unit.mount) or 9) >= 1, "a request that waits")
            unit.start()
            assert child.result() is True
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert os.pread(file.fileno(), len(data), 0) == data
            assert os.listdir(unit.mount).count(f"a{turn}") == 1 and not (unit.mount / "a").exists()
            (unit.mount / f"a{turn}").rename(unit.mount / "a")
            assert unit.manager.names() == unit.kept()
            assert before is not None and f"taken over from pid {before.pid}" in unit.manager.log()
            holder = unit.status()["holder"]
            assert (holder["path"], holder["pid"], holder["alive"]) == ("systemd", os.getpid(), True)
            assert holder["takeovers"] == turn
    unit.umount()
    assert unit.manager.process is not None and unit.manager.process.wait(60) == 0
    assert unit.manager.names() == []
    unit.start()  # anew, as there is nothing to take
    assert (unit.mount / "a").read_bytes() == data
    assert unit.status()["holder"]["takeovers"] == 0


def test_a_store_that_is_too_small_is_told_of_and_nothing_is_mounted(unit: Unit) -> None:
    need = len(unit.kept())
    for maximum, tells, said in (
        (0, False, "is too small, or not set"), (need - 1, False, "is too small, or not set"), (4, True, "is 4"),
    ):  # fmt: skip
        unit.manager.maximum, unit.manager.tells = maximum, tells
        line = unit.fails()
        assert f"systemd does not keep the mount: FileDescriptorStoreMax= of its unit {said}; set it to {need}" in line
        assert mount_device(unit.mount) is None
        wait_until(lambda: unit.manager.names() == [], "the end of what was stored")
    unit.manager.maximum = need
    unit.start()
    assert unit.manager.names() == unit.kept()


@pytest.mark.slow
def test_clones_that_were_dropped_are_told_of_and_the_mount_goes_on(unit: Unit) -> None:
    unit.start()
    (unit.mount / "a").write_bytes(b"kept")
    unit.end(signal.SIGTERM)
    unit.manager.take("kvfs-fuse", 2)
    unit.start()
    assert "systemd has kept 4 of 6 descriptors" in unit.manager.log()
    assert "FileDescriptorStoreMax= of its unit must be 8 or more" in unit.manager.log()
    assert (unit.mount / "a").read_bytes() == b"kept"


@pytest.mark.slow
def test_a_store_that_goes_ends_the_mount_with_its_daemon(unit: Unit) -> None:
    unit.start()
    for name in set(unit.kept()):
        unit.manager.take(name)
    wait_until(lambda: unit.status()["holder"]["alive"] is False, "the daemon's knowledge of it")
    assert f"the holder at systemd (pid {os.getpid()}) has ended" in unit.manager.log()
    assert unit.end(signal.SIGTERM) == 0
    assert mount_device(unit.mount) is None


def test_a_mount_that_was_unmounted_meanwhile_is_made_anew(unit: Unit) -> None:
    unit.start()
    (unit.mount / "a").write_bytes(b"sealed")
    unit.end(signal.SIGTERM)
    unit.command("umount", str(unit.path))
    assert mount_device(unit.mount) is None
    unit.start()
    assert "it has been unmounted" in unit.manager.log()
    assert unit.manager.names() == unit.kept()
    assert (unit.mount / "a").read_bytes() == b"sealed"
    unit.take_over(signal.SIGKILL)


@pytest.mark.slow
def test_a_second_daemon_is_refused_by_the_pool_s_lock(unit: Unit) -> None:
    """systemd starts the next daemon once the last has ended. If it does not, nothing of the mount is touched before
    the lock is had."""
    unit.start()
    (unit.mount / "a").write_bytes(b"served")
    first = unit.manager.process
    assert first is not None
    try:
        line = unit.fails()
        assert re.search(rf"in use by another kvfs: pid {first.pid}", line), line
        assert (unit.mount / "a").read_bytes() == b"served"
        assert unit.manager.names() == unit.kept()
    finally:
        unit.manager.process = first


def _command_of(pid: int) -> str:
    return pathlib.Path(f"/proc/{pid}/comm").read_text()


def _errno_of(path: str) -> int:
    try:
        os.stat(path)
    except OSError as error:
        return error.errno or -1
    return 0


def test_a_mount_that_somebody_keeps_ends_with_kvfs_umount_of_the_pool(unit: Unit) -> None:
    """systemd's descriptors would keep it, with nobody to serve it: a user in another mount namespace hung."""
    unit.start()
    (unit.mount / "a").write_bytes(b"kept")
    keeper = subprocess.Popen(["unshare", "--mount", "--propagation", "private", "sleep", "600"], cwd=unit.mount)
    try:
        wait_until(lambda: "sleep" in _command_of(keeper.pid), "a user in another mount namespace")
        unit.command("umount", str(unit.path))
        assert unit.manager.process is not None and unit.manager.process.wait(60 * helpers.slowness()) == 0
        assert unit.manager.names() == []
        inside = f"/proc/{keeper.pid}/root{unit.mount}/a"
        assert Child(lambda: _errno_of(inside)).result() in (errno.ENOTCONN, errno.ECONNABORTED)
    finally:
        keeper.kill()
        keeper.wait()
