"""The journal of names (native/include/kvfs_names.h): made, and read with all of it checked.

It is memory that outlives a daemon, with the changes of names that the index does not have yet. Its keeper makes it. A
daemon reads it, then attaches it to its names (kvfs/names.py). kvfs/store/inheritance.py says how it is taken in.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, cast

from kvfs._native import ffi, lib
from kvfs.errors import KvfsError

SIZE_MIN, SIZE_MAX = 64 << 10, 16 << 30
# A commit begins after 20,000 changes at the latest, of some 300 bytes each. The rest is for a commit that takes long.
SIZE_USUAL = 64 << 20
_ENTRY = struct.Struct("<IBBHQQQQII")
assert _ENTRY.size == ffi.sizeof("struct kvfs_journal_entry")
_LAST, _HELD = 1, 2


class JournalError(KvfsError):
    """A descriptor is no journal, or one that cannot be used."""

    errno = errno.EBADMSG


class Kind(IntEnum):
    """enum kvfs_journal_kind."""

    PUT = 1
    REMOVE = 2


class Entry(NamedTuple):
    """A change of one inode."""

    kind: Kind
    held: bool  # nothing has changed: told again, as no commit writes it
    sequence: int
    inode: int
    transport: int  # of the request that the step has done, with its `unique` without bit 63; 0: there was none
    unique: int
    data: bytes  # of PUT the record


@dataclass(frozen=True, slots=True)
class Journal:
    """The content of a journal: whole steps, each a list of entries."""

    id: int
    durable: int  # the index has all up to this sequence number
    sequence: int  # the last that was given
    refused: int  # bytes behind the last whole step: torn, or damaged
    steps: list[list[Entry]]


@dataclass(frozen=True, slots=True)
class Fill:
    """How full an attached journal is, in bytes."""

    size: int
    used: int
    lost: int  # entries that had no room
    unanswered: int  # requests whose entries wait for that


def make(size: int = SIZE_USUAL) -> int:
    """The descriptor of a new, empty journal. JournalError."""
    fd = cast(int, lib.kvfs_journal_make(size))
    if fd < 0:
        why = f"{SIZE_MIN} to {SIZE_MAX}, in whole pages, are expected" if -fd == errno.EINVAL else os.strerror(-fd)
        raise _error(-fd, f"a journal of {size} bytes cannot be made: {why}")
    return fd


def read(fd: int) -> Journal:
    """All whole steps of a journal without a writer. JournalError."""
    found, result = ffi.new("struct kvfs_journal_found *"), ffi.new("int *")
    entries = lib.kvfs_journal_read(fd, found, result)
    if entries == ffi.NULL:
        raise failure(-result[0], fd)
    try:
        data = cast(bytes, ffi.buffer(entries, found.size)[:])
    finally:
        lib.kvfs_journal_free(entries)
    return Journal(found.id, found.durable, found.sequence, found.refused, list(_steps(data)))


def failure(number: int, fd: int) -> JournalError:
    """Why descriptor `fd` cannot be read or attached."""
    why = {
        errno.EBADMSG: "it is no journal of names, or a damaged one; give one that this kvfs has made",
        errno.EPROTONOSUPPORT: "another version of kvfs has made it; give a new one",
    }.get(number) or os.strerror(number)
    return _error(number, f"journal at descriptor {fd}: {why}")


def _error(number: int, text: str) -> JournalError:
    error = JournalError(text)
    error.errno = number
    return error


def _steps(data: bytes) -> Iterator[list[Entry]]:
    """C has proven each entry, and ends with a whole step."""
    step: list[Entry] = []
    at = 0
    while at < len(data):
        _, kind, flags, _, sequence, inode, transport, unique, size, _ = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        entry = Entry(Kind(kind), bool(flags & _HELD), sequence, inode, transport, unique, data[at : at + size])
        step.append(entry)
        at += size + 7 & ~7
        if flags & _LAST:
            yield step
            step = []
