"""Frames of native clients as bytes (native/src/base/wire_format.h): what they are made of, and what is read from them.

Every size, count and name is checked here (I18). A breach is a Violation, which ends that client's connection and
nothing else.
"""

from __future__ import annotations

import array
import os
import re
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import trio

from kvfs.errors import KvfsError
from kvfs.types import NAME_MAX, InodeNumber

Path = Sequence[bytes]  # its parts

MAGIC = b"KVFSCLI1"
# The versions of the protocol that are served, the daemon's own last.
VERSIONS = (4, 5)
ITEMS_MAX = 4096
DIRECTORIES_MAX = 256
FDS_MAX = 128
WELCOME_MAX = 16 << 20
READ_ONLY = 1
TIMEOUT_MAX_MS = 3_600_000
SPACE_MAX = 1023
ERRNO_MAX = 4095
EVENTS_BEGIN, EVENTS_PATH = 1, 2
_SO_PEERGROUPS = 59
# Linux 6.16 (asm-generic/socket.h): whether a peer may send descriptors at all.
SO_PASSRIGHTS = 83

HELLO = struct.Struct("<8sII")
PATIENCE = struct.Struct("<II")
FRAME = struct.Struct("<IHHiI")
WELCOME = struct.Struct("<II16sQQQQIIIIII")
WHERE = struct.Struct("<QHHI")
RESERVE = struct.Struct("<QII")
COMMIT = struct.Struct("<Qq")
WORD = struct.Struct("<Q")
WORDS = struct.Struct("<QQ")
LEASE = struct.Struct("<QII")
EVENTS = struct.Struct("<IIQ")
FEED = struct.Struct("<QQQ")
assert (HELLO.size, FRAME.size, WELCOME.size) == (16, 16, 80)


class Type(IntEnum):
    HELLO = 1
    DESCRIPTORS = 2
    RESERVE = 3
    COMMIT = 4
    DELETE = 5
    LIST = 6
    LOOKUP = 7
    BAD_BLOCK = 8
    HITS = 9
    REPORT = 10
    CLOSE = 11
    LEASE = 12
    RELEASE = 13
    EVENTS = 14
    TOUCH = 15
    FOREIGN = 16
    FOREIGN_LEASE = 17
    FRESH = 18
    DONE = 19


class Flags(IntFlag):
    """enum wire_flag."""

    TABLE = 1
    HASHES = 2
    LONG = 4
    PARENTS = 8


class Violation(Exception):
    """The client sent something that the protocol does not have."""


def said_what_it_is(begun: bytes) -> bool:
    """Whether a connection with these first bytes is no native client's, or its hello is whole."""
    if not (begun.startswith(MAGIC) or MAGIC.startswith(begun)):
        return True
    if len(begun) < HELLO.size:
        return False
    _, version, _ = HELLO.unpack_from(begun)
    return version not in VERSIONS or len(begun) >= HELLO.size + PATIENCE.size


async def receive(sock: trio.socket.SocketType, size: int) -> bytes:
    """Some bytes; none at the end. Raises Violation if a descriptor came with them. The descriptor stays open there: a
    close may block (a TCP socket lingers without a bound)."""
    data, _, flags, _ = await sock.recvmsg(size, 0, socket.MSG_PEEK)
    if flags & socket.MSG_CTRUNC:
        raise Violation("sent a descriptor")
    # No byte more: a descriptor may come with those that follow.
    return await sock.recv(len(data)) if data else b""


class RefusedError(KvfsError):
    """A request that cannot be granted; its errno and message are the answer."""

    def __init__(self, error: int, text: str) -> None:
        super().__init__(text)
        self.errno = error


@dataclass(frozen=True, slots=True)
class Peer:
    pid: int
    uid: int
    gid: int
    groups: frozenset[int]
    # Let in by the mount (asked.py), whatever its user: as a native client alone.
    invited: bool = False

    @classmethod
    def of(cls, sock: socket.socket | trio.socket.SocketType) -> Peer:
        """The user and groups of the other end when it connected (SO_PEERCRED, SO_PEERGROUPS; unix(7))."""
        pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        groups = array.array("I")
        # For a peer with more than 256 groups, its first group alone counts.
        with suppress(OSError):
            groups.frombytes(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024))
        return cls(pid, uid, gid, frozenset((gid, *groups)))

    @property
    def told(self) -> str:
        """The user, for messages to it."""
        return f"user {self.uid}" + (
            " (so the host numbers it: it has a user namespace)" if is_mapped(self.pid) else ""
        )

    @property
    def may_control(self) -> bool:
        return not self.invited and self.uid in (0, os.geteuid())

    @property
    def may_connect(self) -> bool:
        return self.invited or self.may_control or os.getegid() in self.groups


def is_mapped(thread: int) -> bool:
    """Whether it has other numbers for users than this process."""
    with suppress(OSError):
        return os.readlink(f"/proc/{thread}/ns/user") != os.readlink("/proc/self/ns/user")
    return False


def parse_where(payload: bytes, allowed: Flags) -> tuple[InodeNumber, list[bytes], int, int, int]:
    """Base, the namespace's parts, count, flags, and where what follows begins."""
    base, space_size, flags, count = WHERE.unpack_from(payload)
    if count > ITEMS_MAX or flags & ~int(allowed):
        raise Violation(f"a request of {count} items with flags 0x{flags:x}")
    parts, at = parse_path(payload, WHERE.size, space_size)
    return InodeNumber(base), parts, count, flags, at


def parse_path(payload: bytes, at: int, size: int) -> tuple[list[bytes], int]:
    """The parts of a relative path, which may be empty, and where what follows begins."""
    path = payload[at : at + size]
    if size > SPACE_MAX or len(path) != size:
        raise Violation(f"a path of {size} bytes")
    parts = path.split(b"/") if path else []
    if b"\0" in path or any(part in (b"", b".", b"..") or len(part) > NAME_MAX for part in parts):
        raise Violation(f"the path {path!r}")
    return parts, at + (size + 7 & ~7)


def parse_table(payload: bytes, at: int) -> tuple[list[list[bytes]], int]:
    """The directories that a request's items are in, and where those begin."""
    (count,) = WORD.unpack_from(payload, at)
    at += WORD.size
    if not 1 <= count <= DIRECTORIES_MAX:
        raise Violation(f"a table of {count} directories")
    table = []
    for _ in range(count):
        (size,) = WORD.unpack_from(payload, at)
        parts, at = parse_path(payload, at + WORD.size, size)
        table.append(parts)
    return table, at


def parse_after(payload: bytes, at: int, pattern: re.Pattern[bytes]) -> tuple[bytes, int]:
    """The key in hex behind which a list begins, which may be empty, and where it ends."""
    (size,) = WORD.unpack_from(payload, at)
    at += WORD.size
    name = payload[at : at + size]
    if size and (len(name) != size or not pattern.fullmatch(name)):
        raise Violation(f"a key's name of {size} bytes: {name[:32]!r}")
    return name, at + (size + 7 & ~7)


def parse_end(payload: bytes, at: int) -> None:
    if at != len(payload):
        raise Violation(f"a request of {len(payload)} bytes whose items end at {at}")
