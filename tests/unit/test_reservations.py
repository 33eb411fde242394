"""Reservations: what clients write themselves enters whole or not at all, survives crashes, and holds up nobody."""

from __future__ import annotations

import array
import shutil
import struct
from collections.abc import Sequence
from errno import ECANCELED, EFBIG, EIO, EISDIR, ENOENT, ENOSPC, ETIMEDOUT
from pathlib import Path
from typing import NamedTuple

import pytest
import trio
from client_double import Place, places_in, run_bytes, wanted
from helpers import slowness
from store_pools import LAZY, OPTIONS, crashed_store, make_pool, names, rename, settle, verify_all, with_store, write

from kvfs.errors import ShareError
from kvfs.frames import SHARDS, Frames, HolderPages, Next, Reserve, RunFields, Shards
from kvfs.lent import Part
from kvfs.names import Names, Note
from kvfs.namespace.files import Changes, Namespace
from kvfs.plane import Run
from kvfs.pool.format import Stream
from kvfs.record import Inode, InodeFlags
from kvfs.store import reservations
from kvfs.store import segments as segments_module
from kvfs.store.fsck import fsck
from kvfs.store.reservations import Holder
from kvfs.store.segment import State
from kvfs.store.shares import PINNED, ROOT
from kvfs.store.store import Store
from kvfs.types import PAGE_SIZE, ROOT_INODE, InodeNumber

SIZE = 3 * PAGE_SIZE + 17
MALLORY = 4711


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return make_pool(tmp_path / "pool")


class Reservation(NamedTuple):
    """A place that was found, as RESERVE's answer has it."""

    number: int
    inode: Inode
    runs: list[Run]
    pages: int
    ancestors: bytes

    @classmethod
    def of(cls, place: Place) -> Reservation | int:
        """Or the error."""
        if place.error:
            return place.error
        inode, runs = Inode.unpack(place.record), place.runs
        assert (inode.segment, inode.page, inode.generation) == (runs[0].segment, runs[0].page, runs[0].generation)
        assert inode.header_pages == place.header_pages
        return cls(place.reservation, inode, runs, inode.header_pages + inode.data_pages, place.ancestors)


async def reserve(
    store: Store, holder: Holder, items: Sequence[bytes], size: int = SIZE, parent: int = ROOT_INODE,
    timeout_s: float = float("inf"),
) -> list[Reservation | int]:  # fmt: skip
    """Every directory of keys is `parent`, so that names may be any."""
    shards = Shards()
    for number in range(SHARDS):
        shards[number].directory, shards[number].gid = parent, 8
    frame = Part(wanted([(name, size) for name in items]))
    answer = await store.reservations.reserve(holder, frame, len(items), shards, 7, timeout_s)
    return [Reservation.of(place) for place in places_in(answer, len(items))]


class Writer:
    """A double of one client, beside the daemon's store."""

    def __init__(self, store: Store, user: int = ROOT) -> None:
        self.store, self.namespace = store, Namespace(store)
        self.hung_up = trio.Event()
        self.holder: Holder = store.reservations.join(user, self.hung_up.set)

    async def reserve(
        self, items: Sequence[bytes], size: int = SIZE, parent: int = ROOT_INODE
    ) -> list[Reservation | int]:
        return await reserve(self.store, self.holder, items, size, parent)

    async def place(self, name: bytes, size: int = SIZE, parent: int = ROOT_INODE) -> Reservation:
        (found,) = await self.reserve([name], size, parent)
        assert isinstance(found, Reservation)
        return found

    async def write(self, place: Reservation, letter: bytes = b"x") -> None:
        store = self.store
        content = letter * place.inode.size
        parts = run_bytes(
            place.inode.pack(), place.runs, place.inode.header_pages, place.ancestors, content, store.config.secret,
            store.epoch,
        )  # fmt: skip
        for run, part in zip(place.runs, parts, strict=True):
            await store.plane.store_write(run.segment, run.page, part)

    async def commit(self, *places: Reservation, error: int = 0) -> list[int]:
        return await self.commit_items([(place.number, error) for place in places])

    async def commit_items(self, items: Sequence[tuple[int, int]]) -> list[int]:
        frame = Part(b"".join(struct.pack("<Qq", *item) for item in items))
        answers, _ = await self.store.reservations.commit(self.holder, frame, len(items), self.namespace.make_way)
        return array.array("q", answers).tolist()

    async def put(self, name: bytes, letter: bytes = b"x", size: int = SIZE, parent: int = ROOT_INODE) -> Reservation:
        place = await self.place(name, size, parent)
        await self.write(place, letter)
        assert await self.commit(place) == [0]
        return place

    def leave(self) -> None:
        self.store.reservations.take_back_all(self.holder)


async def letter_of(store: Store, name: bytes) -> bytes:
    """The first byte of a block, which must verify as a whole."""
    number = store.index.lookup(ROOT_INODE, name)
    assert number is not None, name
    record = store.index.raw(number)
    assert record is not None
    await store.plane.store_verify(record, True)
    inode = Inode.unpack(record)
    extent = inode.all_extents()[0]
    return (await store.plane.store_read(extent.segment, extent.page, PAGE_SIZE))[:1]


