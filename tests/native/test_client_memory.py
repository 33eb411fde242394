"""The memory a client reads into and writes from: every kind, every alignment, and what is refused."""

import array
import ctypes
import gc
import mmap
import os
import pathlib
import subprocess
import sys
import weakref

import pytest
from helpers import MIB, REPOSITORY, Pool, assert_same, content, run, zram_devices

import kvfs
from kvfs.client import memory
from kvfs.errors import ClientError, InvalidBufferError, SmallBufferError

GUARD = 0xA5


# --- host memory through a mounted pool ------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, 7, 511, 512, 4095, 4096])
@pytest.mark.parametrize("size", [0, 1, 511, 512, 4095, 4096, 4097, 64 * 1024, MIB + 1, 3 * MIB - 5])
def test_bytes_around_a_destination_stay(client, size, offset):
    """Before it, behind it, and what is left of one that is larger than its block."""
    data = content(size, (size, offset))
    client.put([(b"key", data)])
    for slack in (0, 1, 511, 4096, 5000):
        whole = client.buffer(offset + size + slack + 8192)
        whole[:] = bytes([GUARD]) * len(whole)
        destination = whole[offset + 4096 : offset + 4096 + size + slack]
        assert client.get_into([(b"key", destination)]) == [size]
        assert_same(destination[:size], data, f"slack {slack}")
        assert bytes(whole[: offset + 4096]) == bytes([GUARD]) * (offset + 4096)
        assert bytes(whole[offset + 4096 + size :]) == bytes([GUARD]) * (slack + 4096)


@pytest.mark.parametrize("offset", [0, 1, 512, 4095])
@pytest.mark.parametrize("size", [1, 4095, 4097, MIB + 1])
def test_a_put_takes_memory_of_any_alignment(client, size, offset):
    whole = client.buffer(size + offset + 1)
    whole[offset : offset + size] = content(size)
    client.put([(b"key", whole[offset : offset + size])])
    assert_same(client.get(b"key"), content(size), "what was put")


def test_aligned_memory_is_read_and_written_without_a_copy(client):
    block = client.buffer(2 * MIB)
    block[:] = content(2 * MIB)
    client.put([(b"key", block)])
    assert client.get_into([(b"key", client.buffer(2 * MIB))]) == [2 * MIB]
    assert client.statistics().bounced_bytes == 0


def test_a_device_of_pages_writes_to_pages_alone():
    """zram says that 512 bytes are aligned enough, and then writes beside such memory (Linux 6.18)."""
    with (
        zram_devices(1, "128M") as devices,
        Pool(devices=devices) as pool,
        kvfs.connect(pool.mount, "llama") as client,
    ):
        data = content(MIB + 5)
        client.put([(b"key", data)])
        whole = client.buffer(len(data) + 3 * 4096)
        for offset in (0, 16, 512, 2048, 3584):
            whole[:] = bytes([GUARD]) * len(whole)
            end = 4096 + offset + len(data)
            assert client.get_into([(b"key", whole[4096 + offset : end])]) == [len(data)], offset
            assert_same(whole[4096 + offset : end], data, f"offset {offset}")
            assert set(whole[: 4096 + offset]) | set(whole[end:]) == {GUARD}, offset
            client.put([(b"again", whole[4096 + offset : end])])
            assert_same(client.get(b"again"), data, f"put from {offset}")
        assert client.information().memory_alignment == 4096


