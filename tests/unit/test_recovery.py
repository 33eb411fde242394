"""After an unclean end, without an index, and with damage: what was sealed is there and right, or gone; nothing
removed comes back."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_pools import (
    LAZY,
    OPTIONS,
    crashed_store,
    make,
    make_pool,
    names,
    rebuilt,
    rename,
    settle,
    unlink,
    verify_all,
    with_store,
    write,
)

from kvfs.errors import DeviceError
from kvfs.pool import config as configuration
from kvfs.pool.format import Stream
from kvfs.pool.geometry import layout
from kvfs.pool.labels import write_labels
from kvfs.pool.making import import_pool
from kvfs.record import Inode, InodeFlags, Kind
from kvfs.store import store as store_module
from kvfs.store.fsck import fsck
from kvfs.store.segment import State
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber

BIG = 64 << 20
# Nothing is committed but by sync(): what the index knows at the crash is then exact.
Work = Callable[[Store], Awaitable[None]]


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return make_pool(tmp_path / "pool")


def found(pool: Path, parent: bytes | None = None) -> set[bytes]:
    """The names there after the next mount; every block verified."""
    result: set[bytes] = set()

    async def work(store: Store) -> None:
        directory = ROOT_INODE if parent is None else store.index.lookup(ROOT_INODE, parent)
        assert directory is not None
        result.update(names(store, directory))
        await verify_all(store, directory)
        assert all(segment.live_pages >= 0 for segment in store.segments.all)

    with_store(pool, work)
    return result


def lose_index(pool: Path) -> None:
    shutil.rmtree(pool / "index")


def test_a_clean_end_keeps_everything(pool: Path) -> None:
    async def work(store: Store) -> None:
        for i in range(50):
            await write(store, b"%d" % i)

    with_store(pool, work)
    assert found(pool) == {b"%d" % i for i in range(50)} == found(pool)


@pytest.mark.parametrize("without_index", [False, True])
def test_a_block_sealed_after_the_last_commit_is_found_by_its_header(pool: Path, without_index: bool) -> None:
    async def work(store: Store) -> None:
        await write(store, b"before")
        await store.sync()
        for i in range(50):
            await write(store, b"after%d" % i)

    crashed_store(pool, work, LAZY)
    if without_index:
        lose_index(pool)
    assert found(pool) == {b"before", *(b"after%d" % i for i in range(50))}


def test_segments_opened_after_the_last_commit_are_found(pool: Path) -> None:
    async def work(store: Store) -> None:
        await store.sync()
        for i in range(60):
            await write(store, b"%d" % i, BIG)

    crashed_store(pool, work, LAZY)
    assert found(pool) == {b"%d" % i for i in range(60)}


def test_directories_are_made_again_from_the_headers(pool: Path) -> None:
    async def work(store: Store) -> None:
        await store.sync()
        top = make(store, 1, b"top", Kind.DIRECTORY)
        below = make(store, top.inode, b"below", Kind.DIRECTORY)
        await write(store, b"block", parent=below.inode)
        await write(store, b"other", parent=top.inode)

    crashed_store(pool, work, LAZY)
    assert found(pool) == {b"top"}
    assert found(pool, b"top") == {b"below", b"other"}


def test_a_committed_removal_is_not_undone_by_the_header(pool: Path) -> None:
    async def work(store: Store) -> None:
        await write(store, b"old")
        await write(store, b"kept")
        await store.sync()
        unlink(store, b"old")
        await store.sync()
        await write(store, b"new")

    crashed_store(pool, work, LAZY)
    assert found(pool) == {b"kept", b"new"} == found(pool)


def test_a_file_that_took_the_name_of_a_removed_directory_is_found_with_its_last_content(pool: Path) -> None:
    """Nothing of it is in the index: neither that the directory went, nor the name, nor the content."""

    async def work(store: Store) -> None:
        taken = make(store, ROOT_INODE, b"taken", Kind.DIRECTORY)
        deep = make(store, taken.inode, b"deep", Kind.DIRECTORY)
        await write(store, b"file", parent=deep.inode)
        moving = await write(store, b"moving")
        await store.sync()
        rename(store, taken.inode, b"elsewhere")
        rename(store, moving.inode, b"taken")
        await store.sealing.rewrite(moving.inode, True)
        store.plane.file_truncate(moving.inode, 20_000)
        assert await store.sealing.seal(moving.inode) is not None

    crashed_store(pool, work, LAZY)

    async def look(store: Store) -> None:
        assert names(store) == {b"taken"}
        number = store.index.lookup(ROOT_INODE, b"taken")
        inode = None if number is None else store.index.get(number)
        assert inode is not None and inode.kind == Kind.FILE and inode.size == 20_000
        await verify_all(store)

    with_store(pool, look)


def test_a_file_that_took_the_name_of_the_directory_it_was_in_is_found(pool: Path) -> None:
    async def work(store: Store) -> None:
        above = make(store, ROOT_INODE, b"name", Kind.DIRECTORY)
        inside = await write(store, b"inside", parent=above.inode)
        await store.sync()
        rename(store, inside.inode, b"moved")
        store.blocks.rmdir(ROOT_INODE, b"name")
        rename(store, inside.inode, b"name")
        await store.sealing.rewrite(inside.inode, True)
        store.plane.file_truncate(inside.inode, 20_000)
        assert await store.sealing.seal(inside.inode) is not None

    crashed_store(pool, work, LAZY)

    async def look(store: Store) -> None:
        assert names(store) == {b"name"}
        found = [store.index.get(number) for _, number in store.index.list(ROOT_INODE, b"", 10)]
        assert [inode.size for inode in found if inode is not None] == [20_000]
        await verify_all(store)

    with_store(pool, look)


@pytest.mark.parametrize("committed", [False, True])
def test_a_directory_that_took_the_name_a_file_had_left_is_found_with_what_is_in_it(
    pool: Path, committed: bool
) -> None:
    async def work(store: Store) -> None:
        first = await write(store, b"name")
        if committed:
            await store.sync()
        rename(store, first.inode, b"elsewhere")
        directory = make(store, ROOT_INODE, b"name", Kind.DIRECTORY)
        await write(store, b"block", parent=directory.inode)

    crashed_store(pool, work, LAZY)
    # The crash undid the rename, and the file's name is the directory's.
    assert found(pool) == {b"name"}
    assert found(pool, b"name") == {b"block"}


def test_a_rewritten_file_whose_new_name_was_taken_again_never_has_its_old_content(pool: Path) -> None:
    async def work(store: Store) -> None:
        first = await write(store, b"a")
        await store.sync()
        rename(store, first.inode, b"b")
        await store.sealing.rewrite(first.inode, True)
        store.plane.file_truncate(first.inode, 20_000)
        assert await store.sealing.seal(first.inode) is not None
        rename(store, first.inode, b"c")
        await write(store, b"b", size=5)

    crashed_store(pool, work, LAZY)

    async def look(store: Store) -> None:
        found = [store.index.get(number) for _, number in store.index.list(ROOT_INODE, b"", 10)]
        sizes = {inode.name: inode.size for inode in found if inode is not None}
        assert sizes == {b"b": 5}

    with_store(pool, look)


@pytest.mark.parametrize("clean", [False, True])
def test_an_index_that_has_not_seen_the_last_mount_is_made_anew(pool: Path, tmp_path: Path, clean: bool) -> None:
    """The devices were used through another directory, as after a failover to another machine and back."""

    async def first(store: Store) -> None:
        for name in (b"replaced", b"removed", b"kept"):
            await write(store, name)

    async def second(store: Store) -> None:
        assert names(store) == {b"replaced", b"removed", b"kept"}
        unlink(store, b"removed")
        await write(store, b"new")
        await write(store, b"a newer one", size=5)
        rename(store, store.index.lookup(ROOT_INODE, b"a newer one") or ROOT_INODE, b"replaced")
        await settle(store)

    async def third(store: Store) -> None:
        found = [store.index.get(number) for _, number in store.index.list(ROOT_INODE, b"", 10)]
        sizes = {inode.name: inode.size for inode in found if inode is not None}
        assert sizes == {b"replaced": 5, b"kept": 3 * 4096, b"new": 3 * 4096}
        await verify_all(store)

    with_store(pool, first)
    other = tmp_path / "other"
    import_pool(other, [pool / "devices/0", pool / "devices/1"])
    with_store(other, second)
    assert any("with another index; a mount or --repair rebuilds it" in f.message for f in fsck(pool).findings)
    (with_store if clean else crashed_store)(pool, third)
    assert not fsck(pool).damaged
    # And back.
    with_store(other, third)


def test_a_mount_that_ended_before_it_wrote_labels_or_after_is_of_the_same_index(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(store: Store) -> None:
        await write(store, b"block")
        make(store, ROOT_INODE, b"an empty directory", Kind.DIRECTORY)  # which a rebuild would not find

    def then_killed(*arguments: object) -> dict[int, str]:
        if arguments[2] != 3:
            write_labels(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with_store(pool, work)
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "write_labels", then_killed)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                with_store(pool, work)
    assert found(pool) == {b"block", b"an empty directory"}


@pytest.mark.parametrize("clean", [False, True])
def test_what_was_removed_stays_removed_without_the_index(pool: Path, clean: bool) -> None:
    async def work(store: Store) -> None:
        for name in (b"a", b"b", b"c", b"d.tmp"):
            await write(store, name)
        await write(store, b"d")
        unlink(store, b"b")
        inode = store.index.lookup(ROOT_INODE, b"d.tmp")
        assert inode is not None
        rename(store, inode, b"d")
        await settle(store)

    (with_store if clean else crashed_store)(pool, work)
    lose_index(pool)
    assert found(pool) == {b"a", b"c", b"d"}
    lose_index(pool)
    assert found(pool) == {b"a", b"c", b"d"}


def test_an_evicted_and_replaced_name_does_not_come_back_older(pool: Path) -> None:
    """The old block is evicted, a new one takes the name and is removed: the old header must not fill the gap."""

    async def work(store: Store) -> None:
        for i in range(80):
            await write(store, b"%d" % i, BIG)
        await store.evict(store.space().used)
        assert names(store) == set()
        for i in range(80):
            await write(store, b"%d" % i)
        await settle(store)
        for i in range(80):
            unlink(store, b"%d" % i)
        await settle(store)

    crashed_store(pool, work)
    lose_index(pool)
    assert found(pool) == set()


def test_a_removal_that_the_crash_undid_stays_undone_without_the_index(pool: Path) -> None:
    """The summary knew of it before the index did; what a mount then gave back may not go with the index later."""

    async def work(store: Store) -> None:
        for name in (b"kept", b"removed"):
            await write(store, name)
        store.segments.retire_open()
        await store.sync()
        unlink(store, b"removed")
        await store.segments.flush_summaries()

    crashed_store(pool, work, LAZY)
    assert found(pool) == {b"kept", b"removed"}
    lose_index(pool)
    assert found(pool) == {b"kept", b"removed"}


def test_a_name_that_a_rename_left_does_not_lead_back_once_its_next_holder_has_gone(pool: Path) -> None:
    """The summary of the renamed block still has the old name, and only the next holder's record stands before it."""

    async def work(store: Store) -> None:
        first = await write(store, b"given")
        store.segments.retire_open()
        await settle_now(store)
        rename(store, first.inode, b"kept")
        second = await write(store, b"given")
        store.segments.retire_open()
        await store.sync()
        unlink(store, b"given")
        freed = store.segments.all[second.segment]
        assert freed.state == State.FREE and first.segment != second.segment
        await store.segments.flush_summaries(all_dirty=False)
        await write_over(store, freed.index)

    crashed_store(pool, work, LAZY)
    lose_index(pool)
    now = found(pool)
    assert b"kept" in now and b"given" not in now


