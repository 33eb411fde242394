"""Puts of native clients do not pass Python block by block: the work of a request hardly depends on its items."""

from __future__ import annotations

import dataclasses
import errno
import struct
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from client_double import counted, places_in, wanted, where
from helpers import slowness
from store_pools import LAZY, make_pool, pass_time, with_store
from test_directories_of_keys import Connection

from kvfs.errors import NoSpaceError
from kvfs.namespace.files import Namespace
from kvfs.store.shares import ROOT
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber

ITEMS = 64
# Calls of Python's functions for a block. The two requests of a put make 320.
MOST = 6.0


async def calls(work: Callable[[], Awaitable[bytes]]) -> tuple[int, bytes]:
    """How many functions of Python were called, and the answer."""
    count = 0

    def called(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(called)
    try:
        answer = await work()
    finally:
        sys.setprofile(None)
    return count, answer


class Puts:
    """A client that puts blocks without writing them: a daemon never looks."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.connection = store, Connection(store, monkeypatch)
        self.left = 0
        make_way = self.connection.namespace.make_way

        def count_left(block: object) -> object:
            self.left += 1
            return make_way(block)  # type: ignore[arg-type]

        monkeypatch.setattr(self.connection.namespace, "make_way", count_left)

    async def put(self, count: int, generation: int = 0, space: bytes = b"model") -> float:
        """Calls for a block."""
        connection = self.connection.connection
        keys = [b"%02x%06x%02x" % (i % 16, i, generation) for i in range(count)]
        frame = where(ROOT_INODE, space, count) + wanted([(key, 4096) for key in keys])
        reserving, answer = await calls(lambda: connection.reserve(frame))
        numbers = [place.reservation for place in places_in(answer, count)]
        items = struct.pack("<Q", count) + b"".join(struct.pack("<Qq", number, 0) for number in numbers)
        committing, answer = await calls(lambda: connection.commit(items))
        assert answer == bytes(8 * count)
        return (reserving + committing) / count


def test_a_put_hardly_reaches_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: Store) -> None:
        puts = Puts(store, monkeypatch)
        await puts.put(ITEMS)  # the directories are made
        # The least of several: other tasks run when a segment is full.
        few = min([await puts.put(ITEMS, generation) for generation in range(1, 6)])
        many = min([await puts.put(8 * ITEMS, generation) for generation in range(6, 11)])
        assert max(few, many) <= MOST, f"{few:.2f} calls a block of {ITEMS}, {many:.2f} of {8 * ITEMS}"
        await puts.put(ITEMS, 1)  # over the blocks that have these names
        assert not puts.left
        puts.connection.close()

    with_store(make_pool(tmp_path / "pool"), work, LAZY)


def test_a_pin_elsewhere_changes_nothing_and_below_a_pin_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(store: Store) -> None:
        puts = Puts(store, monkeypatch)
        namespace = puts.connection.namespace
        for name in (b"kept", b"model"):
            namespace.mkdir(ROOT_INODE, name, 0o755, 0, 0)
        await store.blocks.pin(namespace.lookup(ROOT_INODE, b"kept").inode, ROOT)
        await store.blocks.pins.count()
        assert not puts.left and not store.blocks.pins.pages
        await puts.put(ITEMS)
        assert not puts.left and not store.blocks.pins.pages
        await puts.put(ITEMS, space=b"kept")
        assert puts.left == ITEMS and store.blocks.pins.pages == 2 * ITEMS
        await puts.put(ITEMS, space=b"kept")  # over them: they linger, and count until they go
        store.blocks._lingering.clear()
        for number in store.index.volatile_inodes():
            namespace.idle(number)
        assert store.blocks.pins.pages == 2 * ITEMS
        puts.connection.close()

    with_store(make_pool(tmp_path / "pool"), work, LAZY)


def test_blocks_that_were_replaced_go_in_turns(tmp_path: Path) -> None:
    """A second's worth of them does not hold up the loop, and takes a time that grows with their number alone."""
    count = 100_000

    async def work(store: Store) -> None:
        gone: list[int] = []
        store._options = dataclasses.replace(store._options, on_event=lambda kind, inode, value: gone.append(inode))
        for number in range(count):
            store.blocks.linger(InodeNumber(number + 1000))
        await pass_time(1.1)
        longest, turn = 0, 0

        async def watch() -> None:
            nonlocal longest, turn
            while turn < count:
                await trio.lowlevel.checkpoint()
                longest, turn = max(longest, len(gone) - turn), len(gone)

        with trio.fail_after(20 * slowness()):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch)
                await store._commit_and_flush()
        assert gone == list(range(1000, 1000 + count)) and longest <= 1000

    with_store(make_pool(tmp_path / "pool"), work, LAZY, jumping=True)


