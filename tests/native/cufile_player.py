"""Plays cuFile calls against one libcufile: `cufile_player.py LIBRARY < STEPS`, for test_cufile.py.

STEPS is a JSON list of objects, each with "op" and its arguments. Every step prints its outcome at once as one line of
JSON. So a test sees how far a library came before it crashed or hung. Knows nothing of kvfs. Buffers lie between pages
that nobody may touch, so that what is written beyond one is a fault in every library alike.
"""

import ctypes
import errno
import hashlib
import json
import mmap
import os
import sys
import threading

GUARD = 65536
LIBC = ctypes.CDLL(None, use_errno=True)


class Error(ctypes.Structure):
    _fields_ = (("error", ctypes.c_int), ("cuda_error", ctypes.c_int))

    def outcome(self):
        return [self.error, self.cuda_error]


class Description(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("padding", ctypes.c_int), ("fd", ctypes.c_uint64), ("ops", ctypes.c_void_p))


class Item(ctypes.Structure):
    _fields_ = (
        ("mode", ctypes.c_int),
        ("base", ctypes.c_void_p),
        ("file_offset", ctypes.c_int64),
        ("buffer_offset", ctypes.c_int64),
        ("size", ctypes.c_size_t),
        ("handle", ctypes.c_void_p),
        ("opcode", ctypes.c_int),
        ("cookie", ctypes.c_void_p),
    )


class Event(ctypes.Structure):
    _fields_ = (("cookie", ctypes.c_void_p), ("status", ctypes.c_int), ("result", ctypes.c_int64))


class Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def load(path):
    library = ctypes.CDLL(path, use_errno=True)
    for name in (
        "DriverOpen",
        "DriverClose",
        "DriverClose_v2",
        "HandleRegister",
        "BufRegister",
        "BufDeregister",
        "BatchIOSetUp",
        "BatchIOSubmit",
        "BatchIOGetStatus",
        "BatchIOCancel",
        "ReadAsync",
        "WriteAsync",
        "StreamRegister",
        "StreamDeregister",
        "GetVersion",
        "DriverGetProperties",
    ):
        getattr(library, f"cuFile{name}").restype = Error
    for name in ("Read", "Write", "Readv", "Writev", "UseCount"):
        getattr(library, f"cuFile{name}").restype = ctypes.c_ssize_t
    for name in ("HandleDeregister", "BatchIODestroy"):
        getattr(library, f"cuFile{name}").restype = None
    return library


def pointer(value):
    return ctypes.c_void_p(value)


class HostBuffer:
    def __init__(self, size, protection=None):
        self.size = size
        self.mapping = mmap.mmap(-1, size + 2 * GUARD)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        self.address = base + GUARD
        self.fill(0xA5)
        for start, length in ((base, GUARD), (base + GUARD + size, GUARD)):
            assert LIBC.mprotect(pointer(start), ctypes.c_size_t(length), 0) == 0
        if protection is not None:
            assert LIBC.mprotect(pointer(self.address), ctypes.c_size_t(size), protection) == 0

    def fill(self, byte):
        ctypes.memset(self.address, byte, self.size)

    def content(self):
        return ctypes.string_at(self.address, self.size)


class FakeDeviceBuffer:
    """Memory of the double of libcuda."""

    def __init__(self, cuda, size):
        self.cuda, self.size, self.address = cuda, size, cuda.fake_cuda_alloc(ctypes.c_size_t(size))
        self.fill(0xA5)

    def fill(self, byte):
        self.put(bytes([byte]) * self.size)

    def put(self, data):
        assert self.cuda.fake_cuda_poke(pointer(self.address), data, ctypes.c_size_t(len(data))) == 0

    def content(self):
        data = ctypes.create_string_buffer(self.size)
        assert self.cuda.fake_cuda_peek(data, pointer(self.address), ctypes.c_size_t(self.size)) == 0
        return data.raw


