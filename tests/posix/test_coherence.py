"""A sealed file opened for writing becomes a new version: nobody ever sees a mixture of the two."""

import mmap
import os
import random
import struct
import threading

import pytest
from helpers import MIB, assert_same, content, in_child, opened, read_file, repeated, wait_until, write_file

PAGES = 64


def test_rewritten_file_is_seen_by_old_and_new_readers(directory):
    path = directory / "block"
    old, new = content(3 * MIB, "old"), content(3 * MIB, "new")
    write_file(path, old)
    with opened(path, os.O_RDONLY) as before:
        assert_same(os.pread(before, 3 * MIB, 0), old, "before")
        with opened(path, os.O_WRONLY) as writer:
            assert_same(os.pread(before, 3 * MIB, 0), old, "after the writer's open")
            assert os.pwrite(writer, new[:MIB], 0) == MIB
            half = new[:MIB] + old[MIB:]
            with opened(path, os.O_RDONLY) as during:
                assert_same(os.pread(before, 3 * MIB, 0), half, "the old handle sees the writer's content")
                assert_same(os.pread(during, 3 * MIB, 0), half, "a new handle too")
                assert os.pwrite(writer, new[MIB:], MIB) == 2 * MIB
                assert_same(os.pread(before, 3 * MIB, 0), new, "the old handle, all written")
                assert_same(os.pread(during, 3 * MIB, 0), new, "the new handle, all written")
        assert_same(os.pread(before, 3 * MIB, 0), new, "the old handle after the close")
        assert os.fstat(before).st_ino == path.stat().st_ino
    assert_same(read_file(path), new, "by path after the close")


def test_rewrite_with_truncation_is_seen_by_an_open_reader(directory):
    path = directory / "block"
    write_file(path, content(MIB, "old"))
    with opened(path, os.O_RDONLY) as reader:
        assert os.pread(reader, 2 * MIB, 0) == content(MIB, "old")
        with opened(path, os.O_WRONLY | os.O_TRUNC) as writer:
            assert os.fstat(reader).st_size == 0
            assert os.pread(reader, 2 * MIB, 0) == b""
            os.write(writer, content(5000, "new"))
            assert os.pread(reader, 2 * MIB, 0) == content(5000, "new")
        assert os.pread(reader, 2 * MIB, 0) == content(5000, "new")
        assert os.fstat(reader).st_size == 5000


def test_cached_pages_of_an_old_version_are_never_served_for_the_new(directory):
    """The page cache belongs to the inode: 8,192 bytes once came back half new, half old."""
    path = directory / "block"
    for version in range(repeated(30)):
        write_file(path, bytes([version]) * (2 * MIB), flags=os.O_CREAT | os.O_WRONLY)
        with opened(path, os.O_RDONLY) as first, opened(path, os.O_RDONLY) as second:
            assert set(os.pread(first, 4096, 0)) == {version}  # caches some pages
            write_file(path, bytes([version + 100]) * (2 * MIB), flags=os.O_WRONLY)
            for descriptor in (first, second):
                assert set(os.pread(descriptor, 8192, 0)) == {version + 100}
                assert set(os.pread(descriptor, 2 * MIB, 0)) == {version + 100}
        assert set(read_file(path)) == {version + 100}


