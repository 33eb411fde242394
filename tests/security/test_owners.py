"""Two daemons that want the same devices: one has them, the other hears who, where, and how to go on. A daemon whose
devices were taken stops."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

import helpers
import pytest
from helpers import MIB, CommandError, Pool, assert_same, content, process_alive, read_file, wait_until, write_file

from kvfs.pool import owner
from kvfs.pool.config import load
from kvfs.pool.format import BEAT_OFFSET, Beat, pack_beat
from kvfs.pool.labels import read_beat
from kvfs.pool.opening import device_path, open_device
from kvfs.types import PAGE_SIZE

pytestmark = pytest.mark.usefixtures("only_root")


class Directory:
    """A second directory that leads to the devices of a pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.path, self.mount = pool, pool.base / "second", pool.base / "second-mount"
        self.mount.mkdir()
        devices = [word for path in sorted((pool.path / "devices").iterdir()) for word in ("--device", str(path))]
        pool.command("import", str(self.path), *devices)

    def start(self, *extra: str) -> str:
        """Mount; returns what it said."""
        return self.pool.command("mount", str(self.path), str(self.mount), *extra).stderr

    def umount(self) -> None:
        pid = int((self.path / "kvfs.pid").read_text())
        self.pool.command("umount", str(self.mount))
        wait_until(lambda: not process_alive(pid), f"the end of daemon {pid} after umount")


@pytest.fixture
def second(own_pool: Callable[..., Pool]) -> Iterator[Directory]:
    pool = own_pool(files=2, size="64M")
    other = Directory(pool)
    try:
        yield other
    finally:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((other.path / "kvfs.pid").read_text()), signal.SIGKILL)
        helpers.detach(other.mount)


def _refused(command: Callable[[], object], *words: str) -> None:
    with pytest.raises(CommandError) as caught:
        command()
    for word in words:
        assert word in str(caught.value), str(caught.value)


def _beats(pool: Pool) -> list[Beat | None]:
    config = load(pool.path)
    assert config is not None
    beats = []
    for described in config.devices:
        device = open_device(device_path(pool.path, described), exclusive=False, writable=False)
        beats.append(read_beat(device, config, described.index))
        device.close()
    return beats


class OtherMachine:
    """A double: another machine that has the devices too, of which nothing is seen but its beats. It stops when it
    finds another's."""

    def __init__(self, pool: Pool, epoch: int) -> None:
        config = load(pool.path)
        assert config is not None
        self._config, self._pool = config, pool
        self._beat = replace(
            owner.this_process(epoch, pool="/srv/theirs", use="mounted at /mnt/theirs"), owner=uuid.uuid4(),
            machine=b"m" * 16, boot=b"b" * 16, host="elsewhere", pid=77,
        )  # fmt: skip
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.pages: list[bytes] = []

    def beat(self) -> None:
        self._beat = replace(self._beat, number=self._beat.number + 1, written_ns=time.time_ns())
        self.pages = []
        for described in self._config.devices:
            page = pack_beat(self._config.secret, self._config.uuid, described.uuid, self._beat)
            device = open_device(device_path(self._pool.path, described), exclusive=False)
            device.write(BEAT_OFFSET, page, durable=False)
            device.close()
            self.pages.append(page)

    def on_devices(self) -> bool:
        """Whether what it wrote last is still there."""
        found = []
        for described in self._config.devices:
            device = open_device(device_path(self._pool.path, described), exclusive=False, writable=False)
            found.append(device.read(BEAT_OFFSET, PAGE_SIZE))
            device.close()
        return found == self.pages

    def _run(self) -> None:
        while not self._stop.wait(0.2) and self.on_devices():
            self.beat()

    def __enter__(self) -> OtherMachine:
        # Twice: a daemon that had read its page already writes over the first.
        self.beat()
        time.sleep(0.05)
        self.beat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def stopped(self) -> bool:
        return not self._thread.is_alive()


