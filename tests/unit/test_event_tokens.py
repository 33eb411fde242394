"""Tokens of blocks, from engines' events that nobody vouches for (kvfs/client/tokens.py)."""

from __future__ import annotations

import contextlib
import os
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import wait_until

msgspec = pytest.importorskip("msgspec", reason="the package msgspec is not installed")
zmq = pytest.importorskip("zmq", reason="the package pyzmq is not installed")

from kvfs.client import tokens as module  # noqa: E402
from kvfs.client.event_schemas import Chunk, short  # noqa: E402
from kvfs.client.tokens import TokenFeed, Tokens  # noqa: E402

SIZE = 4


def hash_of(number: int) -> bytes:
    return bytes(16) + (number + 1).to_bytes(16, "big")


def stored(first: int, end: int, **more: object) -> dict[str, object]:
    """Blocks first to end - 1 of a prompt."""
    return {
        "type": "BlockStored", "block_hashes": [hash_of(n) for n in range(first, end)],
        "parent_block_hash": hash_of(first - 1) if first else None,
        "token_ids": list(range(first * SIZE, end * SIZE)), "block_size": SIZE, "lora_id": None, "medium": "GPU",
        "lora_name": None, "group_idx": 0, **more,
    }  # fmt: skip


def batch(*events: object) -> bytes:
    return bytes(msgspec.msgpack.encode([1.5, events, 0]))


class Engine:
    """Publishes and answers at names of its own."""

    def __init__(self, name: str) -> None:
        self.endpoint, self.replay_endpoint = (f"ipc://@kvfs-{os.getpid()}-{name}{end}" for end in ("", "-replay"))
        self.both = f"{self.endpoint},{self.replay_endpoint}"
        self.context = zmq.Context()
        self.socket, self.replay = self.context.socket(zmq.XPUB), self.context.socket(zmq.ROUTER)
        self.socket.bind(self.endpoint)
        self.replay.bind(self.replay_endpoint)
        self.sent: list[bytes] = []
        self.asked = 0

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    def joined(self) -> None:
        """Somebody has subscribed."""
        assert self.socket.poll(10_000)
        self.socket.recv()

    def tell(self, *payloads: bytes, lost: bool = False) -> None:
        for payload in payloads:
            if not lost:
                self.socket.send_multipart([b"", len(self.sent).to_bytes(8, "big"), payload])
            self.sent.append(payload)

    def serves(self) -> bool:
        """Answers those who ask again."""
        while self.replay.poll(0):
            self.asked += 1
            who, empty, first = self.replay.recv_multipart()
            assert empty == b""
            for number in range(int.from_bytes(first, "big"), len(self.sent)):
                self.replay.send_multipart([who, b"", b"", number.to_bytes(8, "big"), self.sent[number]])
            self.replay.send_multipart([who, b"", b"", b"\xff" * 8, b""])
        return True


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(request.node.name) as made:
        yield made


def feed_of(*endpoints: str, size_max: int = 1 << 30, count_max: int = 1 << 20, span: int = 1) -> TokenFeed:
    return TokenFeed(endpoints, size_max=size_max, count_max=count_max, span=span)


def knows(feed: TokenFeed, number: int) -> bool:
    feed.turn()
    return isinstance(feed.chunk(hash_of(number), 0), Chunk)


def test_a_run_of_blocks_is_known_block_by_block() -> None:
    tokens = Tokens(1 << 20, 100)
    new = tokens.learn(batch({"type": "BlockRemoved", "block_hashes": [1]}, stored(0, 3), {"type": "AllBlocksCleared"}))
    assert new == [(short(hash_of(n)), 0) for n in range(3)]
    found = tokens.find(short(hash_of(1)), 0)
    assert found is not None and found.parent == hash_of(0) and found.shared["block_size"] == SIZE
    assert memoryview(found.tokens).cast("I").tolist() == [4, 5, 6, 7] and found.span == 0
    assert tokens.find(short(hash_of(1)), 1) is None and tokens.find(short(hash_of(3)), 0) is None
    assert tokens.counts.senseless == 0 and not tokens.learn(batch(stored(0, 3))), "it is known"


def test_arrays_of_older_engines_and_hashes_that_are_numbers() -> None:
    tokens = Tokens(1 << 20, 100)
    tokens.learn(
        batch(["BlockRemoved", [1]], ["BlockStored", [5, -7], None, [1, 2, 3, 4], 2, None], ["AllBlocksCleared"])
    )
    assert tokens.counts.senseless == 0
    found = tokens.find(short(-7), 3)
    assert found is not None and found.parent == 5, "told without a group, it is of any"


