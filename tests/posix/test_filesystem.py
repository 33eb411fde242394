"""Calls on the whole filesystem: statvfs, sync, the root."""

import os
import stat

import pytest
from helpers import MIB, content, opened, read_file, write_file


def test_statvfs_satisfies_every_engine(directory, is_kvfs):
    """LMCache drops O_DIRECT unless f_bsize is 4096; SGLang's cleaner deletes at 80% used."""
    if not is_kvfs:
        pytest.skip("only kvfs owes these figures")
    for index in range(8):
        write_file(directory / f"{index}", content(8 * MIB, index))
    for figures in (os.statvfs(directory), os.statvfs(directory / "0")):
        assert figures.f_bsize == 4096
        assert figures.f_frsize == 4096
        assert figures.f_blocks > 0
        assert (figures.f_blocks - figures.f_bavail) / figures.f_blocks < 0.70
        assert (figures.f_blocks - figures.f_bfree) / figures.f_blocks < 0.70
        assert figures.f_bavail * figures.f_frsize > 1 << 30, "an evicting cache is never full"
        assert figures.f_files == 0 or figures.f_favail > 0
        assert figures.f_namemax == 255


def test_fstatvfs_agrees_with_statvfs(directory):
    with opened(directory / "block", os.O_CREAT | os.O_WRONLY) as descriptor:
        by_descriptor, by_path = os.fstatvfs(descriptor), os.statvfs(directory)
    assert (by_descriptor.f_bsize, by_descriptor.f_blocks) == (by_path.f_bsize, by_path.f_blocks)


def test_fsync_of_file_and_directory_succeeds(directory):
    with opened(directory / "block.tmp", os.O_CREAT | os.O_WRONLY) as descriptor:
        os.write(descriptor, content(MIB))
        os.fsync(descriptor)
        os.fdatasync(descriptor)
    os.rename(directory / "block.tmp", directory / "block")
    with opened(directory, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)
        os.fdatasync(descriptor)
    with opened(directory / "block", os.O_RDONLY) as descriptor:
        os.fsync(descriptor)
    assert read_file(directory / "block") == content(MIB)


def test_root_is_a_directory_that_lists_and_stats(mount, directory):
    assert stat.S_ISDIR(os.stat(mount).st_mode)
    assert directory.name in os.listdir(mount)


def test_sizes_in_512_byte_sectors_cover_the_content(directory):
    write_file(directory / "block", content(2 * MIB))
    status = os.stat(directory / "block")
    assert status.st_blksize >= 4096
    assert status.st_blocks * 512 >= 2 * MIB
