"""Which blocks of a segment stay when it is emptied: C's choice against a plain one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
import trio
import trio.testing
from helpers import slowness
from store_pools import OPTIONS, index_reads, make, make_pool, names, verify_all, with_store, write

from kvfs._native import ffi, lib

from kvfs.index.lmdb import LmdbIndex
from kvfs.names import Names, NamesError
from kvfs.pool.format import Stream
from kvfs.record import Kind
from kvfs.store.evictor import Evictor
from kvfs.store.sealing import Sealing
from kvfs.store.segment import State
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber
from kvfs.worth import Choice, ChooseBy, Looks


@dataclass
class Block:
    number: int
    pages: int  # in the segment
    pages_all: int
    worth: float
    hits: int
    unit: int = 0
    held: bool = False
    busy: bool = False


class Limits(NamedTuple):
    by: ChooseBy
    price: float
    budget: int


def plain_choice(blocks: list[Block], limits: Limits) -> Choice:
    """As the evictor chose in Python: sort what is worth more than the price, then take what the budget allows."""
    by, price, budget = limits
    there = [block for block in blocks if block.pages]
    held = [block for block in there if block.held or (by is ChooseBy.HITS and block.hits)]
    others = [block for block in there if block not in held]
    mates: dict[int, list[int]] = {}
    for i, block in enumerate(others):
        if block.unit:
            mates.setdefault(block.unit, []).append(i)
    kept: set[int] = set()
    copied = 0
    dear = [i for i, block in enumerate(others) if by is ChooseBy.WORTH and block.worth > price]
    for i in sorted(dear, key=lambda i: -others[i].worth):
        unit = mates.get(others[i].unit, [i])
        size = sum(others[j].pages_all for j in unit)
        if i not in kept and copied + size <= budget:
            copied += size
            kept.update(unit)
    gone = [i for i in range(len(others)) if i not in kept]
    return Choice(
        held=[InodeNumber(block.number) for block in held],
        kept=[InodeNumber(others[i].number) for i in sorted(kept)],
        held_pages=sum(block.pages_all for block in held),
        kept_pages=sum(others[i].pages for i in kept),
        copied_pages=copied,
        lost=sum((others[i].worth for i in gone), 0.0),
        gone=len(gone),
        busy=any(block.busy for block in blocks),
    )


def drawn_blocks(random: Random) -> tuple[list[Block], int]:
    """Many of equal worth. The blocks of a unit are worth the same: as much as the best of them."""
    blocks = []
    for number in range(random.choice((0, 1, 7, 40, 130))):
        pages = random.choice((0, 1, 1, 2, 129))
        worth = random.choice((0.0, 0.25, random.random(), random.random() * 1e-6))
        blocks.append(Block(
            number + 7, pages, pages + random.choice((0, 0, 3)), worth, random.choice((0, 0, 2)),
            held=random.random() < 0.1,
        ))  # fmt: skip
    units = random.choice((0, 0, 3, 20))
    of_unit = {unit: (random.random(), random.choice((0, 1)), random.random() < 0.1) for unit in range(1, units + 1)}
    for block in blocks:
        block.unit = random.choice((0, random.randint(1, units))) if units else 0
        if block.unit:
            block.worth, block.hits, block.held = of_unit[block.unit]
    return blocks, units


def chosen(blocks: list[Block], units: int, limits: Limits) -> Choice:
    looks = Looks(len(blocks))
    for i, block in enumerate(blocks):
        look = looks.all[i]
        look.inode, look.pages, look.pages_all, look.use = block.number, block.pages, block.pages_all, block.hits
        look.worth, look.unit = block.worth, block.unit
        look.held, look.busy = block.held, block.busy
    return looks.choose(limits.by, None, 0, limits.price, limits.budget, units)


def test_the_choice_is_that_of_a_plain_model() -> None:
    random = Random(5)
    kept = partly = 0
    for _ in range(3000):
        blocks, units = drawn_blocks(random)
        price = random.choice((0.0, 0.1, 0.5, float("inf"), -1.0))
        limits = Limits(random.choice(list(ChooseBy)), price, random.choice((0, 5, 200, 1 << 40)))
        found = chosen(blocks, units, limits)
        assert found == plain_choice(blocks, limits), (blocks, limits)
        kept += bool(found.kept)
        partly += bool(found.kept and found.copied_pages < sum(b.pages_all for b in blocks if b.worth > price))
    assert kept > 300 and partly > 100


def test_nothing_is_chosen_where_one_is_busy() -> None:
    blocks = [Block(5, 1, 1, 1.0, 1), Block(6, 0, 0, 1.0, 1, busy=True)]
    found = chosen(blocks, 0, Limits(ChooseBy.WORTH, 0.0, 10))
    assert found.busy and not found.kept and not found.held and not found.gone


def test_a_budget_that_is_overdrawn_allows_nothing() -> None:
    assert chosen([Block(5, 1, 1, 1.0, 1)], 0, Limits(ChooseBy.WORTH, 0.0, -3)).kept == []


# ---- in a pool ----

# Sparse: a block of the second has 18 pages of header, and no data.
_SMALL, _LARGE = 1 << 20, 32 << 20


async def closed_segments(store: Store, least: int) -> None:
    """Fill segments with blocks, and close them."""
    while sum(segment.state == State.CLOSED for segment in store.segments.own) < least:
        await write(store, b"%06d" % store.segments.pages_written, _LARGE)
    await store.sync()


@pytest.mark.parametrize("pins", [False, True])
def test_blocks_go_whose_records_have_left_memory_after_the_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pins: bool
) -> None:
    """And no step is under way while they are brought, and with pins the directories above them."""

    async def work(store: Store) -> None:
        above = make(store, make(store, ROOT_INODE, b"a", Kind.DIRECTORY).inode, b"b", Kind.DIRECTORY)
        blocks = [await write(store, b"%d" % i, _SMALL, parent=above.inode) for i in range(5)]
        if pins:
            await store.blocks.pin(make(store, ROOT_INODE, b"other", Kind.DIRECTORY).inode)
        store.segments.retire_open()
        await store.sync()
        segment, free = store.segments.all[blocks[0].segment], store.segments.freed
        assert segment.state == State.CLOSED
        look, looks = store.blocks.look, 0

        def forgetful(*arguments: object) -> None:
            nonlocal looks
            looks += 1
            look(*arguments)  # type: ignore[arg-type]
            store.plane.names.forget()

        monkeypatch.setattr(store.blocks, "look", forgetful)
        segment.state = State.EVICTING
        with index_reads(store.plane.names) as reads:
            assert await store.evictor._evict(segment)
        assert "_stored_many" in reads
        assert store.segments.freed == free + 1 and names(store, above.inode) == set() and segment.live_pages == 0
        assert store.evictor.counters.blocks == 5 and looks == 1

    with_store(make_pool(tmp_path / "pool"), work, OPTIONS)


@pytest.mark.parametrize("where", ["look", "choose", "bring", "carry"])
def test_a_segment_stays_where_memory_ends_as_it_is_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    async def work(store: Store) -> None:
        blocks = [await write(store, b"%d" % i, _SMALL) for i in range(5)]
        store.segments.retire_open()
        await store.sync()
        segment, evictor = store.segments.all[blocks[0].segment], store.evictor
        if where == "carry":
            await store.blocks.pin(blocks[0].inode)
        ends = {
            "look": (Looks, "__init__", MemoryError()),
            "choose": (Looks, "choose", MemoryError("no memory to choose")),
            "bring": (LmdbIndex, "bring", NamesError("no memory for a record")),
            "carry": (Sealing, "_carry", NamesError("no memory for a record")),
        }
        owner, name, error = ends[where]

        def end(*arguments: object, **more: object) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, end)
            for _ in range(2):
                segment.state = State.EVICTING
                assert not await evictor._evict(segment) and segment.state == State.CLOSED
        left = {b"0", b"1", b"2", b"3", b"4"}
        assert names(store) == left
        if where != "carry":
            assert len(caplog.messages) == 1 and "stays" in caplog.messages[0]
            evictor._give_up(True, False)
            assert "nothing can be evicted: there is no memory" in caplog.messages[-1]
        segment.state = State.EVICTING
        assert await evictor._evict(segment) and segment.state == State.FREE and not evictor._lacks_memory
        assert names(store) == ({b"0"} if where == "carry" else set())
        await verify_all(store)

    with_store(make_pool(tmp_path / "pool"), work, OPTIONS)


@pytest.mark.parametrize(("at_once", "others"), [(1, 0), (2, 3)])
def test_other_segments_are_emptied_while_copies_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, others: int
) -> None:
    async def work(store: Store) -> None:
        await closed_segments(store, 6)
        evictor, copies, go_on = store.evictor, trio.Event(), trio.Event()
        first = min((s for s in store.segments.own if s.state == State.CLOSED), key=lambda s: s.generation)
        await store.blocks.pin(store.index.segment_inodes(first.index)[0])
        carry = store.sealing.carry

        async def late(record: bytes) -> bool:
            copies.set()
            await go_on.wait()
            return await carry(record)

        monkeypatch.setattr(store.sealing, "carry", late)
        before = evictor.counters.segments

        def emptied() -> int:
            return evictor.counters.segments - before

        with trio.fail_after(60 * slowness()):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: evictor.free_until(lambda: emptied() >= 4, at_once=at_once))
                await copies.wait()
                while emptied() < others:
                    await trio.sleep(0.01)
                await trio.testing.wait_all_tasks_blocked(0.05)
                assert first.state == State.EVICTING and emptied() in (others, others + 1)
                go_on.set()
        assert emptied() >= 4 and first.state == State.FREE
        await verify_all(store)

    with_store(make_pool(tmp_path / "pool"), work, OPTIONS)


def test_writers_that_use_up_what_is_free_while_copies_wait_have_more_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(store: Store) -> None:
        await closed_segments(store, 6)
        evictor, copies, go_on, wanted = store.evictor, trio.Event(), trio.Event(), 0
        first = min((s for s in store.segments.own if s.state == State.CLOSED), key=lambda s: s.generation)
        await store.blocks.pin(store.index.segment_inodes(first.index)[0])
        carry, before = store.sealing.carry, evictor.counters.segments

        async def late(record: bytes) -> bool:
            copies.set()
            await go_on.wait()
            return await carry(record)

        def emptied() -> int:
            return evictor.counters.segments - before

        def is_enough() -> bool:
            return emptied() + len(evictor._emptying) >= wanted

        monkeypatch.setattr(store.sealing, "carry", late)
        monkeypatch.setattr(Evictor, "low", property(lambda self: 0 if is_enough() else 1 << 30))
        monkeypatch.setattr(evictor, "_has_space", is_enough)
        with trio.fail_after(60 * slowness()):
            wanted = 2
            store.segments.need_space.set()
            await copies.wait()
            while emptied() < 1:
                await trio.sleep(0.01)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert emptied() == 1 and first.state == State.EVICTING
            wanted = 3  # a writer took one
            store.segments.need_space.set()
            while emptied() < 3:
                await trio.sleep(0.01)
            assert first.state == State.EVICTING
            go_on.set()
            while first.state != State.FREE:
                await trio.sleep(0.01)
        await verify_all(store)

    with_store(make_pool(tmp_path / "pool"), work, OPTIONS)


def test_writers_get_segments_while_a_copy_that_another_asked_for_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for `kvfs evict`, which empties one segment after another."""

    async def work(store: Store) -> None:
        await closed_segments(store, 6)
        evictor, copies, go_on, low = store.evictor, trio.Event(), trio.Event(), 0
        first = min((s for s in store.segments.own if s.state == State.CLOSED), key=lambda s: s.generation)
        await store.blocks.pin(store.index.segment_inodes(first.index)[0])
        carry, before = store.sealing.carry, evictor.counters.segments

        async def late(record: bytes) -> bool:
            copies.set()
            await go_on.wait()
            return await carry(record)

        def emptied() -> int:
            return evictor.counters.segments - before

        monkeypatch.setattr(store.sealing, "carry", late)
        monkeypatch.setattr(Evictor, "low", property(lambda self: low))
        with trio.fail_after(60 * slowness()):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(evictor.free_until, lambda: emptied() >= 1)
                await copies.wait()
                store.segments.need_space.set()  # writers wait for nothing
                await trio.testing.wait_all_tasks_blocked(0.05)
                assert not emptied() and first.state == State.EVICTING
                low = store.segments.free_count() + 2
                store.segments.need_space.set()
                while emptied() < 2:
                    await trio.sleep(0.01)
                await trio.testing.wait_all_tasks_blocked(0.05)
                assert emptied() == 2 and first.state == State.EVICTING
                go_on.set()
        assert first.state == State.FREE
        await verify_all(store)

    with_store(make_pool(tmp_path / "pool"), work, OPTIONS)


