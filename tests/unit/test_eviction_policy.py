"""The policy, by numbers; and the evictor over a real pool."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from store_pools import OPTIONS, make, make_pool, names, settle, verify_all, with_store, write

from kvfs.errors import NoSpaceError
from kvfs.store.eviction import BlockUse, Candidate, OldestLeastLive, Stream
from kvfs.store.pool import Store
from kvfs.store.segments import State
from kvfs.types import Kind

# Sparse: 64 MiB have 16,384 leaves, so a header of this many pages and no data.
BIG, HEADER_PAGES = 64 << 20, 18


def candidate(segment: int, live: int = 100, hot: int = 0, stream: Stream = Stream.NEW) -> Candidate:
    return Candidate(segment, stream, segment, live, hot)


def test_only_the_oldest_of_each_stream_are_considered() -> None:
    policy = OldestLeastLive(depth=2)
    some = [candidate(i) for i in range(5)] + [candidate(10 + i, stream=Stream.CARRIED) for i in range(5)]
    assert [c.segment for c in policy.shortlist(some)] == [0, 1, 10, 11]


def test_the_victim_has_the_least_live_value_and_then_the_greatest_age() -> None:
    policy = OldestLeastLive()
    assert policy.victim([candidate(1), candidate(2, live=50), candidate(3)]) == candidate(2, live=50)
    assert policy.victim([candidate(1, live=50, hot=20), candidate(2, live=100)]) == candidate(2)
    assert policy.victim([candidate(3), candidate(1)]) == candidate(1)
    assert policy.victim([candidate(1, live=103), candidate(2, live=100)]) == candidate(1, live=103)
    assert policy.victim([]) is None


def test_carry_over_keeps_what_is_hit_most_within_the_budget() -> None:
    policy = OldestLeastLive()
    blocks = [BlockUse(10, 0), BlockUse(10, 1), BlockUse(10, 5), BlockUse(100, 200), BlockUse(5, 1)]
    assert policy.carry(blocks, 20) == [2, 4]
    assert policy.carry(blocks, 0) == []
    assert 0 not in policy.carry(blocks, 1000)


def test_writing_more_than_the_pool_holds_evicts(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", files=2, size=32 << 20)

    async def work(store: Store) -> None:
        blocks = 2 * store.space().size // (HEADER_PAGES * 4096)
        for i in range(blocks):
            await write(store, b"%06d" % i, BIG)
        left = names(store)
        assert 0.5 * blocks / 2 < len(left) < blocks
        assert b"%06d" % (blocks - 1) in left and b"%06d" % 0 not in left
        await verify_all(store)
        assert store.evictor.counters.blocks + len(left) == blocks
        statistics = store.segments.statistics()
        assert statistics.free >= store.segments.reserve

    with_store(pool, work)
    with_store(pool, lambda store: verify_all(store))


def test_pinned_blocks_stay_and_everything_pinned_is_enospc(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "pool", files=1, size=16 << 20)

    async def work(store: Store) -> None:
        kept = make(store, 1, b"kept", Kind.DIRECTORY)
        await store.pin(kept.inode)
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
        await store.unpin(kept.inode)
        with trio.fail_after(20):
            await write(store, b"fits again", BIG)
            while not any(name == b"later" for name in names(store)):
                try:
                    await write(store, b"later", BIG)
                except NoSpaceError:
                    await trio.sleep(0.1)

    with_store(pool, work)
    with_store(pool, lambda store: verify_all(store))


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