def test_a_rename_holds_up_no_segment_that_was_full_before_the_last_turn_of_summaries(pool: Path) -> None:
    async def work(store: Store) -> None:
        gone = await write(store, b"gone")
        store.segments.retire_open()
        first = await write(store, b"first.tmp")
        store.segments.retire_open()
        await settle_now(store)
        rename(store, first.inode, b"first")
        unlink(store, b"gone")
        home, freed = store.segments.all[first.segment], store.segments.all[gone.segment]
        before = store.statistics().segments.summaries_written
        await store.segments.flush_summaries(all_dirty=False)
        assert store.statistics().segments.summaries_written == before
        assert home.dirty
        await write_over(store, freed.index)

    crashed_store(pool, work, LAZY)
    lose_index(pool)
    now = found(pool)
    assert b"gone" not in now
    # The crash may take the rename, as of the last second, but not the block.
    assert len(now & {b"first", b"first.tmp"}) == 1


def test_a_removal_is_in_all_summaries_before_the_segment_of_the_name_s_next_holder_is_written_again(
    pool: Path,
) -> None:
    """The older block would come back by a summary that still has it."""

    async def work(store: Store) -> None:
        old = await write(store, b"name")
        await write(store, b"stays")
        store.segments.retire_open()
        new = await write(store, b"name.tmp")
        store.segments.retire_open()
        await settle_now(store)
        rename(store, new.inode, b"name")
        unlink(store, b"name")
        assert store.segments.all[old.segment].state == State.CLOSED
        freed = store.segments.all[new.segment]
        assert freed.state == State.FREE
        await store.blocks.commit()
        await store.segments.flush_summaries(all_dirty=False)
        await write_over(store, freed.index)

    crashed_store(pool, work, LAZY)
    lose_index(pool)
    now = found(pool)
    assert b"stays" in now and not now & {b"name", b"name.tmp"}


