"""The words between a holder and daemons: one JSON object a packet of a unix socket (SOCK_SEQPACKET), with descriptors.

A daemon asks, the holder answers each question with one packet. `v` is the version of the protocol; `error` in an
answer is a text for people. Roles name the descriptors of a packet, in their order.

A holder outlives builds, so each end speaks the versions OLDEST to VERSION. The daemon begins with its newest, and the
holder answers in that of the question. If it does not know that version, its answer is an error in the nearest one
that it speaks, and it hangs up. The daemon asks again in that one (claim.py).

Version 1 has the roles ROLES_1. From version 2 on a holder keeps memory of any role, so that a later daemon may have
more of it. A daemon lets go of memory whose role it does not know: it would not keep that true.

    {"v": 1, "op": "claim", "pool": P, "mountpoint": M}   the mount is mine, until this connection ends
        {"v": 1, "roles": [...], "state": HEX, "idle_ms": N, "last_pid": N, "takeovers": N}   and the descriptors
        {"v": 1, "roles": []}                                  no earlier daemon left any
        {"v": 1, "error": TEXT, "pid": N}                      that process has it
    {"v": 1, "op": "put", "state": HEX, "roles": [...]}   keep these instead; of the mount claimed {"v": 1}
    {"v": 1, "op": "drop"}                                the mount claimed has ended
        {"v": 1}
    {"v": 1, "op": "list"}
        {"v": 1, "mounts": [{"pool": P, "mountpoint": M, "descriptors": N, "pid": N or null}]}
"""

from __future__ import annotations

import array
import json
import os
import re
import select
import socket
import stat
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress

from kvfs.descriptors import all_above
from kvfs.errors import KvfsError, printable

VERSION, OLDEST = 2, 1
SIZE_MAX = 16384
FDS_MAX = 32
TEXT_MAX = 4096
# Roles: a clone of the mount's /dev/fuse; memory of the data plane (content/written.c, names/journal.c,
# content/opens.c).
FUSE, WRITTEN, JOURNAL, OPENS = "fuse", "written", "journal", "opens"
ROLES = (FUSE, WRITTEN, JOURNAL, OPENS)
ROLES_1 = (FUSE, WRITTEN, JOURNAL)  # as long as version 1 is spoken
_ROLE = re.compile("[a-z]{1,32}")
_FUSE_DEVICE = os.makedev(10, 229)  # Documentation/admin-guide/devices.txt
_CREDENTIALS = struct.Struct("iII")

Words = Mapping[str, object]


def process(pid: int, word: str = "process") -> str:
    """A process, for people. The kernel says 0 of one in a pid namespace that is not seen here, as of a container."""
    return f"{word} {pid}" if pid else "a process in another pid namespace"


class HoldError(KvfsError):
    """The other end breaks the protocol, refuses, or is gone."""


class VersionError(HoldError):
    """The other end speaks a version of the protocol that this one does not."""

    def __init__(self, version: object) -> None:
        spoken = str(VERSION) if OLDEST == VERSION else f"{OLDEST} to {VERSION}"
        super().__init__(f"protocol version {printable(repr(version))}; this end speaks {spoken}")
        self.nearest = max(OLDEST, min(version, VERSION)) if isinstance(version, int) else VERSION


def send(sock: socket.socket, words: Words, fds: Sequence[int] = (), version: int = VERSION) -> None:
    """One packet. HoldError if it is too long, or the other end does not take it."""
    data = json.dumps({"v": version, **words}).encode()
    if len(data) > SIZE_MAX or len(fds) > FDS_MAX:
        raise HoldError(
            f"a packet of {len(data)} bytes and {len(fds)} descriptors; {SIZE_MAX} and {FDS_MAX} are possible"
        )
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
    except OSError as error:
        raise HoldError(error.strerror or str(error)) from error


def receive(sock: socket.socket) -> tuple[dict[str, object], list[int]] | None:
    """One packet; its descriptors are the caller's. At the end it returns None. HoldError: it is no such packet, or
    none came in the socket's time."""
    try:
        data, received, flags, _ = socket.recv_fds(sock, SIZE_MAX + 1, FDS_MAX)
        fds = all_above(list(received))
    except (ConnectionError, BrokenPipeError):
        return None
    except OSError as error:
        raise HoldError(error.strerror or str(error)) from error
    if not data and not fds:
        return None
    try:
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(data) > SIZE_MAX:
            raise HoldError(f"a packet of more than {SIZE_MAX} bytes or {FDS_MAX} descriptors")
        return parse(data), fds
    except HoldError:
        close_all(fds)
        raise


