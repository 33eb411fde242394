"""Devices in and out of service, without a mount. The lost blocks are those that the layout says, and those that come
back are those that the index has kept. The clock is the tests': they wait for states, and it jumps meanwhile."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import store_pools
import trio
from store_pools import (
    OPTIONS,
    crashed_store,
    make,
    make_pool,
    names,
    pass_time,
    rename,
    unlink,
    verify_all,
    write,
)

from kvfs.errors import DeviceError, KvfsError, NoSpaceError, UsageError
from kvfs.index.lmdb import LmdbIndex
from kvfs.pool.config import PoolConfig, load
from kvfs.pool.devices import Device
from kvfs.pool.format import META_CLEAN, Stream
from kvfs.record import InodeFlags, Kind
from kvfs.store import device_service as service_module
from kvfs.store import health
from kvfs.store.device_service import DeviceService
from kvfs.store.fsck import fsck
from kvfs.store.health import DeviceState
from kvfs.store.segment import usage
from kvfs.store.store import Store
from kvfs.types import PAGE_SIZE, ROOT_INODE, InodeNumber, SegmentIndex

MIB = 1 << 20
FAULT_ERROR, BOTH = 1, 3
SICK = 1
SIZE = 64 * MIB  # of zeros: its header alone takes 18 pages, so some blocks lie on every device


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices have as much time to answer though the clock jumps."""
    monkeypatch.setattr(service_module, "_LABEL_TIMEOUT_S", 100_000.0)


def with_store(path: Path, work: Callable[[Store], Awaitable[None]]) -> None:
    store_pools.with_store(path, work, jumping=True)


def pool_of(path: Path, width: int) -> Path:
    return make_pool(path / "pool", files=4, size=32 * MIB, stripe_width=width, segment_size=width * MIB)


def seen(store: Store, parent: int = ROOT_INODE) -> set[bytes]:
    """The names in the index, without the block table."""
    return {name for name, _ in store.index.list(InodeNumber(parent), b"", 100_000)}


def sicken(store: Store) -> None:
    """Its label can be read and written, its segments cannot: it stays away until it is cured."""
    store.plane.fault_set(SICK, FAULT_ERROR, BOTH, 1, errno.EIO)


def cure(store: Store) -> None:
    store.plane.fault_set(SICK, 0, BOTH, 0, 0)


def fail(store: Store) -> None:
    sicken(store)
    store.service.fail(SICK, "as the test says")


async def until(store: Store, state: DeviceState, device: int = SICK) -> None:
    await come(lambda: store.service.all[device].state == state)


async def come(condition: Callable[[], object]) -> None:
    """Let time pass until it is true: to the timeout of the test, if it never is."""
    while not condition():
        await pass_time(0.02)


async def back(store: Store) -> None:
    cure(store)
    store.service.all[SICK].probe_at = 0.0
    await until(store, DeviceState.ONLINE)


async def fill(store: Store, count: int = 300) -> dict[bytes, bool]:
    """Blocks; for each whether it has a part on the sick device, as the layout says."""
    found = {}
    for i in range(count):
        block = await write(store, b"%d" % i, SIZE)
        found[block.name] = any(
            device == SICK for segment in usage(block) for device, _ in store.segments.members[segment]
        )
    return found


