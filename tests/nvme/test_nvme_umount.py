"""`kvfs umount` with an enclosure gone: it ends soon after the deadline of its devices, and nothing is lost with it."""

from __future__ import annotations

import os
import signal
import time

import pytest
from enclosure import Enclosure
from helpers import MIB, Pool, slowness, wait_until
from test_initiator import content, files, states, urls

NQNS = ["nqn.2026-11.test:a", "nqn.2026-11.test:b"]
COUNT = 60
# The deadline of device I/O, and of keep alive, at the default; and what umount itself may take on a busy machine.
DEADLINE_S, SLACK_S = 10.0, 9.0


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_an_umount_with_an_enclosure_gone_waits_for_one_deadline(how: str) -> None:
    with (
        files(4, 96 * MIB) as paths,
        Enclosure({NQNS[0]: paths[:2]}) as first,
        Enclosure({NQNS[1]: paths[2:]}) as second,
    ):
        devices = urls(first.port, NQNS[0], 2) + urls(second.port, NQNS[1], 2)
        with Pool(devices=devices, format_args=("--stripe-width", "1", "--segment-size", "2M")) as pool:
            for number in range(COUNT):
                (pool.mount / f"f{number}").write_bytes(content(number, MIB))
            if how == "killed":
                second.kill()
            else:
                os.kill(second.pid, signal.SIGSTOP)
            try:
                began = time.monotonic()
                pool.umount()
                took_s = time.monotonic() - began
            finally:
                if how == "silent":
                    os.kill(second.pid, signal.SIGCONT)
            print(f"{how}: umount took {took_s:.1f} s")
            assert took_s < (DEADLINE_S + SLACK_S) * slowness()
            assert "Traceback" not in (pool.path / "kvfs.log").read_text()
            with Enclosure({NQNS[1]: paths[2:]}, port=second.port if how == "killed" else 0):
                pool.start()
                wait_until(lambda: set(states(pool)) == {"online"}, "the return", timeout_s=30)
                for number in range(COUNT):
                    assert (pool.mount / f"f{number}").read_bytes() == content(number, MIB)
                pool.umount()
