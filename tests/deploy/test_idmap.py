"""A mount with --idmap bound with an idmapping, as a runtime binds it into a pod of a user namespace of its own."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import pathlib
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from helpers import (
    IDMAP,
    Pool,
    assert_same,
    content,
    in_child,
    mount_device,
    opened_by,
    raises_errno,
    read_file,
    requires_idmap,
    requires_root,
    run,
    write_file,
)

import kvfs
from kvfs.client import preload

SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
OPEN_TREE_CLONE, AT_EMPTY_PATH, MOVE_MOUNT_F_EMPTY_PATH, MOUNT_ATTR_IDMAP = 1, 0x1000, 4, 0x00100000
CLONE_NEWUSER = 0x10000000
FIRST = 100_000  # users of the pod lie from here on, outside it
ALICE, MALLORY, NOBODY = 7, 8, 65534
DATA = content(300_000, "idmap")
libc = ctypes.CDLL(None, use_errno=True)


def call(number: int, *arguments: object) -> int:
    result = int(libc.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


@contextlib.contextmanager
def user_namespace() -> Iterator[int]:
    """A descriptor of one whose user n is user FIRST + n outside."""
    words = ["unshare", "--user", "sh", "-c", "echo; exec sleep 600"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"\n"
            for name in ("uid_map", "gid_map"):
                pathlib.Path(f"/proc/{process.pid}/{name}").write_text(f"0 {FIRST} 65536")
            fd = os.open(f"/proc/{process.pid}/ns/user", os.O_RDONLY)
            yield fd
            os.close(fd)
        finally:
            process.kill()


@contextlib.contextmanager
def idmapped(source: pathlib.Path, target: pathlib.Path) -> Iterator[None]:
    """User n of the filesystem is user FIRST + n below target. OSError."""
    target.mkdir()
    with user_namespace() as users:
        tree = call(SYS_OPEN_TREE, -100, os.fsencode(source), OPEN_TREE_CLONE)
        try:
            attributes = struct.pack("QQQQ", MOUNT_ATTR_IDMAP, 0, 0, users)
            call(SYS_MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, attributes, len(attributes))
            call(SYS_MOVE_MOUNT, tree, b"", -100, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH)
        finally:
            os.close(tree)
    try:
        yield
    finally:
        run("umount", "--lazy", target)


@pytest.fixture
def pool(own_pool: Callable[..., Pool]) -> Pool:
    requires_root()
    requires_idmap()
    made = own_pool(files=2, size="128M", mount_args=IDMAP)
    made.base.chmod(0o755)
    made.mount.chmod(0o777)
    return made


def held(pool: Pool, kind: str) -> dict[int, int]:
    """Users that hold anything of a kind, and how much."""
    return {user["user"]: user[kind] for user in pool.status()["users"] if user[kind]}


def test_users_of_an_idmapped_mount_have_their_own_files(pool: Pool) -> None:
    pod = pool.base / "pod"
    with idmapped(pool.mount, pod):

        def store() -> list[int]:
            write_file(pod / "mine", DATA, mode=0o600)
            os.mkdir(pod / "directory")
            write_file(pod / "directory/file", DATA[:70_000])
            os.symlink("file", pod / "directory/link")
            os.rename(pod / "mine", pod / "directory/mine")
            os.setxattr(pod / "directory/mine", "user.note", b"v")
            os.chmod(pod / "directory/file", 0o640)
            assert_same(read_file(pod / "directory/mine"), DATA, "read as its owner")
            with open(pod / "directory/mine", "r+b") as file:
                file.write(b"again")
            names = ("directory", "directory/mine", "directory/file", "directory/link")
            return [os.lstat(pod / name).st_uid for name in names]

        assert in_child(store, user=FIRST + ALICE) == [FIRST + ALICE] * 4
        # The pool has the users of the filesystem, as the host sees them.
        assert os.stat(pool.mount / "directory/mine").st_uid == ALICE
        assert_same(read_file(pool.mount / "directory/mine"), b"again" + DATA[5:], "read by the host")

        def refused() -> None:
            for attempt in (
                lambda: read_file(pod / "directory/mine"),
                lambda: write_file(pod / "directory/new", DATA),
                lambda: os.setxattr(pod / "directory/file", "user.note", b"v"),
                lambda: os.setxattr(pod / "directory/file", "user.kvfs.pin", b"1"),
            ):
                with raises_errno(errno.EACCES):
                    attempt()
            for attempt in (
                lambda: os.chmod(pod / "directory/file", 0o666),
                lambda: os.chown(pod / "directory/file", FIRST + MALLORY, -1),
                lambda: os.setxattr(pod / "directory/file", "trusted.note", b"v"),
            ):
                with raises_errno(errno.EPERM):
                    attempt()

        in_child(refused, user=FIRST + MALLORY)
        pool.mount.chmod(0o1777)
        write_file(pool.mount / "sticky", DATA)

        def removed() -> None:
            with raises_errno(errno.EPERM):
                os.unlink(pod / "sticky")

        in_child(removed, user=FIRST + MALLORY)
    assert pool.status()["mounts"][0]["idmap"] is True
    assert "idmap: shares go by files' owners" in pool.command("status", str(pool.path)).stdout
    pool.remount()
    assert os.stat(pool.mount / "directory/mine").st_uid == ALICE


def test_a_file_that_is_being_written_counts_as_its_owners(pool: Pool) -> None:
    """No other user is charged, not even root, by whichever mount it is written."""
    write_file(pool.mount / "theirs", DATA)
    os.chown(pool.mount / "theirs", ALICE, ALICE)
    pod = pool.base / "pod"
    with idmapped(pool.mount, pod):
        for place in (pod, pool.mount):
            with open(place / "theirs", "r+b", buffering=0) as file:
                file.write(content(2 << 20, place))
                assert held(pool, "writing").keys() == {ALICE}


def test_root_has_a_share_there_as_everybody_has(pool: Pool) -> None:
    """A pod's root makes files of root, and root without a share is for the host alone."""
    pod = pool.base / "pod"
    write_file(pool.mount / "read", DATA)
    with idmapped(pool.mount, pod):

        def create() -> int:
            os.mkdir(pod / "of-root")
            assert os.stat(pod / "of-root").st_uid == FIRST
            descriptor = os.open(pod / "written", os.O_CREAT | os.O_WRONLY)
            os.write(descriptor, DATA)
            return descriptor

        with opened_by(FIRST, create), opened_by(FIRST, lambda: os.open(pod / "read", os.O_RDONLY)):
            assert held(pool, "writing").keys() == held(pool, "open").keys() == {NOBODY}
    assert os.stat(pool.mount / "of-root").st_uid == 0
    os.setxattr(pool.mount / "read", "user.kvfs.pin", b"1")
    assert held(pool, "pinned").keys() == {NOBODY}


