"""The policy, by numbers; and the evictor over a real pool."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import pytest
import trio
from helpers import slowness
from kvfs._native import ffi
from store_pools import OPTIONS, make, make_pool, names, rename, settle, unlink, verify_all, with_store, write

from kvfs.errors import DeviceError, NoSpaceError
from kvfs.record import Kind
from kvfs.store.eviction import (
    CARRY_SHARE,
    CARRY_SHARE_BUSY,
    LEARN_TICKS,
    TICKS_PER_POOL,
    LeastLoss,
    Lost,
)
from kvfs.store.fsck import fsck
from kvfs.store.learning import Learner
from kvfs.store.segment import State
from kvfs.store.store import Store
from kvfs.worth import AGES, TICK_MASK, WORTH_CLASSES, ChooseBy, Looks, Weights, Worths, class_of, word_of

# Sparse: 32 MiB have 8,192 leaves, so a header of this many pages and no data.
BIG, HEADER_PAGES = 32 << 20, 18


def losses(
    policy: LeastLoss,
    segments: dict[int, list[tuple[int, int]]],
    tick: int,
    budget: float = 1.0,
) -> dict[int, float]:
    """The loss of each segment of equal blocks by the page of its room."""
    blocks = [(segment, use) for segment, uses in segments.items() for use in uses]
    weights = Weights(max(segments) + 1)
    words = ffi.new("uint32_t[]", [(used & TICK_MASK) << 8 | hits for _, (used, hits) in blocks])
    places = ffi.new("uint64_t[]", [segment | 1 << 32 for segment, _ in blocks])
    orphans = ffi.new("uint64_t[]", len(blocks) // 64 + 1)
    weighed = ffi.new("struct kvfs_weighed *", [words, places, orphans, len(blocks)])
    weights.weigh(policy.worths(), policy.price(budget), tick, weighed)
    for segment in range(weights.count):
        weights.all[segment].live = len(segments.get(segment, ()))
    lost = weights.losses(10)
    return {segment: lost[segment] for segment in segments}


def choose(policy: LeastLoss, segments: dict[int, list[tuple[int, int]]], tick: int, budget: float = 1.0) -> int:
    lost = losses(policy, segments, tick, budget)
    return min(segments, key=lost.__getitem__)


def looked(uses: Sequence[tuple[int, int]], orphan: bool = False) -> Looks:
    """Blocks of one page, numbered from 0 on."""
    looks = Looks(len(uses))
    for i, use in enumerate(uses):
        look = looks.all[i]
        look.inode, look.pages, look.pages_all, look.use, look.orphan = i, 1, 1, word_of(use), orphan
    return looks


def worths_of(worths: Worths, uses: Sequence[tuple[int, int]], tick: int, orphan: bool = False) -> list[float]:
    looks = looked(uses, orphan)
    looks.choose(ChooseBy.HELD, worths, tick)
    return [looks.all[i].worth for i in range(looks.count)]


def carry(policy: LeastLoss, uses: list[tuple[int, int]], budget: float, tick: int, most: int = 1 << 32) -> list[int]:
    """The blocks that are worth a copy, in their order; at most so many."""
    return looked(uses).choose(ChooseBy.WORTH, policy.worths(), tick, policy.price(budget), most).kept


def lose(policy: LeastLoss, count: int = 200, uses: Sequence[tuple[int, int]] = ((0, 0),) * 10) -> LeastLoss:
    for _ in range(count):
        policy.gone(Lost(sum(worths_of(policy.worths(), uses, 1000)), len(uses), 1.0))
    return policy


def test_the_segment_whose_blocks_were_not_used_for_longest_goes() -> None:
    assert choose(LeastLoss(), {1: [(500, 0)] * 4, 2: [(100, 0)] * 4, 3: [(900, 0)] * 4}, 1000) == 2


def test_dead_pages_are_free() -> None:
    lost = losses(LeastLoss(), {1: [(100, 0)] * 2, 2: [(100, 0)] * 4}, 1000)
    assert lost[1] == pytest.approx(lost[2] / 2)
    weights = Weights(2)
    weights.weigh(LeastLoss().worths(), 1.0, 5, ffi.new("struct kvfs_weighed *"))
    weights.all[1].live = 3
    assert weights.losses(10) == [0.0, inf]


def test_blocks_that_lie_in_several_segments_count_where_they_begin() -> None:
    """A block of 8 pages begins in each segment of 10; of the second the other pages are a block's from elsewhere."""
    weights, worths = Weights(2), Worths([[1.0] * len(AGES)] * WORTH_CLASSES)
    places = ffi.new("uint64_t[]", [0 | 8 << 32, 1 | 8 << 32])
    weighed = ffi.new("struct kvfs_weighed *", [ffi.new("uint32_t[]", 2), places, ffi.new("uint64_t[]", 1), 2])
    weights.weigh(worths, 10.0, 0, weighed)
    weights.all[0].live, weights.all[1].live = 3, 10
    assert weights.losses(10) == [8 / 15, 1.0]


