"""kvfs.connect() into GPU memory, end to end on a mounted pool, against a double of libcuda (fake_cuda.c).

A pass here says nothing about a real GPU: that is tools/gpu_check's job, on a machine that has one.
"""

import contextlib
import ctypes
import errno
import json
import os
import re
import sys
import threading
import time

import helpers
import pytest
from test_client_failures import Throttle

import kvfs
from benches import cuda
from kvfs.client import gpu
from kvfs.client import keys as keys_
from kvfs.errors import ClientError, DeadlineError, InvalidBufferError, KvfsError, MissingFeatureError, SmallBufferError

KIB, MIB = helpers.KIB, helpers.MIB
GUARD, POISON = 64, 0xA5


@pytest.fixture(scope="session")
def fake(tmp_path_factory):
    """The double's path."""
    helpers.requires_program("make")
    helpers.requires_program("gcc")
    out = tmp_path_factory.mktemp("fake-cuda")
    helpers.run("make", "-s", "-C", "native/test", "fake-cuda", f"OUT={out}")
    return out / "libcuda-fake.so"


@pytest.fixture
def driver(fake, monkeypatch):
    """The double in this process; at the end nothing may be wrong or left."""
    monkeypatch.setenv("KVFS_CUDA_LIBRARY", str(fake))
    found = cuda.Driver()
    assert found.double
    found.broken = False
    before = found.library.fake_cuda_violations()
    left = found.library.fake_cuda_left()
    yield found
    found.library.fake_cuda_heal()
    for function in (b"cuMemcpyHtoDAsync_v2", b"cuEventRecord", b"cuStreamCreate"):
        found.library.fake_cuda_fail(function, 0, 0)
    found.library.fake_cuda_delay(0)
    if not found.broken:
        assert found.library.fake_cuda_left() == left, "streams, events, registrations or contexts are left"
    found.close()
    violation = found.library.fake_cuda_violation
    violation.restype = ctypes.c_char_p
    assert found.library.fake_cuda_violations() == before, violation()


@pytest.fixture
def client(driver, directory):
    with kvfs.connect(directory, "gpu", gpu="staged") as connected:
        yield connected


