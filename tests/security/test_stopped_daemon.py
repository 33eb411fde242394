"""A daemon that is stopped and answers nothing: native clients give up in their time, and the kernel ends its mount
where --request-timeout asked for that."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time

import pytest
from helpers import MIB, CommandError, Pool, assert_same, content, read_file, run, slowness, wait_until, write_file

import kvfs
from kvfs.doctor import REQUEST_TIMEOUT_KERNEL
from kvfs.errors import DeadlineError
from kvfs.units import kernel_version

pytestmark = pytest.mark.usefixtures("only_root")

# The least that the kernel knows, which is also how often it looks.
TIMEOUT_S = 15
# Of two or more times that, for a busy machine.
LIMIT_S = 90

has_timeouts = pytest.mark.skipif(
    kernel_version(platform.release()) < REQUEST_TIMEOUT_KERNEL, reason="FUSE_REQUEST_TIMEOUT needs Linux 6.15"
)


def test_native_calls_to_a_stopped_daemon_end_in_their_time():
    with Pool(size="64M") as pool, kvfs.connect(pool.mount, gpu=None, timeout_s=1) as client:
        client.put([(b"before", b"sealed")])
        pid = pool.pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            for call in (
                lambda: client.put([(f"{i}".encode(), content(MIB)) for i in range(40)]),
                lambda: client.delete([b"before"]),
                lambda: list(client.list()),
            ):
                begun_s = time.monotonic()
                with pytest.raises(DeadlineError):
                    call()
                assert time.monotonic() - begun_s < 10 * slowness()
            assert client.get(b"before") == b"sealed"
        finally:
            os.kill(pid, signal.SIGCONT)

        def stored() -> bool:
            try:
                client.put([(b"after", b"sealed too")])
            except DeadlineError:
                return False
            return True

        wait_until(stored, "a put once the daemon runs again", timeout_s=60)
        assert client.get(b"after") == b"sealed too"


@pytest.mark.slow
@has_timeouts
def test_the_kernel_ends_the_mount_of_a_stopped_daemon_and_it_can_be_mounted_again():
    with Pool(size="64M", mount_args=("--allow-other", "--request-timeout", str(TIMEOUT_S))) as pool:
        data = content(MIB)
        write_file(pool.mount / "block", data)
        pid = pool.pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            begun_s = time.monotonic()
            # In a process of its own: a test cannot be taken out of the kernel.
            looker = subprocess.Popen(
                [sys.executable, "-c", "import os, sys; os.listdir(sys.argv[1])", pool.mount],
                stderr=subprocess.PIPE,
                text=True,
            )
            try:
                _, message = looker.communicate(timeout=LIMIT_S)
            finally:
                looker.kill()
            assert looker.returncode == 1 and "Connection" in message, message  # aborted, or not connected any more
            assert time.monotonic() - begun_s > TIMEOUT_S - 1, "it was the daemon's own answer"
            with pytest.raises(OSError, match="endpoint is not connected"):
                os.stat(pool.mount / "another")
        finally:
            os.kill(pid, signal.SIGCONT)
        pool.command("umount", str(pool.mount))
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the end of the daemon", timeout_s=60)
        pool.start()
        assert_same(read_file(pool.mount / "block"), data, "a block that was sealed before")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--request-timeout", "14"), "14: 15 to 65535 s are possible"),
        (("--request-timeout", "65536"), "65536: 15 to 65535 s are possible"),
        (("--request-timeout", "0"), "'0': not a positive number"),
        pytest.param(
            ("--request-timeout", "20", "--io-timeout", "20000"),
            "20: a device may take 20000 ms .* so the kernel must wait 30 s or longer",
            marks=has_timeouts,
        ),
    ],
)
def test_a_timeout_that_cannot_work_is_refused(arguments, message, tmp_path):
    with pytest.raises(CommandError, match=message):
        run(sys.executable, "-m", "kvfs", "mount", str(tmp_path / "pool"), str(tmp_path), *arguments)
