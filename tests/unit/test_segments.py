"""Segments under a real data plane: places for blocks, failing writes, summaries, accounts."""

from __future__ import annotations

import errno
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import trio
from helpers import slowness
from store_pools import (
    OPTIONS,
    crashed_store,
    make,
    make_pool,
    names,
    rename,
    settle,
    unlink,
    verify_all,
    with_store,
    write,
)

import kvfs.store.segments as segments_module
from kvfs.errors import DeviceError, FileTooLargeError
from kvfs.names import Names, Note, Place
from kvfs.plane import PlaneError
from kvfs.pool.config import PoolConfig
from kvfs.pool.format import Stream, Summary
from kvfs.record import InodeFlags
from kvfs.store.segment import Segment, State, usage
from kvfs.store.segments import Segments
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber

BIG = 64 << 20
FAULT_ERROR, WRITES, READS = 1, 2, 1


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return make_pool(tmp_path / "pool")


def live(store: Store) -> dict[int, int]:
    """Live pages by segment, from the index alone."""
    found: dict[int, int] = {}
    for _, number in store.index.list(ROOT_INODE, b"", 100_000):
        inode = store.index.get(number)
        assert inode is not None
        for segment, pages in usage(inode).items():
            found[segment] = found.get(segment, 0) + pages
    return found


def test_live_pages_are_those_of_the_index(pool: Path) -> None:
    async def work(store: Store) -> None:
        for i in range(60):
            await write(store, b"%d" % i, BIG)
        for i in range(0, 60, 2):
            unlink(store, b"%d" % i)
        rename(store, store.index.lookup(ROOT_INODE, b"1") or InodeNumber(0), b"3")
        assert {s.index: s.live_pages for s in store.segments.all if s.live_pages} == live(store)

    with_store(pool, work)

    async def check(store: Store) -> None:
        assert {s.index: s.live_pages for s in store.segments.all if s.live_pages} == live(store)

    with_store(pool, check)
    crashed_store(pool, work_again)
    with_store(pool, check)


async def work_again(store: Store) -> None:
    for i in range(100, 140):
        await write(store, b"%d" % i, BIG)


def test_a_segment_with_nothing_live_is_free_again(pool: Path) -> None:
    async def work(store: Store) -> None:
        for i in range(60):
            await write(store, b"%d" % i, BIG)
        closed = [s for s in store.segments.all if s.state == State.CLOSED]
        assert closed
        for i in range(60):
            unlink(store, b"%d" % i)
        assert all(segment.state == State.FREE for segment in closed)
        await settle(store)
        generation = closed[0].generation
        summary = await store.segments.reader.summary(closed[0].index, generation)
        assert summary is not None and not summary.entries
        assert summary.covered_page == store.segments.geometry.end_page

    with_store(pool, work)


