"""`kvfs umount` where the daemon is in another pid namespace, with its mount seen here or not."""

from __future__ import annotations

import json
import pathlib
import subprocess
import time
from typing import Any

import pytest
from boxes import Box, box, inside, is_mounted, kvfs
from helpers import Pool, assert_same, content, read_file, run, slowness, write_file

from kvfs.pool import owner
from kvfs.pool.format import Beat
from kvfs.pool.lock import locked
from kvfs.pool.owner import wait_free
from kvfs.store.fsck import fsck

DATA = content(3 << 20, "box")


def umount(target: object, *prefix: str, **arguments: Any) -> tuple[dict[str, Any], str]:
    """The document and the messages of a `kvfs umount` that must not take as long as its own patience."""
    began = time.monotonic()
    done = run(*prefix, *kvfs("umount", str(target), "-o", "json"), timeout_s=60, **arguments)
    assert time.monotonic() - began < 30 * slowness()
    return json.loads(done.stdout), done.stderr


def is_kvfs(pid: int) -> bool:
    try:
        return b"kvfs" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def remount_and_check(pool: Pool) -> None:
    pool.start()
    assert_same(read_file(pool.mount / "file"), DATA, "what was stored before")
    assert "was not unmounted" not in pool.log_tail()
    pool.umount()


@pytest.mark.parametrize("target", ["mount", "path"])
def test_an_unmount_from_outside_waits_for_the_daemon_of_a_container(unmounted: Pool, target: str) -> None:
    pool = unmounted
    with box(pool, propagation="unchanged") as boxed:
        write_file(pool.mount / "file", DATA)
        number = pool.pid()  # in its own namespace
        assert boxed.pid != number and not is_kvfs(number), "another process's here, or none's"
        document, _ = umount(getattr(pool, target))
        # Another lane's process may have a copy of all mounts just then: the daemon goes on as long.
        strangers = document.get("held_by", [])
        assert document["clean"] is not bool(strangers)
        assert boxed.process.wait((60 if strangers else 5) * slowness()) == 0 and not is_mounted(pool)
    remount_and_check(pool)


def private_box(pool: Pool) -> Any:
    return box(pool, propagation="private")


def store_inside(boxed: Box) -> None:
    words = ["nsenter", "--target", str(boxed.pid), "--mount", "dd", f"of={boxed.pool.mount}/file", "bs=1M"]
    subprocess.run(words, input=DATA, check=True, capture_output=True, timeout=60 * slowness())


@pytest.mark.parametrize("outside", [(), inside()], ids=["host", "other container"])
def test_a_pool_whose_mount_is_seen_in_its_container_alone_is_unmounted(unmounted: Pool, outside: list[str]) -> None:
    pool = unmounted
    with private_box(pool) as boxed:
        store_inside(boxed)
        assert not is_mounted(pool)
        document, _ = umount(pool.path, *outside)
        assert document["clean"] is True and document["mountpoints"] == []
        assert boxed.process.wait(5 * slowness()) == 0
    remount_and_check(pool)


OLD_KERNEL = """
import sys
from kvfs.frontend import asking
asking._SO_PEERPIDFD = 999
from kvfs.__main__ import main
sys.exit(main())
"""


def test_a_kernel_that_shows_no_process_of_another_namespace_shows_the_pools_lock(unmounted: Pool) -> None:
    pool = unmounted
    with private_box(pool) as boxed:
        store_inside(boxed)
        words = kvfs("umount", pool.path, "-o", "json")
        done = run(*inside(words[0], "-c", OLD_KERNEL, *words[3:]), timeout_s=60)
        assert json.loads(done.stdout)["clean"] is True
        assert boxed.ended() == 0
    remount_and_check(pool)


def test_an_unmount_in_a_container_that_does_not_reach_the_daemon_says_so(unmounted: Pool) -> None:
    """Another container has a copy of the mount, and does not see the daemon's process."""
    pool = unmounted
    with box(pool, propagation="unchanged") as boxed:
        document, said = umount(pool.mount, *inside(propagation="private"))
        assert document["clean"] is False
        assert document["held_by"] == [{"mountpoint": str(pool.mount), "pid": None, "program": ""}]
        assert f"still mounted: the daemon's own mount namespace, at {pool.mount}" in said
        write_file(pool.mount / "file", DATA)
        umount(pool.path)
        assert boxed.ended() == 0
    remount_and_check(pool)


def test_an_unmount_where_only_the_mount_is_seen_does_not_say_that_the_pool_is_clean(unmounted: Pool) -> None:
    pool = unmounted
    hidden = ["bash", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(pool.path)]
    with box(pool, propagation="unchanged"):
        document, said = umount(pool.mount, *inside(*hidden, propagation="private"))
        assert document["clean"] is False
        assert f"whether the pool is clean is not known: its directory, {pool.path}, is not seen here" in said
        assert is_mounted(pool)
        umount(pool.path)
    pool.start()
    pool.umount()


def test_a_daemon_that_was_killed_with_its_container_is_not_watched(unmounted: Pool) -> None:
    """Neither by a daemon of the host, nor by the next one in a container."""
    pool = unmounted
    with box(pool, propagation="unchanged") as boxed:
        write_file(pool.mount / "file", DATA)
        run("sync", "--file-system", pool.mount)
        boxed.kill()
    with box(pool, propagation="unchanged") as boxed:
        assert_same(read_file(pool.mount / "file"), DATA, "after a kill")
        assert "watching for" not in boxed.log.read_text() and "taken over" not in boxed.log.read_text()
        boxed.kill()
    said = run(*kvfs("mount", pool.path, pool.mount)).stderr
    assert "watching for" not in said and "taken over" not in pool.log_tail()
    assert_same(read_file(pool.mount / "file"), DATA, "after another kill")
    pool.umount()


@pytest.mark.parametrize("words", [(), ("--repair",)], ids=["looks", "repairs"])
def test_a_check_after_a_container_was_killed_does_not_watch(
    unmounted: Pool, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """The pool's lock shows that the daemon is dead, also after a holder of the lock that left the devices alone."""
    pool = unmounted
    with box(pool, propagation="unchanged") as boxed:
        write_file(pool.mount / "file", DATA)
        run("sync", "--file-system", pool.mount)
        boxed.kill()
    run("umount", "--lazy", pool.mount)
    still = owner.Clock(sleep=lambda _: pytest.fail("it watches a beat"))

    def free(read: Any, here: Beat, claimed: Any, tell: Any = None, clock: Any = None, dead: Beat | None = None) -> Any:
        return wait_free(read, here, claimed, tell, still, dead)

    monkeypatch.setattr(owner, "wait_free", free)
    with locked(pool.path, "looked at"):
        pass
    report = fsck(pool.path, repair=bool(words))
    assert report.healthy and report.clean == bool(words)


def test_a_bind_mount_with_files_is_mounted_over_when_told(unmounted: Pool) -> None:
    pool = unmounted
    other = pool.base / "other"
    other.mkdir()
    write_file(other / "there", b"hidden")
    run("mount", "--bind", other, pool.mount)
    refused = pool.command("mount", str(pool.path), str(pool.mount), check=False)
    assert refused.returncode == 1 and "there and all else in it would be hidden; --options nonempty" in refused.stderr
    pool.start("--options", "nonempty")
    assert not (pool.mount / "there").exists()
    write_file(pool.mount / "file", DATA)
    pool.umount()
    assert read_file(pool.mount / "there") == b"hidden"