def test_a_second_directory_is_refused_while_the_first_is_mounted(second: Directory, tmp_path: pathlib.Path) -> None:
    pool, data = second.pool, content(MIB)
    write_file(pool.mount / "a", data)
    who = (f"in use by another kvfs: pid {pool.pid()}", f"pool {pool.path}", f"mounted at {pool.mount}",
           f"kvfs umount {pool.path} ends it")  # fmt: skip
    device = str(pool.path / "devices/0")
    _refused(second.start, *who)
    _refused(lambda: pool.command("fsck", str(second.path), "--repair"), *who)
    _refused(lambda: pool.command("format", str(tmp_path / "new"), "--device", device, "--force"), *who)
    _refused(lambda: pool.command("device", "add", str(second.path), str(tmp_path / "none")), *who)
    _refused(lambda: pool.command("device", "remove", str(second.path), "0"), *who)
    _refused(lambda: pool.command("format", str(pool.path), "--files", "2", "--size", "64M", "--force"), *who)
    _refused(lambda: pool.command("mount", str(pool.path), str(second.mount)), *who)
    pool.remount()
    assert_same(read_file(pool.mount / "a"), data, "a")
    pool.umount()
    assert "nothing is damaged" in pool.command("fsck", str(pool.path), "--verify-data").stdout


def test_a_clean_umount_leaves_no_beat_and_a_killed_daemons_delays_nobody(second: Directory) -> None:
    pool = second.pool
    wait_until(lambda: all(beat is not None and beat.number > 4 for beat in _beats(pool)), "some beats")
    pool.kill()
    assert all(beat is not None for beat in _beats(pool))
    said = second.start()
    assert "watching" not in said and "waiting" not in said, said
    second.umount()
    assert _beats(pool) == [None, None]


def test_a_daemon_that_is_ending_is_waited_for(second: Directory) -> None:
    pool = second.pool
    pid = pool.pid()
    with helpers.opened(pool.mount / "open", os.O_CREAT | os.O_WRONLY) as descriptor:
        os.write(descriptor, b"x")
        # With a file open it gives that some seconds.
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: any(beat is not None and beat.flags for beat in _beats(pool)), "the end to be announced")
        waiting = subprocess.Popen([sys.executable, "-m", "kvfs", "mount", str(second.path), str(second.mount)],
                                   cwd=helpers.REPOSITORY, stderr=subprocess.PIPE, text=True)  # fmt: skip
        assert waiting.stderr is not None
        assert f"pid {pid} is ending; waiting for it" in waiting.stderr.readline()
    with waiting:
        assert waiting.wait(120) == 0, waiting.stderr.read()
    assert_same(read_file(second.mount / "open"), b"x", "open")
    second.umount()


def test_of_two_mounts_at_the_same_moment_one_is_refused(second: Directory) -> None:
    pool = second.pool
    pool.umount()
    for _ in range(2):
        mounts = [
            subprocess.Popen([sys.executable, "-m", "kvfs", "mount", str(path), str(at)], cwd=helpers.REPOSITORY,
                             stderr=subprocess.PIPE, text=True)
            for path, at in ((pool.path, pool.mount), (second.path, second.mount))
        ]  # fmt: skip
        said = [process.communicate(timeout=120)[1] for process in mounts]
        assert sorted(process.returncode for process in mounts) == [0, 1], said
        assert "in use by another kvfs" in said[mounts[1].returncode != 0], said
        if mounts[0].returncode == 0:
            pool.umount()
        else:
            second.umount()


