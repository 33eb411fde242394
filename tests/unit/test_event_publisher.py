"""The publisher's sockets (kvfs/client/publisher.py): peers that do not read cost a bounded part of memory and time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import wait_until

msgspec = pytest.importorskip("msgspec", reason="the package msgspec is not installed")
zmq = pytest.importorskip("zmq", reason="the package pyzmq is not installed")

from kvfs.client import publisher as module  # noqa: E402
from kvfs.client.publisher import Publisher  # noqa: E402


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"ipc://@kvfs-{os.getpid()}-{request.node.name}"


Peer = Callable[..., Any]


@pytest.fixture
def peer() -> Iterator[Peer]:
    """peer(KIND, ENDPOINT): a socket that has room for one message. A question: asks for a replay from there."""
    context = zmq.Context()
    made = []

    def connect(kind: int, endpoint: str, question: bytes | None = None) -> Any:
        socket = context.socket(kind)
        made.append(socket)
        socket.set_hwm(1)
        if kind == zmq.SUB:
            socket.subscribe(b"")
        socket.connect(endpoint)
        if question is not None:
            socket.send_multipart([b"", question])
        return socket

    yield connect
    context.destroy(linger=0)


def event(size: int) -> dict[str, object]:
    return {"type": "BlockStored", "bytes": bytes(size)}


def numbers_of(socket: Any, until: int, publisher: Publisher) -> list[int]:
    """Sequence numbers that a peer hears, up to this one."""
    heard: list[int] = []

    def last() -> bool:
        publisher.serve_replay()
        while socket.poll(0):
            heard.append(int.from_bytes(socket.recv_multipart()[-2], "big", signed=True))
        return bool(heard) and heard[-1] == until

    wait_until(last, f"message {until}")
    return heard


def test_a_batch_is_bounded_by_events_and_by_bytes(name: str, peer: Peer) -> None:
    with Publisher(name, replay=f"{name}-replay") as publisher:
        publisher.send(event(1) for _ in range(module.BATCH_EVENTS + 1))
        publisher.send([event(30_000)] * 5)
        publisher.send(iter(()))
        sizes = [len(frame) for _, frame in publisher._sent]
        assert len(sizes) == 4 and max(sizes) < module.BATCH_SIZE + 31_000


class Peers:
    """A double of the replay socket: all ask, and have room for so many messages a turn."""

    def __init__(self, count: int, room: int) -> None:
        self.asks = [b"%d" % number for number in range(count)]
        self.room, self.sent, self.size = room, 0, 0

    def poll(self, timeout_ms: int) -> bool:
        return bool(self.asks)

    def recv_multipart(self) -> list[bytes]:
        return [self.asks.pop(0), b"", bytes(8)]

    def send_multipart(self, parts: tuple[Any, ...], flags: int, copy: bool) -> None:
        self.sent += 1
        self.size += len(parts[-1])


@pytest.mark.parametrize("size", [1, 3000, 60_000])
def test_a_turn_of_all_replays_is_bounded(name: str, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    with Publisher(name, replay=f"{name}-replay") as publisher:
        for _ in range(400):
            publisher.send([event(size)])
        peers = Peers(60, 1 << 30)
        monkeypatch.setattr(publisher, "_replay", peers)
        turns = 0
        while peers.asks or publisher.is_replaying:
            sent, bytes_ = peers.sent, peers.size
            publisher.serve_replay()
            # Each of 16 ends what it has begun, and a message that says so.
            assert peers.sent - sent <= 64 + 32 and peers.size - bytes_ <= module.REPLAY_TURN_SIZE + 17 * (size + 99)
            turns += 1
        assert turns >= 400 * 16 // 96


def test_one_copy_of_a_batch_serves_all_peers(name: str, peer: Peer) -> None:
    with Publisher(name, replay=f"{name}-replay") as publisher:
        for _ in range(100):
            publisher.send([event(60_000)])
        kept = publisher._sent_size
        for _ in range(60):
            peer(zmq.DEALER, f"{name}-replay", bytes(8))
        wait_until(lambda: publisher.serve_replay() or publisher.is_replaying, "their questions")
        for _ in range(50):
            publisher.serve_replay()
        assert publisher._unread.size == kept and publisher.unread_size == 0


def test_peers_that_do_not_read_are_dropped_and_may_come_again(
    name: str, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNREAD_SIZE", 8 << 20)
    said: list[str] = []
    with Publisher(name, told=said.append) as publisher:
        peers = [peer(zmq.SUB, name) for _ in range(3)]
        wait_until(lambda: publisher._socket.poll(0), "subscriptions")
        first = publisher.sequence
        most, count = 0, 0
        while not said and count < 2000:
            publisher.send([event(60_000)])
            count += 1
            most = max(most, publisher.unread_size)
        assert said and most < (8 << 20) + (1 << 20)
        # One that reads again is connected again by ZeroMQ, and sees a gap in the numbers.
        numbers: list[int] = []

        def heard() -> bool:
            publisher.send([event(1)])
            while peers[0].poll(1):
                numbers.append(int.from_bytes(peers[0].recv_multipart()[1], "big"))
            return bool(numbers) and numbers[-1] > first + count

        wait_until(heard, "what is told now")
        assert numbers == sorted(numbers) and len(numbers) < numbers[-1] - first, "there is a gap"


def test_replays_go_on_after_peers_were_dropped(name: str, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNREAD_SIZE", 0)
    with Publisher(name, replay=f"{name}-replay") as publisher:
        for _ in range(20):
            publisher.send([event(1000)])
        peer(zmq.SUB, name)
        wait_until(lambda: publisher._socket.poll(0), "a subscription")
        monkeypatch.setattr(publisher._unread, "_size", publisher._unread.size + 1)
        publisher.send([event(1000)])  # opened anew
        first = publisher._sent[0][0]
        asks = peer(zmq.DEALER, f"{name}-replay", (first + 3).to_bytes(8, "big"))
        assert numbers_of(asks, -1, publisher) == [*range(first + 3, first + 21), -1]


def test_a_peer_that_says_too_much_is_sent_away(name: str, peer: Peer) -> None:
    with Publisher(name, replay=f"{name}-replay") as publisher:
        publisher.send([event(1)])
        liar = peer(zmq.DEALER, f"{name}-replay", bytes(1 << 20))
        honest = peer(zmq.DEALER, f"{name}-replay", bytes(8))
        assert numbers_of(honest, -1, publisher) == [publisher._sent[0][0], -1]
        assert not liar.poll(0)


def test_who_subscribes_late_learns_at_once_what_it_has_missed(name: str, peer: Peer) -> None:
    with Publisher(name, replay=f"{name}-replay") as publisher:
        publisher.send([event(1)])
        for _ in range(2):
            late = peer(zmq.SUB, name)
            before = publisher.sequence
            publisher._greeted_s = 0.0
            wait_until(lambda: publisher.send(()) or publisher.sequence > before, "an empty batch")  # noqa: B023
            wait_until(lambda: late.poll(0), "the batch")  # noqa: B023
            _, sequence, payload = late.recv_multipart()
            assert int.from_bytes(sequence, "big") == before and msgspec.msgpack.decode(payload)[1] == []
        publisher.send(())
        assert publisher.sequence == before + 1, "nobody came"
