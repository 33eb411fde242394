"""The store of one mounted pool: seals blocks into segments, keeps the index and the block table in step, evicts, recovers. (Being written.)"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvfs.types import Inode, InodeNumber


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes of the pool: all of it, in use by live blocks, and of those the ones that eviction leaves alone. And inodes."""

    size: int
    used: int
    pinned: int
    inodes: int
    inodes_max: int


@dataclass(frozen=True, slots=True)
class StoreOptions:
    staging_size: int = 256 << 20
    read_memory_size: int = 128 << 20
    io_timeout_ms: int = 10_000
    request_timeout_ms: int = 60_000
    server_threads: int = 0
    store_threads: int = 0
    max_read: int = 0
    max_write: int = 0
    spin_us: int = 100
    records_max: int = 0
    commit_interval_s: float = 1.0
    # Called with a plane event that is not the store's: type, inode, value (IDLE, TRANSPORTS_GONE, WRITERS_GONE).
    on_event: Callable[[int, int, int], None] | None = None


class Store:
    """Use: `async with Store.open(path, options) as store: nursery.start_soon(store.run)`."""

    index: object
    plane: object

    @classmethod
    @asynccontextmanager
    async def open(cls, pool: Path, options: StoreOptions | None = None) -> AsyncIterator[Store]:
        yield cls()

    def next_inode(self) -> InodeNumber:
        raise AssertionError

    def next_version(self) -> int:
        raise AssertionError

    async def run(self) -> None:
        """Background work until cancelled."""

    async def seal(self, inode: InodeNumber) -> Inode | None: ...

    async def spill(self, inode: InodeNumber) -> None: ...

    async def evict(self, size: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Free segments until `size` more bytes are free."""

    async def pin(self, inode: InodeNumber) -> None: ...

    async def unpin(self, inode: InodeNumber) -> None: ...

    def forget(self, inode: Inode) -> None: ...

    def renamed(self, inode: Inode) -> None: ...

    async def sync(self) -> None: ...

    def space(self) -> Space:
        raise AssertionError

    async def close(self) -> None: ...
