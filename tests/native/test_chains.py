"""Chains by real clients on a real mount: parents that they hand over, orphans, and blocks that come back."""

from __future__ import annotations

import pytest
from helpers import wait_until

import kvfs

BLOCK = 64 << 10


def numbers(pool):
    counters = pool.status()["counters"]
    return {name: counters[name] for name in ("parents_known", "orphans", "ghosts", "ghosts_returned")}


def chain(name, count):
    return [f"{name}-{i:04d}".encode() for i in range(count)]


def put(client, keys, **options):
    return client.put([(key, key * (BLOCK // len(key))) for key in keys], parents=[None, *keys[:-1]], **options)


@pytest.mark.timeout(240)
def test_parents_are_known_and_orphans_follow_what_goes(own_pool):
    pool = own_pool(files=2, size="128M")
    with kvfs.connect(pool.mount, "llama", gpu=None) as client:
        keys = chain("a", 200)
        put(client, keys)
        assert numbers(pool) == {"parents_known": 199, "orphans": 0, "ghosts": 0, "ghosts_returned": 0}
        more = chain("b", 50)  # behind a block of an earlier call
        client.put([(key, b"x") for key in more], parents=[keys[-1], *more[:-1]])
        assert numbers(pool)["parents_known"] == 249
        client.delete([keys[100]])
        # Of all behind it the next one alone loses its parent.
        assert numbers(pool) == {"parents_known": 247, "orphans": 149, "ghosts": 0, "ghosts_returned": 0}
        assert client.get(keys[150])
        client.put([(keys[100], b"again")], parents=[keys[99]])
        client.put([(keys[150], b"stored again")], parents=[keys[149]])
        assert numbers(pool)["parents_known"] == 248


@pytest.mark.timeout(240)
def test_what_was_evicted_is_remembered_with_what_was_behind_it(own_pool):
    pool = own_pool(files=2, size="64M")
    with kvfs.connect(pool.mount, "llama", gpu=None) as client:
        first = chain("first", 100)
        put(client, first)
        for turn in range(60):
            put(client, chain(f"turn-{turn}", 60))
        there = client.exists(first)
        gone = [key for key, found in zip(first, there, strict=True) if not found]
        before = numbers(pool)
        # Some may lie in a segment that is still open.
        assert len(gone) > 50 and before["ghosts"] >= len(gone) and before["ghosts_returned"] == 0
        client.put([(key, b"again") for key in gone])
        after = numbers(pool)
        assert after["ghosts_returned"] == len(gone)
        assert after["parents_known"] > before["parents_known"]  # as the ghosts had them
        pool.umount()
        pool.start()
    with kvfs.connect(pool.mount, "llama", gpu=None) as client:
        assert client.get(first[-1])
        assert numbers(pool)["ghosts"] == 0  # they are of this mount


@pytest.mark.timeout(240)
def test_blocks_that_are_done_with_go_first_and_come_back_by_a_use(own_pool):
    """A writer that had to wait makes the evictor work ahead: up to nine segments of 15 such blocks go at once."""
    pool, count = own_pool(files=2, size="64M"), 240

    def uses():
        return pool.status()["counters"]["uses"]

    with kvfs.connect(pool.mount, "llama", gpu=None) as client:
        done, others, again = (chain(name, count) for name in ("done", "others", "again"))
        for keys in (others, again, done):  # those that are done with are the youngest
            client.put([(key, b"x" * BLOCK) for key in keys])
        before = uses()
        assert all(client.get(key) is not None for key in done)  # and that is no use after the hint
        assert client.done(done + again) == 2 * count
        assert client.done([b"no such block"]) == 0 and client.done([]) == 0
        wait_until(lambda: uses() >= before + count, "the hits before the hint to be told with it")
        assert all(client.get(key) is not None for key in again)
        # Hits are told with a later call, once a second.
        wait_until(lambda: client.get(again[0]) and uses() >= before + 2 * count, "the hits to be told", interval_s=0.2)
        turn = 0
        while sum(client.exists(done)) > count * 3 // 4:
            assert turn < 600, "nothing was evicted"
            put(client, chain(f"turn-{turn}", 6))
            turn += 1
        left = [sum(client.exists(keys)) for keys in (others, again)]
        assert min(left) > count - 20, left  # some lie in a segment with others
