"""Common to all connectors: a connection that an engine's loop can rest on, its options, its namespace, its counters.

An engine asks for blocks in the loop that also feeds its GPU. So nothing here raises for a kvfs that is away: not
mounted, its daemon gone, its version another. Reads are then misses and stores are dropped. One warning tells of each
change of state, and a separate thread connects again. A daemon that goes is noticed without a call (watch.py).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from hashlib import sha256
from typing import TypeVar, cast

from kvfs._native import ffi, lib
from kvfs.client import memory as memory_
from kvfs.client.client import Client, GpuMode, connect
from kvfs.client.keys import Key
from kvfs.client.leases import Lease
from kvfs.client.memory import Memory, Pieces, Region
from kvfs.client.queue import Completion, Queue
from kvfs.connectors import watch
from kvfs.descriptors import above, epoll
from kvfs.errors import (
    DeadlineError,
    ForkError,
    KvfsError,
    NotMountedError,
    PoolChangedError,
    PutError,
    SmallBufferError,
    VersionError,
)

T = TypeVar("T")

# The first attempt to connect again comes after the first of these, each later one after twice the time before.
RETRY_MIN_S, RETRY_MAX_S = 0.25, 2.0
# Memory that a device still writes into is waited for so long: the kernel gives a device up after 30 s by default.
BUSY_TIMEOUT_S = 60.0
_BUSY_POLL_S = 0.005
_PROBE = b"\0"
# Errors of this process's limits.
_NOT_TO_BE_HAD = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_COMPONENT_MAX, _NAMESPACE_MAX = 200, 1023
# The component of a namespace that begins so is a revision of weights.
REVISION_MARK = "@"


# ---- options ----


@dataclass(frozen=True, slots=True)
class Options:
    """A user's options, the same for every engine. mount: an absolute path, as of kvfs.connect(). namespace: a relative
    path below it, before the engine's own identity. timeout_s: what a device or the daemon may take for an answer.
    depth: blocks in flight. revision: of the model's weights, where its name alone does not tell; "" is none."""

    mount: str
    namespace: str = ""
    timeout_s: float = 2.0
    depth: int = 64
    revision: str = ""

    def space(self, *identity: str) -> str:
        """The whole namespace: NAMESPACE/IDENTITY..., or NAMESPACE/@REVISION/IDENTITY.... Raises ValueError."""
        return namespace_of(self.namespace, *([REVISION_MARK + self.revision] if self.revision else []), *identity)


def options_of(engine: str, given: Mapping[str, object], *, known: Iterable[str] = ()) -> Options:
    """The options of a configuration that engine was given; those in `known` are the engine's own.

    Raises ValueError that names the option and what is possible. An unknown option causes a warning: engines pass new
    ones with each version.
    """
    mount, namespace = given.get("mount"), given.get("namespace", "")
    timeout_s, depth = given.get("timeout_s", 2.0), given.get("depth", 64)
    revision = given.get("revision")
    if not isinstance(mount, str) or not os.path.isabs(mount) or "\0" in mount:
        raise ValueError(f"kvfs for {engine}: mount {mount!r}: an absolute path of a kvfs mount is needed")
    if not isinstance(namespace, str):
        raise ValueError(f"kvfs for {engine}: namespace {namespace!r}: a relative path is needed")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0.001 <= timeout_s <= 3600:
        raise ValueError(f"kvfs for {engine}: timeout_s {timeout_s!r}: 0.001 to 3600 are possible")
    if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= 64:
        raise ValueError(f"kvfs for {engine}: depth {depth!r}: 1 to 64 are possible")
    if revision is None or (isinstance(revision, int) and not isinstance(revision, bool)):
        revision = "" if revision is None else str(revision)
    if not isinstance(revision, str):
        raise ValueError(f"kvfs for {engine}: revision {revision!r}: a text is needed, as of a tag or a commit")
    options = Options(mount, namespace, float(timeout_s), depth, revision)
    try:
        options.space()
    except ValueError as error:
        raise ValueError(f"kvfs for {engine}: {error}") from None
    unknown = sorted(set(given) - {field.name for field in fields(Options)} - set(known))
    if unknown:
        _logger.warning("kvfs for %s: options without effect: %s", engine, ", ".join(unknown))
    return options


