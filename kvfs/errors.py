"""Every error kvfs raises on purpose. Each class carries its errno; only the front ends translate.

A message names the object and the numbers. `UsageError` ends the command line with status 2, every other KvfsError with
1.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator


class KvfsError(Exception):
    errno = errno.EIO


class UsageError(KvfsError):
    errno = errno.EINVAL


class PoolError(KvfsError):
    """A pool cannot be made, found or opened."""

    errno = errno.EINVAL


class FormatError(KvfsError):
    """Bytes on a device or in the index are not what their format says."""

    errno = errno.EIO


class ChecksumError(FormatError):
    errno = errno.EIO


class DeviceError(KvfsError):
    errno = errno.EIO


class NoSpaceError(KvfsError):
    errno = errno.ENOSPC


class DeadlineError(KvfsError):
    errno = errno.ETIMEDOUT


class MissingFeatureError(KvfsError):
    """This machine lacks something; the message says what and how to get it."""

    errno = errno.ENOSYS


# ---- what the namespace refuses ----


class NotFoundError(KvfsError):
    errno = errno.ENOENT


class StaleInodeError(KvfsError):
    """The inode is gone but its name may lead to another: the kernel looks it up again."""

    errno = errno.ESTALE


class ExistsError(KvfsError):
    errno = errno.EEXIST


class NotDirectoryError(KvfsError):
    errno = errno.ENOTDIR


class IsDirectoryError(KvfsError):
    errno = errno.EISDIR


class NotEmptyError(KvfsError):
    errno = errno.ENOTEMPTY


class NotPermittedError(KvfsError):
    errno = errno.EPERM


class NotSupportedError(KvfsError):
    errno = errno.EOPNOTSUPP


class InvalidArgumentError(KvfsError):
    errno = errno.EINVAL


class NameTooLongError(KvfsError):
    errno = errno.ENAMETOOLONG


class NoAttributeError(KvfsError):
    """No such extended attribute."""

    errno = errno.ENODATA


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error in a nursery's group that says most: a KvfsError if there is one."""
    leaves = list(_leaves(group))
    return next((error for error in leaves if isinstance(error, KvfsError)), leaves[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
