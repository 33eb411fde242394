"""`kvfs events --zmq` into Dynamo's own KV indexer: which tokens it credits, and which no more."""

import contextlib
import hashlib
import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from helpers import REPOSITORY, slowness, wait_until

import kvfs

msgspec = pytest.importorskip("msgspec", reason="the package msgspec is not installed")
zmq = pytest.importorskip("zmq", reason="the package pyzmq is not installed")

SIZE = 16  # tokens a block
MODEL = "llama"


def port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Indexer:
    """Dynamo's, on a port of its own."""

    def __init__(self, python: str) -> None:
        self.port = port()
        program = "import sys, dynamo._core as core; core.run_kv_indexer(sys.argv[1:])"
        self.process = subprocess.Popen(
            [python, "-c", program, "--port", str(self.port), "--threads", "1"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
        )  # fmt: skip
        wait_until(lambda: self.ask("/health")[0] == 200, "Dynamo's indexer", timeout_s=30)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def ask(self, path: str, body: object = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=10 * slowness()) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, None

    def register(self, endpoint: str, **more: object) -> None:
        body = {"instance_id": 7, "endpoint": endpoint, "model_name": MODEL, "block_size": SIZE, **more}
        status, said = self.ask("/register", body)
        assert status in (200, 201), said

    def credited(self, tokens: Sequence[int]) -> int:
        """Tokens of the prompt that the indexer believes to be on kvfs's disks."""
        status, said = self.ask("/query", {"token_ids": list(tokens), "model_name": MODEL})
        if status == 404:
            return 0
        assert status == 200, said
        return max((instance.get("disk", 0) for instance in said["instances"].values()), default=0)


class Model:
    """A prompt's blocks, and an engine that publishes them as vLLM does."""

    def __init__(self, blocks: int, seed: int = 0) -> None:
        self.tokens = list(range(1000 + 10_000 * seed, 1000 + 10_000 * seed + SIZE * blocks))
        self.hashes = [hashlib.sha256(bytes([seed, n])).digest() for n in range(blocks)]

    def blocks(self, chunk: int = 1) -> list[bytes]:
        return [hash_ + bytes(4) for hash_ in self.hashes[chunk - 1 :: chunk]]

    def stored(self, first: int, end: int, medium: str = "GPU") -> dict[str, object]:
        return {
            "type": "BlockStored", "block_hashes": self.hashes[first:end],
            "parent_block_hash": self.hashes[first - 1] if first else None,
            "token_ids": self.tokens[first * SIZE : end * SIZE], "block_size": SIZE, "lora_id": None,
            "medium": medium, "lora_name": None, "group_idx": 0,
        }  # fmt: skip


class Engine:
    """Publishes, and answers who asks again."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket, self.replay = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        names = [
            f"tcp://127.0.0.1:{each.bind_to_random_port('tcp://127.0.0.1')}" for each in (self.socket, self.replay)
        ]
        self.endpoint, self.both = names[0], ",".join(names)
        self.sent: list[bytes] = []

    def tell(self, *events: dict[str, object]) -> None:
        self.sent.append(msgspec.msgpack.encode([1.0, list(events), 0]))
        self.socket.send_multipart([b"", (len(self.sent) - 1).to_bytes(8, "big"), self.sent[-1]])

    def serve(self) -> None:
        while self.replay.poll(0):
            who, _, first = self.replay.recv_multipart()
            for number in range(int.from_bytes(first, "big"), len(self.sent)):
                self.replay.send_multipart([who, b"", b"", number.to_bytes(8, "big"), self.sent[number]])
            self.replay.send_multipart([who, b"", b"", b"\xff" * 8, b""])

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def indexer(engine: Any) -> Iterator[Indexer]:
    with contextlib.closing(Indexer(str(engine("dynamo").python))) as started:
        yield started


@pytest.fixture
def publishing(directory: Any) -> Iterator[Any]:
    """publishing(*words): the endpoint and the replay endpoint of a `kvfs events --zmq`, and its process."""
    running = []

    def start(*words: str, ports: Sequence[int] | None = None) -> tuple[str, str, subprocess.Popen[str]]:
        events, replay = (f"tcp://127.0.0.1:{each}" for each in ports or (port(), port()))
        command = [sys.executable, "-m", "kvfs", "events", str(directory), MODEL, "--zmq",
                   events.replace("127.0.0.1", "*"), "--replay", replay, *words]  # fmt: skip
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None and process.stdout.readline().startswith("events of")
        return events, replay, process

    yield start
    for process in running:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20 * slowness())
        assert "Traceback" not in errors, errors


def test_blocks_are_credited_with_an_engine_s_tokens_and_not_when_they_are_gone(
    directory: Any, indexer: Indexer, publishing: Any
) -> None:
    model = Model(8)
    with contextlib.closing(Engine()) as engine, kvfs.connect(directory, MODEL, gpu=None) as client:
        engine.tell(model.stored(0, 5))
        endpoint, replay, _ = publishing("--tokens-from", engine.both)
        indexer.register(endpoint, replay_endpoint=replay)
        client.put([(key, b"x") for key in model.blocks()])  # the last three wait for their tokens

        def credited(count: int) -> bool:
            engine.serve()
            return indexer.credited(model.tokens) == count * SIZE

        wait_until(lambda: credited(5), "five blocks are credited", timeout_s=20)
        engine.tell(model.stored(5, 8))
        wait_until(lambda: credited(8), "all blocks are credited", timeout_s=20)
        client.delete(model.blocks()[6:])
        wait_until(lambda: credited(6), "those are gone", timeout_s=20)
        client.delete(model.blocks())
        wait_until(lambda: credited(0), "all are gone", timeout_s=20)


def test_chunks_of_several_blocks_and_what_two_prompts_share(directory: Any, indexer: Indexer, publishing: Any) -> None:
    one, two = Model(8), Model(8)
    two.tokens = [*one.tokens[: 5 * SIZE], *range(1, 1 + 3 * SIZE)]
    two.hashes = [*one.hashes[:5], *Model(8, 1).hashes[5:]]
    with contextlib.closing(Engine()) as engine, kvfs.connect(directory, MODEL, gpu=None) as client:
        for model in (one, two):
            engine.tell(model.stored(0, 8))  # all at once, as by an engine's own memory
            engine.tell(model.stored(0, 4, "CPU"), model.stored(4, 8, "CPU"))
        endpoint, replay, _ = publishing("--tokens-from", engine.both)
        indexer.register(endpoint, replay_endpoint=replay)

        def credited(model: Model, count: int) -> bool:
            engine.serve()
            return indexer.credited(model.tokens) == count * SIZE

        client.put([(key, b"x") for key in {*one.blocks(4), *two.blocks(4)}])
        for model in (one, two):
            wait_until(lambda model=model: credited(model, 8), "both prompts are credited", timeout_s=20)
        client.delete(one.blocks(4)[1:])
        wait_until(lambda: credited(one, 5), "of this prompt there is what the other has too", timeout_s=20)
        assert credited(two, 8)


def test_a_publisher_and_an_indexer_that_start_anew_agree_with_kvfs(
    directory: Any, indexer: Indexer, publishing: Any, engine: Any
) -> None:
    model = Model(6)
    ports = port(), port()
    with contextlib.closing(Engine()) as fake, kvfs.connect(directory, MODEL, gpu=None) as client:
        fake.tell(model.stored(0, 6))
        client.put([(key, b"x") for key in model.blocks()])
        endpoint, replay, process = publishing("--tokens-from", fake.both, "--clear", ports=ports)
        indexer.register(endpoint, replay_endpoint=replay)

        def credited(asked: Indexer, count: int) -> bool:
            fake.serve()
            return asked.credited(model.tokens) == count * SIZE

        wait_until(lambda: credited(indexer, 6), "all are credited", timeout_s=20)
        with contextlib.closing(Indexer(str(engine("dynamo").python))) as second:
            second.register(endpoint, replay_endpoint=replay)
            client.put([(Model(1, 5).blocks()[0], b"x")])
            fake.tell(Model(1, 5).stored(0, 1))  # a message shows it that it has missed some
            wait_until(lambda: credited(second, 6), "the second has them by replay", timeout_s=20)
        process.send_signal(signal.SIGTERM)
        process.wait(20 * slowness())
        client.delete(model.blocks()[4:])
        publishing("--tokens-from", fake.both, "--clear", ports=ports)
        wait_until(lambda: credited(indexer, 4), "those that went meanwhile are gone", timeout_s=30)
