"""Leases: deadlines, and the bounds of clients and of all of them. The clock is moved by the tests."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trio
from store_pools import OPTIONS, make_pool, pass_time, with_store, write

from kvfs.lent import Part
from kvfs.plane import OpenState
from kvfs.store import leases as leases_module
from kvfs.store.leases import LEASE_MAX_MS, Lessee
from kvfs.store.store import Store
from kvfs.types import COUNTER_BITS, InodeNumber

SIZE = 3 * 4096
PAGES = 4


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return make_pool(tmp_path / "pool")


def take(
    store: Store, lessee: Lessee, inodes: Sequence[int], milliseconds: int = 1000, number: int = 0
) -> tuple[int, list[int]]:
    asked = Part(array("Q", inodes).tobytes())
    lease, held = store.leases.take(lessee, number, milliseconds, asked)
    return lease, list(held)


async def blocks(store: Store, count: int) -> list[InodeNumber]:
    return [(await write(store, b"%d" % i, SIZE)).inode for i in range(count)]


def is_leased(store: Store, inode: int) -> bool:
    return store.plane.inode_is_open(inode) == OpenState.LEASED


def figures(store: Store) -> tuple[int, int, int, int]:
    found = store.leases.statistics()
    return found.open, found.clients, found.blocks, found.bytes // 4096


def test_a_lease_ends_at_its_deadline_and_the_longest_after_an_hour(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LEASE_MAX_MS == 3_600_000
    monkeypatch.setattr(leases_module, "LEASE_MAX_MS", 60_000)  # an hour of the test's clock takes minutes

    async def work(store: Store) -> None:
        inodes, one, two = await blocks(store, 3), Lessee(), Lessee()
        short, held = take(store, one, inodes[:2], 2000)
        assert held == [1, 1] and short >> COUNTER_BITS == store.epoch
        # One that is sooner than those before; one that is added to a lease lasts as long as that.
        sooner, _ = take(store, two, inodes[1:2], 500)
        assert take(store, one, inodes[2:], 60_000, short) == (short, [1])
        longest, _ = take(store, two, inodes[:1], 10 * LEASE_MAX_MS)
        assert figures(store) == (3, 2, 3, 3 * PAGES)
        await pass_time(1)
        assert figures(store) == (2, 2, 3, 3 * PAGES) and not store.leases.release(two, sooner)
        await pass_time(1.5)
        assert figures(store) == (1, 1, 1, PAGES) and is_leased(store, inodes[0])
        await pass_time(60 - 4)
        assert is_leased(store, inodes[0])
        await pass_time(3)
        assert figures(store) == (0, 0, 0, 0) and not is_leased(store, inodes[0])
        assert store.leases.statistics().expired == 3 and not store.leases.release(two, longest)
        assert (one.blocks, one.pages, two.blocks, two.pages) == (0, 0, 0, 0)

    with_store(pool, work, jumping=True)


def test_a_client_that_leaves_and_a_pool_that_is_closed_end_all_leases(pool: Path) -> None:
    async def work(store: Store) -> None:
        inodes, one, two = await blocks(store, 2), Lessee(), Lessee()
        for lessee in (one, two):
            take(store, lessee, inodes, 60_000)
            take(store, lessee, inodes, 60_000)
        store.leases.leave(one)
        assert figures(store) == (2, 1, 2, 2 * PAGES)
        store.leases.leave(one)
        store.leases.close()
        assert figures(store) == (0, 0, 0, 0)
        take(store, one, inodes, 60_000)  # the store's end is this one's

    with_store(pool, work, OPTIONS)


@pytest.mark.parametrize(
    ("bound", "value", "expected"),
    [
        ("_LEASES_MAX", 2, [[1, 1, 1], [1, 1, 1], [0, 0, 0]]),
        ("_ALL_LEASES_MAX", 1, [[1, 1, 1], [0, 0, 0], [0, 0, 0]]),
        ("_BLOCKS_MAX", 4, [[1, 1, 1], [1, 0, 0], [0, 0, 0]]),
        ("_ALL_BLOCKS_MAX", 5, [[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
        ("_CLIENT_SHARE", None, [[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
        ("_POOL_SHARE", None, [[1, 1, 0], [1, 1, 0], [1, 1, 0]]),
    ],
)
def test_over_a_bound_a_block_is_not_held_and_nothing_else_happens(
    pool: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int | None, expected: list[list[int]]
) -> None:
    async def work(store: Store) -> None:
        inodes, lessee = await blocks(store, 3), Lessee()
        size = store.segments.usable * store.segments.area
        # The part of the pool that so many blocks are.
        held = {"_CLIENT_SHARE": 5, "_POOL_SHARE": 2}.get(bound, 0) * PAGES
        monkeypatch.setattr(leases_module, bound, value if value is not None else size // (held + PAGES - 1))
        assert [take(store, lessee, inodes)[1] for _ in range(3)] == expected
        refused = 9 - sum(map(sum, expected))
        found = store.leases.statistics()
        assert (found.granted, found.refused) == (9 - refused, refused)
        store.leases.leave(lessee)
        assert take(store, lessee, inodes)[1] == expected[0], "and all is free again"

    with_store(pool, work)


ALICE, BOB, CAROL = 41_002, 41_003, 41_004


@pytest.mark.parametrize(
    ("bound", "value"), [("_ALL_LEASES_MAX", 24), ("_ALL_BLOCKS_MAX", 24), ("_POOL_SHARE", None)]
)  # fmt: skip
def test_no_users_take_all_leases_by_clients_or_by_the_attribute(
    pool: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int | None
) -> None:
    async def work(store: Store) -> None:
        inodes = await blocks(store, 24)
        size = store.segments.usable * store.segments.area
        monkeypatch.setattr(leases_module, bound, value if value is not None else size // (24 * PAGES))
        monkeypatch.setattr(leases_module, "_CLIENT_SHARE", 1)

        def keep_all(user: int) -> int:
            return sum(store.leases.keep(user, inode, 60) for inode in inodes)

        # By the attribute, and by as many clients as there are blocks.
        alice, clients = keep_all(ALICE), [Lessee(BOB) for _ in inodes]
        assert 10 <= alice <= 12, "half, where nobody else has any"
        room = store.leases.statistics().blocks
        bob = sum(take(store, client, [inode])[1][0] for client, inode in zip(clients, inodes[::-1], strict=True))
        # A block that two lease counts once for the pool's room.
        assert 4 <= bob <= 12 and store.leases.statistics().blocks >= room
        assert keep_all(CAROL) >= 1, "and each of many finds some"
        for client in clients:
            store.leases.leave(client)
        for inode in inodes:
            for user in (ALICE, CAROL):
                store.leases.drop_kept(user, inode)
        assert figures(store) == (0, 0, 0, 0) and not store.leases._sums
        assert keep_all(BOB) == alice

    with_store(pool, work)


def test_a_flood_of_leases_leaves_no_deadlines(pool: Path) -> None:
    async def work(store: Store) -> None:
        (inode,) = await blocks(store, 1)
        ways: list[Callable[[Lessee, int], object]] = [
            store.leases.release,
            lambda lessee, number: store.leases.leave(lessee),
        ]
        for turn in range(2000):
            lessee = Lessee()
            number, held = take(store, lessee, [inode], 60_000)
            assert held == [1]
            ways[turn % 2](lessee, number)
        assert len(store.leases._deadlines) < 100 and figures(store) == (0, 0, 0, 0)
        await trio.lowlevel.checkpoint()

    with_store(pool, work)


def test_another_s_number_is_nobody_s(pool: Path) -> None:
    async def work(store: Store) -> None:
        (inode,) = await blocks(store, 1)
        one, two = Lessee(), Lessee()
        number, _ = take(store, one, [inode])
        assert not store.leases.release(two, number) and take(store, two, [inode], 1000, number) == (0, [0])
        assert store.leases.release(one, number) and not is_leased(store, inode)

    with_store(pool, work)


# ---- blocks of other nodes ----


def ask_others(store: Store, lessee: Lessee, number: int, kept: int, ended: list[str], *, wanted: int = 0) -> int:
    with store.leases.ask_others(lessee, number, 1000, wanted or kept) as asking:
        asking.add(min(kept, asking.blocks), lambda: ended.append("ended"))
        return asking.enter()


def test_what_other_nodes_keep_ends_with_the_lease(pool: Path) -> None:
    async def work(store: Store) -> None:
        (inode,), one, ended = await blocks(store, 1), Lessee(), list[str]()
        # Asked for first, then with a number; and the other way round.
        others = ask_others(store, one, 0, 3, ended)
        assert others and take(store, one, [inode], 1000, others) == (others, [1]) and one.blocks == 4
        own, _ = take(store, one, [inode])
        assert ask_others(store, one, own, 2, ended) == own and one.blocks == 7
        assert store.leases.release(one, others) and ended == ["ended"] and one.blocks == 3
        await pass_time(1.1)
        assert ended == ["ended"] * 2 and not store.leases.release(one, own)
        assert ask_others(store, one, own, 2, ended) == 0, "it has ended: nothing is asked for"
        assert ask_others(store, one, 0, 1, ended) and ended == ["ended"] * 2
        store.leases.leave(one)
        assert ended == ["ended"] * 3 and (one.blocks, one.pages) == (0, 0)

    with_store(pool, work, jumping=True)


def test_others_are_asked_for_the_rest_of_a_leases_time(pool: Path) -> None:
    async def work(store: Store) -> None:
        (inode,), one = await blocks(store, 1), Lessee()
        with store.leases.ask_others(one, 0, 1 << 31, 1) as asking:
            assert asking.seconds == pytest.approx(60, abs=1)  # of other nodes a minute at most
        number, _ = take(store, one, [inode], 10_000)
        await pass_time(4)
        with store.leases.ask_others(one, number, 60_000, 1) as asking:
            assert asking.seconds == pytest.approx(6, abs=1)
        assert one.blocks == 1

    with_store(pool, work, jumping=True)


def test_what_other_nodes_keep_is_bounded_also_while_they_are_asked(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "_BLOCKS_MAX", 10)

    async def work(store: Store) -> None:
        one, ended = Lessee(), list[str]()
        with store.leases.ask_others(one, 0, 1000, 8) as asking, store.leases.ask_others(one, 0, 1000, 8) as second:
            assert (asking.blocks, second.blocks) == (8, 2)
            second.add(2, lambda: ended.append("second"))  # not entered, as when its client hangs up
        assert ended == ["second"] and one.blocks == 0
        number = ask_others(store, one, 0, 10, ended)
        assert number and one.blocks == 10
        with store.leases.ask_others(one, number, 1000, 1) as asking:
            assert asking.blocks == 0
        # It ends while others are asked.
        with store.leases.ask_others(one, 0, 1000, 0):
            pass
        assert store.leases.release(one, number)
        number = ask_others(store, one, 0, 1, ended)
        with store.leases.ask_others(one, number, 1000, 1) as asking:
            store.leases.release(one, number)
            asking.add(1, lambda: ended.append("late"))
            assert asking.enter() == 0
        assert ended[-1] == "late" and one.blocks == 0
        assert store.leases.statistics().refused >= 8

    with_store(pool, work, jumping=True)
