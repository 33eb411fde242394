"""kill -9 at random moments under load: every block whose close() returned is there and right, or gone; none is wrong.

KVFS_KILLS sets how many kills there are together (default 40; 6 without --run-slow), KVFS_KILL_SEED
repeats a run's choices.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import helpers
import pytest
from helpers import KIB, MIB, Pool
from workload import Child, Ledger, walk, write_until_dead

import kvfs
from kvfs.errors import KvfsError
from kvfs.index.lmdb import LmdbIndex
from kvfs.pool.format import META_NUMBER, META_OPENING
from kvfs.pool.labels import write_label
from kvfs.pool.opening import open_pool

KILLS = int(os.environ.get("KVFS_KILLS") or helpers.often(6, 40))
SEED = int(os.environ.get("KVFS_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
WRITERS = 4


def _load_and_kill(
    pool: Pool,
    ledger: Ledger,
    chooser: random.Random,
    *,
    names: int,
    sizes: tuple[int, int],
    may_miss: bool,
    step: pathlib.Path | None = None,
) -> tuple[float, bool]:
    """Run writers, kill the daemon 50 to 800 ms later, collect their reports. With a `step` the daemon kills itself as
    it comes there. Returns the time of the kill, and whether anything had been written by then."""
    children = []
    for writer in range(WRITERS):
        (pool.mount / f"w{writer}").mkdir(exist_ok=True)
        children.append(
            Child(
                functools.partial(
                    write_until_dead,
                    str(pool.mount),
                    writer,
                    chooser.getrandbits(32),
                    ledger.known(writer),
                    names,
                    sizes,
                    may_miss,
                )
            )
        )
    pid = pool.pid()
    if step is not None:  # the writers' processes may take a while to begin
        helpers.wait_until(lambda: pool.status()["counters"]["sealed_blocks"] >= 2 * WRITERS, "the first blocks")
    time.sleep(chooser.uniform(0.05, 0.8))  # the moment is the point of the test
    killed_at = time.monotonic()
    if step is None:
        os.kill(pid, signal.SIGKILL)
    else:
        step.touch()
        helpers.wait_until(lambda: not helpers.process_alive(pid), f"the end of daemon {pid} as {step.name}")
        killed_at = time.monotonic()
    reports = [child.result() for child in children]
    for report in reports:
        ledger.add(report)
    pool.kill()
    return killed_at, any(report.events for report in reports)


def _kill_during_start(pool: Pool, chooser: random.Random) -> None:
    """Begin to mount and kill the daemon somewhere in its recovery."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvfs", "mount", str(pool.path), str(pool.mount)],
        cwd=helpers.REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def first_child() -> int | None:
        with contextlib.suppress(OSError, IndexError):
            return int(children.read_text().split()[0])
        return None

    helpers.wait_until(lambda: first_child() or process.poll() is not None, "the daemon to be forked", interval_s=0.001)
    pid = first_child()
    time.sleep(chooser.uniform(0, 0.15))
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(60)
    if pid is None and process.returncode == 0:  # it was ready before its process was seen
        pid = pool.pid()
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):  # it answered before the first kill and was reparented
            os.kill(pid, signal.SIGKILL)
        helpers.wait_until(lambda: not helpers.process_alive(pid), f"the end of daemon {pid}")
    helpers.detach(pool.mount)


def _rounds(pool: Pool, rounds: int, *, names: int, sizes: tuple[int, int], may_miss: bool) -> dict[str, int]:
    ledger, figures = Ledger(), {"found": 0, "missing": 0, "left": 0, "idle": 0}
    for number in range(rounds):
        chooser = random.Random(f"{SEED} {number}")
        try:
            killed_at, written = _load_and_kill(pool, ledger, chooser, names=names, sizes=sizes, may_miss=may_miss)
            figures["idle"] += not written
            helpers.detach(pool.mount)
            if number % 5 == 4:
                _kill_during_start(pool, chooser)
            pool.start()
            found = walk(pool.mount)
            known = sum(len(ledger.known(writer)) for writer in range(WRITERS))
            ledger.settle(found, killed_at, may_miss)
        except BaseException as error:
            error.add_note(f"kill {number} of {rounds}; repeat with KVFS_KILL_SEED={SEED}")
            raise
        figures["found"] += len(found)
        figures["missing"] += max(0, known - len(found))
        for path in found:
            if "/.k." in path:  # its rename was undone; unlinked now, it must not come back
                (pool.mount / path).unlink(missing_ok=may_miss)  # an evicting pool may have taken it since
                ledger.removed(path)
                figures["left"] += 1
    print(f"seed {SEED}: {rounds} kills, {figures}")
    assert figures["idle"] <= rounds // 2, f"nothing was written before {figures['idle']} of {rounds} kills"
    return figures


