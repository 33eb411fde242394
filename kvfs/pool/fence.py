"""NVMe reservations: while one of them is held a namespace takes writes of registered hosts alone.

Type: write exclusive for registrants, so daemon and native clients, which have one host identifier, all write, and
every host reads. Sources: NVMe base 2.0, 7.2 to 7.6 and 8.19; linux/pr.h. Each kind of device has its own way to ask.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import uuid as uuids
from enum import IntEnum
from typing import Protocol

from kvfs.errors import DeviceError

# _IOW('p', 200 to 203 and 205, ...) of linux/pr.h.
_PR_REGISTER, _PR_RESERVE, _PR_RELEASE, _PR_PREEMPT = 0x401870C8, 0x401070C9, 0x401070CA, 0x401870CB
_PR_CLEAR = 0x401070CD
_PR_IGNORE_KEY = 1
_PR_WRITE_EXCLUSIVE_REG_ONLY = 3
# A conflict as newer kernels say it (PR_STS_RESERVATION_CONFLICT), and NVMe's status, which older ones hand on.
_CONFLICTS = (0x18, 0x83, 0x4083)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EPERM, errno.EACCES)


class Step(IntEnum):
    """enum kvfs_reservation_step."""

    REGISTER = 0
    REPLACE = 1
    ACQUIRE = 2
    PREEMPT = 3
    RELEASE = 4
    END = 5


class Reservation(Protocol):
    """A device's (Device.reservation). DeviceError: EBADE for a conflict, EOPNOTSUPP where there are none."""

    def __call__(self, step: Step, key: int, other: int = 0) -> None: ...


def key_of(owner: uuids.UUID) -> int:
    """The key of an owner. A host that reads the owner's beat can preempt it."""
    return int.from_bytes(owner.bytes[:8], "little")


def unsupported(path: str) -> DeviceError:
    error = DeviceError(f"{path}: no reservations")
    error.errno = errno.EOPNOTSUPP
    return error


def reserve(step: Reservation, key: int, before: int) -> None:
    """Register this host and hold the reservation, which an owner `before` (its key; 0: none) may have left.
    DeviceError."""
    if not _without_conflict(step, Step.REGISTER, key):
        # This host is registered, by a daemon that was killed.
        step(Step.REPLACE, key, before)
    if before and before != key:
        # This removes the registration of another host. This host's own is gone by now, which counts as a conflict.
        _without_conflict(step, Step.PREEMPT, key, before)
    step(Step.ACQUIRE, key)


def give_back(step: Reservation, key: int) -> None:
    """Release and unregister. A host that was preempted has nothing to release. DeviceError."""
    if _without_conflict(step, Step.RELEASE, key):
        _without_conflict(step, Step.END, key)


def _without_conflict(step: Reservation, what: Step, key: int, other: int = 0) -> bool:
    try:
        step(what, key, other)
    except DeviceError as error:
        if error.errno != errno.EBADE:
            raise
        return False
    return True


def kernel_reservation(fd: int, path: str, step: Step, key: int, other: int) -> None:
    """By the kernel, of a block device. DeviceError."""
    kind = _PR_WRITE_EXCLUSIVE_REG_ONLY
    request, data = {
        Step.REGISTER: (_PR_REGISTER, struct.pack("<QQII", 0, key, _PR_IGNORE_KEY, 0)),
        # The kernel replaces a registration if any old key is given. The registered key may be in no beat.
        Step.REPLACE: (_PR_REGISTER, struct.pack("<QQII", other or key, key, _PR_IGNORE_KEY, 0)),
        Step.ACQUIRE: (_PR_RESERVE, struct.pack("<QII", key, kind, 0)),
        Step.PREEMPT: (_PR_PREEMPT, struct.pack("<QQII", other, key, kind, 0)),
        Step.RELEASE: (_PR_RELEASE, struct.pack("<QII", key, kind, 0)),
        # The kernel cannot unregister. Nobody else is registered now.
        Step.END: (_PR_CLEAR, struct.pack("<QII", key, 0, 0)),
    }[step]
    try:
        status = fcntl.ioctl(fd, request, bytearray(data), True)
    except OSError as failure:
        error = DeviceError(f"{path}: reservation: {step.name}: {os.strerror(failure.errno or 0)}")
        error.errno = errno.EOPNOTSUPP if failure.errno in _UNSUPPORTED else failure.errno or errno.EIO
        raise error from failure
    if status:
        # All other statuses say only that there is no reservation.
        error = DeviceError(f"{path}: reservation: {step.name}: status {status:#x}")
        error.errno = errno.EBADE if status in _CONFLICTS else errno.EOPNOTSUPP
        raise error
