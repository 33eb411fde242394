"""A subscription's events over ZeroMQ, in the schema of vLLM's KV cache events: for routers that read vLLM's.

A message has three parts: the topic, a sequence number (8 bytes, big-endian), and an event batch in msgpack. The batch
is an array: time, events, data-parallel rank. Each event is a map with its type (vLLM 0.33, distributed/kv_events.py),
or an array, as older routers have it. A block is stored without token ids or parent, as by vLLM's own storage tiers:
kvfs knows keys alone.

A router must never believe in blocks that are gone. So at the beginning, and after each gap or reset, all blocks are
cleared and those that are there are told again. Events that came meanwhile follow, and lead to what is there now.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeAlias

from kvfs.client.client import Client
from kvfs.client.events import Events, Gap, Removed, Reset, Stored
from kvfs.errors import KvfsError, MissingFeatureError, NotMountedError, UsageError

try:
    import msgspec
    import zmq
except ImportError as error:
    raise MissingFeatureError(f"publishing events needs {error.name}: pip install 'kvfs[events]'") from error

_BATCH_MAX = 512
# Batches that the replay socket can send again, as vLLM's default; and bytes, of which a batch of 512 blocks has some
# 100,000.
REPLAY_BATCHES = 10_000
REPLAY_BYTES = 256 << 20
_HIGH_WATER = 100_000
# Messages of a replay that a peer has not read, and the part of one that is sent between two looks at events.
_REPLAY_HIGH_WATER = 8
_REPLAY_PART = 64
# Replays that are under way; beyond, the one gives way whose peer has read nothing for longest. So does one whose
# peer reads nothing for so long.
_REPLAYS_MAX = 16
_REPLAY_PATIENCE_S = 10.0
# A router that is there answers within that; without one, publishing begins all the same.
_ROUTER_WAIT_MS = 5000
# The end of a replay: a sequence number of -1, without a batch.
_REPLAY_END = (-1).to_bytes(8, "big", signed=True)
_GROUP_SIZE = 4
_POLL_S = 0.1
# While a replay is under way.
_REPLAYING_POLL_S = 0.005
# An unmounted pool is looked for so often.
_AWAY_S = 1.0

Hash: TypeAlias = bytes | int
Message: TypeAlias = dict[str, object] | list[object]


@dataclass(frozen=True, slots=True)
class Schema:
    """How a block becomes an event. medium: where routers believe it to lie. groups: keys are vLLM's, a block hash and
    the number of a KV cache group (4 bytes, big-endian), which events have apart. integers: hashes are their last 64
    bits, as with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=1. arrays: an event is an array, as older routers have it."""

    medium: str = "STORAGE"
    groups: bool = True
    integers: bool = False
    arrays: bool = False

    def hash_of(self, key: bytes) -> tuple[Hash, int | None]:
        """A key's block hash, and its group. A key that is too short to have a group is all hash."""
        hash_, group = key, None
        if self.groups and len(key) > _GROUP_SIZE:
            hash_, group = key[:-_GROUP_SIZE], int.from_bytes(key[-_GROUP_SIZE:], "big")
        return (int.from_bytes(hash_[-8:], "big") if self.integers else hash_), group

    def stored(self, key: bytes) -> Message:
        hash_, group = self.hash_of(key)
        fields: dict[str, object] = {
            "block_hashes": [hash_], "parent_block_hash": None, "token_ids": [], "block_size": 0, "lora_id": None,
            "medium": self.medium, "lora_name": None, "extra_keys": None, "group_idx": group,
        }  # fmt: skip
        return self._made("BlockStored", fields)

    def removed(self, keys: Iterable[bytes]) -> list[Message]:
        """One event for each group."""
        groups: dict[int | None, list[Hash]] = {}
        for key in keys:
            hash_, group = self.hash_of(key)
            groups.setdefault(group, []).append(hash_)
        return [
            self._made("BlockRemoved", {"block_hashes": hashes, "medium": self.medium, "group_idx": group})
            for group, hashes in groups.items()
        ]

    def cleared(self) -> Message:
        return self._made("AllBlocksCleared", {})

    def _made(self, name: str, fields: dict[str, object]) -> Message:
        if self.arrays:
            return [name, *fields.values()]
        return {"type": name, **fields}


