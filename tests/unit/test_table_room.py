"""The block table does not fill: blocks' names go, empty files' among them, and of the others each user has a share."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from helpers import slowness
from store_pools import OPTIONS, crashed_store, make_pool, names, verify_all, with_store, write

from kvfs.errors import NoSpaceError, ShareError
from kvfs.namespace.files import Namespace
from kvfs.plane import OpenState
from kvfs.record import Inode, Kind
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber

RECORDS = 1200
SMALL = replace(OPTIONS, records_max=RECORDS)
ALICE, BOB = 41_002, 41_003


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return make_pool(tmp_path / "pool")


def names_of(store: Store) -> dict[int, int]:
    """Of each user: names that eviction cannot take."""
    return {of.user: of.names for of in store.plane.users() if of.names}


async def store_empty(namespace: Namespace, first: int, count: int, parent: int = ROOT_INODE, user: int = 0) -> None:
    for i in range(first, first + count):
        await namespace.make_file(InodeNumber(parent), b"empty-%06d" % i, 0o644, user, user)


def test_empty_files_go_as_blocks_do_and_new_names_find_room(pool: Path) -> None:
    async def work(store: Store) -> None:
        namespace, room = Namespace(store), store.blocks.table_room
        kept = await write(store, b"kept")
        await namespace.set_pinned(kept.inode, True)
        pinned = await namespace.make_file(ROOT_INODE, b"pinned-and-empty", 0o644, 0, 0)
        await namespace.set_pinned(pinned.inode, True)
        opened = namespace.create(ROOT_INODE, b"open-and-empty", 0o644, 0, 0)
        for turn in range(5):
            await store_empty(namespace, turn * RECORDS, RECORDS)
            assert room.left() <= RECORDS - 3
        assert store.evictor.counters.blocks >= 4 * RECORDS - room.high
        with trio.fail_after(30 * slowness()):
            while room.is_short():
                await trio.sleep(0.01)
        found = names(store)
        assert {b"kept", b"pinned-and-empty", b"open-and-empty", b"empty-%06d" % (5 * RECORDS - 1)} <= found
        assert store.plane.inode_is_open(opened.inode) == OpenState.BEING_WRITTEN
        assert store.segments.free_count() > store.segments.usable // 2, "and the pool is all but empty"
        await verify_all(store)
        # The index misses what went, too.
        assert len(found) == store.plane.table_statistics()["records"] - 1

    with_store(pool, work, SMALL)


def test_files_that_are_removed_while_they_are_evicted_are_gone_once(pool: Path) -> None:
    async def work(store: Store) -> None:
        namespace = Namespace(store)

        async def remove(first: int) -> None:
            for i in range(first, first + 4 * RECORDS, 3):
                name = b"empty-%06d" % i
                if namespace._index.lookup(ROOT_INODE, name) is not None:
                    namespace.unlink(ROOT_INODE, name)
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(store_empty, namespace, 0, 4 * RECORDS)
            for first in range(3):
                nursery.start_soon(remove, first)
        table = store.plane.table_statistics()
        assert len(names(store)) + 1 == table["records"] == table["blocks"] + 1
        store.segments.take_notes()
        assert sum(segment.live_pages for segment in store.segments.all) == table["blocks"], "a page for each header"

    with_store(pool, work, SMALL)


def test_of_equal_blocks_those_go_that_free_most_records(pool: Path) -> None:
    async def work(store: Store) -> None:
        namespace = Namespace(store)
        # Stored first, so that each of them is older, and would go first by the page.
        for i in range(8):
            await write(store, b"large-%d" % i, 1 << 20)
        store.segments.retire_open()
        await store_empty(namespace, 0, 2 * RECORDS)
        assert store.evictor.counters.blocks > RECORDS // 2
        assert sum(name.startswith(b"large") for name in names(store)) == 8

    with_store(pool, work, SMALL)


def test_a_user_has_a_share_of_names_that_stay_and_however_many_come_each_finds_some(pool: Path) -> None:
    async def work(store: Store) -> None:
        namespace, path = Namespace(store), [b"of-a-user"]

        def fill(user: int) -> int:
            made = 0
            while True:
                try:
                    namespace.make_directories(ROOT_INODE, [b"%d-%d" % (user, made)], 0o755, user, user)
                except ShareError as error:
                    assert error.errno == errno.EDQUOT
                    return made
                made += 1

        assert RECORDS // 6 < fill(ALICE) < RECORDS // 5
        (alice,) = [user for user in store.shares.statistics() if user.user == ALICE]
        assert alice.names_beyond and alice.names == names_of(store)[ALICE]
        made = [fill(user) for user in range(BOB, BOB + 50)]
        assert made[0] > RECORDS // 10 and min(made) > 0, made
        # Nobody is locked out: blocks come and go in what is left, root makes directories, and so does a new user.
        namespace.make_directories(ROOT_INODE, [b"of-root"], 0o755, 0, 0)
        namespace.make_directories(ROOT_INODE, path, 0o755, BOB + 100, BOB + 100)
        await store_empty(namespace, 0, RECORDS, user=BOB + 101)
        namespace.rmdir(ROOT_INODE, b"%d-0" % ALICE)
        assert names_of(store)[ALICE] == alice.names - 1

    with_store(pool, work, SMALL)


def test_a_table_full_of_what_must_stay_says_so_soon(pool: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(store: Store) -> None:
        namespace, made = Namespace(store), 0

        def make() -> Inode:
            return namespace.mkdir(ROOT_INODE, b"%d" % made, 0o755, 0, 0)

        with (
            trio.fail_after(60 * slowness()),
            pytest.raises(NoSpaceError, match=rf"of {RECORDS} records {RECORDS} are dir"),
        ):
            while True:
                made += 1
                await namespace.when_room(make)
        assert store.plane.table_statistics()["records"] == RECORDS
        assert store.blocks.table_room.exhausted and "no block can be evicted" in caplog.text
        # Room is found again at once.
        namespace.rmdir(ROOT_INODE, b"1")
        await namespace.when_room(lambda: namespace.mkdir(ROOT_INODE, b"again", 0o755, 0, 0))

    with_store(pool, work, SMALL)


@pytest.mark.parametrize("killed", [False, True])
def test_after_a_restart_each_user_has_the_same_names(pool: Path, killed: bool) -> None:
    known: dict[int, int] = {}

    async def before(store: Store) -> None:
        namespace = Namespace(store)
        for i in range(20):
            made = namespace.mkdir(ROOT_INODE, b"d%d" % i, 0o755, ALICE, 0).inode
            namespace.symlink(made, b"link", b"to", BOB, 0)
            await namespace.make_file(made, b"block", 0o644, ALICE, 0)
        known.update(names_of(store))
        assert known == {0: 1, ALICE: 20, BOB: 20}
        namespace.create(ROOT_INODE, b"unfinished", 0o644, BOB, 0)
        assert names_of(store)[BOB] == 21
        await store.sync()
        if not killed:
            namespace.unlink(ROOT_INODE, b"unfinished")

    async def after(store: Store) -> None:
        assert names_of(store) == known
        (number,) = [number for name, number in Namespace(store).list_entries(ROOT_INODE, b"d0", 1)][:1]
        assert Namespace(store).get(number).kind == Kind.DIRECTORY

    (crashed_store if killed else with_store)(pool, before, SMALL)
    with_store(pool, after, SMALL)


def test_a_full_table_is_mounted_again(pool: Path) -> None:
    async def before(store: Store) -> None:
        namespace = Namespace(store)
        await store_empty(namespace, 0, RECORDS - 2 * store.blocks.table_room.high)
        while store.blocks.table_room.left():  # the evictor is not asked
            namespace.mkdir(ROOT_INODE, b"d%d" % store.blocks.table_room.left(), 0o755, 0, 0)

    async def after(store: Store) -> None:
        namespace = Namespace(store)
        await store_empty(namespace, RECORDS, 100)
        await verify_all(store)

    with_store(pool, before, SMALL)
    with_store(pool, after, SMALL)
