"""libkvfs on a pod: what a client stores on one node, clients of the others find, read, replace, delete and lease."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import mmap
import os
import pathlib
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import cast

import pytest
import trio
from helpers import MIB, REPOSITORY, requires_fuse, requires_program, requires_root, run, slowness, wait_until
from kvfs._native import ffi, lib
from podmounts import NEWS_S, Node, Pod, block

import kvfs
from benches.vhost import driver
from kvfs.client import cufile, preload
from kvfs.client.client import Client
from kvfs.client.events import Removed, Stored
from kvfs.client.leases import Lease
from kvfs.connectors.common import Connection, Options
from kvfs.connectors.leases import Leases
from kvfs.errors import DeadlineError, KvfsError, NotMountedError
from kvfs.frontend.asking import ControlClient

SIZE = 256 * 1024 + 100


@pytest.fixture(scope="module")
def pod() -> Iterator[Pod]:
    requires_root()
    requires_fuse()
    with Pod(nodes=2) as started:
        yield started


@pytest.fixture
def space(request: pytest.FixtureRequest) -> str:
    """A namespace of the test's own."""
    return request.node.name.replace("[", "-").replace("]", "").replace("/", "-")


@pytest.fixture
def a(pod: Pod, space: str) -> Iterator[Client]:
    """A client of node 0."""
    with kvfs.connect(pod.nodes[0].mount, space, gpu=None) as client:
        yield client


@pytest.fixture
def b(pod: Pod, space: str) -> Iterator[Client]:
    """A client of node 1."""
    with kvfs.connect(pod.nodes[1].mount, space, gpu=None) as client:
        yield client


def store(client: Client, *numbers: int, size: int = SIZE) -> list[bytes]:
    """Put blocks; their keys."""
    client.put([(key_of(number), block(number, size)) for number in numbers])
    return [key_of(number) for number in numbers]


def key_of(number: int) -> bytes:
    return b"key %d" % number


def read(client: Client, key: bytes | str) -> bytes | None:
    data = client.get(key)
    return None if data is None else bytes(data)


def come(client: Client, keys: list[bytes]) -> None:
    """Wait until all are there."""
    wait_until(lambda: client.exists_prefix(keys) == len(keys), f"{len(keys)} keys", timeout_s=10, interval_s=0.002)


def go(client: Client, keys: list[bytes]) -> None:
    """Wait until none is there."""
    wait_until(lambda: not any(client.exists(keys)), f"the end of {keys}", timeout_s=10, interval_s=0.002)


def ask(node: Node, command: str, **arguments: object) -> dict[str, object]:
    with ControlClient(node.path, 100) as control:
        return control.call(command, **arguments)


def file_of(node: Node, space: str, key: bytes) -> pathlib.Path:
    return node.mount / space / key.hex()[:2] / key.hex()


def test_news_are_followed_from_the_first_on(pod: Pod, a: Client, b: Client) -> None:
    """No news are thought lost, so flash is not read for that, and fresh() need not wait."""
    for writer, reader in ((a, b), (b, a)):
        come(reader, store(writer, 1))
    for node, other in zip(pod.nodes, reversed(pod.nodes), strict=True):
        part = node.part()
        (owner,) = part["owners"]
        assert part["feed"]["skipped"] == 0 and part["feed"]["oldest"] == 0
        # Where the other node was slow to begin, its flash was read before its first sign of life too.
        assert owner["lost"] == 0 and owner["reloads"] <= 2, owner
        assert owner["next"] <= other.part()["feed"]["next"]


# ---- reading ----


def test_a_put_on_one_node_is_found_and_read_on_the_other(a: Client, b: Client) -> None:
    keys = store(a, *range(20))
    come(b, keys)
    assert b.exists([*keys, b"none"]) == [True] * 20 + [False]
    assert b.exists_prefix([*keys[:5], b"none", *keys]) == 5
    assert b.sizes([*keys[:2], b"none"]) == [SIZE, SIZE, None]
    for number, key in enumerate(keys):
        assert read(b, key) == block(number, SIZE)
    assert read(b, b"none") is None


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 2 * MIB, 9 * MIB + 5], ids=str)
def test_sizes(a: Client, b: Client, size: int) -> None:
    keys = store(a, 1, size=size)
    come(b, keys)
    assert b.sizes(keys) == [size]
    assert read(b, keys[0]) == block(1, size)


