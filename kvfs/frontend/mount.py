"""Mounting and unmounting: mount(2) for root, fusermount3 for everybody else, and the table in /proc/self/mountinfo.

Knows paths, mount options and descriptors; knows nothing of pools, requests or the data plane. The descriptor of a new
mount belongs to the caller. Sources: mount(2), umount2(2), fuse(4), proc_pid_mountinfo(5) for the table; fusermount3(1)
and libfuse's lib/mount.c for the _FUSE_COMMFD protocol.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvfs.descriptors import all_above
from kvfs.errors import DeadlineError, KvfsError, MissingFeatureError, UsageError

FILESYSTEM_TYPE = "fuse.kvfs"
# mount(2) and umount2(2) answer in milliseconds unless something below them hangs.
MOUNT_TIMEOUT_S = 20.0

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_NOATIME = 1, 2, 4, 8, 1024
_MS_SYNCHRONOUS, _MS_DIRSYNC, _MS_NODIRATIME, _MS_STRICTATIME, _MS_LAZYTIME = 16, 128, 2048, 1 << 24, 1 << 25
_MNT_FORCE, _MNT_DETACH = 1, 2
# The option of fuse(8) that hides what lies in the mount point; it is ours, not the kernel's.
NONEMPTY = "nonempty"
# Options of mount(8) that are flags of mount(2), not text for the filesystem.
_FLAG_OPTIONS = {
    "ro": _MS_RDONLY, "nosuid": _MS_NOSUID, "nodev": _MS_NODEV, "noexec": _MS_NOEXEC, "noatime": _MS_NOATIME,
    "nodiratime": _MS_NODIRATIME, "lazytime": _MS_LAZYTIME, "strictatime": _MS_STRICTATIME, "sync": _MS_SYNCHRONOUS,
    "dirsync": _MS_DIRSYNC,
}  # fmt: skip
# Those that ask for what a mount has anyway; suid and dev take back what kvfs sets.
_OTHER_OPTIONS = frozenset({"rw", "suid", "dev", "exec", "async", "atime", "diratime", "relatime", "nolazytime"})
# Options that fusermount3 does not know, and that cost nothing when they are left out.
_NOT_FUSERMOUNT = frozenset({"atime", "diratime", "relatime", "nolazytime", "lazytime", "strictatime"})

_RIGHTS = {errno.EPERM: "; it takes CAP_SYS_ADMIN (in a container: --cap-add SYS_ADMIN)"}
_PROGRAM_PREFIX = re.compile(r"^\S*fusermount3: ")

_libc = ctypes.CDLL(None, use_errno=True)


class MountError(KvfsError):
    """A mount point cannot be used, or the kernel refused."""

    errno = errno.EINVAL


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo."""

    mountpoint: str
    source: str
    type: str
    options: str
    device: str  # major:minor
    user: int | None = None  # the user who has mounted it, where the filesystem says so

    @property
    def is_kvfs(self) -> bool:
        return self.type == FILESYSTEM_TYPE

    def is_same(self, device: str, source: str) -> bool:
        """Whether it is the kvfs filesystem with this number and source. A free number is given to another."""
        return self.is_kvfs and self.device == device and self.source == source


def _unescape(text: str) -> str:
    """Undo the octal escapes of mountinfo (space, tab, newline, backslash)."""
    raw = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), os.fsencode(text))
    return os.fsdecode(raw)


def parse_mountinfo(text: str) -> list[Mount]:
    """The mounts in a mountinfo text, in order. Of several at one mount point, the last is on top."""
    mounts = []
    for line in text.split("\n"):  # the kernel escapes no other character that splitlines() would break at
        front, separator, back = line.partition(" - ")
        fields, rest = front.split(" "), back.split(" ")
        if not separator or len(fields) < 6 or len(rest) < 2:
            continue
        user = re.search(r"(?:^|,)user_id=(\d+)", rest[2]) if len(rest) > 2 else None
        mounts.append(
            Mount(
                _unescape(fields[4]), _unescape(rest[1]), _unescape(rest[0]), fields[5], fields[2],
                int(user[1]) if user else None,
            )
        )  # fmt: skip
    return mounts


