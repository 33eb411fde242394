"""The events that tell routers of a namespace's changes (kvfs/client/telling.py): never a block that is gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import pytest

pytest.importorskip("msgspec", reason="the package msgspec is not installed")
pytest.importorskip("zmq", reason="the package pyzmq is not installed")

from kvfs.client import telling as module
from kvfs.client.event_schemas import Chunk, Hash, MooncakeSchema, VllmSchema, short
from kvfs.client.events import Gap, Reason, Removed, Stored
from kvfs.client.telling import Teller, Telling
from kvfs.errors import NotMountedError


def key_of(number: int, group: int = 0) -> bytes:
    return hash_of(number) + group.to_bytes(4, "big")


def hash_of(number: int) -> bytes:
    return b"\xff" * 24 + number.to_bytes(8, "big")


class Tokens:
    """A double of the feed: it knows the chunks that it is given, by their last hash."""

    def __init__(self) -> None:
        self.chunks: dict[int, Chunk | int] = {}
        self.new: list[tuple[int, int | None]] = []
        self.turns = 0

    def knows(self, *numbers: int, parent: int | None = None, guessed: bool = False) -> list[tuple[int, int | None]]:
        hashes = [hash_of(n) for n in numbers]
        before = None if parent is None else hash_of(parent)
        self.chunks[numbers[-1]] = Chunk(hashes, before, [1] * 4 * len(hashes), 4, {}, guessed)
        return [(numbers[-1], 0)]

    def chunk(self, hash_: Hash, group: int | None) -> Chunk | int:
        return self.chunks.get(short(hash_), short(hash_))

    def turn(self) -> tuple[list[tuple[int, int | None]], bool]:
        self.turns += 1
        new, self.new = self.new, []
        return new, bool(self.turns < 100)

    def counts(self) -> Iterable[Any]:
        return ()


def teller_of(tokens: Tokens | None = None, **more: Any) -> Teller:
    return Teller(VllmSchema(), cast(Any, tokens), **more)


class Router:
    """Believes what it is told; a block that is taken back is gone, however often it was told."""

    def __init__(self) -> None:
        self.believed: set[tuple[int, int]] = set()
        self.said: Counter[str] = Counter()

    def hear(self, messages: Iterable[Any]) -> None:
        for message in messages:
            self.said[message["type"]] += 1
            assert "ownership" not in message and "locality" not in message
            hashes = {(hash_, message["group_idx"]) for hash_ in message["block_hashes"]}
            if message["type"] == "BlockStored":
                assert len(message["token_ids"]) == message["block_size"] * len(hashes)
                self.believed |= hashes
            else:
                assert hashes <= self.believed, "what was never told is not taken back"
                self.believed -= hashes

    def believes(self, *numbers: int) -> bool:
        return self.believed == {(number, 0) for number in numbers}


def test_a_block_waits_for_its_tokens() -> None:
    tokens, router = Tokens(), Router()
    teller = teller_of(tokens)
    router.hear(teller.stored(key_of(1)))
    assert router.believes() and teller.waiting_count == 1
    router.hear(teller.learned(tokens.knows(1)))
    assert router.believes(1) and teller.waiting_count == 0
    router.hear(teller.stored(key_of(2)))
    router.hear(teller.removed([key_of(2)]))
    router.hear(teller.learned(tokens.knows(2)))
    assert router.believes(1), "it went while it waited"
    router.hear(teller.removed([key_of(1), key_of(7)]))
    assert router.believes() and router.said == {"BlockStored": 1, "BlockRemoved": 1}


def test_a_chunk_s_blocks_are_taken_back_with_the_last_that_has_them() -> None:
    tokens, router = Tokens(), Router()
    teller = teller_of(tokens)
    for chunk in ((1, 2, 3), (1, 2, 4)):
        tokens.knows(*chunk)
        router.hear(teller.stored(key_of(chunk[-1])))
        router.hear(teller.stored(key_of(chunk[-1])))  # replaced: told again, and counted once
    assert router.believes(1, 2, 3, 4)
    router.hear(teller.removed([key_of(3)]))
    assert router.believes(1, 2, 4)
    router.hear(teller.removed([key_of(4)]))
    assert router.believes()


def test_a_chunk_that_was_guessed_is_told_again_as_what_it_is() -> None:
    tokens, router = Tokens(), Router()
    teller = teller_of(tokens)
    tokens.knows(2, guessed=True)
    router.hear(teller.stored(key_of(2)))
    assert router.believes(2)
    router.hear(teller.learned(tokens.knows(1, 2)))
    assert router.believes(1, 2)
    router.hear(teller.removed([key_of(2)]))
    assert router.believes()


def test_those_that_wait_are_bounded() -> None:
    tokens, router = Tokens(), Router()
    teller = teller_of(tokens, waiting_max=100)
    for number in range(250):
        router.hear(teller.stored(key_of(number)))
    assert (teller.waiting_count, teller.dropped) == (100, 150)
    router.hear(teller.learned([*tokens.knows(149), *tokens.knows(150)]))
    assert router.believes(150)


def test_a_loss_takes_back_what_is_gone_and_tells_what_came() -> None:
    router, teller = Router(), teller_of(None)
    for number in range(6):
        router.hear(teller.stored(key_of(number)))
    router.said.clear()
    gone = teller.known()
    router.hear(teller.there([key_of(number) for number in (4, 5, 6, 7)], gone))
    router.hear(teller.removed(gone))
    assert router.believes(4, 5, 6, 7) and router.said == {"BlockStored": 2, "BlockRemoved": 1}


def test_keys_of_groups_and_hashes_as_they_are_asked_for() -> None:
    (message,) = teller_of(None).stored(key_of(5, group=3))
    assert (message["block_hashes"], message["group_idx"], message["block_size"]) == ([5], 3, 0)  # type: ignore[call-overload]
    as_bytes = Teller(VllmSchema(integers=False, arrays=True))
    (message,) = as_bytes.stored(key_of(5, group=3))
    assert message == ["BlockStored", [hash_of(5)], None, [], 0, None, "STORAGE", None, None, 3]
    (message,) = as_bytes.removed([key_of(5, group=3)])
    assert message == ["BlockRemoved", [hash_of(5)], "STORAGE", 3]


def test_keys_of_sglang_s_connector_are_told_by_the_hashes_of_its_events() -> None:
    tokens, router = Tokens(), Router()
    teller = Teller(VllmSchema(sglang=True), cast(Any, tokens))
    page = b"f" * 15 + b"e" + b"0" * 48
    hash_ = -2  # as SGLang tells it: a signed number
    tokens.chunks[short(hash_)] = Chunk([hash_], None, [1] * 4, 4, {})
    for key in (page + b".kv.t1", page + b".mamba.t0of1", b"other", page + b".kv.t0"):
        for message in teller.stored(key):
            assert isinstance(message, dict) and message["block_hashes"] == [(1 << 64) - 2]
            router.hear([message])
    assert router.believed == {((1 << 64) - 2, None)} and teller.strange == 3
    router.hear(teller.removed([page + b".kv.t1", page + b".kv.t0"]))
    assert not router.believed


def test_events_of_objects_for_sglang_s_keys() -> None:
    teller = Teller(MooncakeSchema("t"))
    key = b"0f" * 32 + b".kv.t0"
    assert [*teller.stored(key), *teller.stored(b"\xff\n")] == [
        {"event_type": "stored", "object_key": key.decode(), "tenant_id": "t"}
    ]
    assert teller.strange == 1
    assert list(teller.removed([key])) == [{"event_type": "removed", "object_key": key.decode(), "tenant_id": "t"}]
    assert MooncakeSchema().cleared() is None and isinstance(MooncakeSchema().time(), int)


class Publisher:
    def __init__(self, router: Router) -> None:
        self.router, self.replays = router, 0
        self.is_replaying = self.is_asked_for_all = False
        self.unread_size = 0

    def send(self, messages: Iterable[Any], now: object) -> None:
        self.router.hear(messages)

    def serve_replay(self) -> None:
        self.replays += 1


class Client:
    """A namespace, and its subscription."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.waiting: list[Any] = []
        self.asked_s: list[float] = []

    def list(self) -> Sequence[bytes]:
        return list(self.keys)

    def next_event(self, timeout_s: float = 0.0) -> Any:
        self.asked_s.append(timeout_s)
        event = self.waiting.pop(0) if self.waiting else None
        if isinstance(event, Exception):
            raise event
        return event

    def change(self, number: int, made: type[Stored] | type[Removed] = Stored) -> None:
        self.waiting.append(made(1, key_of(number), b"", 1, 0, Reason.WRITTEN))


