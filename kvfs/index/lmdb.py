"""The index in LMDB (http://www.lmdb.tech/doc), in the pool's directory.

Reads ask the names in memory first (kvfs/names.py): they have each inode that LMDB does not have as it is. Below lies
LMDB itself, read by one long-lived transaction. A commit takes the changes of one instant; one thread writes them in a
single transaction, and syncs. It derives dentries, memberships and groups from LMDB's records and the new ones.
Databases and keys are described in docs/format.md.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol, cast

import lmdb
import trio

from kvfs.errors import KvfsError
from kvfs.index.hidden import Hidden
from kvfs.index.interface import Dentries, IndexStatistics, Numbers, Pairs, States
from kvfs.names import Begun, Leave, MissingError, Names
from kvfs.record import (
    GROUP_ATTRIBUTE,
    PARENT_OFFSET,
    RECORD_HEAD,
    RECORD_PARENT,
    Inode,
    Kind,
    segments_of,
)
from kvfs.types import NAME_MAX, ROOT_INODE, InodeNumber, SegmentIndex
from kvfs.units import told_size

log = logging.getLogger(__name__)

# Address space, not memory or disk: LMDB's file grows as it is used. 256 GiB hold some 500 million inodes.
MAP_SIZE = 256 << 30
_LMDB_PAGE = 4096
# LMDB does not write the last pages that a transaction took and freed again, though its meta page counts them. Up to
# 11 were seen, and LMDB names no bound. At least half of the hole, 2,048 pages, is there after each commit; a hole
# costs no disk.
_HOLE = 16 << 20
_LMDB_MAGIC = 0xBEEFC0DE
_U64 = struct.Struct(">Q")
_MEMBER = struct.Struct(">IQ")
_U32 = struct.Struct(">I")
_VALUE = struct.Struct("<Q")
_MARK = struct.Struct("<QQ")
_LIST_BATCH = 256
# Of a directory's names so many are read first, then four times as many each time.
_STORED_FIRST = 16
_DEPTH_MAX = 4096  # of directories: longer than PATH_MAX allows
# Keys beyond the segment are read in vain.
_MEMBERS_BATCH = 16
_NOTHING = Begun(None, 0)
# Present while the index is being rebuilt.
_INCOMPLETE_NAME = "incomplete"


class PoolIndexError(KvfsError):
    """The index cannot be opened, read or written."""


class Transaction(Protocol):
    """The part of lmdb.Transaction used here."""

    def get(self, key: bytes, default: bytes | None = None, db: object = None) -> bytes | None: ...
    def put(self, key: bytes, value: bytes, *, db: object) -> bool: ...
    def delete(self, key: bytes, value: bytes = b"", db: object = None) -> bool: ...
    def cursor(self, db: object = None) -> Cursor: ...
    def stat(self, db: object) -> dict[str, int]: ...
    def abort(self) -> None: ...
    def commit(self) -> None: ...
    def drop(self, db: object, delete: bool = True) -> None: ...


class Cursor(Protocol):
    def set_range(self, key: bytes) -> bool: ...
    def first(self) -> bool: ...
    def iternext(self, keys: bool = True, values: bool = True) -> Iterator[object]: ...
    def putmulti(self, items: list[tuple[bytes, bytes]]) -> tuple[int, int]: ...
    def getmulti(self, keys: list[bytes]) -> list[tuple[bytes, bytes]]: ...


@dataclass(slots=True)
class _Batch:
    """The changes of one commit: inodes as Names.commit_begin() gives them, states of segments, meta values (None:
    removed)."""

    inodes: Begun = _NOTHING
    inode_count: int = 0
    segments: dict[int, bytes] = field(default_factory=dict)
    meta: dict[bytes, bytes | None] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.inode_count + len(self.segments) + len(self.meta)


class LmdbIndex:
    """kvfs.index.interface.Index over LMDB. One process opens a pool's index at a time (the pool's lock sees to
    that)."""

    def __init__(
        self, path: Path, *, read_only: bool = False, durable: bool = True, names: Names | None = None
    ) -> None:
        """Open or make the index at `path`. Raises PoolIndexError if it cannot be read. `names`: of a data plane, with
        nothing in them; None: its own.

        Not durable: for a rebuild, which starts again if the machine ends in between; see make_durable().
        """
        self._path = path
        self._read_only = read_only
        _check_size(path / "data.mdb")
        self._open(durable)
        self._names = names or Names()
        # States and meta values that are in no commit yet, and the commit that is under way.
        self._pending = _Batch()
        self._committing: _Batch | None = None
        self._lock = trio.Lock()
        self._writer = trio.CapacityLimiter(1)
        self._write_lock = threading.Lock()
        self.pending_batch, self.durable_batch = 1, 0
        self._commits = 0
        self._failures = 0
        # While a rebuild runs: the names removed since, which must not come back from an old header.
        self.removed_names: set[tuple[int, bytes]] | None = None
        self.distrusted = False
        self._journal: tuple[bytes, bytes] | None = None
        self._hidden = Hidden()
        self._on_drop: Callable[[Inode], None] | None = None  # set as long as anything can be hidden

    def _open(self, durable: bool) -> None:
        path, marker = self._path, self._path / _INCOMPLETE_NAME
        try:
            if not self._read_only:
                path.mkdir(mode=0o700, exist_ok=True)
            if not durable:
                marker.touch(mode=0o600)
                _sync_directory(path)
            self._env = lmdb.open(
                os.fspath(path), map_size=MAP_SIZE, max_dbs=8, max_readers=32, subdir=True, readonly=self._read_only,
                sync=durable, metasync=durable, lock=not self._read_only,
            )  # fmt: skip
            self._inodes_db = self._env.open_db(b"inodes")
            self._names_db = self._env.open_db(b"dentries")
            self._members_db = self._env.open_db(b"segment_inodes")
            self._segments_db = self._env.open_db(b"segments")
            self._meta_db = self._env.open_db(b"meta")
            self._groups_db = self._open_groups()
            self._read = cast(Transaction, self._env.begin())
            if not self._read_only:
                self._grow_file()
        except (lmdb.Error, OSError) as error:
            raise PoolIndexError(f"index {path}: {error}") from error

    def _open_groups(self) -> object | None:
        """Returns None for a reader of an index that was made before there were groups."""
        try:
            return cast(object, self._env.open_db(b"groups"))
        except (lmdb.NotFoundError, lmdb.ReadonlyError):
            return None

    @property
    def incomplete(self) -> bool:
        """A rebuild was begun and never finished: what is in here may be anything."""
        return (self._path / _INCOMPLETE_NAME).exists()

    def distrust(self) -> None:
        """Commits fail: should this be the end, the next start shall make the index anew from the devices. OSError."""
        if not self.incomplete:
            (self._path / _INCOMPLETE_NAME).touch(mode=0o600)
            _sync_directory(self._path)
            self.distrusted = True

    def _trust(self) -> None:
        """A commit has gone well again: it knows all that the devices know."""
        if self.distrusted:
            (self._path / _INCOMPLETE_NAME).unlink(missing_ok=True)
            _sync_directory(self._path)
            self.distrusted = False

    async def make_durable(self, before: Callable[[], None] | None = None) -> None:
        """The rebuild is done: from now on commits are durable, and so is everything before."""
        await self.commit(before)
        async with self._lock:
            await trio.to_thread.run_sync(self._env.sync, True)
            self._read.abort()
            self._env.close()
            self._open(True)
            (self._path / _INCOMPLETE_NAME).unlink(missing_ok=True)
            _sync_directory(self._path)

    # ---- reading ----

    def raw(self, inode: int) -> bytes | None:
        record = self._raw(inode)
        return None if record is not None and self.hides(record) else record

    def _raw(self, inode: int) -> bytes | None:
        record = self._names.get(inode)
        return self._stored(inode) if record is None else record or None

    def _stored(self, inode: int) -> bytes | None:
        """As LMDB has it."""
        return self._read.get(_U64.pack(inode), None, self._inodes_db)

    def get(self, inode: InodeNumber) -> Inode | None:
        record = self.raw(inode)
        return None if record is None else Inode.unpack(record)

    # ---- what lies on devices that are away ----

    def hide(self, segments: Collection[int], on_drop: Callable[[Inode], None]) -> None:
        self._hidden.lost, self._on_drop = frozenset(segments), on_drop
        self._names.leave(Leave.HIDING, bool(segments))

    @property
    def is_hiding(self) -> bool:
        return bool(self._hidden.lost)

    def hides(self, record: bytes) -> bool:
        """Whether a part of it lies on a device that is away."""
        return bool(self._hidden.lost) and self._hidden.hides(record)

    def show(self, inode: int) -> None:
        self._hidden.shown.add(inode)

    def hide_shown(self) -> None:
        self._hidden.shown.clear()

    def hidden(self, inode: int) -> bytes | None:
        record = self._raw(inode) if self._hidden.lost else None
        return record if record is not None and self._hidden.hides(record) else None

    def drop_hidden(self, inode: int) -> bool:
        record = self.hidden(inode)
        if record is None:
            return False
        old = Inode.unpack(record)
        self.delete(old)
        assert self._on_drop is not None
        self._on_drop(old)
        return True

    def drop_hidden_below(self, directory: InodeNumber) -> None:
        """The directory goes, in which only hidden blocks were left."""
        while names := self._list(directory, b"", _LIST_BATCH):
            if not any([self.drop_hidden(number) for _, number in names]):
                return

    # ---- names ----

    def lookup(self, parent: InodeNumber, name: bytes) -> InodeNumber | None:
        number = self._lookup(parent, name)
        return None if number is not None and self._hidden.lost and self.hidden(number) is not None else number

    def _lookup(self, parent: InodeNumber, name: bytes) -> InodeNumber | None:
        found = self._names.find(parent, name)
        if found is None:
            found = self.stored_inode(parent, name)
        return InodeNumber(found) if found else None

    def list(self, parent: InodeNumber, after: bytes, limit: int) -> Dentries:
        found = self._list(parent, after, limit)
        if not self._hidden.lost:
            return found
        visible = [item for item in found if self.hidden(item[1]) is None]
        while len(found) == limit and len(visible) < limit:
            found = self._list(parent, found[-1][0], limit)
            visible += [item for item in found if self.hidden(item[1]) is None]
        return visible[:limit]

    def _list(self, parent: InodeNumber, after: bytes, limit: int) -> Dentries:
        found: Dentries = []
        while True:
            changed = self._names.listing(parent, after, _LIST_BATCH)
            if not changed:
                return found + self.list_stored(parent, after, limit - len(found))
            # Behind the last of a full batch there may be more that has changed.
            bound = changed[-1][0] if len(changed) == _LIST_BATCH else None
            for name, inode in self._merged(parent, after, bound, changed):
                if inode:
                    found.append((name, InodeNumber(inode)))
                    if len(found) == limit:
                        return found
            if bound is None:
                return found
            after = bound

    def _merged(
        self, parent: int, after: bytes, bound: bytes | None, changed: Sequence[tuple[bytes, int]]
    ) -> Iterator[tuple[bytes, int]]:
        """The names up to `bound`: LMDB's, but those that changed as they are now, 0 for one that is gone."""
        rest = iter(changed)
        new = next(rest, None)
        for name, inode in self._stored_names(parent, after):
            if bound is not None and name > bound:
                break
            while new is not None and new[0] < name:
                yield new
                new = next(rest, None)
            if new is not None and new[0] == name:
                yield new
                new = next(rest, None)
            else:
                yield name, inode
        while new is not None:
            yield new
            new = next(rest, None)

    def _stored_names(self, parent: int, after: bytes) -> Iterator[tuple[bytes, int]]:
        prefix = _U64.pack(parent)
        cursor = self._read.cursor(self._names_db)
        if not cursor.set_range(prefix + after):
            return
        for item in cursor.iternext():
            key, value = cast(tuple[bytes, bytes], item)
            if key[:8] != prefix:
                return
            if len(key) > 8 and key[8:] != after:
                yield key[8:], _VALUE.unpack(value)[0]

    def list_stored(self, parent: int, after: bytes, limit: int) -> Dentries:
        """At most `limit` of LMDB's names greater than `after`, as last committed. No more is read behind a directory
        than it has."""
        found: list[tuple[bytes, int]] = []
        cursor, size = self._read.cursor(self._names_db), _STORED_FIRST
        behind = _U64.pack(parent) + b"\xff" * (NAME_MAX + 1)  # above each name
        if not cursor.set_range(_U64.pack(parent) + after + b"\0"):
            return []
        items = cast(Iterator[tuple[bytes, bytes]], cursor.iternext())
        while chunk := list(islice(items, min(size, limit - len(found)))):
            count = len(chunk) if chunk[-1][0] < behind else bisect_left(chunk, (behind, b""))
            values = struct.unpack(f"<{count}Q", b"".join([value for _, value in chunk[:count]]))
            found += zip([key[8:] for key, _ in chunk[:count]], values, strict=True)
            if count < len(chunk):
                break
            size *= 4
        return cast(Dentries, found)

    def is_empty(self, parent: InodeNumber) -> bool:
        return not self.list(parent, b"", 1)

    def segment_inodes(self, segment: SegmentIndex) -> Numbers:
        return cast(Numbers, self._names.members(segment, self._stored_members(segment)))

    def _stored_members(self, segment: int) -> bytes:
        """LMDB's keys of the segment's inodes, concatenated."""
        cursor = self._read.cursor(self._members_db)
        if not cursor.set_range(_U32.pack(segment)):
            return b""
        keys = cast(Iterator[bytes], cursor.iternext(values=False))
        found: list[bytes] = []
        behind = _U32.pack(segment + 1)
        while chunk := list(islice(keys, _MEMBERS_BATCH)):
            count = bisect_left(chunk, behind)
            found += chunk[:count]
            if count < len(chunk):
                break
        return b"".join(found)

    def bring(self, numbers: Sequence[int]) -> None:
        """Have the records of these inodes in memory for a while, in any case in the step in which this is called."""
        if absent := self._names.absent(numbers):
            self._names.load(b"".join(self._stored_many(absent)))

    def load(self, numbers: Sequence[int]) -> Sequence[int]:
        """As bring(), of a few that are not in memory. Returns those that are not in LMDB either: they are gone."""
        found = [(number, self._stored(number)) for number in numbers]
        self._names.load(b"".join([record for _, record in found if record is not None]))
        return [number for number, record in found if record is None]

    def _stored_many(self, numbers: Sequence[int]) -> Iterator[bytes]:
        """As LMDB has them; of those that it has."""
        keys = [_U64.pack(number) for number in numbers]
        return (record for _, record in self._read.cursor(self._inodes_db).getmulti(keys))

    def live_records(self, numbers: Numbers, segment: SegmentIndex | None) -> tuple[bytes, int, set[InodeNumber]]:
        if self._hidden.lost:
            numbers = [number for number in numbers if self.hidden(number) is None]
        found = self._names.records(numbers, segment)
        parts, count, parents = [found.data], found.record_count, set(found.parents)
        for record in self._stored_many(found.absent) if found.absent else ():
            head = RECORD_HEAD.unpack_from(record)
            if segment is None or head[9] == segment:
                parts.append(record)
                parents.add(head[5])
                count += 1
        return b"".join(parts), count, cast(set[InodeNumber], parents)

    @property
    def groups_used(self) -> bool:
        if self._names.grouped:
            return True
        return self._groups_db is not None and self._read.stat(self._groups_db)["entries"] > 0

    def group_inodes(self, group: bytes) -> Numbers:
        found = {*self._stored_group(group), *self._names.group(group)}
        # LMDB has some that left the group since; a rebuild inserts candidates, and removes some at its end.
        inodes = [self.get(InodeNumber(number)) for number in sorted(found)]
        return [inode.inode for inode in inodes if inode is not None and inode.group == group]

    def _stored_group(self, group: bytes) -> Iterator[int]:
        if self._groups_db is None:
            return
        cursor = self._read.cursor(self._groups_db)
        if cursor.set_range(_group_key(group, 0)):
            for item in cursor.iternext(values=False):
                key = cast(bytes, item)
                if key[1:-8] != group:
                    return
                yield _U64.unpack(key[-8:])[0]

    def segment_items(self) -> States:
        cursor = self._read.cursor(self._segments_db)
        found: dict[int, bytes] = {}
        if cursor.first():
            for item in cursor.iternext():
                key, value = cast(tuple[bytes, bytes], item)
                found[_U32.unpack(key)[0]] = value
        for layer in (self._committing, self._pending):
            if layer is not None:
                found.update(layer.segments)
        return [(SegmentIndex(segment), found[segment]) for segment in sorted(found)]

    def meta_get(self, key: bytes) -> bytes | None:
        for layer in (self._pending, self._committing):
            if layer is not None and key in layer.meta:
                return layer.meta[key]
        return self._read.get(key, None, self._meta_db)

    def meta_items(self, prefix: bytes) -> Pairs:
        cursor = self._read.cursor(self._meta_db)
        found: dict[bytes, bytes | None] = {}
        if cursor.set_range(prefix):
            for item in cursor.iternext():
                key, value = cast(tuple[bytes, bytes], item)
                if not key.startswith(prefix):
                    break
                found[key] = value
        for layer in (self._committing, self._pending):
            if layer is not None:
                found.update((key, value) for key, value in layer.meta.items() if key.startswith(prefix))
        return [(key, value) for key, value in sorted(found.items()) if value is not None]

    def records(self, chunk_bytes: int) -> Iterator[bytes]:
        assert not self.changes_pending
        cursor = self._read.cursor(self._inodes_db)
        if not cursor.first():
            return
        values = cast(Iterator[bytes], cursor.iternext(keys=False, values=True))
        count = max(1, chunk_bytes // 200)
        while chunk := b"".join(islice(values, count)):
            yield chunk

    def dentries(self) -> Iterator[tuple[int, bytes, int]]:
        """Every committed dentry: parent, name, inode. For checks."""
        cursor = self._read.cursor(self._names_db)
        if cursor.first():
            for item in cursor.iternext():
                key, value = cast(tuple[bytes, bytes], item)
                yield _U64.unpack_from(key)[0], key[8:], _VALUE.unpack(value)[0]

    def memberships(self) -> Iterator[tuple[int, int]]:
        """Every committed (segment, inode). For checks."""
        cursor = self._read.cursor(self._members_db)
        if cursor.first():
            for item in cursor.iternext(values=False):
                yield cast(tuple[int, int], _MEMBER.unpack(cast(bytes, item)))

    # ---- changing ----

    def keep(self, number: int) -> None:
        """Have the inode's record in memory for a while, where the data plane finds it."""
        self.bring((number,))

    def keep_above(self, number: InodeNumber) -> int | None:
        """As keep(), for an inode and all directories above it. The inode comes last: what is loaded makes older ones
        leave, and without a directory nothing can be made in it. Returns the first that is not there; None: all are."""
        at, way = int(number), [int(number)]
        record = self._raw(at)
        while record and at != ROOT_INODE and len(way) < _DEPTH_MAX:
            (at,) = RECORD_PARENT.unpack_from(record, PARENT_OFFSET)
            way.append(at)
            record = self._raw(at)
        for one in reversed(way):
            self.keep(one)
        return None if record else at

    def hidden_holder(self, parent: InodeNumber, name: bytes) -> int:
        """The hidden block that has this name; 0: there is none. Once the name is given to another, it has to go."""
        holder = self._lookup(parent, name) if self._hidden.lost else None
        return 0 if holder is None or self.hidden(holder) is None else int(holder)

    def put(self, new: Inode, old: Inode | None, record: bytes | None = None) -> None:
        """`record`: new.pack(), if the caller has it."""
        assert old is None or old.inode == new.inode
        named = bool(new.name) and not new.nameless  # the root has none
        if named and (holder := self.hidden_holder(new.parent, new.name)) not in (0, new.inode):
            self.drop_hidden(holder)
        if old is not None and not (named and (old.parent, old.name) == (new.parent, new.name)):
            self.note_removed(old)
        self._put(int(new.inode), record or new.pack(), old is not None)

    def _put(self, number: int, record: bytes, known: bool) -> None:
        try:
            self._names.put(record, known)
        except MissingError:
            self._names.put(record, self._load(number))

    def _load(self, number: int) -> bool:
        """Take in what LMDB has of an inode; False if that is nothing."""
        stored = self._stored(number)
        if stored is not None:
            self._names.load(stored)
        return stored is not None

    def note_removed(self, old: Inode) -> None:
        """The inode has lost its name: while a rebuild runs an old header must not bring it back."""
        if self.removed_names is not None and old.name and not old.nameless:
            self.removed_names.add((int(old.parent), old.name))

    def delete(self, old: Inode) -> None:
        if self._hidden.lost and old.kind == Kind.DIRECTORY:
            self.drop_hidden_below(old.inode)
        self.note_removed(old)
        try:
            self._names.remove(old.inode)
        except MissingError:
            if self._load(old.inode):
                self._names.remove(old.inode)

    def segment_put(self, segment: SegmentIndex, state: bytes) -> None:
        self._pending.segments[segment] = state

    def meta_put(self, key: bytes, value: bytes | None) -> None:
        self._pending.meta[key] = value

    @property
    def changes_pending(self) -> int:
        return self._uncommitted + (0 if self._committing is None else self._committing.count)

    @property
    def _uncommitted(self) -> int:
        return self._names.pending + self._pending.count

    # ---- committing ----

    def follow_journal(self, key: bytes, tail: bytes) -> None:
        """Each commit has under this meta key its part of the names' journal: id and sequence, then the tail."""
        self._journal = (key, tail)

    async def commit(self, before: Callable[[], None] | None = None) -> None:
        """Return when every change made so far is durable. KvfsError with the errno if it cannot be: the changes then
        stay pending. `before` is called in the step that the commit begins with: its changes are part of it."""
        async with self._lock:
            batch = self._begin_commit(before)
            if batch is None:
                return
            error: BaseException | None = None
            try:
                # Carried through on cancellation: a caller that goes is no reason that a commit fails. And it need not
                # wait for a thread.
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self._write, batch, limiter=self._writer)
            except BaseException as caught:
                error = caught
                raise
            finally:
                self._end_commit(batch, error)

    def commit_now(self, before: Callable[[], None] | None = None) -> None:
        """As commit(), blocking; for tools and for the time before the mount answers."""
        assert self._committing is None
        batch = self._begin_commit(before)
        if batch is None:
            return
        error: BaseException | None = None
        try:
            self._write(batch)
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._end_commit(batch, error)

    def _begin_commit(self, before: Callable[[], None] | None) -> _Batch | None:
        """All that a commit writes is of one instant (I14). Returns None if nothing has changed."""
        with self._names:
            if before is not None:
                before()
            if not self._uncommitted:
                self._names.journal_idle()
                return None
            count, inodes = self._names.pending, self._names.commit_begin()
            mark = self._names.journal_mark()
            if mark is not None and self._journal is not None:
                key, tail = self._journal
                self._pending.meta[key] = _MARK.pack(*mark) + tail
        batch, self._pending = self._pending, _Batch()
        batch.inodes, batch.inode_count = inodes, count
        self._committing = batch
        self.pending_batch += 1
        return batch

    def _end_commit(self, batch: _Batch, error: BaseException | None) -> None:
        if error is not None:
            self._pending.segments = batch.segments | self._pending.segments
            self._pending.meta = batch.meta | self._pending.meta
            self._failures += 1
        else:
            self.durable_batch = self.pending_batch - 1
            self._commits += 1
            self._trust()
        self._committing = None
        self._renew()
        self._names.commit_end(error is None)

    def _renew(self) -> None:
        self._read.abort()
        self._read = cast(Transaction, self._env.begin())

    def _write(self, batch: _Batch) -> None:
        """Write one batch in one durable transaction. Blocks; in the committing thread."""
        try:
            with self._write_lock, self._env.begin(write=True) as plain:
                self._write_batch(cast(Transaction, plain), batch)
            self._grow_file()
        except lmdb.MapFullError as error:
            raise _commit_error(self._path, errno.ENOSPC, error) from error
        except (lmdb.Error, OSError) as error:
            number = errno.ENOSPC if "No space" in str(error) else errno.EIO
            raise _commit_error(self._path, number, error) from error

    def _grow_file(self) -> None:
        """Keep a hole behind the file's last page, so that a file that is shorter than its meta page says is cut off.

        A transaction does not write the pages at the end that it has taken and freed again (mdb_page_flush(): P_LOOSE),
        though the meta page counts them. Here, not in the check: a kill may come right after a commit.
        """
        needed = (int(self._env.info()["last_pgno"]) + 1) * _LMDB_PAGE
        path = self._path / "data.mdb"
        with contextlib.suppress(OSError):  # no more than the pages that _check_size() allows for
            if path.stat().st_size < needed + _HOLE // 2:
                os.truncate(path, needed + _HOLE)

    def _write_batch(self, txn: Transaction, batch: _Batch) -> None:
        self._write_inodes(txn, batch.inodes, batch.inode_count)
        states = [(_U32.pack(segment), state) for segment, state in batch.segments.items()]
        txn.cursor(self._segments_db).putmulti(states)
        for key, value in batch.meta.items():
            if value is None:
                txn.delete(key, db=self._meta_db)
            else:
                txn.put(key, value, db=self._meta_db)

    def _write_inodes(self, txn: Transaction, begun: Begun, count: int) -> None:
        """Removals first, as a name that one inode leaves may be another's. Puts are sorted, as neighbours share pages,
        and one call a database, as each call may wait for the interpreter lock."""
        known = self._names.index_known(begun, count)
        stored = txn.cursor(self._inodes_db).getmulti(known) if known else []
        puts_and_drops = self._names.index_changes(begun, [record for _, record in stored])
        inodes, names, members, groups, lost_inodes, lost_names, lost_members, lost_groups = puts_and_drops
        for db, keys in (
            (self._inodes_db, lost_inodes), (self._members_db, lost_members), (self._groups_db, lost_groups),
        ):  # fmt: skip
            for key, _ in keys if db is not None else ():
                txn.delete(key, db=db)
        for dentry, inode in lost_names:
            # An inode that is away may have lost its name to another.
            if txn.get(dentry, None, self._names_db) == inode:
                txn.delete(dentry, db=self._names_db)
        for db, items in (
            (self._inodes_db, inodes), (self._names_db, names), (self._members_db, members), (self._groups_db, groups),
        ):  # fmt: skip
            if items and db is not None:
                txn.cursor(db).putmulti(items)

    # ---- rebuilding ----

    def bulk(self, work: Callable[[Bulk], None]) -> None:
        """Run `work` in one transaction that nothing pending is part of. Blocks; in any thread, while no commit runs.

        The caller holds off commits by `exclusive()` and calls `refresh()` from the trio thread afterwards.
        """
        try:
            with self._write_lock, self._env.begin(write=True) as plain:
                databases = (self._inodes_db, self._names_db, self._members_db, self._groups_db)
                work(Bulk(cast(Transaction, plain), *databases))
        except lmdb.Error as error:
            raise _commit_error(self._path, errno.EIO, error) from error

    def exclusive(self) -> trio.Lock:
        """Held while bulk() runs: no commit then."""
        return self._lock

    def refresh(self) -> None:
        """See what bulk() has written."""
        self._renew()
        self._names.forget()

    def overlay_names(self) -> Iterator[tuple[int, bytes, int | None]]:
        """Names changed and not committed: what a bulk load may have met unknowingly."""
        for parent, name, inode in self._names.changed():
            yield parent, name, inode or None

    def stored_inode(self, parent: int, name: bytes) -> int | None:
        """Where LMDB alone says a name leads."""
        value = self._read.get(_U64.pack(parent) + name, None, self._names_db)
        return None if value is None else cast(int, _VALUE.unpack(value)[0])

    # ---- the rest ----

    def volatile_inodes(self) -> Numbers:
        """Inodes that no commit writes: files not sealed yet, and nameless ones."""
        return [InodeNumber(inode) for inode in self._names.volatile()]

    def statistics(self) -> IndexStatistics:
        stored = self._read.stat(self._inodes_db)["entries"]
        try:
            size = (self._path / "data.mdb").stat().st_blocks * 512
        except OSError:
            size = 0
        return IndexStatistics(stored, size, self.changes_pending, self._commits, self._failures)

    def close(self) -> None:
        self._read.abort()
        self._env.close()
        self._names.close()


