"""Modes, owners and times are real, and enforced for other users."""

import errno
import os
import stat
import time

import pytest
from helpers import SLOWNESS, content, in_child, opened, raises_errno, read_file, requires_root, write_file

ALICE, BOB = 20_001, 20_002
# The kernel's clock for times is coarse; and a guest's, which falls behind on an emulated CPU, is not the daemon's.
CLOCKS_S = 1 if SLOWNESS == 1 else 30


@pytest.fixture
def shared(directory, is_kvfs):
    """A directory that every user can reach and write."""
    requires_root()
    directory.chmod(0o777)

    def reach():
        try:
            os.stat(directory)
        except PermissionError:
            return False
        return True

    if not in_child(reach, user=ALICE) and not is_kvfs:
        pytest.skip("other users cannot reach this directory")
    return directory


def test_new_files_belong_to_their_creator(shared):
    in_child(lambda: write_file(shared / "block", b"x", mode=0o644), user=ALICE)
    in_child(lambda: os.mkdir(shared / "sub"), user=BOB)
    in_child(lambda: os.symlink("block", shared / "link"), user=BOB)
    assert (os.stat(shared / "block").st_uid, os.stat(shared / "block").st_gid) == (ALICE, ALICE)
    assert (os.stat(shared / "sub").st_uid, os.stat(shared / "sub").st_gid) == (BOB, BOB)
    assert os.lstat(shared / "link").st_uid == BOB


def test_private_file_is_eacces_to_another_user(shared):
    in_child(lambda: write_file(shared / "secret", content(5000), mode=0o600), user=ALICE)

    def intrude():
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
            with raises_errno(errno.EACCES):
                os.open(shared / "secret", flags)
        with raises_errno(errno.EACCES):
            os.truncate(shared / "secret", 0)
        assert not os.access(shared / "secret", os.R_OK)
        assert os.access(shared / "secret", os.F_OK)

    in_child(intrude, user=BOB)
    assert in_child(lambda: read_file(shared / "secret"), user=ALICE) == content(5000)


def test_readable_file_is_not_writable_by_another_user(shared):
    in_child(lambda: write_file(shared / "block", content(5000), mode=0o644), user=ALICE)

    def use():
        assert read_file(shared / "block") == content(5000)
        with raises_errno(errno.EACCES):
            os.open(shared / "block", os.O_WRONLY)

    in_child(use, user=BOB)


def test_group_mode_applies_to_the_group(shared):
    in_child(lambda: write_file(shared / "block", b"x", mode=0o640), user=ALICE, group=30_000)
    assert in_child(lambda: read_file(shared / "block"), user=BOB, group=30_000) == b"x"

    def intrude():
        with raises_errno(errno.EACCES):
            os.open(shared / "block", os.O_RDONLY)

    in_child(intrude, user=BOB)


def test_directory_without_write_permission_takes_and_loses_no_names(shared):
    in_child(lambda: (os.mkdir(shared / "sub", 0o755), write_file(shared / "sub" / "a", b"x")), user=ALICE)

    def intrude():
        assert os.listdir(shared / "sub") == ["a"]
        with raises_errno(errno.EACCES):
            os.open(shared / "sub" / "b", os.O_CREAT | os.O_WRONLY)
        for attempt in (
            lambda: os.unlink(shared / "sub" / "a"),
            lambda: os.mkdir(shared / "sub" / "d"),
            lambda: os.rename(shared / "sub" / "a", shared / "a"),
            lambda: os.symlink("x", shared / "sub" / "l"),
        ):
            with raises_errno(errno.EACCES):
                attempt()

    in_child(intrude, user=BOB)


def test_directory_without_search_permission_hides_its_names(shared):
    in_child(lambda: (os.mkdir(shared / "sub", 0o700), write_file(shared / "sub" / "a", b"x")), user=ALICE)

    def intrude():
        with raises_errno(errno.EACCES):
            os.stat(shared / "sub" / "a")
        with raises_errno(errno.EACCES):
            os.listdir(shared / "sub")

    in_child(intrude, user=BOB)


def test_sticky_directory_lets_only_owners_remove(shared):
    shared.chmod(0o1777)
    in_child(lambda: write_file(shared / "block", b"x", mode=0o666), user=ALICE)

    def intrude():
        with raises_errno(errno.EPERM, errno.EACCES):
            os.unlink(shared / "block")
        with raises_errno(errno.EPERM, errno.EACCES):
            os.rename(shared / "block", shared / "mine")

    in_child(intrude, user=BOB)
    in_child(lambda: os.unlink(shared / "block"), user=ALICE)
    assert os.listdir(shared) == []


