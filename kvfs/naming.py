"""A handle to the data plane's changes of names (native/include/kvfs_naming.h): typed calls.

Decides nothing. The store brings what such a change lacks (kvfs/store/bringing.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple, cast

from kvfs._native import ffi, lib
from kvfs.lent import lent
from kvfs.types import InodeNumber

TRIES: int = lib.KVFS_NAMING_TRIES
RENAME_NOREPLACE = 1
# A flag of END: also while it is open.
END_OPEN: int = lib.KVFS_NAMING_OPEN
_FILE, _DIRECTORY = lib.KVFS_KIND_FILE, lib.KVFS_KIND_DIRECTORY


class Act(IntEnum):
    """enum kvfs_naming_kind: what makes, renames and removes names, and changes records."""

    UNLINK = 1
    DELETE = 2
    RMDIR = 3
    RENAME = 4
    TAKE = 5
    END = 6
    CREATE = 7
    MKDIR = 8
    SYMLINK = 9
    COPY = 10
    BORROW = 11
    OWN = 12
    SET = 13
    FOLLOW = 14
    MARK = 15
    ATTRIBUTE = 16
    UNSET = 17


class Need(IntEnum):
    """enum kvfs_need: what it lacks."""

    INODES = 1
    NAME = 2
    ABOVE = 3
    EMPTY = 4


class Attribute(IntFlag):
    """enum kvfs_set: what SET changes."""

    MODE = 1
    UID = 2
    GID = 4
    SIZE = 8
    ATIME = 16
    MTIME = 32
    CONTENT = 64
    KILL = 128


class Given(NamedTuple):
    """What is made, or what a record gets."""

    mode: int = 0
    uid: int = 0
    gid: int = 0
    # Where a symbolic link leads, the record of a block, or the value of the attribute `key`.
    data: bytes = b""
    key: bytes = b""
    set: int = 0  # of Attribute
    size: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    killer_gid: int = 0
    on: int = 0  # of InodeFlags
    off: int = 0


class Naming:
    """One change of names. End it by end()."""

    def __init__(
        self, plane: object, act: Act, parent: int = 0, name: bytes = b"", new_parent: int = 0, new_name: bytes = b"",
        flags: int = 0, inode: int = 0, given: Given | None = None,
    ) -> None:  # fmt: skip
        self.act, self.names, self.parents, self.inode = act, (name, new_name), (parent, new_parent), inode
        self._plane = plane
        self._texts = ffi.new("char[]", name), ffi.new("char[]", new_name)  # as long as C reads them
        told = self._told = ffi.new("struct kvfs_naming *")
        told.kind, told.flags, told.inode = act, flags, inode
        told.parent, told.new_parent = parent, new_parent
        told.name, told.new_name = self._texts
        told.name_size, told.new_name_size = len(name), len(new_name)
        if given is not None:
            self._given = lent(given.data), lent(given.key)  # as long as C reads them
            told.data, told.key = self._given
            told.data_size, told.key_size = len(given.data), len(given.key)
            told.mode, told.uid, told.gid, told.killer_gid = given.mode, given.uid, given.gid, given.killer_gid
            told.set, told.on, told.off = given.set, given.on, given.off
            told.size, told.atime_ns, told.mtime_ns = given.size, given.atime_ns, given.mtime_ns

    def go(self) -> int:
        """Returns 0 if it is done, a negative errno, or a Need. Then neither name has changed. In a pod a directory on
        the way may be this node's too from now on, or others' alone."""
        return cast(int, lib.kvfs_naming(self._plane, self._told))

    def end(self) -> None:
        lib.kvfs_naming_end(self._plane, self._told)

    @property
    def given_name(self) -> int:
        """Of `names`, the one that is given to an inode."""
        return int(self.act == Act.RENAME)

    # ---- what it lacks ----

    @property
    def inodes(self) -> list[InodeNumber]:
        return [InodeNumber(self._told.inodes[i]) for i in range(self._told.inode_count)]

    @property
    def which(self) -> int:
        """Of `names` and `parents`."""
        return cast(int, self._told.which)

    def gone(self, inodes: Sequence[int]) -> None:
        """The index has no record of these."""
        for inode in inodes:
            self._told.gone[self._told.gone_count] = inode
            self._told.gone_count += 1

    def name_is_free(self) -> None:
        """The index has nobody by the name that was asked for."""
        self._told.known |= lib.KVFS_KNOWN_FREE << self._told.which

    def is_empty(self, directory: int, empty: bool, is_open: bool) -> None:
        if empty:
            self._told.empty = directory
        else:
            self._told.full = directory
        if is_open:
            self._told.known |= lib.KVFS_KNOWN_OPEN

    @property
    def emptied(self) -> InodeNumber:
        """The directory that is_empty() said is empty; 0: none."""
        return InodeNumber(self._told.empty)

    def hidden(self, holders: Sequence[int]) -> None:
        """The inodes on devices that are away that have its names; 0: none has."""
        self._told.hidden = list(holders)

    # ---- what was done ----

    @property
    def kept(self) -> int:
        """What lost its name lives on: enum kvfs_kept."""
        return cast(int, self._told.kept)

    @property
    def lingers(self) -> bool:
        """A file lost its name by a rename: look-ups of a moment ago may still open it."""
        return bool(self._told.lingers)

    @property
    def untold(self) -> bool:
        """Hosts may believe that the new name leads to an evicted block, or in rights of before."""
        return bool(self._told.untold)

    @property
    def is_below(self) -> bool:
        """A directory's record is another: blocks below it have the one before in their headers."""
        return bool(self._told.below)

    @property
    def lost(self) -> InodeNumber | None:
        """The file that lost its name, or has gone; None: a directory, or nothing."""
        removed = self._told.removed
        return InodeNumber(removed.inode) if removed and removed.kind == _FILE else None

    @property
    def is_of_directories(self) -> bool:
        """A directory was removed or renamed."""
        return any(record and record.kind == _DIRECTORY for record in (self._told.removed, self._told.before))

    @property
    def removed(self) -> bytes | None:
        """The record of what lost its name, or has gone, as it was."""
        return _record(self._told.removed)

    @property
    def made(self) -> bytes:
        """The record of what was made, found instead, or changed, as it is now."""
        record = _record(self._told.after)
        assert record is not None
        return record

    @property
    def renamed(self) -> tuple[bytes, bytes] | None:
        """The record of what was renamed, before and after."""
        before, after = _record(self._told.before), _record(self._told.after)
        return None if before is None or after is None else (before, after)


def _record(record: Any) -> bytes | None:
    return bytes(ffi.buffer(record, record.record_size)) if record else None
