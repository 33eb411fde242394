"""Directories that another node has too, while its news come at any moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from pods import make_pod
from store_pools import index_reads, write

from kvfs.errors import ExistsError, NotEmptyError, NotFoundError
from kvfs.namespace.files import Changes, Namespace
from kvfs.namespace.foreign import ForeignNames
from kvfs.naming import Naming, Need
from kvfs.podmap import PodMap
from kvfs.record import Inode, InodeFlags
from kvfs.store import opening
from kvfs.store.bringing import Bringing
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber

NEVER = (1 << 64) - 1


def podmap_of(store: Store) -> PodMap:
    podmap = store.plane.pod
    assert podmap is not None
    return podmap


async def news_of_a_directory(pool: Path) -> tuple[bytes, bytes]:
    """The batches of a node that makes the directory `d`, and removes it."""
    async with Store.open(pool) as store:
        podmap = podmap_of(store)
        names = Namespace(store, ForeignNames(store, podmap))
        podmap.take(NEVER)
        names.mkdir(ROOT_INODE, b"d", 0o755, 0, 0)
        made = podmap.take(NEVER)
        names.rmdir(ROOT_INODE, b"d")
        removed = podmap.take(NEVER)
        assert made.record_count == removed.record_count == 1
        return made.data, removed.data


class News(Namespace):
    """The other node removes its directory while it is looked whether the own one is empty."""

    removed: bytes | None = None

    def is_open_directory(self, number: InodeNumber) -> bool:
        if self.removed is not None:
            podmap = self._store.plane.pod
            assert podmap is not None
            podmap.apply(1, self.removed)
        return super().is_open_directory(number)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_directory_that_the_other_removes_meanwhile_is_removed(tmp_path: Path, is_open: bool) -> None:
    pools = make_pod(tmp_path, nodes=2, joined=2)

    async def main() -> None:
        made, removed = await news_of_a_directory(pools[1])
        async with Store.open(pools[0]) as store:
            podmap = podmap_of(store)
            names = News(store, ForeignNames(store, podmap))
            links = names.get(ROOT_INODE).nlink
            own = names.mkdir(ROOT_INODE, b"d", 0o755, 0, 0)
            podmap.apply(1, made)
            # It becomes the other's here, and the root has as many directories as before.
            with pytest.raises(NotEmptyError):
                names.rmdir(ROOT_INODE, b"d")
            assert InodeFlags.BORROWED in names.lookup(ROOT_INODE, b"d").flags
            assert names.get(ROOT_INODE).nlink == links + 1
            # With something of its own in it, it is its own again.
            names.mkdir(own.inode, b"e", 0o755, 0, 0)
            names.rmdir(own.inode, b"e")
            assert InodeFlags.BORROWED not in names.lookup(ROOT_INODE, b"d").flags
            names.removed, removals = removed, store.blocks.directory_removals
            if is_open:
                names.open_directory(own.inode)
            names.rmdir(ROOT_INODE, b"d")
            with pytest.raises(NotFoundError):
                names.lookup(ROOT_INODE, b"d")
            assert names.get(ROOT_INODE).nlink == links and store.blocks.directory_removals == removals + 1
            if is_open:
                assert names.get(own.inode).nlink == 0
                names.close_directory(own.inode)

    trio.run(main)


def test_a_directory_with_attributes_that_becomes_the_others_has_none_of_them(tmp_path: Path) -> None:
    pools = make_pod(tmp_path, nodes=2, joined=2)

    async def main() -> None:
        made, _ = await news_of_a_directory(pools[1])
        async with Store.open(pools[0]) as store:
            podmap = podmap_of(store)
            names = Namespace(store, ForeignNames(store, podmap))
            own = names.mkdir(ROOT_INODE, b"d", 0o755, 0, 0)
            await names.setxattr(own.inode, b"user.note", b"n" * 100)
            podmap.apply(1, made)
            with pytest.raises(NotEmptyError):
                names.rmdir(ROOT_INODE, b"d")
            for _ in range(2):
                theirs = names.lookup(ROOT_INODE, b"d")
                assert (theirs.inode, theirs.flags, theirs.xattrs) == (own.inode, InodeFlags.BORROWED, {})
                await store.blocks.commit()  # then as the index has it
                store.plane.names.forget()

    trio.run(main)


def test_the_index_is_read_without_a_lock_where_the_directory_is_the_others(tmp_path: Path) -> None:
    pools = make_pod(tmp_path, nodes=2, joined=2)

    async def main() -> None:
        made, _ = await news_of_a_directory(pools[1])
        async with Store.open(pools[0]) as store:
            podmap = podmap_of(store)
            names = Namespace(store, ForeignNames(store, podmap))
            await store.blocks.commit()
            store.plane.names.limit(0, 0)
            store.plane.names.forget()
            podmap.apply(1, made)
            with index_reads(store.plane.names) as reads, pytest.raises(NotEmptyError):
                names.rmdir(ROOT_INODE, b"d")
            assert reads and InodeFlags.BORROWED in names.lookup(ROOT_INODE, b"d").flags

    trio.run(main)


def test_a_name_that_is_taken_while_the_others_directory_is_looked_up_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the change lacks is brought without a lock, and a thread of C makes the name meanwhile."""
    pools = make_pod(tmp_path, nodes=2, joined=2)

    async def main() -> None:
        made, _ = await news_of_a_directory(pools[1])
        async with Store.open(pools[0]) as store:
            podmap = podmap_of(store)
            names = Namespace(store, ForeignNames(store, podmap))
            podmap.apply(1, made)
            await store.blocks.commit()
            store.plane.names.limit(0, 0)
            store.plane.names.forget()
            links, bring, taken = names.get(ROOT_INODE).nlink, Bringing._bring, list[InodeNumber]()

            def late(self: Bringing, naming: Naming, need: Need) -> None:
                bring(self, naming, need)
                if not taken:
                    taken.append(InodeNumber(0))
                    taken[0] = names.create(ROOT_INODE, b"d", 0o644, 0, 0).inode

            monkeypatch.setattr(Bringing, "_bring", late)
            assert names._enter_foreign(ROOT_INODE, b"d") == names.get(taken[0])
            assert names.get(ROOT_INODE).nlink == links
            assert names.lookup(ROOT_INODE, b"d").inode == taken[0]

    trio.run(main)


