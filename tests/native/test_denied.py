"""Where io_uring is denied, as in a container: the daemon, a client, or both go by threads, each as it finds it.

The filter is seccomp's (tests/denied.py), for the program that a test starts.
"""

import json
import sys

import pytest
from helpers import MIB, REPOSITORY, assert_same, content, read_file, run, write_file

import kvfs

DENIED = REPOSITORY / "tests/denied.py"
STORE_AND_READ = """
import json, sys, kvfs
data = bytes(range(256)) * 20000
with kvfs.connect(sys.argv[1], "denied", gpu=None) as client:
    client.put([(b"a", data), (b"b", data[:5000])])
    assert client.get(b"a") == data and client.get(b"b") == data[:5000] and client.get(b"c") is None
    print(json.dumps(client.statistics().rings))
"""


def client_of(pool, word=None):
    """The way of I/O that a program's client tells after it has stored and read; the program runs under a filter."""
    filtered = [DENIED, word, sys.executable] if word else []
    said = run(sys.executable, *filtered, "-c", STORE_AND_READ, pool.path, environment=pool.environment)
    return json.loads(said.stdout)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("EPERM", "io_uring_setup: Operation not permitted"),
        ("ENOSYS", "io_uring_setup: Function not implemented"),
        ("EPERM:enter", "io_uring_enter: Operation not permitted"),
        ("EPERM:register", "io_uring_register: Operation not permitted"),
    ],
)
def test_a_client_that_is_denied(own_pool, word, why):
    pool = own_pool(files=2, size="64M")
    assert client_of(pool) == "io_uring"
    assert client_of(pool, word).startswith(f"threads ({why}): ")


@pytest.mark.parametrize("word", ["EPERM", "EPERM:enter", "ENOSYS:register"])
def test_a_daemon_that_is_denied_and_its_clients(own_pool, word):
    pool = own_pool(files=2, size="64M", program=(DENIED, word, sys.executable, "-m", "kvfs"))
    data = content(3 * MIB, 1)
    write_file(pool.mount / "file", data)
    assert_same(read_file(pool.mount / "file"), data, "the file")
    assert client_of(pool) == "io_uring"  # each decides for itself
    assert client_of(pool, word).startswith("threads (")
    assert pool.status()["rings"].startswith("threads (io_uring_")
    assert " rings: threads (io_uring_" in pool.command("status", str(pool.path)).stdout
    assert "device I/O goes by threads (io_uring_" in pool.log_tail(200)
    pool.remount()
    assert_same(read_file(pool.mount / "file"), data, "the file after a mount")
    with kvfs.connect(pool.path, "denied", gpu=None) as client:
        assert client.exists([b"a", b"b"]) == [True, True]
