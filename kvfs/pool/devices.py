"""Devices: opening, measuring, and refusing those that hold something; labels on them; making a pool of them.

Blocking calls throughout: for the command line and for the time before a mount answers. Knows labels, not segments.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import shutil
import stat
import subprocess
import uuid as uuids
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvfs.errors import DeviceError, ForeignLabelError, FormatError, InUseError, KvfsError, PoolError, UsageError
from kvfs.guard import check_owner, open_own
from kvfs.index.lmdb import LmdbIndex
from kvfs.pool import nvme_generic, nvme_kernel, nvme_tcp, owner
from kvfs.pool.config import (
    CONFIG_NAME,
    DEVICES_MAX,
    LABEL_SIZE,
    STRIPE_UNIT_MIN,
    ZONES_OFFSET,
    DeviceConfig,
    Geometry,
    PoolConfig,
    choose_geometry,
    compare,
    format_size,
    load,
    new_config,
)
from kvfs.pool.fence import Step, kernel_reservation, unsupported
from kvfs.pool.format import (
    BEAT_OFFSET,
    META_CLEAN,
    META_UUID,
    Beat,
    Label,
    holds_label,
    pack_label,
    unpack_beat,
    unpack_label,
)
from kvfs.types import PAGE_SIZE

# Where a device is: a path, the URL of an NVMe/TCP namespace, or `ng:` and the path of a generic NVMe device.
Place = Path | str
# Labels, and eight zones of the smallest kind.
DEVICE_SIZE_MIN = ZONES_OFFSET + LABEL_SIZE + 8 * STRIPE_UNIT_MIN
LOCK_NAME = "lock"
INDEX_NAME = "index"
DEVICES_NAME = "devices"
_LOCK_TEXT_MAX = 4096
Tell = Callable[[str], None]
# Where signatures lie: the first MiB holds every one of these, and `btrfs` and `zfs` begin at 64 and 128 KiB.
_HEAD_SIZE = 1 << 20
# A file is one that was made to be a device if so many of its first and last bytes are zeros, and so many pages
# between: a file of zeros is not read whole.
_CONTENT_MAX = 64 << 20
_CONTENT_SAMPLES = 256
_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (1080, b"\x53\xef", "an ext2/3/4 filesystem"),
    (0, b"XFSB", "an XFS filesystem"),
    (65600, b"_BHRfS_M", "a btrfs filesystem"),
    (4086, b"SWAPSPACE2", "a swap area"),
    (4086, b"SWAP-SPACE", "a swap area"),
    (65526, b"SWAPSPACE2", "a swap area"),
    (536, b"LVM2 001", "an LVM physical volume"),
    (24, b"LVM2 001", "an LVM physical volume"),
    (0, b"LUKS\xba\xbe", "a LUKS volume"),
    (4096, b"\xfc\x4e\x2b\xa9", "an md RAID member"),
    (0, b"\xfc\x4e\x2b\xa9", "an md RAID member"),
    (512, b"EFI PART", "a GPT partition table"),
    (4096, b"EFI PART", "a GPT partition table"),
    (1024, b"\x10\x20\xf5\xf2", "an F2FS filesystem"),
    (0, b"hsqs", "a squashfs filesystem"),
    (3, b"NTFS    ", "an NTFS filesystem"),
    (3, b"EXFAT   ", "an exFAT filesystem"),
    (54, b"FAT1", "a FAT filesystem"),
    (82, b"FAT32   ", "a FAT filesystem"),
    (32769, b"CD001", "an ISO 9660 filesystem"),
    (4120, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca", "a bcache device"),
)


@dataclass(slots=True)
class Device:
    """An open device. Close it by closing fd."""

    path: Place
    fd: int
    size: int
    is_block: bool
    direct: bool
    # A descriptor that keeps others away as long as it is open; -1: none. Not the one that io_uring and native clients
    # have: theirs may outlive this process for a moment.
    claim: int = field(default=-1, kw_only=True)

    @property
    def shared_fd(self) -> int:
        """What native clients get a file of their own of."""
        return self.fd

    def close(self) -> None:
        os.close(self.fd)
        self.unclaim()

    def unclaim(self) -> None:
        claim, self.claim = self.claim, -1
        if claim >= 0:
            # A file of a filesystem that is gone says so, and is closed all the same.
            with suppress(OSError):
                os.close(claim)

    def same(self, place: Place) -> bool:
        """Whether `place` leads to this device."""
        return isinstance(place, Path) and os.path.exists(self.path) and os.path.samefile(self.path, place)

    def leads_to(self, place: Place) -> bool:
        """Whether the open descriptor is still what is found there."""
        if not isinstance(place, Path):
            return False
        try:
            named, is_open = os.stat(place), os.fstat(self.fd)
        except OSError:
            return False
        same = (named.st_dev, named.st_ino, named.st_rdev) == (is_open.st_dev, is_open.st_ino, is_open.st_rdev)
        return same and os.lseek(self.fd, 0, os.SEEK_END) >= self.size > 0

    def take_over(self, old: Device) -> None:
        """Get the number of its descriptor, by which the data plane knows it. It is done with."""
        os.dup2(self.fd, old.fd, inheritable=False)
        os.close(self.fd)
        self.fd = old.fd
        old.let_go()

    def let_go(self) -> None:
        """Close all but the descriptor."""
        self.unclaim()

    def door(self) -> Device:
        """The same device for a thread of its own, which closes it: a descriptor that stays what it is."""
        return Device(self.path, os.dup(self.fd), self.size, self.is_block, self.direct)

    def reservation(self, step: Step, key: int, other: int = 0) -> None:
        """A step of an NVMe reservation. DeviceError: EBADE for a conflict, EOPNOTSUPP where there are none."""
        if not self.is_block or nvme_kernel.namespace_at(str(self.path)) is None:
            raise unsupported(str(self.path))
        kernel_reservation(self.fd, str(self.path), step, key, other)

    def sync(self) -> None:
        """What was written is durable when this returns. OSError, DeviceError."""
        os.fdatasync(self.fd)

    def read(self, offset: int, size: int) -> bytes:
        """Read whole pages; raises DeviceError, also at the end of the device."""
        with mmap.mmap(-1, size) as memory:
            try:
                done = os.preadv(self.fd, [memory], offset)
            except OSError as error:
                raise DeviceError(f"{self.path}: read at {offset}: {os.strerror(error.errno or 0)}") from error
            if done != size:
                raise DeviceError(f"{self.path}: read of {size} bytes at {offset} gave {done}")
            return bytes(memory)

    def write(self, offset: int, data: bytes, *, durable: bool = True) -> None:
        """Write whole pages and wait until they are durable; without that, until whoever reads finds them."""
        with mmap.mmap(-1, len(data)) as memory:
            memory[:] = data
            try:
                done = os.pwritev(self.fd, [memory], offset)
                if durable:
                    os.fdatasync(self.fd)
            except OSError as error:
                raise DeviceError(f"{self.path}: write at {offset}: {os.strerror(error.errno or 0)}") from error
            if done != len(data):
                raise DeviceError(f"{self.path}: write of {len(data)} bytes at {offset} took {done}")


@dataclass(slots=True)
class RemoteDevice(Device):
    """An NVMe/TCP namespace. Its fd stands for it in the data plane and in native clients; labels go by a connection of
    its own."""

    controller: nvme_tcp.Controller

    def leads_to(self, place: Place) -> bool:
        """The connection is made again, and the namespace compared, when it is used next."""
        return self.same(place)

    def let_go(self) -> None:
        self.controller.close()

    def door(self) -> Device:
        return _RemoteDoor(self.path, -1, self.size, True, False, self.controller)

    def close(self) -> None:
        os.close(self.fd)
        self.controller.close()

    def same(self, place: Place) -> bool:
        return nvme_tcp.is_url(place) and nvme_tcp.parse(str(place)).where == nvme_tcp.parse(str(self.path)).where

    def reservation(self, step: Step, key: int, other: int = 0) -> None:
        self.controller.reservation(step, key, other)

    def sync(self) -> None:
        self.controller.flush()

    def read(self, offset: int, size: int) -> bytes:
        return self.controller.read(offset, size)

    def write(self, offset: int, data: bytes, *, durable: bool = True) -> None:
        self.controller.write(offset, data)


@dataclass(slots=True)
class _RemoteDoor(RemoteDevice):
    """Its controller is another's, who closes it, and may do so meanwhile."""

    def close(self) -> None:
        pass


