"""Leases: blocks that native clients keep from eviction between a look-up and a read, each until a deadline.

A lease ends with its release, its deadline, or its client's connection, whichever comes first. It keeps a block from
eviction alone. A block that is deleted, replaced, damaged, or on a device that goes away has lost its lease. Which
blocks are kept is counted in the data plane (native/src/content/lease.c), one call for a frame. Here are
the deadlines and the bounds. Leases are few enough that eviction always has something to take.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import trio

from kvfs.frames import LeasedBlocks, Room
from kvfs.store.blocks import Blocks
from kvfs.types import COUNTER_BITS, PAGE_SIZE

# A longer lease is cut to this.
LEASE_MAX_MS = 60_000
# All clients together may lease this part of the pool, one client half of that.
_POOL_SHARE = 8
_CLIENT_SHARE = 2 * _POOL_SHARE
# Of one client, and of all: memory for them. A block that is leased twice counts twice.
_LEASES_MAX, _ALL_LEASES_MAX = 4096, 65_536
_BLOCKS_MAX, _ALL_BLOCKS_MAX = 65_536, 1 << 20
# Deadlines of leases that were released are forgotten once there are this many more of them than of others.
_STALE_MAX = 64


@dataclass(slots=True, eq=False)
class Lessee:
    """One client. Only Leases changes it."""

    leases: dict[int, _Lease] = field(default_factory=dict)
    blocks: int = 0
    pages: int = 0


@dataclass(slots=True, eq=False)
class _Lease:
    lessee: Lessee
    told: LeasedBlocks


@dataclass(frozen=True, slots=True)
class LeaseStatistics:
    """Leases in force, their clients, and the blocks that they keep; since the mount: blocks granted and refused,
    leases that were not released in time."""

    open: int
    clients: int
    blocks: int
    bytes: int
    granted: int
    refused: int
    expired: int


class Leases:
    """All native clients' leases of a mounted pool. `run()` must run."""

    def __init__(self, blocks: Blocks, epoch: int) -> None:
        self._segments, self._frames = blocks.segments, blocks.plane.frames
        # No number of an earlier daemon is used again: a client that has outlived it may still release that.
        self._last_number = epoch << COUNTER_BITS
        self._leases: dict[int, _Lease] = {}
        self._lessees: set[Lessee] = set()
        self._deadlines: list[tuple[float, int]] = []  # a heap; also of leases that were released
        self._blocks = self._granted = self._refused = self._expired = 0
        self._sooner = trio.Event()

    def take(self, lessee: Lessee, number: int, milliseconds: int, inodes: memoryview) -> tuple[int, bytes]:
        """Keep these inodes (uint64_t): in a new lease, or with a number in that lease until its deadline. Returns the
        lease's number, 0 if it keeps nothing, and a byte for each inode: 1: it is kept."""
        count = len(inodes) // 8
        lease = lessee.leases.get(number)
        full = len(lessee.leases) >= _LEASES_MAX or len(self._leases) >= _ALL_LEASES_MAX
        if lease is None and (number or full):
            self._refused += count
            return 0, bytes(count)
        told = self._frames.lease() if lease is None else lease.told
        before = told.count, told.pages
        try:
            held = self._frames.lease_add(told, inodes, self._room(lessee))
        finally:
            if lease is None and not told.count:
                self._frames.lease_end(told)
        kept = sum(held)
        self._granted += kept
        self._refused += count - kept
        if not kept:
            return number, held
        self._blocks += kept
        lessee.blocks += kept
        lessee.pages += told.pages - before[1]
        assert told.count == before[0] + kept
        return (number if lease is not None else self._enter(lessee, told, milliseconds)), held

    def _room(self, lessee: Lessee) -> Room:
        pool = self._segments.usable * self._segments.area
        return Room(
            max(0, pool // _CLIENT_SHARE - lessee.pages), pool // _POOL_SHARE,
            max(0, min(_BLOCKS_MAX - lessee.blocks, _ALL_BLOCKS_MAX - self._blocks)),
        )  # fmt: skip

    def _enter(self, lessee: Lessee, told: LeasedBlocks, milliseconds: int) -> int:
        self._last_number += 1
        number = self._last_number
        self._leases[number] = lessee.leases[number] = _Lease(lessee, told)
        self._lessees.add(lessee)
        heappush(self._deadlines, (trio.current_time() + min(milliseconds, LEASE_MAX_MS) / 1000, number))
        if self._deadlines[0][1] == number:
            self._sooner.set()
        return number

    def release(self, lessee: Lessee, number: int) -> bool:
        """Whether this lease was in force until now."""
        if number not in lessee.leases:
            return False
        self._end(number)
        self._forget()
        return True

    def leave(self, lessee: Lessee) -> None:
        """The client is gone."""
        for number in list(lessee.leases):
            self._end(number)
        self._forget()

    def _forget(self) -> None:
        """A flood of leases that are released at once must not fill the heap."""
        if len(self._deadlines) > 2 * len(self._leases) + _STALE_MAX:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._leases]
            heapify(self._deadlines)

    def _end(self, number: int) -> None:
        lease = self._leases.pop(number)
        lessee, told = lease.lessee, lease.told
        del lessee.leases[number]
        self._blocks -= told.count
        lessee.blocks -= told.count
        lessee.pages -= told.pages
        assert self._blocks >= 0 and lessee.blocks >= 0 and lessee.pages >= 0
        if not lessee.leases:
            self._lessees.discard(lessee)
        self._frames.lease_end(told)

    async def run(self) -> None:
        """End leases at their deadlines. Until cancelled."""
        while True:
            self._sooner = trio.Event()
            now = trio.current_time()
            while self._deadlines and self._deadlines[0][0] <= now:
                _, number = heappop(self._deadlines)
                if number in self._leases:
                    self._end(number)
                    self._expired += 1
            with trio.move_on_at(self._deadlines[0][0] if self._deadlines else float("inf")):
                await self._sooner.wait()

    def close(self) -> None:
        """The pool is closed: all end."""
        for number in list(self._leases):
            self._end(number)

    def statistics(self) -> LeaseStatistics:
        blocks, pages = self._frames.leased()
        return LeaseStatistics(
            len(self._leases), len(self._lessees), blocks, pages * PAGE_SIZE, self._granted, self._refused,
            self._expired,
        )  # fmt: skip
