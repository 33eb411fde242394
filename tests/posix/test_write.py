"""Writing: any order before the seal, the engines' store idioms, appends, truncation, fallocate, crashes of clients."""

import ctypes
import errno
import fcntl
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import (
    KIB,
    MIB,
    assert_same,
    content,
    in_child,
    libc,
    opened,
    process_alive,
    raises_errno,
    read_file,
    repeated,
    wait_until,
    write_file,
)

# The largest of blocks.
LARGE = max(8, repeated(80)) * MIB

FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 0x01, 0x02
FALLOC_FL_COLLAPSE_RANGE, FALLOC_FL_ZERO_RANGE, FALLOC_FL_INSERT_RANGE = 0x08, 0x10, 0x20
DEEPSEEK_BLOCK = 1_124_352  # 16 tokens of DeepSeek-V3: not a multiple of 4 KiB


def aligned(data, padded=None):
    """Return page-aligned memory holding data, for O_DIRECT."""
    memory = mmap.mmap(-1, max(padded or len(data), 1))
    memory[: len(data)] = data
    return memory


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, DEEPSEEK_BLOCK, 2 * MIB, 5 * MIB, 17_989_632])
def test_one_write_of_a_whole_block_reads_back_exactly(directory, size):
    data = content(size)
    write_file(directory / "block.tmp", data)
    os.rename(directory / "block.tmp", directory / "block")
    assert (directory / "block").stat().st_size == size
    assert_same(read_file(directory / "block"), data, f"a block of {size}")


def test_80_mib_go_in_one_write_and_one_read(directory):
    data = content(LARGE)
    with opened(directory / "block.tmp", os.O_CREAT | os.O_EXCL | os.O_WRONLY) as descriptor:
        assert os.write(descriptor, data) == LARGE
    os.rename(directory / "block.tmp", directory / "block")
    target = bytearray(LARGE)
    with opened(directory / "block", os.O_RDONLY) as descriptor:
        assert os.readv(descriptor, [target]) == LARGE
        assert_same(target, data, "all by readv")
        assert_same(os.pread(descriptor, LARGE, 0), data, "all by pread")