def test_a_removal_hardly_reaches_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: Store) -> None:
        puts = Puts(store, monkeypatch)
        await puts.put(ITEMS)
        keys = [b"%02x%06x%02x" % (i % 16, i, 0) for i in range(ITEMS)]
        frame = where(ROOT_INODE, b"model", ITEMS) + b"".join(counted(key) for key in keys)
        monkeypatch.setattr(puts.connection.namespace, "unlink", None)
        count, answer = await calls(lambda: puts.connection.connection.delete(frame))
        # The directories are looked up, and hosts are told.
        assert answer == b"\1" * ITEMS and count <= 2 * MOST * ITEMS
        assert await puts.connection.connection.delete(frame) == bytes(ITEMS)
        puts.connection.close()

    with_store(make_pool(tmp_path / "pool"), work, LAZY)


def test_a_put_into_a_full_table_waits_for_the_evictor_and_enters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the table fills before the reservation or before the commit."""

    async def work(store: Store) -> None:
        puts, namespace, room = Puts(store, monkeypatch), Namespace(store), store.blocks.table_room
        evicted = store.evictor.counters
        for generation in range(4):
            await puts.put(8 * ITEMS, generation)
        # The evictor cannot see that the table is short, so that it fills.
        short = type(room).is_short
        monkeypatch.setattr(type(room), "is_short", lambda self: not self.left() and short(self))
        made = 0
        connection = puts.connection.connection
        keys = [b"%02x%06x%02x" % (i % 16, i, 9) for i in range(ITEMS)]
        answer = await connection.reserve(where(ROOT_INODE, b"model", ITEMS) + wanted([(key, 4096) for key in keys]))
        while room.left():
            namespace.mkdir(ROOT_INODE, b"d%d" % made, 0o755, 0, 0)
            made += 1
        before = evicted.blocks
        numbers = [place.reservation for place in places_in(answer, ITEMS)]
        items = struct.pack("<Q", ITEMS) + b"".join(struct.pack("<Qq", number, 0) for number in numbers)
        assert await connection.commit(items) == bytes(8 * ITEMS)
        assert evicted.blocks > before
        while room.left():
            namespace.mkdir(ROOT_INODE, b"d%d" % made, 0o755, 0, 0)
            made += 1
        await puts.put(ITEMS, 10, b"other")
        puts.connection.close()

    with_store(make_pool(tmp_path / "pool"), work, dataclasses.replace(LAZY, records_max=3 * 8 * ITEMS))


def test_a_put_into_a_table_that_stays_full_is_refused_while_its_client_still_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not ten seconds later, when a client that waits for two has called its daemon dead."""

    async def work(store: Store) -> None:
        puts, namespace, room = Puts(store, monkeypatch), Namespace(store), store.blocks.table_room
        connection = puts.connection.connection
        connection._timeout_s = 0.2
        monkeypatch.setattr(room, "_want", lambda: None)
        monkeypatch.setattr(type(room), "is_short", lambda self: False)
        keys = [b"%02x%06x%02x" % (i % 16, i, 9) for i in range(ITEMS)]
        frame = where(ROOT_INODE, b"model", ITEMS) + wanted([(key, 4096) for key in keys])
        numbers = [place.reservation for place in places_in(await connection.reserve(frame), ITEMS)]
        while room.left():
            namespace.mkdir(ROOT_INODE, b"d%d" % room.left(), 0o755, 0, 0)
        with pytest.raises(NoSpaceError, match=r"none has become free in 0\.15 s"):
            await connection.reserve(frame)
        items = struct.pack("<Q", ITEMS) + b"".join(struct.pack("<Qq", number, 0) for number in numbers)
        assert await connection.commit(items) == struct.pack("<q", -errno.ENOSPC) * ITEMS
        puts.connection.close()

    with_store(make_pool(tmp_path / "pool"), work, dataclasses.replace(LAZY, records_max=3 * 8 * ITEMS))
