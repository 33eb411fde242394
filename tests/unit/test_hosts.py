"""Hosts' kernels are told of evictions a few times a second, and at once where a name leads to another block."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from store_pools import LAZY, make_pool, with_store, write

from kvfs.namespace.files import Namespace
from kvfs.store.blocks import TELL_S
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE

BIG = 64 << 20


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return make_pool(tmp_path / "pool")


class Told:
    """Counts how often hosts were told."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        self._tell = store.plane.notify_epoch
        monkeypatch.setattr(store.plane, "notify_epoch", self._count)

    def _count(self) -> None:
        self.times += 1
        self._tell()


async def fill(store: Store, count: int = 200) -> None:
    for i in range(count):
        await write(store, b"%d" % i, BIG)
    store.segments.retire_open()


async def evict_some(store: Store, count: int) -> None:
    until = store.evictor.counters.segments + count
    await store.evictor.free_until(lambda: store.evictor.counters.segments >= until)


def test_hosts_are_told_of_evictions_four_times_a_second_at_most(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: Store) -> None:
        await fill(store)
        await trio.sleep(2 * TELL_S)
        told, began = Told(store, monkeypatch), trio.current_time()
        before = store.evictor.counters.segments
        await evict_some(store, 20)
        assert store.evictor.counters.segments >= before + 10
        await trio.sleep(2 * TELL_S)
        times = told.times
        assert 1 <= times <= (trio.current_time() - began) / TELL_S
        await trio.sleep(4 * TELL_S)
        assert told.times == times  # nothing is left to tell

    with_store(pool, work, LAZY)


def test_an_eviction_that_was_asked_for_is_told_at_once(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: Store) -> None:
        monkeypatch.setattr("kvfs.store.blocks.TELL_S", 1000)
        await fill(store)
        told = Told(store, monkeypatch)
        await store.evict(1 << 20)
        assert told.times == 1

    with_store(pool, work, LAZY)


def test_hosts_are_told_before_a_name_that_was_evicted_leads_elsewhere(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that still has the old name would else show the old size of a block that was stored anew."""

    async def work(store: Store) -> None:
        monkeypatch.setattr("kvfs.store.blocks.TELL_S", 1000)
        await fill(store)
        namespace, told = Namespace(store), Told(store, monkeypatch)
        await evict_some(store, 3)
        gone = [b"%d" % i for i in range(200) if store.index.lookup(ROOT_INODE, b"%d" % i) is None]
        assert len(gone) > 3 and not told.times
        namespace.create(ROOT_INODE, b"new", 0o644, 0, 0)
        assert not told.times
        namespace.create(ROOT_INODE, gone[0], 0o644, 0, 0)
        assert told.times == 1
        namespace.create(ROOT_INODE, gone[1], 0o644, 0, 0)  # they were told of all
        assert told.times == 1
        known = set(gone)
        await evict_some(store, 3)
        gone = [b"%d" % i for i in range(200) if store.index.lookup(ROOT_INODE, b"%d" % i) is None]
        (first, second, *_) = [name for name in gone if name not in known]
        namespace.rename(ROOT_INODE, b"new", ROOT_INODE, first)
        assert told.times == 2
        namespace.symlink(ROOT_INODE, second, b"x", 0, 0)
        assert told.times == 2

    with_store(pool, work, LAZY)
