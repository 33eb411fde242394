"""A handle to the data plane (native/src/plane.c, native/include/kvfs_plane.h): typed calls, errors, and waiting for
completions.

Decides nothing. Methods bear the C functions' names and raise PlaneError with their errno. A method that starts a job
is async, with its result. A job's memory is kept until its completion (I5), also if the task that waits is cancelled.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

import trio

from kvfs._native import ffi, lib
from kvfs.cgroup import threads_told
from kvfs.errors import KvfsError
from kvfs.frames import Frames
from kvfs.held import HeldMount
from kvfs.listings import Listings
from kvfs.names import LOOK, Evicted, Leave, Look, Names
from kvfs.naming import Act, Given, Naming
from kvfs.podmap import PodMap, PodOptions
from kvfs.record import RECORD_BYTES, RECORD_SIZE, Extent
from kvfs.types import PAGE_SIZE, InodeNumber, SegmentIndex, UserNumbers
from kvfs.upcalls import FUSE_FLUSH, FUSE_READDIR, FUSE_READDIRPLUS, Call, call_of
from kvfs.uses import Uses

log = logging.getLogger(__name__)

# The data plane answers every job by its own deadlines. This deadline is for a job that it lost.
JOB_TIMEOUT_S = 300.0
_BATCH = 256
# content/shares.c: places for users, and one for all others.
_USERS_MAX = 4097
_CALLS = 16
_ERRNO_MAX = 4095
# Completions and FLUSHes of one turn of the event loop: some milliseconds at most, as others wait for theirs.
_STEPS = 16
# Listings of a turn: each brings up to 1,024 names, in some 0.5 ms.
_LISTINGS = 4
RECORD_CAPACITY = 1 << 20
# Bytes of the feed of changes, where nothing else is asked for: some 120,000 changes.
FEED_SIZE: int = lib.KVFS_FEED_SIZE


class PlaneError(KvfsError):
    """A call of the data plane failed."""


class OpenState(IntEnum):
    """enum kvfs_open_state: what inode_is_open() returns. Beyond share: all who have it open hold more than theirs.
    Leased: neither open within a share nor being written, and a lease keeps it."""

    NOT_OPEN = 0
    OPEN = 1
    BEING_WRITTEN = 2
    OPEN_BEYOND_SHARE = 3
    LEASED = 4


class EventType(IntEnum):
    SPILL = 1
    RESEAL = 2
    IDLE = 3
    BAD_BLOCK = 4
    IO_ERROR = 5
    TRANSPORTS_GONE = 6
    GUEST = 8
    DEVICE = 9
    SLAB_CLOSED = 10
    SLAB_FREE = 11
    SLAB_WANTED = 12
    SLOW = 13
    PLACES = 14
    ROOM = 15
    OVERTAKEN = 16
    PINNED = 17
    LINGERS = 18


@dataclass(frozen=True, slots=True)
class Event:
    type: EventType
    inode: int
    value: int


@dataclass(frozen=True, slots=True)
class SealInfo:
    size: int
    mtime_ns: int
    data_pages: int
    ranges: int
    kept_extents: int
    dirty: bool
    shared: bool


@dataclass(frozen=True, slots=True)
class Run:
    """page_count pages of a segment, to be written in one go."""

    generation: int
    segment: SegmentIndex
    page: int
    page_count: int


@dataclass(frozen=True, slots=True)
class ScanResult:
    records: bytes
    next_page: int
    entry_count: int
    full: bool
    impossible: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneTuning:
    """The part of struct kvfs_plane_config that a store's user may choose; 0 lets the data plane choose."""

    staging_size: int = 256 << 20
    read_memory_size: int = 128 << 20
    io_timeout_ms: int = 10_000
    request_timeout_ms: int = 60_000
    # A request that takes longer makes an event SLOW. 0: none does.
    slow_ms: int = 0
    server_threads: int = 0
    max_read: int = 0
    kernel_timeout_s: int = 0
    idmap: bool = False  # new mounts may be bound with an idmapping


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneOptions(PlaneTuning):
    """struct kvfs_plane_config; 0 lets the data plane choose."""

    secret: int
    mount_epoch: int
    zone_size: int
    stripe_unit: int
    stripe_width: int
    segment_count: int
    records_max: int
    store_threads: int = 0
    max_write: int = 0
    verify: int = 1
    spin_us: int = 100


@dataclass(slots=True)
class _Job:
    """A job under way: the callback for its result, and the memory that it uses."""

    done: Callable[[int], None]
    keep: tuple[object, ...]
    until: float


