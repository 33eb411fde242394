"""Listing directories: types, large ones, positions, changes under way."""

import concurrent.futures
import ctypes
import os
import threading

import pytest
from helpers import libc, opened, repeated, write_file

ENTRIES = repeated(20_000)
DT_DIR, DT_REG, DT_LNK = 4, 8, 10


class Dirent(ctypes.Structure):
    _fields_ = (
        ("d_ino", ctypes.c_uint64),
        ("d_off", ctypes.c_int64),
        ("d_reclen", ctypes.c_uint16),
        ("d_type", ctypes.c_uint8),
        ("d_name", ctypes.c_char * 256),
    )


libc.opendir.restype = ctypes.c_void_p
libc.readdir.restype = ctypes.POINTER(Dirent)
libc.telldir.restype = ctypes.c_long
for _function in (libc.readdir, libc.telldir, libc.closedir, libc.rewinddir):
    _function.argtypes = [ctypes.c_void_p]
libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]


class DirectoryStream:
    """readdir(3) with positions, which os.scandir does not show."""

    def __init__(self, path):
        self._stream = libc.opendir(os.fsencode(path))
        assert self._stream, f"opendir {path}: {os.strerror(ctypes.get_errno())}"

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        libc.closedir(self._stream)

    def next(self):
        """Return (name, type, inode) of the next entry but . and .., or None at the end."""
        while True:
            ctypes.set_errno(0)
            entry = libc.readdir(self._stream)
            if not entry:
                assert ctypes.get_errno() == 0, os.strerror(ctypes.get_errno())
                return None
            name = entry.contents.d_name.decode()
            if name not in (".", ".."):
                return name, entry.contents.d_type, entry.contents.d_ino

    def rest(self):
        entries = []
        while (entry := self.next()) is not None:
            entries.append(entry)
        return entries

    def tell(self):
        return libc.telldir(self._stream)

    def seek(self, position):
        libc.seekdir(self._stream, position)

    def rewind(self):
        libc.rewinddir(self._stream)


