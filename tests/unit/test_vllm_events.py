"""The events that vLLM's tier tells to its publisher, without vLLM: kvfs/connectors/vllm_events.py."""

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import wait_until

from kvfs.connectors import changes, vllm_events
from kvfs.connectors.vllm_events import TierEvents

KEYS = [b"%064d\0\0\0\0" % index for index in range(8)]


class Feed:
    """A subscription's double: the test says what happens."""

    def __init__(self) -> None:
        self.queue: list[object] = []
        self.opened = threading.Event()

    def __enter__(self) -> "Feed":
        self.opened.set()
        return self

    def __exit__(self, *details: object) -> None:
        pass

    def next_event(self, timeout_s: float = 0.0) -> object | None:
        return self.queue.pop(0) if self.queue else threading.Event().wait(0.001) or None


class Kvfs:
    """A connection's double: keys that are there."""

    def __init__(self) -> None:
        self.there: set[bytes] = set()
        self.asked: list[int] = []
        self.client: object | None = self
        self.options = SimpleNamespace(mount="/mnt/kv")
        self.space = "m"

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self.asked.append(len(keys))
        return [key in self.there for key in keys]


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> Feed:
    feed = Feed()
    monkeypatch.setattr(changes.kvfs, "events", lambda mount, space: feed)
    return feed


@pytest.fixture
def pool() -> Kvfs:
    return Kvfs()


@pytest.fixture
def tier(feed: Feed, pool: Kvfs) -> Iterator[TierEvents]:
    connection: Any = pool
    tier = TierEvents(connection)
    assert feed.opened.wait(30)
    yield tier
    tier.close()


def taken(tier: TierEvents) -> list[tuple[list[bytes], bool]]:
    return list(tier.take())


def test_a_load_is_told_when_its_request_is_scheduled(tier: TierEvents, pool: Kvfs) -> None:
    pool.there.update(KEYS)
    tier.loaded("r1", KEYS[:2])
    tier.loaded("r2", KEYS[2:])
    tier.loaded("r1", KEYS[3:4])
    assert taken(tier) == []
    tier.scheduled(["r1", "r3"])
    assert taken(tier) == [([KEYS[0], KEYS[1], KEYS[3]], False)]
    tier.scheduled(["r1"])
    assert taken(tier) == []


def test_a_block_is_told_once_until_all_is_cleared(tier: TierEvents, pool: Kvfs) -> None:
    pool.there.update(KEYS)
    tier.stored(KEYS[:4])
    assert taken(tier) == [(KEYS[:4], False)]
    tier.loaded("r1", KEYS[2:6])
    tier.scheduled(["r1"])
    tier.stored(KEYS[5:])
    assert taken(tier) == [(KEYS[4:], False)]
    tier.loaded("r2", KEYS)
    tier.cleared()
    tier.stored(KEYS[:1])  # it finished meanwhile: vLLM has its tokens no more
    tier.scheduled(["r2"])
    assert taken(tier) == []
    tier.loaded("r3", KEYS)
    tier.scheduled(["r3"])
    assert taken(tier) == [(KEYS, False)]


def test_a_removal_is_told_once_and_only_of_what_was_told(tier: TierEvents, feed: Feed, pool: Kvfs) -> None:
    pool.there.update(KEYS)
    tier.stored(KEYS[:4])
    assert taken(tier) == [(KEYS[:4], False)]
    pool.there.difference_update(KEYS[2:])
    feed.queue += [SimpleNamespace(key=key) for key in KEYS]
    told: list[tuple[list[bytes], bool]] = []

    def gone() -> bool:
        told.extend(taken(tier))
        return sum(len(keys) for keys, _ in told) == 2

    wait_until(gone, "the removal of two")
    assert {key for keys, _ in told for key in keys} == set(KEYS[2:4]) and all(removed for _, removed in told)
    feed.queue.append(SimpleNamespace(key=KEYS[2]))
    wait_until(lambda: not feed.queue, "the event")
    assert taken(tier) == []


def test_after_a_gap_all_are_looked_up_some_in_each_step(
    tier: TierEvents, feed: Feed, pool: Kvfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_events, "_LOOKUPS", 3)
    tier.stored(KEYS)
    told = taken(tier)
    feed.queue.append(SimpleNamespace(lost=5))

    def gone() -> bool:
        told.extend(taken(tier))
        return sum(len(keys) for keys, removed in told if removed) == len(KEYS)

    wait_until(gone, "the removal of all")
    assert max(pool.asked) == 3
    assert {key for keys, removed in told if removed for key in keys} == set(KEYS)


def test_changes_that_nobody_takes_are_bounded_and_none_is_lost(
    tier: TierEvents, pool: Kvfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_events, "_CHANGED_MAX", 20)
    wait_until(lambda: tier._all_changed, "the begin")
    pool.there.update(KEYS)
    tier.stored(KEYS)
    assert taken(tier) == [(KEYS, False)]
    pool.there.clear()
    tier._note(KEYS[:1], False)
    for number in range(1000):
        tier._note([b"%d" % number], False)
        assert len(tier._changed) <= 20
    ((gone, removed),) = taken(tier)
    assert removed and set(gone) == set(KEYS)


def test_all_have_their_turn_though_gaps_and_changes_go_on(
    tier: TierEvents, pool: Kvfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than one step's look-ups wait, and each step brings another gap, or as many changes as a step takes."""
    monkeypatch.setattr(vllm_events, "_LOOKUPS", 4)
    pool.there.update(KEYS)
    tier.stored(KEYS)
    taken(tier)
    for brought in ((), KEYS[:6]):
        pool.there = set(KEYS)
        tier.stored(KEYS)
        taken(tier)
        for last in KEYS[6:]:
            pool.there.discard(last)
            told: list[tuple[list[bytes], bool]] = []
            for _ in range(2 * len(KEYS)):
                tier._note(brought, True)
                told += taken(tier)
            assert told == [([last], True)]
    assert max(pool.asked) <= 4


def test_while_kvfs_is_away_nothing_is_said_to_be_gone(tier: TierEvents, feed: Feed, pool: Kvfs) -> None:
    tier.stored(KEYS)
    pool.client = None
    feed.queue.append(SimpleNamespace(lost=5))
    wait_until(lambda: not feed.queue, "the gap")
    assert taken(tier) == [(KEYS, False)] and taken(tier) == []
    pool.client = pool
    wait_until(lambda: taken(tier) != [], "the removal")


def test_loads_of_requests_that_never_come_are_bounded(tier: TierEvents) -> None:
    for index in range(vllm_events._REQUESTS + 5):
        tier.loaded(f"r{index}", KEYS[:1])
    tier.scheduled([f"r{index}" for index in range(5)])
    assert taken(tier) == []
    tier.scheduled(["r5"])
    assert taken(tier)[0] == ([KEYS[0]], False)