def test_an_older_block_does_not_come_back_by_a_freed_segment_that_waits_for_the_index(pool: Path) -> None:
    """A turn of summaries is over with its own. Otherwise that of the name's next holder is written over too early."""

    async def work(store: Store) -> None:
        old = await write(store, b"name")
        other = await write(store, b"other.tmp")
        store.segments.retire_open()
        new = await write(store, b"name.tmp")
        store.segments.retire_open()
        await settle_now(store)
        rename(store, new.inode, b"name")
        await store.blocks.commit()
        rename(store, other.inode, b"other")
        unlink(store, b"other")
        segments = store.segments
        waits, freed = segments.all[old.segment], segments.all[new.segment]
        assert waits.state == State.FREE and segments._waits(waits)
        await segments.flush_summaries()
        unlink(store, b"name")
        assert freed.state == State.FREE and not segments._waits(freed)
        await segments.flush_summaries(all_dirty=False)
        await write_over(store, freed.index)

    crashed_store(pool, work, LAZY)
    lose_index(pool)
    assert b"name" not in found(pool)


async def settle_now(store: Store) -> None:
    await store.blocks.commit()
    for _ in range(2):
        await store.segments.flush_summaries()


async def write_over(store: Store, number: int) -> None:
    """Write a block to this segment, which is free, before any other goes."""
    segments, segment = store.segments, store.segments.all[number]
    generation = segment.generation
    segments._free.remove(segment.index)
    segments._free.appendleft(segment.index)
    for i in range(8):
        segments.retire_open()
        await write(store, b"over %d" % i)
        if segment.generation != generation:
            return
    pytest.fail(f"segment {number} was not opened again")


