"""`kvfs rm` on a store without a mount: all below a path goes, in small steps, and again where it was cut off."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from store_pools import LAZY, OPTIONS, crashed_store, make_pool, with_store, write

from kvfs.errors import InvalidArgumentError, NotDirectoryError, NotFoundError
from kvfs.namespace import forgetting
from kvfs.namespace.files import Namespace
from kvfs.namespace.forgetting import NEXT, Forgetting, Forgotten, NextNames
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber

SIZE = 5000


def run(store: Store, room: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint) -> Forgetting:
    return Forgetting(Namespace(store), store, room)


def directory(store: Store, *names: bytes) -> InodeNumber:
    return Namespace(store).make_directories(ROOT_INODE, names, 0o755, 0, 0).inode


async def blocks(store: Store, count: int, *names: bytes) -> InodeNumber:
    """So many blocks in a directory of that path."""
    parent = directory(store, *names)
    for i in range(count):
        await write(store, b"%06x" % i, SIZE, parent)
    return parent


def live_pages(store: Store) -> int:
    store.segments.take_notes()
    return sum(segment.live_pages for segment in store.segments.own)


def test_all_below_a_path_goes_and_nothing_else(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await blocks(store, 3, b"models", b"r2")
        kept = live_pages(store)
        await blocks(store, 70, b"models", b"r1")
        await blocks(store, 2, b"models", b"r1", b"00")
        names = Namespace(store)
        names.symlink(directory(store, b"models", b"r1"), b"link", b"nowhere", 0, 0)
        await store.blocks.commit()
        await blocks(store, 100, b"models", b"r1", b"01")  # no commit has these
        done = await run(store).forget("/models/r1")
        assert done == Forgotten(files=173, bytes=172 * SIZE, directories=3)
        assert live_pages(store) == kept
        assert [name for name, _ in store.index.list(directory(store, b"models"), b"", 9)] == [b"r2"]
        with pytest.raises(NotFoundError, match="/models/r1: no such file or directory in this pool"):
            await run(store).forget("/models/r1")
        assert await run(store).forget("/models/r2/000001") == Forgotten(files=1, bytes=SIZE)

    with_store(make_pool(tmp_path / "p"), work, LAZY)


def test_the_root_stays_and_is_emptied_only_when_that_is_meant(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await blocks(store, 3, b"a", b"b")
        await write(store, b"loose", SIZE)
        for path in ("/", "//"):
            with pytest.raises(InvalidArgumentError, match="whole pool"):
                await run(store).forget(path)
        for path in ("/a/..", "/a/./b", "/" + "x" * 256):
            with pytest.raises(InvalidArgumentError, match="no name in a directory"):
                await run(store).forget(path)
        with pytest.raises(NotDirectoryError):
            await run(store).forget("/loose/x")
        assert (await run(store).forget("/", whole=True)).files == 4
        assert store.index.list(ROOT_INODE, b"", 9) == [] and store.index.get(ROOT_INODE) is not None

    with_store(make_pool(tmp_path / "p"), work)


def test_pinned_blocks_go_and_their_pins_with_them(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        parent = await blocks(store, 5, b"a")
        await blocks(store, 2, b"b")
        one = store.index.lookup(parent, b"000003")
        assert one is not None
        await store.blocks.pin(parent)
        await store.blocks.pin(one)
        await store.blocks.pin(directory(store, b"b"))
        assert (await run(store).forget("/a")).files == 5
        await store.pins.count()
        assert store.pins.numbers() == [directory(store, b"b")]
        assert store.pins.pages == 4  # of each block its header and its last page: the rest is sparse

    with_store(make_pool(tmp_path / "p"), work)


@pytest.mark.parametrize("times", [1, 1000])
def test_what_is_stored_meanwhile_goes_too_unless_it_never_ends(tmp_path: Path, times: int) -> None:
    async def work(store: Store) -> None:
        parent = await blocks(store, 130, b"a", b"b")
        await blocks(store, 1, b"a", b"c")
        stored = 0

        async def store_one() -> None:  # before names that were listed
            nonlocal stored
            if stored < times:
                stored += 1
                await write(store, b"!%d" % stored, SIZE, parent)

        done = await run(store, store_one).forget("/a")
        if times == 1:
            assert (done.files, done.directories, done.filled) == (132, 3, 0)
        else:
            assert done.filled == 1 and done.directories == 1 and store.index.lookup(directory(store, b"a"), b"b")

    with_store(make_pool(tmp_path / "p"), work)


def test_others_have_their_turn_after_each_step(tmp_path: Path) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async def work(store: Store) -> None:
        await blocks(store, 1000, b"a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(others)
            await run(store).forget("/a")
            nursery.cancel_scope.cancel()
        assert turns >= 1000 // forgetting._STEP

    with_store(make_pool(tmp_path / "p", size=64 << 20), work)


def test_a_commit_is_waited_for_where_many_changes_are_pending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgetting, "_PENDING_MAX", 100)

    async def work(store: Store) -> None:
        await blocks(store, 500, b"a")
        await store.blocks.commit()
        commits = store.index.statistics().commits
        await run(store).forget("/a")
        assert store.index.statistics().commits - commits >= 2
        assert store.index.changes_pending <= 100 + forgetting._STEP + 4

    with_store(make_pool(tmp_path / "p"), work, LAZY)


@pytest.mark.parametrize("commits", [False, True])
def test_it_may_be_cut_off_and_the_next_time_ends_it(tmp_path: Path, commits: bool) -> None:
    """By a kill: with the last commit before it, or one in its middle."""
    pool = make_pool(tmp_path / "p")

    async def begin(store: Store) -> None:
        await blocks(store, 300, b"a", b"b")
        await blocks(store, 3, b"c")
        await store.blocks.commit()
        steps = 0

        async def cut() -> None:
            nonlocal steps
            steps += 1
            if steps == 4:  # the first was for the directory b itself
                if commits:
                    await store.blocks.commit()
                scope.cancel()
            await trio.lowlevel.checkpoint()

        with trio.CancelScope() as scope:
            await run(store, cut).forget("/a")
        assert scope.cancelled_caught
        left = len(store.index.list(directory(store, b"a", b"b"), b"", 1000))
        assert left == 300 - 2 * forgetting._STEP

    crashed_store(pool, begin, LAZY)

    async def end(store: Store) -> None:
        left = store.index.list(directory(store, b"a", b"b"), b"", 1000)
        assert len(left) == (300 - 2 * forgetting._STEP if commits else 300)
        done = await run(store).forget("/a")
        assert (done.files, done.directories) == (len(left), 2)

    with_store(pool, end)

    async def look(store: Store) -> None:
        assert [name for name, _ in store.index.list(ROOT_INODE, b"", 9)] == [b"c"]
        assert len(store.index.list(directory(store, b"c"), b"", 9)) == 3

    with_store(pool, look, OPTIONS)


def test_of_removals_one_by_one_the_next_names_are_brought_into_memory(tmp_path: Path) -> None:
    """For rm -r: then the data plane removes them without Python."""

    async def work(store: Store) -> None:
        parent, other = await blocks(store, 300, b"a"), await blocks(store, 300, b"b")
        await store.blocks.commit()
        ahead = NextNames(store.index)
        store.plane.names.forget()
        numbers = [number for _, number in store.index.list(parent, b"", 1000)]
        for directory_number in (parent, other, parent):  # one in each: nothing tells of a next one
            ahead.bring(directory_number, b"000000")
            assert len(store.plane.names.absent(numbers)) == 300
        Namespace(store).unlink(parent, b"000000")
        ahead.bring(parent, b"000001")
        assert store.plane.names.absent(numbers[1:]) == [numbers[1], *numbers[2 + NEXT :]]
        for name in (b"0000c8", b"0000be", b"0000e0"):  # in no order
            ahead.bring(parent, name)
        assert store.plane.names.absent(numbers[1:]) == [numbers[1], *numbers[2 + NEXT :]]
        ahead = NextNames(store.index)
        ahead.bring(parent, b"000001")
        ahead.bring(parent, b"000002")
        ahead.bring(parent, b"%06x" % (3 + NEXT))  # the first that was not brought
        assert store.plane.names.absent(numbers[1:]) == [numbers[1], numbers[3 + NEXT], *numbers[4 + 2 * NEXT :]]

    with_store(make_pool(tmp_path / "p"), work, LAZY)