def test_writes_in_any_order_before_the_seal(directory):
    """UCM writes shards at their offsets, from several threads, in no order."""
    data = content(4 * MIB + 777)
    pieces = [(offset, data[offset : offset + 70_001]) for offset in range(0, len(data), 70_001)]
    random.Random(7).shuffle(pieces)
    with opened(directory / "block.tmp", os.O_CREAT | os.O_WRONLY) as descriptor:

        def write_every_fourth(start):
            for offset, piece in pieces[start::4]:
                assert os.pwrite(descriptor, piece, offset) == len(piece)

        threads = [threading.Thread(target=write_every_fourth, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert os.fstat(descriptor).st_size == len(data)
    assert_same(read_file(directory / "block.tmp"), data, "shuffled shards")


def test_overlapping_writes_leave_the_later_bytes(directory):
    with opened(directory / "block", os.O_CREAT | os.O_RDWR) as descriptor:
        os.pwrite(descriptor, b"a" * 10_000, 0)
        os.pwrite(descriptor, b"b" * 10_000, 5_000)
        os.pwrite(descriptor, b"c" * 100, 4_950)
        expected = b"a" * 4_950 + b"c" * 100 + b"b" * 9_950
        assert_same(os.pread(descriptor, 20_000, 0), expected, "before the close")
    assert_same(read_file(directory / "block"), expected, "after the close")


def test_a_gap_reads_as_zeros(directory):
    with opened(directory / "sparse", os.O_CREAT | os.O_RDWR) as descriptor:
        os.pwrite(descriptor, b"end", 9 * MIB + 5)
        os.pwrite(descriptor, b"start", 0)
    expected = b"start" + bytes(9 * MIB) + b"end"
    assert_same(read_file(directory / "sparse"), expected, "a file with a gap")
    assert (directory / "sparse").stat().st_size == 9 * MIB + 8


@pytest.mark.parametrize("cut", [None, 3 * MIB // 2 + 7], ids=["whole", "cut"])
def test_the_end_of_a_block_survives_much_that_is_written_far_behind_it(directory, cut):
    """A large file goes to the devices in pieces before its close. The block's last page, which has a successor now,
    lay there before, and has to be written anew at the close."""
    path, size, gap = directory / "block", 3 * MIB + 100, 5 * MIB
    write_file(path, content(size))
    with opened(path, os.O_RDWR) as descriptor:
        if cut is not None:
            os.ftruncate(descriptor, cut)
        for at in range(0, LARGE + 16 * MIB, MIB):
            os.pwrite(descriptor, content(MIB, at), gap + at)
        kept = content(size)[:cut]
        assert_same(os.pread(descriptor, gap, 0), kept.ljust(gap, b"\0"), "before the close")
    data = read_file(path)
    assert_same(data[:gap], kept.ljust(gap, b"\0"), "after the close")
    assert data[gap:] == b"".join(content(MIB, at) for at in range(0, LARGE + 16 * MIB, MIB))


def test_what_was_written_is_read_back_before_the_close(directory):
    data = content(3 * MIB)
    with opened(directory / "block", os.O_CREAT | os.O_RDWR) as descriptor:
        os.write(descriptor, data)
        assert_same(os.pread(descriptor, len(data), 0), data, "by the writer")
        assert_same(read_file(directory / "block"), data, "by another opener")


def test_pwritev_writes_all_its_buffers_at_the_offset(directory):
    buffers = [content(size, size) for size in (1, 4096, 100_000, 3, 65_536)]
    joined = b"".join(buffers)
    with opened(directory / "block", os.O_CREAT | os.O_RDWR) as descriptor:
        assert os.pwritev(descriptor, buffers, 12_345) == len(joined)
        assert os.writev(descriptor, [b"head", b"er"]) == 6
    assert_same(read_file(directory / "block"), b"header" + bytes(12_339) + joined, "pwritev")


def test_vllm_store_idiom(directory):
    """O_CREAT|O_EXCL|O_WRONLY|O_TRUNC|O_DIRECT on a .tmp, one write of the whole block, close, rename."""
    for index in range(8):
        path = directory / f"m_abc_r0/{index:03x}/00_g0/{index:064x}.bin"
        os.makedirs(path.parent, exist_ok=True)
        memory = aligned(content(2 * MIB, index))
        temporary = path.with_suffix(f".bin_{index}.tmp")
        with opened(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT) as descriptor:
            assert os.write(descriptor, memory) == 2 * MIB
        os.rename(temporary, path)
    for index in range(8):
        path = directory / f"m_abc_r0/{index:03x}/00_g0/{index:064x}.bin"
        with opened(path, os.O_RDONLY | os.O_DIRECT) as descriptor:
            target = mmap.mmap(-1, 2 * MIB)
            assert os.readv(descriptor, [target]) == 2 * MIB
            assert_same(target[:], content(2 * MIB, index), path.name)


def test_lmcache_gds_idiom_reopens_before_the_rename(directory):
    """A 4 KiB header, close, reopen r+, the tensor behind it, close, rename; then a separate .metadata."""
    header, tensor = content(4096, "header"), content(DEEPSEEK_BLOCK, "tensor")
    temporary, final = directory / "ab.kvcache.safetensors.tmp", directory / "ab.kvcache.safetensors"
    with open(temporary, "wb") as file:
        file.write(header)
    assert temporary.stat().st_size == 4096
    with open(temporary, "r+b", buffering=0) as file:
        file.seek(4096)
        assert file.write(tensor) == len(tensor)
    os.rename(temporary, final)
    write_file(directory / "ab.metadata", b"{}")
    assert_same(read_file(final), header + tensor, "header and tensor")
    with opened(final, os.O_RDONLY) as descriptor:
        assert os.pread(descriptor, 4096, 0) == header


def test_lmcache_gds_fallback_writes_through_a_shared_mapping(directory):
    header, tensor = content(4096, "header"), content(DEEPSEEK_BLOCK, "tensor")
    temporary, final = directory / "ab.tmp", directory / "ab"

    def store():
        with open(temporary, "wb") as file:
            file.write(header)
        with open(temporary, "r+b") as file:
            file.truncate(4096 + len(tensor))
            with mmap.mmap(file.fileno(), 4096 + len(tensor), mmap.MAP_SHARED) as memory:
                memory[4096:] = tensor
        os.rename(temporary, final)

    in_child(store)
    assert_same(read_file(final), header + tensor, "header and mapped tensor")


def test_sglang_store_idiom_replaces_what_is_there(directory):
    for version in range(3):
        data = content(8 * MIB, version)
        temporary = directory / f"{'0' * 64}_model_0_1.bin.{version:032x}.tmp"
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, directory / f"{'0' * 64}_model_0_1.bin")
        target = bytearray(8 * MIB)
        with open(directory / f"{'0' * 64}_model_0_1.bin", "rb", buffering=0) as file:
            assert file.readinto(target) == 8 * MIB
        assert_same(target, data, f"version {version}")
    assert os.listdir(directory) == [f"{'0' * 64}_model_0_1.bin"]


def test_lmcache_local_disk_overwrites_without_truncating(directory):
    """open("wb") or O_CREAT|O_WRONLY|O_DIRECT without O_TRUNC, under the final name, again and again."""
    path = directory / "m@1@0@0@bfloat16.pt"
    for version in range(3):
        with opened(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT) as descriptor:
            assert os.write(descriptor, aligned(content(MIB, version))) == MIB
        assert_same(read_file(path), content(MIB, version), f"version {version}")


def test_preallocated_slab_is_overwritten_in_place(directory):
    """vLLM SimpleCPUOffload: O_EXCL|O_NOFOLLOW|O_DIRECT, ftruncate, pwritev at slots."""
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_DIRECT
    slots, slot = 16, 256 * KIB
    with opened(directory / "slab", flags) as descriptor:
        os.ftruncate(descriptor, slots * slot)
        shadow = bytearray(slots * slot)
        dice = random.Random(3)
        target = mmap.mmap(-1, slot)
        for step in range(64):
            index = dice.randrange(slots)
            data = content(slot, step)
            assert os.pwritev(descriptor, [aligned(data)], index * slot) == slot
            shadow[index * slot : (index + 1) * slot] = data
            check = dice.randrange(slots)
            assert os.preadv(descriptor, [target], check * slot) == slot
            assert_same(target[:], shadow[check * slot : (check + 1) * slot], f"slot {check} after step {step}")


# --- O_DIRECT ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4096, 2 * MIB, 2 * MIB + 512, DEEPSEEK_BLOCK, 5 * MIB + 4096])
def test_o_direct_by_open_reads_the_exact_size(directory, size):
    data = content(size)
    write_file(directory / "block", data)
    padded = -(-size // 4096) * 4096
    with opened(directory / "block", os.O_RDONLY | os.O_DIRECT) as descriptor:
        target = mmap.mmap(-1, padded)
        assert os.readv(descriptor, [target]) == size
        assert_same(target[:size], data, "O_DIRECT read over the end")
        assert os.preadv(descriptor, [target], padded) == 0


def test_o_direct_by_fcntl_is_accepted_and_reads_and_writes(directory):
    data = content(2 * MIB)
    with opened(directory / "block", os.O_CREAT | os.O_RDWR) as descriptor:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        assert os.pwrite(descriptor, aligned(data), 0) == len(data)
        target = mmap.mmap(-1, len(data))
        assert os.preadv(descriptor, [target], 0) == len(data)
        assert_same(target[:], data, "by F_SETFL before the close")
    with opened(directory / "block", os.O_RDONLY) as descriptor:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
        assert os.preadv(descriptor, [target], 0) == len(data)
        assert_same(target[:], data, "by F_SETFL after the close")


@pytest.mark.parametrize("size", [1, 511, 4095, 4097, DEEPSEEK_BLOCK + 13])
def test_o_direct_with_unaligned_sizes_is_served_or_refused_never_wrong(directory, is_kvfs, size):
    """kvfs serves unaligned tails; a filesystem that refuses them says EINVAL and writes nothing."""
    data = content(size)
    with opened(directory / "block", os.O_CREAT | os.O_WRONLY | os.O_DIRECT) as descriptor:
        try:
            assert os.write(descriptor, aligned(data, size + 4096)[:size] if size % 2 else data) == size
        except OSError as error:
            assert error.errno == errno.EINVAL
            assert not is_kvfs, "kvfs serves unaligned O_DIRECT"
            return
    assert_same(read_file(directory / "block"), data, f"O_DIRECT write of {size}")
    with opened(directory / "block", os.O_RDONLY | os.O_DIRECT) as descriptor:
        assert_same(os.pread(descriptor, size + 100, 0), data, f"O_DIRECT read of {size}")


def test_o_direct_and_buffered_descriptors_see_the_same_bytes(directory):
    path = directory / "block"
    write_file(path, bytes(MIB))
    with opened(path, os.O_RDWR | os.O_DIRECT) as direct, opened(path, os.O_RDWR) as buffered:
        target = mmap.mmap(-1, 4096)
        for step in range(32):
            offset = step * 8192
            os.pwrite(direct, aligned(content(4096, step)), offset)
            assert_same(os.pread(buffered, 4096, offset), content(4096, step), f"buffered after direct, step {step}")
            os.pwrite(buffered, content(4096, -step), offset)
            assert os.preadv(direct, [target], offset) == 4096
            assert_same(target[:], content(4096, -step), f"direct after buffered, step {step}")


# --- appending, truncating, preallocating -----------------------------------------------------------------------


def test_appends_of_5000_bytes_with_fstat_between_never_overlap(directory):
    with opened(directory / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND) as descriptor:
        for step in range(60):
            assert os.write(descriptor, content(5000, step)) == 5000
            assert os.fstat(descriptor).st_size == (step + 1) * 5000
            assert (directory / "log").stat().st_size == (step + 1) * 5000
    assert_same(read_file(directory / "log"), b"".join(content(5000, step) for step in range(60)), "appends")


def test_appends_continue_a_sealed_file(directory):
    expected = b""
    for step in range(10):
        with open(directory / "log", "ab") as file:
            assert file.tell() == len(expected)
            file.write(content(5000, step))
        expected += content(5000, step)
        assert (directory / "log").stat().st_size == len(expected)
    assert_same(read_file(directory / "log"), expected, "appends over closes")


def test_appends_through_two_descriptors_keep_every_record(directory):
    flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
    with opened(directory / "log", flags) as first, opened(directory / "log", flags) as second:
        for step in range(100):
            os.write((first, second)[step % 2], b"%07d\n" % step)
    assert read_file(directory / "log").split() == [b"%07d" % step for step in range(100)]


def test_ftruncate_grows_with_zeros_and_shrinks_exactly(directory):
    data = content(300_000)
    with opened(directory / "block", os.O_CREAT | os.O_RDWR) as descriptor:
        os.write(descriptor, data)
        for size in (100_001, 0, 50_000, 4096, 7 * MIB, 12_288):
            before = os.pread(descriptor, 8 * MIB, 0)
            os.ftruncate(descriptor, size)
            assert os.fstat(descriptor).st_size == size
            expected = before[:size] + bytes(max(0, size - len(before)))
            assert_same(os.pread(descriptor, 8 * MIB, 0), expected, f"ftruncate to {size}")
    assert_same(read_file(directory / "block"), expected, "after the close")


def test_truncated_tail_does_not_come_back_when_the_file_grows(directory):
    with opened(directory / "block", os.O_CREAT | os.O_RDWR) as descriptor:
        os.write(descriptor, b"x" * 10_000)
        os.ftruncate(descriptor, 5_000)
        os.pwrite(descriptor, b"end", 9_000)
    assert_same(read_file(directory / "block"), b"x" * 5_000 + bytes(4_000) + b"end", "the cut-off tail")


@pytest.mark.parametrize("size", [0, 1, 4096, 100_001, 2 * MIB, 2 * MIB + 5, 9 * MIB])
def test_truncate_of_a_sealed_file_by_path(directory, size):
    data = content(2 * MIB + 1)
    path = directory / "block"
    write_file(path, data)
    os.truncate(path, size)
    assert path.stat().st_size == size
    assert_same(read_file(path), data[:size] + bytes(max(0, size - len(data))), f"truncate to {size}")


def test_posix_fallocate_is_fast_and_sets_the_size(directory, service):
    def requests():
        return service.pool.status()["counters"]["requests"] if service.pool else 0

    begin = requests()
    with opened(directory / "slab", os.O_CREAT | os.O_RDWR) as descriptor:
        os.posix_fallocate(descriptor, 0, 240 * MIB)
        assert os.fstat(descriptor).st_size == 240 * MIB
        # Emulated by glibc it would be 61,440 writes of one byte.
        assert requests() - begin < 1000
        os.pwrite(descriptor, b"data", 32 * MIB)
        os.posix_fallocate(descriptor, 0, MIB)
        assert os.fstat(descriptor).st_size == 240 * MIB, "fallocate never shrinks"
        assert os.pread(descriptor, 8, 32 * MIB - 2) == b"\0\0data\0\0"
        assert os.pread(descriptor, 4096, 240 * MIB - 4096) == bytes(4096)


def test_preallocation_and_truncation_wait_for_the_seals_of_others(directory):
    """Each close of a writer seals what was written, as each fsync does: whoever asks for room then gets it, later."""
    path, turns = directory / "shared", repeated(10)
    write_file(path, content(MIB))
    done = threading.Event()

    def seal():
        turn = 0
        while not done.is_set():
            with opened(path, os.O_WRONLY) as descriptor:
                os.pwrite(descriptor, content(4096, turn), 0)
                os.fsync(descriptor)
            turn += 1
        return turn

    with ThreadPoolExecutor(2) as threads, opened(path, os.O_RDWR) as descriptor:
        sealers = [threads.submit(seal) for _ in range(2)]
        try:
            for turn in range(1, turns + 1):
                for size in range(MIB + 1000 * turn - 490, MIB + 1000 * turn + 1, 10):
                    os.posix_fallocate(descriptor, 0, size)
                    assert os.fstat(descriptor).st_size == size
                os.ftruncate(descriptor, MIB + 1000 * turn - 1)
                assert os.fstat(descriptor).st_size == MIB + 1000 * turn - 1
                os.pwrite(descriptor, b"end", MIB + 1000 * turn - 4)
        finally:
            done.set()
        assert all(sealer.result() for sealer in sealers)
    data = read_file(path)
    assert len(data) == MIB + 1000 * turns - 1
    assert_same(data[4096:MIB], content(MIB)[4096:], "what nobody wrote again")
    assert data.endswith(b"end")


@pytest.mark.parametrize(
    "mode",
    [
        FALLOC_FL_KEEP_SIZE,
        FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
        FALLOC_FL_ZERO_RANGE,
        FALLOC_FL_COLLAPSE_RANGE,
        FALLOC_FL_INSERT_RANGE,
    ],
)
def test_other_fallocate_modes_are_eopnotsupp_and_harmless(directory, is_kvfs, mode):
    if not is_kvfs:
        pytest.skip("other filesystems may have these modes")
    data = content(64 * KIB)
    with opened(directory / "block", os.O_CREAT | os.O_RDWR) as descriptor:
        os.write(descriptor, data)
        with raises_errno(errno.EOPNOTSUPP):
            _fallocate(descriptor, mode, 8192, 4096)
        assert_same(os.pread(descriptor, 64 * KIB, 0), data, "after the refusal")
        assert os.fstat(descriptor).st_size == 64 * KIB


def _fallocate(descriptor, mode, offset, size):
    if libc.fallocate(descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(size)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def test_write_to_a_read_only_descriptor_is_ebadf(directory):
    write_file(directory / "block", b"x")
    with opened(directory / "block", os.O_RDONLY) as descriptor, raises_errno(errno.EBADF):
        os.write(descriptor, b"y")
    with opened(directory / "block", os.O_WRONLY) as descriptor, raises_errno(errno.EBADF):
        os.read(descriptor, 1)


# --- closing is not sealing -------------------------------------------------------------------------------------


def test_close_of_a_duplicate_does_not_end_writing(directory):
    """FLUSH comes with every close(2) of a duplicate; the other descriptor goes on."""
    path = directory / "block"
    with opened(path, os.O_CREAT | os.O_WRONLY) as descriptor:
        os.write(descriptor, b"a" * 10_000)
        os.close(os.dup(descriptor))
        os.write(descriptor, b"b" * 10_000)
        os.close(os.dup(descriptor))
        os.pwrite(descriptor, b"c" * 10, 0)
    assert_same(read_file(path), b"c" * 10 + b"a" * 9_990 + b"b" * 10_000, "after three flushes")


def test_exit_of_a_forked_child_does_not_end_writing(directory):
    path = directory / "block"
    with opened(path, os.O_CREAT | os.O_WRONLY) as descriptor:
        os.write(descriptor, b"a" * 5_000)
        assert in_child(lambda: os.write(descriptor, b"b" * 5_000)) == 5_000
        os.write(descriptor, b"c" * 5_000)
    assert_same(read_file(path), b"a" * 5_000 + b"b" * 5_000 + b"c" * 5_000, "parent and child")


def test_fsync_before_close_makes_the_bytes_readable_and_does_not_end_writing(directory):
    path = directory / "block"
    with opened(path, os.O_CREAT | os.O_WRONLY) as descriptor:
        for step in range(4):
            os.write(descriptor, content(100_000, step))
            (os.fsync if step % 2 else os.fdatasync)(descriptor)
            assert_same(read_file(path), b"".join(content(100_000, i) for i in range(step + 1)), f"fsync {step}")


def test_file_closed_many_times_before_its_rename_keeps_everything(directory):
    expected = bytearray(200_000)
    dice = random.Random(11)
    path = directory / "block.tmp"
    write_file(path, bytes(expected))
    for step in range(20):
        offset, data = dice.randrange(190_000), content(10_000, step)
        with open(path, "r+b", buffering=0) as file:
            file.seek(offset)
            assert file.write(data) == len(data)
        expected[offset : offset + 10_000] = data
        assert_same(read_file(path), bytes(expected), f"reopening {step}")
    os.rename(path, directory / "block")
    assert_same(read_file(directory / "block"), bytes(expected), "after the rename")


# --- writers that meet, writers that die ------------------------------------------------------------------------


STORE = """
import errno, os, random, sys
temporary, final, seed, size, rounds = sys.argv[1:4] + [int(word) for word in sys.argv[4:]]
data = random.Random(seed).randbytes(size)
while rounds:
    try:
        descriptor = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        continue
    rounds -= 1
    assert os.write(descriptor, data) == size
    os.close(descriptor)
    try:
        os.rename(temporary, final)
    except FileNotFoundError:
        pass  # the other writer has renamed it
"""


@pytest.mark.parametrize("seeds", [("same", "same"), ("one", "two")], ids=["same-content", "different-content"])
def test_two_writers_on_one_fixed_tmp_name_do_not_corrupt_each_other(directory, seeds):
    """UCM's .tmp names are fixed: two processes storing one key meet in one file.

    When both are done, the final name holds one writer's block, whole. Linux looks a name up again after one ESTALE. An
    open fails with it where both times the file was renamed and replaced between look-up and open.
    """
    size = 3 * MIB + 17
    whole = [random.Random(seed).randbytes(size) for seed in seeds]
    for attempt in range(3):
        final = directory / f"key-{attempt}"
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", STORE, str(directory / "key.tmp"), str(final), seed, str(size), "12"]
            )
            for seed in seeds
        ]
        assert [writer.wait(120) for writer in writers] == [0, 0]
        result = read_file(final)
        assert len(result) == size
        assert result in whole, "the block is a mixture"


def test_two_writers_of_shards_on_one_tmp_name_make_one_whole_block(directory):
    data = content(4 * MIB)
    offsets = list(range(0, len(data), 64 * KIB))
    failures = []

    def store(seed):
        try:
            with opened(directory / "key.tmp", os.O_CREAT | os.O_WRONLY) as descriptor:
                for offset in random.Random(seed).sample(offsets, len(offsets)):
                    assert os.pwrite(descriptor, data[offset : offset + 64 * KIB], offset) == 64 * KIB
        except BaseException as error:  # for the main thread to raise
            failures.append(error)

    threads = [threading.Thread(target=store, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    os.rename(directory / "key.tmp", directory / "key")
    assert_same(read_file(directory / "key"), data, "two writers of the same shards")


ENDLESS_WRITER = """
import os, sys
descriptor = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
data = b"k" * int(sys.argv[2])
print("writing", flush=True)
while True:
    os.pwrite(descriptor, data, 0)
"""


@pytest.mark.slow
def test_kill_of_a_client_in_the_middle_of_a_write_leaves_a_working_mount(directory):
    temporary = directory / "block.tmp"
    for attempt in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", ENDLESS_WRITER, str(temporary), str(LARGE)], stdout=subprocess.PIPE
        )
        with writer:
            assert writer.stdout.readline() == b"writing\n"
            enough = attempt * LARGE // 4 + MIB
            wait_until(lambda enough=enough: temporary.stat().st_size >= enough, "some bytes of the write")
            writer.send_signal(signal.SIGKILL)
            assert writer.wait(120) == -signal.SIGKILL
            wait_until(lambda pid=writer.pid: not process_alive(pid), "the end of the writer")
        assert not (directory / "block").exists()
        assert temporary.stat().st_size <= LARGE
        assert set(read_file(temporary)) <= {ord("k")}
        # The next client stores the same key.
        write_file(temporary, content(2 * MIB, attempt))
        os.rename(temporary, directory / "block")
        assert_same(read_file(directory / "block"), content(2 * MIB, attempt), "the next client's block")
        (directory / "block").unlink()
    assert os.listdir(directory) == []