def test_carried_over_blocks_survive_the_reuse_of_their_segment(pool: Path) -> None:
    async def work(store: Store) -> None:
        kept = await write(store, b"kept")
        await store.blocks.pin(kept.inode)
        await store.sync()
        for i in range(1200):
            await write(store, b"%d" % i, BIG)
        now = store.index.get(kept.inode)
        assert now is not None and now.extents[0].generation != kept.extents[0].generation  # perhaps in the same place

    crashed_store(pool, work, LAZY)
    assert b"kept" in found(pool)
    lose_index(pool)
    assert b"kept" in found(pool)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_pin_that_only_a_header_knows_is_as_the_block_says(pool: Path, pinned: bool) -> None:
    """The last commit is older than the change of the pin, and the block was sealed again after it."""

    async def work(store: Store) -> None:
        block = await write(store, b"block")
        if not pinned:
            await store.blocks.pin(block.inode)
        await store.blocks.commit()
        await (store.blocks.pin if pinned else store.blocks.unpin)(block.inode)
        await store.sealing.rewrite(block.inode, True)
        store.plane.file_truncate(block.inode, 20_000)
        assert await store.sealing.seal(block.inode) is not None

    crashed_store(pool, work, LAZY)

    async def check(store: Store) -> None:
        number = store.index.lookup(ROOT_INODE, b"block")
        record = None if number is None else store.index.raw(number)
        assert number is not None and record is not None
        assert (InodeFlags.PINNED in Inode.unpack(record).flags) == store.pins.holds(record) == pinned
        assert store.pins.numbers() == ([number] if pinned else [])

    with_store(pool, check)


