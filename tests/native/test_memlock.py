"""Little memory may be locked, and CAP_IPC_LOCK is missing, as in a container: rings are smaller, or go by threads."""

from __future__ import annotations

import json
import sys

import pytest
from helpers import (
    MIB,
    Pool,
    assert_same,
    content,
    read_file,
    requires_fuse,
    requires_io_uring,
    requires_program,
    requires_root,
    run,
    write_file,
)


@pytest.fixture(autouse=True)
def _io_uring_elsewhere() -> None:
    requires_io_uring()


CLIENT = """
import json, sys, kvfs
data = bytes(range(256)) * 20000
with kvfs.connect(sys.argv[1], "little", gpu=None) as client:
    client.put([(b"a", data)])
    assert client.get(b"a") == data
    print(json.dumps(client.statistics().rings))
"""


def limited(limit: int) -> tuple[str, ...]:
    """The words that run a command with so many bytes of memory to lock."""
    return ("prlimit", f"--memlock={limit}:{limit}", "setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock")


@pytest.mark.parametrize("limit", [0, 65536])
def test_a_daemon_and_a_client_work_with_little_memory_to_lock(limit: int) -> None:
    requires_root()
    requires_fuse()
    requires_program("setpriv")
    with Pool(files=2, size="64M", started=False) as pool:
        pool.inside = limited(limit)
        pool.start()
        data = content(3 * MIB, limit)
        write_file(pool.mount / "file", data)
        assert_same(read_file(pool.mount / "file"), data, "the file")
        client = json.loads(run(*pool.inside, sys.executable, "-c", CLIENT, pool.path).stdout)
        for rings in (pool.status()["rings"], client):
            assert rings == "io_uring" or "CAP_IPC_LOCK or more memlock gives io_uring" in rings, rings
            assert limit or rings.startswith("threads (io_uring_setup: Cannot allocate memory;"), rings
        pool.umount()


def test_the_doctor_names_the_capability_where_no_memory_can_be_locked() -> None:
    requires_root()
    requires_program("setpriv")
    said = run(*limited(0), sys.executable, "-m", "kvfs", "doctor", "-o", "json").stdout
    checks = {check["name"]: check for check in json.loads(said)["checks"]}
    assert checks["memlock"]["state"] == "note" and "limit 0 KiB" in checks["memlock"]["found"]
    assert checks["io_uring"]["state"] == "note" and "Cannot allocate memory" in checks["io_uring"]["found"]
    assert "CAP_IPC_LOCK" in checks["io_uring"]["action"]
