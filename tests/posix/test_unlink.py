"""unlink, also while open; symbolic links; the refusal of hard links."""

import errno
import os
import stat
import time

import pytest
from helpers import MIB, assert_same, content, in_child, opened, raises_errno, read_file, write_file

pytestmark = pytest.mark.smoke


def test_unlinked_name_is_gone_at_once(directory):
    write_file(directory / "block", content(10_000))
    os.unlink(directory / "block")
    assert os.listdir(directory) == []
    with raises_errno(errno.ENOENT):
        os.open(directory / "block", os.O_RDONLY)
    with raises_errno(errno.ENOENT):
        os.unlink(directory / "block")


def test_unlink_while_open_for_reading_keeps_the_bytes(directory):
    data = content(5 * MIB + 3)
    write_file(directory / "block", data)
    with opened(directory / "block", os.O_RDONLY) as descriptor:
        os.unlink(directory / "block")
        assert not (directory / "block").exists()
        status = os.fstat(descriptor)
        assert (status.st_size, status.st_nlink) == (len(data), 0)
        assert_same(os.pread(descriptor, 6 * MIB, 0), data, "an unlinked file")


def test_unlink_while_open_for_writing_keeps_a_working_file(directory):
    """Dynamo's and vLLM's slab: a file without a name, written and read for as long as it is open."""
    with opened(directory / "slab", os.O_CREAT | os.O_EXCL | os.O_RDWR) as descriptor:
        os.write(descriptor, content(MIB, 1))
        os.unlink(directory / "slab")
        os.pwrite(descriptor, content(MIB, 2), MIB)
        os.ftruncate(descriptor, 3 * MIB)
        assert os.fstat(descriptor).st_size == 3 * MIB
        expected = content(MIB, 1) + content(MIB, 2) + bytes(MIB)
        assert_same(os.pread(descriptor, 4 * MIB, 0), expected, "an unlinked slab")
        os.fsync(descriptor)
        os.fchmod(descriptor, 0o600)
        assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600
    assert os.listdir(directory) == []


def test_unlinked_name_can_be_created_again_while_the_old_file_is_open(directory):
    write_file(directory / "block", content(100_000, "old"))
    with opened(directory / "block", os.O_RDONLY) as old:
        os.unlink(directory / "block")
        write_file(directory / "block", content(50_000, "new"))
        assert os.pread(old, 200_000, 0) == content(100_000, "old")
        assert read_file(directory / "block") == content(50_000, "new")
        assert os.fstat(old).st_ino != (directory / "block").stat().st_ino


def test_unlink_of_one_name_does_not_touch_its_neighbours(directory):
    for index in range(50):
        write_file(directory / f"{index}", content(5000, index))
    for index in range(0, 50, 2):
        os.unlink(directory / f"{index}")
    assert sorted(os.listdir(directory), key=int) == [f"{index}" for index in range(1, 50, 2)]
    for index in range(1, 50, 2):
        assert read_file(directory / f"{index}") == content(5000, index)


def test_removed_directory_stays_usable_for_its_holder_but_takes_no_new_names(directory):
    (directory / "sub").mkdir()
    with opened(directory / "sub", os.O_RDONLY | os.O_DIRECTORY) as held:
        os.rmdir(directory / "sub")
        with raises_errno(errno.ENOENT):
            os.open("block", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=held)
        with raises_errno(errno.ENOENT):
            os.mkdir("below", dir_fd=held)
        assert stat.S_ISDIR(os.fstat(held).st_mode)


def test_a_removed_working_directory_is_empty_and_takes_no_new_names(directory):
    (directory / "sub").mkdir()

    def work():
        os.chdir(directory / "sub")
        os.rmdir(directory / "sub")
        for _ in range(2):
            assert os.listdir(".") == []
            assert os.stat(".").st_nlink == 0
            for make in (lambda: os.open("block", os.O_CREAT | os.O_WRONLY), lambda: os.mkdir("below")):
                with raises_errno(errno.ENOENT):
                    make()
            time.sleep(1.1)  # the kernel trusts a directory's attributes for a second

    in_child(work)


def test_symlink_holds_its_target_and_is_followed(directory):
    write_file(directory / "block", content(1000))
    os.symlink("block", directory / "link")
    assert os.readlink(directory / "link") == "block"
    assert read_file(directory / "link") == content(1000)
    status = os.lstat(directory / "link")
    assert stat.S_ISLNK(status.st_mode)
    assert status.st_size == len("block")
    assert os.stat(directory / "link").st_ino == os.stat(directory / "block").st_ino
    os.unlink(directory / "link")
    assert read_file(directory / "block") == content(1000)


def test_symlinks_may_dangle_lead_to_directories_and_be_long(directory):
    os.symlink("missing", directory / "dangling")
    assert os.path.lexists(directory / "dangling")
    with raises_errno(errno.ENOENT):
        os.stat(directory / "dangling")
    (directory / "sub").mkdir()
    os.symlink(directory / "sub", directory / "to-directory")
    write_file(directory / "to-directory" / "block", b"x")
    assert read_file(directory / "sub" / "block") == b"x"
    target = b"t\xff" * 2000
    os.symlink(target, os.fsencode(directory / "long"))
    assert os.readlink(os.fsencode(directory / "long")) == target
    with raises_errno(errno.EEXIST):
        os.symlink("other", directory / "dangling")
    os.symlink("loop", directory / "loop")
    with raises_errno(errno.ELOOP):
        os.stat(directory / "loop")


def test_symlink_is_renamed_and_replaced_like_a_file(directory):
    write_file(directory / "block", b"x")
    os.symlink("block", directory / "link")
    os.rename(directory / "link", directory / "other")
    assert os.readlink(directory / "other") == "block"
    write_file(directory / "block.tmp", b"y")
    os.rename(directory / "block.tmp", directory / "other")
    assert not (directory / "other").is_symlink()
    assert (read_file(directory / "block"), read_file(directory / "other")) == (b"x", b"y")


def test_readlink_of_a_file_is_einval(directory):
    write_file(directory / "block", b"x")
    with raises_errno(errno.EINVAL):
        os.readlink(directory / "block")


def test_hard_link_is_refused_with_eperm(directory, is_kvfs):
    """A block has one name: its header says which."""
    if not is_kvfs:
        pytest.skip("only kvfs refuses hard links")
    write_file(directory / "block", b"x")
    with raises_errno(errno.EPERM):
        os.link(directory / "block", directory / "second")
    assert os.listdir(directory) == ["block"]
    assert (directory / "block").stat().st_nlink == 1
