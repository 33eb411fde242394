"""All nodes' events of a pod as one stream: `kvfs events --pod`.

Each node reports only the blocks stored on it. Its own `kvfs events --zmq --hashes keys` publishes them. Here they are
subscribed to, with this node's subscription. A block exists while any node has it: every node reads all of a pod's
devices. So routers get its end with the last node that had it.

A loss shows in the numbers of a node's messages, also when it comes back or begins anew. Then it is asked to tell all
again, between two marks. Blocks that it did not tell of between them are gone from that node.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from kvfs.client.keys import KEY_MAX
from kvfs.client.publisher import ASK_FOR_ALL, Message
from kvfs.client.telling import ALL_CLEARED, ALL_TOLD, JOINING_POLL_S, Telling
from kvfs.client.tokens import TURN_MESSAGES, TURN_SIZE, connected
from kvfs.errors import UsageError

# A node is asked for all again so often, until it has told all.
_ASK_S = 6.0
_NODES_MAX = 4096


class _Event(msgspec.Struct, gc=False):
    type: str
    block_hashes: list[bytes] = []


_BATCH = msgspec.msgpack.Decoder(tuple[float, list[_Event], int])


class Node:
    """Another node's messages. index: its bit in Places, above 0. lost, senseless: messages, since the start."""

    def __init__(self, context: zmq.Context[Any], index: int, name: str, events: str, replay: str) -> None:
        self.index, self.name = index, name
        self.is_whole = False
        self.lost = self.senseless = 0
        # Between the marks: its blocks that it did not tell of yet.
        self._unseen: set[bytes] | None = None
        self._next: int | None = None
        self._asked_s = float("-inf")
        self._socket = connected(context, zmq.SUB, events)
        self._socket.subscribe(b"")
        self._questions = connected(context, zmq.DEALER, replay)

    def turn(self, left: list[int], places: Places) -> Iterator[tuple[bytes, bool]]:
        """A part of the waiting changes: keys, and whether the node has them now."""
        self._ask()
        while min(left) > 0:
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            left[0] -= 1
            left[1] -= sum(map(len, parts))
            yield from self._heard(parts, places)

    def _ask(self) -> None:
        if self.is_whole or self._unseen is not None or time.monotonic() < self._asked_s + _ASK_S:
            return
        self._asked_s = time.monotonic()
        with suppress(zmq.Again):  # questions wait for the node
            self._questions.send_multipart((b"", ASK_FOR_ALL), zmq.DONTWAIT)

    def _heard(self, parts: Sequence[bytes], places: Places) -> Iterator[tuple[bytes, bool]]:
        try:
            if len(parts) != 3 or len(parts[1]) != 8:
                raise ValueError
            number = int.from_bytes(parts[1], "big")
            _, events, _ = _BATCH.decode(parts[2])
            if any(not 0 < len(key) <= KEY_MAX for event in events for key in event.block_hashes):
                raise ValueError
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self.senseless += 1
            return
        if number != self._next:
            self.lost += self._next is not None
            self.is_whole, self._unseen = False, None
        self._next = number + 1
        for event in events:
            if event.type == "BlockStored":
                for key in event.block_hashes:
                    if self._unseen is not None:
                        self._unseen.discard(key)
                    yield key, True
            elif event.type == "BlockRemoved":
                yield from ((key, False) for key in event.block_hashes)
            elif event.type == ALL_CLEARED:
                self._unseen = places.of(self.index)
            elif event.type == ALL_TOLD and self._unseen is not None:
                yield from ((key, False) for key in self._unseen)
                self.is_whole, self._unseen = True, None


