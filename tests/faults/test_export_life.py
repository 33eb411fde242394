"""The life of an exported pool: sockets, every kind of end, a mount beside. Guests: tests/guests."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import helpers
import pytest
from helpers import MIB, Pool, content, process_alive, read_file, relayed, run, wait_until, write_file

GET_FEATURES = 1
VIRTIO_F_VERSION_1 = 1 << 32


class FrontEnd:
    """A double of a hypervisor's end of the socket: connects and asks one question of vhost-user."""

    def __init__(self, path: pathlib.Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        # Its file is there a moment before it listens.
        wait_until(lambda: self.socket.connect_ex(str(path)) == 0, f"a listener at {path}", timeout_s=10)

    def features(self) -> int:
        """GET_FEATURES: header of request, flags (version 1), size; the answer has the reply flag and 64 bits."""
        self.socket.sendall(struct.pack("<III", GET_FEATURES, 1, 0))
        answer = self.socket.recv(20, socket.MSG_WAITALL)
        request, flags, size, value = struct.unpack("<IIIQ", answer)
        assert (request, flags, size) == (GET_FEATURES, 5, 8)
        return value

    def __enter__(self) -> FrontEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


@pytest.fixture
def pool(own_pool) -> Iterator[Pool]:
    """A pool that is not mounted yet."""
    yield own_pool(files=2, size="128M", started=False)


def export(pool: Pool, *words: str) -> pathlib.Path:
    path = pool.base / "guest.sock"
    pool.command("export", str(pool.path), "--virtiofs", f"{path},tag=kv,queues=2", *words)
    return path


def exports(pool: Pool) -> list[dict[str, object]]:
    return pool.status()["exports"]


def assert_ended(pool: Pool, pid: int, path: pathlib.Path) -> None:
    wait_until(lambda: not process_alive(pid), f"the end of daemon {pid}")
    assert not path.exists() and not (pool.path / "kvfs.pid").exists()
    assert "nothing is damaged" in pool.command("fsck", str(pool.path)).stdout
    assert pool.status()["pool"]["state"] == "not mounted"


def test_an_export_serves_one_front_end_after_another_until_the_pool_is_unmounted(pool):
    path = export(pool)
    pid = pool.pid()
    assert pool.status()["pool"]["state"] == "exported" and pool.status()["mounts"] == []
    assert helpers.mount_device(pool.mount) is None
    for connection in (1, 2):
        with FrontEnd(path) as front_end:
            assert front_end.features() & VIRTIO_F_VERSION_1
            (state,) = exports(pool)
            assert (state["socket"], state["tag"], state["queues"]) == (str(path), "kv", 2)
            assert (state["connected"], state["connections"]) == (1, connection)
        wait_until(lambda: exports(pool)[0]["connected"] == 0, "the front end's hanging up is noticed")
    assert "export: " in pool.command("status", str(pool.path)).stdout
    assert f'kvfs_virtiofs_connections_total{{pool="{pool.path}",socket="{path}",tag="kv"}} 2.0' in (
        pool.command("stats", str(pool.path), "--prometheus").stdout
    )
    pool.command("umount", str(pool.path))
    assert_ended(pool, pid, path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_also_with_a_front_end(pool, number):
    path = export(pool)
    pid = pool.pid()
    with FrontEnd(path) as front_end:
        front_end.features()
        os.kill(pid, number)
        assert front_end.socket.recv(1) == b""
        assert_ended(pool, pid, path)


def test_a_killed_daemon_s_socket_is_replaced_and_a_living_one_s_is_not(pool, own_pool):
    path = export(pool)
    pool.kill()
    assert path.exists()
    export(pool)
    with FrontEnd(path) as front_end:
        front_end.features()
    other = own_pool(files=2, size="128M", started=False)
    result = other.command("export", str(other.path), "--virtiofs", str(path), check=False)
    assert result.returncode == 1 and result.stderr == f"kvfs: {path}: in use: somebody listens there\n"
    result = pool.command("export", str(pool.path), "--virtiofs", str(other.base / "x.sock"), check=False)
    assert result.returncode == 1 and "in use by another kvfs" in result.stderr
    assert not (other.base / "x.sock").exists()
    with FrontEnd(path) as front_end:
        front_end.features()
    pool.command("umount", str(pool.path))


@pytest.mark.parametrize("command", ["kvfs", "umount"])
def test_an_unmount_leaves_exports_served(pool, command):
    path = pool.base / "guest.sock"
    pool.start("--virtiofs", str(path))
    pid = pool.pid()
    data = content(MIB, 1)
    write_file(pool.mount / "file", data)
    assert pool.status()["pool"]["state"] == "mounted"
    with FrontEnd(path) as front_end:
        front_end.features()
        if command == "kvfs":
            result = pool.command("umount", str(pool.mount))
            assert "still exported" in result.stderr and str(path) in result.stderr
        else:
            run("umount", pool.mount)
        assert helpers.mount_device(pool.mount) is None
        assert pool.status()["pool"]["state"] == "exported" and pool.status()["mounts"] == []
        assert exports(pool)[0]["connected"] == 1
        front_end.features()
    pool.command("umount", str(pool.path))
    assert_ended(pool, pid, path)
    pool.start()
    assert read_file(pool.mount / "file") == data


def test_a_pool_is_unmounted_with_its_exports(pool):
    path = pool.base / "guest.sock"
    pool.start("--virtiofs", str(path))
    pid = pool.pid()
    with open(pool.mount / "file", "wb") as file:
        file.write(b"half")
        result = pool.command("umount", str(pool.path), check=False)
        assert result.returncode == 1 and "busy" in result.stderr
        assert pool.status()["mounts"] and exports(pool)
    pool.command("umount", str(pool.path))
    assert helpers.mount_device(pool.mount) is None
    assert_ended(pool, pid, path)


def test_a_start_that_fails_leaves_no_mount_and_no_socket(pool):
    good, bad = pool.base / "good.sock", pool.base / "bad.sock"
    bad.write_bytes(b"")
    for verb in (["mount", str(pool.path), str(pool.mount)], ["export", str(pool.path)]):
        for extra in ([], ["--foreground"]):
            result = pool.command(*verb, "--virtiofs", str(good), "--virtiofs", str(bad), *extra, check=False)
            assert result.returncode == 1 and f"{bad}: exists and is no socket" in result.stderr
            assert helpers.mount_device(pool.mount) is None and not good.exists()
    result = pool.command(
        "mount", str(pool.path), str(pool.mount), "--options", "frobnicate", "--virtiofs", str(good), check=False
    )
    assert result.returncode == 2 and "frobnicate" in result.stderr
    assert not good.exists() and helpers.mount_device(pool.mount) is None
    pool.start("--virtiofs", str(good))
    pool.command("umount", str(pool.path))


def test_a_front_end_behind_a_relay_outlives_the_daemon(pool):
    export(pool)
    with relayed(pool) as kept, FrontEnd(kept) as front:
        assert front.features() & VIRTIO_F_VERSION_1
        for end in (pool.kill, lambda: pool.command("umount", str(pool.path))):
            end()
            export(pool)
            wait_until(lambda: exports(pool)[0]["connected"] == 1, "the relay connects again")
            assert front.features() & VIRTIO_F_VERSION_1
    pool.command("umount", str(pool.path))


def test_an_export_needs_no_fuse_device(pool):
    """As on a machine without the module; and systemd is told when it is ready."""
    path, manager_path = pool.base / "guest.sock", pool.base / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, contextlib.ExitStack() as stack:
        manager.bind(str(manager_path))
        manager.settimeout(30)
        script = 'mount --bind /dev/null /dev/fuse && exec "$@"'
        words = [sys.executable, "-m", "kvfs", "export", str(pool.path), "--foreground", "--virtiofs", str(path)]
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script, "sh", *words],
            cwd=helpers.REPOSITORY,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **pool.environment, "NOTIFY_SOCKET": str(manager_path)},
        )
        stack.callback(process.kill)
        assert manager.recv(100) == b"READY=1"
        with FrontEnd(path) as front_end:
            assert front_end.features() & VIRTIO_F_VERSION_1
        # The moment it says so it must be able to end well.
        process.terminate()
        assert manager.recv(100) == b"STOPPING=1"
        assert process.wait(30) == 0
    assert_ended(pool, process.pid, path)
