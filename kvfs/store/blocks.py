"""The blocks of an open pool: what must agree changes here, in one step.

A step is code of the one trio thread between two awaits, with the names locked (I4): the data plane has its own steps.
One step changes a block's index record, its record in the block table, the live pages of its segments, pins, and the
list of outdated summaries. Nothing here waits for a device. Names are the namespace's, bytes on devices are
sealing.py's.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from errno import EBUSY, EIO
from itertools import compress

import trio

from kvfs.errors import AttributesFullError, KvfsError, NamesFullError, NotEmptyError, NotFoundError, StaleInodeError
from kvfs.index.lmdb import LmdbIndex
from kvfs.names import Evicted, Leave, Look, Removed, step
from kvfs.naming import END_OPEN, Act, Given, Naming
from kvfs.plane import OpenState, Plane, PlaneError
from kvfs.pool.format import META_IN_FLIGHT, META_NUMBER, META_VERSION
from kvfs.record import Inode, InodeFlags, Kind
from kvfs.store.bringing import Bringing
from kvfs.store.pins import Pins
from kvfs.store.segment import Segment, Versions, usage
from kvfs.store.segments import Segments
from kvfs.store.shares import PINNED, ROOT, Shares
from kvfs.store.space import SpaceLimit
from kvfs.store.table_room import TableRoom
from kvfs.types import COUNTER_BITS, PAGE_SIZE, InodeNumber

log = logging.getLogger("kvfs.store.pool")

_LINGER_S = 1.0
# Changes that wait for an index whose commits fail, some 300 bytes each. From the first number on new names are slowed
# down, from the second on refused.
_BEHIND_SLOW = 500_000
_BEHIND_MOST = 1_000_000
_BEHIND_DELAY_S = 0.01
# Hosts are told of evictions after this time: each telling makes their kernels look every name up again.
TELL_S = 0.25
_WALK_BATCH = 512
_NOBODY = InodeNumber(0)


def _nothing() -> None: ...


class Blocks:
    """Index, block table and accounts of one pool. One trio thread."""

    def __init__(self, index: LmdbIndex, plane: Plane, segments: Segments, shares: Shares, epoch: int) -> None:
        self.index, self.plane, self.segments, self.shares = index, plane, segments, shares
        self.names = plane.names
        self.names.number(epoch << COUNTER_BITS | segments.slot, in_pod=segments.config.pod is not None)
        self.versions = Versions(self.names)
        self.pins = Pins(index, shares, plane.names)
        self.bringing = Bringing(index, plane)
        self.space = SpaceLimit(segments, plane, shares)
        self.table_room = TableRoom(plane, lambda: segments.need_space.set())
        # How often directories were renamed. Ancestors that were read before the last time may be old.
        self.directory_moves = 0
        # How often directories were removed. A path that was followed before the last time may lead nowhere.
        self.directory_removals = 0
        self.bad_blocks = 0
        self._commit_error: KvfsError | None = None
        self.create_delay_s = 0.0
        self._moved_directories: list[InodeNumber] = []
        self._directory_moved = trio.Event()
        # Blocks were evicted since hosts were told.
        self._evicted = trio.Event()
        # Until when; the first is the next. A dict takes ever longer to find its first, the more were removed there.
        self._lingering: OrderedDict[InodeNumber, float] = OrderedDict()
        self._pinning = trio.Lock()

    # ---- numbers and commits ----

    def next_inode(self) -> InodeNumber:
        return InodeNumber(self.names.next_inode())

    def next_version(self) -> int:
        return self.names.next_version()

    async def commit(self) -> None:
        """Return when every change made so far is durable. KvfsError if it cannot be."""
        await self.index.commit(self._before_commit)

    def commit_failed(self, error: KvfsError | None) -> None:
        """A commit has failed, or with None: gone well."""
        self._commit_error = error
        behind = error is not None and (self.index.changes_pending >= _BEHIND_SLOW or self.names.journal_is_full())
        self.names.leave(Leave.BEHIND, behind)
        self.create_delay_s = _BEHIND_DELAY_S if behind else 0.0

    def check_not_behind(self) -> None:
        """KvfsError with EIO if too much waits for the index to take anything new."""
        if self._commit_error is not None and (waiting := self.index.changes_pending) >= _BEHIND_MOST:
            failure = KvfsError(f"{self._commit_error}; {waiting} changes wait for it, {_BEHIND_MOST} may")
            failure.errno = EIO
            raise failure
        if self._commit_error is not None and self.names.journal_is_full():
            failure = KvfsError(f"{self._commit_error}; the journal of names is full until it can be")
            failure.errno = EIO
            raise failure

    def commit_now(self) -> None:
        """As commit(), blocking: for the time before a mount answers."""
        self.index.commit_now(self._before_commit)

    async def make_durable(self) -> None:
        """The index was rebuilt: from now on its commits are durable, and so is everything before."""
        await self.index.make_durable(self._before_commit)

    def _before_commit(self) -> None:
        """Each commit carries segment states, the last version, and the versions in flight (I14)."""
        self.segments.take_notes()
        self.segments.save_changed()
        if self.index.changes_pending:
            self.index.meta_put(META_VERSION, META_NUMBER.pack(self.names.last_version))
            self.index.meta_put(META_IN_FLIGHT, array("Q", self.versions.all_in_flight()).tobytes())

    # ---- blocks that come and go ----

    @step
    def enter(self, before: Inode, record: bytes, written: Inode, *, copy: bool) -> bool:
        """The block is on the devices: index, table and accounts learn of it in one step. False if it lost its name, or
        is the copy of an older content. Then it is an orphan in its segment that no summary will name. `record`:
        before, packed."""
        assert written.inode == before.inode and written.sealed and (not copy or before.sealed), written
        found = self.index.raw(written.inode)
        current = None if found is None else before if found == record else Inode.unpack(found)
        home = self.segments.all[written.segment]
        if current is None or (self._overtaken(before, current) if copy else current.nameless):
            self.segments.mark_dirty(home, gone=True)
            return False
        if current is not before:
            _take_changes(written, before, current)
            self.segments.mark_dirty(home, gone=True)
        entered = written.pack()
        if copy and not self._move_in_table(entered):
            self.segments.mark_dirty(home, gone=True)
            return False
        self.index.put(written, current, entered)
        if current.sealed:
            self.segments.mark_dirty(self.segments.all[current.segment], gone=True)
        self.segments.account(current if current.sealed else None, written)
        if not copy:
            self.count_pinned(current, written)
            self.plane.inode_update(entered)
        return True

    def _move_in_table(self, record: bytes) -> bool:
        """Let the table lead to the copy. False if the data plane has begun to write the block from its old place."""
        try:
            self.plane.inode_move(record)
        except PlaneError as error:
            if error.errno != EBUSY:
                raise
            return False
        return True

    def _overtaken(self, before: Inode, current: Inode) -> bool:
        place = (before.segment, before.page, before.generation)
        moved = (current.segment, current.page, current.generation) != place
        return moved or self.plane.inode_is_open(current.inode) == OpenState.BEING_WRITTEN

    @step
    def entered(self, block: Inode, replaced: Inode | None) -> None:
        """A block of a native client has entered, where the data plane left it to Python; `replaced` had its name."""
        if replaced is not None:
            self.index.note_removed(replaced)
            if replaced.sealed and self.index.raw(replaced.inode) is None:
                self.count_pinned(replaced, None)
                if InodeFlags.PINNED in replaced.flags:
                    self.pins.remove(replaced.inode)
        self.count_pinned(None, block)

    def drop_bad(self, number: InodeNumber, segment: int) -> None:
        """A block failed verification: it is a miss from now on, unless it has moved meanwhile."""

        def is_bad(inode: Inode) -> bool:
            if self.plane.inode_is_open(number) == OpenState.BEING_WRITTEN:
                return False
            return segment == inode.segment or any(extent.segment == segment for extent in inode.extents)

        if inode := self._take_if(number, is_bad):
            self.bad_blocks += 1
            log.error("inode %d in segment %d: failed its checksums; dropped", number, inode.segment)

    def _take_if(self, number: InodeNumber, loses: Callable[[Inode], bool]) -> Inode | None:
        """A sealed block becomes a miss if it `loses`, which is looked at in the same step. Hosts are told. Returns the
        block; None: it did not lose."""
        found: Inode | None = None

        def still(record: bytes) -> bool:
            nonlocal found
            inode = Inode.unpack(record)
            found = inode if inode.sealed and loses(inode) else None
            return found is not None

        def done(naming: Naming) -> None:
            self._changed(naming)
            if naming.lost is not None:
                self.tell_hosts()

        self.bringing.change(done, Act.TAKE, inode=number, still=still)
        return found

    def drop_overtaken(self, number: InodeNumber, version: int) -> None:
        """In a pod: another node has stored or removed its name later, or changed a directory. An own block of at most
        this version lost.

        A file that is being written is mostly stored again, under a higher version. Or its seal was under way before
        the other's news came, or its writer closes it unchanged. So it is looked at once more when it has no writer.
        """
        inode = self.index.get(number)
        if inode is not None and inode.kind == Kind.DIRECTORY:
            self._look_at_directory(inode)
            return

        def is_overtaken(inode: Inode) -> bool:
            if inode.nameless or inode.version > version:
                return False
            return self.plane.inode_overtaken(number, version) != OpenState.BEING_WRITTEN

        self._take_if(number, is_overtaken)

    def _look_at_directory(self, inode: Inode) -> None:
        """Another node has changed its rights, or has nothing in it any more. A directory that
        was only looked up here goes with the last node that has it."""
        try:
            self.follow_rights(inode.inode)
        except StaleInodeError:
            return
        except NotFoundError:
            if InodeFlags.BORROWED in inode.flags:
                with suppress(NotEmptyError):
                    self.take_name(inode.inode)
                    self.tell_hosts()

    def follow_rights(self, number: InodeNumber) -> Inode:
        """In a pod a directory has the rights that were set last, on whichever node. Returns the directory as it is
        then; the others hear of it from each node that has it. NotFoundError: no other node has it."""
        return self._made(Act.FOLLOW, inode=number)

    # ---- names: made, renamed and removed in C (native/src/content/making.c, naming.c) ----

    def create(self, parent: InodeNumber, name: bytes, mode: int, uid: int, gid: int) -> Inode:
        """A new empty file, which is being written. ExistsError, NamesFullError."""
        return self._make(Act.CREATE, parent, name, Given(mode, uid, gid))

    def mkdir(self, parent: InodeNumber, name: bytes, mode: int, uid: int, gid: int) -> Inode:
        return self._make(Act.MKDIR, parent, name, Given(mode, uid, gid))

    def symlink(self, parent: InodeNumber, name: bytes, target: bytes, uid: int, gid: int) -> Inode:
        return self._make(Act.SYMLINK, parent, name, Given(0, uid, gid, target))

    def _make(self, act: Act, parent: InodeNumber, name: bytes, given: Given) -> Inode:
        self.check_not_behind()
        return self._made(act, parent, name, given)

    def enter_copy(self, block: Inode) -> None:
        """A block of another node was stored here, too. ExistsError."""
        self._made(Act.COPY, block.parent, block.name, Given(data=block.pack()))

    def borrow(self, parent: InodeNumber, name: bytes) -> Inode:
        """The directory of this name that other nodes have, or who has the name here. NotFoundError."""
        with self.names.serving_nobody():
            return self._made(Act.BORROW, parent, name, None)

    def own(self, directory: InodeNumber) -> Inode:
        """Something is made in a directory: the other nodes are told that it and all above are here, too. Its version
        stays: it is of its rights."""
        return self._made(Act.OWN, inode=directory)

    # ---- records: changed in C (native/src/content/attributes.c). StaleInodeError ----

    def set(self, number: InodeNumber, given: Given) -> Inode:
        """The attributes that are `given`."""
        return self._made(Act.SET, given=given, inode=number)

    def mark(
        self, number: InodeNumber, *, on: InodeFlags = InodeFlags.NONE, off: InodeFlags = InodeFlags.NONE,
        counted: Callable[[], None] = _nothing,
    ) -> None:  # fmt: skip
        """Set flags and clear some. `counted` is called in the same step. What is gone, or on a device that is away,
        has none."""

        def done(naming: Naming) -> None:
            self._changed(naming)
            counted()

        if self.index.raw(number) is not None:
            with suppress(StaleInodeError):
                self.bringing.change(done, Act.MARK, inode=number, given=Given(on=on, off=off))

    def set_attribute(self, number: InodeNumber, name: bytes, value: bytes) -> None:
        """An extended one. AttributesFullError."""
        try:
            self.bringing.change(self._changed, Act.ATTRIBUTE, inode=number, given=Given(key=name, data=value))
        except NamesFullError as error:
            raise AttributesFullError(f"inode {number}: extended attributes have no room for {name!r}") from error

    def remove_attribute(self, number: InodeNumber, name: bytes) -> None:
        """NoAttributeError."""
        self.bringing.change(self._changed, Act.UNSET, inode=number, given=Given(key=name))

    def _made(
        self, act: Act, parent: InodeNumber = _NOBODY, name: bytes = b"", given: Given | None = None,
        inode: InodeNumber = _NOBODY,
    ) -> Inode:  # fmt: skip
        """What was made, or changed, as it is now."""
        record = b""

        def done(naming: Naming) -> None:
            nonlocal record
            record = naming.made
            self._changed(naming)
            if act == Act.COPY:
                self.count_pinned(None, Inode.unpack(record))

        self.bringing.change(done, act, parent, name, inode=inode, given=given)
        return Inode.unpack(record)

    def unlink(self, parent: InodeNumber, name: bytes) -> None:
        self.bringing.change(self._changed, Act.UNLINK, parent, name)

    def delete(self, parent: InodeNumber, name: bytes) -> None:
        """As unlink(), of a file alone."""
        self.bringing.change(self._changed, Act.DELETE, parent, name)

    def rmdir(self, parent: InodeNumber, name: bytes) -> None:
        self.bringing.change(self._changed, Act.RMDIR, parent, name)

    def rename(
        self, parent: InodeNumber, name: bytes, new_parent: InodeNumber, new_name: bytes, flags: int = 0
    ) -> None:
        """rename(2), atomically over an existing name."""
        self.bringing.change(self._changed, Act.RENAME, parent, name, new_parent, new_name, flags)

    def take_name(self, number: InodeNumber) -> None:
        """The inode is a miss from now on; who has it open reads on. NotEmptyError."""
        self.bringing.change(self._changed, Act.TAKE, inode=number)

    def end_nameless(self, number: InodeNumber, *, even_open: bool = False) -> None:
        """An inode without a name goes, unless it is open."""
        self.bringing.change(self._changed, Act.END, inode=number, flags=END_OPEN if even_open else 0)

    def _changed(self, done: Naming) -> None:
        """Within the step of a change of names: count what is counted here."""
        self.segments.take_notes()
        if done.lingers and done.lost is not None:
            self.linger(done.lost)
        if done.untold:
            self.tell_hosts()  # their kernels may believe that the name leads to a block that was evicted
        if done.is_below:
            self._directory_changed(InodeNumber(done.inode))
        if not self.pins and self.index.removed_names is None and not done.is_of_directories:
            return
        removed, renamed = done.removed, done.renamed
        if removed is not None:
            self._removed(Inode.unpack(removed), done.kept)
        if renamed is not None:
            before, after = Inode.unpack(renamed[0]), Inode.unpack(renamed[1])
            self.index.note_removed(before)
            if after.kind == Kind.DIRECTORY:
                self._directory_changed(after.inode)
            if before.parent != after.parent:
                self._moved(before, after)

    def _removed(self, inode: Inode, kept: int) -> None:
        self.index.note_removed(inode)
        if inode.kind == Kind.DIRECTORY:
            self.directory_removals += 1
            if not kept and self.bringing.directories is not None:
                self.bringing.directories.directory_removed(inode)
        elif inode.sealed and not kept:
            self.count_pinned(inode, None)
            if InodeFlags.PINNED in inode.flags:
                self.pins.remove(inode.inode)

    def _moved(self, before: Inode, after: Inode) -> None:
        """The inode lies in another directory, where other pins may hold it."""
        if after.kind == Kind.DIRECTORY:
            self.pins.changed.set()  # all below it is counted anew
        elif after.sealed:
            self.count_pinned(before, None)
            self.count_pinned(None, after)

    @step
    def forget(self, inode: Inode) -> None:
        """A sealed block was removed from the index: its pages are free, its summary must not name it."""
        if not inode.sealed or inode.kind != Kind.FILE:
            return
        self.count_pinned(inode, None)
        if InodeFlags.PINNED in inode.flags:
            self.pins.remove(inode.inode)
        self.segments.mark_dirty(self.segments.all[inode.segment], gone=True)
        self.segments.account(inode, None)

    def _directory_changed(self, number: InodeNumber) -> None:
        """Summaries of blocks below it must say so."""
        self.directory_moves += 1
        self._moved_directories.append(number)
        self._directory_moved.set()

    async def follow_moves(self) -> None:
        """Mark the summaries that name blocks below a directory that was renamed. Until cancelled."""
        while True:
            await self._directory_moved.wait()
            self._directory_moved = trio.Event()
            while self._moved_directories:
                directory = self._moved_directories.pop()
                after = b""
                while entries := self.index.list(directory, after, _WALK_BATCH):
                    for _, number in entries:
                        inode = self.index.get(number)
                        if inode is not None and inode.kind == Kind.DIRECTORY:
                            self._moved_directories.append(number)
                        elif inode is not None and inode.sealed:
                            self.segments.mark_dirty(self.segments.all[inode.segment], gone=False)
                    after = entries[-1][0]
                    await trio.lowlevel.checkpoint()

    # ---- hosts ----

    def tell_hosts(self) -> None:
        """Let the kernels of hosts look every name up again, now."""
        self.names.told()
        if self._evicted.is_set():
            self._evicted = trio.Event()
        self.plane.notify_epoch()

    async def tell_evictions(self) -> None:
        """Tell hosts of evictions, all of TELL_S at once. Until cancelled."""
        while True:
            await self._evicted.wait()
            await trio.sleep(TELL_S)
            if self._evicted.is_set():
                self.tell_hosts()

    # ---- eviction ----

    @step
    def look(self, segment: Segment, numbers: Sequence[InodeNumber]) -> list[Look]:
        """Look at these inodes, but not at those on a device that is away."""
        if self.index.is_hiding:
            numbers = [number for number in numbers if self.index.hidden(number) is None]
        looks = self.plane.blocks_look(segment.index, numbers)
        if absent := [look.inode for look in looks if look.absent]:
            self.index.bring(absent)
            again = {look.inode: look for look in self.plane.blocks_look(segment.index, absent)}
            looks = [again.get(look.inode, look) for look in looks]
        return looks

    @step
    def evict(self, segment: Segment | None, numbers: Sequence[InodeNumber]) -> Evicted:
        """Blocks with a part in the segment leave block table, index and accounts. Open or pinned ones stay. Without a
        segment they are one group, wherever they lie. Then all stay while one does. Hosts get notice soon."""
        self.index.bring(numbers)
        # Only then anything depends on what each of them was.
        before: dict[InodeNumber, bytes] = {}
        if self.pins or self.index.removed_names is not None:
            before = {number: record for number in numbers if (record := self.index.raw(number)) is not None}
            free = [number for number, record in before.items() if not self.pins.holds(record)]
            numbers = [] if segment is None and len(free) < len(before) else free
        evicted = self.plane.blocks_evict(None if segment is None else segment.index, numbers)
        self.segments.take_notes()
        if evicted.blocks:
            self._evicted.set()
        for number in compress(numbers, evicted.gone) if before else ():
            inode = Inode.unpack(before[number])
            self.index.note_removed(inode)
            self.count_pinned(inode, None)
            self.pins.remove(number)
        return evicted

    # ---- many removals ----

    @step
    def remove_files(self, directory: InodeNumber, numbers: Sequence[InodeNumber]) -> Removed:
        """Files of a directory lose their names and go, as by unlink(2). Hosts are told soon. The rest is the caller's:
        directories and pinned files."""
        self.index.bring(numbers)
        removed = self.names.remove_files(directory, numbers)
        self.segments.take_notes()
        if removed.files:
            self._evicted.set()
        return removed

    def untell(self, parent: InodeNumber, name: bytes) -> None:
        """A directory was removed without a request: hosts get notice soon."""
        self.names.untold(parent, name)
        self._evicted.set()

    # ---- lingering ----

    def linger(self, inode: InodeNumber) -> None:
        """The block's name was given to another. A client that has just looked it up can open it for another second."""
        self._lingering[inode] = trio.current_time() + _LINGER_S
        self._lingering.move_to_end(inode)

    def lingers(self, inode: InodeNumber) -> bool:
        """Whether the inode stays after its last close. An IDLE event follows when its time is over."""
        return inode in self._lingering

    def end_lingering(self, most: int) -> list[InodeNumber]:
        """At most that many inodes whose time is over. The caller sends an IDLE event for each."""
        ended: list[InodeNumber] = []
        now = trio.current_time()
        while self._lingering and len(ended) < most and next(iter(self._lingering.values())) <= now:
            ended.append(self._lingering.popitem(last=False)[0])
        return ended

    # ---- pins ----

    def count_pinned(self, before: Inode | None, after: Inode | None) -> None:
        """Adjust the pinned pages to a block that came, went or changed its size. Writers learn of it at once."""
        if not self.pins:
            return
        known = after or before
        assert known is not None
        user = self.pins.user(known.pack())
        if user is not None:
            come = 0 if after is None else sum(usage(after).values())
            gone = 0 if before is None else sum(usage(before).values())
            self.pins.pages = max(0, self.pins.pages + come - gone)
            self.shares.add(PINNED, user, (come - gone) * PAGE_SIZE)
            self.space.update()

    async def pin(self, inode: InodeNumber, user: int = ROOT) -> None:
        """Keep a file, or everything below a directory, from eviction. ShareError if that is more than `user` may
        hold."""
        # Pins are set one after the other: of two that have room each, the second may have none.
        async with self._pinning:
            if not self.shares.is_exempt(user):
                size = await self.pins.pages_of(inode) * PAGE_SIZE
                self.shares.check(user, size, f"pin of inode {inode}")
                self.shares.add(PINNED, user, size)
            self._set_pinned(inode, True, user)

    async def unpin(self, inode: InodeNumber) -> None:
        async with self._pinning:
            user = self.pins.charged(inode)
            size = 0 if user is None else await self.pins.pages_of(inode) * PAGE_SIZE
            self._set_pinned(inode, False)
            if user is not None:
                self.shares.add(PINNED, user, -size)

    def _set_pinned(self, number: InodeNumber, pinned: bool, user: int = ROOT) -> None:
        def counted() -> None:
            if pinned:
                self.pins.add(number, user)
            else:
                self.pins.remove(number)
                self.segments.look_again()

        on, off = (InodeFlags.PINNED, InodeFlags.NONE) if pinned else (InodeFlags.NONE, InodeFlags.PINNED)
        self.mark(number, on=on, off=off, counted=counted)


def _take_changes(written: Inode, before: Inode, current: Inode) -> None:
    """Take along the changes of the inode, `before` to `current`, that were made while its block was written. The index
    has them, the block header does not."""
    written.parent, written.name, written.nlink = current.parent, current.name, current.nlink
    written.mode, written.uid, written.gid, written.xattrs = current.mode, current.uid, current.gid, current.xattrs
    written.atime_ns, written.ctime_ns = current.atime_ns, max(written.ctime_ns, current.ctime_ns)
    if current.mtime_ns != before.mtime_ns:
        written.mtime_ns = current.mtime_ns
    kept = InodeFlags.PINNED | InodeFlags.NAMELESS
    written.flags = (written.flags & ~kept) | (current.flags & kept)
    written.version = max(written.version, current.version)
