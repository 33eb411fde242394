"""The engine's part of `kvfs pod doctor`: each thing that is wrong is found, and said with its mend."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from memory_engine import MemoryServer

from kvfs.pod.doctor import examine, examine_clock, examine_engine, examine_information, examine_latency
from kvfs.pod.engine import Information, Names
from kvfs.pod.url import parse_url

GOOD = Information("redis", (7, 0, 15), "standalone", "master", "noeviction", 1 << 20, 1 << 30, 1.0, 5, "x")


def states(found: Information) -> dict[str, str]:
    return {finding.name: finding.state for finding in examine_information("redis://h", found)}


def test_a_good_engine_has_nothing_to_mend() -> None:
    assert set(states(GOOD).values()) == {"ok"}
    assert examine_latency([0.0002] * 50).state == "ok" and examine_clock(-0.1).state == "ok"


@pytest.mark.parametrize(
    ("change", "name", "state"),
    [
        ({"version": (6, 0, 16)}, "engine", "missing"),
        ({"product": "valkey", "version": (8, 0, 1)}, "engine", "ok"),
        ({"eviction_policy": "allkeys-lru"}, "engine eviction", "missing"),
        ({"eviction_policy": "volatile-ttl"}, "engine eviction", "missing"),
        ({"memory": 1 << 30}, "engine memory", "missing"),
        ({"memory_max": 0}, "engine memory", "note"),
    ],
)
def test_each_thing_that_is_wrong_is_found(change: dict[str, object], name: str, state: str) -> None:
    assert states(replace(GOOD, **change))[name] == state  # type: ignore[arg-type]


def test_a_slow_engine_and_a_clock_that_is_off_are_found() -> None:
    assert examine_latency([0.001] * 45 + [0.05] * 5).state == "missing"
    assert "2000 ms ahead" in examine_clock(2.0).found and examine_clock(-2.0).state == "note"


def test_nodes_without_a_sign_of_life_are_named() -> None:
    server = MemoryServer("memory", lambda: 5.0, random.Random(0))
    engine = server.engine(0)
    engine.put(Names("u").beat(1), b"x")
    findings = {one.name: one for one in examine_engine(engine, Names("u"), [0, 1, 2], wall=lambda: 5.0)}
    assert "slots 0, 2" in findings["engine streams"].action and "1 of 3 nodes" in findings["engine streams"].found


def test_an_engine_that_is_not_there_is_one_finding() -> None:
    pytest.importorskip("redis")
    findings = examine(parse_url("redis://127.0.0.1:1"), Names("u"), [0])
    assert [finding.state for finding in findings] == ["missing"] and "127.0.0.1:1" in findings[0].found
