"""`kvfs bench`: kvfs and its peers in one interleaved run; ratios first, then figures, then JSON.

Knows kvfs by its command line, its files POOL/kvfs.pid and POOL/index, and POSIX; only `million` reads a pool's
geometry, to damage its summaries. The timed loops are in C (native/tools/bench_client.c), the raw jobs are fio's.
docs/performance.md says what each case compares. Everything made here (zram and loop devices, files, mounts) is gone at
the end, however the run ends.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn, cast

from kvfs.errors import KvfsError, UsageError

JSON_VERSION = 1
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
REPOSITORY = Path(__file__).resolve().parents[1]
DEVICE_COUNT = 4
STRIPE_UNIT = 128 * KIB
DIRECTORIES = 16
# Raw devices are read and written from here on, as kvfs leaves its labels alone.
RAW_BASE = MIB
COMMAND_TIMEOUT_S = 600.0

Json = dict[str, object]


class BenchError(KvfsError):
    """A case could not be measured, or what was measured is not what was meant."""


class MissingError(KvfsError):
    """This machine lacks what a case needs; the case is skipped with this reason."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything."""

    rounds: int
    device_size: int  # of each of kvfs's four
    working_set: int  # bytes of blocks read in one round
    write_set: int  # and written: more, as a disk's cache takes the first of it
    block_size: int
    large_file: int
    threads: int
    reads: int  # 4 KiB reads a round
    lookups: int
    prompt: int
    small_files: int
    million: int
    few: int  # what a million is compared with
    idle_s: int
    settle_s: float  # until the daemon has done what it does a little later


FULL = Scale(
    rounds=5,
    device_size=GIB,
    working_set=512 * MIB,
    write_set=GIB,
    block_size=2 * MIB,
    large_file=8 * MIB,
    threads=8,
    reads=20_000,
    lookups=5_000,
    prompt=3_600,
    small_files=4_000,
    million=1_000_000,
    few=10_000,
    idle_s=5,
    settle_s=3.0,
)
QUICK = Scale(
    rounds=2,
    device_size=96 * MIB,
    working_set=32 * MIB,
    write_set=32 * MIB,
    block_size=512 * KIB,
    large_file=8 * MIB,
    threads=4,
    reads=500,
    lookups=200,
    prompt=360,
    small_files=100,
    million=2_000,
    few=500,
    idle_s=2,
    settle_s=1.0,
)


# ---- results ----


@dataclass(slots=True)
class Row:
    """One line of the table: samples of kvfs, perhaps of a peer, and how they are held against each other.

    relation: `faster` is peer / kvfs (times, of latencies), `share` is kvfs / peer (of throughputs), `extra` is
    kvfs - peer (in the unit), `value` is kvfs alone. target is the least score for the first two, the most for `extra`
    and, with at_most, for `value`.
    """

    case: str
    devices: str
    what: str
    unit: str
    kvfs: list[float]
    peer_name: str = ""
    peer: list[float] = field(default_factory=list)
    relation: str = "value"
    target: float | None = None
    at_most: bool = True
    details: Json = field(default_factory=dict)

    def scores(self) -> list[float]:
        if self.relation == "value":
            return self.kvfs
        pairs = list(zip(self.kvfs, self.peer, strict=True))
        if self.relation == "faster":
            return [peer / kvfs for kvfs, peer in pairs]
        if self.relation == "share":
            return [kvfs / peer for kvfs, peer in pairs]
        return [kvfs - peer for kvfs, peer in pairs]

    def met(self) -> bool | None:
        if self.target is None:
            return None
        score = statistics.median(self.scores())
        at_most = self.relation == "extra" or (self.relation == "value" and self.at_most)
        return score <= self.target if at_most else score >= self.target

    def document(self) -> Json:
        return {
            "case": self.case,
            "devices": self.devices,
            "what": self.what,
            "unit": self.unit,
            "relation": self.relation,
            "score": _spread(self.scores()),
            "target": self.target,
            "at_most": self.relation == "extra" or (self.relation == "value" and self.at_most),
            "met": self.met(),
            "kvfs": _spread(self.kvfs),
            "peer": {"name": self.peer_name, **_spread(self.peer)} if self.peer else None,
            "details": self.details,
        }


def _spread(samples: Sequence[float]) -> Json:
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "samples": list(samples)}


def _number(document: Mapping[str, object], *path: str) -> float:
    """The number at a path of keys of a document that must have it."""
    value: object = document
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            raise BenchError(f"no {'.'.join(path)} in {json.dumps(document)[:300]}")
        value = value[key]
    if not isinstance(value, (int, float)):
        raise BenchError(f"{'.'.join(path)} is {value!r}, not a number")
    return value


def _column(documents: Sequence[Json], *path: str) -> list[float]:
    return [_number(document, *path) for document in documents]


def _rates(documents: Sequence[Json]) -> list[float]:
    """GB/s of each."""
    return [_number(document, "bytes") / _number(document, "seconds") / 1e9 for document in documents]


# ---- commands ----


