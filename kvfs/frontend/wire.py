"""Frames of native clients as bytes (native/include/kvfs_wire.h): what they are made of, and what is read from them.

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

from kvfs._native import ffi, lib
from kvfs.errors import KvfsError
from kvfs.types import NAME_MAX, InodeNumber

Path = Sequence[bytes]  # its parts

MAGIC = b"KVFSCLI1"
# The versions of the protocol that are served, the daemon's own last.
VERSIONS = tuple(range(lib.KVFS_WIRE_OLDEST, lib.KVFS_WIRE_VERSION + 1))
ITEMS_MAX: int = lib.KVFS_WIRE_ITEMS_MAX
DIRECTORIES_MAX: int = lib.KVFS_WIRE_DIRECTORIES_MAX
FDS_MAX: int = lib.KVFS_WIRE_FDS_MAX
WELCOME_MAX: int = lib.KVFS_WIRE_SIZE_MAX
READ_ONLY: int = lib.KVFS_READ_ONLY
TIMEOUT_MAX_MS = 3_600_000
SPACE_MAX: int = lib.KVFS_WIRE_SPACE_MAX
ERRNO_MAX: int = lib.KVFS_WIRE_ERRNO_MAX
EVENTS_BEGIN: int = lib.KVFS_WIRE_EVENTS_BEGIN
EVENTS_PATH: int = lib.KVFS_WIRE_EVENTS_PATH
_SO_PEERGROUPS = 59
# Linux 6.16 (asm-generic/socket.h): whether a peer may send descriptors at all.
SO_PASSRIGHTS = 83
_CODES = {"uint8_t": "B", "uint16_t": "H", "uint32_t": "I", "int32_t": "i", "uint64_t": "Q", "int64_t": "q"}


def layout(name: str, fields: slice = slice(None)) -> struct.Struct:
    """Return some fields of a struct of kvfs_wire.h, packed as C has them."""
    found = ffi.typeof(f"struct {name}").fields[fields]
    codes = (_CODES[one.type.cname] if one.type.kind == "primitive" else f"{one.type.length}s" for _, one in found)
    result = struct.Struct("<" + "".join(codes))
    assert result.size == found[-1][1].offset + ffi.sizeof(found[-1][1].type) - found[0][1].offset, name
    return result


# A hello's last two fields are read once its version is known.
HELLO, PATIENCE = layout("wire_hello", slice(3)), layout("wire_hello", slice(3, None))
FRAME = layout("wire_frame")
WELCOME = layout("wire_welcome")
WHERE = layout("wire_where")
WORD = struct.Struct("<Q")
WORDS = struct.Struct("<QQ")
LEASE = layout("wire_lease")
EVENTS = layout("wire_events")
FEED = layout("wire_feed")
FOREIGN = layout("wire_foreign")


class Type(IntEnum):
    HELLO = lib.WIRE_HELLO
    DESCRIPTORS = lib.WIRE_DESCRIPTORS
    RESERVE = lib.WIRE_RESERVE
    COMMIT = lib.WIRE_COMMIT
    DELETE = lib.WIRE_DELETE
    LIST = lib.WIRE_LIST
    LOOKUP = lib.WIRE_LOOKUP
    BAD_BLOCK = lib.WIRE_BAD_BLOCK
    HITS = lib.WIRE_HITS
    REPORT = lib.WIRE_REPORT
    CLOSE = lib.WIRE_CLOSE
    LEASE = lib.WIRE_LEASE
    RELEASE = lib.WIRE_RELEASE
    EVENTS = lib.WIRE_EVENTS
    TOUCH = lib.WIRE_TOUCH
    FOREIGN = lib.WIRE_FOREIGN
    FOREIGN_LEASE = lib.WIRE_FOREIGN_LEASE
    FRESH = lib.WIRE_FRESH
    DONE = lib.WIRE_DONE


class Flags(IntFlag):
    """enum wire_flag."""

    TABLE = lib.WIRE_TABLE
    HASHES = lib.WIRE_HASHES
    LONG = lib.WIRE_LONG
    PARENTS = lib.WIRE_PARENTS


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