def test_pins_survive_with_and_without_the_index(pool: Path) -> None:
    async def work(store: Store) -> None:
        directory = make(store, 1, b"dir", Kind.DIRECTORY)
        await write(store, b"in it", parent=directory.inode)
        block = await write(store, b"pinned")
        await store.blocks.pin(block.inode)
        await store.blocks.pin(directory.inode)
        await settle(store)

    with_store(pool, work)

    async def check(store: Store) -> None:
        for name in (b"pinned", b"dir"):
            number = store.index.lookup(ROOT_INODE, name)
            assert number is not None
            record = store.index.raw(number)
            assert record is not None and store.pins.holds(record), name
        directory = store.index.lookup(ROOT_INODE, b"dir")
        assert directory is not None
        inside = store.index.raw(store.index.list(directory, b"", 1)[0][1])
        assert inside is not None and store.pins.holds(inside)

    with_store(pool, check)
    lose_index(pool)
    with_store(pool, check)


def test_an_unsealed_file_is_gone_after_a_crash(pool: Path) -> None:
    async def work(store: Store) -> None:
        make(store, 1, b"never closed")
        await write(store, b"closed")
        await store.sync()

    crashed_store(pool, work)
    assert found(pool) == {b"closed"}


def test_an_end_seals_what_is_dirty(pool: Path) -> None:
    async def work(store: Store) -> None:
        inode = make(store, 1, b"open at the end")
        store.plane.file_truncate(inode.inode, 4096)

    with_store(pool, work)
    assert found(pool) == {b"open at the end"}


def test_numbers_never_go_back(pool: Path) -> None:
    seen: list[int] = []

    async def work(store: Store) -> None:
        seen.extend(
            [store.blocks.next_inode(), store.blocks.next_version(), (await write(store, b"%d" % len(seen))).generation]
        )

    for end in (crashed_store, with_store, crashed_store):
        end(pool, work)
        lose_index(pool)
    for kind in range(3):
        assert sorted(set(seen[kind::3])) == seen[kind::3]


def test_what_users_do_during_a_rebuild_counts(pool: Path) -> None:
    async def work(store: Store) -> None:
        top = make(store, 1, b"top", Kind.DIRECTORY)
        for i in range(30):
            await write(store, b"%d" % i, parent=top.inode)
        await write(store, b"file")

    with_store(pool, work)
    lose_index(pool)

    async def main() -> None:
        async with Store.open(pool, OPTIONS) as store:
            assert store.rebuilding
            top = make(store, 1, b"top", Kind.DIRECTORY)
            newer = await write(store, b"file", 4096 * 9)
            await write(store, b"7", 4096 * 9, top.inode)
            await rebuilt(store)
            # How far it was: `kvfs status` and `kvfs fsck --repair` say so.
            assert store.rebuilt[0] == store.rebuilt[1] > 0
            assert names(store) == {b"top", b"file"}
            assert store.index.lookup(ROOT_INODE, b"file") == newer.inode
            # The old directory's blocks are in the new one of that name.
            assert names(store, top.inode) == {b"%d" % i for i in range(30)}
            inode = store.index.get(InodeNumber(store.index.lookup(top.inode, b"7") or 0))
            assert inode is not None and inode.size == 4096 * 9
            await verify_all(store, top.inode)

    trio.run(main)
    assert len(found(pool, b"top")) == 30


