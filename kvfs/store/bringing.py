"""Changes of names: the data plane makes them, and this brings from the index what they lack.

It is as a page fault: C says what is not in memory and has changed nothing, Python brings that and asks again. No lock
is held while the index is read. What was brought stays in memory until the change has ended. C looks at everything
again each time, as its own threads change names meanwhile.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from typing import Protocol

from kvfs.errors import (
    CrossDeviceError,
    ExistsError,
    InvalidArgumentError,
    IsDirectoryError,
    KvfsError,
    NamesFullError,
    NameTooLongError,
    NoAttributeError,
    NotDirectoryError,
    NotEmptyError,
    NotFoundError,
    StaleInodeError,
)
from kvfs.index.lmdb import LmdbIndex
from kvfs.naming import TRIES, Act, Given, Naming, Need
from kvfs.plane import Plane
from kvfs.record import Inode
from kvfs.types import InodeNumber

log = logging.getLogger(__name__)

_ERRORS: dict[int, type[KvfsError]] = {
    errno.ENOENT: NotFoundError, errno.EEXIST: ExistsError, errno.ENOTDIR: NotDirectoryError,
    errno.EISDIR: IsDirectoryError, errno.ENOTEMPTY: NotEmptyError, errno.EXDEV: CrossDeviceError,
    errno.EINVAL: InvalidArgumentError, errno.ENAMETOOLONG: NameTooLongError, errno.ENOSPC: NamesFullError,
    errno.ESTALE: StaleInodeError, errno.ENODATA: NoAttributeError,
}  # fmt: skip


class Directories(Protocol):
    """The namespace, which knows who has a directory open."""

    def is_open_directory(self, number: InodeNumber) -> bool: ...

    def directory_removed(self, directory: Inode) -> None: ...


class Bringing:
    """Makes one change at a time, in the one trio thread."""

    def __init__(self, index: LmdbIndex, plane: Plane) -> None:
        self._index, self._plane, self._names = index, plane, plane.names
        self.directories: Directories | None = None

    def change(
        self, done: Callable[[Naming], None], act: Act, parent: int = 0, name: bytes = b"", new_parent: int = 0,
        new_name: bytes = b"", flags: int = 0, inode: int = 0, still: Callable[[bytes], bool] | None = None,
        given: Given | None = None,
    ) -> None:  # fmt: skip
        """Make it; `done` counts it, in the same step. KvfsError: it was not made (Naming.go() says what may have
        changed). `still`: it is only made while the record of `inode`, looked at in the same step, is so."""
        assert not self._names.is_step  # the index is read without a lock (I48)
        naming = self._plane.naming(act, parent, name, new_parent, new_name, flags, inode, given)
        try:
            for _ in range(TRIES):
                result = self._try(naming, done, still)
                if result <= 0:
                    break
                self._bring(naming, Need(result))
        finally:
            naming.end()
        if result > 0:
            log.error("%s: not done in %d tries; it still lacks %s", _told(naming), TRIES, Need(result).name.lower())
            result = -errno.EIO
        if result < 0:
            error = _ERRORS.get(-result, KvfsError)(f"{_told(naming)}: {os.strerror(-result)}")
            error.errno = -result
            raise error

    def _try(self, naming: Naming, done: Callable[[Naming], None], still: Callable[[bytes], bool] | None) -> int:
        hidden = 0
        if self._index.is_hiding and naming.names[0]:
            holders = [
                self._index.hidden_holder(InodeNumber(p), n) for p, n in zip(naming.parents, naming.names, strict=True)
            ]
            naming.hidden(holders)
            hidden = holders[naming.given_name]
            self._index.bring([holder for holder in holders if holder])
        with self._names:
            if still is not None and not self._is_still(naming.inode, still):
                return 0
            result = naming.go()
            if result != 0:
                # It may have changed something on its way, as a directory that is this node's too from now on.
                self._names.change_for(None)
            else:
                done(naming)
                if hidden:
                    self._index.drop_hidden(hidden)  # its name is another's now
                if self._index.is_hiding and naming.emptied:
                    self._index.drop_hidden_below(naming.emptied)
        return result

    def _is_still(self, number: int, still: Callable[[bytes], bool]) -> bool:
        """Of what is not in memory it is not known: C says that it lacks it, and this is asked again."""
        record = self._names.get(number)
        return record is None or (bool(record) and not self._index.hides(record) and still(record))

    def _bring(self, naming: Naming, need: Need) -> None:
        index, names = self._index, self._names
        if need == Need.NAME:
            parent, name = naming.parents[naming.which], naming.names[naming.which]
            if (number := index.stored_inode(parent, name)) is not None:
                index.keep(number)
            if names.find(parent, name) is None:
                naming.name_is_free()
        elif need == Need.INODES:
            naming.gone(index.load(naming.inodes))
        elif need == Need.ABOVE:
            if (missing := index.keep_above(naming.inodes[0])) is not None:
                naming.gone([missing])
        else:
            (number,) = naming.inodes
            empty = index.is_empty(number)
            naming.is_empty(number, empty, self.directories is not None and self.directories.is_open_directory(number))


def _told(naming: Naming) -> str:
    what = naming.act.name.lower()
    if not naming.names[0]:
        return f"{what} of inode {naming.inode}"
    where = f"{naming.names[0]!r} in directory {naming.parents[0]}"
    to = f" to {naming.names[1]!r} in directory {naming.parents[1]}" if naming.names[1] else ""
    return f"{what} of {where}{to}"
