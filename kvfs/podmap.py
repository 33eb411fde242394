"""A handle to the pod map and the news (native/include/kvfs_pod.h): typed calls.

The pod map has the names of other nodes' blocks, the news are what this node tells them. A batch is bytes that C packs
and checks; only its head is read here.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from kvfs._native import ffi, lib
from kvfs.errors import KvfsError
from kvfs.lent import Part
from kvfs.types import NAME_MAX, InodeNumber

BATCH_SIZE_MAX: int = lib.KVFS_POD_BATCH_SIZE_MAX
BATCH_RECORDS_MAX: int = lib.KVFS_POD_BATCH_RECORDS_MAX
DIRECTORY_HERE: int = lib.KVFS_POD_DIRECTORY_HERE
# struct wire_foreign_block: the key of its name, segment, page.
_BLOCK = struct.Struct("<16sII")
FOREIGN_BLOCK_SIZE = _BLOCK.size
_TOMBSTONES = 1024
# The high bits of a node id that is made of another node's place.
_FOREIGN = 0b011
_BITS = 61


def is_foreign(number: int) -> bool:
    """Whether this is the node id of another node's block, which no inode of this node has."""
    return number >> _BITS == _FOREIGN


class PodMapError(KvfsError):
    """The pod map cannot be made, or a batch is refused."""


@dataclass(frozen=True, slots=True)
class PodOptions:
    """This node's part in a pod, and the bounds of its memory."""

    slot: int
    nodes: int
    lot: int
    entries_max: int
    news_bytes: int
    start: int  # random, of this mount


class Foreign(NamedTuple):
    """struct kvfs_record of another node's block or directory."""

    inode: InodeNumber
    parent: InodeNumber
    name: bytes
    directory: bool
    size: int
    segment: int
    page: int
    generation: int
    mode: int
    uid: int
    gid: int


class Conflict(NamedTuple):
    """struct kvfs_pod_conflict: this node's own block, or its directory's rights, that lost against another node's
    news."""

    inode: InodeNumber
    own_version: int
    version: int
    kind: int
    slot: int


class Tombstone(NamedTuple):
    """struct kvfs_tombstone: a name of another node that was removed here."""

    key_low: int
    key_high: int
    version: int
    slot: int


class Applied(NamedTuple):
    """struct kvfs_pod_applied, but for the arrays."""

    start: int
    number: int
    records: int
    applied: int
    skipped: int
    conflicts: Sequence[Conflict]


class Batch(NamedTuple):
    """A batch of news that is due, and what is left."""

    data: bytes
    number: int
    record_count: int
    lost: int
    next_due_s: float | None  # on CLOCK_MONOTONIC; None: nothing is held


