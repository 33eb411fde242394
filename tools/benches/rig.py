"""Devices, peers and kvfs itself, set up to be measured."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from benches.common import (
    COMMAND_TIMEOUT_S,
    DEVICE_COUNT,
    DIRECTORIES,
    GIB,
    HUGE_PAGES,
    MIB,
    RAW_BASE,
    STRIPE_UNIT,
    BenchError,
    Json,
    MissingError,
    Row,
    alive,
    cpu_s,
    needs_program,
    needs_root,
    number_at,
    parse_json,
    run_command,
    wait_until,
)
from benches.session import Bench
from kvfs.doctor import FUSE_RINGS_PATH
from kvfs.errors import KvfsError

# ---- devices ----


@contextlib.contextmanager
def zram(count: int, size: int) -> Iterator[list[Path]]:
    """`count` fresh zram devices: block devices in RAM, with O_DIRECT."""
    needs_root()
    control = Path("/sys/class/zram-control")
    if not control.exists():
        run_command("modprobe", "zram", check=False)
    if not control.exists():
        raise MissingError("needs the zram module")
    indexes: list[int] = []
    try:
        for _ in range(count):
            index = int((control / "hot_add").read_text())
            indexes.append(index)
            Path(f"/sys/block/zram{index}/disksize").write_text(str(size))
        devices = [Path(f"/dev/zram{index}") for index in indexes]
        wait_until(lambda: all(device.exists() for device in devices), "zram device nodes")
        yield devices
    finally:
        for index in indexes:
            with contextlib.suppress(BenchError):
                wait_until(functools.partial(_zram_gone, index), f"release of zram{index}", interval_s=0.2)


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
    needs_root()
    losetup = needs_program("losetup")
    if not Path("/dev/loop-control").exists():
        raise MissingError("needs loop devices")
    devices: list[Path] = []
    try:
        for path in paths:
            devices.append(Path(run_command(losetup, "--find", "--show", "--direct-io=on", path).stdout.strip()))
        yield devices
    finally:
        for device in devices:
            run_command(losetup, "--detach", device, check=False)


@contextlib.contextmanager
def mapped_stripe(devices: Sequence[Path], unit: int) -> Iterator[Path]:
    """RAID-0 over block devices by the device mapper, for filesystems that have none of their own."""
    dmsetup = needs_program("dmsetup")
    targets = run_command(dmsetup, "targets", check=False)
    if "striped" not in targets.stdout:
        raise MissingError("raid0 for ext4 and XFS: this kernel has neither md nor the device mapper's `striped`")
    name = f"kvfs-bench-{os.getpid()}"
    sectors = min(int(Path(f"/sys/block/{device.name}/size").read_text()) for device in devices)
    sectors -= sectors % (unit // 512)
    members = " ".join(f"{device} 0" for device in devices)
    run_command(
        dmsetup, "create", name, "--table", f"0 {sectors * len(devices)} striped {len(devices)} {unit // 512} {members}"
    )
    try:
        yield Path(f"/dev/mapper/{name}")
    finally:
        run_command(dmsetup, "remove", "--retry", name, check=False)


@contextlib.contextmanager
def filesystem(kind: str, devices: Sequence[Path], mountpoint: Path) -> Iterator[Path]:
    """Make and mount a filesystem on fresh devices."""
    needs_root()
    mkfs = needs_program(f"mkfs.{kind}")
    if kind not in Path("/proc/filesystems").read_text().split():
        raise MissingError(f"this kernel has no {kind}")
    flags = {"ext4": ["-q", "-F", "-E", "nodiscard"], "xfs": ["-q", "-f", "-K"], "btrfs": ["-q", "-f", "-K"]}[kind]
    if kind == "btrfs" and len(devices) > 1:
        flags += ["-d", "raid0", "-m", "raid0"]
    run_command(mkfs, *flags, *devices)
    mountpoint.mkdir(parents=True, exist_ok=True)
    options = ",".join(["noatime", *(f"device={device}" for device in devices[1:])])
    run_command("mount", "-t", kind, "-o", options, devices[0], mountpoint)
    try:
        yield mountpoint
    finally:
        if run_command("umount", mountpoint, check=False).returncode:
            run_command("umount", "-l", mountpoint, check=False)


# ---- measured filesystems and jobs ----


@dataclass(slots=True)
class Side:
    """A filesystem under test: read at root, filled at lower, served by process pid if one serves it."""

    name: str
    root: Path
    lower: Path
    pid: int | None = None

    def cpu_s(self) -> float:
        return cpu_s(self.pid) if self.pid is not None else 0.0

    def measured(self, run: Callable[[], Json]) -> Json:
        """run(), with the CPU seconds of the server and of the client."""
        before = self.cpu_s()
        document = run()
        document["daemon_cpu_s"] = self.cpu_s() - before
        document["client_cpu_s"] = number_at(document, "cpu_s", "user") + number_at(document, "cpu_s", "system")
        return document


class Kvfs:
    """A pool on given devices, formatted and mounted. `environment` may name another build of kvfs."""

    def __init__(self, base: Path, devices: Sequence[Path | str], environment: Mapping[str, str] | None = None) -> None:
        self.pool, self.mountpoint, self.devices = base / "pool", base / "mount", list(devices)
        self.environment = environment
        self.mountpoint.mkdir(parents=True)

    def command(self, *words: str | Path, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        program = (sys.executable, "-m", "kvfs")
        return run_command(*program, *words, timeout_s=timeout_s, environment=self.environment).stdout

    def format(self, segment_size: int | None = None) -> None:
        shutil.rmtree(self.pool, ignore_errors=True)
        words = [word for device in self.devices for word in ("--device", str(device))]
        words += [] if segment_size is None else ["--segment-size", str(segment_size)]
        self.command("format", self.pool, *words, "--stripe-unit", str(STRIPE_UNIT), "--force")

    def mount(self, *words: str) -> Side:
        self.command("mount", self.pool, self.mountpoint, *words)
        return Side("kvfs", self.mountpoint, self.mountpoint, self.pid())

    def pid(self) -> int:
        return int((self.pool / "kvfs.pid").read_text())

    def umount(self) -> None:
        pid = self.pid()
        self.command("umount", self.pool)  # exports too
        wait_until(lambda: not alive(pid), f"the end of the daemon {pid}", timeout_s=120)

    def status(self) -> Json:
        return parse_json(self.command("status", self.pool, "-o", "json"), "kvfs status")

    def device_bytes_written(self) -> float:
        devices = self.status().get("devices")
        if not isinstance(devices, list):
            raise BenchError("kvfs status: no devices in it")
        return sum(number_at(cast(Json, device), "write_bytes") for device in devices)

    def stop(self) -> None:
        """End daemon and mount by any means."""
        with contextlib.suppress(KvfsError, OSError, ValueError):
            self.umount()
            return
        with contextlib.suppress(OSError, ValueError):
            pid = self.pid()
            if alive(pid) and b"kvfs" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        _abort(self.mountpoint)
        run_command("umount", "-l", self.mountpoint, check=False, timeout_s=30)

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
def served(words: Sequence[str | Path], name: str, lower: Path, mountpoint: Path) -> Iterator[Side]:
    """A FUSE server in the foreground that mounts itself."""
    mountpoint.mkdir(parents=True, exist_ok=True)
    device = os.stat(mountpoint).st_dev
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: process.poll() is not None or os.stat(mountpoint).st_dev != device, f"{name}'s mount")
        if process.poll() is not None:
            raise BenchError(f"{name} ended with {process.returncode}")
        yield Side(name, mountpoint, lower, process.pid)
    finally:
        if run_command("umount", mountpoint, check=False, timeout_s=300).returncode:
            _abort(mountpoint)
            run_command("umount", "-l", mountpoint, check=False, timeout_s=30)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


@contextlib.contextmanager
def passthrough(program: Path, lower: Path, mountpoint: Path) -> Iterator[Side]:
    """libfuse's passthrough_hp over a directory, copying (kernel passthrough off), otherwise with its defaults."""
    if not program.exists():
        raise MissingError(f"needs {program}: tools/peers builds it")
    flags = ["--foreground"]
    if "--nopassthrough" in run_command(program, "--help", check=False).stdout:
        flags.append("--nopassthrough")
    with served([program, *flags, lower, mountpoint], "passthrough_hp/ext4", lower, mountpoint) as side:
        yield side