def parse(data: bytes) -> dict[str, object]:
    """The words of a packet. HoldError."""
    try:
        words = json.loads(data)
    except (ValueError, RecursionError):
        raise HoldError("a packet that is no JSON") from None
    if not isinstance(words, dict):
        raise HoldError("a packet that is no JSON object")
    version = words.get("v")
    if not isinstance(version, int) or isinstance(version, bool) or not OLDEST <= version <= VERSION:
        raise VersionError(version)
    return words


def version_of(words: Words) -> int:
    """Of words that were parsed."""
    version = words["v"]
    assert isinstance(version, int)
    return version


def text_of(words: Words, name: str) -> str:
    value = words.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= TEXT_MAX:
        raise HoldError(f"{name}: a text of 1 to {TEXT_MAX} characters is expected")
    return value


def state_of(words: Words) -> bytes:
    try:
        return bytes.fromhex(text_of(words, "state"))
    except ValueError:
        raise HoldError("state: hexadecimal digits are expected") from None


def is_spoken(role: object, version: int) -> bool:
    """Whether descriptors of this role may be named in that version."""
    if version == 1:
        return role in ROLES_1
    return isinstance(role, str) and _ROLE.fullmatch(role) is not None


def roles_of(words: Words, fds: Sequence[int]) -> list[str]:
    """The role of each descriptor, of a whole mount or of nothing at all. HoldError unless each is of that kind,
    and all /dev/fuse are of one connection, as far as the kernel says."""
    roles, version = words.get("roles"), version_of(words)
    if not isinstance(roles, list) or len(roles) != len(fds) or not all(is_spoken(role, version) for role in roles):
        some = f"one of {', '.join(ROLES_1)}" if version == 1 else "a word of 1 to 32 letters a to z"
        raise HoldError(f"roles: {some} is expected for each of {len(fds)} descriptors")
    counts = {role: roles.count(role) for role in (FUSE, WRITTEN, *roles)}
    if roles and (not counts[FUSE] or not counts[WRITTEN] or any(counts[role] > 1 for role in counts if role != FUSE)):
        raise HoldError(
            f"roles: {counts}: a mount has /dev/fuse, one list of written inodes, and at most one memory of each other "
            "role"
        )
    connections = set()
    for fd, role in zip(fds, roles, strict=True):
        status = os.fstat(fd)
        is_fuse = stat.S_ISCHR(status.st_mode) and status.st_rdev == _FUSE_DEVICE
        if is_fuse != (role == FUSE) or not (is_fuse or stat.S_ISREG(status.st_mode)):
            kind = f"mode {status.st_mode:o}, device {os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
            raise HoldError(f"a descriptor that is no {'/dev/fuse' if role == FUSE else role} ({kind})")
        if is_fuse:
            connections.add(connection_of(fd))
    if len(connections) > 1:
        raise HoldError(f"descriptors of {len(connections)} FUSE connections: {sorted(map(str, connections))}")
    return roles


def connection_of(fd: int) -> str | None:
    """The number of a FUSE connection, where the kernel says it (Linux 6.18)."""
    with suppress(OSError), open(f"/proc/self/fdinfo/{fd}", encoding="ascii", errors="replace") as info:
        for line in info:
            name, _, value = line.partition(":")
            if name == "fuse_connection":
                return value.strip()
    return None


def is_alive(fuse: int) -> bool:
    """Whether the mount of a /dev/fuse is still there: the kernel says EPOLLERR else."""
    poller = select.poll()
    poller.register(fuse, 0)
    return not poller.poll(0)


def peer(sock: socket.socket) -> tuple[int, int]:
    """Pid and uid of the process at the other end: of the one that listened, or that connected."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def trusted(uid: int) -> bool:
    """Whether a peer of this user may give and take the descriptors of this user's mounts."""
    return uid in (0, os.geteuid())


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