@pytest.mark.parametrize("width", [1, 2, 4])
def test_what_is_lost_is_what_the_layout_says_at_once_and_all_of_it_comes_back(tmp_path: Path, width: int) -> None:
    async def work(store: Store) -> None:
        blocks = await fill(store)
        left = {name for name, lost in blocks.items() if not lost}
        assert 0 < len(left) < len(blocks) or width == 4
        fail(store)
        assert seen(store) == left  # no await in between
        await come(lambda: not store.service._to_hide and not store.service._lock.locked())
        assert names(store) == left and store.plane.table_statistics()["records"] == len(left) + 1
        await verify_all(store)
        lost = {s.index for s in store.segments.all if s.lost}
        assert lost == {i for i, members in enumerate(store.segments.members) if any(d == SICK for d, _ in members)}
        if width == 4:
            with pytest.raises(DeviceError, match="away"):
                await write(store, b"new")
        for i in range(50 * (width < 4)):
            block = await write(store, b"new %d" % i, SIZE)
            assert not lost.intersection(usage(block))
            left.add(block.name)
        await store.sync()
        await back(store)
        everything = names(store)
        assert everything >= set(blocks) | left
        await verify_all(store)

    pool = pool_of(tmp_path, width)
    with_store(pool, work)
    report = fsck(pool, verify_data=True)
    assert not report.damaged, report.findings


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "for a writer"])
def test_a_segment_that_is_opened_as_its_device_goes_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Its header may lie on another of its devices, and be written."""

    async def work(store: Store) -> None:
        segments, store_write = store.segments, store.plane.store_write
        opened: list[int] = []

        async def write_as_it_goes(segment: int, page: int, data: bytes) -> None:
            await store_write(segment, page, data)
            if page == 0 and not opened and any(device == SICK for device, _ in segments.members[segment]):
                opened.append(segment)
                fail(store)

        monkeypatch.setattr(store.plane, "store_write", write_as_it_goes)
        if not ahead:
            monkeypatch.setattr(segments, "prepare", trio.lowlevel.checkpoint)
        for i in range(200):
            lost = {s.index for s in segments.all if s.lost}  # which a task says, soon after the device has failed
            block = await write(store, b"new %d" % i, SIZE)
            assert not lost.intersection(usage(block))
        assert opened and segments.all[opened[0]].lost
        await back(store)
        await verify_all(store)

    with_store(pool_of(tmp_path, 2), work)


def test_names_given_anew_removed_or_renamed_while_a_device_was_away_stay_so(tmp_path: Path) -> None:
    def lost_names(store: Store, blocks: dict[bytes, bool]) -> list[bytes]:
        return [name for name, lost in blocks.items() if lost and store.index.lookup(ROOT_INODE, name) is None]

    async def work(store: Store) -> None:
        directory = make(store, ROOT_INODE, b"directory", Kind.DIRECTORY)
        inside = {b"in %d" % i: await write(store, b"in %d" % i, SIZE, directory.inode) for i in range(60)}
        blocks = await fill(store, 120)
        fail(store)
        lost = lost_names(store, blocks)
        anew, removed, over = lost[:3]
        new = await write(store, anew, 4096)
        await write(store, removed, 4096)
        unlink(store, removed)
        other = await write(store, b"other", 8192)
        rename(store, other.inode, over)
        # A directory that looks empty without what is hidden can be removed; what was in it stays gone.
        for name in list(inside):
            if store.index.lookup(directory.inode, name) is not None:
                unlink(store, name, directory.inode)
        assert store.index.is_empty(directory.inode)
        store.blocks.rmdir(ROOT_INODE, directory.name)
        left = set(lost) - {removed}
        await back(store)
        assert left <= names(store)
        assert store.index.lookup(ROOT_INODE, anew) == new.inode
        assert store.index.lookup(ROOT_INODE, over) == other.inode
        assert store.index.lookup(ROOT_INODE, removed) is None
        assert not seen(store, directory.inode)
        await verify_all(store)

    pool = pool_of(tmp_path, 1)
    with_store(pool, work)
    report = fsck(pool, verify_data=True)
    assert not report.damaged, report.findings


def test_errors_of_the_device_alone_take_it_out_of_service_and_its_end_puts_it_back(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        blocks = await fill(store)
        sicken(store)
        for name in blocks:
            number = store.index.lookup(ROOT_INODE, name)
            record = None if number is None else store.index.raw(number)
            if record is not None:
                try:
                    await store.plane.store_verify(record, True)
                except KvfsError as error:
                    assert error.errno == errno.EIO
        await until(store, DeviceState.FAILED)
        assert names(store) == {name for name, lost in blocks.items() if not lost}
        # The label can be read all along: but not its segments, so it stays out, however often it is tried.
        await pass_time(3)
        assert store.service.all[SICK].state in (DeviceState.FAILED, DeviceState.RETURNING)
        await back(store)
        assert names(store) >= set(blocks)

    with_store(pool_of(tmp_path, 1), work)


def test_a_device_that_is_back_is_used_soon_however_often_it_went_and_whatever_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, answer = 0, threading.Event()
    probed: dict[int, float] = {}
    find, bring_back = DeviceService._find, DeviceService.bring_back

    def find_or_hang(self: DeviceService, device: int) -> Device | None:
        if device == silent:
            answer.wait()
        return find(self, device)

    async def probe(self: DeviceService, device: int) -> None:
        probed[device] = trio.current_time()
        await bring_back(self, device)

    async def work(store: Store) -> None:
        blocks = await fill(store, 60)
        store.service.fail(silent, "as the test says: it does not answer")
        for turn in range(5):
            store.service.fail(SICK, "as the test says")
            began = trio.current_time()
            await until(store, DeviceState.ONLINE)
            # At the first look after a second: neither its history nor the silent one puts that off.
            assert 1 <= probed[SICK] - began <= 1 + 2 * service_module._WATCH_S
            await write(store, b"more %d" % turn)
        assert store.service.all[silent].state == DeviceState.FAILED
        answer.set()
        await until(store, DeviceState.ONLINE, silent)
        assert names(store) >= set(blocks)
        await verify_all(store)

    monkeypatch.setattr(DeviceService, "_find", find_or_hang)
    monkeypatch.setattr(DeviceService, "bring_back", probe)
    try:
        with_store(pool_of(tmp_path, 2), work)
    finally:
        answer.set()


def test_the_loss_of_a_connection_is_not_held_against_the_device_that_comes_after_it(tmp_path: Path) -> None:
    new = tmp_path / "new"
    with new.open("wb") as file:
        file.truncate(33 * MIB)

    async def work(store: Store) -> None:
        await fill(store, 20)
        for replaced in (False, True):
            store.service.note_connection(SICK, False, "connection lost, as the test says")
            await until(store, DeviceState.FAILED)
            if replaced:
                await store.service.replace(SICK, new, force=False)
            await until(store, DeviceState.ONLINE)
            await pass_time(1.5)
            assert store.service.all[SICK].state == DeviceState.ONLINE, store.service.all[SICK].reason

    with_store(pool_of(tmp_path, 1), work)


def test_two_devices_of_a_stripe_come_back_at_once_with_all_that_lies_on_both(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        blocks = await fill(store, 120)
        for _ in range(5):
            for device in range(4):
                store.service.fail(device, "as the test says")
            assert not seen(store)
            for device in range(4):
                await until(store, DeviceState.ONLINE, device)
            assert names(store) == set(blocks)
        await verify_all(store)

    with_store(pool_of(tmp_path, 2), work)


def test_nobody_waits_for_segments_that_rest_on_a_device_that_is_away(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        segments = store.segments
        for i in range(300):
            await write(store, b"%d" % i, SIZE)
        segments.retire_open()
        for name in names(store):
            unlink(store, name)
        fail(store)  # no await in between: all that was freed rests still
        assert segments._resting.intersection(store.service.segments_of(SICK))
        taken = []
        with pytest.raises(NoSpaceError, match="carry"):
            while True:
                taken.append(await segments._next(Stream.CARRIED))
        assert len(taken) >= len(segments.all) // 2
        for segment in taken:
            segments.retire(segment)
        await write(store, b"more")

    with_store(pool_of(tmp_path, 1), work)


@pytest.mark.parametrize("crash", [False, True])
def test_a_mount_without_a_device_hides_it_and_the_next_one_with_it_has_all_back(tmp_path: Path, crash: bool) -> None:
    pool = pool_of(tmp_path, 1)
    blocks: dict[bytes, bool] = {}
    device, away = pool / "devices" / str(SICK), tmp_path / "away"

    async def first(store: Store) -> None:
        blocks.update(await fill(store))
        await store.sync()

    async def degraded(store: Store) -> None:
        left = {name for name, lost in blocks.items() if not lost}
        assert names(store) >= left and seen(store).isdisjoint(set(blocks) - left)
        name = next(name for name in blocks if blocks[name])
        await write(store, name, 4096)
        blocks[name] = False
        await store.sync()

    async def again(store: Store) -> None:
        assert store.service.all[SICK].state == DeviceState.ONLINE
        assert names(store) >= set(blocks)
        await verify_all(store)

    with_store(pool, first)
    device.rename(away)
    for _ in range(2):
        (crashed_store if crash else with_store)(pool, degraded)
    away.rename(device)
    (crashed_store if crash else with_store)(pool, again)
    with_store(pool, again)


def test_without_the_index_nothing_of_a_device_that_missed_a_mount_is_believed(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, 1)
    device, away = pool / "devices" / str(SICK), tmp_path / "away"
    blocks: dict[bytes, bool] = {}

    async def first(store: Store) -> None:
        blocks.update(await fill(store, 100))

    async def degraded(store: Store) -> None:
        for name, lost in list(blocks.items()):
            if lost:
                await write(store, name, 4096)
                unlink(store, name)
        await store.sync()

    async def again(store: Store) -> None:
        assert names(store) == {name for name, lost in blocks.items() if not lost}
        # Its segments are free, and say so before they are used.
        await store.sync()
        assert all(store.segments.all[i].live_pages == 0 for i in store.service.segments_of(SICK))
        await pass_time(0.5)

    with_store(pool, first)
    device.rename(away)
    with_store(pool, degraded)
    away.rename(device)
    for _ in range(2):
        shutil.rmtree(pool / "index")
        with_store(pool, again)


def test_a_device_of_another_epoch_or_a_blank_one_is_not_taken_in(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, 1)
    copy = tmp_path / "copy"

    async def nothing(store: Store) -> None:
        await write(store, b"%d" % len(names(store)), SIZE)

    async def work(store: Store) -> None:
        device = pool / "devices" / str(SICK)
        store.service.fail(SICK, "as the test says")
        device.rename(tmp_path / "own")
        shutil.copy(copy / "devices" / str(SICK), device)
        with pytest.raises(KvfsError, match="used elsewhere"):
            await store.service.bring_back(SICK)
        with device.open("r+b") as file:
            file.truncate(0)
            file.truncate(32 * MIB)
        with pytest.raises(KvfsError, match="no valid kvfs label"):
            await store.service.bring_back(SICK)
        assert store.service.all[SICK].state == DeviceState.FAILED
        device.unlink()
        (tmp_path / "own").rename(device)
        await store.service.bring_back(SICK)
        assert store.service.all[SICK].state == DeviceState.ONLINE

    with_store(pool, nothing)
    shutil.copytree(pool, copy)
    for _ in range(3):
        with_store(copy, nothing)
    with_store(pool, work)


def test_a_removed_device_stays_out_and_its_replacement_starts_empty(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, 2)
    blocks: dict[bytes, bool] = {}
    new = tmp_path / "new"
    with new.open("wb") as file:
        file.truncate(33 * MIB)

    async def remove(store: Store) -> None:
        blocks.update(await fill(store))
        await store.remove_device(SICK, drain=False)
        assert not store.index.is_hiding, "nothing is left to hide"
        with pytest.raises(UsageError, match="removed already"):
            await store.remove_device(SICK, drain=False)
        with pytest.raises(UsageError, match="would be left"):
            await store.remove_device(next(d for d, _ in store.segments.members[1 - (SICK in (0, 2))]), drain=False)

    async def without(store: Store) -> None:
        assert names(store) == {name for name, lost in blocks.items() if not lost}
        await verify_all(store)

    async def replaced(store: Store) -> None:
        await store.service.replace(SICK, new, force=False)
        await come(lambda: not store.segments._resting)
        homes = set()
        for i in range(600):
            homes.update(usage(await write(store, b"more %d" % i, SIZE)))
        assert homes.intersection(store.service.segments_of(SICK))

    with_store(pool, remove)
    (pool / "devices" / str(SICK)).unlink()
    with_store(pool, without)
    assert not fsck(pool, verify_data=True).damaged
    with_store(pool, replaced)
    config = load(pool)
    assert config is not None and config.revision == 2 and not config.devices[SICK].removed
    report = fsck(pool, verify_data=True)
    assert not report.damaged, report.findings


def test_a_block_that_enters_while_its_device_is_replaced_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was written before the device went. A block that stays counts in a segment which has another life."""
    new = tmp_path / "new"
    with new.open("wb") as file:
        file.truncate(33 * MIB)

    async def work(store: Store) -> None:
        segments, service = store.segments, store.service
        head = segments.head(Stream.NEW)
        while head.segment is None or segments.members[head.segment.index][0][0] != SICK:
            await write(store, b"%d" % segments.pages_written, SIZE)
        (run,) = await segments.allocate(head, 1, 4)
        before = make(store, ROOT_INODE, b"late")
        sleep, entered = trio.sleep, False

        async def enter_and_sleep(seconds: float) -> None:
            """It waits for the runs in flight on the device."""
            nonlocal entered
            if not entered and service.all[SICK].state == DeviceState.FAILED:
                entered = True
                late = before.copy()
                late.flags |= InodeFlags.SEALED
                late.size, late.header_pages, late.version = 4 * PAGE_SIZE, 1, before.version + 1
                late.generation, late.segment, late.page = run.generation, SegmentIndex(run.segment), run.page
                assert store.blocks.enter(before, before.pack(), late, copy=False)
                segments.release([run])
            await sleep(seconds)

        monkeypatch.setattr(trio, "sleep", enter_and_sleep)
        await service.replace(SICK, new, force=False)
        assert entered and b"late" not in seen(store)
        assert all(not segments.all[index].live_pages for index in service.segments_of(SICK))
        await verify_all(store)

    with_store(pool_of(tmp_path, 1), work)


