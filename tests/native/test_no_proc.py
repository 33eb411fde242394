"""Without /proc, as in a bare chroot: a client finds its daemon by the pool's directory; the daemon says its need."""

from __future__ import annotations

import sys

import pytest
from helpers import mount_device, requires_root, run

CLIENT = """
import sys, kvfs
data = bytes(range(256)) * 20000
with kvfs.connect(sys.argv[1], "bare", gpu=None) as client:
    client.put([(b"a", data)])
    assert client.get(b"a") == data and client.get(b"b") is None
"""
BARE = (
    "unshare",
    "--mount",
    "--propagation",
    "private",
    "bash",
    "-c",
    'mount -t tmpfs none /proc && exec "$@"',
    "bash",
)


def test_a_client_by_the_pools_directory_needs_no_proc(own_pool):
    requires_root()
    pool = own_pool(files=2, size="64M")
    run(*BARE, sys.executable, "-c", CLIENT, pool.path)
    run(sys.executable, "-c", CLIENT, pool.mount)


@pytest.mark.parametrize("verb", ["mount", "umount", "status", "export"])
def test_what_needs_proc_says_so(own_pool, verb):
    requires_root()
    pool = own_pool(files=2, size="64M", started=False)
    more = {"mount": [pool.mount], "export": ["--virtiofs", pool.base / "guest.sock"]}.get(verb, [])
    done = run(*BARE, sys.executable, "-m", "kvfs", verb, pool.path, *more, check=False)
    assert done.returncode == 1, done.stdout
    assert done.stderr == (
        "kvfs: /proc is not mounted here, where kvfs finds mounts and processes: mount -t proc proc /proc\n"
    )
    assert mount_device(pool.mount) is None
