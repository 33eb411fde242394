"""A daemon's inheritance: the changes of names that a journal has above the index's last commit.

Recovery takes them in after it knows each segment's life, and before it looks for blocks in headers. So names are as
they were announced, and a header that says something older changes nothing. An inode that the journal names last
without a sealed content is not taken: the older block of its name stays. Sealed blocks without a name stay readable for
open handles. All of it may be done again.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import trio

from kvfs import journal
from kvfs.checks import check_records
from kvfs.errors import FormatError
from kvfs.index.lmdb import LmdbIndex
from kvfs.journal import Entry, Journal
from kvfs.names import Names
from kvfs.pool.format import META_EPOCH, META_JOURNAL, META_JOURNAL_VALUE, META_NUMBER
from kvfs.record import FLAGS_OFFSET, Inode, InodeFlags, Kind
from kvfs.store.pins import Pins
from kvfs.store.segment import State
from kvfs.store.segments import Segments
from kvfs.types import ROOT_INODE, InodeNumber

log = logging.getLogger("kvfs.store.pool")

_DEPTH_MAX = 4096  # of directories: longer than PATH_MAX allows
_WALK_BATCH = 512
_YIELD_EVERY = 256
_Name = tuple[int, bytes]


@dataclass(slots=True)
class Told:
    """The journal's word of inodes, where the index says less."""

    inodes: set[int] = field(default_factory=set)  # a header of them says nothing new
    put: int = 0
    removed: int = 0


class Inheritance:
    """The journal of one opening of a store, which becomes its own."""

    def __init__(self, fd: int, index: LmdbIndex, *, rebuild: bool) -> None:
        """Before this mount changes the index. `rebuild`: that is made anew, and knows no journal. JournalError."""
        self._fd, self._index = fd, index
        self._journal = journal.read(fd)
        self._durable, self.ignored = self._known(rebuild)
        self._steps, self.lost = ([], 0) if self.ignored else _believed(self._journal, self._durable)

    @property
    def is_new(self) -> bool:
        """No daemon has written to it: none was before this one under the mount."""
        return not self._journal.sequence and not self._journal.steps

    def _known(self, rebuild: bool) -> tuple[int, str | None]:
        """Up to which change the index has all, and why nothing of the rest is taken."""
        found = self._journal
        if self.is_new:
            return 0, None
        told = f"the journal of names {found.id:#x} has {sum(map(len, found.steps))} entries that are not taken: "
        if rebuild:
            return found.sequence, told + "the index is made anew from the devices"
        value, epoch = self._index.meta_get(META_JOURNAL), self._index.meta_get(META_EPOCH)
        if value is None or len(value) != META_JOURNAL_VALUE.size:
            return found.sequence, told + "the index knows of no journal"
        number, sequence, of_epoch = META_JOURNAL_VALUE.unpack(value)
        if number != found.id:
            return found.sequence, told + f"the index has had another, {number:#x}"
        if epoch != META_NUMBER.pack(of_epoch):
            return found.sequence, told + f"the index has changed without it since mount {of_epoch}"
        return max(sequence, found.durable), None

    @property
    def has_news(self) -> bool:
        """Whether it has anything that the index does not, or blocks without a name."""
        return any(
            entry.sequence > self._durable or entry.data[FLAGS_OFFSET] & InodeFlags.NAMELESS
            for step in self._steps for entry in step
            if entry.kind == journal.Kind.PUT or entry.sequence > self._durable
        )  # fmt: skip

    def follow(self, epoch: int, *, taken: bool) -> None:
        """The index says from now on its part of this journal in this mount. `taken`: all that it will ever take of the
        former mount's rest."""
        sequence = self._journal.sequence if taken or self.ignored else self._durable
        self._index.meta_put(META_JOURNAL, META_JOURNAL_VALUE.pack(self._journal.id, sequence, epoch))
        if taken:
            self._index.follow_journal(META_JOURNAL, META_NUMBER.pack(epoch))

    def attach(self, names: Names) -> None:
        """The names of this mount write to it. JournalError."""
        names.attach(self._fd)
        if self.ignored:
            names.journal_settled()

    async def replay(self, segments: Segments, pins: Pins) -> Told:
        """Take it in. Generations of segments are those on the devices, and nothing is committed before all is in."""
        history = _History(self._index)
        limits = (segments.epoch - 1, len(segments.all), segments.geometry.end_page)
        for i, step in enumerate(self._steps):
            try:
                changes = [(entry, _checked(entry, *limits)) for entry in step]
            except FormatError as error:
                log.error("journal of names: %s; nothing from it on is taken", error)
                self.lost += len(self._steps) - i
                break
            history.take(changes, newer=step[-1].sequence > self._durable)
            if i % _YIELD_EVERY == _YIELD_EVERY - 1:
                await trio.lowlevel.checkpoint()
        if self.lost:
            log.error("journal of names %#x: of %d steps it has no room for or cannot read, headers tell what was "
                      "sealed", self._journal.id, self.lost)  # fmt: skip
        told = await _Replay(self._index, segments, pins, history, whole=not self.lost).run()
        self.follow(segments.epoch, taken=True)
        return told