def test_a_directory_in_which_something_is_made_is_this_nodes_too(tmp_path: Path) -> None:
    """And all above it; whatever is made, and also where its rights are set. What is only looked up is not."""
    pools = make_pod(tmp_path, nodes=2, joined=2)
    changes: list[Callable[[Store, Namespace, InodeNumber], object]] = [
        lambda store, names, number: names.create(number, b"x", 0o644, 0, 0),
        lambda store, names, number: names.mkdir(number, b"x", 0o755, 0, 0),
        lambda store, names, number: names.symlink(number, b"x", b"target", 0, 0),
        lambda store, names, number: store.blocks.enter_copy(copied(store, number)),
        lambda store, names, number: store.blocks.set(number, Changes(mode=0o700).given()),
        lambda store, names, number: names.make_directories(ROOT_INODE, [b"d"], 0o755, 0, 0),
    ]

    async def main() -> None:
        made, _ = await news_of_a_directory(pools[1])
        for at, change in enumerate(changes):
            async with Store.open(pools[0]) as store:
                podmap = podmap_of(store)
                names = Namespace(store, ForeignNames(store, podmap))
                podmap.apply(1, made)
                await write(store, b"seed", 4096)
                directory = names.lookup(ROOT_INODE, b"d")
                assert InodeFlags.BORROWED in directory.flags, at
                with pytest.raises(ExistsError):
                    names.mkdir(ROOT_INODE, b"d", 0o755, 0, 0)
                assert InodeFlags.BORROWED in names.get(directory.inode).flags
                taken(podmap)
                change(store, names, directory.inode)
                assert InodeFlags.BORROWED not in names.get(directory.inode).flags, at
                assert taken(podmap)[0] > 0, at
                for name, _ in names.list_entries(directory.inode, b"", 10):
                    (names.rmdir if name == b"x" and at == 1 else names.unlink)(directory.inode, name)
                with pytest.raises(NotEmptyError):
                    names.rmdir(ROOT_INODE, b"d")
                assert InodeFlags.BORROWED in names.lookup(ROOT_INODE, b"d").flags
                names.unlink(ROOT_INODE, b"seed")

    trio.run(main)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_directory_that_is_made_again_has_its_number_and_no_trace_of_its_end(tmp_path: Path, is_open: bool) -> None:
    pools = make_pod(tmp_path, nodes=2, joined=2)

    async def main() -> None:
        async with Store.open(pools[0]) as store:
            names = Namespace(store, ForeignNames(store, podmap_of(store)))
            links = names.get(ROOT_INODE).nlink
            for committed in (False, True):
                made = names.mkdir(ROOT_INODE, b"d", 0o755, 0, 0)
                if committed:
                    await store.blocks.commit()
                    store.plane.names.forget()
                if is_open:
                    names.open_directory(made.inode)
                names.rmdir(ROOT_INODE, b"d")
                assert names.look(made.inode).nlink == 0
                again = names.mkdir(ROOT_INODE, b"d", 0o700, 5, 5)
                assert again.inode == made.inode and names.lookup(ROOT_INODE, b"d") == again == names.look(made.inode)
                assert names.get(ROOT_INODE).nlink == links + 1
                inside = names.create(again.inode, b"x", 0o644, 0, 0)
                if is_open:
                    names.close_directory(again.inode)
                assert names.lookup(again.inode, b"x") == inside
                names.unlink(again.inode, b"x")
                names.rmdir(ROOT_INODE, b"d")
                assert names.get(ROOT_INODE).nlink == links

    trio.run(main)


