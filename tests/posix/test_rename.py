"""rename: the engines' commit. Atomic over files and directories, before and after close, with open descriptors."""

import errno
import os
import threading

import pytest
from helpers import (
    MIB,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    assert_same,
    content,
    opened,
    raises_errno,
    read_file,
    renameat2,
    wait_until,
    write_file,
)

pytestmark = pytest.mark.smoke


def test_rename_gives_the_file_its_new_name_and_takes_the_old(directory):
    write_file(directory / "old", content(10_000))
    before = (directory / "old").stat()
    os.rename(directory / "old", directory / "new")
    assert os.listdir(directory) == ["new"]
    assert not (directory / "old").exists()
    after = (directory / "new").stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert read_file(directory / "new") == content(10_000)


def test_rename_over_an_existing_name_returns_success_and_replaces_it(directory):
    write_file(directory / "block", content(10_000, "old"))
    write_file(directory / "block.tmp", content(20_000, "new"))
    os.rename(directory / "block.tmp", directory / "block")
    assert os.listdir(directory) == ["block"]
    assert (directory / "block").stat().st_size == 20_000
    assert read_file(directory / "block") == content(20_000, "new")


def test_rename_over_an_existing_name_is_atomic(directory):
    """A reader that opens the name by path finds a whole version, always, never ENOENT and never a mixture."""
    versions = [content(256 * 1024 + 100 * version, version) for version in range(4)]
    path = directory / "block"
    write_file(path, versions[0])
    done = threading.Event()
    failures = []
    reads = [0] * 4

    def read(reader):
        try:
            while not done.is_set():
                assert read_file(path) in versions, "a mixture of versions"
                with opened(path, os.O_RDONLY) as descriptor:
                    size = os.fstat(descriptor).st_size
                    assert size in {len(version) for version in versions}
                    assert len(os.pread(descriptor, size + 1000, 0)) == size
                reads[reader] += 1
        except BaseException as error:  # for the main thread to raise
            failures.append(error)

    threads = [threading.Thread(target=read, args=(reader,)) for reader in range(4)]
    for thread in threads:
        thread.start()
    try:
        for step in range(150):
            write_file(directory / f"block.{step}.tmp", versions[step % 4])
            os.rename(directory / f"block.{step}.tmp", path)
        wait_until(lambda: failures or min(reads) > 0, "a read by every reader")
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failures, failures[0]
    assert min(reads) > 0


def test_rename_across_directories(directory):
    (directory / "a" / "b").mkdir(parents=True)
    (directory / "c").mkdir()
    write_file(directory / "a" / "b" / "block.tmp", content(10_000))
    write_file(directory / "c" / "block", content(5, "old"))
    os.rename(directory / "a" / "b" / "block.tmp", directory / "c" / "block")
    assert read_file(directory / "c" / "block") == content(10_000)
    assert os.listdir(directory / "a" / "b") == []
    assert os.listdir(directory / "c") == ["block"]


def test_rename_onto_itself_changes_nothing(directory):
    write_file(directory / "block", content(10_000))
    os.rename(directory / "block", directory / "block")
    assert read_file(directory / "block") == content(10_000)
    assert os.listdir(directory) == ["block"]


def test_rename_before_close_keeps_what_is_written_after_it(directory):
    with opened(directory / "block.tmp", os.O_CREAT | os.O_WRONLY) as descriptor:
        os.write(descriptor, content(MIB, 1))
        os.rename(directory / "block.tmp", directory / "block")
        os.write(descriptor, content(MIB, 2))
        assert os.fstat(descriptor).st_size == 2 * MIB
        assert (directory / "block").stat().st_size == 2 * MIB
    assert_same(read_file(directory / "block"), content(MIB, 1) + content(MIB, 2), "renamed while open")
    assert os.listdir(directory) == ["block"]


def test_rename_over_an_open_file_leaves_its_reader_the_old_bytes(directory):
    path = directory / "block"
    old, new = content(3 * MIB + 5, "old"), content(2 * MIB, "new")
    write_file(path, old)
    with opened(path, os.O_RDONLY) as before:
        assert os.pread(before, 4096, 0) == old[:4096]
        write_file(directory / "block.tmp", new)
        os.rename(directory / "block.tmp", path)
        with opened(path, os.O_RDONLY) as after:
            assert_same(os.pread(before, 4 * MIB, 0), old, "the old descriptor")
            assert_same(os.pread(after, 4 * MIB, 0), new, "the new one")
            assert os.fstat(before).st_size == len(old)
            assert os.fstat(after).st_size == len(new)
            assert os.fstat(before).st_nlink == 0
            assert os.fstat(before).st_ino != os.fstat(after).st_ino
        assert_same(os.pread(before, 4 * MIB, 0), old, "the old descriptor again")
    assert_same(read_file(path), new, "by path")


def test_rename_over_a_file_being_written_loses_only_that_file(directory):
    with opened(directory / "block", os.O_CREAT | os.O_RDWR) as descriptor:
        os.write(descriptor, content(100_000, "unfinished"))
        write_file(directory / "block.tmp", content(50_000, "whole"))
        os.rename(directory / "block.tmp", directory / "block")
        os.write(descriptor, b"more")
        assert os.pread(descriptor, 200_000, 0) == content(100_000, "unfinished") + b"more"
    assert read_file(directory / "block") == content(50_000, "whole")


