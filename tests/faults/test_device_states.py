"""Devices that fail, hang, are slow, vanish and come back, under a mount: misses, never a wrong byte, never a hang.

Four devices, the second of them on a filesystem that can be told to be sick (stoppable.py, a double of such a device).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import helpers
import pytest
from helpers import KIB, MIB, Pool, assert_same, content, raises_errno, read_file, wait_until, write_file

import kvfs
from kvfs.client.events import Reason, Removed, Reset, Stored

SICK = 1
COUNT = 120
BLOCK = 150 * KIB
# StoreOptions.io_timeout_ms, and what a busy machine adds.
DEADLINE_S = 10.0
SLACK_S = 9.0
PIN = "user.kvfs.pin"


class Sick:
    """The device that can be sick: a file on a filesystem of a process of its own."""

    def __init__(self, base: pathlib.Path, size: str) -> None:
        self.mountpoint, self.target = base / "sick", base / "sick-target"
        self.mountpoint.mkdir()
        self.device = self.mountpoint / "device"
        helpers.run("truncate", "--size", size, self.target)
        self._process: subprocess.Popen[str] | None = None
        self.appear()

    def appear(self) -> None:
        script = helpers.REPOSITORY / "tests/stoppable.py"
        self._process = subprocess.Popen(
            [sys.executable, script, self.target, self.mountpoint],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def __call__(self, command: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip() == command.partition(" ")[0]

    def vanish(self) -> None:
        """As if it was pulled out: the path is gone, and the descriptor that is open leads nowhere."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(20)
        finally:
            process.kill()
            process.wait(20)
            helpers.detach(self.mountpoint)


Faulty = tuple[Pool, Sick]


@pytest.fixture
def faulty(own_pool: Callable[..., Pool], tmp_path: pathlib.Path) -> Iterator[Callable[..., Faulty]]:
    helpers.requires_fuse()
    sick = Sick(tmp_path, "40M")
    with contextlib.ExitStack() as stack:
        stack.callback(sick.vanish)

        def make(width: int, **arguments: Any) -> Faulty:
            devices = []
            for index in range(4):
                path = sick.device if index == SICK else tmp_path / f"device-{index}"
                if index != SICK:
                    helpers.run("truncate", "--size", "40M", path)
                devices.append(str(path))
            # A pool of width 1 has 152 segments of 1 MiB, one of width 4 has 38 of 4 MiB.
            pool = Pool(
                devices=devices,
                format_args=("--stripe-width", str(width), "--segment-size", str(width * MIB)),
                **arguments,
            )
            stack.enter_context(pool)
            return pool, sick

        yield make
        with contextlib.suppress(AssertionError, OSError):
            sick("go")


def fill(pool: Pool, count: int = COUNT) -> dict[str, bytes]:
    files = {f"{index}": content(BLOCK, index) for index in range(count)}
    for name, data in files.items():
        write_file(pool.mount / name, data)
    return files


