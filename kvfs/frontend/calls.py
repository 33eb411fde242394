"""Calls: the CREATE, UNLINK, RENAME, FLUSH and READDIR requests that the data plane leaves, answered without a task for
each.

The data plane hands them over in batches (struct kvfs_call, native/include/kvfs_plane.h), from every transport; all but
a FLUSH are done when the handler returns. A call that has to wait (a CREATE of an existing file, a FLUSH that finds no
room) goes on in a task. The session (fuse.py) has all other requests. Protocol: fuse(4), linux/fuse.h.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import trio

from kvfs.errors import ExistsError, IsDirectoryError, KvfsError, NamesFullError, StaleInodeError
from kvfs.frontend.fuse import errno_of, room_in_journal
from kvfs.namespace.files import Namespace
from kvfs.namespace.forgetting import NextNames
from kvfs.plane import Plane
from kvfs.record import Inode, Kind
from kvfs.store.table_room import WAIT_S
from kvfs.types import InodeNumber
from kvfs.upcalls import FUSE_FLUSH, FUSE_READDIR, FUSE_READDIRPLUS, Call

# linux/fuse.h
_UNLINK, _RENAME, _CREATE = 10, 12, 35
_CHANGES = frozenset({_UNLINK, _RENAME, _CREATE})
# A directory's names are brought this many at a time: some 0.5 ms.
_PAGE = 1024
# Names by inode, kept for listings that go on behind an entry that was removed. Some 12 MB when full.
_RECENT_MAX = 65_536


class Calls:
    """Handlers over one namespace, all in the one trio thread."""

    def __init__(self, namespace: Namespace, plane: Plane, ahead: NextNames | None = None) -> None:
        """ahead: gets the names that are removed and renamed here."""
        self._namespace, self._plane, self._ahead = namespace, plane, ahead
        self._handlers: dict[int, Callable[[Call], None]] = {
            _CREATE: self._create, _UNLINK: self._unlink, _RENAME: self._rename, FUSE_FLUSH: self._flush,
            FUSE_READDIR: self._list, FUSE_READDIRPLUS: self._list,
        }  # fmt: skip
        self._recent: dict[int, bytes] = {}
        self._nursery: trio.Nursery

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer calls until cancelled. `started` is called when calls come here: from then on the session gets none of
        them."""
        async with trio.open_nursery() as self._nursery:
            self._plane.open_calls(self.take)
            try:
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._plane.open_calls(None)

    def take(self, call: Call) -> None:
        """Begin to answer one. Whatever happens, it is answered."""
        if call.opcode in _CHANGES and self._namespace.names.journal_is_full():
            self._nursery.start_soon(self._take_when_room, call)
        else:
            self._take_now(call)

    def _take_now(self, call: Call) -> None:
        handler = self._handlers[call.opcode]
        try:
            with self._namespace.names.serving(call.id & 0xFFFFFFFF):
                handler(call)
        except Exception as error:
            self._refuse(call, error)

    async def _take_when_room(self, call: Call) -> None:
        try:
            await room_in_journal(self._namespace.names)
        except KvfsError as error:
            self._refuse(call, error)
        else:
            self._take_now(call)

    def _refuse(self, call: Call, error: Exception) -> None:
        name = self._handlers[call.opcode].__name__.lstrip("_")
        self._plane.answer(call.id, errno_of(error, name, call))

    def _create(self, call: Call) -> None:
        if self._namespace.create_delay_s:
            self._nursery.start_soon(self._create_late, call)
        else:
            self._create_now(call)

    async def _create_late(self, call: Call) -> None:
        await trio.sleep(self._namespace.create_delay_s)
        try:
            self._create_now(call)
        except Exception as error:
            self._refuse(call, error)

    def _create_now(self, call: Call, until: float | None = None) -> None:
        """until: so long room for its name may be waited for, if it was before."""
        try:
            made = self._namespace.create(InodeNumber(call.inode), call.name, call.mode, call.uid, call.gid)
        except ExistsError:
            # Another transport was faster.
            if call.flags & os.O_EXCL:
                raise
            self._nursery.start_soon(self._open_existing, call)
            return
        except NamesFullError:
            until = trio.current_time() + WAIT_S if until is None else until
            self._nursery.start_soon(self._create_when_room, call, until)
            return
        self._plane.answer(call.id, 0, made.inode)

    async def _create_when_room(self, call: Call, until: float) -> None:
        try:
            await self._namespace.room_for_name(until - trio.current_time())
            self._create_now(call, until)
        except Exception as error:
            self._refuse(call, error)

    async def _open_existing(self, call: Call) -> None:
        try:
            inode = await self._opened(call)
        except Exception as error:
            self._refuse(call, error)
        else:
            self._plane.answer(call.id, 0, inode.inode)

    async def _opened(self, call: Call) -> Inode:
        inode = self._namespace.lookup(InodeNumber(call.inode), call.name)
        if inode.kind == Kind.DIRECTORY:
            raise IsDirectoryError(f"{call.name!r} in directory {call.inode}: is a directory")
        if inode.kind != Kind.FILE:
            raise StaleInodeError(f"{call.name!r} in directory {call.inode}: a symbolic link by now")
        return await self._namespace.open_for_write(
            inode.inode, truncate=bool(call.flags & os.O_TRUNC), kill_suid=call.gid if call.uid else None
        )

    def _unlink(self, call: Call) -> None:
        if self._ahead is not None:
            self._ahead.bring(InodeNumber(call.inode), call.name)
        self._namespace.unlink(InodeNumber(call.inode), call.name)
        self._plane.answer(call.id, 0)

    def _rename(self, call: Call) -> None:
        parent, new_parent = InodeNumber(call.inode), InodeNumber(call.new_parent)
        if self._ahead is not None:
            self._ahead.bring(parent, call.name)
        self._namespace.rename(parent, call.name, new_parent, call.new_name, call.flags)
        self._plane.answer(call.id, 0)

    def _flush(self, call: Call) -> None:
        self._namespace.flush(InodeNumber(call.inode), functools.partial(self._flushed, call))

    def _flushed(self, call: Call, error: KvfsError | None) -> None:
        if error is not None:
            self._refuse(call, error)
        else:
            self._plane.answer(call.id, 0)

    def _list(self, call: Call) -> None:
        """Bring the names behind the one that was listed last.

        A cookie is an inode number, so a listing can be resumed anywhere, for ever, without state: the index knows the
        name. Only names that were just listed and have since gone or been renamed need remembering.
        """
        directory, cookie = InodeNumber(call.inode), call.new_parent
        after = call.name or (self._name_of_cookie(directory, cookie) if cookie else b"")
        while True:
            found = self._namespace.list_entries(directory, after, _PAGE)
            names, numbers = [name for name, _ in found], [number for _, number in found]
            self._recent.update(zip(numbers, names, strict=True))
            if len(self._recent) > _RECENT_MAX:
                self._forget_recent()
            if self._plane.listings.answer(call.id, names, numbers, end=len(found) < _PAGE):
                return
            after = names[-1]

    def _name_of_cookie(self, directory: InodeNumber, cookie: int) -> bytes:
        name = self._recent.get(cookie)
        if name is not None:
            return name
        inode = self._namespace.get(InodeNumber(cookie))
        if inode.parent != directory:
            raise StaleInodeError(f"directory {directory}: cookie {cookie} is of another directory")
        return inode.name

    def _forget_recent(self) -> None:
        for cookie in list(self._recent)[: _RECENT_MAX // 2]:
            del self._recent[cookie]
