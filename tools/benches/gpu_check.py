"""tools/gpu_check: the way into GPU memory on this machine, measured in one run.

Facts, probe, ceilings (pinned memory to GPU; devices to host), and the staged matrix against them. Then correctness,
libcufile on the mount, and a list of checks that did not run. It makes a pool of its own, in a directory that it
removes.

Exit status: 0 every check that ran is right, on a GPU; 1 something is wrong; 2 usage; 3 nothing is wrong, but without a
GPU. With --fake there is a test double in its place: then every line says so, and no figure means anything.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import mmap
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import kvfs
from benches.cuda import LEGACY_STREAM, DeviceMemory, Driver
from kvfs import doctor
from kvfs.client import gpu, gpu_probe
from kvfs.client.gpu import CUDA_LIBRARY_VARIABLE, GpuReader
from kvfs.errors import InvalidBufferError, KvfsError, MissingFeatureError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BLOCK_SIZE = 2 * MIB
GUARD, POISON = 256, 0xA5
COPY_SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
SLOT_SIZES = (256 * KIB, 512 * KIB, MIB, 4 * MIB)
SLOT_COUNTS = (8, 16, 32)
READER_COUNTS = (1, 2, 4, 8)
# The share of the lower ceiling that staged is to reach, with slots of the default size.
AIM, AIM_SLOT_SIZE = 0.9, 256 * KIB
CUFILE_TIMEOUT_S = 60.0
# Of eight bytes each: what begins elsewhere is read staged.
INDIRECT_SIZES = (MIB, 4 * KIB, 64 * KIB + 8, 3 * MIB + 80, 17 * MIB + 4088)
# Per-GPU statistics of libcufile (1.14 and later) lie behind the GPU's UUID: bytes from its start.
CUFILE_COUNTERS = {"n_p2p_reads": 56, "n_nvfs_reads": 64, "n_posix_reads": 72}


class Report:
    """Lines to stdout, and the verdict that they add up to."""

    def __init__(self) -> None:
        self.prefix = ""
        self.wrong: list[str] = []
        self.not_exercised: list[str] = []

    def line(self, text: str = "") -> None:
        for part in text.splitlines() or [""]:
            print(f"{self.prefix}{part}", flush=True)

    def step(self, title: str) -> None:
        self.line()
        self.line(f"== {title}")

    def check(self, name: str, right: bool, detail: str = "") -> None:
        self.line(f"{'right' if right else 'WRONG'}  {name}{f': {detail}' if detail else ''}")
        if not right:
            self.wrong.append(name)

    def skip(self, what: str, why: str) -> None:
        self.line(f"not exercised: {what}: {why}")
        self.not_exercised.append(f"{what}: {why}")


class CheckedPool:
    """A pool of its own, mounted; both are removed at the end, whatever happens. command: the kvfs that does it, where
    this Python has not what a daemon needs."""

    def __init__(self, base: Path, size: int, devices: Sequence[str], command: Sequence[str] = ()) -> None:
        self._command = command or (sys.executable, "-m", "kvfs")
        self.path, self.mount = base / "pool", base / "mount"
        self._where = [part for device in devices for part in ("--device", device)]
        self._where = self._where or ["--files", "4", "--size", f"{size // 4 // MIB}M"]

    def __enter__(self) -> Self:
        self.mount.mkdir()
        _kvfs(self._command, "format", str(self.path), *self._where)
        try:
            _kvfs(self._command, "mount", str(self.path), str(self.mount))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        with suppress(KvfsError):
            _kvfs(self._command, "umount", str(self.mount))
        if os.path.ismount(self.mount):
            subprocess.run(["umount", "-l", str(self.mount)], timeout=30, check=False)

    def devices(self) -> list[Path]:
        """For a pool of files."""
        return [path for path in self.path.rglob("*") if path.is_file() and path.stat().st_size >= 16 * MIB]


def _kvfs(command: Sequence[str], *words: str) -> None:
    result = subprocess.run(
        [*command, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    if result.returncode:
        raise KvfsError(f"kvfs {' '.join(words)}: {result.stdout.strip() or result.returncode}")


def content(size: int, seed: object) -> bytes:
    """Bytes that only this seed gives."""
    return random.Random(f"{seed}").randbytes(size)


# ---- facts ----


def facts(report: Report) -> None:
    report.step("facts")
    report.line(f"{platform.platform()}, {len(os.sched_getaffinity(0))} cores, kvfs {kvfs.__version__}")
    wanted = ("io_uring", "memlock", "/dev/fuse", "fuse max_pages", "cpu", "memory")
    for check in doctor.examine():
        if check.name in wanted:
            report.line(f"{check.name}: {check.state}: {check.found}")
    for path in ("/proc/driver/nvidia/version", "/proc/driver/nvidia-fs/version", "/proc/modules"):
        text = Path(path).read_text(errors="replace") if os.path.exists(path) else ""
        report.line(f"{path}: {text.splitlines()[0] if text else 'not there'}")
    for function in sorted(Path("/sys/bus/pci/devices").glob("*")):
        with suppress(OSError):
            vendor, kind = ((function / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == "0x10de" and kind.startswith("0x03"):  # NVIDIA, display
                names = ("current_link_speed", "current_link_width")
                speed, width = ((function / name).read_text().strip() for name in names)
                report.line(f"PCIe {function.name}: {speed}, x{width}")


# ---- ceilings ----


class Pinned:
    """Host memory that CUDA knows."""

    def __init__(self, driver: Driver, size: int) -> None:
        self._driver = driver
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = (ctypes.c_char * size).from_buffer(self._memory)
        ctypes.memset(self._view, 0x5A, size)
        self.address = ctypes.addressof(self._view)
        with driver.current():
            driver.pin(self.address, size)

    def close(self) -> None:
        with self._driver.current():
            self._driver.unpin(self.address)
        del self._view
        self._memory.close()


def copy_ceilings(report: Report, driver: Driver, seconds: float) -> dict[int, float]:
    """GB/s from pinned memory into the GPU, by the size of a copy; 8 are queued at a time."""
    room = COPY_SIZES[-1]
    rates: dict[int, float] = {}
    pinned, memory = Pinned(driver, room), DeviceMemory(driver, room)
    with driver.current():
        stream = driver.create_stream()
        for size in COPY_SIZES:
            places = max(1, room // size)
            count, began, rounds = 0, time.perf_counter(), 0
            while rounds < 2 or time.perf_counter() - began < seconds:
                for _ in range(8):
                    at = count % places * size
                    driver.copy_on(stream, memory.pointer + at, pinned.address + at, size)
                    count += 1
                driver.synchronize(stream)
                rounds += 1
                if rounds == 1:  # the first round warms up
                    count, began = 0, time.perf_counter()
            rates[size] = count * size / (time.perf_counter() - began) / 1e9
            report.line(f"pinned host to GPU, copies of {size // KIB} KiB: {rates[size]:.2f} GB/s")
        driver.destroy_stream(stream)
    memory.free()
    pinned.close()
    return rates


def _rate(readers: int, seconds: float, size: int, work: Callable[[int], None]) -> float:
    """GB/s of `readers` threads that each call work(reader) again and again; a call moves size bytes."""
    counts, errors = [0] * readers, []
    start = threading.Barrier(readers + 1)
    stop = threading.Event()

    def run(index: int) -> None:
        try:
            work(index)  # warms up
            start.wait()
            while not stop.is_set():
                work(index)
                counts[index] += 1
        except BaseException as error:
            errors.append(error)
            start.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(readers)]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    with suppress(threading.BrokenBarrierError):
        start.wait()
        began = time.perf_counter()
        time.sleep(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(counts) * size / (time.perf_counter() - began) / 1e9


def source_ceilings(report: Report, client: kvfs.Client, keys: Sequence[str], seconds: float) -> dict[int, float]:
    """GB/s from the devices into host memory, checksums on, by the number of readers, 16 blocks in flight in each."""
    rates: dict[int, float] = {}
    for readers in READER_COUNTS:
        shares = [keys[index::readers] for index in range(readers)]
        buffers = [[client.buffer(BLOCK_SIZE) for _ in share] for share in shares]

        def work(index: int, shares: list[Sequence[str]] = shares, buffers: list[list[memoryview]] = buffers) -> None:
            if None in client.get_into(list(zip(shares[index], buffers[index], strict=True))):
                raise KvfsError("a block was missed")

        rates[readers] = _rate(readers, seconds, len(keys) // readers * BLOCK_SIZE, work)
        report.line(f"devices to host memory, {readers} readers: {rates[readers]:.2f} GB/s")
    return rates


# ---- the staged matrix ----


def direct(
    report: Report,
    driver: Driver,
    client: kvfs.Client,
    keys: Sequence[str],
    seconds: float,
    sources: dict[int, float],
) -> None:
    """Blocks from the devices straight into the GPU, and the share of the rate from devices into host memory."""
    files = gpu.examine_cufile()
    for readers in READER_COUNTS:
        reader = GpuReader(client.library, "gds", "", readers=readers, cufile=files.library, nvrtc=files.nvrtc)
        rate = _reader_rate(reader, driver, keys, readers, seconds)
        found = reader.direct_statistics()
        reader.close()
        report.line(
            f"gds, {readers} readers: {rate / sources[readers]:.2f} of devices to host: {rate:.2f} GB/s; "
            f"{found.blocks} blocks, {found.fallbacks} read staged, {found.mismatches} mismatches; by cuFile "
            f"{found.direct_reads} direct reads, {found.indirect_reads} through host memory"
        )
        report.check(f"gds, {readers} readers: direct by cuFile's statistics", found.direct)
        report.check(f"gds, {readers} readers: no block needed the ring", not found.fallbacks)


def _reader_rate(reader: GpuReader, driver: Driver, keys: Sequence[str], readers: int, seconds: float) -> float:
    """GB/s of that many threads, each with its share of the blocks and memory of the GPU for them."""
    shares = [keys[index::readers] for index in range(readers)]
    memories = [DeviceMemory(driver, len(share) * BLOCK_SIZE) for share in shares]
    packed = [kvfs.client.keys.pack(share) for share in shares]
    places = [
        [(memory.pointer + i * BLOCK_SIZE, BLOCK_SIZE, driver.device) for i in range(len(share))]
        for memory, share in zip(memories, shares, strict=True)
    ]

    def work(index: int) -> None:
        if None in reader.get_into(packed[index], places[index], 0):
            raise KvfsError("a block was missed")

    try:
        return _rate(readers, seconds, len(keys) // readers * BLOCK_SIZE, work)
    finally:
        for memory in memories:
            memory.free()


def matrix(
    report: Report,
    driver: Driver,
    client: kvfs.Client,
    keys: Sequence[str],
    seconds: float,
    copies: dict[int, float],
    sources: dict[int, float],
    unjudged: str,
) -> None:
    """Blocks into the GPU by one call, and the share of the lower ceiling. Ceilings: the most that came from devices
    to host memory, and by copies to the GPU. `unjudged`: the reason for no verdict."""
    best, ceiling = 0.0, min(max(sources.values()), max(copies.values()))
    for slot_size in SLOT_SIZES:
        for slot_count in SLOT_COUNTS:
            for readers in READER_COUNTS:
                reader = GpuReader(
                    client.library, "staged", "", slot_count=slot_count, slot_size=slot_size, readers=readers
                )
                rate = _reader_rate(reader, driver, keys, 1, seconds)
                reader.close()
                ratio = rate / ceiling
                if slot_size == AIM_SLOT_SIZE:
                    best = max(best, ratio)
                report.line(
                    f"staged, one call, {readers} rings of {slot_count} slots of {slot_size // KIB} KiB: "
                    f"{ratio:.2f} of {ceiling:.2f} GB/s: {rate:.2f} GB/s"
                )
    name = f"staged reaches {AIM} of its ceiling at slots of {AIM_SLOT_SIZE // KIB} KiB"
    if unjudged:
        report.skip(name, unjudged)
    else:
        report.check(name, best >= AIM, f"best {best:.2f}")


def stores(report: Report, driver: Driver, client: kvfs.Client, seconds: float) -> None:
    """GB/s of puts of 32 blocks, from host memory that needs no copy and from the GPU's."""
    count = 32
    memory, host = DeviceMemory(driver, count * BLOCK_SIZE), client.buffer(count * BLOCK_SIZE)
    on_gpu = [memory.part(i * BLOCK_SIZE, BLOCK_SIZE) for i in range(count)]
    on_host = [host[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE] for i in range(count)]
    rates = {}
    for name, blocks in (("host memory", on_host), ("the GPU", on_gpu)):
        items = [(f"store {i}", block) for i, block in enumerate(blocks)]

        def work(_: int, items: Sequence[tuple[str, Any]] = items) -> None:
            client.put(items)

        rates[name] = _rate(1, seconds, count * BLOCK_SIZE, work)
        report.line(f"puts from {name}: {rates[name]:.2f} GB/s")
    report.line(f"puts from the GPU: {rates['the GPU'] / rates['host memory']:.2f} of those from host memory")
    client.delete(f"store {i}" for i in range(count))
    memory.free()


