"""Slabs: files that are preallocated and overwritten in place, as engines use them for their pools of KV blocks.

The claims: slabs take the engines' calls, hold every byte through every path, begin as zeros, have a quota, and go with
their last descriptor. A preallocated file that is no slab after all stays, as any file.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import random
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import (
    KIB,
    MIB,
    assert_same,
    content,
    in_child,
    opened,
    raises_errno,
    read_file,
    repeated,
    requires_program,
    run,
    slow,
    wait_until,
    write_file,
)

pytestmark = pytest.mark.timeout(120)

ATTRIBUTE = "user.kvfs.slab"
# From here on a preallocated file becomes a slab by itself.
LEAST = 256 * MIB
RDWR = os.O_RDWR | os.O_CREAT | os.O_EXCL
PAGE = 4096


@pytest.fixture(autouse=True)
def _only_kvfs(is_kvfs):
    if not is_kvfs:
        pytest.skip("slabs are kvfs's own")


def aligned(data):
    memory = mmap.mmap(-1, -(-len(data) // PAGE) * PAGE)
    memory[: len(data)] = data
    return memoryview(memory)[: len(data)]


def direct_read(descriptor, size, offset):
    target = mmap.mmap(-1, size)
    count = os.preadv(descriptor, [target], offset)
    return target[:count]


def direct_write(descriptor, data, offset):
    assert os.pwrite(descriptor, aligned(data), offset) == len(data)


def is_slab(descriptor):
    try:
        return os.getxattr(descriptor, ATTRIBUTE) == b"1"
    except OSError as error:
        assert error.errno == errno.ENODATA
        return False


def make_slab(path, size, flags=RDWR | os.O_DIRECT):
    """Open a new slab of any size, and return its descriptor."""
    descriptor = os.open(path, flags, 0o644)
    try:
        os.ftruncate(descriptor, size)
        if not is_slab(descriptor):
            os.setxattr(descriptor, ATTRIBUTE, b"1")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def slab_bytes(pool):
    return pool.status()["space"]["slabs"]


def overwrite(descriptor, size, steps, *, slot=256 * KIB, shadow=None):
    """Write whole slots at random and read others back, and demand that all are as last written. `shadow` is what an
    earlier call returned for this slab."""
    shadow = {} if shadow is None else shadow
    seed = len(shadow)
    dice = random.Random(seed)
    for step in range(steps):
        index = dice.randrange(size // slot)
        shadow[index] = (seed, step)
        direct_write(descriptor, content(slot, shadow[index]), index * slot)
        index = dice.randrange(size // slot)
        expected = content(slot, shadow[index]) if index in shadow else bytes(slot)
        assert_same(direct_read(descriptor, slot, index * slot), expected, f"slot {index} after step {step}")
    for index, written in shadow.items():
        assert_same(direct_read(descriptor, slot, index * slot), content(slot, written), f"slot {index} at the end")
    return shadow


# --- the engines -----------------------------------------------------------------------------------------------


def dynamo(directory):
    """Dynamo KVBM: mkostemp, O_DIRECT by F_SETFL, fallocate of everything, unlink while open."""
    descriptor, path = tempfile.mkstemp(dir=directory)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    os.posix_fallocate(descriptor, 0, LEAST)
    os.unlink(path)
    return descriptor


def vllm(directory):
    """vLLM SimpleCPUOffload: unlink, O_EXCL|O_NOFOLLOW|O_DIRECT, ftruncate."""
    path = directory / "kv_offload.bin"
    with raises_errno(errno.ENOENT):
        os.unlink(path)
    descriptor = os.open(path, RDWR | os.O_NOFOLLOW | os.O_DIRECT, 0o600)
    os.ftruncate(descriptor, LEAST)
    return descriptor


def pool_file(directory):
    """NIXL's static pools, SGLang's hf3fs: a named file, preallocated, opened again with O_DIRECT."""
    first = os.open(directory / "pool_0.bin", RDWR)
    os.posix_fallocate(first, 0, LEAST)
    descriptor = os.open(directory / "pool_0.bin", os.O_RDWR | os.O_DIRECT)
    os.close(first)
    return descriptor


def late_direct(directory):
    """ftruncate, and O_DIRECT only after that."""
    descriptor = os.open(directory / "pool_1.bin", RDWR)
    os.ftruncate(descriptor, LEAST)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    direct_write(descriptor, bytes(PAGE), 0)
    return descriptor


@pytest.mark.parametrize("idiom", [dynamo, vllm, pool_file, late_direct])
def test_engines_files_become_slabs_and_hold_what_is_written(directory, idiom):
    descriptor = idiom(directory)
    try:
        assert is_slab(descriptor)
        assert os.fstat(descriptor).st_size == LEAST
        for _ in range(2):  # a file with a name that is written only once stays
            direct_write(descriptor, bytes(PAGE), 0)
        overwrite(descriptor, LEAST, repeated(200))
    finally:
        os.close(descriptor)
    wait_until(lambda: not os.listdir(directory), "the end of the slab with its last descriptor")


def test_block_files_of_an_engine_are_no_slabs(directory):
    """TensorRT-LLM's ids that are used again, LMCache GDS's mapping, a small posix_fallocate: files as any others."""
    for version in range(3):
        with opened(directory / "block_3_pool_0.bin", os.O_RDWR | os.O_CREAT) as descriptor:
            assert os.pwrite(descriptor, content(MIB, version), 0) == MIB
        assert_same(read_file(directory / "block_3_pool_0.bin"), content(MIB, version), f"version {version}")
    with opened(directory / "x.tmp", RDWR) as descriptor:
        os.posix_fallocate(descriptor, 0, 64 * MIB)
        assert not is_slab(descriptor)
        direct_write(descriptor, content(MIB), 0)
        direct_write(descriptor, content(MIB, 1), 0)
    os.rename(directory / "x.tmp", directory / "x")
    assert_same(read_file(directory / "x"), content(MIB, 1) + bytes(63 * MIB), "a file with room ahead")


# --- every byte ------------------------------------------------------------------------------------------------


def test_all_paths_to_one_slab_agree(directory):
    """O_DIRECT and buffered descriptors, aligned and not, and a shared mapping, against a model."""
    size = 3 * MIB + 777
    shadow = bytearray(size)
    direct = make_slab(directory / "slab", size)
    try:
        with opened(directory / "slab", os.O_RDWR) as buffered:
            dice = random.Random(5)
            for step in range(repeated(400)):
                offset = dice.randrange(size)
                length = min(dice.choice([1, 100, PAGE, 5000, 64 * KIB, 300 * KIB]), size - offset)
                if dice.random() < 0.3:
                    offset, length = offset // PAGE * PAGE, PAGE
                    length = min(length, size - offset)
                data = content(length, step)
                way = dice.choice(["direct", "buffered", "mapped"])
                if way == "mapped":

                    def store(offset=offset, data=data):
                        with mmap.mmap(buffered, size) as memory:
                            memory[offset : offset + len(data)] = data
                            memory.flush()

                    in_child(store)
                else:
                    descriptor = direct if way == "direct" else buffered
                    assert os.pwrite(descriptor, aligned(data), offset) == length
                shadow[offset : offset + length] = data
                offset = dice.randrange(size)
                length = dice.choice([1, 4000, PAGE, 70_000, MIB])
                for descriptor in (direct, buffered):
                    expected = shadow[offset : offset + length]
                    assert_same(os.pread(descriptor, length, offset), expected, f"{way}, step {step}")
            assert_same(read_file(directory / "slab"), shadow, "another descriptor")
            assert os.fstat(buffered).st_size == size
    finally:
        os.close(direct)


def test_parts_of_one_page_written_at_once_all_stay(directory):
    """Threads write their own 512 bytes of the same pages, others the whole page behind them."""
    descriptor = make_slab(directory / "slab", MIB)
    try:

        def work(part):
            with opened(directory / "slab", os.O_RDWR | os.O_DIRECT) as own:
                for turn in range(repeated(60)):
                    if part < 8:
                        direct_write(own, content(512, (part, turn)), 512 * part)
                    else:
                        direct_write(own, content(PAGE, (part, turn)), PAGE * (part - 7))
                        assert_same(direct_read(own, PAGE, PAGE * (part - 7)), content(PAGE, (part, turn)), f"{part}")

        with ThreadPoolExecutor(12) as threads:
            list(threads.map(work, range(12)))
        last = repeated(60) - 1
        expected = b"".join(content(512, (part, last)) for part in range(8))
        assert_same(direct_read(descriptor, PAGE, 0), expected, "the page of eight writers")
    finally:
        os.close(descriptor)


def test_what_was_never_written_is_zeros_whatever_the_devices_hold(own_pool):
    """Segments that are full of other blocks' bytes, and of another slab's."""
    pool = own_pool(files=2, size="256M")
    for i in range(24):
        write_file(pool.mount / f"{i}", content(16 * MIB, i))
    first = make_slab(pool.mount / "first", 64 * MIB)
    for at in range(0, 64 * MIB, MIB):
        assert_same(direct_read(first, MIB, at), bytes(MIB), f"a new slab at {at}")
        direct_write(first, content(MIB, at), at)
    os.close(first)
    wait_until(lambda: slab_bytes(pool) == 0, "the segments of the first slab")
    second = make_slab(pool.mount / "second", 64 * MIB)
    try:
        direct_write(second, content(PAGE), 5 * MIB)
        for at in range(0, 64 * MIB, MIB):
            expected = content(PAGE) + bytes(MIB - PAGE) if at == 5 * MIB else bytes(MIB)
            assert_same(direct_read(second, MIB, at), expected, f"the next slab at {at}")
    finally:
        os.close(second)


def test_truncation_cuts_and_grows_with_zeros(directory):
    descriptor = make_slab(directory / "slab", 4 * MIB)
    try:
        direct_write(descriptor, content(4 * MIB), 0)
        for size in (2 * MIB + 100, 3 * MIB, PAGE - 1, 40 * MIB, 0, MIB):
            before = os.pread(descriptor, 4 * MIB, 0)
            os.ftruncate(descriptor, size)
            assert os.fstat(descriptor).st_size == size
            expected = (before[:size] + bytes(max(0, size - len(before))))[: 4 * MIB]
            assert_same(os.pread(descriptor, 4 * MIB, 0), expected, f"truncated to {size}")
            assert is_slab(descriptor)
        direct_write(descriptor, content(MIB, 1), 0)
        with opened(directory / "slab", os.O_RDWR | os.O_TRUNC):
            pass
        assert os.fstat(descriptor).st_size == 0
        os.posix_fallocate(descriptor, 0, 2 * MIB)
        assert_same(os.pread(descriptor, 3 * MIB, 0), bytes(2 * MIB), "emptied and preallocated again")
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("engine", ["libaio", "io_uring"])
def test_fio_verifies_every_byte_at_depth_32(directory, engine):
    requires_program("fio")
    size = repeated(64) * MIB
    descriptor = make_slab(directory / "slab", size)
    try:
        for block in ("4k", "128k"):
            words = ["--name=slab", f"--filename={directory}/slab", f"--size={size}", "--rw=randrw", "--direct=1"]
            words += [f"--bs={block}", f"--ioengine={engine}", "--iodepth=32", "--randseed=7", "--allow_file_create=0"]
            words += ["--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0", "--output-format=json"]
            result = run("fio", *words, timeout_s=100)
            [job] = json.loads(result.stdout[result.stdout.index("{") :])["jobs"]
            assert job["error"] == 0
            assert job["write"]["io_bytes"] > 0
            assert job["read"]["io_bytes"] >= job["write"]["io_bytes"], "fio did not verify what it wrote"
    finally:
        os.close(descriptor)


def test_fsync_and_times(directory):
    descriptor = make_slab(directory / "slab", MIB)
    try:
        os.utime(descriptor, ns=(10**18, 10**18))
        assert os.fstat(descriptor).st_mtime_ns == 10**18
        direct_write(descriptor, content(PAGE), 0)
        assert os.fstat(descriptor).st_mtime_ns > 10**18
        os.fsync(descriptor)
        os.fdatasync(descriptor)
        with raises_errno(errno.ENOSPC):
            os.pwrite(descriptor, b"x", 1 << 40)
    finally:
        os.close(descriptor)


# --- whose is it -----------------------------------------------------------------------------------------------


def test_the_attribute_makes_and_tells(directory):
    with opened(directory / "slab", RDWR) as descriptor:
        os.ftruncate(descriptor, 10 * MIB)
        assert ATTRIBUTE not in os.listxattr(descriptor)
        with raises_errno(errno.EINVAL):
            os.setxattr(descriptor, ATTRIBUTE, b"yes")
        os.setxattr(descriptor, ATTRIBUTE, b"1")
        os.setxattr(descriptor, ATTRIBUTE, b"1")
        assert os.listxattr(descriptor) == [ATTRIBUTE]
        with raises_errno(errno.EPERM):
            os.removexattr(descriptor, ATTRIBUTE)
        overwrite(descriptor, 10 * MIB, 20)
    wait_until(lambda: not os.listdir(directory), "the end of the slab")
    with opened(directory / "file", RDWR) as descriptor:
        os.write(descriptor, b"content")
        with raises_errno(errno.EBUSY):
            os.setxattr(descriptor, ATTRIBUTE, b"1")
    with raises_errno(errno.EINVAL):
        os.setxattr(directory / "file", ATTRIBUTE, b"1")
    with raises_errno(errno.EINVAL):
        os.setxattr(directory, ATTRIBUTE, b"1")
    assert read_file(directory / "file") == b"content"


def test_beyond_the_quota_a_file_is_as_any_other_and_room_comes_back(own_pool):
    """Only who chose a slab by its attribute is told that there is no room for one."""
    pool = own_pool(files=4, size="1G")
    room = pool.status()["space"]["size"] // 4
    held = []
    try:
        while True:
            held.append(os.open(pool.mount / f"{len(held)}", RDWR | os.O_DIRECT, 0o644))
            os.posix_fallocate(held[-1], 0, LEAST)
            assert os.fstat(held[-1]).st_size == LEAST
            if not is_slab(held[-1]):
                break
            assert len(held) <= room // LEAST, "slabs beyond the quota"
        assert len(held) == room // LEAST + 1, "less than the quota"
        overwrite(held[-1], LEAST, 20)
        held.append(os.open(pool.mount / "truncated", RDWR | os.O_DIRECT, 0o644))
        os.ftruncate(held[-1], LEAST)
        assert os.fstat(held[-1]).st_size == LEAST
        assert not is_slab(held[-1])
        overwrite(held[-1], LEAST, 20)
        with opened(pool.mount / "chosen", RDWR) as descriptor:
            os.ftruncate(descriptor, LEAST)
            with raises_errno(errno.ENOSPC):
                os.setxattr(descriptor, ATTRIBUTE, b"1")
        overwrite(held[0], LEAST, 20)
    finally:
        for descriptor in held:
            os.close(descriptor)
    wait_until(lambda: slab_bytes(pool) == 0, "the slabs' segments")
    descriptor = make_slab(pool.mount / "again", 2 * LEAST)
    os.close(descriptor)


@pytest.mark.parametrize(
    "grow",
    [slow(lambda descriptor, size: os.posix_fallocate(descriptor, 0, size)), os.ftruncate],
    ids=["fallocate", "ftruncate"],
)
def test_a_slab_that_outgrows_the_quota_becomes_a_file_with_all_its_bytes(own_pool, grow):
    pool = own_pool(files=4, size="512M")
    descriptor = os.open(pool.mount / "grown", RDWR | os.O_DIRECT, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, LEAST)
        assert is_slab(descriptor)
        shadow = overwrite(descriptor, LEAST, 100)
        grow(descriptor, 3 * LEAST)
        assert os.fstat(descriptor).st_size == 3 * LEAST
        assert not is_slab(descriptor)
        wait_until(lambda: slab_bytes(pool) == 0, "the slab's segments")
        overwrite(descriptor, LEAST, 20, shadow=shadow)
        direct_write(descriptor, content(MIB, "end"), 3 * LEAST - MIB)
    finally:
        os.close(descriptor)
    with opened(pool.mount / "grown", os.O_RDONLY) as reader:
        for index, written in shadow.items():
            assert_same(os.pread(reader, 256 * KIB, index * 256 * KIB), content(256 * KIB, written), f"slot {index}")
        assert_same(os.pread(reader, MIB, 3 * LEAST - MIB), content(MIB, "end"), "the end")
        assert_same(os.pread(reader, MIB, LEAST), bytes(MIB), "what was never written")


@pytest.mark.slow
def test_status_and_statvfs_count_slabs(own_pool):
    pool = own_pool(files=2, size="256M")
    free = os.statvfs(pool.mount).f_bavail
    descriptor = make_slab(pool.mount / "slab", 100 * MIB)
    try:
        assert 100 * MIB <= slab_bytes(pool) < 140 * MIB
        assert free - os.statvfs(pool.mount).f_bavail >= 100 * MIB // 4096
        assert "slabs 1" in pool.command("status", str(pool.path)).stdout
    finally:
        os.close(descriptor)
    wait_until(lambda: slab_bytes(pool) == 0, "the slab's segments")


def test_unlinked_and_renamed_slabs_live_on_for_their_descriptors(directory):
    descriptor = make_slab(directory / "a", 8 * MIB)
    try:
        shadow = overwrite(descriptor, 8 * MIB, 20)
        os.rename(directory / "a", directory / "b")
        with opened(directory / "b", os.O_RDONLY) as reader:
            overwrite(descriptor, 8 * MIB, 20, shadow=shadow)
            assert_same(os.pread(reader, MIB, 0), direct_read(descriptor, MIB, 0), "renamed")
            write_file(directory / "c", b"another")
            os.rename(directory / "c", directory / "b")
            assert read_file(directory / "b") == b"another"
            overwrite(descriptor, 8 * MIB, 20, shadow=shadow)
            assert_same(os.pread(reader, MIB, 0), direct_read(descriptor, MIB, 0), "replaced")
    finally:
        os.close(descriptor)
    assert read_file(directory / "b") == b"another"


def test_a_slab_goes_with_the_last_of_its_descriptors(directory, service):
    descriptor = make_slab(directory / "slab", 4 * MIB)
    overwrite(descriptor, 4 * MIB, 20)
    reader = os.open(directory / "slab", os.O_RDONLY)
    copy = os.dup(descriptor)
    in_child(lambda: os.close(descriptor))  # a child's close is not the last
    os.close(descriptor)
    expected = direct_read(copy, MIB, 0)
    os.close(copy)
    for _ in range(20):
        assert_same(os.pread(reader, MIB, 0), expected, "for the reader that is left")
        assert os.path.exists(directory / "slab")
        time.sleep(0.01)
    os.close(reader)
    wait_until(lambda: not os.path.exists(directory / "slab"), "the end of the slab")
    if service.pool is not None:
        wait_until(lambda: slab_bytes(service.pool) == 0, "its segments")


@pytest.mark.slow
@pytest.mark.parametrize("size", [LEAST, LEAST + MIB + 5000])
def test_preallocated_file_that_is_written_once_stays(own_pool, size):
    """posix_fallocate, write, close, rename: its bytes are there, after the close, a rename and a restart."""
    pool = own_pool(files=4, size="1G")
    pieces = {0: content(3 * MIB + 5), 100 * MIB: content(MIB, 1), size - 10_000: content(10_000, 2)}

    def check(path, what):
        assert os.stat(path).st_size == size
        with opened(path, os.O_RDONLY) as reader:
            for at, data in pieces.items():
                assert_same(os.pread(reader, len(data), at), data, f"{what} at {at}")
            assert_same(os.pread(reader, 5 * MIB, 5 * MIB), bytes(5 * MIB), f"{what}: a hole")
            end = content(3 * MIB + 5)[3 * MIB :] + bytes(95)
            assert_same(os.pread(reader, 100, 3 * MIB), end, f"{what}: the end of a piece")

    with opened(pool.mount / "x.tmp", RDWR) as descriptor:
        os.posix_fallocate(descriptor, 0, size)
        assert is_slab(descriptor)
        for at, data in pieces.items():
            assert os.pwrite(descriptor, data, at) == len(data)
        check(pool.mount / "x.tmp", "being written")
    check(pool.mount / "x.tmp", "closed")
    os.rename(pool.mount / "x.tmp", pool.mount / "x")
    check(pool.mount / "x", "renamed")
    wait_until(lambda: pool.status()["counters"]["sealed_blocks"] == 1, "the seal")
    wait_until(lambda: slab_bytes(pool) == 0, "the end of the slab")
    check(pool.mount / "x", "sealed")
    with opened(pool.mount, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)  # a crash may undo a rename of the last second
    pool.kill()
    pool.remount()
    check(pool.mount / "x", "after a crash")
    pool.umount()
    assert "nothing is damaged" in pool.command("fsck", str(pool.path), "--verify-data").stdout
    pool.start()
    check(pool.mount / "x", "after a restart")
    with opened(pool.mount / "x", os.O_RDWR) as descriptor:
        assert os.pwrite(descriptor, content(100, 3), 100 * MIB) == 100
    pieces[100 * MIB] = content(100, 3) + content(MIB, 1)[100:]
    check(pool.mount / "x", "rewritten")


def test_preallocated_file_that_is_not_written_stays_as_a_hole(directory):
    with opened(directory / "hole", RDWR) as descriptor:
        os.posix_fallocate(descriptor, 0, LEAST)
    wait_until(lambda: not is_slab(directory / "hole"), "an ordinary file")
    assert os.stat(directory / "hole").st_size == LEAST
    with opened(directory / "hole", os.O_RDONLY) as reader:
        assert_same(os.pread(reader, MIB, LEAST - MIB), bytes(MIB), "the hole")


# --- with others -----------------------------------------------------------------------------------------------


def _close_dead(descriptor):
    """A close whose daemon is gone says so, and closes."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


