"""kvfs.connect(): blocks of a mounted pool by key, from its devices into the caller's memory and back.

A block is an ordinary file of the mount, DIRECTORY/NAMESPACE/<first 2 hex digits>/<key in hex>; kvfs.h has the names of
keys of more than 127 bytes. With `paths` it is DIRECTORY/NAMESPACE/<path>. Reads ask no daemon.
How memory is described is memory.py's, what the calls cost is libkvfs's (native/include/kvfs.h), GPU memory is
gpu.py's.
"""

from __future__ import annotations

import errno
import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, cast

from kvfs.client import batches
from kvfs.client import memory as memory_
from kvfs.client.batches import Results, host_destinations, or_none, pairs, put_failure, ranges, small_buffer
from kvfs.client.events import Events
from kvfs.client.keys import Key, Keys, shown
from kvfs.client.leases import Lease, milliseconds_of
from kvfs.client.library import NO_VERIFY, READ_ONLY, ClientInformation, ClientStatistics, Library
from kvfs.client.memory import Memory, Pieces, Region
from kvfs.errors import (
    ClientError,
    InvalidBufferError,
    InvalidKeyError,
    NoSpaceError,
    PutError,
    PutNoSpaceError,
    SmallBufferError,
)

if TYPE_CHECKING:
    from kvfs.client.asynchronous import AsyncioClient, TrioClient
    from kvfs.client.gpu import GpuReader
    from kvfs.client.queue import Queue

GpuMode = Literal["auto", "staged", "gds", "host"]
# A call ends by its own deadlines; close() waits this long for calls that run.
CLOSE_TIMEOUT_S = 60.0
_NAMED_AT_MOST = 3
# Of each block 0 or -errno; what ended the whole call before its end.
Stored = tuple[list[int], Exception | None]
# Results of a put that are no failures.
_STORED = frozenset((0, -errno.EEXIST))
# A block that grows each time it is looked at is being replaced all the time.
_GET_TRIES = 8


def connect(
    path: str | os.PathLike[str],
    namespace: str = "",
    *,
    read_only: bool = False,
    timeout_s: float = 2.0,
    depth: int = 8,
    staging_size: int = 256 << 20,
    gpu: GpuMode | None = "auto",
    verify: bool = True,
    paths: bool = False,
) -> Client:
    """Connect to the pool that is mounted at path or above it, or whose own directory path is.

    path: a mount point of kvfs, a directory below one, or the directory of the pool itself. The pool may be mounted or
    only exported; its directory then stands for the mount point. namespace: a relative path below it ("llama-3-8b",
    "team/llama"); "": the keys lie in path itself. It need not exist: the first put makes it. read_only: ask for no
    right to write. timeout_s: what a device or the daemon may take for an answer; a block whose device takes longer is
    a miss. Between two daemons of a mount that is held (kvfs hold) the next one may take as long to come. depth: blocks
    a call has in flight, 1 to 64. staging_size: bytes of memory for prestage(), at most. gpu: how GPU memory is filled.
    "auto" takes the best that works here, a mode that is named and does not work is an error (MissingFeatureError),
    None never touches CUDA. verify=False is for benchmarks only: wrong bytes are then possible. paths: keys are the
    paths of files below the namespace ("a/b/name"), for files that others write through the mount under their own
    names.

    Raises NotMountedError (no daemon answers), VersionError, DeadlineError, ValueError (an option), or ClientError with
    the errno of libkvfs. EINVAL or ENOTDIR: path is not a directory of a kvfs mount. ENOENT. EACCES: the daemon refuses
    this user.
    """
    encoded, space = os.fsencode(path), os.fsencode(namespace)
    timeout_ms = round(timeout_s * 1000)
    if b"\0" in encoded or b"\0" in space:
        raise ValueError(f"path {path!r}, namespace {namespace!r}: a zero byte")
    if not 1 <= timeout_ms <= 3_600_000:
        raise ValueError(f"timeout_s {timeout_s:g}: 0.001 to 3600 are possible")
    if not 1 <= depth <= 64:
        raise ValueError(f"depth {depth}: 1 to 64 are possible")
    if not 1 <= staging_size < 1 << 42:
        raise ValueError(f"staging_size {staging_size}: 1 byte to 4 TiB are possible")
    if gpu not in (None, "auto", "staged", "gds", "host"):
        raise ValueError(f"gpu {gpu!r}: auto, staged, gds, host or None are possible")
    flags = (READ_ONLY if read_only else 0) | (0 if verify else NO_VERIFY)
    library = Library(
        encoded, space, flags=flags, timeout_ms=timeout_ms, depth=depth, staging_size=staging_size, paths=paths
    )
    client = Client(library, namespace, gpu)
    if gpu in ("staged", "gds"):
        try:
            client.gpu_reader()
        except BaseException:
            client.close()
            raise
    return client