def found(pool: Path) -> dict[bytes, bytes]:
    """Names and first bytes after the next mount."""
    result: dict[bytes, bytes] = {}

    async def work(store: Store) -> None:
        for name in names(store):
            result[name] = await letter_of(store, name)

    with_store(pool, work)
    return result


def damage(pool: Path) -> list[str]:
    return [str(finding) for finding in fsck(pool, verify_data=True).findings]


async def until(condition: object, what: str) -> None:
    with trio.fail_after(50 * slowness()):
        while not condition():  # type: ignore[operator]
            await trio.sleep(0.01)
    assert what


def open_reservations(store: Store) -> int:
    return store.reservations.statistics().open


# ---- entering ----


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("without_index", [False, True])
def test_a_committed_block_is_there_and_stays(pool: Path, crash: bool, without_index: bool) -> None:
    async def work(store: Store) -> None:
        writer = Writer(store)
        place = await writer.put(b"block", b"a")
        assert await letter_of(store, b"block") == b"a"
        inode = store.index.get(place.inode.inode)
        assert inode is not None and (inode.mode, inode.uid, inode.gid, inode.nlink) == (0o100644, 7, 8, 1)
        assert names(store) == {b"block"}
        statistics = store.reservations.statistics()
        assert (statistics.open, statistics.reserved_bytes, statistics.committed) == (0, 0, 1)
        assert store.space().used == place.pages * PAGE_SIZE

    (crashed_store if crash else with_store)(pool, work, LAZY if crash else OPTIONS)
    if without_index:
        shutil.rmtree(pool / "index")
    assert found(pool) == {b"block": b"a"}


def test_a_block_of_several_segments_and_an_empty_one(pool: Path) -> None:
    async def work(store: Store) -> None:
        writer = Writer(store)
        place = await writer.put(b"large", b"l", 3 << 20)
        assert len(place.runs) > 1 and len(place.inode.extents) == len(place.runs)
        await writer.put(b"empty", b"", 0)
        await verify_all(store)

    crashed_store(pool, work, LAZY)

    async def again(store: Store) -> None:
        assert names(store) == {b"large", b"empty"}
        await verify_all(store)

    with_store(pool, again)
    assert damage(pool) == []


def test_a_batch_enters_as_a_whole(pool: Path) -> None:
    async def work(store: Store) -> None:
        writer = Writer(store)
        places = [p for p in await writer.reserve([b"%d" % i for i in range(300)]) if isinstance(p, Reservation)]
        assert len(places) == 300 and names(store) == set()
        for place in places:
            await writer.write(place)
        assert await writer.commit(*places) == [0] * 300
        assert len(names(store)) == 300
        await verify_all(store)
        assert await writer.commit(places[0]) == [-ETIMEDOUT]  # a second time

    with_store(pool, work)
    assert damage(pool) == []


def test_a_block_replaces_what_has_its_name(pool: Path) -> None:
    async def work(store: Store) -> None:
        writer = Writer(store)
        old = await writer.put(b"name", b"a")
        new = await writer.put(b"name", b"b")
        assert await letter_of(store, b"name") == b"b"
        lingering = store.index.get(old.inode.inode)
        assert lingering is None or InodeFlags.NAMELESS in lingering.flags
        store.blocks._lingering.clear()
        if lingering is not None:
            writer.namespace.idle(old.inode.inode)
        assert store.space().used == new.pages * PAGE_SIZE

    with_store(pool, work)
    assert found(pool) == {b"name": b"b"}
    assert damage(pool) == []


def test_a_directory_is_not_replaced_and_one_that_went_is_an_error(pool: Path) -> None:
    async def work(store: Store) -> None:
        writer = Writer(store)
        directory = writer.namespace.mkdir(ROOT_INODE, b"d", 0o755, 0, 0)
        orphan = await writer.place(b"block", parent=directory.inode)
        taken = await writer.place(b"e")
        await writer.write(orphan)
        await writer.write(taken)
        writer.namespace.rmdir(ROOT_INODE, b"d")
        writer.namespace.mkdir(ROOT_INODE, b"e", 0o755, 0, 0)
        assert await writer.commit(orphan, taken) == [-ENOENT, -EISDIR]
        await until(lambda: not store.reservations.pages, "taken back")
        assert names(store) == {b"e"}

    with_store(pool, work)
    assert damage(pool) == []


# ---- two writers ----


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("first_commits_first", [False, True])
def test_of_two_writers_the_later_reservation_stays(pool: Path, first_commits_first: bool, crash: bool) -> None:
    async def work(store: Store) -> None:
        one, two = Writer(store), Writer(store)
        a, b = await one.place(b"name"), await two.place(b"name")
        await one.write(a, b"a")
        await two.write(b, b"b")
        for writer, place in ((one, a), (two, b)) if first_commits_first else ((two, b), (one, a)):
            assert await writer.commit(place) == [0]
        assert await letter_of(store, b"name") == b"b"
        assert store.reservations.statistics().superseded == (not first_commits_first)

    (crashed_store if crash else with_store)(pool, work, LAZY if crash else OPTIONS)
    assert found(pool) == {b"name": b"b"}
    assert damage(pool) == []


