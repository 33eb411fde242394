"""Blocks into GPU memory (native/include/kvfs_gpu.h), and what of it can be had on this machine.

CUDA is looked at in a subprocess with a timeout, so that a driver that hangs or crashes takes nothing with it:

    python -m kvfs.client.gpu --probe cuda|cufile       one line of JSON

Modes: `staged`, through a ring of pinned memory in which every byte is verified, and `host`, where there is no GPU or
none is wanted. `gds`, the devices' DMA straight into the GPU, is not to be had: there is no code for it, as none could
be proven (docs/gpu.md). KVFS_CUDA_LIBRARY names another file than libcuda.so.1; a test double says that it is one.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import functools
import json
import os
import re
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from kvfs.errors import ClientError, InvalidBufferError, MissingFeatureError, SmallBufferError, client_error

if TYPE_CHECKING:
    from kvfs.client.client import Client
    from kvfs.client.keys import Keys

PROBE_TIMEOUT_S = 20.0
# More calls at a time than this wait for one another: each has a ring of pinned memory and a stream of its own.
READERS_MAX = 4
ANY_DEVICE = -1
CUDA_LIBRARY_VARIABLE = "KVFS_CUDA_LIBRARY"
NO_MODULES = "cuFileDriverOpen is not tried: without /proc/modules it never returns"
NO_GDS = "gds is not to be had: kvfs has no direct path, as none could be proven on a GPU"


# ---- what there is ----


@dataclass(frozen=True, slots=True)
class Cuda:
    """What libcuda says. error: why nothing can be had of it, or empty. double: no driver, but a test's stand-in."""

    library: str = ""
    error: str = ""
    double: bool = False
    driver_version: str = ""
    devices: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        if self.error:
            return self.error
        kind = "TEST DOUBLE, no GPU" if self.double else "CUDA"
        return f"{kind} {self.driver_version}, {self.library}: {', '.join(self.devices)}"


@dataclass(frozen=True, slots=True)
class CuFile:
    """What libcufile says of itself; nvidia_fs: the kernel module for it."""

    library: str = ""
    error: str = ""
    version: str = ""
    nvidia_fs: bool = False

    @property
    def text(self) -> str:
        module = "nvidia-fs is loaded" if self.nvidia_fs else "nvidia-fs is not loaded"
        return f"{self.error}; {module}" if self.error else f"libcufile {self.version}, {self.library}; {module}"


def examine_cuda() -> Cuda:
    """In a subprocess; asked once, as the answer stays for the life of a process."""
    found = json.loads(_examined("cuda", os.environ.get(CUDA_LIBRARY_VARIABLE, "")))
    return Cuda(**{**found, "devices": tuple(found.get("devices", ()))})


def examine_cufile() -> CuFile:
    """The same for libcufile."""
    return CuFile(**json.loads(_examined("cufile", "")))


@functools.cache
def _examined(what: str, library: str) -> str:
    """What the probe prints, or why it did not; `library` is in the environment already, and here for the cache."""
    # Of the package that asks, wherever it lies.
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]))
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvfs.client.gpu", "--probe", what],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
    except OSError as error:
        return json.dumps({"error": f"the probe of lib{what} did not start: {error}"})
    try:
        output, messages = process.communicate(timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that a driver holds does not die
            process.communicate(timeout=1)
        return json.dumps({"error": f"lib{what}: no answer in {PROBE_TIMEOUT_S:g} s"})
    lines = output.strip().splitlines()
    if process.returncode != 0 or not lines:
        last = (messages.strip().splitlines() or ["no message"])[-1]
        return json.dumps({"error": f"the probe of lib{what} ended with {process.returncode}: {last}"})
    return lines[-1]


def probe_cuda() -> Cuda:
    """Here, in this process: call it in one of its own."""
    name = os.environ.get(CUDA_LIBRARY_VARIABLE) or "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        return Cuda(name, error=f"no CUDA: {error}")
    double = hasattr(library, "fake_cuda_is_double")
    number, count = ctypes.c_int(), ctypes.c_int()

    def failed(function: str, code: int) -> Cuda:
        text = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(text))
        why = (text.value or b"unknown error").decode()
        return Cuda(name, error=f"{function}: {why} ({code})", double=double)

    for function, arguments in (
        ("cuInit", (0,)),
        ("cuDriverGetVersion", (ctypes.byref(number),)),
        ("cuDeviceGetCount", (ctypes.byref(count),)),
    ):
        if code := getattr(library, function)(*arguments):
            return failed(function, code)
    devices = []
    for index in range(count.value):
        device, text, size = ctypes.c_int(), ctypes.create_string_buffer(100), ctypes.c_size_t()
        code = library.cuDeviceGet(ctypes.byref(device), index) or library.cuDeviceGetName(text, 100, device)
        code = code or library.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        if code:
            return failed(f"GPU {index}", code)
        devices.append(f"GPU {index}: {text.value.decode(errors='replace')}, {size.value >> 20} MiB")
    version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    none = "" if devices else "CUDA sees no GPU"
    return Cuda(name, error=none, double=double, driver_version=version, devices=tuple(devices))


