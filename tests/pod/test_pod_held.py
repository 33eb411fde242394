"""A pod node whose mount is taken over while it has blocks of another node open: they read on by old handles."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import helpers
import pytest
from helpers import process_alive, requires_fuse, requires_root, wait_until
from podmounts import Node, Pod, block, found
from test_held_mounts import meanwhile
from test_pod_lost_nodes import sealed

from kvfs.units import kernel_version

KEPT, REMOVED = 4, 2
SIZE = 1 << 20


@pytest.fixture
def pod() -> Iterator[Pod]:
    """Its first node's mount is held."""
    requires_root()
    requires_fuse()
    if kernel_version(os.uname().release) < (6, 9):
        pytest.skip(f"needs Linux 6.9 (FUSE_NOTIFY_RESEND); this is {os.uname().release}")
    with Pod(nodes=2, started=False) as made:
        socket = made.base / "hold.sock"
        words = [sys.executable, "-m", "kvfs", "hold", str(socket)]
        holder = subprocess.Popen(words, cwd=helpers.REPOSITORY, stdin=subprocess.DEVNULL)
        try:
            wait_until(socket.exists, "the holder")
            made.nodes[0].mount_args = (*made.nodes[0].mount_args, "--hold", str(socket))
            for node in made.nodes:
                node.start()
            yield made
        finally:  # first: a mount that is held and that nobody serves answers nobody
            holder.kill()
            holder.wait()


def take_over(node: Node, number: int) -> None:
    pid = node.pid()
    os.kill(pid, number)
    wait_until(lambda: not process_alive(pid), f"the end of daemon {pid}")
    node.start()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_blocks_of_another_node_read_on_by_old_handles(pod: Pod, number: int) -> None:
    a, b = pod.nodes
    count = KEPT + REMOVED
    for i in range(count):
        sealed(b.mount / str(i), block(i, SIZE))
    for i in range(count):
        found(a.mount / str(i), block(i, SIZE))

    def begin() -> tuple[list[int], list[mmap.mmap]]:
        fds = [os.open(a.mount / str(i), os.O_RDONLY) for i in range(count)]
        return fds, [mmap.mmap(fd, 0, prot=mmap.PROT_READ) for fd in fds[:KEPT]]

    def end(seen: object) -> list[object]:
        fds, mapped = seen  # type: ignore[misc]
        outcomes: list[object] = []
        for i, memory in enumerate(mapped):
            memory.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(fds[i], 0, 0, os.POSIX_FADV_DONTNEED)
            outcomes.append(memory[:] == block(i, SIZE))
        for i, fd in enumerate(fds):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            try:
                outcomes.append(os.fstat(fd).st_size == SIZE and os.pread(fd, SIZE, 0) == block(i, SIZE))
            except OSError as error:
                outcomes.append(error.errno)
            os.close(fd)
        return outcomes

    go_on = meanwhile(pod.base, begin, end)
    take_over(a, number)
    take_over(a, number)
    for i in range(KEPT, count):
        (b.mount / str(i)).unlink()
    outcomes = go_on()
    assert isinstance(outcomes, list)
    assert outcomes[: 2 * KEPT] == [True] * 2 * KEPT
    assert all(outcome in (True, errno.EIO) for outcome in outcomes[2 * KEPT :]), outcomes
    found(a.mount / "0", block(0, SIZE))