def host_memory(size):
    """Every kind of writable host memory the standard library has."""
    shared = mmap.mmap(-1, size)
    backing = bytearray(size + 10)
    yield "bytearray", bytearray(size)
    yield "memoryview", memoryview(bytearray(size))
    yield "slice", memoryview(backing)[5 : 5 + size]
    yield "mmap", shared
    yield "array", array.array("d", bytes(size))
    yield "two dimensions", memoryview(bytearray(size)).cast("B", (2, size // 2))
    yield "ctypes", (ctypes.c_uint32 * (size // 4))()
    yield "buffer", memory.allocate(size)


def test_every_kind_of_host_memory_is_read_into_and_written_from(client):
    size = 64_000
    for i, (kind, destination) in enumerate(host_memory(size)):
        client.put([(b"key", content(size, i))])
        assert client.get_into([(b"key", destination)]) == [size], kind
        assert_same(memoryview(destination).cast("B"), content(size, i), kind)
        client.put([("from " + kind, destination)])
        assert_same(client.get("from " + kind), content(size, i), f"put from {kind}")


@pytest.mark.parametrize(
    ("destination", "words"),
    [
        (b"x" * 100, "bytes: read-only"),
        (memoryview(b"x" * 100), "memoryview: read-only"),
        (memoryview(bytearray(200))[::2], r"memoryview: not C-contiguous: shape \(100,\), strides \(2,\) bytes"),
        ("text", "str: no DLPack, .*, no buffer"),
        (None, "NoneType: no DLPack"),
        (1 << 40, "int: no DLPack"),
        ([1, 2], "list: no DLPack"),
    ],
)
def test_a_destination_that_cannot_be_is_named_and_nothing_is_read(client, destination, words):
    client.put([(b"good", content(100)), (b"bad", content(100))])
    good = bytearray(100)
    with pytest.raises(InvalidBufferError, match="key b'bad': destination of type " + words):
        client.get_into([(b"good", good), (b"bad", destination)])
    assert good == bytes(100)


def test_a_source_that_cannot_be_is_named_and_nothing_is_stored(client):
    for source, words in ((memoryview(b"x" * 200)[::2], "source of type memoryview: not C-cont"), ("text", "str")):
        with pytest.raises(InvalidBufferError, match="key b'bad': .*" + words):
            client.put([(b"good", b"data"), (b"bad", source)])
    assert client.exists([b"good", b"bad"]) == [False, False]
    client.put([(b"good", memoryview(b"read-only is fine"))])


def test_a_destination_that_is_too_small_is_an_error_and_the_rest_is_read(client):
    client.put([(b"small", content(100)), (b"large", content(5000)), (b"larger", content(6000))])
    small, tight, none = bytearray(200), bytearray([GUARD]) * 4999, bytearray(0)
    with pytest.raises(
        SmallBufferError, match="key b'large': the block has 5000 bytes, its destination 4999, and 1 more"
    ) as caught:
        client.get_into([(b"small", small), (b"large", tight), (b"gone", bytearray(1)), (b"larger", none)])
    assert caught.value.results == [100, None, None, None]
    assert isinstance(caught.value, BufferError)
    assert small[:100] == content(100)
    assert tight == bytes([GUARD]) * 4999


def test_destinations_that_overlap_are_an_error(client):
    client.put([(b"a", content(100)), (b"b", content(100))])
    whole = memoryview(bytearray(300))
    for first, second in ((whole[:100], whole[99:199]), (whole, whole[50:150]), (whole[100:200], whole[:101])):
        with pytest.raises(ClientError, match="overlap"):
            client.get_into([(b"a", first), (b"b", second)])
    assert bytes(whole) == bytes(300)
    assert client.get_into([(b"a", whole[100:200]), (b"b", whole[:100])]) == [100, 100]


def test_one_source_may_be_put_under_many_keys(client):
    client.put([(f"{i}", b"the same") for i in range(100)])
    assert bytes(client.get("99")) == b"the same"


def test_a_stream_with_host_memory_is_an_error(client):
    client.put([(b"key", b"data")])
    destination = bytearray(4)
    with pytest.raises(InvalidBufferError, match="key b'key': its memory is the host's, so stream 0x7"):
        client.get_into([(b"key", destination)], stream=7)
    with pytest.raises(TypeError, match="a raw CUDA stream"):
        client.get_into([(b"key", destination)], stream="main")
    for stream in (0, None):
        assert client.get_into([(b"key", destination)], stream=stream) == [4]


def test_a_destination_is_let_go_of_when_the_call_ends(client):
    client.put([(b"key", b"data")])
    destination = bytearray(4)
    client.get_into([(b"key", destination)])
    client.put([(b"key2", destination)])
    destination.extend(b"resized")


def test_a_view_from_get_outlives_its_client(directory):
    import kvfs

    with kvfs.connect(directory, gpu=None) as client:
        client.put([(b"key", content(10_000))])
        view = client.get(b"key")
    gc.collect()
    assert_same(view, content(10_000), "after close")
    assert not view.readonly


def test_tensors_of_numpy_and_torch(directory):
    """In whichever interpreter has them: the project does not need them."""
    here, clients = pathlib.Path(sys.executable), REPOSITORY / ".venv-clients/bin/python"
    python = next((p for p in (here, clients) if p.exists() and _imports(p, "numpy", "torch", "cffi")), None)
    if python is None:
        pytest.skip("needs numpy and torch: tools/setup-clients")
    script = pathlib.Path(__file__).with_name("tensors.py")
    run(python, script, directory, environment={"PYTHONPATH": str(REPOSITORY)})


def _imports(python, *modules):
    return subprocess.run([python, "-c", f"import {', '.join(modules)}"], capture_output=True).returncode == 0


# --- what describes memory, without a device --------------------------------------------------------------------


class Capsule:
    """A test double of a tensor library: DLPack by hand."""

    def __init__(self, shape, strides=None, *, device=(1, 0), bits=8, lanes=1, offset=0, version=None, flags=0):
        self.memory = (ctypes.c_uint8 * 4096)()
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = None if strides is None else (ctypes.c_int64 * len(shape))(*strides)
        tensor = memory._Tensor(
            ctypes.addressof(self.memory), device[0], device[1], len(shape), 0, bits, lanes, self.shape,
            self.strides, offset,
        )  # fmt: skip
        if version is None:
            self.managed, self.name = memory._Managed(tensor), b"dltensor"
        else:
            self.managed, self.name = memory._Versioned(*version, None, None, flags, tensor), b"dltensor_versioned"
        self.device, self.version, self.asked = device, version, []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **arguments):
        self.asked.append(arguments)
        if self.version is None and "max_version" in arguments:
            raise TypeError("unexpected keyword argument 'max_version'")
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.managed), self.name, None)

    @property
    def address(self):
        return ctypes.addressof(self.memory)


@pytest.mark.parametrize("version", [None, (1, 0), (1, 1)])
@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ({"shape": (100,)}, 100),
        ({"shape": ()}, 1),
        ({"shape": (3, 0, 5), "strides": (9, 9, 9)}, 0),
        ({"shape": (3, 5), "strides": (5, 1), "bits": 32}, 60),
        ({"shape": (3, 1, 5), "strides": (5, 77, 1), "bits": 16, "lanes": 2}, 60),
        ({"shape": (4,), "offset": 256}, 4),
        ({"shape": (7,), "device": (3, 0)}, 7),
    ],
)
def test_dlpack_on_the_host(version, arguments, size):
    tensor = Capsule(**arguments, version=version)
    region = memory.destination(b"key", tensor)
    assert (region.address, region.size, region.device) == (tensor.address + arguments.get("offset", 0), size, None)
    assert all(asked["stream"] is None for asked in tensor.asked)


