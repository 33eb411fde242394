"""Native clients that have nothing but the mount, as in a container: they ask for a connection through it.

A client makes a pair of sockets, and keeps one (native/src/client/ask.c). The number of the other is N. It asks for the
extended attribute `user.kvfs.connect.N` of its directory. The request says which process asks. While that process waits
for the answer its number is its own, so the descriptor that is taken by it is the asker's. One message goes out over
that socket: a new connection, made here. The taken one is never read from, nor waited for: its flags stay the asker's.

Only where the operator has named a directory (`--native-in`), that directory and those below it answer. Any user
who asks there is served, as a native client alone. Such a connection has no command of the control socket.

A descriptor that is taken may be of any file. Its close may wait without a bound. So a thread does it, and one that
waits keeps one of the few places of its directory, and none of another's.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import trio

from kvfs.descriptors import above
from kvfs.errors import NoAttributeError, UsageError
from kvfs.frontend.wire import SO_PASSRIGHTS, Peer, RefusedError, is_mapped
from kvfs.namespace.files import Namespace
from kvfs.types import NAME_MAX, InodeNumber

log = logging.getLogger(__name__)

ATTRIBUTE = b"user.kvfs.connect."
# The message that has the connection.
GREETING = b"KVFSASK1"
ANSWER = b"connected"
# So long a client waits for a place, and for the work.
TIMEOUT_S = 5.0
# Askers of one directory that are seen to at one time.
TOGETHER_MAX = 4
_DESCRIPTOR_MAX = 0x7FFFFFFF
# Linux 6.9 (linux/pidfd.h): a request names the thread that asks.
_PIDFD_THREAD = os.O_EXCL
_SYS_PIDFD_GETFD = 438
_CAP_SYS_PTRACE = 19
# Of the first pid namespace (linux/proc_ns.h).
_FIRST_PIDS = "pid:[4026531836]"
_NOBODY = 0xFFFFFFFF
_libc = ctypes.CDLL(None, use_errno=True)

# Serves a connection as a native client's until it ends.
Server = Callable[[trio.SocketStream, Peer], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Asker:
    """Of a request: the thread and its user, as the kernel says. user None: it does not say."""

    thread: int
    user: int | None

    @classmethod
    def of(cls, pid: int, uid: int) -> Asker:
        return cls(pid, None if uid == _NOBODY else uid)


def parse_directory(text: str) -> tuple[bytes, ...]:
    """The parts of a directory's path from the pool's root on. UsageError."""
    parts = tuple(os.fsencode(part) for part in text.split("/") if part)
    if not text.startswith("/") or any(part in (b".", b"..") or len(part) > NAME_MAX for part in parts):
        raise UsageError(f"--native-in {text!r}: a directory from the pool's root on is expected, as /tenant-a, or /")
    return parts


class Asked:
    """Clients that ask through the mount. `run()` must run."""

    def __init__(self, namespace: Namespace, serve: Server, directories: Sequence[tuple[bytes, ...]]) -> None:
        self._namespace, self._serve = namespace, serve
        self._places = {directory: trio.CapacityLimiter(TOGETHER_MAX) for directory in directories}
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Serve connected clients, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            await trio.sleep_forever()

    async def connect(self, inode: int, name: bytes, asker: Asker) -> bytes:
        """The attribute's value, once the asker has its connection. NoAttributeError: none is available here.
        RefusedError: why it cannot be."""
        places = self._place_of(InodeNumber(inode))
        number = name.removeprefix(ATTRIBUTE)
        if places is None or not number.isdigit() or len(number) > 10 or int(number) > _DESCRIPTOR_MAX:
            raise NoAttributeError(f"inode {inode}: no native clients are let in there")
        if self._nursery is None:
            raise RefusedError(errno.EAGAIN, "the daemon is starting")
        if asker.thread == 0:
            raise self._refusal(asker, errno.ESRCH, "it is in no pid namespace that the daemon sees")
        try:
            with trio.fail_after(TIMEOUT_S):
                ours, peer = await trio.to_thread.run_sync(
                    _connect, asker, int(number), limiter=places, abandon_on_cancel=True
                )
        except trio.TooSlowError:
            raise self._refusal(asker, errno.ETIMEDOUT, f"no connection within {TIMEOUT_S:g} s") from None
        except OSError as error:
            raise self._refusal(asker, error.errno or errno.EIO, error.strerror or str(error)) from error
        self._nursery.start_soon(self._serve_one, ours, peer)
        return ANSWER

    async def _serve_one(self, ours: socket.socket, peer: Peer) -> None:
        await self._serve(trio.SocketStream(trio.socket.from_stdlib_socket(ours)), peer)

    def _refusal(self, asker: Asker, error: int, text: str) -> RefusedError:
        log.warning("native client, thread %d of user %s, by the mount: %s", asker.thread, asker.user, text)
        return RefusedError(error, text)

    def _place_of(self, number: InodeNumber) -> trio.CapacityLimiter | None:
        """Of the innermost directory that lets clients in and has this one in it."""
        path = self._namespace.find_path(number)
        if path is None:
            return None
        parts = tuple(part for part in path.split(b"/") if part)
        for size in range(len(parts), -1, -1):
            if parts[:size] in self._places:
                # A file is asked as a directory is; and what was removed is not there.
                return self._places[parts[:size]] if stat.S_ISDIR(self._namespace.get(number).mode) else None
        return None


def _connect(asker: Asker, number: int) -> tuple[socket.socket, Peer]:
    """Make a connection, and send its other end to the asker by its descriptor of that number. In a thread. OSError."""
    process = _pidfd(asker.thread)
    try:
        with suppress(FileNotFoundError):  # a /proc that is there: what is no socket is not even taken
            if not os.readlink(f"/proc/{asker.thread}/fd/{number}").startswith("socket:"):
                raise OSError(errno.ENOTSOCK, f"descriptor {number} is no socket")
        taken = _libc.syscall(_SYS_PIDFD_GETFD, process, number, 0)
        if taken < 0:
            error = ctypes.get_errno()
            raise OSError(error, _why(error, number))
    finally:
        os.close(process)
    taken = above(taken)
    try:
        if not stat.S_ISSOCK(os.fstat(taken).st_mode):
            raise OSError(errno.ENOTSOCK, f"descriptor {number} is no socket")
        theirs = socket.socket(fileno=taken)
        try:
            return _send(theirs, asker, number)
        finally:
            theirs.detach()
    finally:
        os.close(taken)


def _send(taken: socket.socket, asker: Asker, number: int) -> tuple[socket.socket, Peer]:
    if taken.family != socket.AF_UNIX or taken.type != socket.SOCK_SEQPACKET:
        raise OSError(errno.ENOTSOCK, f"descriptor {number} is no unix socket of whole messages (SOCK_SEQPACKET)")
    peer = Peer.of(taken)
    if peer.pid != _process_of(asker.thread):
        raise OSError(errno.EPERM, f"descriptor {number} is a socket that process {peer.pid} made, not the asker")
    user = peer.uid if asker.user is None else asker.user
    ours, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # A socket that is full is its asker's doing: it is not waited for.
        with suppress(OSError):
            ours.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", end.fileno()))
        taken.sendmsg([GREETING], [rights], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except BaseException:
        ours.close()
        raise
    finally:
        end.close()
    mapped = ", as its user namespace is mapped" if is_mapped(asker.thread) else ""
    log.info("native client by the mount: pid %d of user %d%s", peer.pid, user, mapped)
    return ours, replace(peer, uid=user, invited=True)


def _pidfd(thread: int) -> int:
    try:
        return above(os.pidfd_open(thread, _PIDFD_THREAD))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return above(os.pidfd_open(_process_of(thread)))  # before Linux 6.9


def _process_of(thread: int) -> int:
    """Whose thread it is. Without /proc only a process's first thread can ask."""
    with suppress(FileNotFoundError):
        found = re.search(r"^Tgid:\s*(\d+)", Path(f"/proc/{thread}/status").read_text(), re.MULTILINE)
        if found:
            return int(found[1])
    return thread


def _why(error: int, number: int) -> str:
    if error == errno.EPERM:
        return f"descriptor {number} cannot be taken: the daemon lacks {' and '.join(missing()) or 'the right to'}"
    return f"descriptor {number} cannot be taken: {os.strerror(error)}"


def missing() -> list[str]:
    """The rights that this process lacks to take descriptors from others' processes."""
    lacks = []
    with suppress(OSError, ValueError, IndexError):
        found = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found and not int(found[1], 16) >> _CAP_SYS_PTRACE & 1:
            lacks.append("CAP_SYS_PTRACE, to take a socket from another user's process")
        if os.readlink("/proc/self/ns/pid") != _FIRST_PIDS:
            lacks.append("the host's pid namespace, to see processes outside its own")
    return lacks
