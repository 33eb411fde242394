"""Guests and front ends that mean harm: their own requests suffer, nobody else's, and the log stays readable."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import pathlib
import random
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator

import front_end
import helpers
import pytest
from front_end import Guest
from helpers import (
    MIB,
    Pool,
    content,
    lingering,
    mount_device,
    opened,
    process_alive,
    read_file,
    wait_until,
    write_file,
)
from message_storm import Storm
from silent_fuse import SilentFuse

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("only_root")]
# KVFS_STORM_S: another length.
STORM_S = float(os.environ.get("KVFS_STORM_S", "10"))


@pytest.fixture
def served(own_pool) -> Iterator[tuple[Pool, pathlib.Path, pathlib.Path]]:
    """A mounted pool that is exported twice as well."""
    pool = own_pool(files=2, size="128M", started=False)
    sockets = [pool.base / name for name in ("a.sock", "b.sock")]
    pool.start("--virtiofs", str(sockets[0]), "--virtiofs", str(sockets[1]))
    yield pool, *sockets
    if mount_device(pool.mount) is not None:
        end_all(pool)  # an umount of the mount alone would leave the exports, and with them the daemon


def assert_others_are_served(pool: Pool, other: pathlib.Path, seed: int) -> None:
    """The host's mount by what C answers and by what Python does, another guest too."""
    data = content(MIB, seed)
    write_file(pool.mount / f"host-{seed}", data)
    assert read_file(pool.mount / f"host-{seed}") == data
    with Guest(other) as guest:
        assert guest.ask(front_end.MKDIR, 1, struct.pack("<II", 0o755, 0) + f"of-{seed}".encode() + b"\0")[0] == 0
        assert (pool.mount / f"of-{seed}").is_dir()


def read_direct(path: pathlib.Path, size: int) -> bytes:
    """From the devices, every time."""
    with opened(path, os.O_RDONLY | os.O_DIRECT) as fd, mmap.mmap(-1, size) as memory:
        assert os.readv(fd, [memory]) == size
        return bytes(memory)


def stop(pid: int) -> None:
    """Returns when every thread has stopped: the signal alone says that they will."""
    os.kill(pid, signal.SIGSTOP)
    threads = pathlib.Path(f"/proc/{pid}/task")
    wait_until(
        lambda: all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in threads.iterdir()),
        f"all threads of {pid} have stopped",
    )


def end_all(pool: Pool, *, wait: bool = True) -> None:
    pid = pool.pid()
    pool.command("umount", str(pool.path))
    if wait:
        wait_until(lambda: not process_alive(pid), f"the end of daemon {pid}")


def readdir(guest: Guest, offset: int, handle: int) -> int:
    return guest.ask(front_end.READDIR, 1, struct.pack("<QQIIQII", handle, offset & (1 << 64) - 1, 4096, 0, 0, 0, 0))[0]


def test_a_guest_cannot_fill_the_log_by_listings_at_unknown_places(served):
    pool, path, _ = served
    log = pool.path / "kvfs.log"
    with Guest(path) as guest:
        error, body = guest.ask(front_end.OPENDIR, 1, bytes(8))
        assert error == 0
        handle = struct.unpack_from("<Q", body)[0]
        before = log.stat().st_size
        for offset in (-1, -2, -(1 << 63), 1 << 63):
            assert readdir(guest, offset, handle) == -errno.EINVAL
        for offset in ((1 << 63) - 1, (1 << 62) + 1, 1 << 32, 99_999):
            assert readdir(guest, offset, handle) in (-errno.ESTALE, -errno.ENOENT, -errno.EINVAL)
        assert readdir(guest, 0, handle) == 0
        assert readdir(guest, 3, handle) in (0, -errno.ESTALE)
        for _ in range(300):
            readdir(guest, -1, handle)
            readdir(guest, (1 << 63) - 1, handle)
        text = log.read_text()[before:]
        assert "Traceback" not in text and len(text) < 2000, text[-2000:]


def test_a_front_end_that_fills_its_eventfds_stops_nobody(served):
    pool, path, other = served
    with Guest(path) as guest:
        deaf = os.eventfd(0, os.EFD_CLOEXEC)
        os.eventfd_write(deaf, (1 << 64) - 2)
        for request in (front_end.SET_VRING_CALL, front_end.SET_VRING_ERR):
            assert guest.event(request, deaf) == 0
        fcntl.fcntl(deaf, fcntl.F_SETFL, 0)
        body = struct.pack("<IIII", os.O_RDWR | os.O_CREAT, 0o100644, 0, 0)
        assert guest.ask(front_end.CREATE, 1, body + b"deaf\0")[0] == 0  # Python's thread answers it
        assert guest.ask(front_end.LOOKUP, 1, b"none\0")[0] == -errno.ENOENT
        assert_others_are_served(pool, other, 1)
        os.close(deaf)
    end_all(pool)