def test_rules_that_are_read_while_a_removal_is_written_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(tmp_path, 2)
    real, rules = service_module.write_config, iter([0.5, 0.125])

    async def work(store: Store) -> None:
        def write_config(path: Path, config: PoolConfig) -> None:
            for quota in rules:
                trio.from_thread.run_sync(store.take_rules, replace(store.config, slab_quota=quota))
                break
            real(path, config)

        monkeypatch.setattr(service_module, "write_config", write_config)
        await store.remove_device(SICK, drain=False)
        here, there = store.config, load(pool)
        assert there == here and here.devices[SICK].removed
        assert (here.slab_quota, here.revision) == (0.125, 1)

    with_store(pool, work)


def test_drained_what_is_pinned_or_hot_stays(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        blocks = await fill(store, 200)
        lost = [name for name, is_lost in blocks.items() if is_lost]
        numbers = {name: store.index.lookup(ROOT_INODE, name) for name in lost}
        for name in lost[:10]:
            await store.blocks.pin(numbers[name] or InodeNumber(0))
        store.plane.uses.touch([numbers[name] or 0 for name in lost[10:20]])
        told: list[tuple[int, int]] = []
        gone = await store.remove_device(SICK, drain=True, progress=lambda *so_far: told.append(so_far))
        # Bytes are told of as they are carried away.
        assert told == sorted(told) and 0 < told[0][0] < told[-1][0]
        assert {total for _, total in told} == {told[-1][0]}
        # Those that were not carried over are gone, too.
        assert set(lost[:20]) <= names(store) and gone == len(set(blocks) - names(store)) > 0
        await verify_all(store)

    pool = pool_of(tmp_path, 1)
    with_store(pool, work)
    assert not fsck(pool, verify_data=True).damaged


def test_a_slow_device_gets_no_new_segments_unless_too_few_were_left(tmp_path: Path) -> None:
    def slow(work: Callable[[Store], Awaitable[None]], width: int) -> None:
        async def begin(store: Store) -> None:
            store.service._set(SICK, DeviceState.SLOW, "as the test says")
            store.service._apply_states()
            await work(store)

        with_store(pool_of(tmp_path / str(width), width), begin)

    async def avoided(store: Store) -> None:
        for i in range(60):
            block = await write(store, b"%d" % i, SIZE)
            assert all(d != SICK for segment in usage(block) for d, _ in store.segments.members[segment])

    async def used(store: Store) -> None:
        await write(store, b"a", SIZE)

    for width in (1, 2, 4):
        (tmp_path / str(width)).mkdir()
        slow(avoided if width < 4 else used, width)


def test_a_device_that_was_slow_is_not_for_long_though_nobody_asks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "SAMPLES", 8)

    async def work(store: Store) -> None:
        await fill(store, 100)
        await verify_all(store)
        await come(lambda: all("read" in service.pace.last_ns for service in store.service.all))
        monkeypatch.setattr(service_module, "_BEAT_S", 1000.0)  # asked every turn, or not within the test
        monkeypatch.setattr(health, "SLOW_NS", 10**12)
        store.service._set(SICK, DeviceState.SLOW, "as the test says")
        store.service._apply_states()
        await until(store, DeviceState.ONLINE)

    with_store(pool_of(tmp_path, 1), work)


