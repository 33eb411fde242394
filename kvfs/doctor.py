"""`kvfs doctor`: kvfs's needs that this machine meets, those it lacks, and how to mend them.

Each check looks at one thing and changes nothing. A check is *required* if a mount cannot work without it; the rest
costs speed or comfort. Sources: io_uring_setup(2), io_uring_register(2), fuse(4), Documentation/filesystems/fuse and
Documentation/admin-guide/sysctl of the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import platform
import re
import resource
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvfs.cgroup import LEAST, memory_limit
from kvfs.client.gpu import examine_cuda, examine_cufile
from kvfs.errors import PoolError, printable
from kvfs.pool import nvme_kernel
from kvfs.pool.config import load
from kvfs.units import kernel_version

# FUSE_NOTIFY_INC_EPOCH came with 6.16. Without it every name is looked up again on each use, so that an evicted one is
# never seen.
INC_EPOCH_KERNEL = (6, 16)
REQUEST_TIMEOUT_KERNEL = (6, 15)
IDMAP_KERNEL = (6, 12)
MINIMUM_KERNEL = (5, 15)
# Requests of 4 MiB need this many pages; the default of 256 pages allows 1 MiB.
WANTED_MAX_PAGES = 1024
MAX_PAGES_PATH = Path("/proc/sys/fs/fuse/max_pages_limit")
FUSE_SYSCTL_PATH = MAX_PAGES_PATH.parent
FUSE_RINGS_PATH = Path("/sys/module/fuse/parameters/enable_uring")
# The option -machine memory-backend= came with it.
MINIMUM_QEMU = (5, 0)
PROGRAM_TIMEOUT_S = 10.0
PLATFORM_DEVICES_PATH = Path("/sys/bus/platform/devices")
DOCA_PATH = Path("/opt/mellanox/doca")
SHMEM_HUGE_PATH = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
IO_URING_DISABLED_PATH = Path("/proc/sys/kernel/io_uring_disabled")
# Rings of a daemon with many cores: one a server thread, one a worker.
RING_COUNT = 24
_LOCK_MEMORY = (
    "CAP_IPC_LOCK for a container; LimitMEMLOCK=infinity in the unit, or '* - memlock unlimited' in limits.conf"
)
RING_ENTRIES = 512

_SYS_IO_URING_SETUP, _SYS_IO_URING_ENTER, _SYS_IO_URING_REGISTER = 425, 426, 427
_IORING_REGISTER_PROBE = 8
# Operations that the ring uses: READV, WRITEV, READ_FIXED, WRITE_FIXED, TIMEOUT, ASYNC_CANCEL, LINK_TIMEOUT, READ,
# WRITE.
_WANTED_OPERATIONS = {
    1: "readv",
    2: "writev",
    4: "read_fixed",
    5: "write_fixed",
    11: "timeout",
    14: "async_cancel",
    15: "link_timeout",
    22: "read",
    23: "write",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `state` is ok, missing (something to do) or note (nothing to do, but good to know)."""

    name: str
    state: str
    found: str
    action: str = ""
    required: bool = False

    @property
    def fatal(self) -> bool:
        return self.required and self.state == "missing"


def examine(devices: Sequence[str] = ()) -> list[Check]:
    """Run every check, and look at each of the devices, or devices of pools. A check that raises is reported as
    missing."""
    found: list[Check] = []
    checks: list[Callable[[], Iterable[Check]]] = [
        _python,
        _native,
        _pyfuse3,
        _kernel,
        _fuse_device,
        _fusermount,
        _fuse_pages,
        _fuse_epoch,
        _fuse_timeout,
        _fuse_idmap,
        _fuse_rings,
        _io_uring,
        _memlock,
        _files,
        _cpu,
        _memory,
        _zram,
        _loop,
        _nvme,
        _qemu,
        _guest_memory,
        _dpu,
        _gpu,
        _cufile,
    ]
    named = [(check.__name__.strip("_"), check) for check in checks]
    named += [(device, partial(_device, device)) for device in devices]
    for name, check in named:
        try:
            found.extend(check())
        except Exception as error:  # a broken probe is a finding, not a crash
            found.append(Check(name, "missing", f"cannot be examined: {error}", "see that it is there and answers"))
    return found


