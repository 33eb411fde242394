"""Blocks into GPU memory and from there (native/include/kvfs_gpu.h), and what of it can be had on this machine.

CUDA is looked at in a subprocess with a timeout (gpu_probe.py): a driver that hangs or crashes takes nothing with it.

Modes: `gds` is the devices' DMA straight into the GPU. A probe has then shown, for every device of the pool and every
GPU, that it works and is direct. `staged` goes through a ring of pinned memory in which every byte is verified. `host`
is for machines without a GPU, or where none is wanted. KVFS_CUDA_LIBRARY, KVFS_CUFILE_LIBRARY and KVFS_NVRTC_LIBRARY
name other files than libcuda.so.1, libcufile.so.0 and libnvrtc's; a test double of libcuda says that it is one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import re
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvfs.errors import (
    ClientError,
    DeadlineError,
    InvalidBufferError,
    MissingFeatureError,
    SmallBufferError,
    client_error,
)

if TYPE_CHECKING:
    from kvfs.client.keys import Keys
    from kvfs.client.library import Library
    from kvfs.client.memory import Region

PROBE_TIMEOUT_S = 20.0
# Rings, each with pinned memory and a stream of its own. A call takes one for each PART_SIZE bytes, as far as there are
# any: one thread proves some 6 GB/s, and PCIe takes ten times that. Calls without a ring wait for one.
READERS_MAX = max(2, min(8, len(os.sched_getaffinity(0)) // 2))
PART_SIZE = 8 << 20
# A call waits for a ring at most so many of the client's timeouts.
_RING_WAIT = 4
ANY_DEVICE = -1
CUDA_LIBRARY_VARIABLE = "KVFS_CUDA_LIBRARY"
CUFILE_LIBRARY_VARIABLE = "KVFS_CUFILE_LIBRARY"
NVRTC_LIBRARY_VARIABLE = "KVFS_NVRTC_LIBRARY"

_log = logging.getLogger(__name__)


# ---- what there is ----


@dataclass(frozen=True, slots=True)
class Cuda:
    """libcuda's answer. error: why nothing can be had of it, or empty. double: no driver, but a test's stand-in."""

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
    """The answer of libcufile. nvidia_fs: the kernel module for it. nvrtc: a path of libnvrtc, or empty: found by the
    dynamic linker. nvrtc_error: the reason that it does not compile the checksums."""

    library: str = ""
    error: str = ""
    version: str = ""
    nvidia_fs: bool = False
    nvrtc: str = ""
    nvrtc_error: str = ""

    @property
    def missing(self) -> str:
        """The first thing that gds lacks, before any GPU or device is asked."""
        return "; ".join(filter(None, (self.error, self.nvrtc_error)))

    @property
    def text(self) -> str:
        module = "nvidia-fs is loaded" if self.nvidia_fs else "nvidia-fs is not loaded"
        compiler = self.nvrtc_error or f"libnvrtc compiles the checksums{f', {self.nvrtc}' if self.nvrtc else ''}"
        return f"{self.error or f'libcufile {self.version}, {self.library}'}; {module}; {compiler}"


@dataclass(frozen=True, slots=True)
class Direct:
    """The proof that a pool's devices can be read straight into every GPU. error: which condition failed, or empty."""

    error: str = ""
    devices: int = 0
    gpus: int = 0

    @property
    def text(self) -> str:
        return self.error or f"{self.devices} devices read directly into {self.gpus} GPUs, by cuFile's own statistics"


def examine_cuda() -> Cuda:
    """In a subprocess; asked once, as the answer stays for the life of a process."""
    found = json.loads(_examined("cuda", os.environ.get(CUDA_LIBRARY_VARIABLE, "")))
    return Cuda(**{**found, "devices": tuple(found.get("devices", ()))})


def examine_cufile() -> CuFile:
    """The same for libcufile."""
    libraries = os.environ.get(CUFILE_LIBRARY_VARIABLE, ""), os.environ.get(NVRTC_LIBRARY_VARIABLE, "")
    return CuFile(**json.loads(_examined("cufile", *libraries)))


def examine_direct(path: str, gpus: int) -> Direct:
    """gds on the pool mounted at a path: everything that opening it proves, in a subprocess. Asked every time."""
    cufile = examine_cufile()
    if cufile.missing:
        return Direct(error=cufile.missing)
    arguments = ("--path", path, "--gpus", str(gpus), "--cufile", cufile.library, "--nvrtc", cufile.nvrtc)
    return Direct(**json.loads(_ask("gds", arguments)))


@functools.cache
def _examined(what: str, *_libraries: str) -> str:
    """The libraries are in the environment already, and here for the cache."""
    return _ask(what, ())


