"""Blocks that hints of vLLM's name: found by the end of their hash, in order, within bounds of room and time."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import wait_until

from kvfs.client.events import Gap, Reason, Removed, Stored
from kvfs.connectors import vllm_ahead
from kvfs.connectors.vllm_ahead import Ahead, Index
from kvfs.connectors.vllm_hints import Hint, Kind
from kvfs.errors import NotMountedError


def key_of(number: int, group: int = 0) -> bytes:
    return bytes([7]) * 24 + number.to_bytes(8, "big") + group.to_bytes(4, "big")


class Pool:
    """A namespace's list and events; away: it has neither."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.lists = 0
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.is_away = False

    def list(self) -> Iterator[bytes]:
        self.lists += 1
        yield from self.keys

    def events(self, path: object, space: object) -> Pool:
        if self.is_away:
            raise NotMountedError("away")
        return self

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def next_event(self, timeout_s: float) -> Any:
        try:
            return self.told.get(timeout=0.01)
        except queue.Empty:
            return None

    def stored(self, key: bytes) -> None:
        self.told.put(Stored(1, key, b"", 1, 0, Reason.WRITTEN))

    def removed(self, key: bytes) -> None:
        self.told.put(Removed(1, key, b"", 1, 0, Reason.EVICTED))


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    made = Pool()
    monkeypatch.setattr(vllm_ahead.kvfs, "events", made.events)
    monkeypatch.setattr(vllm_ahead, "_WAIT_S", 0.01)
    return made


@pytest.fixture
def connection(pool: Pool) -> Any:
    return SimpleNamespace(client=pool, space="model", options=SimpleNamespace(mount="/mnt", timeout_s=1.0))


@pytest.fixture
def ahead(connection: Any) -> Iterator[Ahead]:
    made = Ahead(connection, 8)
    yield made
    made.close()


def hint(*numbers: int, seconds: float = 60.0) -> Hint:
    return Hint(Kind.AHEAD, seconds, numbers)


def taken(ahead: Ahead) -> tuple[list[bytes], int]:
    wait_until(ahead.has_work, "the list")
    keys, until, _, refused = ahead.take()
    ahead.started(keys, until)
    return keys, refused


def test_keys_are_found_by_a_list_and_then_by_events(connection: Any, pool: Pool) -> None:
    pool.keys = [key_of(1), key_of(1, group=1), key_of(2)]
    index = Index(connection)
    assert index.find(1) == () and not index.is_whole and not pool.lists
    index.start()
    index.start()
    wait_until(lambda: index.is_whole, "the list")
    assert index.find(1) == (key_of(1), key_of(1, group=1)) and index.find(3) == ()
    pool.stored(key_of(3))
    pool.stored(key_of(3))
    pool.removed(key_of(1))
    pool.removed(key_of(9))
    wait_until(lambda: index.find(3) == (key_of(3),) and index.find(1) == (key_of(1, group=1),), "the events")
    assert pool.lists == 1
    pool.keys = [key_of(4)]
    pool.told.put(Gap(5, 17))
    wait_until(lambda: index.find(4) == (key_of(4),) and index.find(3) == (), "another list")
    assert pool.lists == 2
    index.close()


def test_of_a_namespace_that_is_too_large_the_newest_are_known(
    connection: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_ahead, "HASHES_MAX", 10)
    pool.keys = [key_of(number) for number in range(100)]
    index = Index(connection)
    index.start()
    wait_until(lambda: index.is_whole, "the list")
    pool.stored(key_of(200))
    wait_until(lambda: index.find(200) != (), "the newest")
    assert sum(index.find(number) != () for number in range(300)) == 10
    index.close()


def test_without_kvfs_hints_wait_until_their_time_is_over(ahead: Ahead, pool: Pool) -> None:
    pool.is_away = True
    assert ahead.want(hint(1, 2, 3, seconds=0.05), None) == 0
    refused = 0
    deadline = time.monotonic() + 60
    while not refused and time.monotonic() < deadline:
        assert not ahead.has_work()
        keys, _, _, refused = ahead.take()
        assert keys == []
    assert refused == 3 and ahead.take()[3] == 0


def test_blocks_are_taken_in_the_order_of_the_hint_with_all_groups_of_layers(ahead: Ahead, pool: Pool) -> None:
    pool.keys = [key_of(number, group) for number in range(4) for group in range(2)]
    assert ahead.want(hint(3, 99, 1), "a filter") == 0
    assert taken(ahead) == ([key_of(3), key_of(3, 1), key_of(1), key_of(1, 1)], 1)
    assert not ahead.has_work()


def test_no_more_is_ahead_than_there_is_room_for_until_it_was_used(ahead: Ahead, pool: Pool) -> None:
    pool.keys = [key_of(number) for number in range(20)]
    ahead.want(hint(*range(12)), None)
    assert taken(ahead) == ([key_of(number) for number in range(8)], 0)
    assert taken(ahead) == ([], 4)
    ahead.want(hint(0, 1, 12), None)
    assert taken(ahead) == ([], 3)
    assert ahead.used([key_of(0), key_of(1), key_of(15)]) == 2
    ahead.failed([key_of(2), key_of(16)])
    ahead.want(hint(3, 13, 14, 15), None)
    assert taken(ahead) == ([key_of(13), key_of(14), key_of(15)], 0)
    assert ahead.used([key_of(0)]) == 0