def say(text: str) -> None:
    """Progress, for people."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def _run(
    *command: str | Path, timeout_s: float = COMMAND_TIMEOUT_S, check: bool = True
) -> subprocess.CompletedProcess[str]:
    words = [os.fspath(word) for word in command]
    try:
        result = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd=REPOSITORY,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{' '.join(words[:6])}: not done after {timeout_s:.0f} s") from error
    except FileNotFoundError as error:
        raise MissingError(f"needs the program {words[0]}") from error
    if check and result.returncode:
        said = (result.stderr or result.stdout).strip()[-1500:]
        raise BenchError(f"{' '.join(words)} ended with {result.returncode}: {said}")
    return result


def _parsed(text: str, what: str) -> Json:
    try:
        return cast(Json, json.loads(text))
    except ValueError as error:
        raise BenchError(f"{what}: its output is no JSON: {text[:200]!r}") from error


def _needs(program: str) -> str:
    path = shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        raise MissingError(f"needs the program {program}")
    return path


def _needs_root() -> None:
    if os.geteuid() != 0:
        raise MissingError("needs root")


def _cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, with its kernel threads for I/O."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _wait(condition: Callable[[], bool], what: str, timeout_s: float = 30.0, interval_s: float = 0.02) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(interval_s)


def _forget_names() -> None:
    """Make the kernel forget names and inodes (not pages), so that each filesystem is asked again."""
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("2")


# ---- devices ----


@contextlib.contextmanager
def zram(count: int, size: int) -> Iterator[list[Path]]:
    """`count` fresh zram devices: block devices in RAM, with O_DIRECT."""
    _needs_root()
    control = Path("/sys/class/zram-control")
    if not control.exists():
        _run("modprobe", "zram", check=False)
    if not control.exists():
        raise MissingError("needs the zram module")
    indexes: list[int] = []
    try:
        for _ in range(count):
            index = int((control / "hot_add").read_text())
            indexes.append(index)
            Path(f"/sys/block/zram{index}/disksize").write_text(str(size))
        devices = [Path(f"/dev/zram{index}") for index in indexes]
        _wait(lambda: all(device.exists() for device in devices), "zram device nodes")
        yield devices
    finally:
        for index in indexes:
            with contextlib.suppress(BenchError):
                _wait(functools.partial(_zram_gone, index), f"release of zram{index}", interval_s=0.2)


def _zram_gone(index: int) -> bool:
    try:
        Path(f"/sys/block/zram{index}/reset").write_text("1")
        Path("/sys/class/zram-control/hot_remove").write_text(str(index))
    except OSError:
        return not Path(f"/sys/block/zram{index}").exists()
    return True


@contextlib.contextmanager
def disk_files(directory: Path, name: str, count: int, size: int) -> Iterator[list[Path]]:
    """`count` files, written through once with random bytes: holes and unwritten extents would be read for free."""
    paths = [directory / f"{name}-{index}" for index in range(count)]
    free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    if free < count * size + GIB:
        raise MissingError(f"{directory}: needs {count * size >> 20} MiB of free space and 1 GiB to spare")
    try:
        for path in paths:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        fio("write", paths, block_size=MIB, depth=4, size=size, base=0)
        os.sync()
        yield paths
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def loops(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Loop devices with direct I/O over files: for the filesystems that want block devices."""
    _needs_root()
    losetup = _needs("losetup")
    if not Path("/dev/loop-control").exists():
        raise MissingError("needs loop devices")
    devices: list[Path] = []
    try:
        for path in paths:
            devices.append(Path(_run(losetup, "--find", "--show", "--direct-io=on", path).stdout.strip()))
        yield devices
    finally:
        for device in devices:
            _run(losetup, "--detach", device, check=False)


