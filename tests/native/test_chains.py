"""Chains by real clients on a real mount: parents that they hand over, orphans, and blocks that come back."""

from __future__ import annotations

import pytest

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