@dataclass(frozen=True, slots=True)
class Bulk:
    """One bulk transaction: the databases of inodes, raw."""

    txn: Transaction
    inodes_db: object
    names_db: object
    members_db: object
    groups_db: object

    def record(self, inode: int) -> bytes | None:
        return self.txn.get(_U64.pack(inode), None, self.inodes_db)

    def named(self, parent: int, name: bytes) -> int | None:
        value = self.txn.get(_U64.pack(parent) + name, None, self.names_db)
        return None if value is None else cast(int, _VALUE.unpack(value)[0])

    def remove(self, inode: Inode) -> None:
        number = int(inode.inode)
        self.txn.delete(_U64.pack(number), db=self.inodes_db)
        if self.named(inode.parent, inode.name) == number:
            self.txn.delete(_U64.pack(inode.parent) + inode.name, db=self.names_db)
        if inode.kind == Kind.FILE:
            for segment in segments_of(inode):
                self.txn.delete(_MEMBER.pack(segment, number), db=self.members_db)
        if inode.group:
            self.txn.delete(_group_key(inode.group, number), db=self.groups_db)

    def remove_name(self, parent: int, name: bytes) -> None:
        self.txn.delete(_U64.pack(parent) + name, db=self.names_db)

    def remove_member(self, segment: int, inode: int) -> None:
        self.txn.delete(_MEMBER.pack(segment, inode), db=self.members_db)

    def load(
        self, inodes: list[tuple[bytes, bytes]], names: list[tuple[bytes, bytes]], members: list[tuple[bytes, bytes]]
    ) -> None:
        """Put many. Keys as in the databases; sorted here."""
        for db, items in ((self.inodes_db, inodes), (self.names_db, names), (self.members_db, members)):
            items.sort()
            self.txn.cursor(db).putmulti(items)
        for _, record in inodes:
            if GROUP_ATTRIBUTE in record and (inode := Inode.unpack(record)).group:
                self.txn.put(_group_key(inode.group, inode.inode), b"", db=self.groups_db)


