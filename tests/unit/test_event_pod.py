"""All nodes' events as one stream (kvfs/client/pod_telling.py): what nodes have, whatever is lost between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import pytest
from helpers import wait_until

msgspec = pytest.importorskip("msgspec", reason="the package msgspec is not installed")
zmq = pytest.importorskip("zmq", reason="the package pyzmq is not installed")

from kvfs.client import pod_telling as module  # noqa: E402
from kvfs.client import telling as telling_module  # noqa: E402
from kvfs.client.event_schemas import PlainSchema, VllmSchema  # noqa: E402
from kvfs.client.events import Reason, Removed, Stored  # noqa: E402
from kvfs.client.pod_telling import Nodes, Places, PodTelling  # noqa: E402
from kvfs.client.publisher import Publisher  # noqa: E402
from kvfs.client.telling import Telling  # noqa: E402
from kvfs.errors import UsageError  # noqa: E402


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "big")


class Client:
    """A node's own namespace, and its subscription."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.keys: set[bytes] = set()

    def list(self) -> Iterable[bytes]:
        return sorted(self.keys)

    def next_event(self, timeout_s: float = 0.0) -> Any:
        return self.waiting.pop(0) if self.waiting else None

    def store(self, *numbers: int) -> None:
        self.keys |= {key_of(number) for number in numbers}
        self.waiting += [Stored(1, key_of(number), b"", 1, 0, Reason.WRITTEN) for number in numbers]

    def remove(self, *numbers: int) -> None:
        self.keys -= {key_of(number) for number in numbers}
        self.waiting += [Removed(1, key_of(number), b"", 1, 0, Reason.DELETED) for number in numbers]


class Remote(Client):
    """Another node: `kvfs events --zmq --hashes keys` of a namespace, turn by turn."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        ends = [f"ipc://@kvfs-{os.getpid()}-{name}-{end}" for end in ("events", "replay")]
        self.words = f"{name}={ends[0]},{ends[1]}"
        self.ends = ends
        self.begin()

    def begin(self) -> None:
        self.publisher = Publisher(self.ends[0], replay=self.ends[1], answers_all=True)
        self.telling = Telling(cast(Any, self), self.publisher, VllmSchema(groups=False, integers=False), print)
        self.telling._tell_all()

    def turn(self) -> None:
        self.telling.turn(cast(Any, self))

    def end(self) -> None:
        self.publisher.close()


class Printer:
    """Believes what it is told of each node."""

    is_replaying = is_asked_for_all = False
    unread_size = 0

    def __init__(self) -> None:
        self.believed: set[tuple[str, int]] = set()
        self.lines = 0

    def send(self, events: Iterable[Any], now: object) -> None:
        for event in events:
            self.lines += 1
            place = event["node"], int(event["key"], 16)
            (self.believed.add if event["event"] == "stored" else self.believed.remove)(place)

    def serve_replay(self) -> None:
        pass


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Remote]]:
    monkeypatch.setattr(module, "_ASK_S", 0.05)
    monkeypatch.setattr(telling_module, "_AGAIN_S", 0.0)
    made: list[Remote] = []

    def make(name: str) -> Remote:
        made.append(Remote(name))
        return made[-1]

    yield make
    for each in made:
        each.end()


class Pod:
    """This node's `kvfs events --pod`, and the other nodes."""

    def __init__(self, *others: Remote) -> None:
        self.client, self.printer, self.others = Client(), Printer(), list(others)
        self.nodes = Nodes([other.words for other in others])
        self.telling = PodTelling(
            cast(Any, self.client), self.printer, PlainSchema(), print, nodes=self.nodes, name="here", each=True
        )

    def __enter__(self) -> Pod:
        return self

    def __exit__(self, *_: object) -> None:
        self.nodes.close()

    def turn(self) -> None:
        for other in self.others:
            other.turn()
        self.telling.turn(cast(Any, self.client))

    def believes(self, **wanted: Iterable[int]) -> None:
        places = {(name, number) for name, numbers in wanted.items() for number in numbers}
        wait_until(lambda: self.turn() or self.printer.believed == places, f"{wanted}", timeout_s=20)


def test_blocks_are_told_with_the_node_that_has_them(remote: Callable[[str], Remote]) -> None:
    one, two = remote("one"), remote("two")
    one.store(1, 2)
    with Pod(one, two) as pod:
        pod.client.store(2, 3)
        pod.believes(here=[2, 3], one=[1, 2])
        two.store(*range(2, 1500))
        pod.believes(here=[2, 3], one=[1, 2], two=range(2, 1500))
        two.remove(*range(3, 1500))
        pod.client.remove(2)
        one.remove(1)
        pod.believes(here=[3], one=[2], two=[2])


def test_a_node_that_begins_anew_and_one_that_lost_messages(remote: Callable[[str], Remote]) -> None:
    one = remote("one")
    one.store(*range(1000))
    with Pod(one) as pod:
        pod.believes(one=range(1000))
        lines = pod.printer.lines
        one.end()
        one.remove(*range(10, 1000))
        one.store(2000)
        one.waiting.clear()
        one.begin()
        pod.believes(one=[*range(10), 2000])
        assert pod.printer.lines == lines + 991, "what stayed was not told again"
        one.publisher.sequence += 5  # as if they had been lost
        one.remove(0)
        pod.believes(one=[*range(1, 10), 2000])
        (node,) = pod.nodes.nodes
        wait_until(lambda: pod.turn() or node.is_whole, "all is told again", timeout_s=20)
        assert node.lost == 2 and pod.printer.lines == lines + 992


def test_a_router_is_told_of_the_end_with_the_last_node() -> None:
    told: list[Any] = []

    class Outlet(Printer):
        def send(self, events: Iterable[Any], now: object) -> None:
            told.extend(events)

    with Nodes([]) as nodes:
        telling = PodTelling(cast(Any, Client()), Outlet(), VllmSchema(), print, nodes=nodes, name="here")
        key = bytes(31) + b"\x07" + bytes(4)
        for has, index, name in ((1, 0, "here"), (1, 2, "two"), (0, 0, "here"), (0, 0, "here"), (0, 2, "two")):
            telling._send((telling._comes if has else telling._goes)(key, index, name))
    assert [(event["type"], event["node"], event["block_hashes"]) for event in told] == [
        ("BlockStored", "here", [7]), ("BlockStored", "two", [7]), ("BlockRemoved", "two", [7]),
    ]  # fmt: skip


def test_messages_that_make_no_sense_are_passed_over(remote: Callable[[str], Remote]) -> None:
    one = remote("one")
    with Pod(one) as pod:
        pod.believes()
        places = Places()
        (node,) = pod.nodes.nodes
        keys: list[list[object]] = [[7], [b"x" * 300]]
        lies = [msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": each}], 0]) for each in keys]
        for payload in (b"", b"\x91" * 9999, *lies):
            assert not list(node._heard([b"", bytes(8), payload], places))
        assert not list(node._heard([b"", b"", b""], places)) and node.senseless == 5
        one.store(4)
        pod.believes(one=[4])


@pytest.mark.parametrize("word", ["one", "one=tcp://a:1", "=tcp://a:1,tcp://a:2", "one=nonsense,tcp://a:2"])
def test_words_that_name_no_node_are_refused(word: str) -> None:
    with pytest.raises(UsageError):
        Nodes([word])
