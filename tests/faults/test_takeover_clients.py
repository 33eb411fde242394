"""Native clients over a take-over: what needs the daemon waits for the next one, within the client's timeout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing

import helpers
import pytest
from helpers import KIB, Pool, content, slowness, wait_until
from test_held_mounts import HeldPool, _kernel, in_thread, pool  # noqa: F401

import kvfs
from kvfs.connectors import watch
from kvfs.connectors.common import Connection, Options, State
from kvfs.errors import NotMountedError


def blocks(count: int, seed: int = 0) -> dict[bytes, bytes]:
    return {f"{seed}-{i}".encode(): content(60 * KIB + i, (seed, i)) for i in range(count)}


def assert_reads(client: kvfs.Client, expected: dict[bytes, bytes]) -> None:
    for key, data in expected.items():
        found = client.get(key)
        assert found is not None and bytes(found) == data, key


@pytest.mark.parametrize("number", [helpers.slow(signal.SIGKILL), signal.SIGTERM])
def test_calls_wait_for_the_next_daemon_and_reads_go_on(pool: HeldPool, number: int) -> None:  # noqa: F811
    old, new = blocks(20), blocks(20, 1)
    with kvfs.connect(pool.mount, "space", gpu=None, timeout_s=60 * slowness()) as client:
        client.put(old.items())
        pool.end(number)
        wait_until(lambda: not client.information().connected, "the client's knowledge of it")
        waits = [
            in_thread(lambda: client.put(new.items())),
            in_thread(lambda: client.delete([b"0-0", b"none"])),
            in_thread(lambda: client.lease([b"0-1"], 60).held),
            in_thread(lambda: sorted(client.list())),
        ]
        # For longer than a client takes to let go of a pool that was unmounted.
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            assert_reads(client, old)
            assert client.exists([*old, b"none"]) == [True] * 20 + [False]
            time.sleep(0.1)
        pool.start()
        assert waits[0]() == [True] * 20
        assert waits[1]() == [True, False]
        assert waits[2]() == [True]
        assert set(old) - {b"0-0"} <= set(waits[3]())  # type: ignore[call-overload]
        assert client.statistics().reconnects == 1
        del old[b"0-0"]
        assert_reads(client, old | new)
        for key, data in (old | new).items():
            found = [path for path in (pool.mount / "space").rglob(key.hex())]
            assert [path.read_bytes() for path in found] == [data]


def test_without_a_next_daemon_a_call_fails_within_its_timeout(pool: HeldPool) -> None:  # noqa: F811
    with kvfs.connect(pool.mount, gpu=None, timeout_s=1) as client:
        client.put([(b"old", b"data")])
        pool.end(signal.SIGKILL)
        wait_until(lambda: not client.information().connected, "the client's knowledge of it")
        for call in (lambda: client.put([(b"new", b"data")]), lambda: client.delete([b"old"])):
            before = time.monotonic()
            with pytest.raises(NotMountedError, match=r"daemon is gone|no daemon answers"):
                call()
            assert 0.9 <= time.monotonic() - before < 10 * slowness()
        before = time.monotonic()
        client.lease([], 1)
        assert client.get(b"old") == b"data"
    pool.start()
    with kvfs.connect(pool.mount, gpu=None) as client:
        assert client.get(b"old") == b"data"


@pytest.mark.parametrize("number", [signal.SIGKILL, helpers.slow(signal.SIGTERM)])
def test_who_connects_between_two_daemons_waits_for_the_next(pool: HeldPool, number: int) -> None:  # noqa: F811
    (pool.mount / "space").mkdir()
    with kvfs.connect(pool.mount, "space", gpu=None) as client:
        client.put([(b"old", b"data")])
    pool.end(number)
    options = Options(str(pool.mount), timeout_s=60 * slowness())
    waits = [
        in_thread(lambda: kvfs.connect(pool.mount, "space", gpu=None, timeout_s=60 * slowness())),
        in_thread(lambda: Connection(options, "space", engine="a test")),
    ]
    wait_until(lambda: (helpers.requests_waiting(pool.mount) or 9) >= 2, "questions to the mount")
    pool.start()
    connected, connection = (wait() for wait in waits)
    assert isinstance(connected, kvfs.Client) and isinstance(connection, Connection)
    with connected, closing(connection):
        assert connected.put([(b"new", b"data")]) == [True]
        assert connected.get(b"old") == b"data"
        assert connection.exists([b"old", b"new"]) == [True, True]
        assert (connection.state, connection.counters.lost) == (State.UP, 0)


def test_who_connects_where_no_daemon_comes_fails_within_its_timeout(pool: HeldPool) -> None:  # noqa: F811
    pool.end(signal.SIGKILL)
    before = time.monotonic()
    with pytest.raises(NotMountedError, match=r"no daemon answers: the mount waits for its next one.* 1000 ms"):
        kvfs.connect(pool.mount, gpu=None, timeout_s=1)
    assert 0.9 <= time.monotonic() - before < 10 * slowness()
    pool.start()
    kvfs.connect(pool.mount, gpu=None).close()


def test_who_connects_to_a_mount_that_nobody_keeps_fails_at_once() -> None:
    with Pool(files=2) as dead:
        dead.kill()
        before = time.monotonic()
        with pytest.raises(NotMountedError, match="no daemon answers: it is not mounted"):
            kvfs.connect(dead.mount, gpu=None, timeout_s=600)
        assert time.monotonic() - before < 10 * slowness()


@pytest.mark.slow
def test_an_unmount_is_an_end_and_no_take_over(pool: HeldPool) -> None:  # noqa: F811
    with kvfs.connect(pool.mount, gpu=None, timeout_s=60) as client:
        client.put([(b"old", b"data")])
        pool.umount()
        before = time.monotonic()
        with pytest.raises(NotMountedError, match="unmounted"):
            client.put([(b"new", b"data")])
        assert time.monotonic() - before < 10 * slowness()


@pytest.mark.slow
def test_calls_that_a_daemon_left_without_an_answer_are_made_again(pool: HeldPool) -> None:  # noqa: F811
    """The daemon stands still while they are asked, and is killed so."""
    old, new = blocks(5), blocks(5, 1)
    with kvfs.connect(pool.mount, "space", gpu=None, timeout_s=60 * slowness()) as client:
        client.put(old.items())
        os.kill(pool.pid(), signal.SIGSTOP)
        waits = [
            in_thread(lambda: client.put(new.items(), if_absent=True)),
            in_thread(lambda: client.delete([b"0-0"])),
            in_thread(lambda: client.lease([b"0-1"], 60).held),
        ]
        time.sleep(0.5)  # the moment is the point of the test
        pool.end(signal.SIGKILL)
        pool.start()
        assert [wait() for wait in waits] == [[True] * 5, [True], [True]]
        del old[b"0-0"]
        assert_reads(client, old | new)


@pytest.mark.slow
def test_puts_of_a_daemon_that_dies_again_and_again_are_whole(pool: HeldPool) -> None:  # noqa: F811
    """Large puts, which are under way at any moment of it."""
    done, stop = dict[bytes, bytes](), threading.Event()

    def put() -> None:
        for seed in range(1000):
            new = blocks(40, seed % 6)
            assert len(client.put(new.items())) == 40
            done.update(new)
            if stop.is_set():
                return

    with kvfs.connect(pool.mount, "space", gpu=None, timeout_s=60 * slowness()) as client:
        ended = in_thread(put)
        wait_until(lambda: bool(done), "a first put")
        for _ in range(2):
            pool.take_over(signal.SIGKILL)
        stop.set()
        ended()
        assert client.statistics().reconnects == 2
        assert_reads(client, done)


@pytest.mark.slow
def test_a_queue_that_is_closed_does_not_wait_for_a_daemon(pool: HeldPool) -> None:  # noqa: F811
    with kvfs.connect(pool.mount, gpu=None, timeout_s=600) as client:
        client.put([(b"old", b"data")])
        queue = client.queue()
        pool.end(signal.SIGKILL)
        wait_until(lambda: not client.information().connected, "the client's knowledge of it")
        queue.put([(b"new", b"data")])
        before = time.monotonic()
        queue.close()
        assert time.monotonic() - before < 10 * slowness()
        pool.start()
        assert client.exists([b"new"]) == [False]
        queue = client.queue()
        queue.put([(b"new", b"data")])
        wait_until(lambda: len(queue.drain()) == 1, "the put")
        queue.close()
        assert client.exists([b"new"]) == [True]


def test_a_connector_drops_no_store_in_a_take_over(pool: HeldPool) -> None:  # noqa: F811
    options = Options(str(pool.mount), timeout_s=60 * slowness())
    connection = Connection(options, "space", engine="a test")
    assert connection.put([(b"first", b"1")]) == [True]
    pool.end(signal.SIGKILL)
    ticket = connection.submit_put([(b"queued", b"2")])
    put = in_thread(lambda: connection.put([(b"third", b"3")]))
    assert connection.exists([b"first"]) == [True]
    pool.start()
    assert put() == [True]
    assert connection.wait(60 * slowness())
    assert [(done.ticket, done.results) for done in connection.drain()] == [(ticket, [True])]
    assert connection.exists([b"first", b"queued", b"third"]) == [True] * 3
    assert (connection.state, connection.counters.dropped, connection.counters.lost) == (State.UP, 0, 0)
    connection.close()


def test_a_connector_that_hears_of_the_gap_by_itself_drops_no_store(pool: HeldPool) -> None:  # noqa: F811
    options = Options(str(pool.mount), timeout_s=60 * slowness())
    with closing(Connection(options, "space", engine="a test")) as connection:
        assert connection.put([(b"first", b"1")]) == [True]
        pool.end(signal.SIGKILL)
        time.sleep(3 * watch.PERIOD_S)  # it has looked meanwhile
        assert (connection.state, connection.exists([b"first"])) == (State.UP, [True])
        ticket = connection.submit_put([(b"second", b"2")])
        pool.start()
        assert connection.wait(60 * slowness())
        assert [(done.ticket, done.results) for done in connection.drain()] == [(ticket, [True])]
        assert (connection.state, connection.counters.dropped, connection.counters.lost) == (State.UP, 0, 0)


def test_a_connector_without_a_daemon_reads_on_whatever_it_asks(pool: HeldPool) -> None:  # noqa: F811
    with closing(Connection(Options(str(pool.mount), timeout_s=0.5), "space", engine="a test")) as connection:
        assert connection.put([(b"first", b"1")]) == [True]
        pool.end(signal.SIGKILL)
        assert connection.lease([b"first"], 60) is None
        assert connection.delete([b"first"]) == [False]
        assert connection.put([(b"second", b"2")]) == [False]
        assert (connection.state, connection.exists([b"first"])) == (State.READING, [True])
        begun = time.monotonic()
        for _ in range(100):  # it is known to be away: none of them waits
            assert connection.lease([b"first"], 60) is None
        assert time.monotonic() - begun < 10 * slowness()
        pool.start()
        wait_until(lambda: connection.state is State.UP, "the next daemon")
        lease = connection.lease([b"first"], 60)
        assert lease is not None and lease.held == [True]
        assert connection.counters.lost == 0


ASKING = """
import kvfs, sys
client = kvfs.connect(sys.argv[1], gpu=None, timeout_s=float(sys.argv[2]))
client.put([(b"old", b"data")])
print("connected", flush=True)
for line in sys.stdin:
    print(client.put([(line.strip(), b"data")]), client.get(b"old") == b"data", flush=True)
"""


@pytest.mark.slow
def test_a_client_that_sees_the_mount_alone_waits_too(pool: HeldPool) -> None:  # noqa: F811
    """As in a container: the pool's directory is hidden from it, and the mount itself is asked."""
    pool.umount()
    pool.holder.wait()
    pool.hold()
    pool.mount_args = (*pool.mount_args, "--native-in", "/")
    pool.start()
    script = 'mount -t tmpfs none "$1" && shift && exec "$@"'
    client = [sys.executable, "-c", ASKING, str(pool.mount), str(60 * slowness())]
    with subprocess.Popen(
        ["unshare", "--mount", "--propagation", "slave", "sh", "-c", script, "sh", str(pool.path), *client],
        cwd=helpers.REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        pool.end(signal.SIGKILL)
        process.stdin.write("new\n")
        process.stdin.flush()
        wait_until(lambda: (helpers.requests_waiting(pool.mount) or 9) >= 1, "its question to the mount")
        pool.start()
        assert process.stdout.readline() == "[True] True\n"
        process.stdin.close()
    with kvfs.connect(pool.mount, gpu=None) as direct:
        assert direct.exists([b"old", b"new"]) == [True, True]
