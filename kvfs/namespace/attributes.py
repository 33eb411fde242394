"""The seam below the namespace: what it asks of the store, and the extended attributes it gives a meaning of its own.

`kvfs.store.store.Store` is the one implementation; tests have a double.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from kvfs.errors import KvfsError
from kvfs.record import Inode
from kvfs.types import InodeNumber

# Where a symbolic link keeps its target; never shown to callers.
SYMLINK_KEY = b"kvfs.symlink"
# Reads as b"1" on what is pinned itself; setting it pins, removing it unpins.
PIN_ATTRIBUTE = b"user.kvfs.pin"
# Reads as b"1" on a slab; setting it to that makes an empty file that is open for writing one.
SLAB_ATTRIBUTE = b"user.kvfs.slab"
# How the data plane passes on a FALLOCATE: a slab, or a file, of so many bytes, in decimal digits.
SLAB_REQUEST = b"kvfs.slab"
ALLOCATE_REQUEST = b"kvfs.allocate"


class Index(Protocol):
    """The part of the index the namespace uses. Every change is visible to the next call and durable with the next
    commit."""

    def get(self, inode: InodeNumber) -> Inode | None: ...

    def raw(self, inode: int) -> bytes | None: ...

    def lookup(self, parent: InodeNumber, name: bytes) -> InodeNumber | None: ...

    def put(self, new: Inode, old: Inode | None, record: bytes | None = None) -> object: ...

    def replace_directory(self, number: InodeNumber, record: bytes) -> object: ...

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

    def file_allocate(self, inode: int, size: int) -> object: ...

    def file_set_mtime(self, inode: int, mtime_ns: int) -> object: ...

    def slab_wanted(self, inode: int, size: int) -> bool: ...


class Slabs(Protocol):
    """Files that are overwritten in place."""

    async def preallocate(self, number: InodeNumber, size: int) -> bool: ...

    async def choose(self, number: InodeNumber) -> object: ...

    async def resize(self, number: InodeNumber, size: int) -> bool: ...


class Space(Protocol):
    """Bytes of the pool: all of it, in use by live blocks and slabs, and of those the ones that eviction leaves alone.
    And inodes."""

    @property
    def size(self) -> int: ...

    @property
    def used(self) -> int: ...

    @property
    def pinned(self) -> int: ...

    @property
    def slabs(self) -> int: ...

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

    @property
    def slabs(self) -> Slabs: ...

    def next_inode(self) -> InodeNumber: ...

    def next_version(self) -> int: ...

    async def seal(self, inode: InodeNumber) -> Inode | None: ...

    def seal_soon(self, number: InodeNumber, done: Callable[[KvfsError | None], None]) -> object: ...

    def turn(self, inode: InodeNumber) -> AbstractAsyncContextManager[None]:
        """No seal or spill of the inode is under way meanwhile."""
        ...

    async def rewrite(self, inode: InodeNumber, keep_content: bool) -> object: ...

    def entered(self, inode: Inode) -> object: ...

    def forget(self, inode: Inode) -> object: ...

    def leave_table(self, number: InodeNumber) -> None:
        """An inode is not there for the index: if that is because it is hidden, the block table forgets it too."""
        ...

    def linger(self, inode: InodeNumber) -> object: ...

    def lingers(self, inode: InodeNumber) -> bool: ...

    def renamed(self, inode: Inode, *, entered: bool = False) -> object:
        """`entered`: with a new version, into index and block table."""
        ...

    def moved(self, before: Inode, after: Inode) -> object:
        """What is in the index has come from one directory to another, and is `renamed`."""
        ...

    async def pin(self, inode: InodeNumber, user: int) -> object:
        """`user`: whom it is charged to."""
        ...

    async def unpin(self, inode: InodeNumber) -> object: ...

    async def sync(self) -> object: ...

    def space(self) -> Space: ...