@contextlib.contextmanager
def mapped_stripe(devices: Sequence[Path], unit: int) -> Iterator[Path]:
    """RAID-0 over block devices by the device mapper, for filesystems that have none of their own."""
    dmsetup = _needs("dmsetup")
    targets = _run(dmsetup, "targets", check=False)
    if "striped" not in targets.stdout:
        raise MissingError("raid0 for ext4 and XFS: this kernel has neither md nor the device mapper's `striped`")
    name = f"kvfs-bench-{os.getpid()}"
    sectors = min(int(Path(f"/sys/block/{device.name}/size").read_text()) for device in devices)
    sectors -= sectors % (unit // 512)
    members = " ".join(f"{device} 0" for device in devices)
    _run(
        dmsetup, "create", name, "--table", f"0 {sectors * len(devices)} striped {len(devices)} {unit // 512} {members}"
    )
    try:
        yield Path(f"/dev/mapper/{name}")
    finally:
        _run(dmsetup, "remove", "--retry", name, check=False)


@contextlib.contextmanager
def filesystem(kind: str, devices: Sequence[Path], mountpoint: Path) -> Iterator[Path]:
    """Make and mount a filesystem on fresh devices."""
    _needs_root()
    mkfs = _needs(f"mkfs.{kind}")
    if kind not in Path("/proc/filesystems").read_text().split():
        raise MissingError(f"this kernel has no {kind}")
    flags = {"ext4": ["-q", "-F", "-E", "nodiscard"], "xfs": ["-q", "-f", "-K"], "btrfs": ["-q", "-f", "-K"]}[kind]
    if kind == "btrfs" and len(devices) > 1:
        flags += ["-d", "raid0", "-m", "raid0"]
    _run(mkfs, *flags, *devices)
    mountpoint.mkdir(parents=True, exist_ok=True)
    options = ",".join(["noatime", *(f"device={device}" for device in devices[1:])])
    _run("mount", "-t", kind, "-o", options, devices[0], mountpoint)
    try:
        yield mountpoint
    finally:
        if _run("umount", mountpoint, check=False).returncode:
            _run("umount", "-l", mountpoint, check=False)


# ---- what is measured ----


@dataclass(slots=True)
class Side:
    """A filesystem under test: read at root, filled at lower, served by process pid if one serves it."""

    name: str
    root: Path
    lower: Path
    pid: int | None = None

    def cpu_s(self) -> float:
        return _cpu_s(self.pid) if self.pid is not None else 0.0


class Kvfs:
    """A pool on given devices, formatted and mounted."""

    def __init__(self, base: Path, devices: Sequence[Path]) -> None:
        self.pool, self.mountpoint, self.devices = base / "pool", base / "mount", list(devices)
        self.mountpoint.mkdir(parents=True)

    def command(self, *words: str | Path, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        return _run(sys.executable, "-m", "kvfs", *words, timeout_s=timeout_s).stdout

    def format(self) -> None:
        shutil.rmtree(self.pool, ignore_errors=True)
        words = [word for device in self.devices for word in ("--device", str(device))]
        self.command("format", self.pool, *words, "--stripe-unit", str(STRIPE_UNIT), "--force")

    def mount(self) -> Side:
        self.command("mount", self.pool, self.mountpoint)
        return Side("kvfs", self.mountpoint, self.mountpoint, self.pid())

    def pid(self) -> int:
        return int((self.pool / "kvfs.pid").read_text())

    def umount(self) -> None:
        pid = self.pid()
        self.command("umount", self.mountpoint)
        _wait(lambda: not _alive(pid), f"the end of the daemon {pid}", timeout_s=120)

    def status(self) -> Json:
        return _parsed(self.command("status", self.pool, "-o", "json"), "kvfs status")

    def device_bytes_written(self) -> float:
        devices = self.status().get("devices")
        if not isinstance(devices, list):
            raise BenchError("kvfs status: no devices in it")
        return sum(_number(cast(Json, device), "write_bytes") for device in devices)

    def stop(self) -> None:
        """End daemon and mount by any means."""
        with contextlib.suppress(KvfsError, OSError, ValueError):
            self.umount()
            return
        with contextlib.suppress(OSError, ValueError):
            pid = self.pid()
            if _alive(pid) and b"kvfs" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        _abort(self.mountpoint)
        _run("umount", "-l", self.mountpoint, check=False, timeout_s=30)

    def log_tail(self) -> str:
        try:
            return "\n".join((self.pool / "kvfs.log").read_text(errors="replace").splitlines()[-20:])
        except OSError:
            return ""


def _abort(mountpoint: Path) -> None:
    """Abort the FUSE connection there, so that nothing waits for a dead server."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[4] == str(mountpoint):
            with contextlib.suppress(OSError):
                Path(f"/sys/fs/fuse/connections/{fields[2].partition(':')[2]}/abort").write_text("1")


@contextlib.contextmanager
def passthrough(program: Path, lower: Path, mountpoint: Path) -> Iterator[Side]:
    """libfuse's passthrough_hp over a directory, copying (kernel passthrough off), otherwise as it comes."""
    if not program.exists():
        raise MissingError(f"needs {program}: tools/peers builds it")
    mountpoint.mkdir(parents=True, exist_ok=True)
    flags = ["--foreground"]
    if "--nopassthrough" in _run(program, "--help", check=False).stdout:
        flags.append("--nopassthrough")
    device = os.stat(mountpoint).st_dev
    process = subprocess.Popen(
        [program, *flags, lower, mountpoint], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        _wait(lambda: process.poll() is not None or os.stat(mountpoint).st_dev != device, "passthrough_hp's mount")
        if process.poll() is not None:
            raise BenchError(f"passthrough_hp ended with {process.returncode}")
        yield Side("passthrough_hp/ext4", mountpoint, lower, process.pid)
    finally:
        if _run("umount", mountpoint, check=False, timeout_s=30).returncode:
            _abort(mountpoint)
            _run("umount", "-l", mountpoint, check=False, timeout_s=30)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def fio(
    pattern: str,
    devices: Sequence[Path],
    *,
    block_size: int,
    depth: int,
    size: int,
    base: int = RAW_BASE,
    seed: int = 1,
) -> Json:
    """A raw job: every device once over `size` bytes from `base`, `depth` requests of block_size in flight on each."""
    program = _needs("fio")
    words = [
        program,
        "--output-format=json",
        "--ioengine=io_uring",
        "--direct=1",
        f"--rw={pattern}",
        f"--bs={block_size}",
        f"--iodepth={depth}",
        f"--size={size}",
        f"--offset={base}",
        f"--randseed={seed}",
        "--thread",
        "--fallocate=none",
        "--allow_file_create=0",
        "--invalidate=0",
    ]
    for index, device in enumerate(devices):
        words += [f"--name=device{index}", f"--filename={device}"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    document = _parsed(_run(*words).stdout, "fio")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # The whole process with its start: fio's own figures lack the kernel threads that work for io_uring.
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    direction = "write" if "write" in pattern else "read"
    jobs = cast(Sequence[Json], document["jobs"])
    if any(_number(job, "error") for job in jobs):
        raise BenchError(f"fio {pattern} on {devices[0]}: error")
    runtime_s = max(_number(job, direction, "runtime") for job in jobs) / 1000
    transferred = sum(_number(job, direction, "io_bytes") for job in jobs)
    return {"bytes": transferred, "seconds": max(runtime_s, 0.001), "client_cpu_s": cpu_s, "daemon_cpu_s": 0.0}


class Stand:
    """One kind of devices with kvfs and its peers on them; each part is set up when it is first needed."""

    def __init__(self, bench: Bench, devices: str, base: Path, device_size: int) -> None:
        self.bench, self.devices, self.base, self.scale = bench, devices, base, bench.scale
        self.device_size = device_size
        self.stack = contextlib.ExitStack()
        self._filled: dict[tuple[str, str], Path] = {}
        base.mkdir()

    def make_devices(self, name: str, count: int, size: int) -> list[Path]:
        if self.devices == "zram":
            return self.stack.enter_context(zram(count, size))
        return self.stack.enter_context(disk_files(self.base, name, count, size))

    def make_block_devices(self, name: str, count: int, size: int) -> list[Path]:
        made = self.make_devices(name, count, size)
        return made if self.devices == "zram" else self.stack.enter_context(loops(made))

    @functools.cached_property
    def pool(self) -> Kvfs:
        pool = Kvfs(self.base / "kvfs", self.make_devices("kvfs", DEVICE_COUNT, self.device_size))
        self.stack.callback(pool.stop)
        pool.format()
        return pool

    @functools.cached_property
    def kvfs(self) -> Side:
        return self.pool.mount()

    def fresh(self) -> None:
        """An empty pool on the same devices."""
        self.pool.umount()
        self.pool.format()
        side = self.pool.mount()
        self.kvfs.pid = side.pid
        self._filled = {key: value for key, value in self._filled.items() if key[0] != "kvfs"}

    @functools.cached_property
    def raw(self) -> list[Path]:
        """Devices for the raw jobs, as large and as fully written as the working set needs."""
        made = self.make_devices("raw", DEVICE_COUNT, self.raw_span + 2 * RAW_BASE)
        if self.devices == "zram":
            fio("write", made, block_size=MIB, depth=4, size=self.raw_span)
        return made

    @property
    def raw_span(self) -> int:
        return max(self.scale.working_set, self.scale.write_set) // DEVICE_COUNT

    @functools.cached_property
    def raw_list(self) -> Path:
        path = self.base / "raw.list"
        path.write_text("".join(f"{device}\n" for device in self.raw))
        return path

    @functools.cached_property
    def peer(self) -> Side:
        """passthrough_hp over ext4 on one such device."""
        size = 2 * self.scale.working_set + self.scale.working_set // 4 + 192 * MIB
        (device,) = self.make_block_devices("peer", 1, size)
        lower = self.stack.enter_context(filesystem("ext4", [device], self.base / "ext4"))
        return self.stack.enter_context(passthrough(self.bench.passthrough_hp, lower, self.base / "passthrough"))

    @functools.cached_property
    def striped(self) -> list[Side]:
        """raid0 over four such devices: btrfs by itself, ext4 and XFS where the kernel can stripe for them."""
        size = max(2 * self.scale.write_set // DEVICE_COUNT, 128 * MIB) + 256 * MIB
        sides: list[Side] = []
        for kind in ("btrfs", "ext4", "xfs"):
            name = f"{kind} raid0"
            try:
                if kind != "btrfs":
                    _needs("dmsetup")
                    if "striped" not in _run("dmsetup", "targets", check=False).stdout:
                        raise MissingError("this kernel has neither md nor the device mapper's `striped`")
                devices = self.make_block_devices(kind, DEVICE_COUNT, size)
                if kind != "btrfs":
                    devices = [self.stack.enter_context(mapped_stripe(devices, STRIPE_UNIT))]
                root = self.stack.enter_context(filesystem(kind, devices, self.base / kind))
            except (MissingError, BenchError) as error:
                self.bench.skip(name, self.devices, str(error))
                continue
            sides.append(Side(name, root, root))
        return sides

    def filled(self, side: Side, kind: str, size: int, count: int) -> Path:
        """A list of `count` blocks of `size` bytes on a side, written now if they are not there yet."""
        key = (side.name, f"{kind}-{size}-{count}")
        if key not in self._filled:
            self.write(side, kind, size=size, count=count, threads=4)
            os.sync()
            path = self.base / f"{side.name.replace('/', '-').replace(' ', '-')}.{kind}.list"
            path.write_text("".join(f"{name}\n" for name in block_names(side.root / kind, count)))
            self._filled[key] = path
        return self._filled[key]

    def write(
        self,
        side: Side,
        directory: str,
        *,
        size: int,
        count: int,
        threads: int,
        first: int = 0,
        modulo: int = 0,
        packable: bool = False,
    ) -> Json:
        """tmp-write-rename of `count` blocks into a directory of a side, from number `first` on."""
        (side.lower / directory).mkdir(exist_ok=True)
        words = ["write", "--dir", side.lower / directory, "--size", size, "--count", count, "--threads", threads]
        words += ["--first", first, "--modulo", modulo, "--dirs", DIRECTORIES, "--direct"]
        return self.measured(side, lambda: self.bench.client(*words, *(["--packable"] if packable else [])))

    def raw_fio(self, pattern: str, index: int) -> Json:
        """fio on the raw devices: blocks of the same size, as many in flight in all as there are threads elsewhere."""
        scale = self.scale
        size = (scale.write_set if "write" in pattern else scale.working_set) // DEVICE_COUNT
        depth = max(1, scale.threads // DEVICE_COUNT)
        return fio(pattern, self.raw, block_size=scale.block_size, depth=depth, size=size, seed=1 + index)

    def measured(self, side: Side, run: Callable[[], Json]) -> Json:
        """run(), with the CPU seconds of who served it."""
        before = side.cpu_s()
        document = run()
        document["daemon_cpu_s"] = side.cpu_s() - before
        document["client_cpu_s"] = _number(document, "cpu_s", "user") + _number(document, "cpu_s", "system")
        return document

    def add(
        self,
        case: str,
        what: str,
        unit: str,
        kvfs: list[float],
        peer_name: str = "",
        peer: Sequence[float] = (),
        relation: str = "value",
        target: float | None = None,
        at_most: bool = True,
        details: Mapping[str, object] | None = None,
    ) -> None:
        """Put a line into the table."""
        self.bench.add(
            Row(
                case,
                self.devices,
                what,
                unit,
                kvfs,
                peer_name,
                list(peer),
                relation,
                target,
                at_most,
                dict(details or {}),
            )
        )

    def close(self) -> None:
        self.stack.close()


def block_names(directory: Path, count: int) -> list[str]:
    """What bench_client calls the blocks that it writes."""
    return [f"{directory}/{index % DIRECTORIES:03x}/b{index:08x}" for index in range(count)]


# ---- the run ----


class Bench:
    def __init__(self, scale: Scale, *, client: Path, passthrough_hp: Path, quick: bool) -> None:
        self.scale, self.client_path, self.passthrough_hp, self.quick = scale, client, passthrough_hp, quick
        self.rows: list[Row] = []
        self.skipped: list[Json] = []
        self.failed: list[Json] = []

    def client(self, *words: object) -> Json:
        if not self.client_path.exists():
            raise MissingError(f"needs {self.client_path}: tools/bench builds it")
        return _parsed(_run(self.client_path, *(str(word) for word in words)).stdout, "bench_client")

    def skip(self, case: str, devices: str, reason: str) -> None:
        say(f"{case} on {devices}: skipped: {reason}")
        self.skipped.append({"case": case, "devices": devices, "reason": reason})

    def add(self, row: Row) -> None:
        self.rows.append(row)
        say(row_text(row.document()))

    def interleave(self, runs: Mapping[str, Callable[[int], Json]]) -> dict[str, list[Json]]:
        """Each round runs every side once, one after the other."""
        results: dict[str, list[Json]] = {name: [] for name in runs}
        for index in range(self.scale.rounds):
            for name, run in runs.items():
                results[name].append(run(index))
        return results

    def run(self, cases: Sequence[str], devices: Sequence[str], base: Path) -> None:
        """The cases on each kind of devices, in the order of CASES; `million` on larger devices of its own."""
        for kind in devices:
            wanted = [name for name, case in CASES.items() if name in cases and kind in case.devices]
            # Header and data of 4 KiB each, and room so that nothing is evicted; zram keeps little of packable data.
            million_size = max(self.scale.million * 8 * KIB * 3 // 2 // DEVICE_COUNT, 64 * MIB) // MIB * MIB
            for names, size in (
                ([name for name in wanted if name != "million"], self.scale.device_size),
                ([name for name in wanted if name == "million"], million_size),
            ):
                if not names:
                    continue
                stand = Stand(self, kind, base / f"{kind}-{names[0]}", size)
                try:
                    for name in names:
                        self.guarded(name, kind, functools.partial(CASES[name].run, stand))
                finally:
                    stand.close()

    def guarded(self, name: str, devices: str, case: Callable[[], None]) -> None:
        """One case; what this machine lacks skips it, what goes wrong fails it, and the others run either way."""
        say(f"{name} on {devices}")
        started = time.monotonic()
        try:
            case()
        except MissingError as error:
            self.skip(name, devices, str(error))
        except (KvfsError, OSError, ValueError) as error:
            say(f"{name} on {devices} FAILED: {error}")
            self.failed.append({"case": name, "devices": devices, "error": f"{type(error).__name__}: {error}"})
        say(f"{name} on {devices}: {time.monotonic() - started:.1f} s")

    def document(self) -> Json:
        return {
            "version": JSON_VERSION,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "quick": self.quick,
            "machine": machine(),
            "scale": {name: getattr(self.scale, name) for name in Scale.__slots__},
            "rows": [row.document() for row in self.rows],
            "skipped": self.skipped,
            "failed": self.failed,
        }


def machine() -> Json:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    model = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "kernel": platform.release(),
        "cpu": model,
        "cores": os.cpu_count(),
        "memory": memory,
        "python": platform.python_version(),
    }


# ---- the cases ----


def _interleaved(
    stand: Stand,
    run: Callable[[Side, int], Json],
    others: Sequence[Side],
    raw: Mapping[str, Callable[[int], Json]] = {},
) -> dict[str, list[Json]]:
    """Rounds of kvfs, the other filesystems, and raw jobs, by name."""
    runs: dict[str, Callable[[int], Json]] = {}
    for side in (stand.kvfs, *others):
        runs[side.name] = functools.partial(run, side)
    return stand.bench.interleave({**runs, **raw})


def case_random_read(stand: Stand) -> None:
    """4 KiB O_DIRECT reads at random places of open, sealed blocks, one thread."""
    bench, scale = stand.bench, stand.scale
    count = scale.working_set // scale.block_size

    def words(listed: Path, index: int) -> list[object]:
        return ["read", "--list", listed, "--size", 4 * KIB, "--count", scale.reads, "--direct", "--seed", 1 + index]

    def read(side: Side, index: int) -> Json:
        blocks = stand.filled(side, "blocks", scale.block_size, count)
        return stand.measured(side, lambda: bench.client(*words(blocks, index)))

    def raw(index: int) -> Json:
        return bench.client(
            *words(stand.raw_list, index), "--base", RAW_BASE, "--span", scale.working_set // DEVICE_COUNT
        )

    if stand.devices == "zram":
        peer, relation, target = stand.peer.name, "faster", 2.5
        results = _interleaved(stand, read, [stand.peer])
        _same_bytes(results)
    else:
        peer, relation, target = "raw pread", "extra", 20.0
        results = _interleaved(stand, read, [], {peer: raw})
    details = {
        "daemon_cpu_us_per_read": sum(_column(results["kvfs"], "daemon_cpu_s")) * 1e6 / scale.reads / scale.rounds
    }
    for point in ("mean", "p50", "p99"):
        ours, theirs = (_column(results[name], "latency_us", point) for name in ("kvfs", peer))
        what = f"4 KiB O_DIRECT read, 1 thread, {point}"
        wanted = target if point != "p99" else None
        stand.add("random-read", what, "us", ours, peer, theirs, relation, wanted, details=details)


def case_lookup(stand: Stand) -> None:
    """A stat that fails (another name each time), and open and close of a file that is there."""
    bench, scale = stand.bench, stand.scale
    count = min(scale.lookups, 2_000)

    def names(side: Side) -> Path:
        return stand.filled(side, "names", 4 * KIB, count)

    def stat(side: Side, index: int) -> Json:
        directory = Path(names(side).read_text().split("\n", 1)[0]).parent
        return bench.client("stat", "--dir", directory, "--count", scale.lookups, "--seed", _unused())

    def open_known(side: Side, index: int) -> Json:
        bench.client("open", "--list", names(side), "--count", count)  # the kernel knows the names now
        return bench.client("open", "--list", names(side), "--count", scale.lookups)

    def open_unknown(side: Side, index: int) -> Json:
        listed = names(side)
        _forget_names()
        return bench.client("open", "--list", listed, "--count", count)

    peer = stand.peer.name
    for what, run, target in (
        ("stat of a missing name", stat, 5.0),
        ("open and close", open_known, 5.0),
        ("open and close, name not cached", open_unknown, None),
    ):
        results = _interleaved(stand, run, [stand.peer])
        ours, theirs = (_column(results[name], "latency_us", "mean") for name in ("kvfs", peer))
        details = {"latency": _latency(results["kvfs"]), "peer_latency": _latency(results[peer])}
        stand.add("lookup", f"{what}, 1 thread, mean", "us", ours, peer, theirs, "faster", target, details=details)


def case_prompt(stand: Stand) -> None:
    """What vLLM asks for one prompt: faccessat of each block's path, half of them missing, no name cached."""
    bench, scale = stand.bench, stand.scale
    half = scale.prompt // 2

    def access(side: Side, index: int) -> Json:
        present = stand.filled(side, "prompt", 4 * KIB, half).read_text().splitlines()
        tag = f"{_unused():x}"
        listed = stand.base / "prompt.list"
        listed.write_text("".join(f"{path}\n{path}-{tag}\n" for path in present))
        _forget_names()
        document = bench.client("access", "--list", listed, "--count", 2 * half)
        if _number(document, "found") != half:
            raise BenchError(f"{side.name}: {document['found']} of {half} blocks found")
        return document

    peer = stand.peer.name
    results = _interleaved(stand, access, [stand.peer])
    ours, theirs = ([value * 1000 for value in _column(results[name], "seconds")] for name in ("kvfs", peer))
    what = f"{2 * half} faccessat, half missing"
    stand.add("prompt", what, "ms", ours, target=100.0)
    stand.add("prompt", what, "ms", ours, peer, theirs, "faster")


def case_large_read(stand: Stand) -> None:
    """1 and 4 MiB O_DIRECT reads of open, sealed blocks, one thread: against the peer, the raw stripe, and raid0."""
    bench, scale = stand.bench, stand.scale
    count = max(2, scale.working_set // scale.large_file)
    for size in (MIB, 4 * MIB):
        words = ["--size", size, "--count", max(8, scale.working_set // size), "--direct"]

        def read(side: Side, index: int, words: list[object] = words) -> Json:
            blocks = stand.filled(side, "large", scale.large_file, count)
            return stand.measured(side, lambda: bench.client("read", "--list", blocks, "--seed", 1 + index, *words))

        def raw(index: int, words: list[object] = words) -> Json:
            place = ["--unit", STRIPE_UNIT, "--base", RAW_BASE, "--span", scale.working_set]
            return bench.client("stripe", "--list", stand.raw_list, "--seed", 1 + index, *place, *words)

        others = [stand.peer, *stand.striped] if stand.devices == "zram" else stand.striped
        results = _interleaved(stand, read, others, {"raw stripe": raw})
        _same_bytes(results, but="raw stripe")
        targets = {("zram", "passthrough_hp/ext4"): 2.0, ("files", "raw stripe"): 0.9}
        for name in list(results)[1:]:
            details = {"latency": _latency(results["kvfs"]), "peer_latency": _latency(results[name])}
            what, target = f"{size // MIB} MiB O_DIRECT reads, 1 thread", targets.get((stand.devices, name))
            ours, theirs = _rates(results["kvfs"]), _rates(results[name])
            stand.add("large-read", what, "GB/s", ours, name, theirs, "share", target, details=details)


def case_block_read(stand: Stand) -> None:
    """Whole blocks, open-read-close, many threads: against raw fio of the same size and total depth, and raid0."""
    bench, scale = stand.bench, stand.scale
    count = scale.working_set // scale.block_size
    words = ["--size", scale.block_size, "--count", count, "--threads", scale.threads, "--direct"]

    def read(side: Side, index: int) -> Json:
        blocks = stand.filled(side, "blocks", scale.block_size, count)
        digest = ["--digest"] if index == 0 else []
        return stand.measured(
            side, lambda: bench.client("blocks", "--list", blocks, "--seed", 1 + index, *words, *digest)
        )

    results = _interleaved(stand, read, stand.striped, {"raw fio": functools.partial(stand.raw_fio, "randread")})
    _same_bytes(results, but="raw fio")
    targets = {("zram", "raw fio"): 0.35, ("files", "raw fio"): 0.95}
    for name in list(results)[1:]:
        what, target = (
            f"{_size(scale.block_size)} open-read-close, threads: {scale.threads}",
            targets.get((stand.devices, name)),
        )
        details = {"cpu": _cpu(results["kvfs"]), "peer_cpu": _cpu(results[name])}
        ours, theirs = _rates(results["kvfs"]), _rates(results[name])
        stand.add("block-read", what, "GB/s", ours, name, theirs, "share", target, details=details)


def case_idle(stand: Stand) -> None:
    """CPU that a mount uses while nobody asks for anything."""
    stand.filled(stand.kvfs, "names", 4 * KIB, 100)
    time.sleep(stand.scale.settle_s)
    before = stand.kvfs.cpu_s()
    time.sleep(stand.scale.idle_s)
    used = stand.kvfs.cpu_s() - before
    stand.add(
        "idle", f"daemon CPU in {stand.scale.idle_s} s of an idle mount", "s", [used], target=0.01 * stand.scale.idle_s
    )


def case_small_files(stand: Stand) -> None:
    """Files of 64 KiB created, written and renamed a second, through the mount."""
    scale = stand.scale
    for threads in (1, 8):

        def write(side: Side, index: int, threads: int = threads) -> Json:
            directory = f"small-{threads}-{index}"
            return stand.write(side, directory, size=64 * KIB, count=scale.small_files, threads=threads)

        results = _interleaved(stand, write, [])["kvfs"]
        rates = [_number(document, "operations") / _number(document, "seconds") for document in results]
        what = f"create, write, rename of 64 KiB, threads: {threads}"
        stand.add("small-files", what, "files/s", rates, details={"latency": _latency(results), "cpu": _cpu(results)})


def case_block_write(stand: Stand) -> None:
    """Whole blocks, tmp-write-rename, many threads, against raw sequential writes: empty pool, then a full one."""
    scale = stand.scale
    count = scale.write_set // scale.block_size
    written = 0
    raw = functools.partial(stand.raw_fio, "write")

    def settled(run: Callable[[], Json]) -> Json:
        document = run()
        time.sleep(scale.settle_s)  # the last summaries, and what the disk puts off
        return document

    def write(side: Side, index: int) -> Json:
        nonlocal written
        first = written
        if side is stand.kvfs:
            written += count
        # Other filesystems do not evict: there the same names are written again.
        modulo = 0 if side is stand.kvfs else count
        return stand.write(
            side, "written", size=scale.block_size, count=count, threads=scale.threads, first=first, modulo=modulo
        )

    for state in ("empty pool", "full pool, evicting"):
        if state == "empty pool":
            for side in stand.striped:  # room for what is written here
                for directory in ("blocks", "large"):
                    shutil.rmtree(side.lower / directory, ignore_errors=True)
        else:
            while written * scale.block_size < DEVICE_COUNT * scale.device_size * 11 // 10:
                write(stand.kvfs, 0)

        def measure(side: Side, index: int, empty: bool = state == "empty pool") -> Json:
            nonlocal written
            if side is not stand.kvfs:
                return settled(lambda: write(side, index))
            if empty:
                stand.fresh()
                written = 0
            before = stand.pool.device_bytes_written()
            document = settled(lambda: write(side, index))
            stored = _number(document, "bytes")
            return {**document, "amplification": (stand.pool.device_bytes_written() - before) / stored}

        results = _interleaved(stand, measure, stand.striped, {"raw fio": lambda index: settled(lambda: raw(index))})
        for name in list(results)[1:]:
            what = f"{_size(scale.block_size)} tmp-write-rename, threads: {scale.threads}, {state}"
            target = 0.85 if (stand.devices, name) == ("files", "raw fio") else None
            cpu = {"cpu": _cpu(results["kvfs"]), "peer_cpu": _cpu(results[name])}
            details = {**cpu, "latency": _latency(results["kvfs"])}
            ours, theirs = _rates(results["kvfs"]), _rates(results[name])
            stand.add("block-write", what, "GB/s", ours, name, theirs, "share", target, details=details)
        what = f"device bytes written / bytes stored, {state}"
        stand.add("block-write", what, "x", _column(results["kvfs"], "amplification"), target=1.02)


def case_million(stand: Stand) -> None:
    """A million small blocks: memory, index, warm mount, rebuild without index, the cost of a lookup among so many."""
    scale = stand.scale
    pool, side = stand.pool, stand.kvfs
    latencies: dict[int, dict[str, list[float]]] = {}
    done, started = 0, time.monotonic()
    for goal in (scale.few, scale.million):
        while done < goal:
            count = min(goal - done, 20_000)
            stand.write(side, "million", size=4 * KIB, count=count, threads=8, first=done, packable=True)
            done += count
            say(f"million: {done} of {scale.million} blocks, {done / (time.monotonic() - started):.0f} a second")
        latencies[goal] = _lookup_latencies(stand, side.root / "million", goal)
    blocks = scale.million
    for what in ("missing", "present"):
        few, many = latencies[scale.few][what], latencies[scale.million][what]
        ratios = [b / a for a, b in zip(few, many, strict=True)]
        told = f"lookup of a {what} name among {blocks} / among {scale.few} blocks"
        stand.add("million", told, "x", ratios, target=1.5, details={"few_us": few, "many_us": many})
    held = int(_number(pool.status(), "blocks"))
    memory = _memory(pool.pid())
    told = "daemon RSS besides mapped index pages"
    stand.add("million", told, "MB", [memory["other"] / 1e6], target=400.0, details=memory)
    stand.add("million", "block table in memory", "bytes/block", [memory["table"] / blocks], target=144.0)
    pool.umount()
    index = sum(path.stat().st_blocks * 512 for path in (pool.pool / "index").rglob("*") if path.is_file())
    stand.add("million", "index on disk", "bytes/block", [index / blocks], target=600.0)
    warm = [_timed_mount(pool, held) for _ in range(max(3, scale.rounds))]
    stand.add("million", "warm mount until it answers and holds all blocks", "s", warm, target=3.0)
    for source, target in (("summaries", 100_000.0), ("headers alone", 50_000.0)):
        if source == "headers alone":
            _erase_summaries(pool)
        shutil.rmtree(pool.pool / "index")
        seconds = _timed_mount(pool, held)
        told = f"rebuild from {source}, mount included"
        stand.add(
            "million", told, "blocks/s", [held / seconds], target=target, at_most=False, details={"seconds": seconds}
        )


def _unused() -> int:
    """A number no earlier call gave: names made of it have not been asked for."""
    return time.monotonic_ns() & 0x7FFFFFFF


def _latency(results: Sequence[Json]) -> Json:
    return {f"{point}_us": statistics.median(_column(results, "latency_us", point)) for point in ("mean", "p50", "p99")}


def _cpu(results: Sequence[Json]) -> Json:
    """CPU seconds a GiB, of who serves and of who asks."""
    gib = sum(_column(results, "bytes")) / GIB
    return {f"{who}_s_per_gib": sum(_column(results, f"{who}_cpu_s")) / gib for who in ("daemon", "client")}


def _same_bytes(results: Mapping[str, Sequence[Json]], but: str = "") -> None:
    """Sides filled with the same seed must have been read as the same bytes, round by round."""
    names = [name for name in results if name != but]
    for documents in zip(*(results[name] for name in names), strict=True):
        digests = {name: document["digest"] for name, document in zip(names, documents, strict=True)}
        if len(set(digests.values())) != 1:
            raise BenchError(f"the sides were read as different bytes: {digests}")


def _lookup_latencies(stand: Stand, directory: Path, blocks: int) -> dict[str, list[float]]:
    """p50 in us, one a round, of a stat that fails and of faccessat of a block whose name the kernel has forgotten."""
    bench, scale = stand.bench, stand.scale
    sample = block_names(directory, blocks)[:: max(1, blocks // scale.lookups)][: scale.lookups]
    listed = stand.base / "million.list"
    listed.write_text("\n".join(sample) + "\n")
    found: dict[str, list[float]] = {"missing": [], "present": []}
    for _ in range(scale.rounds):
        document = bench.client("stat", "--dir", directory / "000", "--count", scale.lookups, "--seed", _unused())
        found["missing"].append(_number(document, "latency_us", "p50"))
        _forget_names()
        document = bench.client("access", "--list", listed, "--count", len(sample))
        if _number(document, "found") != len(sample):
            raise BenchError(f"{document['found']} of {len(sample)} blocks found among {blocks}")
        found["present"].append(_number(document, "latency_us", "p50"))
    return found


def _memory(pid: int) -> dict[str, float]:
    """Resident bytes of a process: mapped index pages, the block table (the largest memfd), all but the index."""
    index = table = total = 0
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            name = words[5] if len(words) > 5 else ""
        elif words[0] == "Rss:":
            size = int(words[1]) * KIB
            total += size
            if name.endswith(".mdb"):
                index += size
            elif name.startswith("/memfd:"):
                table = max(table, size)
    return {"index": float(index), "table": float(table), "total": float(total), "other": float(total - index)}


def _timed_mount(pool: Kvfs, blocks: int) -> float:
    """Seconds from the command to a mount that answers and holds so many blocks again. Leaves it unmounted."""
    started = time.monotonic()
    pool.mount()
    what = f"{blocks} blocks after the mount"
    _wait(lambda: _number(pool.status(), "blocks") >= blocks, what, timeout_s=600, interval_s=0.05)
    seconds = time.monotonic() - started
    pool.umount()
    return seconds


def _erase_summaries(pool: Kvfs) -> None:
    """Overwrite both summary slots of every segment, so that only block headers are left to rebuild from."""
    from kvfs.config import layout, load
    from kvfs.types import PAGE_SIZE

    config = load(pool.pool)
    assert config is not None
    geometry = config.geometry
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(device.path, "r+b", buffering=0)) for device in config.devices]
        for members in layout([device.zone_count for device in config.devices], geometry.stripe_width):
            for page in range(geometry.end_page, geometry.segment_pages):
                stripe, inside = divmod(page * PAGE_SIZE, geometry.stripe_unit)
                row, column = divmod(stripe, geometry.stripe_width)
                device, zone = members[column]
                place = config.devices[device].zones_offset + zone * geometry.zone_size
                os.pwrite(files[device].fileno(), bytes(PAGE_SIZE), place + row * geometry.stripe_unit + inside)
        for file in files:
            os.fsync(file.fileno())


@dataclass(frozen=True, slots=True)
class Case:
    run: Callable[[Stand], None]
    devices: tuple[str, ...]  # the kinds that it is about


BOTH = ("zram", "files")
CASES = {
    "random-read": Case(case_random_read, BOTH),
    "lookup": Case(case_lookup, ("zram",)),
    "prompt": Case(case_prompt, ("zram",)),
    "large-read": Case(case_large_read, BOTH),
    "block-read": Case(case_block_read, BOTH),
    "idle": Case(case_idle, BOTH),
    "small-files": Case(case_small_files, BOTH),
    "block-write": Case(case_block_write, BOTH),
    "million": Case(case_million, ("zram",)),
}


# ---- output ----


def _size(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def _figure(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    size = abs(value)
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 3}f}"


def _cells(row: Json) -> list[str]:
    """case, devices, what, score, target, verdict, kvfs, peer."""
    score, ours = cast(Json, row["score"]), cast(Json, row["kvfs"])
    relation, unit = str(row["relation"]), str(row["unit"])
    suffix = {"faster": "x faster", "share": "x", "extra": f" {unit} more", "value": f" {unit}"}[relation]
    text = _figure(_number(score, "median")) + suffix
    if len(cast(Sequence[float], score["samples"])) > 1:
        text += f" ({_figure(_number(score, 'min'))}-{_figure(_number(score, 'max'))})"
    target = row["target"]
    sign = "at most" if row["at_most"] else "at least"
    goal = "" if target is None else f"{sign} {_figure(cast(float, target))}"
    verdict = {None: "", True: "met", False: "MISSED"}[cast("bool | None", row["met"])]
    peer = cast("Json | None", row["peer"])
    theirs = f"{_figure(_number(peer, 'median'))} {unit} ({peer['name']})" if peer else ""
    return [
        str(row["case"]),
        str(row["devices"]),
        str(row["what"]),
        text,
        goal,
        verdict,
        f"{_figure(_number(ours, 'median'))} {unit}" if peer else "",
        theirs,
    ]


def row_text(row: Json) -> str:
    case, devices, what, score, goal, verdict, ours, theirs = _cells(row)
    against = f"; kvfs {ours}, {theirs}" if theirs else ""
    return f"{case} on {devices}: {score}{f' [{goal}: {verdict}]' if goal else ''}: {what}{against}"


def render(document: Mapping[str, object]) -> str:
    """The table for people: ratios first."""
    from kvfs.stats import table

    rows = cast(Sequence[Json], document["rows"])
    lines = [["score", "target", "", "case", "devices", "what", "kvfs", "peer"]]
    for row in rows:
        case, devices, what, score, goal, verdict, ours, theirs = _cells(row)
        lines.append([score, goal, verdict, case, devices, what, ours, theirs])
    return "\n".join([*table(lines, left=8), *_notes(document)])


def render_markdown(document: Mapping[str, object]) -> str:
    """The table for docs/performance.md."""
    rows = cast(Sequence[Json], document["rows"])
    host, scale = cast(Json, document["machine"]), cast(Json, document["scale"])
    lines = [
        f"{document['date']}; {host['cores']} cores ({host['cpu']}), {_number(host, 'memory') / GIB:.0f} GiB, "
        f"kernel {host['kernel']}; medians (min-max) of {scale['rounds']} interleaved rounds"
        f"{'; toy sizes (--quick)' if document['quick'] else ''}.",
        "",
        "| case | devices | what | score | target | | kvfs | peer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    return "\n".join([*lines, *_notes(document)])


def _notes(document: Mapping[str, object]) -> list[str]:
    notes = []
    for item in cast(Sequence[Json], document["skipped"]):
        notes.append(f"skipped: {item['case']} on {item['devices']}: {item['reason']}")
    for item in cast(Sequence[Json], document["failed"]):
        notes.append(f"FAILED: {item['case']} on {item['devices']}: {str(item['error']).splitlines()[0]}")
    return ["", *notes] if notes else []


# ---- the command line ----


def _chosen(text: str, known: Sequence[str], what: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise UsageError(f"--{what}: {name!r} is none of {', '.join(known)}")
    if not names:
        raise UsageError(f"--{what}: names none of {', '.join(known)}")
    return names


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line and exits with 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (try {self.prog} --help)\n")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="kvfs bench",
        description="Measure kvfs against its peers; docs/performance.md says what each case compares.",
        allow_abbrev=False,
    )
    # A million blocks take minutes: only by name, or with --quick.
    parser.add_argument("--only", metavar="CASE,...", help=f"cases: {', '.join(CASES)} (default: all but million)")
    parser.add_argument("--devices", metavar="KIND,...", default=",".join(BOTH), help="zram, files (default: both)")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default {FULL.rounds}, with --quick {QUICK.rounds}")
    parser.add_argument("--quick", action="store_true", help="toy sizes: does everything still work?")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the JSON document there")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="measure nothing: print the table of this JSON document"
    )
    parser.add_argument("--into", type=Path, metavar="PAGE", help="with --markdown: put the table between PAGE's marks")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="where files as devices are made (default build/bench)"
    )
    parser.add_argument("--client", type=Path, default=REPOSITORY / "build/bench/bench_client", help=argparse.SUPPRESS)
    parser.add_argument("--peer", type=Path, default=REPOSITORY / "build/peers/passthrough_hp", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; 0 if every case ran or was skipped for a reason, however fast it was."""
    try:
        return _main(_arguments(list(sys.argv[1:] if argv is None else argv)))
    except UsageError as error:
        print(f"kvfs bench: {error}", file=sys.stderr)
        return 2
    except KvfsError as error:
        print(f"kvfs bench: {error}", file=sys.stderr)
        return 1


def _main(arguments: argparse.Namespace) -> int:
    if arguments.markdown is not None:
        try:
            text = render_markdown(_parsed(arguments.markdown.read_text(), str(arguments.markdown)))
            if arguments.into is None:
                print(text)
            else:
                _put_into(arguments.into, text)
        except OSError as error:
            raise BenchError(f"{error.filename}: {error.strerror}") from error
        return 0
    default = [name for name in CASES if arguments.quick or name != "million"]
    cases = _chosen(arguments.only, list(CASES), "only") if arguments.only is not None else default
    devices = _chosen(arguments.devices, BOTH, "devices")
    scale = QUICK if arguments.quick else FULL
    if arguments.rounds is not None:
        if arguments.rounds < 1:
            raise UsageError("--rounds: at least 1")
        scale = replace(scale, rounds=arguments.rounds)
    directory = arguments.directory or REPOSITORY / "build/bench"
    directory.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was made is removed
    bench = Bench(scale, client=arguments.client, passthrough_hp=arguments.peer, quick=arguments.quick)
    base = Path(tempfile.mkdtemp(prefix="run-", dir=directory))
    try:
        bench.run(cases, devices, base)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    document = bench.document()
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(document, indent=2) + "\n")
    print(render(document))
    return 1 if bench.failed else 0


def _put_into(page: Path, text: str) -> None:
    """Replace what lies between the marks of a page."""
    before, first, rest = page.read_text().partition("<!-- bench -->\n")
    _, last, after = rest.partition("<!-- /bench -->\n")
    if not first or not last:
        raise BenchError(f"{page}: lacks the lines <!-- bench --> and <!-- /bench -->")
    page.write_text(f"{before}{first}{text}\n{last}{after}")


if __name__ == "__main__":
    sys.exit(main())
