"""The small parts of the connectors: leases between look-up and load, spoiled keys, counters for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.connectors import leases as leases_
from kvfs.connectors import versions
from kvfs.connectors.common import Counters, State
from kvfs.connectors.leases import PAUSE_S, Leases
from kvfs.connectors.lmcache import key_of
from kvfs.connectors.metrics import Exporter
from kvfs.connectors.spoiled import Spoiled
from kvfs.errors import DeadlineError


class Client:
    """The leases of kvfs.Client: refused are those keys that are in `refused`."""

    def __init__(self) -> None:
        self.alive: set[int] = set()
        self.asked: list[list[bytes]] = []
        self.refused: set[bytes] = set()
        self.hangs = False

    def lease(self, keys: Sequence[bytes], seconds: float) -> Any:
        self.asked.append(list(keys))
        if self.hangs:
            raise DeadlineError("the daemon gave no answer")
        number = len(self.asked)
        self.alive.add(number)
        return SimpleNamespace(held=[key not in self.refused for key in keys], release=lambda: self.released(number))

    def released(self, number: int) -> None:
        self.alive.remove(number)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(leases_, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def held_by(client: Client | None, seconds: float = 10.0) -> Leases:
    connection: Any = SimpleNamespace(client=client, state=State.UP if client else State.AWAY)
    return Leases(connection, seconds)


def test_a_lease_goes_back_when_all_that_it_holds_was_loaded(clock: list[float]) -> None:
    client = Client()
    leases = held_by(client)
    leases.take([b"a", b"b"])
    leases.take([b"b", b"c"])
    assert client.alive == {1, 2}
    leases.give_back([b"a"])
    assert client.alive == {1, 2}
    leases.give_back([b"b", b"never leased"])
    assert client.alive == {2}, "of a key that two look-ups hold, the oldest lease lets go"
    leases.give_back([b"b", b"c"])
    assert client.alive == set() and leases.taken == 4


def test_a_lease_whose_time_is_over_is_forgotten(clock: list[float]) -> None:
    client = Client()
    leases = held_by(client)
    leases.take([b"a"])
    clock[0] += 10.0
    leases.take([b"b"])
    leases.give_back([b"a"])
    assert client.alive == {1, 2}, "the daemon has dropped the first by itself"
    leases.give_back([b"b"])
    assert client.alive == {1}


def test_keys_that_are_not_held_are_not_waited_for(clock: list[float]) -> None:
    client = Client()
    client.refused = {b"b"}
    leases = held_by(client)
    leases.take([b"a", b"b"])
    leases.give_back([b"a"])
    assert client.alive == set() and (leases.taken, leases.refused) == (1, 1)


def test_a_daemon_that_gives_no_answer_is_left_alone_for_a_while(clock: list[float]) -> None:
    client = Client()
    client.hangs = True
    leases = held_by(client)
    leases.take([b"a"])
    leases.take([b"a"])
    assert len(client.asked) == 1
    clock[0] += PAUSE_S
    client.hangs = False
    leases.take([b"a"])
    assert client.alive == {2}
    leases.close()
    assert client.alive == set()


def test_a_daemon_that_is_away_is_not_waited_for() -> None:
    client = Client()
    connection: Any = SimpleNamespace(client=client, state=State.READING)
    leases = Leases(connection, 10.0)
    leases.take([b"a"])
    assert client.asked == []
    connection.state = State.UP
    leases.take([b"a"])
    assert client.asked == [[b"a"]]


def test_without_leases_nothing_is_asked() -> None:
    held_by(None).take([b"a"])
    zero = Client()
    held_by(zero, 0.0).take([b"a"])
    assert zero.asked == []


def test_spoiled_keys_are_bounded_and_the_oldest_go() -> None:
    spoiled = Spoiled(2)
    spoiled.add([b"a", b"b"])
    spoiled.add([b"a", b"c"])
    assert len(spoiled) == 2 and spoiled.any_of([b"x", b"a"]) and not spoiled.any_of([b"b"])
    spoiled.discard([b"a", b"c", b"x"])
    assert not spoiled.any_of([b"a", b"c"])


@pytest.mark.parametrize("length", [1, 127])
def test_short_names_are_keys_as_they_are(length: int) -> None:
    assert key_of("m" * length) == b"m" * length


def test_long_names_are_told_apart_by_the_digest_at_their_end() -> None:
    from kvfs.client.keys import KEY_MAX

    names = ["m" * 300 + end for end in ("", "a", "b")] + ["ü" * 200]
    keys = [key_of(name) for name in names]
    assert len(set(keys)) == len(names) and {len(key) for key in keys} == {KEY_MAX}
    assert all(key[-65:-64] == b"~" for key in keys)


def test_what_was_counted_since_the_last_time_is_added() -> None:
    from prometheus_client import REGISTRY

    exporter, counters = Exporter("an engine", "a/namespace"), Counters(loaded=3)
    exporter.update(counters)
    counters.loaded += 2
    exporter.update(counters)
    Exporter("an engine", "another").update(Counters(loaded=1))
    labels = {"engine": "an engine", "namespace": "a/namespace"}
    assert REGISTRY.get_sample_value("kvfs_connector_loaded_total", labels) == 5
    assert REGISTRY.get_sample_value("kvfs_connector_hits_total", labels) == 0


def test_an_engine_that_does_not_import_is_named_with_the_versions_that_were_tried() -> None:
    error = versions.missing("no-such-engine", ("1.2", "1.3"), ImportError("no module", name="no_such"))
    assert "no-such-engine: no module (it is not installed here" in str(error) and "1.2, 1.3" in str(error)
    assert error.name == "no_such"
