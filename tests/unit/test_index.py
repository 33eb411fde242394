"""The index: what is visible at once, what is durable, and what must not be."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from helpers import often
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvfs.errors import KvfsError
from kvfs.index.lmdb import LmdbIndex, PoolIndexError
from kvfs.record import Extent, Inode, InodeFlags, Kind
from kvfs.types import InodeNumber, SegmentIndex


def block(number: int, name: bytes, parent: int = 1, segment: int = 3, **fields: object) -> Inode:
    return Inode(
        inode=InodeNumber(number), parent=InodeNumber(parent), name=name, kind=Kind.FILE, mode=0o100644,
        flags=InodeFlags.SEALED, segment=SegmentIndex(segment), size=4096, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture
def index(tmp_path: Path) -> Iterator[LmdbIndex]:
    made = LmdbIndex(tmp_path / "index")
    yield made
    made.close()


def reopened(index: LmdbIndex) -> LmdbIndex:
    index.close()
    index.__init__(index._path)  # type: ignore[misc]
    return index


def directory(number: int, parent: int) -> Inode:
    return Inode(
        inode=InodeNumber(number), parent=InodeNumber(parent), name=b"%d" % number, kind=Kind.DIRECTORY, mode=0o40755
    )


def in_memory(index: LmdbIndex, *numbers: int) -> list[bool]:
    return [index._names.get(number) is not None for number in numbers]


def test_a_directory_is_kept_with_all_above_it(index: LmdbIndex) -> None:
    """Memory has room for 65,536 unchanged directories: the one above is loaded in the place of the oldest."""
    index.put(directory(10, 1), None)
    for number in range(11, 11 + (1 << 16)):
        index.put(directory(number, 10), None)
    trio.run(index.commit)
    assert in_memory(index, 10, 11) == [False, True]
    index.keep_above(InodeNumber(11))
    assert in_memory(index, 10, 11) == [True, True]


def test_a_directory_stays_in_memory_while_those_above_it_are_loaded(index: LmdbIndex) -> None:
    """With room for two: without the directory itself a native put would be told ENOENT."""
    for number in range(10, 16):
        index.put(directory(number, number - 1 if number > 10 else 1), None)
    trio.run(index.commit)
    for room in (1, 2, 3):
        index._names.forget()
        index._names.limit(room, room)
        index.keep(15)
        index.keep_above(InodeNumber(15))
        assert in_memory(index, *range(10, 16)) == [False] * (6 - room) + [True] * room


def test_what_is_loaded_together_is_in_memory_together(index: LmdbIndex) -> None:
    """There is room for 32,768 unchanged files. Half of those that are asked for are the oldest of them."""
    for number in range(10, 10 + (1 << 15) + 50):
        index.put(block(number, b"%d" % number), None)
    trio.run(index.commit)
    assert in_memory(index, 59, 60) == [False, True]
    index.bring(list(range(10, 110)))
    assert all(in_memory(index, *range(10, 110)))


def test_a_change_is_visible_at_once_and_durable_after_a_commit(index: LmdbIndex) -> None:
    index.put(block(10, b"a"), None)
    assert index.lookup(InodeNumber(1), b"a") == 10
    assert index.segment_inodes(SegmentIndex(3)) == [10]
    index.commit_now()
    assert reopened(index).get(InodeNumber(10)) == block(10, b"a")
    assert index.segment_inodes(SegmentIndex(3)) == [10]


def test_what_was_not_committed_is_gone_after_a_crash(index: LmdbIndex) -> None:
    index.put(block(10, b"a"), None)
    assert reopened(index).get(InodeNumber(10)) is None


def test_an_unsealed_file_is_never_durable(index: LmdbIndex) -> None:
    unsealed = Inode(inode=InodeNumber(9), parent=InodeNumber(1), name=b"t", kind=Kind.FILE, mode=0o100644)
    index.put(unsealed, None)
    assert index.lookup(InodeNumber(1), b"t") == 9 and index.list(InodeNumber(1), b"", 10) == [(b"t", 9)]
    index.commit_now()
    assert reopened(index).lookup(InodeNumber(1), b"t") is None


def test_a_file_that_is_sealed_becomes_durable(index: LmdbIndex) -> None:
    unsealed = Inode(inode=InodeNumber(9), parent=InodeNumber(1), name=b"t", kind=Kind.FILE, mode=0o100644)
    index.put(unsealed, None)
    index.put(block(9, b"t"), unsealed)
    index.commit_now()
    assert reopened(index).lookup(InodeNumber(1), b"t") == 9


def test_a_nameless_inode_stays_until_the_end_and_not_longer(index: LmdbIndex) -> None:
    named = block(9, b"t")
    index.put(named, None)
    index.commit_now()
    nameless = named.copy()
    nameless.flags |= InodeFlags.NAMELESS
    index.put(nameless, named)
    assert index.lookup(InodeNumber(1), b"t") is None and index.get(InodeNumber(9)) is not None
    assert index.segment_inodes(SegmentIndex(3)) == [9]
    index.commit_now()
    assert reopened(index).get(InodeNumber(9)) is None and index.segment_inodes(SegmentIndex(3)) == []


def test_rename_over_a_name_leaves_one_inode(index: LmdbIndex) -> None:
    old, new = block(1001, b"a"), block(1002, b"a.tmp")
    index.put(old, None)
    index.put(new, None)
    index.commit_now()
    renamed = block(1002, b"a")
    index.delete(old)
    index.put(renamed, new)
    for _ in range(2):
        assert index.list(InodeNumber(1), b"", 10) == [(b"a", 1002)]
        index.commit_now()
        reopened(index)
    assert index.get(InodeNumber(1001)) is None


def test_an_inode_is_listed_under_every_segment_it_touches(index: LmdbIndex) -> None:
    spanning = block(7, b"big", extents=(Extent(1, SegmentIndex(3), 5, 2, 0), Extent(1, SegmentIndex(8), 1, 2, 2)))
    index.put(spanning, None)
    assert index.segment_inodes(SegmentIndex(8)) == [7] == index.segment_inodes(SegmentIndex(3))
    index.commit_now()
    index.put(block(7, b"big", segment=4), spanning)
    assert index.segment_inodes(SegmentIndex(8)) == [] == index.segment_inodes(SegmentIndex(3))
    assert index.segment_inodes(SegmentIndex(4)) == [7]


def test_listing_resumes_and_merges_what_is_pending(index: LmdbIndex) -> None:
    for i in range(0, 100, 2):
        index.put(block(100 + i, b"%03d" % i), None)
    index.commit_now()
    for i in range(1, 100, 2):
        index.put(block(100 + i, b"%03d" % i), None)
    index.delete(block(150, b"050"))
    seen: list[bytes] = []
    while entries := index.list(InodeNumber(1), seen[-1] if seen else b"", 7):
        seen += [name for name, _ in entries]
    assert seen == [b"%03d" % i for i in range(100) if i != 50]


def test_a_failed_commit_is_reported_and_retried(index: LmdbIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        index.put(block(10, b"a"), None)

        def fail(txn: object, batch: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(index, "_write_batch", fail)
            with pytest.raises(KvfsError) as caught:
                await index.commit()
        assert caught.value.errno == errno.ENOSPC
        index.put(block(11, b"b"), None)
        assert index.lookup(InodeNumber(1), b"a") == 10
        await index.commit()

    trio.run(main)
    reopened(index)
    assert index.list(InodeNumber(1), b"", 10) == [(b"a", 10), (b"b", 11)]


def test_a_commit_whose_caller_is_cancelled_is_carried_through_and_no_failure(index: LmdbIndex) -> None:
    async def main() -> None:
        index.put(block(10, b"a"), None)
        with trio.CancelScope() as scope:
            await index.commit(before=scope.cancel)
        with trio.CancelScope() as scope:
            scope.cancel()
            await index.commit()
        assert (index.statistics().commits, index.statistics().commit_failures) == (1, 0)

    trio.run(main)
    reopened(index)
    assert index.list(InodeNumber(1), b"", 10) == [(b"a", 10)]


def test_changes_made_while_a_commit_runs_are_not_lost(index: LmdbIndex) -> None:
    async def main() -> None:
        index.put(block(10, b"a"), None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(index.commit)
            await trio.sleep(0)
            index.put(block(11, b"b"), None)
            index.delete(block(10, b"a"))
            assert index.list(InodeNumber(1), b"", 10) == [(b"b", 11)]
        assert index.list(InodeNumber(1), b"", 10) == [(b"b", 11)]
        await index.commit()

    trio.run(main)
    reopened(index)
    assert index.list(InodeNumber(1), b"", 10) == [(b"b", 11)]


def test_records_are_concatenated(index: LmdbIndex) -> None:
    for i in range(1000):
        index.put(block(100 + i, b"%d" % i), None)
    index.commit_now()
    assert sum(len(chunk) for chunk in index.records(4096)) == sum(
        len(block(100 + i, b"%d" % i).pack()) for i in range(1000)
    )


def test_no_number_of_a_directory_is_too_large_to_list(index: LmdbIndex) -> None:
    """A guest may ask for any."""
    index.put(block(11, b"b"), None)
    index.commit_now()
    assert index.list(InodeNumber(1), b"", 9) == [(b"b", 11)]
    assert index.list(InodeNumber(0), b"", 9) == index.list(InodeNumber(2**64 - 1), b"", 9) == []


def test_an_index_that_is_no_index_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "data.mdb").write_bytes(b"not a database" * 1000)
    with pytest.raises(PoolIndexError, match="index"):
        LmdbIndex(tmp_path / "index")


@pytest.mark.parametrize("seed", [135, 183, 190, 196])
def test_a_commit_that_leaves_pages_at_its_end_unwritten_leaves_an_index_that_opens(tmp_path: Path, seed: int) -> None:
    """Pages that a transaction takes at the end and frees again are not written. Without a hole behind them the file is
    up to 11 pages shorter than its meta page says. A daemon that is killed here would have lost its index."""
    chooser = random.Random(seed)  # these leave most pages of 200
    index, number, live = LmdbIndex(tmp_path / "index"), 100, dict[int, Inode]()

    def opens_after_a_kill() -> None:
        index.commit_now()
        (tmp_path / "killed").mkdir()
        shutil.copy(tmp_path / "index" / "data.mdb", tmp_path / "killed")
        again = LmdbIndex(tmp_path / "killed")
        assert {inode for _, _, inode in again.dentries()} == live.keys()
        again.close()
        shutil.rmtree(tmp_path / "killed")

    for _ in range(6):
        for _ in range(chooser.choice((20, 200, 500, 2000))):
            number += 1
            live[number] = block(number, b".k.%d" % number, segment=number % 7)
            index.put(live[number], None)
        opens_after_a_kill()
        share = chooser.choice((0.3, 0.9, 0.97, 1))
        for gone in [inode for inode in live if chooser.random() < share]:
            index.delete(live.pop(gone))
        opens_after_a_kill()
    index.close()


class Model(RuleBasedStateMachine):
    """Against a dict of names; a crash brings back the last commit."""

    @initialize()
    def begin(self) -> None:
        import tempfile

        self.directory = tempfile.TemporaryDirectory()
        self.index = LmdbIndex(Path(self.directory.name) / "i")
        self.now: dict[bytes, int] = {}
        self.durable: dict[bytes, int] = {}
        self.next = 100

    @rule(name=st.sampled_from([b"a", b"b", b"c", b"dd"]))
    def create(self, name: bytes) -> None:
        self.remove(name)
        self.next += 1
        self.index.put(block(self.next, name, segment=self.next % 3), None)
        self.now[name] = self.next

    @rule(name=st.sampled_from([b"a", b"b", b"c", b"dd"]))
    def remove(self, name: bytes) -> None:
        if name in self.now:
            inode = self.index.get(InodeNumber(self.now.pop(name)))
            assert inode is not None
            self.index.delete(inode)

    @rule(name=st.sampled_from([b"a", b"b"]), new=st.sampled_from([b"c", b"dd"]))
    def rename(self, name: bytes, new: bytes) -> None:
        if name in self.now:
            self.remove(new)
            old = self.index.get(InodeNumber(self.now.pop(name)))
            assert old is not None
            inode = old.copy()
            inode.name = new
            self.index.put(inode, old)
            self.now[new] = inode.inode

    @rule()
    def commit(self) -> None:
        self.index.commit_now()
        self.durable = dict(self.now)

    @rule()
    def crash(self) -> None:
        reopened(self.index)
        self.now = dict(self.durable)

    @invariant()
    def same(self) -> None:
        if hasattr(self, "index"):
            assert self.index.list(InodeNumber(1), b"", 100) == sorted(self.now.items())
            for segment in range(3):
                assert self.index.segment_inodes(SegmentIndex(segment)) == sorted(
                    number for number in self.now.values() if number % 3 == segment
                )

    def teardown(self) -> None:
        if hasattr(self, "index"):
            self.index.close()
            self.directory.cleanup()


TestModel = Model.TestCase
TestModel.pytestmark = [pytest.mark.files]
TestModel.settings = settings(max_examples=often(10, 30), stateful_step_count=40)
