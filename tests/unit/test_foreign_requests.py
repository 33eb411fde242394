"""Requests about other nodes' blocks: sorted by owner, put together again, and refused where they break a rule."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import trio
import trio.testing
from kvfs._native import ffi
from store_pools import make_pool, with_store

from kvfs.frames import FrameError
from kvfs.frontend.foreign import ForeignRequests, Kept
from kvfs.lent import Part
from kvfs.podmap import PodMap
from kvfs.store.leases import Lessee
from kvfs.store.store import Store

OWN = 0


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def blocks(*numbers: int) -> bytes:
    """Of each number a block, in a segment of that number."""
    return b"".join(struct.pack("<16sII", key(number), number, 1) for number in numbers)


class Map:
    """A double of the pod map: segment n belongs to slot n % 4."""

    def __init__(self) -> None:
        self.notes: list[tuple[int, bytes]] = []

    def by_owner(self, given: memoryview) -> dict[int, tuple[list[int], list[bytes]]]:
        owners: dict[int, tuple[list[int], list[bytes]]] = {}
        for index, (one, segment, _) in enumerate(struct.iter_unpack("<16sII", given)):
            if segment % 4 != OWN:
                indexes, keys = owners.setdefault(segment % 4, ([], []))
                indexes.append(index)
                keys.append(one)
        return owners

    def note(self, what: int, given: Part) -> None:
        self.notes.append((what, bytes(ffi.buffer(given.data, given.size))))


class Others:
    """A double of other nodes. Each keeps its odd keys, and answers two keys at a time; slot 3 keeps nothing."""

    def __init__(self) -> None:
        self.used: dict[int, list[bytes]] = {}
        self.released: list[int] = []
        self.hold_up: Callable[[], None] = lambda: None

    def fresh(self) -> None:
        self.hold_up()

    def keep(self, wanted: Mapping[int, Sequence[bytes]], seconds: float) -> Iterable[Kept]:
        assert 0 < seconds <= 1
        self.hold_up()
        return [
            Kept(
                slot, [one[0] % 2 == 1 and slot != 3 for one in keys[at : at + 2]], partial(self.released.append, slot)
            )
            for slot, keys in wanted.items()
            for at in range(0, len(keys), 2)
        ]

    def tell_used(self, slot: int, keys: Sequence[bytes]) -> None:
        self.used.setdefault(slot, []).extend(keys)


def requests(store: Store) -> tuple[ForeignRequests, Map, Others]:
    podmap, others = Map(), Others()
    return ForeignRequests(cast("PodMap", podmap), store.leases, others), podmap, others


def test_a_lease_is_asked_of_each_owner_and_answered_in_order(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        foreign, _, others = requests(store)
        lessee = Lessee()
        numbers = [1, 2, 3, 4, 5, 9, 13, 17, 7, 6]  # slot 1 is asked for five, 4 is this node's own
        answer = await foreign.lease(lessee, struct.pack("<QII", 0, 1000, 0) + blocks(*numbers))
        (number,) = struct.unpack_from("<Q", answer)
        assert number and list(answer[8:]) == [1, 0, 0, 0, 1, 1, 1, 1, 0, 0]
        assert lessee.blocks == 5 and store.leases.release(lessee, number)
        assert len(others.released) == 3 and lessee.blocks == 0
        answer = await foreign.lease(lessee, struct.pack("<QII", 0, 1000, 0) + blocks(3, 7))
        assert answer == bytes(8 + 2) and not lessee.leases

    with_store(make_pool(tmp_path / "pool"), work)


def test_a_client_that_is_gone_while_others_are_asked_leaves_no_lease(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        foreign, _, others = requests(store)
        lessee, asked = Lessee(), trio.Event()
        token = trio.lowlevel.current_trio_token()
        others.hold_up = lambda: trio.from_thread.run_sync(asked.set, trio_token=token)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(foreign.lease, lessee, struct.pack("<QII", 0, 1000, 0) + blocks(1, 5))
            await asked.wait()
            nursery.cancel_scope.cancel()
        store.leases.leave(lessee)
        assert others.released == [1] and (lessee.blocks, store.leases.statistics().open) == (0, 0)

    with_store(make_pool(tmp_path / "pool"), work)


def test_a_barrier_of_a_client_that_is_gone_counts_until_its_thread_ends(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        foreign, _, others = requests(store)
        asked, over, limit = trio.Event(), threading.Event(), trio.CapacityLimiter(1)
        token = trio.lowlevel.current_trio_token()

        def hold_up() -> None:
            trio.from_thread.run_sync(asked.set, trio_token=token)
            assert over.wait(30)

        async def ask() -> None:
            async with limit:
                await foreign.fresh()

        others.hold_up = hold_up
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await asked.wait()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                try:
                    await trio.testing.wait_all_tasks_blocked(0.05)
                    assert limit.borrowed_tokens == 1
                finally:
                    over.set()
        assert limit.borrowed_tokens == 0

    with_store(make_pool(tmp_path / "pool"), work)


def test_a_touch_goes_to_the_owners_and_hits_and_bad_blocks_to_the_map(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        foreign, podmap, others = requests(store)
        for what in (1, 2, 3):
            foreign.note(struct.pack("<II", what, 3) + blocks(1, 2, 5))
        assert others.used == {1: [key(1), key(5)], 2: [key(2)]}
        assert podmap.notes == [(1, blocks(1, 2, 5)), (3, blocks(1, 2, 5))]

    with_store(make_pool(tmp_path / "pool"), work)


def test_frames_that_break_a_rule_are_refused(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        foreign, podmap, others = requests(store)
        one = blocks(1)
        for what, count, rest in (
            (0, 1, one),
            (4, 1, one),
            (1, 0, b""),
            (1, 2, one),
            (1, 1, one[:-1]),
            (2, 1, one * 2),
        ):
            with pytest.raises(FrameError):
                foreign.note(struct.pack("<II", what, count) + rest)
        for milliseconds, reserved, rest in (
            (0, 0, one),
            (1, 1, one),
            (1, 0, b""),
            (1, 0, one[:-1]),
            (1, 0, one + b"x"),
        ):
            with pytest.raises(FrameError):
                await foreign.lease(Lessee(), struct.pack("<QII", 0, milliseconds, reserved) + rest)
        for short in (b"", bytes(7)):
            with pytest.raises(struct.error):
                foreign.note(short)
            with pytest.raises(struct.error):
                await foreign.lease(Lessee(), short)
        assert not podmap.notes and not others.used

    with_store(make_pool(tmp_path / "pool"), work)
