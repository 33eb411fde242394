"""Hints for eviction that users of the mount give by extended attributes (attributes.py)."""

from __future__ import annotations

from typing import Protocol

from kvfs.errors import InvalidArgumentError, ShareError
from kvfs.namespace.attributes import PARENT_ATTRIBUTE
from kvfs.record import Inode, Kind
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber


class Tree(Protocol):
    """The namespace."""

    def lookup(self, parent: InodeNumber, name: bytes) -> Inode: ...

    def find_directory(self, number: InodeNumber, path: list[bytes]) -> InodeNumber: ...

    def path(self, number: InodeNumber) -> bytes: ...


class Hints:
    def __init__(self, tree: Tree, store: Store) -> None:
        self._tree, self._store = tree, store

    def give(self, inode: Inode, name: bytes, value: bytes, user: int) -> None:
        """user: whom blocks that are kept are charged to. InvalidArgumentError; ShareError: that is full;
        NotFoundError, NotDirectoryError: no such parent."""
        if inode.kind != Kind.FILE:
            raise InvalidArgumentError(f"inode {inode.inode}: not a file: {name.decode()} is for files alone")
        if name == PARENT_ATTRIBUTE:
            self._follow(inode, value)
        else:
            self._keep(inode, name, value, user)

    def parent_of(self, inode: Inode) -> bytes | None:
        """As it is set; None: it is not known, or not there."""
        number = self._store.plane.uses.parent(inode.inode)
        parent = None if number is None else self._store.index.get(number)
        if parent is None or parent.nameless:
            return None
        return parent.name if parent.parent == inode.parent else self._tree.path(parent.inode)

    def _follow(self, inode: Inode, value: bytes) -> None:
        *path, last = value.strip(b"/").split(b"/")
        directory = self._tree.find_directory(ROOT_INODE if value.startswith(b"/") else inode.parent, path)
        self._store.plane.uses.follow(inode.inode, self._tree.lookup(directory, last).inode)

    def _keep(self, inode: Inode, name: bytes, value: bytes, user: int) -> None:
        number = inode.inode
        if not value.isdigit() or len(value) > 9:
            raise InvalidArgumentError(f"inode {number}: {name.decode()} is {value!r}; seconds are possible, 0 to 3600")
        if not inode.sealed:
            raise InvalidArgumentError(f"inode {number}: being written; {name.decode()} can be set once it is closed")
        if int(value) == 0:
            self._store.leases.drop_kept(user, number)
            self._store.plane.uses.done([number])
        elif not self._store.leases.keep(user, number, int(value)):
            raise ShareError(f"inode {number}: user {user} keeps as many blocks as one may for a while")