def test_a_daemon_whose_devices_are_taken_stops_at_once_and_writes_nothing_more(own_pool: Callable[..., Pool]) -> None:
    pool = own_pool(files=2, size="64M")
    data = content(MIB)
    write_file(pool.mount / "before", data)
    pool.umount()
    pool.start()
    pid, epoch = pool.pid(), pool.status()["pool"]["epoch"]
    with helpers.opened(pool.mount / "unsealed", os.O_CREAT | os.O_WRONLY) as descriptor:
        os.write(descriptor, b"x" * MIB)
        with OtherMachine(pool, epoch + 1) as other:
            pool.wait_dead(pid)
            assert not other.stopped
            log = pool.log_tail()
            assert "CRITICAL" in log and "pid 77 on elsewhere" in log, log
            # And it may not come back.
            helpers.detach(pool.mount)
            _refused(pool.start, "in use by another kvfs: pid 77 on elsewhere", "mounted at /mnt/theirs",
                     "on elsewhere, kvfs umount /srv/theirs ends it; kvfs mount --force")  # fmt: skip
            assert not other.stopped
            # But by force: then it is the other one that stops.
            pool.start("--force")
            assert other.stopped
    assert_same(read_file(pool.mount / "before"), data, "before")
    assert not (pool.mount / "unsealed").exists()


def test_a_machine_that_is_off_is_found_out_by_watching(own_pool: Callable[..., Pool]) -> None:
    pool = own_pool(files=2, size="64M", started=False)
    OtherMachine(pool, 41).beat()
    said = pool.command("mount", str(pool.path), str(pool.mount)).stderr
    assert "pid 77 on elsewhere" in said and "watching for 5 s" in said and "taken over" in said, said
    assert pool.status()["pool"]["epoch"] == 42


def test_a_daemon_that_was_stopped_while_another_took_over_ends_when_it_goes_on(own_pool: Callable[..., Pool]) -> None:
    pool = own_pool(files=2, size="64M")
    pid, epoch = pool.pid(), pool.status()["pool"]["epoch"]
    os.kill(pid, signal.SIGSTOP)
    try:
        other = OtherMachine(pool, epoch + 1)
        other.beat()
    finally:
        os.kill(pid, signal.SIGCONT)
    pool.wait_dead(pid)
    # At most one beat of it was on its way when it was stopped.
    assert "pid 77 on elsewhere" in pool.log_tail()
    helpers.detach(pool.mount)


@pytest.mark.parametrize("verb", [helpers.slow("replace"), helpers.slow("replace itself"), "remove"])
def test_a_foreign_label_on_one_device_of_four_degrades_the_pool_and_its_advice_works(
    own_pool: Callable[..., Pool], tmp_path: pathlib.Path, verb: str
) -> None:
    pool = own_pool(files=4, size="64M", format_args=("--stripe-width", "1"))
    files = {f"f{number}": content(MIB, number) for number in range(40)}
    for name, data in files.items():
        write_file(pool.mount / name, data)
    pool.umount()
    device = pool.path / "devices/2"
    pool.command("format", str(tmp_path / "other"), "--device", str(device), "--force")
    said = pool.command("mount", str(pool.path), str(pool.mount)).stderr
    assert "degraded: device 2: " in said and "the label of" in said and "kvfs device replace POOL 2 PATH" in said, said
    left = {name for name in files if (pool.mount / name).exists()}
    assert 0 < len(left) < len(files)
    pool.umount()
    # Its own mount or fsck would write over the other pool's label.
    _refused(lambda: pool.command("fsck", str(pool.path), "--repair"), "kvfs device replace POOL 2 PATH")
    if verb == "replace":
        with (tmp_path / "new").open("wb") as file:
            file.truncate(64 * MIB)
        pool.command("device", "replace", str(pool.path), "2", str(tmp_path / "new"))
    elif verb == "replace itself":
        again = ("device", "replace", str(pool.path), "2", str(device))
        _refused(lambda: pool.command(*again), "holds the label", "--force")
        pool.command(*again, "--force")
    else:
        pool.command("device", "remove", str(pool.path), "2")
    pool.start()
    states = [entry["state"] for entry in pool.status()["devices"]]
    assert states == ["online"] * 2 + ["removed" if verb == "remove" else "online"] + ["online"]
    for name in left:
        assert_same(read_file(pool.mount / name), files[name], name)
    write_file(pool.mount / "new", files["f0"])
    pool.umount()
    assert "nothing is damaged" in pool.command("fsck", str(pool.path), "--verify-data").stdout