@pytest.mark.slow
def test_a_killed_daemon_leaves_nothing_of_a_slab(own_pool):
    pool = own_pool(files=2, size="256M")
    write_file(pool.mount / "block", content(5 * MIB))
    run("sync", "-f", pool.mount)
    descriptor = make_slab(pool.mount / "slab", 64 * MIB)
    overwrite(descriptor, 64 * MIB, 50)
    write_file(pool.mount / "after", content(5 * MIB, 1))
    pool.kill()
    with raises_errno(errno.ENOTCONN, errno.EIO, errno.ECONNABORTED):
        direct_read(descriptor, PAGE, 0)
    _close_dead(descriptor)
    pool.remount()
    assert sorted(os.listdir(pool.mount)) == ["after", "block"]
    assert_same(read_file(pool.mount / "block"), content(5 * MIB), "a block from before")
    assert_same(read_file(pool.mount / "after"), content(5 * MIB, 1), "a block from beside it")
    assert slab_bytes(pool) == 0
    wait_until(lambda: pool.status()["segments"]["free"] + 4 > pool.status()["segments"]["count"] // 2, "free segments")
    again = make_slab(pool.mount / "slab", 64 * MIB)
    assert_same(direct_read(again, 4 * MIB, 0), bytes(4 * MIB), "a new slab")
    os.close(again)
    pool.umount()
    assert "nothing is damaged" in pool.command("fsck", str(pool.path), "--verify-data").stdout
    # Without its index too: slabs' segments are empty, whatever lies in them.
    pool.start()
    descriptor = make_slab(pool.mount / "slab", 64 * MIB)
    overwrite(descriptor, 64 * MIB, 20)
    pool.kill()
    _close_dead(descriptor)
    run("rm", "-r", pool.path / "index")
    pool.remount()
    pool.wait_rebuilt()
    assert sorted(os.listdir(pool.mount)) == ["after", "block"]
    assert_same(read_file(pool.mount / "block"), content(5 * MIB), "a block after the rebuild")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_slab_in_use_while_the_pool_evicts(own_pool):
    """Blocks of twice the pool pass by; the slab is never touched, and gets its room from them."""
    pool = own_pool(files=2, size="256M")
    for i in range(30):
        write_file(pool.mount / f"old-{i}", content(16 * MIB, i))
    descriptor = make_slab(pool.mount / "slab", 100 * MIB)
    stop = threading.Event()
    failures = []

    def hammer():
        turn = 0
        try:
            while not stop.is_set():
                at = turn % 100 * MIB
                direct_write(descriptor, content(MIB, turn), at)
                assert_same(direct_read(descriptor, MIB, at), content(MIB, turn), f"turn {turn}")
                turn += 1
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=hammer)
    thread.start()
    try:
        for i in range(64):
            write_file(pool.mount / f"new-{i}", content(16 * MIB, i))
            if i % 8 == 0:
                assert_same(read_file(pool.mount / f"new-{i}"), content(16 * MIB, i), "a block beside the slab")
    finally:
        stop.set()
        thread.join()
        os.close(descriptor)
    assert not failures, failures
    assert pool.status()["counters"]["evicted_segments"] > 10


