"""libkvfs (native/include/kvfs.h) as Python uses it: one handle, its calls, its errors, and its end.

Every call is inside `with library.call()`, so that close() never frees memory in use. It also stops a forked child
before the child touches a lock. Calls release the interpreter's lock while they run.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from array import array
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from uuid import UUID

from kvfs._native import ffi, lib
from kvfs.client.keys import KEY_MAX, Key, Keys, pack
from kvfs.client.memory import Region
from kvfs.errors import ClientError, DeadlineError, ForkError, client_error
from kvfs.lent import lent

READ_ONLY = 1
NO_VERIFY = 2
IF_ABSENT = 1
LIST_COUNT = 4096

# Memory that a device had not let go of when its client was closed: it stays the process's.
_owed: list[object] = []


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """struct kvfs_client_statistics: totals since the connection was made. Sizes are bytes, the rest are counts.

    rings: what device I/O goes by: "io_uring"; or "threads (...)", and why io_uring does not serve.
    user: whom the daemon takes this client for, as "7". Shares, and owners of blocks, go by that. In a user namespace:
    "100007 (7 in this process's user namespace)".
    """

    lookups: int
    hits: int
    misses: int
    gets: int
    get_bytes: int
    bounced_bytes: int
    retries: int
    timeouts: int
    checksum_errors: int
    puts: int
    put_bytes: int
    deletes: int
    prestaged: int
    prestage_used: int
    prestage_wasted: int
    reconnects: int
    busy: int
    rings: str
    user: str


_COUNTED = [name for name, _ in ffi.typeof("struct kvfs_client_statistics").fields]
assert list(ClientStatistics.__dataclass_fields__) == [*_COUNTED, "rings", "user"]


@dataclass(frozen=True, slots=True)
class ClientInformation:
    """The pool that a client is connected to. connected: the daemon answers (reads go on without).

    memory_alignment: bytes; reads into memory aligned to it need no copy.
    """

    pool: str
    pool_uuid: UUID
    mount_epoch: int
    connected: bool
    writable: bool
    device_count: int
    memory_alignment: int


class Library:
    """One struct kvfs_client. Any thread may call anything."""

    def __init__(
        self, path: bytes, space: bytes, *, flags: int, timeout_ms: int, depth: int, staging_size: int, paths: bool
    ) -> None:
        self.name = os.fsdecode(path)
        self.paths = paths  # its keys are paths
        self.pid = os.getpid()
        self.timeout_s = timeout_ms / 1000
        self._lock = threading.Lock()  # of _freed and _held
        self._calls: dict[int, threading.RLock] = {}  # of each thread that has made one
        self._closing = False
        self._freed = True
        self._held: list[Region] = []
        options = ffi.new(
            "struct kvfs_options *", [ffi.sizeof("struct kvfs_options"), flags, timeout_ms, depth, staging_size]
        )
        out = ffi.new("struct kvfs_client **")
        check(lib.kvfs_connect(path, space, options, out), self.name)
        self._handle: object = out[0]
        self._freed = False

    # ---- calls under way ----

    def call(self) -> AbstractContextManager[bool]:
        """`with library.call():` is a call under way. The handle is had inside of it.

        It is a lock of this thread, held for the call. The lock is C's, so no interrupt comes between it and the block
        that it guards. A count that is kept in Python would be wrong after a Ctrl-C.
        """
        if os.getpid() != self.pid:
            raise ForkError(
                f"{self.name}: this client was connected by process {self.pid}; after a fork, connect again"
            )
        self.check_open()
        lock = self._calls.setdefault(threading.get_ident(), threading.RLock())
        if self._held:
            with lock:
                self.check_open()
                self._prune()
        return lock

    def check_open(self) -> None:
        """ClientError if the client is closed. It does not close until a call that has asked this has ended."""
        if self._closing:
            raise ClientError(f"{self.name}: this client is closed")

    @property
    def handle(self) -> object:
        """struct kvfs_client *, inside a call."""
        self.check_open()
        return self._handle

    def _is_under_way(self, thread: int, call: threading.RLock, timeout_s: float) -> bool:
        if thread == threading.get_ident():
            # As where a signal's handler closes the client: a thread does not wait for itself.
            try:
                threading.Condition(call).notify()
            except RuntimeError:  # it does not hold it
                return False
            return True
        if not call.acquire(timeout=max(0.0, timeout_s)):
            return True
        call.release()
        return False

    def under_way(self, until: float = 0.0) -> int:
        """How many calls are under way, this thread's too. It waits for their ends until time.monotonic() is
        `until`."""
        calls = self._calls.copy().items()
        return sum(self._is_under_way(thread, call, until - time.monotonic()) for thread, call in calls)

    @property
    def usable(self) -> bool:
        """There is something to free, and it is this process's."""
        return not self._freed and os.getpid() == self.pid

    def stop(self, timeout_s: float) -> bool:
        """Refuse new calls, and wait for the ones under way. Returns whether there is something to free. Raises
        DeadlineError if they go on; it may be tried again."""
        if not self.usable:
            return False
        self._closing = True
        until = time.monotonic() + timeout_s
        if under_way := self.under_way(until):
            raise DeadlineError(f"{self.name}: calls under way {timeout_s:g} s after close(): {under_way}")
        return True

    def free(self) -> None:
        """After stop(). Waits for answers that devices owe, for as much time as a device may take."""
        with self._lock:
            if self._freed:
                return
            assert self._closing
            self._freed = True
        deadline = time.monotonic() + self.timeout_s
        self._prune()
        while self._held and time.monotonic() < deadline:
            time.sleep(0.005)
            self._prune()
        _owed.extend(self._held)
        self._held.clear()
        lib.kvfs_close(self._handle)

    def abandon(self) -> None:
        """Free without waiting, where no further call can come."""
        self._closing = self._freed = True
        if self._held:
            _owed.extend([*self._held, self._handle])
        else:
            lib.kvfs_close(self._handle)

    def check(self, result: int) -> int:
        """The result of a call of libkvfs, or its error raised: right behind the call, in the same thread."""
        return check(result, self.name)

    # ---- memory that devices still own ----

    def _hold(self, regions: Sequence[Region]) -> None:
        with self._lock:
            self._held.extend(regions)

    def hold_timeouts(self, results: Sequence[int], vectors: Sequence[Sequence[Region]]) -> None:
        """Keep the owners of blocks that were given up on, by the results of a read. Inside a call."""
        if -errno.ETIMEDOUT in results:
            late = [pieces for pieces, result in zip(vectors, results, strict=True) if result == -errno.ETIMEDOUT]
            self._hold([region for pieces in late for region in pieces])

    def hold_busy(self, regions: Sequence[Region]) -> None:
        """Keep the owners of buffers that a device may still write into. Inside a call."""
        busy = [region for region in regions if lib.kvfs_busy(self._handle, region.pointer, region.size) == 1]
        if busy:
            self._hold(busy)

    def _prune(self) -> None:
        """Release memory that devices have released."""
        with self._lock:
            self._held = [
                region for region in self._held if lib.kvfs_busy(self._handle, region.pointer, region.size) == 1
            ]

    @property
    def held(self) -> int:
        """Destinations that a device may still write into; their owners are kept."""
        if self._held:
            self.call()
        return len(self._held)

    # ---- libkvfs ----

    def keys(self, names: Sequence[bytes], *, gaps: bool = False) -> Keys:
        """Keys, or paths, of this client. gaps: b"" stands for none. Raises InvalidKeyError."""
        return Keys(names, paths=self.paths, gaps=gaps)

    def pack(self, keys: Iterable[Key]) -> Keys:
        return pack(keys, paths=self.paths)

    def exists(self, keys: Keys) -> bytearray:
        """A byte for each key, 1 or 0."""
        found = bytearray(keys.count)
        with self.call():
            check(lib.kvfs_exists(self.handle, keys.struct, lent(found)), self.name)
        return found

    def exists_prefix(self, keys: Keys) -> int:
        """How many keys, from the first on, exist."""
        with self.call():
            return check(lib.kvfs_exists_prefix(self.handle, keys.struct), self.name)

    def sizes(self, keys: Keys) -> list[int]:
        """Bytes of each block, or -ENOENT."""
        sizes = _zeros(keys.count)
        with self.call():
            check(lib.kvfs_sizes(self.handle, keys.struct, lent(sizes, "int64_t[]")), self.name)
        return sizes.tolist()

    def get(self, keys: Keys, vectors: Sequence[Sequence[Region]], offsets: Sequence[int] | None = None) -> list[int]:
        """Bytes read, or -errno, for each; with offsets, of a part of each block. Owners of memory that a device did
        not let go of are kept till it does."""
        assert len(vectors) == keys.count, (len(vectors), keys.count)
        results = _zeros(keys.count)
        out = lent(results, "int64_t[]")
        with self.call():
            if offsets is None and all(len(pieces) == 1 for pieces in vectors):
                result = lib.kvfs_get(self.handle, keys.struct, _buffers([pieces[0] for pieces in vectors]), out)
            else:
                call = lib.kvfs_get_vectors if offsets is None else lib.kvfs_get_ranges
                memory = Vectors(vectors, offsets)
                result = call(self.handle, keys.struct, memory.struct, out)
            check(result, self.name)
            values = results.tolist()
            self.hold_timeouts(values, vectors)
        return values

    def put(
        self, keys: Keys, blocks: Sequence[Sequence[Region]], *, if_absent: bool = False, parents: Keys | None = None
    ) -> tuple[list[int], Exception | None]:
        """Blocks, each the pieces of its memory. 0 or -errno for each, -EEXIST where one exists (if_absent); and what
        ended the whole call before its end, if something did."""
        assert len(blocks) == keys.count, (len(blocks), keys.count)
        results = array("q", [-errno.ECANCELED]) * keys.count
        options, memory = put_options(if_absent, parents), Vectors(blocks)
        with self.call():
            result = lib.kvfs_put_vectors(self.handle, keys.struct, memory.struct, options, lent(results, "int64_t[]"))
            error = _error(result, self.name) if result < 0 else None
        return results.tolist(), error

    def delete(self, keys: Keys) -> bytearray:
        deleted = bytearray(keys.count)
        with self.call():
            check(lib.kvfs_delete(self.handle, keys.struct, lent(deleted)), self.name)
        return deleted

    def list_page(self, after: bytes | None) -> list[bytes]:
        """Up to LIST_COUNT keys behind `after`, in byte order; none at the end."""
        if self.paths:
            raise client_error(errno.EOPNOTSUPP, f"{self.name}: paths are not listed; walk the mount instead")
        data = _list_memory("char[]", LIST_COUNT * KEY_MAX)
        sizes = ffi.new("uint32_t[]", LIST_COUNT)
        with self.call():
            count = check(
                lib.kvfs_list(
                    self.handle, ffi.NULL if after is None else lent(after), len(after or b""), data, len(data),
                    sizes, LIST_COUNT,
                ),
                self.name,
            )  # fmt: skip
        ends = 0
        keys = []
        assert count <= LIST_COUNT, count
        assert sum(sizes[0:count]) <= len(data)
        memory = bytes(ffi.buffer(data, sum(sizes[0:count])))
        for size in sizes[0:count]:
            keys.append(memory[ends : ends + size])
            ends += size
        return keys

    def lease(self, keys: Keys, milliseconds: int) -> tuple[int, bytearray]:
        """The lease's number, 0 if it keeps nothing; and a byte for each key, 1 or 0."""
        held, out = bytearray(keys.count), ffi.new("uint64_t *")
        with self.call():
            check(lib.kvfs_lease(self.handle, keys.struct, milliseconds, out, lent(held)), self.name)
        return out[0], held

    def release(self, lease: int) -> bool:
        with self.call():
            return bool(check(lib.kvfs_release(self.handle, lease), self.name))

    def claim(self, keys: Keys, milliseconds: int) -> int:
        with self.call():
            return check(lib.kvfs_claim(self.handle, keys.struct, milliseconds), self.name)

    def unclaim(self, keys: Keys) -> int:
        with self.call():
            return check(lib.kvfs_unclaim(self.handle, keys.struct), self.name)

    def touch(self, keys: Keys) -> int:
        with self.call():
            return check(lib.kvfs_touch(self.handle, keys.struct), self.name)

    def done(self, keys: Keys) -> int:
        with self.call():
            return check(lib.kvfs_done(self.handle, keys.struct), self.name)

    def fresh(self) -> None:
        with self.call():
            check(lib.kvfs_fresh(self.handle), self.name)

    def prestage(self, keys: Keys) -> int:
        with self.call():
            return check(lib.kvfs_prestage(self.handle, keys.struct), self.name)

    def statistics(self) -> ClientStatistics:
        out = ffi.new("struct kvfs_client_statistics *")
        with self.call():
            check(lib.kvfs_client_statistics_get(self.handle, out), self.name)
            rings, user = ffi.new("char[]", 512), ffi.new("char[]", 64)
            check(lib.kvfs_client_rings(self.handle, rings, 512), self.name)
            check(lib.kvfs_client_user(self.handle, user, 64), self.name)
        found = {name: getattr(out, name) for name in _COUNTED}
        found["rings"], found["user"] = ffi.string(rings).decode(), ffi.string(user).decode()
        return ClientStatistics(**found)

    def information(self) -> ClientInformation:
        out = ffi.new("struct kvfs_client_information *")
        with self.call():
            check(lib.kvfs_client_information_get(self.handle, out), self.name)
        return ClientInformation(
            pool=os.fsdecode(ffi.string(out.pool)),
            pool_uuid=UUID(bytes=bytes(ffi.buffer(out.pool_uuid))),
            mount_epoch=out.mount_epoch,
            connected=bool(out.connected),
            writable=bool(out.writable),
            device_count=out.device_count,
            memory_alignment=out.memory_alignment,
        )


