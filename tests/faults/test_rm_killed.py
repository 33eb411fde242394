"""`kvfs rm` under a daemon that is killed: what is left is right, the next ends it, a held mount forgets no removal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import helpers
from helpers import Pool, process_alive, wait_until
from test_held_mounts import HeldPool, _kernel, pool  # noqa: F401

import kvfs
from kvfs.namespace.forgetting import _STEP

COUNT = 3000
KEYS = [b"%06d" % i for i in range(COUNT)]


def value(key: bytes) -> bytes:
    return key * 100


def stored(there: Pool, space: str, keys: list[bytes]) -> None:
    with kvfs.connect(there.mount, namespace=space) as client:
        for at in range(0, len(keys), 500):
            client.put([(key, value(key)) for key in keys[at : at + 500]])


def left(there: Pool, space: str) -> set[bytes]:
    """Keys whose blocks are there: each is right."""
    with kvfs.connect(there.mount, namespace=space) as client:
        found = {key for key, is_there in zip(KEYS, client.exists(KEYS), strict=True) if is_there}
        for key in found:
            data = client.get(key)
            assert data is None or bytes(data) == value(key)
        return found


def killed_in_the_middle(there: Pool, space: str) -> set[bytes]:
    """Kill the daemon while it removes a namespace. Returns the keys that were gone before that."""
    words = [sys.executable, "-m", "kvfs", "rm", str(there.path), space]
    with kvfs.connect(there.mount, namespace=space) as client:
        pid = there.pid()
        with subprocess.Popen(words, cwd=helpers.REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            wait_until(lambda: not client.exists([KEYS[0]])[0], "the first removal", interval_s=0.0005)
            found = client.exists(KEYS)
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not process_alive(pid), f"the end of daemon {pid}")
        return {key for key, is_there in zip(KEYS, found, strict=True) if not is_there}


def test_the_next_daemon_ends_what_a_killed_one_began() -> None:
    with Pool(files=2, size="128M") as own:
        stored(own, "m/old", KEYS)
        stored(own, "m/new", KEYS[:50])
        killed_in_the_middle(own, "m/old")
        own.remount()
        assert left(own, "m/new") == set(KEYS[:50])
        left(own, "m/old")
        own.command("rm", str(own.mount), "m/old", "--force")
        assert not os.path.lexists(own.mount / "m" / "old") and left(own, "m/old") == set()
        assert left(own, "m/new") == set(KEYS[:50])
        own.umount()
        own.command("fsck", str(own.path))
        own.start()
        assert left(own, "m/old") == set() and left(own, "m/new") == set(KEYS[:50])


def test_under_a_held_mount_no_removal_is_forgotten(pool: HeldPool) -> None:  # noqa: F811
    stored(pool, "m/old", KEYS)
    gone = killed_in_the_middle(pool, "m/old")
    assert gone
    pool.start()
    # A client sees a step in its middle, and the journal has it at its end.
    assert len(left(pool, "m/old") & gone) <= _STEP
    pool.command("rm", str(pool.mount), "m/old", "--force")
    # Removed and answered: no commit is waited for by the next daemon.
    stored(pool, "m/old", KEYS[:10])
    pool.command("rm", str(pool.mount), "m/old")
    pool.take_over(signal.SIGKILL)
    assert left(pool, "m/old") == set()
    with contextlib.suppress(FileNotFoundError):
        assert os.listdir(pool.mount / "m") == []
