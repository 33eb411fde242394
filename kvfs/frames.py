"""A handle to the requests of native clients (native/include/kvfs_frames.h): one call for many blocks.

Reservations, their commits, and removals are the data plane's. A frame's items stay as the client sent them: C reads
and checks them. Python handles the items that C leaves, and waits.
"""

from __future__ import annotations

from enum import IntEnum
from errno import ENOMEM
from types import TracebackType
from typing import Any, NamedTuple, Protocol, cast

from kvfs._native import ffi, lib
from kvfs.errors import KvfsError
from kvfs.lent import Part, lent

SHARDS = 256
_UINT32 = ffi.typeof("uint32_t *")


class Next(IntEnum):
    """enum kvfs_frame_next: what a frame needs to go on."""

    DONE = 0
    MORE = 1
    ROOM = 2
    PLACE = 3
    NAMES = 4


class FrameError(KvfsError):
    """There is no memory for a frame, or its items break the rules of the protocol."""


class HolderPages(Protocol):
    """struct kvfs_holder: what one client holds."""

    open_pages: int
    pages: int
    late_pages: int
    rested_pages: int
    open: int
    count: int


class Shard(Protocol):
    """struct kvfs_shard: a directory that items of a frame are in."""

    directory: int
    gid: int
    error: int


class LeasedBlocks(Protocol):
    """struct kvfs_lease: what one lease keeps."""

    pages: int
    count: int


class Room(NamedTuple):
    """struct kvfs_lease_room: what may be leased."""

    pages: int
    all_pages: int
    blocks: int


class Totals(NamedTuple):
    """struct kvfs_reservation_statistics."""

    open: int
    pages: int
    resting: int
    committed: int
    superseded: int
    reclaimed: int
    gains: int


RunFields = tuple[int, int, int, int]  # generation, segment, page, page count


class Shards:
    """The directories of a frame's items, by number: the one that a key begins with, or that in the frame's table."""

    def __init__(self, known: Shards | None = None) -> None:
        self.items = ffi.new("struct kvfs_shard[]", SHARDS)
        if known is not None:
            ffi.memmove(self.items, known.items, ffi.sizeof(self.items))

    def __getitem__(self, number: int) -> Shard:
        return cast(Shard, self.items[number])