# ---- damage ----


def segment_pages(pool: Path, segment: int, page: int, count: int, change: Callable[[bytes], bytes]) -> None:
    """Change pages of a segment on its devices, through the documented layout."""
    config = configuration.load(pool)
    assert config is not None
    geometry = config.geometry
    members = layout([d.zone_count for d in config.devices], geometry.stripe_width)[segment]
    for i in range(page, page + count):
        unit, within = divmod(i * 4096, geometry.stripe_unit)
        row, column = divmod(unit, geometry.stripe_width)
        device, zone = members[column]
        offset = config.devices[device].zones_offset + zone * geometry.zone_size + row * geometry.stripe_unit + within
        with (pool / config.devices[device].path).open("r+b") as file:
            file.seek(offset)
            data = file.read(4096)
            file.seek(offset)
            file.write(change(data))


def zeroed(data: bytes) -> bytes:
    return bytes(len(data))


def flip(data: bytes) -> bytes:
    return data[:40] + bytes([data[40] ^ 4]) + data[41:]


def used_segments(pool: Path) -> tuple[list[int], configuration.PoolConfig]:
    numbers: list[int] = []

    async def work(store: Store) -> None:
        numbers.extend(s.index for s in store.segments.all if s.state == State.CLOSED and s.live_pages)

    with_store(pool, work)
    config = configuration.load(pool)
    assert config is not None
    return numbers, config


async def fifty(store: Store) -> None:
    for i in range(50):
        await write(store, b"%d" % i, BIG)
    for i in range(0, 50, 5):
        unlink(store, b"%d" % i)
    await settle(store)


FIFTY = {b"%d" % i for i in range(50) if i % 5}


@pytest.mark.parametrize("slot", [0, 1])
def test_a_damaged_summary_slot_is_made_up_for_by_the_other(pool: Path, slot: int) -> None:
    with_store(pool, fifty)
    numbers, config = used_segments(pool)
    for number in numbers:
        segment_pages(pool, number, config.geometry.summary_page(slot), 1, flip)
    lose_index(pool)
    assert found(pool) == FIFTY


def test_without_any_summary_the_headers_are_enough(pool: Path) -> None:
    with_store(pool, fifty)
    numbers, config = used_segments(pool)
    for number in numbers:
        segment_pages(pool, number, config.geometry.end_page, 2 * config.geometry.summary_pages, zeroed)
    lose_index(pool)
    assert found(pool) >= FIFTY


def test_a_damaged_segment_header_loses_nothing(pool: Path) -> None:
    with_store(pool, fifty)
    numbers, _ = used_segments(pool)
    for number in numbers:
        segment_pages(pool, number, 0, 1, flip)
    assert found(pool) == FIFTY
    lose_index(pool)
    assert found(pool) == FIFTY