def _ask(what: str, arguments: Sequence[str]) -> str:
    """The line that the probe prints, or one with the reason why it did not."""
    name = "gds" if what == "gds" else f"lib{what}"
    # The path of the package that asks, wherever it lies.
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]))
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvfs.client.gpu_probe", "--probe", what, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
    except OSError as error:
        return json.dumps({"error": f"the probe of {name} did not start: {error}"})
    try:
        output, messages = process.communicate(timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that a driver holds does not die
            process.communicate(timeout=1)
        return json.dumps({"error": f"{name}: no answer in {PROBE_TIMEOUT_S:g} s"})
    lines = output.strip().splitlines()
    if process.returncode != 0 or not lines:
        last = (messages.strip().splitlines() or ["no message"])[-1]
        return json.dumps({"error": f"the probe of {name} ended with {process.returncode}: {last}"})
    return lines[-1]


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


@dataclass(frozen=True, slots=True)
class DirectStatistics:
    """struct kvfs_gpu_direct_statistics: counts summed over this reader's rings. But known, direct_reads and
    indirect_reads are cuFile's own figures for this process and GPU, from the ring that was opened first."""

    blocks: int = 0
    bytes: int = 0
    reads: int = 0
    fallbacks: int = 0
    mismatches: int = 0
    overdue: int = 0
    known: int = 0
    direct_reads: int = 0
    indirect_reads: int = 0

    @property
    def direct(self) -> bool:
        """True: the reads may be called direct."""
        return bool(self.known and self.direct_reads and not self.indirect_reads)


def open_reader(library: Library, wanted: str) -> GpuReader:
    """Open the reader that fills GPU memory for a client, in the mode wanted: "auto", "staged", "gds" or "host".

    No GPU is touched before the first destination. Raises MissingFeatureError, with the reason, if a named mode is not
    available.
    """
    if wanted == "host":
        return GpuReader(library, "host", "asked for")
    cuda = examine_cuda()
    why = "asked for"
    if wanted != "staged":
        direct = Direct(cuda.error) if cuda.error else examine_direct(library.name, len(cuda.devices))
        if not direct.error:
            cufile = examine_cufile()
            reason = f"{cuda.text}; {direct.text}"
            return GpuReader(library, "gds", reason, cufile=cufile.library, nvrtc=cufile.nvrtc, wanted=wanted)
        why = f"gds is not to be had: {direct.error}"
        if wanted == "gds":
            raise MissingFeatureError(f"{why}. Use staged")
    if not cuda.error:
        return GpuReader(library, "staged", f"{cuda.text}; {why}")
    if wanted == "staged":
        raise MissingFeatureError(f"staged is not to be had: {cuda.error}")
    return GpuReader(library, "host", cuda.error)


class GpuReader:
    """Made by open_reader(); any thread may call anything, but for close()."""

    def __init__(
        self,
        library: Library,
        mode: str,
        reason: str,
        *,
        slot_count: int = 0,
        slot_size: int = 0,
        readers: int = READERS_MAX,
        cufile: str = "",
        nvrtc: str = "",
        wanted: str = "",
        indirect: bool = False,
    ) -> None:
        """indirect is for diagnosis: gds also where cuFile's statistics show no direct reads."""
        self.mode = mode
        self.reason = reason
        self._library = library
        self._slots = (slot_count, slot_size)
        self._libraries = (cufile.encode(), nvrtc.encode())
        self._wanted = wanted
        self._indirect = indirect
        # True: a read may go on after a call, also when the mode has changed.
        self.may_owe = mode == "gds"
        self._readers = readers
        self._changed = threading.Condition()
        self._idle: dict[int, list[object]] = {}
        self._opened: dict[int, int] = {}
        self._closed = False
        # For all parts of a call but the first; its threads are made when they are first needed, and then stay.
        self._threads = ThreadPoolExecutor(max(1, readers - 1), "kvfs-gpu")

    def get_into(self, keys: Keys, destinations: Sequence[tuple[int, int, int]], stream: int) -> list[int | None]:
        """Read blocks into GPU memory: (address, size, device) for each key. Returns bytes read, None for a miss.

        stream: a raw CUDA stream of that GPU. Earlier work on it is done before a byte is written, and later work on it
        finds the bytes. Copies may still be under way when this returns: destinations must stay until the stream has
        passed. 0: they have arrived when this returns. Raises InvalidBufferError, naming the key; SmallBufferError;
        ClientError with EIO where CUDA fails, ETIMEDOUT where the GPU hangs.
        """
        if self.mode == "host":
            raise MissingFeatureError(
                f"key {keys_shown(keys, 0)}: its destination is in GPU memory, and the mode is host: {self.reason}"
            )
        from kvfs._native import ffi, lib
        from kvfs.lent import lent

        assert len(destinations) == keys.count, (len(destinations), keys.count)
        device = self._device(keys, destinations)
        pointers = [(ffi.cast("void *", address), size) for address, size, _ in destinations]
        buffers = ffi.new("struct kvfs_buffer[]", pointers)
        results = array("q", bytes(8 * keys.count))
        out = lent(results, "int64_t[]")

        def fill(first: int, end: int) -> None:
            with self._reader(device) as reader:
                status = lib.kvfs_gpu_get(reader, keys.part(first, end), buffers + first, stream, out + first)
                if status < 0:
                    raise self._error(status, keys, range(first, end))

        parts = _parts([size for _, size, _ in destinations], self._readers)
        waiting = [self._threads.submit(fill, *part) for part in parts[1:]]
        try:
            fill(*parts[0])
        finally:
            wait(waiting)  # they write into the caller's memory
        for part_done in waiting:
            part_done.result()
        read = [value if value >= 0 else None for value in results]
        small = [i for i, value in enumerate(results) if value == -errno.ERANGE]
        if small:
            i = small[0]
            size = self._library.sizes(keys)[i]
            others = f", and {len(small) - 1} more such" if len(small) > 1 else ""
            raise SmallBufferError(
                f"key {keys_shown(keys, i)}: the block has {size} bytes, its destination {destinations[i][1]}{others}",
                read,
            )
        return read

    def put(
        self, keys: Keys, blocks: Sequence[Sequence[Region]], stream: int, *, if_absent: bool, parents: Keys | None
    ) -> tuple[list[int], Exception | None]:
        """Store blocks from GPU memory, each the pieces of its memory; Library.put()'s answer. Earlier work on the
        stream is done before a byte is read, and all are read when this returns."""
        if self.mode == "host":
            raise MissingFeatureError(
                f"key {keys_shown(keys, 0)}: its bytes are in GPU memory, and the mode is host: {self.reason}"
            )
        from kvfs._native import lib
        from kvfs.client.library import Vectors, put_options
        from kvfs.lent import lent

        assert len(blocks) == keys.count, (len(blocks), keys.count)
        places = [(region.address, region.size, cast(int, region.device)) for block in blocks for region in block]
        owners = [i for i, block in enumerate(blocks) for _ in block]
        device = self._device(keys, places, owners)
        options, memory = put_options(if_absent, parents), Vectors(blocks)
        results = array("q", [-errno.ECANCELED]) * keys.count
        with self._reader(device) as reader:
            status = lib.kvfs_gpu_put(reader, keys.struct, memory.struct, options, stream, lent(results, "int64_t[]"))
            error = self._error(status, keys, owners) if status < 0 else None
        if isinstance(error, InvalidBufferError):
            raise error
        return results.tolist(), error

    def statistics(self) -> GpuStatistics:
        """Sums over the rings that no call is using at the moment."""
        from kvfs._native import ffi, lib

        totals = dict.fromkeys((field.name for field in fields(GpuStatistics)), 0)
        out = ffi.new("struct kvfs_gpu_statistics *")
        with self._changed:
            for reader in [reader for readers in self._idle.values() for reader in readers]:
                if lib.kvfs_gpu_statistics_get(reader, out) == 0:
                    for name in totals:
                        totals[name] += getattr(out, name)
        return GpuStatistics(**totals)

    def direct_statistics(self) -> DirectStatistics:
        """Sums over the rings that no call is using at the moment."""
        from kvfs._native import ffi, lib

        totals = dict.fromkeys((field.name for field in fields(DirectStatistics)), 0)
        out = ffi.new("struct kvfs_gpu_direct_statistics *")
        with self._changed:
            for reader in [reader for readers in self._idle.values() for reader in readers]:
                if lib.kvfs_gpu_direct_statistics_get(reader, out) == 0:
                    for name in totals:
                        whole = name in ("known", "direct_reads", "indirect_reads")
                        value = getattr(out, name)
                        totals[name] = max(totals[name], value) if whole else totals[name] + value
        return DirectStatistics(**totals)

    def try_out(self, device: int) -> None:
        """Open a ring for a GPU, which for gds proves all that it needs. Raises KvfsError."""
        with self._reader(device):
            pass

    def close(self) -> None:
        """Wait for copies under way. No call may be under way, and none comes afterwards; before the client's end.
        Reads that were believed to be direct and were not, by cuFile's own statistics, are logged as a warning."""
        found = self.direct_statistics() if self.may_owe and not self._indirect else DirectStatistics()
        if found.reads and not found.direct:
            _log.warning(
                "gds: by cuFile's statistics %d reads were direct, %d went through host memory: not direct",
                found.direct_reads, found.indirect_reads,
            )  # fmt: skip
        self._threads.shutdown()
        with self._changed:
            self._closed = True
            readers = [reader for idle in self._idle.values() for reader in idle]
            self._idle.clear()
        if readers:
            from kvfs._native import lib

            for reader in readers:
                lib.kvfs_gpu_close(reader)

    def _device(self, keys: Keys, places: Sequence[tuple[int, int, int]], owners: Sequence[int] | None = None) -> int:
        """The GPU of all of them; where nobody said which, that of the first. owners: the key of each, if not one for
        one."""
        owners = owners if owners is not None else range(len(places))
        named = {device for _, _, device in places if device != ANY_DEVICE}
        if len(named) > 1:
            first = places[0][2]
            i = next(i for i, (_, _, device) in enumerate(places) if device not in (ANY_DEVICE, min(named)))
            raise InvalidBufferError(
                f"key {keys_shown(keys, owners[i])}: its memory is on GPU {places[i][2]}, that of key "
                f"{keys_shown(keys, 0)} on GPU {first if first != ANY_DEVICE else min(named)}: one call, one GPU"
            )
        if named:
            return named.pop()
        from kvfs._native import ffi, lib

        for i, (address, size, _) in enumerate(places):
            if size:
                device = int(lib.kvfs_gpu_device_of(ffi.cast("void *", address)))
                if device < 0:
                    raise InvalidBufferError(
                        f"key {keys_shown(keys, owners[i])}: {ffi.string(lib.kvfs_error()).decode()}"
                    )
                return device
        return 0

    @contextlib.contextmanager
    def _reader(self, device: int) -> Iterator[object]:
        """A ring that no other call uses: the one used last, or a new one, or the first that becomes free."""
        reader: object | None = None
        with self._changed:
            limit_s = _RING_WAIT * self._library.timeout_s
            if not self._changed.wait_for(
                lambda: self._closed or self._idle.get(device) or self._opened.get(device, 0) < self._readers,
                timeout=limit_s,
            ):
                raise DeadlineError(f"GPU {device}: none of {self._readers} rings became free in {limit_s:g} s")
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
        libraries = [ffi.new("char[]", name) if name else ffi.NULL for name in self._libraries]
        options = ffi.new(
            "struct kvfs_gpu_options *",
            {
                "size": ffi.sizeof("struct kvfs_gpu_options"),
                "mode": lib.KVFS_GPU_GDS if self.mode == "gds" else lib.KVFS_GPU_STAGED,
                "device": device,
                "slot_count": self._slots[0],
                "slot_size": self._slots[1],
                "flags": lib.KVFS_GPU_INDIRECT if self._indirect else 0,
                "cufile": libraries[0],
                "nvrtc": libraries[1],
            },
        )
        out = ffi.new("struct kvfs_gpu **")
        with self._library.call():
            status = lib.kvfs_gpu_open(self._library.handle, options, out)
        text = ffi.string(lib.kvfs_error()).decode(errors="replace") if status < 0 else ""
        if status == -errno.EOPNOTSUPP and self._wanted == "auto":  # it was to be had when the probe looked
            self.mode, self.reason = "staged", f"gds is not to be had: {text.removeprefix('no gds: ')}"
            return self._open(device)
        if status == -errno.EOPNOTSUPP:
            raise MissingFeatureError(text)
        if status < 0:
            raise client_error(-status, text)
        return out[0]

    @staticmethod
    def _error(status: int, keys: Keys, owners: Sequence[int]) -> Exception:
        """owners: the key of each buffer of the call."""
        from kvfs._native import ffi, lib

        text = ffi.string(lib.kvfs_error()).decode(errors="replace")
        named = re.match(r"buffers? (\d+)", text)
        if status == -errno.EINVAL and named:
            return InvalidBufferError(f"key {keys_shown(keys, owners[int(named[1])])}: {text}")
        return client_error(-status, text)


def _parts(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Blocks as (first, end), in at most that many parts of PART_SIZE or more, about alike."""
    total = sum(sizes)
    part = max(PART_SIZE, -(-total // most))
    parts: list[tuple[int, int]] = []
    first = so_far = 0
    for i, size in enumerate(sizes):
        so_far += size
        if so_far >= part and len(parts) < most - 1:
            parts.append((first, i + 1))
            first, so_far = i + 1, 0
    return [*parts, (first, len(sizes))] if first < len(sizes) or not parts else parts


def keys_shown(keys: Keys, index: int) -> str:
    """A key of a packed batch as errors name it."""
    from kvfs.client.keys import shown

    start = sum(keys.sizes[:index])
    return shown(keys.data[start : start + keys.sizes[index]])