def test_eviction_goes_on_beside_a_device_that_is_away(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        before = await fill(store, 100)
        fail(store)
        for i in range(900):
            await write(store, b"more %d" % i, 200 * MIB)
        assert store.statistics().eviction.segments
        assert not any(s.avoided and s.state == s.state.EVICTING for s in store.segments.all)
        await back(store)
        kept = [name for name, lost in before.items() if lost and name in names(store)]
        assert kept, "what lies on a device that is away is not evicted"
        await verify_all(store)

    with_store(pool_of(tmp_path, 1), work)


def test_a_store_that_is_cancelled_from_outside_still_closes_cleanly(tmp_path: Path) -> None:
    """Seals under way cannot be cancelled: their completions come until the store has closed."""
    pool = pool_of(tmp_path, 2)

    async def main() -> None:
        with trio.CancelScope() as scope:
            async with Store.open(pool, OPTIONS) as store:
                await fill(store, 10)
                late = make(store, ROOT_INODE, b"late")
                store.plane.file_truncate(late.inode, SIZE)
                scope.cancel()
                await store.sealing.seal(late.inode)
        assert scope.cancelled_caught

    trio.run(main)

    async def look(store: Store) -> None:
        assert seen(store) == {b"%d" % i for i in range(10)} | {b"late"}

    index = LmdbIndex(pool / "index", read_only=True)
    assert index.meta_get(META_CLEAN) == b"1"
    index.close()
    with_store(pool, look)