class PodMap:
    """The pod map and the news of a plane, which owns them."""

    def __init__(self, plane: object, options: PodOptions) -> None:
        result = lib.kvfs_plane_join(
            plane, options.slot, options.nodes, options.lot, options.entries_max, options.news_bytes, options.start
        )
        if result < 0:
            raise PodMapError(
                f"pod map of {options.entries_max} entries, slot {options.slot} of {options.nodes}, lots of "
                f"{options.lot}: {os.strerror(-result)}"
            )
        self.options = options
        self._plane = plane
        self._pod, self._news = lib.kvfs_plane_pod(plane), lib.kvfs_plane_news(plane)
        self._record = ffi.new("struct kvfs_record *")
        self._out = ffi.new("uint8_t[]", BATCH_SIZE_MAX)
        self._taken = ffi.new("struct kvfs_news_taken *")
        self._conflicts = ffi.new("struct kvfs_pod_conflict[]", BATCH_RECORDS_MAX)
        self._tombstones = ffi.new("struct kvfs_tombstone[]", _TOMBSTONES)
        self._applied = ffi.new("struct kvfs_pod_applied *")

    @property
    def fd(self) -> int:
        """The map's memory, for readers in other processes. The map keeps it."""
        return cast(int, lib.kvfs_pod_fd(self._pod))

    def wait_on_misses(self, on: bool) -> None:
        """Look-ups through mounts that find nothing come to Python, which waits for news."""
        lib.kvfs_foreign_wait(self._plane, int(on))

    # ---- look-ups ----

    def find(self, parent: InodeNumber, name: bytes) -> Foreign | None:
        """The block or directory that the name leads to at other nodes."""
        result = lib.kvfs_foreign_find(self._plane, parent, name, len(name), self._record)
        return None if result < 0 else self._foreign(parent, name)

    def tombstones(self) -> list[Tombstone]:
        """Names of other nodes that were removed here since the last call."""
        found: list[Tombstone] = []
        while count := lib.kvfs_foreign_tombstones(self._plane, self._tombstones, _TOMBSTONES):
            found += [Tombstone(t.key_low, t.key_high, t.version, t.slot) for t in self._tombstones[0:count]]
        return found

    def tell_gone(self, tombstones: Sequence[Tombstone]) -> None:
        """Tell of removals once more."""
        for at in range(0, len(tombstones), _TOMBSTONES):
            some = tombstones[at : at + _TOMBSTONES]
            words = ffi.new("struct kvfs_tombstone[]", [(*one, 0) for one in some])
            lib.kvfs_foreign_tell_gone(self._plane, words, len(some))

    def known(self, number: InodeNumber) -> Foreign | None:
        """A block that was looked up, by its node id."""
        name = ffi.new("char[]", NAME_MAX + 1)
        if lib.kvfs_foreign_known(self._plane, number, self._record, name) < 0:
            return None
        return self._foreign(InodeNumber(self._record.parent), ffi.string(name))

    def _foreign(self, parent: InodeNumber, name: bytes) -> Foreign:
        r = self._record
        return Foreign(
            InodeNumber(r.inode), parent, name, r.kind == 2, r.size, r.segment, r.page, r.generation, r.mode, r.uid,
            r.gid,
        )  # fmt: skip

    # ---- what others tell ----

    def apply(self, slot: int, batch: bytes) -> Applied:
        """Take in a batch of the node of that slot. PodMapError: it is damaged, or another's. Any thread, one at a
        time."""
        out = self._applied
        result = lib.kvfs_foreign_apply(self._plane, slot, batch, len(batch), self._conflicts, out)
        if result < 0:
            error = PodMapError(f"news of slot {slot}, {len(batch)} bytes: {os.strerror(-result)}")
            error.errno = -result
            raise error
        conflicts = [
            Conflict(InodeNumber(c.inode), c.own_version, c.version, c.kind, c.slot)
            for c in self._conflicts[0 : out.conflict_count]
        ]
        skipped = out.old + out.ended + out.foreign + out.malformed + out.no_room + out.waiting + out.unknown + out.own
        return Applied(out.start, out.number, out.records, out.applied, skipped, conflicts)

    def load(self, segment: int, generation: int, records: bytes) -> int:
        """Take in inode records that were found on the devices in this life of a segment. PodMapError."""
        result = lib.kvfs_foreign_load(self._plane, segment, generation, records, len(records))
        if result < 0:
            raise PodMapError(f"segment {segment}: {len(records)} bytes of records: {os.strerror(-result)}")
        return cast(int, result)

    def own_inodes(self, keys: Sequence[bytes]) -> list[InodeNumber]:
        """The inodes of this node's blocks with these keys of 16 bytes; 0: there is none. Any thread."""
        inodes = ffi.new("uint64_t[]", len(keys))
        words = ffi.new("uint64_t[]", 2 * len(keys))
        ffi.memmove(words, b"".join(keys), 16 * len(keys))
        lib.kvfs_foreign_asked(self._plane, words, len(keys), inodes)
        return [InodeNumber(number) for number in inodes]

    def by_owner(self, blocks: memoryview) -> dict[int, tuple[list[int], list[bytes]]]:
        """The blocks (struct wire_foreign_block each) by the slot that owns their segment: which they are, and their
        keys. Without this node's."""
        owners: dict[int, tuple[list[int], list[bytes]]] = {}
        for index, (key, segment, _) in enumerate(_BLOCK.iter_unpack(blocks)):
            slot = lib.kvfs_pod_owner(self._pod, segment)
            if slot != self.options.slot:
                indexes, keys = owners.setdefault(slot, ([], []))
                indexes.append(index)
                keys.append(key)
        return owners

    def note(self, what: int, blocks: Part) -> None:
        """Take news of a native client about blocks of other nodes: struct wire_foreign_block each."""
        lib.kvfs_foreign_note(self._plane, what, blocks.data, blocks.size // FOREIGN_BLOCK_SIZE)

    def life(self, segment: int, generation: int, *, ended: bool) -> bool:
        """A segment of another node has this life, or it has ended. False: later news are known, or the sweep lags."""
        return cast(int, lib.kvfs_pod_life(self._pod, segment, generation, int(ended))) == 0

    def avoid_none(self) -> None:
        """A device is back: segments that were avoided as their device failed are read again."""
        lib.kvfs_pod_avoid_none(self._pod)

    def sweep(self, buckets: int) -> int:
        return cast(int, lib.kvfs_pod_sweep(self._pod, buckets))

    def repeat_begin(self, slot: int) -> None:
        """From now on the node of this slot says all that it has."""
        lib.kvfs_pod_repeat_begin(self._pod, slot)

    def repeat_end(self, slot: int) -> int:
        """Returns how many names went, as the node did not repeat them."""
        return cast(int, lib.kvfs_pod_repeat_end(self._pod, slot))

    # ---- what this node tells ----

    @property
    def news_fd(self) -> int:
        """An eventfd: readable when something is due earlier than was said."""
        return cast(int, lib.kvfs_news_fd(self._news))

    def take(self, now_ns: int) -> Batch:
        """A batch that is due, empty if none is. One thread."""
        taken = self._taken
        size = lib.kvfs_news_take(self._news, now_ns, self._out, BATCH_SIZE_MAX, taken)
        if size < 0:
            raise PodMapError(f"news: {os.strerror(-size)}")
        due = None if taken.next_due_ns == (1 << 64) - 1 else taken.next_due_ns / 1e9
        return Batch(bytes(ffi.buffer(self._out, size)), taken.number, taken.record_count, taken.lost, due)

    def flush(self) -> None:
        """All that is held back is due now, names that engines rename aside."""
        lib.kvfs_news_flush(self._news)

    def tell_directories(self) -> int:
        """Tell once more of all directories that this node has. Returns how many. Any thread."""
        return cast(int, lib.kvfs_foreign_tell_directories(self._plane))

    def life_ended(self, segment: int, generation: int) -> None:
        """A segment of this node is free."""
        lib.kvfs_news_life(self._news, segment, generation, 1)

    # ---- statistics ----

    def statistics(self) -> dict[str, int]:
        """struct kvfs_pod_statistics and, as news_*, struct kvfs_news_statistics."""
        pod, news = ffi.new("struct kvfs_pod_statistics *"), ffi.new("struct kvfs_news_statistics *")
        lib.kvfs_pod_statistics(self._pod, pod)
        lib.kvfs_news_statistics(self._news, news)
        found = {name: getattr(pod, name) for name, _ in ffi.typeof("struct kvfs_pod_statistics").fields}
        found |= {f"news_{name}": getattr(news, name) for name, _ in ffi.typeof("struct kvfs_news_statistics").fields}
        return found