@pytest.fixture(scope="module")
def large(mount):
    """A directory of ENTRIES empty files, made once."""
    path = mount / "large"
    path.mkdir()

    def create(index):
        os.close(os.open(path / f"{index:05d}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(create, range(ENTRIES)))
    yield path
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(os.unlink, [entry.path for entry in os.scandir(path)]))
    path.rmdir()


def test_entries_carry_their_types_and_inode_numbers(directory):
    write_file(directory / "file", b"x")
    (directory / "sub").mkdir()
    os.symlink("file", directory / "link")
    with DirectoryStream(directory) as stream:
        found = {name: (kind, number) for name, kind, number in stream.rest()}
    assert {name: kind for name, (kind, _) in found.items()} == {"file": DT_REG, "sub": DT_DIR, "link": DT_LNK}
    for name, (_, number) in found.items():
        assert number == os.lstat(directory / name).st_ino, name
    with os.scandir(directory) as entries:
        kinds = {
            entry.name: (entry.is_file(follow_symlinks=False), entry.is_dir(follow_symlinks=False), entry.is_symlink())
            for entry in entries
        }
    assert kinds == {"file": (True, False, False), "sub": (False, True, False), "link": (False, False, True)}


def test_empty_directory_lists_only_itself_and_its_parent(directory):
    (directory / "sub").mkdir()
    assert os.listdir(directory / "sub") == []
    with DirectoryStream(directory / "sub") as stream:
        assert stream.rest() == []


def test_file_being_written_is_listed_with_its_type(directory):
    with opened(directory / "block.tmp", os.O_CREAT | os.O_WRONLY) as descriptor:
        os.write(descriptor, b"x" * 5000)
        with DirectoryStream(directory) as stream:
            assert [(name, kind) for name, kind, _ in stream.rest()] == [("block.tmp", DT_REG)]


def test_scan_of_20000_entries_finds_each_exactly_once(large):
    expected = [f"{index:05d}" for index in range(ENTRIES)]
    with os.scandir(large) as entries:
        assert sorted(entry.name for entry in entries if entry.is_file()) == expected
    assert sorted(os.listdir(large)) == expected


def test_seekdir_returns_to_where_telldir_was(large):
    with DirectoryStream(large) as stream:
        positions = []
        order = []
        while True:
            position = stream.tell()
            entry = stream.next()
            if entry is None:
                break
            order.append(entry[0])
            if len(order) % 997 == 1:
                positions.append((position, entry[0]))
        assert len(order) == len(set(order)) == ENTRIES
        for position, name in positions[::-1] + positions:
            stream.seek(position)
            assert stream.next()[0] == name
        position, name = positions[len(positions) // 2]
        stream.seek(position)
        assert [entry[0] for entry in stream.rest()] == order[order.index(name) :]
        stream.rewind()
        assert len(stream.rest()) == ENTRIES


def test_names_that_stay_are_listed_exactly_once_while_others_come_and_go(large):
    """POSIX leaves open only whether a name added or removed during the scan is returned."""
    stay = {f"{index:05d}" for index in range(ENTRIES)}
    done = threading.Event()
    failures = []

    def churn(worker):
        try:
            step = 0
            while not done.is_set():
                # Between, before and after the names that stay.
                names = [f"{(step * 37) % ENTRIES:05d}-{worker}", f"-{worker}-{step % 50}", f"zz-{worker}-{step % 50}"]
                for name in names:
                    write_file(large / name, b"")
                for name in names:
                    os.unlink(large / name)
                step += 1
        except BaseException as error:  # for the main thread to raise
            failures.append(error)

    threads = [threading.Thread(target=churn, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            with os.scandir(large) as entries:
                names = [entry.name for entry in entries]
            of_stay = [name for name in names if name in stay]
            assert len(of_stay) == len(set(of_stay)), "a name twice"
            assert set(of_stay) == stay, "a name lost"
            assert all("-" in name for name in set(names) - stay)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failures, failures[0]


def test_names_removed_while_scanning_leave_the_rest_exactly_once(directory):
    """rm -r: the scan's own caller removes what it was given."""
    names = {f"{index:04d}" for index in range(repeated(3000))}
    for name in names:
        write_file(directory / name, b"")
    seen = []
    with os.scandir(directory) as entries:
        for entry in entries:
            seen.append(entry.name)
            os.unlink(entry.path)
    assert sorted(seen) == sorted(names)
    assert os.listdir(directory) == []


def test_scan_of_two_levels_finds_every_block(directory):
    """LMCache's GDS backend does this when it starts."""
    expected = set()
    for first in range(16):
        for second in range(4):
            (directory / f"{first:02x}" / f"{second:02x}").mkdir(parents=True)
            name = f"{first:02x}/{second:02x}/key.metadata"
            write_file(directory / name, b"{}")
            expected.add(name)
    found = set()
    for top in os.scandir(directory):
        for below in os.scandir(top.path):
            for entry in os.scandir(below.path):
                with opened(entry.path, os.O_RDONLY | os.O_NOATIME) as descriptor:
                    assert os.read(descriptor, 100) == b"{}"
                found.add(os.path.relpath(entry.path, directory))
    assert found == expected


def test_attributes_come_with_the_listing(own_pool):
    """A caller that asks for each entry's attributes as it is listed, as `ls -l` does, has the kernel ask for few of
    them."""
    count = 600
    pool = own_pool(files=1, size="256M")
    (pool.mount / "d").mkdir()
    for index in range(count):
        write_file(pool.mount / "d" / f"{index:03d}", b"x" * index)
    pool.remount()
    with opened(pool.mount / "d" / "005", os.O_WRONLY | os.O_APPEND) as descriptor:
        os.write(descriptor, b"y" * 4095)
        before = pool.status()["counters"]["lookups"]
        with DirectoryStream(pool.mount / "d") as stream:
            sizes = {name: os.stat(pool.mount / "d" / name).st_size for name, _, _ in iter(stream.next, None)}
        asked = pool.status()["counters"]["lookups"] - before
    assert sizes == {f"{index:03d}": 4100 if index == 5 else index for index in range(count)}
    if kernel_release() < (6, 16):
        pytest.skip("this kernel keeps no names of blocks: it cannot be told of evictions")
    assert asked < count // 3, f"{asked} lookups for {count} entries"


def kernel_release():
    return tuple(int(part) for part in os.uname().release.split(".")[:2])
