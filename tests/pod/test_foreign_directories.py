"""Directories that another node has too, while its news come at any moment."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from pods import make_pod
from store_pools import index_reads

from kvfs.errors import NotEmptyError, NotFoundError
from kvfs.index.lmdb import LmdbIndex
from kvfs.namespace.files import Namespace
from kvfs.namespace.foreign import ForeignNames
from kvfs.podmap import PodMap
from kvfs.record import InodeFlags
from kvfs.store import opening
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


def test_a_pinned_directory_that_becomes_the_others_stays_pinned(tmp_path: Path) -> None:
    pools = make_pod(tmp_path, nodes=2, joined=2)

    async def main() -> None:
        made, _ = await news_of_a_directory(pools[1])
        async with Store.open(pools[0]) as store:
            podmap = podmap_of(store)
            names = Namespace(store, ForeignNames(store, podmap))
            own = names.mkdir(ROOT_INODE, b"d", 0o755, 0, 0)
            await names.set_pinned(own.inode, True)
            podmap.apply(1, made)
            with pytest.raises(NotEmptyError):
                names.rmdir(ROOT_INODE, b"d")
            assert names.lookup(ROOT_INODE, b"d").flags == InodeFlags.BORROWED | InodeFlags.PINNED
            assert store.pins.numbers() == [own.inode]
            # As the first is made in it, it is this node's again, and what is in it is pinned.
            inside = names.mkdir(own.inode, b"e", 0o755, 0, 0)
            assert names.lookup(ROOT_INODE, b"d").flags == InodeFlags.PINNED
            assert store.pins.holds(inside.pack())

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
    """The index is read before the step, and a thread of C makes the name meanwhile."""
    pools = make_pod(tmp_path, nodes=2, joined=2)

    async def main() -> None:
        made, _ = await news_of_a_directory(pools[1])
        async with Store.open(pools[0]) as store:
            podmap = podmap_of(store)
            names = Namespace(store, ForeignNames(store, podmap))
            podmap.apply(1, made)
            links = names.get(ROOT_INODE).nlink
            stored, taken = LmdbIndex.stored_inode, list[InodeNumber]()

            def late(self: LmdbIndex, parent: int, name: bytes) -> int | None:
                found = stored(self, parent, name)
                if not taken:
                    taken.append(InodeNumber(0))
                    taken[0] = names.create(ROOT_INODE, b"d", 0o644, 0, 0).inode
                return found

            monkeypatch.setattr(LmdbIndex, "stored_inode", late)
            assert names._enter_foreign(ROOT_INODE, b"d") == names.get(taken[0])
            assert names.get(ROOT_INODE).nlink == links
            assert names.lookup(ROOT_INODE, b"d").inode == taken[0]

    trio.run(main)


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
