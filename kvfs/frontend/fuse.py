"""The pyfuse3 session: turns FUSE requests into calls of the namespace, and KvfsErrors into errnos.

One session serves every transport, through the mux of the data plane (native/include/kvfs_plane.h). Two facts follow
from that. A file handle is always the inode number: the mux makes the handles that the kernel sees. READ, WRITE,
RELEASE of files, FORGET and the attributes of files being written never come here: the mux answers or completes them.
Calls that come with every block go by calls.py. Protocol: fuse(4), linux/fuse.h.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import stat
from collections.abc import Callable, Coroutine
from typing import Concatenate, ParamSpec, TypeVar, cast

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, RequestContext, SetattrFields, StatvfsData

from kvfs.errors import AttributesFullError, KvfsError, NoAttributeError, NotPermittedError
from kvfs.frontend.asked import ATTRIBUTE, Asked, Asker
from kvfs.names import Names
from kvfs.namespace.files import Changes, Namespace
from kvfs.namespace.hints import Caller
from kvfs.podmap import is_foreign
from kvfs.record import Inode
from kvfs.types import NAME_MAX, PAGE_SIZE, InodeNumber

log = logging.getLogger(__name__)

# The default of 99 tasks lets 99 waiting requests stop every other one (a stat took 5 s behind 110 of them).
TASKS_MAX = 10_000
# Idle tasks that are kept: with fewer, a burst of creates spends its time making tasks.
TASKS_IDLE = 16
# Errors that say something about the pool rather than about the request.
_WORTH_LOGGING = frozenset({errno.EIO, errno.ENOSPC, errno.ETIMEDOUT})

# A commit takes less, also on a busy disk.
JOURNAL_WAIT_S = 10.0
_JOURNAL_LOOK_S = 0.02

P = ParamSpec("P")
R = TypeVar("R")
Handler = Callable[Concatenate["Operations", P], Coroutine[object, object, R]]


def _answers(function: Handler[P, R]) -> Handler[P, R]:
    """Make a handler answer whatever happens: an exception that leaves a handler would end the session and hang the
    mount."""

    @functools.wraps(function)
    async def handler(self: Operations, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await function(self, *args, **kwargs)
        except FUSEError:
            raise
        except Exception as error:
            raise FUSEError(errno_of(error, function.__name__, args)) from error

    return cast("Handler[P, R]", handler)


def _once(function: Handler[P, R]) -> Handler[P, R]:
    """Its changes are done once, also where a kernel sends the request again. The mux has a token for it in `pid`."""

    @functools.wraps(function)
    async def handler(self: Operations, *args: P.args, **kwargs: P.kwargs) -> R:
        ctx = cast("RequestContext", args[-1])
        names = self._namespace.names
        if names.journal_is_full():
            await room_in_journal(names)
        with names.serving(ctx.pid):
            return await function(self, *args, **kwargs)

    return cast("Handler[P, R]", handler)


async def room_in_journal(names: Names) -> None:
    """Wait for the commit that a full journal has begun. KvfsError with EIO if it does not come in time."""
    until = trio.current_time() + JOURNAL_WAIT_S
    while names.journal_is_full():
        if trio.current_time() > until:
            error = KvfsError(f"the journal of names is full, and no commit has emptied it for {JOURNAL_WAIT_S:g} s")
            error.errno = errno.EIO
            raise error
        await trio.sleep(_JOURNAL_LOOK_S)


def errno_of(error: Exception, what: str, arguments: object) -> int:
    """The errno for a failed request, which is logged unless the caller is at fault."""
    if not isinstance(error, (KvfsError, OSError)):
        log.error("%s%r failed", what, arguments, exc_info=error)
        return errno.EIO
    if (error.errno in _WORTH_LOGGING or error.errno is None) and not isinstance(error, AttributesFullError):
        log.warning("%s: %s", what, error)
    return error.errno or errno.EIO


class Operations(pyfuse3.Operations):
    """Handlers over one namespace, all in the one trio thread."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, namespace: Namespace, asked: Asked | None = None) -> None:
        super().__init__()
        self._namespace, self._asked = namespace, asked

    # ---- looking ----

    @_answers
    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        return attributes(await self._namespace.lookup_fresh(InodeNumber(parent_inode), name))

    @_answers
    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        return attributes(self._namespace.look(InodeNumber(inode)))

    @_answers
    async def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        return self._namespace.readlink(InodeNumber(inode))

    @_answers
    async def access(self, inode: int, mode: int, ctx: RequestContext) -> bool:
        # The kernel checks permissions itself (default_permissions) and does not ask.
        self._namespace.get(InodeNumber(inode))
        return True

    @_answers
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        space = self._namespace.statfs()
        data = StatvfsData()
        data.f_bsize = data.f_frsize = PAGE_SIZE
        data.f_blocks = space.block_count
        data.f_bfree = data.f_bavail = space.free_count
        data.f_files = space.inode_count
        data.f_ffree = data.f_favail = space.free_inode_count
        data.f_namemax = NAME_MAX
        return data

    # ---- making and removing ----

    @_answers
    async def mknod(self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext) -> EntryAttributes:
        if not stat.S_ISREG(mode) and stat.S_IFMT(mode):
            raise NotPermittedError(f"mknod {name!r}: only regular files")
        return attributes(await self._namespace.make_file(InodeNumber(parent_inode), name, mode, ctx.uid, ctx.gid))

    @_answers
    @_once
    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext) -> EntryAttributes:
        parent = InodeNumber(parent_inode)
        made = functools.partial(self._namespace.mkdir, parent, name, mode, ctx.uid, ctx.gid)
        return attributes(await self._namespace.when_room(made))

    @_answers
    @_once
    async def symlink(self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        parent = InodeNumber(parent_inode)
        made = functools.partial(self._namespace.symlink, parent, name, target, ctx.uid, ctx.gid)
        return attributes(await self._namespace.when_room(made))

    @_answers
    async def link(self, inode: int, new_parent_inode: int, new_name: bytes, ctx: RequestContext) -> EntryAttributes:
        raise NotPermittedError(f"link {new_name!r}: a block has one name")

    @_answers
    @_once
    async def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        self._namespace.rmdir(InodeNumber(parent_inode), name)

    # ---- attributes ----

    @_answers
    async def setattr(
        self, inode: int, attr: EntryAttributes, fields: SetattrFields, fh: int | None, ctx: RequestContext
    ) -> EntryAttributes:
        changes = Changes(
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
            kill_suid=ctx.gid if ctx.uid else None,
            through_handle=fh is not None,
        )
        return attributes(await self._namespace.setattr(InodeNumber(inode), changes))

    @_answers
    @_once
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: RequestContext) -> None:
        await self._namespace.setxattr(InodeNumber(inode), name, value, Caller(ctx.uid, ctx.gid))

    @_answers
    async def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        if is_foreign(inode):
            found = (await self._namespace.foreign_xattrs(InodeNumber(inode))).get(name)
            if found is None:
                raise NoAttributeError(f"inode {inode:#x}: no extended attribute {name!r}")
            return found
        if name.startswith(ATTRIBUTE) and self._asked is not None:
            return await self._asked.connect(inode, name, Asker.of(ctx.pid, ctx.uid))
        return self._namespace.getxattr(InodeNumber(inode), name, Caller(ctx.uid, ctx.gid))

    @_answers
    async def listxattr(self, inode: int, ctx: RequestContext) -> list[bytes]:
        if is_foreign(inode):
            return list(await self._namespace.foreign_xattrs(InodeNumber(inode)))
        return self._namespace.listxattr(InodeNumber(inode))

    @_answers
    @_once
    async def removexattr(self, inode: int, name: bytes, ctx: RequestContext) -> None:
        await self._namespace.removexattr(InodeNumber(inode), name)

    # ---- content ----

    @_answers
    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        if flags & (os.O_ACCMODE | os.O_TRUNC):
            await self._namespace.open_for_write(
                InodeNumber(inode), truncate=bool(flags & os.O_TRUNC), kill_suid=ctx.gid if ctx.uid else None
            )
        else:
            self._namespace.get(InodeNumber(inode))
        return FileInfo(fh=inode, keep_cache=False)

    @_answers
    async def fsync(self, fh: int, datasync: bool) -> None:
        await self._namespace.fsync(InodeNumber(fh))

    # ---- directories ----

    @_answers
    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        self._namespace.open_directory(InodeNumber(inode))
        return inode

    @_answers
    async def releasedir(self, fh: int) -> None:
        self._namespace.close_directory(InodeNumber(fh))

    @_answers
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await self._namespace.sync()