# ---- correctness ----


class Batch:
    """Destinations side by side in poisoned device memory, guard bytes between them."""

    def __init__(self, driver: Driver, sizes: Sequence[int]) -> None:
        self.sizes, end = sizes, GUARD
        self.offsets: list[int] = []
        for size in sizes:
            self.offsets.append(end)
            end += size + GUARD
        self.memory = DeviceMemory(driver, end)
        self.memory.fill(POISON)
        self.parts = [self.memory.part(at, size) for at, size in zip(self.offsets, sizes, strict=True)]

    def wrong(self, results: Sequence[int | None], contents: Sequence[bytes]) -> str:
        """Places where device memory is not as it should be; destinations of missed blocks are not looked at."""
        data = self.memory.read()
        expected = bytearray([POISON]) * len(data)
        for at, size, result, block in zip(self.offsets, self.sizes, results, contents, strict=True):
            if result is None:
                expected[at : at + size] = data[at : at + size]
            elif result != len(block):
                return f"{result} bytes instead of {len(block)}"
            else:
                expected[at : at + result] = block
        if data == expected:
            return ""
        first = next(i for i in range(len(data)) if data[i] != expected[i])
        return f"byte {first} of {len(data)} is 0x{data[first]:02x}, not 0x{expected[first]:02x}"


