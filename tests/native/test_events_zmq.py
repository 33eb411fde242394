"""`kvfs events --zmq`: routers that read vLLM's events read ours, and believe in what is there, whatever happens."""

import base64
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import REPOSITORY, slowness, wait_until

import kvfs

msgspec = pytest.importorskip("msgspec", reason="the package msgspec is not installed")
zmq = pytest.importorskip("zmq", reason="the package pyzmq is not installed")

# The schema of vLLM 0.33, as a router would write it down.


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class StoredArray(msgspec.Struct, tag="BlockStored", array_like=True, omit_defaults=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True, omit_defaults=True):
    block_hashes: list[bytes | int]
    medium: str | None


class ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


class ArrayBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[StoredArray | RemovedArray | ClearedArray]
    data_parallel_rank: int | None = None


def key_of(number, group=0):
    """As vLLM's offload keys: a hash of 32 bytes, and the group."""
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


class Router:
    """Believes what it is told."""

    def __init__(self, endpoint, batch=Batch, topic=""):
        self.batch, self.believed, self.payloads, self.sequences = batch, set(), [], []
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.subscribe(topic)
        # It binds, as the publisher of a test connects: nothing is lost before both are there.
        self.socket.bind(endpoint)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.destroy(linger=0)

    def hear(self, timeout_s=0.2):
        """All messages until none comes in time."""
        while self.socket.poll(int(timeout_s * 1000)):
            topic, sequence, payload = self.socket.recv_multipart()
            self.topic = topic
            self.sequences.append(int.from_bytes(sequence, "big"))
            self.payloads.append(payload)
            self.apply(payload)

    def apply(self, payload):
        self.last = msgspec.msgpack.decode(payload, type=self.batch)
        for event in self.last.events:
            if hasattr(event, "token_ids"):
                assert (event.token_ids, event.block_size, event.parent_block_hash) == ([], 0, None)
                self.believed |= {(hash_, getattr(event, "group_idx", None)) for hash_ in event.block_hashes}
            elif hasattr(event, "block_hashes"):
                self.believed -= {(hash_, getattr(event, "group_idx", None)) for hash_ in event.block_hashes}
            else:
                self.believed.clear()

    def wait(self, numbers, group=0):
        """Hear until exactly these are believed."""
        wanted = {(number, group) for number in numbers}

        def heard():
            self.hear(0.05)
            return self.believed == wanted

        wait_until(heard, "the router to believe in what is there", timeout_s=20)