def failure(result: int, what: str, why: str = "") -> PlaneError:
    """The error for a negative result."""
    error = PlaneError(f"{what}: {why or os.strerror(-result)}")
    error.errno = -result
    return error


def _check(result: int, what: str) -> int:
    if result < 0:
        raise failure(result, what)
    return result


async def wait_job(begin: Callable[[Callable[[int], None]], None], what: str) -> int:
    """Begin a job and return its result. PlaneError if that is negative, or does not come."""
    event, results = trio.Event(), []

    def done(result: int) -> None:
        results.append(result)
        event.set()

    begin(done)
    with trio.move_on_after(JOB_TIMEOUT_S):
        await event.wait()
    if not results:
        error = PlaneError(f"{what}: no completion after {JOB_TIMEOUT_S:.0f} s")
        error.errno = errno.ETIMEDOUT
        raise error
    return _check(results[0], what)


def _assert_record(record: bytes) -> None:
    """The other half is in C, which takes record_size for granted: all bytes are there, and no more."""
    assert len(record) >= RECORD_SIZE and RECORD_BYTES.unpack_from(record)[0] == len(record), len(record)


def _assert_block(runs: Sequence[Run], header_pages: int, record: bytes, ancestors: bytes) -> None:
    """Paired with kvfs_seal_write and kvfs_store_copy: a header fits into the first run, and its parts are of words."""
    assert runs
    assert 0 < header_pages <= runs[0].page_count, (header_pages, runs[0].page_count)
    assert len(ancestors) % 8 == 0, len(ancestors)
    _assert_record(record)


def _nobody(result: int) -> None:
    pass


def _notify(job: _Job, result: int) -> None:
    done, job.done = job.done, _nobody
    done(result)


LINGERS = cast(int, lib.KVFS_KEPT_LINGERS)
_STATISTICS = [
    "requests", "forwarded", "forward_timeouts", "forwarded_in_flight", "lookups", "lookup_misses",
    "names_missed", "opens", "opens_found", "stale_opens",
    "reads", "read_bytes", "writes", "write_bytes", "checksum_errors", "read_errors", "staged_bytes", "staging_size",
    "staged_files", "open_handles", "parked", "spins", "sleeps", "wakeups", "blocks_written", "blocks_copied",
    "written_bytes", "jobs_in_flight", "zombies", "open_bytes", "slow_requests", "handed", "flushes_sealed",
    "ring_requests", "uses", "staging_waits", "staging_refusals", "staging_short",
]  # fmt: skip
_DEVICE_STATISTICS = [
    "reads", "read_bytes", "writes", "write_bytes", "errors", "timeouts", "read_ns", "write_ns",
]  # fmt: skip
_VIRTIOFS_STATISTICS = [
    "connected", "queues_running", "connections", "requests", "bytes_read", "bytes_written", "zero_copy_bytes",
    "copied_bytes", "protocol_errors", "descriptor_errors", "io_errors",
]  # fmt: skip
_TABLE_STATISTICS = ["records", "blocks", "records_max", "bytes", "buckets", "overflow_buckets", "ambiguous"]
OPERATIONS = ("lookup", "open", "read", "write", "forwarded")


