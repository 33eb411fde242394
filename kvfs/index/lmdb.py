"""The index in LMDB (http://www.lmdb.tech/doc), in the pool's directory.

Reads go through the volatile layer (inodes that must not survive a restart), the pending one, and the one that is being
committed. Below lies LMDB itself, read by one long-lived transaction. A commit hands the pending layer to one thread,
which writes it in a single transaction and syncs; meanwhile a fresh layer collects. Databases and keys are described in
docs/format.md.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol, cast

import lmdb
import trio

from kvfs.errors import KvfsError
from kvfs.index.hidden import Hidden
from kvfs.index.interface import IndexStatistics, Names, Numbers, Pairs, States
from kvfs.index.overlay import Layer
from kvfs.record import (
    GROUP_ATTRIBUTE,
    Inode,
    Kind,
    segments_of,
)
from kvfs.types import InodeNumber, SegmentIndex

log = logging.getLogger(__name__)

# Address space, not memory or disk: LMDB's file grows as it is used. 256 GiB hold some 500 million inodes.
MAP_SIZE = 256 << 30
_LMDB_PAGE = 4096
_LMDB_MAGIC = 0xBEEFC0DE
_U64 = struct.Struct(">Q")
_MEMBER = struct.Struct(">IQ")
_U32 = struct.Struct(">I")
_VALUE = struct.Struct("<Q")
_LIST_BATCH = 512
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


class LmdbIndex:
    """kvfs.index.interface.Index over LMDB. One process opens a pool's index at a time (the pool's lock sees to
    that)."""

    def __init__(self, path: Path, *, read_only: bool = False, durable: bool = True) -> None:
        """Open or make the index at `path`. Raises PoolIndexError if it cannot be read.

        Not durable: for a rebuild, which starts again if the machine ends in between; see make_durable().
        """
        self._path = path
        self._read_only = read_only
        _check_size(path / "data.mdb")
        self._open(durable)
        self._volatile = Layer()
        self._pending = Layer()
        self._committing: Layer | None = None
        self._lock = trio.Lock()
        self._write_lock = threading.Lock()
        self.pending_batch, self.durable_batch = 1, 0
        self._commits = 0
        self._failures = 0
        # While a rebuild runs: the names removed since, which must not come back from an old header.
        self.removed_names: set[tuple[int, bytes]] | None = None
        self.distrusted = False
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
        return None if record is not None and self._hidden.lost and self._hidden.hides(record) else record

    def _raw(self, inode: int) -> bytes | None:
        inodes = self._volatile.inodes
        if inode in inodes:
            return inodes[inode]
        inodes = self._pending.inodes
        if inode in inodes:
            return inodes[inode]
        if self._committing is not None and inode in self._committing.inodes:
            return self._committing.inodes[inode]
        return self._read.get(_U64.pack(inode), None, self._inodes_db)

    def get(self, inode: InodeNumber) -> Inode | None:
        record = self.raw(inode)
        return None if record is None else Inode.unpack(record)

    # ---- what lies on devices that are away ----

    def hide(self, segments: Collection[int], on_drop: Callable[[Inode], None]) -> None:
        self._hidden.lost, self._on_drop = frozenset(segments), on_drop

    @property
    def is_hiding(self) -> bool:
        return bool(self._hidden.lost)

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

    def _drop_hidden_holder(self, parent: InodeNumber, name: bytes, successor: int) -> None:
        """A name that a hidden block has is given to another: the block must not come back with its device."""
        holder = self._lookup(parent, name)
        if holder is not None and holder != successor:
            self.drop_hidden(holder)

    def _drop_hidden_below(self, directory: InodeNumber) -> None:
        while names := self._list(directory, b"", _LIST_BATCH):
            if not any([self.drop_hidden(number) for _, number in names]):
                return

    # ---- names ----

    def lookup(self, parent: InodeNumber, name: bytes) -> InodeNumber | None:
        number = self._lookup(parent, name)
        return None if number is not None and self._hidden.lost and self.hidden(number) is not None else number

    def _lookup(self, parent: InodeNumber, name: bytes) -> InodeNumber | None:
        for layer in (self._volatile, self._pending, self._committing):
            if layer is not None:
                names = layer.names.get(parent)
                if names is not None and name in names:
                    found = names[name]
                    return None if found is None else InodeNumber(found)
        value = self._read.get(_U64.pack(parent) + name, None, self._names_db)
        return None if value is None else InodeNumber(_VALUE.unpack(value)[0])

    def list(self, parent: InodeNumber, after: bytes, limit: int) -> Names:
        found = self._list(parent, after, limit)
        if not self._hidden.lost:
            return found
        visible = [item for item in found if self.hidden(item[1]) is None]
        while len(found) == limit and len(visible) < limit:
            found = self._list(parent, found[-1][0], limit)
            visible += [item for item in found if self.hidden(item[1]) is None]
        return visible[:limit]

    def _list(self, parent: InodeNumber, after: bytes, limit: int) -> Names:
        layers = [layer for layer in (self._volatile, self._pending, self._committing) if layer is not None]
        changed: dict[bytes, int | None] = {}
        for layer in reversed(layers):
            names = layer.names.get(parent)
            if names:
                for name in layer.names_after(parent, after):
                    changed[name] = names[name]
        found: Names = []
        if not changed:
            for name, inode in self._stored_names(parent, after):
                found.append((name, InodeNumber(inode)))
                if len(found) == limit:
                    break
            return found
        order = sorted(changed)
        at = 0
        for name, inode in self._stored_names(parent, after):
            while at < len(order) and order[at] < name and len(found) < limit:
                value = changed[order[at]]
                if value is not None:
                    found.append((order[at], InodeNumber(value)))
                at += 1
            if len(found) >= limit:
                return found
            if name not in changed:
                found.append((name, InodeNumber(inode)))
                if len(found) == limit:
                    return found
        while at < len(order) and len(found) < limit:
            value = changed[order[at]]
            if value is not None:
                found.append((order[at], InodeNumber(value)))
            at += 1
        return found

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

    def is_empty(self, parent: InodeNumber) -> bool:
        return not self.list(parent, b"", 1)

    def segment_inodes(self, segment: SegmentIndex) -> Numbers:
        found = set(self._stored_members(segment))
        for layer in (self._committing, self._pending, self._volatile):
            members = None if layer is None else layer.members.get(segment)
            for inode, present in (members or {}).items():
                if present:
                    found.add(inode)
                else:
                    found.discard(inode)
        return [InodeNumber(inode) for inode in sorted(found)]

    def _stored_members(self, segment: int) -> Iterator[int]:
        prefix = _U32.pack(segment)
        cursor = self._read.cursor(self._members_db)
        if cursor.set_range(prefix):
            for item in cursor.iternext(values=False):
                key = cast(bytes, item)
                if key[:4] != prefix:
                    return
                yield _MEMBER.unpack(key)[1]

    @property
    def groups_used(self) -> bool:
        if any(layer is not None and layer.groups for layer in (self._volatile, self._pending, self._committing)):
            return True
        return self._groups_db is not None and self._read.stat(self._groups_db)["entries"] > 0

    def group_inodes(self, group: bytes) -> Numbers:
        found = set(self._stored_group(group))
        for layer in (self._committing, self._pending, self._volatile):
            for number, present in ({} if layer is None else layer.groups.get(group, {})).items():
                if present:
                    found.add(number)
                else:
                    found.discard(number)
        # A rebuild inserts candidates; some are removed again at its end.
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

    def put(self, new: Inode, old: Inode | None, record: bytes | None = None) -> None:
        """`record`: new.pack(), if the caller has it."""
        number = int(new.inode)
        assert old is None or old.inode == number
        if self._hidden.lost and new.name and not new.nameless:
            self._drop_hidden_holder(new.parent, new.name, number)
        if new.kind == Kind.FILE and (not new.sealed or new.nameless):
            self._put_volatile(new, old, record)
            return
        pending = self._pending
        if number in self._volatile.inodes:
            self._drop_volatile(number)
        pending.inodes[number] = record or new.pack()
        named = not new.nameless and bool(new.name)  # the root has none
        if old is not None and not old.nameless and (not named or old.parent != new.parent or old.name != new.name):
            self._remove_name(old)
        if named:
            pending.set_name(new.parent, new.name, number)
        after = segments_of(new) if new.kind == Kind.FILE else set()
        before = segments_of(old) if old is not None and old.kind == Kind.FILE else set()
        for segment in after:
            pending.set_member(segment, number, True)
        for segment in before - after:
            pending.set_member(segment, number, False)
        if old is not None and old.group and old.group != new.group:
            pending.set_group(old.group, number, False)
        if new.group:
            pending.set_group(new.group, number, True)
        pending.count += 1

    def replace_directory(self, number: InodeNumber, record: bytes) -> None:
        self._pending.inodes[number] = record
        self._pending.count += 1

    def _put_volatile(self, new: Inode, old: Inode | None, record: bytes | None) -> None:
        number = int(new.inode)
        if old is not None and number in self._volatile.inodes:
            self._drop_volatile(number)
        elif old is not None:
            self._delete_durable(old)
        volatile = self._volatile
        volatile.inodes[number] = record or new.pack()
        if not new.nameless:
            volatile.set_name(new.parent, new.name, number)
        for segment in segments_of(new):
            volatile.set_member(segment, number, True)
        if new.group:
            volatile.set_group(new.group, number, True)

    def _drop_volatile(self, number: int) -> Inode | None:
        record = self._volatile.inodes.pop(number, None)
        if record is None:
            return None
        inode = Inode.unpack(record)
        if self._volatile.names.get(inode.parent, {}).get(inode.name) == number:
            self._volatile.drop_name(inode.parent, inode.name)
        for segment in segments_of(inode):
            self._volatile.drop_member(segment, number)
        if inode.group:
            self._volatile.drop_group(inode.group, number)
        return inode

    def _remove_name(self, old: Inode) -> None:
        if not old.name:
            return
        # A name that leads elsewhere by now has been taken over by its new owner.
        if self._lookup(old.parent, old.name) == old.inode:
            self._pending.set_name(old.parent, old.name, None)
        if self.removed_names is not None:
            self.removed_names.add((int(old.parent), old.name))

    def delete(self, old: Inode) -> None:
        if self._hidden.lost and old.kind == Kind.DIRECTORY:
            self._drop_hidden_below(old.inode)
        if int(old.inode) in self._volatile.inodes:
            self._drop_volatile(int(old.inode))
            if self.removed_names is not None:
                self.removed_names.add((int(old.parent), old.name))
            return
        self._delete_durable(old)

    def _delete_durable(self, old: Inode) -> None:
        pending, number = self._pending, int(old.inode)
        pending.inodes[number] = None
        if not old.nameless:
            self._remove_name(old)
        if old.kind == Kind.FILE:
            for segment in segments_of(old):
                pending.set_member(segment, number, False)
        if old.group:
            pending.set_group(old.group, number, False)
        pending.count += 1

    def segment_put(self, segment: SegmentIndex, state: bytes) -> None:
        self._pending.segments[segment] = state
        self._pending.count += 1

    def meta_put(self, key: bytes, value: bytes | None) -> None:
        self._pending.meta[key] = value
        self._pending.count += 1

    @property
    def changes_pending(self) -> int:
        return self._pending.count + (0 if self._committing is None else self._committing.count)

    # ---- committing ----

    async def commit(self, before: Callable[[], None] | None = None) -> None:
        """Return when every change made so far is durable. KvfsError with the errno if it cannot be: the changes then
        stay pending. `before` is called in the step that the commit begins with: its changes are part of it."""
        async with self._lock:
            if before is not None:
                before()
            if not self._pending.count:
                return
            batch = self._begin_commit()
            error: BaseException | None = None
            try:
                # Not abandoned on cancellation: the batch would be in two hands.
                await trio.to_thread.run_sync(self._write, batch)
            except BaseException as caught:
                error = caught
                raise
            finally:
                self._end_commit(batch, error)

    def commit_now(self, before: Callable[[], None] | None = None) -> None:
        """As commit(), blocking; for tools and for the time before the mount answers."""
        assert self._committing is None
        if before is not None:
            before()
        if not self._pending.count:
            return
        batch = self._begin_commit()
        error: BaseException | None = None
        try:
            self._write(batch)
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._end_commit(batch, error)

    def _begin_commit(self) -> Layer:
        batch, self._pending = self._pending, Layer()
        self._committing = batch
        self.pending_batch += 1
        return batch

    def _end_commit(self, batch: Layer, error: BaseException | None) -> None:
        if error is not None:
            batch.update(self._pending)
            self._pending = batch
            self._failures += 1
        else:
            self.durable_batch = self.pending_batch - 1
            self._commits += 1
            self._trust()
        self._committing = None
        self._renew()

    def _renew(self) -> None:
        self._read.abort()
        self._read = cast(Transaction, self._env.begin())

    def _write(self, batch: Layer) -> None:
        """Write one layer in one durable transaction. Blocks; in the committing thread."""
        try:
            with self._write_lock, self._env.begin(write=True) as plain:
                self._write_layer(cast(Transaction, plain), batch)
        except lmdb.MapFullError as error:
            raise _commit_error(self._path, errno.ENOSPC, error) from error
        except (lmdb.Error, OSError) as error:
            number = errno.ENOSPC if "No space" in str(error) else errno.EIO
            raise _commit_error(self._path, number, error) from error

    def _write_layer(self, txn: Transaction, batch: Layer) -> None:
        # Sorted: neighbours share pages. In one call a database: each call may wait for the interpreter lock.
        puts = [(_U64.pack(inode), record) for inode, record in sorted(batch.inodes.items()) if record is not None]
        txn.cursor(self._inodes_db).putmulti(puts)
        for inode, record in batch.inodes.items():
            if record is None:
                txn.delete(_U64.pack(inode), db=self._inodes_db)
        names: list[tuple[bytes, bytes]] = []
        for parent, entries in batch.names.items():
            prefix = _U64.pack(parent)
            for name, number in entries.items():
                if number is None:
                    txn.delete(prefix + name, db=self._names_db)
                else:
                    names.append((prefix + name, _VALUE.pack(number)))
        names.sort()
        txn.cursor(self._names_db).putmulti(names)
        members: list[tuple[bytes, bytes]] = []
        for segment, inodes in batch.members.items():
            for inode, present in inodes.items():
                if present:
                    members.append((_MEMBER.pack(segment, inode), b""))
                else:
                    txn.delete(_MEMBER.pack(segment, inode), db=self._members_db)
        members.sort()
        txn.cursor(self._members_db).putmulti(members)
        if self._groups_db is not None:
            for group, inodes in batch.groups.items():
                for number, present in inodes.items():
                    if present:
                        txn.put(_group_key(group, number), b"", db=self._groups_db)
                    else:
                        txn.delete(_group_key(group, number), db=self._groups_db)
        txn.cursor(self._segments_db).putmulti(
            [(_U32.pack(segment), state) for segment, state in batch.segments.items()]
        )
        for key, value in batch.meta.items():
            if value is None:
                txn.delete(key, db=self._meta_db)
            else:
                txn.put(key, value, db=self._meta_db)

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

    def overlay_names(self) -> Iterator[tuple[int, bytes, int | None]]:
        """Names changed and not committed: what a bulk load may have met unknowingly."""
        for layer in (self._pending, self._volatile):
            for parent, names in layer.names.items():
                for name, inode in names.items():
                    yield parent, name, inode

    def stored_inode(self, parent: int, name: bytes) -> int | None:
        """Where LMDB alone says a name leads."""
        value = self._read.get(_U64.pack(parent) + name, None, self._names_db)
        return None if value is None else cast(int, _VALUE.unpack(value)[0])

    # ---- the rest ----

    def volatile_inodes(self) -> Numbers:
        """Inodes that no commit writes: files not sealed yet, and nameless ones."""
        return [InodeNumber(inode) for inode in self._volatile.inodes]

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

    Fields of MDB_page and MDB_meta in LMDB's mdb.c. A few pages at the end may never have been written: they are added.
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
                raise PoolIndexError(f"index {path}: {size} bytes, at least {needed} belong to it: cut off or damaged")
            if size < needed and size:
                file.truncate(needed)
    except FileNotFoundError:
        return


def _commit_error(path: Path, number: int, cause: Exception) -> PoolIndexError:
    error = PoolIndexError(f"index {path}: commit failed: {cause}")
    error.errno = number
    return error