@pytest.mark.timeout(60 + 12 * KILLS)
def test_killed_at_any_moment_while_evicting_no_file_is_wrong(own_pool: Callable[..., Pool]) -> None:
    """A small pool that evicts all the time: a file may be missing, but what is there is whole and not too old."""
    pool = own_pool(files=4, size="16M")
    figures = _rounds(pool, max(1, KILLS * 2 // 3), names=80, sizes=(100, 600 * KIB), may_miss=True)
    assert figures["found"] > 0
    assert figures["missing"] > 0, "nothing was evicted: the pool is too large for this test"


@pytest.mark.timeout(60 + 12 * KILLS)
def test_killed_at_any_moment_without_eviction_nothing_acknowledged_is_missing(own_pool: Callable[..., Pool]) -> None:
    """A pool that never fills: whatever close() acknowledged is there, at most under the name of a second ago."""
    pool = own_pool(files=4, size="1G")
    figures = _rounds(pool, max(1, KILLS // 3), names=40, sizes=(100, 300 * KIB), may_miss=False)
    assert figures["found"] > 0
    status = pool.status()
    assert status["counters"]["evicted_blocks"] == 0
    assert "recovered: " in (pool.path / "kvfs.log").read_text()


STEPS = ("frozen", "half-written", "written", "committed", "shown", "noted")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("step", STEPS)
def test_killed_between_two_steps_of_a_commit_nothing_acknowledged_is_missing(
    step: str, own_pool: Callable[..., Pool], tmp_path: pathlib.Path
) -> None:
    pool = own_pool(files=4, size="256M", started=False)
    ledger = Ledger()
    for number in range(helpers.often(1, 3)):
        (tmp_path / step).unlink(missing_ok=True)
        helpers.run(
            sys.executable,
            pathlib.Path(__file__).with_name("killed_in_commit.py"),
            tmp_path,
            "mount",
            pool.path,
            pool.mount,
            *pool.mount_args,
            environment=pool.environment,
        )
        chooser = random.Random(f"{SEED} {step} {number}")
        killed_at, written = _load_and_kill(
            pool, ledger, chooser, names=40, sizes=(100, 300 * KIB), may_miss=False, step=tmp_path / step
        )
        assert written
        helpers.detach(pool.mount)
        pool.start()
        ledger.settle(walk(pool.mount), killed_at, False)
        pool.umount()
    pool.command("fsck", str(pool.path), "--verify-data")


def _replace_files(directory: pathlib.Path) -> None:
    """Create, rename and unlink until the daemon is gone: most of the time the directory is locked for one of them."""
    temporary = directory / f".{os.getpid()}"
    with contextlib.suppress(OSError):
        while True:
            helpers.write_file(temporary, b"x" * 5000)
            os.rename(temporary, directory / b"k0".hex())


def _replace_natively(mountpoint: pathlib.Path) -> None:
    with contextlib.suppress(KvfsError), kvfs.connect(mountpoint, gpu=None, timeout_s=1) as client:
        while True:
            client.put([(b"k0", b"y" * 5000)])
            client.delete([b"k0"])


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_killed_while_native_clients_and_files_replace_the_same_name_the_daemon_ends(
    own_pool: Callable[..., Pool],
) -> None:
    """The daemon tells the kernel what native clients replaced. It must not wait in there for the directory's lock:
    who holds that waits for the daemon, and both would for ever."""
    pool = own_pool(files=2, size="64M")
    directory = pool.mount / b"k".hex()
    chooser = random.Random(SEED)
    for _ in range(8):
        directory.mkdir(exist_ok=True)
        children = [
            Child(functools.partial(function, where))
            for function, where in (*[(_replace_files, directory)] * 3, *[(_replace_natively, pool.mount)] * 3)
        ]
        time.sleep(chooser.uniform(0.2, 0.6))
        pool.kill()
        with helpers.raises_errno(errno.ENOTCONN, errno.ECONNABORTED):
            os.statvfs(pool.mount)
        for child in children:
            child.result()
        pool.remount()


@pytest.mark.timeout(180)
def test_what_was_fsynced_survives_an_immediate_kill(own_pool: Callable[..., Pool]) -> None:
    """After fsync of a file and its directory neither content nor name may change: no grace."""
    pool = own_pool(files=2, size="64M")
    for number in range(5):
        data = os.urandom(MIB + number)
        directory = pool.mount / f"d{number}"
        directory.mkdir()
        with helpers.opened(directory / "new", os.O_CREAT | os.O_WRONLY) as descriptor:
            os.write(descriptor, data)
            os.fsync(descriptor)
        helpers.write_file(directory / "gone", data)
        os.rename(directory / "new", directory / "final")
        os.unlink(directory / "gone")
        with helpers.opened(directory, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            os.fsync(descriptor)
        pool.kill()
        pool.remount()
        assert os.listdir(directory) == ["final"]
        helpers.assert_same(helpers.read_file(directory / "final"), data, f"{directory}/final")


@pytest.mark.timeout(180)
def test_what_a_recovery_found_survives_another_kill_that_takes_the_index_along(own_pool: Callable[..., Pool]) -> None:
    """A rename in a segment closed long ago: in the index at the first kill, in no summary yet."""
    pool = own_pool(files=2, size="64M")
    directory = pool.mount / "d"
    directory.mkdir()
    helpers.write_file(directory / "before", b"x" * 50_000)
    pool.umount()
    pool.start()
    os.rename(directory / "before", directory / "after")
    with helpers.opened(directory, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)
    pool.kill()
    pool.remount()
    assert os.listdir(directory) == ["after"]
    pool.kill()
    helpers.detach(pool.mount)
    shutil.rmtree(pool.path / "index")
    pool.start()
    pool.wait_rebuilt()
    assert os.listdir(directory) == ["after"]


@pytest.mark.parametrize("labelled", (1, 3))
def test_killed_while_it_labels_the_devices_the_next_mount_has_what_was_closed_before(
    own_pool: Callable[..., Pool], labelled: int
) -> None:
    """The first labels say that there was another mount, the others do not: they have missed nothing."""
    pool = own_pool(files=4, size="64M")
    helpers.write_file(pool.mount / "before", b"x" * 50_000)
    pool.kill()
    helpers.detach(pool.mount)
    opened = open_pool(pool.path)
    index = LmdbIndex(pool.path / "index")
    index.meta_put(META_OPENING, META_NUMBER.pack(opened.epoch + 1))
    index.commit_now()
    index.close()
    for number, device in enumerate(opened.devices[:labelled]):
        write_label(opened.config, device, number, opened.epoch + 1)
    opened.close()
    pool.start()
    assert helpers.read_file(pool.mount / "before") == b"x" * 50_000
    assert {device["state"] for device in pool.status()["devices"]} == {"online"}
