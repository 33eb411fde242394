"""Hints of vLLM's requests: what is taken from whoever sends them, and what the thread asks the daemon for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import wait_until

from kvfs.connectors import vllm_hints
from kvfs.connectors.vllm_hints import (
    ACTIONS_MAX,
    AHEAD_MAX_S,
    HASHES_MAX,
    KEEP_MAX_S,
    Hint,
    Hints,
    Kind,
    Plan,
    hash_of,
    hints_of,
)


def key_of(number: int) -> bytes:
    return bytes(24) + number.to_bytes(8, "big") + bytes(4)


def action(of_type: object, payload: object = None, version: object = "1.0") -> Any:
    return SimpleNamespace(action_type=of_type, action_version=version, payload={} if payload is None else payload)


def request(*actions: Any, protocol: object = "0.1", parameters: object = None) -> Any:
    envelope = SimpleNamespace(protocol_version=protocol, message_id="m", actions=list(actions)) if actions else None
    return SimpleNamespace(kv_transfer_params=parameters, kv_hints=envelope)


def test_an_envelope_s_actions_are_taken() -> None:
    hints, wrong = hints_of(
        request(
            action("kv.retain", {"ttl_s": 60}),
            action("kv.pin", {"block_hashes": [3, 1, 3]}, "1.7"),
            action("kv.demote"),
            action("kv.prefetch", {"block_hashes": [(1 << 64) - 1], "ttl_s": 7.5}),
            parameters={"kvfs": {"keep_s": 600}, "do_remote_prefill": True},
        )
    )
    assert hints == [
        Hint(Kind.KEEP, 600.0),
        Hint(Kind.KEEP, 60.0),
        Hint(Kind.KEEP, 300.0, (3, 1)),
        Hint(Kind.DONE),
        Hint(Kind.AHEAD, 7.5, ((1 << 64) - 1,)),
    ]
    assert wrong == []
    assert hints_of(request()) == ([], []) == hints_of(SimpleNamespace())


@pytest.mark.parametrize(
    "wrong",
    [
        action("kv.fetch", {"block_hashes": [1], "source_control_endpoint": "tcp://a:1"}),
        action("kv.retain", version="2.0"),
        action("kv.retain", version=1.0),
        action("kv.retain", version="9" * 6000),
        action("kv.retain", version="¹.0"),
        action(["kv.retain"]),
        action(None),
        action("kv.retain", [1]),
        action("kv.retain", {"ttl_s": -1}),
        action("kv.retain", {"ttl_s": 0}),
        action("kv.retain", {"ttl_s": True}),
        action("kv.retain", {"ttl_s": "60"}),
        action("kv.retain", {"ttl_s": float("nan")}),
        action("kv.retain", {"block_hashes": []}),
        action("kv.retain", {"block_hashes": "abc"}),
        action("kv.retain", {"block_hashes": {"a": 1}}),
        action("kv.demote", {"block_hashes": [1, -1]}),
        action("kv.demote", {"block_hashes": [1 << 64]}),
        action("kv.demote", {"block_hashes": [1.0]}),
        action("kv.demote", {"block_hashes": [True]}),
        action("kv.demote", {"block_hashes": [[1]]}),
        action("kv.demote", {"block_hashes": list(range(HASHES_MAX + 1))}),
        action("kv.prefetch"),
        SimpleNamespace(),
        None,
        7,
    ],
    ids=str,
)
def test_what_makes_no_sense_is_passed_over_and_the_rest_is_taken(wrong: Any) -> None:
    hints, why = hints_of(request(wrong, action("kv.demote")))
    assert hints == [Hint(Kind.DONE)]
    assert len(why) == 1 and len(why[0]) < 300


@pytest.mark.parametrize("parameters", [{"kvfs": given} for given in (
    {}, [], "done", {"done": False}, {"done": 1}, {"keep_s": -1}, {"keep_s": 3601}, {"keep_s": float("inf")},
    {"keep_s": True}, {"keep_s": 1, "done": True}, {"soon": 1}, 10**5000,
)], ids=lambda given: str(type(given["kvfs"])))  # fmt: skip
def test_parameters_that_make_no_sense_are_passed_over(parameters: Any) -> None:
    hints, why = hints_of(request(parameters=parameters))
    assert hints == [] and len(why) == 1 and len(why[0]) < 300


def test_a_time_is_bounded_and_so_are_actions() -> None:
    year = 365 * 86_400
    hints, wrong = hints_of(
        request(
            action("kv.retain", {"ttl_s": year}),
            action("kv.pin", {"ttl_s": 10**400}),
            action("kv.retain", {"ttl_s": float("inf")}),
            action("kv.prefetch", {"ttl_s": year, "block_hashes": [1]}),
        )
    )
    assert [hint.seconds for hint in hints] == [KEEP_MAX_S] * 3 + [AHEAD_MAX_S]
    assert wrong == []
    hints, wrong = hints_of(request(*[action("kv.demote")] * 1_000_000))
    assert len(hints) == ACTIONS_MAX and wrong == [f"1000000 actions: the first {ACTIONS_MAX} are taken"]
    for protocol in ("2.0", None, 1, "", "x"):
        assert hints_of(request(action("kv.demote"), protocol=protocol))[0] == []
    assert hints_of(SimpleNamespace(kv_hints=SimpleNamespace(protocol_version="1.0", actions=7)))[0] == []
    assert hints_of(SimpleNamespace(kv_transfer_params=[1], kv_hints=None)) == ([], [])


def test_hashes_of_an_envelope_are_bounded_in_sum() -> None:
    many, few = list(range(HASHES_MAX - 1)), [1, 2]
    hints, wrong = hints_of(
        request(*(action("kv.pin", {"block_hashes": hashes}) for hashes in (many, few, [7], many, [8])))
    )
    assert [len(hint.hashes or ()) for hint in hints] == [HASHES_MAX - 1, 1]
    assert wrong[0] == f"kv.pin: 2 block_hashes: an envelope has {HASHES_MAX} in all, 1 are left" and len(wrong) == 3


def test_of_several_hints_about_one_block_the_longest_to_keep_it_wins() -> None:
    keys = [key_of(number) for number in range(4)]
    plan = Plan([Hint(Kind.DONE), Hint(Kind.KEEP, 10.0, (0, 1)), Hint(Kind.KEEP, 60.0, (1, 9))])
    assert plan.split(keys) == ({10.0: [keys[0]], 60.0: [keys[1]]}, keys[2:])
    assert hash_of(keys[3]) == 3
    assert Plan([Hint(Kind.KEEP, 10.0, (7,))]).split(keys) == ({}, [])


class Connection:
    """Of the connectors' the calls for hints: a daemon that keeps what is not in `refused`, while it is there."""

    def __init__(self) -> None:
        self.options = SimpleNamespace(timeout_s=1.0)
        self.refused: set[bytes] = set()
        self.away = False
        self.leases: dict[int, tuple[list[bytes], float]] = {}
        self.ended: list[bytes] = []
        self.taken = 0
        self.gate = threading.Event()
        self.gate.set()

    def lease(self, keys: Sequence[bytes], seconds: float) -> Any:
        assert self.gate.wait(60)
        if self.away:
            return None
        self.taken += 1
        number = self.taken
        self.leases[number] = list(keys), seconds
        held = [key not in self.refused for key in keys]
        return SimpleNamespace(held=held, end=lambda: self.leases.pop(number))

    def done(self, keys: Sequence[bytes]) -> int:
        self.ended += keys
        return len(keys)


