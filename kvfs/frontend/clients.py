"""The daemon's side of the native path: the requests of libkvfs on the control socket
(native/include/kvfs_wire.h).

A client gets the block table and the devices, and then reads by itself. Afterwards it asks only for changes, and for
facts that the table does not hold. Those requests the data plane reads, and answers if it can
(native/include/kvfs_clients.h); here are the welcome and the others. Clients are root, the daemon's user, and the
members of the daemon's group. Even so every size, count and name is checked (I18), and a violation ends that client's
connection and nothing else. Knows requests and answers; their meaning for blocks is known to the namespace and the
reservations.
"""

from __future__ import annotations

import array
import errno
import fcntl
import logging
import os
import socket
import struct
import termios
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import trio

from kvfs.connections import SPACES_MAX, Connections, Handed
from kvfs.descriptors import reason
from kvfs.errors import KvfsError
from kvfs.frames import FrameError, HolderPages, Next, Shards
from kvfs.frontend import wire
from kvfs.frontend.foreign import ForeignRequests, OtherNodes
from kvfs.frontend.listing import Listing, directory_at
from kvfs.frontend.told import REPORTED, TOTALS, Report
from kvfs.frontend.users import CHECKS_MAX, CHECKS_OF_USER_MAX, User, Users
from kvfs.frontend.wire import VERSIONS, Flags, Path, Peer, RefusedError, Type, Violation
from kvfs.lent import Part
from kvfs.namespace.files import Namespace
from kvfs.plane import FEED_SIZE
from kvfs.store.leases import Lessee
from kvfs.store.reservations import RESERVATION_MS, Holder
from kvfs.store.store import Store
from kvfs.types import NAME_MAX, InodeNumber

log = logging.getLogger(__name__)

# The deadline for the rest of a frame that has begun, and for an answer that is being sent.
FRAME_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 1.0
HOSTS_TIMEOUT_S = 1.0
# Items of a DELETE that C leaves, and directories of keys that are found or made, between two looks at other work.
_YIELD_EVERY = 32
# Blocks of all users that are read again at one time.
_CHECKING_MAX = 4
# Threads that open descriptors for welcomes, and that wait for other nodes.
_OPENING_MAX = 4
_ASKING_MAX = 16
_RECEIVE_SIZE = 1 << 12
# Descriptors of the feed that were sent on a connection and not taken.
_HANDED_MAX = 8
_DIRECTORY_MODE = 0o755
# Of the time that a client waits for an answer: so long a request may wait for what others have.
_HEARD = 0.75


@dataclass(frozen=True, slots=True)
class _Handing:
    """An answer with a descriptor: a new one of that file, which is open while it is sent."""

    payload: bytes
    fd: int