def test_get_into_and_ranges(a: Client, b: Client) -> None:
    keys = store(a, *range(4), size=3 * MIB + 17)
    come(b, keys)
    memory = [bytearray(3 * MIB + 17) for _ in keys]
    assert b.get_into(list(zip(keys, memory, strict=True))) == [3 * MIB + 17] * 4
    assert memory == [bytearray(block(number, 3 * MIB + 17)) for number in range(4)]
    halves = [bytearray(MIB), bytearray(2 * MIB + 17)]
    assert b.get_into([(keys[1], halves)]) == [3 * MIB + 17]
    assert b"".join(halves) == block(1, 3 * MIB + 17)
    part, end = bytearray(10_000), bytearray(100)
    wanted = [(keys[2], 2 * MIB + 3, part), (keys[3], 3 * MIB, end), (b"none", 0, bytearray(9))]
    assert b.get_ranges(wanted) == [10_000, 17, None]
    assert part == block(2, 3 * MIB + 17)[2 * MIB + 3 :][:10_000]
    assert end[:17] == block(3, 3 * MIB + 17)[3 * MIB :]


def test_a_queue(a: Client, b: Client) -> None:
    keys = store(a, *range(8))
    come(b, keys)
    memory = [bytearray(SIZE) for _ in keys]
    with b.queue(depth=16) as queue:
        number = queue.get(list(zip(keys, memory, strict=True)))
        asked = queue.exists([*keys, b"none"])
        done = {}
        while len(done) < 2:
            assert select.select([queue], [], [], 10 * slowness())[0], "no answer"
            done.update({one.id: one for one in queue.drain()})
        assert done[number].results == [SIZE] * 8
        assert done[asked].results == [True] * 8 + [False]
        assert memory == [bytearray(block(i, SIZE)) for i in range(8)]
        removed = queue.delete(keys[:2])
        select.select([queue], [], [], 10 * slowness())
        (one,) = queue.drain()
        assert one.id == removed and one.results == [True, True]
    go(a, keys[:2])


def test_prestage(a: Client, b: Client) -> None:
    keys = store(a, *range(4))
    come(b, keys)
    b.prestage(keys)
    memory = [bytearray(SIZE) for _ in keys]
    assert b.get_into(list(zip(keys, memory, strict=True))) == [SIZE] * 4
    assert memory == [bytearray(block(i, SIZE)) for i in range(4)]
    assert b.statistics().prestage_used == 4


def test_in_trio_and_asyncio(pod: Pod, a: Client, space: str) -> None:
    keys = store(a, 1)

    async def by_trio() -> None:
        async with kvfs.connect(pod.nodes[1].mount, space, gpu=None).trio() as client:
            with trio.fail_after(NEWS_S * slowness()):
                while await client.exists(keys) == [False]:
                    await trio.sleep(0.005)
            assert bytes(await client.get(keys[0]) or b"") == block(1, SIZE)
            async with await client.lease(keys, 5) as lease:
                assert len(lease.held) == 1

    async def by_asyncio() -> None:
        async with kvfs.connect(pod.nodes[1].mount, space, gpu=None).asyncio() as client:
            with contextlib.suppress(DeadlineError):  # a node that has just started
                await client.fresh()
                assert await client.exists(keys, fresh=True) == [True]
            assert bytes(await client.get(keys[0]) or b"") == block(1, SIZE)

    trio.run(by_trio)
    asyncio.run(by_asyncio())


