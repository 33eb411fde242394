"""Every error kvfs raises on purpose. Each class carries its errno; only the front ends translate.

A message names the object and the numbers. `UsageError` ends the command line with status 2, every other KvfsError with
1.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence


class KvfsError(Exception):
    """All that kvfs raises on purpose. `errno` is what the front ends answer with."""

    errno = errno.EIO


def printable(text: str) -> str:
    """Text chosen by others (paths, names), without characters that move a terminal's cursor or begin a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


class UsageError(KvfsError):
    """A request that makes no sense, whatever the state of the pool: wrong options, numbers out of range."""

    errno = errno.EINVAL


class PoolError(KvfsError):
    """A pool cannot be made, found or opened."""

    errno = errno.EINVAL


class InUseError(PoolError):
    """Another kvfs uses the pool, or a device of it."""

    errno = errno.EBUSY


class ForeignLabelError(PoolError):
    """A device has the label of another pool, or of a device that was one of this pool."""


class OtherVersionError(PoolError):
    """A kvfs of another version of the format wrote it, older or newer."""

    # False: its checksum is wrong, as this version computes it. So it may be damage.
    proven = True


class FormatError(KvfsError):
    """Bytes on a device or in the index are not what their format says."""

    errno = errno.EIO


class ChecksumError(FormatError):
    """Bytes that were read do not have the checksum that was written with them."""

    errno = errno.EIO


class DeviceError(KvfsError):
    """A device failed, answered wrongly, or did not answer in time."""

    errno = errno.EIO


class NoSpaceError(KvfsError):
    """No room, and nothing that may be evicted for it."""

    errno = errno.ENOSPC


class NamesFullError(NoSpaceError):
    """The block table has no record for another name: eviction may make room (kvfs.store.table_room)."""


class ShareError(NoSpaceError):
    """A user has reached the pool's limit (kvfs.store.shares)."""

    errno = errno.EDQUOT


class FileTooLargeError(KvfsError):
    """A file larger than the pool can hold."""

    errno = errno.EFBIG


class DeadlineError(KvfsError):
    """No answer in time: of a daemon, a device, or another node."""

    errno = errno.ETIMEDOUT


class MissingFeatureError(KvfsError):
    """This machine lacks something; the message says what and how to get it."""

    errno = errno.ENOSYS


# ---- a pod ----


class EngineError(KvfsError):
    """The engine of a pod refused a call. The message has its URL, never a password."""


class EngineAwayError(EngineError):
    """The engine of a pod cannot be reached, or missed a call's deadline."""

    errno = errno.EHOSTUNREACH


class FreshError(DeadlineError):
    """Owners of a pod did not publish in time what they held back; `slots` names them."""

    def __init__(self, message: str, slots: Sequence[int]) -> None:
        super().__init__(message)
        self.slots = tuple(slots)


# ---- what the namespace refuses ----


class NotFoundError(KvfsError):
    """No such file, directory, pool or mount point."""

    errno = errno.ENOENT


class StaleInodeError(KvfsError):
    """The inode is gone but its name may lead to another: the kernel looks it up again."""

    errno = errno.ESTALE


class ExistsError(KvfsError):
    """The name exists already."""

    errno = errno.EEXIST


class NotDirectoryError(KvfsError):
    """A part of a path is a file."""

    errno = errno.ENOTDIR


class IsDirectoryError(KvfsError):
    """A directory is where a file is needed; of a client, a key whose path leads to one."""

    errno = errno.EISDIR


class NotEmptyError(KvfsError):
    """A directory that is to be removed or replaced has entries."""

    errno = errno.ENOTEMPTY


class CrossDeviceError(KvfsError):
    """A rename or link that would leave the mount, or the node of a pod."""

    errno = errno.EXDEV


class NotPermittedError(KvfsError):
    """Forbidden to all users, or to the owner alone."""

    errno = errno.EPERM


class AccessError(KvfsError):
    """A directory's mode keeps a user out. The kernel checks paths itself; this is for paths that it does not see."""

    errno = errno.EACCES


class BusyError(KvfsError):
    """It is in use: mounted, open, or being changed."""

    errno = errno.EBUSY


class NotSupportedError(KvfsError):
    """kvfs does not have this: a kind of file, an attribute, a flag."""

    errno = errno.EOPNOTSUPP


class InvalidArgumentError(KvfsError):
    """A value that the call cannot have."""

    errno = errno.EINVAL


class NameTooLongError(KvfsError):
    """A name of more than 255 bytes."""

    errno = errno.ENAMETOOLONG


class AttributesFullError(NoSpaceError):
    """The extended attributes of one inode have no room for another. It says nothing of the pool."""


class NoAttributeError(KvfsError):
    """No such extended attribute."""

    errno = errno.ENODATA


# ---- what a client of a mounted pool meets ----


class ClientError(KvfsError):
    """A call of a client (kvfs.connect) failed; errno is libkvfs's."""


class NotMountedError(ClientError):
    """No daemon serves the pool: unmounted, or gone. The client connects again by itself once one is back."""

    errno = errno.ENOTCONN


class PoolChangedError(ClientError):
    """Another pool is where this client's was: it was formatted again. Connect anew."""

    errno = errno.ESTALE


class VersionError(ClientError):
    """The daemon and this library do not speak the same protocol."""

    errno = errno.EPROTO


class ForkError(ClientError):
    """The client belongs to the process that connected it; a child connects itself."""

    errno = errno.ECHILD


class BusyBufferError(ClientError):
    """A device that missed its deadline may still write into this memory, or every lane is taken: try later."""

    errno = errno.EBUSY


class InvalidKeyError(ClientError, ValueError):
    """A key that cannot be: of a wrong type or size, or twice where it may occur once."""

    errno = errno.EINVAL


class InvalidBufferError(ClientError, BufferError):
    """Memory that cannot be used: read-only, not contiguous, too small, overlapping, not memory."""

    errno = errno.EINVAL


class SmallBufferError(InvalidBufferError):
    """A destination is smaller than its block. The rest of the batch was read: `results` is what get_into would have
    returned, None where the block did not fit."""

    errno = errno.ERANGE

    def __init__(self, message: str, results: Sequence[int | None]) -> None:
        super().__init__(message)
        self.results = results


class PutError(ClientError):
    """Blocks of a put were not stored; those not in `failed` were."""

    def __init__(self, message: str, failed: Mapping[bytes, KvfsError]) -> None:
        super().__init__(message)
        self.failed = failed
        self.errno = next(iter(failed.values())).errno


class PutNoSpaceError(PutError, NoSpaceError):
    """Every block that was not stored found no room."""


_CLIENT_ERRORS: dict[int, type[KvfsError]] = {
    kind.errno: kind
    for kind in (
        NotMountedError, PoolChangedError, VersionError, ForkError, BusyBufferError, NoSpaceError, DeadlineError,
        IsDirectoryError,
    )
}  # fmt: skip


def client_error(number: int, text: str) -> KvfsError:
    """libkvfs's error (a positive errno and its message) as an exception."""
    error = _CLIENT_ERRORS.get(number, ClientError)(text)
    error.errno = number
    return error


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