def correctness(report: Report, driver: Driver, pool: CheckedPool, client: kvfs.Client, seconds: float) -> None:
    tails = (1, 4095, 4096, 4097, 65_537, MIB - 1, MIB, MIB + 1, 3 * MIB + 77, 17 * MIB + 4095)
    blocks = {f"tail {size}": content(size, size) for size in tails}
    client.put(list(blocks.items()))
    contents = list(blocks.values())

    batch = Batch(driver, tails)
    put = client.put([(f"put {size}", part) for size, part in zip(tails, batch.parts, strict=True)])
    same = all(bytes(client.get(f"put {size}") or b"") == bytes([POISON]) * size for size in tails)
    report.check("blocks with unaligned tails stored from the GPU are what is read by the host", all(put) and same)
    results = client.get_into(list(zip(blocks, batch.parts, strict=True)))
    wrong = batch.wrong(results, contents)
    report.check("seeded blocks with unaligned tails, guard bytes between them", not wrong, wrong)
    batch.memory.free()

    with driver.current():
        stream = driver.create_stream()
    for used, name in ((stream, "a stream"), (LEGACY_STREAM, "the legacy default stream")):
        batch = Batch(driver, tails)
        with driver.current():
            for part in batch.parts:
                driver.fill_on(used, batch.memory.pointer + part.offset, 0x11, part.size)
            results = client.get_into(list(zip(blocks, batch.parts, strict=True)), stream=used)
            snapshot = bytearray(batch.memory.size)
            driver.read_on(used, batch.memory.pointer, snapshot)
            driver.synchronize(used)
        wrong = batch.wrong(results, contents)
        late = snapshot != batch.memory.read()
        report.check(f"ordered with {name}", not wrong and not late, wrong or ("read too early" if late else ""))
        batch.memory.free()
    with driver.current():
        driver.destroy_stream(stream)

    host = ctypes.create_string_buffer(8192)
    address = {"shape": (8192,), "typestr": "|u1", "data": (ctypes.addressof(host), False), "version": 3}
    refused = ""
    try:
        client.get_into([("tail 4096", type("Host", (), {"__cuda_array_interface__": address})())])
    except InvalidBufferError as error:
        refused = str(error)
    report.check("host memory given as GPU memory is refused", bool(refused), refused)

    _torn(report, driver, client, seconds)
    if pool.devices():
        _flipped(report, driver, pool, client)
    else:
        report.skip("a flipped byte on a device", "the pool lies on given block devices, which are left alone")