def test_attributes_that_changed_meanwhile_do_not_bring_the_old_content_back(pool: Path) -> None:
    async def work(store: Store) -> None:
        writer = Writer(store)
        old = await writer.put(b"name", b"a")
        new = await writer.place(b"name")
        await writer.write(new, b"b")
        await writer.namespace.setattr(old.inode.inode, Changes(mode=0o600))
        await store.blocks.commit()
        assert await writer.commit(new) == [0]
        assert await letter_of(store, b"name") == b"b"

    crashed_store(pool, work, LAZY)
    assert found(pool) == {b"name": b"b"}
    assert damage(pool) == []


def test_a_directory_renamed_meanwhile_has_the_block_under_its_new_name(pool: Path) -> None:
    async def work(store: Store) -> None:
        writer = Writer(store)
        directory = writer.namespace.mkdir(ROOT_INODE, b"before", 0o755, 0, 0)
        place = await writer.place(b"block", parent=directory.inode)
        await writer.write(place)
        writer.namespace.rename(ROOT_INODE, b"before", ROOT_INODE, b"after")
        await trio.sleep(0.1)  # the blocks that are there have been looked through
        assert await writer.commit(place) == [0]
        await settle(store)

    crashed_store(pool, work)
    shutil.rmtree(pool / "index")

    async def again(store: Store) -> None:
        assert names(store) == {b"after"}
        directory = store.index.lookup(ROOT_INODE, b"after")
        assert directory is not None and names(store, directory) == {b"block"}

    with_store(pool, again)


def test_what_a_crash_undoes_leaves_the_version_before_it_and_no_older_one(pool: Path) -> None:
    """Three versions in three segments; the third takes the name by a rename. The crash comes between the summaries:
    that of the second's segment says already that it was replaced, those of the others are as they were."""

    async def work(store: Store) -> None:
        writer = Writer(store)
        await store.sync()
        first = await writer.put(b"name", b"a")
        store.segments.retire_open()
        await store.segments.flush_summaries()
        second = await writer.put(b"name", b"b")
        store.segments.retire_open()
        third = await writer.put(b"temporary", b"c")
        assert len({place.inode.segment for place in (first, second, third)}) == 3
        rename(store, third.inode.inode, b"name")
        await store.segments._write_summary(store.segments.all[second.inode.segment])

    crashed_store(pool, work, LAZY)
    assert found(pool) == {b"name": b"b", b"temporary": b"c"}
    assert damage(pool) == []


def test_the_segment_of_a_successor_waits_for_the_index(pool: Path) -> None:
    """It was committed before the older version was superseded. The index knows the older one as being written, so a
    crash would bring it back if the successor's segment had been written over."""

    async def work(store: Store) -> None:
        one, two = Writer(store), Writer(store)
        old = await one.place(b"name")
        await one.write(old, b"a")
        store.segments.retire_open()
        new = await two.put(b"name", b"b")
        await store.sync()
        segment = store.segments.all[new.inode.segment]
        assert segment.batch <= store.index.durable_batch
        assert await one.commit(old) == [0]
        assert store.reservations.statistics().superseded == 1
        batch = segment.batch
        assert batch > store.index.durable_batch
        store.segments.retire_open()
        await store.evictor.free_until(lambda: segment.state == State.FREE)
        # Nothing else makes the index durable here: the store commits because the segment waits for it.
        await until(lambda: not store.segments.waits_for_commit, "the freed segment may be opened")
        assert store.index.durable_batch >= batch

    with_store(pool, work, LAZY)


# ---- taking back ----


@pytest.mark.parametrize("without_index", [False, True])
def test_what_lies_behind_a_dead_clients_reservation_survives_a_crash(pool: Path, without_index: bool) -> None:
    async def work(store: Store) -> None:
        dead, alive = Writer(store), Writer(store)
        await dead.reserve([b"dead%d" % i for i in range(5)])
        place = await alive.place(b"alive")
        await alive.write(place, b"v")
        dead.leave()
        await until(lambda: store.reservations.pages == place.pages, "taken back")
        assert await alive.commit(place) == [0]
        assert names(store) == {b"alive"}
        statistics = store.reservations.statistics()
        assert (statistics.open, statistics.reclaimed) == (0, 5)

    crashed_store(pool, work, LAZY)
    if without_index:
        shutil.rmtree(pool / "index")
    assert found(pool) == {b"alive": b"v"}


def test_a_commit_does_not_wait_for_a_client_that_stopped(pool: Path) -> None:
    async def work(store: Store) -> None:
        stopped, alive = Writer(store), Writer(store)
        await stopped.place(b"stopped")
        started = trio.current_time()
        place = await alive.put(b"alive", b"v")
        own = await alive.place(b"own")
        await alive.put(b"behind its own", b"w")
        assert trio.current_time() - started < 25 * slowness()
        assert own.runs[0].segment == place.runs[0].segment

    crashed_store(pool, work, LAZY)
    assert found(pool) == {b"alive": b"v", b"behind its own": b"w"}


