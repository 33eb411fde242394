"""Removals and renames of a store, which C makes, and how what they lack is brought (kvfs/store/bringing.py)."""

from __future__ import annotations

import errno
import functools
import logging
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from store_pools import LAZY, crashed_store, index_reads, make_pool, with_store, write

from kvfs import errors, journal
from kvfs.daemon.pod import PodNode
from kvfs.index.lmdb import LmdbIndex
from kvfs.namespace import files
from kvfs.namespace.files import Namespace
from kvfs.naming import RENAME_NOREPLACE, TRIES, Naming, Need
from kvfs.plane import Event, EventType, OpenState, Plane, PlaneError
from kvfs.podmap import Conflict
from kvfs.record import InodeFlags
from kvfs.store import blocks as blocks_module
from kvfs.store.blocks import Blocks
from kvfs.store.bringing import Bringing
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber

Test = Callable[[Store, Namespace], Awaitable[None]]


def in_store(test: Test) -> Callable[[Path], None]:
    """Run it over a store and its namespace."""

    @functools.wraps(test)
    def run(tmp_path: Path) -> None:
        async def work(store: Store) -> None:
            await test(store, Namespace(store))

        with_store(make_pool(tmp_path / "pool", files=1), work, LAZY)

    del run.__wrapped__  # type: ignore[attr-defined]
    return run


def names(namespace: Namespace, parent: InodeNumber = ROOT_INODE) -> list[bytes]:
    return [name for name, _ in namespace.list_entries(parent, b"", 100)]


async def nothing_in_memory(store: Store) -> None:
    """All is committed; of files and directories memory has one each."""
    await store.blocks.commit()
    store.plane.names.limit(0, 0)
    store.plane.names.forget()


# ---- what removals and renames do ----


@in_store
async def test_directories_count_their_subdirectories(store: Store, namespace: Namespace) -> None:
    a = namespace.mkdir(ROOT_INODE, b"a", 0o755, 0, 0)
    b = namespace.mkdir(a.inode, b"b", 0o755, 0, 0)
    assert [namespace.get(n).nlink for n in (ROOT_INODE, a.inode, b.inode)] == [3, 3, 2]
    namespace.rename(a.inode, b"b", ROOT_INODE, b"c")
    assert [namespace.get(n).nlink for n in (ROOT_INODE, a.inode, b.inode)] == [4, 2, 2]
    namespace.rmdir(ROOT_INODE, b"a")
    assert namespace.get(ROOT_INODE).nlink == 3
    namespace.mkdir(ROOT_INODE, b"d", 0o755, 0, 0)
    namespace.rename(ROOT_INODE, b"c", ROOT_INODE, b"d")
    assert namespace.get(ROOT_INODE).nlink == 3
    assert names(namespace) == [b"d"]


@in_store
async def test_only_empty_directories_go(store: Store, namespace: Namespace) -> None:
    directory = namespace.mkdir(ROOT_INODE, b"d", 0o755, 0, 0)
    namespace.create(directory.inode, b"f", 0o644, 0, 0)
    for _ in range(2):  # the index has the file, memory has it not
        with pytest.raises(errors.NotEmptyError):
            namespace.rmdir(ROOT_INODE, b"d")
        with pytest.raises(errors.IsDirectoryError):
            namespace.unlink(ROOT_INODE, b"d")
        with pytest.raises(errors.NotDirectoryError):
            namespace.rmdir(directory.inode, b"f")
        await store.sealing.seal(namespace.lookup(directory.inode, b"f").inode)
        await nothing_in_memory(store)


@in_store
async def test_a_removed_directory_lives_on_for_those_who_hold_it(store: Store, namespace: Namespace) -> None:
    directory = namespace.mkdir(ROOT_INODE, b"d", 0o755, 0, 0)
    namespace.open_directory(directory.inode)
    namespace.open_directory(directory.inode)
    namespace.rmdir(ROOT_INODE, b"d")
    assert namespace.get(directory.inode).nlink == 0
    with pytest.raises(errors.NotFoundError):
        namespace.create(directory.inode, b"x", 0o644, 0, 0)
    namespace.close_directory(directory.inode)
    assert namespace.get(directory.inode).nlink == 0
    namespace.close_directory(directory.inode)
    with pytest.raises(errors.StaleInodeError):
        namespace.get(directory.inode)
    namespace.open_directory(ROOT_INODE)
    namespace.close_directory(ROOT_INODE)
    assert namespace.get(ROOT_INODE).nlink == 2