def test_long_keys_and_paths(pod: Pod, a: Client, b: Client, space: str) -> None:
    keys = [bytes(range(1, 129)), bytes(255), b"x" * 200]
    a.put([(key, block(number, SIZE)) for number, key in enumerate(keys)])
    come(b, keys)
    for number, key in enumerate(keys):
        assert read(b, key) == block(number, SIZE)
    assert b.delete(keys[:1]) == [True]
    go(a, keys[:1])
    with (
        kvfs.connect(pod.nodes[0].mount, space, gpu=None, paths=True) as one,
        kvfs.connect(pod.nodes[1].mount, space, gpu=None, paths=True) as two,
    ):
        one.put([("base_r0/0ab/3c_g1/4d5e.bin", block(7, SIZE))])
        come(two, [b"base_r0/0ab/3c_g1/4d5e.bin"])
        assert read(two, "base_r0/0ab/3c_g1/4d5e.bin") == block(7, SIZE)
        # A file that an engine wrote through the mount.
        (pod.nodes[0].mount / space / "base_r0" / "file").write_bytes(block(8, SIZE))
        come(two, [b"base_r0/file"])
        assert read(two, "base_r0/file") == block(8, SIZE)
        assert read(two, "base_r0") is None and read(two, "base_r0/file/under") is None


# ---- changing ----


def test_a_put_if_absent_knows_the_other_nodes_block(a: Client, b: Client) -> None:
    keys = store(a, 1, 2)
    come(b, keys)
    assert b.put([(key_of(1), block(9, SIZE)), (key_of(3), block(3, SIZE))], if_absent=True) == [False, True]
    assert read(b, key_of(1)) == block(1, SIZE)
    come(a, [key_of(3)])
    assert b.statistics().puts == 1


def test_a_put_replaces_the_other_nodes_block(a: Client, b: Client) -> None:
    keys = store(a, 1)
    come(b, keys)
    for number in range(2, 6):
        writer, reader = (b, a) if number % 2 == 0 else (a, b)
        writer.put([(key_of(1), block(number, SIZE))])
        assert read(writer, key_of(1)) == block(number, SIZE), "the writer's own"

        def new(reader: Client = reader, number: int = number) -> bool:
            data = read(reader, key_of(1))
            assert data in (block(number, SIZE), block(number - 1, SIZE), None)
            return data == block(number, SIZE)

        wait_until(new, "the new block on the other node", timeout_s=10)


def test_a_delete_of_the_other_nodes_blocks(a: Client, b: Client) -> None:
    keys = store(a, 1, 2, 3)
    come(b, keys)
    assert b.delete([key_of(1), key_of(2), key_of(1), b"none"]) == [True, True, False, False]
    assert b.exists(keys) == [False, False, True]
    go(a, keys[:2])
    assert a.delete(keys) == [False, False, True]
    go(b, keys)


# ---- fresh ----


def _is_fresh(client: Client) -> bool:
    with contextlib.suppress(KvfsError):
        client.fresh()
        return True
    return False


def be_fresh(client: Client) -> None:
    """On a busy machine an owner may take more than its 100 ms."""
    wait_until(lambda: _is_fresh(client), "all nodes' news", timeout_s=20)


def test_fresh_finds_what_was_just_put_on_the_other_node(a: Client, b: Client) -> None:
    be_fresh(b)
    took = []
    for number in range(40):
        keys = store(a, number, size=4096)
        began = time.monotonic()
        try:
            there = b.exists(keys, fresh=True)
        except DeadlineError:  # 100 ms, on a busy machine
            continue
        assert there == [True], f"round {number}"
        took.append(time.monotonic() - began)
    assert len(took) > 20
    print(f"fresh: p50 {statistics.median(took) * 1000:.2f} ms, most {max(took) * 1000:.2f} ms")
    (key,) = store(a, 41)
    be_fresh(b)
    assert read(b, key) == block(41, SIZE)
    assert bytes(b.get(key, fresh=True) or b"") == block(41, SIZE)
    assert b.sizes([key], fresh=True) == [SIZE]
    assert b.exists_prefix([key, key, b"none"], fresh=True) == 2


