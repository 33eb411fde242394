"""The sockets that a subscription's events go out by: ZeroMQ, as vLLM publishes its own.

A message has three parts: the topic, a sequence number (8 bytes, big-endian), and a batch in msgpack: time, events,
data-parallel rank. Schemas (event_schemas.py) say how an event looks; telling.py says which are sent.

Peers are not trusted to read. ZeroMQ keeps a queue for each, so unread bytes are counted over all of them. Beyond a
bound the sockets are opened anew: those queues go, peers connect again, and find a gap in the numbers.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self, TypeAlias

from kvfs.errors import MissingFeatureError, UsageError

try:
    import msgspec
    import zmq
except ImportError as error:
    raise MissingFeatureError(f"publishing events needs {error.name}: pip install 'kvfs[events]'") from error

# A batch has so many events, and ends with the event that brings it to so many bytes.
BATCH_EVENTS = 512
BATCH_SIZE = 64 << 10
# Batches that the replay socket can send again, as vLLM's default, and their bytes.
REPLAY_BATCHES = 10_000
REPLAY_SIZE = 256 << 20
# Messages that a subscriber may be behind, and those of a replay.
_HIGH_WATER = 1024
_REPLAY_HIGH_WATER = 8
# Bytes of all peers' queues together, beside those that can be replayed.
UNREAD_SIZE = 192 << 20
# The bytes of all replays together that are sent between two looks at events. A batch counts as so many at least.
REPLAY_TURN_SIZE = 1 << 20
_REPLAY_COST_LEAST = REPLAY_TURN_SIZE // 64
# Replays that are under way; beyond, the one gives way whose peer has read nothing for longest. So does one whose
# peer reads nothing for so long.
_REPLAYS_MAX = 16
_REPLAY_PATIENCE_S = 10.0
# Subscriptions that are heard between two batches, and the longest message of a peer.
_HEARD_MAX = 64
_ASK_SIZE_MAX = 4096
# An empty batch is sent so often at most.
_GREETING_S = 1.0
# A router that is there answers within that; without one, publishing begins all the same.
_ROUTER_WAIT_MS = 5000
# An endpoint that was closed is free again a moment later.
_REOPEN_S = 2.0
# The end of a replay: a sequence number of -1, without a batch.
_REPLAY_END = (-1).to_bytes(8, "big", signed=True)
# A question for this number, of another node's `kvfs events --pod`: tell all again.
ASK_FOR_ALL = bytes(_REPLAY_END)

Message: TypeAlias = dict[str, object] | list[object]


class _Payload(bytearray):
    """The bytes of a batch; ZeroMQ holds them until the last peer has them."""


class _Unread:
    """The bytes of all payloads that something holds."""

    def __init__(self) -> None:
        self._size = 0
        self._freed: deque[int] = deque()  # appended to by ZeroMQ's thread

    def hold(self, payload: _Payload) -> None:
        self._size += len(payload)
        weakref.finalize(payload, self._freed.append, len(payload)).atexit = False

    @property
    def size(self) -> int:
        while self._freed:
            self._size -= self._freed.popleft()
        return self._size


class Publisher:
    """The sockets. endpoint: bound if it has a wildcard, or is ipc or inproc, else connected to. replay: where batches
    can be asked for again. One thread. told: gets a line when peers' queues were dropped. answers_all: a peer may ask
    for all blocks, too; is_asked_for_all says so.

    UsageError: an endpoint that cannot be had."""

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str = "",
        rank: int = 0,
        told: Callable[[str], None] = lambda line: None,
        answers_all: bool = False,
    ) -> None:
        self._topic, self._rank, self._told = topic.encode(), rank, told
        # A publisher that starts anew goes on above its old numbers: routers pass over those that they have had.
        self.sequence = time.time_ns() // 1_000_000
        self._encoder = msgspec.msgpack.Encoder()
        self._sent: deque[tuple[int, zmq.Frame]] = deque()
        self._sent_size = 0
        self._unread = _Unread()
        # Peers that are being answered: the next batch for each, and when it got the last one.
        self._replays: dict[bytes, tuple[int, float]] = {}
        self._is_greeting, self._greeted_s = False, 0.0
        self._answers_all, self.is_asked_for_all = answers_all, False
        self._endpoint, self._replay_endpoint = endpoint, replay
        self._is_bound = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._open()
            if not self._is_bound:  # messages sent before the router has answered are lost
                self._socket.poll(_ROUTER_WAIT_MS)
        except BaseException:
            self.close()
            raise

    def _open(self, until_s: float = 0.0) -> None:
        self._socket = self._context.socket(zmq.XPUB)  # PUB, but that it says who subscribes
        self._socket.set_hwm(_HIGH_WATER)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _ASK_SIZE_MAX)
        _at(self._socket.bind if self._is_bound else self._socket.connect, self._endpoint, until_s)
        if self._replay_endpoint is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            # A router that asks and does not read loses the rest; it holds up nobody. It is an error here, and not
            # silence, that a peer's queue is full, or that the peer has gone.
            self._replay.set_hwm(_REPLAY_HIGH_WATER)
            self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._replay.setsockopt(zmq.MAXMSGSIZE, _ASK_SIZE_MAX)
            _at(self._replay.bind, self._replay_endpoint, until_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let what was sent go for a second at most."""
        self._context.destroy(linger=1000)

    @property
    def unread_size(self) -> int:
        """Bytes that peers' queues hold, and that no replay would need."""
        return self._unread.size - self._sent_size

    def send(self, events: Iterable[Message], now: Callable[[], object] = time.time) -> None:
        """Publish them, in batches. now: the time that a batch says."""
        self._hear()
        batch: list[msgspec.Raw] = []
        size = 0
        for event in events:
            batch.append(msgspec.Raw(self._encoder.encode(event)))
            size += len(batch[-1])
            if len(batch) == BATCH_EVENTS or size >= BATCH_SIZE:
                self._send_batch(batch, now())
                batch, size = [], 0
        if batch or (self._is_greeting and time.monotonic() > self._greeted_s + _GREETING_S):
            self._send_batch(batch, now())

    def _hear(self) -> None:
        """Subscriptions. The number of the next batch shows a late one what it has missed. So a batch follows, if need
        be an empty one."""
        for _ in range(_HEARD_MAX):
            if not self._socket.poll(0):
                break
            is_new = self._socket.recv()[:1] == b"\1"
            self._is_greeting = self._is_greeting or (is_new and self._replay is not None)

    def _send_batch(self, batch: list[msgspec.Raw], time_: object) -> None:
        if self.unread_size > UNREAD_SIZE:
            self._reopen()
        payload = _Payload(self._encoder.encode([time_, batch, self._rank]))
        self._unread.hold(payload)
        # One copy for all peers, and for replays.
        frame = zmq.Frame(payload, copy=False)
        self._socket.send_multipart((self._topic, self.sequence.to_bytes(8, "big"), frame), copy=False)
        if self._replay is not None:
            self._sent.append((self.sequence, frame))
            self._sent_size += len(payload)
            while len(self._sent) > REPLAY_BATCHES or self._sent_size > REPLAY_SIZE:
                self._sent_size -= len(self._sent.popleft()[1])
        self.sequence += 1
        self._is_greeting, self._greeted_s = False, time.monotonic()

    def _reopen(self) -> None:
        self._told(f"peers have not read {self.unread_size >> 20} MiB: they are dropped, and may connect again")
        for socket in (self._socket, self._replay):
            if socket is not None:
                socket.close(linger=0)
        self._replays.clear()
        self._open(time.monotonic() + _REOPEN_S)

    def serve_replay(self) -> None:
        """Answer peers that ask for batches again: from the sequence number on that they name. Sends a part at a time,
        so that events go out meanwhile. The rest follows with the next calls, as fast as they read."""
        for _ in range(_REPLAYS_MAX):
            if self._replay is None or not self._replay.poll(0):
                break
            parts = self._replay.recv_multipart()
            if len(parts) != 3 or len(parts[2]) != 8:
                continue
            if parts[2] == ASK_FOR_ALL:
                self.is_asked_for_all = self._answers_all
                continue
            # To ask again is no progress.
            _, since_s = self._replays.get(parts[0], (0, time.monotonic()))
            self._replays[parts[0]] = int.from_bytes(parts[2], "big"), since_s
            if len(self._replays) > _REPLAYS_MAX:
                del self._replays[min(self._replays, key=lambda who: self._replays[who][1])]
                # All get a part before the next peer is heard.
                break
        # A turn is over after so much, whoever had it. Each who is left gets an equal part of it.
        left = REPLAY_TURN_SIZE
        for served, who in enumerate(peers := list(self._replays)):
            left -= self._replay_some(who, left // (len(peers) - served))

    def _replay_some(self, who: bytes, most: int) -> int:
        """Send batches until they count as so many bytes. Returns that count."""
        first = self._sent[0][0] if self._sent else self.sequence
        at = max(self._replays[who][0], first)
        cost = 0
        try:
            while at < self.sequence and cost < most:
                frame = self._sent[at - first][1]
                self._answer(who, self._topic, at.to_bytes(8, "big"), frame)
                at, cost = at + 1, cost + max(len(frame), _REPLAY_COST_LEAST)
                self._replays[who] = at, time.monotonic()
            if at >= self.sequence:
                self._answer(who, b"", _REPLAY_END, b"")
                del self._replays[who]
        except zmq.Again:
            # It has not read.
            if time.monotonic() - self._replays[who][1] > _REPLAY_PATIENCE_S:
                del self._replays[who]
        except zmq.ZMQError:
            del self._replays[who]  # it has gone
        return cost

    @property
    def is_replaying(self) -> bool:
        """Whether a peer waits for batches."""
        return bool(self._replays)

    def _answer(self, who: bytes, *parts: bytes | zmq.Frame) -> None:
        assert self._replay is not None
        self._replay.send_multipart((who, b"", *parts), flags=zmq.DONTWAIT, copy=False)


def _at(open_: Callable[[str], object], endpoint: str, until_s: float) -> None:
    """Bind or connect; again until then, while the endpoint is still in use."""
    while True:
        try:
            open_(endpoint)
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > until_s:
                raise UsageError(f"endpoint {endpoint}: {error.strerror or error}") from error
        time.sleep(0.01)
