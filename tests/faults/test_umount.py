"""An unmount while somebody keeps the mount: another mount namespace, a bind mount, or a daemon that stands still."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Iterator

import pytest
from helpers import (
    Pool,
    assert_same,
    content,
    detach,
    mount_device,
    process_alive,
    read_file,
    requests_waiting,
    run,
    wait_until,
)

DATA = content(5 << 20)
# A process elsewhere: it opens a file for writing, says so, and keeps it.
KEEPER = 'exec 8>"$0/held"; cat >&8; echo here; exec sleep 600'


@pytest.fixture
def pool(own_pool) -> Pool:
    return own_pool(files=2, size="128M")


@contextlib.contextmanager
def elsewhere(pool: Pool) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a mount namespace of its own, where it has a file of the mount open."""
    command = ["unshare", "-m", "--propagation", "private", "bash", "-c", KEEPER, str(pool.mount)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(DATA)
            process.stdin.close()
            assert process.stdout.readline() == b"here\n"
            yield process
        finally:
            process.kill()


def who(process: subprocess.Popen[bytes], pool: Pool) -> str:
    return f"pid {process.pid} (sleep) in another mount namespace, at {pool.mount}"


def told(text: str, *ours: int) -> str:
    """The text without holders that are none of ours: another lane's process may have a copy of all mounts."""
    pids = "|".join(map(str, ours))
    stranger = rf"pid (?!(?:{pids}) \()\d+ \([^)]*\) in another mount namespace, at [^\s:;,]+"
    return re.sub(rf", {stranger}|{stranger}, ", "", text)


def test_holders_that_are_none_of_ours_are_left_out() -> None:
    one, two, ours = (f"pid {pid} (python) in another mount namespace, at /tmp/p/mount" for pid in (12, 345, 34))
    for holders in (ours, f"{one}, {ours}", f"{ours}, {two}", f"{one}, {two}, {ours}", f"{one}, {ours}, {two}"):
        assert told(f"kept by {holders}: it ends\n", 34) == f"kept by {ours}: it ends\n"


def test_an_unmount_names_the_namespace_that_keeps_the_mount(pool: Pool) -> None:
    with elsewhere(pool) as keeper:
        result = pool.command("umount", str(pool.mount), timeout_s=60)
        ends = f"kvfs umount {pool.path} ends that"
        said = f"kvfs: {pool.mount}: unmounted; the pool is still mounted: {who(keeper, pool)}: {ends}\n"
        assert told(result.stderr, keeper.pid) == said
        assert mount_device(pool.mount) is None
        status = pool.status()
        assert status["pool"]["state"] == "mounted elsewhere"
        assert told(status["advice"][0], keeper.pid) == (
            f"unmounted here, and kept by {who(keeper, pool)}: kvfs umount {pool.path} ends it all the same"
        )
        # The advice of each verb leads on.
        refused = pool.command("mount", str(pool.path), str(pool.mount), check=False)
        assert refused.returncode == 1 and f"kvfs umount {pool.path} ends it" in refused.stderr
        pid = pool.pid()
        result = pool.command("umount", str(pool.path), timeout_s=60)
        assert who(keeper, pool) in result.stderr
        assert not process_alive(pid)
        inside = ["nsenter", "-m", "-t", str(keeper.pid), "stat", "-f", str(pool.mount)]
        assert "not connected" in run(*inside, check=False).stderr
        pool.start()
        assert_same(read_file(pool.mount / "held"), DATA, "a file that was open where the mount was kept")


@pytest.mark.slow
def test_the_pool_is_unmounted_at_once_wherever_it_is_mounted(pool: Pool) -> None:
    with elsewhere(pool) as keeper:
        pid = pool.pid()
        result = pool.command("umount", str(pool.path), "-o", "json", timeout_s=60)
        assert json.loads(result.stdout)["clean"] is True
        assert f"also mounted: {who(keeper, pool)}" in told(result.stderr, keeper.pid)
        assert not process_alive(pid)


@pytest.mark.slow
def test_a_signal_ends_the_daemon_wherever_it_is_mounted(pool: Pool, tmp_path: pathlib.Path) -> None:
    with elsewhere(pool) as keeper:
        pid = pool.pid()
        bound = tmp_path / "bound"
        bound.mkdir()
        run("mount", "--bind", pool.mount, bound)
        try:
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda: not process_alive(pid), "the end of the daemon")
            assert mount_device(bound) is None and mount_device(pool.mount) is None
        finally:
            detach(bound)
        assert f"the mount is kept by {who(keeper, pool)}; it ends with the daemon" in told(pool.log_tail(), keeper.pid)


def test_a_bind_mount_keeps_the_mount_and_goes_with_the_pool(pool: Pool, tmp_path: pathlib.Path) -> None:
    bound = tmp_path / "bound"
    bound.mkdir()
    run("mount", "--bind", pool.mount, bound)
    try:
        pid = pool.pid()
        result = pool.command("umount", str(pool.mount), "-o", "json", timeout_s=60)
        here = [holder for holder in json.loads(result.stdout)["held_by"] if holder["pid"] is None]
        assert here == [{"mountpoint": str(bound), "pid": None, "program": ""}]
        assert f"still mounted: {bound}: kvfs umount {pool.path} ends that" in told(result.stderr)
        (bound / "file").write_bytes(b"served on")
        pool.command("umount", str(pool.path), timeout_s=60)
        assert not process_alive(pid) and mount_device(bound) is None
    finally:
        detach(bound)