@pytest.mark.parametrize("kind", [2, 13])
def test_dlpack_on_a_gpu_is_for_the_gpu_and_orders_no_stream(kind):
    tensor = Capsule((64,), device=(kind, 3), bits=16)
    region = memory.destination(b"key", tensor)
    assert (region.address, region.size, region.device) == (tensor.address, 128, 3)
    assert all(asked["stream"] == -1 for asked in tensor.asked)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"shape": (3, 5), "strides": (1, 3)}, r"not C-contiguous: shape \(3, 5\), strides \(1, 3\)"),
        ({"shape": (5,), "strides": (2,)}, "not C-contiguous"),
        ({"shape": (5,), "version": (1, 0), "flags": 1}, "read-only"),
        ({"shape": (5,), "version": (2, 0)}, "DLPack of version 2.0"),
        ({"shape": (5,), "bits": 4}, "elements of 4 bits"),
        ({"shape": (5,), "device": (10, 0)}, "memory of a device of DLPack type 10"),
    ],
)
def test_dlpack_that_is_refused(arguments, words):
    with pytest.raises(InvalidBufferError, match="key b'key': destination of type Capsule: " + words):
        memory.destination(b"key", Capsule(**arguments))


def test_a_read_only_tensor_is_a_source():
    assert memory.source(b"key", Capsule((5,), version=(1, 0), flags=1)).size == 5


