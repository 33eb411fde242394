"""Names that a store makes, and records that it changes, which C does, and how what they lack is brought."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from store_pools import LAZY, crashed_store, in_store, index_reads, make_pool, nothing_in_memory, with_store, write

from kvfs import errors, journal
from kvfs.index.lmdb import LmdbIndex
from kvfs.namespace.attributes import PIN_ATTRIBUTE
from kvfs.namespace.files import Changes, Namespace
from kvfs.naming import TRIES, Naming, Need
from kvfs.record import GROUP_ATTRIBUTE, InodeFlags
from kvfs.store.blocks import Blocks
from kvfs.store.bringing import Bringing
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber


def names(namespace: Namespace, parent: InodeNumber = ROOT_INODE) -> list[bytes]:
    return [name for name, _ in namespace.list_entries(parent, b"", 100)]


async def tree(store: Store, namespace: Namespace) -> tuple[InodeNumber, InodeNumber]:
    """Directories a/b with a block `old` in it; memory has next to nothing."""
    a = namespace.mkdir(ROOT_INODE, b"a", 0o755, 0, 0).inode
    b = namespace.mkdir(a, b"b", 0o755, 0, 0).inode
    await write(store, b"old", parent=b)
    await nothing_in_memory(store)
    return a, b


# ---- what is brought ----


@in_store
async def test_names_are_made_in_directories_that_are_not_in_memory(store: Store, namespace: Namespace) -> None:
    a, b = await tree(store, namespace)
    made = namespace.create(b, b"file", 0o600, 1, 2)
    assert (made.mode, made.uid, made.gid, made.parent) == (stat.S_IFREG | 0o600, 1, 2, b)
    assert namespace.lookup(b, b"file") == made
    await store.sealing.seal(made.inode)
    await nothing_in_memory(store)
    below = namespace.mkdir(b, b"directory", 0o700, 1, 2)
    assert (below.mode, below.nlink, namespace.get(b).nlink) == (stat.S_IFDIR | 0o700, 2, 3)
    await nothing_in_memory(store)
    link = namespace.symlink(below.inode, b"link", b"../file", 1, 2)
    assert (namespace.readlink(link.inode), link.size, namespace.get(below.inode).nlink) == (b"../file", 7, 2)
    await nothing_in_memory(store)
    assert names(namespace, b) == [b"directory", b"file", b"old"] and names(namespace, below.inode) == [b"link"]
    assert namespace.get(a).nlink == 3


@in_store
async def test_what_is_there_is_found_wherever_it_is(store: Store, namespace: Namespace) -> None:
    a, b = await tree(store, namespace)
    number = namespace.lookup(b, b"old").inode
    for make in (namespace.create, namespace.mkdir):
        await nothing_in_memory(store)
        with pytest.raises(errors.ExistsError) as caught:
            make(b, b"old", 0o644, 0, 0)
        assert caught.value.errno == errno.EEXIST
        with pytest.raises(errors.ExistsError):
            make(a, b"b", 0o644, 0, 0)
        with pytest.raises(errors.NotDirectoryError):
            make(number, b"x", 0o644, 0, 0)
        with pytest.raises(errors.NotFoundError):
            make(InodeNumber(12345), b"x", 0o644, 0, 0)
        with pytest.raises(errors.NameTooLongError):
            make(b, b"n" * 256, 0o644, 0, 0)
    namespace.unlink(b, b"old")
    assert store.index.stored_inode(b, b"old") == number  # no commit has its end
    assert namespace.create(b, b"old", 0o644, 0, 0).inode != number
    namespace.unlink(b, b"old")
    namespace.rmdir(a, b"b")
    with pytest.raises(errors.NotFoundError):
        namespace.create(b, b"x", 0o644, 0, 0)


@in_store
async def test_attributes_of_what_is_not_in_memory_are_set(store: Store, namespace: Namespace) -> None:
    a, b = await tree(store, namespace)
    block = namespace.lookup(b, b"old")
    await nothing_in_memory(store)
    changed = await namespace.setattr(block.inode, Changes(mode=0o600, uid=3, gid=4, atime_ns=5, mtime_ns=6))
    assert (changed.mode, changed.uid, changed.gid, changed.atime_ns, changed.mtime_ns) == (
        stat.S_IFREG | 0o600, 3, 4, 5, 6,
    )  # fmt: skip
    assert changed.version > block.version
    await nothing_in_memory(store)
    moves = store.blocks.directory_moves
    await namespace.setattr(a, Changes(mode=0o2700))
    await nothing_in_memory(store)
    await namespace.setxattr(b, b"user.x", b"1")
    await nothing_in_memory(store)
    await namespace.setxattr(block.inode, GROUP_ATTRIBUTE, b"g")
    assert store.blocks.directory_moves == moves + 2  # blocks below have them in their headers
    await nothing_in_memory(store)
    assert store.index.group_inodes(b"g") == [block.inode]
    await namespace.setxattr(block.inode, PIN_ATTRIBUTE, b"1")
    assert store.pins.numbers() == [block.inode]
    await nothing_in_memory(store)
    await namespace.setxattr(block.inode, PIN_ATTRIBUTE, b"0")
    await nothing_in_memory(store)
    await namespace.removexattr(block.inode, GROUP_ATTRIBUTE)
    await nothing_in_memory(store)
    found = namespace.get(block.inode)
    assert (found.mode, found.xattrs, found.flags) == (changed.mode, {}, InodeFlags.SEALED)
    assert namespace.get(a).mode == stat.S_IFDIR | 0o2700 and namespace.get(b).xattrs == {b"user.x": b"1"}
    assert not store.pins and not store.index.group_inodes(b"g")


@in_store
async def test_the_index_is_read_without_a_lock(store: Store, namespace: Namespace) -> None:
    a, b = await tree(store, namespace)
    number = namespace.lookup(b, b"old").inode
    changes: list[Callable[[], object]] = [
        lambda: namespace.create(b, b"file", 0o644, 0, 0),
        lambda: namespace.mkdir(b, b"directory", 0o755, 0, 0),
        lambda: namespace.symlink(b, b"link", b"x", 0, 0),
        lambda: namespace.make_directories(ROOT_INODE, [b"a", b"b", b"c", b"d"], 0o755, 0, 0),
        lambda: store.blocks.set_attribute(number, b"user.x", b"1"),
        lambda: store.blocks.remove_attribute(number, b"user.x"),
    ]
    with index_reads(store.plane.names) as reads:
        for change in changes:
            await nothing_in_memory(store)
            reads.clear()
            change()
            assert reads
        waits: list[Callable[[], Awaitable[object]]] = [
            lambda: namespace.setattr(number, Changes(mode=0o600)),
            lambda: namespace.setattr(a, Changes(uid=5)),
            lambda: namespace.set_pinned(number, True),
            lambda: namespace.set_pinned(number, False),
        ]
        for wait in waits:
            await nothing_in_memory(store)
            reads.clear()
            await wait()
            assert reads
    assert names(namespace, b) == [b"c", b"directory", b"file", b"link", b"old"]


@in_store
async def test_a_directory_that_leaves_memory_as_others_are_brought_is_there(
    store: Store, namespace: Namespace
) -> None:
    """Memory has one file and one directory; more are looked at while this one is brought."""
    _, b = await tree(store, namespace)
    others = [namespace.mkdir(ROOT_INODE, b"%d" % number, 0o755, 0, 0).inode for number in range(4)]
    await nothing_in_memory(store)
    bring, lacked = Bringing._bring, list[Need]()

    def brought(self: Bringing, naming: Naming, need: Need) -> None:
        bring(self, naming, need)
        lacked.append(need)
        for other in others:
            store.index.keep(other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bringing, "_bring", brought)
        namespace.create(b, b"file", 0o644, 0, 0)
    assert lacked == [Need.INODES]
    await store.sealing.seal(namespace.lookup(b, b"file").inode)
    await nothing_in_memory(store)
    assert names(namespace, b) == [b"file", b"old"]


@in_store
async def test_a_directory_that_is_removed_as_it_is_brought_gets_nothing(store: Store, namespace: Namespace) -> None:
    directory = namespace.mkdir(ROOT_INODE, b"d", 0o755, 0, 0).inode
    await nothing_in_memory(store)
    bring, removed = Bringing._bring, list[bool]()

    def brought(self: Bringing, naming: Naming, need: Need) -> None:
        bring(self, naming, need)
        if not removed:
            removed.append(True)
            namespace.rmdir(ROOT_INODE, b"d")  # as another request may

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bringing, "_bring", brought)
        with pytest.raises(errors.NotFoundError):
            namespace.mkdir(directory, b"e", 0o755, 0, 0)
    assert names(namespace) == []
    with pytest.raises(errors.StaleInodeError):
        await namespace.setattr(directory, Changes(mode=0o700))


@in_store
async def test_a_change_that_stays_without_what_it_lacks_fails_and_changes_nothing(
    store: Store, namespace: Namespace
) -> None:
    _, b = await tree(store, namespace)
    before, lacked = namespace.get(b), list[Need]()

    def bring(self: Bringing, naming: Naming, need: Need) -> None:
        lacked.append(need)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bringing, "_bring", bring)
        for change in (
            lambda: namespace.create(b, b"x", 0o644, 0, 0),
            lambda: store.blocks.set_attribute(b, b"user.x", b"1"),
        ):
            store.plane.names.forget()
            lacked.clear()
            with pytest.raises(errors.KvfsError) as caught:
                change()
            assert caught.value.errno == errno.EIO and lacked == [Need.INODES] * TRIES
    assert names(namespace, b) == [b"old"] and namespace.get(b) == before
    assert store.plane.statistics()["staged_files"] == 0


@in_store
async def test_a_name_that_comes_while_the_index_is_read_counts(store: Store, namespace: Namespace) -> None:
    """The table does not know all names, so the index is asked; the file is made after its answer."""
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
            namespace.mkdir(ROOT_INODE, b"b", 0o755, 0, 0)
    assert made and names(namespace) == [b"b"]
    store.plane.table_set_complete(True)


@in_store
async def test_directories_are_found_where_a_thread_of_c_was_faster(store: Store, namespace: Namespace) -> None:
    lookup, made = LmdbIndex.lookup, list[InodeNumber]()

    def late(self: LmdbIndex, parent: InodeNumber, name: bytes) -> InodeNumber | None:
        found = lookup(self, parent, name)
        if name == b"a" and not made:
            made.append(namespace.mkdir(ROOT_INODE, b"a", 0o755, 0, 0).inode)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LmdbIndex, "lookup", late)
        found = namespace.make_directories(ROOT_INODE, [b"a", b"b"], 0o755, 0, 0)
    assert found.parent == made[0] and names(namespace) == [b"a"]


# ---- ends ----

State = dict[bytes, tuple[int, dict[bytes, bytes]]]


def lives(pool: Path, fd: int) -> State:
    """The names that the next daemon of a held mount has, with modes and attributes."""
    found: State = {}

    async def work(store: Store) -> None:
        for name, number in store.index.list(ROOT_INODE, b"", 100):
            inode = store.index.get(number)
            assert inode is not None and store.plane.table_find_name(ROOT_INODE, name) == number
            found[name] = stat.S_IMODE(inode.mode), inode.xattrs
        root = store.index.get(ROOT_INODE)
        assert root is not None and root.nlink == 2 + (b"d" in found)

    with_store(pool, work, replace(LAZY, journal=fd))
    return found


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_kill_within_a_change_leaves_it_undone_and_one_behind_it_done(tmp_path: Path, in_memory: bool) -> None:
    """With the journal of names, which outlives the daemon. Within: as what is lacked is brought, and between the
    change in C and the end of its step."""
    pool, size = make_pool(tmp_path / "pool", files=1), 1 << 20
    changes: dict[str, Callable[[Store, Namespace], object]] = {
        "mkdir": lambda store, namespace: namespace.mkdir(ROOT_INODE, b"d", 0o700, 0, 0),
        "symlink": lambda store, namespace: namespace.symlink(ROOT_INODE, b"l", b"x", 0, 0),
        "create": lambda store, namespace: namespace.create(ROOT_INODE, b"f", 0o600, 0, 0),
        "chmod": lambda store, namespace: store.blocks.set(
            namespace.lookup(ROOT_INODE, b"a").inode, Changes(mode=0o640).given()
        ),
        "setxattr": lambda store, namespace: store.blocks.set_attribute(
            namespace.lookup(ROOT_INODE, b"a").inode, b"user.x", b"1"
        ),
    }
    link = (0o777, {b"kvfs.symlink": b"x"})
    expected: dict[str, State] = {
        "mkdir": {b"a": (0o644, {}), b"d": (0o700, {})},
        "symlink": {b"a": (0o644, {}), b"d": (0o700, {}), b"l": link},
        "create": {b"a": (0o644, {}), b"d": (0o700, {}), b"l": link},  # it has no block, and goes with its daemon
        "chmod": {b"a": (0o640, {}), b"d": (0o700, {}), b"l": link},
        "setxattr": {b"a": (0o640, {b"user.x": b"1"}), b"d": (0o700, {}), b"l": link},
    }
    fd = journal.make(size)
    kills: list[tuple[str, bytes, State]] = []
    try:

        async def work(store: Store) -> None:
            await write(store, b"a", 4096)
            await store.blocks.commit()
            namespace, last = Namespace(store), {b"a": (0o644, dict[bytes, bytes]())}
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
                    change(store, namespace)
                    last = expected[name]
                    kill("behind")

        crashed_store(pool, work, replace(LAZY, journal=fd))
    finally:
        os.close(fd)
    assert {"within", "behind"} <= {what for what, _, _ in kills} and in_memory != any(k[0] == "brought" for k in kills)
    for number, (what, memory, then) in enumerate(kills):
        copy = Path(shutil.copytree(pool, tmp_path / str(number)))
        kept = journal.make(size)
        try:
            assert os.pwrite(kept, memory, 0) == size
            assert lives(copy, kept) == then, (number, what)
        finally:
            os.close(kept)
