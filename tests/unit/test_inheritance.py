"""A daemon inherits by a journal of names: after a kill names are as they were told, whatever was committed.

A kill is the end of a store without seal, close or commit (store_pools.crashed_store). Nothing is committed but by
sync(), so without the journal the index knows nothing of what came after.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trio
from client_double import counted
from helpers import often
from store_pools import LAZY, crashed_store, make, make_pool, verify_all, with_store, write
from test_reservations import SIZE, Writer

from kvfs import journal
from kvfs.errors import KvfsError
from kvfs.frames import Next, Shards
from kvfs.lent import Part
from kvfs.namespace.files import Namespace
from kvfs.naming import Naming
from kvfs.plane import PlaneError
from kvfs.pool.format import META_EPOCH, META_JOURNAL, META_JOURNAL_VALUE
from kvfs.record import Inode, Kind
from kvfs.store.blocks import Blocks
from kvfs.store.fsck import fsck
from kvfs.store.inheritance import nameless_blocks
from kvfs.store.sealing import _Seal
from kvfs.store.segment import usage
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber

Work = Callable[[Store], Awaitable[None]]
Tree = dict[bytes, int | bytes | None]  # path -> a block's size, a link's target, None of a directory
BIG = 64 << 20
HISTORIES = int(os.environ.get("KVFS_HISTORIES") or often(6, 40))
PAGE = 4096


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return make_pool(tmp_path / "pool")


@contextmanager
def made(size: int = 1 << 20) -> Iterator[int]:
    fd = journal.make(size)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.fixture
def kept() -> Iterator[int]:
    with made() as fd:
        yield fd


def kill(pool: Path, fd: int | None, work: Work) -> None:
    crashed_store(pool, work, replace(LAZY, journal=fd))


def end(pool: Path, fd: int | None, work: Work) -> None:
    with_store(pool, work, replace(LAZY, journal=fd))


def tree(store: Store) -> Tree:
    """All names; each must lead there in the block table too, and pages must be counted right."""
    found: Tree = {}
    live = [0] * len(store.segments.all)

    def walk(directory: InodeNumber, path: bytes) -> None:
        for name, number in store.index.list(directory, b"", 100_000):
            inode = store.index.get(number)
            assert inode is not None and inode.name == name and inode.parent == directory and not inode.nameless
            assert store.plane.table_find_name(directory, name) == number, name
            here = path + b"/" + name
            if inode.kind == Kind.DIRECTORY:
                found[here] = None
                walk(number, here)
                continue
            found[here] = inode.size if inode.kind == Kind.FILE else Namespace(store).readlink(number)
            for segment, pages in usage(inode).items():
                live[segment] += pages

    walk(ROOT_INODE, b"")
    for record in nameless_blocks(store.index):
        for segment, pages in usage(Inode.unpack(record)).items():
            live[segment] += pages
    assert [segment.live_pages for segment in store.segments.all] == live
    return found


def found(pool: Path, fd: int | None, *, again: bool = True) -> Tree:
    """All that the next store has, every block verified; and the one after that, once more by the journal."""
    seen: list[Tree] = []

    async def look(store: Store) -> None:
        seen.append(tree(store))
        await verify_all(store)

    if again:
        kill(pool, fd, look)
    end(pool, fd, look)
    assert not fsck(pool).damaged
    assert seen[0] == seen[-1]
    return seen[0]


def at(store: Store, path: bytes) -> tuple[InodeNumber, bytes]:
    """Directory and name of a path."""
    *above, name = path.strip(b"/").split(b"/")
    number = ROOT_INODE
    for part in above:
        number = Namespace(store).lookup(number, part).inode
    return number, name


def number_of(store: Store, path: bytes) -> InodeNumber:
    directory, name = at(store, path)
    return Namespace(store).lookup(directory, name).inode


async def put(store: Store, path: bytes, size: int = PAGE) -> Inode:
    directory, name = at(store, path)
    return await write(store, name, size, directory)


def new_file(store: Store, path: bytes) -> Inode:
    """It is being written: nothing of it is sealed."""
    directory, name = at(store, path)
    return make(store, directory, name)


def rename(store: Store, old: bytes, new: bytes) -> None:
    Namespace(store).rename(*at(store, old), *at(store, new), 0)


def rename_over_open(store: Store, old: bytes, new: bytes) -> None:
    """As if somebody had the block open that loses its name."""
    replaced = number_of(store, new)
    rename(store, old, new)
    inode = store.index.get(replaced)
    assert inode is not None and inode.nameless and inode.nlink == 1
    inode.nlink = 0  # no next daemon lets go of it
    store.index.put(inode, inode)


def unlink(store: Store, path: bytes) -> None:
    Namespace(store).unlink(*at(store, path))


def mkdir(store: Store, path: bytes) -> None:
    Namespace(store).mkdir(*at(store, path), 0o755, 0, 0)


def both(pool: Path, fd: int, before: Work, after: Work) -> tuple[Tree, Tree]:
    """Work that is committed, then work that is not, then a kill: names by the journal, and, of a copy, without."""

    async def work(store: Store) -> None:
        await before(store)
        await store.sync()
        await after(store)

    kill(pool, fd, work)
    other = pool.parent / "copy"
    shutil.copytree(pool, other)
    return found(pool, fd), found(other, None)


async def two_blocks(store: Store) -> None:
    await put(store, b"a", 1 * PAGE)
    await put(store, b"b", 2 * PAGE)


# ---- each change ----


def test_a_rename_and_what_was_removed_stay(pool: Path, kept: int) -> None:
    async def change(store: Store) -> None:
        rename(store, b"a", b"c")
        unlink(store, b"b")

    assert both(pool, kept, two_blocks, change) == ({b"/c": PAGE}, {b"/a": PAGE, b"/b": 2 * PAGE})


def test_a_rename_over_another_block_stays(pool: Path, kept: int) -> None:
    async def change(store: Store) -> None:
        rename(store, b"a", b"b")

    assert both(pool, kept, two_blocks, change) == ({b"/b": PAGE}, {b"/a": PAGE, b"/b": 2 * PAGE})


def test_directories_and_links_without_a_block_stay(pool: Path, kept: int) -> None:
    async def before(store: Store) -> None:
        mkdir(store, b"old")
        mkdir(store, b"gone")

    async def change(store: Store) -> None:
        mkdir(store, b"new")
        mkdir(store, b"new/deep")
        Namespace(store).rmdir(ROOT_INODE, b"gone")
        rename(store, b"old", b"new/old")
        Namespace(store).symlink(*at(store, b"new/link"), b"target", 0, 0)

    told, today = both(pool, kept, before, change)
    assert told == {b"/new": None, b"/new/deep": None, b"/new/old": None, b"/new/link": b"target"}
    assert today == {b"/old": None, b"/gone": None}


def test_a_removed_link_stays_removed(pool: Path, kept: int) -> None:
    async def before(store: Store) -> None:
        Namespace(store).symlink(ROOT_INODE, b"link", b"target", 0, 0)

    async def change(store: Store) -> None:
        unlink(store, b"link")

    assert both(pool, kept, before, change) == ({}, {b"/link": b"target"})


def test_a_directory_that_moved_keeps_all_below_it_also_where_a_file_took_its_name(pool: Path, kept: int) -> None:
    async def before(store: Store) -> None:
        mkdir(store, b"d")
        await put(store, b"d/x", 3 * PAGE)

    async def change(store: Store) -> None:
        rename(store, b"d", b"e")
        await put(store, b"d", 5 * PAGE)

    told, today = both(pool, kept, before, change)
    assert told == {b"/e": None, b"/e/x": 3 * PAGE, b"/d": 5 * PAGE}
    assert today == {b"/d": 5 * PAGE}  # the crash takes what the directory had


def test_summaries_name_the_directory_as_it_was_renamed(pool: Path, kept: int) -> None:
    """So that they say so when the index is lost as well."""

    async def before(store: Store) -> None:
        mkdir(store, b"d")
        mkdir(store, b"d/deep")
        await put(store, b"d/deep/x")
        store.segments.retire_open()  # else recovery has its summary written in any case
        for _ in range(2):
            await store.segments.flush_summaries()

    async def change(store: Store) -> None:
        rename(store, b"d", b"e")

    assert both(pool, kept, before, change)[0] == {b"/e": None, b"/e/deep": None, b"/e/deep/x": PAGE}
    shutil.rmtree(pool / "index")
    assert found(pool, None) == {b"/e": None, b"/e/deep": None, b"/e/deep/x": PAGE}


def test_attributes_stay(pool: Path, kept: int) -> None:
    async def change(store: Store) -> None:
        await Namespace(store).setxattr(number_of(store, b"a"), b"user.x", b"y")
        await store.blocks.pin(number_of(store, b"b"))

    both(pool, kept, two_blocks, change)

    async def look(store: Store) -> None:
        assert Namespace(store).getxattr(number_of(store, b"a"), b"user.x") == b"y"
        assert store.pins.numbers() == [number_of(store, b"b")]

    end(pool, None, look)


def test_a_name_that_was_left_does_not_come_back_by_a_header(pool: Path, kept: int) -> None:
    """Headers say the names with which blocks were sealed, here all after the commit."""

    async def nothing(store: Store) -> None:
        pass

    async def change(store: Store) -> None:
        for name in (b"a", b"b", b"c"):
            await put(store, name)
        rename(store, b"a", b"x")
        unlink(store, b"b")

    told, today = both(pool, kept, nothing, change)
    assert told == {b"/x": PAGE, b"/c": PAGE}
    assert today == {b"/a": PAGE, b"/b": PAGE, b"/c": PAGE}


def test_evicted_blocks_stay_away(pool: Path, kept: int) -> None:
    async def before(store: Store) -> None:
        for i in range(20):
            await put(store, b"%d" % i, BIG)

    left: list[Tree] = []

    async def change(store: Store) -> None:
        freed = store.evictor.counters.segments + 2
        await store.evictor.free_until(lambda: store.evictor.counters.segments >= freed)
        left.append(tree(store))

    told, today = both(pool, kept, before, change)
    assert told == left[0] and len(told) < len(today) == 20


def test_what_evictions_made_room_for_is_there_with_its_last_name(pool: Path, kept: int) -> None:
    """Segments have begun another life since the commit."""

    async def before(store: Store) -> None:
        for i in range(60):
            await put(store, b"%d" % i, BIG)

    left: list[Tree] = []

    async def change(store: Store) -> None:
        for i in range(60):
            await put(store, b"new%d" % i, BIG + PAGE)
            rename(store, b"new%d" % i, b"named%d" % i)
        left.append(tree(store))

    told, _ = both(pool, kept, before, change)
    assert told == left[0] and any(path.startswith(b"/named") for path in told)
    assert not any(path.startswith(b"/new") for path in told)


def test_blocks_that_were_carried_are_at_their_new_place(pool: Path, kept: int) -> None:
    async def change(store: Store) -> None:
        record = store.index.raw(number_of(store, b"a"))
        assert record is not None and await store.sealing.carry(record)
        rename(store, b"a", b"carried")

    assert both(pool, kept, two_blocks, change)[0] == {b"/carried": PAGE, b"/b": 2 * PAGE}


def test_native_puts_and_deletes_stay(pool: Path, kept: int) -> None:
    async def before(store: Store) -> None:
        mkdir(store, b"d")
        writer = Writer(store)
        for name in (b"k1", b"k2"):
            await writer.put(name, parent=number_of(store, b"d"))

    async def change(store: Store) -> None:
        writer, directory = Writer(store), number_of(store, b"d")
        await writer.put(b"k3", parent=directory)
        await writer.put(b"k1", b"y", size=SIZE + PAGE, parent=directory)
        shards = Shards()
        for number in range(256):
            shards[number].directory = directory
        items = Part(counted(b"k2") + counted(b"k9"))
        frame = store.plane.frames.delete(items, 2, shards, 0)
        while frame.go() != Next.DONE:
            pass
        assert frame.answer() == b"\1\0"
        rename(store, b"d/k3", b"d/k4")

    told, today = both(pool, kept, before, change)
    assert told == {b"/d": None, b"/d/k1": SIZE + PAGE, b"/d/k4": SIZE}
    assert today == {b"/d": None, b"/d/k1": SIZE + PAGE, b"/d/k2": SIZE, b"/d/k3": SIZE}


def test_a_client_s_block_that_was_written_and_not_committed_takes_no_name(pool: Path, kept: int) -> None:
    async def change(store: Store) -> None:
        writer = Writer(store)
        place = await writer.place(b"a", SIZE)
        await writer.write(place)
        rename(store, b"a", b"c")

    told, _ = both(pool, kept, two_blocks, change)
    # Nobody was told of it, so it may be there; what was renamed is.
    assert told.pop(b"/a", SIZE) == SIZE and told == {b"/c": PAGE, b"/b": 2 * PAGE}


# ---- what was not sealed ----


def test_a_name_never_leads_to_what_was_not_sealed_and_its_older_block_stays(pool: Path, kept: int) -> None:
    async def change(store: Store) -> None:
        new_file(store, b"tmp")
        rename(store, b"tmp", b"a")
        new_file(store, b"alone")

    assert both(pool, kept, two_blocks, change)[0] == {b"/a": PAGE, b"/b": 2 * PAGE}


def test_the_older_block_stays_over_commits_until_the_other_is_sealed(pool: Path, kept: int) -> None:
    async def before(store: Store) -> None:
        await two_blocks(store)
        for name in (b"a", b"b"):
            new_file(store, b"tmp")
            rename(store, b"tmp", name)
        new_file(store, b"tmp")
        rename(store, b"tmp", b"b")  # the older block of what was not sealed
        for _ in range(3):
            await store.sync()
            await trio.sleep(0.5)  # the block that was replaced lingers no more than a second

    async def after(store: Store) -> None:
        assert tree(store) == {b"/a": 0, b"/b": 0}

    assert both(pool, kept, before, after)[0] == {b"/a": PAGE, b"/b": 2 * PAGE}

    async def sealed(store: Store) -> None:
        made_there = new_file(store, b"tmp")
        rename(store, b"tmp", b"a")
        await store.sync()
        store.plane.file_truncate(made_there.inode, 3 * PAGE)
        assert await store.sealing.seal(made_there.inode)
        unlink(store, b"b")
        await store.sync()

    kill(pool, kept, sealed)
    assert found(pool, kept) == {b"/a": 3 * PAGE}


def test_a_file_renamed_during_its_seal_does_not_come_back_under_its_old_name(pool: Path, kept: int) -> None:
    """Data and header are there, and say the name of before; the kill comes before the seal enters."""

    async def change(store: Store) -> None:
        for name in (b"a", b"new"):
            number = new_file(store, b"tmp").inode
            store.plane.file_truncate(number, 3 * PAGE)
            real = store.sealing._write

            async def write(seal: _Seal, error: PlaneError | None, name: bytes = name) -> Inode:
                await real(seal, error)  # noqa: B023
                rename(store, b"tmp", name)
                await store.sync()
                raise KvfsError("killed")

            with pytest.MonkeyPatch.context() as patch, pytest.raises(KvfsError, match="killed"):
                patch.setattr(store.sealing, "_write", write)
                await store.sealing.seal(number)

    assert both(pool, kept, two_blocks, change)[0] == {b"/a": PAGE, b"/b": 2 * PAGE}


def test_the_older_block_does_not_come_back_to_a_name_that_was_left_or_removed(pool: Path, kept: int) -> None:
    async def change(store: Store) -> None:
        for target, then in ((b"a", b"elsewhere"), (b"b", None)):
            new_file(store, b"tmp")
            rename(store, b"tmp", target)
            if then is None:
                unlink(store, target)
            else:
                rename(store, target, then)

    assert both(pool, kept, two_blocks, change)[0] == {}


def test_an_older_block_that_moved_away_is_where_it_went(pool: Path, kept: int) -> None:
    async def change(store: Store) -> None:
        rename(store, b"a", b"moved")
        new_file(store, b"a")

    assert both(pool, kept, two_blocks, change)[0] == {b"/moved": PAGE, b"/b": 2 * PAGE}


def test_of_several_unsealed_files_over_one_name_the_block_below_them_stays(pool: Path, kept: int) -> None:
    async def change(store: Store) -> None:
        for i in range(3):
            new_file(store, b"tmp%d" % i)
            rename(store, b"tmp%d" % i, b"b")

    assert both(pool, kept, two_blocks, change)[0] == {b"/a": PAGE, b"/b": 2 * PAGE}


def test_an_unsealed_file_that_was_renamed_and_then_sealed_is_there(pool: Path, kept: int) -> None:
    async def change(store: Store) -> None:
        inode = new_file(store, b"tmp")
        rename(store, b"tmp", b"a")
        store.plane.file_truncate(inode.inode, 7 * PAGE)
        assert await store.sealing.seal(inode.inode) is not None

    assert both(pool, kept, two_blocks, change)[0] == {b"/a": 7 * PAGE, b"/b": 2 * PAGE}


def test_a_block_that_is_written_again_keeps_its_content_and_its_new_name(pool: Path, kept: int) -> None:
    async def change(store: Store) -> None:
        number = number_of(store, b"a")
        await store.sealing.rewrite(number, False)
        store.plane.file_truncate(number, 9 * PAGE)
        rename(store, b"a", b"c")

    assert both(pool, kept, two_blocks, change)[0] == {b"/c": PAGE, b"/b": 2 * PAGE}


# ---- blocks without a name ----


def test_a_block_that_lost_its_name_while_it_was_open_can_still_be_read(pool: Path, kept: int) -> None:
    numbers: list[InodeNumber] = []

    async def work(store: Store) -> None:
        await two_blocks(store)
        await store.sync()
        numbers.append(number_of(store, b"b"))
        rename_over_open(store, b"a", b"b")
        await store.sync()
        await put(store, b"later")
        await store.sync()

    async def look(store: Store) -> None:
        assert tree(store) == {b"/b": PAGE, b"/later": PAGE}
        (record,) = nameless_blocks(store.index)
        inode = Inode.unpack(record)
        assert inode.inode == numbers[0] and inode.nameless and inode.size == 2 * PAGE
        await store.plane.store_verify(record, True)
        assert [look.inode for look in store.blocks.look(store.segments.all[inode.segment], numbers)] == numbers

    async def leave(store: Store) -> None:
        await look(store)
        store.leave()

    async def none(store: Store) -> None:
        assert tree(store) == {b"/b": PAGE, b"/later": PAGE} and nameless_blocks(store.index) == []

    kill(pool, kept, work)
    kill(pool, kept, look)
    end(pool, kept, leave)  # an upgrade: the kernel keeps its handles
    end(pool, kept, look)  # an unmount
    end(pool, kept, none)
    end(pool, None, none)


def test_a_block_that_was_replaced_and_that_nobody_has_open_is_not_inherited(pool: Path, kept: int) -> None:
    """It lingers for a second, for those that have just looked it up. A kernel looks all names up again."""

    async def work(store: Store) -> None:
        await two_blocks(store)
        await store.sync()
        rename(store, b"a", b"b")
        assert len(nameless_blocks(store.index)) == 1
        await store.sync()

    async def none(store: Store) -> None:
        assert tree(store) == {b"/b": PAGE} and nameless_blocks(store.index) == []

    kill(pool, kept, work)
    kill(pool, kept, none)


def test_what_was_left_without_a_name_is_nobody_s_without_the_journal(pool: Path, kept: int) -> None:
    async def work(store: Store) -> None:
        await two_blocks(store)
        rename(store, b"a", b"b")
        store.leave()

    end(pool, kept, work)
    assert found(pool, None) == {b"/b": PAGE}


def test_a_nameless_block_that_was_evicted_is_not_inherited(pool: Path, kept: int) -> None:
    async def work(store: Store) -> None:
        await two_blocks(store)
        rename(store, b"a", b"b")
        await store.sync()
        assert len(nameless_blocks(store.index)) == 1
        await store.evict(None)

    async def none(store: Store) -> None:
        assert tree(store) == {} and nameless_blocks(store.index) == []

    kill(pool, kept, work)
    kill(pool, kept, none)


# ---- which journal ----


def test_the_index_says_what_it_has_of_the_journal(pool: Path, kept: int) -> None:
    async def work(store: Store) -> None:
        await two_blocks(store)
        await store.sync()
        value, epoch = store.index.meta_get(META_JOURNAL), store.index.meta_get(META_EPOCH)
        assert value is not None and epoch is not None
        there = journal.read(kept)
        assert META_JOURNAL_VALUE.unpack(value) == (there.id, there.sequence, int.from_bytes(epoch, "little"))
        fill = store.plane.names.journal_fill()
        assert fill is not None and fill.lost == 0 and fill.used == 0
        rename(store, b"a", b"c")
        fill = store.plane.names.journal_fill()
        assert fill is not None and fill.used > 0
        assert len(journal.read(kept).steps) == 1

    kill(pool, kept, work)


def test_a_journal_that_the_index_never_had_is_not_taken(
    pool: Path, kept: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is of another pool; or of this one, and the index was restored since."""

    async def other(store: Store) -> None:
        await put(store, b"theirs")
        unlink(store, b"theirs")
        mkdir(store, b"a directory of theirs")

    async def change(store: Store) -> None:
        rename(store, b"a", b"c")

    end(pool, None, two_blocks)
    kill(make_pool(tmp_path / "other"), kept, other)
    assert found(pool, kept) == {b"/a": PAGE, b"/b": 2 * PAGE}
    assert any("the index knows of no journal" in record.message for record in caplog.records)
    # From then on it is this pool's.
    kill(pool, kept, change)
    assert found(pool, kept) == {b"/c": PAGE, b"/b": 2 * PAGE}