def fio(
    pattern: str,
    devices: Sequence[Path],
    *,
    block_size: int,
    depth: int,
    size: int,
    base: int = RAW_BASE,
    passes: int = 1,
    seed: int = 1,
) -> Json:
    """Raw jobs, one a device: over `size` bytes of it from `base`, `depth` requests of block_size in flight on each."""
    words = [f"--rw={pattern}", f"--bs={block_size}", f"--iodepth={depth}", f"--size={size}", f"--offset={base}"]
    words += [f"--loops={passes}", f"--randseed={seed}", "--thread"]
    for index, device in enumerate(devices):
        words += [f"--name=device{index}", f"--filename={device}"]
    return raw_fio(pattern, words)


def fio_stripe(
    pattern: str, devices: Sequence[Path], *, block_size: int, depth: int, size: int, passes: int, seed: int
) -> Json:
    """One raw job with one ring over all devices in turn: `size` bytes in all, `passes` times. `depth` requests of
    block_size are in flight in all; huge pages. Its CPU is without that of its start."""
    common = [f"--rw={pattern}", f"--bs={block_size}", f"--iodepth={depth}", f"--offset={RAW_BASE}"]
    common += [f"--randseed={seed}", "--name=stripe", f"--filename={':'.join(map(str, devices))}"]
    common += ["--file_service_type=roundrobin"]
    document = raw_fio(pattern, [*common, f"--size={size}", f"--loops={passes}"])
    start = raw_fio(pattern, [*common, f"--size={block_size * len(devices)}"])
    used = number_at(document, "client_cpu_s") - number_at(start, "client_cpu_s")
    return {**document, "client_cpu_s": max(used, number_at(document, "thread_cpu_s"), 1e-4)}


