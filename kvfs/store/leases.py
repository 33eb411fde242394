"""Leases: blocks that native clients keep from eviction between a look-up and a read, each until a deadline.

A lease ends with its release, its deadline, or its client's connection, whichever comes first. It keeps a block from
eviction alone. A block that is deleted, replaced, damaged, or on a device that goes away has lost its lease. Which
blocks are kept is counted in the data plane (native/src/content/lease.c), one call for a frame. Here are
the deadlines and the bounds. Leases are few enough that eviction always has something to take.

All leases of a user together are at most as many as are left to others: half where no other user has any. So however
many users come, each finds some left. Root and the daemon's own user are bound as clients alone.

In a pod a lease may also keep blocks of other nodes, which those keep by their own rules. Here is when they get its
end, and how many there may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import trio

from kvfs.frames import LeasedBlocks, Room
from kvfs.lent import Part
from kvfs.store.blocks import Blocks
from kvfs.store.shares import ROOT
from kvfs.types import COUNTER_BITS, PAGE_SIZE

# A longer lease is cut to this.
LEASE_MAX_MS = 3_600_000
# Another node keeps its blocks for so long at most: it may not hear of a lessee's end.
_OTHERS_MAX_S = 60
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
    """One client, and its user. Only Leases changes it."""

    user: int = ROOT
    leases: dict[int, _Lease] = field(default_factory=dict)
    blocks: int = 0
    pages: int = 0


@dataclass(slots=True)
class _Sum:
    """All that a user's clients have."""

    leases: int = 0
    blocks: int = 0
    pages: int = 0


@dataclass(slots=True, eq=False)
class _Lease:
    lessee: Lessee
    told: LeasedBlocks
    until_s: float
    # Of other nodes: how many, and how each of those is told of the end.
    other_blocks: int = 0
    others: list[Callable[[], None]] = field(default_factory=list)
    kept: tuple[int, int] | None = None  # the user of the mount, and the inode that it keeps by this


class Asking:
    """Other nodes are being asked for a lease. blocks: how many of those wanted they may be asked for, the first ones;
    seconds: for how long."""

    def __init__(self, leases: Leases, lessee: Lessee, number: int, until_s: float, blocks: int) -> None:
        self.blocks = blocks
        self.seconds = max(0.001, min(until_s - trio.current_time(), _OTHERS_MAX_S))
        self._leases, self._lessee, self._number, self._until_s = leases, lessee, number, until_s
        self._kept, self._others = 0, list[Callable[[], None]]()

    def add(self, kept: int, release: Callable[[], None]) -> None:
        """A node was asked, and keeps a number of blocks. They are released with the lease."""
        if kept:
            self._kept += kept
            self._others.append(release)

    def enter(self) -> int:
        """Returns the lease's number; 0: it keeps nothing of this, or has ended meanwhile."""
        number = self._leases.enter_others(self._lessee, self._number, self._until_s, self._kept, self._others)
        self._others = []
        return number

    def end(self) -> None:
        """All that was not entered is released."""
        for release in self._others:
            release()
        self._others = []