@dataclass(slots=True)
class GenericDevice(Device):
    """An NVMe namespace by passthrough. Native clients get its block device where there is one: that needs no
    privilege."""

    namespace: nvme_generic.Namespace

    @property
    def shared_fd(self) -> int:
        return self.fd if self.namespace.block_fd < 0 else self.namespace.block_fd

    def leads_to(self, place: Place) -> bool:
        try:
            return nvme_kernel.is_generic(place) and (
                os.stat(nvme_kernel.path_of(place)).st_rdev == os.fstat(self.fd).st_rdev
            )
        except OSError:
            return False

    def take_over(self, old: Device) -> None:
        Device.take_over(self, old)
        self.namespace.fd = self.fd

    def let_go(self) -> None:
        self.namespace.fd = -1
        self.namespace.close()

    def door(self) -> Device:
        namespace = self.namespace.duplicate()
        return GenericDevice(self.path, namespace.fd, self.size, True, False, namespace)

    def close(self) -> None:
        self.namespace.close()

    def same(self, place: Place) -> bool:
        path = nvme_kernel.path_of(self.path)
        return nvme_kernel.is_generic(place) and os.path.samefile(path, nvme_kernel.path_of(place))

    def reservation(self, step: Step, key: int, other: int = 0) -> None:
        raise unsupported(str(self.path))

    def sync(self) -> None:
        self.namespace.flush()

    def read(self, offset: int, size: int) -> bytes:
        return self.namespace.read(offset, size)

    def write(self, offset: int, data: bytes, *, durable: bool = True) -> None:
        self.namespace.write(offset, data, durable=durable)


def _open_generic(place: str, *, exclusive: bool, writable: bool) -> Device:
    namespace = nvme_generic.Namespace(place, exclusive=exclusive, writable=writable)
    return GenericDevice(place, namespace.fd, namespace.size, True, namespace.block_fd >= 0, namespace)


