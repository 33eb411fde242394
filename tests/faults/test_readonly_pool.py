"""A pool on a filesystem that takes no writes."""

from __future__ import annotations

import fcntl
import json
import pathlib

from helpers import detach, run


def test_status_tells_whether_it_is_used(own_pool, tmp_path: pathlib.Path) -> None:
    pool = own_pool(files=1, size="64M")
    pool.umount()  # the lock is there, and nobody has it
    view = tmp_path / "view"
    view.mkdir()
    run("mount", "--bind", pool.path, view)
    try:
        run("mount", "-o", "remount,bind,ro", view)
        state = json.loads(pool.command("status", str(view), "-o", "json").stdout)["pool"]["state"]
        assert state == "not mounted"
        with (pool.path / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = json.loads(pool.command("status", str(view), "-o", "json").stdout)["pool"]["state"]
            assert state == "in use, without a mount"
    finally:
        detach(view)
