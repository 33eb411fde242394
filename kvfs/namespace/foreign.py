"""Names of other nodes of a pod, for the namespace: directories that are entered here, and blocks that are copied to be
changed.

A node is an upper layer over all others, as in overlayfs. To change a block of another node is to copy it up; to remove
it is to tell everybody. A directory has the same inode number on every node, so a look-up makes it.
"""

from __future__ import annotations

import stat
from collections.abc import Awaitable, Callable

from kvfs.errors import KvfsError, StaleInodeError
from kvfs.podmap import Foreign, PodMap
from kvfs.record import Inode, InodeFlags, Kind, split_records
from kvfs.store.store import Store
from kvfs.types import EPOCH_MAX, InodeNumber

# Room for the records of a block and of the directories above it.
_RECORD_MAX = 16384


class ForeignNames:
    """The other nodes' names, in addition to a Namespace's."""

    def __init__(self, store: Store, podmap: PodMap) -> None:
        self._plane, self._map, self._sealing = store.plane, podmap, store.sealing
        self._end_page = store.segments.geometry.end_page
        # How many times this node's part the pool is.
        self.parts = len(store.segments.all) / len(store.segments.own)
        # Waits for the news of all nodes; None: look-ups that miss do not wait.
        self.wait_for_news: Callable[[], Awaitable[None]] | None = None

    def directory(self, parent: InodeNumber, name: bytes) -> Foreign | None:
        """The directory of this name at another node."""
        found = self._map.find(parent, name)
        return found if found is not None and found.directory else None

    def block(self, parent: InodeNumber, name: bytes) -> Foreign | None:
        """The block of this name at another node."""
        found = self._map.find(parent, name)
        return None if found is None or found.directory else found

    def entry(self, parent: InodeNumber, name: bytes) -> Inode | None:
        """Another node's block of this name, as a look-up has it."""
        found = self.block(parent, name)
        if found is None:
            return None
        return Inode(
            inode=found.inode, parent=parent, name=name, kind=Kind.FILE, mode=stat.S_IFREG | found.mode & 0o7777,
            uid=found.uid, gid=found.gid, size=found.size, flags=InodeFlags.SEALED,
        )  # fmt: skip

    async def record(self, number: InodeNumber) -> Inode:
        """The record in the header of another node's block, under its present name and with its present rights. The
        header has the values of the seal. StaleInodeError if it is gone."""
        known = self._map.known(number)
        gone = StaleInodeError(f"inode {number:#x}: a block of another node, gone")
        if known is None or not known.name:
            raise gone
        try:
            found = await self._plane.store_scan(
                known.segment, known.generation, EPOCH_MAX, known.page, self._end_page, _RECORD_MAX
            )
        except KvfsError as error:
            raise gone from error
        now = self._map.find(known.parent, known.name)
        if now is None or now.inode != number:
            raise gone
        for at, size in split_records(found.records):
            inode = Inode.unpack(found.records[at : at + size])
            inode.parent, inode.name = known.parent, known.name
            inode.mode, inode.uid, inode.gid = stat.S_IFREG | now.mode & 0o7777, now.uid, now.gid
            inode.flags = InodeFlags.SEALED
            return inode
        raise gone

    async def copy_up(self, number: InodeNumber, enter: Callable[[Inode], None]) -> None:
        """Store the block here too, under its name, with a higher version. `enter` takes it into the namespace."""
        await self._sealing.copy_up(await self.record(number), enter)