class Publisher:
    """The sockets. endpoint: bound if it has a wildcard, or is ipc or inproc, else connected to. replay: where batches
    can be asked for again. One thread. UsageError: an endpoint that cannot be had."""

    def __init__(self, endpoint: str, *, replay: str | None = None, topic: str = "", rank: int = 0) -> None:
        self._topic, self._rank = topic.encode(), rank
        self._sequence = 0
        self._sent: deque[tuple[int, bytes]] = deque()
        self._sent_size = 0
        # Peers that are being answered: the next batch for each, and when it got the last one.
        self._replays: dict[bytes, tuple[int, float]] = {}
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._socket = self._context.socket(zmq.XPUB)  # PUB, but that it says who subscribes
            self._socket.set_hwm(_HIGH_WATER)
            is_bound = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
            self._open(self._socket.bind if is_bound else self._socket.connect, endpoint)
            if not is_bound:  # messages sent before the router has answered are lost
                self._socket.poll(_ROUTER_WAIT_MS)
            if replay is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                # A router that asks and does not read loses the rest; it holds up nobody. It is an error here, and not
                # silence, that a peer's queue is full, or that the peer has gone.
                self._replay.set_hwm(_REPLAY_HIGH_WATER)
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self._open(self._replay.bind, replay)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _open(open_: Callable[[str], object], endpoint: str) -> None:
        try:
            open_(endpoint)
        except zmq.ZMQError as error:
            failure = UsageError(f"endpoint {endpoint}: {error.strerror or error}")
            raise failure from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let what was sent go for a second at most."""
        self._context.destroy(linger=1000)

    def send(self, events: Sequence[Message]) -> None:
        """Publish one batch."""
        while self._socket.poll(0):  # subscriptions
            self._socket.recv()
        payload = msgspec.msgpack.encode([time.time(), events, self._rank])
        self._socket.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), payload))
        if self._replay is not None:
            self._sent.append((self._sequence, payload))
            self._sent_size += len(payload)
            while len(self._sent) > REPLAY_BATCHES or self._sent_size > REPLAY_BYTES:
                self._sent_size -= len(self._sent.popleft()[1])
        self._sequence += 1

    def serve_replay(self) -> None:
        """Answer those who ask for batches again: from the sequence number on that they name. A part of what they want,
        so that events are told meanwhile. The rest follows with the next calls, as fast as they read."""
        for _ in range(_REPLAYS_MAX):
            if self._replay is None or not self._replay.poll(0):
                break
            parts = self._replay.recv_multipart()
            if len(parts) != 3 or len(parts[2]) != 8:
                continue
            # To ask again is no progress.
            _, since_s = self._replays.get(parts[0], (0, time.monotonic()))
            self._replays[parts[0]] = int.from_bytes(parts[2], "big"), since_s
            if len(self._replays) > _REPLAYS_MAX:
                del self._replays[min(self._replays, key=lambda who: self._replays[who][1])]
                # All get a part before the next peer is heard.
                break
        for who in list(self._replays):
            self._replay_some(who)

    def _replay_some(self, who: bytes) -> None:
        first = self._sent[0][0] if self._sent else self._sequence
        at = max(self._replays[who][0], first)
        end = min(at + _REPLAY_PART, self._sequence)
        try:
            for sequence in range(at, end):
                self._answer(who, self._topic, sequence.to_bytes(8, "big"), self._sent[sequence - first][1])
                self._replays[who] = sequence + 1, time.monotonic()
            if end >= self._sequence:
                self._answer(who, b"", _REPLAY_END, b"")
                del self._replays[who]
        except zmq.Again:
            # It has not read.
            if time.monotonic() - self._replays[who][1] > _REPLAY_PATIENCE_S:
                del self._replays[who]
        except zmq.ZMQError:
            del self._replays[who]  # it has gone

    @property
    def is_replaying(self) -> bool:
        """Whether somebody is to get more than was sent."""
        return bool(self._replays)

    def _answer(self, who: bytes, *parts: bytes) -> None:
        assert self._replay is not None
        self._replay.send_multipart((who, b"", *parts), flags=zmq.DONTWAIT)


def publish(client: Client, publisher: Publisher, schema: Schema, told: Callable[[str], None]) -> None:
    """Publish the events of the client's namespace, for ever. A pool that is unmounted has no blocks until it is
    mounted again. told: gets a line for each such change."""
    with client.events() as events:
        _publish_all(client, publisher, schema)
        while True:
            try:
                if not _publish_some(events, publisher, schema):
                    told("a gap or a reset: all blocks are told again")
                    _publish_all(client, publisher, schema)
            except NotMountedError as error:
                told(str(error))
                publisher.send([schema.cleared()])
                _wait_mounted(events, publisher)
                _publish_all(client, publisher, schema)


def _wait_mounted(events: Events, publisher: Publisher) -> None:
    while True:
        publisher.serve_replay()
        with suppress(NotMountedError):
            # A reset follows the mount; what is behind it is published later.
            events.next_event(0.0)
            return
        time.sleep(_AWAY_S)


def _publish_some(events: Events, publisher: Publisher, schema: Schema) -> bool:
    """Publish what is there, or comes soon. False: some of it is lost."""
    batch: list[Stored | Removed] = []
    whole = True
    event = events.next_event(_REPLAYING_POLL_S if publisher.is_replaying else _POLL_S)
    while event is not None:
        if isinstance(event, (Gap, Reset)):
            whole = False
            break
        batch.append(event)
        event = events.next_event() if len(batch) < _BATCH_MAX else None
    if batch and whole:
        publisher.send(list(_messages(batch, schema)))
    publisher.serve_replay()
    return whole


def _messages(batch: Sequence[Stored | Removed], schema: Schema) -> Iterator[Message]:
    """In their order; removals that follow one another are one event for each group."""
    removed: list[bytes] = []
    for event in batch:
        assert event.key is not None
        if isinstance(event, Removed):
            removed.append(event.key)
            continue
        yield from schema.removed(removed)
        removed.clear()
        yield schema.stored(event.key)
    yield from schema.removed(removed)


def _publish_all(client: Client, publisher: Publisher, schema: Schema) -> None:
    """All blocks that are there. If the daemon goes meanwhile, a reset follows, and this is done again."""
    publisher.send([schema.cleared()])
    batch: list[Message] = []
    try:
        for key in client.list():
            batch.append(schema.stored(key))
            if len(batch) == _BATCH_MAX:
                publisher.send(batch)
                batch = []
                publisher.serve_replay()
    except NotMountedError:
        return
    except KvfsError:
        if client.information().connected:
            raise
    if batch:
        publisher.send(batch)