@pytest.fixture
def publishing():
    """publishing(MOUNTPOINT, NAMESPACE, *words): a `kvfs events --zmq` until the test's end."""
    running = []

    def start(*words):
        program = subprocess.Popen(
            [sys.executable, "-m", "kvfs", "events", *map(str, words)], cwd=REPOSITORY, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        # It waits for the router's subscription, which goes out when the router first listens.
        running.append(program)
        return program

    yield start
    for program in running:
        program.send_signal(signal.SIGTERM)
        said, errors = program.communicate(timeout=20 * slowness())
        assert said.startswith("events of") and "Traceback" not in errors, (said, errors)


@pytest.fixture
def tcp():
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
    return f"tcp://127.0.0.1:{port}"


def test_a_router_believes_in_what_is_there(directory, publishing, tcp):
    with kvfs.connect(directory, "llama", gpu=None) as client, Router(tcp) as router:
        client.put([(key_of(n, 1), b"x") for n in range(700)])
        publishing(directory, "llama", "--zmq", tcp, "--rank", "3")
        router.wait(range(700), group=1)
        assert router.last.data_parallel_rank == 3
        client.put([(key_of(n, 1), b"y") for n in range(600, 800)])
        client.delete([key_of(n, 1) for n in range(0, 800, 2)])
        router.wait(range(1, 800, 2), group=1)
        assert router.sequences == list(range(router.sequences[0], router.sequences[-1] + 1)) and router.topic == b""
        assert {event.medium for event in router.last.events} == {"STORAGE"}


def test_options_of_messages(directory, publishing, tcp):
    with kvfs.connect(directory, "llama", gpu=None) as client, Router(tcp, ArrayBatch, "kv@") as router:
        words = ("--arrays", "--topic", "kv@pod", "--medium", "DISK", "--hashes", "vllm")
        client.put([(key_of((5 << 64) + 7), b"x")])
        publishing(directory, "llama", "--zmq", tcp, *words)
        hash_ = key_of((5 << 64) + 7)[:32]
        wait_until(lambda: router.hear(0.05) or router.believed == {(hash_, None)}, "the block")
        assert router.topic == b"kv@pod" and router.last.events[-1].medium == "DISK"
        client.delete([key_of((5 << 64) + 7)])
        wait_until(lambda: router.hear(0.05) or not router.believed, "the removal")


def test_a_gap_a_restart_and_an_unmount_leave_no_wrong_belief(own_pool, publishing, tcp):
    pool = own_pool(files=2, size="256M", environment={"KVFS_EVENTS_SIZE": str(256 << 10)})
    with kvfs.connect(pool.mount, "llama", gpu=None) as client, Router(tcp) as router:
        client.put([(key_of(n), b"x") for n in range(10)])
        program = publishing(pool.mount, "llama", "--zmq", tcp)
        router.wait(range(10))
        program.send_signal(signal.SIGSTOP)
        for first in range(10, 6000, 1000):
            client.put([(key_of(n), b"x") for n in range(first, first + 1000)])
        client.delete([key_of(n) for n in range(6, 5900)])
        program.send_signal(signal.SIGCONT)
        there = [*range(6), *range(5900, 6010)]
        router.wait(there)
        pool.kill()
        pool.remount()
        client.delete([key_of(0)])
        there = [int.from_bytes(key[:32], "big") for key in client.list()]
        router.wait(there)
        pool.umount()
        router.wait([])
        pool.start()
        router.wait(there)


def test_lost_messages_are_asked_for_again(directory, publishing, tcp, tmp_path):
    replay = f"ipc://{tmp_path}/replay"
    with kvfs.connect(directory, "llama", gpu=None) as client, Router(tcp) as router:
        publishing(directory, "llama", "--zmq", tcp, "--replay", replay)
        for number in range(5):
            client.put([(key_of(number), b"x")])
            router.wait(range(number + 1))
        with zmq.Context() as context, context.socket(zmq.REQ) as socket:
            socket.linger = 0
            socket.connect(replay)
            asked = router.sequences[2]
            socket.send(asked.to_bytes(8, "big"))
            assert socket.poll(5000 * slowness())
            topic, sequence, payload = socket.recv_multipart()
            assert (topic, int.from_bytes(sequence, "big"), payload) == (b"", asked, router.payloads[2])


def test_what_is_no_endpoint_or_no_pool_is_one_line(directory, tmp_path):
    for words, said in (
        ((directory, "--zmq", "nonsense"), "endpoint nonsense"), ((tmp_path,), "not on a kvfs mount"),
        ((directory, "--topic", "t"), "--topic is of --zmq"), ((directory, "--node", "a"), "--node is of --pod"),
        ((directory, "--zmq", "tcp://*:1", "--tokens-memory", "1M"), "--tokens-memory is of --tokens-from"),
        ((directory, "--zmq", "tcp://*:1", "--chunk", "4"), "--chunk is of --tokens-from"),
        ((directory, "--zmq", "tcp://*:1", "--keys"), "no --count"),
    ):  # fmt: skip
        done = subprocess.run([sys.executable, "-m", "kvfs", "events", *map(str, words)], cwd=REPOSITORY,
                              capture_output=True, text=True, timeout=60)  # fmt: skip
        assert done.returncode in (1, 2) and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


_READ_BY_VLLM = """
import base64, sys, msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
believed = set()
for line in sys.stdin:
    batch = msgspec.msgpack.decode(base64.b64decode(line), type=KVEventBatch)
    for event in batch.events:
        if isinstance(event, BlockStored):
            believed |= {(hash_, event.group_idx, event.medium) for hash_ in event.block_hashes}
        elif isinstance(event, BlockRemoved):
            believed -= {(hash_, event.group_idx, event.medium) for hash_ in event.block_hashes}
        else:
            assert isinstance(event, AllBlocksCleared)
            believed.clear()
print(sorted(hash_ for hash_, group, medium in believed), {x[1:] for x in believed})
"""


def test_vllm_s_own_classes_read_our_messages(directory, publishing, tcp):
    where = subprocess.run([REPOSITORY / "tools/setup-engines", "--where", "vllm"], capture_output=True, text=True)
    if where.returncode:
        pytest.skip(where.stdout.strip() or where.stderr.strip())
    with kvfs.connect(directory, "llama", gpu=None) as client, Router(tcp) as router:
        client.put([(key_of(n, 2), b"x") for n in range(5)])
        publishing(directory, "llama", "--zmq", tcp)
        router.wait(range(5), group=2)
        client.delete([key_of(n, 2) for n in (1, 3)])
        router.wait([0, 2, 4], group=2)
    lines = "".join(base64.b64encode(payload).decode() + "\n" for payload in router.payloads)
    done = subprocess.run([where.stdout.strip(), "-c", _READ_BY_VLLM], input=lines, capture_output=True, text=True,
                          timeout=200, env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}, cwd="/")  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["[0, 2, 4] {(2, 'STORAGE')}"], done.stderr[-3000:]


