"""virtio-fs exports: their options (--virtiofs), their sockets, and the data plane's counters of each. Front ends
connect to a socket: a hypervisor, or a DPU's device emulation.

Speaks no vhost-user: the data plane does, on the listening descriptor that it is given (native/include/kvfs_plane.h).
Sources: unix(7); virtio 1.2, 5.11 (tag and queues).
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
import string
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvfs.descriptors import reason
from kvfs.errors import KvfsError, UsageError

# The logger's name stays when a module moves.
log = logging.getLogger("kvfs.frontend.virtiofs")

DEFAULT_TAG = "kvfs"
# A tag has at most this many bytes in the configuration space.
TAG_MAX = 36
QUEUES_MAX = 64
MEMORY_TYPES_MAX = 4
EXPORTS_MAX = 64
# sockaddr_un has 108 bytes, one of them the zero at the end; QEMU connects by the name.
SOCKET_PATH_MAX = 107
_BACKLOG = 4
# A guest can break the rules at any rate; the log hears of it this often.
_LOG_INTERVAL_S = 60.0
_PROTOCOL = 0xFFFFFFFF
_WHY = {
    errno.EMEDIUMTYPE: "its memory is of neither memfd, tmpfs, hugetlbfs nor a filesystem that memory= names",
    errno.EDQUOT: "its memory is more than this export's part of the daemon's addresses",
}


class ExportError(KvfsError):
    """A socket cannot be made at the given path."""

    errno = errno.EADDRINUSE


@dataclass(frozen=True, slots=True)
class Export:
    """One --virtiofs: the pool for one front end at a time."""

    socket: Path
    tag: str = DEFAULT_TAG
    queues: int = 1
    memory_types: tuple[int, ...] = ()  # of filesystems, besides memfd, tmpfs and hugetlbfs


class ExportPlane(Protocol):
    """The data plane's operations on a listening socket."""

    def virtiofs_add(self, fd: int, tag: str, queues: int, *, memory_types: Sequence[int] = ()) -> int: ...

    def virtiofs_remove(self, transport: int) -> None:
        """Only asks for the end: the export has ended with the last transport's event."""

    def virtiofs_statistics(self, transport: int) -> Mapping[str, int]: ...


def parse_export(text: str) -> Export:
    """Parse SOCKET[,tag=TAG][,queues=N][,memory=TYPE]... Raises UsageError with the part that makes no sense."""
    path, *options = text.split(",")
    if not path:
        raise UsageError(f"--virtiofs {text!r}: the path of a socket is missing")
    socket_path = os.path.abspath(path)
    size = len(os.fsencode(socket_path))
    if size > SOCKET_PATH_MAX:
        raise UsageError(
            f"--virtiofs {socket_path}: {size} bytes long; the path of a socket has at most {SOCKET_PATH_MAX}"
        )
    values: dict[str, str] = {}
    memory_types: list[int] = []
    for option in options:
        key, _, value = option.partition("=")
        if key == "memory":
            memory_types.append(_memory_type(value, text))
            continue
        if key not in ("tag", "queues") or key in values:
            raise UsageError(f"--virtiofs {text!r}: {option!r}: SOCKET[,tag=TAG][,queues=N][,memory=TYPE] is possible")
        values[key] = value
    if len(memory_types) > MEMORY_TYPES_MAX:
        count = len(memory_types)
        raise UsageError(f"--virtiofs {text!r}: memory= {count} times; at most {MEMORY_TYPES_MAX} are possible")
    return Export(
        Path(socket_path),
        _tag(values.get("tag", DEFAULT_TAG), text),
        _queues(values.get("queues", "1"), text),
        tuple(memory_types),
    )


def _tag(tag: str, text: str) -> str:
    size = len(os.fsencode(tag))
    if not 1 <= size <= TAG_MAX:
        raise UsageError(f"--virtiofs {text!r}: a tag of {size} bytes; 1 to {TAG_MAX} are possible")
    if not tag.isprintable() or " " in tag or "/" in tag:
        raise UsageError(f"--virtiofs {text!r}: tag {tag!r}: printable characters but space and slash are possible")
    return tag


def _queues(value: str, text: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 4 and 1 <= int(value) <= QUEUES_MAX):
        raise UsageError(f"--virtiofs {text!r}: queues={value}: 1 to {QUEUES_MAX} request queues are possible")
    return int(value)


def _memory_type(value: str, text: str) -> int:
    if not 1 <= len(value) <= 16 or any(digit not in string.hexdigits for digit in value):
        raise UsageError(
            f"--virtiofs {text!r}: memory={value}: the type of a filesystem is a hexadecimal number, as "
            "stat -f -c %t FILE prints it"
        )
    return int(value, 16)


def parse_exports(texts: Sequence[str]) -> tuple[Export, ...]:
    """All --virtiofs of a command line, each with its own socket."""
    exports = tuple(parse_export(text) for text in texts)
    if len(exports) > EXPORTS_MAX:
        raise UsageError(f"--virtiofs: {len(exports)} times; at most {EXPORTS_MAX} are possible")
    seen: set[Path] = set()
    for export in exports:
        if export.socket in seen:
            raise UsageError(f"--virtiofs {export.socket}: given twice")
        seen.add(export.socket)
    return exports


# ---- sockets ----