def _torn(report: Report, driver: Driver, client: kvfs.Client, seconds: float) -> None:
    """Two contents of one key in turn, while it is read."""
    contents = [content(5 * MIB + 3, f"turn {turn}") for turn in range(2)]
    client.put([("rewritten", contents[0])])
    stop, errors, turns = threading.Event(), [], [0]

    def rewrite() -> None:
        try:
            while not stop.is_set():
                turns[0] += 1
                client.put([("rewritten", contents[turns[0] % 2])])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=rewrite)
    thread.start()
    batch, wrong, reads = Batch(driver, [len(contents[0])]), "", 0
    deadline = time.monotonic() + max(1.0, 10 * seconds)
    while time.monotonic() < deadline and not wrong:
        results = client.get_into([("rewritten", batch.parts[0])])
        if results != [None]:
            reads += 1
            wrong = batch.wrong(results, [contents[0]]) and batch.wrong(results, [contents[1]])
    stop.set()
    thread.join()
    batch.memory.free()
    wrong = wrong or (f"the writer failed: {errors[0]}" if errors else "") or ("" if reads else "never read")
    report.check(f"a block rewritten {turns[0]} times while it was read {reads} times is never torn", not wrong, wrong)


def _flipped(report: Report, driver: Driver, pool: CheckedPool, client: kvfs.Client) -> None:
    blocks = {f"flip {index}": content(300 * KIB, f"flip {index}") for index in range(3)}
    client.put(list(blocks.items()))
    page = blocks["flip 1"][40 * KIB : 44 * KIB]
    flipped = any(_flip(path, page) for path in pool.devices())
    batch = Batch(driver, [300 * KIB] * 3)
    results = client.get_into(list(zip(blocks, batch.parts, strict=True)))
    wrong = batch.wrong(results, list(blocks.values()))
    miss = results == [300 * KIB, None, 300 * KIB]
    detail = wrong or ("" if miss else f"results {results}") or ("" if flipped else "its page was not found")
    report.check("a byte flipped on a device makes that block a miss, and no other", not detail, detail)
    batch.memory.free()