class Places:
    """Which nodes have a block: a bit for each."""

    def __init__(self) -> None:
        self._bits: dict[bytes, int] = {}

    def add(self, key: bytes, index: int) -> bool:
        """Whether that is news."""
        before = self._bits.get(key, 0)
        self._bits[key] = before | 1 << index
        return not before >> index & 1

    def discard(self, key: bytes, index: int) -> tuple[bool, bool]:
        """Whether that is news, and whether no node has the block now."""
        before = self._bits.get(key, 0)
        after = before & ~(1 << index)
        if after:
            self._bits[key] = after
        else:
            self._bits.pop(key, None)
        return before != after, before != after and not after

    def of(self, index: int) -> set[bytes]:
        return {key for key, bits in self._bits.items() if bits >> index & 1}


class Nodes:
    """The other nodes: NAME=EVENTS,REPLAY of each. UsageError: words or an endpoint that cannot be."""

    def __init__(self, words: Sequence[str]) -> None:
        self._context = zmq.Context()
        self._first = 0
        self.nodes: list[Node] = []
        try:
            if len(words) > _NODES_MAX:
                raise UsageError(f"--pod: {len(words)} nodes, {_NODES_MAX} are possible")
            for index, word in enumerate(words, 1):
                name, _, endpoints = word.partition("=")
                events, _, replay = endpoints.partition(",")
                if not (name and events and replay):
                    raise UsageError(
                        f"--pod {word}: NAME=EVENTS,REPLAY is expected, as node1=tcp://node1:7000,tcp://node1:7001"
                    )
                self.nodes.append(Node(self._context, index, name.strip(), events.strip(), replay.strip()))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def turn(self, places: Places) -> Iterator[tuple[Node, bytes, bool]]:
        """A bounded part of the nodes' events: each in turn."""
        left = [TURN_MESSAGES, TURN_SIZE]
        for _ in self.nodes:
            node = self.nodes[self._first]
            self._first = (self._first + 1) % len(self.nodes)
            for key, has in node.turn(left, places):
                yield node, key, has
            if min(left) <= 0:
                self.more = True
                return
        self.more = False

    more = False


class PodTelling(Telling):
    """A pod's changes on their way to a publisher. name: this node's. A block is sent with each node that has it.
    each: so is its end on each of them; without it only the end on the last."""

    def __init__(self, *given: Any, nodes: Nodes, name: str, each: bool = False, **more: Any) -> None:
        super().__init__(*given, **more)
        self._nodes, self._name, self._each = nodes, name, each
        self.places = Places()

    def _known(self) -> set[bytes]:
        return self.places.of(0)

    def _stored(self, key: bytes) -> Iterator[Message]:
        return self._comes(key, 0, self._name)

    def _removed(self, keys: Iterable[bytes]) -> Iterator[Message]:
        for key in keys:
            yield from self._goes(key, 0, self._name)

    def _there(self, keys: Iterable[bytes], gone: set[bytes]) -> Iterator[Message]:
        for key in keys:
            if key in gone:
                gone.discard(key)
            else:
                yield from self._comes(key, 0, self._name)

    def _others(self) -> None:
        super()._others()
        self._send(self._heard())
        self._more = self._more or self._nodes.more

    def _poll_s(self) -> float:
        return min(super()._poll_s(), JOINING_POLL_S)

    def _heard(self) -> Iterator[Message]:
        for node, key, has in self._nodes.turn(self.places):
            yield from (self._comes if has else self._goes)(key, node.index, node.name)

    def _comes(self, key: bytes, index: int, name: str) -> Iterator[Message]:
        if self.places.add(key, index):
            yield from _by(name, self.teller.stored(key))

    def _goes(self, key: bytes, index: int, name: str) -> Iterator[Message]:
        is_news, is_last = self.places.discard(key, index)
        if is_last:
            yield from _by(name, self.teller.removed([key]))
        elif is_news and self._each:
            yield from _by(name, self._schema.removed([(key, None)]))


def _by(name: str, messages: Iterable[Message]) -> Iterator[Message]:
    """With the node's name. An array has no room for it."""
    for message in messages:
        if isinstance(message, dict):
            message["node"] = name
        yield message
