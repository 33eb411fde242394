"""Real engines' storage clients, unchanged, while the test takes their blocks away: each is a miss, none is wrong.

`tools/setup-clients` brings the clients in; one that is not there is a named skip. Each runs in a process of its own,
scripts/player.py, which stores, looks up and loads on command. It has to live through unlinked blocks, blocks damaged
on the devices, eviction by hand, the pressure of others, and a pool with no room.
"""

import contextlib
import errno
import json
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass

import pytest
from helpers import MIB, content, opened, wait_until, write_file
from image import Image, flipped
from test_clients import PYTHON, SCRIPTS, SOURCES

SIZE = MIB
ANSWER_S = 90
COUNT = 8

pytestmark = pytest.mark.timeout(240)


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


class Player:
    """The engine's process."""

    def __init__(self, case, directory, home):
        missing = [name for name in case.sources if not (SOURCES / name / ".unpacked").exists()]
        if not PYTHON.exists() or missing:
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
        source = SOURCES / case.sources[0] if case.sources else home
        self.process = subprocess.Popen(
            [PYTHON, SCRIPTS / "player.py", case.engine, directory, source],
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


def damage(pool, path):
    """Flip a bit in the middle of a block on the devices, and have the kernel forget what it knew of it."""
    image = Image(pool.path)
    pages = image.block_of(os.stat(path).st_ino).data_pages()
    segment, page, _ = pages[len(pages) // 2]
    image.write(segment, page, flipped(image.read(segment, page), 12_345))
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def press(pool, paths):
    """Write other files until some of these are gone: 500 of them are twice the pool."""
    size = int(pool.status()["space"]["size"]) // 250
    for index in range(2000):
        write_file(pool.mount / f"other-{index % 500}", content(size, index))
        if not all(os.path.exists(path) for path in paths):
            return
    raise AssertionError("eight times the pool's size of other files drove nothing out")


def fill(pool):
    """Pin other files until there is no room; return how many."""
    for index in range(1000):
        path = pool.mount / f"pinned-{index}"
        with opened(path, os.O_CREAT | os.O_WRONLY) as descriptor:
            os.setxattr(descriptor, "user.kvfs.pin", b"1")
            try:
                assert os.write(descriptor, content(MIB, 1)) == MIB
            except OSError as error:
                assert error.errno == errno.ENOSPC
                path.unlink()
                return index
    raise AssertionError("a thousand MiB were pinned")


@pytest.mark.parametrize("name", CASES)
def test_what_is_lost_is_a_miss_and_the_engine_lives_on(own_pool, tmp_path, name):
    case = CASES[name]
    pool = own_pool(files=2, size=case.size)
    directory = pool.mount / "kv"
    player = Player(case, directory, tmp_path)
    try:
        assert player.answer() == "ready", player.tail()
        store(player, range(COUNT))
        files = player.ask("files", range(COUNT))
        assert check(player, range(COUNT)) == list(range(COUNT))
        assert player.ask("load", [99])[0] in MISSES

        os.unlink(files[1])
        check(player, range(COUNT), gone={1})

        damage(pool, files[2])
        if case.mapped:
            player = after_damage(player, 2)
        assert player.ask("load", [2])[0] in MISSES, "damaged, and no miss"
        wait_until(lambda: not os.path.exists(files[2]), "the end of a block that was found damaged")
        check(player, range(COUNT), gone={1, 2})

        # By the pressure of others, then by hand.
        store(player, range(10, 10 + COUNT))
        files = player.ask("files", range(10, 10 + COUNT))
        press(pool, files)
        lost = {10 + index for index, path in enumerate(files) if not os.path.exists(path)}
        assert lost
        check(player, lost, gone=lost)
        check(player, range(10, 10 + COUNT), gone=lost, evicting=True)
        pool.command("evict", str(pool.path), "--all")
        check(player, range(20), evicting=True)

        # No room: what cannot be stored is not there, and nothing else suffers.
        count = fill(pool)
        answers = zip(range(30, 34), player.ask("store", range(30, 34)), strict=True)
        refused = [block for block, error in answers if error]
        assert refused, "a full pool took four blocks"
        check(player, refused, gone=set(refused), stumps=case.stumps)
        check(player, range(30, 34), evicting=True)
        for index in range(count):
            os.unlink(pool.mount / f"pinned-{index}")
        store(player, range(40, 44))
        check(player, range(40, 44))
        player.end()
    finally:
        player.stop()


def after_damage(player, block):
    """A process that reads damaged bytes through a mapping gets SIGBUS, as from any disk: docs/engines.md. The block is
    gone for the next one."""
    player.tell("load", [block])
    answer = player.answer()
    if answer is not None:
        assert answer[0] in MISSES
        return player
    assert player.process.wait(60) == -signal.SIGBUS
    player.stop()
    again = Player(player.case, player.directory, player.home)
    assert again.answer() == "ready", again.tail()
    return again


POOLS = {
    "nixl-pool": Case("nixl-pool", ("nixl", "nixl-cu12")),
    "mooncake-offset": Case(
        "mooncake",
        (MOONCAKE,),
        (
            ("MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR", "offset_allocator_storage_backend"),
            ("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(256 * MIB)),
        ),
    ),
}


@pytest.mark.parametrize("name", POOLS)
def test_a_preallocated_pool_is_a_slab_that_eviction_leaves_alone(own_pool, tmp_path, name):
    pool = own_pool(files=2, size="640M")
    player = Player(POOLS[name], pool.mount / "kv", tmp_path)
    try:
        assert player.answer() == "ready", player.tail()
        store(player, range(4))
        path = player.ask("files", [0])[0]
        assert os.getxattr(path, "user.kvfs.slab") == b"1"
        assert pool.status()["space"]["slabs"] >= 256 * MIB
        check(player, range(4))
        pool.command("evict", str(pool.path), "--all")
        check(player, range(4))
        store(player, range(4, 8))
        pool.command("evict", str(pool.path), "--all")
        check(player, range(4, 8))
        player.end()
    finally:
        player.stop()
    wait_until(lambda: pool.status()["space"]["slabs"] == 0, "the end of the slab")


def test_ucm():
    pytest.skip("UCM's posix store is in no wheel that installs here: uc-manager needs a build with CUDA or CANN")
