"""Batches that run in parallel to their submitter: kvfs_queue_* of libkvfs (native/include/kvfs.h).

A submission copies its keys and returns an id. Memory stays exported until its completion, and until devices have let
go of it. Queue.fileno() is for poll, selectors, or an event loop's add_reader().
"""

from __future__ import annotations

import errno
import os
import threading
import warnings
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Self

from kvfs._native import ffi, lib
from kvfs.client import batches
from kvfs.client import keys as keys_
from kvfs.client import memory as memory_
from kvfs.client.batches import host_destinations, or_none, pairs, put_failure, ranges, small_buffer
from kvfs.client.keys import Key, shown
from kvfs.client.library import Library, Vectors, put_options
from kvfs.client.memory import Pieces, Region
from kvfs.errors import ClientError, DeadlineError, InvalidBufferError, InvalidKeyError, KvfsError, client_error
from kvfs.lent import lent

_DRAINED_AT_ONCE = 64


class _Kind(Enum):
    GET = "get"
    RANGES = "get_ranges"
    PUT = "put"
    EXISTS = "exists"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Completion:
    """A batch that ended. results are as of the plain call, for each key: of a get bytes, or None for a miss. Of a put,
    exists and delete: whether it was stored by this, exists, existed.

    error: of the whole batch, or None; results then tell what was done before. A get whose destinations were too small
    has a SmallBufferError. failed: of a put, why which keys were not stored.
    """

    id: int
    results: list[int | None] | list[bool]
    error: Exception | None = None
    failed: dict[bytes, KvfsError] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Batch:
    """The memory that libkvfs writes to, and the rest of what the completion needs."""

    kind: _Kind
    names: Sequence[bytes]
    vectors: Sequence[Sequence[Region]] = ()
    values: array[int] | bytearray = field(default_factory=bytearray)


