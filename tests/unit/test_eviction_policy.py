"""The policy, by numbers; and the evictor over a real pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from store_pools import OPTIONS, make, make_pool, names, rename, settle, unlink, verify_all, with_store, write

from kvfs.errors import DeviceError, NoSpaceError
from kvfs.record import Kind
from kvfs.store.eviction import CARRY_SHARE, TICK_MASK, TICKS_PER_POOL, Contents, LeastLoss, Use
from kvfs.store.fsck import fsck
from kvfs.store.segment import State
from kvfs.store.store import Store

# Sparse: 32 MiB have 8,192 leaves, so a header of this many pages and no data.
BIG, HEADER_PAGES = 32 << 20, 18


def closed(segments: dict[int, list[Use]], live_share: float = 1.0) -> dict[int, Contents]:
    return {segment: Contents(uses, live_share) for segment, uses in segments.items()}


def choose(policy: LeastLoss, contents: dict[int, Contents], tick: int, budget: float = 1.0) -> int | None:
    return next(iter(policy.choose(list(contents), contents.__getitem__, budget, tick)), None)


def test_nothing_closed_is_nothing_to_evict() -> None:
    assert choose(LeastLoss(), {}, 5) is None


def test_the_segment_whose_blocks_were_not_used_for_longest_goes() -> None:
    some = closed({1: [(500, 0)] * 4, 2: [(100, 0)] * 4, 3: [(900, 0)] * 4})
    assert choose(LeastLoss(), some, 1000) == 2


def test_opens_count_and_dead_pages_are_free() -> None:
    assert choose(LeastLoss(), closed({1: [(100, 2)] * 4, 2: [(100, 0)] * 4}), 1000) == 2
    some = closed({1: [(100, 0)] * 4, 2: [(100, 0)] * 4})
    some[1] = Contents(some[1].uses[:2], 0.5)
    assert choose(LeastLoss(), some, 1000) == 1
    # Those that were removed from under a sample are (0, 0); a segment with nothing in it costs nothing.
    assert choose(LeastLoss(), {1: Contents([(900, 0)], 1.0), 2: Contents([], 0.0)}, 1000) == 2


def test_the_clock_goes_round() -> None:
    some = closed({1: [(TICK_MASK - 10, 0)] * 4, 2: [(3, 0)] * 4})
    assert choose(LeastLoss(), some, 20) == 1


def test_what_can_be_copied_is_not_what_a_segment_is_worth() -> None:
    """A segment with one hot block and else old ones goes before one in which everything is somewhat younger."""

    def lose(policy: LeastLoss) -> LeastLoss:
        for number in range(200):
            policy.gone(number, Contents([(0, 0)] * 10, 1.0), 1000)
        return policy

    some = closed({1: [(990, 3)] + [(100, 0)] * 9, 2: [(400, 0)] * 10})
    assert choose(lose(LeastLoss()), some, 1000, budget=5.0) == 1
    # Without a budget the hot one would be lost.
    assert choose(lose(LeastLoss()), some, 1000, budget=0.0) == 2


def test_a_bounded_number_of_segments_is_weighed_and_all_in_turn() -> None:
    policy, asked = LeastLoss(), set()
    some = closed({segment: [(100 + segment, 0)] * 4 for segment in range(500)})

    def contents(segment: int) -> Contents:
        asked.add(segment)
        return some[segment]

    for turn in range(17):
        before = len(asked)
        assert policy.choose(list(some), contents, 1.0, 2000)
        assert len(asked) - before <= 500 // 16 + 8, turn
    assert len(asked) == 500
    # Of segments with many blocks fewer; and of very many, with a block in each, no more than 128.
    for blocks, segments, most in ((256, 500, 16), (1, 5000, 128), (1, 3, 3)):
        weighed: list[int] = []

        def count(segment: int, blocks: int = blocks, weighed: list[int] = weighed) -> Contents:
            weighed.append(segment)
            return Contents([(100 + segment, 0)] * blocks, 1.0)

        LeastLoss().choose(range(segments), count, 1.0, 20_000)
        assert len(weighed) == most
    assert policy.choose(list(some), contents, 1.0, 2000) == [0]
    assert policy.choose(list(some), contents, 1.0, 2000, 3) == [0, 1, 2]
    assert sorted(policy.choose([7, 5], contents, 1.0, 2000, 3)) == [5, 7]


def test_one_that_was_used_since_it_was_weighed_is_weighed_again() -> None:
    policy = LeastLoss()
    some = closed({segment: [(100 + segment, 0)] * 4 for segment in range(40)})
    for _ in range(3):
        assert choose(policy, some, 1000) == 0
    some[0] = Contents([(1001, 5)] * 4, 1.0)
    assert choose(policy, some, 1002) == 1


def test_what_is_worth_a_copy_is_carried_the_best_first_and_heads_before_tails() -> None:
    policy = LeastLoss()
    for number in range(200):
        policy.gone(number, Contents([(500, 0)] * 10, 1.0), 1000)
    uses = [(400, 0), (990, 1), (990, 1), (999, 3), (500, 0)]
    assert policy.carry(uses, 10.0, 1000) == [3, 1, 2]
    assert policy.carry(uses, 0.0, 1000) == []
    # Little is left of the budget: only the best is worth it.
    assert policy.carry([(800, 0), (999, 3)], 0.05, 1000) == [1]


def test_the_first_segment_that_goes_sets_the_price_of_a_copy() -> None:
    policy = LeastLoss()
    policy.gone(0, Contents([(500, 0)] * 10, 1.0), 1000)
    assert policy.carry([(500, 0), (990, 0), (600, 0)], 10.0, 1000) == [1]


def test_what_hits_say_is_learnt_within_bounds() -> None:
    """Where every block is opened once and never again, a hit must not keep one for long."""
    policy = LeastLoss()
    some = closed({1: [(500, 1)] * 4, 2: [(600, 0)] * 4})
    assert choose(policy, some, 1000) == 2
    for number in range(100):
        policy.gone(number, Contents([(500, 1)] * 100, 1.0), 1000)
    assert choose(policy, some, 1000) == 1
    # And where those that were hit are always hit again, there is an end to what that counts.
    for number in range(100):
        policy.gone(number, Contents([(500, 0)] * 99 + [(500, 200)], 1.0), 1000)
    assert choose(policy, closed({1: [(100, 200)] * 4, 2: [(900, 0)] * 4}), 1000) == 1


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
        with pytest.raises(NoSpaceError, match="pinned"), trio.fail_after(50):
            for i in range(10_000):
                await write(store, b"q%06d" % i, BIG, kept.inode)
        await store.blocks.unpin(kept.inode)
        with trio.fail_after(20):
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
        with trio.fail_after(20):
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
            store.plane.inode_touch([number for number in numbers if number is not None])
        assert names(store) >= set(hot) and not any(b"+" in name for name in names(store))
        counters, written = store.evictor.counters, store.segments.pages_written
        assert 8 <= counters.carried_blocks < blocks // 4
        assert counters.carried_pages <= CARRY_SHARE * (written - counters.carried_pages)
        assert 3 * TICKS_PER_POOL < store.segments.tick < 6 * TICKS_PER_POOL
        await verify_all(store)

    with_store(pool, work)


def test_uses_are_opens_on_the_clock_and_follow_a_rename(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")

    async def work(store: Store) -> None:
        plane = store.plane
        plane.tick(7)
        first = (await write(store, b"a")).inode
        plane.tick(9)
        assert plane.inode_uses([first, 99999]) == [(7, 0), (0, 0)]
        plane.inode_touch([first, 99999])
        rename(store, first, b"b")
        plane.tick(TICK_MASK + 12)
        second = (await write(store, b"c")).inode
        assert plane.inode_uses([first, second]) == [(9, 1), (11, 0)]
        unlink(store, b"b")
        third = (await write(store, b"d")).inode  # perhaps in the record's place
        assert plane.inode_uses([first, third]) == [(0, 0), (11, 0)]
        assert plane.inode_uses([]) == []

    with_store(pool, work)


def test_a_block_carried_over_keeps_its_uses(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool")

    async def work(store: Store) -> None:
        block = await write(store, b"block")
        store.plane.tick(3)
        store.plane.inode_touch([block.inode] * 2)
        record = store.index.raw(block.inode)
        assert record is not None and await store.sealing.carry(record)
        assert store.plane.inode_uses([block.inode]) == [(3, 2)]

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

    def carry(self, uses: Sequence[Use], budget: float, tick: int) -> list[int]:
        return list(range(len(uses)))


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