def test_only_the_owner_changes_mode_and_times_and_only_root_the_owner(shared):
    in_child(lambda: (write_file(shared / "block", b"x"), os.chmod(shared / "block", 0o666)), user=ALICE)

    def intrude():
        with raises_errno(errno.EPERM):
            os.chmod(shared / "block", 0o777)
        with raises_errno(errno.EPERM):
            os.utime(shared / "block", (1, 1))
        with raises_errno(errno.EPERM):
            os.chown(shared / "block", BOB, BOB)
        os.utime(shared / "block")  # "now" needs only write permission

    in_child(intrude, user=BOB)
    in_child(lambda: os.chmod(shared / "block", 0o640), user=ALICE)
    assert stat.S_IMODE(os.stat(shared / "block").st_mode) == 0o640
    os.chown(shared / "block", BOB, 30_000)
    assert (os.stat(shared / "block").st_uid, os.stat(shared / "block").st_gid) == (BOB, 30_000)
    os.chown(shared / "block", -1, ALICE)
    assert (os.stat(shared / "block").st_uid, os.stat(shared / "block").st_gid) == (BOB, ALICE)


def test_chmod_takes_effect_for_the_next_open_and_not_for_open_descriptors(shared):
    in_child(lambda: write_file(shared / "block", content(9000), mode=0o644), user=ALICE)
    with opened(shared / "block", os.O_RDONLY) as descriptor:
        os.chmod(shared / "block", 0)

        def intrude():
            assert os.pread(descriptor, 10_000, 0) == content(9000)
            with raises_errno(errno.EACCES):
                os.open(shared / "block", os.O_RDONLY)

        in_child(intrude, user=BOB)


@pytest.mark.parametrize("mode", [0o000, 0o400, 0o644, 0o755, 0o777, 0o1777, 0o2755, 0o4755])
def test_chmod_is_exact_on_files_and_directories(directory, mode):
    requires_root()
    write_file(directory / "file", b"x")
    (directory / "sub").mkdir()
    for name in ("file", "sub"):
        os.chmod(directory / name, mode)
        assert stat.S_IMODE(os.stat(directory / name).st_mode) == mode
    with opened(directory / "file", os.O_RDONLY) as descriptor:
        os.fchmod(descriptor, 0o600)
    assert stat.S_IMODE(os.stat(directory / "file").st_mode) == 0o600


def test_umask_applies_to_new_files_and_directories(directory):
    def create():
        os.umask(0o027)
        write_file(directory / "file", b"x", mode=0o666)
        os.mkdir(directory / "sub", 0o777)

    in_child(create)
    assert stat.S_IMODE(os.stat(directory / "file").st_mode) == 0o640
    assert stat.S_IMODE(os.stat(directory / "sub").st_mode) == 0o750


def test_setgid_directory_gives_its_group_to_new_names(shared):
    os.mkdir(shared / "team")
    os.chown(shared / "team", 0, 30_000)
    os.chmod(shared / "team", 0o2777)
    in_child(lambda: (write_file(shared / "team" / "block", b"x"), os.mkdir(shared / "team" / "sub")), user=ALICE)
    assert os.stat(shared / "team" / "block").st_gid == 30_000
    assert os.stat(shared / "team" / "sub").st_gid == 30_000
    assert os.stat(shared / "team" / "sub").st_mode & stat.S_ISGID


def test_write_by_another_user_drops_setuid(shared):
    in_child(lambda: write_file(shared / "tool", b"x"), user=ALICE)
    os.chmod(shared / "tool", 0o4777)

    def intrude():
        with opened(shared / "tool", os.O_WRONLY) as descriptor:
            os.write(descriptor, b"y")

    in_child(intrude, user=BOB)
    assert not os.stat(shared / "tool").st_mode & stat.S_ISUID


@pytest.mark.parametrize("change", ["write", "truncate", "allocate"])
def test_a_change_by_another_drops_set_group_id_without_group_execute_too(shared, change):
    write_file(shared / "tool", b"x" * 5000)
    os.chmod(shared / "tool", 0o6666)

    def intrude():
        with opened(shared / "tool", os.O_WRONLY) as descriptor:
            if change == "write":
                os.write(descriptor, b"y")
            elif change == "truncate":
                os.ftruncate(descriptor, 100)
            else:
                os.posix_fallocate(descriptor, 0, 10_000)

    in_child(intrude, user=BOB)
    assert stat.S_IMODE(os.stat(shared / "tool").st_mode) == 0o666