def test_a_chunk_s_end_says_how_many_blocks_it_has(engine: Engine) -> None:
    with feed_of(engine.both) as feed:
        engine.tell(batch(stored(0, 4, extra_keys=[None, ["salt"], None, None])), batch(stored(2, 4, medium="CPU")))
        (_, counts), *_ = feed.counts()
        wait_until(lambda: engine.serves() and feed.turn() and counts.events == 2, "the tokens")
        found = feed.chunk(hash_of(3), 0)
        assert isinstance(found, Chunk) and not found.guessed and found.hashes == [hash_of(2), hash_of(3)]
        assert (found.parent, list(found.token_ids), found.block_size) == (hash_of(1), list(range(8, 16)), SIZE)
        assert found.more == {}
        found = feed.chunk(short(hash_of(1)), 0)
        assert isinstance(found, Chunk) and found.guessed and found.hashes == [hash_of(1)]
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(found.more)) == {"extra_keys": [["salt"]]}
        assert feed.chunk(hash_of(9), 0) == short(hash_of(9))


def test_a_chunk_is_known_when_all_its_blocks_are(engine: Engine) -> None:
    with feed_of(engine.both, span=3) as feed:
        engine.tell(batch(stored(4, 6)))
        wait_until(lambda: engine.serves() and feed.turn() and feed.chunk(hash_of(5), 0) == short(hash_of(3)), "two")
        engine.joined()
        engine.tell(batch(stored(3, 4)))
        wait_until(lambda: knows(feed, 5), "the third")