@pytest.mark.slow
def test_a_device_with_a_slab_is_not_removed(own_pool):
    pool = own_pool(files=4, size="256M", format_args=("--stripe-width", "1"))
    descriptor = make_slab(pool.mount / "slab", 200 * MIB)
    try:
        shadow = overwrite(descriptor, 200 * MIB, 20)
        result = pool.command("device", "remove", str(pool.path), "0", check=False)
        assert result.returncode != 0
        assert "slab" in result.stderr, result.stderr
        overwrite(descriptor, 200 * MIB, 20, shadow=shadow)
    finally:
        os.close(descriptor)
    wait_until(lambda: slab_bytes(pool) == 0, "the slab's segments")
    pool.command("device", "remove", str(pool.path), "0")


def test_native_clients_miss_a_slab(own_pool):
    pool = own_pool(files=2, size="256M")
    name = b"slab".hex()
    (pool.mount / name[:2]).mkdir()
    code = """if True:
        import kvfs, sys
        with kvfs.connect(sys.argv[1], gpu=None, timeout_s=20) as client:
            assert client.exists(["slab", "block"]) == [False, True]
            assert client.sizes(["slab"]) == [None]
            assert client.get("slab") is None
            assert client.get_into([("slab", bytearray(4 << 20))]) == [None]
    """
    block = b"block".hex()
    (pool.mount / block[:2]).mkdir(exist_ok=True)
    write_file(pool.mount / block[:2] / block, content(MIB))
    descriptor = make_slab(pool.mount / name[:2] / name, 2 * MIB)
    try:
        direct_write(descriptor, content(2 * MIB), 0)
        run(sys.executable, "-c", code, pool.mount, environment=pool.environment)
        assert_same(direct_read(descriptor, MIB, 0), content(2 * MIB)[:MIB], "the slab")
    finally:
        os.close(descriptor)


def test_fallocate_with_a_mode_changes_nothing(directory):
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = make_slab(directory / "slab", MIB)
    try:
        direct_write(descriptor, content(MIB), 0)
        for mode in (1, 3, 16):
            assert libc.fallocate(descriptor, mode, ctypes.c_int64(0), ctypes.c_int64(MIB)) == -1
            assert ctypes.get_errno() == errno.EOPNOTSUPP
        assert_same(direct_read(descriptor, MIB, 0), content(MIB), "after refused modes")
    finally:
        os.close(descriptor)