@pytest.fixture
def connection() -> Connection:
    return Connection()


@pytest.fixture
def hints(connection: Connection) -> Any:
    made = Hints(connection, logging.getLogger("test"))  # type: ignore[arg-type]
    yield made
    connection.gate.set()
    made.close()


def settled(of: Hints, /, **expected: int) -> None:
    wait_until(lambda: all(getattr(of.counters, name) == count for name, count in expected.items()), str(expected))


def test_what_arrives_is_kept_at_once_and_all_of_it_at_the_end(hints: Hints, connection: Connection) -> None:
    keys = [key_of(number) for number in range(4)]
    hints.new_request("r", request(action("kv.retain", {"ttl_s": 60})))
    plan = hints.plan("r")
    assert plan is not None and hints.plan("another") is None
    hints.arrived(plan, keys[:2])
    settled(hints, hints=1, hints_kept=2)
    assert list(connection.leases.values()) == [(keys[:2], 60.0)]
    connection.refused = {keys[3]}
    hints.finished("r", keys)
    settled(hints, hints_kept=5, hints_refused=1)
    # The first lease was of blocks that the second one has, too.
    wait_until(lambda: list(connection.leases.values()) == [(keys, 60.0)], "the end of the older lease")
    assert hints.plan("r") is None


def test_what_is_still_being_stored_at_the_end_is_asked_for_once_it_is_there(
    hints: Hints, connection: Connection
) -> None:
    keys = [key_of(number) for number in range(4)]
    hints.new_request("r", request(action("kv.pin", {"block_hashes": [0, 1, 2]}), action("kv.demote")))
    plan = hints.plan("r")
    assert plan is not None
    connection.refused = set(keys[1:])  # as if not there
    hints.finished("r", keys, frozenset(keys[1:]))
    settled(hints, hints_kept=1)
    connection.refused = set()
    hints.arrived(plan, keys[2:], keys[1:2])
    settled(hints, hints_kept=2, hints_refused=1, hints_done=1)
    assert connection.ended == keys[3:]


