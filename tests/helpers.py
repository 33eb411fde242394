"""Shared by the black-box tests: a pool under test, block devices to put it on, and the fixtures of a mount.

Knows kvfs only by its command line (`python -m kvfs`), its files POOL/kvfs.pid and POOL/kvfs.log, and POSIX.
Every wait has a deadline. Commands have timeouts, conditions are polled until a deadline, and a watchdog process aborts
the FUSE connection of a test that hangs. A signal could not end such a test. A thread waiting for a FUSE reply wakes
only for SIGKILL, and a page fault waits with the interpreter lock held.

A plugin of pytest: tests/conftest.py names it, so every test has these fixtures and hooks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import io
import json
import os
import pathlib
import pickle
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NoReturn, Self

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
URING_PARAMETER = pathlib.Path("/sys/module/fuse/parameters/enable_uring")
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# Long enough for a machine on which thirty others are at work, short enough that a hang is seen the same day.
TEST_TIMEOUT_S = float(os.environ.get("KVFS_TEST_TIMEOUT_S", "900"))
COMMAND_TIMEOUT_S = 180
LOG_TAIL_LINES = 60
# A guest under emulation is this many times slower than its machine. Deadlines are this many times as long, and
# repetitions this many times fewer.
SLOWNESS = int(os.environ.get("KVFS_TEST_SLOWNESS", "1"))


def slowness() -> float:
    """How many times as long as on an idle machine of the usual speed things take at this moment. Deadlines are so many
    times as long: they tell a hang, and a machine with much to do has none. The mean of the last minute is not enough:
    of a load that has just begun it knows little."""
    mean, _, _, now, _ = pathlib.Path("/proc/loadavg").read_text().split()
    return SLOWNESS * max(1.0, max(float(mean), int(now.partition("/")[0])) / len(os.sched_getaffinity(0)))


def often(few: Any, full: Any, long: Any = None) -> Any:
    """How often to do what is the surer the more often it is done: `few` times, with --run-slow `full` times, with
    tools/test --long `long` times."""
    if long is not None and os.environ.get("KVFS_RUN_LONG"):
        return long
    return full if os.environ.get("KVFS_RUN_SLOW") else few


def slow(*values: Any) -> Any:
    """Of a parametrized test: the values of a case that is slow, or that asserts what a quick one does."""
    return pytest.param(*values, marks=pytest.mark.slow)


def repeated(count: int) -> int:
    """How often to do what is done `count` times on a machine of the usual speed."""
    return max(1, count // SLOWNESS)


def give_devices_time() -> None:
    """A block is a miss for a client whose device takes two seconds, unless it says otherwise. A sound device on a busy
    machine may take as long: from here on it is given twenty, also by the programs that a test starts."""
    import kvfs

    os.environ.setdefault("KVFS_TIMEOUT_MS", "20000")
    kvfs.connect.__kwdefaults__["timeout_s"] = 20.0


# --- commands and conditions -----------------------------------------------------------------------------------


class CommandError(AssertionError):
    """A command failed or ran past its timeout; the message holds its output."""


def run(
    *command: str | os.PathLike[str],
    timeout_s: float = COMMAND_TIMEOUT_S,
    check: bool = True,
    environment: dict[str, str] | None = None,
    cwd: pathlib.Path = REPOSITORY,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return it with its output; raise CommandError if it fails or is late.

    Output goes to files, not pipes: a daemon that keeps a pipe open would make its parent look unfinished.
    """
    words = [os.fspath(word) for word in command]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd, env={**os.environ, **(environment or {})}
        )
        late = False
        try:
            _wait_as_long_as_it_takes(process, timeout_s)
        except subprocess.TimeoutExpired:
            late = True
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # one in state D does not die
                process.wait(5)
        out.seek(0)
        err.seek(0)
        stdout, stderr = (stream.read().decode(errors="replace") for stream in (out, err))
    result = subprocess.CompletedProcess(words, process.returncode, stdout, stderr)
    if late or (check and process.returncode != 0):
        how = f"ran past {timeout_s:g} s of an idle machine" if late else f"exited with {process.returncode}"
        raise CommandError(f"{' '.join(words)} {how}\n{stdout[-4000:]}{stderr[-4000:]}")
    return result