def resident() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_peers_that_ask_for_a_replay_and_read_nothing_cost_little(tmp_path: pathlib.Path) -> None:
    from kvfs.client.publisher import Publisher

    context = zmq.Context()
    try:
        with Publisher(f"ipc://{tmp_path}/events", replay=f"ipc://{tmp_path}/replay") as publisher:
            first = publisher.sequence
            for number in range(200):
                publisher.send([{"number": number, "bytes": bytes(1 << 20)}])
            peers = []
            for _ in range(61):
                peer = context.socket(zmq.DEALER)
                peer.set_hwm(1)
                peer.setsockopt(zmq.RCVBUF, 4096)
                peer.connect(f"ipc://{tmp_path}/replay")
                peers.append(peer)
            *silent, reader = peers
            before = resident()
            for peer in silent:
                peer.send_multipart([b"", bytes(8)])
            for _ in range(500):
                publisher.serve_replay()
            # Of each there is one copy, whoever is to have it; two messages lie at each peer, in this process too.
            assert resident() - before < 200 << 20, "60 peers, 200 MiB each"
            # Beside them another has all that it asks for.
            reader.send_multipart([b"", (first + 50).to_bytes(8, "big")])
            numbers: list[int] = []

            def heard() -> bool:
                publisher.serve_replay()
                while reader.poll(5):
                    numbers.append(int.from_bytes(reader.recv_multipart()[2], "big", signed=True))
                    publisher.serve_replay()
                return numbers[-1:] == [-1]

            wait_until(heard, "the end of its replay", timeout_s=30)
            assert numbers == [*range(first + 50, first + 200), -1]
    finally:
        context.destroy(linger=0)


class Peers:
    """A double of the replay socket: peers that ask, and have room for so many messages."""

    def __init__(self) -> None:
        self.asks: list[bytes] = []
        self.room: dict[bytes, int] = {}
        self.ended: list[bytes] = []

    def poll(self, timeout_ms: int) -> bool:
        return bool(self.asks)

    def recv_multipart(self) -> list[bytes]:
        return [self.asks.pop(0), b"", bytes(8)]

    def send_multipart(self, parts: tuple[bytes, ...], flags: int, copy: bool) -> None:
        if not self.room.get(parts[0]):
            raise zmq.Again
        self.room[parts[0]] -= 1
        if parts[3] == b"\xff" * 8:
            self.ended.append(parts[0])


class Clock:
    """Of the publisher."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 0.001
        return self.now_s

    time = monotonic

    def time_ns(self) -> int:
        return round(self.now_s * 1e9)


@pytest.fixture
def replaying(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Peers, Clock]]:
    """A publisher of 200 batches, with doubles of its replay socket and its clock."""
    from kvfs.client import publisher as module

    clock, peers = Clock(), Peers()
    monkeypatch.setattr(module, "time", clock)
    with module.Publisher(f"ipc://{tmp_path}/events", replay=f"ipc://{tmp_path}/replay") as publisher:
        for number in range(200):
            publisher.send([{"number": number}])
        monkeypatch.setattr(publisher, "_replay", peers)
        yield publisher, peers, clock


def test_a_replay_goes_on_whose_peer_has_just_read(replaying: tuple[Any, Peers, Clock]) -> None:
    publisher, peers, clock = replaying
    peers.asks, peers.room = [b"slow"], {b"slow": 8}
    publisher.serve_replay()
    clock.now_s += 11
    peers.room[b"slow"] = 8
    publisher.serve_replay()
    assert publisher.is_replaying
    peers.room[b"slow"] = 1000
    while publisher.is_replaying:
        publisher.serve_replay()
    assert peers.ended == [b"slow"]
    peers.asks, peers.room[b"slow"] = [b"slow"], 8
    publisher.serve_replay()
    clock.now_s += 11
    publisher.serve_replay()
    assert not publisher.is_replaying, "it has read nothing for 11 s"


def test_peers_that_ask_again_and_again_push_out_none_that_reads(replaying: tuple[Any, Peers, Clock]) -> None:
    publisher, peers, _ = replaying
    silent = [b"silent %d" % i for i in range(17)]
    peers.asks = [b"honest"]
    for _ in range(50):
        peers.asks += silent
        peers.room[b"honest"] = 8
        publisher.serve_replay()
    assert peers.ended == [b"honest"]