class CuFileStatus(ctypes.Structure):
    """What most of its functions return, by value."""

    _fields_ = (("error", ctypes.c_int), ("cuda_error", ctypes.c_int))


def probe_cufile() -> CuFile:
    """Here, in this process: call it in one of its own."""
    modules = Path("/proc/modules")
    loaded = modules.exists() and any(line.startswith("nvidia_fs ") for line in modules.read_text().splitlines())
    found, library = "", None
    for name in ("libcufile.so.0", *_wheels("libcufile.so.0")):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        found = name
        break
    if library is None:
        return CuFile(error="no libcufile.so.0", nvidia_fs=loaded)
    number = ctypes.c_int()
    library.cuFileGetVersion.restype = library.cuFileDriverOpen.restype = CuFileStatus
    library.cuFileGetVersion(ctypes.byref(number))
    version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    if not modules.exists():
        return CuFile(found, f"libcufile {version}: {NO_MODULES}", version, loaded)
    status = library.cuFileDriverOpen()
    failed = f"libcufile {version}: cuFileDriverOpen: error {status.error} (CUDA: {status.cuda_error})"
    return CuFile(found, failed if status.error else "", version, loaded)


def _wheels(name: str) -> Iterator[str]:
    """Where NVIDIA's Python packages have their libraries."""
    for directory in sys.path:
        yield from map(str, Path(directory or ".").glob(f"nvidia/*/lib/{name}"))


# ---- reading ----


@dataclass(frozen=True, slots=True)
class GpuStatistics:
    """struct kvfs_gpu_statistics, summed over this reader's rings; counts, but for bytes."""

    blocks: int = 0
    bytes: int = 0
    prestaged: int = 0
    pieces: int = 0
    copies: int = 0
    restarts: int = 0
    slot_waits: int = 0
    slots_stuck: int = 0


def open_reader(client: Client, wanted: str) -> GpuReader:
    """What fills GPU memory for a client, in the mode wanted: "auto", "staged", "gds" or "host". No GPU is touched
    before the first destination. Raises MissingFeatureError, with the reason, if a mode that is named is not to be
    had."""
    if wanted == "gds":
        raise MissingFeatureError(f"{NO_GDS}. Here: {examine_cufile().text}; {examine_cuda().text}. Use staged")
    if wanted == "host":
        return GpuReader(client, "host", "asked for")
    cuda = examine_cuda()
    if not cuda.error:
        return GpuReader(client, "staged", f"{cuda.text}; {NO_GDS}")
    if wanted == "staged":
        raise MissingFeatureError(f"staged is not to be had: {cuda.error}")
    return GpuReader(client, "host", cuda.error)


