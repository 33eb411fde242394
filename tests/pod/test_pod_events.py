"""`kvfs events --pod` on a pod: one stream has all nodes' blocks, with the node that stored each."""

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from helpers import REPOSITORY, requires_fuse, requires_root, slowness, wait_until
from podmounts import Pod

import kvfs

pytest.importorskip("msgspec", reason="the package msgspec is not installed")
pytest.importorskip("zmq", reason="the package pyzmq is not installed")

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    """start(FILE, *words): a `kvfs events` that writes into a file of the test's directory, until the test's end."""
    running = []

    def begin(name: str, *words: str | os.PathLike[str]) -> subprocess.Popen[bytes]:
        with (tmp_path / name).open("wb") as output, (tmp_path / f"{name}.errors").open("wb") as errors:
            command = [sys.executable, "-m", "kvfs", "events", *words]
            running.append(subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=errors))
        return running[-1]

    yield begin
    for process in running:
        process.send_signal(signal.SIGTERM)
        process.wait(20 * slowness())
    for path in tmp_path.glob("*.errors"):
        assert "Traceback" not in path.read_text(), path.read_text()


def test_one_stream_has_all_nodes_blocks(tmp_path: pathlib.Path, start: Start) -> None:
    requires_root()
    requires_fuse()
    events, replay = (f"ipc://{tmp_path}/{end}" for end in ("e", "r"))
    with Pod(nodes=2) as pod:
        here, there = (node.mount for node in pod.nodes)
        publishing = (there, "llama", "--zmq", events, "--replay", replay, "--hashes", "keys")

        def believed() -> dict[str, set[str]]:
            nodes: dict[str, set[str]] = {"zero": set(), "one": set()}
            for line in (tmp_path / "pod").read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    event = json.loads(line)
                    keys = nodes[event["node"]]
                    (keys.add if event["event"] == "stored" else keys.discard)(bytes.fromhex(event["key"]).decode())
            return nodes

        def wait(zero: str, one: str) -> None:
            wanted = {"zero": set(zero), "one": set(one)}
            wait_until(lambda: believed() == wanted, f"{wanted}", timeout_s=30)

        with kvfs.connect(here, "llama", gpu=None) as a, kvfs.connect(there, "llama", gpu=None) as b:
            b.put([("a", b"x"), ("b", b"x")])
            publisher = start("one", *publishing)
            start("pod", here, "llama", "--pod", f"one={events},{replay}", "--node", "zero", "-o", "json")
            wait("", "ab")
            a.put([("c", b"x"), ("d", b"x")])
            b.delete(["b"])
            wait("cd", "a")
            wait_until(lambda: b.exists(["c"]) == [True], "the news of c", timeout_s=30)
            b.delete(["c"])  # another node's block
            wait("d", "a")
            # A publisher that was away tells what is there, and so what went meanwhile.
            publisher.send_signal(signal.SIGTERM)
            publisher.wait(20 * slowness())
            b.delete(["a"])
            b.put([("e", b"x")])
            start("one-again", *publishing)
            wait("d", "e")