class Clients:
    """All native clients of a mounted pool. feed_size: bytes of the feed of changes, after the first subscription.
    others: the other nodes of a pod. read_only: no client may write. outlived: a next daemon goes on with the mount."""

    def __init__(
        self, store: Store, namespace: Namespace, feed_size: int = FEED_SIZE, others: OtherNodes | None = None, *,
        read_only: bool = False, outlived: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._store, self._namespace, self._feed_size = store, namespace, feed_size
        self.read_only, self.outlived = read_only, outlived
        self._connections: set[_Connection] = set()
        # Those whose sockets are the data plane's, by its numbers.
        self._served: dict[int, _Connection] = {}
        self._told_fd = -1  # readable while the data plane has left something
        self._subscribed: set[_Connection] = set()
        self._users = Users(len(store.config.devices), store.blocks.shares.is_exempt)
        self._base = [0] * len(REPORTED)
        self.ending = False
        podmap = store.plane.pod
        # A pool of one node has no such requests: None.
        self.foreign = (
            ForeignRequests(podmap, store.leases, others) if podmap is not None and others is not None else None
        )
        self._checks = 0
        self._checking = trio.CapacityLimiter(_CHECKING_MAX)
        self.opening = trio.CapacityLimiter(_OPENING_MAX)
        self.asking = trio.CapacityLimiter(_ASKING_MAX)
        self._layout: bytes | None = None

    async def run(self) -> None:
        """Let users have their turns, and hear the data plane. Until cancelled, and until it has let go of all
        sockets."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._users.run)
            try:
                while True:
                    await self._hear()
            finally:
                self.ending = True
                self.hang_up()
                with trio.CancelScope(shield=True):
                    while self._served:
                        await self._hear()
                nursery.cancel_scope.cancel()

    async def _hear(self) -> None:
        """Take what the data plane has left."""
        door = self._start()
        await trio.lowlevel.wait_readable(self._told_fd)
        while frames := door.take():
            for frame in frames:
                connection = self._served.get(frame.client)
                if frame.ended:
                    del self._served[frame.client]
                if connection is None:
                    frame.drop()
                    continue
                try:
                    connection.take(frame)
                except Exception:
                    connection.fail(frame)
            await trio.lowlevel.checkpoint()

    def _start(self) -> Connections:
        door = self._store.plane.connections
        if self._told_fd < 0:
            clock_ns = int((trio.current_time() - time.monotonic()) * 1e9)
            self._told_fd = door.start(clock_ns, RESERVATION_MS * 1_000_000)
        return door

    def begin(self, connection: _Connection, fd: int, holder: HolderPages, begun: bytes) -> int:
        """From now on the data plane reads and writes its socket. Returns its number there."""
        uid, version, writable = connection.peer.uid, connection.version, connection.writable
        number = self._start().serve(fd, uid, version, writable, holder, begun)
        self._served[number] = connection
        return number

    async def serve(self, stream: trio.SocketStream, begun: bytes, peer: Peer) -> None:
        """Serve one connection that has begun with these bytes, until it ends. The stream stays the caller's."""
        connection = _Connection(self, self._store, self._namespace, stream, begun, peer)
        try:
            await self._serve(connection)
        except Violation as violation:
            peer = connection.peer
            log.warning("native client, pid %d of user %d: %s; hung up", peer.pid, peer.uid, violation)
        finally:
            self._connections.discard(connection)
            self._unsubscribe(connection)
            connection.end()
            for i, value in enumerate(connection.report.totals[:-1]):
                self._base[i] += value

    async def _serve(self, connection: _Connection) -> None:
        try:
            read_only = await connection.hello()
            if self.ending:
                raise RefusedError(errno.ENOTCONN, "the pool is being unmounted")
            connection.enter(self._users)
            self._connections.add(connection)
            await connection.welcome(read_only)
        except KvfsError as error:
            await connection.answer(Type.HELLO, 0, _message(error), status=-(error.errno or errno.EIO))
            return
        await connection.run()

    async def close(self, *, stays: bool = False) -> None:
        """Hang up, and serve no new client. All get the end, unless the mount stays for a daemon."""
        self.ending = True
        if stays:
            return self.hang_up()
        async with trio.open_nursery() as nursery:
            for connection in list(self._connections):
                nursery.start_soon(connection.close)

    def hang_up(self) -> None:
        """The devices have changed: clients that connect again get the new ones."""
        self._layout = None
        for connection in list(self._connections):
            connection.hang_up()

    def counters(self) -> dict[str, int]:
        """Totals of all clients so far, and how many there are."""
        totals = [
            base + sum(connection.report.totals[i] for connection in self._connections)
            for i, base in enumerate(self._base)
        ]
        named = {f"native_{name}": value for name, value in zip(REPORTED, totals, strict=True)}
        return {"native_clients": len(self._connections), **named}

    def subscribe(self, connection: _Connection) -> tuple[int, int, int, int]:
        """The feed of changes: descriptor, size, position, last number. It ends with the last connection that asked for
        it."""
        feed = self._store.plane.feed_begin(self._feed_size)
        self._subscribed.add(connection)
        return feed

    def _unsubscribe(self, connection: _Connection) -> None:
        if connection in self._subscribed:
            self._subscribed.discard(connection)
            if not self._subscribed:
                self._store.plane.feed_stop()

    def layout(self) -> bytes:
        """Where zones begin on each device, and which zones each segment has."""
        if self._layout is None:
            devices, members = self._store.config.devices, self._store.segments.members
            self._layout = b"".join(
                (
                    array.array("Q", [device.zones_offset for device in devices]).tobytes(),
                    array.array("I", [value for segment in members for place in segment for value in place]).tobytes(),
                )
            )
        return self._layout

    def may_check(self, user: User, number: int, segment: int) -> bool:
        """Whether a block is to be read again because this user says so: then check_block() follows."""
        block = number, segment
        if block in user.checks or len(user.checks) >= CHECKS_OF_USER_MAX or self._checks >= CHECKS_MAX:
            return False
        user.checks.add(block)
        self._checks += 1
        return True

    async def check_block(self, user: User, number: int, segment: int) -> None:
        """A client could not verify a block."""
        try:
            async with user.checking, self._checking:
                await self._store.check_block(InodeNumber(number), segment)
        finally:
            user.checks.discard((number, segment))
            self._checks -= 1


class _Connection:
    def __init__(
        self, clients: Clients, store: Store, namespace: Namespace, stream: trio.SocketStream, begun: bytes, peer: Peer
    ) -> None:
        self._clients, self._store, self._namespace = clients, store, namespace
        self._socket = stream.socket
        # The same socket, for calls that do not wait. It is the stream's.
        self._now = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=self._socket.fileno())
        self._data = bytearray(begun)
        self._sending = trio.Lock()
        self.writable = False
        self._timeout_s = 0.0
        # The client's: as its hello says.
        self.version = VERSIONS[-1]
        self._holder: Holder
        self._lessee: Lessee
        self._nursery: trio.Nursery
        # In the data plane; 0: its socket is not that one's.
        self._number = 0
        self._hung_up = False
        self._ended = trio.Event()
        self._breach = ""
        # Frames without an answer that wait for a turn; frames with one that came behind them wait for `quiet`.
        self._heard: deque[Handed] = deque()
        self._quiet = trio.Event()
        self._quiet.set()
        self.peer = peer
        self.report = Report()
        self.user: User | None = None
        self._handed = 0
        # Directories of keys, by base and namespace. All were found since as many moves and removals of directories as
        # there have been.
        self._spaces: dict[tuple[InodeNumber, bytes], Shards] = {}
        self._spaces_as_of = (0, 0)

    def enter(self, users: Users) -> None:
        """RefusedError: there are too many connections."""
        self.user = users.enter(self, self.peer.uid)

    def end(self) -> None:
        self._now.detach()
        if self.user is not None:
            self.user.leave(self)

    @property
    def _owner(self) -> User:
        assert self.user is not None
        return self.user

    async def _pause(self) -> None:
        """Between two parts of a request's work."""
        await self._owner.pause()

    # ---- frames ----

    async def _have(self, size: int) -> bool:
        """Wait until `size` bytes are there, in one frame's time. Returns False at the end."""
        with trio.fail_after(FRAME_TIMEOUT_S):
            while len(self._data) < size:
                piece = await wire.receive(self._socket, max(_RECEIVE_SIZE, size - len(self._data)))
                if not piece:
                    return False
                self._data += piece
        return True

    async def answer(self, kind: Type, id_: int, *payload: bytes, status: int = 0) -> None:
        assert -wire.ERRNO_MAX <= status <= 0, status
        head = wire.FRAME.pack(sum(map(len, payload)), kind, 0, status, id_)
        await _acquire(self._sending)
        try:
            await self._send(head, *payload)
        finally:
            self._sending.release()

    async def _send(self, *parts: bytes) -> None:
        with trio.fail_after(FRAME_TIMEOUT_S):
            sent = await self._socket.sendmsg(parts)
            for part in parts:
                left = memoryview(part)[sent:]
                sent = max(0, sent - len(part))
                while left:
                    left = left[await self._socket.send(left) :]

    async def _hand(self, frame: bytes, open_: Callable[[], Awaitable[list[int]]]) -> None:
        """Send a short frame with descriptors. They are not open while the peer is waited for."""
        with trio.fail_after(FRAME_TIMEOUT_S):
            while frame:
                await trio.lowlevel.wait_writable(self._now)
                fds = await open_()
                try:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                    frame = frame[self._now.sendmsg([frame], [rights]) :]
                    break
                except BlockingIOError:
                    continue
                finally:
                    for fd in fds:
                        os.close(fd)
        if frame:
            await self._send(frame)

    def hang_up(self) -> None:
        self._hung_up = True
        if self._number:
            self._store.plane.connections.end(self._number)

    async def close(self) -> None:
        """Hang up, once the client has got the end."""
        if self._number:
            self._store.plane.connections.end(self._number, tell=True)
            return await self._ended.wait()
        with trio.move_on_after(CLOSE_TIMEOUT_S), suppress(OSError, trio.BusyResourceError, trio.ClosedResourceError):
            async with self._sending:
                await self._send(wire.FRAME.pack(0, Type.CLOSE, 0, 0, 0))
        self.hang_up()

    # ---- the beginning ----

    async def hello(self) -> bool:
        """Whether the client only wants to read. Raises KvfsError with the reason that it cannot be."""
        if not await self._have(wire.HELLO.size):
            raise Violation("hung up before its hello was whole")
        magic, version, flags = wire.HELLO.unpack_from(self._data)
        del self._data[: wire.HELLO.size]
        assert magic == wire.MAGIC
        if version not in VERSIONS:
            raise RefusedError(
                errno.EPROTO,
                f"the daemon speaks version {VERSIONS[-1]} of the client protocol and serves version {VERSIONS[0]}, "
                f"the client speaks {version}",
            )
        self.version = version
        if not await self._have(wire.PATIENCE.size):
            raise Violation("hung up before its hello was whole")
        timeout_ms, reserved = wire.PATIENCE.unpack_from(self._data)
        del self._data[: wire.PATIENCE.size]
        if not 1 <= timeout_ms <= wire.TIMEOUT_MAX_MS or reserved:
            raise RefusedError(
                errno.EINVAL, f"hello with a timeout of {timeout_ms} ms: 1 to {wire.TIMEOUT_MAX_MS} are possible"
            )
        self._timeout_s = timeout_ms / 1000
        if not self.peer.may_connect:
            raise RefusedError(
                errno.EACCES,
                f"{self.peer.told} may not use this pool: neither the daemon's user ({os.geteuid()}) nor a member "
                f"of its group ({os.getegid()})",
            )
        if flags & ~wire.READ_ONLY:
            raise RefusedError(errno.EINVAL, f"hello with flags 0x{flags:x}, which this daemon does not know")
        return bool(flags & wire.READ_ONLY)

    async def welcome(self, read_only: bool) -> None:
        """The answer that lets the client read by itself, and its descriptors. Raises KvfsError with the reason that it
        cannot have them."""
        store, config = self._store, self._store.config
        self.writable = not (read_only or self._clients.read_only)
        head = wire.WELCOME.pack(
            self.version, self.writable, config.uuid.bytes, store.epoch, config.secret, config.geometry.zone_size,
            config.geometry.stripe_unit, config.geometry.stripe_width, len(store.segments.members),
            len(config.devices), RESERVATION_MS, store.plane.pod is not None, self._clients.outlived(),
        )  # fmt: skip
        layout = self._clients.layout()
        # The client's half is connection_fill().
        assert len(layout) == 8 * len(config.devices) + 8 * len(store.segments.members) * config.geometry.stripe_width
        if len(head) + len(layout) > wire.WELCOME_MAX:
            raise RefusedError(
                errno.EOVERFLOW, f"{len(store.segments.members)} segments are more than a client can be told of"
            )
        count = 1 + len(config.devices) + (store.plane.pod is not None)
        # Before the answer, for a device that cannot be opened is a reason to refuse.
        for fd in await self._open(0, count):
            os.close(fd)
        await self.answer(Type.HELLO, self.peer.uid + 1 & 0xFFFFFFFF, head, layout)
        async with self._sending:
            for at in range(0, count, wire.FDS_MAX):
                frame = wire.FRAME.pack(0, Type.DESCRIPTORS, 0, 0, 0)
                await self._hand(frame, partial(self._open, at, min(at + wire.FDS_MAX, count)))

    async def _open(self, first: int, end: int) -> list[int]:
        """Open some files of the client's own: changed flags of its descriptors change none of ours. RefusedError."""
        fds: list[int] = []
        try:
            await trio.to_thread.run_sync(self._open_some, first, end, fds, limiter=self._clients.opening)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return fds

    def _open_some(self, first: int, end: int, fds: list[int]) -> None:
        mode = os.O_RDWR if self.writable else os.O_RDONLY
        files = [(self._store.plane.table_fd(), os.O_RDONLY)]
        files += [(one.fd, mode | (os.O_DIRECT if one.direct else 0)) for one in self._store.devices]
        if self._store.plane.pod is not None:
            files.append((self._store.plane.pod.fd, os.O_RDONLY))
        try:
            for fd, flags in files[first:end]:
                fds.append(_reopen(fd, flags))
        except OSError as error:
            text = f"devices cannot be opened: {reason(error)}"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                log.warning("native client, pid %d of user %d: %s", self.peer.pid, self.peer.uid, text)
            raise RefusedError(error.errno or errno.EIO, text) from error

    # ---- requests ----

    async def run(self) -> None:
        """Serve a client that was welcomed."""
        self._holder, self._lessee = self._store.reservations.join(self.peer.uid, self.hang_up), Lessee(self.peer.uid)
        try:
            async with trio.open_nursery() as self._nursery:
                if self._hung_up or self._clients.ending:
                    return
                self._number = self._clients.begin(self, self._now.fileno(), self._holder.told, bytes(self._data))
                self._data.clear()
                try:
                    await self._ended.wait()
                finally:
                    # The socket is the data plane's until this end.
                    if not self._ended.is_set():
                        self._store.plane.connections.end(self._number)
                    with trio.CancelScope(shield=True):
                        await self._ended.wait()
                    self._nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._store.leases.leave(self._lessee)
            self._store.reservations.take_back_all(self._holder)
        if self._breach:
            raise Violation(self._breach)

    def take(self, frame: Handed) -> None:
        """Handle a frame, or have it handled. Answers are made side by side: a reservation that waits for room needs
        the commit behind it."""
        if frame.ended:
            self._number, self._breach = 0, self._breach or frame.payload.decode(errors="replace")
            frame.drop()
            self._ended.set()
            self._hear_last()
            return
        if frame.commit is not None:  # before any wait: the client may be gone after it
            frame.replaced = self._store.reservations.take_in(self._holder, frame.commit)
        request = _REQUESTS[frame.kind]
        if self._breach:
            frame.drop()
            return
        if request.handle is not None:
            self._nursery.start_soon(self._answer, frame, request, request.handle)
            return
        self._heard.append(frame)
        if len(self._heard) == 1:
            if self._owner.may_begin:
                self._owner.begin_now()
                self._listen()
            if self._heard:
                self._quiet = trio.Event()
                self._nursery.start_soon(self._listen_on)

    def _listen(self) -> None:
        """In a turn of the user's, which it ends: frames without an answer, in the order in which they came."""
        user = self._owner
        try:
            while self._heard and not user.is_over:
                frame = self._heard.popleft()
                hear = _REQUESTS[frame.kind].hear
                assert hear is not None
                try:
                    with suppress(KvfsError), self._breaches(frame):
                        hear(self, frame.payload)
                except Violation as violation:
                    self._break(str(violation))
                finally:
                    frame.drop()
        finally:
            user.end()

    def _hear_last(self) -> None:
        """A client may tell its totals and hang up. The last ones have all others in them."""
        last = next((frame for frame in reversed(self._heard) if frame.kind == Type.REPORT), None)
        if last is not None and not self._breach:
            with suppress(Violation):
                self.hear_report(last.payload)

    def _break(self, rule: str) -> None:
        """The client has broken a rule: nothing more of it is heard."""
        self._breach = rule
        self.hang_up()
        while self._heard:
            self._heard.popleft().drop()

    def fail(self, frame: Handed) -> None:
        """What failed at this frame, without a wait, ends this connection and no other."""
        log.exception("native client, pid %d of user %d", self.peer.pid, self.peer.uid)
        self._break(f"the daemon has failed at a frame of type {frame.kind}")
        frame.drop()

    async def _listen_on(self) -> None:
        try:
            while self._heard:
                await self._owner.begin()
                self._listen()
        finally:
            while self._heard:
                self._heard.popleft().drop()
            self._quiet.set()

    async def _go_on(self, frame: Handed) -> None:
        """With a RESERVE or COMMIT that is under way."""
        reservations, left_s = self._store.reservations, self._timeout_s * _HEARD
        if frame.reserve is not None:
            await reservations.reserve_on(self._holder, frame.reserve, frame.next, left_s, self._pause)
        elif frame.commit is not None:
            assert frame.next is not None
            make_way = self._namespace.make_way
            told = reservations.commit_on(self._holder, frame.commit, frame.next, make_way, left_s, self._pause)
            if await told or frame.replaced:
                await self._tell_hosts()

    async def _answer(self, frame: Handed, request: _Request, handle: Handler) -> None:
        user = self._owner
        answer: bytes | _Handing | None
        try:
            await self._quiet.wait()
            await user.begin()
            try:
                if request.writes and not self.writable:
                    pool, own = "the pool is mounted read-only", "this client is connected for reading only"
                    raise RefusedError(errno.EROFS, pool if self._clients.read_only else own)
                with self._breaches(frame):
                    answer = None if frame.under_way else await handle(self, frame.payload)
                    await self._go_on(frame)
                    status = 0
            except KvfsError as error:
                answer, status = _message(error), -(error.errno or errno.EIO)
            finally:
                user.end()
            if isinstance(answer, _Handing):
                frame.answer(answer.payload, fd=answer.fd)
            else:
                frame.answer(answer, status)
        finally:
            frame.drop()

    @staticmethod
    @contextmanager
    def _breaches(frame: Handed) -> Iterator[None]:
        """Of the protocol, as parsers find them."""
        try:
            yield
        except FrameError as error:
            raise Violation(str(error)) from error
        except struct.error as error:
            raise Violation(f"a frame of type {frame.kind} that ends too early: {frame.size} bytes") from error

    async def reserve(self, payload: bytes) -> bytes:
        base, space, count, flags, at = wire.parse_where(payload, Flags.TABLE | Flags.HASHES | Flags.PARENTS)
        # All waits end in time for the answer to be heard.
        until = trio.current_time() + self._timeout_s * _HEARD
        await self._namespace.room_for_name(self._timeout_s * _HEARD)
        if flags & Flags.TABLE:
            table, at = wire.parse_table(payload, at)
            items = Part(payload, at)
            shards = await self._make_table(base, space, table, self._check(Type.RESERVE, items, count, flags, table))
        else:
            items = Part(payload, at)
            known = self._remembered(base, space)
            missing = self._check(Type.RESERVE, items, count, flags, known=known)
            # The request's own, as it waits and others change what is remembered.
            shards = Shards(known)
            if missing:
                await self._make(base, space, missing, known, shards)
            if self._number and self._remembered(base, space) is known and not self._store.rebuilding:
                self._store.plane.connections.remember(self._number, base, b"/".join(space), known)
        left_s = max(0.0, until - trio.current_time())
        return await self._store.reservations.reserve(
            self._holder, items, count, shards, self.peer.uid, left_s, flags, pause=self._pause
        )

    def _check(
        self, kind: Type, items: Part, count: int, flags: int = 0, table: Sequence[Path] = (), *,
        known: Shards | None = None,
    ) -> list[int]:  # fmt: skip
        """The numbers of the items' directories, as the table has them or as names begin, that are not known. Violation
        if the items break a rule."""
        try:
            return self._store.plane.frames.check(kind, items, count, flags=flags, directories=len(table), known=known)
        except FrameError as error:
            raise Violation(str(error)) from error

    def _moves(self) -> tuple[int, int]:
        return self._store.blocks.directory_moves, self._store.blocks.directory_removals

    def _remembered(self, base: InodeNumber, space: Sequence[bytes]) -> Shards:
        as_of = self._moves()
        if self._spaces_as_of != as_of:
            self._spaces_as_of = as_of
            self._spaces.clear()
        key = base, b"/".join(space)
        known = self._spaces.get(key)
        if known is None:
            if len(self._spaces) >= SPACES_MAX:
                del self._spaces[next(iter(self._spaces))]
            known = self._spaces[key] = Shards()
        return known

    async def _make_path(self, base: InodeNumber, path: Path) -> InodeNumber:
        """The directory below `base`, made if it is not there. KvfsError."""
        found = self._namespace.make_directories(
            base, path[:_YIELD_EVERY], _DIRECTORY_MODE, self.peer.uid, self.peer.gid
        )
        for at in range(_YIELD_EVERY, len(path), _YIELD_EVERY):
            await self._pause()
            part = path[at : at + _YIELD_EVERY]
            found = self._namespace.make_directories(found.inode, part, _DIRECTORY_MODE, self.peer.uid, self.peer.gid)
        return found.inode

    async def _make(
        self, base: InodeNumber, space: Path, missing: Sequence[int], known: Shards, shards: Shards
    ) -> None:
        """Find the directories of keys with these first digits, made if they are not there, or their errors. KvfsError
        if the namespace has no directory."""
        root = await self._make_path(base, space)
        moves = self._moves()
        for i, number in enumerate(missing):
            try:
                found = self._namespace.make_directories(
                    root, (b"%02x" % number,), _DIRECTORY_MODE, self.peer.uid, self.peer.gid
                )
            except KvfsError as error:
                shards[number].error = -(error.errno or errno.EIO)
                continue
            # A rebuild may let another directory have the name; and one that moved is found anew.
            lasts = not self._store.rebuilding and moves == self._moves() == self._spaces_as_of
            for shard in (shards[number], known[number]) if lasts else (shards[number],):
                shard.directory, shard.gid = found.inode, self._namespace.group_in(found, self.peer.gid)
            if i % _YIELD_EVERY == _YIELD_EVERY - 1:
                await self._pause()

    async def _make_table(
        self, base: InodeNumber, space: Path, table: Sequence[Path], numbers: Sequence[int]
    ) -> Shards:
        """Find the directories with these numbers in the table, made if they are not there, or their errors. KvfsError
        if the namespace has no directory."""
        shards = Shards()
        root = await self._make_path(base, space)
        for number in numbers:
            shard, path = shards[number], table[number]
            try:
                # A path may have hundreds of parts.
                above = await self._make_path(root, path[:-1])
                found = self._namespace.make_directories(
                    above, path[-1:], _DIRECTORY_MODE, self.peer.uid, self.peer.gid
                )
            except KvfsError as error:
                shard.error = -(error.errno or errno.EIO)
            else:
                shard.directory, shard.gid = found.inode, self._namespace.group_in(found, self.peer.gid)
            await self._pause()
        return shards

    async def commit(self, payload: bytes) -> bytes:
        (count,) = wire.WORD.unpack_from(payload)
        items = Part(payload, wire.WORD.size)
        if count > wire.ITEMS_MAX:
            raise Violation(f"a commit of {count} items")
        self._check(Type.COMMIT, items, count)
        answers, replaced = await self._store.reservations.commit(
            self._holder, items, count, self._namespace.make_way, self._timeout_s * _HEARD, self._pause
        )
        if replaced:
            await self._tell_hosts()
        return answers

    async def _tell_hosts(self) -> None:
        """A look at the mount after the answer sees the change: hosts may have cached where a name led. They never
        cache that it led nowhere."""
        with trio.move_on_after(HOSTS_TIMEOUT_S), suppress(KvfsError):
            await self._store.plane.notify_flush()

    async def delete(self, payload: bytes) -> bytes:
        base, space, count, flags, at = wire.parse_where(payload, Flags.TABLE)
        names, root = self._namespace, directory_at(self._namespace, base, space)
        if flags & Flags.TABLE:
            table, at = wire.parse_table(payload, at)
            items, shards = Part(payload, at), Shards()
            for number in self._check(Type.DELETE, items, count, flags, table):
                shards[number].directory = directory_at(names, root, table[number]) or 0
                await self._pause()
        else:
            items, shards = Part(payload, at), Shards(self._remembered(base, space))
            for number in self._check(Type.DELETE, items, count, known=shards):
                shards[number].directory = directory_at(names, root, (b"%02x" % number,)) or 0
                await self._pause()
        frame = self._store.plane.frames.delete(items, count, shards, flags)
        found, told, left = Next.MORE, 0, 0
        while found != Next.DONE:
            found = frame.go()
            self._store.segments.take_notes()
            if found == Next.NAMES:
                left += 1
                directory, name = frame.name()
                frame.item(self._delete(InodeNumber(directory), name))
            # Before any wait: the client may be gone after it.
            if frame.any_since(told):
                self._store.blocks.tell_hosts()
            told = frame.told.done
            if found == Next.MORE or left == _YIELD_EVERY:
                left = 0
                await self._pause()
        answer = frame.answer()
        if any(answer):
            await self._tell_hosts()
        return answer

    def _delete(self, parent: InodeNumber, name: bytes) -> bool:
        with suppress(KvfsError):
            self._namespace.delete(parent, name)
            return True
        return False

    async def list_(self, payload: bytes) -> bytes:
        return await Listing(self._namespace, self._store.index, self._pause).answer(payload)

    async def lookup(self, payload: bytes) -> bytes:
        parent, size = wire.WORDS.unpack_from(payload)
        name = payload[wire.WORDS.size : wire.WORDS.size + size]
        if not 0 < size <= NAME_MAX or len(name) != size or b"/" in name or b"\0" in name or name in (b".", b".."):
            raise Violation(f"a lookup of a name of {size} bytes")
        inode = self._namespace.lookup(InodeNumber(parent), name)
        record = self._store.index.raw(inode.inode)
        assert record is not None
        return record

    async def events(self, payload: bytes) -> bytes | _Handing:
        operation, reserved, number = wire.EVENTS.unpack(payload)
        if operation == wire.EVENTS_PATH and not reserved:
            path = self._namespace.find_path(InodeNumber(number))
            if path is None:
                raise RefusedError(errno.ENOENT, f"directory {number}: gone")
            return path[1:]
        if operation != wire.EVENTS_BEGIN or reserved or number:
            raise Violation(f"events with operation {operation} and inode {number}")
        if self._handed >= _HANDED_MAX and not self._unread_size():
            self._handed = 0
        if self._handed >= _HANDED_MAX:
            raise RefusedError(errno.EMFILE, f"{self._handed} descriptors of the feed were sent and not taken")
        self._handed += 1
        fd, *place = self._clients.subscribe(self)
        return _Handing(wire.FEED.pack(*place), fd)

    def _unread_size(self) -> int:
        """Bytes that were sent and not read, with what they cost the kernel (SIOCOUTQ; unix(7))."""
        size = array.array("i", [0])
        fcntl.ioctl(self._now, termios.TIOCOUTQ, size)
        return size[0]

    def bad_block(self, payload: bytes) -> None:
        number, segment = wire.WORDS.unpack(payload)
        if self._clients.may_check(self._owner, number, segment):
            self._nursery.start_soon(self._clients.check_block, self._owner, number, segment)

    def foreign(self, payload: bytes) -> None:
        if self._clients.foreign is not None:
            self._clients.foreign.note(payload)

    async def fresh(self, payload: bytes) -> bytes:
        wire.parse_end(payload, 0)
        if self._clients.foreign is not None:
            async with self._owner.asking, self._clients.asking:
                await self._clients.foreign.fresh()
        return b""

    async def foreign_lease(self, payload: bytes) -> bytes:
        if self._clients.foreign is None:
            raise Violation("a lease of other nodes' blocks in a pool that is no pod")
        async with self._owner.asking, self._clients.asking:
            return await self._clients.foreign.lease(self._lessee, payload)

    async def lease(self, payload: bytes) -> bytes:
        number, milliseconds, reserved = wire.LEASE.unpack_from(payload)
        inodes = Part(payload, wire.LEASE.size)
        if not milliseconds or reserved or not inodes.size or inodes.size % 8:
            raise Violation(f"a lease for {milliseconds} ms with {inodes.size} bytes of inodes")
        number, held = self._store.leases.take(self._lessee, number, milliseconds, inodes)
        return wire.WORD.pack(number) + held

    async def release(self, payload: bytes) -> bytes:
        (number,) = wire.WORD.unpack(payload)
        return wire.WORD.pack(self._store.leases.release(self._lessee, number))

    def hear_report(self, payload: bytes) -> None:
        if len(payload) < 8 * (TOTALS + 1):
            raise Violation(f"a report of {len(payload)} bytes, at least {8 * (TOTALS + 1)} are needed")
        told = struct.unpack_from(f"<{TOTALS + 1}Q", payload)
        self.report.take(told, self._owner.told, trio.current_time())


