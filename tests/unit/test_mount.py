"""Mount points and the mount table, without mounting anything."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from pathlib import Path

import pytest

from kvfs.cli import targets
from kvfs.errors import DeadlineError, MissingFeatureError, NotFoundError, UsageError
from kvfs.frontend import mount

MOUNTINFO = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:50 / /mnt/a\040b rw,nosuid,nodev - fuse.kvfs /srv/my\011pool rw,user_id=0
41 22 0:51 / /mnt/x rw - tmpfs tmpfs rw
broken line
42 41 0:52 / /mnt/x rw shared:3 master:1 - fuse.kvfs /srv/other rw
"""


def test_mountinfo_is_read_with_its_escapes() -> None:
    found = mount.parse_mountinfo(MOUNTINFO)
    assert [entry.mountpoint for entry in found] == ["/", "/mnt/a b", "/mnt/x", "/mnt/x"]
    assert found[1].source == "/srv/my\tpool" and found[1].is_kvfs
    assert found[3].device == "0:52"


@pytest.mark.parametrize("odd", ["\r", "\v", "\f", "\x1c", "\x85", "\u2028"])
def test_a_mount_point_may_have_what_other_texts_end_lines_by(odd: str) -> None:
    """The kernel escapes space, tab, newline and backslash alone."""
    assert [entry.mountpoint for entry in mount.parse_mountinfo(MOUNTINFO.replace("/mnt/a", f"/mnt/a{odd}b"))][
        1
    ] == f"/mnt/a{odd}b b"


def test_the_topmost_mount_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount, "mounts", lambda: mount.parse_mountinfo(MOUNTINFO))
    present = mount.find_mount("/mnt/x/")
    assert present is not None and present.source == "/srv/other"
    assert mount.find_mount("/mnt") is None
    assert [entry.mountpoint for entry in mount.mounts_of("/srv/other")] == ["/mnt/x"]


def test_symbolic_links_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "real" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    assert mount.resolve(tmp_path / "link") == str(tmp_path / "real")
    assert mount.resolve(tmp_path / "link" / "below") == str(tmp_path / "real" / "below")
    assert mount.resolve("/") == "/"


def test_bad_mount_points_are_named(tmp_path: Path) -> None:
    pool = tmp_path / "holder" / "pool"
    (pool / "index").mkdir(parents=True)
    (pool / "devices" / "below").mkdir(parents=True)
    (tmp_path / "file").write_bytes(b"")
    for path, reason in (
        (tmp_path / "none", "No such file"),
        (tmp_path / "file", "not a directory"),
        (pool, "would be hidden"),
        (tmp_path / "holder", "would be hidden"),
        (pool / "index", "lies in the pool"),
        (pool / "devices" / "below", "lies in the pool"),
        (Path("/proc"), "busy: "),
    ):
        with pytest.raises(mount.MountError) as caught:
            mount.check_mountpoint(path, pool)
        assert (
            str(caught.value).startswith(f"{path}: ") and reason in str(caught.value) and "\n" not in str(caught.value)
        )


def test_a_good_mount_point_is_resolved(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    assert mount.check_mountpoint(tmp_path / "." / "mnt", tmp_path / "pool") == str(tmp_path / "mnt")


def test_an_empty_mount_point_is_mounted_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "mnt"
    inside.mkdir()

    def bound(kind: str) -> None:
        line = f"50 22 8:1 /srv/kv {inside} rw shared:9 - {kind} /dev/sda1 rw\n"
        monkeypatch.setattr(mount, "mounts", lambda: mount.parse_mountinfo(line))

    bound("ext4")
    assert mount.check_mountpoint(inside, tmp_path / "pool") == str(inside)
    (inside / "file").write_bytes(b"")
    with pytest.raises(mount.MountError, match="busy: /dev/sda1 \\(ext4\\) is mounted there, and is not empty: file"):
        mount.check_mountpoint(inside, tmp_path / "pool")
    bound("autofs")  # nothing looks into it
    assert mount.check_mountpoint(inside, tmp_path / "pool") == str(inside)


def test_a_mount_that_is_not_permitted_names_the_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:  # a double of libc
        @staticmethod
        def mount(*_: object) -> int:
            ctypes.set_errno(errno.EPERM)
            return -1

        umount2 = mount

    monkeypatch.setattr(mount, "_libc", Refusing)
    monkeypatch.setattr(mount, "_open_device", lambda: os.open(os.devnull, os.O_RDWR))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(mount.MountError, match="CAP_SYS_ADMIN") as caught:
        mount.mount("/pool", "/tmp", max_read=1 << 20)
    assert caught.value.errno == errno.EPERM
    with pytest.raises(mount.MountError, match="/mnt: Operation not permitted; it takes CAP_SYS_ADMIN"):
        mount.unmount("/mnt")


def test_a_verb_where_only_the_mount_is_seen_says_that_its_pool_is_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in an engine's container: the source is a path of the machine where the pool was mounted."""
    pool = tmp_path / "pool"
    line = f"36 35 0:51 / /mnt/kv rw - fuse.kvfs {pool} rw,user_id=0"
    monkeypatch.setattr(mount, "mounts", lambda: mount.parse_mountinfo(line))
    for verb in (targets.pool_of, targets.place_of):
        with pytest.raises(NotFoundError, match=f"/mnt/kv: the directory of its pool, {pool} where it was mounted"):
            verb("/mnt/kv")
    pool.mkdir()
    assert targets.pool_of("/mnt/kv") == pool and targets.place_of("/mnt/kv/a/b") == (pool, "/a/b")


def test_unknown_mount_options_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="mount option frobnicate"):
        mount.mount("/pool", "/mnt", max_read=1 << 20, options=("ro", "frobnicate"))


def test_a_call_that_hangs_meets_its_deadline() -> None:
    release = threading.Event()
    with pytest.raises(DeadlineError, match="no answer within"):
        mount.call_with_deadline(lambda: print(release.wait(60)), 0.05, "umount")
    release.set()
    with pytest.raises(ZeroDivisionError):
        mount.call_with_deadline(lambda: print(1 // 0), 5, "x")


def test_a_process_is_watched_to_its_end() -> None:
    pid = os.posix_spawn("/bin/sleep", ["sleep", "30"], {})
    watch = mount.ProcessWatch(pid)
    assert not watch.wait(0.01)
    watch.kill()
    assert watch.wait(5)
    os.waitpid(pid, 0)
    watch.close()
    assert mount.ProcessWatch(pid).wait(0)


def test_a_missing_fuse_device_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, flags: int) -> int:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(
        MissingFeatureError, match=r"^/dev/fuse: No such file or directory; .*modprobe fuse.*--device /dev/fuse"
    ):
        mount.check_device()