@in_store
async def test_removed_directories_are_remembered_and_the_oldest_forgotten(store: Store, namespace: Namespace) -> None:
    removed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_REMOVED_MAX", 2)
        for _ in range(3):
            directory = namespace.mkdir(ROOT_INODE, b"d", 0o755, 0, 0)
            namespace.rmdir(ROOT_INODE, b"d")
            removed.append(directory.inode)
    assert store.blocks.directory_removals == 3
    with pytest.raises(errors.StaleInodeError):
        namespace.look(removed[0])
    assert [namespace.look(number).nlink for number in removed[1:]] == [0, 0]
    namespace.open_directory(removed[2])
    assert namespace.list_entries(removed[2], b"", 10) == []
    namespace.close_directory(removed[2])
    with pytest.raises(errors.StaleInodeError):
        namespace.get(removed[2])


@in_store
async def test_unlinking_a_closed_block_frees_it(store: Store, namespace: Namespace) -> None:
    inode = await write(store, b"x")
    segment = store.segments.all[inode.segment]
    assert segment.live_pages > 0
    namespace.unlink(ROOT_INODE, b"x")
    assert segment.live_pages == 0 and store.plane.table_find_name(ROOT_INODE, b"x") is None
    with pytest.raises(errors.StaleInodeError) as caught:
        await namespace.open_for_write(inode.inode)
    assert caught.value.errno == errno.ESTALE
    with pytest.raises(errors.NotFoundError) as lost:
        namespace.unlink(ROOT_INODE, b"x")
    assert lost.value.errno == errno.ENOENT


@in_store
async def test_a_replaced_block_can_be_opened_for_a_moment(store: Store, namespace: Namespace) -> None:
    """Somebody else may have looked the name up just before, and is about to open what it led to."""
    old, new = await write(store, b"x"), await write(store, b"x.tmp")
    namespace.rename(ROOT_INODE, b"x.tmp", ROOT_INODE, b"x")
    assert namespace.lookup(ROOT_INODE, b"x").inode == new.inode and names(namespace) == [b"x"]
    namespace.idle(old.inode)
    assert InodeFlags.NAMELESS in namespace.get(old.inode).flags
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module.trio, "current_time", lambda: float("inf"))
        assert store.blocks.end_lingering(10) == [old.inode]
    namespace.idle(old.inode)
    with pytest.raises(errors.StaleInodeError):
        namespace.get(old.inode)
    namespace.idle(old.inode)  # a second event does nothing
    assert namespace.lookup(ROOT_INODE, b"x").inode == new.inode


@in_store
async def test_what_is_staged_of_an_unlinked_file_is_discarded(store: Store, namespace: Namespace) -> None:
    inode = namespace.create(ROOT_INODE, b"x", 0o644, 0, 0)
    store.plane.file_truncate(inode.inode, 9000)
    namespace.unlink(ROOT_INODE, b"x")
    assert store.plane.dirty_files() == [] and names(namespace) == []


@in_store
async def test_a_name_that_a_rebuild_has_not_put_into_the_table_can_be_unlinked(
    store: Store, namespace: Namespace
) -> None:
    for forget in (False, True):
        inode = await write(store, b"x")
        store.plane.table_set_complete(False)
        store.plane.inode_hide(inode.inode)
        if forget:
            await nothing_in_memory(store)
        store.index.removed_names = set()
        namespace.unlink(ROOT_INODE, b"x")
        assert names(namespace) == [] and store.index.removed_names == {(ROOT_INODE, b"x")}
        assert store.segments.all[inode.segment].live_pages == 0
        with pytest.raises(errors.NotFoundError):
            namespace.unlink(ROOT_INODE, b"x")
        store.plane.table_set_complete(True)
    store.index.removed_names = None


@in_store
async def test_rename_noreplace_and_unknown_flags(store: Store, namespace: Namespace) -> None:
    await write(store, b"a")
    await write(store, b"b")
    with pytest.raises(errors.ExistsError):
        namespace.rename(ROOT_INODE, b"a", ROOT_INODE, b"b", RENAME_NOREPLACE)
    namespace.rename(ROOT_INODE, b"a", ROOT_INODE, b"c", RENAME_NOREPLACE)
    for flags in (2, 4, 3):
        with pytest.raises(errors.InvalidArgumentError):
            namespace.rename(ROOT_INODE, b"b", ROOT_INODE, b"c", flags)
    with pytest.raises(errors.NameTooLongError):
        namespace.rename(ROOT_INODE, b"b", ROOT_INODE, b"n" * 256)
    with pytest.raises(errors.NotFoundError):
        namespace.rename(ROOT_INODE, b"a", ROOT_INODE, b"d")


