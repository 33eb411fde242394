"""Hints for eviction that users of the mount give by extended attributes (attributes.py)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvfs.errors import AccessError, InvalidArgumentError, ShareError
from kvfs.namespace.attributes import PARENT_ATTRIBUTE
from kvfs.record import Inode, Kind
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber

READ, SEARCH = 4, 1
# The kernel of a mount with --idmap does not say who asks.
UNKNOWN = 0xFFFFFFFF


class Caller(NamedTuple):
    """A user. A guest's setxattr has the guest's own number as its uid. Its other groups are not known. If gid is
    UNKNOWN, so is the user: uid is whom a hint is charged to, and gives no rights."""

    uid: int
    gid: int

    def may(self, wanted: int, inode: Inode) -> bool:
        if self.gid == UNKNOWN:
            return inode.mode & inode.mode >> 3 & inode.mode >> 6 & wanted == wanted
        shift = 6 if self.uid == inode.uid else 3 if self.gid == inode.gid else 0
        return self.uid == 0 or inode.mode >> shift & wanted == wanted


ROOT_CALLER = Caller(0, 0)


class Tree(Protocol):
    """The namespace."""

    def get(self, number: InodeNumber) -> Inode: ...

    def lookup(self, parent: InodeNumber, name: bytes) -> Inode: ...

    def find_directory(self, number: InodeNumber, path: list[bytes]) -> InodeNumber: ...

    def path(self, number: InodeNumber) -> bytes: ...


class Hints:
    def __init__(self, tree: Tree, store: Store) -> None:
        self._tree, self._store = tree, store

    def give(self, inode: Inode, name: bytes, value: bytes, caller: Caller) -> None:
        """Blocks that are kept are charged to the caller. InvalidArgumentError; ShareError: that is full;
        NotFoundError, NotDirectoryError: no such parent; AccessError: it may not be looked up."""
        if inode.kind != Kind.FILE:
            raise InvalidArgumentError(f"inode {inode.inode}: not a file: {name.decode()} is for files alone")
        if name == PARENT_ATTRIBUTE:
            self._follow(inode, value, caller)
        else:
            self._keep(inode, name, value, caller.uid)

    def parent_of(self, inode: Inode, caller: Caller) -> bytes | None:
        """As it is set; None: it is not known, or not there, or the caller may not list its directory."""
        number = self._store.plane.uses.parent(inode.inode)
        parent = None if number is None else self._store.index.get(number)
        if parent is None or parent.nameless or not self._may_list(parent.parent, caller):
            return None
        return parent.name if parent.parent == inode.parent else self._tree.path(parent.inode)

    def _may_list(self, number: InodeNumber, caller: Caller) -> bool:
        wanted = READ | SEARCH
        while True:
            directory = self._store.index.get(number)
            if directory is None or not caller.may(wanted, directory):
                return False
            if number == ROOT_INODE:
                return True
            number, wanted = directory.parent, SEARCH

    def _follow(self, inode: Inode, value: bytes, caller: Caller) -> None:
        *path, last = value.strip(b"/").split(b"/")
        directory = ROOT_INODE if value.startswith(b"/") else inode.parent
        for name in path:
            self._search(directory, caller)
            directory = self._tree.find_directory(directory, [name])
        if directory != inode.parent:
            self._search(directory, caller)
        self._store.plane.uses.follow(inode.inode, self._tree.lookup(directory, last).inode)

    def _search(self, number: InodeNumber, caller: Caller) -> None:
        directory = self._tree.get(number)
        if not caller.may(SEARCH, directory):
            who = "users whom the kernel does not name" if caller.gid == UNKNOWN else f"user {caller.uid}"
            raise AccessError(f"inode {number}: {who} may not search it, mode {directory.mode & 0o7777:o}")

    def _keep(self, inode: Inode, name: bytes, value: bytes, user: int) -> None:
        number = inode.inode
        if not inode.sealed:
            raise InvalidArgumentError(f"inode {number}: being written; {name.decode()} can be set once it is closed")
        if int(value) == 0:
            self._store.leases.drop_kept(user, number)
            self._store.plane.uses.done([number])
        elif not self._store.leases.keep(user, number, int(value)):
            raise ShareError(f"inode {number}: user {user} keeps as many blocks as one may for a while")