def _group_key(group: bytes, inode: int) -> bytes:
    # The length first: then the keys of one group lie side by side, whatever bytes the names of others are.
    return bytes([len(group)]) + group + _U64.pack(inode)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_size(path: Path) -> None:
    """PoolIndexError if the file is shorter than its newest meta page says: LMDB maps it, and a missing page is SIGBUS.

    Fields of MDB_page and MDB_meta in LMDB's mdb.c. A few pages may be missing where a kvfs made the file that kept no
    hole behind it (LmdbIndex._grow_file()): they are added.
    """
    try:
        with path.open("r+b") as file:
            head = file.read(2 * _LMDB_PAGE)
            size = file.seek(0, os.SEEK_END)
            newest = (-1, 0)
            for at in (0, _LMDB_PAGE):
                if len(head) >= at + 152 and struct.unpack_from("<I", head, at + 16)[0] == _LMDB_MAGIC:
                    last_page, transaction = struct.unpack_from("<QQ", head, at + 136)
                    newest = max(newest, (transaction, last_page))
            needed = (newest[1] + 1) * _LMDB_PAGE
            if size and (newest[0] < 0 or size + 4 * _LMDB_PAGE < needed):
                raise PoolIndexError(
                    f"index {path}: {told_size(size)}, at least {told_size(needed)} belong to it: cut off or damaged"
                )
            if size < needed and size:
                file.truncate(needed)
    except FileNotFoundError:
        return


def _commit_error(path: Path, number: int, cause: Exception) -> PoolIndexError:
    error = PoolIndexError(f"index {path}: commit failed: {cause}")
    error.errno = number
    return error
