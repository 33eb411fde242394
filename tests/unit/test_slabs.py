"""Slabs without a mount: which segments they have, within which quota, and their fate when they are closed, when a
device goes, and after a crash."""

from __future__ import annotations

import dataclasses
import errno
import re
from pathlib import Path

import pytest
import trio
from helpers import slowness
from store_pools import crashed_store, make, make_pool, names, with_store, write

from kvfs.errors import BusyError, InvalidArgumentError, NoSpaceError, PoolError, UsageError
from kvfs.plane import PlaneError
from kvfs.pool.config import PoolConfig, load, parse
from kvfs.pool.format import Stream
from kvfs.pool.opening import write_config
from kvfs.record import InodeFlags
from kvfs.store.fsck import fsck
from kvfs.store.segment import Segment, State
from kvfs.store.store import Store
from kvfs.types import PAGE_SIZE, ROOT_INODE, InodeNumber

MIB = 1 << 20


def pool_of(path: Path, **arguments: object) -> Path:
    return make_pool(path / "pool", files=4, size=32 * MIB, segment_size=MIB, stripe_width=1, **arguments)


def slab_segments(store: Store) -> list[Segment]:
    return [s for s in store.segments.all if s.state != State.FREE and s.stream == Stream.SLAB]


def new_file(store: Store, name: bytes = b"slab") -> InodeNumber:
    return make(store, ROOT_INODE, name).inode


async def freed(store: Store) -> None:
    with trio.fail_after(50 * slowness()):
        while store.slabs.count:
            await trio.sleep(0.01)


def with_quota(pool: Path, quota: float) -> None:
    config = load(pool)
    assert config is not None
    write_config(pool, dataclasses.replace(config, slab_quota=quota))


