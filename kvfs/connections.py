"""A handle to the connections of native clients (native/include/kvfs_clients.h).

The data plane's thread reads and writes their sockets, and hands on the frames that it cannot answer by itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from errno import EIO
from typing import Any, cast

from kvfs._native import ffi, lib
from kvfs.errors import KvfsError
from kvfs.frames import Commit, HolderPages, Next, Reserve, Shards
from kvfs.lent import lent

_TAKEN_MAX = 64
# Namespaces whose directories of keys one connection remembers.
SPACES_MAX = cast(int, lib.KVFS_CLIENT_SPACES)


class Handed:
    """A frame that is the caller's to answer, or the end of a connection."""

    def __init__(self, plane: Any, told: Any) -> None:
        self._plane, self._told = plane, told
        self.client = cast(int, told.client)
        self.ended = told.what == lib.KVFS_CLIENT_ENDED
        self.kind = cast(int, told.type)
        self.size = cast(int, told.size)
        # What is under way: the caller goes on with it, from `next`.
        self.reserve = None if told.reserve == ffi.NULL else Reserve(plane, told.reserve)
        self.commit = None if told.commit == ffi.NULL else Commit(told.commit, plane)
        self.next = None if told.next < 0 else Next(told.next)
        self.replaced = False  # the caller's

    @property
    def payload(self) -> bytes:
        """A copy, made now. Before its end. What is under way needs none."""
        return cast(bytes, ffi.buffer(self._told.payload, self.size)[:])

    @property
    def under_way(self) -> bool:
        return self.reserve is not None or self.commit is not None

    def answer(self, data: bytes | None, status: int = 0, fd: int = -1) -> None:
        """data: None: what `reserve` or `commit` has to say. fd: of a file that goes along; it stays open as long as
        the connection."""
        told, self._told = self._told, None
        out, size = (ffi.NULL, 0) if data is None else (lent(data), len(data))
        lib.kvfs_client_answer(self._plane, told, status, out, size, fd)

    def drop(self) -> None:
        """The end of it without an answer, unless it has one."""
        told, self._told = self._told, None
        if told is not None:
            lib.kvfs_client_answer(self._plane, told, lib.KVFS_CLIENT_NO_ANSWER, ffi.NULL, 0, -1)


class Connections:
    """Of one plane. All calls from the thread that runs the store."""

    def __init__(self, plane: object) -> None:
        self._plane = plane
        self._out = ffi.new("struct kvfs_client_frame *[]", _TAKEN_MAX)

    def start(self, clock_ns: int, reservation_ns: int) -> int:
        """Call once. clock_ns: the clock by which reservations expire, less CLOCK_MONOTONIC. Returns a descriptor that
        is readable while take() has something."""
        config = ffi.new("struct kvfs_clients_config *", (clock_ns, reservation_ns))
        fd = cast(int, lib.kvfs_clients_start(self._plane, config))
        if fd < 0:
            raise _failure(fd, "the thread of native clients")
        return fd

    def serve(self, fd: int, uid: int, version: int, writable: bool, holder: HolderPages, begun: bytes) -> int:
        """From now on the socket is the thread's. Returns the client's number."""
        data = lent(begun)
        client = ffi.new("struct kvfs_client *", (fd, uid, version, writable, holder, data, len(begun)))
        number = cast(int, lib.kvfs_client_serve(self._plane, client))
        if number < 0:
            raise _failure(number, "a client")
        return number

    def end(self, client: int, *, tell: bool = False) -> None:
        """Hang up; `tell`: with a CLOSE. The client's end is handed on."""
        lib.kvfs_client_end(self._plane, client, tell)

    def remember(self, client: int, base: int, space: bytes, shards: Shards) -> None:
        """The directories of keys in a namespace, as they are now."""
        lib.kvfs_client_remember(self._plane, client, base, space, len(space), shards.items)

    def take(self) -> Sequence[Handed]:
        count = lib.kvfs_clients_take(self._plane, self._out, _TAKEN_MAX)
        return [Handed(self._plane, self._out[i]) for i in range(count)]


def _failure(error: int, what: str) -> KvfsError:
    failure = KvfsError(f"{what}: {os.strerror(-error)}")
    failure.errno = -error or EIO
    return failure
