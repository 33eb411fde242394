"""A daemon's side of a holder: the claim of a mount, and what an earlier daemon left of it."""

from __future__ import annotations

import logging
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvfs.descriptors import above, reason
from kvfs.errors import printable
from kvfs.hold.words import (
    FUSE,
    ROLES,
    VERSION,
    HoldError,
    Words,
    close_all,
    is_spoken,
    peer,
    process,
    receive,
    roles_of,
    send,
    state_of,
    trusted,
    version_of,
)

# One logger name for the whole room: it is in every line of the log.
log = logging.getLogger(__package__)

ANSWER_TIMEOUT_S = 10.0
# A daemon that was killed has gone within that, and so has its connection.
GOING_S = 5.0
_AGAIN_S = 0.02


@dataclass(slots=True)
class Left:
    """A mount as an earlier daemon left it. The descriptors are the receiver's."""

    state: bytes
    fuse: list[int]
    memories: dict[str, int]  # by their roles
    idle_s: float | None  # unknown of systemd
    pid: int
    takeovers: int = 0  # with this one; 0: an older holder counts none

    def close(self) -> None:
        close_all([*self.fuse, *self.memories.values()])


class Claim(ABC):
    """A mount that this process serves, as a holder knows it. It lasts until close(), or the end of this process."""

    def __init__(self, path: Path, pid: int, left: Left | None) -> None:
        """path: --hold's. pid: the holder's."""
        self.path, self.pid, self.left = path, pid, left

    @abstractmethod
    def fileno(self) -> int:
        """Readable once the holder has ended, or keeps nothing."""

    @abstractmethod
    def put(self, state: bytes, fuse: Sequence[int], memories: Mapping[str, int]) -> None:
        """Have the holder keep these for the next daemon, and nothing else of the mount. Memories by their roles; one
        that the holder's version has no word for is not kept. HoldError."""

    @abstractmethod
    def drop(self) -> None:
        """The mount has ended: the holder keeps nothing of it. HoldError."""

    def close(self) -> None:
        if self.left is not None:
            self.left.close()
            self.left = None


class SocketClaim(Claim):
    """At a holder that listens on a socket. It says nothing unasked."""

    def __init__(self, path: Path, sock: socket.socket, left: Left | None, version: int) -> None:
        super().__init__(path, peer(sock)[0], left)
        self._sock, self.version = sock, version

    def fileno(self) -> int:
        return self._sock.fileno()

    def put(self, state: bytes, fuse: Sequence[int], memories: Mapping[str, int]) -> None:
        kept = {role: fd for role, fd in memories.items() if is_spoken(role, self.version)}
        words: dict[str, object] = {"op": "put", "state": state.hex(), "roles": [*[FUSE] * len(fuse), *kept]}
        _ask(self.path, self._sock, words, self.version, [*fuse, *kept.values()])

    def drop(self) -> None:
        _ask(self.path, self._sock, {"op": "drop"}, self.version)

    def close(self) -> None:
        self._sock.close()
        super().close()


def connect(path: Path) -> socket.socket:
    """A connection to the holder. HoldError: no holder listens there, or one that may not have this user's mounts."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock = socket.socket(fileno=above(sock.detach()))
        sock.settimeout(ANSWER_TIMEOUT_S)
        sock.connect(os.fspath(path))
        pid, uid = peer(sock)
    except OSError as error:
        sock.close()
        raise HoldError(f"--hold {path}: {reason(error)}; kvfs hold {path} listens there") from error
    if not trusted(uid):
        sock.close()
        raise HoldError(
            f"--hold {path}: {process(pid)} of user {uid} listens there: a holder of root or user {os.geteuid()} "
            "is expected"
        )
    return sock


def claim(path: Path, pool: str, mountpoint: str, going: Callable[[int], bool]) -> SocketClaim:
    """Claim a mount. HoldError, also if another process has it, unless that one has ended within GOING_S. `going`:
    whether the process with this number is about to end."""
    until, version = time.monotonic() + GOING_S, VERSION
    while True:
        sock = connect(path)
        try:
            words, fds = _ask(path, sock, {"op": "claim", "pool": pool, "mountpoint": mountpoint}, version)
            return SocketClaim(path, sock, _left(path, words, fds), version)
        except _RefusedError as error:
            sock.close()
            if error.version < version:  # an older holder
                version = error.version
                continue
            if time.monotonic() > until or error.pid is None or not going(error.pid):
                raise HoldError(str(error)) from None
            time.sleep(_AGAIN_S)
        except BaseException:
            sock.close()
            raise


class _RefusedError(HoldError):
    """The holder's own error. A version below the question's: it knows none above that."""

    pid: int | None = None
    version = VERSION


def _ask(
    path: Path, sock: socket.socket, words: dict[str, object], version: int, fds: Sequence[int] = ()
) -> tuple[dict[str, object], list[int]]:
    try:
        send(sock, words, fds, version)
        packet = receive(sock)
    except HoldError as error:
        raise HoldError(f"--hold {path}: {error}") from error
    if packet is None:
        raise HoldError(f"--hold {path}: the holder has ended")
    answer, received = packet
    if "error" in answer:
        close_all(received)
        refused = _RefusedError(f"--hold {path}: {printable(str(answer['error']))}")
        pid = answer.get("pid")
        refused.pid = pid if isinstance(pid, int) else None
        refused.version = version_of(answer)
        raise refused
    return answer, received


def _left(path: Path, words: Words, fds: list[int]) -> Left | None:
    try:
        return left_of(words, fds)
    except HoldError as error:
        with suppress(OSError):
            close_all(fds)
        raise HoldError(f"--hold {path}: {error}") from error


def left_of(words: Words, fds: Sequence[int]) -> Left | None:
    """The mount that was left, by its words; None: there is none. Memory of roles that this build does not know is
    closed. HoldError."""
    roles = roles_of(words, fds)
    if not roles:
        return None
    state, given = state_of(words), list(zip(roles, fds, strict=True))
    for role in sorted(set(roles).difference(ROLES)):
        log.warning("another build has left memory %r, which this one does not know: it is let go", role)
    close_all([fd for role, fd in given if role not in ROLES])
    idle_ms, pid, takeovers = words.get("idle_ms"), words.get("last_pid"), words.get("takeovers")
    return Left(
        state, [fd for role, fd in given if role == FUSE],
        {role: fd for role, fd in given if role in ROLES and role != FUSE},
        idle_ms / 1000 if isinstance(idle_ms, int) else None, pid if isinstance(pid, int) else 0,
        takeovers if isinstance(takeovers, int) else 0,
    )  # fmt: skip
