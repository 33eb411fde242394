"""The common ground of all connectors: options, namespaces, a connection that gives misses instead of exceptions."""

import logging
import select
import threading
import time
from types import SimpleNamespace

import pytest
from helpers import MIB, content, in_child, slowness, wait_until

import kvfs
from kvfs.connectors import common
from kvfs.connectors.common import Connection, State, namespace_of, options_of
from kvfs.errors import DeadlineError, KvfsError, NotMountedError

KEYS = [b"block %d" % i for i in range(8)]


@pytest.fixture
def connect(caplog):
    """connect(mount) is a connection in namespace "model"; closed at the end."""
    caplog.set_level(logging.DEBUG, logger="kvfs.connectors")
    opened = []

    def connect(mount, **options):
        connection = Connection(options_of("test", {"mount": str(mount), **options}), "model", engine="test")
        opened.append(connection)
        return connection

    yield connect
    for connection in opened:
        connection.close()


@pytest.fixture
def warnings(caplog):
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def items(size=MIB // 4, fill=True):
    memories = [kvfs.Client.buffer(size) for _ in KEYS]
    for i, memory in enumerate(memories):
        if fill:
            memory[:] = content(size, i)
    return list(zip(KEYS, memories, strict=True))


def finished(connection, ticket):
    """The results of a batch, which is told of once."""
    assert connection.wait(20 * slowness())
    (done,) = connection.drain()
    assert done.ticket == ticket and connection.drain() == [] and connection.pending == 0
    return done.results


# ---- names ----


@pytest.mark.parametrize("namespace", ["..", "a/../b", "a/./b", "a\0b", "x" * 256, "y/" * 600])
def test_a_namespace_that_cannot_be_is_named(namespace):
    with pytest.raises(ValueError, match="namespace"):
        namespace_of(namespace)


def test_identities_that_differ_have_directories_that_differ():
    identities = ["a/b", "a_b", "a\nb", "a\x7fb", "é" * 200, "é" * 201, "x" * 300, "x" * 301, "", ".", ".."]
    spaces = [namespace_of("team//one/", identity) for identity in identities]
    assert len(set(spaces)) == len(spaces)
    assert all(space.startswith("team/one/") and space.count("/") == 2 for space in spaces), spaces
    assert all(len(space.split("/")[2].encode()) <= 255 for space in spaces)
    assert namespace_of("", "llama-3_8b_0123") == "llama-3_8b_0123"
    assert namespace_of("") == ""


def test_an_option_that_nobody_knows_is_warned_of(caplog):
    options = options_of("test", {"mount": "/mnt/kv", "mont": 1, "own": 2}, known=["own"])
    assert (options.mount, options.namespace, options.timeout_s, options.depth) == ("/mnt/kv", "", 2.0, 64)
    assert "options without effect: mont" in caplog.text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "mount None"),
        ({"mount": "kv"}, "mount 'kv': an absolute path"),
        ({"mount": "/kv", "namespace": 3}, "namespace 3"),
        ({"mount": "/kv", "timeout_s": True}, "timeout_s True"),
        ({"mount": "/kv", "timeout_s": float("nan")}, "timeout_s nan"),
        ({"mount": "/kv", "depth": 0}, "depth 0"),
        ({"mount": "/kv", "depth": 2.0}, "depth 2.0"),
    ],
)
def test_options_are_checked(given, words):
    with pytest.raises(ValueError, match=f"kvfs for test: {words}"):
        options_of("test", given)


# ---- the connection ----


