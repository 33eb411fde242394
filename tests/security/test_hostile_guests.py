"""Guests and front ends that mean harm: their own requests suffer, nobody else's, and the log stays readable."""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import signal
import struct
from collections.abc import Iterator

import front_end
import helpers
import pytest
from front_end import Guest
from helpers import MIB, Pool, content, mount_device, process_alive, read_file, wait_until, write_file
from silent_fuse import SilentFuse

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("only_root")]


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


@pytest.fixture
def silent(tmp_path: pathlib.Path) -> Iterator[SilentFuse]:
    helpers.requires_fuse()
    with SilentFuse(tmp_path, 4 * MIB) as filesystem:
        yield filesystem


@pytest.mark.parametrize("end", ["umount", "kill"])
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