def test_changes_are_told_first_whatever_engines_and_routers_want() -> None:
    """One turn tells what is there, and takes one part of a flood and one of all replays."""
    tokens, router, client = Tokens(), Router(), Client()
    publisher = Publisher(router)
    telling = Telling(cast(Any, client), cast(Any, publisher), VllmSchema(), print, tokens=cast(Any, tokens))
    for turn in range(1, 20):
        tokens.knows(turn)
        client.change(turn)
        assert telling.turn(cast(Any, client))
        assert router.believes(*range(1, turn + 1)) and (tokens.turns, publisher.replays) == (turn, turn)
    assert set(client.asked_s[2:]) == {0.0}, "while a flood waits no turn waits for a change"


def test_a_gap_and_an_unmount(monkeypatch: pytest.MonkeyPatch) -> None:
    router, client = Router(), Client()
    said: list[str] = []
    telling = Telling(cast(Any, client), cast(Any, Publisher(router)), VllmSchema(), said.append)
    client.change(1)
    client.change(2)
    assert telling.turn(cast(Any, client)) and router.believed
    router.said.clear()
    client.waiting = [Gap(9, 5)]
    client.keys = [key_of(2), key_of(3)]
    assert not telling.turn(cast(Any, client))
    telling._tell_all()
    assert {hash_ for hash_, _ in router.believed} == {2, 3} and set(router.said) == {"BlockStored", "BlockRemoved"}
    client.waiting = [NotMountedError("gone")]
    with pytest.raises(NotMountedError):
        telling.turn(cast(Any, client))
    telling._take_back(telling.teller.known())
    assert router.believes()