class GpuReader:
    """Made by open_reader(); any thread may call anything, but for close()."""

    def __init__(
        self,
        client: Client,
        mode: str,
        reason: str,
        *,
        slot_count: int = 0,
        slot_size: int = 0,
        readers: int = READERS_MAX,
    ) -> None:
        self.mode = mode
        self.reason = reason
        self._client = client
        self._slots = (slot_count, slot_size)
        self._readers = readers
        self._changed = threading.Condition()
        self._idle: dict[int, list[object]] = {}
        self._opened: dict[int, int] = {}
        self._closed = False

    def get_into(self, keys: Keys, destinations: Sequence[tuple[int, int, int]], stream: int) -> list[int | None]:
        """Read blocks into GPU memory: (address, size, device) for each key. Returns bytes read, None for a miss.

        stream: a raw CUDA stream of that GPU: what was on it is done before a byte is written, and what comes on it
        afterwards finds the bytes, though copies may still be under way when this returns: destinations must stay
        until the stream has passed. 0: they are there when this returns. Raises InvalidBufferError, naming the key;
        SmallBufferError; ClientError with EIO where CUDA fails, ETIMEDOUT where the GPU hangs.
        """
        if self.mode == "host":
            raise MissingFeatureError(
                f"key {keys_shown(keys, 0)}: its destination is in GPU memory, and the mode is host: {self.reason}"
            )
        from kvfs._native import ffi, lib

        device = self._device(keys, destinations)
        pointers = [(ffi.cast("void *", address), size) for address, size, _ in destinations]
        buffers = ffi.new("struct kvfs_buffer[]", pointers)
        results = array("q", bytes(8 * keys.count))
        with self._reader(device) as reader:
            status = lib.kvfs_gpu_get(reader, keys.struct, buffers, stream, ffi.from_buffer("int64_t[]", results))
            if status < 0:
                raise self._error(status, keys)
        read = [value if value >= 0 else None for value in results]
        small = [i for i, value in enumerate(results) if value == -errno.ERANGE]
        if small:
            i = small[0]
            size = self._client.library.sizes(keys)[i]
            others = f", and {len(small) - 1} more such" if len(small) > 1 else ""
            raise SmallBufferError(
                f"key {keys_shown(keys, i)}: the block has {size} bytes, its destination {destinations[i][1]}{others}",
                read,
            )
        return read

    def statistics(self) -> GpuStatistics:
        """Of the rings that no call is using at the moment."""
        from kvfs._native import ffi, lib

        totals = dict.fromkeys((field.name for field in fields(GpuStatistics)), 0)
        out = ffi.new("struct kvfs_gpu_statistics *")
        with self._changed:
            for reader in [reader for readers in self._idle.values() for reader in readers]:
                if lib.kvfs_gpu_statistics_get(reader, out) == 0:
                    for name in totals:
                        totals[name] += getattr(out, name)
        return GpuStatistics(**totals)

    def close(self) -> None:
        """Wait for copies under way. No call may be under way, and none comes afterwards; before the client's end."""
        with self._changed:
            self._closed = True
            readers = [reader for idle in self._idle.values() for reader in idle]
            self._idle.clear()
        if readers:
            from kvfs._native import lib

            for reader in readers:
                lib.kvfs_gpu_close(reader)

    def _device(self, keys: Keys, destinations: Sequence[tuple[int, int, int]]) -> int:
        """The GPU of all of them; where nobody said which, that of the first."""
        named = {device for _, _, device in destinations if device != ANY_DEVICE}
        if len(named) > 1:
            first = destinations[0][2]
            i = next(i for i, (_, _, device) in enumerate(destinations) if device not in (ANY_DEVICE, min(named)))
            raise InvalidBufferError(
                f"key {keys_shown(keys, i)}: its destination is on GPU {destinations[i][2]}, that of key "
                f"{keys_shown(keys, 0)} on GPU {first if first != ANY_DEVICE else min(named)}: one call fills one GPU"
            )
        if named:
            return named.pop()
        from kvfs._native import ffi, lib

        for i, (address, size, _) in enumerate(destinations):
            if size:
                device = int(lib.kvfs_gpu_device_of(ffi.cast("void *", address)))
                if device < 0:
                    raise InvalidBufferError(f"key {keys_shown(keys, i)}: {ffi.string(lib.kvfs_error()).decode()}")
                return device
        return 0

    @contextlib.contextmanager
    def _reader(self, device: int) -> Iterator[object]:
        """A ring that no other call uses: the one used last, or a new one, or the first that becomes free."""
        reader: object | None = None
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._idle.get(device) or self._opened.get(device, 0) < self._readers
            )
            if self._closed:
                raise ClientError("this client's GPU reader is closed")
            if self._idle.get(device):
                reader = self._idle[device].pop()
            else:
                self._opened[device] = self._opened.get(device, 0) + 1
        try:
            if reader is None:
                reader = self._open(device)
            yield reader
        finally:
            with self._changed:
                if reader is None:
                    self._opened[device] -= 1
                else:
                    self._idle.setdefault(device, []).append(reader)
                self._changed.notify()

    def _open(self, device: int) -> object:
        from kvfs._native import ffi, lib

        if device < 0:
            raise InvalidBufferError(f"GPU {device}: there is no such device")
        options = ffi.new(
            "struct kvfs_gpu_options *",
            {
                "size": ffi.sizeof("struct kvfs_gpu_options"),
                "mode": lib.KVFS_GPU_STAGED,
                "device": device,
                "slot_count": self._slots[0],
                "slot_size": self._slots[1],
            },
        )
        out = ffi.new("struct kvfs_gpu **")
        with self._client.library as handle:
            status = lib.kvfs_gpu_open(handle, options, out)
        if status < 0:
            raise client_error(-status, ffi.string(lib.kvfs_error()).decode(errors="replace"))
        return out[0]

    @staticmethod
    def _error(status: int, keys: Keys) -> Exception:
        from kvfs._native import ffi, lib

        text = ffi.string(lib.kvfs_error()).decode(errors="replace")
        named = re.match(r"buffers? (\d+)", text)
        if status == -errno.EINVAL and named:
            return InvalidBufferError(f"key {keys_shown(keys, int(named[1]))}: {text}")
        return client_error(-status, text)


def keys_shown(keys: Keys, index: int) -> str:
    """A key of a packed batch as errors name it."""
    from kvfs.client.keys import shown

    start = sum(keys.sizes[:index])
    return shown(keys.data[start : start + keys.sizes[index]])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvfs.client.gpu", description="Look at CUDA; one line of JSON.")
    parser.add_argument("--probe", choices=("cuda", "cufile"), required=True)
    probes: dict[str, Callable[[], Cuda | CuFile]] = {"cuda": probe_cuda, "cufile": probe_cufile}
    print(json.dumps(asdict(probes[parser.parse_args().probe]())))


if __name__ == "__main__":
    main()
