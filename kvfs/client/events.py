"""kvfs.events(): what is stored and removed in a namespace of a mounted pool, by anybody, evictions included.

The daemon writes each change into shared memory once; a subscriber reads it there (native/src/block/feed.h). So a
subscriber that is slow, or stops, costs a store nothing. It learns how much it has missed: a Gap has the number.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Self, TypeAlias

from kvfs._native import ffi, lib
from kvfs.client.library import Library, check
from kvfs.errors import ClientError

# A call of libkvfs waits so long at most: between two of them interrupts are heard.
_SLICE_S = 0.1


class Reason(IntEnum):
    """The cause of a change: enum kvfs_event_reason of kvfs.h."""

    WRITTEN = 1
    REPLACED = 2
    RENAMED = 3
    DELETED = 4
    EVICTED = 5
    AWAY = 6
    FOUND = 7
    DAEMON = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """The path, below the namespace, leads to a block of `size` bytes from now on. key: None if it is no key's path.
    number: of the change, among all of the whole pool."""

    number: int
    key: bytes | None
    path: bytes
    size: int
    time_ns: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Removed:
    """The path leads to a block no longer; It had `size` bytes."""

    number: int
    key: bytes | None
    path: bytes
    size: int
    time_ns: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Gap:
    """`lost` changes of the whole pool, of which the namespace may have had some, are unknown. The last has this
    number."""

    number: int
    lost: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Anything may have changed below `path` (b"": in the namespace): another daemon serves the pool, or a directory
    was renamed."""

    path: bytes
    reason: Reason


Event: TypeAlias = Stored | Removed | Gap | Reset


class Events:
    """A subscription, made by kvfs.events() or Client.events(). Iterating waits for ever; next_event() has a deadline.
    Any thread may close it; one thread at a time may wait. `ended` is called after its end."""

    def __init__(self, library: Library, *, keys: bool, ended: Callable[[], None] | None = None) -> None:
        self._library, self._keys, self._ended = library, keys, ended
        self._lock = threading.Lock()
        self._closed = True
        out = ffi.new("struct kvfs_events **")
        with library.call():
            check(lib.kvfs_events_open(library.handle, out), library.name)
        self._handle: object = out[0]
        self._closed = False
        self._out = ffi.new("struct kvfs_block_event *")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the subscription. A second close() does nothing, as does one in a forked child."""
        if os.getpid() != self._library.pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            lib.kvfs_events_close(self._handle)
        if self._ended is not None:
            self._ended()

    def __del__(self) -> None:
        # A subscription that failed has no handle, and is closed.
        if not getattr(self, "_closed", True) and os.getpid() == self._library.pid:
            self._closed = True
            lib.kvfs_events_close(self._handle)
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self)

    def __repr__(self) -> str:
        return f"<kvfs events of {self._library.name!r}>"

    def __iter__(self) -> Iterator[Event]:
        while True:
            event = self.next_event(_SLICE_S)
            if event is not None:
                yield event

    def next_event(self, timeout_s: float = 0.0) -> Event | None:
        """The next event; None if there is none in time. Raises NotMountedError after an unmount: when the pool is
        mounted again, a later call goes on with a Reset. ClientError if the subscription is closed."""
        until = time.monotonic() + timeout_s
        while True:
            left = until - time.monotonic()
            event = self._next(max(0.0, min(left, _SLICE_S)))
            if event is not None or left <= 0:
                return event

    def _next(self, timeout_s: float) -> Event | None:
        out = self._out
        while True:
            with self._lock, self._library.call():
                self._library.check_open()
                if self._closed:
                    raise ClientError(f"{self._library.name}: this subscription is closed")
                found = check(lib.kvfs_events_next(self._handle, out, round(timeout_s * 1000)), self._library.name)
                if not found:
                    return None
                if out.kind == lib.KVFS_GAP:
                    return Gap(out.number, out.lost)
                path = bytes(ffi.buffer(out.path, out.path_size))
                if out.kind == lib.KVFS_RESET:
                    return Reset(path, Reason(out.reason))
                key = bytes(ffi.buffer(out.key, out.key_size)) if out.key_size else None
                if key is None and self._keys:
                    continue
                made = Stored if out.kind == lib.KVFS_STORED else Removed
                return made(out.number, key, path, out.size, out.time_ns, Reason(out.reason))