def test_runs_never_overlap_and_stay_inside(pool: Path) -> None:
    async def work(store: Store) -> None:
        segments = store.segments
        taken: set[tuple[int, int, int]] = set()
        for pages in (1, 5, 100, segments.area // 2, segments.area, 3 * segments.area, 7):
            runs = await segments.allocate(store.segments.head(Stream.NEW), 1, pages)
            assert sum(run.page_count for run in runs) == pages + 1 + len(runs) - 1
            assert len(runs) <= segments.runs_bound(pages)
            for run in runs:
                assert run.page >= 1 and run.page + run.page_count <= segments.geometry.end_page
                places = {(run.segment, run.generation, page) for page in range(run.page, run.page + run.page_count)}
                assert not places & taken
                taken |= places
            segments.release(runs)

    with_store(pool, work)


def test_a_writer_that_found_no_segment_gets_the_one_that_was_being_opened_ahead(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one that may be opened is on its way as the writer looks: it does not wait for a poll."""

    async def work(store: Store) -> None:
        segments, opened = store.segments, Segments._format
        begun, goes_on = trio.Event(), trio.Event()

        async def slowly(self: Segments, segment: Segment, stream: Stream) -> bool:
            begun.set()
            await goes_on.wait()
            return await opened(self, segment, stream)

        segments.retire_open()
        kept = list(segments._free)[: segments.reserve + 1]
        monkeypatch.setattr(segments, "_free", deque(kept))
        monkeypatch.setattr(Segments, "_format", slowly)
        monkeypatch.setattr(segments_module, "_SPACE_POLL_S", 120.0)
        segments.ready_taken.set()

        async def write() -> None:
            segments.release(await segments.allocate(segments.head(Stream.NEW), 1, 1))

        # Without being told it takes until the next poll, or commit of the index.
        with trio.fail_after(50 * slowness()):
            await begun.wait()
            assert len(segments._free) == segments.reserve and not segments._ready
            async with trio.open_nursery() as nursery:
                nursery.start_soon(write)
                while not segments.waits:
                    await trio.sleep(0.01)
                goes_on.set()

    with_store(pool, work, replace(OPTIONS, commit_interval_s=1000))


def test_a_failing_write_goes_to_other_segments(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", files=3, stripe_width=1)

    async def work(store: Store) -> None:
        await write(store, b"before")
        before = store.index.get(store.index.lookup(ROOT_INODE, b"before") or InodeNumber(0))
        assert before is not None
        device = store.segments.members[before.segment][0][0]
        store.plane.fault_set(device, FAULT_ERROR, WRITES, 1, errno.EIO)
        for i in range(10):
            block = await write(store, b"%d" % i)
            assert store.segments.members[block.segment][0][0] != device
        assert store.statistics().seal_retries
        store.plane.fault_set(device, 0, WRITES | READS, 0, 0)
        await verify_all(store)

    with_store(pool, work)


def test_a_file_whose_header_fits_in_no_segment_is_refused_when_it_is_written(pool: Path) -> None:
    async def work(store: Store) -> None:
        area = store.segments.area
        largest = 256 * store.segments.geometry.segment_size
        inode = make(store, ROOT_INODE, b"x")
        with pytest.raises(PlaneError) as refused:
            store.plane.file_truncate(inode.inode, largest + 1)
        assert refused.value.errno == errno.EFBIG
        store.plane.file_truncate(inode.inode, largest)
        assert await store.sealing.seal(inode.inode) is not None
        with trio.fail_after(50 * slowness()), pytest.raises(FileTooLargeError, match=f"{area} pages does not fit"):
            await store.segments.allocate(store.segments.head(Stream.NEW), area, 0)
        await verify_all(store)

    with_store(pool, work)


def test_when_every_device_fails_the_seal_fails_and_the_file_stays_dirty(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.store.health.FAILURES", 10**6)  # or both go out of service

    async def work(store: Store) -> None:
        inode = make(store, ROOT_INODE, b"x")
        store.plane.file_truncate(inode.inode, 4096)
        for device in range(2):
            store.plane.fault_set(device, FAULT_ERROR, WRITES, 1, errno.EIO)
        with pytest.raises((PlaneError, DeviceError)):
            await store.sealing.seal(inode.inode)
        for device in range(2):
            store.plane.fault_set(device, 0, WRITES | READS, 0, 0)
        assert await store.sealing.seal(inode.inode) is not None
        await verify_all(store)

    with_store(pool, work)


def test_a_spill_whose_file_stays_busy_is_given_up_and_waited_for_no_more(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.store.sealing.JOB_TIMEOUT_S", 0.05)

    async def work(store: Store) -> None:
        number = make(store, ROOT_INODE, b"x").inode
        store.plane.file_truncate(number, 4096)
        ended: list[int] = []
        cancel = store.plane.spill_cancel

        def spy(inode: int) -> None:
            cancel(inode)
            ended.append(inode)

        monkeypatch.setattr(store.plane, "spill_cancel", spy)
        assert store.plane.seal_begin(number).dirty
        await store.sealing.spill_quietly(number)
        assert ended == [number]
        store.plane.seal_end(number, False)
        assert await store.sealing.seal(number) is not None

    with_store(pool, work)


def test_a_summary_names_what_is_live_under_its_current_name(pool: Path) -> None:
    async def work(store: Store) -> None:
        first = await write(store, b"a.tmp")
        await write(store, b"b")
        rename(store, first.inode, b"a")
        unlink(store, b"b")
        await settle(store)
        summary = await store.segments.reader.summary(first.segment, first.generation)
        assert summary is not None and not summary.closed
        current = store.index.raw(first.inode)
        assert current is not None and summary.entries == current
        assert summary.covered_page == store.segments.all[first.segment].next_page

    with_store(pool, work)


class Busy:
    """A double of a place to which the data plane appends in the very moment that it is looked at."""

    def __init__(self, place: Place, names: Names, segment: int) -> None:
        self._place, self._names, self._segment = place, names, segment
        self.taken: list[int] = []
        self.thread = threading.Thread(target=lambda: self.taken.append(self._names.take(self._segment, 4)))

    @property
    def run_count(self) -> int:
        count = self._place.run_count
        if not self.thread.is_alive() and not self.taken:
            self.thread.start()
            self.thread.join(0.2)  # within a step it waits
        return count

    def __getattr__(self, name: str) -> int:
        return cast(int, getattr(self._place, name))


def test_a_summary_covers_no_block_that_is_on_its_way(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    covered: list[int] = []
    pack = segments_module.pack_summary

    def note(config: PoolConfig, summary: Summary, epoch: int) -> bytes:
        covered.append(summary.covered_page)
        return pack(config, summary, epoch)

    async def work(store: Store) -> None:
        block = await write(store, b"a")
        segment = store.segments.all[block.segment]
        store.segments.mark_dirty(segment, gone=False)
        place = segment.place
        busy = Busy(place, store.plane.names, segment.index)
        monkeypatch.setattr(segments_module, "pack_summary", note)
        segment.place = busy  # type: ignore[assignment]
        await store.segments._write_summary(segment)
        segment.place = place
        busy.thread.join(10)
        store.plane.names.release(segment.index, busy.taken[0])
        assert covered[0] <= busy.taken[0]

    with_store(pool, work, replace(OPTIONS, commit_interval_s=1000))


def test_a_segment_that_the_data_plane_went_on_to_is_nobody_elses(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on just before Python wants the head for itself, and Python has not heard of it."""

    async def work(store: Store) -> None:
        segments, names = store.segments, store.plane.names
        head = segments.head(Stream.NEW)
        while not segments._ready:
            await trio.sleep(0.01)
        led = segments._ready[0]
        lead: list[int | None] = [led.index]
        noted = iter([[(int(led.index), int(Note.LED))]])
        set_head, take = names.head, segments.take_notes
        monkeypatch.setattr(names, "lead", lambda: lead[0])

        def closes(segment: int | None, generation: int = 0) -> None:
            lead[0] = segment
            set_head(segment, generation)

        def goes_on() -> None:
            if head.lock.locked():
                monkeypatch.setattr(names, "noted", lambda: next(noted, []))
            take()

        monkeypatch.setattr(names, "head", closes)
        monkeypatch.setattr(segments, "take_notes", goes_on)
        names.withdraw(led.index)
        await segments.make_room(head, 4)
        assert head.segment is led or led.closing or led.state != State.OPEN

    with_store(pool, work)


def test_room_for_a_block_that_goes_on_in_a_second_segment_leaves_none_empty(pool: Path) -> None:
    """The head stays, and there is a segment behind it. A block that does not go on in a second one closes the head."""

    async def work(store: Store) -> None:
        segments, names = store.segments, store.plane.names
        head = segments.head(Stream.NEW)
        await segments.make_room(head, 4)
        first = head.segment
        assert first is not None
        tail = segments.area // 16 + 30
        (run,) = await segments.allocate(head, 1, segments.geometry.end_page - first.next_page - tail - 1)
        segments.release([run])
        while segments._take_ready():  # as if writers had been faster
            pass
        await segments.make_room(head, tail + 50)
        assert head.segment is first and segments._ready and first.next_page == segments.geometry.end_page - tail
        (run,) = await segments.allocate(head, 1, tail - 6)
        segments.release([run])
        await segments.make_room(head, 50)
        assert head.segment is not first and first.state == State.FREE  # nothing in it has entered
        assert names.lead() == head.segment.index

    with_store(pool, work)


def test_a_segment_takes_two_summaries_in_its_life(tmp_path: Path) -> None:
    """One as it is closed, one as it is freed. The renames between take a third now and then: with each turn of all
    summaries, for what is open or was closed since the last."""
    pool = make_pool(tmp_path / "pool", files=2, size=48 << 20)

    async def work(store: Store) -> None:
        async def store_some(first: int, count: int) -> None:
            for i in range(first, first + count):
                block = await write(store, b"%d.tmp" % i, BIG)
                rename(store, block.inode, b"%d" % i)
                if i % 200 == 199:  # so many are stored in a second or so
                    await store._commit_and_flush()

        await store_some(0, 1500)
        before, evicted = store.statistics().segments.summaries_written, store.evictor.counters.segments
        await store_some(1500, 3000)
        lives = store.evictor.counters.segments - evicted
        assert lives > 100
        assert store.statistics().segments.summaries_written - before < 3 * lives

    with_store(pool, work, replace(OPTIONS, commit_interval_s=1000))


def test_a_rename_before_the_first_summary_makes_no_second_copy(pool: Path) -> None:
    async def work(store: Store) -> None:
        block = await write(store, b"a.tmp")
        segment = store.segments.all[block.segment]
        rename(store, block.inode, b"a")
        assert segment.dirty and not segment.copy_stale
        await store.segments.flush_summaries()
        assert segment.summarized and not segment.dirty and not segment.copy_stale
        rename(store, block.inode, b"b")
        assert segment.dirty and segment.copy_stale  # both slots are to have the new name
        for _ in range(2):
            await store.segments.flush_summaries()
        assert store.statistics().segments.summaries_written == 3

    with_store(pool, work, replace(OPTIONS, commit_interval_s=1000))


def test_both_copies_of_a_summary_learn_that_an_open_block_has_no_name_any_more(pool: Path) -> None:
    async def work(store: Store) -> None:
        block = await write(store, b"x")
        await write(store, b"y")
        store.blocks.rename(ROOT_INODE, b"y", ROOT_INODE, b"x")
        found = store.index.get(block.inode)
        assert found is not None and found.nameless
        assert store.segments.all[block.segment].copy_stale

    with_store(pool, work, replace(OPTIONS, commit_interval_s=1000))


def test_a_summary_that_was_not_written_still_has_to_say_what_is_gone(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(store: Store) -> None:
        await write(store, b"stays")
        block = await write(store, b"gone")
        store.segments.retire_open()
        for _ in range(2):
            await store.segments.flush_summaries()
        unlink(store, b"gone")
        segment = store.segments.all[block.segment]

        async def fails(index: int, page: int, data: bytes) -> None:
            raise DeviceError("no")

        with monkeypatch.context() as failing:
            failing.setattr(store.plane, "store_write", fails)
            await store.segments.flush_summaries()
        assert segment.dirty and segment.copy_stale

    with_store(pool, work, replace(OPTIONS, commit_interval_s=1000))


def test_a_summary_that_does_not_fit_is_compressed(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", files=1, size=16 << 20)

    async def work(store: Store) -> None:
        for i in range(110):
            await write(store, b"%d" % i + b"x" * 120, 4096)
        store.segments.retire_open()
        await settle(store)
        assert store.segments.statistics().summaries_too_large == 0
        sizes = []
        for segment in store.segments.all:
            if segment.state == State.CLOSED and segment.live_pages:
                summary = await store.segments.reader.summary(segment.index, segment.generation)
                assert summary is not None and summary.entry_count == len(store.index.segment_inodes(segment.index))
                sizes.append(len(summary.entries))
        assert max(sizes) > store.segments.geometry.summary_pages * 4096

    with_store(pool, work)


def test_seals_of_many_files_at_once_are_all_there(pool: Path) -> None:
    async def work(store: Store) -> None:
        async with trio.open_nursery() as nursery:
            for i in range(200):
                nursery.start_soon(write, store, b"%d" % i, BIG if i % 7 == 0 else 4096)
        assert len(names(store)) == 200
        await verify_all(store)

    with_store(pool, work)


def test_two_seals_of_one_file_do_it_once(pool: Path) -> None:
    async def work(store: Store) -> None:
        inode = make(store, ROOT_INODE, b"x")
        results: list[object] = []

        async def seal() -> None:
            results.append(await store.sealing.seal(inode.inode))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(seal)
            nursery.start_soon(seal)
        assert len([result for result in results if result is not None]) == 1

    with_store(pool, work)


def test_a_rename_during_the_seal_counts(pool: Path) -> None:
    async def work(store: Store) -> None:
        inode = make(store, ROOT_INODE, b"x.tmp")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.sealing.seal, inode.inode)
            while not store.blocks.versions.in_flight:
                await trio.sleep(0)
            rename(store, inode.inode, b"x")
        assert names(store) == {b"x"}
        sealed = store.index.get(inode.inode)
        assert sealed is not None and sealed.sealed and sealed.name == b"x"

    with_store(pool, work)
    with_store(pool, lambda store: _only(store, {b"x"}))


async def _only(store: Store, expected: set[bytes]) -> None:
    assert names(store) == expected
    await verify_all(store)


def test_a_bad_block_is_a_miss(pool: Path) -> None:
    async def work(store: Store) -> None:
        block = await write(store, b"bad")
        await write(store, b"good")
        store.blocks.drop_bad(block.inode, block.segment + 1)  # it has moved since: nothing happens
        assert names(store) == {b"bad", b"good"}
        store.blocks.drop_bad(block.inode, block.segment)
        assert names(store) == {b"good"} and store.plane.table_find_name(ROOT_INODE, b"bad") is None
        assert store.statistics().bad_blocks == 1

    with_store(pool, work)
    with_store(pool, lambda store: _only(store, {b"good"}))


def test_a_file_sealed_again_is_marked_so(pool: Path) -> None:
    async def work(store: Store) -> None:
        block = await write(store, b"x")
        assert InodeFlags.REWRITTEN not in block.flags
        await store.sealing.rewrite(block.inode, True)
        store.plane.file_truncate(block.inode, 100)
        again = await store.sealing.seal(block.inode)
        assert again is not None and again.size == 100 and again.version > block.version
        assert InodeFlags.REWRITTEN in again.flags
        await verify_all(store)

    with_store(pool, work)


def test_who_waits_for_room_is_not_forgotten_where_an_event_is_lost(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data plane tells of the first that waits; it has no memory for that, say."""

    async def work(store: Store) -> None:
        made = trio.Event()

        async def make_room() -> None:
            made.set()

        monkeypatch.setattr(store.sealing, "make_room", make_room)
        monkeypatch.setattr(store.plane, "flush_wanted", lambda: 5)
        with trio.fail_after(60):
            await made.wait()
        monkeypatch.undo()

    with_store(pool, work)
