"""Engines of a pod that fail, lose or lie, and two nodes that change one name at once: real mounts, real
redis-servers. Each test is a row of the pod's table of faults; test_pod_lost_nodes.py has the rows of nodes."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pathlib
import random
import shutil
import signal
import struct
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence

import pytest
from helpers import in_child, often, requires_fuse, requires_root, wait_until
from podmounts import CALLS_S, Node, Pod, all_calls, block, found, missing, settle, stored, timed, written_in_place

import kvfs
from kvfs.errors import KvfsError
from kvfs.pod.messages import Message, seal

ENGINE_BACK_S = 30.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Pod]:
    requires_root()
    requires_fuse()
    with Pod(nodes=2) as started:
        yield started


@pytest.fixture
def pod(shared: Pod) -> Pod:
    """A pod in which all is well."""
    settle(shared.nodes)
    return shared


@pytest.fixture
def here(pod: Pod, request: pytest.FixtureRequest) -> str:
    """The name of a directory that both nodes know."""
    name = request.node.name.replace("[", "-").replace("]", "")
    (pod.nodes[0].mount / name).mkdir()
    wait_until((pod.nodes[1].mount / name).is_dir, f"{name} at node 1", timeout_s=30)
    return name


def fresh_fails(node: Node, *names: str) -> None:
    """fresh() ends soon, and says by one of these names what is away."""
    with kvfs.connect(node.path, timeout_s=20.0) as client, timed(CALLS_S, "fresh()"):
        with pytest.raises(KvfsError) as error:
            client.fresh()
        assert any(name in str(error.value) for name in names), str(error.value)


def content(path: pathlib.Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def same_on_all(nodes: Sequence[Node], names: Sequence[str], possible: Callable[[str, bytes | None], bool]) -> None:
    """Wait until all nodes have the same under each name; never what is not possible."""

    def same() -> bool:
        equal = True
        for name in names:
            contents = [content(node.mount / name) for node in nodes]
            for node, data in zip(nodes, contents, strict=True):
                assert possible(name, data), f"node {node.number}, {name}: {data and data[:16]!r}"
            equal = equal and len(set(contents)) == 1
        return equal

    wait_until(same, "one content on all nodes", timeout_s=30, interval_s=0.1)
    time.sleep(0.5)
    assert same(), "what was the same on all nodes is so no more"


# ---- the engine ----


def test_an_engine_that_is_killed_and_comes_back_empty(pod: Pod, here: str) -> None:
    a, b = pod.nodes
    stored(a, f"{here}/before", block(1))
    found(b.mount / here / "before", block(1))
    pod.redis.stop()
    try:
        stored(a, f"{here}/meanwhile", block(2))
        stored(b, f"{here}/mine", block(3))
        for node in pod.nodes:
            all_calls(node, here)
            fresh_fails(node, pod.redis.url, "slot")
        assert (b.mount / here / "before").read_bytes() == block(1)
    finally:
        pod.redis.start()
    found(b.mount / here / "meanwhile", block(2), ENGINE_BACK_S)
    found(a.mount / here / "mine", block(3), ENGINE_BACK_S)


def test_an_engine_that_is_flushed(pod: Pod, here: str) -> None:
    a, b = pod.nodes
    for i in range(20):
        stored(a, f"{here}/{i}", block(i, 4096))
        pod.redis.command("FLUSHALL")
    for i in range(20):
        found(b.mount / here / str(i), block(i, 4096), ENGINE_BACK_S)


def test_an_engine_that_stands_still(pod: Pod, here: str) -> None:
    a, b = pod.nodes
    stored(a, f"{here}/before", block(1))
    found(b.mount / here / "before", block(1))
    with pod.redis.stopped():
        stored(a, f"{here}/meanwhile", block(2))
        stored(b, f"{here}/mine", block(3))
        for node in pod.nodes:
            all_calls(node, here)
            fresh_fails(node, pod.redis.url, "slot")
        assert (b.mount / here / "before").read_bytes() == block(1)
        # An own removal, and an own eviction or rewrite, need nobody.
        (a.mount / here / "before").unlink()
        time.sleep(2)
        for node in pod.nodes:
            all_calls(node, here)
            fresh_fails(node, pod.redis.url)
    found(b.mount / here / "meanwhile", block(2), ENGINE_BACK_S)
    found(a.mount / here / "mine", block(3), ENGINE_BACK_S)
    missing(b.mount / here / "before", ENGINE_BACK_S)


def test_an_engine_that_is_restored_from_an_old_dump(pod: Pod, here: str) -> None:
    a, b = pod.nodes
    stored(a, f"{here}/before", block(1))
    found(b.mount / here / "before", block(1))
    pod.redis.command("SAVE")
    stored(a, f"{here}/before", block(2))
    stored(a, f"{here}/after", block(3))
    found(b.mount / here / "after", block(3))
    (b.mount / here / "after").unlink()
    missing(a.mount / here / "after")
    found(b.mount / here / "before", block(2))
    pod.redis.stop()
    stored(a, f"{here}/meanwhile", block(4))
    try:
        pod.redis.start()  # with the dump
        found(b.mount / here / "meanwhile", block(4), ENGINE_BACK_S)
        settle(pod.nodes)
        for node in pod.nodes:
            assert (node.mount / here / "before").read_bytes() == block(2)
            assert not (node.mount / here / "after").exists()
    finally:
        (pod.base / "dump.rdb").unlink(missing_ok=True)


def test_a_stream_that_is_trimmed_under_a_reader_that_stands_still(pod: Pod, here: str) -> None:
    a, b = pod.nodes
    uuid = json.loads(pod.kvfs("pod", "status", a.path, "-o", "json").stdout)["uuid"]
    with b.stopped():
        for i in range(50):
            stored(a, f"{here}/{i}", block(i, 4096))
        wait_until(lambda: not a.part()["feed"]["unsent_batches"], "all news in the engine", timeout_s=20)
        pod.redis.command("XTRIM", f"kvfs:{{{uuid}}}:0", "MAXLEN", "0")
    for i in range(50):
        found(b.mount / here / str(i), block(i, 4096), ENGINE_BACK_S)


def test_news_that_are_forged_or_damaged_do_no_harm(pod: Pod, here: str) -> None:
    redis = pytest.importorskip("redis")
    a, b = pod.nodes
    stored(a, f"{here}/before", block(1))
    found(b.mount / here / "before", block(1))
    uuid = json.loads(pod.kvfs("pod", "status", a.path, "-o", "json").stdout)["uuid"]
    own, other = (f"kvfs:{{{uuid}}}:{slot}" for slot in (0, 1))
    with redis.Redis(port=pod.redis.port) as client:
        batches = [fields[b"b"] for _, fields in client.xrange(own) if b"b" in fields]
        last = batches[-1]
        head = struct.Struct("<QIIQQQHHHHII")
        magic, version, _, checksum, start, number, *rest = head.unpack_from(last)
        ends = number + max(1, rest[4])

        def forged(number: int, records: int, data: bytes = b"") -> bytes:
            body = head.pack(magic, version, 56 + len(data), checksum, start, number, 0, 0, 0, 0, records, 0)
            return body + data

        dice = random.Random(1)
        for _ in range(50):
            damaged = bytearray(dice.choice(batches))
            damaged[dice.randrange(8, len(damaged))] ^= 1 << dice.randrange(8)
            client.xadd(own, {"b": bytes(damaged)})
        client.xadd(other, {"b": last})  # of another slot than the stream's
        client.xadd(own, {"b": last[:60]})
        client.xadd(own, {"b": b""})
        client.xadd(own, {"b": bytes(70_000)})
        for seen in range(3):  # more often than a damaged batch is asked for
            client.xadd(own, {"b": forged(ends, 0xFFFFFFFF, bytes([seen]))})
        client.xadd(own, {"b": forged((1 << 63) - 1, 5)})
        client.xadd(own, {"c": b"no message"})
        fields: dict[str, int | str] = {"epoch": 1 << 20, "next": 9, "oldest": 9, "floor": 9, "beat": 1, "ask": 0,
                                        "ask_start": 0}  # fmt: skip
        lie = Message("state", 0, 77, 1, fields)
        client.xadd(own, {"c": seal(lie, b"another!")})
        client.xadd(f"{other}:in", {"c": seal(lie, b"another!"), "b": forged(ends, 1)})
    for i in range(20):
        stored(a, f"{here}/{i}", block(i, 4096))
        stored(b, f"{here}/b{i}", block(i, 4096))
    for i in range(20):
        found(b.mount / here / str(i), block(i, 4096), ENGINE_BACK_S)
        found(a.mount / here / f"b{i}", block(i, 4096), ENGINE_BACK_S)
    assert (b.mount / here / "before").read_bytes() == block(1)
    time.sleep(2)
    stored(a, f"{here}/late", block(30))
    found(b.mount / here / "late", block(30))


# ---- one name, two nodes ----


def both(one: Callable[[int], object], two: Callable[[int], object], count: int) -> None:
    """Call one(i) and two(i) at the same moment."""
    barrier = threading.Barrier(2, timeout=60)
    failures: list[BaseException] = []

    def turn(what: Callable[[int], object]) -> None:
        try:
            for i in range(count):
                barrier.wait()
                what(i)
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=turn, args=(what,)) for what in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        if not isinstance(failure, threading.BrokenBarrierError):
            raise failure


def one_of_two_on_all(pod: Pod, here: str, count: int) -> None:
    """Each of the names has one of the two contents that were stored at once, and the same on all nodes."""

    def possible(name: str, data: bytes | None) -> bool:
        i = int(name.rpartition("/")[2])
        return data in (block(2 * i, 8192), block(2 * i + 1, 8192))

    same_on_all(pod.nodes, [f"{here}/{i}" for i in range(count)], possible)


def test_two_nodes_that_store_one_key_at_once(pod: Pod, here: str) -> None:
    a, b = pod.nodes
    count = often(100, 250, 5000)
    both(
        lambda i: stored(a, f"{here}/{i}", block(2 * i, 8192)),
        lambda i: stored(b, f"{here}/{i}", block(2 * i + 1, 8192)),
        count,
    )
    one_of_two_on_all(pod, here, count)


def test_two_nodes_that_write_one_key_in_place_at_once(pod: Pod, here: str) -> None:
    a, b = pod.nodes
    count = often(50, 125, 2500)
    both(
        lambda i: written_in_place(a.mount / here / str(i), block(2 * i, 8192)),
        lambda i: written_in_place(b.mount / here / str(i), block(2 * i + 1, 8192)),
        count,
    )
    one_of_two_on_all(pod, here, count)


def test_an_unlink_on_one_node_and_a_store_on_the_other_at_once(pod: Pod, here: str) -> None:
    a, b = pod.nodes
    count = often(60, 125, 2500)
    for i in range(count):
        stored(a, f"{here}/{i}", block(2 * i, 8192))
    for i in range(count):
        found(b.mount / here / str(i), block(2 * i, 8192))

    def unlink(i: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            (a.mount / here / str(i)).unlink()

    both(unlink, lambda i: stored(b, f"{here}/{i}", block(2 * i + 1, 8192)), count)
    names = [f"{here}/{i}" for i in range(count)]

    def possible(name: str, data: bytes | None) -> bool:
        i = int(name.rpartition("/")[2])
        return data in (None, block(2 * i, 8192), block(2 * i + 1, 8192))

    same_on_all(pod.nodes, names, possible)
    for i in range(count):
        assert content(a.mount / here / str(i)) != block(2 * i, 8192), f"{i}: it was removed, or stored anew"


def test_an_unlink_of_the_others_block_while_its_owner_stores_it_again(pod: Pod, here: str) -> None:
    a, b = pod.nodes
    count = often(60, 125, 2500)
    for i in range(count):
        stored(a, f"{here}/{i}", block(2 * i, 8192))
    for i in range(count):
        found(b.mount / here / str(i), block(2 * i, 8192))

    def unlink(i: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            (b.mount / here / str(i)).unlink()

    both(unlink, lambda i: stored(a, f"{here}/{i}", block(2 * i + 1, 8192)), count)

    def possible(name: str, data: bytes | None) -> bool:
        i = int(name.rpartition("/")[2])
        return data in (None, block(2 * i, 8192), block(2 * i + 1, 8192))

    same_on_all(pod.nodes, [f"{here}/{i}" for i in range(count)], possible)
    for i in range(count):
        assert content(a.mount / here / str(i)) != block(2 * i, 8192), f"{i}: it was removed, or stored anew"


def test_a_name_of_the_other_that_is_replaced_and_removed_at_once_is_gone(pod: Pod, here: str) -> None:
    a, b = pod.nodes
    names = [f"{here}/{i}" for i in range(40)]
    for i, name in enumerate(names):
        stored(a, name, block(i, 8192))
    for i, name in enumerate(names):
        found(b.mount / name, block(i, 8192))
    for i, name in enumerate(names):
        (b.mount / name).write_bytes(block(100 + i, 8192))
        (b.mount / name).unlink()
    for name in names:
        for node in (b, a):
            missing(node.mount / name)


# ---- one content each handle ----


def test_a_handle_has_one_content_while_the_owner_rewrites(pod: Pod, here: str) -> None:
    a, b = pod.nodes
    stored(a, f"{here}/a", block(0))
    found(b.mount / here / "a", block(0))
    ending = threading.Event()
    wrong: list[str] = []

    def read() -> None:
        while not ending.is_set():
            try:
                with (b.mount / here / "a").open("rb", buffering=0) as opened:
                    first = opened.read(4096)
                    time.sleep(random.random() / 100)
                    data = first + opened.read()
            except OSError:
                continue
            if data != block(int.from_bytes(data[:8], "little")):
                wrong.append(f"{len(data)} bytes of several contents")

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for i in range(1, often(60, 150, 3000), 2):
            stored(a, f"{here}/a", block(i))
            (a.mount / here / "a").write_bytes(block(i + 1))
    finally:
        ending.set()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[0]
    last = (a.mount / here / "a").read_bytes()
    wait_until(lambda: content(b.mount / here / "a") == last, "the last content at node 1", timeout_s=20)


@pytest.mark.parametrize("how", ["replaced", "rewritten", "removed"])
def test_a_mapping_has_one_content(pod: Pod, here: str, how: str) -> None:
    a, b = pod.nodes
    stored(a, f"{here}/a", block(1))
    found(b.mount / here / "a", block(1))
    stored(a, f"{here}/b", block(1))
    wait_until((b.mount / here / "b").exists, "b at node 1", timeout_s=20)

    def mapped() -> bytes:
        with (b.mount / here / "b").open("rb") as opened:
            memory = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
        first = memory[:4096]
        path = a.mount / here / "b"
        if how == "replaced":
            stored(a, f"{here}/b", block(2))
        elif how == "rewritten":
            path.write_bytes(block(2))
        else:
            path.unlink()
        wait_until(lambda: content(b.mount / here / "b") != block(1), "the news of it at node 1", timeout_s=20)
        return first + memory[4096:]

    assert in_child(mapped) == block(1)


# ---- several engines, users ----

PASSWORD = "correct-horse-battery"


@pytest.fixture(scope="module")
def pair() -> Iterator[Pod]:
    """Two engines with a user each, whose password only a file has."""
    requires_root()
    requires_fuse()
    directory = pathlib.Path(os.environ.get("TMPDIR", "/tmp")) / f"kvfs-password-{os.getpid()}"
    directory.mkdir(mode=0o700)
    file = directory / "password"
    file.write_text(PASSWORD + "\n")
    file.chmod(0o600)
    acl = f"user default off\nuser kvfs on >{PASSWORD} ~kvfs:* &* +@all\n"
    try:
        with Pod(nodes=2, engines=2, acl=acl, user="kvfs", create_args=("--password-file", str(file))) as started:
            yield started
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def password_file(pod: Pod) -> pathlib.Path:
    table = tomllib.loads((pod.nodes[0].path / "pool.toml").read_text())["pod"]
    return pathlib.Path(table["password_file"])


def test_a_password_is_shown_nowhere(pair: Pod) -> None:
    a, b = pair.nodes
    settle(pair.nodes)
    stored(a, "p", block(1))
    found(b.mount / "p", block(1))
    secret = PASSWORD.encode()
    for node in pair.nodes:
        pair.kvfs("pod", "doctor", node.path, check=False)
        assert PASSWORD not in json.dumps(node.status()) + pair.kvfs("pod", "status", node.path).stdout
        for path in node.path.rglob("*"):
            if path.is_file():
                assert secret not in path.read_bytes(), path
    for device in pair.devices:
        with open(device, "rb") as opened:
            assert secret not in opened.read(8 << 20), device
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                said = (path / name).read_bytes()
                assert secret not in said or path.name == str(os.getpid()), path


def test_a_password_file_that_others_can_read_is_refused(pair: Pod) -> None:
    a, b = pair.nodes
    settle(pair.nodes)
    file = password_file(pair)
    file.chmod(0o644)
    try:
        for engine in pair.engines:
            engine.stop()
            engine.start()
        said = wait_until(
            lambda: [link["error"] for link in a.part()["engines"] if "0644" in link["error"]],
            "the refusal", timeout_s=20,
        )  # fmt: skip
        assert str(file) in said[0] and PASSWORD not in said[0]
        all_calls(a, "refused")
        fresh_fails(a, str(file))
    finally:
        file.chmod(0o600)
    stored(a, "q", block(2))
    found(b.mount / "q", block(2), ENGINE_BACK_S)


def test_one_of_two_engines_dies(pair: Pod) -> None:
    a, b = pair.nodes
    settle(pair.nodes)
    for turn, dies in enumerate((*pair.engines, *pair.engines)):
        dies.stop() if turn < 2 else dies.signal(signal.SIGSTOP)
        try:
            for i in range(20):
                stored(a, f"e{turn}-{i}", block(i, 4096))
                found(b.mount / f"e{turn}-{i}", block(i, 4096))
            with kvfs.connect(b.path, timeout_s=20.0) as client:
                stored(a, f"e{turn}", block(turn))
                wait_until(lambda: _is_fresh(client), "fresh() by the other engine", timeout_s=20)
        finally:
            dies.start() if turn < 2 else dies.signal(signal.SIGCONT)
        wait_until(
            lambda: all(link["state"] == "up" for node in pair.nodes for link in node.part()["engines"]),
            "both engines", timeout_s=ENGINE_BACK_S,
        )  # fmt: skip


def _is_fresh(client: kvfs.Client) -> bool:
    try:
        client.fresh()
    except KvfsError:
        return False
    return True


def test_all_nodes_restart_while_no_engine_is_there(pair: Pod) -> None:
    a, b = pair.nodes
    settle(pair.nodes)
    stored(a, "r1", block(1))
    stored(b, "r2", block(2))
    found(b.mount / "r1", block(1))
    found(a.mount / "r2", block(2))
    # Others hear of a rename before it is on flash, where fsync does not bring it: it is in this node's index then.
    # Node 0 reads this flash 1.5 s after its own start. By then node 1 may not be back.
    b.wait_summaries()
    for engine in pair.engines:
        engine.stop()
    try:
        with timed(60, "two unmounts without an engine"):
            b.kill()
            a.umount()
        for node in pair.nodes:
            node.remount()
        found(b.mount / "r1", block(1), 30)
        found(a.mount / "r2", block(2), 30)
        for node in pair.nodes:
            all_calls(node, "restarted")
    finally:
        for engine in pair.engines:
            engine.start()
    settle(pair.nodes)