def _flip(path: Path, page: bytes) -> bool:
    """Change a bit of this page, if it is in this file."""
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0) as memory:
            at = memory.find(page)
            while at >= 0 and at % len(page):
                at = memory.find(page, at + 1)
            if at < 0:
                return False
            memory[at + 1234] ^= 1
            memory.flush()
        os.fsync(file.fileno())
    return True


def _store(client: kvfs.Client, keys: Sequence[str]) -> None:
    for key in keys:
        client.put([(key, content(BLOCK_SIZE, key))], if_absent=True)


def indirect(report: Report, driver: Driver, pool: CheckedPool, client: kvfs.Client) -> None:
    """gds through cuFile's compatibility mode, which is no one's way to read: its order and its kernel on this GPU."""
    files = gpu.examine_cufile()
    if files.missing:
        report.skip("gds: its checksums by the GPU", files.missing)
        return
    contents = {f"indirect {size}": content(size, f"indirect {size}") for size in INDIRECT_SIZES}
    client.put(list(contents.items()))
    reader = GpuReader(client.library, "gds", "", cufile=files.library, nvrtc=files.nvrtc, indirect=True)
    batch = Batch(driver, INDIRECT_SIZES)

    def read() -> list[int | None]:
        places = [(batch.memory.pointer + part.offset, part.size, driver.device) for part in batch.parts]
        return reader.get_into(kvfs.client.keys.pack(list(contents)), places, 0)

    try:
        wrong = batch.wrong(read(), list(contents.values()))
        found = reader.direct_statistics()
        report.line(f"gds by cuFile's compatibility mode, for diagnosis: {found}")
        report.check("gds, indirect: blocks proven by a kernel of this GPU", not wrong, wrong)
        staged = f"{found.fallbacks} of {len(contents)} staged, {found.mismatches} mismatches"
        report.check("gds, indirect: no block needed the ring", not found.fallbacks, staged)
        first = next(iter(contents))
        if not any(_flip(path, contents[first][: 4 * KIB]) for path in pool.devices()):
            report.skip("gds, indirect: a flipped byte", "only pools of files are flipped")
            return
        results = read()
        wrong = batch.wrong(results, list(contents.values()))
        seen = reader.direct_statistics().mismatches
        missed = [index for index, result in enumerate(results) if result is None]
        detail = f"{wrong} blocks {missed} are misses, the kernel saw {seen}"
        report.check("gds, indirect: a byte flipped on a device", not wrong and missed == [0] and seen == 1, detail)
    except MissingFeatureError as error:
        report.skip("gds: its checksums by the GPU", str(error))
    finally:
        reader.close()
        batch.memory.free()


# ---- libcufile, on the mount and on a device ----


class _Descriptor(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("fd", ctypes.c_int64), ("operations", ctypes.c_void_p))


