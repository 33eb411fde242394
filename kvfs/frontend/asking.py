"""Asking a pool's daemon, by its control socket (control.py has the lines): for the command line.

Imports nothing of the daemon: a command that only asks starts in a third of the time.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from kvfs.errors import DeadlineError, KvfsError
from kvfs.frontend.holders import is_stopped

SOCKET_NAME = "control.sock"
PID_NAME = "kvfs.pid"
_SO_PEERPIDFD = 77  # since Linux 6.5
# A daemon says something at least once a second, also while a command takes long.
TIMEOUT_S = 15.0


@contextmanager
def socket_path(pool: Path) -> Iterator[str]:
    """A name of the pool's socket that fits into sockaddr_un (108 bytes), however long the pool's path is."""
    directory = os.open(pool, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{SOCKET_NAME}"
    finally:
        os.close(directory)


def how_to_mount(pool: Path) -> str:
    """The advice for a pool that is not mounted, as the end of a phrase; empty if it is no pool."""
    return f": kvfs mount {shlex.quote(str(pool))} MOUNTPOINT" if (pool / "pool.toml").exists() else ", and no pool"


class NotRunningError(KvfsError):
    """No daemon serves this pool."""


class NotAllowedError(KvfsError):
    """The pool is another user's."""

    errno = errno.EACCES


def not_yours(pool: Path) -> NotAllowedError:
    """The error for a user who may not look into a pool's directory."""
    try:
        owner = f"user {os.stat(pool).st_uid}"
    except OSError:
        owner = "its owner"
    return NotAllowedError(f"{pool}: user {os.geteuid()} may not ask its daemon: only root and {owner} may")


def stopped(pid: int) -> str:
    """The words for a daemon that stands still."""
    return f"the daemon (pid {pid}) is stopped, by SIGSTOP or a debugger: kill -CONT {pid} lets it go on"


class ControlClient:
    """The other end, for the command line: plain blocking calls. Each word of the daemon has a deadline."""

    def __init__(self, pool: Path, timeout_s: float | None = None) -> None:
        """Raises KvfsError if no daemon listens."""
        self._pool = pool
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(TIMEOUT_S if timeout_s is None else timeout_s)
        self._pending = b""
        try:
            with socket_path(pool) as path:
                self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            if isinstance(error, (FileNotFoundError, ConnectionRefusedError, NotADirectoryError)):
                raise NotRunningError(f"{pool}: not mounted{how_to_mount(pool)}") from error
            if isinstance(error, PermissionError):
                raise not_yours(pool) from error
            failure = KvfsError(f"{pool}: {os.strerror(error.errno or 0)}")
            failure.errno = error.errno or errno.EIO
            raise failure from error

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(
        self, command: str, progress: Callable[[Mapping[str, object]], None] | None = None, **arguments: object
    ) -> object:
        """The result of a command. Raises KvfsError with the daemon's words, or DeadlineError."""
        try:
            self._socket.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            while True:
                document = json.loads(self._line())
                if "progress" in document:
                    if progress is not None:
                        progress(document["progress"])
                    continue
                break
        except TimeoutError as error:
            pid = self.peer_pid()
            why = f"the daemon gave no answer to {command!r} for {self._socket.gettimeout():g} s"
            raise DeadlineError(f"{self._pool}: {stopped(pid) if is_stopped(pid) else why}") from error
        except (OSError, ValueError) as error:
            raise KvfsError(f"{self._pool}: the daemon broke off: {error}") from error
        if not document.get("ok"):
            failure = KvfsError(f"{self._pool}: {document.get('error')}")
            code = document.get("errno")
            failure.errno = code if isinstance(code, int) else errno.EIO
            raise failure
        return cast(object, document.get("result"))

    def peer_pid(self) -> int:
        """Of the listener (SO_PEERCRED, unix(7)); 0 if it is none of our pid namespace. The pid file may be an earlier
        daemon's, and has the number that the daemon has in its own namespace."""
        return cast(int, struct.unpack("3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])

    def peer_descriptor(self) -> int | None:
        """A pidfd of the listener, whatever its pid namespace; it is the caller's. An old kernel may have none:
        None."""
        try:
            return cast(int, struct.unpack("i", self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))[0])
        except OSError:
            pid = self.peer_pid()
            try:
                return os.pidfd_open(pid) if pid else None
            except OSError:
                return None

    def _line(self) -> bytes:
        while b"\n" not in self._pending:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError("connection closed")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line