def test_whom_the_kernel_does_not_name_may_look_where_everybody_may(pool: Pool) -> None:
    """A hint names another file by its path, which the daemon looks up for whoever gives it."""
    for name in ("open", "private"):
        (pool.mount / name).mkdir()
        write_file(pool.mount / name / "before", DATA)
    write_file(pool.mount / "block", DATA)
    (pool.mount / "block").chmod(0o666)
    for path in (pool.mount / "private", pool.mount / "block"):
        os.chown(path, ALICE, ALICE)
    (pool.mount / "private").chmod(0o700)

    def hint() -> None:
        os.setxattr(pool.mount / "block", "user.kvfs.parent", b"/open/before")
        assert os.getxattr(pool.mount / "block", "user.kvfs.parent") == b"/open/before"
        with raises_errno(errno.EACCES):
            os.setxattr(pool.mount / "block", "user.kvfs.parent", b"/private/before")

    for user in (MALLORY, ALICE, 0):
        in_child(hint, user=user)


def test_a_change_of_the_content_takes_the_bits_of_the_owners_rights_away(pool: Pool) -> None:
    write_file(pool.mount / "file", DATA)
    for how in ("write", "truncate"):
        (pool.mount / "file").chmod(0o6777)
        if how == "write":
            with open(pool.mount / "file", "r+b") as file:
                file.write(b"x")
        else:
            in_child(lambda: os.truncate(pool.mount / "file", 5), user=MALLORY)
        assert os.stat(pool.mount / "file").st_mode & 0o7777 == 0o777, how