def test_batches_go_in_and_come_out_once(own_pool, connect):
    connection = connect(own_pool(files=2, size="64M").mount)
    stored, read = items(), items(fill=False)
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    assert poll.poll(0) == []
    ticket = connection.submit_put(stored, parents=[None, *KEYS[:-1]])
    assert poll.poll(20_000 * slowness())
    assert finished(connection, ticket) == [True] * 8
    assert poll.poll(0) == []
    assert finished(connection, connection.submit_put(stored[:2])) == [True] * 2, "what is there counts as stored"
    assert finished(connection, connection.submit_exists([*KEYS, b"none"])) == [True] * 8 + [False]
    assert finished(connection, connection.submit_get([*read, (b"none", bytearray(9))])) == [MIB // 4] * 8 + [None]
    assert all(memory == other for (_, memory), (_, other) in zip(stored, read, strict=True))
    assert finished(connection, connection.submit_delete(KEYS[:1])) == [True]
    assert connection.exists_prefix([KEYS[1], KEYS[2], KEYS[0], KEYS[3]]) == 2
    counted = connection.counters
    assert (counted.stored, counted.present, counted.loaded, counted.failed_loads) == (8, 2, 8, 1)


def test_the_blocking_calls(own_pool, connect):
    connection = connect(own_pool(files=2, size="64M").mount)
    stored, read = items(), items(fill=False)
    assert connection.put(stored) == [True] * 8
    assert connection.put(stored[:1], if_absent=False) == [True]
    assert connection.get_into(read) == [MIB // 4] * 8
    assert connection.get_into([(KEYS[0], bytearray(9))]) == [None], "too small is a miss"
    parts = [bytearray(1000), bytearray(5000), bytearray(10)]
    wanted = list(zip((KEYS[0], KEYS[1], b"none"), (0, 12_345, 0), parts, strict=True))
    assert connection.get_ranges(wanted) == [1000, 5000, None]
    assert parts[0] == stored[0][1][:1000] and parts[1] == stored[1][1][12_345:17_345]
    assert connection.sizes([KEYS[0], b"none"]) == [MIB // 4, None]
    assert connection.touch([KEYS[0], b"none"]) == 1
    assert connection.delete(KEYS[:2]) == [True, True]
    assert all(memory == other for (_, memory), (_, other) in zip(stored, read, strict=True))


def test_a_key_or_memory_that_cannot_be_is_a_miss_and_one_warning(own_pool, connect, warnings):
    connection = connect(own_pool(files=2, size="64M").mount)
    for _ in range(3):
        assert connection.exists([b"x" * 5000]) == [False]
        assert finished(connection, connection.submit_put([(b"a", b"1"), (b"a", b"2")])) == [False, False]
        assert connection.state is State.UP
    assert len(warnings()) == 1, warnings()


def test_without_a_mount_every_block_is_a_miss(tmp_path, connect, warnings):
    connection = connect(tmp_path)
    read = items()
    assert connection.state is State.AWAY and connection.client is None
    assert connection.exists(KEYS) == [False] * 8 and connection.exists_prefix(KEYS) == 0
    assert connection.put(read) == [False] * 8 and connection.get_into(read) == [None] * 8
    assert finished(connection, connection.submit_get(read)) == [None] * 8
    assert finished(connection, connection.submit_put(read)) == [False] * 8
    time.sleep(1)
    assert len(warnings()) == 1 and "not on a kvfs mount" in warnings()[0]
    assert connection.counters.dropped == 16


def test_the_daemon_dies_and_the_pool_goes_and_each_is_said_once(own_pool, connect, warnings):
    pool = own_pool(files=2, size="64M")
    connection = connect(pool.mount)
    stored, read = items(), items(fill=False)
    connection.put(stored)
    pool.kill()
    assert connection.get_into(read) == [MIB // 4] * 8, "reads need no daemon"
    for _ in range(3):
        assert connection.put(stored, if_absent=False) == [False] * 8
    assert connection.state is State.READING
    assert connection.exists(KEYS) == [True] * 8
    assert len(warnings()) == 1 and "none is stored" in warnings()[0], warnings()
    pool.remount()
    wait_until(lambda: connection.state is State.UP, "the connection", timeout_s=20)
    assert connection.put(stored, if_absent=False) == [True] * 8
    pool.umount()
    assert connection.get_into(read) == [None] * 8
    assert connection.state is State.AWAY and connection.counters.lost == 1
    assert len(warnings()) == 2, warnings()
    pool.command("format", str(pool.path), "--files", "2", "--size", "64M", "--force")
    pool.start()
    wait_until(lambda: connection.state is State.UP, "the other pool", timeout_s=20)
    assert connection.exists(KEYS) == [False] * 8
    assert finished(connection, connection.submit_put(stored)) == [True] * 8


def test_a_connection_that_nobody_uses_hears_of_the_end_by_itself(own_pool, connect, warnings):
    pool = own_pool(files=2, size="64M")
    connection, another = connect(pool.mount), connect(pool.mount)
    assert len(watchers_alive()) == 1, "one for all"
    pool.kill()
    wait_until(lambda: connection.state is State.READING and another.state is State.READING, "the kill", timeout_s=20)
    pool.remount()
    wait_until(lambda: connection.state is State.UP and another.state is State.UP, "the next daemon", timeout_s=20)
    pool.umount()
    wait_until(lambda: connection.state is State.AWAY and another.state is State.AWAY, "the unmount", timeout_s=20)
    assert connection.counters.lost == 1 and connection.client is None
    assert len(warnings()) == 4 and sum(": unmounted" in each for each in warnings()) == 2, warnings()
    pool.start()
    wait_until(lambda: connection.state is State.UP and another.state is State.UP, "the mount", timeout_s=20)
    connection.close()
    another.close()
    wait_until(lambda: not watchers_alive(), "the end of the watch, which has nothing to do", timeout_s=20)


def watchers_alive():
    return [thread for thread in threading.enumerate() if thread.name == "kvfs-watch"]


def test_a_batch_is_over_when_no_device_writes_into_its_memory(own_pool, connect, monkeypatch):
    """A read that missed its deadline may arrive later, and an engine would have given the memory to another block."""
    connection = connect(own_pool(files=2, size="64M").mount)
    writing = [True]
    monkeypatch.setattr(common, "_any_busy", lambda client, regions: writing[0])
    ticket = connection.submit_get([(b"none", kvfs.Client.buffer(4096))])
    wait_until(lambda: connection.drain() == [] and connection._busy, "the end of the read")
    assert not connection.wait(0.05) and connection.pending == 1
    with pytest.raises(DeadlineError, match="under way"):
        connection.close(timeout_s=0.05)
    writing[0] = False
    assert finished(connection, ticket) == [None]


def test_a_child_of_fork_misses_and_hurts_nobody(own_pool, connect):
    connection = connect(own_pool(files=2, size="64M").mount)
    connection.put(items())

    def child():
        return [connection.exists(KEYS[:1]), connection.drain(), connection.state.value]

    assert in_child(child) == [[False], [], "away"]
    assert connection.exists(KEYS) == [True] * 8


def test_a_second_close_does_nothing(tmp_path):
    connection = Connection(options_of("test", {"mount": str(tmp_path)}), "", engine="test")
    connection.close()
    connection.close()
    assert connection.exists([b"a"]) == [False]


@pytest.mark.parametrize(
    ("results", "error", "failed", "there", "counts"),
    [
        ([True, False, False], None, {KEYS[1]: KvfsError("no room")}, [True, False, True], (1, 1, 1)),
        ([True, False, False], NotMountedError("the daemon is gone"), {}, [True, False, False], (1, 2, 0)),
        ([], NotMountedError("the daemon is gone"), {}, [False, False, False], (0, 3, 0)),
    ],
)
def test_a_put_that_ends_half_way_tells_what_is_there(
    connect, own_pool, monkeypatch, warnings, results, error, failed, there, counts
):
    connection = connect(own_pool(files=2, size="64M").mount)
    completion = SimpleNamespace(id=0, results=results, error=error, failed=failed)
    queue = connection._link.queue
    monkeypatch.setattr(queue, "put", lambda *_, **__: 0)
    monkeypatch.setattr(queue, "drain", lambda: [completion] if connection._batches else [])
    ticket = connection.submit_put([(key, b"1") for key in KEYS[:3]])
    assert finished(connection, ticket) == there
    counted = connection.counters
    assert (counted.stored, counted.failed_stores, counted.present) == counts
    assert len(warnings()) == 1, warnings()