def test_blocks_that_are_in_memory_already_take_no_room(ahead: Ahead, pool: Pool) -> None:
    pool.keys = [key_of(number) for number in range(20)]
    ahead.want(hint(*range(12)), None)
    wait_until(ahead.has_work, "the list")
    keys, until, _, refused = ahead.take()
    assert keys == [key_of(number) for number in range(8)] and refused == 0
    ahead.started(keys[4:], until)
    assert taken(ahead) == ([key_of(number) for number in range(8, 12)], 0)


def test_room_that_nobody_uses_comes_back_with_time(ahead: Ahead, pool: Pool) -> None:
    pool.keys = [key_of(number) for number in range(20)]
    ahead.want(hint(*range(8), seconds=60), None)
    keys, _ = taken(ahead)
    ahead.failed(keys)
    ahead.started(keys, time.monotonic() - 1)
    ahead.want(hint(*range(10, 18)), None)
    assert taken(ahead) == ([key_of(number) for number in range(10, 18)], 0)


def test_room_comes_back_behind_a_block_that_has_more_time(ahead: Ahead, pool: Pool) -> None:
    """Until when a block is waited for is its hint's: the first of them may have the longest time."""
    pool.keys = [key_of(number) for number in range(20)]
    ahead.started([key_of(0)], time.monotonic() + 600)
    ahead.started([key_of(number) for number in range(1, 8)], time.monotonic() - 1)
    ahead.want(hint(*range(8, 20)), None)
    assert taken(ahead) == ([key_of(number) for number in range(8, 15)], 0)
    assert taken(ahead) == ([], 5)


def test_hashes_that_are_not_there_take_their_part_of_a_step(
    ahead: Ahead, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_ahead, "_STEP_HASHES", 100)
    pool.keys = [key_of(250)]
    assert ahead.want(hint(*range(300)), None) == 0
    assert [taken(ahead) for _ in range(3)] == [([], 100), ([], 100), ([key_of(250)], 99)]
    assert not ahead.has_work()


def test_hashes_that_wait_are_bounded_in_sum(ahead: Ahead, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_ahead, "_WAITING_MAX", 10)
    assert ahead.want(hint(*range(6)), None) == 0
    assert ahead.want(hint(*range(10, 15)), None) == 5
    assert ahead.want(hint(*range(20, 24), seconds=0.001), None) == 0
    assert taken(ahead) == ([], 6)
    time.sleep(0.01)
    assert ahead.take()[3] == 4
    assert ahead.want(hint(*range(10)), None) == 0
    assert taken(ahead) == ([], 10)
    ahead.started([key_of(number) for number in range(8)], time.monotonic() + 600)
    assert ahead.want(hint(*range(20, 30)), None) == 0 and taken(ahead) == ([], 10)
    assert ahead.want(hint(*range(40, 50)), None) == 0


def test_of_keys_whose_hashes_end_alike_the_newest_are_known(connection: Any) -> None:
    index = Index(connection)
    keys = [key_of(1, group) for group in range(1000)]
    for key in keys:
        index.add(key)
    assert index.find(1) == tuple(keys[-vllm_ahead._KEYS_A_HASH :])
    for key in keys:
        index.remove(key)
    assert index.find(1) == ()


def test_after_a_gap_the_list_is_made_at_once(connection: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only an end of kvfs is waited for."""
    monkeypatch.setattr(vllm_ahead, "_WAIT_S", 1000.0)
    monkeypatch.setattr(pool, "next_event", lambda timeout_s: pool.told.get(timeout=60))
    index = Index(connection)
    index.start()
    for lists in range(2, 5):
        wait_until(lambda: index.is_whole, "the list")
        pool.told.put(Gap(5, 17))
        wait_until(lambda lists=lists: pool.lists == lists, "another list")  # type: ignore[misc]
    index._stop.set()
    pool.stored(key_of(1))
    index.close()


def test_a_long_hint_takes_several_steps_and_a_flood_is_refused(
    ahead: Ahead, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_ahead, "_STEP_KEYS", 3)
    monkeypatch.setattr(vllm_ahead, "_HINTS_MAX", 2)
    pool.keys = [key_of(number) for number in range(20)]
    assert ahead.want(hint(*range(5)), None) == 0
    assert ahead.want(hint(10, 11), None) == 0
    assert ahead.want(hint(*range(1000)), None) == 1000
    steps = [taken(ahead)[0] for _ in range(3)]
    assert steps == [[key_of(0), key_of(1), key_of(2)], [key_of(3), key_of(4)], [key_of(10), key_of(11)]]
    assert not ahead.has_work()