def events(path: str | os.PathLike[str], namespace: str = "", *, keys: bool = True, timeout_s: float = 2.0) -> Events:
    """Subscribe to the changes of a namespace of the pool that is mounted at path or above it, or whose directory path
    is. All that changes after this call is reported, in order.

    keys: only blocks whose names a put could have made; False: every file that becomes a block. timeout_s: the deadline
    of the daemon's answers. Raises as kvfs.connect().
    """
    client = connect(path, namespace, read_only=True, timeout_s=timeout_s, gpu=None)
    try:
        return Events(client.library, keys=keys, ended=client.close)
    except BaseException:
        client.close()
        raise


class Client:
    """A connection to a mounted pool, made by kvfs.connect(). Any thread may call anything; after os.fork() a child
    must connect again.

    Reads need no daemon: if it dies they go on, unchanged blocks for unchanged keys, and the client connects again by
    itself when it is back. After an unmount every call raises NotMountedError until the pool is mounted again.
    Keys are bytes, or str (their UTF-8), of 1 to 255 bytes; or paths of at most 1023 bytes (connect's `paths`).
    Every call takes thousands at once; an empty batch is an empty result. Raised by all: InvalidKeyError,
    NotMountedError, PoolChangedError, ForkError, ClientError.
    """

    def __init__(self, library: Library, namespace: str, gpu: GpuMode | None) -> None:
        self.library = library
        self.namespace = namespace
        self._gpu = gpu
        self._gpu_lock = threading.Lock()
        self._gpu_reader: GpuReader | None = None
        self._queues: weakref.WeakSet[Queue] = weakref.WeakSet()

    # ---- life ----

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait for calls under way in other threads, then disconnect. No call afterwards; a second close() does
        nothing, as does one in a forked child.

        Its queues are closed first. Raises DeadlineError if they still run after timeout_s; then close again later.
        """
        for queue in list(self._queues):
            queue.close()
        if not self.library.stop(timeout_s):
            return
        with self._gpu_lock:
            reader, self._gpu_reader = self._gpu_reader, None
            if reader is not None:
                reader.close()
            self.library.free()

    def __del__(self) -> None:
        # A client whose connection failed has no library, and at the interpreter's end modules may be gone.
        library = getattr(self, "library", None)
        if library is not None and library.usable:
            if self._gpu_reader is not None:
                self._gpu_reader.close()
            library.abandon()
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self)

    def __repr__(self) -> str:
        return f"<kvfs.Client of {self.library.name!r}, namespace {self.namespace!r}>"

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError(f"{self!r} belongs to its process and cannot be pickled or copied: connect where it is needed")

    # ---- blocks ----

    def put(
        self,
        items: Iterable[tuple[Key, Memory | Sequence[Memory]]],
        *,
        if_absent: bool = False,
        parents: Sequence[Key | None] | None = None,
        stream: int | None = None,
    ) -> list[bool]:
        """Store blocks: pairs of key and memory (C-contiguous, taken as bytes; read-only is fine). A list or tuple of
        memories is one block in pieces. No copy is made of host memory where every piece is aligned to
        information().memory_alignment, and every one but the last is whole pages of 4096 bytes. GPU memory is copied
        into pinned memory first, while what was copied before is written.

        An existing block is replaced; readers see the old one or the new one, whole. Two writers of one key both
        succeed and one stays. Space is reserved, and blocks are entered, in batches of up to 1024 or 256 MiB.
        if_absent: an existing block is not written, and counts as used; but one that this client could not read is
        stored again. parents: for each block the key of the block before it in its chain, None for a first one. stream:
        a raw CUDA stream, for blocks in GPU memory. Earlier work on it is done before they are read; on the legacy
        default stream, if it is None or 0. All memory has been read when this returns.

        Returns for each whether this call stored it; False: it existed (if_absent). Raises PutError if any was not
        stored (its `failed`: key -> error; all others were, or existed). The PutError is also a NoSpaceError if only
        room was missing. InvalidKeyError: a key twice; InvalidBufferError; ValueError: not as many parents as blocks;
        NotMountedError: no daemon.
        """
        names, memories = pairs(items)
        above = None if parents is None else batches.parents(parents, len(names))
        if not names:
            return []
        keys = self.library.keys(names)
        if len(set(names)) != len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise InvalidKeyError(f"key {shown(twice)}: twice in one put; which of the two is to be stored?")
        blocks = list(map(memory_.sources, names, memories))
        results, error = self._put(keys, names, blocks, above, if_absent, stream)
        failed = {name: result for name, result in zip(names, results, strict=True) if result not in _STORED}
        if error is not None:
            if len(failed) < len(names):
                error.add_note(f"{len(names) - len(failed)} of {len(names)} blocks were stored before")
            raise error
        if failed:
            sizes = {name: memory_.size_of(block) for name, block in zip(names, blocks, strict=True)}
            raise _put_error(failed, sizes, len(names))
        return [result == 0 for result in results]

    def fresh(self) -> None:
        """In a pod: return once everything is found here that the other nodes had stored or removed before this call.

        They are asked for held-back news; names that engines are about to rename aside. Calls with `fresh=True` do this
        first. DeadlineError names a node that lives and gave no answer in 100 ms; ClientError: no engine can be
        reached. Where the pool is no pod there is nothing to wait for.
        """
        self.library.fresh()

    def exists(self, keys: Iterable[Key], *, fresh: bool = False) -> list[bool]:
        """Whether each key has a block. Reads nothing from a device and asks no daemon, unless it is to be fresh()."""
        if fresh:
            self.fresh()
        packed = self.library.pack(keys)
        return list(map(bool, self.library.exists(packed))) if packed.count else []

    def exists_prefix(self, keys: Iterable[Key], *, fresh: bool = False) -> int:
        """How many keys, from the first on, have a block: the length of the existing prefix. As cheap as exists(); keys
        behind the first gap are not looked up. `fresh`: fresh() first."""
        if fresh:
            self.fresh()
        packed = self.library.pack(keys)
        return self.library.exists_prefix(packed) if packed.count else 0

    def sizes(self, keys: Iterable[Key], *, fresh: bool = False) -> list[int | None]:
        """Bytes of each block; None: there is none. `fresh`: fresh() first."""
        if fresh:
            self.fresh()
        packed = self.library.pack(keys)
        return [or_none(size) for size in self.library.sizes(packed)] if packed.count else []

    def get_into(self, items: Iterable[tuple[Key, Pieces]], *, stream: int | None = None) -> Results:
        """Read whole blocks into the caller's memory: pairs of key and destination. Returns bytes read for each; None
        for a miss: no such block, or its device gave no answer in time, or its bytes did not verify.

        A destination is writable, C-contiguous, and at least as large as the block. A list or tuple of memories takes
        the block's bytes in its order. Bytes behind the block stay as they are; after a miss its content is undefined.
        Host memory aligned to information().memory_alignment (buffer() is) is read into without a copy, in whole pages
        of 4096 bytes. Of a miss by timeout the owner is kept, and the memory refused (BusyBufferError), until the
        device has let go of it. stream: a raw CUDA stream, for destinations in GPU memory: what the stream does
        afterwards finds their bytes; destinations must stay until it has. With None or 0 the bytes have arrived when
        this returns.

        Raises SmallBufferError (the rest was read: its `results`); InvalidBufferError: read-only, not contiguous,
        overlapping, a stream with host memory. DeadlineError: the daemon was asked for the meaning of a name, and gave
        no answer.
        """
        names, memories = pairs(items)
        if not names:
            return []
        keys = self.library.keys(names)
        vectors = list(map(memory_.destinations, names, memories))
        on_gpu = _on_gpu(names, vectors, stream)
        if not on_gpu:
            return self._get_host(keys, names, vectors)
        for i in on_gpu:
            if len(vectors[i]) > 1:
                raise InvalidBufferError(
                    f"key {shown(names[i])}: {len(vectors[i])} pieces, some in GPU memory: there one is expected"
                )
        return self._get_mixed(names, vectors, on_gpu, stream or 0)

    def get_ranges(self, items: Iterable[tuple[Key, int, Pieces]]) -> Results:
        """Read parts of blocks: key, offset in the block in bytes, and destination (get_into's; host memory alone). A
        part is as large as its destination, or ends with its block. Returns bytes read for each, 0 at or behind the
        end, None for a miss.

        Only the leaves (4096 bytes) that hold these bytes are read and proved, and what of the block's header proves
        them. A key may come any number of times. Raises what get_into raises, but never SmallBufferError.
        """
        names, offsets, memories = ranges(items)
        if not names:
            return []
        vectors = host_destinations(names, memories)
        return [or_none(value) for value in self.library.get(self.library.keys(names), vectors, offsets)]

    def get(self, key: Key, *, fresh: bool = False) -> memoryview | None:
        """A block in its own page-aligned memory; None for a miss. `fresh`: fresh() first."""
        if fresh:
            self.fresh()
        packed = self.library.pack([key])
        for _ in range(_GET_TRIES):
            size = self.library.sizes(packed)[0]
            if size < 0:
                return None
            destination = memory_.allocate(size)
            read = self.library.get(packed, [memory_.destinations(packed.data, destination)])[0]
            if read != -errno.ERANGE:
                return destination[:read] if read >= 0 else None
        raise ClientError(f"key {shown(packed.data)}: replaced by a larger block {_GET_TRIES} times while it was read")

    def delete(self, keys: Iterable[Key]) -> list[bool]:
        """Remove blocks. Returns whether there was one, for each key (of a key given twice, the second is False)."""
        packed = self.library.pack(keys)
        return list(map(bool, self.library.delete(packed))) if packed.count else []

    def lease(self, keys: Iterable[Key], seconds: float) -> Lease:
        """Keep blocks from eviction until the lease's release(), for `seconds` (an hour at most; more is cut), or until
        this client is gone: whichever ends first. `held` of the result tells which blocks are kept: the existing ones,
        as far as leases may hold them. All together hold an eighth of the pool at most, one client's a sixteenth.

        A lease keeps no block that others delete or replace, whose bytes are bad, or whose device goes away. So a read
        may still miss. A block of two leases is kept until both have ended. The daemon is asked: DeadlineError,
        NotMountedError.
        """
        milliseconds, packed = milliseconds_of(seconds), self.library.pack(keys)
        number, held = self.library.lease(packed, milliseconds) if packed.count else (0, bytearray())
        return Lease(self.library, number, list(map(bool, held)))

    def claim(self, keys: Iterable[Key], seconds: float) -> int:
        """Like lease(), for a look-up before a load, without a wait: the daemon gets the existing keys, and its answer
        is not read. Blocks that it refuses are not kept; none is while it is gone or late. Returns how many it was
        sent. unclaim() ends it, or time."""
        milliseconds, packed = milliseconds_of(seconds), self.library.pack(keys)
        return self.library.claim(packed, milliseconds) if packed.count else 0

    def unclaim(self, keys: Iterable[Key]) -> int:
        """A load of these is over: each is given back to its oldest claim, which ends with its last key. Does not wait.
        Returns how many were claimed."""
        packed = self.library.pack(keys)
        return self.library.unclaim(packed) if packed.count else 0

    def touch(self, keys: Iterable[Key]) -> int:
        """Let each block count as read now, for eviction; it is no hit of statistics. Returns how many exist. A hint: a
        daemon that is busy or gone does not hear of it."""
        packed = self.library.pack(keys)
        return self.library.touch(packed) if packed.count else 0

    def done(self, keys: Iterable[Key]) -> int:
        """Hint that these blocks are no longer needed: their session has ended. They go before others, until they are
        used again. Returns how many exist. Of blocks that lie on other nodes of a pod nothing is said."""
        packed = self.library.pack(keys)
        return self.library.done(packed) if packed.count else 0

    def list(self, after: Key | None = None) -> Iterator[bytes]:
        """All keys of the namespace in byte order, from the first behind `after`. Asks the daemon page by page: what is
        stored or removed meanwhile may be seen or not, all else is, once."""
        last = None if after is None else self.library.pack([after]).data
        while page := self.library.list_page(last):
            yield from page
            last = page[-1]

    def prestage(self, keys: Iterable[Key]) -> int:
        """Start reading blocks that will be needed soon; the next get_into of each takes it from memory. Returns how
        many were started: missing and present ones do not count. When staging_size is full the oldest go."""
        packed = self.library.pack(keys)
        return self.library.prestage(packed) if packed.count else 0

    def queue(self, *, depth: int = 64) -> Queue:
        """A queue of batches that run in parallel to this thread, with up to depth blocks (1 to 256) being read at a
        time."""
        from kvfs.client.queue import Queue

        if not 1 <= depth <= 256:
            raise ValueError(f"depth {depth}: 1 to 256 are possible")
        queue = Queue(self.library, depth, self)
        self._queues.add(queue)
        return queue

    @staticmethod
    def buffer(size: int) -> memoryview:
        """size bytes of zeroed, page-aligned, writable memory: reads into it, and puts from it, need no copy."""
        if size < 0:
            raise ValueError(f"a buffer of {size} bytes")
        return memory_.allocate(size)

    def events(self, *, keys: bool = True) -> Events:
        """Subscribe to the changes of the namespace: all that is stored and removed after this call, by anybody,
        evictions included. keys: only what a put could have stored. Close it before the client."""
        return Events(self.library, keys=keys)

    # ---- what is known ----

    def statistics(self) -> ClientStatistics:
        """The work of this client since it connected: calls, blocks, bytes, errors."""
        return self.library.statistics()

    def information(self) -> ClientInformation:
        """The other side: the pool, its state, the limits of this connection."""
        return self.library.information()

    @property
    def mode(self) -> str:
        """How GPU memory is filled: "gds", "staged" or "host". Looks at CUDA, once, if connect's `gpu` allows it."""
        return "host" if self._gpu is None else self.gpu_reader().mode

    @property
    def mode_reason(self) -> str:
        """Why it is that mode."""
        return "connected with gpu=None" if self._gpu is None else self.gpu_reader().reason

    # ---- asynchronous forms ----

    def trio(self) -> TrioClient:
        """The same calls as coroutines for trio."""
        from kvfs.client.asynchronous import TrioClient

        return TrioClient(self)

    def asyncio(self) -> AsyncioClient:
        """The same calls as coroutines for asyncio."""
        from kvfs.client.asynchronous import AsyncioClient

        return AsyncioClient(self)

    # ---- inside kvfs.client ----

    def gpu_reader(self) -> GpuReader:
        """The reader that fills GPU memory; made at its first use. Raises MissingFeatureError if the mode asked for is
        not available."""
        from kvfs.client.gpu import open_reader

        if self._gpu is None:
            raise ClientError(f"{self!r}: a destination is in GPU memory, but it was connected with gpu=None")
        # The library first: it raises if closed, or in a forked child, where this lock may be held for ever.
        with self.library.call(), self._gpu_lock:
            self.library.check_open()
            if self._gpu_reader is None:
                self._gpu_reader = open_reader(self.library, self._gpu)
            return self._gpu_reader

    def _put(
        self,
        keys: Keys,
        names: Sequence[bytes],
        blocks: Sequence[Sequence[Region]],
        parents: Sequence[bytes] | None,
        if_absent: bool,
        stream: int | None,
    ) -> Stored:
        """Library.put()'s answer for blocks wherever they are; those on the host first."""
        above = None if parents is None else self.library.keys(parents, gaps=True)
        chosen = set(_on_gpu(names, blocks, stream))
        if not chosen:
            return self.library.put(keys, blocks, if_absent=if_absent, parents=above)
        for i in chosen:
            if any(region.device is None for region in blocks[i]):
                raise InvalidBufferError(f"key {shown(names[i])}: some of its pieces are in GPU memory, some are not")
        reader = self.gpu_reader()  # if there is none, nothing is stored
        results = [-errno.ECANCELED] * len(names)
        failure: Exception | None = None
        for on_gpu in (False, True):
            places = [i for i in range(len(names)) if (i in chosen) is on_gpu]
            if not places or failure is not None:
                continue
            some, part = self.library.keys([names[i] for i in places]), [blocks[i] for i in places]
            above = None if parents is None else self.library.keys([parents[i] for i in places], gaps=True)
            if on_gpu:
                with self.library.call():
                    self.library.check_open()
                    found, failure = reader.put(some, part, stream or 0, if_absent=if_absent, parents=above)
            else:
                found, failure = self.library.put(some, part, if_absent=if_absent, parents=above)
            for i, result in zip(places, found, strict=True):
                results[i] = result
        return results, failure

    def _get_mixed(
        self, names: Sequence[bytes], vectors: Sequence[Sequence[Region]], on_gpu: Sequence[int], stream: int
    ) -> Results:
        """Destinations of which some are in GPU memory."""
        results: Results = [None] * len(names)
        self.gpu_reader()  # if there is none, nothing is read
        chosen = set(on_gpu)
        on_host = [i for i in range(len(names)) if i not in chosen]
        small: SmallBufferError | None = None
        parts: list[tuple[Sequence[int], Callable[[], Results]]] = []
        if on_host:
            host_names, host_vectors = [names[i] for i in on_host], [vectors[i] for i in on_host]
            parts.append((on_host, lambda: self._get_host(self.library.keys(host_names), host_names, host_vectors)))
        gpu_regions = [vectors[i][0] for i in on_gpu]
        parts.append((on_gpu, lambda: self._get_gpu([names[i] for i in on_gpu], gpu_regions, stream)))
        for places, read in parts:
            try:
                part: Sequence[int | None] = read()
            except SmallBufferError as error:
                part, small = error.results, small or error
            for i, result in zip(places, part, strict=True):
                results[i] = result
        if small is not None:
            raise SmallBufferError(str(small), results)
        return results

    def _get_gpu(self, names: Sequence[bytes], regions: Sequence[Region], stream: int) -> Results:
        reader = self.gpu_reader()
        destinations = [(region.address, region.size, cast(int, region.device)) for region in regions]
        with self.library.call():
            self.library.check_open()
            try:
                return reader.get_into(self.library.keys(names), destinations, stream)
            finally:
                if reader.may_owe:
                    self.library.hold_busy(regions)

    def _get_host(self, keys: Keys, names: Sequence[bytes], vectors: Sequence[Sequence[Region]]) -> Results:
        values = self.library.get(keys, vectors)
        results = [or_none(value) for value in values]
        if -errno.ERANGE in values:
            raise small_buffer(self.library, names, vectors, values)
        return results


def _on_gpu(names: Sequence[bytes], blocks: Sequence[Sequence[Region]], stream: int | None) -> list[int]:
    """Which blocks have memory on a GPU; a stream is for those alone."""
    if stream is not None and type(stream) is not int:
        raise TypeError(f"stream: a raw CUDA stream (an int) is expected, not {type(stream).__name__}")
    found = [i for i, pieces in enumerate(blocks) if any(piece.device is not None for piece in pieces)]
    if stream and len(found) < len(blocks):
        name = next(name for i, name in enumerate(names) if i not in set(found))
        raise InvalidBufferError(f"key {shown(name)}: its memory is the host's, so stream {stream:#x} must be None")
    return found


def _put_error(failed: dict[bytes, int], sizes: dict[bytes, int], count: int) -> PutError:
    errors = {name: put_failure(name, sizes[name], result) for name, result in failed.items()}
    texts = [str(error) for error in list(errors.values())[:_NAMED_AT_MOST]]
    if len(errors) > _NAMED_AT_MOST:
        texts.append(f"and {len(errors) - _NAMED_AT_MOST} more")
    full = all(isinstance(error, NoSpaceError) for error in errors.values())
    kind = PutNoSpaceError if full else PutError
    return kind(f"{len(errors)} of {count} blocks were not stored: {'; '.join(texts)}", errors)