def copied(store: Store, parent: InodeNumber) -> Inode:
    """A block of a page as a copy of another node's, in the segment of the block `seed`."""
    seed = store.index.get(store.index.lookup(ROOT_INODE, b"seed") or ROOT_INODE)
    assert seed is not None
    block = seed.copy()
    block.inode, block.version = store.blocks.next_inode(), store.blocks.next_version()
    block.parent, block.name = parent, b"x"
    return block


def test_more_directories_than_the_queue_of_news_holds_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_NEWS_BYTES", 1 << 20)  # 4,096 items
    (pool,) = make_pod(tmp_path, nodes=2)
    count = 6000

    async def main() -> None:
        async with Store.open(pool) as store:
            podmap = podmap_of(store)
            names, told = Namespace(store, ForeignNames(store, podmap)), list[int]()
            for number in range(count):
                names.mkdir(ROOT_INODE, b"%d" % number, 0o755, 0, 0)
                if number % 1000 == 0:
                    taken(podmap)
            taken(podmap)

            async def tell() -> None:
                told.append(await trio.to_thread.run_sync(podmap.tell_directories))

            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(tell)
                    while not told and podmap.statistics()["news_held"] <= 2048:
                        await trio.sleep(0.001)
                    records = lost = 0
                    while not told or podmap.statistics()["news_held"]:
                        some = taken(podmap)
                        records, lost = records + some[0], lost + some[1]
                        await trio.sleep(0.001)
            assert (records, lost) == (told[0], 0) and told[0] >= count

    trio.run(main)


def taken(podmap: PodMap) -> tuple[int, int]:
    """All that is due: records, and what was lost for want of room."""
    records = lost = 0
    while (batch := podmap.take(NEVER)).data or batch.lost:
        records, lost = records + batch.record_count, lost + batch.lost
    return records, lost