def raw_fio(pattern: str, words: Sequence[str]) -> Json:
    """fio with O_DIRECT on the target that these words name; they may replace its engine."""
    program = needs_program("fio")
    common = ["--output-format=json", "--ioengine=io_uring", "--direct=1", "--fallocate=none", "--allow_file_create=0"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = run_command(program, *common, "--invalidate=0", *words, environment=HUGE_PAGES)
    document = parse_json(result.stdout, "fio")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # The whole process with its start: fio's own figures lack the kernel threads that work for io_uring.
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    direction = "write" if "write" in pattern else "read"
    jobs = cast(Sequence[Json], document["jobs"])
    if any(number_at(job, "error") for job in jobs):
        raise BenchError(f"fio {' '.join(words)}: error")
    runtime_s = max(number_at(job, direction, "runtime") for job in jobs) / 1000
    transferred = sum(number_at(job, direction, "io_bytes") for job in jobs)
    thread_cpu_s = sum(
        (number_at(job, "usr_cpu") + number_at(job, "sys_cpu")) / 100 * number_at(job, "job_runtime") / 1000
        for job in jobs
    )
    return {
        "bytes": transferred,
        "seconds": max(runtime_s, 0.001),
        "client_cpu_s": cpu_s,
        "thread_cpu_s": thread_cpu_s,
        "daemon_cpu_s": 0.0,
    }


@contextlib.contextmanager
def rings_offered() -> Iterator[None]:
    """The kernel offers FUSE over io_uring to servers that mount meanwhile. Raises MissingError where it cannot."""
    if not FUSE_RINGS_PATH.exists() or not os.access(FUSE_RINGS_PATH, os.W_OK):
        raise MissingError(f"needs {FUSE_RINGS_PATH} (Linux 6.14), and permission to write to it")
    with FUSE_RINGS_PATH.open() as parameter:
        fcntl.flock(parameter, fcntl.LOCK_EX)  # of all the machine: others that change it wait
        before = parameter.read()
        FUSE_RINGS_PATH.write_text("Y")
        try:
            yield
        finally:
            FUSE_RINGS_PATH.write_text(before.strip())


class Rig:
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

    @functools.cached_property
    def rings(self) -> Side:
        """kvfs once more, on devices of its own, by FUSE over io_uring."""
        pool = Kvfs(self.base / "rings", self.make_devices("rings", DEVICE_COUNT, self.device_size))
        self.stack.callback(pool.stop)
        pool.format()
        with rings_offered():
            return replace(pool.mount(), name="kvfs by io_uring")

    def fresh(self, segment_size: int | None = None) -> None:
        """An empty pool on the same devices."""
        mounted = self.kvfs
        self.pool.umount()
        self.pool.format(segment_size)
        mounted.pid = self.pool.mount().pid
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
    def floor(self) -> Side:
        """A server that answers every LOOKUP with ENOENT and does nothing else: the cost of a wake-up here."""
        mountpoint = self.base / "floor"
        program = self.bench.client_path.with_name("fuse_floor")
        if not program.exists():
            raise MissingError(f"needs {program}: tools/bench builds it")
        return self.stack.enter_context(served([program, mountpoint], "fuse_floor", mountpoint, mountpoint))

    @functools.cached_property
    def striped(self) -> list[Side]:
        """raid0 over four such devices: btrfs by itself, ext4 and XFS where the kernel can stripe for them."""
        size = max(2 * self.scale.write_set // DEVICE_COUNT, 128 * MIB) + 256 * MIB
        sides: list[Side] = []
        for kind in ("btrfs", "ext4", "xfs"):
            name = f"{kind} raid0"
            try:
                if kind != "btrfs":
                    needs_program("dmsetup")
                    if "striped" not in run_command("dmsetup", "targets", check=False).stdout:
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
        return side.measured(lambda: self.bench.client(*words, *(["--packable"] if packable else [])))

    def native(self, *words: object) -> Json:
        """native_client on the mount, with the daemon's CPU seconds."""
        side = self.kvfs
        return side.measured(lambda: self.bench.native(*words, "--mount", side.root))

    def stored(self, space: str, size: int, count: int, *, packable: bool = False) -> None:
        """`count` blocks of `size` bytes in a namespace of kvfs, put now if they are not there yet."""
        key = ("kvfs", f"{space}-{size}-{count}")
        if key not in self._filled:
            batch = max(1, min(1024, 128 * MIB // size))
            words = ["put", "--space", space, "--size", size, "--count", count, "--batch", batch]
            self.native(*words, *(["--packable"] if packable else []))
            self._filled[key] = self.kvfs.root / space

    def raw_fio(self, pattern: str, index: int, passes: int = 1) -> Json:
        """fio on the raw devices: blocks of the same size, as many in flight in all as there are threads elsewhere."""
        scale = self.scale
        size = (scale.write_set if "write" in pattern else scale.working_set) // DEVICE_COUNT
        depth = max(1, scale.threads // DEVICE_COUNT)
        return fio(
            pattern,
            self.raw,
            block_size=scale.block_size,
            depth=depth,
            size=size,
            passes=passes,
            seed=1 + index,
        )

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
    """bench_client's names for the blocks that it writes."""
    return [f"{directory}/{index % DIRECTORIES:03x}/b{index:08x}" for index in range(count)]