def test_noreplace_refuses_an_existing_name_and_takes_a_free_one(directory, is_kvfs):
    write_file(directory / "a", b"a")
    write_file(directory / "b", b"b")
    try:
        renameat2(directory / "a", directory / "c", RENAME_NOREPLACE)
    except OSError as error:
        if error.errno == errno.EINVAL and not is_kvfs:
            pytest.skip("this filesystem has no RENAME_NOREPLACE")
        raise
    with raises_errno(errno.EEXIST):
        renameat2(directory / "c", directory / "b", RENAME_NOREPLACE)
    assert (read_file(directory / "b"), read_file(directory / "c")) == (b"b", b"a")


def test_exchange_is_einval_and_changes_nothing(directory, is_kvfs):
    if not is_kvfs:
        pytest.skip("other filesystems may have RENAME_EXCHANGE")
    write_file(directory / "a", b"a")
    write_file(directory / "b", b"b")
    with raises_errno(errno.EINVAL):
        renameat2(directory / "a", directory / "b", RENAME_EXCHANGE)
    assert (read_file(directory / "a"), read_file(directory / "b")) == (b"a", b"b")


def test_directory_rename_takes_its_tree_along(directory):
    (directory / "old" / "sub").mkdir(parents=True)
    for index in range(20):
        write_file(directory / "old" / "sub" / f"{index}", content(1000, index))
    with opened(directory / "old" / "sub" / "3", os.O_RDONLY) as descriptor:
        os.rename(directory / "old", directory / "new")
        assert os.pread(descriptor, 2000, 0) == content(1000, 3)
    assert os.listdir(directory) == ["new"]
    assert not (directory / "old" / "sub" / "3").exists()
    for index in range(20):
        assert read_file(directory / "new" / "sub" / f"{index}") == content(1000, index)


def test_directory_rename_onto_an_empty_directory_replaces_it(directory):
    (directory / "full").mkdir()
    (directory / "empty").mkdir()
    write_file(directory / "full" / "block", b"x")
    os.rename(directory / "full", directory / "empty")
    assert os.listdir(directory) == ["empty"]
    assert read_file(directory / "empty" / "block") == b"x"


def test_directory_rename_onto_a_full_directory_is_enotempty(directory):
    for name in ("a", "b"):
        (directory / name).mkdir()
        write_file(directory / name / name, name.encode())
    with raises_errno(errno.ENOTEMPTY, errno.EEXIST):
        os.rename(directory / "a", directory / "b")
    assert os.listdir(directory / "a") == ["a"]
    assert os.listdir(directory / "b") == ["b"]


def test_directory_rename_into_another_directory(directory):
    (directory / "a" / "moved").mkdir(parents=True)
    (directory / "b").mkdir()
    write_file(directory / "a" / "moved" / "block", b"x")
    os.rename(directory / "a" / "moved", directory / "b" / "moved")
    assert os.listdir(directory / "a") == []
    assert read_file(directory / "b" / "moved" / "block") == b"x"


def test_directory_cannot_move_into_itself(directory):
    (directory / "a" / "b").mkdir(parents=True)
    with raises_errno(errno.EINVAL):
        os.rename(directory / "a", directory / "a" / "b" / "c")
    with raises_errno(errno.EINVAL, errno.ENOTEMPTY):
        os.rename(directory / "a", directory / "a" / "b")
    assert (directory / "a" / "b").is_dir()


def test_file_and_directory_do_not_replace_each_other(directory):
    write_file(directory / "file", b"x")
    (directory / "sub").mkdir()
    with raises_errno(errno.EISDIR):
        os.rename(directory / "file", directory / "sub")
    with raises_errno(errno.ENOTDIR):
        os.rename(directory / "sub", directory / "file")
    assert read_file(directory / "file") == b"x"
    assert (directory / "sub").is_dir()


def test_rename_into_a_missing_directory_is_enoent(directory):
    write_file(directory / "file", b"x")
    with raises_errno(errno.ENOENT):
        os.rename(directory / "file", directory / "missing" / "file")
    with raises_errno(errno.ENOTDIR):
        os.rename(directory / "file", directory / "file" / "file")
    assert read_file(directory / "file") == b"x"


def test_writing_goes_on_in_a_renamed_directory(directory):
    (directory / "old").mkdir()
    with opened(directory / "old", os.O_RDONLY | os.O_DIRECTORY) as parent:
        os.rename(directory / "old", directory / "new")
        descriptor = os.open("block", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=parent)
        os.write(descriptor, content(5000))
        os.close(descriptor)
        assert os.listdir(parent) == ["block"]
    assert read_file(directory / "new" / "block") == content(5000)


def test_many_threads_renaming_onto_one_name_leave_one_whole_winner(directory):
    blocks = {content(100_000, index) for index in range(8)}
    failures = []

    def store(index):
        try:
            for step in range(20):
                write_file(directory / f"{index}.{step}.tmp", content(100_000, index))
                os.rename(directory / f"{index}.{step}.tmp", directory / "block")
        except BaseException as error:  # for the main thread to raise
            failures.append(error)

    threads = [threading.Thread(target=store, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert os.listdir(directory) == ["block"]
    assert read_file(directory / "block") in blocks
