"""A handle to the names in memory (native/include/kvfs_names.h): typed calls.

Here is each inode whose record the index does not have yet. An inode that is not here is as the index says.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from enum import IntEnum, IntFlag
from itertools import compress
from types import TracebackType
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, cast

from kvfs import journal
from kvfs._native import ffi, lib
from kvfs.errors import FormatError, KvfsError
from kvfs.lent import lent
from kvfs.types import InodeNumber

_CAPACITY = 64 << 10
_LIST_MAX = 4096
_NOTED_MAX = 256
_NOWHERE = 0xFFFFFFFF
_MEMBER_SIZE = 12
LOOK = struct.Struct("<QIIIB??x")
assert LOOK.size == ffi.sizeof("struct kvfs_look")

# The request whose changes a task makes: connection, number.
_REQUEST: ContextVar[tuple[int, int] | None] = ContextVar("kvfs_request", default=None)

assert lib.KVFS_INDEX_LISTS == 8  # struct kvfs_index_changes has as many

P = ParamSpec("P")
R = TypeVar("R")


class Leave(IntFlag):
    """enum kvfs_names_leave: why the data plane leaves changes to Python."""

    CLOSED = 1
    HIDING = 2
    PINS = 4
    BEHIND = 8
    FULL = 16


class Note(IntEnum):
    """enum kvfs_note: news of a segment. No IntFlag, whose operators are slow: these are taken with every request."""

    CHANGED = 1
    ENTERED = 2
    DIRTY = 4
    GONE = 8
    SETTLED = 16
    FAILED = 32
    RENAMED = 64
    LED = 128
    LEFT = 256
    RESTS = 512


class Place(Protocol):
    """struct kvfs_place: changes only within a step, but for `awaited`."""

    next_page: int
    live_pages: int
    run_count: int
    first_page: int
    lent: int
    awaited: int


class Look(NamedTuple):
    """struct kvfs_look: a block, as eviction looks at it."""

    inode: InodeNumber
    pages: int  # in the segment; 0: nothing of it is there
    pages_all: int  # in all segments
    use: int  # the tick of its last use << 8 | hits
    open: int  # plane.OpenState
    absent: bool  # its record must be in memory before anything is known
    orphan: bool  # the block before it in its chain is gone


class Evicted(NamedTuple):
    """How many blocks left, with how many pages; and for each inode 1 if it was one of them."""

    blocks: int
    pages: int
    gone: bytes


class Removed(NamedTuple):
    """Files that lost their names: how many, how many of them are open, bytes of the sealed ones. And the inodes that
    are the caller's to remove."""

    files: int
    open: int
    bytes: int
    left: list[InodeNumber]


class FailedRun(NamedTuple):
    """A run that was not written."""

    generation: int
    page: int
    page_count: int


class Records(NamedTuple):
    """Records of inodes, concatenated: how many, the directories that they are in, the inodes that are not in
    memory."""

    data: bytes
    record_count: int
    parents: list[int]
    absent: list[int]


def new_place() -> Place:
    """The place of a segment that no data plane appends to."""
    place = ffi.new("struct kvfs_place *")
    place.next_page = 1
    return cast(Place, place)


class NamesError(KvfsError):
    """There is no memory for a name."""


class MissingError(KvfsError):
    """The inode is not in memory: load it first."""


class Begun(NamedTuple):
    """Changes that a commit writes: memory of the names until the commit ends."""

    data: object
    size: int