def test_an_expired_reservation_is_taken_back(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservations, "RESERVATION_MS", 200)

    async def work(store: Store) -> None:
        writer = Writer(store)
        place = await writer.place(b"late")
        segment = store.segments.all[place.runs[0].segment]
        await until(lambda: not store.reservations.pages, "taken back")
        assert open_reservations(store) == 0
        # Its client lives and may write there at any time: not before its end is the segment anybody's.
        assert segment.lent == 1 and not segment.late
        await writer.write(place)
        # Or before it says that it has written.
        assert await writer.commit(place) == [-ETIMEDOUT]
        assert segment.lent == 0 and segment.late
        assert names(store) == set()

    with_store(pool, work)
    assert found(pool) == {}


def test_what_has_expired_is_taken_back_in_steps(
    pool: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(store: Store) -> None:
        expire, steps = Frames.expire, [1024, 1024, 5]

        def some(frames: Frames, now: int) -> tuple[int, int | None]:
            return (steps.pop(0), now) if steps else expire(frames, now)

        monkeypatch.setattr(Frames, "expire", some)
        writer = Writer(store)
        await writer.place(b"one")
        await until(lambda: not steps, "all steps")
        assert "2053 reservations" in caplog.text and caplog.text.count("taken back") == 1

    with_store(pool, work)


def test_accounts_are_taken_in_one_round(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of clients goes on meanwhile: who has been looked at may have changed again."""
    asked: list[int] = []

    async def work(store: Store) -> None:
        writers = [Writer(store) for _ in range(3)]

        def changed(_: object, count: int) -> list[HolderPages]:
            asked.append(count)
            return [writer.holder.told for writer in writers][: count if len(asked) < 1000 else 0]

        monkeypatch.setattr(Frames, "changed", changed)
        store.reservations.look()
        assert asked == [3]

    with_store(pool, work)


def test_what_is_left_is_buried_in_rounds(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may leave tens of thousands of reservations: others' work is done between two rounds."""
    under_way, most = 0, 0
    returned, buried = Frames.returned, Frames.buried

    def take(frames: Frames) -> tuple[int, list[RunFields]] | None:
        nonlocal under_way, most
        found = returned(frames)
        under_way += found is not None
        most = max(most, under_way)
        return found

    def bury(frames: Frames, number: int) -> None:
        nonlocal under_way
        under_way -= 1
        buried(frames, number)

    async def work(store: Store) -> None:
        monkeypatch.setattr(Frames, "returned", take)
        monkeypatch.setattr(Frames, "buried", bury)
        writer = Writer(store)
        found = await writer.reserve([b"%04x" % i for i in range(1500)], 1)
        assert sum(isinstance(one, Reservation) for one in found) == 1500
        writer.leave()
        await until(lambda: not store.reservations.pages, "buried")
        assert 0 < most <= 1024

    with_store(pool, work)


def test_the_data_plane_is_told_which_head_is_held(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While Python looks for a segment for a head, clients' blocks go to others."""
    told: list[tuple[bool, bool]] = []
    head = Names.head

    def tell(names: Names, number: int, segment: int | None, generation: int = 0, *, held: bool = False) -> None:
        told.append((segment is not None, held))
        head(names, number, segment, generation, held=held)

    async def work(store: Store) -> None:
        monkeypatch.setattr(Names, "head", tell)
        await Writer(store).place(b"first")
        assert told == [(False, True), (True, False)]

    with_store(pool, work)


def test_shares_are_exact_between_two_accounts(pool: Path) -> None:
    """The data plane reserves by itself for a user that asks Python for pins: neither gives what the other gave."""

    def go(store: Store, writer: Writer, pages: int) -> Next | None:
        shards = Shards()
        for number in range(SHARDS):
            shards[number].directory = ROOT_INODE
        items = Part(wanted([(b"name", pages * PAGE_SIZE)]))
        with store.plane.frames.reserve(writer.holder.told, items, 1, shards, MALLORY, 0) as frame:
            return frame.go()

    async def work(store: Store) -> None:
        shares, writer = store.shares, Writer(store, MALLORY)
        await writer.place(b"opens a segment")
        before = shares.held(MALLORY)
        assert go(store, writer, 100) == Next.DONE
        assert shares.held(MALLORY) - before >= 100 * PAGE_SIZE
        with pytest.raises(ShareError):
            shares.check(MALLORY, shares.size - before, "all")
        shares.add(PINNED, MALLORY, shares.room(MALLORY) - 50 * PAGE_SIZE)
        assert go(store, writer, 60) is None
        shares.add(PINNED, MALLORY, -shares.held_as(PINNED, MALLORY))
        assert go(store, writer, 60) == Next.DONE

    with_store(pool, work)


def test_a_client_that_keeps_what_expired_is_hung_up_on(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservations, "RESERVATION_MS", 100)
    monkeypatch.setattr(reservations, "LATE_HELD_S", 1.5 * slowness())
    monkeypatch.setattr(reservations, "LATE_WRITES_S", 0.3)

    async def work(store: Store) -> None:
        held = lambda: store.shares.held(MALLORY)  # noqa: E731
        keeps, says, idle = (Writer(store, MALLORY) for _ in range(3))
        place = await says.place(b"says that no write can land")
        await until(lambda: not store.reservations.pages, "taken back")
        assert await says.commit(place) == [-ETIMEDOUT]
        lost = await keeps.place(b"keeps")
        segment = store.segments.all[lost.runs[0].segment]
        with trio.fail_after(50 * slowness()):
            await keeps.hung_up.wait()
        # The client may write there, so its user is charged still.
        assert segment.lent and held() >= lost.pages * PAGE_SIZE
        keeps.leave()
        assert not segment.lent and segment.late
        await until(lambda: not held(), "the end of the rest")
        assert not says.hung_up.is_set() and not idle.hung_up.is_set()
        assert store.reservations.statistics().reserved_bytes == store.blocks.space.reserved_pages == 0

    with_store(pool, work)


def rest_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rest ends within a test, however slow the machine is."""
    monkeypatch.setattr(reservations, "LATE_WRITES_S", 3600.0)
    monkeypatch.setattr(reservations, "LATE_HELD_S", 3600.0)


@pytest.mark.parametrize("how", ["expire", "are late", "fail", "end with their client"])
def test_places_that_nobody_can_commit_count_while_writes_may_land_there(
    pool: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """However reservations end, a user that makes them again and again has a quarter of the pool, and half of that
    while some rest."""
    monkeypatch.setattr(reservations, "RESERVATION_MS", 50 if how == "expire" else 600_000)
    rest_for_long(monkeypatch)

    async def work(store: Store) -> None:
        share = len(store.segments.all) * store.segments.area // 4
        mallory, got = Writer(store, MALLORY), 0
        for attempt in range(8):
            # Only from the second on it waits for room.
            patience = 0.05 if attempt else float("inf")
            answers = await reserve(store, mallory.holder, [b"%d" % i for i in range(100)], 1 << 20, timeout_s=patience)
            places = [answer for answer in answers if isinstance(answer, Reservation)]
            got += sum(place.pages for place in places)
            if how == "end with their client":
                mallory.leave()
                mallory = Writer(store, MALLORY)
            elif how != "expire" and places:
                error = -ETIMEDOUT if how == "are late" else -EIO
                assert await mallory.commit(*places, error=error) == [error] * len(places)
            await until(lambda: not store.reservations.pages, "taken back")
        assert share * 3 // 4 < got <= share, (got, share)
        assert store.shares.held(MALLORY) == got * PAGE_SIZE == store.blocks.space.reserved_pages * PAGE_SIZE
        # Half of the quarter is others', at once.
        other = Writer(store, MALLORY + 1)
        assert isinstance(await other.place(b"other", share // 3 * PAGE_SIZE), Reservation)

    with_store(pool, work)


def test_users_that_reserve_and_leave_one_after_another_do_not_take_the_pool(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first may have the share, and the next the half that is left to it: then more than the share rests."""
    rest_for_long(monkeypatch)

    async def work(store: Store) -> None:
        share, got = len(store.segments.all) * store.segments.area // 4, 0
        for user in range(MALLORY, MALLORY + 6):
            writer, patience = Writer(store, user), float("inf") if user == MALLORY else 0.2 * slowness()
            answers = await reserve(store, writer.holder, [b"%d" % i for i in range(100)], 1 << 20, timeout_s=patience)
            got += sum(place.pages for place in answers if isinstance(place, Reservation))
            writer.leave()
            await until(lambda: not store.reservations.pages, "taken back")
        assert share < got <= share * 3 // 2, (got, share)

    with_store(pool, work)


def test_beside_others_a_user_has_half_of_what_may_be_reserved(pool: Path) -> None:
    async def work(store: Store) -> None:
        share = len(store.segments.all) * store.segments.area // 4
        names = [b"%d" % i for i in range(100)]
        one = Writer(store)
        alone = [place for place in await one.reserve(names, 1 << 20) if isinstance(place, Reservation)]
        assert await one.commit(*alone, error=-ECANCELED) == [-ECANCELED] * len(alone)
        await until(lambda: not store.reservations.pages, "taken back")
        other = Writer(store, MALLORY)
        answers = await one.reserve(names, 1 << 20)
        beside = [place for place in answers if isinstance(place, Reservation)]
        assert answers[len(beside) :] == [-ENOSPC] * (100 - len(beside))
        pages = [sum(place.pages for place in places) for places in (alone, beside)]
        assert share * 3 // 4 < pages[0] <= share and share * 3 // 8 < pages[1] <= share // 2, (pages, share)
        # Nobody waits for it.
        assert isinstance(await other.place(b"other", share // 3 * PAGE_SIZE), Reservation)

    with_store(pool, work)


def test_a_write_that_failed_is_taken_back(pool: Path) -> None:
    async def work(store: Store) -> None:
        writer = Writer(store)
        good, bad = await writer.place(b"good"), await writer.place(b"bad")
        await writer.write(good)
        answers = await writer.commit_items([(bad.number, -5), (good.number, 0)])
        assert answers == [-5, 0]
        await until(lambda: not store.reservations.pages, "taken back")
        assert names(store) == {b"good"}

    with_store(pool, work)
    assert damage(pool) == []


@pytest.mark.slow
def test_writes_that_time_out_do_not_use_up_the_pool_while_their_client_lives(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments_module, "LATE_WRITES_S", 0.2)

    async def work(store: Store) -> None:
        writer = Writer(store)
        segments = store.segments.all
        for error in (-ETIMEDOUT, -ECANCELED):
            # Each time-out takes a segment out of use; those that were never begun do not.
            late = []
            for i in range(3 * len(segments)):
                (place,) = await writer.reserve([b"%d" % i])
                assert isinstance(place, Reservation), f"block {i} of {3 * len(segments)}: {place}"
                assert await writer.commit(place, error=error) == [error]
                await until(lambda: not store.reservations.pages, "taken back")
                if error == -ETIMEDOUT:
                    late.append(place)
                    assert segments[place.runs[0].segment].lent
                # The client's message when a device has answered after all.
                if len(late) == 3:
                    assert await writer.commit(*late, error=-EIO) == [-ETIMEDOUT] * 3
                    assert not any(segments[place.runs[0].segment].lent for place in late)
                    late.clear()
            assert not any(segment.lent for segment in segments)
        await writer.put(b"last")
        assert await letter_of(store, b"last") == b"x"

    with_store(pool, work)
    assert damage(pool) == []


def test_a_segment_rests_before_it_is_opened_again(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_module, "LATE_WRITES_S", 100.0)
    monkeypatch.setattr(segments_module, "_LENT_REST_S", 200.0)
    segments: list[int] = []

    async def work(store: Store) -> None:
        writer = Writer(store)
        place = await writer.place(b"dead")
        segments.append(place.runs[0].segment)
        writer.leave()
        await until(lambda: not store.reservations.pages, "taken back")
        await settle(store)
        segment = store.segments.all[segments[0]]
        assert store.segments._late[segment.index] > trio.current_time() + 50
        taken = []
        while (picked := store.segments._pick(0)) is not None:
            taken.append(picked.index)
        assert taken and segment.index not in taken
        store.segments._free.extend(taken)

    with_store(pool, work)

    async def again(store: Store) -> None:
        # The next daemon knows that a client of the one before may not have noticed.
        assert store.segments._late.keys() == {segments[0]}
        assert store.segments._late[store.segments.all[segments[0]].index] > trio.current_time() + 150

    with_store(pool, again)

    async def and_again(store: Store) -> None:
        assert not store.segments._late

    with_store(pool, and_again)


def test_a_segment_that_is_to_rest_is_not_opened_before_python_knows(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(store: Store) -> None:
        segments, number = store.segments, store.segments._free[0]
        noted = iter([[(int(number), int(Note.RESTS))]])
        with monkeypatch.context() as patch:
            patch.setattr(segments.names, "noted", lambda: next(noted, []))
            picked = segments._pick(0)
        assert picked is not None and picked.index != number
        segments._free.append(picked.index)

    with_store(pool, work)


def test_a_clean_end_takes_everything_back(pool: Path) -> None:
    async def work(store: Store) -> None:
        writer = Writer(store)
        await writer.put(b"kept", b"k")
        await writer.reserve([b"%d" % i for i in range(50)])
        assert open_reservations(store) == 50

    with_store(pool, work)
    assert found(pool) == {b"kept": b"k"}
    assert damage(pool) == []


def test_a_removed_block_stays_removed_while_an_older_reservation_is_open(pool: Path) -> None:
    async def work(store: Store) -> None:
        stopped, alive = Writer(store), Writer(store)
        await stopped.write(await stopped.place(b"stopped"))
        await alive.put(b"removed", b"r")
        await store.blocks.commit()
        alive.namespace.unlink(ROOT_INODE, b"removed")
        await store.blocks.commit()
        dead = await alive.place(b"dead")
        await alive.write(dead)

    crashed_store(pool, work, LAZY)
    assert b"removed" not in found(pool)


def test_a_block_reserved_before_the_last_commit_of_the_index_is_found(pool: Path) -> None:
    async def work(store: Store) -> None:
        writer = Writer(store)
        place = await writer.place(b"block")
        store.blocks.next_version()
        await store.blocks.commit()
        await writer.write(place, b"b")
        assert await writer.commit(place) == [0]

    crashed_store(pool, work, LAZY)
    assert found(pool) == {b"block": b"b"}


def test_what_was_written_and_not_committed_may_be_found_and_is_whole(pool: Path) -> None:
    async def work(store: Store) -> None:
        writer = Writer(store)
        old = await writer.put(b"name", b"a")
        whole, torn = await writer.place(b"name"), await writer.place(b"torn")
        assert whole.inode.version > old.inode.version
        await writer.write(whole, b"b")
        await writer.write(torn, b"t")
        run = torn.runs[0]
        await store.plane.store_write(run.segment, run.page + run.page_count - 1, bytes(PAGE_SIZE))

    crashed_store(pool, work, LAZY)
    after = found(pool)
    assert after.keys() == {b"name"} and after[b"name"] in (b"a", b"b")
    assert damage(pool) == []


# ---- space ----


def test_who_waits_for_room_waits_no_longer_than_he_said(pool: Path) -> None:
    async def work(store: Store) -> None:
        writer, other = Writer(store), Writer(store)
        await writer.reserve([b"%d" % i for i in range(100)], 1 << 20)
        started = trio.current_time()
        answers = await reserve(store, other.holder, [b"other"] * 2, 1 << 20, timeout_s=0.25)
        assert answers == [-ENOSPC] * 2
        assert 0.25 <= trio.current_time() - started < 20 * slowness()

    with_store(pool, work)


def test_a_batch_that_does_not_fit_is_refused_in_part_and_at_once(pool: Path) -> None:
    async def work(store: Store) -> None:
        writer = Writer(store)
        started = trio.current_time()
        answers = await writer.reserve([b"%d" % i for i in range(100)], 1 << 20)
        assert trio.current_time() - started < 30 * slowness()
        got = [answer for answer in answers if isinstance(answer, Reservation)]
        share = len(store.segments.all) * store.segments.area // 4
        assert 0 < sum(place.pages for place in got) <= share
        assert answers[len(got) :] == [-ENOSPC] * (100 - len(got))
        assert await writer.reserve([b"huge"], share * PAGE_SIZE) == [-EFBIG]
        for place in got:
            await writer.write(place)
        assert await writer.commit(*got) == [0] * len(got)
        again = await writer.reserve([b"again"], 1 << 20)
        assert isinstance(again[0], Reservation)

    with_store(pool, work)


def test_all_clients_of_a_user_together_reserve_no_more_than_the_users_share(pool: Path) -> None:
    text = (pool / "pool.toml").read_text()
    (pool / "pool.toml").write_text(text.replace("\n[geometry]", "user_share = 0.1\n\n[geometry]", 1))

    async def work(store: Store) -> None:
        first, second, other, root = (Writer(store, user) for user in (MALLORY, MALLORY, MALLORY + 1, ROOT))
        answers = await first.reserve([b"first %d" % i for i in range(4)], 1 << 20)
        answers += await second.reserve([b"second %d" % i for i in range(20)], 1 << 20)
        got = [answer for answer in answers if not isinstance(answer, int)]
        assert len(got) > 4 and answers[len(got) :] == [-ENOSPC] * (24 - len(got))
        held = sum(place.pages for place in got) * PAGE_SIZE
        assert 0 < held <= store.shares.size < held + (1 << 20) + PAGE_SIZE
        assert [(user.user, user.reserved) for user in store.shares.statistics()] == [(MALLORY, held)]
        # Pins and the like leave less for reservations.
        assert await other.reserve([b"other"], 1 << 20) != [-ENOSPC]
        store.shares.add(PINNED, MALLORY + 1, store.shares.size)
        assert await other.reserve([b"another"], 1 << 20) == [-ENOSPC]
        room = store.shares.size // (1 << 20) + 1
        assert -ENOSPC not in await root.reserve([b"root %d" % i for i in range(room)], 1 << 20)
        first.leave()
        second.leave()
        await until(lambda: not store.shares.held(MALLORY), "the end of what had been reserved")

    with_store(pool, work)


def test_a_client_waits_for_what_others_reserved(pool: Path) -> None:
    async def work(store: Store) -> None:
        greedy, modest = Writer(store), Writer(store)
        places = [p for p in await greedy.reserve([b"%d" % i for i in range(100)], 1 << 20) if not isinstance(p, int)]
        answers: list[Reservation | int] = []

        async def ask() -> None:
            answers.extend(await modest.reserve([b"modest"], 1 << 20))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.2)
            assert not answers
            for place in places:
                await greedy.write(place)
            await greedy.commit(*places)
        assert isinstance(answers[0], Reservation)

    with_store(pool, work)


@pytest.mark.parametrize("handed", [True, False])
def test_room_that_came_before_the_wait_ends_it(pool: Path, monkeypatch: pytest.MonkeyPatch, handed: bool) -> None:
    """Another thread has found none, or has made some after Python found none."""

    async def work(store: Store) -> None:
        modest, greedy, shards = Writer(store), Writer(store), Shards()
        for number in range(SHARDS):
            shards[number].directory = ROOT_INODE
        mine, items = await modest.place(b"mine", 1 << 20), Part(wanted([(b"modest", 1 << 20)]))
        assert -ENOSPC in await reserve(store, greedy.holder, [b"%d" % i for i in range(100)], 1 << 20, timeout_s=0.1)

        def make_room() -> None:
            ended = Part(struct.pack("<Qq", mine.number, 0))
            with store.plane.frames.commit(modest.holder.told, ended, 1) as told:
                assert told.go() == Next.DONE

        with store.plane.frames.reserve(modest.holder.told, items, 1, shards, 7, 0) as frame:
            looks, go = [frame.go()], frame.go
            assert looks == [Next.ROOM]

            def look() -> Next | None:
                looks.append(go())
                if len(looks) == 2 and not handed:
                    make_room()
                return looks[-1]

            if handed:
                make_room()
                store.reservations._look(modest.holder)
            monkeypatch.setattr(frame, "go", look)
            found, pause = Next.ROOM if handed else Next.MORE, trio.lowlevel.checkpoint
            with trio.fail_after(20 * slowness()):
                await store.reservations.reserve_on(modest.holder, frame, found, 100.0, pause)
            assert places_in(frame.answer(), 1)[0].error == 0 and looks.count(Next.ROOM) == 2 - handed

    with_store(pool, work)


@pytest.mark.parametrize("ends", ["by a commit", "by expiry"])
def test_who_waits_for_a_reservation_has_it_though_pages_are_more(
    pool: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """A thread of C has reserved more pages than it ends, both since Python looked last; or they are not buried yet."""

    async def work(store: Store) -> None:
        modest, greedy, shards = Writer(store), Writer(store), Shards()
        frames, own, segments = store.plane.frames, store.reservations, store.segments
        for number in range(SHARDS):
            shards[number].directory = ROOT_INODE
        small = await greedy.place(b"small", 4096)
        frames.limit(1 << 20, 2)
        items, ended = Part(wanted([(b"large", 1 << 20)])), Part(struct.pack("<Qq", small.number, 0))
        with frames.reserve(greedy.holder.told, items, 1, shards, 7, 0) as large:
            while (found := large.go()) == Next.PLACE:
                head, pages = segments.head(Stream.CLIENT), (large.told.header_pages, large.told.data_pages)
                runs = await segments.allocate(head, *pages)
                large.place([(run.generation, run.segment, run.page, run.page_count) for run in runs])
            assert found == Next.DONE
            large.finish(1 << 62)
        own._look(modest.holder)  # of what came before nobody is told again
        found_room, buried, go, looks, tombstone = trio.Event(), trio.Event(), Reserve.go, [], segments.tombstone

        async def bury(runs: Sequence[Run]) -> None:
            await buried.wait()
            await tombstone(runs)

        def look(frame: Reserve) -> Next | None:
            looks.append(go(frame))
            return looks[-1]

        async def wait() -> None:
            await modest.place(b"modest", 4096)
            found_room.set()

        async with trio.open_nursery() as nursery:
            monkeypatch.setattr(Reserve, "go", look)
            nursery.start_soon(wait)
            while not looks:
                await trio.lowlevel.checkpoint()
            assert looks == [Next.ROOM]
            if ends == "by a commit":
                with frames.commit(greedy.holder.told, ended, 1) as told:
                    assert told.go() == Next.DONE
                own._look(greedy.holder)
            else:
                monkeypatch.setattr(segments, "tombstone", bury)
                with monkeypatch.context() as patch:
                    patch.setattr(reservations, "_nanoseconds", lambda _: 1 << 62)
                    await own._expire()
            try:
                with trio.fail_after(20 * slowness()):
                    await found_room.wait()
            finally:
                buried.set()

    with_store(pool, work)


def test_puts_go_on_in_a_full_pool(pool: Path) -> None:
    async def work(store: Store) -> None:
        writer = Writer(store)
        for i in range(160):  # 64 MiB of devices
            await writer.put(b"%d" % i, b"p", 1 << 20)
        assert store.evictor.counters.segments > 0
        assert b"159" in names(store)
        await verify_all(store)

    with_store(pool, work)
    assert damage(pool) == []


# ---- what clients tell ----


def test_a_block_is_dropped_only_if_it_is_bad(pool: Path) -> None:
    async def work(store: Store) -> None:
        writer = Writer(store)
        good, bad = await writer.put(b"good"), await writer.put(b"bad")
        run = bad.runs[0]
        await store.plane.store_write(run.segment, run.page + run.page_count - 1, b"?" * PAGE_SIZE)
        for place in (good, bad):
            await store.check_block(place.inode.inode, 1 << 30)
            assert names(store) == {b"good", b"bad"}
        for place in (good, bad):
            await store.check_block(place.inode.inode, place.inode.segment)
        await store.check_block(InodeNumber(12345), 0)
        assert names(store) == {b"good"} and store.statistics().bad_blocks == 1

    with_store(pool, work)


def test_a_touch_is_a_hit(pool: Path) -> None:
    async def work(store: Store) -> None:
        writer = Writer(store)
        place = await writer.put(b"block")
        number = place.inode.inode
        store.plane.uses.tick(5)
        store.plane.uses.touch([number, 99999, number])
        assert store.plane.uses.of([number]) == [(5, 2)]
        store.plane.uses.touch([number] * 300)
        assert store.plane.uses.of([number]) == [(5, 255)]
        store.plane.uses.touch([])

    with_store(pool, work)


def test_a_name_of_a_block_on_a_device_that_is_away_is_given_to_a_new_one(pool: Path) -> None:
    async def work(store: Store) -> None:
        writer = Writer(store)
        old = await write(store, b"key")
        await store.sync()
        dropped: list[Inode] = []

        def leave_table(number: InodeNumber) -> None:
            store.blocks.hide_in_table([number])

        store.index.hide({old.segment}, leave_table, dropped.append)
        place = await writer.place(b"key")
        assert place.inode.segment != old.segment
        # Refused, it leaves the name to who has it.
        assert await writer.commit(place, error=-EIO) == [-EIO]
        assert store.index.hidden(old.inode) is not None and not dropped
        new = await writer.put(b"key", b"n")
        assert [inode.inode for inode in dropped] == [old.inode]
        store.index.hide((), leave_table, dropped.append)
        assert store.index.lookup(ROOT_INODE, b"key") == new.inode.inode and store.index.get(old.inode) is None
        await store.sync()
        assert store.index.lookup(ROOT_INODE, b"key") == new.inode.inode and store.index.get(old.inode) is None

    with_store(pool, work, OPTIONS)
    assert not fsck(pool).damaged