@contextlib.contextmanager
def joined() -> Iterator[Callable[[Callable[[], object]], object]]:
    """Calls a function in a child that is user ALICE of a user namespace."""
    with user_namespace() as users:

        def become(function: Callable[[], object]) -> object:
            if libc.setns(users, CLONE_NEWUSER) < 0:
                raise OSError(ctypes.get_errno(), "setns")
            os.setgroups([])
            os.setresgid(ALICE, ALICE, ALICE)
            os.setresuid(ALICE, ALICE, ALICE)
            return function()

        yield lambda function: in_child(lambda: become(function))


def test_a_native_client_of_a_pod_is_told_which_user_it_is(own_pool: Callable[..., Pool]) -> None:
    """SO_PEERCRED has the host's number of the pod's user, whatever the mount's idmapping is."""
    requires_root()
    requires_idmap()
    pool = own_pool(files=2, size="128M", mount_args=(*IDMAP, "--native-in", "/"))
    pool.base.chmod(0o755)
    pod = pool.base / "pod"

    def store() -> str:
        assert os.geteuid() == ALICE
        with kvfs.connect(pod, "space", gpu=None) as client:
            client.put([(b"key", b"data")])
            assert bytes(client.get(b"key") or b"") == b"data"
            with open(pod / "space/6b/6b6579", "rb") as file:
                assert file.read() == b"data"
            assert os.stat(pod / "space/6b/6b6579").st_uid == NOBODY
            return client.statistics().user

    with idmapped(pool.mount, pod), joined() as become:
        assert become(store) == f"{FIRST + ALICE} ({ALICE} in this process's user namespace)"
    assert os.stat(pool.mount / "space/6b/6b6579").st_uid == FIRST + ALICE
    with kvfs.connect(pool.mount, "space", gpu=None) as client:
        assert client.statistics().user == "0"


def test_a_refusal_names_the_user_that_the_host_sees(own_pool: Callable[..., Pool]) -> None:
    requires_root()
    pool = own_pool(files=2, size="64M")
    for path, mode in ((pool.base, 0o755), (pool.path, 0o711), (pool.path / "control.sock", 0o666)):
        path.chmod(mode)

    def refused() -> str:
        with pytest.raises(kvfs.errors.ClientError) as caught:
            kvfs.connect(pool.path, "space", gpu=None)
        return str(caught.value)

    with joined() as become:
        said = f"user {FIRST + ALICE} (so the host numbers it: it has a user namespace) may not use this pool"
        assert said in str(become(refused))


def test_the_preload_library_leaves_an_idmapped_mount_to_the_kernel(pool: Pool, tmp_path: pathlib.Path) -> None:
    """Owners that it would tell, and rights that it would find, are those of the mount that was bound."""
    write_file(pool.mount / "file", DATA)
    os.chown(pool.mount / "file", ALICE, ALICE)
    pod = pool.base / "pod"
    program = "import os, sys; [print(os.stat(path).st_uid) for path in sys.argv[1:]]"
    stats = tmp_path / "stats"
    environment = preload.environment(dict(os.environ)) | {"KVFS_PRELOAD_STATS": str(stats)}
    with idmapped(pool.mount, pod):
        done = run(sys.executable, "-c", program, pool.mount / "file", pod / "file", environment=environment)
        assert done.stdout.split() == [str(ALICE), str(FIRST + ALICE)]
    assert [json.loads(line)["stats"] for line in stats.read_text().splitlines()] == [1]


def test_without_the_option_a_mount_takes_no_idmapping(own_pool: Callable[..., Pool]) -> None:
    requires_root()
    plain = own_pool(files=2, size="64M")
    with raises_errno(errno.EINVAL), idmapped(plain.mount, plain.base / "pod"):
        pass
    assert mount_device(plain.base / "pod") is None
    assert plain.status()["mounts"][0]["idmap"] is False


def test_users_of_a_pod_are_others(own_pool: Callable[..., Pool]) -> None:
    alone = own_pool(files=2, size="64M", started=False)
    done = alone.command("mount", str(alone.path), str(alone.mount), "--idmap", check=False)
    assert done.returncode == 2 and "are let in by --allow-other alone: give both" in done.stderr
