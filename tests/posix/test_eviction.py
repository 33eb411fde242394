"""Never full, never wrong: what an engine sees of eviction. kvfs only, each on a small pool of its own."""

import contextlib
import errno
import json
import os
import time

import pytest
from helpers import MIB, assert_same, content, opened, raises_errno, read_file, wait_until, write_file

import kvfs

BLOCK = 4 * MIB + 100


@pytest.mark.timeout(240)
def test_writing_twice_the_pool_evicts_and_never_fails(own_pool):
    """Afterwards each name is a whole block or ENOENT; what was open stayed readable; statvfs never said full."""
    pool = own_pool(files=4, size="128M")
    count = 2 * 4 * 128 * MIB // BLOCK
    (pool.mount / "kv").mkdir()
    with opened(pool.mount / "kv" / "held", os.O_CREAT | os.O_RDWR) as descriptor:
        os.write(descriptor, content(BLOCK, "held"))
    with opened(pool.mount / "kv" / "held", os.O_RDONLY) as held:
        for index in range(count):
            path = pool.mount / "kv" / f"{index:06d}"
            write_file(path.with_suffix(".tmp"), content(BLOCK, index))
            os.rename(path.with_suffix(".tmp"), path)
            if index % 16 == 0:
                figures = os.statvfs(pool.mount)
                assert (figures.f_blocks - figures.f_bavail) / figures.f_blocks < 0.70
        assert_same(os.pread(held, 2 * BLOCK, 0), content(BLOCK, "held"), "a block open all along")
    hits = 0
    for index in range(count):
        path = pool.mount / "kv" / f"{index:06d}"
        try:
            data = read_file(path)
        except FileNotFoundError:
            assert not os.access(path, os.F_OK), f"a stale hit on {path.name}"
            with raises_errno(errno.ENOENT):
                os.stat(path)
            continue
        assert_same(data, content(BLOCK, index), path.name)
        hits += 1
    assert 0 < hits < count, f"{hits} of {count} blocks are left"
    assert hits * BLOCK > 4 * 128 * MIB // 3, f"only {hits} blocks are left: the pool keeps too little"
    last = pool.mount / "kv" / f"{count - 1:06d}"
    assert_same(read_file(last), content(BLOCK, count - 1), "the newest block")
    assert len(os.listdir(pool.mount / "kv")) >= hits


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_evicted_names_can_be_stored_again(own_pool):
    pool = own_pool(files=4, size="64M")
    names = [pool.mount / f"{index:06d}" for index in range(2 * 4 * 64 * MIB // BLOCK)]
    for round_ in range(2):
        for path in names:
            write_file(path.with_suffix(".tmp"), content(BLOCK, (round_, path.name)))
            os.rename(path.with_suffix(".tmp"), path)
            assert_same(read_file(path), content(BLOCK, (round_, path.name)), f"{path.name} just stored")


@pytest.mark.timeout(240)
def test_when_everything_is_held_open_the_write_fails_not_the_close(own_pool):
    """ENOSPC comes from write(2), in good time, leaves what is held readable, and goes away with the handles."""
    pool = own_pool(files=4, size="64M")
    held = []
    failed = None
    try:
        for index in range(4 * 64 * MIB // BLOCK + 20):
            descriptor = os.open(pool.mount / f"{index:06d}", os.O_CREAT | os.O_EXCL | os.O_RDWR)
            held.append(descriptor)
            written = 0
            data = content(BLOCK, index)
            try:
                while written < BLOCK:
                    written += os.pwrite(descriptor, data[written:], written)
            except OSError as error:
                failed = error
                break
            os.close(held.pop())  # must not fail: what write() took is safe
            held.append(os.open(pool.mount / f"{index:06d}", os.O_RDONLY))
        assert failed is not None, "more was held than the pool can hold"
        assert failed.errno == errno.ENOSPC
        os.close(held.pop())
        assert len(held) * BLOCK > 4 * 64 * MIB // 4, f"full with {len(held)} blocks held"
        for index, descriptor in enumerate(held):
            assert_same(os.pread(descriptor, 2 * BLOCK, 0), content(BLOCK, index), f"held block {index}")
    finally:
        for descriptor in held:
            os.close(descriptor)
    for index in range(40):
        write_file(pool.mount / f"after-{index}", content(BLOCK, index))
    assert_same(read_file(pool.mount / "after-39"), content(BLOCK, 39), "a block written after the release")


@pytest.mark.slow
def test_unmount_and_mount_keep_every_block_and_name(own_pool):
    pool = own_pool(files=2, size="256M")
    os.makedirs(pool.mount / "a" / "b")
    for index in range(20):
        write_file(pool.mount / "a" / "b" / f"{index}", content(MIB + index, index))
    os.symlink("b/3", pool.mount / "a" / "link")
    os.setxattr(pool.mount / "a" / "b" / "3", "user.vllm.kv_crc32c", b"1234")
    os.chmod(pool.mount / "a" / "b" / "4", 0o600)
    os.utime(pool.mount / "a" / "b" / "4", ns=(10**18, 2 * 10**18))
    pool.umount()
    assert not (pool.mount / "a").exists()
    pool.start()
    assert sorted(os.listdir(pool.mount / "a" / "b"), key=int) == [f"{index}" for index in range(20)]
    for index in range(20):
        assert_same(read_file(pool.mount / "a" / "b" / f"{index}"), content(MIB + index, index), f"block {index}")
    assert read_file(pool.mount / "a" / "link") == content(MIB + 3, 3)
    assert os.getxattr(pool.mount / "a" / "b" / "3", "user.vllm.kv_crc32c") == b"1234"
    status = os.stat(pool.mount / "a" / "b" / "4")
    assert (status.st_mode & 0o7777, status.st_mtime_ns) == (0o600, 2 * 10**18)


@pytest.mark.parametrize("end", ["umount", "kill"])
def test_what_an_open_for_reading_cut_stays_cut(own_pool, end):
    """O_RDONLY|O_TRUNC empties the file, and no descriptor that could write is ever closed."""
    pool = own_pool(files=2, size="256M")
    for name in ("closed", "held"):
        write_file(pool.mount / name, content(MIB, name))
    with opened(pool.mount / "closed", os.O_RDONLY | os.O_TRUNC) as descriptor:
        assert os.fstat(descriptor).st_size == 0
    held = os.open(pool.mount / "held", os.O_RDONLY | os.O_TRUNC)
    os.fsync(held)
    if end == "umount":
        os.close(held)
        pool.umount()
    else:
        with opened(pool.mount, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            os.fsync(descriptor)
        pool.kill()
        with contextlib.suppress(OSError):
            os.close(held)
    pool.remount()
    for name in ("closed", "held"):
        assert os.stat(pool.mount / name).st_size == 0 and read_file(pool.mount / name) == b"", name


def test_killed_daemon_is_followed_by_misses_never_by_wrong_bytes(own_pool):
    """Fsynced files are there again; each other file is whole or missing."""
    pool = own_pool(files=2, size="256M")
    for index in range(20):
        write_file(pool.mount / f"{index}", content(MIB + index, index))
    with opened(pool.mount / "synced", os.O_CREAT | os.O_WRONLY) as descriptor:
        os.write(descriptor, content(MIB, "synced"))
        os.fsync(descriptor)
    with opened(pool.mount, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)
    for index in range(20, 40):
        write_file(pool.mount / f"{index}", content(MIB + index, index))
    pool.kill()
    with raises_errno(errno.ENOTCONN, errno.ECONNABORTED, errno.EIO):
        os.stat(pool.mount / "3")
    pool.remount()
    assert_same(read_file(pool.mount / "synced"), content(MIB, "synced"), "a synced block")
    for index in range(40):
        try:
            data = read_file(pool.mount / f"{index}")
        except FileNotFoundError:
            assert index >= 20, f"block {index} was synced"
            continue
        assert_same(data, content(MIB + index, index), f"block {index}")
    write_file(pool.mount / "after", b"works")
    assert read_file(pool.mount / "after") == b"works"


def test_status_is_json_with_a_version_and_the_devices(own_pool):
    pool = own_pool(files=3, size="128M")
    status = pool.status()
    assert "version" in status
    assert len(status["devices"]) == 3


@pytest.mark.slow
def test_files_just_closed_stay_while_older_blocks_are_there(own_pool):
    """Between close and rename an engine's temporary file has nobody who holds it. It is in the newest segment of its
    stream, which may be the emptiest one. Still all blocks that libkvfs stored before go first."""
    pool = own_pool(files=4, size="64M")
    with kvfs.connect(pool.mount, "old", gpu=None) as client:
        block = content(MIB // 4)
        written = 0

        def put(size):
            nonlocal written
            for _ in range(size // (4 * MIB)):
                client.put([(f"{written + i}", block) for i in range(16)])
                written += 16

        put(512 * MIB)
        (pool.mount / "new").mkdir()
        for index in range(64):
            write_file(pool.mount / "new" / f"{index}.tmp", content(MIB // 16, index))
            write_file(pool.mount / "new" / "junk", content(MIB // 16))
            os.unlink(pool.mount / "new" / "junk")
        for _ in range(4):  # less than the quarter that goes last; which that is is looked up once a second
            put(8 * MIB)
            time.sleep(1.1)
        for index in range(64):
            os.rename(pool.mount / "new" / f"{index}.tmp", pool.mount / "new" / f"{index}")


@pytest.mark.timeout(240)
def test_in_a_full_pool_a_write_to_what_ftruncate_added_fails_not_the_close(own_pool):
    """ftruncate(2) takes no space, so nobody has asked for it when the bytes come."""
    pool = own_pool(files=2, size="32M")
    write_file(pool.mount / "before", content(BLOCK))
    full = None
    for index in range(2 * 32 * MIB // BLOCK + 20):
        path = pool.mount / f"pinned-{index}"
        with opened(path, os.O_CREAT | os.O_WRONLY) as descriptor:
            os.setxattr(descriptor, "user.kvfs.pin", b"1")
            try:
                for at in range(0, BLOCK, MIB):
                    part = content(BLOCK, index)[at : at + MIB]
                    assert os.pwrite(descriptor, part, at) == len(part)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                full = index
                path.unlink()
                break
    assert full, "more was pinned than the pool can hold"
    descriptor = os.open(pool.mount / "late", os.O_CREAT | os.O_WRONLY)
    try:
        os.ftruncate(descriptor, 4 * BLOCK)
        with raises_errno(errno.ENOSPC):
            for at in range(0, 4 * BLOCK, MIB):
                os.pwrite(descriptor, content(MIB, at), at)
    finally:
        os.unlink(pool.mount / "late")
        os.close(descriptor)  # must not fail
    for index in range(full):
        assert_same(read_file(pool.mount / f"pinned-{index}"), content(BLOCK, index), f"pinned block {index}")


def test_evict_all_takes_hot_files_too_and_names_what_stays(own_pool):
    pool = own_pool(files=2, size="128M")
    names = [pool.mount / f"{index}" for index in range(12)]
    for index, path in enumerate(names):
        write_file(path, content(MIB, index))
    for _ in range(4):  # hot: a copy of each would be worth its price
        for index, path in enumerate(names):
            assert_same(read_file(path), content(MIB, index), path.name)
    pool.command("pin", str(names[3]))
    with opened(names[5], os.O_RDONLY) as held, opened(pool.mount / "new", os.O_CREAT | os.O_WRONLY) as written:
        os.write(written, b"not sealed yet")

        def left():
            """The blocks that stay, once the kernel has given the other handles back: that comes after their
            close()."""
            result = json.loads(pool.command("evict", str(pool.mount), "--all", "-o", "json").stdout)
            return sorted(os.listdir(pool.mount)) == ["3", "5", "new"] and result["kept"]

        kept = wait_until(left, "the eviction of all that is neither pinned nor open")
        assert {why: (part["blocks"], part["names"]) for why, part in kept.items()} == {
            "pinned": (1, ["/3"]),
            "open": (2, ["/5", "/new"]),
        }
        assert kept["pinned"]["bytes"] > MIB and kept["open"]["bytes"] > MIB
        shown = pool.command("evict", str(pool.mount), "--all").stdout
        assert "pinned: /3" in shown and "open: /5, /new" in shown
        assert_same(os.pread(held, 2 * MIB, 0), content(MIB, 5), "the block that is open")
        assert_same(read_file(names[3]), content(MIB, 3), "the block that is pinned")
    short = pool.command("evict", str(pool.mount), "--size", "100G", check=False)
    assert short.returncode == 1 and "could be evicted" in short.stderr