def test_the_clock_goes_round() -> None:
    assert choose(LeastLoss(), {1: [(TICK_MASK - 10, 0)] * 4, 2: [(3, 0)] * 4}, TICK_MASK + 21) == 1
    # A use may be ahead of the tick that was read before.
    assert choose(LeastLoss(), {1: [(1001, 0)] * 4, 2: [(990, 0)] * 4}, 1000) == 2


def test_classes_and_ages_of_a_table() -> None:
    assert [class_of(hits) for hits in (0, 1, 2, 3, 4, 5, 8, 9, 19, 20, 255)] == [0, 1, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert AGES[:5] == (0, 1, 2, 3, 4) and AGES[-1] == (TICK_MASK + 1) // 2
    worths = Worths([[float(age) for age in AGES]] * WORTH_CLASSES, 0.25)
    uses = [(1 << 20, hits) for hits in (0, 1, 2, 3, 100)]
    for age in (0, 3, 5, 100, 1023, 40_000):
        assert worths_of(worths, uses, (1 << 20) + age) == pytest.approx([age] * 5)
        assert worths_of(worths, uses, (1 << 20) + age, True) == pytest.approx([age / 4] * 5)
    assert worths_of(worths, [], 5) == []


def test_before_anything_is_learnt_older_blocks_are_worth_less() -> None:
    worths = LeastLoss().worths()
    some = [worths_of(worths, [(0, hits)], age)[0] for hits in (0, 3, 20) for age in (0, 10, 100, 1000, 10_000)]
    assert some[:5] == sorted(some[:5], reverse=True) and some[:5] == some[5:10] == some[10:]


def test_worths_are_learnt_from_uses_and_from_time_without_one() -> None:
    """Blocks of one hit are used again after 300 ticks, others never: at that age they are worth the most."""
    learner = Learner()
    used, there = [[0.0] * len(AGES) for _ in range(WORTH_CLASSES)], [[0.0] * len(AGES) for _ in range(WORTH_CLASSES)]
    at = bisect.bisect_right(AGES, 300) - 1
    used[1][at] = 1000
    for i in range(len(AGES)):
        there[0][i] = there[1][i] = 10 if i <= at + 1 else 0
    for _ in range(50):
        learner.learn(used, there, 4)
    values = learner.values()
    assert values[1][at] > 20 * values[0][at] and values[1][at] > 3 * values[1][0] > 3 * values[0][0]
    # An octave before it takes 150 ticks to come there; others are worth what all are.
    assert values[1][at] > values[1][at - 4] > 1.5 * values[0][at - 4] and values[5][at] > values[0][at]


def test_it_learns_less_often_the_more_it_has_learnt() -> None:
    """Of a pool that was filled many times a 64th of what is known would change little."""
    policy, ticks, turns = LeastLoss(), 0, 0
    assert policy.learn_ticks == LEARN_TICKS
    none = [[0] * len(AGES) for _ in range(WORTH_CLASSES)]
    while ticks < 100 * TICKS_PER_POOL:
        ticks, turns = ticks + policy.learn_ticks, turns + 1
        policy.learn(none, none, policy.learn_ticks)
    assert policy.learn_ticks == ticks // 64 and turns < 400  # 6,400 turns of 16 ticks


def test_what_can_be_copied_is_not_what_a_segment_is_worth() -> None:
    """A segment with one hot block and else old ones goes before one in which everything is somewhat younger."""
    some: dict[int, list[tuple[int, int]]] = {1: [(990, 3)] + [(100, 0)] * 9, 2: [(400, 0)] * 10}
    assert choose(lose(LeastLoss()), some, 1000, budget=5.0) == 1
    # Without a budget the hot one would be lost.
    assert choose(lose(LeastLoss()), some, 1000, budget=0.0) == 2


def test_what_is_worth_a_copy_is_carried_the_best_first_and_heads_before_tails() -> None:
    policy = lose(LeastLoss(), uses=[(500, 0)] * 10)
    uses = [(400, 0), (990, 1), (990, 1), (999, 3), (500, 0)]
    kept = [carry(policy, uses, 10.0, 1000, most) for most in range(5)]
    assert kept == [[], [3], [1, 3], [1, 2, 3], [1, 2, 3]]
    assert carry(policy, uses, 0.0, 1000) == []
    # Little is left of the budget: only the best is worth it.
    assert carry(policy, [(800, 0), (999, 3)], 0.05, 1000) == [1]


def test_the_first_segment_that_goes_sets_the_price_of_a_copy() -> None:
    policy = lose(LeastLoss(), 1, [(500, 0)] * 10)
    assert carry(policy, [(500, 0), (990, 0), (600, 0)], 10.0, 1000) == [1]


def test_writing_more_than_the_pool_holds_evicts(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", files=2, size=32 << 20)

    async def work(store: Store) -> None:
        blocks = 2 * store.space().size // (HEADER_PAGES * 4096)
        for i in range(blocks):
            await write(store, b"%06d" % i, BIG)
        left, gone = names(store), store.evictor.counters.blocks
        assert 0.5 * blocks / 2 < len(left) < blocks
        assert b"%06d" % (blocks - 1) in left and b"%06d" % 0 not in left
        await verify_all(store)
        assert gone + len(left) == blocks
        statistics = store.segments.statistics()
        assert statistics.free >= store.segments.reserve

    with_store(pool, work)
    with_store(pool, lambda store: verify_all(store))


def test_pinned_blocks_stay_and_everything_pinned_is_enospc(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", files=1, size=16 << 20)

    async def work(store: Store) -> None:
        kept = make(store, 1, b"kept", Kind.DIRECTORY)
        await store.blocks.pin(kept.inode)
        pinned = {b"p%d" % i for i in range(20)}
        for name in pinned:
            await write(store, name, BIG, kept.inode)
        for i in range(2 * store.space().size // (HEADER_PAGES * 4096)):
            await write(store, b"%06d" % i, BIG)
        assert names(store, kept.inode) == pinned
        await verify_all(store, kept.inode)
        await store.pins.count()
        assert store.space().pinned == 20 * HEADER_PAGES * 4096
        with pytest.raises(NoSpaceError, match="pinned"), trio.fail_after(50 * slowness()):
            for i in range(10_000):
                await write(store, b"q%06d" % i, BIG, kept.inode)
        await store.blocks.unpin(kept.inode)
        with trio.fail_after(20 * slowness()):
            await write(store, b"fits again", BIG)
            while not any(name == b"later" for name in names(store)):
                try:
                    await write(store, b"later", BIG)
                except NoSpaceError:
                    await trio.sleep(0.1)

    with_store(pool, work)
    with_store(pool, lambda store: verify_all(store))


def test_to_evict_all_ends_where_pinned_blocks_fill_more_than_half_a_segment_each(tmp_path: Path) -> None:
    """To empty such a segment takes another: it frees nothing, however often it is done."""
    pool = make_pool(tmp_path / "pool", files=1, size=16 << 20)

    async def work(store: Store) -> None:
        pages = store.segments.area * 35 // 100  # two in a segment, and no third
        for i in range(8):
            pinned = await write(store, b"p%d" % i, pages * 512 * 4096)  # 8 bytes of header for each 4 KiB
            await store.blocks.pin(pinned.inode)
            await write(store, b"q%d" % i)
        with trio.fail_after(20 * slowness()):
            await store.evict(1 << 60)
        assert {b"p%d" % i for i in range(8)} == names(store)
        assert store.evictor.counters.carried_blocks <= 4 * 8
        await verify_all(store)

    with_store(pool, work)


def test_evict_frees_what_is_asked_for(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")

    async def work(store: Store) -> None:
        for i in range(100):
            await write(store, b"%03d" % i, BIG)
        seen: list[int] = []
        await store.evict(store.space().used, lambda done, wanted: seen.append(done))
        assert names(store) == set() and seen
        await settle(store)
        states = {segment.state for segment in store.segments.all if segment.generation}
        assert State.CLOSED not in states and State.EVICTING not in states

    with_store(pool, work, OPTIONS)


def test_an_evict_that_fails_says_why_in_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(tmp_path / "pool")

    async def work(store: Store) -> None:
        for i in range(100):
            await write(store, b"%03d" % i, BIG)

        async def fail(*_: object, **__: object) -> int:
            raise DeviceError("device 1: gone")

        with monkeypatch.context() as patch:
            patch.setattr(store.evictor, "_drop_blocks", fail)
            with pytest.raises(DeviceError, match="device 1: gone"):
                await store.evict(store.space().used)
        assert State.EVICTING not in {segment.state for segment in store.segments.all}
        await store.evict(store.space().used)
        assert names(store) == set()

    with_store(pool, work, OPTIONS)


def test_what_is_used_stays_and_copies_keep_to_their_budget(tmp_path: Path) -> None:
    """Blocks that are opened again and again among many that are not; the clock goes on as pages are written."""
    pool = make_pool(tmp_path / "pool", files=1, size=96 << 20)

    async def work(store: Store) -> None:
        hot = [b"hot%d" % i for i in range(8)]
        for name in hot:  # each in a segment with others: one that is full of them would just stay
            await write(store, name, BIG)
            for i in range(store.segments.area // HEADER_PAGES):
                await write(store, name + b"+%d" % i, BIG)
        numbers = [store.plane.table_find_name(1, name) for name in hot]
        blocks = 4 * store.space().size // (HEADER_PAGES * 4096)
        for i in range(blocks):
            await write(store, b"%06d" % i, BIG)
            store.plane.uses.touch([number for number in numbers if number is not None])
        assert names(store) >= set(hot) and not any(b"+" in name for name in names(store))
        counters, written = store.evictor.counters, store.segments.pages_written
        assert 8 <= counters.carried_blocks < blocks // 4
        assert counters.carried_pages <= CARRY_SHARE * (written - counters.carried_pages)
        assert 3 * TICKS_PER_POOL < store.segments.tick < 6 * TICKS_PER_POOL
        await verify_all(store)

    with_store(pool, work)


def test_fewer_copies_may_be_made_while_writers_wait_for_segments(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", files=1, size=96 << 20)

    async def work(store: Store) -> None:
        evictor = store.evictor
        found = []
        for waits in (0, 1):  # of writers, since the look before
            store.segments.waits += waits
            evictor._look_ahead(trio.current_time())
            before = evictor._budget_pages()
            evictor._pages_at_start -= 1000  # as if so many had been written
            found.append(evictor._budget_pages() - before)
        assert found == [round(CARRY_SHARE * 1000), round(CARRY_SHARE_BUSY * 1000)] and found[1] < found[0] // 2

    with_store(pool, work)


def test_all_segments_are_weighed_and_the_least_goes_wherever_it_is(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", files=1, size=64 << 20, stripe_width=1, segment_size=256 << 10)

    async def work(store: Store) -> None:
        area = store.segments.area
        for i in range(100 * area // HEADER_PAGES):
            await write(store, b"%06d" % i, BIG)
        closed = [s for s in store.segments.own if s.state == State.CLOSED]
        assert len(closed) > 90
        closed.sort(key=lambda s: s.generation)
        # The newest are spared. Two among the others are left unused, of which one is half empty.
        least, half = closed[61], closed[33]
        store.plane.uses.tick(store.segments.tick)
        for segment in closed:
            if segment not in (least, half):
                store.plane.uses.touch(store.index.segment_inodes(segment.index))
        here = store.index.segment_inodes(half.index)
        for number in here[: len(here) // 2]:
            inode = store.index.get(number)
            assert inode is not None
            unlink(store, inode.name)
        newest = max(s.generation for s in closed)
        order = [await store.evictor._choose(newest) for _ in range(3)]
        assert order[:2] == [half, least] and order[2] not in (None, half, least)
        # One that may not go now is passed over, also if it was chosen before.
        store.evictor._chosen.append((least, least.generation))
        least.avoid_until = trio.current_time() + 60
        assert await store.evictor._choose(newest) not in (None, least)
        assert await store.evictor._choose(-1) is None

    with_store(pool, work)


def test_uses_are_opens_on_the_clock_and_follow_a_rename(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")

    async def work(store: Store) -> None:
        plane = store.plane
        plane.uses.tick(7)
        first = (await write(store, b"a")).inode
        plane.uses.tick(9)
        assert plane.uses.of([first, 99999]) == [(7, 0), (0, 0)]
        plane.uses.touch([first, 99999])
        rename(store, first, b"b")
        plane.uses.tick(TICK_MASK + 12)
        second = (await write(store, b"c")).inode
        assert plane.uses.of([first, second]) == [(9, 1), (11, 0)]
        unlink(store, b"b")
        third = (await write(store, b"d")).inode  # perhaps in the record's place
        assert plane.uses.of([first, third]) == [(0, 0), (11, 0)]
        assert plane.uses.of([]) == []

    with_store(pool, work)


def test_a_block_carried_over_keeps_its_uses(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")

    async def work(store: Store) -> None:
        block = await write(store, b"block")
        store.plane.uses.tick(3)
        store.plane.uses.touch([block.inode] * 2)
        record = store.index.raw(block.inode)
        assert record is not None and await store.sealing.carry(record)
        assert store.plane.uses.of([block.inode]) == [(3, 2)]

    with_store(pool, work)


@pytest.mark.parametrize("change", ["write", "rename", "remove"])
def test_what_changes_while_it_is_copied_is_not_undone_by_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    pool = make_pool(tmp_path / "pool")

    async def work(store: Store) -> None:
        before = await write(store, b"block")
        copy = store.plane.store_copy

        async def meanwhile(*arguments: Any) -> bytes:
            copied = await copy(*arguments)
            if change == "write":  # as the data plane does it, which takes no turn
                await store.plane.file_rewrite(before.inode, True)
                store.plane.file_truncate(before.inode, 5000)
            elif change == "rename":
                rename(store, before.inode, b"renamed")
            else:
                unlink(store, b"block")
            return copied

        monkeypatch.setattr(store.plane, "store_copy", meanwhile)
        record = store.index.raw(before.inode)
        assert record is not None and await store.sealing.carry(record) == (change == "rename")
        after = store.index.get(before.inode)
        if change == "remove":
            assert after is None and names(store) == set()
            return
        assert after is not None and names(store) == {b"block" if change == "write" else b"renamed"}
        assert (after.segment == before.segment) == (change == "write")
        if change == "write":
            assert store.plane.file_extents(before.inode)[0].segment == before.segment
            sealed = await store.sealing.seal(before.inode)
            assert sealed is not None and sealed.size == 5000
        await verify_all(store)

    with_store(pool, work)
    assert fsck(pool, verify_data=True).healthy


class KeepsAll(LeastLoss):
    """A double of the policy: every block is worth a copy."""

    def price(self, budget: float) -> float:
        return -1.0


def test_evict_all_takes_blocks_that_are_worth_a_copy_and_says_what_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(tmp_path / "pool")

    async def work(store: Store) -> None:
        monkeypatch.setattr(store.evictor, "_policy", KeepsAll())
        monkeypatch.setattr(store.evictor, "_budget_pages", lambda: 1 << 30)
        blocks = [await write(store, b"%03d" % i, BIG) for i in range(100)]
        await store.blocks.pin(blocks[7].inode)
        await store.evict(None)
        assert names(store) == {b"007"}
        kept = await store.evictor.kept()
        assert {why: (part.blocks, part.inodes) for why, part in kept.items()} == {"pinned": (1, [blocks[7].inode])}
        await store.blocks.unpin(blocks[7].inode)
        await store.evict(store.space().used)  # they go last, but they go
        assert names(store) == set() and not await store.evictor.kept()
        await verify_all(store)

    with_store(pool, work, OPTIONS)