@pytest.mark.parametrize("again", [False, True])
def test_a_segment_that_was_freed_as_its_blocks_were_copied_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Its device went, and came back without its blocks. `again`: the segment is filled and emptied by another hand."""

    async def work(store: Store) -> None:
        blocks = [await write(store, b"%d" % i, _SMALL) for i in range(5)]
        store.segments.retire_open()
        await store.sync()
        segment, evictor = store.segments.all[blocks[0].segment], store.evictor
        await store.blocks.pin(blocks[0].inode)
        freed = store.segments.freed

        async def ends(record: bytes) -> bool:
            await store.blocks.unpin(blocks[0].inode)
            segment.state = State.CLOSED
            assert store.blocks.evict(segment, [block.inode for block in blocks]).blocks == 5
            if again:
                store.segments._resting.discard(segment.index)
                assert await store.segments._format(segment, Stream.NEW)
                segment.state = State.EVICTING
            return False

        monkeypatch.setattr(store.sealing, "carry", ends)
        segment.state = State.EVICTING
        assert not await evictor._evict(segment)
        assert store.segments.freed == freed + 1
        assert segment.state == (State.EVICTING if again else State.FREE)
        if again:
            segment.state = State.CLOSED
            store.segments.free_if_empty(segment)

    with_store(make_pool(tmp_path / "pool"), work, OPTIONS)


def test_others_are_emptied_while_a_drain_waits_for_what_is_written_to_its_segment(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await closed_segments(store, 6)
        segments, evictor = store.segments, store.evictor
        head = segments.head(Stream.CLIENT)
        (run,) = await segments.allocate(head, 1, 1)
        segment = segments.all[run.segment]
        segments.retire(segment)
        assert segment.state == State.OPEN
        with trio.fail_after(60 * slowness()):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(evictor.drain, segment, lambda count: None)
                await trio.testing.wait_all_tasks_blocked(0.002)
                before = evictor.counters.segments
                assert await evictor.free_until(lambda: evictor.counters.segments > before) == 1
                assert segment.state == State.OPEN
                await segments.tombstone([run])
                segments.release([run])
        assert segment.state == State.FREE
        await verify_all(store)

    with_store(make_pool(tmp_path / "pool"), work, OPTIONS)


@pytest.mark.parametrize("pins", [False, True])
def test_a_group_stays_while_the_record_of_one_is_not_in_memory(tmp_path: Path, pins: bool) -> None:
    async def work(store: Store) -> None:
        if pins:
            await store.blocks.pin(make(store, ROOT_INODE, b"other", Kind.DIRECTORY).inode)
        blocks = [await write(store, b"%d" % i, _SMALL) for i in range(3)]
        numbers = [block.inode for block in blocks]
        await store.sync()
        store.plane.names.forget()
        store.index.bring(numbers[:2])
        assert not any(store.blocks.evict(None, numbers).gone) and names(store) >= {b"0", b"1", b"2"}
        store.blocks.bring_to_evict(numbers)
        assert store.blocks.evict(None, numbers).blocks == 3 and not names(store) & {b"0", b"1", b"2"}

    with_store(make_pool(tmp_path / "pool"), work, OPTIONS)


def place_in_table(store: Store, name: bytes) -> tuple[int, int]:
    out = ffi.new("struct kvfs_record *")
    assert lib.kvfs_table_find_name(store.plane._table, ROOT_INODE, name, len(name), out) == 0
    return out.segment, out.page


@pytest.mark.parametrize("ends", ["put", "load"])
def test_names_and_table_lead_to_one_place_wherever_memory_ends_as_a_copy_enters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    async def work(store: Store) -> None:
        block = await write(store, b"block", _SMALL)
        await store.sync()
        store.plane.names.forget()
        record = store.index.raw(block.inode)
        assert record is not None

        def end(*arguments: object) -> None:
            raise NamesError("no memory for a record")

        with monkeypatch.context() as patch:
            patch.setattr(Names, ends, end)
            with suppress(NamesError):
                await store.sealing.carry(record)
        now = store.index.get(block.inode)
        assert now is not None and place_in_table(store, b"block") == (now.segment, now.page)
        await verify_all(store)
        assert await store.sealing.carry(record)
        now = store.index.get(block.inode)
        assert now is not None and place_in_table(store, b"block") == (now.segment, now.page)
        assert now.segment != block.segment

    with_store(make_pool(tmp_path / "pool"), work, OPTIONS)