def _state(thread: pathlib.Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


@contextlib.contextmanager
def stopped(node: Node) -> Iterator[None]:
    pid = node.pid()
    os.kill(pid, signal.SIGSTOP)
    threads = pathlib.Path(f"/proc/{pid}/task")
    wait_until(lambda: all(_state(thread) == "T" for thread in threads.iterdir()), "all threads to stop", timeout_s=10)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_fresh_names_the_slot_that_gives_no_answer(pod: Pod, b: Client) -> None:
    be_fresh(b)
    with stopped(pod.nodes[0]):
        began = time.monotonic()
        with pytest.raises(DeadlineError, match="slot 0 gave no answer"):
            b.exists([b"none"], fresh=True)
        assert time.monotonic() - began < 2 * slowness()
    be_fresh(b)


def test_fresh_without_an_engine_says_so_and_without_a_pod_nothing(pod: Pod, b: Client) -> None:
    be_fresh(b)
    pod.redis.signal(signal.SIGSTOP)
    try:
        with pytest.raises(KvfsError, match=r"slot 0 gave no answer|redis"):
            b.fresh()
        wait_until(lambda: _engine_is_named(b), "an error that names the engine", timeout_s=20)
    finally:
        pod.redis.signal(signal.SIGCONT)
    be_fresh(b)


def _engine_is_named(client: Client) -> bool:
    try:
        client.fresh()
    except KvfsError as error:
        return "redis" in str(error)
    return False


# ---- leases ----


def evict_all(node: Node) -> dict[str, int]:
    """How many blocks stay, by the reason."""
    kept = cast("dict[str, dict[str, int]]", ask(node, "evict", all=True)["kept"])
    return {why: found["blocks"] for why, found in kept.items()}


def leased_blocks(node: Node) -> int:
    return cast("dict[str, dict[str, int]]", ask(node, "status"))["counters"]["leased_blocks"]


def leased(client: Client, keys: list[bytes], seconds: float = 60) -> Lease:
    """A lease of all these: owners are given 50 ms for an answer, which a busy machine may need more than."""
    found: list[Lease] = []

    def all_held() -> bool:
        lease = client.lease(keys, seconds)
        if all(lease.held):
            found.append(lease)
        else:
            lease.end()
        return bool(found)

    wait_until(all_held, f"a lease of {len(keys)} blocks", timeout_s=20)
    return found[0]


def test_a_leased_block_of_the_other_node_is_not_evicted_there(pod: Pod, a: Client, b: Client) -> None:
    keys, own = store(a, 1, 2, 3), store(b, 7)
    come(b, keys)
    be_fresh(b)
    lease = leased(b, [*keys[:2], *own])
    assert leased_blocks(pod.nodes[0]) == 2 and leased_blocks(pod.nodes[1]) == 1
    assert evict_all(pod.nodes[0]) == {"leased": 2} and evict_all(pod.nodes[1]) == {"leased": 1}
    go(b, keys[2:])
    for number, key in [*enumerate(keys[:2], 1), (7, own[0])]:
        assert read(b, key) == block(number, SIZE)
    assert b.lease([*keys[:1], keys[2], b"none"], 60).held[1:] == [False, False]
    assert lease.release() is True and lease.release() is False
    b.close()  # and with it the other lease
    wait_until(lambda: leased_blocks(pod.nodes[0]) == 0, "the release at the owner", timeout_s=10)
    assert evict_all(pod.nodes[0]) == {} and not any(a.exists(keys))


def test_a_lease_of_the_other_nodes_block_ends_at_its_deadline(pod: Pod, a: Client, b: Client) -> None:
    keys = store(a, 1)
    come(b, keys)
    be_fresh(b)
    lease = leased(b, keys, 1.0)
    wait_until(lambda: leased_blocks(pod.nodes[0]) == 0, "the end of the lease", timeout_s=10)
    assert lease.release() is False


def test_a_killed_clients_leases_end_at_the_other_node(pod: Pod, a: Client, b: Client, space: str) -> None:
    keys = store(a, 1)
    come(b, keys)
    be_fresh(b)
    script = (
        "import sys, time, kvfs\n"
        "client = kvfs.connect(sys.argv[1], sys.argv[2], gpu=None)\n"
        "while not client.lease([sys.argv[3]], 60).held[0]: pass\n"
        "print('held', flush=True)\n"
        "time.sleep(100)\n"
    )
    words = [sys.executable, "-c", script, os.fspath(pod.nodes[1].mount), space, keys[0].decode()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=REPOSITORY) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        assert evict_all(pod.nodes[0])["leased"] == 1
        other.kill()
    wait_until(lambda: leased_blocks(pod.nodes[0]) == 0, "the end of the lease", timeout_s=10)


def test_a_lease_is_not_held_while_the_owner_gives_no_answer(pod: Pod, a: Client, b: Client) -> None:
    keys, own = store(a, *range(10)), store(b, 70)
    come(b, keys)
    be_fresh(b)
    leased(b, keys).release()
    with stopped(pod.nodes[0]):
        began = time.monotonic()
        lease = b.lease([*keys, *own], 60)
        took = time.monotonic() - began
        assert lease.held == [False] * 10 + [True]
        assert 0.045 < took < 1 * slowness(), f"{took * 1000:.0f} ms"
        print(f"lease of an owner that is stopped: {took * 1000:.0f} ms")
        assert b.get_into([(keys[0], bytearray(SIZE))]) == [SIZE], "it is read all the same"
        assert lease.release() is True

        def left_alone() -> bool:
            """An owner that is asked has 45 ms to answer. A busy machine may let the second pass."""
            began = time.monotonic()
            assert b.lease(keys, 60).held == [False] * 10
            return time.monotonic() - began < 0.045

        wait_until(left_alone, "an answer without asking an owner that gave none within a second")
    be_fresh(b)
    wait_until(lambda: leased_blocks(pod.nodes[0]) == 0, "the release of what was answered late", timeout_s=10)


def test_many_leased_at_once(pod: Pod, a: Client, b: Client) -> None:
    """More than a message has."""
    count = 1500
    keys = store(a, *range(count), size=100)
    come(b, keys)
    be_fresh(b)
    lease = leased(b, keys)
    assert leased_blocks(pod.nodes[0]) == count
    assert lease.release() is True
    wait_until(lambda: leased_blocks(pod.nodes[0]) == 0, "the release", timeout_s=10)


def counters_of(node: Node) -> tuple[int, int]:
    """Uses of this node's blocks by readers, and touches by other nodes."""
    status = ask(node, "status")
    return sum(cast("list[int]", status["found_ages"])), cast("dict[str, int]", status["pod"])["touches"]


def test_a_touch_counts_at_the_owner_as_use_and_as_no_hit(pod: Pod, a: Client, b: Client) -> None:
    keys = store(a, *range(400), size=4096)
    come(b, keys)
    be_fresh(a)  # hits that come while a node reads another's flash may be lost
    found, touches = counters_of(pod.nodes[0])
    assert b.touch([*keys, b"none"]) == 400
    wait_until(lambda: counters_of(pod.nodes[0]) == (found, touches + 400), "the touches at the owner", timeout_s=10)
    assert b.get_into([(key, bytearray(4096)) for key in keys]) == [4096] * 400
    b.close()  # sends the rest of its hits
    wait_until(lambda: counters_of(pod.nodes[0]) == (found + 400, touches + 400), "the hits at the owner", timeout_s=10)


# ---- by path ----


def test_find_and_read_a_file_by_path(pod: Pod, a: Client, b: Client, space: str) -> None:
    keys = store(a, 1)
    come(b, keys)
    file = file_of(pod.nodes[1], space, keys[0])
    assert file.read_bytes() == block(1, SIZE)  # the daemon enters the directories
    name = os.fspath(file.relative_to(pod.nodes[1].mount)).encode()
    with b.library.call():
        handle = b.library.handle
        out, opened = ffi.new("struct kvfs_attributes *"), ffi.new("struct kvfs_file **")
        wait_until(lambda: lib.kvfs_find(handle, name, out) == 0, "its attributes", timeout_s=5)
        assert (out.size, out.sealed) == (SIZE, 1) and out.inode == file.stat().st_ino
        assert lib.kvfs_file_open(handle, out.inode, opened) == 0
        memory = bytearray(10_000)
        assert lib.kvfs_file_read(opened[0], 5000, ffi.from_buffer(memory), 10_000) == 10_000
        assert memory == block(1, SIZE)[5000:15_000]
        lib.kvfs_file_close(opened[0])


def test_an_open_file_of_another_node_never_mixes_two_contents(pod: Pod, a: Client, b: Client, space: str) -> None:
    keys = store(a, 1)
    come(b, keys)
    file = file_of(pod.nodes[1], space, keys[0])
    number = file.stat().st_ino
    name = os.fspath(file.relative_to(pod.nodes[1].mount)).encode()
    with b.library.call():
        handle = b.library.handle
        out, opened = ffi.new("struct kvfs_attributes *"), ffi.new("struct kvfs_file **")
        wait_until(lambda: lib.kvfs_find(handle, name, out) == 0, "its attributes", timeout_s=5)
        assert out.inode == number and lib.kvfs_file_open(handle, number, opened) == 0
        memory = bytearray(8192)
        assert lib.kvfs_file_read(opened[0], 0, ffi.from_buffer(memory), 8192) == 8192
        assert memory == block(1, SIZE)[:8192]
        a.put([(keys[0], block(2, SIZE))])
        wait_until(lambda: read(b, keys[0]) == block(2, SIZE), "the new block", timeout_s=10)
        ask(pod.nodes[0], "evict", all=True)
        for at in range(8192, SIZE - 8192, 8192):
            size = lib.kvfs_file_read(opened[0], at, ffi.from_buffer(memory), 8192)
            assert size == -errno.EAGAIN or memory == block(1, SIZE)[at : at + 8192], f"offset {at}: {size}"
        lib.kvfs_file_close(opened[0])


def test_the_preload_library_reads_the_other_nodes_block(
    pod: Pod, a: Client, b: Client, space: str, tmp_path: pathlib.Path
) -> None:
    keys = store(a, 1, size=2 * MIB)
    come(b, keys)
    file, stats = file_of(pod.nodes[1], space, keys[0]), tmp_path / "stats.json"
    assert file.stat().st_size == 2 * MIB
    script = (
        "import os, sys, hashlib\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)\n"
        "import mmap\n"
        "memory = mmap.mmap(-1, 1 << 20)\n"
        "found = hashlib.sha256()\n"
        "for at in range(0, 2 << 20, 1 << 20):\n"
        "    assert os.preadv(fd, [memory], at) == 1 << 20\n"
        "    found.update(memory)\n"
        "print(found.hexdigest(), os.stat(sys.argv[1]).st_size)\n"
    )
    environment = preload.environment(dict(os.environ)) | {"KVFS_PRELOAD_STATS": os.fspath(stats)}
    done = subprocess.run(
        [sys.executable, "-c", script, file], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [hashlib.sha256(block(1, 2 * MIB)).hexdigest(), str(2 * MIB)]
    counters = json.loads(stats.read_text().splitlines()[0])
    assert counters["error"] == "" and counters["read_bytes"] == 2 * MIB, counters


def test_the_cufile_library_reads_the_other_nodes_block(
    pod: Pod, a: Client, b: Client, space: str, tmp_path: pathlib.Path
) -> None:
    """Into host memory, with no libcufile of NVIDIA's behind it."""
    library = cufile.NAMES / "libcufile.so"
    if not library.exists():
        pytest.skip(f"{library} is not built: run tools/setup")
    keys = store(a, 1, size=2 * MIB)
    come(b, keys)
    file, stats = file_of(pod.nodes[1], space, keys[0]), tmp_path / "stats.json"
    assert file.stat().st_size == 2 * MIB
    steps = [
        {"op": "buffer", "name": "B", "size": 2 * MIB},
        {"op": "open", "name": "f", "path": os.fspath(file), "flags": "O_RDONLY"},
        {"op": "register", "name": "h", "fd": "f"},
        {"op": "read", "handle": "h", "buffer": "B", "size": 2 * MIB, "offset": 0},
    ]
    given = os.environ | {"KVFS_CUFILE_REAL": "none", "KVFS_CUFILE_STATS": os.fspath(stats)}
    player = REPOSITORY / "tests" / "native" / "cufile_player.py"
    done = subprocess.run(
        [sys.executable, player, library],
        input=json.dumps(steps),
        env=given,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert outcomes[-1] == [2 * MIB, 0, hashlib.sha256(block(1, 2 * MIB)).hexdigest()[:16]]
    assert json.loads(stats.read_text().splitlines()[0])["native_reads"] == 1, stats.read_text()


def test_gpu_memory_gets_the_other_nodes_block(pod: Pod, a: Client, space: str, tmp_path: pathlib.Path) -> None:
    """Against a double of libcuda: it says nothing about a GPU."""
    requires_program("make")
    requires_program("gcc")
    run("make", "-s", "-C", REPOSITORY / "native/test", "fake-cuda", f"OUT={tmp_path}")
    keys = store(a, 1, 2, size=3 * MIB + 7)
    script = (
        "import sys, time, hashlib, kvfs\n"
        "from benches import cuda\n"
        "driver = cuda.Driver()\n"
        "assert driver.double\n"
        "client = kvfs.connect(sys.argv[1], sys.argv[2], gpu='staged')\n"
        "keys = sys.argv[3:]\n"
        "while not all(client.exists(keys)): time.sleep(0.01)\n"
        "size = (3 << 20) + 7\n"
        "memory = cuda.DeviceMemory(driver, 2 * size)\n"
        "parts = [memory.part(i * size, size) for i in range(2)]\n"
        "assert client.get_into(list(zip(keys, parts))) == [size] * 2\n"
        "print(hashlib.sha256(memory.read()).hexdigest(), client.gpu_reader().statistics().blocks)\n"
    )
    words = [sys.executable, "-c", script, os.fspath(pod.nodes[1].mount), space, *(key.decode() for key in keys)]
    environment = os.environ | {
        "KVFS_CUDA_LIBRARY": os.fspath(tmp_path / "libcuda-fake.so"),
        "PYTHONPATH": os.pathsep.join((os.fspath(REPOSITORY), os.fspath(REPOSITORY / "tools"))),
    }
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    expected = hashlib.sha256(block(1, 3 * MIB + 7) + block(2, 3 * MIB + 7)).hexdigest()
    assert done.stdout.split() == [expected, "2"]


@pytest.mark.slow
def test_a_guest_by_virtio_fs_reads_the_other_nodes_block(tmp_path: pathlib.Path) -> None:
    """A front end as a guest's is, without the guest."""
    run(REPOSITORY / "tools/bench_clients", timeout_s=300)
    size = 9 * MIB + 5000
    with Pod(nodes=2, started=False) as pod:
        socket = pod.base / "guest.sock"
        pod.nodes[0].start()
        pod.nodes[1].start("--virtiofs", os.fspath(socket))
        (pod.nodes[0].mount / "a").mkdir()
        (pod.nodes[0].mount / "a" / "block").write_bytes(block(1, size))
        with kvfs.connect(pod.nodes[1].mount, "a", gpu=None, paths=True) as b:
            come(b, [b"block"])
        with driver(REPOSITORY / "build/bench/virtiofs_client", socket) as front_end:
            assert front_end.ask(f"copy a/block {tmp_path / 'copied'}")["bytes"] == size
            assert (tmp_path / "copied").read_bytes() == block(1, size)
            for case in ("read-4k", "read-1m", "read-4m"):
                assert cast("int", front_end.ask(f"{case} a/block 3 0.05")["operations"]) >= 3


def test_a_connectors_connection_is_as_on_one_node(pod: Pod, a: Client, b: Client, space: str) -> None:
    """Common to all connectors (kvfs/connectors/common.py, leases.py)."""
    keys = store(a, 1, 2)
    come(b, keys)
    be_fresh(b)
    connection = Connection(Options(os.fspath(pod.nodes[1].mount)), space, engine="test")
    with contextlib.closing(connection):
        assert connection.exists([*keys, b"none"]) == [True, True, False]
        assert connection.exists_prefix([*keys, b"none"]) == 2 and connection.sizes(keys) == [SIZE, SIZE]
        assert connection.touch(keys) == 2
        assert connection.put([(key, block(9, SIZE)) for key in [*keys, b"new"]]) == [True] * 3
        assert (connection.counters.present, connection.counters.stored) == (2, 1)
        part, whole = bytearray(5000), bytearray(SIZE)
        assert connection.get_ranges([(keys[0], 9000, part)]) == [5000] and part == block(1, SIZE)[9000:14_000]
        assert connection.get_into([(keys[1], whole)]) == [SIZE] and whole == block(2, SIZE)
        leases = Leases(connection, 5)
        taken = 0

        def take() -> bool:
            nonlocal taken
            taken += 1
            leases.take(keys)
            return leased_blocks(pod.nodes[0]) == 2

        wait_until(take, "the lease at the owner", timeout_s=10)
        for _ in range(taken):
            leases.give_back(keys)
        wait_until(lambda: leased_blocks(pod.nodes[0]) == 0, "its release", timeout_s=10)
        assert connection.delete(keys) == [True, True]
    go(a, keys)


# ---- events ----


def test_events_of_all_nodes_together_tell_everything(pod: Pod, a: Client, b: Client, space: str) -> None:
    """Each node tells its own changes. A block is there while a node has it that told of it and not of its end."""
    have: dict[bytes, set[int]] = {}
    numbers: dict[int, list[int]] = {0: [], 1: []}
    with a.events() as of_a, b.events() as of_b:

        def take() -> dict[bytes, set[int]]:
            for node, events in ((0, of_a), (1, of_b)):
                while (event := events.next_event(timeout_s=0.05)) is not None:
                    if isinstance(event, Stored | Removed):
                        numbers[node].append(event.number)
                        nodes = have.setdefault(event.key or b"", set())
                        (nodes.add if isinstance(event, Stored) else nodes.discard)(node)
            return {key: nodes for key, nodes in have.items() if nodes}

        keys = store(a, 1, 2, 3)
        come(b, keys)
        wait_until(lambda: take() == {key: {0} for key in keys}, "three blocks of node 0", timeout_s=10)
        b.put([(keys[0], block(9, SIZE))])  # replaces
        b.delete(keys[1:2])
        wait_until(lambda: take() == {keys[0]: {1}, keys[2]: {0}}, "what node 1 changed", timeout_s=10)
        ask(pod.nodes[0], "evict", all=True)
        wait_until(lambda: take() == {keys[0]: {1}}, "what node 0 evicted", timeout_s=10)
    for told in numbers.values():
        assert told == sorted(told) and told


# ---- what fails ----


def test_a_client_outlives_its_daemon_and_reads_the_others_blocks() -> None:
    with Pod(nodes=2) as pod:
        with kvfs.connect(pod.nodes[0].mount, "s", gpu=None) as a, kvfs.connect(pod.nodes[1].mount, "s", gpu=None) as b:
            keys = store(a, *range(4))
            come(b, keys)
            os.kill(pod.nodes[1].pid(), signal.SIGKILL)
            wait_until(lambda: not b.information().connected, "the end of the daemon", timeout_s=10)
            for number, key in enumerate(keys):
                assert read(b, key) == block(number, SIZE)
            with pytest.raises(NotMountedError):
                b.fresh()
            with pytest.raises(NotMountedError):
                b.lease(keys, 60)
            assert a.delete(keys[:1]) == [True]


def test_a_damaged_block_of_the_other_node_is_a_miss_and_is_stored_again(a: Client, b: Client, pod: Pod) -> None:
    marker = os.urandom(4096)
    data = marker * 64
    a.put([(b"damaged", data)])
    come(b, [b"damaged"])
    for device in pod.devices:
        content = pathlib.Path(device)
        with content.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            at = memory.find(marker)
            while at >= 0:
                memory[at : at + 8] = b"damaged!"
                at = memory.find(marker, at + 8)
            memory.flush()
    assert read(b, b"damaged") is None
    assert b.put([(b"damaged", data)], if_absent=True) == [True]
    assert read(b, b"damaged") == data
    wait_until(lambda: read(a, b"damaged") == data, "the new block on node 0", timeout_s=10)
