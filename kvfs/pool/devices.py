"""An open device, of each kind: a block device or a file, or an NVMe/TCP namespace.

Reads, writes and claims whole devices; knows nothing of their contents. Blocks. opening.py opens devices.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvfs.errors import DeviceError, UsageError
from kvfs.pool import nvme_kernel, nvme_tcp
from kvfs.pool.fence import Step, kernel_reservation, unsupported
from kvfs.pool.geometry import LABEL_SIZE, STRIPE_UNIT_MIN, ZONES_OFFSET

# Where a device is: a path, or the URL of an NVMe/TCP namespace.
DeviceAddress = Path | str
Tell = Callable[[str], None]
# What stood before /dev/ngXnY while kvfs had NVMe passthrough.
_PASSTHROUGH = "ng:"
# Labels, and eight zones of the smallest kind.
DEVICE_SIZE_MIN = ZONES_OFFSET + LABEL_SIZE + 8 * STRIPE_UNIT_MIN


@dataclass(slots=True)
class Device:
    """An open device. Close it by closing fd."""

    path: DeviceAddress
    fd: int
    size: int
    is_block: bool
    direct: bool
    # A descriptor that keeps others away as long as it is open; -1: none. io_uring and native clients have another one,
    # which may outlive this process for a moment.
    claim: int = field(default=-1, kw_only=True)

    def close(self) -> None:
        os.close(self.fd)
        self.unclaim()

    def unclaim(self) -> None:
        claim, self.claim = self.claim, -1
        if claim >= 0:
            # close(2) of a file whose filesystem is gone fails, and closes the descriptor all the same.
            with suppress(OSError):
                os.close(claim)

    def same(self, place: DeviceAddress) -> bool:
        """Whether `place` leads to this device."""
        return isinstance(place, Path) and os.path.exists(self.path) and os.path.samefile(self.path, place)

    def leads_to(self, place: DeviceAddress) -> bool:
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
        """Take over the number of the old descriptor, by which the data plane knows the device. The old device is
        closed."""
        os.dup2(self.fd, old.fd, inheritable=False)
        os.close(self.fd)
        self.fd = old.fd
        old.let_go()

    def let_go(self) -> None:
        """Close all but the descriptor."""
        self.unclaim()

    def door(self) -> Device:
        """The same device for a separate thread, which closes it: a descriptor that stays what it is."""
        return Device(self.path, os.dup(self.fd), self.size, self.is_block, self.direct)

    def reservation(self, step: Step, key: int, other: int = 0) -> None:
        """A step of an NVMe reservation. DeviceError: EBADE for a conflict, EOPNOTSUPP where there are none."""
        if not self.is_block or nvme_kernel.namespace_at(str(self.path)) is None:
            raise unsupported(str(self.path))
        kernel_reservation(self.fd, str(self.path), step, key, other)

    def sync(self) -> None:
        """All writes before the call are durable when it returns. OSError, DeviceError."""
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
        """Write whole pages and wait until they are durable. Not durable: until readers find them."""
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
    """An NVMe/TCP namespace. Its fd stands for it in the data plane and in native clients; labels go by a separate
    connection."""

    controller: nvme_tcp.Controller

    def leads_to(self, place: DeviceAddress) -> bool:
        """Always: the next use connects again and compares the namespace."""
        return self.same(place)

    def let_go(self) -> None:
        self.controller.close()

    def door(self) -> Device:
        return _RemoteDoor(self.path, -1, self.size, True, False, self.controller)

    def close(self) -> None:
        os.close(self.fd)
        self.controller.close()

    def same(self, place: DeviceAddress) -> bool:
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
    """The controller belongs to the RemoteDevice that it came from, which may close it at any time."""

    def close(self) -> None:
        pass


def device_address(text: str) -> DeviceAddress:
    """A device as a user, or pool.toml, names it. An `ng:` address stays as it is: open_device() refuses it."""
    return text if nvme_tcp.is_url(text) or text.startswith(_PASSTHROUGH) else Path(text)


def passthrough_error(place: str) -> UsageError:
    """Return the error for a device that an earlier kvfs used by NVMe passthrough, past the kernel's block layer."""
    block = re.sub(r"(.*/)?ng(\d+n\d+)", r"/dev/nvme\2", place.removeprefix(_PASSTHROUGH))
    return UsageError(
        f"{place}: kvfs no longer has NVMe passthrough; name the block device, {block}, for --device or as the path "
        "in pool.toml: it has the same content"
    )


def open_absent(path: DeviceAddress) -> Device:
    """Stands for a device that is not there: reads give nothing, writes fail."""
    fd = os.memfd_create("kvfs-absent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return Device(path, fd, 0, False, False)