def _wait_as_long_as_it_takes(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait for its end; subprocess.TimeoutExpired after timeout_s, or later on a machine with much to do."""
    began = time.monotonic()
    while True:
        left = began + timeout_s * slowness() - time.monotonic()
        try:
            process.wait(max(0, left))
            return
        except subprocess.TimeoutExpired:
            if time.monotonic() - began >= timeout_s * slowness():
                raise


def wait_until(condition: Callable[[], Any], what: str, *, timeout_s: float = 90, interval_s: float = 0.01) -> Any:
    """Poll until condition() is true and return its value; fail after timeout_s, or later on a machine with much to
    do."""
    began = time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        waited_s = time.monotonic() - began
        if waited_s > timeout_s and waited_s > timeout_s * slowness():
            raise AssertionError(f"{what}: not within {waited_s:.0f} s, of an idle machine {timeout_s:g} s")
        time.sleep(interval_s)


# --- a pool under test -----------------------------------------------------------------------------------------


class Pool:
    """A pool of its own in a temporary directory, formatted and mounted: `with Pool() as pool: pool.mount / "a"`.

    files and size make `--files`; devices, if given, are used instead. With a template, the directory of a pool
    that is not mounted, the pool is a copy of it. With started=False it is left unmounted. With rings=True its mounts
    use FUSE over io_uring. `program`: Python runs it in place of kvfs to mount the pool. On an exception the tail of
    the daemon's log is added to it.
    """

    # The words that run a command in the daemon's network namespace.
    inside: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        files: int = 4,
        size: str = "1G",
        devices: Sequence[str] = (),
        format_args: Sequence[str] = (),
        mount_args: Sequence[str] = ("--allow-other",),
        environment: dict[str, str] | None = None,
        base: str | None = None,
        template: pathlib.Path | None = None,
        started: bool = True,
        rings: bool = False,
        program: Sequence[str | pathlib.Path] = ("-m", "kvfs"),
    ) -> None:
        self.program = tuple(program)
        self.template, self.started, self.rings = template, started, rings
        self.files, self.size, self.devices = files, size, tuple(devices)
        self.format_args, self.mount_args = tuple(format_args), tuple(mount_args)
        self.environment = {**sanitizer_environment(), **(environment or {})}
        self.base_parent = base
        self.base = pathlib.Path()
        self.path = pathlib.Path()
        self.mount = pathlib.Path()

    def __enter__(self) -> Self:
        self.base = pathlib.Path(tempfile.mkdtemp(prefix="kvfs-test-", dir=self.base_parent))
        self.base.chmod(0o755)  # other users' tests must reach the mountpoint
        self.path, self.mount = self.base / "pool", self.base / "mount"
        self.mount.mkdir()
        try:
            if self.template is None:
                self.format()
            else:
                run("cp", "--archive", "--sparse=always", self.template, self.path)
            if self.started:
                self.start()
        except BaseException as error:
            self._annotate(error)
            self._destroy()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._annotate(error)
        self._destroy()

    def command(
        self, *words: str, timeout_s: float = COMMAND_TIMEOUT_S, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run `kvfs WORDS` in the project's tree."""
        return run(
            *self.inside, sys.executable, "-m", "kvfs", *words,
            timeout_s=timeout_s, check=check, environment=self.environment,
        )  # fmt: skip

    def format(self) -> None:
        where: list[str] = []
        for device in self.devices:
            where += ["--device", device]
        words = [str(self.path), *(where or ["--files", str(self.files), "--size", self.size]), *self.format_args]
        if self.inside or self.environment != sanitizer_environment():
            self.command("format", *words)
        else:
            format_pool(*words)

    def start(self, *extra: str, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Mount; returns once the mount answers."""
        with rings_offered() if self.rings else contextlib.nullcontext():
            words = ("mount", str(self.path), str(self.mount), *self.mount_args, *extra)
            run(
                *self.inside, sys.executable, *self.program, *words,
                timeout_s=timeout_s, environment=self.environment,
            )  # fmt: skip
        if mount_device(self.mount) is None:
            raise CommandError(f"kvfs mount returned 0, but nothing is mounted at {self.mount}")

    def status(self) -> dict[str, Any]:
        """Return what `kvfs status POOL -o json` prints. A daemon is asked by this process: the command takes half a
        second of a core, and many tests wait until a status says something."""
        from kvfs.errors import KvfsError
        from kvfs.frontend.asking import ControlClient

        with contextlib.suppress(KvfsError), ControlClient(self.path) as client:
            document: Any = client.call("status")
            if document["mounts"] and not self.inside:
                return document
        return json.loads(self.command("status", str(self.path), "-o", "json").stdout)

    def wait_summaries(self) -> None:
        """Wait until the summaries on the devices say what the names say. The daemon writes them once a second, at most
        twice after a change: none has come in the time of two turns."""
        seen, since = -1, 0.0

        def still() -> bool:
            nonlocal seen, since
            written = self.status()["counters"]["summaries_written"]
            if written != seen:
                seen, since = written, time.monotonic()
            return time.monotonic() - since > 2.5 * slowness()

        wait_until(still, "the summaries", interval_s=0.1)

    def wait_rebuilt(self) -> None:
        """Wait until the index, lost before this mount, has been made again behind it."""
        wait_until(lambda: self.status()["pool"]["state"] == "mounted", "the rebuild of the index")

    def pid(self) -> int:
        """Return the daemon's process id."""
        return int((self.path / "kvfs.pid").read_text())

    def umount(self, *, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Unmount in good order and wait for the daemon's end."""
        pid = self.pid()
        self.command("umount", str(self.mount), timeout_s=timeout_s)
        wait_until(lambda: not process_alive(pid), f"the end of daemon {pid} after umount", timeout_s=timeout_s)

    def kill(self) -> None:
        """SIGKILL the daemon and wait until it is gone. The dead mount stays until remount()."""
        pid = self.pid()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.wait_dead(pid)

    def wait_dead(self, pid: int, *, timeout_s: float = 30) -> None:
        """Wait for the end of a daemon that did not unmount, and until its mount says ENOTCONN.

        The kernel closes files that io_uring held a moment after its last thread has ended; requests until then get
        ECONNABORTED."""
        wait_until(lambda: not process_alive(pid), f"the end of daemon {pid}", timeout_s=timeout_s)

        def disconnected() -> bool:
            try:
                os.statvfs(self.mount)
            except OSError as error:
                return error.errno == errno.ENOTCONN
            return mount_device(self.mount) is None

        wait_until(disconnected, f"the end of daemon {pid}'s mount")

    def remount(self, *extra: str) -> None:
        """Mount again, after umount(), kill() or an abort."""
        self._stop()
        self.start(*extra)

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Return the end of the daemon's log, or a line that says why there is none."""
        try:
            text = (self.path / "kvfs.log").read_text(errors="replace")
        except OSError as error:
            return f"no kvfs.log: {error}"
        return "\n".join(text.splitlines()[-lines:])

    def _annotate(self, error: BaseException) -> None:
        error.add_note(f"--- {self.path}/kvfs.log ---\n{self.log_tail()}")

    def _stop(self) -> None:
        """End daemon and mount by any means."""
        with contextlib.suppress(OSError, ValueError, AssertionError):
            pid = self.pid()
            if mount_device(self.mount) is not None and process_alive(pid):
                self.umount(timeout_s=20)
        with contextlib.suppress(OSError, ValueError, AssertionError):
            pid = self.pid()
            if process_alive(pid) and b"kvfs" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                self.kill()
        detach(self.mount)

    def _destroy(self) -> None:
        self._stop()
        if os.environ.get("KVFS_KEEP_POOL"):
            print(f"kept {self.base}", file=sys.stderr)
        else:
            shutil.rmtree(self.base, ignore_errors=True)


def format_pool(*words: str) -> None:
    """Do what `kvfs format WORDS` does, in this process: another takes a third of a second of a core to load it."""
    from kvfs.cli.command import parser
    from kvfs.errors import KvfsError

    try:
        arguments = parser("format").parse_args(["format", *words])
        with contextlib.redirect_stdout(io.StringIO()):
            arguments.function(arguments)
    except KvfsError as error:
        raise CommandError(f"kvfs format {' '.join(words)}: {error}") from error


def process_alive(pid: int) -> bool:
    """Return whether any of its threads runs; a zombie does not. One that was killed may have one that waits in the
    kernel for ever, and holds all its files open."""
    try:
        texts = [path.read_text() for path in pathlib.Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # one ended meanwhile
        return os.path.exists(f"/proc/{pid}") and process_alive(pid)
    return any(text.rpartition(")")[2].split()[0] not in "ZX" for text in texts)


def mount_device(mountpoint: pathlib.Path) -> int | None:
    """Return the minor device number of what is mounted there, without touching it; None if nothing is."""
    found = None
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[4].encode().decode("unicode_escape") == str(mountpoint):
            found = int(fields[2].partition(":")[2])
    return found


def abort_file(minor: int | None) -> pathlib.Path | None:
    """Return the file that aborts the FUSE connection of this device, None if it has none."""
    connections = pathlib.Path("/sys/fs/fuse/connections")
    if minor is not None and connections.is_dir() and not os.path.ismount(connections) and os.geteuid() == 0:
        run("mount", "-t", "fusectl", "fusectl", connections, check=False, timeout_s=10)  # no udev did it here
    path = connections / f"{minor}/abort"
    return path if minor is not None and path.exists() else None


def requests_waiting(mountpoint: pathlib.Path) -> int | None:
    """How many requests the kernel has that the filesystem has not answered; None where it does not say."""
    abort = abort_file(mount_device(mountpoint))
    return None if abort is None else int(abort.with_name("waiting").read_text())


def detach(mountpoint: pathlib.Path) -> None:
    """Abort the connection and unmount lazily, as often as something is mounted there."""
    for _ in range(8):
        minor = mount_device(mountpoint)
        if minor is None:
            return
        with contextlib.suppress(OSError):
            abort = abort_file(minor)
            if abort is not None:
                abort.write_text("1")
        run("umount", "-l", mountpoint, check=False, timeout_s=10)
    raise AssertionError(f"{mountpoint} stays mounted")


# --- block devices ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def zram_devices(count: int, size: str) -> Iterator[list[str]]:
    """Yield `count` fresh zram devices (RAM, with O_DIRECT); they are released at the end."""
    requires_zram()
    devices: list[str] = []
    try:
        for _ in range(count):
            index = int(pathlib.Path("/sys/class/zram-control/hot_add").read_text())
            devices.append(f"/dev/zram{index}")
            pathlib.Path(f"/sys/block/zram{index}/disksize").write_text(size)
        for device in devices:
            wait_until(functools.partial(os.path.exists, device), f"the node {device}")
        yield devices
    finally:
        for device in devices:
            name = device.removeprefix("/dev/")
            wait_until(
                functools.partial(_zram_released, name), f"the release of {device}", timeout_s=20, interval_s=0.1
            )


def _zram_released(name: str) -> bool:
    try:
        pathlib.Path(f"/sys/block/{name}/reset").write_text("1")
        pathlib.Path("/sys/class/zram-control/hot_remove").write_text(name.removeprefix("zram"))
    except OSError as error:
        return error.errno in (errno.ENODEV, errno.ENOENT)
    return True


@contextlib.contextmanager
def loop_devices(directory: pathlib.Path, count: int, size: str) -> Iterator[list[str]]:
    """Yield `count` loop devices over sparse files in directory, with direct I/O; detached at the end."""
    requires_loop()
    devices: list[str] = []
    try:
        for index in range(count):
            backing = directory / f"loop-{index}"
            run("truncate", "--size", size, backing)
            devices.append(run("losetup", "--find", "--show", "--direct-io=on", backing).stdout.strip())
        yield devices
    finally:
        for device in devices:
            run("losetup", "--detach", device, check=False)


@functools.cache
def sanitizer_environment() -> dict[str, str]:
    """With KVFS_TEST_SANITIZED set, what makes the daemon run on the data plane that has the sanitizers in it."""
    if not os.environ.get("KVFS_TEST_SANITIZED"):
        return {}
    modules = list((REPOSITORY / "build/sanitized/kvfs").glob("_native*.so"))
    assert len(modules) == 1, "build it first: native/build_ffi.py --sanitize --output build/sanitized"
    libasan = run("gcc", "-print-file-name=libasan.so").stdout.strip()
    return {
        "KVFS_NATIVE": str(modules[0]),
        "LD_PRELOAD": libasan,
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:handle_segv=1:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "halt_on_error=1:abort_on_error=1:print_stacktrace=1",
    }


def requires_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")


def requires_fuse() -> None:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        pytest.skip(f"needs /dev/fuse: {error}")


def requires_io_uring() -> None:
    """Skip in a lane where it is denied: for tests that deny it to one side alone, or that lack something else."""
    setup, enter, register, nothing_to_unregister = 425, 426, 427, 3
    ring = libc.syscall(setup, 1, ctypes.create_string_buffer(120))
    try:
        for call in ((enter, ring, 0, 0, 0, None, 0), (register, ring, nothing_to_unregister, None, 0)):
            if ring < 0 or (libc.syscall(*call) < 0 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS)):
                pytest.skip(f"io_uring is denied here: {os.strerror(ctypes.get_errno())}")
    finally:
        if ring >= 0:
            os.close(ring)


def requires_zram() -> None:
    requires_root()
    if not os.path.exists("/sys/class/zram-control/hot_add"):
        run("modprobe", "zram", check=False)
    if not os.path.exists("/sys/class/zram-control/hot_add"):
        pytest.skip("needs the zram module")


def requires_loop() -> None:
    requires_root()
    requires_program("losetup")
    if not os.path.exists("/dev/loop-control"):
        pytest.skip("needs loop devices")


@contextlib.contextmanager
def rings_decided() -> Iterator[None]:
    """Nobody changes meanwhile whether this machine's kernel offers FUSE over io_uring: lanes and the bench run beside
    one another."""
    with URING_PARAMETER.open() as parameter:
        fcntl.flock(parameter, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def rings_offered() -> Iterator[None]:
    """Let the kernel offer FUSE over io_uring to servers that mount meanwhile; skip the test where it cannot be had.

    Only a server that asks for it in INIT is affected, and it keeps its rings when the parameter goes back."""
    if not URING_PARAMETER.exists():
        pytest.skip(f"no {URING_PARAMETER}: Linux before 6.14, or without CONFIG_FUSE_IO_URING")
    with rings_decided():
        before = URING_PARAMETER.read_text().strip()
        if before == "Y":
            yield
            return
        if os.geteuid() != 0:
            pytest.skip(f"{URING_PARAMETER} is {before}, and only root can change it")
        URING_PARAMETER.write_text("Y")
        try:
            yield
        finally:
            URING_PARAMETER.write_text(before)


def requires_program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs the program {name}")
    return path


# --- files -----------------------------------------------------------------------------------------------------


def content(size: int, seed: object = 0) -> bytes:
    """Return `size` bytes that only this seed gives, so that bytes of another file are never taken for these."""
    return random.Random(f"{seed}").randbytes(size)


def write_file(
    path: str | os.PathLike[str], data: bytes, *, flags: int = os.O_CREAT | os.O_WRONLY | os.O_TRUNC, mode: int = 0o644
) -> None:
    """Write data by one write() and demand the full count."""
    descriptor = os.open(path, flags, mode)
    try:
        written = os.write(descriptor, data) if data else 0
        assert written == len(data), f"{path}: wrote {written} of {len(data)}"
    finally:
        os.close(descriptor)


def tell(path: pathlib.Path, text: str) -> None:
    """Write a file that another process waits for: as soon as it is there it is whole."""
    unseen = path.with_name(f".{path.name}.new")
    unseen.write_text(text)
    unseen.rename(path)


def read_file(path: str | os.PathLike[str]) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def assert_same(actual: bytes | memoryview, expected: bytes | memoryview, what: str) -> None:
    """Compare contents and, if they differ, say where instead of printing megabytes."""
    if actual == expected:
        return
    actual, expected = bytes(actual), bytes(expected)
    first = next(
        (i for i, (a, b) in enumerate(zip(actual, expected, strict=False)) if a != b), min(len(actual), len(expected))
    )
    raise AssertionError(
        f"{what}: {len(actual)} bytes, expected {len(expected)}; first difference at offset {first}: "
        f"{actual[first : first + 16].hex()} instead of {expected[first : first + 16].hex()}"
    )


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], flags: int, mode: int = 0o644) -> Iterator[int]:
    """Yield an open descriptor; it may have been closed inside."""
    descriptor = os.open(path, flags, mode)
    identity = os.fstat(descriptor)[1:3]
    try:
        yield descriptor
    finally:
        with contextlib.suppress(OSError):
            if os.fstat(descriptor)[1:3] == identity:
                os.close(descriptor)


@contextlib.contextmanager
def lingering() -> Iterator[socket.socket]:
    """A TCP socket whose last descriptor is closed for as long as this lasts, whoever closes it: tcp(7), SO_LINGER."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as full:
        other, _ = listener.accept()
        with other:
            full.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    full.send(bytes(1 << 16))
            full.setblocking(True)
            full.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
            try:
                yield full
            finally:
                # A reset: whoever waits is let go.
                other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@contextlib.contextmanager
def raises_errno(*expected: int) -> Iterator[None]:
    """Demand an OSError with one of these numbers."""
    names = " or ".join(errno.errorcode[number] for number in expected)
    try:
        yield
    except OSError as error:
        assert error.errno in expected, f"{errno.errorcode.get(error.errno or 0)} instead of {names}: {error}"
        return
    raise AssertionError(f"no error instead of {names}")


libc = ctypes.CDLL(None, use_errno=True)
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
_AT_FDCWD = -100


def renameat2(old: str | os.PathLike[str], new: str | os.PathLike[str], flags: int) -> None:
    """rename with flags (rename(2)); raises OSError."""
    if libc.renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), ctypes.c_uint(flags)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(old))


# --- children --------------------------------------------------------------------------------------------------


def in_child(
    function: Callable[[], Any],
    *,
    user: int | None = None,
    group: int | None = None,
    timeout_s: float = TEST_TIMEOUT_S - 20,
) -> Any:
    """Call function in a forked child and return its (picklable) value; its exception fails the caller.

    With user, the child first becomes that user, with no supplementary groups. A child that dies (SIGBUS
    of a mapping, say) or is late is an AssertionError here, and takes nothing else with it.
    """
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        _be_child(function, user, group, sink)
    os.close(sink)
    received = b""
    deadline = time.monotonic() + timeout_s * slowness()
    try:
        while True:
            ready, _, _ = select.select([source], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"the child did not finish within {timeout_s:g} s")
            piece = os.read(source, 1 << 20)
            if not piece:
                break
            received += piece
    finally:
        os.close(source)
        if time.monotonic() >= deadline:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if not received:
        raise AssertionError(f"the child died with status {os.waitstatus_to_exitcode(status)}")
    succeeded, value = pickle.loads(received)
    if not succeeded:
        raise AssertionError(f"in the child:\n{value}")
    return value


def _be_child(function: Callable[[], Any], user: int | None, group: int | None, sink: int) -> NoReturn:
    signal.setitimer(signal.ITIMER_REAL, 0)  # pytest-timeout's alarm belongs to the parent
    try:
        if user is not None:
            os.setgroups([])
            own = user if group is None else group
            os.setresgid(own, own, own)
            os.setresuid(user, user, user)
        answer = (True, function())
    except BaseException:  # SystemExit and pytest's own outcomes too: all go to the parent
        answer = (False, traceback.format_exc())
    with contextlib.suppress(BaseException), os.fdopen(sink, "wb") as stream:
        stream.write(pickle.dumps(answer))
    os._exit(0)


# --- the mount under test --------------------------------------------------------------------------------------


class Service:
    """The filesystem under test: kvfs in a pool of its own, or any directory given by --directory."""

    def __init__(self, root: pathlib.Path, pool: Pool | None, *, is_kvfs: bool = True) -> None:
        self.root, self.pool, self.is_kvfs = root, pool, is_kvfs
        self.device = os.stat(root).st_dev

    def revive(self) -> None:
        """Mount again if an earlier test brought the mount down; a given directory is only checked."""
        try:
            alive = os.stat(self.root).st_dev == self.device
        except OSError:
            alive = False
        if alive:
            return
        assert self.pool is not None, f"{self.root} no longer answers"
        self.pool.remount()
        self.device = os.stat(self.root).st_dev


# A process, not a thread: a page fault waits for FUSE with the interpreter lock held. It ends when its stdin does.
_WATCHDOG = """
import select, subprocess, sys
limit, abort, mountpoint = sys.argv[1:]
if not select.select([0], [], [], float(limit))[0]:
    print(f"watchdog: the test hangs; aborting its connection by {abort}", file=sys.stderr, flush=True)
    with open(abort, "w") as file:
        file.write("1")
    if mountpoint:
        subprocess.run(["umount", "-l", mountpoint], timeout=20)
"""

# The pools in use, for the report of a failure.
_pools: list[Pool] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--directory", metavar="DIR", help="test this directory instead of mounting kvfs")
    parser.addoption("--rings", action="store_true", help="mount kvfs with FUSE over io_uring")
    parser.addoption("--kvfs", action="store_true", help="DIR is kvfs: ask of it what only kvfs owes")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getini("filterwarnings"):  # the project's own say it already, and the last said counts
        config.addinivalue_line("filterwarnings", "error")
    config.addinivalue_line("markers", "timeout(seconds): the longest a test may take")


def pytest_itemcollected(item: pytest.Item) -> None:
    given = item.get_closest_marker("timeout")
    seconds = max(given.args[0] if given is not None else 0, TEST_TIMEOUT_S)
    item.add_marker(pytest.mark.timeout(seconds * SLOWNESS, method="signal"), append=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for pool in _pools:
            report.sections.append((f"{pool.path}/kvfs.log", pool.log_tail()))
    return report


@pytest.fixture(scope="session")
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """The filesystem under test, for the whole session."""
    given = request.config.getoption("directory", default=None)
    with contextlib.ExitStack() as stack:
        if given:
            root = pathlib.Path(given).resolve(strict=True)
            made = pathlib.Path(tempfile.mkdtemp(prefix="kvfs-test-", dir=root))
            made.chmod(0o755)
            stack.callback(shutil.rmtree, made, ignore_errors=True)
            current = Service(made, None, is_kvfs=request.config.getoption("kvfs"))
        else:
            requires_fuse()
            pool = stack.enter_context(Pool(rings=request.config.getoption("rings", default=False)))
            stack.enter_context(_reported(pool))
            current = Service(pool.mount, pool)
        yield current


@pytest.fixture(scope="session")
def mount(service: Service) -> pathlib.Path:
    """The root of the filesystem under test."""
    return service.root


@pytest.fixture(scope="session")
def is_kvfs(service: Service) -> bool:
    """Whether kvfs itself is under test: what only kvfs owes is asserted then, and skipped elsewhere."""
    return service.is_kvfs


@pytest.fixture
def directory(service: Service, request: pytest.FixtureRequest) -> Iterator[pathlib.Path]:
    """A fresh directory on the mount, removed at the end, with a watchdog over the test."""
    service.revive()
    with watched(service.root, request, detach_too=service.pool is not None):
        made = pathlib.Path(tempfile.mkdtemp(prefix="t-", dir=service.root))
        made.chmod(0o755)
        yield made
        with contextlib.suppress(OSError):
            shutil.rmtree(made)


@contextlib.contextmanager
def opened_by(user: int, function: Callable[[], int]) -> Iterator[int]:
    """A descriptor that a process of `user` has opened, and handed over: who opened it counts, not who has it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        in_child(lambda: socket.send_fds(theirs, [b"x"], [function()]), user=user, group=user)
        _, received, _, _ = socket.recv_fds(ours, 1, 1)
        try:
            yield received[0]
        finally:
            os.close(received[0])


def requires_idmap() -> None:
    """Skip unless `kvfs mount --idmap` is to be had."""
    from kvfs.doctor import IDMAP_KERNEL
    from kvfs.units import kernel_version

    if kernel_version(os.uname().release) < IDMAP_KERNEL:
        pytest.skip(f"Linux 6.12 or newer has idmapped FUSE mounts; this is {os.uname().release}")


# The kernel tells the user of each request, or, with --idmap, of creations alone.
USERS, IDMAP = ("--allow-other",), ("--allow-other", "--idmap")
BOTH_WAYS = pytest.mark.parametrize("pool", [USERS, IDMAP], indirect=True, ids=["users", "idmap"])


def pool_of_shares(request: pytest.FixtureRequest, own_pool: Callable[..., Pool], size: str, *extra: str) -> Pool:
    """A pool that is mounted as BOTH_WAYS says."""
    requires_root()
    words = getattr(request, "param", USERS)
    if words == IDMAP:
        requires_idmap()
    return own_pool(files=2, size=size, mount_args=(*words, *extra))


@pytest.fixture
def own_pool(request: pytest.FixtureRequest) -> Iterator[Callable[..., Pool]]:
    """Make pools that only this test uses: own_pool(files=4, size="256M"). kvfs only."""
    if request.config.getoption("directory", default=None):
        pytest.skip("needs a kvfs pool of its own, not --directory")
    requires_fuse()
    give_devices_time()
    with contextlib.ExitStack() as stack:

        def make(**arguments: Any) -> Pool:
            pool = stack.enter_context(Pool(**arguments))
            stack.enter_context(_reported(pool))
            stack.enter_context(watched(pool.mount, request, detach_too=True))
            return pool

        yield make


@contextlib.contextmanager
def _reported(pool: Pool) -> Iterator[None]:
    _pools.append(pool)
    try:
        yield
    finally:
        _pools.remove(pool)


@contextlib.contextmanager
def watched(root: pathlib.Path, request: pytest.FixtureRequest, *, detach_too: bool) -> Iterator[None]:
    """Abort the FUSE connection of root ten seconds after the test's timeout has failed to wake it."""
    abort = abort_file(os.minor(os.stat(root).st_dev))
    if abort is None:
        yield
        return
    marker = request.node.get_closest_marker("timeout")
    seconds = 10 + (marker.args[0] if marker is not None and marker.args else TEST_TIMEOUT_S)
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _WATCHDOG, str(seconds), str(abort), str(root) if detach_too else ""],
        stdin=subprocess.PIPE,
    )
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        process.wait(30)


@contextlib.contextmanager
def relayed(pool: Pool) -> Iterator[pathlib.Path]:
    """The socket of a relay before the pool's export, which is served already."""
    kept = pool.base / "kept.sock"
    words = [sys.executable, "-m", "kvfs", "keep", str(kept), str(pool.base / "guest.sock"), "--timeout", "30"]
    process = subprocess.Popen(
        words,
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **pool.environment},
    )
    try:
        wait_until(kept.exists, "the relay's socket")
        yield kept
        process.terminate()
        assert process.wait(30) == 0 and not kept.exists()
    finally:
        process.kill()
        process.wait()