def held_mount(status: Mapping[str, object], known: Mapping[str, tuple[int, int]]) -> Iterator[Check]:
    """Whether this build takes over the mount that a pool's daemon, perhaps of another build, leaves to a holder."""
    holder = status.get("holder")
    versions = holder.get("versions") if isinstance(holder, Mapping) else None
    if not isinstance(versions, Mapping):
        return
    others = [
        f"{part} of version {versions[part]}, and this build knows {oldest} to {newest}"
        for part, (oldest, newest) in known.items()
        if isinstance(versions.get(part), int) and not oldest <= versions[part] <= newest
    ]
    if others:
        yield Check(
            "held mount", "missing", "; ".join(others), "stay with the build that runs; or kvfs umount and mount"
        )
    else:
        yield Check("held mount", "ok", "this build can take it over from the daemon that runs")


def render(checks: list[Check]) -> str:
    """One line a check, and the advice below the missing ones."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.name.ljust(width)}  {check.state.ljust(7)}  {check.found}")
        if check.action:
            lines.append(f"{'':{width}}           -> {check.action}")
    fatal = [check.name for check in checks if check.fatal]
    lines.append("")
    export = "; kvfs export can" if set(fatal) <= {"/dev/fuse", "fusermount3"} else ""
    lines.append(f"a mount cannot work: {', '.join(fatal)}{export}" if fatal else "a mount can work here")
    return "\n".join(printable(line) for line in lines)


def _python() -> Iterator[Check]:
    version = platform.python_version()
    if sys.flags.optimize:
        yield Check(
            "python", "missing", f"{version} with -O", "run without -O: kvfs keeps its assertions", required=True
        )
    else:
        yield Check("python", "ok", version)


def _module(name: str, module: str, action: str) -> Check:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return Check(name, "missing", str(error), action, required=True)
    return Check(name, "ok", f"{module} loads")


def _native() -> Iterator[Check]:
    yield _module("data plane", "kvfs._native", "build it with tools/setup")


def _pyfuse3() -> Iterator[Check]:
    action = "pip install 'kvfs[daemon]', or tools/setup in the sources; it is built with libfuse3-dev and pkg-config"
    yield _module("pyfuse3", "pyfuse3", action)


def _kernel() -> Iterator[Check]:
    release = platform.release()
    if kernel_version(release) < MINIMUM_KERNEL:
        wanted = ".".join(map(str, MINIMUM_KERNEL))
        yield Check("kernel", "missing", release, f"kvfs needs Linux {wanted} or newer", required=True)
    else:
        yield Check("kernel", "ok", release)


def _fuse_device() -> Iterator[Check]:
    path = "/dev/fuse"
    try:
        status = os.stat(path)
    except FileNotFoundError:
        yield Check(path, "missing", "not there", "modprobe fuse; in a container: --device /dev/fuse", required=True)
        return
    mode = stat.S_IMODE(status.st_mode)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        action = "chmod 0666 /dev/fuse (as root)" if isinstance(error, PermissionError) else "modprobe fuse"
        yield Check(path, "missing", f"mode {mode:04o}, cannot be opened: {error.strerror}", action, required=True)
        return
    if mode & 0o666 != 0o666:
        yield Check(
            path, "note", f"mode {mode:04o}: only its owner can mount", "for unprivileged mounts: chmod 0666 /dev/fuse"
        )
    else:
        yield Check(path, "ok", f"mode {mode:04o}")


def _fusermount() -> Iterator[Check]:
    program = shutil.which("fusermount3")
    required = os.geteuid() != 0
    if program is None:
        state = "missing" if required else "note"
        yield Check("fusermount3", state, "not found: only root can mount", "apt install fuse3", required=required)
        return
    if not os.stat(program).st_mode & stat.S_ISUID:
        state = "missing" if required else "note"
        yield Check("fusermount3", state, f"{program} is not setuid root", f"chmod u+s {program}", required=required)
        return
    configuration = Path("/etc/fuse.conf")
    text = configuration.read_text(errors="replace") if configuration.exists() else ""
    allowed = any(line.strip() == "user_allow_other" for line in text.splitlines())
    note = "" if allowed else "; --allow-other needs user_allow_other in /etc/fuse.conf"
    yield Check("fusermount3", "ok", f"{program}, setuid{note if required else ''}")


def _fuse_pages() -> Iterator[Check]:
    name = "fuse max_pages"
    if not MAX_PAGES_PATH.exists():
        yield Check(name, "note", "no fs.fuse.max_pages_limit (kernel < 6.13): requests are at most 1 MiB")
        return
    pages = int(MAX_PAGES_PATH.read_text())
    if pages >= WANTED_MAX_PAGES:
        yield Check(name, "ok", f"{pages} pages: requests of up to {pages // 256} MiB")
    elif os.geteuid() == 0:
        yield Check(name, "note", f"{pages} pages; kvfs mount raises it to {WANTED_MAX_PAGES} when it runs as root")
    else:
        yield Check(
            name,
            "missing",
            f"{pages} pages: requests are at most {pages * 4} KiB",
            f"as root: sysctl fs.fuse.max_pages_limit={WANTED_MAX_PAGES}",
        )


def _fuse_epoch() -> Iterator[Check]:
    release = platform.release()
    if kernel_version(release) >= INC_EPOCH_KERNEL:
        yield Check("fuse epoch", "ok", "FUSE_NOTIFY_INC_EPOCH: names stay cached in the kernel until an eviction")
    else:
        yield Check(
            "fuse epoch",
            "note",
            f"{release} is older than 6.16: names are not cached in the kernel, every stat asks the daemon",
        )


def _fuse_timeout() -> Iterator[Check]:
    release, limits = platform.release(), []
    for name in ("default_request_timeout", "max_request_timeout"):
        with suppress(OSError, ValueError):
            if seconds := int((FUSE_SYSCTL_PATH / name).read_text()):
                limits.append(f"fs.fuse.{name} = {seconds}")
    if kernel_version(release) < REQUEST_TIMEOUT_KERNEL:
        found = f"{release} is older than 6.15: requests to a stopped daemon wait for it"
        yield Check("fuse timeout", "note", found)
    elif limits:
        found = f"{', '.join(limits)}: the kernel ends each FUSE mount that is slower, unsealed files with it"
        yield Check("fuse timeout", "note", found)
    else:
        found = "kvfs mount --request-timeout S has the kernel end a mount that answers nothing, unsealed files with it"
        yield Check("fuse timeout", "ok", found)


def _fuse_idmap() -> Iterator[Check]:
    release = platform.release()
    if kernel_version(release) < IDMAP_KERNEL:
        yield Check("fuse idmap", "note", f"{release} is older than 6.12: no mounts for pods with hostUsers: false")
    else:
        yield Check("fuse idmap", "ok", "kvfs mount --idmap lets a mount be bound into pods with hostUsers: false")


def _fuse_rings() -> Iterator[Check]:
    """FUSE over io_uring: the kernel offers it to a mount that is made while the parameter is Y."""
    name = "fuse rings"
    if not FUSE_RINGS_PATH.exists():
        found = (
            f"{platform.release()} has no FUSE over io_uring (Linux 6.14, CONFIG_FUSE_IO_URING): mounts use /dev/fuse"
        )
        yield Check(name, "note", found)
    elif FUSE_RINGS_PATH.read_text().strip() == "Y":
        found = "on: mounts use FUSE over io_uring, with buffers of at most 1 GiB, of which touched pages alone count"
        yield Check(name, "ok", found)
    else:
        yield Check(
            name,
            "note",
            "off: mounts use /dev/fuse; FUSE over io_uring takes less CPU a request",
            f"as root: echo Y > {FUSE_RINGS_PATH}, or fuse.enable_uring=1 at boot; then mount again",
        )


class _Ring:
    """A bare io_uring, for probing. Raises OSError."""

    def __init__(self, entries: int = 4) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        parameters = ctypes.create_string_buffer(120)
        self.fd = self._call(_SYS_IO_URING_SETUP, entries, parameters)

    def _call(self, *arguments: object) -> int:
        result = int(self._libc.syscall(*arguments))
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

    def missing_operations(self) -> list[str]:
        count = 64
        probe = ctypes.create_string_buffer(16 + 8 * count)
        self._call(_SYS_IO_URING_REGISTER, self.fd, _IORING_REGISTER_PROBE, probe, count)
        supported = set()
        for index in range(probe.raw[1]):
            operation, _, flags, _ = struct.unpack_from("<BBHI", probe.raw, 16 + 8 * index)
            if flags & 1:
                supported.add(operation)
        return [name for operation, name in _WANTED_OPERATIONS.items() if operation not in supported]

    def enter(self) -> None:
        """Submits nothing, and waits for nothing."""
        self._call(_SYS_IO_URING_ENTER, self.fd, 0, 0, 0, None, 0)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _io_uring() -> Iterator[Check]:
    disabled = IO_URING_DISABLED_PATH.read_text().strip() if IO_URING_DISABLED_PATH.exists() else "0"
    profile = "a seccomp profile that allows io_uring (Docker: --security-opt seccomp=FILE)"
    enable = profile if disabled == "0" else f"as root: sysctl kernel.io_uring_disabled=0; in a container: {profile}"
    call = "io_uring_setup"
    try:
        ring = _Ring()
        try:
            call = "io_uring_register"
            missing = ring.missing_operations()
            call = "io_uring_enter"
            ring.enter()
        finally:
            ring.close()
    except OSError as error:
        found = f"{call}: {error.strerror}; kernel.io_uring_disabled = {disabled}"
        enable = _LOCK_MEMORY if error.errno == errno.ENOMEM else enable
        yield Check("io_uring", "note", f"{found}: device I/O goes by threads, which cost more", enable)
        return
    if missing:
        yield Check("io_uring", "missing", f"this kernel lacks {', '.join(missing)}", "a newer kernel", required=True)
    elif disabled != "0":
        yield Check(
            "io_uring", "note", f"works for this user; kernel.io_uring_disabled = {disabled} stops others", enable
        )
    else:
        yield Check("io_uring", "ok", "a ring can be made and has every operation needed")


def _memlock() -> Iterator[Check]:
    """Make as many rings as the daemon does. The kernel charges a little of each as locked memory, which must fit."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard >> 10} KiB"
    rings: list[_Ring] = []
    try:
        for _ in range(RING_COUNT):
            rings.append(_Ring(RING_ENTRIES))
    except OSError as error:
        if not rings:
            yield Check("memlock", "note", f"limit {text}; not tried: no io_uring")
            return
        found = f"limit {text}; ring {len(rings) + 1} of {RING_COUNT}: {error.strerror}: rings are smaller, or threads"
        yield Check("memlock", "note", found, _LOCK_MEMORY)
        return
    finally:
        for ring in rings:
            ring.close()
    yield Check("memlock", "ok", f"limit {text}: enough for {RING_COUNT} rings")