def cufile_read(path: str, size: int, on_gpu: bool) -> dict[str, object]:
    """Read the start of a file by cuFileRead. In a process of its own: cuFileDriverOpen may never return."""
    found = gpu_probe.probe_cufile()
    if found.error:
        return {"error": found.error}
    library = ctypes.CDLL(found.library)
    for name in ("cuFileHandleRegister", "cuFileSetStatsLevel", "cuFileStatsStart", "cuFileGetStatsL3"):
        if hasattr(library, name):
            getattr(library, name).restype = gpu_probe.CuFileStatus
    library.cuFileRead.restype = ctypes.c_ssize_t
    driver = Driver() if on_gpu else None
    counted = hasattr(library, "cuFileGetStatsL3")
    with ExitStack() as stack:
        uuid = ctypes.create_string_buffer(16)
        if driver is not None:
            stack.enter_context(driver.current())
            memory = driver.allocate(size)
            driver.call("cuDeviceGetUuid", uuid, driver.device)
        else:
            host = mmap.mmap(-1, size)
            memory = ctypes.addressof(ctypes.c_char.from_buffer(host))
        if counted:
            counted = not library.cuFileSetStatsLevel(3).error and not library.cuFileStatsStart().error
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        handle = ctypes.c_void_p()
        status = library.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(_Descriptor(1, descriptor, None)))
        if status.error:
            return {"error": f"cuFileHandleRegister: error {status.error}"}
        offset = ctypes.c_int64(0)
        read = library.cuFileRead(handle, ctypes.c_void_p(memory), ctypes.c_size_t(size), offset, offset)
        data = b"" if read <= 0 else bytes(driver.read(memory, size)) if driver is not None else host[:]
        counters: dict[str, int] = {}
        if counted:
            statistics = ctypes.create_string_buffer(64 * KIB)
            at = -1 if library.cuFileGetStatsL3(statistics).error else statistics.raw.find(uuid.raw)
            if driver is not None and at >= 0:
                for name, where in CUFILE_COUNTERS.items():
                    counters[name] = int.from_bytes(statistics.raw[at + where : at + where + 8], "little")
    with open(path, "rb") as file:
        return {"read": read, "right": data == file.read(size), "counters": counters}


def cufile(report: Report, pool: CheckedPool, client: kvfs.Client, on_gpu: bool) -> None:
    """Let libcufile read a whole block's file, and a whole device under it. Diagnosis: gds reads parts."""
    data = content(BLOCK_SIZE, "cufile")
    client.put([("cufile", data)])
    where = "GPU memory" if on_gpu else "host memory"
    name = b"cufile".hex()
    places = [("a block's file on the mount", pool.mount / "check" / name[:2] / name)]
    places += [("a device's file", path) for path in pool.devices()[:1]]
    for title, path in places:
        command = [sys.executable, "-m", "benches.gpu_check", "--cufile-read", str(path), str(BLOCK_SIZE)]
        what = f"libcufile reads {title} into {where}"
        try:
            result = subprocess.run(
                [*command, *(["--on-gpu"] if on_gpu else [])],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=CUFILE_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            report.skip(what, f"no answer in {CUFILE_TIMEOUT_S:g} s")
            continue
        if result.returncode:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            report.check(what, False, f"its process ended with {result.returncode}: {last}")
            continue
        found = json.loads(result.stdout.strip().splitlines()[-1])
        if "error" in found:
            report.skip(what, found["error"])
            continue
        counters = found["counters"]
        direct = (counters.get("n_p2p_reads") or counters.get("n_nvfs_reads")) and counters.get("n_posix_reads") == 0
        how = f"{'direct' if direct else 'not direct'}, {counters}" if counters else "it does not say how"
        report.check(what, found["right"], f"{found['read']} bytes; {how}")


# ---- all of it ----


@contextmanager
def _clean_directory(parent: str | None) -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="kvfs-gpu-check-", dir=parent))
    try:
        yield base
    finally:
        shutil.rmtree(base, ignore_errors=True)


