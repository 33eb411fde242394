"""The blocks of an open pool: what must agree changes here, in one step.

A step is code of the one trio thread between two awaits, with the names locked (I4): the data plane has its own steps.
One step changes a block's index record, its record in the block table, the live pages of its segments, pins, and the
list of outdated summaries. Nothing here waits for a device. Names are the namespace's, bytes on devices are
sealing.py's.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from errno import EBUSY, EIO
from itertools import compress

import trio

from kvfs.errors import KvfsError, NotEmptyError
from kvfs.index.lmdb import LmdbIndex
from kvfs.names import Evicted, Leave, Removed, step
from kvfs.naming import END_OPEN, Act, Naming
from kvfs.plane import OpenState, Plane, PlaneError
from kvfs.podmap import Rights
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
from kvfs.worth import Looks

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
_OVERTAKEN_S = 1.0


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
        # Up to which versions inodes are overtaken that drop_overtaken() could not drop.
        self._not_dropped: dict[InodeNumber, int] = {}
        self._any_overtaken = trio.Event()

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
        self.bringing.drop_hidden()
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
        if not copy:
            self.index.put(written, current, entered)
        elif not self._move(written, entered):
            return False
        if current.sealed:
            self.segments.mark_dirty(self.segments.all[current.segment], gone=True)
        self.segments.account(current if current.sealed else None, written)
        if not copy:
            self.count_pinned(current, written)
            self.plane.inode_update(entered)
        return True

    def _move(self, written: Inode, record: bytes) -> bool:
        """Let names and table lead to the copy. False if the data plane has begun to write the block from its old
        place. NamesError: both are as before (I11)."""
        try:
            self.index.keep(written.inode)
            self.plane.inode_move(record)
        except KvfsError as error:
            self.segments.mark_dirty(self.segments.all[written.segment], gone=True)
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
        """A block failed verification: it is a miss from now on, unless it has moved meanwhile. Where that cannot be
        done now, as memory ends, the next reader reports it again."""

        def is_bad(inode: Inode) -> bool:
            if self.plane.inode_is_open(number) == OpenState.BEING_WRITTEN:
                return False
            return segment == inode.segment or any(extent.segment == segment for extent in inode.extents)

        try:
            inode = self._take_if(number, is_bad)
        except KvfsError as error:
            log.error("inode %d in segment %d: failed its checksums; not dropped: %s", number, segment, error)
            return
        if inode is not None:
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
        What cannot be done now, as memory ends, is tried again soon.
        """
        try:
            inode = self.index.get(number)
            if inode is not None and inode.kind == Kind.DIRECTORY:
                self._look_at_directory(inode)
            else:
                self._drop_if_overtaken(number, version)
        except (KvfsError, MemoryError) as error:
            # Nothing else keeps it from being served.
            if number not in self._not_dropped:
                log.error("inode %d: another node has it as of version %d; looked at again soon, as this one cannot "
                          "take that in now: %s", number, version, error)  # fmt: skip
            self._not_dropped[number] = max(version, self._not_dropped.get(number, 0))
            self._any_overtaken.set()
            return
        if self._not_dropped.get(number, version) <= version:
            self._not_dropped.pop(number, None)

    def _drop_if_overtaken(self, number: InodeNumber, version: int) -> None:
        def is_overtaken(inode: Inode) -> bool:
            if inode.nameless or inode.version > version:
                return False
            return self.plane.inode_overtaken(number, version) != OpenState.BEING_WRITTEN

        self._take_if(number, is_overtaken)

    async def follow_overtaken(self) -> None:
        """Look again at what drop_overtaken() could not drop, as memory had ended. Until cancelled."""
        while True:
            await self._any_overtaken.wait()
            self._any_overtaken = trio.Event()
            await trio.sleep(_OVERTAKEN_S)
            for number, version in list(self._not_dropped.items()):
                self.drop_overtaken(number, version)
                await trio.lowlevel.checkpoint()

    def _look_at_directory(self, inode: Inode) -> None:
        """Another node has changed its rights, or has nothing in it any more. A directory that
        was only looked up here goes with the last node that has it."""
        if self.follow_rights(inode) is not inode or InodeFlags.BORROWED not in inode.flags:
            return
        if self._rights(inode) is None:
            with suppress(NotEmptyError):
                self.take_name(inode.inode)
                self.tell_hosts()

    def _rights(self, inode: Inode) -> Rights | None:
        return None if self.plane.pod is None else self.plane.pod.rights(inode.parent, inode.name)

    @step
    def follow_rights(self, inode: Inode) -> Inode:
        """In a pod a directory has the rights that were set last, on whichever node. Returns the directory as it is
        then; the others hear of it from each node that has it."""
        theirs = self._rights(inode)
        if theirs is None or theirs.version <= inode.version:
            return inode
        changed = inode.copy()
        changed.version, changed.mode, changed.uid, changed.gid = theirs
        changed.ctime_ns = time.time_ns()
        self.index.put(changed, inode)
        self.plane.inode_update(changed.pack())
        self._directory_changed(changed.inode)
        self.tell_hosts()
        return changed

    # ---- removals and renames: made in C (native/src/content/naming.c) ----

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
        """Within the step of a removal or rename: count what is counted here."""
        self.segments.take_notes()
        if done.lingers and done.lost is not None:
            self.linger(done.lost)
        if done.untold:
            self.tell_hosts()
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
            self.directory_gone()
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

    @step
    def hide_in_table(self, numbers: Sequence[InodeNumber]) -> None:
        """Hidden blocks leave the block table. Open handles stay, and read what they can; the name goes."""
        for number, is_open in zip(numbers, self.plane.inode_evict(numbers), strict=True):
            if is_open:
                with suppress(PlaneError):
                    self.plane.inode_hide(number)

    @step
    def renamed(self, inode: Inode, *, entered: bool = False, rights: bool = True) -> None:
        """Name or attributes of an inode in the index have changed, or it has lost its name: summaries must say so. The
        version rises, unless it did when the inode `entered`. In a pod a directory's is of its rights alone."""
        if not entered and not inode.nameless:
            if rights or inode.kind != Kind.DIRECTORY or self.plane.pod is None:
                inode.version = self.next_version()
            self.index.put(inode, inode)
            self.plane.inode_update(inode.pack())
        if inode.kind == Kind.DIRECTORY:
            self._directory_changed(inode.inode)
        elif inode.sealed:
            self.segments.renamed(self.segments.all[inode.segment], gone=inode.nameless)

    def _directory_changed(self, number: InodeNumber) -> None:
        """Summaries of blocks below it must say so."""
        self.directory_moves += 1
        self.plane.frames.directories_changed(moved=True)
        self._moved_directories.append(number)
        self._directory_moved.set()

    def directory_gone(self) -> None:
        """A directory was removed, or lost its name. Within the step."""
        self.directory_removals += 1
        self.plane.frames.directories_changed(moved=False)

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

    def is_untold(self, parent: InodeNumber, name: bytes) -> bool:
        """Whether a host may still believe that the name leads to a block that was evicted."""
        return self.names.is_untold(parent, name)

    def give_name(self, parent: InodeNumber, name: bytes) -> None:
        """The name leads to another inode now. Hosts without notice of its eviction get it at once."""
        if self.is_untold(parent, name):
            self.tell_hosts()

    async def tell_evictions(self) -> None:
        """Tell hosts of evictions, all of TELL_S at once. Until cancelled."""
        while True:
            await self._evicted.wait()
            await trio.sleep(TELL_S)
            if self._evicted.is_set():
                self.tell_hosts()

    # ---- eviction ----

    def look(self, segment: Segment, numbers: Sequence[InodeNumber], looks: Looks, at: int = 0) -> None:
        """Look at these inodes: into `looks` from `at` on. Those on a device that is away have no pages anywhere. Not
        within a step."""
        if self.plane.blocks_look(segment.index, numbers, looks, at):
            self.index.bring([number for i, number in enumerate(numbers, at) if looks.all[i].absent])
            self.plane.blocks_look(segment.index, numbers, looks, at)
        for i, number in enumerate(numbers, at) if self.index.is_hiding else ():
            if self.index.hidden(number) is not None:
                look = looks.all[i]
                look.pages = look.pages_all = look.held = look.busy = 0

    def bring_to_evict(self, numbers: Sequence[InodeNumber]) -> None:
        """Have in memory what evict() needs of these, just before its step: no lock is held while the index is read
        (I48)."""
        self.index.bring(numbers)
        if self.pins:
            for parent in self.names.records(numbers, None).parents:
                self.index.keep_above(InodeNumber(parent))

    @step
    def evict(self, segment: Segment | None, numbers: Sequence[InodeNumber]) -> Evicted:
        """Blocks with a part in the segment leave block table, index and accounts. Open or pinned ones stay, and those
        whose records are not in memory. Without a segment they are one group, wherever they lie. Then all stay while
        one does. Hosts get notice soon."""
        # Only then anything depends on what each of them was.
        before: dict[InodeNumber, bytes] = {}
        if self.pins or self.index.removed_names is not None:
            before = {n: record for n in numbers if (record := self.names.get(n)) and not self.index.hides(record)}
            free = [number for number, record in before.items() if not self.pins.holds(record)]
            if segment is not None:
                numbers = free
            elif len(free) < len(before):
                numbers = []
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

    @step
    def _set_pinned(self, number: InodeNumber, pinned: bool, user: int = ROOT) -> None:
        before = self.index.get(number)
        if before is None:
            return
        inode = before.copy()
        inode.flags = before.flags | InodeFlags.PINNED if pinned else before.flags & ~InodeFlags.PINNED
        self.index.put(inode, before)
        if pinned:
            self.pins.add(number, user)
        else:
            self.pins.remove(number)
            self.segments.look_again()
        if inode.sealed or inode.kind == Kind.DIRECTORY:
            self.renamed(inode, rights=False)
        else:
            self.plane.inode_update(inode.pack())


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