LIES: list[Any] = [
    b"", b"\xc1", b"\x93", b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000, b"\xa5words", msgspec.msgpack.encode([1.0]),
    msgspec.msgpack.encode([1.0, {"a": 1}, 0]), batch(3), batch("BlockStored"), batch([]), batch({}),
    batch({"type": "Other"}), batch({"type": "BlockStored"}), batch(stored(0, 0)), batch(stored(0, 2, block_size=3)),
    batch(stored(0, 2, token_ids=list(range(7)))), batch(stored(0, 2, token_ids=[-1] * 8)),
    batch(stored(0, 2, token_ids=[1 << 32] * 8)), batch(stored(0, 2, token_ids="x" * 8)),
    batch(stored(0, 2, block_hashes=[b"short", b"short"])), batch(stored(0, 1, block_hashes=[b"x" * 65])),
    batch(stored(0, 1, block_hashes=["text"])), batch(stored(0, 1, parent_block_hash=b"")),
    batch(stored(0, 1, group_idx=-1)), batch(stored(0, 1, group_idx=1 << 32)), batch(stored(0, 1, group_idx="0")),
    batch(stored(0, 2, extra_keys=[None])), batch(stored(0, 1, extra_keys=["x" * 20_000])),
    batch(stored(0, 1, lora_name="x" * 300)), batch(stored(0, 1, block_size=1 << 20)),
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_counted_and_passed_over(lie: bytes) -> None:
    tokens = Tokens(1 << 20, 100)
    assert not tokens.learn(lie) and tokens.counts.senseless == 1 and tokens.counts.blocks == 0
    assert len(tokens.learn(batch(stored(0, 2)))) == 2, "what follows is heard"


def test_what_stands_beside_a_lie_is_heard() -> None:
    tokens = Tokens(1 << 20, 100)
    assert len(tokens.learn(batch(stored(0, 1), {"type": "Other"}, stored(1, 3, block_size=9), stored(1, 2)))) == 2
    assert tokens.counts.senseless == 2


def test_other_tokens_for_a_known_hash_are_not_believed() -> None:
    tokens = Tokens(1 << 20, 100)
    tokens.learn(batch(stored(0, 2)))
    assert not tokens.learn(batch(stored(0, 2, token_ids=[9] * 8)))
    found = tokens.find(short(hash_of(1)), 0)
    assert found is not None and memoryview(found.tokens).cast("I").tolist() == [4, 5, 6, 7]
    assert tokens.counts.different == 2


def test_a_ring_of_parents_ends(engine: Engine) -> None:
    with feed_of(engine.both, span=1 << 30) as feed:
        ring = stored(0, 2, parent_block_hash=hash_of(1), token_ids=[1] * 60_000, block_size=30_000)
        engine.tell(batch(ring))
        wait_until(lambda: engine.serves() and knows(feed, 1), "the ring")
        found = feed.chunk(hash_of(1), 0)
        assert isinstance(found, Chunk) and len(found.token_ids) <= 65_536


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    tokens = Tokens(1 << 30, 10)
    tokens.learn(batch(stored(0, 8)))
    tokens.learn(batch(stored(0, 2)))  # told again, so they are the newest
    tokens.learn(batch(stored(8, 12)))
    assert tokens.counts.blocks == 10 and tokens.counts.dropped == 2
    assert [tokens.find(short(hash_of(n)), 0) is not None for n in (0, 1, 2, 3, 4, 11)] == [1, 1, 0, 0, 1, 1]
    small = Tokens(2000, 1 << 20)
    small.learn(batch(stored(0, 100)))
    assert small.counts.size <= 2000 and 0 < small.counts.blocks < 10
    assert small.counts.blocks + small.counts.dropped == 100


def test_blocks_are_counted_with_the_bytes_that_they_take() -> None:
    messages = [batch(stored(n, n + 100)) for n in range(0, 30_000, 100)]
    tokens = Tokens(1 << 30, 1 << 20)
    tracemalloc.start()
    try:
        for message in messages:
            tokens.learn(message)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.75 < taken / tokens.counts.size < 1.1, (taken / 30_000, tokens.counts.size / 30_000)


def test_an_engine_that_floods_drops_its_own(engine: Engine) -> None:
    with Engine("honest") as honest, feed_of(engine.endpoint, honest.endpoint, count_max=200) as feed:
        engine.joined()
        honest.joined()
        honest.tell(batch(stored(0, 5)))
        wait_until(lambda: knows(feed, 4), "the honest one")
        for first in range(100, 2000, 100):
            engine.tell(batch(stored(first, first + 100)))
        wait_until(lambda: knows(feed, 1999), "the flood")
        assert knows(feed, 0) and not knows(feed, 1000)
        counts = dict(feed.counts())
        assert counts[engine.endpoint].dropped == 1800 and counts[honest.endpoint].dropped == 0


def test_a_flood_takes_a_bounded_part_of_a_turn(engine: Engine) -> None:
    with feed_of(engine.endpoint) as feed:
        engine.joined()
        engine.tell(*[batch(stored(n, n + 1)) for n in range(100)])
        turns = []

        def all_heard() -> bool:
            new, more = feed.turn()
            turns.append(len(new))
            assert more == (len(new) == module.TURN_MESSAGES)
            return sum(turns) == 100

        wait_until(all_heard, "all messages")
        assert max(turns) == module.TURN_MESSAGES


def test_a_gap_is_asked_for_again(engine: Engine) -> None:
    with feed_of(engine.both) as feed:
        engine.joined()
        wait_until(lambda: feed.turn() and engine.serves() and engine.asked, "the first question, for all")
        engine.tell(batch(stored(0, 1)))
        wait_until(lambda: knows(feed, 0), "the first")
        engine.tell(batch(stored(1, 2)), batch(stored(2, 3)), lost=True)
        engine.tell(batch(stored(3, 4)))
        wait_until(lambda: engine.serves() and knows(feed, 1) and knows(feed, 2), "those that were lost")
        ((_, counts),) = feed.counts()
        assert (counts.replays, counts.lost) == (2, 0)


def test_a_gap_without_replays_is_said(engine: Engine) -> None:
    with feed_of(engine.endpoint) as feed:
        engine.joined()
        engine.tell(batch(stored(0, 1)))
        engine.tell(batch(stored(1, 2)), batch(stored(2, 3)), lost=True)
        engine.tell(batch(stored(3, 4)))
        wait_until(lambda: knows(feed, 3), "the last")
        ((_, counts),) = feed.counts()
        assert counts.lost == 2


def test_a_replay_that_stops_is_asked_for_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REPLAY_PATIENCE_S", 0.05)
    with feed_of(engine.both) as feed:
        engine.tell(batch(stored(0, 2)))
        engine.joined()
        for _ in range(2):  # questions without an answer
            wait_until(lambda: feed.turn() and engine.replay.poll(0), "a question")
            engine.replay.recv_multipart()
        wait_until(lambda: engine.serves() and knows(feed, 1), "the answer")


def test_an_engine_that_ends_and_begins_anew_is_heard_again() -> None:
    with contextlib.ExitStack() as stack:
        first = Engine("again")
        feed = stack.enter_context(feed_of(first.endpoint))
        with first:
            first.joined()
            first.tell(batch(stored(0, 1)), batch(stored(1, 2)))
            wait_until(lambda: knows(feed, 1), "the first")
        with Engine("again") as second:
            # A socket says again what it wants when it is asked, and not before.
            wait_until(lambda: feed.turn() and second.socket.poll(0), "the subscription")
            second.tell(batch(stored(2, 3)))
            wait_until(lambda: knows(feed, 2), "the second")
            ((_, counts),) = feed.counts()
            assert counts.starts == 2 and counts.lost == 0 and knows(feed, 0)


def test_a_message_that_is_none_is_counted(engine: Engine) -> None:
    with feed_of(engine.endpoint) as feed:
        engine.joined()
        for parts in ([b"x"], [b"", b"123", b""], [b"", bytes(8), b"", b""]):
            engine.socket.send_multipart(parts)
        engine.tell(batch(stored(0, 1)))
        wait_until(lambda: knows(feed, 0), "the block")
        ((_, counts),) = feed.counts()
        assert counts.senseless == 3