class Frames:
    """The reservations of one data plane. All calls from the thread that runs the store."""

    def __init__(self, plane: object) -> None:
        self._plane = plane
        self._missing = ffi.new("uint8_t[]", SHARDS)
        self._none = Shards()
        self._totals = ffi.new("struct kvfs_reservation_statistics *")
        self._runs = ffi.new("const struct kvfs_run **")
        self._run_count, self._next = ffi.new("uint32_t *"), ffi.new("uint64_t *")
        self._leased = ffi.new("struct kvfs_leased *")

    def check(
        self,
        kind: int,
        items: Part,
        count: int,
        *,
        flags: int = 0,
        directories: int = 0,
        known: Shards | None = None,
    ) -> list[int]:
        """The numbers of the items' directories that are not known. directories: how many the frame's table has.
        FrameError: the items are not what the protocol has."""
        shards = (known or self._none).items
        found = lib.kvfs_frame_check(kind, flags, items.data, items.size, count, directories, shards, self._missing)
        if found < 0:
            raise FrameError(f"{count} items in {items.size} bytes break a rule of frames of type {kind}")
        return list(self._missing[0:found])

    def limit(self, share_pages: int, open_max: int) -> None:
        """The most that all clients together may have reserved."""
        lib.kvfs_reservations_limit(self._plane, share_pages, open_max)

    def rested(self, user: int, pages: int) -> None:
        """Late writes cannot land any more in these pages that rested for a user."""
        lib.kvfs_reservations_rested(self._plane, user, pages)

    def directories_changed(self, *, moved: bool) -> None:
        """Directories have moved, or else one was removed or replaced. Within the step of the
        change."""
        lib.kvfs_directories_changed(self._plane, moved)

    def changed(self, count: int) -> list[HolderPages]:
        """At most so many clients for which the data plane has reserved or ended something since the last call."""
        out = ffi.new("struct kvfs_holder *[]", count + 1)
        return cast(list[HolderPages], list(out[0 : lib.kvfs_holders_changed(self._plane, out, count)]))

    def join(self, user: int) -> HolderPages:
        holder = lib.kvfs_holder_create(self._plane, user)
        if holder == ffi.NULL:
            raise _no_memory("a client")
        return cast(HolderPages, holder)

    def leave(self, holder: HolderPages) -> None:
        """The client is gone: what it has not committed is taken back."""
        lib.kvfs_holder_leave(self._plane, holder)

    def late_since(self, holder: HolderPages) -> int | None:
        """When the oldest of its reservations expired where it may write all the same, as given to finish()."""
        since = cast(int, lib.kvfs_holder_late(self._plane, holder))
        return None if since == (1 << 64) - 1 else since

    def free(self, holder: HolderPages) -> None:
        """Nothing is left of its reservations."""
        lib.kvfs_holder_free(self._plane, holder)

    def gains(self) -> int:
        """How often there was more room than before for others' reservations."""
        lib.kvfs_reservation_statistics_get(self._plane, self._totals)
        return cast(int, self._totals.gains)

    def totals(self) -> Totals:
        lib.kvfs_reservation_statistics_get(self._plane, self._totals)
        return Totals(*(int(getattr(self._totals, name)) for name in Totals._fields))

    def reserve(self, holder: HolderPages, items: Part, count: int, shards: Shards, uid: int, flags: int) -> Reserve:
        """Items that were checked with these flags."""
        told = lib.kvfs_reserve_begin(holder, flags, items.data, count, shards.items, uid)
        if told == ffi.NULL:
            raise _no_memory("a RESERVE")
        return Reserve(self._plane, told, items)

    def commit(self, holder: HolderPages, items: Part, count: int) -> Commit:
        """Items that were checked."""
        told = lib.kvfs_commit_begin(holder, items.data, count)
        if told == ffi.NULL:
            raise _no_memory("a COMMIT")
        return Commit(told, self._plane, items, count)

    def delete(self, items: Part, count: int, shards: Shards, flags: int) -> Delete:
        """Items that were checked with these flags."""
        return Delete(self._plane, items, count, shards, flags)

    # ---- leases ----

    def lease(self) -> LeasedBlocks:
        """A lease that keeps nothing yet."""
        lease = lib.kvfs_lease_create()
        if lease == ffi.NULL:
            raise _no_memory("a lease")
        return cast(LeasedBlocks, lease)

    def lease_add(self, lease: LeasedBlocks, inodes: Part, room: Room) -> bytes:
        """Let it keep these inodes (uint64_t), as far as there is room. Returns a byte for each: 1: it is kept."""
        count = inodes.size // 8
        held = bytearray(count)
        asked, out = ffi.cast("const uint64_t *", inodes.data), lent(held, "uint8_t[]")
        told = ffi.new("struct kvfs_lease_room *", (*room, 0))
        if lib.kvfs_lease_add(self._plane, lease, asked, count, told, out) < 0:
            raise _no_memory("a lease")
        return bytes(held)

    def lease_end(self, lease: LeasedBlocks) -> None:
        lib.kvfs_lease_end(self._plane, lease)

    def leased(self) -> tuple[int, int]:
        """Blocks and pages of all leases together; what was leased twice counts once."""
        lib.kvfs_leased_get(self._plane, self._leased)
        return self._leased.blocks, self._leased.pages

    # ---- taking back ----

    def expire(self, now: int) -> tuple[int, int | None]:
        """How many were taken back because they have expired, some at a time, and when the next one does or did, as
        given to finish()."""
        count = cast(int, lib.kvfs_reservations_expire(self._plane, now, self._next))
        return count, None if self._next[0] == (1 << 64) - 1 else cast(int, self._next[0])

    def returned(self) -> tuple[int, list[RunFields]] | None:
        """One that was taken back: number and runs. The caller makes scans step over the runs, then calls buried()."""
        number = lib.kvfs_reservation_returned(self._plane, self._runs, self._run_count)
        return (number, _runs(self._runs[0], self._run_count[0])) if number else None

    def buried(self, number: int) -> None:
        lib.kvfs_reservation_buried(self._plane, number)


