"""A bug in the store: a background task of it dies. The daemon ends in seconds and says why; nobody waits for ever."""

from __future__ import annotations

import errno
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable

import helpers
from helpers import MIB, Pool, assert_same, content, raises_errno, read_file, requests_waiting, wait_until, write_file

END_S = 40.0


def test_a_store_task_that_dies_ends_the_daemon_and_answers_whoever_waits(
    own_pool: Callable[..., Pool], tmp_path: pathlib.Path
) -> None:
    pool = own_pool(size="128M", started=False)
    helpers.run(
        sys.executable,
        pathlib.Path(__file__).with_name("dying.py"),
        tmp_path,
        "mount",
        pool.path,
        pool.mount,
        *pool.mount_args,
        environment=pool.environment,
    )
    files = {f"{index}": content(MIB, index) for index in range(20)}
    # C seals a new file alone; one that is changed after it was sealed is sealed by a task of the store.
    former = {f"late-{index}": content(MIB, ("former", index)) for index in range(8)}
    for name, data in (files | former).items():
        write_file(pool.mount / name, data)
    late = {name: content(MIB, ("late", name)) for name in former}
    changed = {name: os.open(pool.mount / name, os.O_WRONLY) for name in late}
    pid = pool.pid()
    (tmp_path / "hold").touch()
    wait_until((tmp_path / "held").exists, "no job is completed")
    begun: list[str] = []
    answers: list[tuple[str, int | None]] = []

    def close(name: str) -> None:
        os.write(changed[name], late[name])
        begun.append(name)
        try:
            os.close(changed[name])
            answers.append(("close", None))
        except OSError as error:
            answers.append(("close", error.errno))

    def sync() -> None:
        with helpers.opened(pool.mount, os.O_RDONLY | os.O_DIRECTORY) as directory:
            begun.append("sync")
            try:
                os.fsync(directory)
                answers.append(("sync", None))
            except OSError as error:
                answers.append(("sync", error.errno))

    # The kernel makes no file in a directory that is being synced: that comes last.
    waiting = [threading.Thread(target=close, args=(name,)) for name in late]
    for thread in waiting:
        thread.start()
    wait_until(lambda: len(begun) == len(late), "all files are being closed")
    waiting.append(threading.Thread(target=sync))
    waiting[-1].start()
    wait_until(lambda: "sync" in begun, "the sync has begun")
    if requests_waiting(pool.mount) is not None:
        wait_until(lambda: (requests_waiting(pool.mount) or 0) >= len(begun), "all of it to be asked of the daemon")
    assert not answers, answers
    began = time.monotonic()
    (tmp_path / "die").touch()
    for thread in waiting:
        thread.join(END_S * helpers.slowness())
    assert sorted(answers) == [("close", errno.EIO)] * 8 + [("sync", errno.EIO)]
    pool.wait_dead(pid, timeout_s=END_S)
    assert time.monotonic() - began < END_S * helpers.slowness()
    log = (pool.path / "kvfs.log").read_text()
    assert "CRITICAL" in log and "LookupError: the task that dies" in log, log
    with raises_errno(errno.ENOTCONN):
        read_file(pool.mount / "0")
    pool.start()
    for name, data in files.items():
        assert_same(read_file(pool.mount / name), data, name)
    # What was changed is as it was before, as it was written, or not there.
    for name in set(os.listdir(pool.mount)) - set(files):
        assert read_file(pool.mount / name) in (former[name], late[name]), name
    pool.umount()
    assert "nothing is damaged" in pool.command("fsck", str(pool.path), "--verify-data").stdout
