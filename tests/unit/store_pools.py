"""Pools in files, and blocks in them without a mount: sparse files, sealed, whose size only their headers take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from helpers import slowness

from kvfs.index.lmdb import LmdbIndex
from kvfs.names import Names
from kvfs.namespace.files import Namespace
from kvfs.pool.making import FormatRequest, format_devices
from kvfs.record import Inode, InodeFlags, Kind
from kvfs.store.opening import StoreOptions
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber

# A disk that others use may pause for as long as a device's usual deadline.
OPTIONS = StoreOptions(
    staging_size=16 << 20, read_memory_size=16 << 20, commit_interval_s=0.1, records_max=1 << 16, io_timeout_ms=50_000
)
LAZY = replace(OPTIONS, commit_interval_s=1000)
# Of jumping_run(): after so long without a task that can run, its clock goes on by as much.
_TICK_S = 0.02


def make_pool(path: Path, *, files: int = 2, size: int = 32 << 20, **arguments: object) -> Path:
    format_devices(FormatRequest(pool=path, files=files, file_size=size, **arguments))  # type: ignore[arg-type]
    return path


def with_store(
    path: Path, work: Callable[[Store], Awaitable[None]], options: StoreOptions = OPTIONS, *, jumping: bool = False
) -> None:
    """Open, work, close cleanly. Where `jumping`, pass_time() makes the clock jump."""
    (jumping_run if jumping else trio.run)(_opened, path, work, options)


def in_store(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test over a store and its namespace; pytest sees its other arguments."""
    others = list(inspect.signature(test).parameters.values())[2:]

    @functools.wraps(test)
    def run(tmp_path: Path, **fixtures: object) -> None:
        async def work(store: Store) -> None:
            await test(store, Namespace(store), **fixtures)

        with_store(make_pool(tmp_path / "pool", files=1), work, LAZY)

    del run.__wrapped__  # type: ignore[attr-defined]
    tmp_path = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([tmp_path, *others])  # type: ignore[attr-defined]
    return run


async def nothing_in_memory(store: Store) -> None:
    """All is committed; of files and directories memory has one each."""
    await store.blocks.commit()
    store.plane.names.limit(0, 0)
    store.plane.names.forget()


async def _opened(path: Path, work: Callable[[Store], Awaitable[None]], options: StoreOptions) -> None:
    async with Store.open(path, options) as store:
        await rebuilt(store)
        await work(store)


def jumping_run(function: Callable[..., Awaitable[None]], *arguments: object) -> None:
    """trio.run() with a clock that stands still while tasks work: a busy machine does not make anything late.

    While all tasks wait it goes at the pace of the world, and pass_time() makes it jump."""

    clock = trio.testing.MockClock()

    async def tick() -> None:
        while True:
            await trio.testing.wait_all_tasks_blocked(_TICK_S)
            clock.jump(_TICK_S)

    async def main() -> None:
        trio.lowlevel.spawn_system_task(tick)
        await function(*arguments)

    trio.run(main, clock=clock)


async def pass_time(seconds: float) -> None:
    """Sleep, or with a clock that jumps only as long as what is due on the way needs."""
    clock = trio.lowlevel.current_clock()
    if not isinstance(clock, trio.testing.MockClock):
        await trio.sleep(seconds)
        return
    until = trio.current_time() + seconds
    while (left := until - trio.current_time()) > 0:
        clock.jump(min(0.25, left))
        await trio.testing.wait_all_tasks_blocked(_TICK_S)  # as tick(): of unlike waits only the shorter would end


def crashed_store(path: Path, work: Callable[[Store], Awaitable[None]], options: StoreOptions = OPTIONS) -> None:
    """As with_store, but the end is that of a kill: nothing is sealed, closed or committed."""

    async def crash(store: Store) -> None:
        await work(store)
        store._close_cleanly = trio.lowlevel.checkpoint  # type: ignore[method-assign]

    trio.run(_opened, path, crash, options)


async def rebuilt(store: Store) -> None:
    with trio.fail_after(600 * slowness()):
        while store.rebuilding:
            await trio.sleep(0.01)


@contextmanager
def index_reads(names: Names) -> Iterator[list[str]]:
    """How LMDB is read meanwhile. No step is under way then (I48)."""
    reads: list[str] = []

    def watched(how: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def look(*arguments: Any) -> Any:
            reads.append(how)
            assert not names.is_step, how
            return read(*arguments)

        return look

    with pytest.MonkeyPatch.context() as patch:
        for how in ("_stored", "_stored_many", "stored_inode", "list_stored"):
            patch.setattr(LmdbIndex, how, watched(how, getattr(LmdbIndex, how)))
        yield reads


def make(store: Store, parent: int, name: bytes, kind: Kind = Kind.FILE) -> Inode:
    """A new name; a file is being written afterwards."""
    made, mode = (store.blocks.mkdir, 0o755) if kind == Kind.DIRECTORY else (store.blocks.create, 0o644)
    return made(InodeNumber(parent), name, mode, 0, 0)


async def write(store: Store, name: bytes, size: int = 3 * 4096, parent: int = ROOT_INODE) -> Inode:
    """A sealed block of zeros; with a large size its header alone fills pages (4 bytes for every 4 KiB)."""
    inode = make(store, parent, name)
    store.plane.file_truncate(inode.inode, size)
    sealed = await store.sealing.seal(inode.inode)
    assert sealed is not None
    return sealed


def rename(store: Store, number: InodeNumber, name: bytes, parent: int = ROOT_INODE) -> None:
    """Over whoever has the name; nobody can open that any more."""
    old = store.index.get(number)
    assert old is not None
    target = store.index.lookup(InodeNumber(parent), name)
    store.blocks.rename(old.parent, old.name, InodeNumber(parent), name)
    if target is not None:
        store.blocks.end_nameless(target)
        assert store.index.get(target) is None


def unlink(store: Store, name: bytes, parent: int = ROOT_INODE) -> None:
    number = store.index.lookup(InodeNumber(parent), name)
    assert number is not None
    store.blocks.unlink(InodeNumber(parent), name)
    assert store.index.get(number) is None


def names(store: Store, parent: int = ROOT_INODE) -> set[bytes]:
    """The names in a directory; each must be in the block table too, and every block must verify."""
    entries = store.index.list(InodeNumber(parent), b"", 100_000)
    for name, number in entries:
        inode = store.index.get(number)
        assert inode is not None and inode.name == name and inode.parent == parent
        assert InodeFlags.NAMELESS not in inode.flags
        assert store.plane.table_find_name(parent, name) == number, name
    return {name for name, _ in entries}


async def verify_all(store: Store, parent: int = ROOT_INODE) -> None:
    for _, number in store.index.list(InodeNumber(parent), b"", 100_000):
        record = store.index.raw(number)
        if record is None:  # evicted while others were read: the evictor works on
            continue
        if Inode.unpack(record).sealed:
            await store.plane.store_verify(record, True)


async def settle(store: Store, seconds: float = 0.5) -> None:
    """Let commits and summaries follow; a busy disk takes its time."""

    def followed() -> bool:
        segments = store.segments
        return (
            not store.index.changes_pending
            and not segments._changed
            and not any(segment.dirty or segment.copy_stale or segment.writing for segment in segments.all)
        )

    await trio.sleep(seconds)
    with trio.fail_after(600 * slowness()):
        while not followed():
            await trio.sleep(0.01)