def namespace_of(namespace: str, *identity: str) -> str:
    """The user's namespace, and below it a component for each part of the engine's identity (model, layout, rank).

    A part may hold anything: `/` and bytes that no name has become `_`. A part that was changed, or is too long, ends
    with a digest of the whole, so two identities never share a directory. Raises ValueError.
    """
    parts = [part for part in namespace.split("/") if part]
    for part in parts:
        if part in (".", "..") or "\0" in part or len(os.fsencode(part)) > 255:
            raise ValueError(f"namespace {namespace!r}: {part[:40]!r} is no name of a directory")
    parts += map(_component, identity)
    whole = "/".join(parts)
    if len(os.fsencode(whole)) > _NAMESPACE_MAX:
        raise ValueError(f"namespace {namespace!r}: {len(os.fsencode(whole))} bytes, {_NAMESPACE_MAX} are possible")
    return whole


def _component(part: str) -> str:
    safe = "".join(c if c.isprintable() and c != "/" else "_" for c in part).encode(errors="replace").decode()
    if safe == part and part not in ("", ".", "..") and len(part.encode()) <= _COMPONENT_MAX:
        return part
    digest = sha256(part.encode(errors="surrogatepass")).hexdigest()[:16]
    return f"{safe.encode()[: _COMPONENT_MAX - 17].decode(errors='ignore')}_{digest}"


# ---- what is counted ----


@dataclass(slots=True)
class Counters:
    """Totals since the connector was made: keys, but for sizes (bytes) and times (seconds).

    present: stores of existing blocks. dropped: stores while kvfs was away. lost: changes to the state "away".
    """

    lookups: int = 0
    hits: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    failed_loads: int = 0
    stored: int = 0
    stored_bytes: int = 0
    present: int = 0
    failed_stores: int = 0
    dropped: int = 0
    lost: int = 0

    def since(self, before: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))

    def copy(self) -> Counters:
        return replace(self)


# ---- the connection ----


class State(Enum):
    UP = "up"
    READING = "reading"  # the daemon is gone: blocks are read from the table as it was, none is stored
    AWAY = "away"


@dataclass(slots=True)
class Done:
    """A batch that is over. results of a get: bytes read for each key, None for a miss. Of a put: is the block there
    now. Of exists and delete: was it there."""

    ticket: int
    results: list[int | None] | list[bool]
    seconds: float


@dataclass(slots=True)
class _Link:
    """One client and its queue. A link whose pool is gone lives until its batches are over."""

    client: Client
    queue: Queue
    pending: int = 0


@dataclass(slots=True)
class _Batch:
    ticket: int
    kind: str
    keys: Sequence[Key]
    sizes: Sequence[int]
    regions: Sequence[Region]
    link: _Link
    begun: float