@in_store
async def test_rename_onto_itself_changes_nothing(store: Store, namespace: Namespace) -> None:
    inode = await write(store, b"a")
    namespace.rename(ROOT_INODE, b"a", ROOT_INODE, b"a")
    assert namespace.get(inode.inode) == inode


@in_store
async def test_rename_minds_the_kinds(store: Store, namespace: Namespace) -> None:
    await write(store, b"file")
    directory = namespace.mkdir(ROOT_INODE, b"dir", 0o755, 0, 0)
    await write(store, b"inside", parent=directory.inode)
    with pytest.raises(errors.IsDirectoryError):
        namespace.rename(ROOT_INODE, b"file", ROOT_INODE, b"dir")
    with pytest.raises(errors.NotDirectoryError):
        namespace.rename(ROOT_INODE, b"dir", ROOT_INODE, b"file")
    with pytest.raises(errors.NotDirectoryError):
        namespace.rename(ROOT_INODE, b"file", namespace.lookup(ROOT_INODE, b"file").inode, b"x")
    namespace.mkdir(ROOT_INODE, b"other", 0o755, 0, 0)
    with pytest.raises(errors.NotEmptyError):
        namespace.rename(ROOT_INODE, b"other", ROOT_INODE, b"dir")
    below = namespace.mkdir(directory.inode, b"below", 0o755, 0, 0)
    deep = namespace.mkdir(below.inode, b"deep", 0o755, 0, 0)
    for _ in range(2):
        with pytest.raises(errors.InvalidArgumentError):
            namespace.rename(ROOT_INODE, b"dir", deep.inode, b"loop")
        with pytest.raises(errors.InvalidArgumentError):
            namespace.rename(ROOT_INODE, b"dir", directory.inode, b"loop")
        await nothing_in_memory(store)
    moves = store.blocks.directory_moves
    namespace.rename(ROOT_INODE, b"dir", ROOT_INODE, b"elsewhere")
    assert store.blocks.directory_moves == moves + 1


# ---- what is brought ----


@in_store
async def test_what_is_not_in_memory_is_renamed_and_removed(store: Store, namespace: Namespace) -> None:
    """Of files and directories memory keeps one each: a rename needs two of both at a time."""
    a, b = (namespace.mkdir(ROOT_INODE, name, 0o755, 0, 0) for name in (b"a", b"b"))
    deep = namespace.mkdir(a.inode, b"deep", 0o755, 0, 0)
    for name in (b"1", b"2", b"3"):
        await write(store, name, parent=deep.inode)
        await write(store, name, parent=b.inode)
    await nothing_in_memory(store)
    moved = namespace.lookup(deep.inode, b"1").inode
    namespace.rename(deep.inode, b"1", b.inode, b"1")
    assert namespace.lookup(b.inode, b"1").inode == moved
    await nothing_in_memory(store)
    namespace.rename(deep.inode, b"2", b.inode, b"new", RENAME_NOREPLACE)
    await nothing_in_memory(store)
    namespace.unlink(deep.inode, b"3")
    await nothing_in_memory(store)
    namespace.rename(a.inode, b"deep", b.inode, b"deep")
    await nothing_in_memory(store)
    namespace.rmdir(b.inode, b"deep")
    namespace.rmdir(ROOT_INODE, b"a")
    assert names(namespace) == [b"b"] and names(namespace, b.inode) == [b"1", b"2", b"3", b"new"]
    await nothing_in_memory(store)
    assert names(namespace, b.inode) == [b"1", b"2", b"3", b"new"]


