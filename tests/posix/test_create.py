"""Creating, opening and naming files and directories; the errors that go with each."""

import concurrent.futures
import errno
import os
import stat

import pytest
from helpers import content, opened, raises_errno, read_file, repeated, write_file


def test_created_file_is_there_with_its_exact_size_and_mode(directory):
    path = directory / "block.bin"
    write_file(path, content(1_124_352 + 1), mode=0o640)
    status = path.stat()
    assert status.st_size == 1_124_353
    assert stat.S_IMODE(status.st_mode) == 0o640 & ~_umask()
    assert stat.S_ISREG(status.st_mode)
    assert status.st_nlink == 1


def test_empty_file_has_size_zero_and_reads_empty(directory):
    write_file(directory / "empty", b"")
    assert (directory / "empty").stat().st_size == 0
    assert read_file(directory / "empty") == b""


def test_exclusive_create_of_an_existing_name_is_eexist_and_harmless(directory):
    path = directory / "block.tmp"
    write_file(path, content(5000))
    with raises_errno(errno.EEXIST):
        os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_TRUNC)
    assert read_file(path) == content(5000)


def test_exclusive_create_succeeds_for_exactly_one_of_many_threads(directory):
    def attempt(_index):
        try:
            os.close(os.open(directory / "lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        for _ in range(20):
            assert sum(threads.map(attempt, range(16))) == 1
            (directory / "lock").unlink()


def test_open_with_truncate_discards_the_content_at_once(directory):
    path = directory / "block"
    write_file(path, content(100_000))
    with opened(path, os.O_WRONLY | os.O_TRUNC) as descriptor:
        assert path.stat().st_size == 0
        assert os.write(descriptor, b"new") == 3
    assert read_file(path) == b"new"


def test_open_without_truncate_keeps_the_tail(directory):
    path = directory / "block"
    write_file(path, content(100_000))
    write_file(path, b"x" * 10, flags=os.O_CREAT | os.O_WRONLY)
    assert read_file(path) == b"x" * 10 + content(100_000)[10:]


def test_missing_name_is_enoent_for_every_call(directory):
    missing = directory / "missing"
    for call in (os.stat, os.lstat, os.unlink, os.rmdir, os.listdir, os.readlink, os.listxattr):
        with raises_errno(errno.ENOENT):
            call(missing)
    with raises_errno(errno.ENOENT):
        os.open(missing, os.O_RDONLY)
    with raises_errno(errno.ENOENT):
        os.open(missing / "child", os.O_CREAT | os.O_WRONLY)
    with raises_errno(errno.ENOENT):
        os.rename(missing, directory / "other")
    with raises_errno(errno.ENOENT):
        os.truncate(missing, 0)
    assert not os.access(missing, os.F_OK)


def test_a_miss_becomes_a_hit_and_a_miss_again_at_once(directory):
    path = directory / "block"
    for round_ in range(50):
        assert not os.access(path, os.F_OK)
        assert not path.exists()
        write_file(path, content(4096, round_))
        assert os.access(path, os.F_OK)
        assert read_file(path) == content(4096, round_)
        path.unlink()


def test_lookup_batches_tell_hits_from_misses(directory):
    count = 2 * repeated(512)
    present = {f"{index:064x}" for index in range(0, count, 2)}
    for name in present:
        write_file(directory / name, name.encode())
    names = [f"{index:064x}" for index in range(count)]
    for _ in range(4):
        assert {name for name in names if os.access(directory / name, os.F_OK)} == present
        assert {name for name in names if os.path.isfile(directory / name)} == present


def test_a_file_is_not_a_directory(directory):
    write_file(directory / "file", b"x")
    for call in (os.listdir, os.rmdir):
        with raises_errno(errno.ENOTDIR):
            call(directory / "file")
    for call in (os.stat, os.unlink, os.mkdir):
        with raises_errno(errno.ENOTDIR):
            call(directory / "file" / "child")
    with raises_errno(errno.ENOTDIR):
        os.open(directory / "file", os.O_RDONLY | os.O_DIRECTORY)
    with raises_errno(errno.ENOTDIR):
        os.open(directory / "file" / "child", os.O_CREAT | os.O_WRONLY)


def test_a_directory_is_not_a_file(directory):
    (directory / "sub").mkdir()
    with raises_errno(errno.EISDIR):
        os.open(directory / "sub", os.O_WRONLY)
    with raises_errno(errno.EISDIR):
        os.open(directory / "sub", os.O_RDWR)
    with raises_errno(errno.EISDIR, errno.EPERM):
        os.unlink(directory / "sub")
    with raises_errno(errno.EISDIR):
        os.truncate(directory / "sub", 0)
    with opened(directory / "sub", os.O_RDONLY) as descriptor, raises_errno(errno.EISDIR):
        os.read(descriptor, 1)


def test_rmdir_of_a_full_directory_is_enotempty(directory):
    (directory / "sub").mkdir()
    write_file(directory / "sub" / "file", b"x")
    with raises_errno(errno.ENOTEMPTY):
        os.rmdir(directory / "sub")
    os.unlink(directory / "sub" / "file")
    os.rmdir(directory / "sub")
    assert not (directory / "sub").exists()


def test_mkdir_of_an_existing_name_is_eexist(directory):
    (directory / "sub").mkdir()
    write_file(directory / "file", b"x")
    for name in ("sub", "file"):
        with raises_errno(errno.EEXIST):
            os.mkdir(directory / name)


def test_directory_link_counts_follow_posix_or_stay_one(directory):
    (directory / "sub").mkdir()
    before = directory.stat().st_nlink
    (directory / "sub2").mkdir()
    after = directory.stat().st_nlink
    assert (before, after) == (3, 4) or before == after, (before, after)
    assert stat.S_ISDIR((directory / "sub").stat().st_mode)


@pytest.mark.timeout(180)
def test_thousands_of_directories_by_makedirs_from_eight_threads(directory):
    """vLLM makes 4,096 x 256 of them; each of its threads makes whatever is missing of its path."""
    count = repeated(400)
    paths = [directory / "model_r0" / f"{index % count:03x}" / f"{index // count:02x}_g0" for index in range(7 * count)]

    def make(path):
        os.makedirs(path, exist_ok=True)
        os.makedirs(path, exist_ok=True)
        return path.is_dir()

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert all(threads.map(make, paths + paths[::-1]))
    assert sorted(os.listdir(directory / "model_r0")) == [f"{index:03x}" for index in range(count)]
    assert sorted(os.listdir(directory / "model_r0" / "003")) == [f"{index:02x}_g0" for index in range(7)]


def test_names_of_255_bytes_work_and_256_are_enametoolong(directory):
    longest, too_long = b"n" * 255, b"n" * 256
    root = os.fsencode(directory)
    write_file(os.path.join(root, longest), b"x")
    assert os.listdir(root) == [longest]
    for call in (os.stat, os.unlink, os.mkdir):
        with raises_errno(errno.ENAMETOOLONG):
            call(os.path.join(root, too_long))
    with raises_errno(errno.ENAMETOOLONG):
        os.open(os.path.join(root, too_long), os.O_CREAT | os.O_WRONLY)
    with raises_errno(errno.ENAMETOOLONG):
        os.rename(os.path.join(root, longest), os.path.join(root, too_long))
    os.rename(os.path.join(root, longest), os.path.join(root, b"m" * 255))
    assert os.listdir(root) == [b"m" * 255]


def test_names_are_bytes_not_text(directory):
    root = os.fsencode(directory)
    names = {b"\xff\xfe", b"caf\xe9", "zo\u00eb".encode(), b"new\nline", b"a b", b"back\\slash", b"\x01", b"..."}
    for name in names:
        write_file(os.path.join(root, name), name)
    assert set(os.listdir(root)) == names
    for name in names:
        assert read_file(os.path.join(root, name)) == name
        os.rename(os.path.join(root, name), os.path.join(root, name + b"\xff"))
    assert set(os.listdir(root)) == {name + b"\xff" for name in names}


def test_names_that_differ_in_case_only_are_different(directory):
    write_file(directory / "Block", b"1")
    write_file(directory / "block", b"2")
    assert (read_file(directory / "Block"), read_file(directory / "block")) == (b"1", b"2")


def test_deep_paths_work(directory):
    deep = directory
    for level in range(64):
        deep = deep / f"level-{level:02d}"
    deep.mkdir(parents=True)
    write_file(deep / "block", content(10_000))
    assert read_file(deep / "block") == content(10_000)
    # The same by relative steps, past PATH_MAX.
    here = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    made = 0
    try:
        for _ in range(20):
            os.mkdir("d" * 250, dir_fd=here)
            below = os.open("d" * 250, os.O_RDONLY | os.O_DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
            made += 1
        descriptor = os.open("bottom", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=here)
        os.close(descriptor)
        assert os.listdir(here) == ["bottom"]
    finally:
        os.close(here)
    assert made == 20


def test_dot_dot_leads_to_the_parent(directory):
    (directory / "a" / "b").mkdir(parents=True)
    with opened(directory / "a" / "b", os.O_RDONLY | os.O_DIRECTORY) as below:
        assert os.stat("..", dir_fd=below).st_ino == (directory / "a").stat().st_ino
    os.rename(directory / "a" / "b", directory / "b")
    with opened(directory / "b", os.O_RDONLY | os.O_DIRECTORY) as below:
        assert os.stat("..", dir_fd=below).st_ino == directory.stat().st_ino


def test_nofollow_refuses_a_symlink_with_eloop(directory):
    write_file(directory / "file", b"x")
    os.symlink("file", directory / "link")
    with raises_errno(errno.ELOOP):
        os.open(directory / "link", os.O_RDONLY | os.O_NOFOLLOW)
    with raises_errno(errno.ELOOP):
        os.open(directory / "link", os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW)
    with opened(directory / "file", os.O_RDONLY | os.O_NOFOLLOW) as descriptor:
        assert os.read(descriptor, 10) == b"x"


def test_file_created_read_only_can_still_be_written_by_its_descriptor(directory):
    path = directory / "block"
    with opened(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o400) as descriptor:
        assert os.write(descriptor, content(9000)) == 9000
        assert os.pread(descriptor, 9000, 0) == content(9000)
    assert read_file(path) == content(9000)
    assert stat.S_IMODE(path.stat().st_mode) == 0o400


def test_inode_numbers_are_distinct_and_stay_with_their_file(directory):
    numbers = {}
    for index in range(200):
        write_file(directory / f"{index}", b"%d" % index)
        numbers[index] = (directory / f"{index}").stat().st_ino
    assert len(set(numbers.values())) == 200
    for index, number in numbers.items():
        os.rename(directory / f"{index}", directory / f"renamed-{index}")
        with opened(directory / f"renamed-{index}", os.O_RDONLY) as descriptor:
            assert os.fstat(descriptor).st_ino == number


def _umask():
    current = os.umask(0)
    os.umask(current)
    return current


def test_a_block_is_stored_with_few_requests(own_pool):
    """As engines do: asked for, written under another name, renamed. The kernel itself asks for two names that are not
    there and twice for the directory's mode, and sends CREATE, WRITE, FLUSH, RELEASE and RENAME."""
    if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) < (6, 16):
        pytest.skip("needs FUSE_NOTIFY_INC_EPOCH (Linux 6.16): before it the kernel caches no names")
    pool = own_pool()
    directory = pool.mount / "blocks"
    directory.mkdir()

    def requests():
        return pool.status()["counters"]["requests"]

    def store(turn):
        before = requests()
        for i in range(50):
            path = directory / f"{turn}-{i}.bin"
            assert not path.exists()
            write_file(directory / f".{i}.tmp", content(65_536))
            (directory / f".{i}.tmp").rename(path)
        return (requests() - before) / 50

    # The kernel may have to give cached entries back meanwhile, as to another test's drop_caches.
    assert min(store(turn) for turn in range(3)) < 11
    assert all(read_file(directory / f"0-{i}.bin") == content(65_536) for i in range(50))


def test_attributes_of_a_new_file_follow_what_is_written_at_once(directory):
    """The kernel keeps those that came with CREATE for a moment."""
    path = directory / "block"
    with opened(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as descriptor:
        assert os.fstat(descriptor).st_size == 0
        os.write(descriptor, content(5000))
        assert (os.fstat(descriptor).st_size, path.stat().st_size) == (5000, 5000)
        os.ftruncate(descriptor, 100)
        assert (os.fstat(descriptor).st_size, path.stat().st_size) == (100, 100)
        os.fchmod(descriptor, 0o600)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        os.utime(descriptor, ns=(10**18, 10**18))
        assert path.stat().st_mtime_ns == 10**18
    with opened(path, os.O_WRONLY | os.O_APPEND) as descriptor:
        os.write(descriptor, b"end")
    assert read_file(path) == content(5000)[:100] + b"end"