def attributes(inode: Inode) -> EntryAttributes:
    """The attributes of an inode for the kernel. The mux sets timeouts, and the size and mtime of a file being
    written."""
    entry = EntryAttributes()
    entry.st_ino = inode.inode
    entry.generation = 0
    entry.entry_timeout = 0
    entry.attr_timeout = 0
    entry.st_mode = inode.mode
    entry.st_nlink = 0 if inode.nameless else inode.nlink
    entry.st_uid = inode.uid
    entry.st_gid = inode.gid
    entry.st_size = inode.size
    entry.st_blksize = PAGE_SIZE
    entry.st_blocks = (inode.size + 511) // 512
    entry.st_atime_ns = inode.atime_ns
    entry.st_mtime_ns = inode.mtime_ns
    entry.st_ctime_ns = inode.ctime_ns
    return entry


class _Library:
    """libfuse writes to stderr by itself. Its messages go into the log under its name. It takes the end of the
    session's socket for a short read; that message is dropped, as we ended the session."""

    _AT_THE_END = b"short read on fuse device"
    _LINE_MAX = 1024

    def __init__(self) -> None:
        kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        self._libc = ctypes.CDLL(None)
        # Kept for as long as the process lives: libfuse calls it.
        self._function = kind(self._log)
        ctypes.CDLL("libfuse3.so.3").fuse_set_log_func(self._function)

    def _log(self, level: int, text: bytes, arguments: int) -> None:
        if text.startswith(self._AT_THE_END):
            log.debug("libfuse: the session's socket has ended")
            return
        line = ctypes.create_string_buffer(self._LINE_MAX)
        self._libc.vsnprintf(line, ctypes.c_size_t(self._LINE_MAX), text, ctypes.c_void_p(arguments))
        said = line.value.decode(errors="replace").strip()
        # syslog's levels: 3 is an error, 4 a warning.
        log.log(logging.ERROR if level <= 3 else logging.WARNING if level == 4 else logging.DEBUG, "libfuse: %s", said)


@functools.cache
def _library() -> _Library | None:
    try:
        return _Library()
    except (OSError, AttributeError):
        return None  # a libfuse before 3.7: it goes on writing to stderr


class Session:
    """The pyfuse3 session on the mux's socket. A process has only one: pyfuse3 keeps it in globals."""

    def __init__(self, namespace: Namespace, fd: int, asked: Asked | None = None) -> None:
        """Take over `fd`, from Plane.session_open(). asked: users who ask through the mount for a connection."""
        self._ending = False
        _library()
        pyfuse3.init(Operations(namespace, asked), f"/dev/fd/{fd}", {"fsname=kvfs"})

    async def run(self) -> None:
        """Answer requests until stop() is called or the mux closes its end."""
        try:
            await pyfuse3.main(min_tasks=TASKS_IDLE, max_tasks=TASKS_MAX)
        except* OSError as group:
            # libfuse takes the end of the socket for a short read.
            log.debug("session ended: %s", group)
        finally:
            self._ending = True

    def stop(self) -> None:
        if not self._ending:
            self._ending = True
            pyfuse3.terminate()

    def close(self) -> None:
        """Free the session and close its descriptor. Call after run() has returned."""
        pyfuse3.close(unmount=False)
