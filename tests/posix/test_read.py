"""Reading sealed blocks: exact counts, at any offset, by many at once."""

import concurrent.futures
import os
import random
import threading

import pytest
from helpers import KIB, MIB, assert_same, content, opened, raises_errno, read_file, write_file

pytestmark = pytest.mark.smoke

SIZE = 5 * MIB + 1234


@pytest.fixture
def block(directory):
    path = directory / "block"
    write_file(path, content(SIZE))
    return path


def test_pread_at_random_offsets_returns_exactly_the_bytes_there(block):
    data = content(SIZE)
    dice = random.Random(5)
    with opened(block, os.O_RDONLY) as descriptor:
        for _ in range(400):
            offset, size = dice.randrange(SIZE), dice.choice([1, 100, 4096, 4097, 131_072, MIB])
            assert_same(os.pread(descriptor, size, offset), data[offset : offset + size], f"pread({size}, {offset})")


def test_pread_past_the_end_is_empty_and_across_it_is_cut(block):
    with opened(block, os.O_RDONLY) as descriptor:
        assert os.pread(descriptor, 4096, SIZE) == b""
        assert os.pread(descriptor, 4096, SIZE + 10 * MIB) == b""
        assert os.pread(descriptor, 4096, 1 << 40) == b""
        assert os.pread(descriptor, 4096, SIZE - 10) == content(SIZE)[-10:]
        assert os.pread(descriptor, SIZE + MIB, 0) == content(SIZE)


def test_readv_and_preadv_fill_buffers_in_order(block):
    data = content(SIZE)
    sizes = [10, 4096, 1, 100_000, MIB]
    with opened(block, os.O_RDONLY) as descriptor:
        for read, offset in ((os.readv, 0), (lambda fd, b: os.preadv(fd, b, 777), 777)):
            buffers = [bytearray(size) for size in sizes]
            assert read(descriptor, buffers) == sum(sizes)
            assert_same(b"".join(buffers), data[offset : offset + sum(sizes)], "scattered read")


def test_sequential_reads_of_any_size_reassemble_the_block(block):
    for size in (1000, 4096, 65_536, 1_000_003):
        pieces = []
        with opened(block, os.O_RDONLY) as descriptor:
            while piece := os.read(descriptor, size):
                pieces.append(piece)
        assert all(len(piece) == size for piece in pieces[:-1]), "a short read inside the block"
        assert_same(b"".join(pieces), content(SIZE), f"reads of {size}")


def test_lseek_moves_as_posix_says(block):
    with opened(block, os.O_RDONLY) as descriptor:
        assert os.lseek(descriptor, 0, os.SEEK_END) == SIZE
        assert os.read(descriptor, 10) == b""
        assert os.lseek(descriptor, -100, os.SEEK_CUR) == SIZE - 100
        assert os.read(descriptor, 1000) == content(SIZE)[-100:]
        assert os.lseek(descriptor, 4000, os.SEEK_SET) == 4000
        assert os.read(descriptor, 200) == content(SIZE)[4000:4200]
        with raises_errno(22):
            os.lseek(descriptor, -1, os.SEEK_SET)


def test_seek_data_and_seek_hole_find_data_and_the_end(block):
    with opened(block, os.O_RDONLY) as descriptor:
        assert os.lseek(descriptor, 0, os.SEEK_DATA) == 0
        assert os.lseek(descriptor, 0, os.SEEK_HOLE) == SIZE
        with raises_errno(6):  # ENXIO
            os.lseek(descriptor, SIZE, os.SEEK_DATA)


def test_readinto_of_a_whole_block_is_one_full_count(block):
    target = bytearray(SIZE)
    with open(block, "rb", buffering=0) as file:
        assert file.readinto(target) == SIZE
    assert_same(target, content(SIZE), "readinto")


def test_noatime_is_accepted_for_the_owner(block):
    with opened(block, os.O_RDONLY | os.O_NOATIME) as descriptor:
        assert os.pread(descriptor, 4096, 0) == content(SIZE)[:4096]


def test_128_threads_open_and_read_at_once(directory):
    blocks = 16
    for index in range(blocks):
        write_file(directory / f"{index}", content(256 * KIB + index, index))
    gate = threading.Barrier(128)

    def read(thread):
        gate.wait(120)
        for step in range(4):
            index = (thread + step) % blocks
            assert_same(read_file(directory / f"{index}"), content(256 * KIB + index, index), f"block {index}")
        return True

    with concurrent.futures.ThreadPoolExecutor(128) as threads:
        assert list(threads.map(read, range(128))) == [True] * 128


def test_one_descriptor_serves_many_threads(block):
    data = content(SIZE)
    with opened(block, os.O_RDONLY) as descriptor:

        def read(seed):
            dice = random.Random(seed)
            for _ in range(40):
                offset = dice.randrange(SIZE - 65_536)
                assert_same(os.pread(descriptor, 65_536, offset), data[offset : offset + 65_536], f"at {offset}")
            return True

        with concurrent.futures.ThreadPoolExecutor(32) as threads:
            assert all(threads.map(read, range(32)))


def test_copy_file_range_and_sendfile_copy_the_bytes(directory, block):
    with opened(block, os.O_RDONLY) as source, opened(directory / "copy", os.O_CREAT | os.O_WRONLY) as target:
        copied = 0
        while copied < SIZE:
            count = os.copy_file_range(source, target, SIZE - copied)
            assert count > 0
            copied += count
    assert_same(read_file(directory / "copy"), content(SIZE), "copy_file_range")
    with opened(block, os.O_RDONLY) as source, opened(directory / "sent", os.O_CREAT | os.O_WRONLY) as target:
        sent = 0
        while sent < SIZE:
            count = os.sendfile(target, source, sent, SIZE - sent)
            assert count > 0
            sent += count
    assert_same(read_file(directory / "sent"), content(SIZE), "sendfile")