def _open_remote(url: str) -> Device:
    controller = nvme_tcp.Controller(url)
    try:
        if not controller.size:
            raise UsageError(f"{url}: names no namespace (nsid)")
        return RemoteDevice(url, controller.descriptor(), controller.size, True, False, controller)
    except BaseException:
        controller.close()
        raise


def place_of(text: str) -> Place:
    """A device as a user, or pool.toml, names it."""
    return text if nvme_tcp.is_url(text) or nvme_kernel.is_generic(text) else Path(text)


def open_device(
    path: Place, *, exclusive: bool = True, writable: bool = True, holder: Device | None = None,
    tell: Tell | None = None,
) -> Device:  # fmt: skip
    """Open for direct I/O. A device that is mounted or otherwise claimed is an error when exclusive, unless `holder`,
    which is open, has the claim. DeviceError, InUseError."""
    if isinstance(path, str):
        return (
            _open_remote(path) if nvme_tcp.is_url(path) else _open_generic(path, exclusive=exclusive, writable=writable)
        )
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise DeviceError(f"{path}: {os.strerror(error.errno or 0)}") from error
    is_block = stat.S_ISBLK(mode)
    if not is_block and not stat.S_ISREG(mode):
        raise DeviceError(f"{path}: neither a block device nor a file")
    claim = -1
    if holder is not None and holder.claim >= 0 and holder.same(path):
        claim = os.dup(holder.claim)
    elif exclusive:
        claim = _claim(path, is_block, tell)
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC
    direct = True
    try:
        try:
            fd = os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            # A filesystem without direct I/O under a file: slower, still right.
            if is_block or error.errno != errno.EINVAL:
                raise
            fd, direct = os.open(path, flags), False
        size = os.lseek(fd, 0, os.SEEK_END)
    except OSError as error:
        if claim >= 0:
            os.close(claim)
        raise DeviceError(f"{path}: {os.strerror(error.errno or 0)}") from error
    return Device(path, fd, size, is_block, direct, claim=claim)


def _claim(path: Path, is_block: bool, tell: Tell | None) -> int:
    """A descriptor that keeps others away: by O_EXCL from a block device (open(2)), by flock(2) from a file."""
    claimed = -1

    def claim() -> bool:
        nonlocal claimed
        try:
            # Readable and writable: flock on NFS asks for that.
            claimed = os.open(path, (os.O_RDONLY | os.O_EXCL if is_block else os.O_RDWR) | os.O_CLOEXEC)
            if not is_block:
                fcntl.flock(claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if claimed >= 0:
                os.close(claimed)
                claimed = -1
            if error.errno in (errno.EBUSY, errno.EWOULDBLOCK):
                return False
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EROFS, errno.EACCES) and not is_block:
                return True  # a filesystem without locks, or a file that can only be read: the beat has to do
            raise DeviceError(f"{path}: {os.strerror(error.errno or 0)}") from error
        return True

    if claim():
        return claimed
    if label_beat(path)[0]:
        here = owner.this_process()
        found = owner.wait_claim(claim, lambda: label_beat(path)[1], here, tell)
        if found is None:
            return claimed
        who = owner.describe(found, here) if found.owner.int else "in use by another kvfs, or mounted"
        raise InUseError(f"{path}: {who}")
    busy = DeviceError(f"{path}: in use (mounted, or part of another device)")
    busy.errno = errno.EBUSY
    raise busy


def label_beat(path: Place) -> tuple[bool, Beat | None]:
    """Whether there is a kvfs label, and who uses the device as its beat says. For devices that others have claimed."""
    try:
        device = open_device(path, exclusive=False, writable=False)
    except KvfsError:
        return False, None
    try:
        return beat_by_label(device)
    finally:
        device.close()


def beat_by_label(device: Device) -> tuple[bool, Beat | None]:
    """As label_beat: where only the label says which pool it is."""
    try:
        label = read_labels(device).best() if device.size >= DEVICE_SIZE_MIN else None
        if label is None:
            return False, None
        config = label.config(f"{device.path}: label")
        return True, read_beat(device, config, label.device_index)
    except (KvfsError, OSError, IndexError):
        return False, None


def has_beat(described: DeviceConfig) -> bool:
    """Whether there is room for one before its zones."""
    return described.zones_offset >= BEAT_OFFSET + PAGE_SIZE and not described.removed


def read_beat(device: Device, config: PoolConfig, number: int) -> Beat | None:
    """Who uses a device, or did until it was killed. DeviceError."""
    if not has_beat(config.devices[number]):
        return None
    page = device.read(BEAT_OFFSET, PAGE_SIZE)
    return unpack_beat(config.secret, config.uuid, config.devices[number].uuid, page)


def check_unused(device: Device, me: Beat | None = None) -> None:
    """That nobody but `me` uses the pool whose label a device has. InUseError."""
    here = me or owner.this_process()
    try:
        owner.wait_free(lambda: {0: beat_by_label(device)[1]}, here, {0: device.claim >= 0})
    except InUseError as error:
        raise InUseError(f"{device.path}: {error}") from error


