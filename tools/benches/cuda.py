"""libcuda by ctypes, as much of it as tools/gpu_check and the tests need to hold device memory in their hands.

Blocks do not come this way: native/src/client/gpu/driver.h has its own table of functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

from kvfs.client.gpu import CUDA_LIBRARY_VARIABLE
from kvfs.errors import MissingFeatureError

NON_BLOCKING = 1
PORTABLE = 1
LEGACY_STREAM = 1


class CudaError(RuntimeError):
    """A function of the driver said no; code is CUDA's."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Driver:
    """The driver, and one device's primary context, current on the thread that enters `current()`."""

    def __init__(self, device: int = 0) -> None:
        self.name = os.environ.get(CUDA_LIBRARY_VARIABLE) or "libcuda.so.1"
        try:
            self.library = ctypes.CDLL(self.name)
        except OSError as error:
            raise MissingFeatureError(f"no CUDA: {error}") from error
        self.double = hasattr(self.library, "fake_cuda_is_double")
        self.device = device
        self._handle = ctypes.c_int()
        self.context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(self._handle), device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), self._handle)

    def close(self) -> None:
        self.call("cuDevicePrimaryCtxRelease_v2", self._handle)

    def call(self, function: str, *arguments: object) -> None:
        """Raises CudaError."""
        code = getattr(self.library, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(f"{function}: {(text.value or b'unknown error').decode()} ({code})", code)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        self.call("cuCtxPushCurrent_v2", self.context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    # ---- with the context current ----

    def allocate(self, size: int) -> int:
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer.value

    def free(self, pointer: int) -> None:
        self.call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def fill(self, pointer: int, byte: int, size: int) -> None:
        """Returns when it is done."""
        self.call("cuMemsetD8_v2", ctypes.c_uint64(pointer), ctypes.c_ubyte(byte), ctypes.c_size_t(size))
        self.synchronize(0)

    def fill_on(self, stream: int, pointer: int, byte: int, size: int) -> None:
        arguments = ctypes.c_uint64(pointer), ctypes.c_ubyte(byte), ctypes.c_size_t(size), ctypes.c_void_p(stream)
        self.call("cuMemsetD8Async", *arguments)

    def read(self, pointer: int, size: int) -> bytearray:
        """Work of other streams counts only as far as it is done by now."""
        data = bytearray(size)
        if size:
            into = (ctypes.c_char * size).from_buffer(data)
            self.call("cuMemcpyDtoH_v2", into, ctypes.c_uint64(pointer), ctypes.c_size_t(size))
        return data

    def read_on(self, stream: int, pointer: int, into: bytearray) -> None:
        """into is filled when the stream gets there, and must stay until then."""
        memory = (ctypes.c_char * len(into)).from_buffer(into)
        arguments = ctypes.c_uint64(pointer), ctypes.c_size_t(len(into)), ctypes.c_void_p(stream)
        self.call("cuMemcpyDtoHAsync_v2", memory, *arguments)

    def copy_on(self, stream: int, pointer: int, host: int, size: int) -> None:
        """From host memory at an address."""
        arguments = ctypes.c_uint64(pointer), ctypes.c_void_p(host), ctypes.c_size_t(size), ctypes.c_void_p(stream)
        self.call("cuMemcpyHtoDAsync_v2", *arguments)

    def pin(self, host: int, size: int) -> None:
        self.call("cuMemHostRegister_v2", ctypes.c_void_p(host), ctypes.c_size_t(size), PORTABLE)

    def unpin(self, host: int) -> None:
        self.call("cuMemHostUnregister", ctypes.c_void_p(host))

    def create_stream(self) -> int:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self.call("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def synchronize(self, stream: int) -> None:
        self.call("cuStreamSynchronize", ctypes.c_void_p(stream))


class DeviceMemory:
    """size bytes on a device, with `__cuda_array_interface__`: a destination for get_into."""

    def __init__(self, driver: Driver, size: int) -> None:
        self.driver, self.size = driver, size
        with driver.current():
            self.pointer = driver.allocate(size)

    def free(self) -> None:
        with self.driver.current():
            self.driver.free(self.pointer)

    def fill(self, byte: int) -> None:
        with self.driver.current():
            self.driver.fill(self.pointer, byte, self.size)

    def read(self) -> bytearray:
        with self.driver.current():
            return self.driver.read(self.pointer, self.size)

    def part(self, offset: int, size: int) -> DevicePart:
        return DevicePart(self, offset, size)


class DevicePart:
    """Bytes of a DeviceMemory, as a destination."""

    def __init__(self, memory: DeviceMemory, offset: int, size: int) -> None:
        self.memory, self.offset, self.size = memory, offset, size

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        address = self.memory.pointer + self.offset
        return {"shape": (self.size,), "typestr": "|u1", "data": (address, False), "version": 3}
