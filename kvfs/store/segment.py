"""One segment: its state in memory and in the index, and the pages that a block takes of it. Numbers that never go
back."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import trio

from kvfs.errors import FormatError
from kvfs.names import Names, Place, new_place
from kvfs.pool.format import Stream
from kvfs.record import Inode, Kind
from kvfs.types import COUNTER_BITS, SegmentIndex

_STATE = struct.Struct("<BBBBIQQQ")
_STATE_VERSION = 1
_STATE_DIRTY = 1
_STATE_SLOT = 2
_STATE_LENT = 4


class State(IntEnum):
    FREE = 0
    OPEN = 1
    CLOSED = 2
    EVICTING = 3


@dataclass(slots=True)
class Segment:
    index: SegmentIndex
    state: State = State.FREE
    generation: int = 0
    stream: int = Stream.NEW
    place: Place = field(default_factory=new_place)  # next_page, live_pages, runs in flight: the data plane's
    sequence: int = 0  # of the last summary
    slot: int = 1  # of the last summary
    dirty: bool = False  # the summary on the device is not true any more
    copy_stale: bool = False  # the summary in the other slot names blocks that are gone, or under old names
    summarized: bool = True  # a summary that knows blocks of this life may be on the device
    writing: bool = False  # a summary is on its way to the device: until it is there, a crash must find this dirty
    closing: bool = False  # full; closed with its last run in flight
    held: int = 0  # files being written with pages here
    batch: int = 0  # index batch in which a block last came here or was renamed
    turn: int = 0  # the same by turns of summaries (Segments.flush_summaries)
    avoid_until: float = 0.0  # eviction freed nothing here; trio time
    late: bool = False  # a client that is gone may have had writes under way here
    lost: bool = False  # a device that it lies on is away: nothing of it can be read or written
    foreign: bool = False  # another node's: never opened, written or judged here
    avoided: bool = False  # not to be opened or evicted: lost, on a slow device, or on a device that is drained

    @property
    def next_page(self) -> int:
        return self.place.next_page

    @next_page.setter
    def next_page(self, page: int) -> None:
        self.place.next_page = page

    @property
    def live_pages(self) -> int:
        return self.place.live_pages

    @live_pages.setter
    def live_pages(self, pages: int) -> None:
        self.place.live_pages = pages

    @property
    def lent(self) -> int:
        """Runs that a native client may be writing to, entitled or late."""
        return self.place.lent

    @property
    def in_flight(self) -> int:
        """Runs not finished."""
        return self.place.run_count

    def covered_page(self) -> int:
        """All blocks before this page have entered the index or failed. Within a step."""
        return self.place.first_page if self.place.run_count else self.place.next_page

    def pack(self) -> bytes:
        assert self.covered_page() <= self.next_page and self.live_pages >= 0 and self.stream < len(Stream), self
        return _STATE.pack(
            _STATE_VERSION, self.state, self.stream,
            _STATE_DIRTY * (self.dirty or self.copy_stale or self.writing) + _STATE_SLOT * self.slot
            + _STATE_LENT * (self.late or self.lent > 0),
            self.covered_page(), self.generation, self.live_pages, self.sequence,
        )  # fmt: skip

    def unpack_into(self, data: bytes) -> None:
        try:
            version, state, stream, flags, page, generation, live, sequence = _STATE.unpack(data)
            if version != _STATE_VERSION or stream >= len(Stream) or page >= 1 << 32 or live >= 1 << 32:
                raise ValueError(data)
            self.state = State(state)
        except (struct.error, ValueError) as error:
            raise FormatError(f"segment {self.index}: its state in the index is not readable") from error
        self.stream, self.next_page, self.generation, self.live_pages = stream, page, generation, live
        self.sequence = sequence
        self.dirty = bool(flags & _STATE_DIRTY)
        self.slot = int(bool(flags & _STATE_SLOT))
        self.late = bool(flags & _STATE_LENT)


@dataclass(slots=True, eq=False)
class Head:
    """The place to which a stream is appended. Only Segments changes it."""

    stream: Stream
    on_lead: Callable[[Segment | None, bool], None]  # told to which segment others may append; True: the lock is taken
    segment: Segment | None = None
    lock: trio.Lock = field(default_factory=trio.Lock)


@dataclass(frozen=True, slots=True)
class SegmentStatistics:
    count: int
    size: int
    free: int
    open: int
    closed: int
    evicting: int
    live_bytes: int
    capacity: int
    summaries_written: int
    summaries_too_large: int
    write_errors: int
    lost: int


def usage(inode: Inode) -> dict[int, int]:
    """Pages that a sealed block takes in each segment, headers included."""
    if not inode.sealed or inode.kind != Kind.FILE:
        return {}
    if not inode.extents:
        return {inode.segment: inode.header_pages + inode.data_pages}
    used: dict[int, int] = {inode.segment: inode.header_pages}
    for extent in inode.extents:
        used[extent.segment] = used.get(extent.segment, 0) + extent.page_count
    return used


class Counter:
    """Numbers that never go back, with the mount epoch in the high bits. In a pod the low ones are the node's slot, and
    SLOT_STEP lies between two."""

    def __init__(self, epoch: int, slot: int = 0, step: int = 1) -> None:
        self.last, self._step = epoch << COUNTER_BITS | slot, step

    def next(self) -> int:
        self.last += self._step
        return self.last


class Versions:
    """Versions of blocks. Versions in flight were given out, and the index does not know yet what became of them."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self.in_flight: set[int] = set()

    def begin(self) -> int:
        version = self._names.next_version()
        self.in_flight.add(version)
        return version

    def end(self, version: int) -> None:
        self.in_flight.discard(version)

    def all_in_flight(self) -> list[int]:
        """The data plane's included."""
        return [*self.in_flight, *self._names.in_flight()]