# Of requests that are answered, beside each other; and of those that are not, in the turn that they came in.
Handler = Callable[[_Connection, bytes], Awaitable[bytes | _Handing]]
Hearer = Callable[[_Connection, bytes], None]


@dataclass(frozen=True, slots=True)
class _Request:
    handle: Handler | None = None
    hear: Hearer | None = None
    writes: bool = False


# The data plane's thread lets no other through, and none that is too large.
_REQUESTS = {
    int(Type.RESERVE): _Request(_Connection.reserve, writes=True),
    int(Type.COMMIT): _Request(_Connection.commit, writes=True),
    int(Type.DELETE): _Request(_Connection.delete, writes=True),
    int(Type.LIST): _Request(_Connection.list_),
    int(Type.LOOKUP): _Request(_Connection.lookup),
    int(Type.EVENTS): _Request(_Connection.events),
    int(Type.BAD_BLOCK): _Request(hear=_Connection.bad_block),
    int(Type.FOREIGN): _Request(hear=_Connection.foreign),
    int(Type.FOREIGN_LEASE): _Request(_Connection.foreign_lease),
    int(Type.FRESH): _Request(_Connection.fresh),
    int(Type.LEASE): _Request(_Connection.lease),
    int(Type.RELEASE): _Request(_Connection.release),
    int(Type.REPORT): _Request(hear=_Connection.hear_report),
}


async def _acquire(lock: trio.Lock) -> None:
    """At once if it is free: trio would let all other tasks run first, and a client waits for each such turn."""
    try:
        lock.acquire_nowait()
    except trio.WouldBlock:
        await lock.acquire()


def _message(error: KvfsError) -> bytes:
    return str(error).encode(errors="replace")[:400]


def _reopen(fd: int, flags: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