def listen(path: Path) -> socket.socket:
    """A listening socket of mode 0660 and our group at `path`. A socket that a dead daemon has left there is replaced.

    Raises ExportError: no such directory, one in which anybody could replace the socket, a file that is no socket, or a
    socket with a listener.
    """
    _check_directory(path)
    _clear(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind(str(path))
        # Nobody can connect before listen(), so nobody sees another mode.
        os.chown(path, -1, os.getegid())
        path.chmod(0o660)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _failure(path, os.strerror(error.errno or 0), error.errno) from error
    return listener


def _failure(path: Path, reason: str, error: int | None = None) -> ExportError:
    failure = ExportError(f"{path}: {reason}")
    failure.errno = error or ExportError.errno
    return failure


def _check_directory(path: Path) -> None:
    try:
        status = os.stat(path.parent)
    except OSError as error:
        raise _failure(path, f"its directory: {os.strerror(error.errno or 0)}", error.errno) from error
    if not stat.S_ISDIR(status.st_mode):
        raise _failure(path, f"{path.parent} is not a directory", errno.ENOTDIR)
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise _failure(
            path, f"{path.parent} is open to all (mode {stat.S_IMODE(status.st_mode):04o}): anybody could put a socket "
            "of theirs in its place", errno.EPERM,
        )  # fmt: skip


def _clear(path: Path) -> None:
    """Remove a socket that nobody listens on."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _failure(path, os.strerror(error.errno or 0), error.errno) from error
    if not stat.S_ISSOCK(status.st_mode):
        raise _failure(path, "exists and is no socket", errno.EEXIST)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            pass
        except FileNotFoundError:
            return
        except BlockingIOError as error:  # its backlog is full
            raise _failure(path, "in use: somebody listens there") from error
        except OSError as error:
            raise _failure(path, f"whether it is in use: {os.strerror(error.errno or 0)}", error.errno) from error
        else:
            raise _failure(path, "in use: somebody listens there")
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _failure(path, f"left by one that is gone; {os.strerror(error.errno or 0)}", error.errno) from error


# ---- served ----


@dataclass(slots=True)
class _Served:
    export: Export
    listener: socket.socket
    place: tuple[int, int]  # of the socket's file: (device, inode)
    transport: int | None = None
    logged_s: float = float("-inf")
    left_out: int = 0


class Exports:
    """The exports of one daemon. Their sockets listen from construction on and are gone after close()."""

    def __init__(self, wanted: Sequence[Export], plane: ExportPlane) -> None:
        """All exports, or none: ExportError names the one that failed."""
        self._plane = plane
        self._served: list[_Served] = []
        try:
            for export in wanted:
                listener = listen(export.socket)
                status = os.lstat(export.socket)
                self._served.append(_Served(export, listener, (status.st_dev, status.st_ino)))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._served)

    def serve(self) -> None:
        """Let front ends in. Raises PlaneError."""
        for served in self._served:
            assert served.transport is None, served.export.socket
            served.transport = self._plane.virtiofs_add(
                served.listener.fileno(),
                served.export.tag,
                served.export.queues,
                memory_types=served.export.memory_types,
            )

    def stop(self) -> None:
        """Ask for the end of all exports: requests of front ends that are under way are answered first. Front ends that
        connect again find no listener."""
        for served in self._served:
            _take_away(served)
            if served.transport is not None:
                transport, served.transport = served.transport, None
                try:
                    self._plane.virtiofs_remove(transport)
                except KvfsError as error:
                    log.warning("%s: %s", served.export.socket, error)

    def broken(self, transport: int, queue: int, error: int) -> None:
        """A guest's driver (by a queue) or its front end has broken the rules. Logged, but not each time."""
        for served in self._served:
            if served.transport != transport:
                continue
            if time.monotonic() < served.logged_s + _LOG_INTERVAL_S:
                served.left_out += 1
                continue
            what = "its front end broke the protocol" if queue == _PROTOCOL else f"queue {queue} has stopped"
            if error in (errno.EMFILE, errno.ENFILE):
                what = "a front end waits"
            why = _WHY.get(error) or reason(OSError(error, os.strerror(error)))
            before = f"; {served.left_out} such messages before it were left out" if served.left_out else ""
            log.warning("%s: %s: %s; see kvfs status%s", served.export.socket, what, why, before)
            served.logged_s = time.monotonic()
            served.left_out = 0

    def statistics(self) -> list[dict[str, object]]:
        """Socket, tag, queues and the data plane's counters of each export."""
        return [
            {
                "socket": str(served.export.socket),
                "tag": served.export.tag,
                "queues": served.export.queues,
                **self._plane.virtiofs_statistics(served.transport),
            }
            for served in self._served
            if served.transport is not None
        ]

    def close(self) -> None:
        """Remove the sockets, even of exports that are still served."""
        for served in self._served:
            _take_away(served)
            if served.left_out:
                log.warning("%s: %d more messages of broken rules were left out", served.export.socket, served.left_out)
                served.left_out = 0


def _take_away(served: _Served) -> None:
    """Close our end and remove the name, unless another socket has it by now."""
    served.listener.close()
    with suppress(OSError):
        status = os.lstat(served.export.socket)
        if (status.st_dev, status.st_ino) == served.place:
            served.export.socket.unlink()
