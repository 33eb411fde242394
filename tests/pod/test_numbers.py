"""Numbers of a pod's node: its slot in each, above all that it has seen, and a new epoch before they run out."""

from __future__ import annotations

from pathlib import Path

import trio
from pods import make_pod

from kvfs.store.store import Store
from kvfs.types import COUNTER_BITS, SLOT_BITS, SLOT_STEP


def test_numbers_have_the_slot_and_rise_over_what_was_seen(tmp_path: Path) -> None:
    pools = make_pod(tmp_path, nodes=2, joined=2)

    async def main() -> None:
        async with Store.open(pools[1]) as store:
            names = store.plane.names
            first = names.next_version()
            assert first % SLOT_STEP == 1 and first >> COUNTER_BITS == store.epoch
            assert names.next_inode() % SLOT_STEP == 1
            others = (first >> SLOT_BITS) + 1000 << SLOT_BITS
            names.seen(others)
            assert names.next_version() == others + SLOT_STEP + 1
            names.seen(first)
            assert names.next_version() == others + 2 * SLOT_STEP + 1
            # An epoch that cannot be is no node's.
            names.seen((1 << 63) - 1)
            assert names.next_version() == others + 3 * SLOT_STEP + 1

    trio.run(main)


def test_a_new_epoch_is_taken_while_the_pool_is_used(tmp_path: Path) -> None:
    (pool,) = make_pod(tmp_path, nodes=2, joined=1)

    async def main() -> int:
        async with Store.open(pool) as store:
            before = store.plane.names.next_version()
            await store.raise_epoch()
            after = store.plane.names.next_version()
            assert after > before and after >> COUNTER_BITS > before >> COUNTER_BITS and after % SLOT_STEP == 0
            return after

    last = trio.run(main)

    async def again() -> None:
        async with Store.open(pool) as store:
            assert store.plane.names.next_version() > last and store.epoch > last >> COUNTER_BITS

    trio.run(again)


def test_a_node_opens_its_own_segments_alone(tmp_path: Path) -> None:
    pools = make_pod(tmp_path, nodes=3, joined=3)

    async def main() -> None:
        owned: list[set[int]] = []
        for slot, pool in enumerate(pools):
            async with Store.open(pool) as store:
                own = {segment.index for segment in store.segments.own}
                assert own == set(store.config.segments_of(slot))
                assert all(segment.foreign == (segment.index not in own) for segment in store.segments.all)
                owned.append(own)
        assert not owned[0] & owned[1] and not owned[1] & owned[2] and not owned[0] & owned[2]

    trio.run(main)