class Player:
    def __init__(self, path):
        self.library = load(path)
        self.cuda = None
        self.buffers, self.descriptors, self.handles, self.batches, self.streams = {}, {}, {}, {}, {None: None}

    def play(self, step):
        return getattr(self, f"do_{step.pop('op')}")(**step)

    # ---- arguments: a name, or a number that stands for itself ----

    def address(self, buffer, at=0):
        if buffer is None:
            return None
        return (self.buffers[buffer].address if isinstance(buffer, str) else buffer) + at

    def handle(self, handle):
        return self.handles.get(handle) if isinstance(handle, str) else handle

    def batch(self, batch):
        return self.batches.get(batch) if isinstance(batch, str) else batch

    def digest(self, buffer):
        return hashlib.sha256(self.buffers[buffer].content()).hexdigest()[:16] if isinstance(buffer, str) else None

    def transferred(self, result, buffer):
        number = ctypes.get_errno() if result < 0 else 0
        return [result, errno.errorcode.get(number, number), self.digest(buffer)]

    # ---- memory and files ----

    def do_buffer(self, name, size, read_only=False):
        self.buffers[name] = HostBuffer(size, 1 if read_only else None)

    def do_cuda(self, path):
        self.cuda = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        self.cuda.fake_cuda_alloc.restype = ctypes.c_void_p

    def do_device_buffer(self, name, size):
        self.buffers[name] = FakeDeviceBuffer(self.cuda, size)

    def do_fill(self, buffer, byte):
        self.buffers[buffer].fill(byte)

    def do_digest(self, buffer):
        return self.digest(buffer)

    def do_open(self, name, path, flags):
        mode = 0
        for flag in flags.split("|"):
            mode |= getattr(os, flag)
        self.descriptors[name] = os.open(path, mode, 0o644)

    def do_close(self, name):
        os.close(self.descriptors.pop(name))

    def do_file_write(self, name, size, offset, byte):
        return os.pwrite(self.descriptors[name], bytes([byte]) * size, offset)

    def do_file_digest(self, path):
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:16]

    def do_unlink(self, path):
        os.unlink(path)

    # ---- driver ----

    def do_driver_open(self):
        return self.library.cuFileDriverOpen().outcome()

    def do_driver_close(self, v2=True):
        return (self.library.cuFileDriverClose_v2 if v2 else self.library.cuFileDriverClose)().outcome()

    def do_use_count(self):
        return self.library.cuFileUseCount()

    def do_version(self):
        version = ctypes.c_int()
        return [*self.library.cuFileGetVersion(ctypes.byref(version)).outcome(), version.value]

    def do_properties(self, null=False):
        out = (ctypes.c_uint32 * 14)()
        return [*self.library.cuFileDriverGetProperties(None if null else out).outcome(), list(out)]

    # ---- handles and buffers ----

    def do_register(self, name, fd, type=1, null_out=False, null_description=False):
        number = self.descriptors[fd] if isinstance(fd, str) else fd
        description = Description(type, 0, number & 0xFFFFFFFF, None)
        out = ctypes.c_void_p()
        result = self.library.cuFileHandleRegister(
            None if null_out else ctypes.byref(out), None if null_description else ctypes.byref(description)
        )
        if out.value:
            self.handles[name] = out.value
        return [*result.outcome(), bool(out.value)]

    def do_deregister(self, handle):
        self.library.cuFileHandleDeregister(pointer(self.handle(handle)))

    def do_buffer_register(self, buffer, size, at=0, flags=0):
        return self.library.cuFileBufRegister(pointer(self.address(buffer, at)), ctypes.c_size_t(size), flags).outcome()

    def do_buffer_deregister(self, buffer, at=0):
        return self.library.cuFileBufDeregister(pointer(self.address(buffer, at))).outcome()

    # ---- transfers ----

    def do_read(self, handle, buffer, size, offset, buffer_offset=0, at=0, call="Read"):
        ctypes.set_errno(0)
        result = getattr(self.library, f"cuFile{call}")(
            pointer(self.handle(handle)),
            pointer(self.address(buffer, at)),
            ctypes.c_size_t(size),
            ctypes.c_int64(offset),
            ctypes.c_int64(buffer_offset),
        )
        return self.transferred(result, buffer)

    def do_write(self, **arguments):
        return self.do_read(**arguments, call="Write")

    def do_readv(self, handle, vectors, offset, flags=0, call="Readv"):
        array = (Vector * max(1, len(vectors)))(*(Vector(self.address(b, at), size) for b, at, size in vectors))
        ctypes.set_errno(0)
        result = getattr(self.library, f"cuFile{call}")(
            pointer(self.handle(handle)), array, ctypes.c_size_t(len(vectors)), ctypes.c_int64(offset), flags
        )
        return self.transferred(result, vectors[0][0] if vectors else None)

    def do_writev(self, **arguments):
        return self.do_readv(**arguments, call="Writev")

    def do_threads(self, handle, buffer, size, count, rounds):
        """Reads of different parts by several threads at once; how many bytes each got."""

        def work(index):
            for turn in range(rounds):
                at = ((index + turn) % count) * size
                totals[index] += self.library.cuFileRead(
                    pointer(self.handle(handle)),
                    pointer(self.address(buffer)),
                    ctypes.c_size_t(size),
                    ctypes.c_int64(at),
                    ctypes.c_int64(at),
                )

        totals = [0] * count
        threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [totals, self.digest(buffer)]

    def do_fork(self, steps):
        """The outcomes of these steps in a forked child."""
        source, sink = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(sink, json.dumps([self.play(step) for step in steps]).encode())
            finally:
                os._exit(0)
        os.close(sink)
        received = b""
        while piece := os.read(source, 65536):
            received += piece
        os.close(source)
        return [json.loads(received), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]

    # ---- batches ----

    def do_batch(self, name, count, null=False):
        out = ctypes.c_void_p()
        result = self.library.cuFileBatchIOSetUp(None if null else ctypes.byref(out), count)
        self.batches[name] = out.value
        return [*result.outcome(), bool(out.value)]

    def do_submit(self, batch, items, count=None, null=False):
        array = (Item * max(1, len(items)))()
        for to, item in zip(array, items, strict=False):
            to.mode, to.opcode, to.cookie = item.get("mode", 1), item.get("opcode", 0), item["cookie"]
            to.base, to.handle = self.address(item["buffer"], item.get("at", 0)), self.handle(item["handle"])
            to.file_offset, to.buffer_offset, to.size = item["offset"], item.get("buffer_offset", 0), item["size"]
        return self.library.cuFileBatchIOSubmit(
            pointer(self.batch(batch)), len(items) if count is None else count, None if null else array, 0
        ).outcome()

    def do_status(self, batch, least, count, timeout_ms=None, null=False):
        number, events = ctypes.c_uint(count), (Event * max(1, count))()
        timeout = None if timeout_ms is None else Timespec(timeout_ms // 1000, timeout_ms % 1000 * 1000000)
        result = self.library.cuFileBatchIOGetStatus(
            pointer(self.batch(batch)),
            least,
            ctypes.byref(number),
            None if null else events,
            None if timeout is None else ctypes.byref(timeout),
        )
        if result.error:
            return result.outcome()
        return [*result.outcome(), sorted([e.cookie or 0, e.status, e.result] for e in events[: number.value])]

    def do_drain(self, batch, count, capacity, buffers=()):
        """Events until so many are there, or none comes any more; then what the buffers hold."""
        seen = []
        while len(seen) < count:
            outcome = self.do_status(batch, 1, capacity, timeout_ms=10000)
            if len(outcome) < 3 or not outcome[2]:
                seen.append(outcome)
                break
            seen += outcome[2]
        return [sorted(seen, key=str), [self.digest(buffer) for buffer in buffers]]

    def do_cancel(self, batch):
        return self.library.cuFileBatchIOCancel(pointer(self.batch(batch))).outcome()

    def do_destroy(self, batch):
        self.library.cuFileBatchIODestroy(pointer(self.batch(batch)))

    # ---- streams ----

    def do_stream(self, name):
        out = ctypes.c_void_p()
        self.cuda.cuCtxPushCurrent_v2(pointer(0xC0C0))
        assert self.cuda.cuStreamCreate(ctypes.byref(out), 1) == 0
        self.streams[name] = out.value

    def do_stream_register(self, stream=None, flags=0):
        return self.library.cuFileStreamRegister(pointer(self.streams[stream]), flags).outcome()

    def do_stream_deregister(self, stream=None):
        return self.library.cuFileStreamDeregister(pointer(self.streams[stream])).outcome()

    def do_capture(self, on):
        self.cuda.fake_cuda_capture(int(on))

    def do_read_async(
        self, handle, buffer, size, offset, buffer_offset=0, stream=None, late_size=None, null=False, call="ReadAsync"
    ):
        """With late_size, work that is on the stream already stores that as the size, later than the call is made."""
        values = [ctypes.c_size_t(size), ctypes.c_int64(offset), ctypes.c_int64(buffer_offset), ctypes.c_ssize_t(-77)]
        if late_size is not None:
            late = ctypes.c_size_t(late_size)
            self.cuda.fake_cuda_launch(
                pointer(self.streams[stream]),
                ctypes.byref(values[0]),
                ctypes.byref(late),
                ctypes.c_size_t(8),
                ctypes.c_long(50_000_000),
            )
        result = getattr(self.library, f"cuFile{call}")(
            pointer(self.handle(handle)),
            pointer(self.address(buffer)),
            *(None if null else ctypes.byref(value) for value in values),
            pointer(self.streams[stream]),
        )
        if self.cuda is not None:
            assert self.cuda.cuStreamSynchronize(pointer(self.streams[stream])) == 0
        return [*result.outcome(), values[3].value, self.digest(buffer)]

    def do_write_async(self, **arguments):
        return self.do_read_async(**arguments, call="WriteAsync")

    def do_cuda_live(self):
        """Copies that are still under way, and calls that had no context."""
        return [ctypes.c_int.in_dll(self.cuda, f"fake_cuda_{name}").value for name in ("live_copies", "errors")]

    # ---- forwarding ----

    def do_object_initialize(self):
        function = self.library.cuFileObjectInitialize
        function.restype = ctypes.c_long
        numbers = [ctypes.c_long(n) for n in range(1, 9)]
        return [function(*numbers, ctypes.c_double(1.5), ctypes.c_double(2.25)) for _ in range(2)]

    def do_parameter(self, number):
        """cuFileGetParameterSizeT and back by cuFileSetParameterSizeT."""
        value = ctypes.c_size_t()
        getter, setter = self.library.cuFileGetParameterSizeT, self.library.cuFileSetParameterSizeT
        getter.restype = setter.restype = Error
        got = getter(number, ctypes.byref(value)).outcome()
        return [got, value.value, setter(number, value).outcome()]


def main():
    player = Player(sys.argv[1])
    for step in json.load(sys.stdin):
        print(json.dumps(player.play(step)), flush=True)


if __name__ == "__main__":
    main()