def test_a_slab_takes_whole_segments_and_gives_them_back_when_it_is_closed(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        before = store.segments.free_count()
        number = new_file(store)
        await store.slabs.make(number, 10 * MIB, chosen=True)
        segments = slab_segments(store)
        assert len(segments) == store.slabs.segment_count
        usable = store.plane.slab_pages(number) * PAGE_SIZE
        assert 10 * MIB <= usable < len(segments) * MIB
        assert store.slabs.bytes == store.space().slabs == len(segments) * store.segments.area * PAGE_SIZE
        assert all(s.held and s.state == State.CLOSED and s.live_pages for s in segments)
        assert store.plane.file_size(number) == 10 * MIB
        inode = store.index.get(number)
        assert inode is not None and InodeFlags.SLAB in inode.flags and not inode.sealed
        await store.slabs.make(number, 20 * MIB)
        assert store.plane.slab_pages(number) * PAGE_SIZE >= 20 * MIB
        await store.slabs.resize(number, 5 * MIB)
        assert store.plane.file_size(number) == 5 * MIB
        await store.slabs.resize(number, 22 * MIB)
        assert store.plane.file_size(number) == 22 * MIB
        assert await store.sealing.seal(number) is None, "a slab is never sealed"
        await store.slabs.closed(number, True)
        await freed(store)
        assert names(store) == set() and not slab_segments(store) and store.slabs.bytes == 0
        await store.segments.flush_summaries()
        assert store.segments.free_count() >= before - 2

    pool = pool_of(tmp_path)
    with_store(pool, work)
    assert fsck(pool, verify_data=True).healthy


def test_beyond_the_quota_nothing_is_taken(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        quota = len(store.segments.all) // 4
        assert store.slabs.quota == quota
        number = new_file(store)
        with pytest.raises(NoSpaceError, match=f"the {quota} that slab_quota"):
            await store.slabs.make(number, quota * MIB)
        assert not slab_segments(store) and store.plane.file_size(number) == 0
        await store.slabs.make(number, quota // 2 * MIB, chosen=True)
        used = store.slabs.segment_count
        with pytest.raises(NoSpaceError):
            await store.slabs.resize(number, quota * MIB)
        assert store.slabs.segment_count == used
        another = new_file(store, b"another")
        assert not await store.slabs.preallocate(another, quota * MIB), "a file as any other"
        told = re.search(r"would take (\d+) of (\d+) segments.* slab_quota = (\S+) in pool.toml", store.slabs.refused)
        assert told is not None and int(told[1]) > quota
        parts = [int(int(told[2]) * each) for each in (float(told[3]) - 0.01, float(told[3]))]
        assert parts[0] < int(told[1]) <= parts[1], "enough, and no more than that"
        assert await store.slabs.preallocate(another, MIB // 2)
        assert not await store.slabs.resize(another, quota * MIB), "a file as any other, from now on"
        assert store.slabs.segment_count == used and store.plane.file_size(another) == MIB // 2
        inode = store.index.get(another)
        assert inode is not None and InodeFlags.SLAB not in inode.flags
        sealed = await store.sealing.seal(another)
        assert sealed is not None and sealed.size == MIB // 2

    pool = pool_of(tmp_path)
    with_store(pool, work)


def test_the_quota_is_the_pool_s_and_0_forbids_slabs(tmp_path: Path) -> None:
    async def none(store: Store) -> None:
        with pytest.raises(NoSpaceError):
            await store.slabs.make(new_file(store), 1)

    async def half(store: Store) -> None:
        assert store.slabs.quota == len(store.segments.all) // 2

    pool = pool_of(tmp_path)
    with_quota(pool, 0)
    with_store(pool, none)
    with_quota(pool, 0.5)
    with_store(pool, half)
    config = load(pool)
    assert config is not None and config.slab_quota == 0.5
    assert parse(config.dump(), "dump") == config
    assert "slab_quota" not in dataclasses.replace(config, slab_quota=0.25).dump()
    for wrong in ("-0.1", "1.5", '"a"', "true"):
        with pytest.raises(PoolError, match="slab_quota"):
            parse(_with(config, wrong), "wrong")


def _with(config: PoolConfig, quota: str) -> str:
    return config.dump().replace("slab_quota = 0.5", f"slab_quota = {quota}")


def test_only_an_untouched_file_that_is_open_becomes_a_slab(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        sealed = await write(store, b"block")
        with pytest.raises(InvalidArgumentError, match="not open"):
            await store.slabs.make(sealed.inode, MIB)
        with pytest.raises(InvalidArgumentError, match="not open"):
            await store.slabs.choose(sealed.inode)
        await store.sealing.rewrite(sealed.inode, True)
        with pytest.raises(BusyError, match="content"):
            await store.slabs.make(sealed.inode, MIB)
        assert not slab_segments(store)
        number = new_file(store)
        store.plane.file_truncate(number, 3 * MIB)
        await store.slabs.choose(number)
        assert store.plane.slab_pages(number) * PAGE_SIZE >= 3 * MIB

    pool = pool_of(tmp_path)
    with_store(pool, work)


def test_one_that_was_not_overwritten_becomes_a_file(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        number = new_file(store)
        await store.slabs.make(number, 5 * MIB)
        await store.slabs.closed(number, False)
        await freed(store)
        assert not await store.slabs.resize(number, MIB)
        inode = store.index.get(number)
        assert inode is not None and inode.sealed and inode.size == 5 * MIB and InodeFlags.SLAB not in inode.flags
        chosen = new_file(store, b"chosen")
        await store.slabs.make(chosen, 5 * MIB, chosen=True)
        await store.slabs.closed(chosen, False)  # it goes all the same: nobody has it open
        await freed(store)
        assert names(store) == {b"slab"} and not slab_segments(store)

    pool = pool_of(tmp_path)
    with_store(pool, work)
    assert fsck(pool, verify_data=True).healthy


def test_a_slab_keeps_its_segments_when_an_earlier_one_of_the_same_file_is_freed_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(store: Store) -> None:
        number, free = new_file(store), store.slabs.freed
        late: list[tuple[InodeNumber, int]] = []
        monkeypatch.setattr(store.slabs, "freed", lambda inode, first: late.append((inode, first)))
        await store.slabs.make(number, 5 * MIB)
        before = slab_segments(store)
        await store.slabs.closed(number, False)
        with trio.fail_after(50 * slowness()):
            while not late:  # as if somebody were still reading the slab, which is a file by now
                await trio.sleep(0.01)
        await store.sealing.rewrite(number, False)
        await store.slabs.make(number, 7 * MIB)
        mine = [segment for segment in slab_segments(store) if segment not in before]
        assert len(mine) >= 7 and store.slabs.segment_count == len(mine) + len(before)
        for inode, first in late:
            free(inode, first)
        assert store.slabs.segment_count == len(mine) and store.slabs.count == 1
        assert all(segment.held for segment in mine)
        assert not [segment for segment in before if segment.held]
        monkeypatch.setattr(store.slabs, "freed", free)
        await store.slabs.closed(number, True)
        await freed(store)

    with_store(pool_of(tmp_path), work)


@pytest.mark.parametrize("index", [True, False], ids=["index", "rebuild"])
def test_a_crash_leaves_empty_segments(tmp_path: Path, index: bool) -> None:
    async def crash(store: Store) -> None:
        await write(store, b"block")
        await store.slabs.make(new_file(store), 10 * MIB)
        await store.sync()
        await store.slabs.make(new_file(store, b"later"), 10 * MIB)
        assert len(slab_segments(store)) > 20

    async def after(store: Store) -> None:
        assert names(store) == {b"block"} and not slab_segments(store) and store.slabs.bytes == 0
        rested = {number for number in store.segments._late if store.segments.all[number].stream == Stream.SLAB}
        assert len(rested) > 20, "late writes of the dead daemon have time to land"

    pool = pool_of(tmp_path)
    crashed_store(pool, crash)
    if not index:
        for file in (pool / "index").iterdir():
            file.unlink()
        (pool / "index").rmdir()
    with_store(pool, after)
    assert fsck(pool, verify_data=True).healthy


def test_a_slab_on_a_device_that_fails_has_failed_and_its_segments_come_back(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        number = new_file(store)
        await store.slabs.make(number, 20 * MIB)
        lies_on = {device for s in slab_segments(store) for device, _ in store.segments.members[s.index]}
        assert len(lies_on) == 4
        with pytest.raises(UsageError, match=f"device 1 has 1 slab .*{number}"):
            await store.remove_device(1, drain=False)
        with pytest.raises(UsageError, match="has 1 slab"):
            await store.remove_device(1, drain=True)
        store.service.fail(1, "as the test says")
        assert store.slabs.on_segments(range(len(store.segments.all))) == []
        with trio.fail_after(30 * slowness()):
            while store.service.all[1].state.away:
                await trio.sleep(0.05)
        with pytest.raises(PlaneError) as failure:
            store.plane.slab_extend(InodeNumber(number + 1000), 0, False, [])
        assert failure.value.errno == errno.ENOENT
        await store.slabs.closed(number, False)  # its content cannot be believed
        await freed(store)
        assert names(store) == set() and not slab_segments(store)
        await store.remove_device(1, drain=False)

    pool = pool_of(tmp_path)
    with_store(pool, work)


def test_eviction_makes_room_for_a_slab_and_leaves_it_alone(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        for i in range(1500):  # headers of 64 KiB: most of the pool
            await write(store, b"%d" % i, 64 * MIB)
        number = new_file(store)
        await store.slabs.make(number, 20 * MIB)
        mine = {(s.index, s.generation) for s in slab_segments(store)}
        for i in range(1500):
            await write(store, b"again %d" % i, 64 * MIB)
        await store.evict(1 << 40)
        assert {(s.index, s.generation) for s in slab_segments(store)} == mine
        assert store.evictor.counters.segments > 20
        assert names(store) == {b"slab"}

    pool = pool_of(tmp_path)
    with_store(pool, work)