_list_memory = ffi.new_allocator(should_clear_after_alloc=False)


def _zeros(count: int) -> array[int]:
    return array("q", bytes(8 * count))


def put_options(if_absent: bool, parents: Keys | None) -> object:
    """struct kvfs_put_options *; parents must outlive it."""
    above = ffi.NULL if parents is None else parents.struct
    return ffi.new(
        "struct kvfs_put_options *", [ffi.sizeof("struct kvfs_put_options"), IF_ABSENT if if_absent else 0, above]
    )


class Vectors:
    """A struct kvfs_vector for each block: its pieces, and with offsets where in the block its bytes begin. Valid while
    this lives."""

    __slots__ = ("_pieces", "struct")

    def __init__(self, vectors: Sequence[Sequence[Region]], offsets: Sequence[int] | None = None) -> None:
        self._pieces = _buffers([region for pieces in vectors for region in pieces])
        # One after the other: `first + i` is the address of piece i.
        first, at, parts = ffi.cast("struct kvfs_buffer *", self._pieces), 0, []
        for pieces, offset in zip(vectors, offsets or [0] * len(vectors), strict=True):
            parts.append((first + at, len(pieces), 0, offset))
            at += len(pieces)
        self.struct: object = ffi.new("struct kvfs_vector[]", parts)


def _buffers(regions: Sequence[Region]) -> object:
    return ffi.new("struct kvfs_buffer[]", [(region.pointer, region.size) for region in regions])


def _error(result: int, name: str) -> Exception:
    text = ffi.string(lib.kvfs_error()).decode(errors="replace")
    return client_error(-result, text or f"{name}: {os.strerror(-result)}")


def check(result: int, name: str) -> int:
    """The result of a call of libkvfs, unless that is an error: then it is raised."""
    if result < 0:
        raise _error(result, name)
    return result