class Plane:
    """A handle to one data plane. `pump()` must run while anything awaits a job."""

    def __init__(
        self,
        options: PlaneOptions,
        device_fds: Sequence[int],
        zones_offset: Sequence[int],
        members: Sequence[Sequence[tuple[int, int]]],
    ) -> None:
        """device_fds stay the caller's and must outlive this. Raises PlaneError, which names what the data plane
        lacks."""
        config = ffi.new("struct kvfs_plane_config *")
        for name in PlaneOptions.__dataclass_fields__:
            setattr(config, name, getattr(options, name))
        assert len(device_fds) == len(zones_offset), (len(device_fds), len(zones_offset))
        assert len(members) == options.segment_count, len(members)
        assert all(len(segment) == options.stripe_width for segment in members)
        config.device_count = len(device_fds)
        flat = ffi.new("struct kvfs_member[]", sum(len(segment) for segment in members))
        at = 0
        for segment in members:
            for device, zone in segment:
                flat[at].device = device
                flat[at].zone = zone
                at += 1
        out = ffi.new("struct kvfs_plane **")
        result = lib.kvfs_plane_create(config, list(device_fds), list(zones_offset), flat, out)
        if result < 0:
            reason = ffi.string(lib.kvfs_plane_error()).decode(errors="replace") or os.strerror(-result)
            limits = f"; {threads_told()}" if result == -errno.EAGAIN else ""
            raise failure(result, "data plane", reason + limits)
        self._plane = out[0]
        self._closed = False
        # The reason why nobody waits for jobs any more.
        self.abandoned: str | None = None
        self._cookie = 0
        self._jobs: dict[int, _Job] = {}
        self._completions = ffi.new("struct kvfs_completion[]", _BATCH)
        self._events = ffi.new("struct kvfs_event[]", _BATCH)
        self._calls = ffi.new("struct kvfs_call[]", _CALLS)
        # Answers calls (open_calls). An exception that it raises ends the pump.
        self.on_call: Callable[[Call], None] | None = None
        # Taken from the data plane and not delivered yet.
        self._done: deque[tuple[int, int]] = deque()
        self._flushes: deque[Call] = deque()
        self._listings: deque[Call] = deque()
        self._info = ffi.new("struct kvfs_seal_info *")
        self._record = ffi.new("uint8_t[]", RECORD_CAPACITY)
        self._table = lib.kvfs_plane_table(self._plane)
        self.names = Names(lib.kvfs_plane_names(self._plane), self._plane)
        self.frames = Frames(self._plane)
        self.uses, self.held, self.listings = Uses(self._plane), HeldMount(self._plane), Listings(self._plane)
        # The names of other nodes, once join() was called.
        self.pod: PodMap | None = None

    def destroy(self) -> None:
        """Blocks until the devices' I/O is reaped. No call afterwards."""
        if not self._closed:
            self._closed = True
            lib.kvfs_plane_destroy(self._plane)
            self._jobs.clear()

    # ---- completions and events ----

    def event_fd(self) -> int:
        return cast(int, lib.kvfs_event_fd(self._plane))

    async def pump(self, handler: Callable[[Event], None]) -> None:
        """Deliver completions to the jobs' callbacks, events to the handler and calls to on_call, until cancelled."""
        fd = self.event_fd()
        while True:
            if self._done or self._flushes or self._listings:
                await trio.lowlevel.checkpoint()
            else:
                await trio.lowlevel.wait_readable(fd)
            self.take(handler)

    def take(self, handler: Callable[[Event], None]) -> None:
        """Deliver events first, then calls and completions for a moment. The next call delivers the rest.

        Calls that change a directory come before all else (I29): the kernel holds the directory's lock meanwhile, and
        others that store there wait for it. A FLUSH takes its time anyway. Listings come last, few at a time.
        """
        while count := lib.kvfs_take_events(self._plane, self._events, _BATCH):
            events = [Event(EventType(e.type), e.inode, e.value) for e in self._events[0:count]]
            for event in events:
                try:
                    handler(event)
                except Exception:
                    log.exception("event %s of inode %d", event.type.name, event.inode)
            if count < _BATCH:
                break
        for _ in range(_STEPS):
            self._take_calls()
            if not self._done:
                count = lib.kvfs_take_completions(self._plane, self._completions, _BATCH)
                self._done.extend((c.cookie, c.result) for c in self._completions[0:count])
            if self._done:
                self._deliver(*self._done.popleft())
            elif self._flushes:
                call = self._flushes.popleft()
                if self.on_call is not None:
                    self.on_call(call)
            else:
                break
        for _ in range(min(_LISTINGS, len(self._listings))):
            call = self._listings.popleft()
            if self.on_call is not None:
                self.on_call(call)

    def _take_calls(self) -> None:
        while count := lib.kvfs_take_calls(self._plane, self._calls, _CALLS):
            for i in range(count):
                call = call_of(self._calls[i])
                if call.opcode == FUSE_FLUSH:
                    self._flushes.append(call)
                elif call.opcode in (FUSE_READDIR, FUSE_READDIRPLUS):
                    self._listings.append(call)
                elif self.on_call is not None:
                    self.on_call(call)

    def _deliver(self, cookie: int, result: int) -> None:
        job = self._jobs.pop(cookie, None)
        if job is not None:
            _notify(job, result)

    def expire(self) -> None:
        """Fail jobs that did not answer in time. Their memory is kept, as C may still use it. Call it now and then."""
        now = trio.current_time()
        for job in self._jobs.values():
            if job.until > now:
                break  # later jobs began later
            _notify(job, -errno.ETIMEDOUT)

    def abandon(self, reason: str) -> None:
        """All jobs that are waited for fail with EIO now, and new ones at once. Their memory is kept until
        destroy()."""
        self.abandoned = reason
        self.names.leave(Leave.CLOSED, True)
        for job in self._jobs.values():
            _notify(job, -errno.EIO)

    def _begin(self, start: Callable[[int], int], what: str, done: Callable[[int], None], *keep: object) -> None:
        """Start a job; `done` gets its result, once, in the trio thread. Its memory stays until the completion is
        reaped."""
        if self.abandoned is not None:
            raise PlaneError(f"{what}: {self.abandoned}")
        self._cookie += 1
        cookie = self._cookie
        self._jobs[cookie] = _Job(done, keep, trio.current_time() + JOB_TIMEOUT_S)
        started = start(cookie)
        if started < 0:
            del self._jobs[cookie]
            _check(started, what)

    async def _run(self, start: Callable[[int], int], what: str, *keep: object) -> int:
        """Start a job and wait for it."""
        return await wait_job(lambda done: self._begin(start, what, done, *keep), what)

    @property
    def jobs(self) -> int:
        """Jobs whose completions have not been reaped."""
        return len(self._jobs)

    # ---- transports and the session ----

    def session_open(self) -> int:
        return _check(lib.kvfs_session_open(self._plane), "session")

    def open_calls(self, on_call: Callable[[Call], None] | None) -> None:
        """From now on CREATE, UNLINK, RENAME, FLUSH and listings come to on_call. With None they
        come to the session, but for listings, which the end of the session answers."""
        self.on_call = on_call
        lib.kvfs_calls_open(self._plane, int(on_call is not None))

    def answer(self, call: int, error: int, inode: int = 0) -> None:
        """Answer a call: an errno or 0, and the inode that a CREATE made or found."""
        assert 0 <= error <= _ERRNO_MAX, error
        lib.kvfs_answer(self._plane, call, -error, inode, ffi.NULL)

    def flush_wanted(self) -> int:
        """The pages that the first FLUSH that waits for room needs; 0: none waits."""
        return cast(int, lib.kvfs_flush_wanted(self._plane))

    def flush_retry(self) -> None:
        """There may be room for FLUSHes that wait."""
        lib.kvfs_flush_retry(self._plane)

    def flush_give_up(self) -> None:
        """There is no room for FLUSHes that wait: they come as calls."""
        lib.kvfs_flush_give_up(self._plane)

    def fuse_add(self, fd: int) -> int:
        return _check(lib.kvfs_fuse_add(self._plane, fd), "transport")

    def virtiofs_add(
        self, fd: int, tag: str, queues: int, queue_size_max: int = 1024, *, memory_types: Sequence[int] = ()
    ) -> int:
        """Serve guests whose front ends connect to `fd`, a listening Unix socket (duplicated). Returns the transport's
        number. memory_types: of filesystems (statfs(2), f_type) whose files guest memory may be, in addition to memfd,
        tmpfs and hugetlbfs."""
        config = ffi.new("struct kvfs_virtiofs_config *")
        name = tag.encode()
        if not 0 < len(name) <= len(config.tag):
            raise PlaneError(f"virtio-fs tag {tag!r}: {len(name)} bytes, 1 to {len(config.tag)} are possible")
        ffi.memmove(config.tag, name, len(name))
        config.queue_count = queues
        config.queue_size_max = queue_size_max
        config.memory_type_count = len(memory_types)
        config.memory_types[0 : len(memory_types)] = list(memory_types)
        return _check(
            lib.kvfs_virtiofs_add(self._plane, fd, config),
            f"virtio-fs tag {tag!r}, {queues} queues of up to {queue_size_max}",
        )

    def virtiofs_remove(self, transport: int) -> None:
        """Ask for the end of a guest's transport: requests in flight are answered first. It has gone when
        virtiofs_statistics raises ENOENT."""
        _check(lib.kvfs_virtiofs_remove(self._plane, transport), f"virtio-fs transport {transport}")

    def virtiofs_statistics(self, transport: int) -> dict[str, int]:
        out = ffi.new("struct kvfs_virtiofs_statistics *")
        _check(lib.kvfs_virtiofs_statistics(self._plane, transport, out), f"virtio-fs transport {transport}")
        return {name: getattr(out, name) for name in _VIRTIOFS_STATISTICS}

    def notify_epoch(self) -> None:
        lib.kvfs_notify_epoch(self._plane)

    async def notify_flush(self) -> None:
        """Return when the hosts have all notifications that were queued before."""
        await self._run(lambda cookie: lib.kvfs_notify_flush(self._plane, cookie), "notification of the hosts")

    def inode_update(self, record: bytes) -> int:
        _assert_record(record)
        return _check(lib.kvfs_inode_update(self._plane, record), "block table: update")

    def inode_move(self, record: bytes) -> None:
        """As inode_update(), of a copied block. PlaneError with EBUSY if it is being written from where it was."""
        _assert_record(record)
        _check(lib.kvfs_inode_move(self._plane, record), "block table: move")

    def naming(
        self, act: Act, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, inode: int,
        given: Given | None,
    ) -> Naming:  # fmt: skip
        """A change of names, to be begun."""
        return Naming(self._plane, act, parent, name, new_parent, new_name, flags, inode, given)

    def inode_hide(self, inode: int) -> int:
        """Its device is away: it leaves the table, unless it is open."""
        return _check(lib.kvfs_inode_hide(self._plane, inode), f"block table: inode {inode}, whose device is away")

    def inode_evict(self, inodes: Sequence[int]) -> bytes:
        """Take the inodes out of the table unless they are open, within their users' shares. Returns a byte for each:
        1 if it is open and stayed."""
        if not inodes:
            return b""
        busy = ffi.new("uint8_t[]", len(inodes))
        _check(
            lib.kvfs_inode_evict(self._plane, ffi.new("uint64_t[]", inodes), len(inodes), busy), "block table: evict"
        )
        return bytes(ffi.buffer(busy))

    def blocks_look(self, segment: int, inodes: Sequence[int]) -> list[Look]:
        """Each of these inodes, as eviction looks at it."""
        out = ffi.new("struct kvfs_look[]", len(inodes))
        lib.kvfs_blocks_look(self._plane, segment, ffi.new("uint64_t[]", inodes), len(inodes), out)
        return [Look._make(found) for found in LOOK.iter_unpack(ffi.buffer(out))]

    def blocks_evict(self, segment: int | None, inodes: Sequence[int]) -> Evicted:
        """Take these inodes' blocks with a part in the segment out of table, names, places. Open ones stay. Without a
        segment they are one group: while one is open all stay. Records have to be in memory."""
        gone, out = ffi.new("uint8_t[]", len(inodes)), ffi.new("struct kvfs_evicted *")
        rest = ffi.new("uint64_t[]", inodes), len(inodes), gone, out
        if segment is None:
            lib.kvfs_group_evict(self._plane, *rest)
        else:
            lib.kvfs_blocks_evict(self._plane, segment, *rest)
        return Evicted(out.blocks, out.pages, bytes(ffi.buffer(gone)))

    def inode_is_open(self, inode: int) -> int:
        """An OpenState. Eviction may take an inode that is open beyond its users' shares."""
        return _check(lib.kvfs_inode_is_open(self._plane, inode), f"inode {inode}")

    def inode_overtaken(self, inode: int, version: int) -> int:
        """As inode_is_open(). While it is being written, an OVERTAKEN event of this version follows at the end."""
        return _check(lib.kvfs_inode_overtaken(self._plane, inode, version), f"inode {inode}")

    # ---- files being written ----

    async def file_rewrite(self, inode: int, keep_content: bool) -> None:
        """From the return on all handles of a sealed file read through staging; without keep_content it is empty
        then."""
        await self._run(
            lambda cookie: lib.kvfs_file_rewrite(self._plane, cookie, inode, int(keep_content)),
            f"rewrite of inode {inode}",
        )

    def file_truncate(self, inode: int, size: int) -> int:
        return _check(lib.kvfs_file_truncate(self._plane, inode, size), f"truncate of inode {inode} to {size}")

    def file_allocate(self, inode: int, size: int) -> int:
        return _check(lib.kvfs_file_allocate(self._plane, inode, size), f"fallocate of inode {inode} to {size}")

    def seal_begin(self, inode: int) -> SealInfo:
        _check(lib.kvfs_seal_begin(self._plane, inode, self._info), f"seal of inode {inode}")
        return self._seal_info()

    def _seal_info(self) -> SealInfo:
        i = self._info
        return SealInfo(i.size, i.mtime_ns, i.data_pages, i.ranges, i.kept_extents, bool(i.dirty), bool(i.shared))

    def seal_write(
        self, inode: int, runs: Sequence[Run], header_pages: int, record: bytes, ancestors: bytes,
        done: Callable[[int], None],
    ) -> None:  # fmt: skip
        """`done` gets the result when data and header are on the devices, or -errno."""
        _assert_block(runs, header_pages, record, ancestors)
        array = _runs(runs)
        self._begin(
            lambda cookie: lib.kvfs_seal_write(
                self._plane, cookie, inode, array, len(runs), header_pages, record, len(record), ancestors,
                len(ancestors),
            ),
            f"seal of inode {inode}", done,
        )  # fmt: skip

    def seal_record(self, inode: int) -> bytes:
        size = lib.kvfs_seal_record(self._plane, inode, self._record, RECORD_CAPACITY)
        record = bytes(ffi.buffer(self._record, _check(size, f"seal of inode {inode}")))
        _assert_record(record)
        return record

    def seal_end(self, inode: int, ok: bool) -> None:
        _check(lib.kvfs_seal_end(self._plane, inode, int(ok)), f"end of the seal of inode {inode}")

    def header_pages(self, size: int, record_size: int, ancestors_size: int, extents: int) -> int:
        return cast(int, lib.kvfs_header_pages(size, record_size, ancestors_size, extents))

    def spill_begin(self, inode: int) -> SealInfo:
        _check(lib.kvfs_spill_begin(self._plane, inode, self._info), f"spill of inode {inode}")
        return self._seal_info()

    async def spill_write(self, inode: int, runs: Sequence[Run]) -> None:
        array = _runs(runs)
        await self._run(
            lambda cookie: lib.kvfs_spill_write(self._plane, cookie, inode, array, len(runs)), f"spill of inode {inode}"
        )

    def spill_cancel(self, inode: int) -> None:
        _check(lib.kvfs_spill_cancel(self._plane, inode), f"spill of inode {inode}")

    def file_extents(self, inode: int) -> list[Extent]:
        """The extents of a file that is being written. PlaneError with ENOENT if it is not being written."""
        capacity = 256
        while True:
            out = ffi.new("struct kvfs_extent[]", capacity)
            count = _check(lib.kvfs_file_extents(self._plane, inode, out, capacity), f"extents of inode {inode}")
            if count <= capacity:
                return [
                    Extent(e.generation, SegmentIndex(e.segment), e.page, e.page_count, e.file_page)
                    for e in out[0:count]
                ]
            capacity = count

    def dirty_files(self) -> list[InodeNumber]:
        """The files that have something to seal, sealed ones that were changed among them."""
        capacity = 1024
        while True:
            out = ffi.new("uint64_t[]", capacity)
            count = lib.kvfs_dirty_files(self._plane, out, capacity)
            if count <= capacity:
                return [InodeNumber(number) for number in out[0:count]]
            capacity = 2 * count

    # ---- slabs ----

    def slab_pages(self, inode: int) -> int:
        """The pages that a slab has room for; 0 if the file is none yet, but may become one."""
        return _check(lib.kvfs_slab_pages(self._plane, inode), f"slab of inode {inode}")

    def file_size(self, inode: int) -> int:
        return _check(lib.kvfs_file_size(self._plane, inode), f"size of inode {inode}")

    def slab_wanted(self, inode: int, size: int) -> bool:
        """Whether the file, truncated to `size`, should be a slab."""
        return bool(lib.kvfs_slab_wanted(self._plane, inode, size))

    def slab_extend(self, inode: int, size: int, chosen: bool, runs: Sequence[Run]) -> None:
        array = _runs(runs)
        _check(
            lib.kvfs_slab_extend(self._plane, inode, size, int(chosen), array, len(runs)),
            f"slab of inode {inode}, {size} bytes",
        )

    async def slab_resize(self, inode: int, size: int) -> None:
        await self._run(
            lambda cookie: lib.kvfs_slab_resize(self._plane, cookie, inode, size),
            f"slab of inode {inode}: new size {size}",
        )

    async def slab_to_file(self, inode: int, writers_stay: bool = False) -> None:
        """Make a slab an ordinary file that is being written, its content where it lies."""
        await self._run(
            lambda cookie: lib.kvfs_slab_to_file(self._plane, cookie, inode, int(writers_stay)),
            f"slab of inode {inode}",
        )

    def slab_close(self, inode: int) -> None:
        _check(lib.kvfs_slab_close(self._plane, inode), f"slab of inode {inode}")

    def slab_answer(self, inode: int) -> None:
        """After SLAB_WANTED: writes that waited for it go on."""
        _check(lib.kvfs_slab_answer(self._plane, inode), f"slab of inode {inode}")

    def slab_fail(self, inode: int) -> None:
        """Every read and write of the slab ends with EIO from now on."""
        _check(lib.kvfs_slab_fail(self._plane, inode), f"slab of inode {inode}")

    def set_space(self, size: int, error: int) -> None:
        """Set the bytes that may be open or being written. A write that needs more ends with this errno."""
        lib.kvfs_set_space(self._plane, size, error)

    def set_share(self, size: int, part: float, exempt: int) -> None:
        """Set the bytes that one user may hold, and the part of the block table's names. Root and `exempt` may hold
        all."""
        lib.kvfs_set_share(self._plane, size, int(part * lib.KVFS_WHOLE), exempt)

    def may_make_directory(self, user: int) -> bool:
        """Whether the user has fewer names that eviction cannot take than one user may have."""
        return bool(lib.kvfs_names_ask(self._plane, user) == 0)

    def set_staging_share(self, size: int) -> None:
        """Set the bytes of memory of files being written that one user may have while others have less than that."""
        lib.kvfs_set_staging_share(self._plane, size)

    def user_hold(self, user: int, size: int) -> None:
        """Set the bytes that a user holds in addition to open blocks."""
        lib.kvfs_user_hold(self._plane, user, size)

    def users(self) -> list[UserNumbers]:
        """Each user that was ever seen."""
        out = ffi.new("struct kvfs_user[]", _USERS_MAX)
        count = lib.kvfs_users(self._plane, out, _USERS_MAX)
        return [
            UserNumbers(
                user.id,
                user.open_bytes,
                user.writing_bytes,
                user.evicted,
                user.names,
                user.staged_bytes,
                user.staging_refusals,
            )
            for user in (out[i] for i in range(count))
        ]

    def inode_user(self, inode: int) -> int:
        """The user that the inode's open content is charged to. PlaneError: ENOENT."""
        return _check(lib.kvfs_inode_user(self._plane, inode), f"inode {inode}")

    # ---- the store ----

    async def store_write(self, segment: int, page: int, data: bytes) -> None:
        assert data and not len(data) % PAGE_SIZE, f"segment {segment}: {len(data)} bytes at page {page}"
        await self._run(
            lambda cookie: lib.kvfs_store_write(self._plane, cookie, segment, page, data, len(data)),
            f"segment {segment}: write of {len(data)} bytes at page {page}",
        )

    async def store_read(self, segment: int, page: int, size: int) -> bytes:
        out = ffi.new("uint8_t[]", size)
        await self._run(
            lambda cookie: lib.kvfs_store_read(self._plane, cookie, segment, page, out, size),
            f"segment {segment}: read of {size} bytes at page {page}",
            out,
        )
        return bytes(ffi.buffer(out))

    async def store_read_pages(self, segments: Sequence[int], page: int) -> bytes:
        """This page of each segment, one after the other; 0xff bytes in place of a page that could not be read."""
        if not segments:
            return b""
        out = ffi.new("uint8_t[]", len(segments) * PAGE_SIZE)
        await self._run(
            lambda cookie: lib.kvfs_store_read_pages(self._plane, cookie, list(segments), len(segments), page, out),
            f"page {page} of {len(segments)} segments",
            out,
        )
        return bytes(ffi.buffer(out))

    async def store_scan(
        self, segment: int, generation: int, epoch_max: int, first_page: int, end_page: int, capacity: int = 4 << 20
    ) -> ScanResult:
        out = _scan_memory("uint8_t[]", capacity)
        result = ffi.new("struct kvfs_scan_result *")
        await self._run(
            lambda cookie: lib.kvfs_store_scan(
                self._plane, cookie, segment, generation, epoch_max, first_page, end_page, out, capacity, result
            ),
            f"segment {segment}: scan from page {first_page}",
            out,
            result,
        )
        assert result.size <= capacity, f"segment {segment}: {result.size} bytes of {capacity}"
        assert first_page <= result.next_page <= end_page, f"segment {segment}: page {result.next_page}"
        records = bytes(ffi.buffer(out, result.size)) if result.size else b""
        return ScanResult(records, result.next_page, result.entry_count, bool(result.full), result.impossible)

    async def store_verify(self, record: bytes, verify_data: bool) -> None:
        await self._run(
            lambda cookie: lib.kvfs_store_verify(self._plane, cookie, record, len(record), int(verify_data)), "verify"
        )

    async def store_copy(
        self, old_record: bytes, runs: Sequence[Run], header_pages: int, record: bytes, ancestors: bytes, capacity: int
    ) -> bytes:
        """Copy a block; returns its final record, which may have up to `capacity` bytes."""
        _assert_block(runs, header_pages, record, ancestors)
        out = ffi.new("uint8_t[]", capacity)
        array = _runs(runs)
        size = await self._run(
            lambda cookie: lib.kvfs_store_copy(
                self._plane, cookie, old_record, len(old_record), array, len(runs), header_pages, record, len(record),
                ancestors, len(ancestors), out, capacity,
            ),
            "copy of a block",
            out,
        )  # fmt: skip
        assert size <= capacity, f"{size} bytes of {capacity}"
        final = bytes(ffi.buffer(out, size))
        _assert_record(final)
        return final

    def segment_busy(self, segment: int) -> int:
        return cast(int, lib.kvfs_segment_busy(self._plane, segment))

    # ---- the block table ----

    def join(self, options: PodOptions) -> PodMap:
        """This node is one of a pod. Call it before anything is served. PodMapError."""
        self.pod = PodMap(self._plane, options)
        return self.pod

    def table_load(self, records: bytes) -> int:
        with self.names:
            return _check(lib.kvfs_blocks_load(self._plane, records, len(records)), "block table: load")

    def feed_begin(self, size: int) -> tuple[int, int, int, int]:
        """The feed of changes, of `size` bytes if it begins now: its descriptor, size, position, and last number."""
        out = ffi.new("struct kvfs_feed_place *")
        _check(lib.kvfs_feed_begin(self._plane, size, out), f"feed of {size} bytes")
        return out.fd, out.size, out.position, out.number

    def feed_stop(self) -> None:
        """End the feed: its last listener has gone."""
        lib.kvfs_feed_stop(self._plane)

    def table_set_complete(self, complete: bool) -> None:
        lib.kvfs_table_set_complete(self._table, int(complete))

    def table_fd(self) -> int:
        return _check(lib.kvfs_table_fd(self._table), "block table")

    def table_find_name(self, parent: int, name: bytes) -> int | None:
        """The inode number a name leads to in the table; None if it is not there or must be asked for."""
        out = ffi.new("struct kvfs_record *")
        if lib.kvfs_table_find_name(self._table, parent, name, len(name), out) < 0:
            return None
        return cast(int, out.inode)

    # ---- statistics, faults ----

    def statistics(self) -> dict[str, int]:
        out = ffi.new("struct kvfs_statistics *")
        lib.kvfs_statistics_get(self._plane, out)
        return {name: getattr(out, name) for name in _STATISTICS}

    def rings(self) -> str:
        """The way of device I/O: "io_uring", or "threads (...)" and why."""
        out = ffi.new("char[]", 512)
        lib.kvfs_rings_tell(self._plane, out, 512)
        return cast(str, ffi.string(out).decode())

    def found_ages(self) -> list[int]:
        """Blocks asked for and found, by the time since they were written: [0] within a second, [i] below 2**i s."""
        out = ffi.new("struct kvfs_statistics *")
        lib.kvfs_statistics_get(self._plane, out)
        return list(out.found_ages)

    def device_statistics(self, device: int) -> dict[str, int]:
        out = ffi.new("struct kvfs_device_statistics *")
        _check(lib.kvfs_device_statistics_get(self._plane, device, out), f"device {device}")
        return {name: getattr(out, name) for name in _DEVICE_STATISTICS}

    def device_message(self, device: int) -> tuple[bool, str]:
        """Whether an NVMe/TCP device can be used now, and the last news of its connection."""
        out = ffi.new("char[]", 512)
        usable = _check(lib.kvfs_device_message(self._plane, device, out, 512), f"device {device}")
        return bool(usable), ffi.string(out).decode(errors="replace")

    def device_latency(self, device: int) -> dict[str, list[int]]:
        """Histograms of single I/Os: bucket i counts those below 2**i ns."""
        out = ffi.new("struct kvfs_device_statistics *")
        _check(lib.kvfs_device_statistics_get(self._plane, device, out), f"device {device}")
        return {"read": list(out.read_buckets), "write": list(out.write_buckets)}

    def device_stop(self, device: int) -> None:
        """I/O of segments that touch the device fails at once from now on."""
        _check(lib.kvfs_device_stop(self._plane, device), f"device {device}")

    def device_use(self, device: int) -> None:
        """I/O goes to where the device's descriptor leads now. Blocks if the device does: for a thread."""
        result = lib.kvfs_device_use(self._plane, device)
        if result < 0:
            error = PlaneError(f"device {device}: {ffi.string(lib.kvfs_plane_error()).decode(errors='replace')}")
            error.errno = -result
            raise error

    def table_statistics(self) -> dict[str, int]:
        out = ffi.new("struct kvfs_table_statistics *")
        lib.kvfs_table_statistics(self._table, out)
        return {name: getattr(out, name) for name in _TABLE_STATISTICS}

    def latency(self, operation: str) -> dict[str, int | list[int]]:
        out = ffi.new("struct kvfs_latency *")
        _check(lib.kvfs_latency_get(self._plane, OPERATIONS.index(operation), out), f"latency of {operation}")
        return {"count": out.count, "total_ns": out.total_ns, "buckets": list(out.buckets)}

    def fault_set(self, device: int, fault: int, direction: int, every: int, value: int) -> None:
        _check(lib.kvfs_fault_set(self._plane, device, fault, direction, every, value), f"fault on device {device}")


def _runs(runs: Sequence[Run]) -> object:
    fields = ("generation", "segment", "page", "page_count")
    return ffi.new("struct kvfs_run[]", [{name: getattr(run, name) for name in fields} for run in runs])


# Megabytes that a job fills only in part need not be cleared first.
_scan_memory = ffi.new_allocator(should_clear_after_alloc=False)