@in_store
async def test_below_pins_what_is_not_in_memory_is_counted(store: Store, namespace: Namespace) -> None:
    way = ROOT_INODE
    for name in (b"1", b"2", b"3"):
        way = namespace.mkdir(way, name, 0o755, 0, 0).inode
    other = namespace.mkdir(ROOT_INODE, b"other", 0o755, 0, 0).inode
    blocks = [await write(store, name, parent=way) for name in (b"a", b"b", b"c")]
    await write(store, b"c", parent=other)
    await namespace.set_pinned(namespace.lookup(ROOT_INODE, b"1").inode, True)
    await store.pins.count()
    pages = store.pins.pages // len(blocks)
    assert pages > 0
    for change, left in (
        (lambda: namespace.unlink(way, b"a"), 2),
        (lambda: namespace.rename(way, b"b", other, b"b"), 1),
        (lambda: namespace.rename(other, b"b", way, b"d"), 2),
        (lambda: namespace.rename(other, b"c", way, b"d"), 2),
    ):
        await nothing_in_memory(store)
        change()
        for number in store.blocks._lingering.copy():
            store.blocks._lingering.clear()
            namespace.idle(number)
        assert store.pins.pages == left * pages
        await store.pins.count()
        assert store.pins.pages == left * pages


@in_store
async def test_what_was_brought_leaves_memory_after_the_change(store: Store, namespace: Namespace) -> None:
    directory = namespace.mkdir(ROOT_INODE, b"d", 0o755, 0, 0)
    blocks = [await write(store, b"%d" % number, parent=directory.inode) for number in range(4)]
    await nothing_in_memory(store)
    with pytest.raises(errors.ExistsError):
        namespace.rename(directory.inode, b"0", directory.inode, b"1", RENAME_NOREPLACE)
    here = [block for block in blocks if store.plane.names.get(block.inode) is not None]
    assert len(here) == 1


@in_store
async def test_the_index_is_read_without_a_lock(store: Store, namespace: Namespace) -> None:
    directory = namespace.mkdir(ROOT_INODE, b"d", 0o755, 0, 0)
    other = namespace.mkdir(ROOT_INODE, b"e", 0o755, 0, 0)
    for name in (b"a", b"b"):
        await write(store, name, parent=directory.inode)
    await write(store, b"a", parent=other.inode)
    bad, overtaken = await write(store, b"bad", parent=other.inode), await write(store, b"old", parent=other.inode)
    # Below a pin the directories above are asked for, too.
    await namespace.set_pinned(ROOT_INODE, True)
    with index_reads(store.plane.names) as reads:
        for change in (
            lambda: namespace.rename(directory.inode, b"a", other.inode, b"a"),
            lambda: namespace.unlink(directory.inode, b"b"),
            lambda: namespace.rmdir(ROOT_INODE, b"d"),
            lambda: namespace.unlink(other.inode, b"a"),
            lambda: store.blocks.drop_bad(bad.inode, bad.segment),
            lambda: store.blocks.drop_overtaken(overtaken.inode, overtaken.version),
        ):
            await nothing_in_memory(store)
            reads.clear()
            change()
            assert reads
    assert names(namespace, other.inode) == [] and store.blocks.bad_blocks == 1


@in_store
async def test_a_bad_block_that_is_written_as_its_record_is_brought_stays(store: Store, namespace: Namespace) -> None:
    block = await write(store, b"x")
    await nothing_in_memory(store)
    bring, is_open = Bringing._bring, Plane.inode_is_open
    written: list[Need] = []

    def brought(self: Bringing, naming: Naming, need: Need) -> None:
        bring(self, naming, need)
        written.append(need)

    def opened(self: Plane, inode: int) -> OpenState:
        return OpenState.BEING_WRITTEN if written else is_open(self, inode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bringing, "_bring", brought)
        patch.setattr(Plane, "inode_is_open", opened)
        store.blocks.drop_bad(block.inode, block.segment)
    assert written == [Need.INODES] and names(namespace) == [b"x"] and store.blocks.bad_blocks == 0
    store.blocks.drop_bad(block.inode, block.segment)
    assert names(namespace) == [] and store.blocks.bad_blocks == 1
    store.blocks.drop_bad(block.inode, block.segment)  # it is gone
    assert store.blocks.bad_blocks == 1


@in_store
async def test_a_bad_block_that_cannot_be_dropped_ends_no_task_and_goes_later(
    store: Store, namespace: Namespace
) -> None:
    """Whoever finds that it is bad: a copy that eviction makes, a reader, a client."""
    block = await write(store, b"x")
    record, bad = block.pack(), PlaneError("damaged")
    bad.errno = errno.EBADMSG

    async def damaged(self: Plane, *arguments: object, **more: object) -> bytes:
        raise bad

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plane, "store_copy", damaged)
        patch.setattr(Plane, "store_verify", damaged)
        patch.setattr(Naming, "go", lambda self: -errno.ENOMEM)
        assert not await store.sealing.carry(record)
        store._on_event(Event(EventType.BAD_BLOCK, block.inode, block.segment))
        await store.check_block(block.inode, block.segment)
        assert names(namespace) == [b"x"] and store.blocks.bad_blocks == 0
        patch.undo()
        patch.setattr(Plane, "store_copy", damaged)
        assert not await store.sealing.carry(record)
    assert names(namespace) == [] and store.blocks.bad_blocks == 1