def mounts() -> list[Mount]:
    """Every mount this process sees. Raises MissingFeatureError without /proc."""
    try:
        text = Path("/proc/self/mountinfo").read_bytes().decode("utf-8", "surrogateescape")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFeatureError(
            "/proc is not mounted here, where kvfs finds mounts and processes: mount -t proc proc /proc"
        ) from error
    return parse_mountinfo(text)


def resolve(path: str | Path) -> str:
    """The absolute path without symbolic links. Does not ask the filesystem mounted at `path` itself, which may be dead
    or stuck."""
    absolute = os.path.abspath(path)
    if absolute == "/":
        return absolute
    full = os.path.join(os.path.realpath(os.path.dirname(absolute)), os.path.basename(absolute))
    try:
        os.readlink(full)
    except OSError:
        return full
    return os.path.realpath(full)


def find_mount(path: str | Path) -> Mount | None:
    """The topmost mount at exactly this path, or None."""
    wanted = resolve(path)
    found = None
    for mount in mounts():
        if mount.mountpoint == wanted:
            found = mount
    return found


def mount_of(path: str | Path, among: Sequence[Mount] | None = None) -> Mount | None:
    """The mount that a path lies in: of all mounts, or of those given."""
    real = os.path.realpath(path)
    best: Mount | None = None
    for mount in mounts() if among is None else among:
        inside = real == mount.mountpoint or real.startswith(mount.mountpoint.rstrip("/") + "/")
        if inside and (best is None or len(mount.mountpoint) >= len(best.mountpoint)):
            best = mount
    return best


def refuse_inside(path: str | Path, what: str) -> None:
    """Raises MountError if the path lies in a kvfs mount: a pool that needs another to work waits for it for ever, or
    for itself."""
    present = mount_of(path)
    if present is not None and present.is_kvfs:
        raise MountError(f"{path}: {what} cannot lie in a kvfs mount ({present.mountpoint}, of pool {present.source})")


def mounts_of(pool: str | Path) -> list[Mount]:
    """The mount point of this pool, if it is mounted."""
    wanted = resolve(pool)
    return [mount for mount in mounts() if mount.is_kvfs and mount.source == wanted]


