"""The seam below the namespace: what it asks of the store, and the extended attributes it gives a meaning of its own.

`kvfs.store.pool.Store` is the one implementation; tests have a double.
"""

from __future__ import annotations

from typing import Protocol

from kvfs.types import Inode, InodeNumber

# Where a symbolic link keeps its target; never shown to callers.
SYMLINK_KEY = b"kvfs.symlink"
# Reads as b"1" on what is pinned itself; setting it pins, removing it unpins.
PIN_ATTRIBUTE = b"user.kvfs.pin"


class Index(Protocol):
    """The part of the index the namespace uses. Every change is visible to the next call and durable with the next
    commit."""

    def get(self, inode: InodeNumber) -> Inode | None: ...

    def raw(self, inode: int) -> bytes | None: ...

    def lookup(self, parent: InodeNumber, name: bytes) -> InodeNumber | None: ...

    def put(self, new: Inode, old: Inode | None) -> object: ...

    def delete(self, old: Inode) -> object: ...

    def list(self, parent: InodeNumber, after: bytes, limit: int) -> list[tuple[bytes, InodeNumber]]: ...

    def is_empty(self, parent: InodeNumber) -> bool: ...


class Plane(Protocol):
    """The part of the data plane the namespace uses; native/include/kvfs_plane.h says what each does."""

    def name_put(self, record: bytes, replaced: int) -> int: ...

    def inode_update(self, record: bytes) -> object: ...

    def inode_remove(self, inode: int) -> int: ...

    def file_create(self, inode: int) -> object: ...

    def file_truncate(self, inode: int, size: int) -> object: ...

    def file_set_mtime(self, inode: int, mtime_ns: int) -> object: ...


class Space(Protocol):
    """Bytes of the pool: all of it, in use by live blocks, and of those the ones that eviction leaves alone. And
    inodes."""

    @property
    def size(self) -> int: ...

    @property
    def used(self) -> int: ...

    @property
    def pinned(self) -> int: ...

    @property
    def inodes(self) -> int: ...

    @property
    def inodes_max(self) -> int: ...


class Storage(Protocol):
    """What the namespace asks of the store."""

    @property
    def index(self) -> Index: ...

    @property
    def plane(self) -> Plane: ...

    def next_inode(self) -> InodeNumber: ...

    def next_version(self) -> int: ...

    async def seal(self, inode: InodeNumber) -> Inode | None: ...

    async def rewrite(self, inode: InodeNumber, keep_content: bool) -> object: ...

    def forget(self, inode: Inode) -> object: ...

    def renamed(self, inode: Inode) -> object: ...

    async def pin(self, inode: InodeNumber) -> object: ...

    async def unpin(self, inode: InodeNumber) -> object: ...

    async def sync(self) -> object: ...

    def space(self) -> Space: ...