def _believed(found: Journal, durable: int) -> tuple[list[list[Entry]], int]:
    """The steps up to the first number that is missing, and how many behind it are not taken."""
    expected = durable + 1
    for i, step in enumerate(found.steps):
        for entry in step:
            if entry.sequence > expected:
                return found.steps[:i], len(found.steps) - i
            expected += entry.sequence == expected
    return found.steps, int(bool(found.refused) or expected <= found.sequence)


def _checked(entry: Entry, epoch_max: int, segment_count: int, end_page: int) -> Inode | None:
    """The inode as the entry has it; None if it has gone, or lost its name and was not open. FormatError."""
    if entry.kind == journal.Kind.REMOVE:
        return None
    origin = f"entry {entry.sequence} of inode {entry.inode}"
    try:
        inode = Inode.unpack(entry.data)
    except (FormatError, struct.error) as error:
        raise FormatError(f"{origin}: {error}") from error
    if inode.nameless and inode.nlink:
        return None
    if inode.sealed or inode.kind != Kind.FILE:
        check_records(entry.data, epoch_max=epoch_max, segment_count=segment_count, end_page=end_page, origin=origin)
    return inode


def _is_unsealed(inode: Inode | None) -> bool:
    return inode is not None and inode.kind == Kind.FILE and not inode.sealed


def _name(inode: Inode | None) -> _Name | None:
    return None if inode is None or inode.nameless or not inode.name else (inode.parent, inode.name)


class _History:
    """The fate of each inode, and which older block an unsealed one pushed from its name."""

    def __init__(self, index: LmdbIndex) -> None:
        self._index = index
        self.last: dict[int, Inode | None] = {}
        self.told: set[int] = set()  # in entries that the index does not have
        self._older: dict[_Name, Inode] = {}

    def known(self, number: int) -> Inode | None:
        """As the index has it, also on a device that is away."""
        record = self._index.raw(number) or self._index.hidden(number)
        return None if record is None else Inode.unpack(record)

    def _before(self, number: int) -> Inode | None:
        return self.last[number] if number in self.last else self.known(number)

    def take(self, step: Sequence[tuple[Entry, Inode | None]], *, newer: bool) -> None:
        """A step, as one instant. Not newer: the index has what it did to names; it is looked at for nameless blocks
        alone."""
        after = {entry.inode: inode for entry, inode in step}
        if not newer:
            for number, inode in after.items():
                if inode is not None and inode.nameless and self.known(number) is None:
                    self.last[number] = inode
                else:
                    self.last.pop(number, None)
            return
        before = {number: self._before(number) for number in after}
        self._take_names(before, after)
        self.last.update(after)
        self.told.update(after)

    def _take_names(self, before: dict[int, Inode | None], after: dict[int, Inode | None]) -> None:
        left = {name: number for number, inode in before.items() if (name := _name(inode)) is not None}
        taken = {name: number for number, inode in after.items() if (name := _name(inode)) is not None}
        for name in left.keys() - taken.keys():
            self._older.pop(name, None)
        for name, number in taken.items():
            if left.get(name) == number and _is_unsealed(after[number]):
                continue  # it had the name before
            pushed = before.get(left.get(name, 0))
            if not _is_unsealed(after[number]) or pushed is None or _name(after[pushed.inode]) is not None:
                self._older.pop(name, None)
            elif not _is_unsealed(pushed):
                self._older[name] = pushed

    def final(self) -> Iterator[tuple[int, Inode | None]]:
        """All inodes as the index is to have them, with None for one that goes. Of an unsealed one the index may have
        an older content, which stays."""
        stays = {int(inode.inode): inode for inode in self._older.values()}
        for number, inode in self.last.items():
            if number in stays:
                yield number, stays[number]
            elif inode is None or (inode.nameless and not (inode.sealed and inode.kind == Kind.FILE)):
                yield number, None
            elif not _is_unsealed(inode):
                yield number, inode