# --- times ------------------------------------------------------------------------------------------------------


def test_utimensat_sets_both_times_to_the_nanosecond(directory):
    write_file(directory / "block", b"x")
    (directory / "sub").mkdir()
    os.symlink("block", directory / "link")
    for name in ("block", "sub", "link"):
        os.utime(directory / name, ns=(1_234_567_890_123_456_789, 987_654_321_987_654_321), follow_symlinks=False)
        status = os.lstat(directory / name)
        assert (status.st_atime_ns, status.st_mtime_ns) == (1_234_567_890_123_456_789, 987_654_321_987_654_321), name
    os.rename(directory / "block", directory / "moved")
    assert os.stat(directory / "moved").st_mtime_ns == 987_654_321_987_654_321


@pytest.mark.parametrize("moment", [-1, -1_500_000_000, -(10**9) - 1, -(1 << 62) - 3])
def test_times_before_1970_come_back_to_the_nanosecond(directory, moment, is_kvfs):
    if not is_kvfs and moment < -(1 << 31) * 10**9:
        pytest.skip("most filesystems begin in 1901")
    with opened(directory / "block", os.O_CREAT | os.O_WRONLY) as descriptor:
        os.utime(descriptor, ns=(moment, moment))
        assert os.fstat(descriptor).st_mtime_ns == moment, "while it is written"
    status = os.stat(directory / "block")
    assert (status.st_atime_ns, status.st_mtime_ns) == (moment, moment)


@pytest.mark.parametrize(
    ("moment", "kept"),
    [
        (10**19 + 5, (1 << 63) - 1),
        ((1 << 63) - 1, (1 << 63) - 1),
        (-(10**19), -(1 << 63)),
    ],
)
def test_times_beyond_what_a_file_can_have_become_the_nearest_that_it_can(directory, moment, kept, is_kvfs):
    if not is_kvfs:
        pytest.skip("other filesystems end elsewhere")
    write_file(directory / "block", b"x")
    os.utime(directory / "block", ns=(moment, moment))
    status = os.stat(directory / "block")
    assert (status.st_atime_ns, status.st_mtime_ns) == (kept, kept)


def test_futimens_on_a_file_being_written_holds_after_the_close(directory):
    with opened(directory / "block", os.O_CREAT | os.O_WRONLY) as descriptor:
        os.write(descriptor, content(100_000))
        os.utime(descriptor, ns=(10**18, 2 * 10**18))
        assert os.fstat(descriptor).st_mtime_ns == 2 * 10**18
    status = os.stat(directory / "block")
    assert (status.st_atime_ns, status.st_mtime_ns) == (10**18, 2 * 10**18)


def test_writing_moves_mtime_and_ctime_to_now(directory):
    write_file(directory / "block", b"x")
    os.utime(directory / "block", (1000, 1000))
    begin = time.time() - CLOCKS_S
    with opened(directory / "block", os.O_WRONLY) as descriptor:
        os.write(descriptor, b"y")
        assert begin <= os.fstat(descriptor).st_mtime <= time.time() + CLOCKS_S
    status = os.stat(directory / "block")
    assert begin <= status.st_mtime <= time.time() + CLOCKS_S
    assert begin <= status.st_ctime <= time.time() + CLOCKS_S


def test_new_files_have_times_of_now_and_reading_leaves_mtime_alone(directory):
    begin = time.time() - CLOCKS_S
    write_file(directory / "block", content(10_000))
    first = os.stat(directory / "block")
    for moment in (first.st_atime, first.st_mtime, first.st_ctime):
        assert begin <= moment <= time.time() + CLOCKS_S
    read_file(directory / "block")
    assert os.stat(directory / "block").st_mtime_ns == first.st_mtime_ns


def test_new_and_removed_names_move_their_directorys_mtime(directory):
    for change in (
        lambda: write_file(directory / "a", b"x"),
        lambda: os.rename(directory / "a", directory / "b"),
        lambda: os.unlink(directory / "b"),
        lambda: os.mkdir(directory / "c"),
        lambda: os.rmdir(directory / "c"),
    ):
        os.utime(directory, (1000, 1000))
        change()
        assert os.stat(directory).st_mtime > 1000