def _files() -> Iterator[Check]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= 1024:
        yield Check("open files", "ok", f"limit {hard}")
    else:
        yield Check("open files", "missing", f"limit {hard}", "raise it to 1024 or more (LimitNOFILE=, ulimit -n)")


def _cpu() -> Iterator[Check]:
    if platform.machine() not in ("x86_64", "amd64"):
        yield Check("cpu", "note", f"{platform.machine()}: checksums use the portable code")
        return
    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            flags = set(line.partition(":")[2].split())
            break
    cores = len(os.sched_getaffinity(0))
    if "avx2" in flags:
        best = "AVX-512" if "avx512f" in flags else "AVX2"
        yield Check("cpu", "ok", f"{cores} cores, {best} checksums")
    else:
        yield Check(
            "cpu", "note", f"{cores} cores, no AVX2: checksums run at some 5 GB/s a core instead of 20 and more"
        )


def _memory() -> Iterator[Check]:
    limit = memory_limit()
    if limit is not None:
        found = f"{limit.size >> 20} MiB: the cgroup's limit ({limit.path})"
        if limit.size < LEAST:
            action = f"raise it: a daemon needs {LEAST >> 20} MiB at least, and 1 GiB for its usual sizes"
            yield Check("memory", "missing", found, action, required=True)
        elif limit.size < 1 << 30:
            yield Check("memory", "note", f"{found}: staging and memory for reads are smaller than usual")
        else:
            yield Check("memory", "ok", found)
        return
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            mebibytes = int(line.split()[1]) >> 10
            if mebibytes < 1024:
                yield Check(
                    "memory", "missing", f"{mebibytes} MiB available", "a mount at default sizes takes up to 1 GiB"
                )
            else:
                yield Check("memory", "ok", f"{mebibytes} MiB available")
            return