@pytest.mark.parametrize("as_an_older_kvfs", [False, True])
def test_a_journal_is_not_taken_once_a_store_has_gone_without_it(
    pool: Path, kept: int, as_an_older_kvfs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def first(store: Store) -> None:
        await two_blocks(store)
        await store.sync()
        rename(store, b"a", b"c")

    values: list[bytes] = []

    async def second(store: Store) -> None:
        assert tree(store) == {b"/a": PAGE, b"/b": 2 * PAGE}
        unlink(store, b"a")
        if as_an_older_kvfs:  # it does not know this value, and lets it be
            store.index.meta_put(META_JOURNAL, values[0])

    async def remember(store: Store) -> None:
        await first(store)
        value = store.index.meta_get(META_JOURNAL)
        assert value is not None
        values.append(value)

    kill(pool, kept, remember)
    end(pool, None, second)
    assert found(pool, kept) == {b"/b": 2 * PAGE}
    reason = "without it since mount" if as_an_older_kvfs else "knows of no journal"
    assert any(reason in record.message for record in caplog.records)


def test_a_new_journal_after_another_counts(pool: Path, kept: int) -> None:
    async def first(store: Store) -> None:
        await two_blocks(store)
        await store.sync()
        rename(store, b"a", b"c")

    async def second(store: Store) -> None:
        assert tree(store) == {b"/a": PAGE, b"/b": 2 * PAGE}
        rename(store, b"b", b"d")

    kill(pool, kept, first)
    with made() as other:
        kill(pool, other, second)
        assert found(pool, other) == {b"/a": PAGE, b"/d": 2 * PAGE}
    assert found(pool, kept) == {b"/a": PAGE, b"/d": 2 * PAGE}


def test_an_index_that_is_made_anew_takes_nothing_and_the_journal_goes_on(pool: Path, kept: int) -> None:
    async def first(store: Store) -> None:
        await two_blocks(store)
        mkdir(store, b"d")

    async def second(store: Store) -> None:
        assert tree(store) == {b"/a": PAGE, b"/b": 2 * PAGE}
        rename(store, b"a", b"c")

    kill(pool, kept, first)
    shutil.rmtree(pool / "index")
    kill(pool, kept, second)
    assert found(pool, kept) == {b"/c": PAGE, b"/b": 2 * PAGE}


def test_what_is_no_journal_is_refused_by_a_clear_error(pool: Path, tmp_path: Path) -> None:
    async def never(store: Store) -> None:
        raise AssertionError

    end(pool, None, two_blocks)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with pytest.raises(journal.JournalError, match=rf"descriptor {fd}: it is no journal of names") as refused:
        end(pool, fd, never)
    assert refused.value.errno == errno.EBADMSG
    os.close(fd)
    with made() as other:
        os.pwrite(other, (2).to_bytes(4, "little"), 8)
        with pytest.raises(journal.JournalError, match="another version of kvfs has made it") as refused:
            end(pool, other, never)
        assert refused.value.errno == errno.EPROTONOSUPPORT
    with pytest.raises(journal.JournalError, match="Bad file descriptor"):
        journal.read(fd)
    with pytest.raises(journal.JournalError, match="a journal of 4096 bytes cannot be made: 65536 to"):
        journal.make(4096)
    assert found(pool, None) == {b"/a": PAGE, b"/b": 2 * PAGE}


# ---- torn, damaged, full ----


def copy_of(fd: int, change: Callable[[bytearray], None]) -> int:
    """The same memory with other bytes."""
    data = bytearray(os.pread(fd, os.fstat(fd).st_size, 0))
    change(data)
    other = os.memfd_create("copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(other, data)
    fcntl.fcntl(other, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return other


def test_a_torn_last_step_is_not_taken_and_headers_tell_what_was_sealed(pool: Path, kept: int) -> None:
    async def work(store: Store) -> None:
        await two_blocks(store)
        await store.sync()
        mkdir(store, b"d")
        rename(store, b"a", b"c")
        await put(store, b"new", 3 * PAGE)

    kill(pool, kept, work)

    def tear(data: bytearray) -> None:
        tail = int.from_bytes(data[72:80], "little")
        data[4096 + tail - 8] ^= 1

    torn = copy_of(kept, tear)
    assert journal.read(torn).refused > 0
    try:
        assert found(pool, torn) == {b"/d": None, b"/c": PAGE, b"/b": 2 * PAGE, b"/new": 3 * PAGE}
    finally:
        os.close(torn)


def test_damage_ends_what_is_taken_and_never_gives_wrong_bytes(pool: Path, kept: int, tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await two_blocks(store)
        await store.sync()
        for i in range(20):
            mkdir(store, b"d%d" % i)
            rename(store, b"a" if i == 0 else b"a%d" % (i - 1), b"a%d" % i)

    kill(pool, kept, work)
    choices = random.Random(34)
    for number in range(often(4, 20)):

        def damage(data: bytearray) -> None:
            tail = int.from_bytes(data[72:80], "little")
            data[4096 + choices.randrange(tail)] ^= 1 << choices.randrange(8)

        other, copy = copy_of(kept, damage), tmp_path / f"copy{number}"
        shutil.copytree(pool, copy)
        there = found(copy, other, again=False)
        # Each directory came just before a rename: of the last step one of them may be there.
        count = sum(size is None for size in there.values())
        names = {b"/a" if made < 1 else b"/a%d" % (made - 1) for made in (count - 1, count)}
        assert there[b"/b"] == 2 * PAGE and len(there) == count + 2 and len(names & there.keys()) == 1
        os.close(other)
        shutil.rmtree(copy)


def test_records_that_no_kvfs_writes_are_not_taken(pool: Path, kept: int, caplog: pytest.LogCaptureFixture) -> None:
    """Their checksums are right: whoever wrote them could."""

    async def work(store: Store) -> None:
        await two_blocks(store)
        await store.sync()
        rename(store, b"a", b"c")
        inode = store.index.get(number_of(store, b"b"))
        assert inode is not None
        bad = inode.copy()
        bad.segment, bad.name = len(store.segments.all) + 7, b"bad"  # type: ignore[assignment]
        store.plane.names.put(bad.pack(), True)
        mkdir(store, b"later")

    kill(pool, kept, work)
    assert found(pool, kept) == {b"/c": PAGE, b"/b": 2 * PAGE}
    assert any("nothing from it on is taken" in record.message for record in caplog.records)


def test_a_full_journal_is_taken_up_to_what_it_lacks(pool: Path) -> None:
    async def work(store: Store) -> None:
        store._is_commit_due = lambda: False  # type: ignore[method-assign]  # it would empty the journal
        await two_blocks(store)
        await store.sync()
        rename(store, b"a", b"c")
        names, i = store.plane.names, 0
        while (fill := names.journal_fill()) is not None and not fill.lost:
            mkdir(store, b"d%d" % i)
            i += 1
        await put(store, b"sealed", 3 * PAGE)
        mkdir(store, b"not known")

    with made(journal.SIZE_MIN) as fd:
        kill(pool, fd, work)
        there = found(pool, fd)
    assert there[b"/c"] == PAGE and there[b"/sealed"] == 3 * PAGE and b"/not known" not in there
    count = sum(path.startswith(b"/d") for path in there)
    assert count > 10 and {b"/d%d" % i for i in range(count)} < there.keys()


def test_while_commits_fail_a_full_journal_takes_no_new_names(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_there: list[int] = []

    def failing(*arguments: object) -> None:
        raise KvfsError("no room for the index")

    async def work(store: Store) -> None:
        monkeypatch.setattr(store.index, "_write", failing)
        mkdir(store, b"first")
        await store._commit_and_flush()
        with pytest.raises(KvfsError, match="the journal of names is full until it can be") as refused:
            for i in range(10_000):
                mkdir(store, b"d%d" % i)
                made_there.append(i)
        assert refused.value.errno == errno.EIO
        fill = store.plane.names.journal_fill()
        assert fill is not None and fill.lost == 0
        store.index.distrusted = False
        (pool / "index/incomplete").unlink()

    with made(journal.SIZE_MIN) as fd:
        kill(pool, fd, work)
        assert found(pool, fd, again=False) == {b"/first": None} | {b"/d%d" % i: None for i in made_there}


# ---- histories drawn by chance ----

KINDS = ["write"] * 4 + ["rename"] * 4 + ["unfinished"] * 2 + ["unlink", "mkdir", "rmdir", "symlink", "commit", "carry"]
NAMES = [b"n%d" % i for i in range(8)]


@dataclass
class History:
    """A model of what users were told. `older`: what a name leads to when its unsealed file is gone."""

    choices: random.Random
    tree: Tree = field(default_factory=dict)
    older: dict[bytes, int | bytes] = field(default_factory=dict)
    unsealed: set[bytes] = field(default_factory=set)
    log: list[str] = field(default_factory=list)
    written: int = 0

    def after_a_kill(self) -> Tree:
        return {path: what for path, what in self.tree.items() if path not in self.unsealed} | self.older

    async def live_once(self, store: Store) -> None:
        for _ in range(self.choices.randrange(1, 25)):
            kind = self.choices.choice(KINDS)
            await getattr(self, f"_{kind}")(store)

    def _path(self) -> bytes:
        directories = [path for path, what in self.tree.items() if what is None and path.count(b"/") < 3]
        return self.choices.choice([b"", *sorted(directories)]) + b"/" + self.choices.choice(NAMES)

    def _leave(self, path: bytes) -> int | bytes | None:
        """The name leads nowhere."""
        self.unsealed.discard(path)
        self.older.pop(path, None)
        return self.tree.pop(path)

    async def _write(self, store: Store) -> None:
        path = self._path()
        if path in self.tree:
            return
        self.written += 1
        await put(store, path, self.written * PAGE)
        self.tree[path] = self.written * PAGE
        self.log.append(f"write {path!r} of {self.written} pages")

    async def _unfinished(self, store: Store) -> None:
        path = self._path()
        if path not in self.tree:
            new_file(store, path)
            self.tree[path] = 0
            self.unsealed.add(path)
            self.log.append(f"begin {path!r}")

    async def _rename(self, store: Store) -> None:
        if not self.tree:
            return
        old, new = self.choices.choice(sorted(self.tree)), self._path()
        if old == new or new.startswith(old + b"/") or self.tree.get(new, 0) is None:
            return
        what, is_unsealed = self.tree[old], old in self.unsealed
        if what is None and new in self.tree:
            return
        rename(store, old, new)
        self.log.append(f"rename {old!r} to {new!r}")
        if what is None:
            for table in (self.tree, self.older):
                for path in [path for path in table if path == old or path.startswith(old + b"/")]:
                    table[new + path[len(old) :]] = table.pop(path)  # type: ignore[assignment, attr-defined]
            moved = {path for path in self.unsealed if path.startswith(old + b"/")}
            self.unsealed = (self.unsealed - moved) | {new + path[len(old) :] for path in moved}
            return
        pushed = self.tree.get(new)
        if is_unsealed and pushed is not None and new not in self.unsealed:
            self.older[new] = pushed
        elif not is_unsealed:
            self.older.pop(new, None)
        self._leave(old)
        self.tree[new] = what
        self.unsealed.discard(new)
        if is_unsealed:
            self.unsealed.add(new)

    async def _unlink(self, store: Store) -> None:
        files = sorted(path for path, what in self.tree.items() if what is not None)
        if files:
            path = self.choices.choice(files)
            unlink(store, path)
            self._leave(path)
            self.log.append(f"unlink {path!r}")

    async def _mkdir(self, store: Store) -> None:
        path = self._path()
        if path not in self.tree:
            mkdir(store, path)
            self.tree[path] = None
            self.log.append(f"mkdir {path!r}")

    async def _rmdir(self, store: Store) -> None:
        empty = [
            path
            for path, what in self.tree.items()
            if what is None and not any(other.startswith(path + b"/") for other in self.tree)
        ]
        if empty:
            path = self.choices.choice(sorted(empty))
            Namespace(store).rmdir(*at(store, path))
            self._leave(path)
            self.log.append(f"rmdir {path!r}")

    async def _symlink(self, store: Store) -> None:
        path = self._path()
        if path not in self.tree:
            Namespace(store).symlink(*at(store, path), b"to", 0, 0)
            self.tree[path] = b"to"
            self.log.append(f"symlink {path!r}")

    async def _carry(self, store: Store) -> None:
        blocks = [path for path, what in self.tree.items() if isinstance(what, int) and path not in self.unsealed]
        if blocks:
            path = self.choices.choice(sorted(blocks))
            record = store.index.raw(number_of(store, path))
            assert record is not None
            await store.sealing.carry(record)
            self.log.append(f"carry {path!r}")

    async def _commit(self, store: Store) -> None:
        await store.sync()
        self.log.append("commit")


def test_after_kills_names_are_as_they_were_told(tmp_path: Path) -> None:
    for number in range(HISTORIES):
        history = History(random.Random(f"inheritance/{number}"))
        pool = make_pool(tmp_path / f"pool{number}")
        with made() as fd:
            for _ in range(history.choices.randrange(1, 5)):
                kill(pool, fd, history.live_once)
                told = history.after_a_kill()
                assert found(pool, fd, again=history.choices.random() < 0.3) == told, (number, history.log)
                history.tree, history.older, history.unsealed = dict(told), {}, set()
                history.log.append("kill")
        shutil.rmtree(pool)


def test_a_step_that_is_cut_off_is_not_there(pool: Path, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal is read while a step is under way, as a kill would leave it."""
    torn: list[int] = []
    changed = Blocks._changed

    def cut_off(self: Blocks, done: Naming) -> None:
        changed(self, done)
        torn.append(copy_of(kept, lambda data: None))

    async def work(store: Store) -> None:
        await two_blocks(store)
        await store.sync()
        rename(store, b"b", b"d")
        monkeypatch.setattr(Blocks, "_changed", cut_off)
        rename(store, b"a", b"c")

    kill(pool, kept, work)
    monkeypatch.undo()
    try:
        assert len(torn) == 1 and found(pool, torn[0]) == {b"/a": PAGE, b"/d": 2 * PAGE}
    finally:
        os.close(torn[0])


def test_a_kill_within_recovery_costs_nothing(pool: Path, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: Store) -> None:
        await two_blocks(store)
        await store.sync()
        rename(store, b"a", b"c")
        rename(store, b"b", b"c")

    async def never(store: Store) -> None:
        raise AssertionError

    class KilledError(Exception):
        pass

    def killed(*arguments: object) -> None:
        raise KilledError

    kill(pool, kept, work)
    for place in ("kvfs.store.recovery.recount", "kvfs.store.store.Inheritance.attach", "kvfs.plane.Plane.table_load"):
        with monkeypatch.context() as patch, pytest.raises(KilledError):
            patch.setattr(place, killed)
            kill(pool, kept, never)
    assert found(pool, kept) == {b"/c": 2 * PAGE}


def test_a_cancelled_opening_leaves_the_journal_as_it_was(pool: Path, kept: int) -> None:
    async def work(store: Store) -> None:
        await two_blocks(store)
        await store.sync()
        rename(store, b"a", b"c")

    async def cancelled() -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            async with Store.open(pool, replace(LAZY, journal=kept)):
                raise AssertionError

    kill(pool, kept, work)
    trio.run(cancelled)
    assert found(pool, kept) == {b"/c": PAGE, b"/b": 2 * PAGE}