def call_with_deadline(function: Callable[[], None], timeout_s: float, what: str) -> None:
    """Run a call that may hang in the kernel in a separate thread. Raises DeadlineError when it does; the thread is
    then left behind."""
    failure: list[BaseException] = []

    def body() -> None:
        try:
            function()
        except BaseException as error:  # handed to the caller below
            failure.append(error)

    thread = threading.Thread(target=body, name=what, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise DeadlineError(f"{what}: no answer within {timeout_s:g} s")
    if failure:
        raise failure[0]


def is_dead(mountpoint: str) -> bool:
    """Whether the filesystem there has lost its daemon (ENOTCONN)."""
    try:
        call_with_deadline(lambda: _touch(mountpoint), 5.0, mountpoint)
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    except DeadlineError:
        return False
    return False


def _touch(path: str) -> None:
    # Not stat: for a second after the daemon's death the kernel answers stat from its cache.
    os.statvfs(path)


def check_mountpoint(path: str | Path, pool: str | Path, *, nonempty: bool = False) -> str:
    """Return the resolved mount point, ready to be mounted on. A dead mount of the same pool is taken away first. A
    bind mount or another filesystem may be mounted over while nothing lies in it, or with `nonempty`.

    Raises MountError: missing, no directory, busy, not writable for an unprivileged user, or above or in the pool it
    would hide.
    """
    resolved, pool_path = resolve(path), resolve(pool)
    present = find_mount(resolved)
    if present is not None:
        if not present.is_kvfs:
            if not nonempty:
                _check_hides_nothing(path, present)
        elif not is_dead(resolved):
            raise MountError(f"{path}: busy: pool {present.source} is mounted there")
        elif present.source != pool_path:
            raise MountError(f"{path}: busy: holds a dead mount of pool {present.source}; run kvfs umount {path}")
        else:
            unmount(resolved, lazy=True)
    try:
        status = os.stat(resolved)
    except OSError as error:
        raise MountError(f"{path}: cannot be mounted on: {os.strerror(error.errno or 0)}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise MountError(f"{path}: not a directory")
    common = os.path.commonpath((resolved, pool_path))
    if common == resolved:
        raise MountError(f"{path}: the pool {pool} lies in it and would be hidden by the mount")
    if common == pool_path:
        raise MountError(f"{path}: lies in the pool {pool}, whose files the mount would hide; mount it elsewhere")
    if os.geteuid() != 0 and not os.access(resolved, os.W_OK):
        raise MountError(f"{path}: fusermount3 needs write permission there for an unprivileged mount")
    return resolved


def _check_hides_nothing(path: str | Path, present: Mount) -> None:
    """Raises MountError if a mount over this one would hide files. A look into autofs would have it mount."""
    if present.type == "autofs":
        return
    names: list[str] = []

    def look() -> None:
        with os.scandir(present.mountpoint) as entries:
            names.extend(entry.name for entry, _ in zip(entries, range(1), strict=False))

    there = f"{path}: busy: {present.source} ({present.type}) is mounted there"
    try:
        call_with_deadline(look, MOUNT_TIMEOUT_S, str(path))
    except OSError as error:
        raise MountError(f"{there}, and cannot be looked into: {os.strerror(error.errno or 0)}") from error
    if names:
        raise MountError(
            f"{there}, and is not empty: {names[0]} and all else in it would be hidden; --options nonempty hides it"
        )


def check_options(options: Sequence[str]) -> None:
    """Raises UsageError for an option of mount(8) that kvfs does not know."""
    known = {*_FLAG_OPTIONS, *_OTHER_OPTIONS, NONEMPTY}
    for option in options:
        if option not in known:
            raise UsageError(f"mount option {option}: not known; known are {', '.join(sorted(known))}")


def mount(
    source: str, mountpoint: str, *, max_read: int, allow_other: bool = False, options: tuple[str, ...] = ()
) -> int:
    """Mount and return the /dev/fuse descriptor (close-on-exec). The holder of the descriptor must answer the kernel's
    INIT.

    `options` are mount(8) options that the kernel knows (ro, noexec, ...). Blocks for at most MOUNT_TIMEOUT_S.
    """
    check_options(options)
    options = tuple(option for option in options if option != NONEMPTY)
    if os.geteuid() == 0:
        return _mount_as_root(source, mountpoint, max_read, allow_other, options)
    return _mount_by_fusermount(source, mountpoint, max_read, allow_other, options)


def _open_device() -> int:
    try:
        return os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        hint = (
            "load it with: modprobe fuse; in a container: --device /dev/fuse"
            if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENXIO)
            else "see kvfs doctor"
        )
        raise MissingFeatureError(f"/dev/fuse: {os.strerror(error.errno or 0)}; {hint}") from error


def check_device() -> None:
    """Raises MissingFeatureError unless this user can open /dev/fuse. fusermount3, too, opens it as the user."""
    os.close(_open_device())


def _mount_as_root(source: str, mountpoint: str, max_read: int, allow_other: bool, options: tuple[str, ...]) -> int:
    fd = _open_device()
    root_mode = stat.S_IFMT(os.stat(mountpoint).st_mode)
    data = f"fd={fd},rootmode={root_mode:o},user_id={os.geteuid()},group_id={os.getegid()}"
    data += f",default_permissions,max_read={max_read}"
    if allow_other:
        data += ",allow_other"
    # As libfuse does: a daemon's filesystem carries no devices and no setuid programs unless asked to.
    flags = (0 if "suid" in options else _MS_NOSUID) | (0 if "dev" in options else _MS_NODEV)
    for option in options:
        flags |= _FLAG_OPTIONS.get(option, 0)

    def call() -> None:
        target, kind = os.fsencode(mountpoint), FILESYSTEM_TYPE.encode()
        if _libc.mount(os.fsencode(source), target, kind, ctypes.c_ulong(flags), data.encode()) != 0:
            error = ctypes.get_errno()
            raise _failure(mountpoint, f"mount: {os.strerror(error)}{_RIGHTS.get(error, '')}", error)

    try:
        call_with_deadline(call, MOUNT_TIMEOUT_S, f"{mountpoint}: mount")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _mount_by_fusermount(
    source: str, mountpoint: str, max_read: int, allow_other: bool, options: tuple[str, ...]
) -> int:
    program = shutil.which("fusermount3")
    if program is None:
        raise MissingFeatureError("fusermount3: not found; an unprivileged mount needs it (apt install fuse3)")
    name = source.replace("\\", "\\\\").replace(",", "\\,")
    texts = [f"fsname={name}", "subtype=kvfs", "default_permissions", f"max_read={max_read}"]
    texts += [option for option in options if option not in _NOT_FUSERMOUNT]
    if allow_other:
        texts.append("allow_other")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        process = subprocess.Popen(
            [program, "-o", ",".join(texts), "--", mountpoint],
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        theirs.close()
        ours.settimeout(MOUNT_TIMEOUT_S)
        try:
            _, received, _, _ = socket.recv_fds(ours, 1, 1)
            descriptors = all_above(list(received))
            message = process.communicate(timeout=MOUNT_TIMEOUT_S)[1].decode(errors="replace").strip()
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            process.kill()
            raise DeadlineError(f"{mountpoint}: fusermount3: no answer within {MOUNT_TIMEOUT_S:g} s") from error
    if not descriptors:
        said = _PROGRAM_PREFIX.sub("", message).splitlines()[:1]
        raise MountError(f"{mountpoint}: fusermount3: {said[0] if said else f'exit status {process.returncode}'}")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


def unmount(mountpoint: str, *, lazy: bool = False, force: bool = False, timeout_s: float = MOUNT_TIMEOUT_S) -> None:
    """Unmount. `lazy` removes the name now and the rest when the last file is closed; `force` also aborts requests that
    hang.

    Raises MountError (busy, not mounted, not permitted) and DeadlineError. Must not be called from a thread that serves
    the mount.
    """
    if os.geteuid() == 0:
        flags = (_MNT_DETACH if lazy or force else 0) | (_MNT_FORCE if force else 0)

        def call() -> None:
            if _libc.umount2(os.fsencode(mountpoint), flags) != 0:
                error = ctypes.get_errno()
                said = os.strerror(error) + _RIGHTS.get(error, "")
                busy = "busy: files are open there; close them or use --lazy"
                raise _failure(mountpoint, busy if error == errno.EBUSY else said, error)

        call_with_deadline(call, timeout_s, f"{mountpoint}: umount")
        return
    program = shutil.which("fusermount3")
    if program is None:
        raise MissingFeatureError("fusermount3: not found; an unprivileged umount needs it (apt install fuse3)")
    command = [program, "-u", *(["-z"] if lazy or force else []), "--", mountpoint]
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(f"{mountpoint}: fusermount3: no answer within {timeout_s:g} s") from error
    if result.returncode != 0:
        said = _PROGRAM_PREFIX.sub("", result.stderr.strip()).splitlines()
        text = said[0] if said else f"exit status {result.returncode}"
        raise _failure(mountpoint, text, errno.EBUSY if "busy" in text.lower() else errno.EINVAL)


def _failure(mountpoint: str, reason: str, error: int) -> MountError:
    failure = MountError(f"{mountpoint}: {reason}")
    failure.errno = error
    return failure


def _has_let_go(pid: int) -> bool:
    """Whether it has ended, but for threads that wait in the kernel with a descriptor table of their own. Such a thread
    may hold a file of a guest's front end (virtiofs/porter.c). Its standard output is /dev/null, and the daemon's own
    table has the block table besides."""
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            return False
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(FileNotFoundError):
                table = f"/proc/{pid}/task/{thread}/fd"
                if os.readlink(f"{table}/1") != os.devnull:
                    return False
                for fd in os.listdir(table):
                    if "memfd:kvfs-block-table" in os.readlink(f"{table}/{fd}"):
                        return False
    except OSError:  # gone meanwhile, or another user's
        return False
    return True


class ProcessWatch:
    """Waits for the end of a process that is no child. Holds a pidfd, so a reused number cannot mislead it."""

    def __init__(self, pid: int, descriptor: int | None = None) -> None:
        """pid: 0 if it is none of our pid namespace. descriptor: a pidfd, which is the watch's from now on."""
        self.pid = pid
        self._fd = descriptor
        if descriptor is None:
            with suppress(ProcessLookupError):
                self._fd = os.pidfd_open(pid)

    def wait(self, timeout_s: float) -> bool:
        """True once it has ended, but for threads that hold nothing of it."""
        if self._fd is None:
            return True
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000)) or _has_let_go(self.pid)

    def kill(self) -> None:
        if self._fd is not None:
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
