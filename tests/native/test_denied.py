"""Where io_uring is denied, as in a container: the daemon, a client, or both go by threads, each as it finds it.

The filter is seccomp's (tests/denied.py), for the program that a test starts.
"""

import json
import re
import select
import subprocess
import sys

import pytest
from helpers import MIB, REPOSITORY, assert_same, content, read_file, requires_io_uring, run, slowness, write_file

import kvfs


@pytest.fixture(autouse=True)
def _io_uring_elsewhere():
    requires_io_uring()


DENIED = REPOSITORY / "tests/denied.py"
STORE_AND_READ = """
import json, sys, kvfs
data = bytes(range(256)) * 20000
with kvfs.connect(sys.argv[1], "denied", gpu=None) as client:
    client.put([(b"a", data), (b"b", data[:5000])])
    assert client.get(b"a") == data and client.get(b"b") == data[:5000] and client.get(b"c") is None
    print(json.dumps(client.statistics().rings))
"""

# An engine's connector, told by lines what to do: "deny" forbids this process to make threads.
CONNECTOR = """
import json, logging, sys
sys.path.insert(0, sys.argv[2])
from denied import deny
from kvfs.connectors.common import Connection, Options
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
logging.getLogger("kvfs.connectors").addHandler(handler)
connection = Connection(Options(sys.argv[1]), "denied", engine="test")
keys = [b"a", b"b"]
for line in sys.stdin:
    if line == "deny\\n":
        deny("EAGAIN:clone,EAGAIN:clone3")
    found = [connection.exists(keys), connection.put([(b"a", b"x")], if_absent=False)]
    found.append(connection.submit_put([(b"a", b"x")], if_absent=False) > 0 and connection.wait(60))
    print(json.dumps([connection.state.value, *found, connection.drain()[0].results, said]), flush=True)
connection.close()
"""
NO_THREAD = "io_uring is denied, and no thread could be made instead: raise pids.max of the cgroup"


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
        ("ENOSYS:enter", "io_uring_enter: Function not implemented"),
        ("EPERM:register", "io_uring_register: Operation not permitted"),
        ("ENOSYS:register", "io_uring_register: Function not implemented"),
    ],
)
def test_a_client_that_is_denied(own_pool, word, why):
    pool = own_pool(files=2, size="64M")
    assert client_of(pool) == "io_uring"
    assert client_of(pool, word).startswith(f"threads ({why}): ")


@pytest.mark.parametrize("word", ["EPERM", "ENOSYS", "EPERM:enter", "ENOSYS:register"])
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


class Connector:
    """A connector in a process of its own, under a filter."""

    def __init__(self, pool, word):
        words = [sys.executable, DENIED, word, sys.executable, "-c", CONNECTOR, pool.path, DENIED.parent]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        try:
            assert self.process.wait(60 * slowness()) == 0
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()

    def ask(self, line="look"):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], 60 * slowness())[0], "the connector hangs"
        return json.loads(self.process.stdout.readline())


def test_a_connector_that_can_do_no_io_is_away_and_says_why_once(own_pool):
    """Neither io_uring nor threads are to be had, the connector's own among them."""
    pool = own_pool(files=2, size="64M")
    client_of(pool)
    with Connector(pool, "EPERM,EAGAIN:clone,EAGAIN:clone3") as connector:
        for _ in range(3):
            state, exists, put, waited, results, said = connector.ask()
            assert (state, exists, put, waited, results) == ("away", [False, False], [False], True, [False])
            ((level, text),) = said
            assert level == "WARNING" and NO_THREAD in text and "every block is a miss" in text


def test_a_connector_that_can_do_no_io_after_a_restart_of_the_daemon_is_away(own_pool):
    pool = own_pool(files=2, size="64M")
    client_of(pool)
    with Connector(pool, "EPERM") as connector:
        # Denied before the daemon ends: a connector connects again by itself.
        assert connector.ask("deny")[:5] == ["up", [True, True], [True], True, [True]]
        pool.kill()
        pool.remount()
        for _ in range(3):
            state, exists, put, _, results, said = connector.ask()
            assert (state, exists, put, results) == ("away", [False, False], [False], [False])
            # A look between the two daemons may have told of the first one's end.
            assert [level for level, _ in said] in (["WARNING"], ["WARNING"] * 2), said
            assert [NO_THREAD in text for _, text in said] == [False] * (len(said) - 1) + [True], said


@pytest.mark.parametrize("call", ["setup", "register", "enter"])
def test_the_doctor_names_the_call_that_is_denied(call):
    for word, why in (("EPERM", "Operation not permitted"), ("ENOSYS", "Function not implemented")):
        said = run(sys.executable, DENIED, f"{word}:{call}", sys.executable, "-m", "kvfs", "doctor", "-o", "json")
        (check,) = [check for check in json.loads(said.stdout)["checks"] if check["name"] == "io_uring"]
        assert check["state"] == "note" and f"io_uring_{call}: {why}" in check["found"]
        assert "device I/O goes by threads" in check["found"] and "seccomp" in check["action"]


def test_a_daemon_that_gets_no_thread_names_the_limit(own_pool):
    pool = own_pool(files=2, size="64M", started=False)
    words = [DENIED, "EPERM,EAGAIN:clone,EAGAIN:clone3", sys.executable, "-m", "kvfs"]
    refused = run(sys.executable, *words, "mount", pool.path, pool.mount, "--foreground", check=False)
    assert refused.returncode == 1, refused.stdout
    why = "no thread could be made: raise pids.max of the cgroup"
    limits = r"; pids\.max: (\d+ in /|no limit is seen here)\S*.*; ulimit -u: (\d+|unlimited)$"
    assert f"kvfs: {pool.path}: {why}" in refused.stderr and re.search(limits, refused.stderr.strip())
    checked = run(sys.executable, *words, "fsck", pool.path, check=False)
    assert checked.returncode == 1 and checked.stderr.startswith(f"kvfs: {why}"), checked.stderr
    assert re.search(limits, checked.stderr.strip())
    pool.start()
    assert client_of(pool) == "io_uring"