@in_store
async def test_a_block_that_another_node_has_later_goes_once_there_is_memory(
    store: Store, namespace: Namespace
) -> None:
    blocks = [await write(store, name) for name in (b"a", b"b", b"c")]
    conflicts = [Conflict(block.inode, block.version, block.version, 0, 1) for block in blocks]
    go, left = Naming.go, [0]

    def ends(self: Naming) -> int:
        left[0] -= 1
        return -errno.ENOMEM if left[0] == 0 else go(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "_OVERTAKEN_S", 0.01)
        patch.setattr(Naming, "go", ends)
        left[0] = 2
        PodNode._drop(cast(PodNode, SimpleNamespace(_store=store)), conflicts)
        assert names(namespace) == [b"b"]
        left[0] = 1  # also the second time
        store.blocks.drop_overtaken(blocks[1].inode, blocks[1].version - 1)  # of older news
        with trio.fail_after(60):
            while names(namespace):
                await trio.sleep(0.01)
    assert store.blocks._not_dropped == {}
    await write(store, b"a")
    store._on_event(Event(EventType.OVERTAKEN, blocks[0].inode, blocks[0].version))
    assert names(namespace) == [b"a"]


@in_store
async def test_a_change_that_stays_without_what_it_lacks_fails_and_says_so(store: Store, namespace: Namespace) -> None:
    block = await write(store, b"x")
    await nothing_in_memory(store)
    lacked: list[Need] = []

    def bring(self: Bringing, naming: Naming, need: Need) -> None:
        lacked.append(need)

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kvfs.store.bringing").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bringing, "_bring", bring)
        with pytest.raises(errors.KvfsError) as caught:
            namespace.unlink(ROOT_INODE, b"x")
    logging.getLogger("kvfs.store.bringing").removeHandler(handler)
    assert caught.value.errno == errno.EIO and lacked == [Need.INODES] * TRIES
    assert len(messages) == 1 and "lacks inodes" in messages[0]
    assert namespace.lookup(ROOT_INODE, b"x").inode == block.inode
    namespace.unlink(ROOT_INODE, b"x")


@in_store
async def test_a_file_that_is_made_as_its_directory_goes_keeps_it(store: Store, namespace: Namespace) -> None:
    directory = namespace.mkdir(ROOT_INODE, b"d", 0o755, 0, 0)
    is_empty = LmdbIndex.is_empty

    def made(self: LmdbIndex, parent: InodeNumber) -> bool:
        empty = is_empty(self, parent)
        namespace.create(directory.inode, b"made", 0o644, 0, 0)  # as a thread of C may
        return empty

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LmdbIndex, "is_empty", made)
        with pytest.raises(errors.NotEmptyError):
            namespace.rmdir(ROOT_INODE, b"d")
    assert names(namespace, directory.inode) == [b"made"]


@in_store
async def test_a_name_that_comes_while_the_index_is_read_counts(store: Store, namespace: Namespace) -> None:
    """The table does not know all names, so the index is asked; the file is made after its answer."""
    await write(store, b"a")
    store.plane.table_set_complete(False)
    stored, wanted, made = LmdbIndex.stored_inode, [b"b"], []

    def late(self: LmdbIndex, parent: int, name: bytes) -> int | None:
        found = stored(self, parent, name)
        if name in wanted:
            wanted.clear()
            made.append(namespace.create(ROOT_INODE, b"b", 0o644, 0, 0))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LmdbIndex, "stored_inode", late)
        with pytest.raises(errors.ExistsError):
            namespace.rename(ROOT_INODE, b"a", ROOT_INODE, b"b", RENAME_NOREPLACE)
    assert made and names(namespace) == [b"a", b"b"]
    store.plane.table_set_complete(True)