@pytest.mark.slow
def test_a_lazy_unmount_with_a_file_open_can_be_ended(pool: Pool) -> None:
    pid = pool.pid()
    with (pool.mount / "open").open("wb") as file:
        file.write(b"written")
        file.flush()
        result = pool.command("umount", str(pool.mount), "--lazy", "-o", "json", timeout_s=60)
        assert json.loads(result.stdout)["clean"] is False
        assert f"the daemon (pid {pid}) goes on until files that are open are closed" in result.stderr
        # A stranger that has a copy of the mount is named instead, as long as it has it.
        wait_until(lambda: "kept by files that are open in it" in pool.status()["advice"][0], "the advice")
        pool.command("umount", str(pool.path), timeout_s=60)
        assert not process_alive(pid)
        with contextlib.suppress(OSError):
            file.close()
    pool.start()
    assert read_file(pool.mount / "open") == b"written"


def mounted_at_the_number_of(pool: Pool, other: Pool) -> int:
    """Mount `other` at the number that `pool`'s filesystem had, whose daemon goes on for a guest.

    The kernel gives a mount the lowest number that is free. Another mount of this machine may take the number
    between the two, and keep it: then both begin anew.
    """
    for _ in range(20):
        pid = pool.pid()
        pool.command("umount", str(pool.path), timeout_s=60)
        wait_until(lambda pid=pid: not process_alive(pid), "the end of the daemon")
        pool.start("--virtiofs", f"{pool.base / 'guest.sock'},tag=kv,queues=2")
        number = mount_device(pool.mount)
        assert number is not None
        pool.command("umount", str(pool.mount), timeout_s=60)
        other.start()
        if mount_device(other.mount) == number:
            return number
        other.umount()
    raise AssertionError(f"{other.path} was mounted 20 times, and never at the number that {pool.path} had")


@pytest.mark.parametrize("end", ["umount", "signal"])
def test_the_mount_of_another_pool_that_has_the_number_since_stays(pool: Pool, own_pool, end: str) -> None:
    other: Pool = own_pool(files=2, size="128M", started=False)
    number, pid = mounted_at_the_number_of(pool, other), pool.pid()
    if end == "umount":
        assert "also mounted" not in pool.command("umount", str(pool.path), timeout_s=60).stderr
    else:
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not process_alive(pid), "the end of the daemon")
    assert mount_device(other.mount) == number
    (other.mount / "file").write_bytes(b"served on")


def test_a_pool_that_nobody_serves_is_not_mounted(pool: Pool) -> None:
    pool.umount()
    result = pool.command("umount", str(pool.path), check=False)
    assert (result.returncode, result.stderr) == (1, f"kvfs: {pool.path}: not mounted\n")


@contextlib.contextmanager
def standing_still(pool: Pool) -> Iterator[str]:
    """The words for the pool's daemon, which is stopped. At the end it goes on, and is unmounted if it is not yet."""
    pid = pool.pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield f"the daemon (pid {pid}) is stopped, by SIGSTOP or a debugger: kill -CONT {pid}"
    finally:
        os.kill(pid, signal.SIGCONT)
    if mount_device(pool.mount) is not None:
        pool.command("umount", str(pool.mount), timeout_s=60)
    wait_until(lambda: not process_alive(pid), "the end of the daemon")


def test_an_unmount_says_that_the_daemon_is_stopped(pool: Pool) -> None:
    """Some other program of this machine may look at all mounts just then: then it says busy, and the same."""
    with standing_still(pool) as words:
        result = pool.command("umount", str(pool.mount), timeout_s=60, check=False)
        assert result.returncode == 1 and words in result.stderr


def test_a_lazy_unmount_is_not_clean_while_the_daemon_has_not_ended(pool: Pool) -> None:
    pid = pool.pid()
    with standing_still(pool):
        result = pool.command("umount", str(pool.mount), "--lazy", "-o", "json", timeout_s=60)
        assert json.loads(result.stdout)["clean"] is False and mount_device(pool.mount) is None
        assert f"the daemon (pid {pid}) goes on until files that are open are closed" in result.stderr


def test_a_lazy_unmount_names_the_namespace_that_keeps_the_mount_and_the_daemon_that_goes_on(pool: Pool) -> None:
    pid = pool.pid()
    with elsewhere(pool) as keeper:
        result = pool.command("umount", str(pool.mount), "--lazy", "-o", "json", timeout_s=60)
        document = json.loads(result.stdout)
        assert document["clean"] is False and keeper.pid in [holder["pid"] for holder in document["held_by"]]
        kept, goes_on = told(result.stderr, keeper.pid).splitlines()
        assert f"still mounted: {who(keeper, pool)}: kvfs umount {pool.path} ends that" in kept
        assert f"the daemon (pid {pid}) goes on until files that are open are closed" in goes_on
    wait_until(lambda: not process_alive(pid), "the end of the daemon")


def test_an_unmount_says_that_a_stopped_daemon_is_waited_for(pool: Pool) -> None:
    with standing_still(pool) as words:
        with subprocess.Popen(["stat", "-f", pool.mount], stdout=subprocess.DEVNULL) as waiting:
            try:
                wait_until(lambda: requests_waiting(pool.mount), "its request")
                result = pool.command("umount", str(pool.mount), timeout_s=60, check=False)
                assert result.returncode == 1 and mount_device(pool.mount) is not None
                kept = "busy: an open file keeps it, or somebody who waits for an answer"
                assert f"{pool.mount}: {kept}; {words}" in result.stderr
            finally:
                os.kill(pool.pid(), signal.SIGCONT)  # else `stat` waits for ever
            assert waiting.wait(60) == 0