def test_rewriting_in_place_keeps_the_inode_and_replacing_changes_it(directory):
    path = directory / "block"
    write_file(path, b"1")
    number = path.stat().st_ino
    write_file(path, b"22")
    assert path.stat().st_ino == number
    write_file(directory / "block.tmp", b"333")
    os.rename(directory / "block.tmp", path)
    assert path.stat().st_ino != number


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_concurrent_readers_of_pages_see_only_what_was_written_there(directory, is_kvfs, direct):
    """One thread rewrites aligned 4 KiB pages, each full of its version number; three read them.

    Every word that a reader gets is a version written before its read ended. It was not replaced before its read began
    (O_DIRECT), or before its open (page cache). The kernel's FUSE makes a page that a write fills readable before the
    server has it. If an open drops that page meanwhile, a reader may fetch the earlier one, which stays until the next
    open. Any server shows it, libfuse's passthrough_hp --nocache among them. Whole pages of one version are demanded of
    O_DIRECT on kvfs alone. Through the page cache the kernel copies in and out of a page without a lock.
    """
    path = directory / "block"
    flags = os.O_DIRECT if direct else 0
    write_file(path, bytes(PAGES * 4096))
    begun, ended = [0] * PAGES, [0] * PAGES
    done = threading.Event()
    failures, reads = [], [0] * 3

    def read(reader):
        dice = random.Random(reader)
        page = mmap.mmap(-1, 4096)
        try:
            before, descriptor = list(ended), os.open(path, os.O_RDONLY | flags)
            while not done.is_set():
                if dice.random() < 0.02:
                    os.close(descriptor)
                    before, descriptor = list(ended), os.open(path, os.O_RDONLY | flags)
                index = dice.randrange(PAGES)
                low = ended[index] if direct else before[index]
                assert os.preadv(descriptor, [page], index * 4096) == 4096
                high = begun[index]
                words = set(struct.unpack("<512Q", page[:]))
                assert all(low <= word <= high for word in words), f"page {index}: {words} not in {low}..{high}"
                assert len(words) == 1 or not (direct and is_kvfs), f"page {index} is a mixture: {words}"
                reads[reader] += 1
            os.close(descriptor)
        except BaseException as error:  # for the main thread to raise
            failures.append(error)

    threads = [threading.Thread(target=read, args=(reader,)) for reader in range(3)]
    for thread in threads:
        thread.start()
    dice = random.Random(99)
    memory = mmap.mmap(-1, 4096)
    try:
        for _ in range(40):
            descriptor = os.open(path, os.O_WRONLY | flags)
            for _ in range(40):
                index = dice.randrange(PAGES)
                version = begun[index] + 1
                memory[:] = struct.pack("<Q", version) * 512
                begun[index] = version
                assert os.pwritev(descriptor, [memory], index * 4096) == 4096
                ended[index] = version
            os.close(descriptor)
        wait_until(lambda: failures or min(reads) > 0, "a read by every reader")
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failures, failures[0]
    assert min(reads) > 0
    expected = b"".join(struct.pack("<Q", version) * 512 for version in ended)
    assert_same(read_file(path), expected, "when all is done")


def test_another_process_sees_a_rewrite_at_once(directory):
    path = directory / "block"
    for version in range(20):
        in_child(lambda version=version: write_file(path, content(100_000 + version, version)))
        assert read_file(path) == content(100_000 + version, version)
        assert path.stat().st_size == 100_000 + version


def test_a_new_file_that_is_read_while_it_is_written_is_what_its_writer_says(directory):
    """A writer bypasses the page cache: no page that somebody read or mapped meanwhile may outlive what was written."""
    path = directory / "growing"
    size = 40 * 4096 + 77
    draw = random.Random(5)
    for turn in range(repeated(6)):
        expected = bytearray(content(size, ("first", turn)))
        stop = threading.Event()

        def read_on(stop=stop):
            with opened(path, os.O_RDONLY) as reader, mmap.mmap(reader, 8192, prot=mmap.PROT_READ) as pages:
                while not stop.is_set():
                    os.pread(reader, size, 0)
                    assert len(pages[:]) == 8192

        with opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as writer:
            for at in range(0, size, 50_000):
                os.pwrite(writer, expected[at : at + 50_000], at)
            with opened(path, os.O_RDONLY) as other:
                assert_same(os.pread(other, size + 1, 0), bytes(expected), "while it is written")
                thread = threading.Thread(target=read_on)
                thread.start()
                for _ in range(100):
                    at = draw.randrange(size - 5000)
                    piece = draw.randbytes(draw.randrange(1, 5000))
                    expected[at : at + len(piece)] = piece
                    assert os.pwrite(writer, piece, at) == len(piece)
                    assert os.pread(other, len(piece), at) == piece
        assert_same(read_file(path), bytes(expected), "after the close, while another has it open")
        stop.set()
        thread.join(30)
        for _ in range(2):
            assert_same(read_file(path), bytes(expected), "after the close")
        with opened(path, os.O_RDONLY) as reader, mmap.mmap(reader, 0, prot=mmap.PROT_READ) as pages:
            assert_same(pages[:], bytes(expected), "mapped after the close")
        path.unlink()
