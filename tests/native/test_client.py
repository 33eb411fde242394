"""kvfs.connect(): what is put is read, by key and as a file of the mount; batches, replacement, deletion, lists."""

import concurrent.futures
import errno
import os
import subprocess
import sys
import threading
import time

import pytest
from helpers import KIB, MIB, REPOSITORY, assert_same, content, opened, read_file, wait_until, write_file

import kvfs
from kvfs.errors import ClientError, InvalidKeyError, KvfsError, NotMountedError, PutError

SIZES = [0, 1, 4095, 4096, 4097, 128 * KIB, MIB + 1, 2 * MIB, 9 * MIB]


def store_file(path, data):
    """As engines do: a temporary file, renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    write_file(temporary, data)
    os.rename(temporary, path)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_put_is_read_by_key_and_as_a_file(client, block_path, size):
    data = content(size, size)
    client.put([(b"key", data)])
    assert client.exists([b"key"]) == [True]
    assert client.sizes([b"key"]) == [size]
    destination = client.buffer(size)
    assert client.get_into([(b"key", destination)]) == [size]
    assert_same(destination, data, "get_into")
    assert_same(client.get(b"key"), data, "get")
    assert_same(read_file(block_path(b"key")), data, "the file")
    status = os.stat(block_path(b"key"))
    assert (status.st_size, status.st_mode, status.st_uid) == (size, 0o100644, os.getuid())


@pytest.mark.parametrize("size", SIZES)
def test_a_file_is_a_block(client, block_path, size):
    data = content(size, size)
    store_file(block_path(b"key"), data)
    assert client.exists([b"key"]) == [True]
    assert client.sizes([b"key"]) == [size]
    assert_same(client.get(b"key"), data, "get")


def test_the_pool_s_own_directory_is_as_good_as_its_mount_point(own_pool):
    pool = own_pool(files=2, size="64M")
    data = content(MIB, 1)
    with kvfs.connect(pool.path, "team/llama", gpu=None) as client:
        client.put([(b"key", data)])
        assert_same(read_file(pool.mount / "team" / "llama" / b"key".hex()[:2] / b"key".hex()), data, "the file")
        store_file(pool.mount / "team" / "llama" / b"two".hex()[:2] / b"two".hex(), data)
        assert_same(client.get(b"two"), data, "get")
    pool.umount()
    with pytest.raises(NotMountedError, match=f"it is not mounted; kvfs mount {pool.path} MOUNTPOINT serves it"):
        kvfs.connect(pool.path, gpu=None)
    with pytest.raises(KvfsError, match=f"not on a kvfs mount: .*; kvfs mount POOL {pool.mount} mounts a pool there"):
        kvfs.connect(pool.mount, gpu=None)
    assert pool.status()["advice"] == [f"kvfs mount {pool.path} MOUNTPOINT serves it"]
    listed = pool.command("list", str(pool.path), check=False)
    assert listed.stderr == f"kvfs: {pool.path}: not mounted: kvfs mount {pool.path} MOUNTPOINT\n"


def test_a_file_that_is_being_written_is_a_miss_until_it_is_closed(client, block_path):
    client.put([(b"key2", b"makes the directories")])
    path = block_path(b"key")
    with opened(path, os.O_CREAT | os.O_WRONLY) as descriptor:
        os.write(descriptor, b"half")
        assert client.exists([b"key"]) == [False]
        assert client.get(b"key") is None
        os.write(descriptor, b" and half")
    assert bytes(client.get(b"key")) == b"half and half"


def test_blocks_of_several_extents(own_pool):
    pool = own_pool(files=2, size="128M", format_args=("--segment-size", "4M"))
    sizes = [3 * MIB, 9 * MIB, 9 * MIB + 1, 17 * MIB + 4097]
    with kvfs.connect(pool.mount, gpu=None) as client:
        client.put([(f"key {size}", content(size, size)) for size in sizes])
        for size in sizes:
            assert_same(client.get(f"key {size}"), content(size, size), f"get of {size} bytes")
            name = f"key {size}".encode().hex()
            assert_same(read_file(pool.mount / name[:2] / name), content(size, size), f"file of {size} bytes")
            name = f"file {size}".encode().hex()
            store_file(pool.mount / name[:2] / name, content(size, -size))
            assert_same(client.get(f"file {size}"), content(size, -size), f"get of a file of {size} bytes")
    pool.umount()
    assert pool.command("fsck", str(pool.path)).returncode == 0
    pool.start()
    with kvfs.connect(pool.mount, gpu=None) as client:
        for size in sizes:
            assert_same(client.get(f"key {size}"), content(size, size), f"{size} bytes after a remount")


def test_a_put_replaces_a_block(client, block_path):
    for version in range(4):
        data = content(100_000 * version + version, version)
        client.put([(b"key", data)])
        assert_same(client.get(b"key"), data, f"version {version}")
        assert_same(read_file(block_path(b"key")), data, f"file of version {version}")
    write_file(block_path(b"key"), b"by file")
    assert bytes(client.get(b"key")) == b"by file"
    client.put([(b"key", b"by key")])
    assert read_file(block_path(b"key")) == b"by key"
    assert list(client.list()) == [b"key"]


def test_an_open_file_keeps_its_content_when_a_put_replaces_it(client, block_path):
    client.put([(b"key", content(300_000, "old"))])
    with opened(block_path(b"key"), os.O_RDONLY) as descriptor:
        client.put([(b"key", content(10_000, "new"))])
        assert_same(os.pread(descriptor, MIB, 0), content(300_000, "old"), "the old content")
    assert_same(client.get(b"key"), content(10_000, "new"), "the new content")


def test_a_put_over_a_file_that_is_being_written_wins_over_it_or_loses_whole(client, block_path):
    client.put([(b"key", b"old")])
    with opened(block_path(b"key"), os.O_WRONLY | os.O_TRUNC) as descriptor:
        os.write(descriptor, b"by file")
        client.put([(b"key", b"by key")])
        assert bytes(client.get(b"key")) == b"by key"
    assert bytes(client.get(b"key")) == b"by key"
    assert read_file(block_path(b"key")) == b"by key"


def test_a_put_over_a_directory_is_an_error_of_that_key(client, block_path):
    block_path(b"dir").mkdir(parents=True)
    with pytest.raises(PutError, match="1 of 2 blocks were not stored: key b'dir', 3 bytes: there is a dir") as caught:
        client.put([(b"file", b"two"), (b"dir", b"one")])
    assert list(caught.value.failed) == [b"dir"]
    assert caught.value.failed[b"dir"].errno == errno.EISDIR
    assert bytes(client.get(b"file")) == b"two"


def test_keys_of_every_kind(client, block_path):
    keys = [b"\0", b"\xff" * 127, "ключ", "a/b", "..", "k" * 127, b"key", "key2"]
    client.put([(key, repr(key).encode()) for key in keys])
    assert client.exists(keys) == [True] * len(keys)
    assert client.exists(key for key in keys) == [True] * len(keys)
    assert client.exists(tuple(keys)) == [True] * len(keys)
    for key in keys:
        assert bytes(client.get(key)) == repr(key).encode()
        assert read_file(block_path(key)) == repr(key).encode()
    assert bytes(client.get("key")) == b"b'key'", "a str is its UTF-8"
    assert sorted(client.list()) == sorted(key if isinstance(key, bytes) else key.encode() for key in keys)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (b"", "key b'': 0 bytes, 1 to 255"),
        ("", "0 bytes"),
        (b"k" * 256, r"key b'k{32}'... \(256 bytes\): 256 bytes, 1 to 255"),
        ("ü" * 128, "256 bytes"),
        (7, "key 7: bytes or str are expected, not int"),
        (None, "not NoneType"),
        (bytearray(b"key"), "not bytearray"),
        ("\ud800", "no UTF-8"),
    ],
)
def test_a_key_that_cannot_be_is_named(client, key, words):
    for call in (client.exists, client.sizes, client.delete, client.prestage):
        with pytest.raises(InvalidKeyError, match=words):
            call([b"good", key])
    with pytest.raises(InvalidKeyError, match=words):
        client.put([(b"good", b"data"), (key, b"data")])
    with pytest.raises(InvalidKeyError, match=words):
        client.get_into([(b"good", bytearray(4)), (key, bytearray(4))])
    with pytest.raises(InvalidKeyError, match=words):
        client.get(key)
    assert client.exists([b"good"]) == [False]


def test_one_key_in_the_place_of_a_list_is_an_error(client):
    for call in (client.exists, client.sizes, client.delete, client.prestage):
        for key in (b"key", "key"):
            with pytest.raises(InvalidKeyError, match="a list of keys is expected"):
                call(key)


def test_items_that_are_no_pairs_are_an_error(client):
    for items in ([b"key"], [(b"key", b"data", 1)], [7]):
        for call in (client.put, client.get_into):
            with pytest.raises(TypeError, match="pairs of key and memory"):
                call(items)


def test_an_empty_batch_is_an_empty_result(client):
    before = client.statistics()
    assert client.put([]) == client.exists([]) == client.sizes([]) == client.get_into([]) == client.delete([]) == []
    assert client.prestage([]) == 0
    assert list(client.list()) == []
    assert client.statistics() == before


def test_misses_are_none_and_leave_the_rest_of_the_batch_alone(client):
    client.put([(b"here", content(5000))])
    destinations = [bytearray(5000) for _ in range(3)]
    keys = [b"gone", b"here", b"hers"]
    assert client.exists(keys) == [False, True, False]
    assert client.sizes(keys) == [None, 5000, None]
    assert client.get_into(zip(keys, destinations, strict=True)) == [None, 5000, None]
    assert destinations[1] == content(5000)
    assert client.get(b"gone") is None
    assert client.delete([b"gone"]) == [False]


def test_the_same_key_twice_is_answered_twice_and_is_an_error_in_a_put(client):
    client.put([(b"key", content(5000))])
    assert client.exists([b"key", b"no", b"key"]) == [True, False, True]
    assert client.sizes([b"key", b"key"]) == [5000, 5000]
    first, second = bytearray(5000), bytearray(5000)
    assert client.get_into([(b"key", first), ("key", second)]) == [5000, 5000]
    assert first == second == content(5000)
    with pytest.raises(InvalidKeyError, match="key b'key': twice"):
        client.put([(b"other", b"x"), (b"key", b"one"), ("key", b"two")])
    assert client.exists([b"other"]) == [False]
    assert bytes(client.get(b"key")) == content(5000)
    assert client.delete([b"key", b"key"]) == [True, False]


def test_a_batch_of_5000_blocks_and_the_list_of_them(client):
    keys = [f"{number:05}".encode() for number in range(5000)]
    client.put((key, key * 20) for key in keys)
    assert client.exists(keys) == [True] * 5000
    assert client.sizes(keys) == [100] * 5000
    memory = client.buffer(5000 * 128)
    destinations = [memory[128 * i : 128 * i + 100] for i in range(5000)]
    assert client.get_into(zip(keys, destinations, strict=True)) == [100] * 5000
    for key, destination in zip(keys, destinations, strict=True):
        assert destination == key * 20
    assert list(client.list()) == keys
    assert list(client.list(after=keys[4094])) == keys[4095:]
    assert list(client.list(after=b"02")) == keys[2000:]
    assert list(client.list(after=keys[-1])) == []
    gone = keys[::2]
    assert client.delete([*gone, b"never"]) == [True] * 2500 + [False]
    assert client.exists(keys) == [False, True] * 2500
    assert list(client.list()) == keys[1::2]


def test_a_list_is_in_byte_order_over_keys_of_many_sizes(client):
    keys = [os.urandom(1 + i % 127) for i in range(600)]
    client.put((key, b"x") for key in set(keys))
    expected = sorted(set(keys))
    assert list(client.list()) == expected
    assert list(client.list(after=expected[300])) == expected[301:]


def test_a_list_passes_over_files_that_are_no_blocks(client, block_path, directory):
    client.put([(b"key", b"data"), (b"kez", b"data")])
    shard = block_path(b"key").parent
    write_file(shard / "notes.txt", b"no hex")
    write_file(shard / "6b6", b"half a byte")
    write_file(shard / "6B65", b"upper case")
    write_file(shard / "00ff", b"of another shard")
    write_file(directory / "llama" / "readme", b"no shard")
    (shard / "6b6c").mkdir()
    assert list(client.list()) == [b"key", b"kez"]


def test_a_deleted_block_is_gone_from_the_mount_and_the_reverse(client, block_path):
    client.put([(b"one", b"1"), (b"two", b"2")])
    assert client.delete([b"one"]) == [True]
    assert not block_path(b"one").exists()
    os.unlink(block_path(b"two"))
    assert client.exists([b"one", b"two"]) == [False, False]
    assert client.get_into([(b"two", bytearray(1))]) == [None]


def test_namespaces_are_apart(directory):
    def connect(path, namespace):
        return kvfs.connect(path, namespace, gpu=None)

    with connect(directory, "a") as a, connect(directory, "b/c") as c, connect(directory, "") as none:
        a.put([(b"key", b"a")])
        c.put([(b"key", b"c")])
        none.put([(b"key", b"none")])
        assert [bytes(client.get(b"key")) for client in (a, c, none)] == [b"a", b"c", b"none"]
        assert read_file(directory / "b/c/6b/6b6579") == b"c"
        assert [list(client.list()) for client in (a, c, none)] == [[b"key"]] * 3
        with connect(directory / "b", "c") as again:
            assert bytes(again.get(b"key")) == b"c"
            assert again.delete([b"key"]) == [True]
        assert c.exists([b"key"]) == [False]


@pytest.mark.parametrize("namespace", ["/absolute", "..", "a/../b", "a//b", "a/", ".", "x" * 256, "y/" * 600 + "y"])
def test_a_namespace_that_is_no_relative_path_is_an_error(directory, namespace):
    with pytest.raises(ClientError, match="namespace") as caught:
        kvfs.connect(directory, namespace, gpu=None)
    assert caught.value.errno == errno.EINVAL


def test_a_namespace_that_does_not_exist_is_empty(directory):
    with kvfs.connect(directory, "none/yet", gpu=None) as client:
        assert client.exists([b"key"]) == [False]
        assert client.get(b"key") is None
        assert client.sizes([b"key"]) == [None]
        assert client.delete([b"key"]) == [False]
        assert list(client.list()) == []
        assert client.prestage([b"key"]) == 0
        assert not (directory / "none").exists()


def test_prestaged_blocks_are_taken_from_memory_and_counted(client):
    blocks = {f"key {i}": content(300_000 + i, i) for i in range(10)}
    client.put(blocks.items())
    assert client.prestage([*blocks, "none"]) == 10
    assert client.prestage(blocks) == 0, "they are there"
    for key, data in blocks.items():
        destination = bytearray(len(data))
        assert client.get_into([(key, destination)]) == [len(data)]
        assert_same(destination, data, key)
    statistics = client.statistics()
    assert (statistics.prestaged, statistics.prestage_used, statistics.prestage_wasted) == (10, 10, 0)


def test_a_replaced_block_is_never_taken_from_what_was_prestaged(client):
    client.put([(b"key", content(100_000, "old"))])
    assert client.prestage([b"key"]) == 1
    client.put([(b"key", content(100_000, "new"))])
    assert_same(client.get(b"key"), content(100_000, "new"), "the new block")


def test_prestaging_is_bounded_and_the_oldest_go(directory):
    with kvfs.connect(directory, "llama", staging_size=8 * MIB, gpu=None) as client:
        blocks = {f"key {i}": content(2 * MIB, i) for i in range(12)}
        client.put(blocks.items())
        for key in blocks:
            wait_until(lambda key=key: client.prestage([key]) == 1, "room for the next")
        for key, data in blocks.items():
            assert_same(client.get(key), data, key)
        statistics = client.statistics()
        assert statistics.prestage_used <= 4
        assert statistics.prestaged == statistics.prestage_used + statistics.prestage_wasted
        assert statistics.prestage_wasted >= 4


def test_statistics_count_what_was_done(client):
    assert client.statistics().gets == 0
    client.put([(b"a", content(5000)), (b"b", content(7000))])
    client.get_into([(b"a", client.buffer(8192)), (b"b", client.buffer(8192)), (b"c", client.buffer(1))])
    client.exists([b"a", b"b"])
    client.delete([b"a"])
    statistics = client.statistics()
    assert (statistics.puts, statistics.put_bytes, statistics.deletes) == (2, 12_000, 1)
    assert (statistics.gets, statistics.get_bytes, statistics.hits, statistics.misses) == (2, 12_000, 2, 1)
    assert statistics.lookups >= 5
    assert (statistics.busy, statistics.timeouts, statistics.checksum_errors) == (0, 0, 0)


def test_information_says_what_it_is_connected_to(client, service):
    information = client.information()
    assert information.connected and information.writable
    assert information.device_count == service.pool.files
    assert information.memory_alignment in (4, 512, 4096)
    assert information.pool == str(service.pool.path)
    assert str(information.pool_uuid) == service.pool.status()["pool"]["uuid"]


def test_a_client_that_only_reads(directory, client):
    client.put([(b"key", b"data")])
    with kvfs.connect(directory, "llama", read_only=True, gpu=None) as reader:
        assert not reader.information().writable
        assert bytes(reader.get(b"key")) == b"data"
        for call in (lambda: reader.put([(b"key", b"new")]), lambda: reader.delete([b"key"])):
            with pytest.raises(ClientError, match="reading only") as caught:
                call()
            assert caught.value.errno == errno.EROFS
        assert list(reader.list()) == [b"key"]
    assert bytes(client.get(b"key")) == b"data"


_WRITER = """
import sys
import kvfs
path, which, count = sys.argv[1:]
with kvfs.connect(path, "llama", gpu=None, timeout_s=20) as client:
    for i in range(int(count)):
        client.put([(b"key", which.encode() * (300_000 + 1000 * i))])