def test_a_longer_lease_and_one_of_other_blocks_stay(hints: Hints, connection: Connection) -> None:
    for number, (seconds, blocks) in enumerate([(600, (0, 1)), (60, (0, 1, 2)), (60, (5, 2)), (700, (9, 0, 1))]):
        hints.new_request(str(number), request(action("kv.retain", {"ttl_s": seconds})))
        hints.finished(str(number), [key_of(block) for block in blocks])
    settled(hints, hints_kept=10)
    wait_until(lambda: sorted(seconds for _, seconds in connection.leases.values()) == [60, 60, 700], "the first's end")


def test_leases_that_are_known_are_bounded_and_the_expired_go_first(
    hints: Hints, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_hints, "_GRANTS_MAX", 10)

    def keep(number: int, seconds: float) -> None:
        hints._keep([key_of(number)], seconds)

    keep(0, 600.0)
    for number in range(1, 10):
        keep(number, 1e-6)
    keep(10, 600.0)
    assert list(hints._grants) == [key_of(0), key_of(10)]
    for number in range(11, 100):
        keep(number, 600.0)
    assert list(hints._grants) == [key_of(number) for number in range(90, 100)]
    keep(95, 700.0)
    assert list(hints._grants)[-1] == key_of(95) and len(hints._grants) == 10


def test_a_block_is_needed_no_more_only_when_its_request_has_ended(hints: Hints, connection: Connection) -> None:
    keys = [key_of(number) for number in range(4)]
    hints.new_request("r", request(action("kv.demote", {"block_hashes": [0, 1, 3]})))
    plan = hints.plan("r")
    assert plan is not None
    hints.arrived(plan, keys[:1])
    hints.finished("r", keys[:3])
    settled(hints, hints_done=2)
    assert connection.ended == keys[:2]
    hints.arrived(plan, keys[2:])  # its last store is over
    settled(hints, hints_done=3)
    assert connection.ended == [*keys[:2], keys[3]] and not connection.leases


def test_without_a_daemon_nothing_is_kept_and_it_is_counted(hints: Hints, connection: Connection) -> None:
    connection.away = True
    hints.new_request("r", request(action("kv.pin")))
    hints.finished("r", [key_of(1)])
    settled(hints, hints_refused=1, hints_kept=0)


def test_a_flood_that_the_daemon_does_not_keep_up_with_is_refused(
    hints: Hints, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_hints, "_KEYS_MAX", 100)
    connection.gate.clear()
    for _ in range(1000):
        hints.new_request("r", request(action("kv.retain")))
        hints.finished("r", [key_of(number) for number in range(10)])
    assert hints.counters.hints_refused >= 10_000 - 100 - 10
    connection.gate.set()
    wait_until(lambda: hints.counters.hints_kept + hints.counters.hints_refused == 10_000, "all of them")


def test_of_a_flood_of_mistakes_one_is_told_of(hints: Hints, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(100):
        hints.new_request("r", request(action("kv.retain", {"ttl_s": "x" * 10_000})))
    assert hints.counters.hints_ignored == 100 and hints.counters.hints == 0 and hints.plan("r") is None
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1 and "ttl_s 'xxx" in told[0].getMessage() and len(told[0].getMessage()) < 400


def test_where_hints_are_not_wanted_none_is_looked_at(connection: Connection) -> None:
    hints = Hints(connection, logging.getLogger("test"), obeyed=False)  # type: ignore[arg-type]
    hints.new_request("r", request(action("kv.retain"), None))
    hints.finished("r", [key_of(1)])
    assert hints.counters == vllm_hints.HintCounters() and not connection.leases
    hints.close()