def _zram() -> Iterator[Check]:
    found = Path("/sys/class/zram-control").exists() or Path("/sys/block/zram0").exists()
    yield Check(
        "zram",
        "ok" if found else "note",
        "there (RAM devices for tests and benches)"
        if found
        else "not there: modprobe zram; only tests and benches use it",
    )


def _loop() -> Iterator[Check]:
    found = Path("/dev/loop-control").exists()
    yield Check(
        "loop",
        "ok" if found else "note",
        "there (files as block devices)" if found else "not there: modprobe loop; only tests use it",
    )


def _nvme() -> Iterator[Check]:
    """Namespaces that the kernel has connected, whether a pool uses them or not."""
    return (_namespace(namespace.name, namespace) for namespace in nvme_kernel.namespaces())


def _namespace(name: str, namespace: nvme_kernel.Namespace) -> Check:
    return Check(name, "ok" if namespace.reachable else "note", namespace.text)


def _device(place: str) -> Iterator[Check]:
    """A device in the form that `kvfs format` takes, or the devices of a pool. Raises the errors of opening it."""
    from kvfs.pool import devices, nvme_tcp, opening

    if Path(place).is_dir():
        config = load(Path(place))
        if config is None:
            raise PoolError(f"{place} is no pool")
        for device in config.devices:
            yield from _device(str(opening.device_path(Path(place), device)))
    elif nvme_tcp.is_url(place):
        controller = nvme_tcp.Controller(place)
        try:
            limits = nvme_kernel.limits_text(*controller.limits)
        finally:
            controller.close()
        yield Check(place, "ok", f"tcp (by kvfs itself), {nvme_tcp.parse(place).nqn}, {limits}, no multipath")
    elif (namespace := nvme_kernel.namespace_at(place)) is not None:
        yield _namespace(place, namespace)
    elif not isinstance(devices.device_address(place), Path):
        raise devices.passthrough_error(place)
    else:
        block = stat.S_ISBLK(os.stat(place).st_mode)
        yield Check(place, "ok", "a block device, no NVMe" if block else "a file")