"""


def test_two_writers_of_one_key_both_succeed_and_readers_see_one_version_whole(client, directory):
    client.put([(b"key", b"0" * 1000)])
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER, str(directory), which, "30"], cwd=REPOSITORY) for which in "ab"
    ]
    seen = set()
    try:
        while any(writer.poll() is None for writer in writers):
            block = bytes(client.get(b"key"))
            assert len(set(block)) == 1, "a mixture of versions"
            seen.add(block[:1])
    finally:
        for writer in writers:
            writer.wait(60)
    assert [writer.returncode for writer in writers] == [0, 0]
    last = bytes(client.get(b"key"))
    assert last in (b"a" * 329_000, b"b" * 329_000)
    assert len(seen) > 1


def test_many_threads_share_a_client(client):
    """More of them than calls can be under way."""
    blocks = {f"key {i}": content(20_000 + i, i) for i in range(40)}
    client.put(blocks.items())
    stop = threading.Event()

    def read(reader):
        rounds = 0
        while not stop.is_set():
            destinations = {key: bytearray(len(data)) for key, data in blocks.items()}
            assert client.get_into(destinations.items()) == [len(data) for data in blocks.values()]
            assert destinations == blocks
            assert client.exists(blocks) == [True] * 40
            client.put([(f"own {reader}", content(1000, (reader, rounds)))])
            assert client.get(f"own {reader}") == content(1000, (reader, rounds))
            rounds += 1
        return rounds

    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        readers = [pool.submit(read, reader) for reader in range(40)]
        wait_until(lambda: client.statistics().puts > 240 or any(r.done() for r in readers), "200 rounds", timeout_s=60)
        stop.set()
        assert all(reader.result() for reader in readers)


def test_blocks_put_by_key_outlive_a_remount(own_pool):
    pool = own_pool(files=2, size="256M")
    blocks = {f"key {i}": content(50_000 * i, i) for i in range(20)}
    with kvfs.connect(pool.mount, "space", gpu=None) as client:
        client.put(blocks.items())
    pool.remount()
    with kvfs.connect(pool.mount, "space", gpu=None) as client:
        assert sorted(client.list()) == sorted(key.encode() for key in blocks)
        for key, data in blocks.items():
            assert_same(client.get(key), data, key)


@pytest.mark.slow
def test_writing_evicts_and_what_is_left_is_right(own_pool):
    pool = own_pool(files=2, size="128M")
    with kvfs.connect(pool.mount, gpu=None) as client:
        for batch in range(16):
            client.put([(f"{batch} {i}", content(4 * MIB, (batch, i))) for i in range(8)])
        keys = [f"{batch} {i}" for batch in range(16) for i in range(8)]
        found = client.exists(keys)
        assert found[-1] and not all(found)
        destination = client.buffer(4 * MIB)
        for key in keys:
            if client.get_into([(key, destination)]) == [4 * MIB]:
                batch, i = key.split()
                assert_same(destination, content(4 * MIB, (int(batch), int(i))), key)


@pytest.mark.slow
def test_a_batch_may_be_larger_than_the_pool(own_pool):
    """Writing evicts, also what the same call stored before."""
    pool = own_pool(files=2, size="128M")
    with kvfs.connect(pool.mount, gpu=None) as client:
        block = bytearray(content(MIB))
        for size in (40, 100, 400):
            client.put([(f"{size} {i}", block) for i in range(size)])
            assert client.exists([f"{size} {size - 1}"]) == [True]
        assert_same(client.get("400 399"), block, "the last block")


def test_a_client_that_reads_many_blocks_tells_its_statistics_meanwhile(own_pool):
    """A report went with hits that were a second old, and fast readers have none."""
    pool = own_pool(files=1, size="64M")
    keys = [f"key {index}" for index in range(600)]
    with kvfs.connect(pool.mount, "fast", gpu=None) as client:
        client.put([(key, b"x" * 100) for key in keys])
        items = [(key, bytearray(100)) for key in keys]

        def told():
            done = time.monotonic() + 1.3
            while time.monotonic() < done:
                client.get_into(items)
            return pool.status()["counters"]["native_gets"] > 0

        wait_until(told, "a report while blocks are read", timeout_s=20)