def run(arguments: argparse.Namespace, report: Report) -> int:
    facts(report)
    report.step("probe")
    cuda, files = gpu.examine_cuda(), gpu.examine_cufile()
    report.line(cuda.text)
    report.line(files.text)
    driver = None if cuda.error else Driver(arguments.gpu)
    if driver is None:
        report.line(f"NO GPU HERE: {cuda.error}. What needs one is not exercised")
    elif driver.double:
        report.line("a test double is in the GPU's place: every figure below is the double's")
    seconds = 0.05 if arguments.quick else 1.0
    with ExitStack() as stack:
        base = stack.enter_context(_clean_directory(arguments.directory))
        pool = stack.enter_context(CheckedPool(base, arguments.size, arguments.device))
        client = stack.enter_context(
            kvfs.connect(pool.mount, "check", depth=16, gpu="staged" if driver else "host", timeout_s=10.0)
        )
        blocks = 16 if arguments.quick else max(64, min(512, arguments.size // 4 // BLOCK_SIZE))
        blocks -= blocks % math.lcm(*READER_COUNTS)
        keys = [f"block {index}" for index in range(blocks)]
        _store(client, keys)
        report.step(f"ceilings ({blocks} blocks of {BLOCK_SIZE // MIB} MiB on {arguments.device or base})")
        sources = source_ceilings(report, client, keys, seconds)
        if driver is None:
            for what in ("pinned host to GPU", "the staged matrix", "correctness of reads into a GPU", "gds"):
                report.skip(what, "no GPU")
        else:
            copies = copy_ceilings(report, driver, seconds)
            report.step("staged, against the lower of the two ceilings")
            unjudged = "a double has no speed" if driver.double else "--quick is too short" if arguments.quick else ""
            matrix(report, driver, client, keys, seconds, copies, sources, unjudged)
            stores(report, driver, client, seconds)
            report.step("correctness, staged")
            correctness(report, driver, pool, client, seconds)
            report.step("gds")
            found = gpu.examine_direct(str(pool.mount), 1)
            report.line(found.text)
            if found.error:
                report.skip("gds: reads from the devices straight into the GPU", found.error)
                indirect(report, driver, pool, client)
            else:
                _store(client, keys)  # later stores may have evicted them
                direct(report, driver, client, keys, seconds, sources)
                with kvfs.connect(pool.mount, "check", depth=16, gpu="gds", timeout_s=10.0) as straight:
                    correctness(report, driver, pool, straight, seconds)
            report.skip("gds: a read that hangs", "only a double does that on demand")
        report.step("libcufile")
        cufile(report, pool, client, on_gpu=driver is not None and not driver.double)
    if driver is not None:
        if driver.double:
            report.check("the double saw nothing that CUDA would forbid", driver.library.fake_cuda_violations() == 0)
        driver.close()
    for what, why in (
        ("two GPUs", "one is checked: --gpu N"),
        ("a GPU that breaks or hangs", "only a double does that on demand"),
    ):
        report.skip(what, why)

    report.step("summary")
    for what in report.not_exercised:
        report.line(f"not exercised: {what}")
    if report.wrong:
        report.line(f"WRONG: {'; '.join(report.wrong)}")
        return 1
    if driver is None or driver.double:
        report.line("nothing wrong, but there was no GPU: nothing here says anything about one")
        return 3
    report.line("all that was run is right")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/gpu_check", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--directory", metavar="DIR", help="where the pool's files go: on the storage to measure")
    parser.add_argument("--device", action="append", default=[], metavar="PATH", help="a block device instead of files")
    parser.add_argument("--size", type=int, default=8, metavar="GIB", help="of the pool of files (default 8)")
    parser.add_argument("--gpu", type=int, default=0, metavar="N")
    parser.add_argument("--quick", action="store_true", help="toy sizes, no speed judged: does every step work?")
    parser.add_argument("--fake", metavar="LIBRARY", help="a test double of libcuda in the GPU's place")
    parser.add_argument("--cufile-read", nargs=2, metavar=("FILE", "SIZE"), help=argparse.SUPPRESS)
    parser.add_argument("--on-gpu", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cufile_read:
        path, size = arguments.cufile_read
        gpu_probe.answer(json.dumps(cufile_read(path, int(size), arguments.on_gpu)))
    arguments.size = (1 if arguments.quick else arguments.size) * GIB
    report = Report()
    if arguments.fake:
        os.environ[CUDA_LIBRARY_VARIABLE] = os.path.abspath(arguments.fake)
    if os.environ.get(CUDA_LIBRARY_VARIABLE) and gpu.examine_cuda().double:
        report.prefix = "[TEST DOUBLE, NO GPU] "
    try:
        return run(arguments, report)
    except KvfsError as error:
        report.line(f"WRONG: {error}")
        return 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # No ordinary end: libcufile 1.15 crashes in one, after a device that it did not take (gpu_probe.answer()).
    os._exit(status)