def _qemu() -> Iterator[Check]:
    """Needed only where guests run on this machine."""
    program = f"qemu-system-{platform.machine()}"
    path = shutil.which(program)
    if path is None:
        yield Check("qemu", "note", f"no {program}: no guest can run here; an export serves other front ends")
        return
    said = subprocess.run(
        [path, "--version"], capture_output=True, text=True, errors="replace", timeout=PROGRAM_TIMEOUT_S, check=False
    ).stdout
    match = re.search(r"version (\d+)\.(\d+)\S*", said)
    if match is None:
        yield Check("qemu", "note", f"{path} says no version")
    elif (int(match[1]), int(match[2])) < MINIMUM_QEMU:
        wanted = ".".join(map(str, MINIMUM_QEMU))
        yield Check("qemu", "note", f"{match[0]}: older than {wanted}, without memory-backend= for a whole machine")
    else:
        yield Check("qemu", "ok", f"{match[0]}; kvfs export POOL --show-qemu prints the command")


def _guest_memory() -> Iterator[Check]:
    """Huge pages for the shared memory of guests, which is the target of reads: fewer pages to hold for each."""
    numbers = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in ("HugePages_Free", "Hugepagesize"):
            numbers[key] = int(value.split()[0])
    size = numbers.get("Hugepagesize", 0) >> 10
    chosen = re.search(r"\[(\w+)\]", SHMEM_HUGE_PATH.read_text() if SHMEM_HUGE_PATH.exists() else "")
    transparent = chosen[1] if chosen else "not there"
    free = numbers.get("HugePages_Free", 0)
    found = f"{free} huge pages of {size} MiB free; transparent ones for memfd: {transparent}"
    if free or transparent not in ("never", "deny", "not there"):
        yield Check("guest memory", "ok", found)
    else:
        yield Check(
            "guest memory",
            "note",
            f"{found}: guests' memory is in pages of 4 KiB",
            f"for guests: echo advise > {SHMEM_HUGE_PATH} (as root), or hugetlb=on at their memory-backend-memfd",
        )


def _dpu() -> Iterator[Check]:
    """The Arm side of a BlueField: its firmware names its parts MLNXBF... (drivers/platform/mellanox of the kernel)."""
    parts = sorted(path.name for path in PLATFORM_DEVICES_PATH.glob("MLNXBF*"))
    if not parts:
        return
    doca = f"DOCA is at {DOCA_PATH}" if DOCA_PATH.exists() else f"no DOCA at {DOCA_PATH}"
    yield Check("dpu", "note", f"a BlueField ({parts[0]}); {doca}; docs/virtiofs.md says how its host can be served")


def _gpu() -> Iterator[Check]:
    """Only clients that read into GPU memory need one. Looked at in a process of its own (kvfs/client/gpu_probe.py)."""
    cuda = examine_cuda()
    if cuda.error:
        yield Check("gpu", "note", f"{cuda.error}; clients have mode host")
    elif cuda.double:
        yield Check("gpu", "note", f"{cuda.text}; KVFS_CUDA_LIBRARY is set: unset it")
    else:
        yield Check("gpu", "ok", f"{cuda.text}; clients have mode staged, or gds (tools/gpu_check measures it)")


def _cufile() -> Iterator[Check]:
    """Needs of gds that can be checked without a pool. The rest is proven, device by device, when a client connects."""
    cufile, cuda = examine_cufile(), examine_cuda()
    found = "; ".join(filter(None, (cufile.text, cuda.error)))
    if cufile.missing or cuda.error:
        yield Check("gpu direct", "note", f"gds is not to be had: {found}")
    else:
        rest = "clients have mode gds where cuFile reads every device of the pool right, and directly by its statistics"
        yield Check("gpu direct", "note" if cuda.double else "ok", f"{rest}; {found}")
