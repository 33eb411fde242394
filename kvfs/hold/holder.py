"""`kvfs hold`: keeps the descriptors of mounts while no daemon serves them, so that the next one goes on.

Knows no pool and no request: it stores descriptors and a few bytes, and gives them to the next daemon that claims the
mount. One connection claims a mount at a time. Its end is the proof that the daemon is dead: the kernel closes it as
the last thread goes. The holder ends with its last mount.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path

from kvfs.descriptors import above
from kvfs.errors import printable
from kvfs.hold.words import (
    FUSE,
    VERSION,
    HoldError,
    VersionError,
    Words,
    close_all,
    is_alive,
    is_spoken,
    peer,
    process,
    receive,
    roles_of,
    send,
    state_of,
    text_of,
    trusted,
    version_of,
)

# One logger name for the whole room: it is in every line of the log.
log = logging.getLogger(__package__)

MOUNTS_MAX = 64
CONNECTIONS_MAX = 128
# Between looks at mounts. A poll of /dev/fuse would wake the holder for every request.
LOOK_S = 1.0
# A connection that claims nothing within that is closed.
SILENT_S = 10.0

Key = tuple[str, str]


@dataclass(slots=True)
class Connection:
    sock: socket.socket
    pid: int
    since: float
    claims: Key | None = None
    version: int = VERSION  # of its last question, and so of the answer


@dataclass(slots=True)
class Held:
    """A mount: what its daemon has put here."""

    state: bytes
    roles: list[str]
    fds: list[int] = field(default_factory=list)
    last_pid: int = 0
    takeovers: int = 0
    alone_since: float | None = None

    def is_alive(self) -> bool:
        """Whether it is still mounted."""
        return is_alive(self.fds[self.roles.index(FUSE)])


class Holder:
    """`timeout_s`: a mount that no daemon serves for so long ends, so that nothing waits for ever."""

    def __init__(self, listener: socket.socket, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._listener, self._timeout_s, self._clock = listener, timeout_s, clock
        self._connections: dict[int, Connection] = {}
        self._mounts: dict[Key, Held] = {}
        self._poller = select.poll()
        self._poller.register(listener, select.POLLIN)
        self._had_mounts = False

    def run(self) -> None:
        """Until the last mount has ended."""
        try:
            while not self._is_done():
                self.turn(LOOK_S)
        finally:
            self.close()

    def _is_done(self) -> bool:
        claimed = any(connection.claims for connection in self._connections.values())
        return self._had_mounts and not self._mounts and not claimed

    def close(self) -> None:
        for held in self._mounts.values():
            close_all(held.fds)
        for connection in self._connections.values():
            connection.sock.close()
        self._mounts.clear()
        self._connections.clear()

    def turn(self, timeout_s: float) -> None:
        """Wait for questions, at most so long, and answer them; then look after the mounts."""
        for fd, _ in self._poller.poll(timeout_s * 1000):
            if fd == self._listener.fileno():
                self._accept()
            elif (connection := self._connections.get(fd)) is not None:
                self._hear(connection)
        self._look()

    def _accept(self) -> None:
        with suppress(OSError):
            made, _ = self._listener.accept()
            sock = socket.socket(fileno=above(made.detach()))
            pid, uid = peer(sock)
            if not trusted(uid) or len(self._connections) >= CONNECTIONS_MAX:
                log.warning("%s of user %d: refused", process(pid), uid)
                sock.close()
                return
            sock.setblocking(False)
            self._connections[sock.fileno()] = Connection(sock, pid, self._clock())
            self._poller.register(sock, select.POLLIN)

    def _hear(self, connection: Connection) -> None:
        try:
            packet = receive(connection.sock)
            if packet is None:
                self._end(connection)
                return
            words, fds = packet
        except HoldError as error:
            if isinstance(error, VersionError):
                connection.version = error.nearest
            self._refuse(connection, error)
            return
        connection.version = version_of(words)
        try:
            self._answer(connection, words, fds)
        except HoldError as error:
            close_all(fds)
            self._refuse(connection, error)

    def _refuse(self, connection: Connection, error: HoldError) -> None:
        log.warning("%s: %s", process(connection.pid), error)
        with suppress(HoldError):
            _tell(connection, {"error": str(error)})
        self._end(connection)

    def _answer(self, connection: Connection, words: Words, fds: list[int]) -> None:
        op = words.get("op")
        if op == "put" and connection.claims is not None:
            self._put(connection, connection.claims, words, fds)
            return
        if fds:
            raise HoldError(f"{len(fds)} descriptors with {printable(repr(op))}")
        if op == "claim" and connection.claims is None:
            self._claim(connection, (text_of(words, "pool"), text_of(words, "mountpoint")))
        elif op == "drop" and connection.claims is not None:
            if connection.claims in self._mounts:
                self._drop(connection.claims, "its daemon has ended it")
            _tell(connection, {})
        elif op == "list":
            _tell(connection, {"mounts": self._list()})
        else:
            raise HoldError(f"operation {printable(repr(op))} is not known, or comes at the wrong time")

    def _claim(self, connection: Connection, key: Key) -> None:
        owner = self._owner(key)
        if owner is not None:
            text = f"{process(owner.pid)} serves {key[1]} of pool {key[0]}: it must end first"
            _tell(connection, {"error": text, "pid": owner.pid})
            return
        held = self._mounts.get(key)
        if held is not None and not held.is_alive():
            self._drop(key, "it has been unmounted")
            held = None
        if held is None and len(self._mounts) >= MOUNTS_MAX:
            raise HoldError(f"{len(self._mounts)} mounts are held; {MOUNTS_MAX} are possible")
        if held is None:
            _tell(connection, {"roles": [], "idle_ms": 0})
        else:
            idle_s = self._clock() - (held.alone_since or self._clock())
            held.takeovers += 1
            spoken = [is_spoken(role, connection.version) for role in held.roles]
            words: dict[str, object] = {"roles": list(compress(held.roles, spoken)), "state": held.state.hex()}
            words |= {"idle_ms": int(idle_s * 1000), "last_pid": held.last_pid, "takeovers": held.takeovers}
            _tell(connection, words, list(compress(held.fds, spoken)))
            held.alone_since, held.last_pid = None, connection.pid
            log.info("%s: %s has it, after %.2f s", key[1], process(connection.pid), idle_s)
        connection.claims = key

    def _put(self, connection: Connection, key: Key, words: Words, fds: list[int]) -> None:
        roles, state = roles_of(words, fds), state_of(words)
        if not roles:
            raise HoldError("put: no descriptors")
        before = self._mounts.get(key)
        self._mounts[key] = Held(state, roles, fds, connection.pid, 0 if before is None else before.takeovers)
        self._had_mounts = True
        if before is not None:
            close_all(before.fds)
        _tell(connection, {})
        log.info("%s of pool %s: %d descriptors of %s", key[1], key[0], len(fds), process(connection.pid))

    def _owner(self, key: Key) -> Connection | None:
        return next((each for each in self._connections.values() if each.claims == key), None)

    def _list(self) -> list[dict[str, object]]:
        return [
            {
                "pool": key[0], "mountpoint": key[1], "descriptors": len(held.fds),
                "pid": None if (owner := self._owner(key)) is None else owner.pid,
            }
            for key, held in self._mounts.items()
        ]  # fmt: skip

    def _end(self, connection: Connection) -> None:
        self._poller.unregister(connection.sock)
        del self._connections[connection.sock.fileno()]
        connection.sock.close()
        held = None if connection.claims is None else self._mounts.get(connection.claims)
        if held is not None and connection.claims is not None:
            held.alone_since = self._clock()
            if held.is_alive():
                log.info("%s: %s has ended; requests wait", connection.claims[1], process(connection.pid))

    def _drop(self, key: Key, why: str) -> None:
        log.info("%s of pool %s: %s", key[1], key[0], why)
        close_all(self._mounts.pop(key).fds)

    def _look(self) -> None:
        now = self._clock()
        for connection in list(self._connections.values()):
            if connection.claims is None and now - connection.since > SILENT_S:
                self._end(connection)
        for key, held in list(self._mounts.items()):
            if not held.is_alive():
                self._drop(key, "it has been unmounted")
            elif held.alone_since is not None and now - held.alone_since > self._timeout_s:
                self._drop(key, f"no daemon came for {self._timeout_s:g} s: the mount ends")


def _tell(connection: Connection, words: Words, fds: Sequence[int] = ()) -> None:
    send(connection.sock, words, fds, connection.version)


def listen(path: Path) -> socket.socket:
    """A socket that this user and root may connect to. HoldError: another holder listens there, or a file lies
    there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        listener = socket.socket(fileno=above(listener.detach()))
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise HoldError(f"{path}: a file that is no socket is there")
            if _answers(path):
                raise HoldError(f"{path}: another process listens there")
            path.unlink()
        before = os.umask(0o177)
        try:
            listener.bind(os.fspath(path))
        finally:
            os.umask(before)
        listener.listen(16)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise HoldError(f"{path}: {error.strerror or error}") from error
    except BaseException:
        listener.close()
        raise
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(LOOK_S)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True