def pages_written(store: Store, landed: Collection[str]) -> Callable[[int, Mapping[int, bytes]], Awaitable[None]]:
    """In place of Plane.store_write_pages() as a segment is opened: these pages are written, and a device fails."""

    async def write_pages(segment: int, pages: Mapping[int, bytes]) -> None:
        for page, data in pages.items():
            if ("header" if page == 0 else "summary") in landed:
                await store.plane.store_write(segment, page, data)
        if len(landed) < len(pages):
            raise DeviceError("no answer")

    return write_pages


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("landed", [(), ("header",), ("summary",), ("header", "summary")], ids="-".join)
def test_nothing_of_its_former_life_comes_back_by_a_segment_that_was_opened_again(
    pool: Path, monkeypatch: pytest.MonkeyPatch, landed: tuple[str, ...], damaged: bool
) -> None:
    """Its last summary still has an older block, whose name a newer one had, which is gone and written over."""
    lives: list[int] = []

    async def work(store: Store) -> None:
        old = await write(store, b"name")
        store.segments.retire_open()
        new = await write(store, b"name.tmp")
        store.segments.retire_open()
        await settle_now(store)
        unlink(store, b"name")
        rename(store, new.inode, b"name")
        segment = store.segments.all[old.segment]
        assert segment.state == State.FREE
        await store.blocks.commit()
        await store.segments.flush_summaries(all_dirty=False)
        assert segment.dirty and segment.index in store.segments._free
        store.segments._free.remove(segment.index)
        with monkeypatch.context() as patch:
            patch.setattr(store.plane, "store_write_pages", pages_written(store, landed))
            assert await store.segments._format(segment, Stream.NEW) == (len(landed) == 2)
        if segment.state == State.OPEN:
            assert not segment.dirty
            store.segments._supply(segment)
        await settle_now(store)
        unlink(store, b"name")
        await settle_now(store)
        await write_over(store, new.segment)
        lives.append(segment.index)

    crashed_store(pool, work, LAZY)
    if damaged:
        segment_pages(pool, lives[0], 0, 1, flip)
    lose_index(pool)
    assert b"name" not in found(pool)


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_blocks_are_found_in_an_open_segment_whose_header_is_damaged(pool: Path, index: str) -> None:
    lives: list[int] = []

    async def work(store: Store) -> None:
        block = await write(store, b"block")
        assert store.segments.all[block.segment].state == State.OPEN
        lives.append(block.segment)
        await store.sync()

    crashed_store(pool, work, LAZY)
    segment_pages(pool, lives[0], 0, 1, flip)
    if index == "lost":
        lose_index(pool)
    assert found(pool) == {b"block"}