class Batch:
    """Destinations side by side in one piece of poisoned device memory, with guard bytes between them."""

    def __init__(self, driver, sizes, room=0):
        self.driver, self.sizes = driver, sizes
        self.offsets, end = [], GUARD
        for size in sizes:
            self.offsets.append(end)
            end += size + room + GUARD
        self.memory = cuda.DeviceMemory(driver, end)
        self.memory.fill(POISON)
        self.parts = [self.memory.part(at, size + room) for at, size in zip(self.offsets, sizes, strict=True)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.memory.free()

    def check(self, results, contents, data=None):
        """The blocks that were read are there; behind them, and where blocks were missed, nothing has changed."""
        data = self.memory.read() if data is None else data
        expected = bytearray([POISON]) * len(data)
        for part, result, content in zip(self.parts, results, contents, strict=True):
            if result is None:
                expected[part.offset : part.offset + part.size] = data[part.offset : part.offset + part.size]
            else:
                assert result == len(content)
                expected[part.offset : part.offset + result] = content
        helpers.assert_same(data, expected, "device memory")


SIZES = (0, 1, 4095, 4096, 4097, 70_001, MIB, MIB + 1, 5 * MIB + 12_345)


def fill(client, sizes=SIZES):
    contents = {f"key{i}": helpers.content(size, i) for i, size in enumerate(sizes)}
    client.put(list(contents.items()))
    return contents


def test_blocks_arrive_whole_and_alone(client, driver):
    contents = fill(client)
    keys = [*contents, "missing"]
    with Batch(driver, [*SIZES, 100], room=333) as batch:
        results = client.get_into(list(zip(keys, batch.parts, strict=True)))
        assert results == [*SIZES, None]
        batch.check(results, [*contents.values(), b""])
    statistics = client.gpu_reader().statistics()
    assert statistics.blocks == len(SIZES) and statistics.bytes == sum(SIZES)
    assert client.statistics().gets >= len(SIZES)


def test_a_file_of_the_mount_is_a_block(client, driver, directory):
    """Written by POSIX, of several extents or one: the way into the GPU is the same."""
    name = b"posix".hex()
    path = directory / "gpu" / name[:2] / name
    path.parent.mkdir(parents=True)
    content = helpers.content(9 * MIB + 7, "posix")
    helpers.write_file(path, content)
    with Batch(driver, [len(content)]) as batch:
        assert client.get_into([(b"posix", batch.parts[0])]) == [len(content)]
        batch.check([len(content)], [content])


def test_mode_and_reason_say_that_it_is_a_double(client):
    assert client.mode == "staged"
    assert "TEST DOUBLE, no GPU" in client.mode_reason and "fake CUDA device 0" in client.mode_reason
    assert client.mode_reason.endswith("; asked for")


def test_a_stream_orders_both_ways(client, driver):
    contents = fill(client, [300 * KIB + i for i in range(12)])
    with driver.current():
        own = driver.create_stream()
    for stream in (own, cuda.LEGACY_STREAM):
        with Batch(driver, [len(content) for content in contents.values()]) as batch, driver.current():
            # A kernel that is still at work on the destinations, and a reader right behind the call.
            driver.call("fake_cuda_work", ctypes.c_void_p(stream), 50_000)
            for part in batch.parts:
                driver.fill_on(stream, batch.memory.pointer + part.offset, 0x11, part.size)
            driver.library.fake_cuda_delay(3000)
            results = client.get_into(list(zip(contents, batch.parts, strict=True)), stream=stream)
            snapshot = bytearray(batch.memory.size)
            driver.read_on(stream, batch.memory.pointer, snapshot)
            driver.synchronize(stream)
            driver.library.fake_cuda_delay(0)
            batch.check(results, contents.values(), snapshot)
    with driver.current():
        driver.destroy_stream(own)


def test_without_a_stream_the_bytes_are_there(client, driver):
    contents = fill(client, [300 * KIB + i for i in range(12)])
    with Batch(driver, [len(content) for content in contents.values()]) as batch:
        with driver.current():
            driver.call("fake_cuda_work", ctypes.c_void_p(0), 50_000)
            for part in batch.parts:
                driver.fill_on(0, batch.memory.pointer + part.offset, 0x11, part.size)
        driver.library.fake_cuda_delay(2000)
        results = client.get_into(list(zip(contents, batch.parts, strict=True)))
        size = batch.memory.size
        data = bytearray(size)
        into = (ctypes.c_char * size).from_buffer(data)
        driver.call("fake_cuda_peek", into, ctypes.c_uint64(batch.memory.pointer), ctypes.c_size_t(size))
        batch.check(results, contents.values(), data)


def test_one_batch_for_host_and_gpu(client, driver):
    contents = fill(client, [5000, 6000, 7000])
    host = bytearray(6000)
    with Batch(driver, [5000, 7000]) as batch:
        keys = list(contents)
        items = [(keys[0], batch.parts[0]), (keys[1], host), (keys[2], batch.parts[1])]
        assert client.get_into(items) == [5000, 6000, 7000]
        assert host == contents[keys[1]]
        batch.check([5000, 7000], [contents[keys[0]], contents[keys[2]]])


PUT_SIZES = (0, 1, 4095, 4097, MIB + 1, *[3 * MIB + i for i in range(20)], 41 * MIB + 5)


def sources(driver, contents):
    """Blocks side by side in device memory."""
    memory = cuda.DeviceMemory(driver, sum(map(len, contents)) + 1)
    parts, at = [], 0
    for content in contents:
        parts.append(memory.part(at, len(content)))
        at += len(content)
    write(driver, memory, b"".join(contents))
    return memory, parts


@contextlib.contextmanager
def pinned(driver, data):
    """The address of a copy of the data that the driver may read from."""
    held = kvfs.Client.buffer(-(-len(data) // 4096) * 4096)
    held[: len(data)] = data
    address = ctypes.addressof(ctypes.c_char.from_buffer(held))
    driver.pin(address, len(held))
    yield address
    driver.unpin(address)


def write(driver, memory, data):
    with driver.current(), pinned(driver, data) as address:
        driver.copy_on(0, memory.pointer, address, len(data))
        driver.synchronize(0)


def test_blocks_are_put_from_gpu_memory(client, driver):
    """More than a share of them, and one that is larger than a share: what is read through the host is the same."""
    contents = [helpers.content(size, f"put {size}") for size in PUT_SIZES]
    memory, parts = sources(driver, contents)
    keys = [f"from the GPU {i}" for i in range(len(parts))]
    assert client.put(list(zip(keys, parts, strict=True))) == [True] * len(keys)
    for key, content in zip(keys, contents, strict=True):
        helpers.assert_same(client.get(key), content, key)
    # Again: they are there.
    assert client.put(list(zip(keys, parts, strict=True)), if_absent=True) == [False] * len(keys)
    memory.free()


def test_pieces_host_memory_and_parents_in_one_put(client, driver):
    """A block in pieces is gathered; a batch may lie on both sides."""
    first, second = helpers.content(2 * MIB + 100, "pieces"), helpers.content(MIB, "host")
    memory = cuda.DeviceMemory(driver, len(first))
    write(driver, memory, first)
    pieces = [memory.part(0, 100), memory.part(100, MIB), memory.part(MIB + 100, MIB)]
    assert client.put([("pieces", pieces), ("host", second)], parents=[None, "pieces"]) == [True, True]
    helpers.assert_same(client.get("pieces"), first, "pieces")
    helpers.assert_same(client.get("host"), second, "host")
    with pytest.raises(InvalidBufferError, match="key b'both': some of its pieces are in GPU memory, some are not"):
        client.put([("both", [pieces[0], second])])
    with pytest.raises(InvalidBufferError, match="key b'host': its memory is the host's, so stream 0x2 must be None"):
        client.put([("pieces", pieces), ("host", second)], stream=2)
    memory.free()


def test_a_put_waits_for_the_stream(client, driver):
    """Bytes that a kernel still writes are stored."""
    sizes = [MIB + 4096 * i for i in range(40)]
    with driver.current():
        own = driver.create_stream()
    for stream in (own, cuda.LEGACY_STREAM, None):
        contents = [helpers.content(size, f"{stream} {size}") for size in sizes]
        memory, parts = sources(driver, [bytes(size) for size in sizes])
        data = b"".join(contents)
        with driver.current(), pinned(driver, data) as address:
            driver.call("fake_cuda_work", ctypes.c_void_p(stream or 0), 50_000)
            driver.copy_on(stream or 0, memory.pointer, address, len(data))
            driver.library.fake_cuda_delay(2000)
            client.put([(f"order {i}", part) for i, part in enumerate(parts)], stream=stream)
            driver.library.fake_cuda_delay(0)
        for i, content in enumerate(contents):
            helpers.assert_same(client.get(f"order {i}"), content, f"{stream} {i}")
        memory.free()
    with driver.current():
        driver.destroy_stream(own)


def test_a_put_whose_copy_fails_says_so_and_the_next_is_well(client, driver):
    contents = [helpers.content(MIB, f"failing {i}") for i in range(80)]
    memory, parts = sources(driver, contents)
    items = [(f"failing {i}", part) for i, part in enumerate(parts)]
    for function, nth in ((b"cuMemHostRegister_v2", 1), (b"cuMemcpyDtoHAsync_v2", 3), (b"cuMemcpyDtoHAsync_v2", 50)):
        with kvfs.connect(client.library.name, "gpu", gpu="staged") as other:
            other.gpu_reader().try_out(0)
            driver.library.fake_cuda_fail(function, nth, 719)
            with pytest.raises(ClientError, match="CUDA_ERROR_LAUNCH_FAILED") as caught:
                other.put(items)
            assert caught.value.errno == errno.EIO and function.decode().partition("_")[0] in str(caught.value)
            for i, content in enumerate(contents):
                found = other.get(f"failing {i}")
                assert found is None or found == content
            assert other.put(items) == [True] * len(items)
            other.delete(key for key, _ in items)
    memory.free()


def test_a_put_into_a_full_pool_and_past_an_allocation(driver, own_pool):
    pool = own_pool(files=2, size="128M")
    with kvfs.connect(pool.mount, gpu="staged") as client:
        content = helpers.content(8 * MIB, "full")
        memory, _ = sources(driver, [content])
        # Four times what the pool holds: eviction makes room.
        for turn in range(8):
            assert client.put([(f"{turn} {i}", memory.part(0, 8 * MIB)) for i in range(8)]) == [True] * 8
        helpers.assert_same(client.get("7 7"), content, "the last")
        with pytest.raises(InvalidBufferError, match=r"key b'far': buffer 1 of 2: .* past the end of its allocation"):
            client.put([("near", memory.part(0, MIB)), ("far", memory.part(4 * MIB, 8 * MIB))])
        assert client.exists(["near"]) == [False]
        memory.free()


def test_a_large_batch_is_read_by_several_rings(client, driver):
    client._gpu_reader = gpu.GpuReader(client.library, "staged", "", readers=4)
    contents = {f"large {i}": helpers.content(MIB + i, f"large {i}") for i in range(48)}
    client.put(list(contents.items()))
    flawed = [*contents, "missing"]
    with Batch(driver, [*map(len, contents.values()), 100]) as batch:
        results = client.get_into(list(zip(flawed, batch.parts, strict=True)))
        assert results == [*map(len, contents.values()), None]
        batch.check(results, [*contents.values(), b""])
        assert 1 < len(client.gpu_reader()._idle[0]) <= 4
        small = [*batch.parts[:40], batch.memory.part(0, 10), *batch.parts[41:48]]
        with pytest.raises(SmallBufferError, match="key b'large 40': the block has 1048616 bytes, its destination 10"):
            client.get_into(list(zip(contents, small, strict=True)))
        far = [*batch.parts[:47], batch.memory.part(batch.memory.size - 5, 10)]
        with pytest.raises(InvalidBufferError, match=r"key b'large 47': buffer .* past the end of its allocation"):
            client.get_into(list(zip(contents, far, strict=True)))


def test_a_call_waits_for_a_ring_until_its_deadline(client, driver, monkeypatch):
    client.put([("a block", b"its bytes")])
    reader = client._gpu_reader = gpu.GpuReader(client.library, "staged", "", readers=1)
    with Batch(driver, [9]) as batch:
        with reader._reader(0), monkeypatch.context() as patches:
            patches.setattr(client.library, "timeout_s", 0.05)
            with pytest.raises(DeadlineError, match=r"GPU 0: none of 1 rings became free in 0\.2 s"):
                client.get_into([("a block", batch.parts[0])])
        assert client.get_into([("a block", batch.parts[0])]) == [9]


def test_prestaged_blocks_come_from_memory(client, driver):
    contents = fill(client, [200 * KIB + i for i in range(8)])
    assert client.prestage(contents) == 8
    with Batch(driver, [len(content) for content in contents.values()]) as batch:
        results = client.get_into(list(zip(contents, batch.parts, strict=True)))
        batch.check(results, contents.values())
    assert client.gpu_reader().statistics().prestaged > 0
    assert client.statistics().prestage_used == client.gpu_reader().statistics().prestaged


def test_a_replaced_block_is_never_torn(client, driver):
    """Two contents of one key in turn: what arrives is one of them."""
    contents = [helpers.content(3 * MIB + 5, turn) for turn in range(2)]
    client.put([("key", contents[0])])
    stop = threading.Event()
    errors = []

    def rewrite():
        turn = 0
        try:
            while not stop.is_set():
                turn += 1
                client.put([("key", contents[turn % 2])])
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=rewrite)
    thread.start()
    seen = [0, 0]
    try:
        driver.library.fake_cuda_delay(200)
        with Batch(driver, [len(contents[0])]) as batch:
            deadline = time.monotonic() + 3
            while time.monotonic() < deadline or sum(seen) < 4:
                results = client.get_into([("key", batch.parts[0])])
                if results == [None]:
                    continue
                data = batch.memory.read()
                which = int(data[GUARD : GUARD + 64] == contents[1][:64])
                batch.check(results, [contents[which]], data)
                seen[which] += 1
                assert time.monotonic() < deadline + 30
    finally:
        stop.set()
        thread.join()
    assert not errors and sum(seen) > 3


def test_flipped_bytes_on_a_device_are_a_miss(driver, own_pool):
    pool = own_pool(files=2, size="256M")
    with kvfs.connect(pool.mount, gpu="staged") as client:
        contents = fill(client, [400 * KIB] * 6)
        flip(pool, contents["key3"][8192 : 8192 + 4096])
        with Batch(driver, [400 * KIB] * 6) as batch:
            results = client.get_into(list(zip(contents, batch.parts, strict=True)))
            assert results == [400 * KIB] * 3 + [None] + [400 * KIB] * 2
            batch.check(results, contents.values())
        assert client.statistics().checksum_errors == 1


def flip(pool, page):
    """Change a byte of this page of a block, wherever on the pool's devices it lies."""
    for path in pool.path.rglob("*"):
        if not path.is_file() or path.stat().st_size < 16 * MIB:
            continue
        with path.open("r+b") as file:
            for at in iter(lambda file=file: file.tell(), path.stat().st_size):
                chunk = file.read(16 * MIB)
                found = chunk.find(page)
                if found >= 0:
                    assert found % 4096 == 0
                    file.seek(at + found + 1234)
                    file.write(bytes([page[1234] ^ 1]))
                    file.flush()
                    os.fsync(file.fileno())
                    return
    raise AssertionError("the page is on no device")


@pytest.mark.timeout(180)
def test_a_stuck_device_is_a_miss_and_the_slots_come_back(driver, tmp_path):
    with (
        helpers.loop_devices(tmp_path, 2, "128M") as devices,
        helpers.Pool(devices=devices, format_args=("--stripe-width", "1")) as pool,
        Throttle() as throttle,
        kvfs.connect(pool.mount, gpu="staged", timeout_s=5) as client,
    ):
        contents = fill(client, [MIB + i for i in range(40)])
        with Batch(driver, [len(content) for content in contents.values()]) as batch:
            items = list(zip(contents, batch.parts, strict=True))
            assert None not in client.get_into(items)
            throttle.stop(devices[0])
            began = time.monotonic()
            results = client.get_into(items)
            assert time.monotonic() - began < 25 * helpers.slowness()
            batch.check(results, contents.values())
            assert 0 < results.count(None) < 40
            reader = client.gpu_reader()
            assert reader.statistics().slots_stuck > 0
            throttle.go_on(devices[0])
            helpers.wait_until(lambda: reader.statistics().slots_stuck == 0, "the slots", timeout_s=30)
            helpers.wait_until(lambda: None not in client.get_into(items), "the device's return")
            batch.check(client.get_into(items), contents.values())


def test_failures_of_cuda_are_errors_and_it_goes_on(client, driver):
    contents = fill(client, [300 * KIB] * 6)
    with Batch(driver, [300 * KIB] * 6) as batch:
        items = list(zip(contents, batch.parts, strict=True))
        for function, nth in ((b"cuStreamCreate", 1), (b"cuMemcpyHtoDAsync_v2", 3), (b"cuEventRecord", 2)):
            driver.library.fake_cuda_fail(function, nth, 719)
            with pytest.raises(ClientError, match="CUDA_ERROR_LAUNCH_FAILED") as caught:
                client.get_into(items)
            assert caught.value.errno == errno.EIO and function.decode().partition("_")[0] in str(caught.value)
            results = client.get_into(items)
            assert results == [300 * KIB] * 6
            batch.check(results, contents.values())


@pytest.mark.slow
def test_a_gpu_that_hangs_is_an_error_in_time(driver, directory):
    with kvfs.connect(directory, "gpu", gpu=None) as client:
        contents = fill(client, [300 * KIB] * 6)
    with kvfs.connect(directory, "gpu", gpu="staged", timeout_s=3) as client:
        with Batch(driver, [300 * KIB] * 6) as batch:
            items = list(zip(contents, batch.parts, strict=True))
            driver.library.fake_cuda_hold(1)
            driver.broken = True  # memory that a hanging GPU may still use is kept
            began = time.monotonic()
            try:
                with pytest.raises(DeadlineError, match="has not ended in 15000 ms"):
                    client.get_into(items)
                assert time.monotonic() - began < 60 * helpers.slowness()
                with pytest.raises(KvfsError, match="out of use"):
                    client.get_into(items)
            finally:
                driver.library.fake_cuda_hold(0)  # else the batch's memory could not be given back


def test_wrong_destinations_are_refused_by_key(client, driver):
    contents = fill(client, [5000, 6000])
    first, second = contents

    class Array:
        def __init__(self, address, size):
            self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}

    host = ctypes.create_string_buffer(8192)
    with Batch(driver, [5000, 6000]) as batch:
        good = (first, batch.parts[0])
        for array, words in (
            (Array(ctypes.addressof(host), 8192), "no memory that CUDA knows"),
            (Array(0, 8192), "8192 bytes at 0x0"),
            (Array(batch.memory.pointer + batch.offsets[1], 1 * MIB), "past the end of its allocation"),
            (Array(batch.memory.pointer + batch.offsets[0] + 4000, 6000), "overlap"),
        ):
            with pytest.raises(InvalidBufferError, match=f"key b'key[01]': buffers? .*{words}"):
                client.get_into([good, (second, array)])
        with pytest.raises(InvalidBufferError, match=r"key b'key0': .* is no GPU memory"):
            client.get_into([(first, Array(ctypes.addressof(host), 8192))])
        words = "key b'key1': the block has 6000 bytes, its destination 5999"
        with pytest.raises(SmallBufferError, match=words) as caught:
            client.get_into([good, (second, batch.memory.part(batch.offsets[1], 5999))])
        assert caught.value.results == [5000, None]


def test_two_gpus(client, driver, directory):
    """Each has a reader of its own; one call fills one."""
    contents = fill(client, [70_000, 80_000])
    keys = list(contents)
    other = cuda.Driver(1)
    reader = client.gpu_reader()
    with Batch(driver, [70_000, 80_000]) as here, Batch(other, [70_000, 80_000]) as there:
        for batch in (here, there, here):
            results = client.get_into(list(zip(keys, batch.parts, strict=True)))
            assert results == [70_000, 80_000]
            batch.check(results, contents.values())
        words = r"key b'key1': buffer 1 of 2: 0x[0-9a-f]+ is on GPU 1; this reader is GPU 0's"
        with pytest.raises(InvalidBufferError, match=words):
            client.get_into([(keys[0], here.parts[0]), (keys[1], there.parts[1])])
        pointers = [(batch.memory.pointer + GUARD, 70_000, device) for batch, device in ((here, 0), (there, 1))]
        words = "key b'key1': its memory is on GPU 1, that of key b'key0' on GPU 0"
        with pytest.raises(InvalidBufferError, match=words):
            reader.get_into(keys_.pack(keys), pointers, 0)
        with pytest.raises(InvalidBufferError, match="this reader is GPU 1's"):  # said to be on GPU 1, and on GPU 0
            reader.get_into(keys_.pack(keys[:1]), [(pointers[0][0], 70_000, 1)], 0)
        with pytest.raises(ClientError, match="no GPU 5: CUDA sees 2"):
            reader.get_into(keys_.pack(keys[:1]), [(pointers[0][0], 70_000, 5)], 0)
    other.close()


def test_many_threads_share_a_client(client, driver):
    contents = fill(client, [150 * KIB + i for i in range(16)])
    errors = []

    def read():
        try:
            for _ in range(5):
                with Batch(driver, [len(content) for content in contents.values()]) as batch:
                    results = client.get_into(list(zip(contents, batch.parts, strict=True)))
                    batch.check(results, contents.values())
        except BaseException as error:
            errors.append(error)

    driver.library.fake_cuda_delay(300)
    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert client.gpu_reader().statistics().blocks == 8 * 5 * 16


def test_close_waits_for_copies_under_way(driver, directory):
    client = kvfs.connect(directory, "gpu", gpu="staged")
    contents = fill(client, [150 * KIB + i for i in range(8)])
    with Batch(driver, [len(content) for content in contents.values()]) as batch:
        driver.library.fake_cuda_delay(20_000)
        results = client.get_into(list(zip(contents, batch.parts, strict=True)), stream=cuda.LEGACY_STREAM)
        client.close()
        driver.library.fake_cuda_delay(0)
        batch.check(results, contents.values())


# ---- modes, and the probe ----


def test_auto_takes_staged_where_there_is_cuda_and_host_where_there_is_not(driver, directory, fake, monkeypatch):
    with kvfs.connect(directory) as client:
        assert client.mode == "staged" and "gds is not to be had: " in client.mode_reason
    monkeypatch.setenv("KVFS_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
    with kvfs.connect(directory) as client:
        assert client.mode == "host"
        assert "no CUDA: /nowhere/libcuda.so.1" in client.mode_reason
        words = r"key b'key': .* the mode is host: no CUDA"
        with Batch(driver, [100]) as batch, pytest.raises(MissingFeatureError, match=words):
            client.get_into([("key", batch.parts[0])])


def test_a_mode_that_is_named_and_not_to_be_had_is_an_error(driver, directory, monkeypatch):
    with pytest.raises(MissingFeatureError, match=r"gds is not to be had: .* Use staged"):
        kvfs.connect(directory, gpu="gds")
    with kvfs.connect(directory, gpu="host") as client:
        assert (client.mode, client.mode_reason) == ("host", "asked for")
    monkeypatch.setenv("KVFS_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
    with pytest.raises(MissingFeatureError, match="staged is not to be had: no CUDA: /nowhere"):
        kvfs.connect(directory, gpu="staged")


def test_the_probe_survives_a_driver_that_hangs_crashes_or_fails(tmp_path, monkeypatch):
    """Libraries that stand in for broken drivers."""
    helpers.requires_program("gcc")
    for name, body, words in (
        ("hangs", "for (;;);", "libcuda: no answer in 1 s"),
        ("crashes", "__builtin_trap();", "the probe of libcuda ended with -"),
        ("fails", "return 999;", r"cuInit: CUDA_ERROR_UNKNOWN \(999\)"),
    ):
        source, library = tmp_path / f"{name}.c", tmp_path / f"lib{name}.so"
        source.write_text(
            f"int cuInit(unsigned f) {{ (void)f; {body} }}\n"
            'int cuGetErrorName(int e, const char **n) { (void)e; *n = "CUDA_ERROR_UNKNOWN"; return 0; }\n'
        )
        helpers.run("gcc", "-shared", "-fPIC", "-o", library, source)
        monkeypatch.setenv("KVFS_CUDA_LIBRARY", str(library))
        monkeypatch.setattr(gpu, "PROBE_TIMEOUT_S", 1.0 if name == "hangs" else 20.0)
        found = gpu.examine_cuda()
        assert re.search(words, found.error), found
        assert gpu.examine_cuda() is not None and not found.devices


def test_the_probe_prints_one_line_of_json(fake):
    command = [sys.executable, "-m", "kvfs.client.gpu_probe", "--probe", "cuda"]
    result = helpers.run(*command, environment={"KVFS_CUDA_LIBRARY": str(fake)})
    found = json.loads(result.stdout)
    assert found["double"] and found["driver_version"] == "12.8" and len(found["devices"]) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gpu_check_goes_through_all_steps_with_the_double(tmp_path):
    """And says in every line that it is one, and by its exit status that no GPU was checked."""
    command = ("tools/gpu_check", "--fake", "--quick", "--directory", str(tmp_path))
    result = helpers.run(*command, check=False, timeout_s=240)
    assert result.returncode == 3, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert all(line.startswith("[TEST DOUBLE, NO GPU] ") for line in lines)
    assert sum(" right  " in line for line in lines) >= 7 and "WRONG" not in result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(300)
def test_gpu_check_on_a_gpu(tmp_path):
    found = gpu.examine_cuda()
    if found.error or found.double:
        pytest.skip(f"no GPU, so nothing that reads into one was exercised on it: {found.error or 'a double'}")
    result = helpers.run("tools/gpu_check", "--quick", "--directory", str(tmp_path), check=False, timeout_s=240)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_gpu_check_without_a_gpu_says_so(tmp_path):
    result = helpers.run(
        "tools/gpu_check", "--quick", "--directory", str(tmp_path), check=False, timeout_s=100,
        environment={"KVFS_CUDA_LIBRARY": "/nowhere/libcuda.so.1"},
    )  # fmt: skip
    assert result.returncode == 3, result.stdout + result.stderr
    assert "NO GPU HERE: no CUDA: /nowhere/libcuda.so.1" in result.stdout
    assert "not exercised: correctness of reads into a GPU: no GPU" in result.stdout
    assert not list(tmp_path.iterdir())
