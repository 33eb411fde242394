"""Files and directories over the store: names, attributes, and what opening, closing and removing mean for a block.

Holds no state of its own apart from the index; knows neither FUSE nor devices nor payload. Methods are plain wherever
they need not wait. All of one change (index, block table, summaries) then happens in one step of the one trio thread.
So no other request sees half of it (I4): they are steps, as the data plane makes, renames, removes and seals files by
itself. The rules for inodes that are being written are in native/include/kvfs_plane.h; the kernel checks permissions
(default_permissions).
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from kvfs.errors import (
    DeadlineError,
    ExistsError,
    InvalidArgumentError,
    IsDirectoryError,
    KvfsError,
    NamesFullError,
    NoAttributeError,
    NotDirectoryError,
    NotFoundError,
    NotPermittedError,
    NotSupportedError,
    StaleInodeError,
)
from kvfs.names import step
from kvfs.namespace import attributes
from kvfs.namespace.attributes import (
    ALLOCATE_REQUEST,
    HINTS,
    PARENT_ATTRIBUTE,
    PIN_ATTRIBUTE,
    SLAB_ATTRIBUTE,
    SLAB_REQUEST,
    SYMLINK_KEY,
)
from kvfs.namespace.foreign import ForeignNames
from kvfs.namespace.hints import ROOT_CALLER, Caller, Hints
from kvfs.naming import Attribute, Given
from kvfs.podmap import is_foreign
from kvfs.record import Inode, InodeFlags, Kind
from kvfs.store.store import Store
from kvfs.store.table_room import WAIT_S
from kvfs.types import PAGE_SIZE, ROOT_INODE, InodeNumber

# A time is nanoseconds in 64 bits, of the years 1677 to 2262: what lies beyond becomes the first or the last of them.
TIME_NS_MIN, TIME_NS_MAX = -(1 << 63), (1 << 63) - 1
# Removed directories that may still be somebody's place to work: so many are known, the oldest go first.
_REMOVED_MAX = 4096
USED_PERCENT_MAX = 65
# A truncation or preallocation waits this long for seals of what was written before.
_SEAL_TIMEOUT_S = 60.0


_ASKED = tuple(
    int(attribute) for attribute in (
        Attribute.MODE, Attribute.UID, Attribute.GID, Attribute.SIZE, Attribute.ATIME, Attribute.MTIME, Attribute.KILL,
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of a setattr; None leaves a field as it is."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    # The caller may not keep set-user-ID bits across a change of the content (everybody but root): the caller's group.
    kill_suid: int | None = None
    # The change came through an open file: whoever holds it will close it, and that seals.
    through_handle: bool = False

    def given(self) -> Given:
        """For C."""
        asked = (self.mode, self.uid, self.gid, self.size, self.atime_ns, self.mtime_ns, self.kill_suid)
        which = sum(attribute for attribute, value in zip(_ASKED, asked, strict=True) if value is not None)
        return Given(
            mode=(self.mode or 0) & 0o7777, uid=self.uid or 0, gid=self.gid or 0, set=which, size=self.size or 0,
            atime_ns=_clamped(self.atime_ns or 0), mtime_ns=_clamped(self.mtime_ns or 0),
            killer_gid=self.kill_suid or 0,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FilesystemSpace:
    """The figures of statvfs: pages of 4 KiB, and inodes."""

    block_count: int
    free_count: int
    inode_count: int
    free_inode_count: int


class Namespace:
    """The tree of a pool. All methods raise KvfsError with the errno that POSIX has for the case."""

    def __init__(self, store: Store, foreign: ForeignNames | None = None) -> None:
        """`foreign`: the names of the other nodes, in a pod."""
        self._foreign = foreign
        self._store, self._blocks, self._sealing, self._slabs = store, store.blocks, store.sealing, store.slabs
        self._index, self._plane, self.names = store.index, store.plane, store.plane.names
        self._hints = Hints(self, store)
        self._blocks.bringing.directories = self
        # How often each directory is open: a removed one stays until its last holder has closed it.
        self._open_directories: dict[InodeNumber, int] = {}
        # Nobody counts who works in a directory, so those that were removed are remembered for a while.
        self._removed: dict[InodeNumber, Inode] = {}

    # ---- looking ----

    def get(self, number: InodeNumber) -> Inode:
        """The inode. StaleInodeError if it is gone."""
        inode = self._index.get(number)
        if inode is None:
            self._store.service.hide_in_table([number])
            raise StaleInodeError(f"inode {number}: gone")
        return inode

    def _check(self, number: InodeNumber) -> None:
        """StaleInodeError if it is gone, or on a device that is away, of which C does not know."""
        if self._index.raw(number) is None:
            self.get(number)

    def look(self, number: InodeNumber) -> Inode:
        """As get(), also of a directory that was removed a while ago: it may be a process's working directory."""
        removed = self._removed.get(number)
        # In a pod it has its number again when it is made again.
        return self.get(number) if removed is None or self._index.get(number) is not None else removed

    def lookup(self, parent: InodeNumber, name: bytes) -> Inode:
        number = self._index.lookup(parent, name)
        inode = None if number is None else self._index.get(number)
        if inode is None and self._foreign is not None:
            inode = self._enter_foreign(parent, name)
        if inode is None:
            raise NotFoundError(f"{name!r} in directory {parent}: not found")
        return inode

    # ---- other nodes ----

    async def lookup_fresh(self, parent: InodeNumber, name: bytes) -> Inode:
        """As lookup(), of other nodes' blocks too. Where the pool says so, a miss waits for news first."""
        foreign = self._foreign
        try:
            return self.lookup(parent, name)
        except NotFoundError:
            if foreign is None or foreign.wait_for_news is None:
                raise
        await foreign.wait_for_news()
        found = foreign.entry(parent, name)
        return self.lookup(parent, name) if found is None else found

    def _enter_foreign(self, parent: InodeNumber, name: bytes) -> Inode | None:
        """Make a directory that another node has. It is told to nobody before something is made in it. Returns None
        where nobody else has it, and changes nothing then. Where the name was taken meanwhile: who has it."""
        assert self._foreign is not None
        if self._foreign.directory(parent, name) is None:
            return None
        try:
            found = self._blocks.borrow(parent, name)
        except (NotFoundError, NotDirectoryError):
            return None
        if found.kind != Kind.DIRECTORY:
            return found
        try:
            return self._blocks.follow_rights(found.inode)  # news of a moment ago found nothing here
        except (NotFoundError, StaleInodeError):
            return found

    async def _take_over(self, number: InodeNumber, *, keep_content: bool = True) -> None:
        """Copy up a block of another node that is about to be changed, and raise StaleInodeError. The kernel then looks
        its name up again, and finds the copy."""
        if self._foreign is None or not is_foreign(number):
            return
        if keep_content:
            await self._foreign.copy_up(number, self._enter_copy)
        else:
            theirs = await self._foreign.record(number)
            await self.make_file(theirs.parent, theirs.name, theirs.mode, theirs.uid, theirs.gid)
        raise StaleInodeError(f"inode {number:#x}: another node's block; its copy has another number")

    def _enter_copy(self, block: Inode) -> None:
        try:
            self._blocks.enter_copy(block)
        except ExistsError as error:
            raise StaleInodeError(f"{block.name!r} in directory {block.parent}: stored here meanwhile") from error

    def list_entries(self, parent: InodeNumber, after: bytes, limit: int) -> list[tuple[bytes, InodeNumber]]:
        """At most `limit` entries with names greater than `after`, in byte order of names. Fewer come only at the
        end."""
        return self._index.list(parent, after, limit)

    def open_directory(self, number: InodeNumber) -> None:
        """Note that a process lists the directory, or works in it."""
        if self.look(number).kind != Kind.DIRECTORY:
            raise NotDirectoryError(f"inode {number}: not a directory")
        self._open_directories[number] = self._open_directories.get(number, 0) + 1

    def close_directory(self, number: InodeNumber) -> None:
        left = self._open_directories.get(number, 0) - 1
        if left > 0:
            self._open_directories[number] = left
            return
        self._open_directories.pop(number, None)
        directory = self._index.get(number)
        if directory is not None and directory.nameless:
            self._blocks.end_nameless(number)

    def statfs(self) -> FilesystemSpace:
        """Sizes as clients expect them of a cache that evicts: what it may drop is as good as free.

        Use is reported as at most USED_PERCENT_MAX unless more is pinned or in slabs: SGLang deletes files from 80% on,
        others stop storing. In a pod the sizes are of the whole pool, filled as this node's part is.
        """
        space = self._store.space()
        blocks = space.size // PAGE_SIZE
        kept = (space.pinned + space.slabs) // PAGE_SIZE
        used = max(kept, min(space.used // PAGE_SIZE, blocks * USED_PERCENT_MAX // 100))
        inodes = max(space.inodes_kept, min(space.inodes, space.inodes_max * USED_PERCENT_MAX // 100))
        nodes = 1 if self._foreign is None else self._foreign.parts
        return FilesystemSpace(
            int(blocks * nodes), int(max(blocks - used, 0) * nodes), space.inodes_max,
            max(space.inodes_max - inodes, 0),
        )  # fmt: skip

    def readlink(self, number: InodeNumber) -> bytes:
        inode = self.get(number)
        if inode.kind != Kind.SYMLINK:
            raise InvalidArgumentError(f"inode {number}: not a symbolic link")
        return inode.xattrs.get(SYMLINK_KEY, b"")

    # ---- making ----

    @property
    def create_delay_s(self) -> float:
        """The time that a CREATE waits first, as the index does not keep up."""
        return self._blocks.create_delay_s

    def create(self, parent: InodeNumber, name: bytes, mode: int, uid: int, gid: int) -> Inode:
        """A new empty file that is being written."""
        return self._blocks.create(parent, name, mode, uid, gid)

    async def make_file(self, parent: InodeNumber, name: bytes, mode: int, uid: int, gid: int) -> Inode:
        """mknod(2): a new file without anybody who writes it, so its (empty) content is sealed here."""
        inode = await self.when_room(lambda: self.create(parent, name, mode, uid, gid))
        return await self._sealing.seal(inode.inode) or inode

    async def when_room(self, make: Callable[[], Inode]) -> Inode:
        """make() a name; where the block table is full, once eviction has made room. NoSpaceError. All its tries have
        the time of one."""
        until = trio.current_time() + WAIT_S
        while True:
            try:
                return make()
            except NamesFullError:
                await self.room_for_name(until - trio.current_time())

    async def room_for_name(self, timeout_s: float = WAIT_S) -> None:
        """Return when the block table has room. NoSpaceError."""
        await self._blocks.table_room.wait(timeout_s)

    def mkdir(self, parent: InodeNumber, name: bytes, mode: int, uid: int, gid: int) -> Inode:
        return self._blocks.mkdir(parent, name, mode, uid, gid)

    def symlink(self, parent: InodeNumber, name: bytes, target: bytes, uid: int, gid: int) -> Inode:
        return self._blocks.symlink(parent, name, target, uid, gid)

    def find_directory(self, number: InodeNumber, path: Sequence[bytes]) -> InodeNumber:
        """The directory that a path leads to from another. NotFoundError, NotDirectoryError."""
        self._directory(number)
        for name in path:
            found = self.lookup(number, name).inode
            self._directory(found)
            number = found
        return number

    def make_directories(self, number: InodeNumber, path: Sequence[bytes], mode: int, uid: int, gid: int) -> Inode:
        """As find_directory, but missing ones are made."""
        here = self._directory(number)
        for name in path:
            here = self._directory_in(here.inode, name) or self._make_directory(here.inode, name, mode, uid, gid)
        return self._blocks.own(here.inode) if InodeFlags.BORROWED in here.flags else here

    def _directory_in(self, parent: InodeNumber, name: bytes) -> Inode | None:
        found = self._index.lookup(parent, name)
        if found is not None:
            return self._directory(found)
        return None if self._foreign is None else self._enter_foreign(parent, name)

    def _make_directory(self, parent: InodeNumber, name: bytes, mode: int, uid: int, gid: int) -> Inode:
        self._store.shares.check_names(uid, f"directory {name!r} in directory {parent}")
        try:
            return self.mkdir(parent, name, mode, uid, gid)
        except ExistsError:
            # A thread of C was faster, or another node's news.
            found = self._directory_in(parent, name)
            if found is None:
                raise
            return found

    @staticmethod
    def group_in(directory: Inode, gid: int) -> int:
        """The group of a new file there."""
        return directory.gid if directory.mode & stat.S_ISGID else gid

    @step
    def make_way(self, block: Inode) -> Inode | None:
        """Have in memory what a native client's block needs for its name, and return the file that has it. In the same
        step the data plane lets the block enter (native/src/content/commit.c)."""
        self._directory(block.parent)
        self._blocks.check_not_behind()
        self._index.keep_above(block.parent)
        number = self._index.lookup(block.parent, block.name)
        holder = None if number is None else self._index.get(number)
        if holder is not None:
            self._index.keep(holder.inode)
        return holder

    def _directory(self, number: InodeNumber) -> Inode:
        inode = self._index.get(number)
        if inode is None:
            raise NotFoundError(f"directory {number}: gone")
        if inode.kind != Kind.DIRECTORY:
            raise NotDirectoryError(f"inode {number}: not a directory")
        if inode.nameless:
            raise NotFoundError(f"directory {number}: removed")
        return inode

    # ---- removing and renaming: in C, as making is, by what is brought from the index (kvfs/store/bringing.py) ----

    def unlink(self, parent: InodeNumber, name: bytes) -> None:
        self._blocks.unlink(parent, name)

    def delete(self, parent: InodeNumber, name: bytes) -> None:
        """As unlink(), of a file alone."""
        self._blocks.delete(parent, name)

    def rmdir(self, parent: InodeNumber, name: bytes) -> None:
        self._blocks.rmdir(parent, name)

    def rename(
        self, parent: InodeNumber, name: bytes, new_parent: InodeNumber, new_name: bytes, flags: int = 0
    ) -> None:
        """rename(2), atomically over an existing name."""
        self._blocks.rename(parent, name, new_parent, new_name, flags)

    def idle(self, number: InodeNumber) -> None:
        """The last handle of a nameless inode was closed: now it goes, unless who looked it up may still open it.
        Opened again through /proc meanwhile it stays: another idle() follows."""
        if not self._blocks.lingers(number) and self._index.hidden(number) is None:
            self._blocks.end_nameless(number)

    def is_open_directory(self, number: InodeNumber) -> bool:
        return number in self._open_directories

    def directory_removed(self, directory: Inode) -> None:
        directory.nlink = 0
        self._removed[directory.inode] = directory
        if len(self._removed) > _REMOVED_MAX:
            del self._removed[next(iter(self._removed))]

    # ---- attributes ----

    async def setattr(self, number: InodeNumber, changes: Changes) -> Inode:
        """Apply the changes and return the inode. A new size counts at once, also for open handles."""
        await self._take_over(number)
        if changes.size is not None:
            await self._truncate(number, changes.size, through_handle=changes.through_handle)
        self._check(number)
        inode = self._blocks.set(number, changes.given())
        if changes.size is not None and not changes.through_handle:
            # truncate(2) has no close() that would seal what it did.
            return await self._sealing.seal(number) or self.get(number)
        return inode

    async def _truncate(self, number: InodeNumber, size: int, *, through_handle: bool = False) -> None:
        inode = self.get(number)
        if inode.kind == Kind.DIRECTORY:
            raise IsDirectoryError(f"inode {number}: is a directory")
        if inode.kind != Kind.FILE:
            raise InvalidArgumentError(f"inode {number}: not a file")
        if InodeFlags.SLAB in inode.flags and await self._slabs.resize(number, size):
            return
        slab = through_handle and self._plane.slab_wanted(number, size)
        if slab and await self._slabs.preallocate(number, size):
            return
        await self._when_settled(number, lambda: self._truncate_file(number, size))

    async def _truncate_file(self, number: InodeNumber, size: int) -> None:
        while True:
            try:
                async with self._sealing.turn(number):
                    self._plane.file_truncate(number, size)
                return
            except (KvfsError, OSError) as error:
                if error.errno != errno.ENOENT:
                    raise
            await self._write_again(number, keep_content=size > 0)
            if size == 0:
                return

    async def _write_again(self, number: InodeNumber, *, keep_content: bool) -> None:
        """It is not being written, or not any more: its last writer may close it at any moment."""
        if not self.get(number).sealed:
            raise StaleInodeError(f"inode {number}: gone")
        await self._rewrite(number, keep_content=keep_content)

    async def _allocate(self, number: InodeNumber, size: int, *, slab: bool) -> None:
        """fallocate(2): the file has at least that size, and the room for it."""
        if slab and await self._slabs.preallocate(number, size):
            return
        await self._when_settled(number, lambda: self._allocate_file(number, size))

    async def _allocate_file(self, number: InodeNumber, size: int) -> None:
        while True:
            try:
                async with self._sealing.turn(number):
                    self._plane.file_allocate(number, size)
                return
            except (KvfsError, OSError) as error:
                if error.errno != errno.ENOENT:
                    raise
            await self._write_again(number, keep_content=True)

    async def _when_settled(self, number: InodeNumber, change: Callable[[], Awaitable[None]]) -> None:
        """Make a change that a seal or a spill forbids, which hold the file as it was when they began."""
        try:
            with trio.fail_after(_SEAL_TIMEOUT_S):
                while True:
                    try:
                        await change()
                        return
                    except (KvfsError, OSError) as error:
                        if error.errno != errno.EBUSY:
                            raise
                    # It takes no turns while it stops being a slab.
                    await trio.sleep(0.002)
        except trio.TooSlowError:
            raise DeadlineError(f"inode {number}: was being sealed for {_SEAL_TIMEOUT_S:g} s") from None

    async def _rewrite(self, number: InodeNumber, *, keep_content: bool) -> None:
        try:
            await self._sealing.rewrite(number, keep_content)
        except (KvfsError, OSError) as error:
            if error.errno in (errno.ENOENT, errno.EBADMSG):
                raise StaleInodeError(f"inode {number}: gone") from error
            raise

    # ---- content ----

    async def open_for_write(
        self, number: InodeNumber, *, truncate: bool = False, kill_suid: int | None = None
    ) -> Inode:
        """From now on the file is being written, under the same inode number. StaleInodeError if it is gone."""
        await self._take_over(number, keep_content=not truncate)
        inode = self.get(number)
        if inode.kind != Kind.FILE:
            raise IsDirectoryError(f"inode {number}: not a file")
        if truncate:
            await self._truncate(number, 0)
            inode = self.get(number)
        elif inode.sealed:
            await self._rewrite(number, keep_content=True)
            inode = self.get(number)
        if kill_suid is None:
            return inode
        # The data plane takes the writes and tells nobody, so the bits go with the open, a little early.
        return self._blocks.set(number, Given(set=Attribute.CONTENT | Attribute.KILL, killer_gid=kill_suid))

    def flush(self, number: InodeNumber, done: Callable[[KvfsError | None], None]) -> None:
        """close(2): `done` is called when the content is on the devices and in the index, or why it is not."""
        self._sealing.seal_soon(number, done)

    async def fsync(self, number: InodeNumber) -> None:
        """As flush, and durable."""
        await self._sealing.seal(number)
        await self._store.sync()

    async def sync(self) -> None:
        """Every change so far is durable."""
        await self._store.sync()

    # ---- extended attributes ----

    async def setxattr(self, number: InodeNumber, name: bytes, value: bytes, caller: Caller = ROOT_CALLER) -> None:
        """A pin is charged to the caller."""
        attributes.check(number, name, value)
        if name in (PIN_ATTRIBUTE, *HINTS) and is_foreign(number):
            raise NotSupportedError(
                f"inode {number:#x}: another node's block; {name.decode()} is set where it was stored"
            )
        await self._take_over(number)
        if name == PIN_ATTRIBUTE:
            await self.set_pinned(number, value == b"1", caller.uid)
            return
        if name in HINTS:
            self._hints.give(self.get(number), name, value, caller)
            return
        if name in (SLAB_ATTRIBUTE, SLAB_REQUEST, ALLOCATE_REQUEST):
            await self._preallocate(number, name, value)
            return
        if not name.startswith((b"user.", b"trusted.")):
            raise NotSupportedError(f"extended attribute {name!r}: only user.* and trusted.* can be set")
        self._check(number)
        self._blocks.set_attribute(number, name, value)

    async def _preallocate(self, number: InodeNumber, name: bytes, value: bytes) -> None:
        if self.get(number).kind != Kind.FILE:
            raise InvalidArgumentError(f"inode {number}: not a file: nothing can be preallocated")
        if name == SLAB_ATTRIBUTE:
            await self._slabs.choose(number)
            return
        if not value.isdigit() or len(value) > 19:
            raise InvalidArgumentError(f"inode {number}: {value!r} bytes to preallocate")
        await self._allocate(number, int(value), slab=name == SLAB_REQUEST)

    def getxattr(self, number: InodeNumber, name: bytes, caller: Caller = ROOT_CALLER) -> bytes:
        inode = self.get(number)
        if name == PIN_ATTRIBUTE and InodeFlags.PINNED in inode.flags:
            return b"1"
        if name == SLAB_ATTRIBUTE and InodeFlags.SLAB in inode.flags:
            return b"1"
        if name == PARENT_ATTRIBUTE:
            value = self._hints.parent_of(inode, caller)
        else:
            value = None if name == SYMLINK_KEY else inode.xattrs.get(name)
        if value is None:
            raise NoAttributeError(f"inode {number}: no extended attribute {name!r}")
        return value

    def listxattr(self, number: InodeNumber) -> list[bytes]:
        inode = self.get(number)
        names = [name for name in inode.xattrs if name != SYMLINK_KEY]
        if InodeFlags.PINNED in inode.flags:
            names.append(PIN_ATTRIBUTE)
        if InodeFlags.SLAB in inode.flags:
            names.append(SLAB_ATTRIBUTE)
        return names

    async def foreign_xattrs(self, number: InodeNumber) -> dict[bytes, bytes]:
        """The attributes of another node's block. StaleInodeError."""
        if self._foreign is None:
            raise StaleInodeError(f"inode {number:#x}: gone")
        return (await self._foreign.record(number)).xattrs

    async def removexattr(self, number: InodeNumber, name: bytes) -> None:
        await self._take_over(number)
        inode = self.get(number)
        if name == PIN_ATTRIBUTE and InodeFlags.PINNED in inode.flags:
            await self.set_pinned(number, False)
            return
        if name == SLAB_ATTRIBUTE and InodeFlags.SLAB in inode.flags:
            raise NotPermittedError(f"inode {number}: a slab stays one")
        self._blocks.remove_attribute(number, name)

    async def set_pinned(self, number: InodeNumber, pinned: bool, user: int = 0) -> None:
        """Keep a file, or everything below a directory, from being evicted; or no longer."""
        inode = self.get(number)
        if inode.kind == Kind.SYMLINK:
            raise NotPermittedError(f"inode {number}: a symbolic link cannot be pinned")
        if pinned != (InodeFlags.PINNED in inode.flags):
            await (self._blocks.pin(number, user) if pinned else self._blocks.unpin(number))

    def path(self, number: InodeNumber) -> bytes:
        """Where the inode is, from the root on; for messages."""
        parts: list[bytes] = []
        inode = self._index.get(number)
        while inode is not None and inode.inode != ROOT_INODE:
            parts.append(inode.name)
            inode = self._index.get(inode.parent)
        return b"/" + b"/".join(reversed(parts))

    def find_path(self, number: InodeNumber) -> bytes | None:
        """As path(); None if it has lost its name, or lies below a directory that has none."""
        at = self._index.get(number)
        while at is not None and not at.nameless and at.inode != ROOT_INODE:
            at = self._index.get(at.parent)
        return None if at is None or at.nameless else self.path(number)


def _clamped(time_ns: int) -> int:
    return max(TIME_NS_MIN, min(TIME_NS_MAX, time_ns))
