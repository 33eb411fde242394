"""Mappings. Each test maps in a child: a mapping whose page cannot be read kills its process."""

import mmap
import os

import pytest
from helpers import MIB, assert_same, content, in_child, opened, read_file, write_file

SIZE = 3 * MIB + 1000


def test_shared_mapping_writes_before_the_seal(directory):
    def store():
        with opened(directory / "block.tmp", os.O_CREAT | os.O_RDWR) as descriptor:
            os.ftruncate(descriptor, SIZE)
            with mmap.mmap(descriptor, SIZE, mmap.MAP_SHARED) as memory:
                memory[:] = content(SIZE)
                memory.flush()
        os.rename(directory / "block.tmp", directory / "block")

    in_child(store)
    assert_same(read_file(directory / "block"), content(SIZE), "msynced mapping")


def test_page_dirtied_after_the_close_reaches_the_file_over_a_rename(directory):
    """The kernel's order is FLUSH, RENAME, WRITE: closing and renaming do not end writing."""

    def store():
        with open(directory / "block.tmp", "w+b") as file:
            file.truncate(SIZE)
            memory = mmap.mmap(file.fileno(), SIZE, mmap.MAP_SHARED)
        with memory:
            memory[:] = content(SIZE, 1)
            os.rename(directory / "block.tmp", directory / "block")
            memory[MIB : 2 * MIB] = content(MIB, 2)
            memory.flush()
            expected = content(SIZE, 1)[:MIB] + content(MIB, 2) + content(SIZE, 1)[2 * MIB :]
            assert_same(read_file(directory / "block"), expected, "while mapped, after msync")

    in_child(store)
    expected = content(SIZE, 1)[:MIB] + content(MIB, 2) + content(SIZE, 1)[2 * MIB :]
    assert_same(read_file(directory / "block"), expected, "after munmap")


def test_mapping_without_msync_is_written_back_by_munmap_and_exit(directory):
    def store():
        with open(directory / "block.tmp", "w+b") as file:
            file.truncate(SIZE)
            memory = mmap.mmap(file.fileno(), SIZE, mmap.MAP_SHARED)
        memory[:] = content(SIZE)
        os._exit(0)

    with pytest.raises(AssertionError, match="status 0"):  # it says nothing, and ends well
        in_child(store)
    os.rename(directory / "block.tmp", directory / "block")
    assert_same(read_file(directory / "block"), content(SIZE), "after exit")


@pytest.mark.parametrize("kind", [mmap.MAP_PRIVATE, mmap.MAP_SHARED], ids=["private", "shared"])
def test_read_only_mapping_of_a_sealed_block(directory, kind):
    write_file(directory / "block", content(SIZE))

    def load():
        with opened(directory / "block", os.O_RDONLY) as descriptor:
            memory = mmap.mmap(descriptor, SIZE, kind, mmap.PROT_READ)
        with memory:
            assert_same(memory[:], content(SIZE), "mapped block")
            assert memory[SIZE - 5 :] == content(SIZE)[-5:]

    in_child(load)


def test_private_mapping_never_changes_the_file(directory):
    write_file(directory / "block", content(SIZE))

    def scribble():
        with (
            opened(directory / "block", os.O_RDONLY) as descriptor,
            mmap.mmap(descriptor, SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as memory,
        ):
            memory[:MIB] = bytes(MIB)
            assert memory[:MIB] == bytes(MIB)

    in_child(scribble)
    assert_same(read_file(directory / "block"), content(SIZE), "after a private write")


def test_mapping_of_a_replaced_and_removed_file_keeps_its_bytes(directory):
    write_file(directory / "block", content(SIZE, "old"))

    def hold():
        with opened(directory / "block", os.O_RDONLY) as descriptor:
            memory = mmap.mmap(descriptor, SIZE, mmap.MAP_SHARED, mmap.PROT_READ)
        with memory:
            assert memory[:4096] == content(SIZE, "old")[:4096]
            write_file(directory / "block.tmp", content(SIZE, "new"))
            os.rename(directory / "block.tmp", directory / "block")
            assert_same(memory[:], content(SIZE, "old"), "replaced")
            os.unlink(directory / "block")
            assert_same(memory[:], content(SIZE, "old"), "and removed")

    in_child(hold)


def test_mapping_and_read_see_each_others_writes(directory):
    def share():
        with opened(directory / "block", os.O_CREAT | os.O_RDWR) as descriptor:
            os.ftruncate(descriptor, MIB)
            with mmap.mmap(descriptor, MIB, mmap.MAP_SHARED) as memory:
                for step in range(40):
                    offset = step * 20_000
                    memory[offset : offset + 5000] = content(5000, step)
                    memory.flush()
                    assert os.pread(descriptor, 5000, offset) == content(5000, step), f"read after map, step {step}"
                    os.pwrite(descriptor, content(5000, -step), offset + 5000)
                    assert memory[offset + 5000 : offset + 10_000] == content(5000, -step), f"map after write {step}"

    in_child(share)


def test_sealed_block_can_be_mapped_for_writing_again(directory):
    write_file(directory / "block", content(SIZE))

    def update():
        with (
            opened(directory / "block", os.O_RDWR) as descriptor,
            mmap.mmap(descriptor, SIZE, mmap.MAP_SHARED) as memory,
        ):
            memory[SIZE - 3 :] = b"end"
            memory[:5] = b"begin"

    in_child(update)
    assert_same(read_file(directory / "block"), b"begin" + content(SIZE)[5:-3] + b"end", "updated in place")


def test_many_processes_map_one_block(directory):
    write_file(directory / "block", content(SIZE))

    def load():
        with (
            opened(directory / "block", os.O_RDONLY) as descriptor,
            mmap.mmap(descriptor, SIZE, mmap.MAP_SHARED, mmap.PROT_READ) as memory,
        ):
            return memory[:] == content(SIZE)

    def load_in_four():
        return [in_child(load) for _ in range(4)]

    assert in_child(load_in_four) == [True] * 4