class Reserve:
    """RESERVE, on its way. `told` is struct kvfs_reserve."""

    def __init__(self, plane: object, told: Any, items: Part | None = None) -> None:
        """items: alive as long as the frame. None: the frame is the data plane's to end."""
        self._plane, self._items, self.told = plane, items, told

    def __enter__(self) -> Reserve:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._items is not None:
            lib.kvfs_reserve_end(self._plane, self.told)

    def go(self) -> Next | None:
        """Handle a part of the items. Returns None if no item finds a place."""
        found = lib.kvfs_reserve(self._plane, self.told)
        return None if found < 0 else Next(found)

    def place(self, runs: list[RunFields]) -> None:
        array = ffi.new("struct kvfs_run[]", [(*run, 0) for run in runs])
        lib.kvfs_reserve_place(self._plane, self.told, array, len(runs), 0)

    def no_place(self, error: int) -> None:
        lib.kvfs_reserve_place(self._plane, self.told, ffi.NULL, 0, error)

    def finish(self, until: int) -> None:
        """All items have an answer. `until`: when these reservations expire."""
        lib.kvfs_reserve_finish(self._plane, self.told, until)

    def answer(self) -> bytes:
        return cast(bytes, ffi.buffer(self.told.answer, self.told.answer_size)[:])


class Commit:
    """COMMIT, on its way. `told` is struct kvfs_commit."""

    def __init__(self, told: Any, plane: object, items: Part | None = None, count: int = 0) -> None:
        """items: alive as long as the frame. None: the frame is the data plane's to end, and its answers are."""
        self._plane, self._items, self._count, self.told = plane, items, count, told

    def __enter__(self) -> Commit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._items is not None:
            lib.kvfs_commit_end(self.told)

    def go(self) -> Next:
        return Next(lib.kvfs_commit(self._plane, self.told))

    def block(self) -> bytes:
        """The record of the item that NAMES was said for."""
        return cast(bytes, ffi.buffer(self.told.block, ffi.cast(_UINT32, self.told.block)[0])[:])

    def item(self, error: int = 0) -> bool:
        """Enter that item, or with an error take it back. Whether it has entered."""
        return bool(lib.kvfs_commit_item(self._plane, self.told, error))

    def lingering(self) -> list[int]:
        """Inodes that have lost their names to others in the last call, and stay."""
        return cast(list[int], ffi.unpack(self.told.lingering, self.told.lingering_count))

    def runs(self) -> list[RunFields]:
        """The last run of the blocks that entered, in each segment."""
        return _runs(self.told.runs, self.told.run_count)

    def answers(self) -> bytes:
        return cast(bytes, ffi.buffer(self.told.answers, 8 * self._count)[:]) if self._count else b""


class Delete:
    """DELETE, on its way. `told` is struct kvfs_removal."""

    def __init__(self, plane: object, items: Part, count: int, shards: Shards, flags: int) -> None:
        self._plane, self._items, self._count, self._shards = plane, items, count, shards
        self._flags = flags
        self.told = ffi.new("struct kvfs_removal *")
        self._deleted = ffi.new("uint8_t[]", count + 1)

    def go(self) -> Next:
        return Next(
            lib.kvfs_remove_names(
                self._plane, self.told, self._flags, self._items.data, self._count, self._shards.items, self._deleted
            )
        )

    def name(self) -> tuple[int, bytes]:
        """The directory, an inode number, and the name of the item that NAMES was said for."""
        directory = self._shards[self.told.shard].directory
        return directory, cast(bytes, ffi.unpack(self.told.name, self.told.name_size))

    def item(self, deleted: bool) -> None:
        """The caller has done that item."""
        self._deleted[self.told.done] = deleted
        self.told.done += 1

    def any_since(self, first: int) -> bool:
        """Whether any item from this one on was deleted."""
        return any(ffi.buffer(self._deleted)[first : self.told.done])

    def answer(self) -> bytes:
        """A byte for each item: 1 if there was one."""
        return cast(bytes, ffi.buffer(self._deleted, self._count)[:]) if self._count else b""


def _runs(runs: object, count: int) -> list[RunFields]:
    return [(run.generation, run.segment, run.page, run.page_count) for run in ffi.unpack(runs, count)] if count else []


def _no_memory(what: str) -> FrameError:
    error = FrameError(f"no memory for {what}")
    error.errno = ENOMEM
    return error