class Connection:
    """kvfs as an engine's loop sees it: any thread may call anything, and no call raises except close().

    engine: its name in messages. space: the whole namespace (namespace_of()). The first attempt to connect is made
    here, and takes at most options.timeout_s. All others are made by a thread, which lives while kvfs is not up. gpu:
    of kvfs.connect(), for memory of a GPU.
    """

    def __init__(
        self,
        options: Options,
        space: str,
        *,
        engine: str,
        logger: logging.Logger | None = None,
        read_only: bool = False,
        gpu: GpuMode | None = None,
    ) -> None:
        self.options = options
        self.space = space
        self.state = State.AWAY
        self.counters = Counters()
        self.reason = "not tried yet"
        self._engine = engine
        self._logger = logger or _logger
        self._read_only, self._gpu = read_only, gpu
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None
        self._keeper_due_s = 0.0
        self._gone_s: float | None = None  # when the daemon was first seen to be away
        self._warned: set[int] = set()
        self._link: _Link | None = None
        self._links: list[_Link] = []
        self._batches: dict[tuple[int, int], _Batch] = {}
        self._busy: list[tuple[Done, _Batch]] = []
        self._ready: list[Done] = []
        self._tickets = 0
        self._bell = above(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._poll = epoll()
        self._poll.register(self._bell, select.EPOLLIN)
        self._started = False
        self._probe()

    # ---- at once ----

    @property
    def client(self) -> Client | None:
        """For an absent part; None while kvfs is away."""
        link = self._link
        return None if link is None or self.state is State.AWAY else link.client

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        found = self._read(lambda client: client.exists(keys), [False] * len(keys))
        self.counters.lookups += len(keys)
        self.counters.hits += sum(found)
        return found

    def exists_prefix(self, keys: Sequence[Key]) -> int:
        """How many keys from the first on exist."""
        count = self._read(lambda client: client.exists_prefix(keys), 0)
        self.counters.lookups += min(count + 1, len(keys))
        self.counters.hits += count
        return count

    def sizes(self, keys: Sequence[Key]) -> list[int | None]:
        missing: list[int | None] = [None] * len(keys)
        return self._read(lambda client: client.sizes(keys), missing)

    def touch(self, keys: Sequence[Key]) -> int:
        return self._read(lambda client: client.touch(keys), 0)

    def done(self, keys: Sequence[Key]) -> int:
        return self._read(lambda client: client.done(keys), 0)

    def lease(self, keys: Sequence[Key], seconds: float) -> Lease | None:
        """Without a daemon that could keep any: None."""
        return self._write(lambda client: client.lease(keys, seconds), None)

    def delete(self, keys: Sequence[Key]) -> list[bool]:
        return self._write(lambda client: client.delete(keys), [False] * len(keys))

    # ---- blocking: for engines that call from threads of their own ----

    def get_into(self, items: Sequence[tuple[Key, Pieces]]) -> list[int | None]:
        """Bytes read for each, None for a miss. Returns when no device writes into the memory."""

        def get(client: Client) -> list[int | None]:
            try:
                results = client.get_into(items)
            except SmallBufferError as error:
                results = list(error.results)
            if None in results:
                _wait_free(client, _regions([items[i] for i, result in enumerate(results) if result is None]))
            return results

        missing: list[int | None] = [None] * len(items)
        results = self._read(get, missing)
        self._count_loads(results)
        return results

    def get_ranges(self, items: Sequence[tuple[Key, int, Memory]]) -> list[int | None]:
        """Parts of blocks: key, offset in bytes, destination. As get_into()."""

        def get(client: Client) -> list[int | None]:
            results = client.get_ranges(items)
            missed = [(key, memory) for (key, _, memory), result in zip(items, results, strict=True) if result is None]
            if missed:
                _wait_free(client, _regions(missed))
            return results

        missing: list[int | None] = [None] * len(items)
        results = self._read(get, missing)
        self._count_loads(results)
        return results

    def put(
        self,
        items: Sequence[tuple[Key, Pieces]],
        *,
        if_absent: bool = True,
        parents: Sequence[Key | None] | None = None,
    ) -> list[bool]:
        """Is each block there now? A block that exists already counts as stored."""
        sizes = [_size(memory) for _, memory in items]
        if self.state is not State.UP:
            self._ensure_keeper()
            self.counters.dropped += len(items)
            return [False] * len(items)
        failed: Mapping[bytes, KvfsError] = {}

        def put(client: Client) -> list[bool] | None:
            nonlocal failed
            try:
                return client.put(items, if_absent=if_absent, parents=parents)
            except PutError as error:
                failed = error.failed
                self._say_once(next(iter(failed.values())))
                # Of those that did not fail nobody says whether they were there before: they count as stored.
                return [_bytes(key) not in failed for key, _ in items]

        stored = self._write(put, None)
        return self._count_stores([key for key, _ in items], sizes, stored, failed)

    # ---- asynchronous ----

    def fileno(self) -> int:
        """A descriptor that is readable while drain() has something; the same for the connection's life."""
        return self._poll.fileno()

    @property
    def pending(self) -> int:
        """Batches that drain() has not reported yet."""
        return len(self._batches) + len(self._busy) + len(self._ready)

    def submit_get(self, items: Sequence[tuple[Key, Pieces]]) -> int:
        """Start reading; never blocks. Returns a ticket, which drain() reports exactly once, after all devices have let
        go of the memory."""
        return self._submit("get", [key for key, _ in items], items, lambda queue: queue.get(items))

    def submit_put(
        self,
        items: Sequence[tuple[Key, Pieces]],
        *,
        if_absent: bool = True,
        parents: Sequence[Key | None] | None = None,
    ) -> int:
        return self._submit(
            "put",
            [key for key, _ in items],
            items,
            lambda queue: queue.put(items, if_absent=if_absent, parents=parents),
        )

    def submit_exists(self, keys: Sequence[Key]) -> int:
        return self._submit("exists", keys, (), lambda queue: queue.exists(keys))

    def submit_delete(self, keys: Sequence[Key]) -> int:
        return self._submit("delete", keys, (), lambda queue: queue.delete(keys))

    def drain(self) -> list[Done]:
        """Batches that are over since the last call; never blocks."""
        with self._lock:
            for link in self._links:
                with contextlib.suppress(ForkError):  # in a child its batches are the parent's
                    for completion in link.queue.drain():
                        self._complete(link, completion)
            self._look_at_busy()
            for link in [link for link in self._links if link is not self._link and not link.pending]:
                with contextlib.suppress(RuntimeError):  # no thread is to be had: a later drain() tries again
                    threading.Thread(target=_close, args=(link,), name="kvfs-close", daemon=True).start()
                    self._links.remove(link)
            done, self._ready = self._ready, []
            if not self._busy:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
            return done

    def wait(self, timeout_s: float) -> bool:
        """Wait until every batch is over and its memory free; drain() reports them afterwards. Whether they are."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                done = self.drain()
                self._ready[:0] = done
                if done:
                    self._ring()
                if not self._batches and not self._busy:
                    return True
                poll = select.poll()
                for link in self._links:
                    poll.register(link.queue.fileno(), select.POLLIN)
                interval_s = _BUSY_POLL_S if self._busy else 0.1
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            poll.poll(1000 * min(left_s, interval_s))

    def close(self, *, timeout_s: float = BUSY_TIMEOUT_S) -> None:
        """Wait for all calls under way, then disconnect. A second close() does nothing. Raises DeadlineError if memory
        is still in use after timeout_s."""
        self._stop.set()
        keeper = self._keeper
        if keeper is not None and keeper is not threading.current_thread():
            keeper.join(self.options.timeout_s + 1)
        if self._poll.closed:
            return
        if not self.wait(timeout_s):
            raise DeadlineError(
                f"kvfs for {self._engine}: {self.pending} batches are under way {timeout_s:g} s after close()"
            )
        with self._lock:
            self.state, self.reason = State.AWAY, "closed"
            links, self._links, self._link = self._links, [], None
            self._ready.clear()
            self._poll.close()
            os.close(self._bell)
        for link in links:
            _close(link)

    # ---- the state ----

    def _read(self, call: Callable[[Client], T], missing: T) -> T:
        link = self._link
        if link is None or self.state is State.AWAY:
            self._ensure_keeper()
            return missing
        try:
            return call(link.client)
        except (KvfsError, OSError) as error:
            self._failed(error, State.AWAY)
            return missing

    def _write(self, call: Callable[[Client], T], missing: T) -> T:
        link = self._link
        if link is None or self.state is not State.UP:
            self._ensure_keeper()
            return missing
        try:
            return call(link.client)
        except (KvfsError, OSError) as error:
            self._failed(error, State.READING)
            return missing

    def _failed(self, error: Exception, worse: State) -> None:
        """A call failed as a whole. If the connection is the reason the state gets worse, until the keeper has found
        out what holds."""
        if isinstance(error, (NotMountedError, PoolChangedError, VersionError, ForkError, DeadlineError)):
            self._set(worse, str(error))
        elif getattr(error, "errno", 0) in _NOT_TO_BE_HAD and not self._is_connected():
            self._set(State.AWAY, str(error))
        else:
            self._say_once(error)

    def _is_connected(self) -> bool:
        """False: the call failed when it wanted to connect anew, since this process got no thread or descriptor."""
        link = self._link
        try:
            return link is not None and link.client.information().connected
        except (KvfsError, OSError):
            return False

    def _say_once(self, error: Exception) -> None:
        """Until kvfs was away and is back: a pool that is full fails every store."""
        number = getattr(error, "errno", 0) or 0
        level = logging.DEBUG if number in self._warned else logging.WARNING
        self._warned.add(number)
        self._logger.log(level, "kvfs for %s: %s", self._engine, error)

    def _set(self, state: State, reason: str = "") -> None:
        with self._lock:
            if self._stop.is_set():
                return
            if state is State.UP:
                watch.add(self)
            else:
                self._ensure_keeper()
            if state is self.state and self._started:
                return
            # From AWAY to READING only the keeper goes.
            if self._started and self.state is State.AWAY and threading.current_thread() is not self._keeper:
                return
            before, self.state, self.reason = self.state, state, reason
            if state is State.UP:
                self._warned.clear()
                word = "is back" if self._started else "is connected"
                self._logger.info(
                    "kvfs for %s: %s, namespace %s, %s%s",
                    self._engine, self.options.mount, self.space, word, self._ways(),
                )  # fmt: skip
            elif state is State.READING:
                self._logger.warning(
                    "kvfs for %s: %s: the daemon is away (%s): blocks are read, none is stored until it is back",
                    self._engine, self.options.mount, reason,
                )  # fmt: skip
            else:
                self.counters.lost += before is not State.AWAY or not self._started
                self._logger.warning(
                    "kvfs for %s: %s is away (%s): every block is a miss until it is back",
                    self._engine, self.options.mount, reason,
                )  # fmt: skip
            self._started = True

    def look(self) -> bool:
        """Called by the watch: a dead daemon is noticed here, whether or not an engine calls."""
        if self.state is not State.UP or self._stop.is_set():
            return False  # the keeper is at work, and its success adds this again
        if self._is_connected():
            self._gone_s = None
        else:
            self._ensure_keeper(0.0)
        return True

    def _ensure_keeper(self, first_s: float = RETRY_MIN_S) -> None:
        """first_s: it begins after so long. Where no thread is to be had (pids.max), a later call tries again."""
        with self._lock:
            alive = self._keeper is not None and self._keeper.is_alive()
            if alive or self._stop.is_set() or time.monotonic() < self._keeper_due_s:
                return
            keeper = threading.Thread(target=self._keep, args=(first_s,), name="kvfs-connect", daemon=True)
            try:
                keeper.start()
                self._keeper = keeper
            except RuntimeError:
                self._keeper_due_s = time.monotonic() + RETRY_MAX_S

    def _ways(self) -> str:
        """For the message that it is up: what it goes by, where that is not io_uring, and a user that is mapped."""
        if self._link is None:
            return ""
        try:
            known = self._link.client.statistics()
        except (KvfsError, OSError):
            return ""
        rings = "" if known.rings == "io_uring" else f"; device I/O goes by {known.rings}"
        return rings + ("" if known.user.isdigit() else f"; the daemon knows it as user {known.user}")

    def _keep(self, first_s: float) -> None:
        """Until kvfs is up again: the only place that connects anew."""
        wait_s = first_s
        while not self._stop.wait(wait_s):
            self._probe()
            with self._lock:
                if self.state is State.UP:
                    self._keeper = None
                    return
            wait_s = min(max(2 * wait_s, RETRY_MIN_S), RETRY_MAX_S)

    def _probe(self) -> None:
        """Find out what holds, connecting if need be."""
        try:
            link = self._link
            if link is not None:
                try:
                    link.client.exists([_PROBE])
                except (PoolChangedError, ForkError):
                    with self._lock:
                        link = self._link = None
            if link is None:
                link = self._open()
            if link.client.information().connected:
                self._gone_s = None
                self._set(State.UP)
                return
            now = time.monotonic()
            self._gone_s = now if self._gone_s is None else self._gone_s
            # Stores wait so long for the next daemon of a held mount: until then none is dropped.
            if self.state is not State.UP or now - self._gone_s >= self.options.timeout_s:
                self._set(State.READING, "it does not answer")
        except (KvfsError, OSError, ValueError) as error:
            self._set(State.AWAY, str(error))

    def _open(self) -> _Link:
        options = self.options
        client = connect(
            options.mount, self.space, read_only=self._read_only, timeout_s=options.timeout_s, depth=options.depth,
            gpu=self._gpu,
        )  # fmt: skip
        try:
            link = _Link(client, client.queue(depth=options.depth))
        except BaseException:
            client.close()
            raise
        with self._lock:
            self._poll.register(link.queue.fileno(), select.EPOLLIN)
            self._links.append(link)
            self._link = link
        return link

    # ---- batches ----

    def _submit(
        self, kind: str, keys: Sequence[Key], items: Sequence[tuple[Key, Pieces]], start: Callable[[Queue], int]
    ) -> int:
        with self._lock:
            self._tickets += 1
            ticket, begun, link = self._tickets, time.monotonic(), self._link
            enough = self.state is State.UP or (self.state is State.READING and kind in ("get", "exists"))
            if link is None or not enough:
                self._ensure_keeper()
                if kind == "put":
                    self.counters.dropped += len(keys)
                self._finish_missing(kind, ticket, len(keys))
                return ticket
            try:
                number = start(link.queue)
            except (KvfsError, OSError) as error:
                self._failed(error, State.AWAY if kind in ("get", "exists") else State.READING)
                self._finish_missing(kind, ticket, len(keys))
                return ticket
            sizes = [_size(memory) for _, memory in items] if kind == "put" else ()
            regions = _regions(items) if kind == "get" else ()
            link.pending += 1
            self._batches[id(link), number] = _Batch(ticket, kind, keys, sizes, regions, link, begun)
            return ticket

    def _finish_missing(self, kind: str, ticket: int, count: int) -> None:
        if kind == "get":
            missing: list[int | None] = [None] * count
            self.counters.failed_loads += count
            self._ready.append(Done(ticket, missing, 0.0))
        else:
            self._ready.append(Done(ticket, [False] * count, 0.0))
        self._ring()

    def _complete(self, link: _Link, completion: Completion) -> None:
        batch = self._batches.pop((id(link), completion.id))
        seconds = time.monotonic() - batch.begun
        if completion.error is not None:
            self._failed(completion.error, State.AWAY if batch.kind in ("get", "exists") else State.READING)
        if batch.kind == "put":
            stored, failed = cast("list[bool]", completion.results), completion.failed
            if completion.error is not None:  # those are there whose storing was told before
                error = KvfsError(str(completion.error))
                stored = stored or [False] * len(batch.keys)
                failed = {_bytes(key): error for key, new in zip(batch.keys, stored, strict=True) if not new}
            elif failed:
                self._say_once(next(iter(failed.values())))
            self._end(batch, Done(batch.ticket, self._count_stores(batch.keys, batch.sizes, stored, failed), seconds))
        elif batch.kind == "get":
            results = cast("list[int | None]", completion.results) or [None] * len(batch.keys)
            self._count_loads(results)
            done = Done(batch.ticket, results, seconds)
            if None in results:
                self._busy.append((done, batch))
            else:
                self._end(batch, done)
        else:
            found = [bool(result) for result in completion.results] or [False] * len(batch.keys)
            if batch.kind == "exists":
                self.counters.lookups += len(found)
                self.counters.hits += sum(found)
            self._end(batch, Done(batch.ticket, found, seconds))

    def _end(self, batch: _Batch, done: Done) -> None:
        batch.link.pending -= 1
        self._ready.append(done)

    def _look_at_busy(self) -> None:
        """A read that missed its deadline may still arrive: its batch is not over before."""
        for entry in list(self._busy):
            done, batch = entry
            if not _any_busy(batch.link.client, batch.regions):
                self._busy.remove(entry)
                self._end(batch, done)
        if self._busy:
            self._ring()

    def _ring(self) -> None:
        if not self._poll.closed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._bell, 1)

    # ---- counting ----

    def _count_loads(self, results: Sequence[int | None]) -> None:
        loaded = [result for result in results if result is not None]
        self.counters.loaded += len(loaded)
        self.counters.loaded_bytes += sum(loaded)
        self.counters.failed_loads += len(results) - len(loaded)

    def _count_stores(
        self,
        keys: Sequence[Key],
        sizes: Sequence[int],
        stored: Sequence[bool] | None,
        failed: Mapping[bytes, KvfsError],
    ) -> list[bool]:
        """Returns whether each block is there now."""
        if stored is None:
            self.counters.failed_stores += len(keys)
            return [False] * len(keys)
        there = [_bytes(key) not in failed for key in keys] if failed else [True] * len(keys)
        for size, new, is_there in zip(sizes, stored, there, strict=True):
            if not is_there:
                self.counters.failed_stores += 1
            elif new:
                self.counters.stored += 1
                self.counters.stored_bytes += size
            else:
                self.counters.present += 1
        return there


_logger = logging.getLogger("kvfs.connectors")


def _close(link: _Link) -> None:
    try:
        link.queue.close()
    finally:
        link.client.close()


def _bytes(key: Key) -> bytes:
    return key if isinstance(key, bytes) else key.encode()


def _pieces(memory: Pieces) -> Sequence[Memory]:
    return cast("Sequence[Memory]", memory) if isinstance(memory, (list, tuple)) else (cast("Memory", memory),)


def _regions(items: Iterable[tuple[Key, Pieces]]) -> list[Region]:
    return [memory_.source(_bytes(key), piece) for key, memory in items for piece in _pieces(memory)]


def _size(memory: Pieces) -> int:
    return sum(
        piece.nbytes if isinstance(piece, memoryview) else memory_.source(b"", piece).size for piece in _pieces(memory)
    )


def _any_busy(client: Client, regions: Sequence[Region]) -> bool:
    """May a device still write into any of these?"""
    if not client.library.usable:
        return False
    with client.library.call():
        handle = client.library.handle
        return any(lib.kvfs_busy(handle, ffi.cast("void *", region.address), region.size) == 1 for region in regions)


def _wait_free(client: Client, regions: Sequence[Region]) -> None:
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while _any_busy(client, regions):
        if time.monotonic() >= deadline:
            raise DeadlineError(f"a device has written into an engine's memory for {BUSY_TIMEOUT_S:g} s")
        time.sleep(_BUSY_POLL_S)