class Queue:
    """Made by Client.queue(). Any thread may call anything; after os.fork() a child must connect again.

    Submissions (get, get_ranges, put, exists, delete) return an id above 0 and never wait for a device or the daemon.
    Reads of many batches are in flight together. Puts and deletes go one after the other in their order; puts that
    wait are joined. They raise what the plain calls raise of keys and memory, and ClientError with EAGAIN when 4096
    batches or 262,144 blocks wait or were not drained.
    """

    def __init__(self, library: Library, depth: int, client: object) -> None:
        self._library = library
        self._client = client  # closed when nobody has it any more: not before its queue
        # Held while an id is made known: a completion may be drained before its submission has returned.
        self._lock = threading.Lock()
        self._batches: dict[int, _Batch] = {}
        # They have no number yet. A batch whose submission an interrupt broke off stays: its memory is written into.
        self._entering: list[_Batch] = []
        self._out = ffi.new("struct kvfs_queue_completion[]", _DRAINED_AT_ONCE)
        self._open = False
        out = ffi.new("struct kvfs_queue **")
        with self._library.call():
            self._library.check(lib.kvfs_queue_open(self._library.handle, depth, out))
            self._handle: object = out[0]
            self._fd = self._library.check(lib.kvfs_queue_fd(self._handle))
        self._freed = False
        self._open = True

    # ---- life ----

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let what runs end, cancel the rest. Completions that were not drained are gone. A second close() does
        nothing, as does one in a forked child.

        Raises DeadlineError if a put still runs after four times the client's timeout_s; then close again later.
        """
        if self._freed or os.getpid() != self._library.pid:
            return
        with self._lock:
            self._open = False
        with self._library.call():
            if self._freed:
                return
            if lib.kvfs_queue_close(self._handle) == -errno.ETIMEDOUT:
                raise DeadlineError(f"{self!r}: a put still runs; close it again later")
            self._freed = True
            for batch in [*self._batches.values(), *self._entering]:
                self._library.hold_busy([region for pieces in batch.vectors for region in pieces])
        self._batches.clear()
        self._entering.clear()

    def __del__(self) -> None:
        if getattr(self, "_open", False) and self._library.usable:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self)
            self.close()

    def __repr__(self) -> str:
        return f"<kvfs.client.Queue of {self._library.name!r}>"

    def fileno(self) -> int:
        """An eventfd, readable while completions wait to be drained; only drain() may read it. close() closes it."""
        self._check_open()
        return self._fd

    # ---- submissions ----

    def get(self, items: Iterable[tuple[Key, Pieces]]) -> int:
        """Client.get_into(), of host memory alone."""
        names, memories = pairs(items)
        return self._read(_Kind.GET, names, host_destinations(names, memories), None)

    def get_ranges(self, items: Iterable[tuple[Key, int, Pieces]]) -> int:
        """Client.get_ranges()."""
        names, offsets, memories = ranges(items)
        return self._read(_Kind.RANGES, names, host_destinations(names, memories), offsets)

    def put(
        self,
        items: Iterable[tuple[Key, Pieces]],
        *,
        if_absent: bool = False,
        parents: Sequence[Key | None] | None = None,
    ) -> int:
        """Client.put(). Of a key in two batches the later one is stored later."""
        names, memories = pairs(items)
        if len(set(names)) != len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise InvalidKeyError(f"key {shown(twice)}: twice in one put; which of the two is to be stored?")
        vectors = list(map(memory_.sources, names, memories))
        for name, pieces in zip(names, vectors, strict=True):
            if any(piece.device is not None for piece in pieces):
                raise InvalidBufferError(f"key {shown(name)}: its bytes are in GPU memory: a queue takes host memory")
        above = None if parents is None else self._library.keys(batches.parents(parents, len(names)), gaps=True)
        options = put_options(if_absent, above)
        batch = _Batch(_Kind.PUT, names, vectors, array("q", bytes(8 * len(names))))
        keys, memory, results = self._library.keys(names), Vectors(vectors), lent(batch.values, "int64_t[]")
        with self._lock:
            handle = self._check_open()
            with self._library.call():
                self._entering.append(batch)
                number = lib.kvfs_queue_put(handle, keys.struct, memory.struct, options, results)
                return self._enter(number, batch)

    def exists(self, keys: Iterable[Key]) -> int:
        """Client.exists(). Its completion is queued when this returns, if the block table can say; otherwise behind the
        puts."""
        return self._ask(_Kind.EXISTS, keys)

    def delete(self, keys: Iterable[Key]) -> int:
        """Client.delete()."""
        return self._ask(_Kind.DELETE, keys)

    # ---- completions ----

    def drain(self) -> list[Completion]:
        """All batches that ended since the last drain, in that order; may be none. Never waits."""
        ended: list[tuple[_Batch, int, int, str]] = []
        with self._lock:
            handle = self._check_open()
            with self._library.call():
                count = _DRAINED_AT_ONCE
                while count == _DRAINED_AT_ONCE:
                    count = self._library.check(lib.kvfs_queue_drain(handle, self._out, _DRAINED_AT_ONCE))
                    for one in self._out[0:count]:
                        text = ffi.string(one.error).decode(errors="replace")
                        batch = self._batches.pop(one.id, None)
                        if batch is not None:  # nobody knows the number of one whose submission was interrupted
                            ended.append((batch, one.id, one.result, text))
                for batch, _, _, _ in ended:
                    if batch.kind in (_Kind.GET, _Kind.RANGES):
                        self._library.hold_timeouts(batch.values, batch.vectors)
        return [self._completion(*one) for one in ended]

    # ---- inside ----

    def _check_open(self) -> object:
        if not self._open:
            raise ClientError(f"{self!r} is closed")
        return self._handle

    def _enter(self, number: int, batch: _Batch) -> int:
        """With the lock, right behind the call: the batch has its number, or its submission failed."""
        if number > 0:
            self._batches[number] = batch
        self._entering.remove(batch)
        return self._library.check(number)

    def _read(
        self, kind: _Kind, names: Sequence[bytes], vectors: Sequence[Sequence[Region]], offsets: Sequence[int] | None
    ) -> int:
        batch = _Batch(kind, names, vectors, array("q", bytes(8 * len(names))))
        keys, memory, results = (
            self._library.keys(names),
            Vectors(vectors, offsets),
            lent(batch.values, "int64_t[]"),
        )
        call = lib.kvfs_queue_get if kind is _Kind.GET else lib.kvfs_queue_get_ranges
        with self._lock:
            handle = self._check_open()
            with self._library.call():
                self._entering.append(batch)
                return self._enter(call(handle, keys.struct, memory.struct, results), batch)

    def _ask(self, kind: _Kind, keys: Iterable[Key]) -> int:
        names = keys_.normalized(keys)
        packed = self._library.keys(names)
        batch = _Batch(kind, names, values=bytearray(packed.count))
        answers = lent(batch.values)
        call = lib.kvfs_queue_exists if kind is _Kind.EXISTS else lib.kvfs_queue_delete
        with self._lock:
            handle = self._check_open()
            with self._library.call():
                self._entering.append(batch)
                return self._enter(call(handle, packed.struct, answers), batch)

    def _completion(self, batch: _Batch, number: int, result: int, text: str) -> Completion:
        error = client_error(-result, text) if result < 0 else None
        values = batch.values.tolist() if isinstance(batch.values, array) else batch.values
        if batch.kind in (_Kind.EXISTS, _Kind.DELETE):
            return Completion(number, list(map(bool, values)), error)
        if batch.kind is _Kind.PUT:
            failed = {
                name: put_failure(name, memory_.size_of(pieces), value)
                for name, pieces, value in zip(batch.names, batch.vectors, values, strict=True)
                if value < 0 and value != -errno.EEXIST
            }
            return Completion(number, [value == 0 for value in values], error, failed)
        if error is None and -errno.ERANGE in values:
            error = small_buffer(self._library, batch.names, batch.vectors, values)
        return Completion(number, [or_none(value) for value in values], error)