def test_a_dlpack_owner_lives_as_long_as_its_region():
    tensor = Capsule((5,))
    alive = weakref.ref(tensor)
    region = memory.destination(b"key", tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    del region
    gc.collect()
    assert alive() is None


class CudaArray:
    """A test double of GPU memory: `__cuda_array_interface__`."""

    def __init__(self, **changes):
        self.__cuda_array_interface__ = {
            "shape": (4, 8), "typestr": "<f4", "data": (0x7F00_0000, False), "strides": None, "version": 3, **changes,
        }  # fmt: skip


def test_the_cuda_array_interface():
    region = memory.destination(b"key", CudaArray())
    assert (region.address, region.size, region.device) == (0x7F00_0000, 128, memory.ANY_DEVICE)
    assert memory.destination(b"key", CudaArray(strides=(32, 4))).size == 128
    for changes, words in (
        ({"data": (1, True)}, "read-only"), ({"strides": (4, 16)}, "not C-contiguous"), ({"typestr": "|O8"}, "objects"),
        ({"data": None}, "__cuda_array_interface__"),
    ):  # fmt: skip
        with pytest.raises(InvalidBufferError, match="destination of type CudaArray: .*" + words):
            memory.destination(b"key", CudaArray(**changes))


class Tensor:
    """A test double of a torch tensor that DLPack cannot express."""

    def __init__(self, *, device="cuda", index=1, contiguous=True):
        self.device = type("device", (), {"type": device, "index": index})
        self.shape, self.contiguous = (2, 3), contiguous

    def __dlpack_device__(self):
        return (2, 1)

    def __dlpack__(self, **_):
        raise RuntimeError("Can't export tensors that require gradient")

    def data_ptr(self):
        return 0x7F00_0000

    def is_contiguous(self):
        return self.contiguous

    def numel(self):
        return 6

    def element_size(self):
        return 2

    def stride(self):
        return (1, 2)


def test_what_dlpack_cannot_express_data_ptr_may():
    assert memory.destination(b"key", Tensor())[:3] == (0x7F00_0000, 12, 1)
    assert memory.destination(b"key", Tensor(index=None)).device == memory.ANY_DEVICE
    assert memory.destination(b"key", Tensor(device="cpu")).device is None
    for arguments in ({"contiguous": False}, {"device": "mps"}):
        with pytest.raises(InvalidBufferError, match="Can't export tensors that require gradient"):
            memory.destination(b"key", Tensor(**arguments))


def test_gpu_memory_goes_to_the_gpu_reader_and_host_memory_does_not(client):
    """One large batch is split; the reader is a test double."""

    class Reader:
        mode, reason, may_owe = "staged", "a double", False

        def __init__(self):
            self.asked = []

        def get_into(self, keys, destinations, stream):
            self.asked.append((keys.data, list(keys.sizes), destinations, stream))
            return [77, None]

        def put(self, keys, blocks, stream, if_absent, parents):
            regions = [[(piece.address, piece.size, piece.device) for piece in block] for block in blocks]
            self.asked.append((keys.data, regions, stream, if_absent, parents))
            return [0] * len(blocks), None

        def close(self):
            self.asked.append("closed")

    client.put([(b"host", b"data")])
    host = bytearray(4)
    items = [(b"g1", CudaArray()), (b"host", host), (b"gpu2", Capsule((9,), device=(2, 5)))]
    with pytest.raises(ClientError, match="gpu=None"):
        client.get_into(items)
    client._gpu, client._gpu_reader = "auto", Reader()
    reader = client._gpu_reader
    assert client.get_into(items) == [77, 4, None]
    assert host == b"data"
    keys, sizes, destinations, stream = reader.asked.pop()
    assert (keys, sizes, stream) == (b"g1gpu2", [2, 4], 0)
    assert destinations == [(0x7F00_0000, 128, memory.ANY_DEVICE), (items[2][1].address, 9, 5)]
    assert client.get_into([items[0], items[2]], stream=12345) == [77, None]
    assert reader.asked.pop()[3] == 12345
    with pytest.raises(InvalidBufferError, match="key b'host': its memory is the host's"):
        client.get_into(items, stream=12345)
    with pytest.raises(SmallBufferError, match="key b'host': the block has 4 bytes, its destination 0") as caught:
        client.get_into([items[0], (b"host", bytearray()), items[2]])
    assert caught.value.results == [77, None, None]
    reader.asked.clear()
    assert client.put([items[0], (b"host", b"more"), items[2]]) == [True] * 3
    assert client.get(b"host") == b"more"
    places = [[(0x7F00_0000, 128, memory.ANY_DEVICE)], [(items[2][1].address, 9, 5)]]
    assert reader.asked.pop() == (b"g1gpu2", places, 0, False, None) and not reader.asked
    with pytest.raises(InvalidBufferError, match="key b'g1': some of its pieces are in GPU memory, some are not"):
        client.put([(b"g1", [CudaArray(), b"on the host"])])
    assert client.mode == "staged"
    client.close()
    assert reader.asked == ["closed"]


def test_a_client_without_gpu_says_so(client):
    assert client.mode == "host"
    assert client.mode_reason == "connected with gpu=None"


def test_buffer_is_page_aligned_and_writable(client):
    for size in (0, 1, 4096, 5000, 4 * MIB + 1):
        block = client.buffer(size)
        assert len(block) == size and not block.readonly
        if size:
            assert memory.destination(b"key", block).address % os.sysconf("SC_PAGE_SIZE") == 0
            block[-1] = 1
    with pytest.raises(ValueError, match="-1 bytes"):
        client.buffer(-1)
