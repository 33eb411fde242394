"""Namespaces by NVMe passthrough, `ng:/dev/ng0n1`: opening them, and the questions before a mount.

A generic character device knows no claims: two users of one would not see each other. So its block device, where there
is one, is held exclusively meanwhile. Blocking calls. The commands are the data plane's (native/src/io/nvme/generic.c).
"""

from __future__ import annotations

import copy
import errno
import os
import stat

from kvfs._native import ffi, lib
from kvfs.errors import DeviceError, UsageError
from kvfs.lent import lent
from kvfs.pool.nvme_kernel import PREFIX, block_device_of, path_of


class Namespace:
    """An open namespace. `block_fd` is the descriptor of its block device, or -1."""

    def __init__(self, place: str, *, exclusive: bool, writable: bool) -> None:
        """UsageError, DeviceError."""
        self._place, self._path = place, path_of(place)
        self.fd = self.block_fd = -1
        if not self._path.is_absolute():
            raise UsageError(f"{place}: not of the form {PREFIX}/dev/ngXnY")
        mode = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC
        try:
            if not stat.S_ISCHR(os.stat(self._path).st_mode):
                raise DeviceError(f"{place}: not a generic NVMe device (/dev/ngXnY)")
            block = block_device_of(self._path)
            if block is not None:
                self.block_fd = os.open(block, mode | os.O_DIRECT | (os.O_EXCL if exclusive else 0))
            self.fd = os.open(self._path, mode)
            self._info = ffi.new("struct kvfs_generic_info *")
            self._check(lib.kvfs_generic_info(self.fd, self._info), "identify")
        except OSError as error:
            self.close()
            why = "in use (mounted, or part of another device)" if error.errno == errno.EBUSY else error.strerror
            raise DeviceError(f"{place}: {why}") from error
        except DeviceError:
            self.close()
            raise

    def close(self) -> None:
        for fd in (self.fd, self.block_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self.block_fd = -1

    @property
    def size(self) -> int:
        return int(self._info.size)

    def read(self, offset: int, size: int) -> bytes:
        out = ffi.new("uint8_t[]", size)
        self._check(lib.kvfs_generic_io(self.fd, self._info, 0, offset, out, size), f"read at {offset}")
        return bytes(ffi.buffer(out))

    def duplicate(self) -> Namespace:
        """The same namespace by a separate descriptor, without the claim on its block device."""
        other = copy.copy(self)
        other.fd, other.block_fd = os.dup(self.fd), -1
        return other

    def write(self, offset: int, data: bytes, *, durable: bool = True) -> None:
        """The data is durable when this returns, if `durable`."""
        memory = lent(data, "uint8_t[]")
        self._check(lib.kvfs_generic_io(self.fd, self._info, 1, offset, memory, len(data)), f"write at {offset}")
        if durable:
            self.flush()

    def flush(self) -> None:
        self._check(lib.kvfs_generic_flush(self.fd, self._info), "flush")

    def _check(self, result: int, what: str) -> None:
        if result == 0:
            return
        words = {
            -errno.ENOTTY: "not an NVMe namespace",
            -errno.EMEDIUMTYPE: "its blocks have metadata or are not of 512 to 4096 bytes, or its MDTS is below 64 KiB",
            -errno.EACCES: "the kernel wants CAP_SYS_ADMIN for NVMe passthrough",
        }
        why = f"NVMe status {result:#x}" if result > 0 else words.get(result, os.strerror(-result))
        error = DeviceError(f"{self._place}: {what}: {why}")
        error.errno = -result if result < 0 else errno.EIO
        raise error