class Names:
    """The names of one pool. `with names:` is a step: meanwhile no thread of the data plane changes a name."""

    def __init__(self, names: object | None = None, plane: object | None = None) -> None:
        """`names`: of a data plane, `plane`, which ends them; None makes own ones."""
        self._own, self._plane = names is None, plane
        self._attached, self._depth = False, 0
        if names is None:
            out = ffi.new("struct kvfs_names **")
            if lib.kvfs_names_create(out) < 0:
                raise NamesError("no memory for names")
            names = out[0]
        self._names = names
        self._record = ffi.new("uint8_t[]", _CAPACITY)
        self._number, self._second = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        self._noted = ffi.new("struct kvfs_noted[]", _NOTED_MAX)

    def close(self) -> None:
        if self._own:
            lib.kvfs_names_destroy(self._names)
            self._own = False

    def __enter__(self) -> None:
        lib.kvfs_names_begin(self._names)
        self._depth += 1
        if self._attached and self._depth == 1:
            self.change_for(_REQUEST.get())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._attached and not self._depth and error is not None:
            self.change_for(None)  # the request is not done by that
        lib.kvfs_names_end(self._names)
        if self._attached and not self._depth:
            self.change_for(None)

    @property
    def is_step(self) -> bool:
        """A step of Python's is under way."""
        return self._depth > 0

    # ---- numbers ----

    def number(self, number: int, *, in_pod: bool = False) -> None:
        """Inode numbers and versions begin behind this. `in_pod`: they have its slot."""
        lib.kvfs_names_number(self._names, number, int(in_pod))

    def seen(self, version: int) -> None:
        """Another node has given this version: this node's are above it from now on."""
        lib.kvfs_names_seen(self._names, version)

    def next_inode(self) -> int:
        return cast(int, lib.kvfs_names_next_inode(self._names))

    def next_version(self) -> int:
        return cast(int, lib.kvfs_names_next_version(self._names))

    @property
    def last_version(self) -> int:
        return cast(int, lib.kvfs_names_last_version(self._names))

    def in_flight(self) -> list[int]:
        """Versions of blocks that the data plane is sealing."""
        return self._numbers(lambda out, capacity: lib.kvfs_names_in_flight(self._names, out, capacity))

    def leave(self, reason: Leave, on: bool) -> None:
        """From now on the data plane leaves changes to Python, or no longer for this reason."""
        lib.kvfs_names_leave(self._names, reason, int(on))

    def untold(self, parent: int, name: bytes) -> None:
        """Hosts may believe that this name leads to a block that was evicted."""
        lib.kvfs_names_untold(self._names, parent, name, len(name))

    def told(self) -> None:
        """Hosts believe so of no name."""
        lib.kvfs_names_untold(self._names, 0, b"", 0)

    # ---- places ----

    def places(self, count: int, end_page: int, tick_pages: int) -> list[Place]:
        """The places of all segments. Call once."""
        made = lib.kvfs_places_make(self._names, count, end_page, tick_pages)
        if made == ffi.NULL:
            raise NamesError(f"no memory for the places of {count} segments")
        return [cast(Place, made + i) for i in range(count)]

    def take(self, segment: int, pages: int) -> int:
        """Append a run to a segment that has room; returns its first page."""
        page = lib.kvfs_place_take(self._names, segment, pages)
        if not page:
            raise NamesError(f"segment {segment}: no memory for a run of {pages} pages")
        return cast(int, page)

    def release(self, segment: int, page: int) -> None:
        lib.kvfs_place_release(self._names, segment, page)

    def failed(self, segment: int, generation: int) -> Iterator[FailedRun]:
        """Runs of the data plane that were not written: from now on they are the caller's to release."""
        out = ffi.new("struct kvfs_failed_run *")
        while lib.kvfs_place_failed(self._names, segment, out):
            yield FailedRun(generation, out.page, out.page_count)

    def head(self, segment: int | None, generation: int = 0) -> None:
        """The data plane appends new blocks to this segment, or to none."""
        lib.kvfs_place_head(self._names, _NOWHERE if segment is None else segment, generation)

    def lead(self) -> int | None:
        """The segment that the data plane appends to; None if there is none."""
        segment = lib.kvfs_place_lead(self._names)
        return None if segment == _NOWHERE else cast(int, segment)

    def supply(self, segment: int, generation: int) -> None:
        """An open segment for the data plane to append to, after the others."""
        if lib.kvfs_place_supply(self._names, segment, generation) < 0:
            raise NamesError(f"segment {segment}: the supply is full")

    def withdraw(self, segment: int) -> bool:
        """Take a segment out of the supply. False: it is not there."""
        return bool(lib.kvfs_place_withdraw(self._names, segment))

    @property
    def pages_written(self) -> int:
        return cast(int, lib.kvfs_places_written(self._names))

    def noted(self) -> list[tuple[int, int]]:
        """Segments with news, and what (Note). They are no longer news."""
        found: list[tuple[int, int]] = []
        while count := lib.kvfs_places_noted(self._names, self._noted, _NOTED_MAX):
            found += [(self._noted[i].segment, self._noted[i].notes) for i in range(count)]
        return found

    # ---- reading ----

    def get(self, inode: int) -> bytes | None:
        """The inode's record, b"" if it is gone, None if it is as the index says."""
        out, capacity = self._record, _CAPACITY
        while (size := lib.kvfs_names_get(self._names, inode, out, capacity)) > capacity:
            capacity = size
            out = ffi.new("uint8_t[]", capacity)
        return None if size < 0 else cast(bytes, ffi.buffer(out, size)[:])

    def find(self, parent: int, name: bytes) -> int | None:
        """The inode that the name leads to; 0 for a name that is gone, None for one that is as the index says."""
        if not lib.kvfs_names_find(self._names, parent, name, len(name), self._number):
            return None
        return cast(int, self._number[0])

    def listing(self, parent: int, after: bytes, limit: int) -> list[tuple[bytes, int]]:
        """Changed names of a directory greater than `after`, in byte order, with their inodes; 0 for a name that is
        gone."""
        out = ffi.new("struct kvfs_name[]", limit)
        count = lib.kvfs_names_list(self._names, parent, after, len(after), out, limit)
        if count < 0:
            raise NamesError(f"names of directory {parent}: {os.strerror(-count)}")
        return [(ffi.unpack(out[i].name, out[i].size), out[i].inode) for i in range(count)]

    def changed(self) -> Iterator[tuple[int, bytes, int]]:
        """Every changed name: parent, name, inode (0: gone)."""
        for parent in self._numbers(lambda out, capacity: lib.kvfs_names_parents(self._names, out, capacity)):
            after = b""
            while found := self.listing(parent, after, _LIST_MAX):
                yield from ((parent, name, inode) for name, inode in found)
                after = found[-1][0]

    def members(self, segment: int, keys: bytes) -> list[int]:
        """The inodes of a segment, ascending. keys: the segment's in the index's table segment_inodes."""
        count = len(keys) // _MEMBER_SIZE
        return self._numbers(
            lambda out, capacity: lib.kvfs_names_members(self._names, segment, keys, count, out, capacity), count + 64
        )

    def absent(self, inodes: Sequence[int]) -> list[int]:
        """The ones that are not in memory."""
        out = ffi.new("uint64_t[]", len(inodes))
        count = lib.kvfs_names_absent(self._names, ffi.new("uint64_t[]", inodes), len(inodes), out)
        return cast(list[int], ffi.unpack(out, count)) if count else []

    def records(self, inodes: Sequence[int], segment: int | None) -> Records:
        """The records of these inodes: of the sealed blocks with a name and their header in this segment, or of all."""
        asked, count, found = ffi.new("uint64_t[]", inodes), len(inodes), ffi.new("struct kvfs_records *")
        absent, parents = ffi.new("uint64_t[]", count), ffi.new("uint64_t[]", count)
        out, capacity = self._record, _CAPACITY
        where = _NOWHERE if segment is None else segment
        while True:
            lib.kvfs_names_records(self._names, where, asked, count, out, capacity, absent, parents, found)
            if found.size <= capacity:
                break
            capacity = found.size
            out = ffi.new("uint8_t[]", capacity)
        return Records(
            cast(bytes, ffi.buffer(out, found.size)[:]), found.count,
            ffi.unpack(parents, found.parent_count) if found.parent_count else [],
            ffi.unpack(absent, found.absent_count) if found.absent_count else [],
        )  # fmt: skip

    @property
    def grouped(self) -> int:
        """How many inodes in memory have an attribute that names a group."""
        return cast(int, lib.kvfs_names_grouped(self._names))

    def group(self, group: bytes) -> list[int]:
        """Changed inodes whose attribute names this group."""
        return self._numbers(lambda out, capacity: lib.kvfs_names_group(self._names, group, len(group), out, capacity))

    def volatile(self) -> list[int]:
        """Inodes that no commit writes."""
        return self._numbers(lambda out, capacity: lib.kvfs_names_volatile(self._names, out, capacity))

    @staticmethod
    def _numbers(ask: Callable[[object, int], int], capacity: int = 256) -> list[int]:
        while True:
            out = ffi.new("uint64_t[]", capacity)
            count = ask(out, capacity)
            if count <= capacity:
                return cast(list[int], ffi.unpack(out, count)) if count else []
            capacity = 2 * count

    # ---- changing ----

    def load(self, records: bytes) -> None:
        """Take in concatenated records as the index has them."""
        if lib.kvfs_names_load(self._names, records, len(records)) < 0:
            raise NamesError("no memory for a record")

    def put(self, record: bytes, known: bool) -> None:
        """Insert or change. `known`: the index may have an earlier record; MissingError: that is to be loaded first."""
        self._check(lib.kvfs_names_put(self._names, record, known))

    def remove(self, inode: int) -> None:
        """MissingError: its record is to be loaded first."""
        self._check(lib.kvfs_names_remove(self._names, inode))

    def remove_files(self, directory: int, inodes: Sequence[InodeNumber]) -> Removed:
        """Files of a directory lose their names and go, as by unlink(2), and block table and places follow. Left are
        directories, pinned files, and files that are not in memory."""
        left, out = ffi.new("uint8_t[]", len(inodes)), ffi.new("struct kvfs_removed *")
        lib.kvfs_files_remove(self._plane, directory, ffi.new("uint64_t[]", inodes), len(inodes), left, out)
        return Removed(out.files, out.open, out.bytes, list(compress(inodes, ffi.buffer(left)[:])))

    @staticmethod
    def _check(result: int) -> None:
        if result == -errno.ENOENT:
            raise MissingError("not in memory")
        if result < 0:
            raise NamesError("no memory for a record")

    def limit(self, files: int, directories: int) -> None:
        """The most records to keep that equal the index's. For tests."""
        lib.kvfs_names_limit(self._names, files, directories)

    def forget(self) -> None:
        """Forget all that is as the index has it."""
        lib.kvfs_names_forget(self._names)

    # ---- committing ----

    def commit_begin(self) -> Begun:
        """The changes since the last commit, for index_known() and index_changes()."""
        size = ffi.new("uint64_t *")
        begun = lib.kvfs_names_commit_begin(self._names, size)
        if begun == ffi.NULL:
            raise NamesError("no memory for a commit")
        return Begun(begun, size[0])

    @staticmethod
    def index_known(begun: Begun, count: int) -> list[bytes]:
        """Keys of the inodes that the index may have already, ascending. `count`: of the changes. Before commit_end(),
        in any thread, as index_changes()."""
        keys = ffi.new("uint8_t[]", 8 * count)
        known = lib.kvfs_index_known(begun.data, begun.size, keys)
        packed = bytes(ffi.buffer(keys, 8 * known))
        return [packed[at : at + 8] for at in range(0, len(packed), 8)]

    @staticmethod
    def index_changes(begun: Begun, records: Sequence[bytes]) -> list[list[tuple[bytes, bytes]]]:
        """Keys and values that the index's databases lose and get, each list ascending, in the order of enum
        kvfs_index_list. `records`: what the index has of index_known()'s, in that order. FormatError."""
        error, damaged = ffi.new("int *"), ffi.new("uint64_t *")
        stored = b"".join(records)
        made = lib.kvfs_index_changes(begun.data, begun.size, lent(stored), len(stored), error, damaged)
        if made == ffi.NULL:
            if error[0] == -errno.EBADMSG:
                raise FormatError(f"index: what it has of inode {damaged[0]} is no record")
            raise NamesError("no memory for a commit")
        try:
            packed = bytes(ffi.buffer(made.bytes, made.size))
            return [_pairs(packed, ffi.unpack(one.bounds, 2 * one.count + 1)) for one in made.lists]
        finally:
            lib.kvfs_index_changes_free(made)

    def commit_end(self, ok: bool) -> None:
        """In the step in which the index begins to show what was committed."""
        lib.kvfs_names_commit_end(self._names, int(ok))

    @property
    def pending(self) -> int:
        """Changes that no commit has begun to write."""
        return cast(int, lib.kvfs_names_pending(self._names))

    # ---- the journal ----

    def attach(self, fd: int) -> None:
        """From now on changes are written to this journal too. Its content counts as durable. Call once.
        journal.JournalError."""
        if (result := lib.kvfs_names_journal(self._names, fd)) < 0:
            raise journal.failure(-result, fd)
        self._attached = True

    @property
    def request(self) -> tuple[int, int] | None:
        """The request that this task serves, if the journal is to say so."""
        return _REQUEST.get() if self._attached else None

    def change_for(self, request: tuple[int, int] | None) -> None:
        """Until the end of the present step changes are this request's."""
        lib.kvfs_names_request(*(request or (0, 0)))

    @contextlib.contextmanager
    def serving_nobody(self) -> Iterator[None]:
        """What this task changes meanwhile is not what its request asked for: one that is sent again is done again."""
        reset = _REQUEST.set(None)
        try:
            yield
        finally:
            _REQUEST.reset(reset)

    @contextlib.contextmanager
    def serving(self, token: int) -> Iterator[None]:
        """Changes that this task makes belong to a request of a kernel, if that is one to be done once
        (native/src/fuse/once.c). `token`: the `pid` that the session has of it, or the low half of a call's id."""
        if not (self._attached and lib.kvfs_request_of(self._plane, token, self._number, self._second)):
            yield
            return
        reset = _REQUEST.set((self._number[0], self._second[0]))
        try:
            yield
        finally:
            _REQUEST.reset(reset)

    def journal_settled(self) -> None:
        """The kernel sends no request of the former daemon again."""
        lib.kvfs_names_journal_settled(self._names)

    def journal_idle(self) -> None:
        """Nothing is pending, and no commit is under way: what is in the journal may go."""
        lib.kvfs_names_journal_idle(self._names)

    def journal_mark(self) -> tuple[int, int] | None:
        """Of the commit that begins in this step: the journal's id, and the last change that the commit has; None
        without a journal."""
        if not lib.kvfs_names_journal_mark(self._names, self._number, self._second):
            return None
        return self._number[0], self._second[0]

    def journal_is_full(self) -> bool:
        """Changes that can wait are to wait for a commit."""
        return bool(lib.kvfs_names_journal_is_full(self._names))

    def journal_fill(self) -> journal.Fill | None:
        """How full the journal is; None without one."""
        out = ffi.new("struct kvfs_journal_fill *")
        if not lib.kvfs_names_journal_fill(self._names, out):
            return None
        return journal.Fill(out.size, out.used, out.lost, out.unanswered)


def _pairs(packed: bytes, bounds: Sequence[int]) -> list[tuple[bytes, bytes]]:
    """Keys and values that lie one behind another."""
    starts, middles, ends = bounds[0:-1:2], bounds[1::2], bounds[2::2]
    return [(packed[a:b], packed[b:c]) for a, b, c in zip(starts, middles, ends, strict=True)]


class _Stepping(Protocol):
    @property
    def names(self) -> Names: ...


S = TypeVar("S", bound=_Stepping)


def step(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """The method is a step: meanwhile no thread of the data plane changes a name, a record or the block table."""

    @functools.wraps(method)
    def stepping(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.names:
            return method(self, *args, **kwargs)

    return cast(Callable[Concatenate[S, P], R], stepping)