def signature(device: Device) -> str | None:
    """What a device holds already, as a phrase; None if nothing is known to be there."""
    size = min(_HEAD_SIZE, device.size // PAGE_SIZE * PAGE_SIZE)
    if not size:
        return None
    head = device.read(0, size)
    if holds_label(head):
        try:
            return f"the label of kvfs pool {unpack_label(head[:LABEL_SIZE], str(device.path)).pool_uuid}"
        except (FormatError, PoolError):
            return "a kvfs label"
    for offset, magic, what in _SIGNATURES:
        if head[offset : offset + len(magic)] == magic:
            return what
    # Boot sectors also end in 55 aa; a table has a partition with a type and a size.
    if head[510:512] == b"\x55\xaa" and any(
        head[446 + 16 * i + 4] and any(head[458 + 16 * i : 462 + 16 * i]) for i in range(4)
    ):
        return "an MBR partition table"
    end = device.size // PAGE_SIZE * PAGE_SIZE
    if end >= 2 * LABEL_SIZE and holds_label(device.read(end - LABEL_SIZE, LABEL_SIZE)):
        return "the second label of a kvfs pool"
    return _blkid(device.path) or _content(device)


def _content(device: Device) -> str | None:
    """Whether a plain file holds anything but zeros: then somebody may want it back. One that was made to be a device
    has a hole, or zeros."""
    if device.is_block or not isinstance(device.path, Path):
        return None
    with open(device.path, "rb") as file:
        fd, step = file.fileno(), max(PAGE_SIZE, device.size // _CONTENT_SAMPLES)
        if (
            _holds_data(fd, 0)
            or _holds_data(fd, max(0, device.size - _CONTENT_MAX))
            or any(os.pread(fd, PAGE_SIZE, at).strip(b"\0") for at in range(0, device.size, step))
        ):
            return "data: it is a plain file, and no device of a pool"
    return None


def _holds_data(fd: int, at: int) -> bool:
    """Whether there is anything but zeros in a file's next _CONTENT_MAX bytes that are no hole."""
    left = _CONTENT_MAX
    while left > 0:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            return False  # nothing but a hole from there on
        data = os.pread(fd, min(left, _HEAD_SIZE), at)
        if not data:
            return False
        if data.count(0) != len(data):
            return True
        at += len(data)
        left -= len(data)
    return False


def _blkid(path: Place) -> str | None:
    """What blkid (util-linux) finds where it is installed: it knows the rare ones."""
    program = shutil.which("blkid") or shutil.which("blkid", path="/usr/sbin:/sbin")
    block = nvme_kernel.block_device_of(nvme_kernel.path_of(path)) if nvme_kernel.is_generic(path) else path
    if program is None or block is None or nvme_tcp.is_url(block):
        return None
    try:
        found = subprocess.run(
            [program, "-p", "-o", "value", "-s", "TYPE", "-s", "PTTYPE", "--", os.fspath(block)],
            capture_output=True, text=True, timeout=10, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = found.stdout.split()
    return f"{' and '.join(words)} (says blkid)" if found.returncode == 0 and words else None


# ---- labels on devices ----


@dataclass(frozen=True, slots=True)
class LabelCopies:
    """What was found at a device's two label places: labels, or why there is none."""

    copies: tuple[Label | FormatError | PoolError, Label | FormatError | PoolError]

    def best(self) -> Label | None:
        valid = [copy for copy in self.copies if isinstance(copy, Label)]
        return max(valid, key=lambda label: label.mount_epoch, default=None)

    def newer(self) -> PoolError | None:
        """The complaint about a newer version, if that is what one copy is."""
        return next((copy for copy in self.copies if isinstance(copy, PoolError)), None)


def read_labels(device: Device, size: int | None = None) -> LabelCopies:
    """Both copies. `size`: where the pool says the device ends; by default, where it really does."""
    end = (device.size if size is None else size) // PAGE_SIZE * PAGE_SIZE
    return LabelCopies((_read_label(device, 0, "first"), _read_label(device, end - LABEL_SIZE, "second")))


def _read_label(device: Device, offset: int, which: str) -> Label | FormatError | PoolError:
    where = f"{device.path}: {which} label"
    if offset < 0:
        return FormatError(f"{where}: the device is too small")
    try:
        return unpack_label(device.read(offset, LABEL_SIZE), where)
    except (FormatError, PoolError) as error:
        return error
    except DeviceError as error:
        return FormatError(str(error))


def write_labels(
    config: PoolConfig, devices: Sequence[Device], epoch: int, absent: Container[int] = ()
) -> dict[int, str]:
    """Both copies on every device but those `absent`, one after the other: a crash in between leaves one of them whole.
    Returns what failed on which device."""
    failed: dict[int, str] = {}
    for second in (False, True):
        for device, described in zip(devices, config.devices, strict=True):
            if described.index in absent or described.index in failed:
                continue
            offset = described.size - LABEL_SIZE if second else 0
            try:
                device.write(offset, pack_label(config, described.index, epoch))
            except DeviceError as error:
                failed[described.index] = str(error)
    return failed


def write_label(config: PoolConfig, device: Device, number: int, epoch: int) -> None:
    """Both copies on one device. DeviceError."""
    for offset in (0, config.devices[number].size - LABEL_SIZE):
        device.write(offset, pack_label(config, number, epoch))


def device_path(pool: Path, device: DeviceConfig) -> Place:
    """Relative paths are relative to the pool."""
    place = place_of(device.path)
    return pool / place if isinstance(place, Path) else place


# ---- opening a pool ----


@dataclass(slots=True)
class OpenPool:
    """A pool's devices, checked against its configuration and each other."""

    path: Path
    config: PoolConfig
    devices: list[Device]
    epoch: int
    notes: list[str]
    # Devices that could not be opened, or were removed, and why. Their descriptors give nothing.
    absent: dict[int, str] = field(default_factory=dict)
    # Of the labels of the others.
    epochs: dict[int, int] = field(default_factory=dict)

    def leave_stale(self, known: int) -> None:
        """Count those as absent that missed a mount: what is on them has to be compared first.

        `known`: the last mount that the index knows, 0 if it cannot say. A mount that ended while it wrote the labels
        wrote nothing else, and the index does not know of it: the devices that it did not come to missed nothing.
        """
        last = known or self.epoch
        for index, epoch in self.epochs.items():
            if epoch < last:
                self.absent[index] = f"its label has mount epoch {epoch}, the pool {last}"
        self.epoch = max(self.epoch, known)

    def close(self) -> None:
        # At once: a controller that is silent has half a second to say that it has shut down.
        with ThreadPoolExecutor(len(self.devices)) as threads:
            for device in self.devices:
                threads.submit(device.close)


@contextmanager
def locked(
    pool: Path, use: str = "in use", *, wait: bool = True, tell: Tell | None = None
) -> Iterator[PoolLock]:  # fmt: skip
    """Hold the pool's lock. PoolError if it is no pool, InUseError if somebody else has it.

    `use`: what others are told that it is for. Whoever is about to give it up is waited for, without `wait` nobody.
    """
    if not pool.is_dir():
        raise PoolError(f"{pool}: {'not a directory' if pool.exists() else 'no such pool'}")
    if not (pool / CONFIG_NAME).exists() and not (pool / INDEX_NAME).is_dir() and not (pool / DEVICES_NAME).is_dir():
        raise PoolError(f"{pool}: not a kvfs pool (no {CONFIG_NAME})")
    with _pool_lock(pool, use, wait=wait, tell=tell) as lock:
        yield lock


@dataclass(frozen=True, slots=True)
class PoolLock:
    """The lock of a pool's directory, which this process holds. Its text says who that is."""

    fd: int
    holder: Beat

    def describe(self, *, ending: bool = False) -> None:
        """For others to read. A full disk is no reason not to hold it."""
        beat = self.holder
        text = json.dumps({
            "pid": beat.pid, "started": beat.started, "namespace": beat.namespace, "boot": beat.boot.hex(),
            "host": beat.host, "use": beat.use, "ending": ending,
        })  # fmt: skip
        with suppress(OSError):
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, text.encode()[:_LOCK_TEXT_MAX], 0)


def _lock_holder(fd: int, pool: Path) -> Beat | None:
    """Who holds the lock, by its text; None if that says nothing."""
    try:
        read = json.loads(os.pread(fd, _LOCK_TEXT_MAX, 0))
        return replace(
            owner.this_process(), pid=int(read["pid"]), started=int(read["started"]), host=str(read["host"]),
            namespace=int(read["namespace"]), boot=bytes.fromhex(read["boot"]), use=str(read["use"]), pool=str(pool),
            flags=int(bool(read["ending"])),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def _pool_lock(
    pool: Path, use: str, *, wait: bool = True, tell: Tell | None = None
) -> Iterator[PoolLock]:  # fmt: skip
    check_owner(pool)
    fd = open_own(pool / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    here = owner.this_process(use=use)

    def claim() -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    try:
        if wait:
            found = owner.wait_claim(claim, lambda: _lock_holder(fd, pool), here, tell)
        else:
            found = None if claim() else _lock_holder(fd, pool) or replace(here, owner=uuids.UUID(int=0))
        if found is not None:
            who = owner.describe(found, here) if found.owner.int else "in use by another kvfs"
            raise InUseError(f"{pool}: {who}")
        lock = PoolLock(fd, here)
        lock.describe()
        try:
            yield lock
        finally:
            with suppress(OSError):
                os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def open_absent(path: Place) -> Device:
    """Stands for a device that is not there: reads give nothing, writes fail."""
    fd = os.memfd_create("kvfs-absent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return Device(path, fd, 0, False, False)


def open_pool(
    pool: Path, *, writable: bool = True, degraded: bool = False, tell: Tell | None = None
) -> OpenPool:  # fmt: skip
    """Open and check every device. The caller holds the lock and closes the result. PoolError, DeviceError.

    `degraded`: those that cannot be opened or read are absent, unless none is left.
    """
    config, notes = load(pool), []
    if config is None:
        config = discover(pool)
        if writable:
            write_config(pool, config)
        notes.append(f"{pool / CONFIG_NAME} was missing; {'written' if writable else 'read'} again from the labels")
    devices: list[Device] = []
    absent: dict[int, str] = {}
    epochs: dict[int, int] = {}
    failure = None
    try:
        for described in config.devices:
            path = device_path(pool, described)
            if described.removed:
                absent[described.index] = "removed"
                devices.append(open_absent(path))
                continue
            device = None
            try:
                device = open_device(path, exclusive=writable, writable=writable, tell=tell)
                label, note = check_device(config, device, described, str(pool / CONFIG_NAME))
                epochs[described.index] = label.mount_epoch
                notes += note
                devices.append(device)
            except BaseException as error:
                if device is not None:
                    device.close()
                # One that somebody else uses is there: nobody may write around it.
                lost = isinstance(error, DeviceError) and error.errno != errno.EBUSY
                if not degraded or not (lost or isinstance(error, ForeignLabelError)):
                    raise
                failure = failure or error
                absent[described.index] = str(error)
                devices.append(open_absent(path))
        if failure is not None and len(absent) == len(devices):
            raise failure
    except BaseException:
        for device in devices:
            device.close()
        raise
    return OpenPool(pool, config, devices, max(epochs.values(), default=0), notes, absent, epochs)


def check_device(config: PoolConfig, device: Device, described: DeviceConfig, origin: str) -> tuple[Label, list[str]]:
    """Its best label, checked against pool.toml, and what is wrong with the other copy."""
    if device.size < described.size:
        raise DeviceError(
            f"{device.path}: {device.size} bytes, but {origin} says {described.size}: "
            f"device {described.index} has shrunk"
        )
    found = read_labels(device, described.size)
    newer = found.newer()
    if newer is not None:
        raise newer
    label = found.best()
    if label is None:
        raise DeviceError(
            f"{device.path}: device {described.index} of the pool has no valid kvfs label: {found.copies[0]}"
        )
    if label.pool_uuid != config.uuid:
        raise ForeignLabelError(
            f"{origin}: uuid is {config.uuid}, but the label of {device.path} says {label.pool_uuid}: "
            f"{_replace_advice(described.index)}"
        )
    if label.device_uuid != described.uuid:
        # One of the others: paths were mixed up, and can be put right. Else it was one once.
        known = any(label.device_uuid == other.uuid for other in config.devices)
        raise (PoolError if known else ForeignLabelError)(
            f"{origin}: device[{described.index}].uuid is {described.uuid}, but the label of {device.path} says "
            f"{label.device_uuid} (device {label.device_index})"
            + (": put the paths right" if known else f": {_replace_advice(described.index)}")
        )
    described_there = label.config(f"{device.path}: label")
    if described_there.revision > config.revision:
        raise PoolError(
            f"{origin}: revision is {config.revision}, but the label of {device.path} has {described_there.revision}: "
            "remove the file, and mount or import the pool by its labels"
        )
    # Devices were added, removed or replaced while this one was away.
    own = described.index if described_there.revision < config.revision else None
    compare(config, origin, described_there, f"the label of {device.path}", own)
    return label, [f"{copy}; the other copy is used" for copy in found.copies if not isinstance(copy, Label)]


def _replace_advice(number: int) -> str:
    return (
        f"give pool.toml the path of the right device, or `kvfs device replace POOL {number} PATH` a new one, with "
        f"--force this one, or `kvfs device remove POOL {number}`"
    )


def discover(pool: Path) -> PoolConfig:
    """The configuration from the labels of the devices in the pool's own directory."""
    directory = pool / DEVICES_NAME
    candidates = sorted(directory.iterdir()) if directory.is_dir() else []
    if not candidates:
        raise PoolError(
            f"{pool}: no {CONFIG_NAME} and no devices in {directory}; use `kvfs import POOL --device PATH ...`"
        )
    return config_from_labels(candidates, pool)


def config_from_labels(paths: Sequence[Place], pool: Path) -> PoolConfig:
    """The configuration that the labels of these devices agree on, with their present paths. PoolError."""
    found: dict[int, tuple[Place, Label]] = {}
    for path in paths:
        device = open_device(path, exclusive=False, writable=False)
        try:
            copies = read_labels(device)
            label = copies.best()
            if label is None:
                raise PoolError(str(copies.newer() or f"{path}: no valid kvfs label"))
        finally:
            device.close()
        other = found.get(label.device_index)
        if other is not None:
            raise PoolError(f"{path}: says it is device {label.device_index}, and so does {other[0]}")
        found[label.device_index] = (path, label)
    # The one with the latest description; of those the first.
    first_path, first = max(
        (found[index] for index in sorted(found)), key=lambda item: item[1].config(str(item[0])).revision
    )
    config = first.config(f"{first_path}: label")
    for path, label in found.values():
        own = label.config(f"{path}: label")
        older = label.device_index if own.revision < config.revision else None
        compare(own, f"{path}: label", config, f"the label of {first_path}", older)
    missing = [device.index for device in config.devices if device.index not in found and not device.removed]
    if missing:
        listed = ", ".join(str(index) for index in missing)
        raise PoolError(f"pool {config.uuid}: device {listed} of {len(config.devices)} is missing")
    devices = tuple(
        device if device.index not in found else replace(device, path=stored_path(found[device.index][0], pool))
        for device in config.devices
    )
    return replace(config, devices=devices)


def stored_path(path: Place, pool: Path) -> str:
    """As pool.toml has it: relative inside the pool, absolute outside."""
    if isinstance(path, str):
        return path
    absolute, base = Path(os.path.abspath(path)), Path(os.path.abspath(pool))
    return os.fspath(absolute.relative_to(base) if absolute.is_relative_to(base) else absolute)


def write_config(pool: Path, config: PoolConfig) -> None:
    """Replace pool.toml, durably."""
    temporary = pool / f"{CONFIG_NAME}.new"
    try:
        fd = open_own(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(fd, config.dump().encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, pool / CONFIG_NAME)
        _sync_directory(pool)
    except OSError as error:
        raise PoolError(f"{pool / CONFIG_NAME}: {os.strerror(error.errno or 0)}") from error


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---- making a pool ----


@dataclass(frozen=True, slots=True)
class FormatRequest:
    """`kvfs format`: devices that are there, or `files` sparse files of `file_size` bytes in the pool."""

    pool: Path
    devices: tuple[Place, ...] = ()
    files: int = 0
    file_size: int = 0
    stripe_width: int | None = None
    stripe_unit: int | None = None
    segment_size: int | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class FormatResult:
    config: PoolConfig
    notes: tuple[str, ...]


def format_devices(request: FormatRequest) -> FormatResult:
    """Make the pool's directory, devices, labels and pool.toml. Whatever can be refused is refused before anything
    changes."""
    pool = request.pool
    _check_directory(pool, request.force)
    if request.files:
        sizes = [request.file_size] * request.files
        _check_files(request)
        geometry, notes = choose_geometry(
            sizes, stripe_width=request.stripe_width, stripe_unit=request.stripe_unit, segment_size=request.segment_size
        )
        created = not pool.exists()
        pool.mkdir(mode=0o700, exist_ok=True)
        paths = [pool / DEVICES_NAME / str(index) for index in range(request.files)]
        try:
            with _pool_lock(pool, "being formatted"):
                for old in filter(Path.exists, paths):
                    _check_old_file(old)
                _make_files(paths, request.file_size)
                notes += _room(pool, sum(sizes))
                return _write_pool(request, geometry, notes, [open_device(p) for p in paths])
        except BaseException:
            if created:
                shutil.rmtree(pool, ignore_errors=True)
            raise
    opened: list[Device] = []
    try:
        for path in request.devices:
            if any(other.same(path) for other in opened):
                raise UsageError(f"{path}: given twice")
            device = open_device(path)
            opened.append(device)
            if device.size < DEVICE_SIZE_MIN:
                raise UsageError(f"{path}: {device.size} bytes; a device needs at least {DEVICE_SIZE_MIN}")
            _check_content(device, request.force)
        geometry, notes = choose_geometry(
            [device.size for device in opened], stripe_width=request.stripe_width, stripe_unit=request.stripe_unit,
            segment_size=request.segment_size,
        )  # fmt: skip
        if 1 < geometry.stripe_width == len(opened):
            notes.append(
                f"stripe width {geometry.stripe_width} of {len(opened)} devices: each segment lies on all of them, so "
                "one that fails takes the whole cache, and writes fail until it is back; "
                f"--stripe-width {geometry.stripe_width - 1} leaves some of it"
            )
        pool.mkdir(mode=0o700, exist_ok=True)
        with _pool_lock(pool, "being formatted"):
            return _write_pool(request, geometry, notes, opened)
    finally:
        for device in opened:
            with suppress(OSError):
                device.close()


def _check_content(device: Device, force: bool, me: Beat | None = None) -> None:
    """That a device may be overwritten: what it holds by `force`, what somebody uses never."""
    what = None if force else signature(device)
    if what is not None:
        raise PoolError(f"{device.path}: holds {what}; use --force to overwrite it")
    check_unused(device, me)


def _check_old_file(path: Path) -> None:
    """That nobody uses the file that is about to go: another pool's directory may lead to it."""
    device = open_device(path)
    try:
        check_unused(device)
    finally:
        device.close()


def _write_pool(request: FormatRequest, geometry: Geometry, notes: list[str], opened: list[Device]) -> FormatResult:
    config = new_config(geometry, [(stored_path(device.path, request.pool), device.size) for device in opened])
    try:
        # The index of a pool that was here before describes other blocks.
        shutil.rmtree(request.pool / INDEX_NAME, ignore_errors=True)
        for failed in write_labels(config, opened, 0).values():
            raise DeviceError(failed)
        _make_index(request.pool / INDEX_NAME, config)
    finally:
        if request.files:
            for device in opened:
                device.close()
    write_config(request.pool, config)
    return FormatResult(config, tuple(notes))


def _make_index(path: Path, config: PoolConfig) -> None:
    """An empty one: there is nothing to rebuild at the first mount."""
    index = LmdbIndex(path)
    try:
        index.meta_put(META_UUID, config.uuid.bytes)
        index.meta_put(META_CLEAN, b"1")
        index.commit_now()
    finally:
        index.close()


def _check_directory(pool: Path, force: bool) -> None:
    if pool.exists() and not pool.is_dir():
        raise PoolError(f"{pool}: not a directory")
    if not pool.exists():
        if not pool.parent.is_dir():
            raise PoolError(f"{pool}: {pool.parent} is not a directory")
        return
    check_owner(pool)
    if (pool / LOCK_NAME).exists():
        with _pool_lock(pool, "being formatted"):
            pass
    if force:
        return
    if (pool / CONFIG_NAME).exists():
        raise PoolError(f"{pool}: holds a kvfs pool; use --force to overwrite it")
    if any(entry.name != LOCK_NAME for entry in pool.iterdir()):
        raise PoolError(f"{pool}: not empty; use --force to make a pool there all the same")


def _check_files(request: FormatRequest) -> None:
    size, count = request.file_size, request.files
    if not 1 <= count <= DEVICES_MAX:
        raise UsageError(f"--files: {count}; 1 to {DEVICES_MAX} are possible")
    if size < DEVICE_SIZE_MIN or size % PAGE_SIZE:
        raise UsageError(f"--size: {size} bytes; it must be a multiple of {PAGE_SIZE}, at least {DEVICE_SIZE_MIN}")


def _room(pool: Path, size: int) -> list[str]:
    """A note, if the disk below sparse files has less room than they may grow to."""
    disk = os.statvfs(pool)
    free = disk.f_bavail * disk.f_frsize
    if size <= free:
        return []
    unit = 30 if free >= 10 << 30 else 20
    return [
        f"{pool}: the pool may grow to {format_size(size)}, and its disk has {format_size(free >> unit << unit)} free: "
        "writes that find the disk full fail (ENOSPC)"
    ]


def _make_files(paths: Sequence[Path], size: int) -> None:
    """Sparse files: they take disk space as the pool fills."""
    try:
        paths[0].parent.mkdir(mode=0o700, exist_ok=True)
        for path in paths:
            path.unlink(missing_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, size)
            finally:
                os.close(fd)
    except OSError as error:
        raise PoolError(f"{paths[0].parent}: {os.strerror(error.errno or 0)}") from error


def add_devices(pool: Path, paths: Sequence[Place], *, force: bool) -> tuple[PoolConfig, PoolConfig]:
    """Add devices to a pool that nobody uses: new segments on them alone. Returns the pool as it was and as it is.

    The new devices' labels come first, then pool.toml, then the labels of the others: whoever reads in between finds
    the pool as it was, or older labels, which are known by their revision.
    """
    with locked(pool, "being given devices"):
        opened = open_pool(pool)
        fresh: list[Device] = []
        try:
            config, geometry = opened.config, opened.config.geometry
            for number, device in enumerate(opened.devices):
                if number not in opened.absent:
                    check_unused(device)
            for path in paths:
                fresh.append(open_new(path, [*opened.devices, *fresh], force=force))
            first, group = len(config.devices), 1 + max(device.group for device in config.devices)
            added = new_config(geometry, [(stored_path(device.path, pool), device.size) for device in fresh]).devices
            changed = replace(
                config, revision=config.revision + 1,
                devices=(*config.devices, *(replace(d, index=first + d.index, group=group) for d in added)),
            )  # fmt: skip
            if len(changed.devices) > DEVICES_MAX:
                raise UsageError(f"{len(changed.devices)} devices: at most {DEVICES_MAX} are possible")
            if changed.segment_count == config.segment_count:
                raise UsageError(
                    f"{len(fresh)} devices: a segment needs {geometry.stripe_width}, with a zone of "
                    f"{format_size(geometry.zone_size)} on each: add that many at a time"
                )
            devices = [*opened.devices, *fresh]
            new, old = range(first, len(devices)), range(first)
            for absent in (old, new):
                if absent is new:
                    write_config(pool, changed)
                for failed in write_labels(changed, devices, opened.epoch, {*absent, *opened.absent}).values():
                    raise DeviceError(failed)
            return config, changed
        finally:
            for device in fresh:
                device.close()
            opened.close()


def open_new(
    path: Place, others: Sequence[Device], *, force: bool, old: Device | None = None, me: Beat | None = None
) -> Device:  # fmt: skip
    """A device that is to become one of a pool, in the place of `old`, which is `me`'s. UsageError, PoolError,
    DeviceError."""
    if any(other.same(path) for other in others):
        raise UsageError(f"{path}: is a device of this pool, or given twice")
    device = open_device(path, holder=old)
    try:
        if device.size < DEVICE_SIZE_MIN:
            raise UsageError(f"{path}: {device.size} bytes; a device needs at least {DEVICE_SIZE_MIN}")
        _check_content(device, force, me)
    except BaseException:
        device.close()
        raise
    return device


def import_pool(pool: Path, paths: Sequence[Place]) -> PoolConfig:
    """Write pool.toml again from the labels of the devices at `paths`. Whatever can be refused is refused before
    anything changes."""
    if (pool / CONFIG_NAME).exists():
        raise PoolError(f"{pool / CONFIG_NAME}: exists; remove it first to import")
    config = config_from_labels(paths, pool)
    pool.mkdir(mode=0o700, exist_ok=True)
    with _pool_lock(pool, "being imported"):
        write_config(pool, config)
    return config