@in_store
async def test_a_removal_that_no_commit_has_is_not_revived(store: Store, namespace: Namespace) -> None:
    """The index still has the record and the name. Both are brought, and neither counts."""
    await write(store, b"x")
    block = await write(store, b"y")
    await nothing_in_memory(store)
    namespace.unlink(ROOT_INODE, b"y")
    assert store.index.stored_inode(ROOT_INODE, b"y") == block.inode
    store.index.keep(block.inode)
    store.plane.table_set_complete(False)  # nobody but the index says who has the name
    for change in (
        lambda: namespace.unlink(ROOT_INODE, b"y"),
        lambda: namespace.rename(ROOT_INODE, b"y", ROOT_INODE, b"z"),
    ):
        with pytest.raises(errors.NotFoundError):
            change()
    namespace.rename(ROOT_INODE, b"x", ROOT_INODE, b"y", RENAME_NOREPLACE)
    assert names(namespace) == [b"y"]
    store.plane.table_set_complete(True)
    await nothing_in_memory(store)
    assert names(namespace) == [b"y"] and namespace.lookup(ROOT_INODE, b"y").inode != block.inode


@in_store
async def test_links_and_files_of_a_directory_go_in_one_step(store: Store, namespace: Namespace) -> None:
    """And directories are left, as is what is pinned."""
    await write(store, b"a")
    namespace.symlink(ROOT_INODE, b"b", b"a", 0, 0)
    namespace.mkdir(ROOT_INODE, b"c", 0o755, 0, 0)
    pinned = await write(store, b"d")
    await namespace.set_pinned(pinned.inode, True)
    asked = [namespace.lookup(ROOT_INODE, name).inode for name in (b"a", b"b", b"c", b"d")]
    removed = store.blocks.remove_files(ROOT_INODE, asked)
    assert (removed.files, removed.left) == (2, asked[2:]) and names(namespace) == [b"c", b"d"]


# ---- ends ----


def lives(pool: Path, fd: int) -> dict[bytes, int]:
    """The names that the next daemon of a held mount has, by their blocks' sizes."""
    found: dict[bytes, int] = {}

    async def work(store: Store) -> None:
        for name, number in store.index.list(ROOT_INODE, b"", 100):
            inode = store.index.get(number)
            assert inode is not None and store.plane.table_find_name(ROOT_INODE, name) == number
            found[name] = inode.size

    with_store(pool, work, replace(LAZY, journal=fd))
    return found


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_kill_within_a_change_leaves_it_undone_and_one_behind_it_done(tmp_path: Path, in_memory: bool) -> None:
    """With the journal of names, which outlives the daemon. Within: as what is lacked is brought, and between the
    change in C and the end of its step."""
    pool, size = make_pool(tmp_path / "pool", files=1), 1 << 20
    changes: dict[str, Callable[[Namespace], None]] = {
        "rename": lambda namespace: namespace.rename(ROOT_INODE, b"a", ROOT_INODE, b"b"),
        "unlink": lambda namespace: namespace.unlink(ROOT_INODE, b"b"),
    }
    expected = {"rename": {b"b": 4096}, "unlink": {}}
    before: dict[bytes, int] = {b"a": 4096, b"b": 8192}
    fd = journal.make(size)
    kills: list[tuple[str, bytes, dict[bytes, int]]] = []
    try:

        async def work(store: Store) -> None:
            await write(store, b"a", 4096)
            await write(store, b"b", 8192)
            await store.blocks.commit()
            namespace, last = Namespace(store), before
            changed, bring = Blocks._changed, Bringing._bring

            def kill(what: str) -> None:
                kills.append((what, os.pread(fd, size, 0), last))

            def counted(self: Blocks, done: Naming) -> None:
                changed(self, done)
                kill("within")

            def brought(self: Bringing, naming: Naming, need: Need) -> None:
                bring(self, naming, need)
                kill("brought")

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Blocks, "_changed", counted)
                patch.setattr(Bringing, "_bring", brought)
                for name, change in changes.items():
                    if not in_memory:
                        store.plane.names.limit(0, 0)
                        store.plane.names.forget()
                    change(namespace)
                    last = expected[name]
                    kill("behind")

        crashed_store(pool, work, replace(LAZY, journal=fd))
    finally:
        os.close(fd)
    assert {"within", "behind"} <= {what for what, _, _ in kills} and in_memory != any(k[0] == "brought" for k in kills)
    for number, (what, memory, names_then) in enumerate(kills):
        copy = Path(shutil.copytree(pool, tmp_path / str(number)))
        kept = journal.make(size)
        try:
            assert os.pwrite(kept, memory, 0) == size
            assert lives(copy, kept) == names_then, (number, what)
        finally:
            os.close(kept)
