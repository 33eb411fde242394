"""The caller's memory as addresses and sizes: whatever has DLPack, `__cuda_array_interface__`, torch's `data_ptr()`
or the buffer protocol, asked in this order.

Memory must be C-contiguous and is taken as bytes. A Region keeps its owner: while it lives, the memory can be neither
freed nor resized. Formats: dlpack.h of version 1.1, `__cuda_array_interface__` of version 3.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from array import array
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, cast

from kvfs._native import ffi
from kvfs.client.keys import shown
from kvfs.errors import InvalidBufferError

if TYPE_CHECKING:
    from typing_extensions import Buffer as BufferProtocol

# Nothing but the buffer protocol: no need to ask for more.
_PLAIN = frozenset({bytes, bytearray, mmap.mmap, array})
_HUGE = 2 << 20
ANY_DEVICE = -1


class SupportsDLPack(Protocol):
    @property
    def __dlpack__(self) -> Callable[..., object]: ...
    @property
    def __dlpack_device__(self) -> Callable[..., tuple[object, object]]: ...


class SupportsCudaArray(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, object]: ...


class SupportsDataPointer(Protocol):
    """torch.Tensor, where it has no DLPack."""

    @property
    def data_ptr(self) -> Callable[[], int]: ...


Memory: TypeAlias = "BufferProtocol | SupportsDLPack | SupportsCudaArray | SupportsDataPointer"
# Of one block: its memory, or, as a list or tuple, the pieces of it in the order of the block's bytes.
Pieces: TypeAlias = "Memory | Sequence[Memory]"


class Region(NamedTuple):
    """size bytes at address, in the host's memory (device None) or a GPU's (its index; ANY_DEVICE: the address tells).

    pointer is the address as libkvfs takes it.
    """

    address: int
    size: int
    device: int | None
    pointer: object
    owner: object


class _Refusal(Exception):
    """This way leads to no memory; the text says why."""


def destination(key: bytes, memory: Memory) -> Region:
    """Raises InvalidBufferError, naming the key, for memory that is read-only, not C-contiguous, or no memory."""
    return _region(key, memory, writable=True)


def source(key: bytes, memory: Memory) -> Region:
    """The same for memory that is only read."""
    return _region(key, memory, writable=False)


def destinations(key: bytes, memory: Pieces) -> tuple[Region, ...]:
    """destination() of each piece."""
    return _regions(key, memory, writable=True)


def sources(key: bytes, memory: Pieces) -> tuple[Region, ...]:
    """source() of each piece."""
    return _regions(key, memory, writable=False)


def size_of(regions: Sequence[Region]) -> int:
    """Bytes of all pieces of a block."""
    return sum(region.size for region in regions)


def allocate(size: int) -> memoryview:
    """size bytes of zeroed, page-aligned, writable memory; it goes with its last user."""
    if size == 0:
        return memoryview(bytearray())
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _regions(key: bytes, memory: Pieces, writable: bool) -> tuple[Region, ...]:
    if not isinstance(memory, (list, tuple)):
        return (_region(key, cast(Memory, memory), writable),)
    of = type(memory).__name__
    return tuple(_region(key, piece, writable, (of, i)) for i, piece in enumerate(memory))


def _region(key: bytes, memory: Memory, writable: bool, piece: tuple[str, int] | None = None) -> Region:
    """piece: the type of the list that it is in, and its place there."""
    kind = type(memory)
    reason = ""
    if kind not in _PLAIN:
        for name, way in _WAYS:
            if not hasattr(memory, name):
                continue
            try:
                return way(memory, writable)
            except _Refusal as refusal:
                # Another interface may express what this one cannot (DLPack: a tensor that wants a gradient).
                reason = reason or str(refusal)
    try:
        return _from_buffer(memory, writable)
    except _Refusal as refusal:
        what = "destination" if writable else "source"
        of, which = (
            (kind.__name__, "") if piece is None else (piece[0], f" (piece {piece[1]}, of type {kind.__name__})")
        )
        raise InvalidBufferError(f"key {shown(key)}: {what} of type {of}: {reason or refusal}{which}") from refusal


# ---- the buffer protocol ----


def _from_buffer(memory: object, writable: bool) -> Region:
    if type(memory) not in _PLAIN:
        try:
            view = memoryview(cast(bytes, memory))
        except TypeError as error:
            raise _Refusal("no DLPack, no __cuda_array_interface__, no data_ptr(), no buffer") from error
        except (BufferError, ValueError) as error:
            raise _Refusal(str(error)) from error
        if "O" in view.format:
            raise _Refusal("it holds Python objects, not bytes")
        if not view.c_contiguous:
            raise _Refusal(f"not C-contiguous: shape {view.shape}, strides {view.strides} bytes")
        if writable and view.readonly:
            raise _Refusal("read-only")
    try:
        # The cdata is the export: while it lives, a bytearray cannot be resized, nor an mmap closed.
        held = ffi.from_buffer("char[]", memory, require_writable=writable)
    except (TypeError, BufferError, ValueError) as error:
        raise _Refusal("read-only" if isinstance(memory, bytes) else str(error)) from error
    address, size = int(ffi.cast("uintptr_t", held)), len(held)
    if isinstance(memory, memoryview):
        # A memoryview that the garbage collector clears while it has exports crashes CPython when those end; and a
        # traceback makes such cycles. One of our own has none, and holds the memory as well.
        ffi.release(held)
        return Region(address, size, None, ffi.cast("void *", address), memoryview(memory))
    return Region(address, size, None, held, held)


# ---- DLPack ----


class _Device(IntEnum):
    CPU = 1
    CUDA = 2
    CUDA_HOST = 3
    CUDA_MANAGED = 13


_HOST = frozenset({_Device.CPU, _Device.CUDA_HOST})
# Managed memory may be on the GPU at any time: it goes the GPU's way, whose copies take it as they take device memory.
_GPU = frozenset({_Device.CUDA, _Device.CUDA_MANAGED})
_READ_ONLY = 1


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_capsule_is = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is.argtypes = (ctypes.py_object, ctypes.c_char_p)
_capsule_is.restype = ctypes.c_int
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_capsule_pointer.restype = ctypes.c_void_p


def _from_dlpack(memory: SupportsDLPack, writable: bool) -> Region:
    try:
        device = int(cast(int, memory.__dlpack_device__()[0]))
        # The caller orders the streams (get_into's `stream`), so the producer is to order nothing.
        stream = -1 if device in _GPU else None
        try:
            capsule = memory.__dlpack__(stream=stream, max_version=(1, 1))
        except TypeError:  # of before version 1
            capsule = memory.__dlpack__(stream=stream)
    except Exception as error:  # each library has its own
        raise _Refusal(f"DLPack: {error}") from error
    # The capsule is not renamed: then it frees what it holds when it goes, and is our hold on the memory.
    if _capsule_is(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise _Refusal(f"DLPack of version {versioned.major}.{versioned.minor}, 1 is known")
        if writable and versioned.flags & _READ_ONLY:
            raise _Refusal("read-only")
        tensor = versioned.tensor
    elif _capsule_is(capsule, b"dltensor"):
        tensor = _Managed.from_address(_capsule_pointer(capsule, b"dltensor")).tensor
    else:
        raise _Refusal("its DLPack capsule is none, or used up")
    shape = tensor.shape[: tensor.ndim]
    if tensor.strides and not _contiguous(shape, tensor.strides[: tensor.ndim], 1):
        raise _Refusal(f"not C-contiguous: shape {tuple(shape)}, strides {tuple(tensor.strides[: tensor.ndim])}")
    if tensor.bits * tensor.lanes % 8:
        raise _Refusal(f"elements of {tensor.bits * tensor.lanes} bits are no whole bytes")
    size = math.prod(shape) * (tensor.bits * tensor.lanes // 8)
    address = (tensor.data or 0) + tensor.byte_offset
    if tensor.device_type in _HOST:
        return Region(address, size, None, ffi.cast("void *", address), (capsule, memory))
    if tensor.device_type in _GPU:
        return Region(address, size, tensor.device_id, ffi.cast("void *", address), (capsule, memory))
    raise _Refusal(f"memory of a device of DLPack type {tensor.device_type}: host and CUDA are known")


def _contiguous(shape: Sequence[int], strides: Sequence[int], item: int) -> bool:
    if 0 in shape:
        return True
    expected = item
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


# ---- __cuda_array_interface__ ----


def _from_cuda_array(memory: SupportsCudaArray, writable: bool) -> Region:
    try:
        interface = memory.__cuda_array_interface__
        address, read_only = cast(tuple[int, bool], interface["data"])
        shape = cast(tuple[int, ...], interface["shape"])
        strides = cast(tuple[int, ...] | None, interface.get("strides"))
        item = int(cast(str, interface["typestr"])[2:])
    except Exception as error:
        raise _Refusal(f"__cuda_array_interface__: {type(error).__name__}: {error}") from error
    if cast(str, interface["typestr"])[1] == "O":
        raise _Refusal("it holds Python objects, not bytes")
    if writable and read_only:
        raise _Refusal("read-only")
    if strides is not None and not _contiguous(shape, strides, item):
        raise _Refusal(f"not C-contiguous: shape {shape}, strides {strides} bytes")
    address = int(address or 0)
    return Region(address, math.prod(shape) * item, ANY_DEVICE, ffi.cast("void *", address), memory)


# ---- torch ----


class _TorchTensor(Protocol):
    @property
    def device(self) -> _TorchDevice: ...
    @property
    def shape(self) -> Sequence[int]: ...
    def data_ptr(self) -> int: ...
    def is_contiguous(self) -> bool: ...
    def numel(self) -> int: ...
    def element_size(self) -> int: ...
    def stride(self) -> Sequence[int]: ...


class _TorchDevice(Protocol):
    type: str
    index: int | None


def _from_data_pointer(memory: _TorchTensor, writable: bool) -> Region:
    try:
        device, size, address = memory.device, memory.numel() * memory.element_size(), memory.data_ptr()
        contiguous = memory.is_contiguous()
    except Exception as error:
        raise _Refusal(f"data_ptr(): {type(error).__name__}: {error}") from error
    if not contiguous:
        raise _Refusal(f"not C-contiguous: shape {tuple(memory.shape)}, strides {tuple(memory.stride())}")
    if device.type not in ("cpu", "cuda"):
        raise _Refusal(f"memory of device {device.type!r}: cpu and cuda are known")
    index = None if device.type == "cpu" else ANY_DEVICE if device.index is None else device.index
    return Region(address, size, index, ffi.cast("void *", address), memory)


_WAYS: tuple[tuple[str, Callable[..., Region]], ...] = (
    ("__dlpack__", _from_dlpack),
    ("__cuda_array_interface__", _from_cuda_array),
    ("data_ptr", _from_data_pointer),
)