@dataclass(frozen=True, slots=True)
class LeaseStatistics:
    """Leases in force, their clients, and the blocks of this node that they keep.

    Since the mount: blocks granted and refused, leases that were not released in time."""

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
        self._segments, self._frames, self._shares = blocks.segments, blocks.plane.frames, blocks.shares
        # No number of an earlier daemon is used again: a client that has outlived it may still release that.
        self._last_number = epoch << COUNTER_BITS
        self._leases: dict[int, _Lease] = {}
        self._lessees: set[Lessee] = set()
        self._sums: dict[int, _Sum] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap; also of leases that were released
        self._blocks = self._granted = self._refused = self._expired = 0
        self._sooner = trio.Event()
        # Users of the mount, who keep blocks by an extended attribute, and those blocks.
        self._users: dict[int, Lessee] = {}
        self._kept: dict[tuple[int, int], int] = {}

    def keep(self, user: int, inode: int, seconds: int) -> bool:
        """A user of the mount keeps one inode for so long at least, as a client does. A later call replaces this."""
        lessee = self._users.setdefault(user, Lessee(user))
        number, _ = self.take(lessee, 0, seconds * 1000, Part(inode.to_bytes(8, "little")))
        if number:
            self.drop_kept(user, inode)
            self._kept[user, inode] = number
            self._leases[number].kept = (user, inode)
        return number != 0

    def drop_kept(self, user: int, inode: int) -> None:
        """The end of keep()."""
        self.release(self._users.get(user, Lessee()), self._kept.pop((user, inode), 0))

    def take(self, lessee: Lessee, number: int, milliseconds: int, inodes: Part) -> tuple[int, bytes]:
        """Keep these inodes (uint64_t): in a new lease, or with a number in that lease until its deadline. Returns the
        lease's number, 0 if it keeps nothing, and a byte for each inode: 1: it is kept."""
        count = inodes.size // 8
        lease = lessee.leases.get(number)
        if lease is None and (number or self._is_full(lessee)):
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
        self._count(lessee, kept, told.pages - before[1])
        assert told.count == before[0] + kept
        return (number if lease is not None else self._enter(lessee, told, _until(milliseconds))), held

    @contextmanager
    def ask_others(self, lessee: Lessee, number: int, milliseconds: int, count: int) -> Iterator[Asking]:
        """Other nodes are asked for a number of blocks, for a new lease or that of a number. Requested ones count
        against the bounds; after that, kept ones."""
        lease = lessee.leases.get(number)
        full = lease is None and (number or self._is_full(lessee))
        blocks = 0 if full else min(count, self._block_room(lessee))
        asking = Asking(self, lessee, number, _until(milliseconds) if lease is None else lease.until_s, blocks)
        before = self._granted
        self._count(lessee, blocks)
        try:
            yield asking
        finally:
            self._count(lessee, -blocks)
            asking.end()
            self._refused += max(0, count - (self._granted - before))

    def enter_others(
        self, lessee: Lessee, number: int, until_s: float, kept: int, others: list[Callable[[], None]]
    ) -> int:
        """See Asking.enter()."""
        if number and number not in lessee.leases:
            for release in others:
                release()
            return 0
        if kept:
            number = number or self._enter(lessee, self._frames.lease(), until_s)
            lease = lessee.leases[number]
            lease.other_blocks += kept
            lease.others += others
            self._count(lessee, kept)
            self._granted += kept
        return number

    def _count(self, lessee: Lessee, blocks: int, pages: int = 0, leases: int = 0) -> None:
        """So much more, or less, of a client."""
        of_user = self._sums.setdefault(lessee.user, _Sum())
        self._blocks += blocks
        lessee.blocks += blocks
        lessee.pages += pages
        of_user.leases += leases
        of_user.blocks += blocks
        of_user.pages += pages
        assert min(self._blocks, lessee.blocks, lessee.pages, of_user.leases, of_user.blocks, of_user.pages) >= 0
        if of_user == _Sum():
            del self._sums[lessee.user]

    def _fair(self, lessee: Lessee, has: int, left: int) -> int:
        """The most that a user with so much may take of what is left: no more than others find then."""
        return left if self._shares.is_exempt(lessee.user) else (left - has) // 2

    def _is_full(self, lessee: Lessee) -> bool:
        """Whether there can be no more leases of this client."""
        has, left = self._sums.get(lessee.user, _Sum()).leases, _ALL_LEASES_MAX - len(self._leases)
        fair = left if self._shares.is_exempt(lessee.user) else left - has
        return len(lessee.leases) >= _LEASES_MAX or fair <= 0

    def _block_room(self, lessee: Lessee) -> int:
        has, left = self._sums.get(lessee.user, _Sum()).blocks, _ALL_BLOCKS_MAX - self._blocks
        return max(0, min(_BLOCKS_MAX - lessee.blocks, self._fair(lessee, has, left)))

    def _room(self, lessee: Lessee) -> Room:
        pool = self._segments.usable * self._segments.area
        own = pool // _CLIENT_SHARE - lessee.pages
        if not self._shares.is_exempt(lessee.user):
            _, leased = self._frames.leased()
            has = self._sums.get(lessee.user, _Sum()).pages
            own = min(own, self._fair(lessee, has, pool // _POOL_SHARE - leased))
        return Room(max(0, own), pool // _POOL_SHARE, self._block_room(lessee))

    def _enter(self, lessee: Lessee, told: LeasedBlocks, until_s: float) -> int:
        self._last_number += 1
        number = self._last_number
        self._leases[number] = lessee.leases[number] = _Lease(lessee, told, until_s)
        self._count(lessee, 0, 0, 1)
        self._lessees.add(lessee)
        heappush(self._deadlines, (until_s, number))
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
        if lease.kept is not None:
            self._kept.pop(lease.kept, None)
        del lessee.leases[number]
        self._count(lessee, -told.count - lease.other_blocks, -told.pages, -1)
        if not lessee.leases:
            self._lessees.discard(lessee)
        self._frames.lease_end(told)
        for release in lease.others:
            release()

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


def _until(milliseconds: int) -> float:
    return trio.current_time() + min(milliseconds, LEASE_MAX_MS) / 1000