class Slow(Publisher):
    """A publisher whose peers read so much between two looks, and have so much left."""

    def __init__(self, router: Router, speed: int, sending: Callable[[], None] = lambda: None) -> None:
        super().__init__(router)
        self.speed, self.most, self.left, self.sending = speed, 0, 0, sending

    def send(self, messages: Iterable[Any], now: object) -> None:
        self.left += 4 << 20
        self.sending()
        self.most = max(self.most, self.left)
        super().send(messages, now)

    @property
    def unread_size(self) -> int:
        self.left = max(0, self.left - self.speed)
        return self.left

    @unread_size.setter
    def unread_size(self, value: int) -> None:
        pass


@pytest.mark.parametrize(("send_s", "longest_s"), [(0.0, 5.2), (1.0, 60.0)], ids=["fast", "slow"])
def test_a_router_that_reads_a_little_is_waited_for_5_s_or_as_long_as_the_telling_takes(
    monkeypatch: pytest.MonkeyPatch, send_s: float, longest_s: float
) -> None:
    """40 pages, of which it reads each in 0.32 s."""
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(module.time, "sleep", lambda time_s: clock.__setitem__(0, clock[0] + time_s))
    router, client = Router(), Client()
    publisher = Slow(router, 64 << 10, lambda: clock.__setitem__(0, clock[0] + send_s))
    telling = Telling(cast(Any, client), cast(Any, publisher), VllmSchema(), print)
    client.keys = [key_of(number) for number in range(20_000)]
    for _ in range(2):
        begun_s, publisher.most = clock[0], 0
        telling._tell_all()
        assert len(router.believed) == 20_000 and clock[0] - begun_s < longest_s
        assert (publisher.most < 32 << 20) == bool(send_s), "it loses nothing where all waits are waited"
        client.waiting.clear()
        telling.teller = teller_of(None)
        publisher.left = 0


@pytest.mark.parametrize(("speed", "most"), [(1 << 20, 32 << 20), (0, 1 << 40)])
def test_all_blocks_are_told_as_fast_as_routers_read_and_wait_for_none_that_does_not(
    monkeypatch: pytest.MonkeyPatch, speed: int, most: int
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(module.time, "sleep", lambda time_s: clock.__setitem__(0, clock[0] + time_s))
    router, client = Router(), Client()
    publisher = Slow(router, speed)
    telling = Telling(cast(Any, client), cast(Any, publisher), VllmSchema(), print)
    client.keys = [key_of(number) for number in range(20_000)]
    telling._tell_all()
    assert len(router.believed) == 20_000 and publisher.most <= most
    assert clock[0] < 2.0, "of a router that reads nothing it waits for a moment"
