"""Signatures of a device's earlier content: other filesystems, partition tables, kvfs labels, data in a plain file.

The command that makes a pool asks before it overwrites anything. Reads only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from kvfs.errors import FormatError, PoolError
from kvfs.pool import nvme_tcp
from kvfs.pool.devices import Device, DeviceAddress
from kvfs.pool.format import FORMAT_VERSION, holds_label, unpack_label
from kvfs.pool.geometry import LABEL_SIZE
from kvfs.types import PAGE_SIZE

# The first MiB holds every signature below; `btrfs` and `zfs` begin at 64 and 128 KiB.
_HEAD_SIZE = 1 << 20
# A file was made to be a device if so many of its first and last bytes are zeros, and so many pages between. So a file
# of zeros is not read whole.
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


def signature(device: Device) -> str | None:
    """A phrase for the content of a device; None if nothing known was found."""
    size = min(_HEAD_SIZE, device.size // PAGE_SIZE * PAGE_SIZE)
    if not size:
        return None
    head = device.read(0, size)
    if holds_label(head):
        try:
            label = unpack_label(head[:LABEL_SIZE], str(device.path), oldest=1)
            older = "" if label.version == FORMAT_VERSION else f", of format {label.version}"
            return f"the label of kvfs pool {label.pool_uuid}{older}"
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
    """Whether a plain file holds anything but zeros, which somebody may want back. A file that was made to be a device
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


def _blkid(path: DeviceAddress) -> str | None:
    """The answer of blkid (util-linux), which knows rare signatures; None where it is not installed."""
    program = shutil.which("blkid") or shutil.which("blkid", path="/usr/sbin:/sbin")
    if program is None or nvme_tcp.is_url(path):
        return None
    try:
        found = subprocess.run(
            [program, "-p", "-o", "value", "-s", "TYPE", "-s", "PTTYPE", "--", os.fspath(path)],
            capture_output=True, text=True, timeout=10, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = found.stdout.split()
    return f"{' and '.join(words)} (says blkid)" if found.returncode == 0 and words else None
