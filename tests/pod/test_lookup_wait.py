"""A pod whose look-ups wait for news: what was closed on one node is found on the other by the next look-up."""

from __future__ import annotations

import os
import signal

from helpers import requires_fuse, requires_root, wait_until
from podmounts import Pod, block, timed


def test_a_look_up_waits_for_news() -> None:
    requires_root()
    requires_fuse()
    with Pod(nodes=2, create_args=("--lookup-wait", "500")) as pod:
        here, there = (node.mount / "d" for node in pod.nodes)
        here.mkdir()
        wait_until(there.is_dir, "the directory")
        for i in range(50):
            (here / f"b{i}").write_bytes(block(i, 4096))
            assert (there / f"b{i}").read_bytes() == block(i, 4096), i
        # A name that nobody has is a miss after the other node's answer, not after the whole time.
        with timed(5.0, "twenty misses"):
            for i in range(20):
                assert not (there / f"none{i}").exists()
        # Without an engine a miss takes at most that time, and then it is one.
        pod.redis.signal(signal.SIGSTOP)
        try:
            with timed(5.0, "a miss without an engine"):
                assert not os.path.exists(there / "gone")
        finally:
            pod.redis.signal(signal.SIGCONT)
