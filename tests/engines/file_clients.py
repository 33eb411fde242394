"""Real engines' storage clients: where they lie, and a process of each that does what it is told.

`tools/setup-clients` brings them in. One that is not there is a skip by its name.
"""

import contextlib
import json
import os
import select
import subprocess
import time
from dataclasses import dataclass

import pytest
from helpers import REPOSITORY

from engines import environments

PYTHON = REPOSITORY / ".venv-clients" / "bin" / "python"
SOURCES = REPOSITORY / "build" / "clients"
SCRIPTS = REPOSITORY / "tests" / "engines" / "scripts"
ANSWER_S = 90
COUNT = 8


@dataclass(frozen=True)
class Case:
    """An engine as the player knows it, the parts of build/clients that it needs, and what is told to it.

    index: it believes its own memory about what is there, so a look-up says nothing about files. mapped: it loads
    through a mapping, and of a damaged page there the kernel tells by SIGBUS. stumps: it writes under the final name,
    so a store that failed leaves a file that a look-up finds and a load does not take. size: of each device.
    """

    engine: str
    sources: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    index: bool = False
    mapped: bool = False
    stumps: bool = False
    size: str = "48M"


DIRECT = (("DIRECT", "1"),)
MOONCAKE = "mooncake-transfer-engine-non-cuda"
CASES = {
    "vllm-c": Case("vllm", ("vllm",), (("WITH_C", "1"),)),
    "vllm-python": Case("vllm", ("vllm",)),
    "lmcache-fs-native": Case("lmcache-fs-native", ("lmcache",), DIRECT),
    "lmcache-local-disk": Case("lmcache-local-disk", ("lmcache",), index=True),
    "lmcache-fs-connector": Case("lmcache-fs-connector", ("lmcache",)),
    "lmcache-l2-fs": Case("lmcache-l2", ("lmcache",), DIRECT),
    "sglang-file": Case("sglang-file", ("sglang",)),
    "sglang-nixl": Case("sglang-nixl", ("sglang", "nixl", "nixl-cu12"), stumps=True),
    "nixl-posix": Case("nixl", ("nixl", "nixl-cu12"), stumps=True),
    # Where df says that less than 256 MiB are free it stores nothing, and removes what is there.
    "mooncake-bucket": Case("mooncake", (MOONCAKE,), index=True, size="400M"),
    "mooncake-file": Case(
        "mooncake",
        (MOONCAKE,),
        (("MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR", "file_per_key_storage_backend"),),
        index=True,
        size="400M",
    ),
    "safetensors": Case("safetensors", mapped=True, stumps=True),
    "torch-save": Case("torch", stumps=True),
    "torch-save-mapped": Case("torch", (), (("MAPPED", "1"),), mapped=True, stumps=True),
}
# An engine's report of a miss: its own word for it, or the exception of its load.
MISSES = {
    "miss",
    "FileNotFoundError",
    "OSError",
    "KeyError",
    "EOFError",
    "RuntimeError",
    "transfer ERR",
    "nixlBackendError",
    "SafetensorError",
}


def places(case):
    """The engine's Python, and the folder with its packages. Those of tools/engine-matrix where it names one."""
    versions = (each.partition("==") for each in os.environ.get("KVFS_ENGINE_VERSIONS", "").split())
    name, version = next(((name, version) for name, _, version in versions if name == case.engine), (case.engine, ""))
    if not version:
        return PYTHON, SOURCES / case.sources[0] if case.sources else None
    assert environments.is_there(name, version), f"{name} {version}: tools/engine-matrix --folders makes it"
    return environments.place(name, version) / "bin/python", environments.folder_place(name, version)


class Player:
    """The engine's process."""

    def __init__(self, case, directory, home):
        python, source = places(case)
        missing = [name for name in case.sources if not (SOURCES / name / ".unpacked").exists()]
        if python == PYTHON and (not PYTHON.exists() or missing):
            pytest.skip(
                f"the client {case.engine} is not installed ({', '.join(missing) or 'torch'}): run tools/setup-clients"
            )
        environment = {
            **os.environ,
            "HOME": os.fspath(home),
            "LMCACHE_TRACK_USAGE": "false",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "2",
            **dict(case.environment),
            "PYTHONPATH": ":".join(str(SOURCES / name) for name in case.sources[1:]),
        }
        if "WITH_C" in environment:
            torch = next(PYTHON.parents[1].glob("lib/python*/site-packages/torch/lib"), "")
            environment["LD_LIBRARY_PATH"] = f"{SOURCES / 'vllm' / 'stubs'}:{torch}"
            if not (SOURCES / "vllm" / "stubs" / "libtorch_cuda.so").exists():
                pytest.skip("vLLM's C lookup needs the stub libraries of tools/setup-clients")
        self.log = (home / "player.log").open("ab")
        self.process = subprocess.Popen(
            [python, SCRIPTS / "player.py", case.engine, directory, source or home],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=environment,
        )
        self.case, self.directory, self.home = case, directory, home

    def answer(self):
        """The next line of its answers, parsed; None if it has ended."""
        assert self.process.stdout is not None
        line = b""
        deadline = time.monotonic() + ANSWER_S
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{self.case.engine} has not answered for {ANSWER_S} s: {self.tail()}"
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            if not piece:
                return None
            line += piece
        return json.loads(line)

    def tell(self, what, blocks):
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, "blocks": list(blocks)}).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, what, blocks):
        self.tell(what, blocks)
        answer = self.answer()
        assert answer is not None, f"{self.case.engine} died of {what}: {self.process.wait(10)}: {self.tail()}"
        return answer

    def tail(self):
        return (self.home / "player.log").read_bytes()[-3000:].decode(errors="replace")

    def end(self):
        """End of input; it must have lived until now."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(60) == 0, self.tail()

    def stop(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout, self.log):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def check(player, blocks, *, gone=(), evicting=False, stumps=False):
    """Look up and load: what is gone is a miss, everything else is there and right."""
    blocks = list(blocks)
    found = player.ask("lookup", blocks)
    loaded = player.ask("load", blocks)
    for block, hit, result in zip(blocks, found, loaded, strict=True):
        if block in gone:
            assert result in MISSES, f"block {block} is gone, and {player.case.engine} loads {result!r}"
            assert not hit or player.case.index or stumps, f"block {block}: a stale hit"
        elif evicting:
            assert result == "same" or result in MISSES, f"block {block}: {result!r}"
        else:
            assert hit is True and result == "same", f"block {block}: lookup {hit}, load {result!r}: {player.tail()}"
    return [block for block, result in zip(blocks, loaded, strict=True) if result == "same"]


def store(player, blocks):
    blocks = list(blocks)
    assert player.ask("store", blocks) == [None] * len(blocks), player.tail()
