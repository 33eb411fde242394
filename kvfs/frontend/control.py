"""The control socket: POOL/control.sock. The first bytes of a connection decide. JSON lines are of `kvfs status`,
`stats`, `evict` and anybody else who asks the daemon. Other bytes are a native client's, for clients.py.

A request is one line: {"command": NAME, ...arguments}. The answer is any number of {"progress": ...} lines, then {"ok":
true, "result": ...} or {"ok": false, "error": TEXT}. A connection carries any number of requests, one after the other.
Only root and the daemon's own user are heard. Knows nothing of the commands' work.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import trio

from kvfs.errors import KvfsError
from kvfs.frontend.asking import SOCKET_NAME, socket_path
from kvfs.frontend.wire import MAGIC, SO_PASSRIGHTS, Peer, Violation, receive, said_what_it_is

log = logging.getLogger(__name__)

LINE_MAX = 1 << 20
# A client that neither asks nor goes away is disconnected after this long.
IDLE_TIMEOUT_S = 3600.0
# A connection must say soon what it is. So many silent ones of a user are kept, the latest.
GREETING_TIMEOUT_S = 10.0
GREETINGS_MAX = 512
GREETINGS_OF_USER_MAX = 128
# A limit for control connections; native clients have a limit of their own.
CLIENTS_MAX = 64
_BACKLOG = 1024

Arguments = Mapping[str, object]
Progress = Callable[[Mapping[str, object]], Awaitable[None]]
Command = Callable[[Arguments, Progress], Awaitable[object]]
# A native client's connection, its first bytes, and who it is.
NativeServer = Callable[[trio.SocketStream, bytes, Peer], Awaitable[None]]


class ControlServer:
    """Listens from construction on, so that every user of the mount can ask; answers while run() runs."""

    def __init__(self, pool: Path, commands: Mapping[str, Command], native: NativeServer | None = None) -> None:
        self._path = pool / SOCKET_NAME
        self._commands = commands
        self._native = native
        self._limit = trio.CapacityLimiter(CLIENTS_MAX)
        # Connections that have said nothing yet, and their users, oldest first.
        self._silent: dict[trio.CancelScope, int] = {}
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # The pool's lock is ours: a socket that exists was left by a daemon that died.
            self._path.unlink(missing_ok=True)
            with socket_path(pool) as path:
                listener.bind(path)
            # By a descriptor: a link in place of the socket is not followed.
            fd = os.open(self._path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.chown(f"/proc/self/fd/{fd}", -1, os.getegid())
                os.chmod(f"/proc/self/fd/{fd}", 0o660)
            finally:
                os.close(fd)
            # Connections inherit it from their listener. On older kernels `receive` finds descriptors.
            with suppress(OSError):
                listener.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise KvfsError(f"{self._path}: {os.strerror(error.errno or 0)}") from error
        self._listener = trio.SocketListener(trio.socket.from_stdlib_socket(listener))

    async def run(self) -> None:
        """Serve until cancelled."""
        async with self._listener:
            await trio.serve_listeners(self._serve, [self._listener])

    def close(self) -> None:
        """Take the socket's name away."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    async def _serve(self, stream: trio.SocketStream) -> None:
        await self.serve(stream, Peer.of(stream.socket))

    async def serve(self, stream: trio.SocketStream, peer: Peer) -> None:
        """Serve one connection until it ends, and close it. A command that its peer may not give is refused."""
        try:
            async with _letting_go(stream):
                begun = b""
                with self._silence(peer.uid) as silence:
                    begun = await self._greeting(stream)
                if silence.cancelled_caught:
                    return
                if begun.startswith(MAGIC) and self._native is not None:
                    await self._native(stream, begun, peer)
                elif peer.may_control:
                    async with self._limit:
                        await self._converse(stream, begun)
                elif begun:
                    text = (
                        "this connection is a native client's, without commands"
                        if peer.invited
                        else f"{peer.told} may not control this pool: only root and user {os.geteuid()} may"
                    )
                    await _send(stream, _failure(text, errno.EACCES))
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, OSError):
            log.debug("a control client went away")
        except Violation as violation:
            log.warning("a control connection: %s; hung up", violation)
        except Exception:
            log.exception("a control connection failed")

    @contextmanager
    def _silence(self, uid: int) -> Iterator[trio.CancelScope]:
        """Its deadline until a connection has said what it is. Beyond the limit the oldest silent one of the same user
        goes, or of the user who has most. A new connection that does speak is never refused."""
        users = Counter(self._silent.values())
        if users[uid] >= GREETINGS_OF_USER_MAX or len(self._silent) >= GREETINGS_MAX:
            most = uid if users[uid] >= GREETINGS_OF_USER_MAX else users.most_common(1)[0][0]
            oldest = next(scope for scope, user in self._silent.items() if user == most)
            del self._silent[oldest]
            oldest.cancel()
        with trio.CancelScope() as scope:
            self._silent[scope] = uid
            try:
                yield scope
            finally:
                self._silent.pop(scope, None)

    async def _greeting(self, stream: trio.SocketStream) -> bytes:
        """Enough bytes to know which protocol is spoken."""
        begun = b""
        with trio.fail_after(GREETING_TIMEOUT_S):
            while not said_what_it_is(begun):
                data = await receive(stream.socket, 65536)
                if not data:
                    break
                begun += data
        return begun

    async def _converse(self, stream: trio.SocketStream, pending: bytes) -> None:
        while True:
            line, separator, rest = pending.partition(b"\n")
            if separator:
                pending = rest
                await _send(stream, await self._answer(line, stream))
                continue
            if len(pending) > LINE_MAX:
                return
            with trio.fail_after(IDLE_TIMEOUT_S):
                data = await receive(stream.socket, 65536)
            if not data:
                return
            pending += data

    async def _answer(self, line: bytes, stream: trio.SocketStream) -> Mapping[str, object]:
        async def progress(document: Mapping[str, object]) -> None:
            await _send(stream, {"progress": document})

        try:
            request = json.loads(line)
            name = request.get("command") if isinstance(request, dict) else None
            command = self._commands.get(name) if isinstance(name, str) else None
            if command is None:
                return {"ok": False, "error": f"no command {name!r}"}
            return {"ok": True, "result": await command(request, progress)}
        except (KvfsError, ValueError, trio.TooSlowError) as error:
            return _failure(str(error) or type(error).__name__, getattr(error, "errno", None))
        except OSError as error:
            return _failure(str(error), error.errno)


@asynccontextmanager
async def _letting_go(stream: trio.SocketStream) -> AsyncIterator[None]:
    """Close the connection at its end. Data that nobody has received goes with it, and so do descriptors in that data.
    A close may wait, so a thread of its own does it."""
    async with stream:
        try:
            yield
        finally:
            with suppress(OSError):
                stream.socket.shutdown(socket.SHUT_RDWR)
                last = socket.socket(fileno=os.dup(stream.socket.fileno()))
                stream.socket.close()
                if _holds_something(last):
                    threading.Thread(target=last.close, daemon=True).start()
                else:
                    last.close()


def _holds_something(connection: socket.socket) -> bool:
    """The bytes left in a connection that is shut down: no more come."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


def _failure(text: str, error: int | None) -> Mapping[str, object]:
    return {"ok": False, "error": text, "errno": error or errno.EIO}


async def _send(stream: trio.SocketStream, document: Mapping[str, object]) -> None:
    with trio.fail_after(30):
        await stream.send_all(json.dumps(document).encode() + b"\n")