def test_a_turn_of_summaries_is_over_when_the_segments_being_opened_are(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has the summary of their former life until then."""

    async def work(store: Store) -> None:
        old = await write(store, b"name")
        store.segments.retire_open()
        await settle_now(store)
        unlink(store, b"name")
        segments, segment, go_on = store.segments, store.segments.all[old.segment], trio.Event()
        await store.blocks.commit()
        await segments.flush_summaries(all_dirty=False)
        segments._free.remove(segment.index)
        write_pages, turns = store.plane.store_write_pages, segments._turns_done

        async def late(number: int, pages: Mapping[int, bytes]) -> None:
            await go_on.wait()
            await write_pages(number, pages)

        monkeypatch.setattr(store.plane, "store_write_pages", late)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(segments._format, segment, Stream.NEW)
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.start_soon(segments.flush_summaries)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert segments._turns_done == turns
            go_on.set()
        assert segments._turns_done == turns + 1
        segments._supply(segment)

    with_store(pool, work, LAZY)


def test_nothing_comes_back_by_a_segment_that_a_crash_kept_from_being_opened(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index says that it was opened, its header that it was not."""

    async def opens(store: Store) -> None:
        old = await write(store, b"name")
        await write(store, b"other")
        store.segments.retire_open()
        await settle_now(store)
        for name in (b"name", b"other"):
            unlink(store, name)
        segment = store.segments.all[old.segment]
        await store.blocks.commit()
        await store.segments.flush_summaries(all_dirty=False)
        store.segments._free.remove(segment.index)
        monkeypatch.setattr(store.plane, "store_write_pages", pages_written(store, ()))
        with monkeypatch.context() as patch:
            patch.setattr(store.segments, "mark_dirty", lambda segment, gone: None)
            await store.segments._format(segment, Stream.NEW)
        # As it was meanwhile.
        segment.state, segment.generation, segment.slot = State.OPEN, segment.generation + 4096, 1 - segment.slot
        segment.dirty = segment.copy_stale = False
        store.segments._dirty.discard(segment.index)
        store.segments._resting.discard(segment.index)
        store.segments.changed(segment)
        await store.blocks.commit()

    async def goes_on(store: Store) -> None:
        await settle_now(store)

    crashed_store(pool, opens, LAZY)
    monkeypatch.undo()
    crashed_store(pool, goes_on, LAZY)
    lose_index(pool)
    assert found(pool) == set()


def test_a_block_with_a_damaged_header_is_found_out(pool: Path) -> None:
    places: list[tuple[int, int]] = []

    async def work(store: Store) -> None:
        for i in range(5):
            block = await write(store, b"%d" % i)
            places.append((block.segment, block.page))

    with_store(pool, work)
    segment_pages(pool, *places[2], 1, flip)

    async def check(store: Store) -> None:
        for i in range(5):
            number = store.index.lookup(ROOT_INODE, b"%d" % i)
            assert number is not None
            record = store.index.raw(number)
            assert record is not None
            try:
                await store.plane.store_verify(record, True)
                assert i != 2
            except Exception:
                assert i == 2

    with_store(pool, check)


def test_a_late_header_of_a_dead_daemon_costs_at_most_its_segment(pool: Path) -> None:
    """An old segment header that lands over a new one: its blocks are gone, none is wrong, the pool goes on."""
    kept: list[bytes] = []

    async def first(store: Store) -> None:
        await write(store, b"one")

    with_store(pool, first)
    numbers, _ = used_segments(pool)
    segment_pages(pool, numbers[0], 0, 1, lambda data: kept.append(data) or data)  # type: ignore[func-returns-value]

    async def second(store: Store) -> None:
        await store.evict(1 << 40)
        for i in range(1000):
            await write(store, b"%d" % i, BIG)
        await store.sync()
        assert store.segments.all[numbers[0]].generation > 0

    crashed_store(pool, second)
    segment_pages(pool, numbers[0], 0, 1, lambda data: kept[0])
    left = found(pool)
    assert b"one" not in left and len(left) > 20


# ---- model: any history, any end ----

STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "rename", "unlink", "sync", "settle"]), st.integers(0, 5), st.integers(0, 5)),
    max_size=25,
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(histories=st.lists(st.tuples(STEPS, st.sampled_from(["clean", "crash"]), st.booleans()), min_size=1, max_size=3))
def test_any_history_ends_in_what_was_or_a_miss(
    tmp_path_factory: pytest.TempPathFactory, histories: list[tuple[list[tuple[str, int, int]], str, bool]]
) -> None:
    pool = make_pool(tmp_path_factory.mktemp("model") / "pool")
    sizes = iter(range(4096, 1 << 40, 4096))
    # For each name the sizes (unique: they identify a version) it may have; 0: it may be missing.
    model: dict[bytes, int] = {}

    for steps, end, drop_index in histories:

        async def work(store: Store, steps: list[tuple[str, int, int]] = steps) -> None:
            for kind, a, b in steps:
                name, other = b"n%d" % a, b"n%d" % b
                if kind == "write":
                    size = next(sizes)
                    if name in model:
                        unlink(store, name)
                    await write(store, name, size)
                    model[name] = size
                elif kind == "rename" and name in model and a != b:
                    number = store.index.lookup(ROOT_INODE, name)
                    assert number is not None
                    rename(store, number, other)
                    model[other] = model.pop(name)
                elif kind == "unlink" and name in model:
                    unlink(store, name)
                    del model[name]
                elif kind == "sync":
                    await store.sync()
                elif kind == "settle":
                    await settle(store, 0.25)
            # Changes before the last second are not to be undone; that second is this.
            await settle(store, 0.5)

        (with_store if end == "clean" else crashed_store)(pool, work)
        if drop_index:
            lose_index(pool)

        async def check(store: Store) -> None:
            left = {}
            for name, number in store.index.list(ROOT_INODE, b"", 100):
                inode = store.index.get(number)
                assert inode is not None
                left[name] = inode.size
            assert left == model
            await verify_all(store)

        with_store(pool, check)