def status(pool: Pool) -> dict[str, Any]:
    """As `kvfs status -o json`, without a process for each look where there is a daemon to ask."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(DEADLINE_S * helpers.slowness())
        try:
            connection.connect(str(pool.path / "control.sock"))
        except (FileNotFoundError, ConnectionRefusedError):
            return pool.status()
        connection.sendall(b'{"command": "status"}\n')
        with connection.makefile() as lines:
            answer = json.loads(lines.readline())
    assert answer["ok"], answer
    found: dict[str, Any] = answer["result"]
    return found


def state(pool: Pool) -> str:
    return str(status(pool)["devices"][SICK]["state"])


def wait_state(pool: Pool, wanted: str, timeout_s: float = 30) -> None:
    wait_until(lambda: state(pool) == wanted, f"device {SICK} {wanted}", timeout_s=timeout_s, interval_s=0.1)


def uncached(path: pathlib.Path) -> bytes:
    """Read around the page cache: from the devices."""
    with helpers.opened(path, os.O_RDONLY | os.O_DIRECT) as descriptor:
        return os.pread(descriptor, BLOCK + 4096, 0)


def look(pool: Pool, files: dict[str, bytes]) -> set[str]:
    """The names that are there, after every byte of them was compared. A name is there, or ENOENT."""
    there = set()
    for name, data in files.items():
        try:
            found = uncached(pool.mount / name)
        except FileNotFoundError:
            continue
        assert_same(found, data, name)
        there.add(name)
    assert set(os.listdir(pool.mount)) == there
    return there


def provoke(pool: Pool, files: dict[str, bytes]) -> None:
    """Read everything once, whatever becomes of it: EIO or right bytes."""
    for name, data in files.items():
        try:
            assert_same(uncached(pool.mount / name), data, name)
        except OSError as error:
            assert error.errno in (errno.EIO, errno.ENOENT), error


@pytest.mark.parametrize("width", [helpers.slow(1), 2, helpers.slow(4)])
def test_a_device_that_fails_is_some_misses_and_everything_is_back_when_it_is(
    faulty: Callable[..., Faulty], width: int
) -> None:
    pool, sick = faulty(width)
    files = fill(pool)
    sick("fail now")
    provoke(pool, files)
    wait_state(pool, "failed")
    there: set[str] = set()

    def missing() -> bool:
        nonlocal there
        try:
            there = look(pool, files)
        except OSError as error:  # until the kernel and the block table have been told
            assert error.errno == errno.EIO
            return False
        return there != set(files)

    wait_until(missing, "misses")
    if width == 4:
        assert not there
        with raises_errno(errno.EIO):
            write_file(pool.mount / "new", content(BLOCK, "new"))
        os.unlink(pool.mount / "new")
        said = pool.command("status", str(pool.path)).stdout
        assert f"writes get EIO: each lies on a device that is away ({SICK})" in said, said
        assert "width 4, unit 128K, all of them on every device" in said, said
        assert (pool.path / "kvfs.log").read_text().count("no segment can be written") == 1
    else:
        # All segments of a width come in turn; segments of width 2 are those of two pairs of devices.
        share = len(there) / len(files)
        assert abs(share - (1 - width / 4)) < 0.1, f"{len(there)} of {len(files)} are left"
    assert "degraded" in status(pool)["pool"]["state"]
    lost = sorted(set(files) - there)
    if width < 4:
        before = status(pool)["devices"][SICK]["write_bytes"]
        for index in range(20):
            write_file(pool.mount / f"new-{index}", content(BLOCK, ("new", index)))
            files[f"new-{index}"] = content(BLOCK, ("new", index))
        # A name that is lost can be given anew, and removed: what it was does not come back.
        files[lost[0]] = content(BLOCK, "again")
        write_file(pool.mount / lost[0], files[lost[0]])
        write_file(pool.mount / lost[1], b"x")
        os.unlink(pool.mount / lost[1])
        del files[lost[1]]
        assert status(pool)["devices"][SICK]["write_bytes"] == before
        assert look(pool, files) == set(files) - set(lost[2:])
    sick("go")
    wait_state(pool, "online")
    assert look(pool, files) == set(files)
    pool.umount()
    pool.start()
    assert look(pool, files) == set(files)
    pool.umount()
    assert "nothing is damaged" in pool.command("fsck", str(pool.path), "--verify-data").stdout


def test_a_device_that_hangs_costs_its_deadline_once_and_the_others_nothing(faulty: Callable[..., Faulty]) -> None:
    pool, sick = faulty(1)
    files = fill(pool)
    sick("stop read")
    sick("stop write")
    longest, wrong = [0.0], []
    stop = threading.Event()

    def read(offset: int) -> None:
        while not stop.is_set():
            for name in list(files)[offset::4]:
                began = time.monotonic()
                try:
                    assert_same(uncached(pool.mount / name), files[name], name)
                except OSError as error:
                    if error.errno not in (errno.EIO, errno.ENOENT):
                        wrong.append(error)
                except AssertionError as error:
                    wrong.append(error)
                longest[0] = max(longest[0], time.monotonic() - began)

    readers = [threading.Thread(target=read, args=(offset,)) for offset in range(4)]
    for reader in readers:
        reader.start()
    try:
        wait_state(pool, "failed", timeout_s=3 * DEADLINE_S)
    finally:
        stop.set()
        for reader in readers:
            reader.join(3 * DEADLINE_S)
    assert not wrong, wrong[0]
    assert 1 < longest[0] < (DEADLINE_S + SLACK_S) * helpers.slowness(), f"a read took {longest[0]:.1f} s"
    began = time.monotonic()
    there = look(pool, files)
    write_file(pool.mount / "after", content(BLOCK, "after"))
    assert time.monotonic() - began < DEADLINE_S * helpers.slowness(), "something waited for the device once more"
    with helpers.opened(pool.mount, os.O_RDONLY | os.O_DIRECTORY) as directory:
        os.fsync(directory)
    assert 0.65 < len(there) / len(files) < 0.85
    sick("go")
    wait_state(pool, "online")
    files["after"] = content(BLOCK, "after")
    assert look(pool, files) == set(files)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_slow_device_is_reported_and_gets_no_new_segments_until_it_is_fast(faulty: Callable[..., Faulty]) -> None:
    pool, sick = faulty(1)
    files = fill(pool)
    stop, gently = threading.Event(), threading.Event()

    def read(offset: int) -> None:
        while not stop.is_set():
            for name in list(files)[offset::4]:
                if gently.is_set() and offset:
                    return  # the double is never as fast as a file: less so when many ask
                assert_same(uncached(pool.mount / name), files[name], name)

    readers = [threading.Thread(target=read, args=(offset,)) for offset in range(4)]
    readers[0].start()
    try:
        time.sleep(3)
        wait_state(pool, "online", timeout_s=60)  # the double competes with other tests
        sick("slow 600")  # ten times what its peers need, also where other tests keep them waiting
        for reader in readers[1:]:
            reader.start()
        wait_state(pool, "slow", timeout_s=120)
        text = pool.command("status", str(pool.path)).stdout
        assert "is slow: p99 of reads" in text, text
        assert 'state="slow"} 1' in pool.command("stats", str(pool.path), "--prometheus").stdout
        written = -1

        def over() -> bool:
            nonlocal written
            last, written = written, int(status(pool)["devices"][SICK]["write_bytes"])
            return last == written

        wait_until(over, "the end of writes under way", interval_s=2 * helpers.slowness())
        before = status(pool)["devices"]
        for index in range(30):
            write_file(pool.mount / f"new-{index}", content(BLOCK, ("new", index)))
        after = status(pool)["devices"]
        # A summary of a segment that was closed may be written; no block is.
        assert after[SICK]["write_bytes"] - before[SICK]["write_bytes"] < BLOCK
        assert all(after[i]["write_bytes"] - before[i]["write_bytes"] > 4 * BLOCK for i in (0, 2, 3))
        gently.set()
        sick("go")
        wait_state(pool, "online", timeout_s=180)  # at once, but for a double that competes with other tests
    finally:
        stop.set()
        for reader in readers:
            if reader.ident is not None:
                reader.join(30)


@pytest.mark.parametrize("width", [1, helpers.slow(4)])
def test_a_mount_without_a_device_is_degraded_and_takes_it_in_when_it_appears(
    faulty: Callable[..., Faulty], width: int
) -> None:
    pool, sick = faulty(width)
    files = fill(pool)
    pool.umount()
    sick.vanish()
    said = pool.command("mount", str(pool.path), str(pool.mount), "--allow-other").stderr
    assert "degraded" in said and str(sick.device) in said, said
    there = look(pool, files)
    assert len(there) == 0 if width == 4 else 0.65 < len(there) / len(files) < 0.85
    assert "failed" in pool.command("device", "list", str(pool.path)).stdout
    if width == 1:
        again = sorted(set(files) - there)[0]
        files[again] = content(BLOCK, "again")
        write_file(pool.mount / again, files[again])
        # A second mount without it, after a crash, must not lose what the first left hidden.
        pool.kill()
        pool.remount()
        assert look(pool, files) == there | {again}
    sick.appear()
    wait_state(pool, "online")
    assert look(pool, files) == set(files)
    # Its label knows now what it missed.
    pool.umount()
    pool.start()
    assert state(pool) == "online" and look(pool, files) == set(files)


def test_a_device_that_is_pulled_out_under_load_is_taken_in_by_a_new_descriptor(faulty: Callable[..., Faulty]) -> None:
    pool, sick = faulty(2)
    files = fill(pool)
    held = {name: os.open(pool.mount / name, os.O_RDONLY | os.O_DIRECT) for name in list(files)[::10]}
    try:
        sick.vanish()
        provoke(pool, files)
        wait_state(pool, "failed")
        there = look(pool, files)
        for name, descriptor in held.items():
            if name in there:
                assert_same(os.pread(descriptor, BLOCK, 0), files[name], f"{name}, held open")
            else:
                with raises_errno(errno.EIO):
                    os.pread(descriptor, BLOCK, 0)
        sick.appear()
        wait_state(pool, "online")
        assert look(pool, files) == set(files)
    finally:
        for descriptor in held.values():
            os.close(descriptor)
    assert look(pool, files) == set(files)


def test_a_native_client_misses_what_is_lost_and_connects_again_when_it_is_back(faulty: Callable[..., Faulty]) -> None:
    pool, sick = faulty(1)
    blocks = {f"block {index}".encode(): content(BLOCK, index) for index in range(COUNT)}
    with kvfs.connect(pool.mount, namespace="native") as client:
        client.put(blocks.items())
        sick.vanish()
        for key in blocks:
            client.get(key)
        assert None in [client.get(key) for key in blocks]
        # Clients tell the daemon nothing of it: it finds out by itself.
        wait_state(pool, "failed")
        found = {key: client.get(key) for key in blocks}
        there = {key for key, data in found.items() if data is not None}
        assert 0.65 < len(there) / len(blocks) < 0.85
        assert all(found[key] == blocks[key] for key in there)
        more = {f"more {index}".encode(): content(BLOCK, ("more", index)) for index in range(20)}
        client.put(more.items())
        sick.appear()
        wait_state(pool, "online")
        before = client.statistics().reconnects
        wait_until(lambda: all(client.get(key) == data for key, data in (blocks | more).items()), "all blocks")
        assert client.statistics().reconnects == before + 1
        again = {f"again {index}".encode(): content(BLOCK, ("again", index)) for index in range(200)}
        client.put(again.items())
        assert all(client.get(key) == data for key, data in again.items())


@pytest.mark.slow
def test_subscribers_are_told_what_a_device_takes_along_and_brings_back(faulty: Callable[..., Faulty]) -> None:
    pool, sick = faulty(2)
    heard: set[str] = set()
    reasons: set[Reason] = set()
    with kvfs.events(pool.mount, keys=False) as events:

        def follow() -> set[str]:
            while (event := events.next_event(0.1)) is not None:
                if isinstance(event, Stored):
                    heard.add(event.path.decode())
                elif isinstance(event, Removed):
                    heard.remove(event.path.decode())
                else:  # devices have changed, so the daemon hung up
                    assert event == Reset(b"", Reason.DAEMON)
                    heard.clear()
                    heard.update(os.listdir(pool.mount))
                    continue
                reasons.add(event.reason)
            return heard

        files = fill(pool)
        wait_until(lambda: follow() == set(files), "events of all files")
        assert reasons == {Reason.WRITTEN}
        with contextlib.ExitStack() as stack:
            for name in files:  # a file that is open then is away as any other
                stack.enter_context((pool.mount / name).open("rb"))
            sick("fail now")
            provoke(pool, files)
            wait_state(pool, "failed")
            wait_until(
                lambda: len(follow()) < len(files) and heard == set(os.listdir(pool.mount)), "events of what is lost"
            )
        assert reasons == {Reason.WRITTEN, Reason.AWAY}
        sick("go")
        wait_state(pool, "online")
        wait_until(lambda: follow() == set(files), "events of what is back")
        assert Reason.FOUND in reasons


def test_another_device_in_its_place_is_not_taken_in_until_it_is_told_to(
    faulty: Callable[..., Faulty], tmp_path: pathlib.Path
) -> None:
    pool, sick = faulty(1)
    files = fill(pool)
    sick.vanish()
    provoke(pool, files)
    wait_state(pool, "failed")
    there = look(pool, files)
    sick.target.unlink()
    helpers.run("truncate", "--size", "40M", sick.target)
    sick.appear()
    time.sleep(3)
    assert state(pool) == "failed" and look(pool, files) == there
    new = tmp_path / "new"
    helpers.run("truncate", "--size", "39M", new)
    assert "needs" in pool.command("device", "replace", str(pool.path), str(SICK), str(new), check=False).stderr
    helpers.run("truncate", "--size", "48M", new)
    said = pool.command("device", "replace", str(pool.path), str(sick.device), str(new)).stdout
    assert re.search(rf"\b{len(files) - len(there)} blocks? went", said), said
    assert state(pool) == "online" and status(pool)["devices"][SICK]["path"] == str(new)
    before = status(pool)["devices"][SICK]["write_bytes"]
    more: dict[str, bytes] = {}
    while status(pool)["devices"][SICK]["write_bytes"] - before <= 5 * BLOCK:
        # Segments are taken in turn, and those of the new device may be the last that were free.
        assert len(more) < 600, f"nothing is written to the new device: {status(pool)['segments']}"
        for index in range(len(more), len(more) + 40):
            name = f"more-{index}"
            more[name] = content(BLOCK, ("more", index))
            write_file(pool.mount / name, more[name])
    left = {name: files[name] for name in there} | more
    assert look(pool, left) == set(left)
    pool.umount()
    assert "nothing is damaged" in pool.command("fsck", str(pool.path), "--verify-data").stdout
    pool.start()
    assert look(pool, left) == set(left)


@pytest.mark.parametrize("mounted", [True, helpers.slow(False)])
def test_a_device_is_removed_drained_and_devices_are_added(
    faulty: Callable[..., Faulty], tmp_path: pathlib.Path, mounted: bool
) -> None:
    pool, sick = faulty(1)
    files = fill(pool)
    for name in list(files)[::3]:
        os.setxattr(pool.mount / name, PIN, b"1")
    if not mounted:
        pool.umount()
    pool.command("device", "remove", str(pool.path), str(SICK), "--drain")
    assert state(pool) == "removed"
    if not mounted:
        pool.start()
    there = look(pool, files)
    assert there >= set(list(files)[::3]), "pinned blocks are gone"
    assert 0.65 < len(there) / len(files) < 1
    files = {name: files[name] for name in there}
    sick.vanish()
    write_file(pool.mount / "after", content(BLOCK, "after"))
    files["after"] = content(BLOCK, "after")
    new = tmp_path / "new"
    helpers.run("truncate", "--size", "20M", new)
    refused = pool.command("device", "add", str(pool.path), str(new), check=False)
    assert refused.returncode == 1 and f"kvfs umount {pool.path} ends it" in refused.stderr, refused.stderr
    pool.umount()
    said = pool.command("device", "add", str(pool.path), str(new)).stdout
    assert "1 device added, 18 segments more" in said, said
    assert "nothing is damaged" in pool.command("fsck", str(pool.path), "--verify-data").stdout
    pool.start()
    assert look(pool, files) == set(files)
    for index in range(400):
        name = f"more-{index}"
        write_file(pool.mount / name, content(BLOCK, name))
    devices = status(pool)["devices"]
    states = ["online" if device["state"] == "slow" else device["state"] for device in devices]  # the disk's pauses
    assert states == ["online", "removed", "online", "online", "online"]
    assert devices[4]["write_bytes"] > 10 * BLOCK
    pool.umount()
    # The labels alone describe it all the same.
    (pool.path / "pool.toml").unlink()
    given = [word for device in devices if device["state"] != "removed" for word in ("--device", device["path"])]
    pool.command("import", str(pool.path), *given)
    pool.start()
    assert {f"more-{index}" for index in range(390, 400)} <= set(os.listdir(pool.mount))


@pytest.mark.parametrize("width", [helpers.slow(1), 2])
def test_a_device_that_comes_and_goes_under_load_costs_misses_and_never_a_wrong_or_an_old_byte(
    faulty: Callable[..., Faulty], width: int
) -> None:
    """KVFS_STORM_S: how long."""
    pool, sick = faulty(width)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    until = time.monotonic() + float(os.environ.get("KVFS_STORM_S") or helpers.often(2, 5))
    wrong: list[BaseException] = []
    passing = (errno.EIO, errno.ENOENT, errno.ENOSPC)

    def work(worker: int) -> None:
        """Names of its own: each is missing, or what was last renamed over it."""
        chooser, latest, version = random.Random(f"{seed} {worker}"), {}, 0
        while time.monotonic() < until and not wrong:
            name = f"{worker}-{chooser.randrange(40)}"
            try:
                what = chooser.randrange(4)
                if what == 0:
                    version += 1
                    size = chooser.choice((3000, 100 * KIB, BLOCK))
                    write_file(pool.mount / f".{name}", content(size, (name, version)))
                    os.rename(pool.mount / f".{name}", pool.mount / name)
                    latest[name] = (size, version)
                elif what == 1 and chooser.randrange(4) == 0:
                    os.unlink(pool.mount / name)  # ENOENT while it is lost: then it may come back
                    latest.pop(name, None)
                else:
                    data = uncached(pool.mount / name)
                    assert name in latest, f"{name} is back"
                    assert_same(data, content(latest[name][0], (name, latest[name][1])), name)
            except OSError as error:
                if error.errno not in passing:
                    wrong.append(error)
            except BaseException as error:
                wrong.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    chooser = random.Random(seed)
    try:
        while time.monotonic() < until and not wrong:
            if chooser.randrange(2):
                sick("fail now")
                time.sleep(chooser.uniform(0.1, 2))
                sick("go")
            else:
                sick.vanish()
                time.sleep(chooser.uniform(0.1, 2))
                sick.appear()
            time.sleep(chooser.uniform(0.1, 3))
    finally:
        for worker in workers:
            worker.join(60)
    assert not any(worker.is_alive() for worker in workers)
    assert not wrong, wrong[0]
    wait_state(pool, "online", timeout_s=60)
    pool.umount()
    assert "nothing is damaged" in pool.command("fsck", str(pool.path), "--verify-data").stdout


def test_what_would_leave_no_segments_is_refused(faulty: Callable[..., Faulty]) -> None:
    pool, _ = faulty(4, started=False)
    refused = pool.command("device", "remove", str(pool.path), "0", check=False)
    assert refused.returncode == 2 and "without it 0 segments would be left" in refused.stderr, refused.stderr
    unknown = pool.command("device", "remove", str(pool.path), "7", check=False)
    assert unknown.returncode == 2 and "no device of this pool" in unknown.stderr
    pool.start()
    write_file(pool.mount / "a", b"a")
    assert read_file(pool.mount / "a") == b"a"


def test_slow_operations_are_logged_with_their_path(faulty: Callable[..., Faulty]) -> None:
    pool, sick = faulty(4, mount_args=("--allow-other", "--slow-ops", "400"))
    (pool.mount / "sessions").mkdir()
    data = content(8 * BLOCK, "slow")  # a part of it lies on every device
    name = "a\nforged line"
    path = pool.mount / "sessions" / name
    write_file(path, data)
    number = path.stat().st_ino
    log = pool.path / "kvfs.log"
    wanted = rf"slow read of /sessions/a\\nforged line \(inode {number}\): (\d[\d,]*) ms\n"
    with helpers.opened(path, os.O_RDONLY | os.O_DIRECT) as descriptor:
        assert re.search(wanted, log.read_text()) is None
        sick("slow 600")
        assert_same(os.pread(descriptor, 8 * BLOCK, 0), data, name)
        wait_until(lambda: re.search(wanted, log.read_text()) is not None, f"a line like {wanted} in {log}")
        found = re.search(wanted, log.read_text())
        assert found is not None and int(found[1].replace(",", "")) >= 400
        path.unlink()  # an inode without a name is told of by its number
        assert_same(os.pread(descriptor, 8 * BLOCK, 0), data, name)
        wait_until(lambda: f"slow read of inode {number}: " in log.read_text(), "a line without a path")
        sick("go")
    assert status(pool)["counters"]["slow_requests"] >= 2