class _Replay:
    """Brings the index to what a history says."""

    def __init__(self, index: LmdbIndex, segments: Segments, pins: Pins, history: _History, *, whole: bool) -> None:
        self._index, self._segments, self._pins, self._history = index, segments, pins, history
        self._whole = whole
        self._final = dict(history.final())
        self._reachable = {int(ROOT_INODE)}
        self._told = Told()

    async def run(self) -> Told:
        history, told = self._history, self._told
        # Behind what the journal lacks an inode may have been sealed that was not yet. A removed one stays removed.
        told.inodes = history.told if self._whole else {n for n in history.told if history.last[n] is None}
        puts = {number: inode for number, inode in self._final.items() if inode is not None and self._lies(inode)}
        for number in self._final.keys() - puts.keys():
            self._remove(number)
        moved: list[InodeNumber] = []
        for i, (number, inode) in enumerate(puts.items()):
            old = history.known(number)
            if not self._takes_name(inode, puts):
                self._remove(number)
                continue
            self._dirty(old)
            self._index.put(inode, old)
            self._dirty(inode)
            self._pins.follow(inode)
            told.put += 1
            if inode.kind == Kind.DIRECTORY and old is not None and _name(old) != _name(inode):
                moved.append(inode.inode)
            if i % _YIELD_EVERY == _YIELD_EVERY - 1:
                await trio.lowlevel.checkpoint()
        for number, inode in puts.items():
            if not inode.nameless and number != ROOT_INODE and not self._reaches_root(inode.parent):
                log.error("inode %d: the journal of names puts it into directory %d, which is not there; it is left "
                          "out", number, inode.parent)  # fmt: skip
                self._remove(number)
        await self._tell_below(moved)
        if told.put or told.removed:
            log.info("the journal of names had %d inodes that changed and %d that went", told.put, told.removed)
        return told

    def _lies(self, inode: Inode) -> bool:
        """Whether the block's bytes are where the record says: its segments have not begun another life."""
        if inode.kind != Kind.FILE:
            return True
        places = [(inode.segment, inode.generation), *((e.segment, e.generation) for e in inode.extents)]
        for number, generation in places:
            segment = self._segments.all[number]
            if segment.generation != generation or segment.state == State.FREE:
                return False
        return True

    def _remove(self, number: int) -> None:
        old = self._history.known(number)
        if old is None or number == ROOT_INODE:
            return
        self._dirty(old)
        self._index.delete(old)
        self._pins.remove(number)
        self._told.removed += 1

    def _takes_name(self, inode: Inode, puts: dict[int, Inode]) -> bool:
        """False if an inode that the journal does not name has this name, and is newer."""
        name = _name(inode)
        holder = None if name is None else self._index.lookup(inode.parent, inode.name)
        if holder is None or holder == inode.inode or holder in puts:
            return True
        other = self._history.known(holder)
        if other is not None and (other.version > inode.version or not self._index.is_empty(holder)):
            return False
        self._remove(holder)
        return True

    def _reaches_root(self, number: int) -> bool:
        """Whether this is a directory with a name, and all above it."""
        way: dict[int, None] = {}
        while number not in self._reachable:
            inode = self._history.known(number)
            if inode is None or inode.kind != Kind.DIRECTORY or inode.nameless or number in way:
                return False
            if len(way) == _DEPTH_MAX:
                return False
            way[number] = None
            number = inode.parent
        self._reachable.update(way)
        return True

    def _dirty(self, inode: Inode | None) -> None:
        if inode is not None and inode.sealed and inode.kind == Kind.FILE:
            self._segments.mark_dirty(self._segments.all[inode.segment], gone=True)

    async def _tell_below(self, moved: list[InodeNumber]) -> None:
        """Summaries name the directories of their blocks: they must be written again."""
        queue = deque(moved)
        while queue:
            directory, after = queue.popleft(), b""
            while entries := self._index.list(directory, after, _WALK_BATCH):
                for _, number in entries:
                    inode = self._index.get(number)
                    if inode is not None and inode.kind == Kind.DIRECTORY:
                        queue.append(number)
                    else:
                        self._dirty(inode)
                after = entries[-1][0]
                await trio.lowlevel.checkpoint()


def nameless_blocks(index: LmdbIndex) -> list[bytes]:
    """The records of sealed blocks without a name, which no commit writes."""
    records = [index.raw(number) for number in index.volatile_inodes()]
    flags = int(InodeFlags.SEALED | InodeFlags.NAMELESS)
    return [record for record in records if record is not None and record[FLAGS_OFFSET] & flags == flags]
