"""A mount outlives its daemons: the next one takes it over, and programs notice no more than a pause.

Files that are open for writing are another process's here. This one starts daemons, and each program that it starts
closes them once more: a FLUSH, which no daemon would answer.
"""

from __future__ import annotations

import errno
import mmap
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import helpers
import pytest
from helpers import KIB, Pool, content, mount_device, process_alive, wait_until
from workload import Child

from kvfs.units import kernel_version

PAGES = 16


@pytest.fixture(autouse=True)
def _kernel() -> None:
    if kernel_version(os.uname().release) < (6, 9):
        pytest.skip(f"needs Linux 6.9 (FUSE_NOTIFY_RESEND); this is {os.uname().release}")


class HeldPool(Pool):
    """A pool whose mount a `kvfs hold` keeps."""

    holder: subprocess.Popen[bytes]
    hold_args: tuple[str, ...] = ()

    @property
    def socket(self) -> pathlib.Path:
        return self.base / "hold.sock"

    def hold(self, program: tuple[str | pathlib.Path, ...] = ("-m", "kvfs")) -> None:
        with (self.base / "hold.log").open("ab") as log:
            self.holder = subprocess.Popen(
                [sys.executable, *program, "hold", str(self.socket), *self.hold_args],
                cwd=helpers.REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        wait_until(self.socket.exists, "the holder")

    def end(self, number: int) -> int:
        """End the daemon by a signal; the mount stays."""
        pid = self.pid()
        os.kill(pid, number)
        wait_until(lambda: not process_alive(pid), f"the end of daemon {pid}")
        return pid

    def take_over(self, number: int) -> None:
        before = mount_device(self.mount)
        self.end(number)
        assert mount_device(self.mount) == before
        self.start()
        assert mount_device(self.mount) == before

    def die_in_the_middle(self, program: tuple[str | pathlib.Path, ...], delay_s: float) -> None:
        """Start a daemon that takes the mount over, and kill it so long after its claim."""
        words = [sys.executable, *program, "mount", str(self.path), str(self.mount), *self.mount_args, "--foreground"]
        process = subprocess.Popen(
            words,
            cwd=helpers.REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(lambda: f"process {process.pid} has it" in self.held(), "the claim of the next daemon")
        time.sleep(delay_s)  # the moment is the point of the test
        process.kill()
        process.wait()

    def held(self) -> str:
        return (self.base / "hold.log").read_text()

    def _destroy(self) -> None:
        if hasattr(self, "holder"):  # first: a mount that is held and that nobody serves answers nobody
            self.holder.kill()
            self.holder.wait()
        super()._destroy()


@pytest.fixture
def pool() -> Iterator[HeldPool]:
    with HeldPool(files=2, size="512M", started=False) as made:
        made.hold()
        made.mount_args = ("--allow-other", "--hold", str(made.socket))
        made.start()
        yield made


def in_thread(call: Callable[[], object]) -> Callable[[], object]:
    """Begin a call that waits; the function returned waits for its result, and raises its error."""
    found: list[object] = []

    def body() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()

    def result() -> object:
        thread.join(60 * helpers.slowness())
        assert found, "no answer"
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    return result


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_readers_read_on_and_requests_wait(pool: HeldPool, number: int) -> None:
    data = content(300 * KIB, 1)
    (pool.mount / "a").write_bytes(data)
    with (pool.mount / "a").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert file.read(4096) == data[:4096]
        for turn in range(3):
            pool.end(number)
            waits = [
                in_thread(lambda: (pool.mount / "a").read_bytes()),
                in_thread(lambda turn=turn: (pool.mount / f"new{turn}").write_bytes(data)),
                in_thread(lambda turn=turn: (pool.mount / f"dir{turn}").mkdir()),
                in_thread(lambda: sorted(os.listdir(pool.mount))),
            ]
            wait_until(lambda: (helpers.requests_waiting(pool.mount) or 9) >= 2, "requests that wait")
            pool.start()
            assert waits[0]() == data
            assert waits[1]() == len(data)
            assert waits[2]() is None
            assert "a" in waits[3]()  # type: ignore[operator]
            assert (pool.mount / f"new{turn}").read_bytes() == data
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert os.pread(file.fileno(), len(data), 0) == data
            mapped.madvise(mmap.MADV_DONTNEED)
            assert mapped[:] == data
    status = pool.status()
    assert status["pool"]["state"] == "mounted"
    holder = status["holder"]
    assert (holder["path"], holder["pid"], holder["alive"]) == (str(pool.socket), pool.holder.pid, True)
    assert holder["takeovers"] == 3
    assert 0 <= holder["journal"]["used"] < holder["journal"]["size"] and holder["journal"]["lost"] == 0


def meanwhile(
    base: pathlib.Path, before: Callable[[], object], after: Callable[[object], object]
) -> Callable[[], object]:
    """Run before() in a process of its own; the function returned then has it run after() with that, and returns the
    result."""
    ready, go = base / "ready", base / "go"
    for step in (ready, go):
        step.unlink(missing_ok=True)

    def body() -> object:
        found = before()
        ready.touch()
        wait_until(go.exists, "the step after the take-over")
        return after(found)

    child = Child(body)
    wait_until(ready.exists, "the step before the take-over")

    def go_on() -> object:
        go.touch()
        return child.result()

    return go_on


def errno_of(call: Callable[[], object]) -> int:
    try:
        call()
    except OSError as error:
        return error.errno or -1
    return 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_file_that_was_not_sealed_is_ebadf(pool: HeldPool, number: int) -> None:
    def begin() -> int:
        fd = os.open(pool.mount / "open", os.O_RDWR | os.O_CREAT)
        os.write(fd, b"x" * 100)
        return fd

    def end(fd: object) -> list[int]:
        assert isinstance(fd, int)
        return [errno_of(call) for call in (lambda: os.write(fd, b"y"), lambda: os.fsync(fd), lambda: os.close(fd))]

    go_on = meanwhile(pool.base, begin, end)
    pool.take_over(number)
    assert go_on() == [errno.EBADF] * 3
    if number == signal.SIGTERM:  # sealed with what it had
        assert (pool.mount / "open").read_bytes() == b"x" * 100
    else:
        assert not (pool.mount / "open").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_file_that_is_sealed_reads_on_though_its_writer_has_not_gone(pool: HeldPool, number: int) -> None:
    """A close(2) seals it, and the RELEASE comes later. Here another descriptor of the same open keeps that away."""
    data = b"d" * 4096 * PAGES
    path = pool.mount / "sealed"

    def begin() -> tuple[int, int]:
        writer = os.open(path, os.O_WRONLY | os.O_CREAT)
        early = os.open(path, os.O_RDONLY)
        os.write(writer, data)
        os.close(os.dup(writer))  # FLUSH alone
        return writer, early

    def end(found: object) -> tuple[int, bytes, bytes]:
        writer, early = found  # type: ignore[misc]
        failed = errno_of(lambda: os.pwrite(writer, b"x" * 5000, 0))
        os.posix_fadvise(early, 0, 0, os.POSIX_FADV_DONTNEED)
        return failed, os.pread(early, len(data), 0), path.read_bytes()

    go_on = meanwhile(pool.base, begin, end)
    pool.take_over(number)
    assert go_on() == (errno.EBADF, data, data)


def test_pages_that_were_never_sealed_are_served_to_nobody(pool: HeldPool) -> None:
    """A block is being rewritten as the daemon is killed. The kernel has pages of the new content, and the next daemon
    serves the old."""
    old, new = b"o" * 4096 * PAGES, b"n" * 4096 * PAGES
    path = pool.mount / "block"
    path.write_bytes(old)

    def begin() -> tuple[int, int, mmap.mmap]:
        early = os.open(path, os.O_RDONLY)
        assert os.pread(early, 4096, 0) == old[:4096]
        writer = os.open(path, os.O_RDWR)
        assert os.pwrite(writer, new, 0) == len(new)
        mapped = mmap.mmap(writer, 0)
        mapped[:8] = b"UNSEALED"
        return early, writer, mapped

    def end(found: object) -> tuple[bytes, bytes, bytes, int]:
        early, _, _ = found  # type: ignore[misc]
        seen = b""
        with suppress(OSError):
            for at in range(0, len(old), 4096):
                seen += os.pread(early, 4096, at)
        read = path.read_bytes()
        with path.open("rb") as late, mmap.mmap(late.fileno(), 0, prot=mmap.PROT_READ) as later:
            mapped = later[:]
        os.posix_fadvise(early, 0, 0, os.POSIX_FADV_DONTNEED)
        return seen, read, mapped, errno_of(lambda: os.pread(early, 4096, 8192))

    go_on = meanwhile(pool.base, begin, end)
    pool.take_over(signal.SIGKILL)
    seen, read, mapped, error = go_on()  # type: ignore[misc]
    assert b"o" not in seen  # an error, or the content of before: none of each
    assert read == old
    assert mapped == old
    assert error == errno.EBADF
    # The daemon after that knows it as well.
    pool.take_over(signal.SIGKILL)
    assert path.read_bytes() == old


def test_renames_and_unlinks_of_the_last_moment_stay(pool: HeldPool) -> None:
    """Without the journal that the holder keeps, a kill undoes those that no commit has."""
    for number in range(60):
        (pool.mount / f"a{number}").write_bytes(content(5000, number))
    os.sync()
    for number in range(40):
        (pool.mount / f"a{number}").rename(pool.mount / f"b{number}")
    for number in range(40, 50):
        (pool.mount / f"a{number}").unlink()
    (pool.mount / "directory").mkdir()
    pool.take_over(signal.SIGKILL)
    expected = {f"b{number}" for number in range(40)} | {f"a{number}" for number in range(50, 60)} | {"directory"}
    assert set(os.listdir(pool.mount)) == expected
    for number in range(40):
        assert (pool.mount / f"b{number}").read_bytes() == content(5000, number)


def test_a_mount_may_be_idmapped_as_it_was_made_whatever_the_next_daemon_asks_for() -> None:
    helpers.requires_idmap()
    with HeldPool(files=2, size="64M", started=False) as pool:
        pool.hold()
        pool.mount_args = (*helpers.IDMAP, "--hold", str(pool.socket))
        pool.start()
        file = pool.mount / "theirs"
        file.write_bytes(bytes(100_000))
        os.chown(file, 7, 7)
        for words, said in ((helpers.USERS, "was made with --idmap, and keeps it"), (helpers.IDMAP, "")):
            pool.mount_args = (*words, "--hold", str(pool.socket))
            pool.take_over(signal.SIGKILL)
            assert pool.status()["mounts"][0]["idmap"] is True
            assert said in pool.log_tail()
            with file.open("rb"):
                assert [user["user"] for user in pool.status()["users"] if user["open"]] == [7]


def test_a_mount_that_was_made_without_it_goes_on_without_idmap(pool: HeldPool) -> None:
    helpers.requires_idmap()
    pool.mount_args = (*pool.mount_args, "--idmap")
    pool.take_over(signal.SIGTERM)
    assert "was made without --idmap, and goes on without it until it is unmounted and made anew" in pool.log_tail()
    assert pool.status()["mounts"][0]["idmap"] is False


def test_a_second_daemon_is_refused(pool: HeldPool) -> None:
    done = pool.command("mount", str(pool.path), str(pool.mount), *pool.mount_args, check=False)
    assert done.returncode == 1
    assert f"process {pool.pid()} serves {pool.mount} of pool {pool.path}: it must end first" in done.stderr
    (pool.mount / "a").write_bytes(b"still served")
    assert (pool.mount / "a").read_bytes() == b"still served"


def test_a_take_over_dies_in_the_middle_of_it(pool: HeldPool) -> None:
    data = content(200 * KIB, 2)
    (pool.mount / "a").write_bytes(data)
    pool.end(signal.SIGKILL)
    read = in_thread((pool.mount / "a").read_bytes)
    for delay_s in (0.0, 0.1, 0.3, 0.5):
        pool.die_in_the_middle(pool.program, delay_s)
    pool.start()
    assert read() == data
    assert (pool.mount / "a").read_bytes() == data


def test_the_holder_ends_with_its_last_mount(pool: HeldPool) -> None:
    pool.umount()
    assert pool.holder.wait(30 * helpers.slowness()) == 0
    assert not pool.socket.exists()


def test_umount_of_a_mount_that_nobody_serves(pool: HeldPool) -> None:
    pool.end(signal.SIGTERM)
    pool.command("umount", str(pool.path))
    assert mount_device(pool.mount) is None
    assert pool.holder.wait(30 * helpers.slowness()) == 0
    pool.hold()
    pool.start()  # anew
    assert os.listdir(pool.mount) == []


def test_a_holder_that_dies_is_told_of_and_the_mount_goes_on(pool: HeldPool) -> None:
    pid = pool.pid()
    pool.holder.kill()
    wait_until(lambda: f"(pid {pool.holder.pid}) has ended" in pool.log_tail(), "a line on the holder's end")
    assert pool.status()["holder"]["alive"] is False
    (pool.mount / "a").write_bytes(b"served")
    assert (pool.mount / "a").read_bytes() == b"served"
    os.kill(pid, signal.SIGTERM)  # nobody keeps the mount: it ends
    wait_until(lambda: not process_alive(pid), "the end of the daemon")
    assert mount_device(pool.mount) is None


def test_a_mount_that_no_daemon_comes_for_ends() -> None:
    with HeldPool(files=2, size="256M", started=False) as pool:
        pool.hold_args = ("--timeout", "1")
        pool.hold()
        pool.mount_args = ("--hold", str(pool.socket))
        pool.start()
        (pool.mount / "a").write_bytes(b"sealed")
        pool.end(signal.SIGKILL)
        with pytest.raises(OSError) as caught:
            in_thread((pool.mount / "a").read_bytes)()
        assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
        assert pool.holder.wait(30 * helpers.slowness()) == 0
        assert "no daemon came for 1 s: the mount ends" in pool.held()


def test_what_a_held_mount_cannot_have_is_refused(pool: HeldPool) -> None:
    pool.umount()
    done = pool.command(
        "mount", str(pool.path), str(pool.mount), *pool.mount_args, "--request-timeout", "90", check=False
    )
    assert done.returncode == 2
    assert "--request-timeout 90: the kernel would end the mount while no daemon serves it" in done.stderr
    nobody = pool.base / "nobody.sock"
    done = pool.command("mount", str(pool.path), str(pool.mount), "--hold", str(nobody), check=False)
    assert done.returncode == 1
    assert f"--hold {nobody}: No such file or directory; kvfs hold {nobody} listens there" in done.stderr
