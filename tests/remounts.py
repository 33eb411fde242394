"""own_pool for tests that remount: its watchdog finds the daemon by its pid file.

The watchdog of helpers.py knows only the connection that the test began with. This one kills the daemon, which ends
every request that hangs.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import helpers
import pytest

_WATCHDOG = """
import os, select, signal, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    pid = int(open(sys.argv[2]).read())
    print(f"watchdog: the test hangs; killing daemon {pid}", file=sys.stderr, flush=True)
    os.kill(pid, signal.SIGKILL)
"""


@contextlib.contextmanager
def _watched(pool: helpers.Pool, seconds: float) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _WATCHDOG, str(seconds), str(pool.path / "kvfs.pid")], stdin=subprocess.PIPE
    )
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        process.wait(30)


@pytest.fixture
def own_pool(request: pytest.FixtureRequest) -> Iterator[Callable[..., helpers.Pool]]:
    """Make pools that only this test uses: own_pool(files=4, size="256M"), own_pool(template=path, started=False)."""
    if request.config.getoption("directory", default=None):
        pytest.skip("needs a kvfs pool of its own, not --directory")
    helpers.requires_fuse()
    marker = request.node.get_closest_marker("timeout")
    seconds = marker.args[0] if marker is not None and marker.args else helpers.TEST_TIMEOUT_S
    with contextlib.ExitStack() as stack:

        def make(**arguments: Any) -> helpers.Pool:
            pool = stack.enter_context(helpers.Pool(**arguments))
            stack.enter_context(helpers._reported(pool))
            stack.enter_context(_watched(pool, seconds + 10))
            return pool

        yield make


@pytest.fixture
def only_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: kills, remounts, damages")