@pytest.mark.parametrize("where", ["of a second front end", "behind a message that ends the connection"])
def test_a_descriptor_that_nobody_took_is_waited_for_by_nobody(served, where):
    """It goes with its connection: there the last descriptor of a TCP socket that lingers would be closed."""
    pool, path, other = served
    with lingering() as gift:
        if where == "of a second front end":
            with Guest(path) as guest:
                with socket.socket(socket.AF_UNIX) as second:
                    stop(pool.pid())
                    second.connect(str(path))
                    front_end.send(second, 99, b"", (gift.fileno(),))
                    gift.close()
                    os.kill(pool.pid(), signal.SIGCONT)
                # The thread that turned it away goes on with this one.
                assert guest.tell(front_end.SET_OWNER) == 0
        else:
            with Guest(path, bare=True) as guest:
                stop(pool.pid())
                for fds in ((), (gift.fileno(),)):
                    front_end.send(guest.socket, 1 << 31, bytes(4096), fds)
                gift.close()
                os.kill(pool.pid(), signal.SIGCONT)
        assert_others_are_served(pool, other, 4)
        with Guest(path) as guest:
            assert guest.ask(front_end.LOOKUP, 1, b"none\0")[0] == -errno.ENOENT
        end_all(pool)


def test_memory_that_takes_every_address_is_refused(served):
    """A file of any size costs nothing who shares it."""
    pool, path, other = served
    with Guest(path, bare=True) as guest:
        vast = os.memfd_create("vast", os.MFD_CLOEXEC)
        os.ftruncate(vast, 1 << 46)
        taken, place = 0, 1 << 30
        for size in (1 << shift for shift in range(46, 29, -1)):
            if guest.region(vast, size, at=place) == 0:
                taken += size
                place += size
        os.close(vast)
        assert 1 << 40 <= taken <= 1 << 45  # half of what two exports have
        assert_others_are_served(pool, other, 5)
        assert pool.status()["exports"][0]["protocol_errors"] > 0
    with Guest(path):
        pass
    end_all(pool)


@pytest.mark.slow
def test_a_storm_of_messages_disturbs_nobody(served):
    pool, path, other = served
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    blocks = {pool.mount / f"block-{i}": content(MIB, i) for i in range(16)}
    for block, data in blocks.items():
        write_file(block, data)
    before = (pool.path / "kvfs.log").stat().st_size
    until, failures, waits = time.monotonic() + STORM_S, [], [0.0]

    def read() -> None:
        while time.monotonic() < until:
            for block, data in blocks.items():
                began = time.monotonic()
                if read_direct(block, MIB) != data:
                    failures.append(block)
                waits.append(time.monotonic() - began)

    storm = Storm(path, seed)
    reader = threading.Thread(target=read)
    reader.start()
    storm.blow(lambda: time.monotonic() < until)
    reader.join()
    print(f"{storm.messages} messages, {storm.connections} connections")
    print(f"{len(waits)} reads, the longest {max(waits):.3f} s")
    assert not failures and storm.messages > 100 * STORM_S
    assert max(waits) < 5 * helpers.slowness()  # a device's deadline is longer
    assert_others_are_served(pool, other, 6)
    with Guest(path) as guest:
        assert guest.ask(front_end.LOOKUP, 1, b"none\0")[0] == -errno.ENOENT
    text = (pool.path / "kvfs.log").read_text()[before:]
    assert "Traceback" not in text and len(text) < 20_000, text[-2000:]
    end_all(pool)
    assert "nothing is damaged" in pool.command("fsck", str(pool.path)).stdout


@pytest.fixture
def silent(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentFuse]:
    helpers.requires_fuse()
    # A child closes the double's file before its exec, and the double answers from this process: not while vfork has
    # the interpreter's lock.
    monkeypatch.setattr(subprocess, "_USE_VFORK", False)
    with SilentFuse(tmp_path, 4 * MIB) as filesystem:
        yield filesystem


@pytest.mark.parametrize("end", [helpers.slow("umount"), "kill"])
def test_a_file_whose_filesystem_does_not_answer_stops_nobody(served, silent, tmp_path, end):
    """Not as memory, not as an eventfd, and not when it is closed: that is a request to its filesystem as well."""
    pool, path, other = served
    file = os.open(tmp_path / "memory", os.O_RDWR | os.O_CLOEXEC)
    pipe = os.pipe()
    silent.silent_to = pool.pid()
    layout = struct.pack("<QQHH4x", 65536, 0, 2, 16)
    with Guest(path, bare=True) as guest:
        assert guest.region(pipe[0], MIB) == 1  # refused, and closed at once
        assert guest.event(front_end.SET_VRING_CALL, pipe[1]) == 1
        assert guest.region(file, 4 * MIB) == 1
    for request, payload in (
        (front_end.SET_INFLIGHT_FD, layout),
        (front_end.SET_VRING_KICK, struct.pack("<Q", 1)),
        (front_end.SET_VRING_CALL, struct.pack("<Q", 1)),
        (99, b""),
    ):
        with Guest(path, bare=True) as guest:
            assert guest.tell(request, payload, (file,)) == 1
    wait_until(lambda: len(silent.unanswered) >= 5, "all five are being closed")
    assert_others_are_served(pool, other, 2)
    with Guest(path) as guest:  # the same export goes on
        assert guest.ask(front_end.LOOKUP, 1, b"none\0")[0] == -errno.ENOENT
    pid = pool.pid()
    if end == "umount":
        end_all(pool, wait=False)
        assert "nothing is damaged" in pool.command("fsck", str(pool.path)).stdout
    else:
        os.kill(pid, signal.SIGKILL)
        helpers.detach(pool.mount)
    pool.start()  # another daemon: the first one has let go of everything, whatever it waits for
    data = content(MIB, 3)
    write_file(pool.mount / "after", data)
    assert read_file(pool.mount / "after") == data
    for fd in (file, *pipe):
        os.close(fd)
