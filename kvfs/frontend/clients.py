"""The daemon's side of the native path: the requests of libkvfs on the control socket
(native/src/base/wire_format.h).

A client gets the block table and the devices, and then reads by itself. Afterwards it asks only for changes, and for
facts that the table does not hold. Clients are root, the daemon's user, and the members of the daemon's group. Even so
every size, count and name is checked (I18), and a violation ends that client's connection and nothing else. Knows
requests and answers; their meaning for blocks is known to the namespace and the reservations.
"""

from __future__ import annotations

import array
import errno
import logging
import os
import re
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import trio

from kvfs._native import ffi
from kvfs.errors import KvfsError
from kvfs.frames import FrameError, Next, Shards
from kvfs.frontend.foreign import ForeignRequests, OtherNodes
from kvfs.lent import Part
from kvfs.namespace.files import Namespace
from kvfs.plane import FEED_SIZE
from kvfs.podmap import FOREIGN_BLOCK_SIZE
from kvfs.record import FLAGS_OFFSET, InodeFlags, Kind
from kvfs.store.leases import Lessee
from kvfs.store.reservations import RESERVATION_MS, Holder
from kvfs.store.store import Store
from kvfs.types import NAME_MAX, InodeNumber

log = logging.getLogger(__name__)

_Path = Sequence[bytes]  # its parts

MAGIC = b"KVFSCLI1"
# The versions of the protocol that are served, the daemon's own last.
VERSIONS = (4, 5)
CLIENTS_MAX = 1024
ITEMS_MAX = 4096
DIRECTORIES_MAX = 256
FDS_MAX = 128
WELCOME_MAX = 16 << 20
READ_ONLY = 1
# The deadline for the rest of a frame that has begun, and for an answer that is being sent.
FRAME_TIMEOUT_S = 30.0
_TIMEOUT_MAX_MS = 3_600_000
CLOSE_TIMEOUT_S = 1.0
HOSTS_TIMEOUT_S = 1.0
# Items of a DELETE that C leaves, between two looks at other work.
_YIELD_EVERY = 64
# Blocks that are read again at one time because clients call them bad; reports beyond are dropped.
_CHECKS_MAX = 16
_CHECKING_MAX = 4
_RECEIVE_SIZE = 1 << 17
# Requests of one client that are under way; those beyond wait in its socket. Each call of a client takes a few of them
# at most.
_UNDER_WAY_MAX = 256
# Namespaces whose directories of keys one connection remembers.
_SPACES_MAX = 16
_SPACE_MAX = 1023
_DIRECTORY_MODE = 0o755
_SO_PEERGROUPS = 59
_SEALED = int(InodeFlags.SEALED)

_HELLO = struct.Struct("<8sII")
_PATIENCE = struct.Struct("<II")
_FRAME = struct.Struct("<IHHiI")
_WELCOME = struct.Struct("<II16sQQQQIIIIII")
_WHERE = struct.Struct("<QHHI")
_RESERVE = struct.Struct("<QII")
_COMMIT = struct.Struct("<Qq")
_WORD = struct.Struct("<Q")
_WORDS = struct.Struct("<QQ")
_LEASE = struct.Struct("<QII")
_EVENTS = struct.Struct("<IIQ")
_FEED = struct.Struct("<QQQ")
_EVENTS_BEGIN, _EVENTS_PATH = 1, 2
_ERRNO_MAX = 4095
_NAME = re.compile(rb"(?:[0-9a-f][0-9a-f]){1,127}")
# The directory of longer keys: 254 digits, and the next as a letter. And the names of files there.
_LONG = re.compile(rb"[0-9a-f]{254}[g-v]")
_REST = re.compile(rb"[0-9a-f](?:[0-9a-f][0-9a-f]){0,127}")
_LONG_KEY = re.compile(rb"(?:[0-9a-f][0-9a-f]){1,255}")
_SHORT_DIGITS = 254
_DIGITS, _LETTERS = b"0123456789abcdef", b"ghijklmnopqrstuv"
assert (_HELLO.size, _FRAME.size, _WELCOME.size) == (16, 16, 80)

# struct kvfs_client_statistics. All but the last, `busy`, are totals.
REPORTED = tuple(name for name, _ in ffi.typeof("struct kvfs_client_statistics").fields)
_RECONNECTS = REPORTED.index("reconnects")
# A report's totals; then comes `busy`.
_TOTALS = len(REPORTED) - 1


class Type(IntEnum):
    HELLO = 1
    DESCRIPTORS = 2
    RESERVE = 3
    COMMIT = 4
    DELETE = 5
    LIST = 6
    LOOKUP = 7
    BAD_BLOCK = 8
    HITS = 9
    REPORT = 10
    CLOSE = 11
    LEASE = 12
    RELEASE = 13
    EVENTS = 14
    TOUCH = 15
    FOREIGN = 16
    FOREIGN_LEASE = 17
    FRESH = 18
    DONE = 19


class Flags(IntFlag):
    """enum wire_flag."""

    TABLE = 1
    HASHES = 2
    LONG = 4
    PARENTS = 8


class Violation(Exception):
    """The client sent something that the protocol does not have."""


def said_what_it_is(begun: bytes) -> bool:
    """Whether a connection with these first bytes is no native client's, or its hello is whole."""
    if not (begun.startswith(MAGIC) or MAGIC.startswith(begun)):
        return True
    if len(begun) < _HELLO.size:
        return False
    _, version, _ = _HELLO.unpack_from(begun)
    return version not in VERSIONS or len(begun) >= _HELLO.size + _PATIENCE.size


async def receive(sock: trio.socket.SocketType, size: int) -> bytes:
    """Some bytes; none at the end. Raises Violation if a descriptor came with them. The descriptor stays open there: a
    close may block (a TCP socket lingers as long as its maker likes)."""
    data, _, flags, _ = await sock.recvmsg(size, 0, socket.MSG_PEEK)
    if flags & socket.MSG_CTRUNC:
        raise Violation("sent a descriptor")
    # No byte more: a descriptor may come with those that follow.
    return await sock.recv(len(data)) if data else b""


class RefusedError(KvfsError):
    """A request that cannot be granted; its errno and message are the answer."""

    def __init__(self, error: int, text: str) -> None:
        super().__init__(text)
        self.errno = error


@dataclass(frozen=True, slots=True)
class Peer:
    pid: int
    uid: int
    gid: int
    groups: frozenset[int]

    @classmethod
    def of(cls, sock: socket.socket | trio.socket.SocketType) -> Peer:
        """The user and groups of the other end when it connected (SO_PEERCRED, SO_PEERGROUPS; unix(7))."""
        pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        groups = array.array("I")
        # For a peer with more than 256 groups, its first group alone counts.
        with suppress(OSError):
            groups.frombytes(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024))
        return cls(pid, uid, gid, frozenset((gid, *groups)))

    @property
    def may_control(self) -> bool:
        return self.uid in (0, os.geteuid())

    @property
    def may_connect(self) -> bool:
        return self.may_control or os.getegid() in self.groups


@dataclass(frozen=True, slots=True)
class _Handing:
    """An answer with a descriptor, which is closed once it is sent."""

    payload: bytes
    fd: int


class Clients:
    """All native clients of a mounted pool. feed_size: bytes of the feed of changes, once somebody subscribes.
    others: the other nodes of a pod."""

    def __init__(
        self, store: Store, namespace: Namespace, feed_size: int = FEED_SIZE, others: OtherNodes | None = None
    ) -> None:
        self._store, self._namespace, self._feed_size = store, namespace, feed_size
        self._connections: set[_Connection] = set()
        self._subscribed: set[_Connection] = set()
        self._base = [0] * len(REPORTED)
        self._ending = False
        podmap = store.plane.pod
        # A pool of one node has no such requests: None.
        self.foreign = (
            ForeignRequests(podmap, store.leases, others) if podmap is not None and others is not None else None
        )
        self._checks = 0
        self._checking = trio.CapacityLimiter(_CHECKING_MAX)

    async def serve(self, stream: trio.SocketStream, begun: bytes) -> None:
        """Serve one connection that has begun with these bytes, until it ends. The stream stays the caller's."""
        connection = _Connection(self, self._store, self._namespace, stream, begun)
        try:
            await self._serve(connection)
        except Violation as violation:
            peer = connection.peer
            log.warning("native client, pid %d of user %d: %s; hung up", peer.pid, peer.uid, violation)
        finally:
            self._connections.discard(connection)
            self._unsubscribe(connection)
            for i, value in enumerate(connection.reported[:-1]):
                self._base[i] += value

    async def _serve(self, connection: _Connection) -> None:
        try:
            read_only = await connection.hello()
            if self._ending:
                raise RefusedError(errno.ENOTCONN, "the pool is being unmounted")
            if len(self._connections) >= CLIENTS_MAX:
                raise RefusedError(errno.EMFILE, f"{CLIENTS_MAX} native clients are connected, the most there can be")
            self._connections.add(connection)
            await connection.welcome(read_only)
        except KvfsError as error:
            await connection.answer(Type.HELLO, 0, _message(error), status=-(error.errno or errno.EIO))
            return
        await connection.run()

    async def close(self) -> None:
        """The pool was unmounted: tell the clients, and hang up. No new client is served afterwards."""
        self._ending = True
        async with trio.open_nursery() as nursery:
            for connection in list(self._connections):
                nursery.start_soon(connection.close)

    def hang_up(self) -> None:
        """The devices have changed: clients that connect again are told the new ones."""
        for connection in list(self._connections):
            connection.hang_up()

    def counters(self) -> dict[str, int]:
        """Totals of all clients so far, and how many there are."""
        totals = [
            base + sum(connection.reported[i] for connection in self._connections) for i, base in enumerate(self._base)
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

    async def check_block(self, number: InodeNumber, segment: int) -> None:
        """A client could not verify a block."""
        if self._checks >= _CHECKS_MAX:
            return
        self._checks += 1
        try:
            async with self._checking:
                await self._store.check_block(number, segment)
        finally:
            self._checks -= 1


class _Connection:
    def __init__(
        self, clients: Clients, store: Store, namespace: Namespace, stream: trio.SocketStream, begun: bytes
    ) -> None:
        self._clients, self._store, self._namespace = clients, store, namespace
        self._socket = stream.socket
        self._data = bytearray(begun)
        self._sending = trio.Lock()
        self._writable = False
        self._timeout_s = 0.0
        # The client's: as its hello says.
        self.version = VERSIONS[-1]
        self._under_way = trio.Semaphore(_UNDER_WAY_MAX)
        self._holder: Holder
        self._lessee: Lessee
        self._nursery: trio.Nursery
        self._scope = trio.CancelScope()
        self.peer = Peer.of(stream.socket)
        self.reported: Sequence[int] = (0,) * len(REPORTED)
        self._before: Sequence[int] | None = None
        # Directories of keys, by base and namespace. All were found since as many moves and removals of directories as
        # there have been.
        self._spaces: dict[tuple[InodeNumber, bytes], Shards] = {}
        self._spaces_as_of = (0, 0)

    # ---- frames ----

    async def _have(self, size: int, *, idle: bool) -> bool:
        """Wait until `size` bytes are there; with `idle`, wait for the first without a deadline. Returns False at the
        end."""
        data = self._data
        if idle and not data:
            piece = await receive(self._socket, _RECEIVE_SIZE)
            if not piece:
                return False
            data += piece
        if len(data) < size:
            with trio.fail_after(FRAME_TIMEOUT_S):
                while len(data) < size:
                    piece = await receive(self._socket, max(_RECEIVE_SIZE, size - len(data)))
                    if not piece:
                        return False
                    data += piece
        return True

    async def answer(self, kind: Type, id_: int, payload: bytes, *, status: int = 0, fds: Sequence[int] = ()) -> None:
        assert -_ERRNO_MAX <= status <= 0, status
        await _acquire(self._sending)
        try:
            with trio.fail_after(FRAME_TIMEOUT_S):
                frame = _FRAME.pack(len(payload), kind, 0, status, id_) + payload
                if fds:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                    frame = frame[await self._socket.sendmsg([frame], [rights]) :]
                await self._send(frame)
        finally:
            self._sending.release()

    async def _send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[await self._socket.send(left) :]

    def hang_up(self) -> None:
        self._scope.cancel()

    async def close(self) -> None:
        with trio.move_on_after(CLOSE_TIMEOUT_S), suppress(OSError):
            async with self._sending:
                await self._send(_FRAME.pack(0, Type.CLOSE, 0, 0, 0))
        self._scope.cancel()

    # ---- the beginning ----

    async def hello(self) -> bool:
        """Whether the client only wants to read. Raises KvfsError with the reason that it cannot be."""
        if not await self._have(_HELLO.size, idle=False):
            raise Violation("hung up before its hello was whole")
        magic, version, flags = _HELLO.unpack_from(self._data)
        del self._data[: _HELLO.size]
        assert magic == MAGIC
        if version not in VERSIONS:
            raise RefusedError(
                errno.EPROTO,
                f"the daemon speaks version {VERSIONS[-1]} of the client protocol and serves version {VERSIONS[0]}, "
                f"the client speaks {version}",
            )
        self.version = version
        if not await self._have(_PATIENCE.size, idle=False):
            raise Violation("hung up before its hello was whole")
        timeout_ms, reserved = _PATIENCE.unpack_from(self._data)
        del self._data[: _PATIENCE.size]
        if not 1 <= timeout_ms <= _TIMEOUT_MAX_MS or reserved:
            raise RefusedError(
                errno.EINVAL, f"hello with a timeout of {timeout_ms} ms: 1 to {_TIMEOUT_MAX_MS} are possible"
            )
        self._timeout_s = timeout_ms / 1000
        if not self.peer.may_connect:
            raise RefusedError(
                errno.EACCES,
                f"user {self.peer.uid} may not use this pool: neither the daemon's user ({os.geteuid()}) nor a member "
                f"of its group ({os.getegid()})",
            )
        if flags & ~READ_ONLY:
            raise RefusedError(errno.EINVAL, f"hello with flags 0x{flags:x}, which this daemon does not know")
        return bool(flags & READ_ONLY)

    async def welcome(self, read_only: bool) -> None:
        """The answer that lets the client read by itself, and its descriptors. Raises KvfsError with the reason that it
        cannot have them."""
        store, config = self._store, self._store.config
        members = store.segments.members
        self._writable = not read_only
        payload = b"".join(
            (
                _WELCOME.pack(
                    self.version, self._writable, config.uuid.bytes, store.epoch, config.secret,
                    config.geometry.zone_size, config.geometry.stripe_unit, config.geometry.stripe_width,
                    len(members), len(config.devices), RESERVATION_MS, store.plane.pod is not None, 0,
                ),
                array.array("Q", [device.zones_offset for device in config.devices]).tobytes(),
                array.array("I", [value for segment in members for place in segment for value in place]).tobytes(),
            )
        )  # fmt: skip
        # The client's half is connection_fill().
        assert len(payload) == _WELCOME.size + 8 * len(config.devices) + 8 * len(members) * config.geometry.stripe_width
        if len(payload) > WELCOME_MAX:
            raise RefusedError(errno.EOVERFLOW, f"{len(members)} segments are more than a client can be told of")
        fds: list[int] = []
        try:
            await trio.to_thread.run_sync(self._open_descriptors, fds)
            assert len(fds) == 1 + len(config.devices) + (store.plane.pod is not None), (len(fds), len(config.devices))
            await self.answer(Type.HELLO, 0, payload)
            for at in range(0, len(fds), FDS_MAX):
                frame = _FRAME.pack(0, Type.DESCRIPTORS, 0, 0, 0)
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds[at : at + FDS_MAX]))
                with trio.fail_after(FRAME_TIMEOUT_S):
                    sent = await self._socket.sendmsg([frame], [rights])
                    await self._send(frame[sent:])
        finally:
            for fd in fds:
                os.close(fd)

    def _open_descriptors(self, fds: list[int]) -> None:
        """Open files of the client's own: changed flags of its descriptors change none of ours."""
        mode = os.O_RDWR if self._writable else os.O_RDONLY
        try:
            fds.append(_reopen(self._store.plane.table_fd(), os.O_RDONLY))
            for device in self._store.devices:
                fds.append(_reopen(device.shared_fd, mode | (os.O_DIRECT if device.direct else 0)))
            if self._store.plane.pod is not None:
                fds.append(_reopen(self._store.plane.pod.fd, os.O_RDONLY))
        except OSError as error:
            raise RefusedError(error.errno or errno.EIO, f"devices cannot be opened: {error.strerror}") from error

    # ---- requests ----

    async def run(self) -> None:
        self._holder, self._lessee = self._store.reservations.join(self.peer.uid), Lessee()
        try:
            async with trio.open_nursery() as self._nursery:
                with self._scope:
                    await self._converse()
                self._nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._store.leases.leave(self._lessee)
            self._store.reservations.take_back_all(self._holder)

    async def _converse(self) -> None:
        while await self._have(_FRAME.size, idle=True):
            size, kind, reserved, status, id_ = _FRAME.unpack_from(self._data)
            entry = _REQUESTS.get(kind)
            if entry is None or reserved or status or size > entry.size_max:
                raise Violation(
                    f"a frame of type {kind} with {size} bytes and status {status}, in version {self.version}"
                )
            if not await self._have(_FRAME.size + size, idle=False):
                return
            payload = bytes(self._data[_FRAME.size : _FRAME.size + size])
            del self._data[: _FRAME.size + size]
            if entry.answered:
                # Side by side: a reservation that waits for room needs the commit behind it.
                await _acquire(self._under_way)
                self._nursery.start_soon(self._answer, entry, Type(kind), id_, payload)
            else:
                with suppress(KvfsError):
                    await self._handle(entry, kind, payload)

    async def _answer(self, entry: _Request, kind: Type, id_: int, payload: bytes) -> None:
        answer: bytes | _Handing | None
        try:
            answer, status = await self._handle(entry, kind, payload), 0
        except KvfsError as error:
            answer, status = _message(error), -(error.errno or errno.EIO)
        assert answer is not None
        if isinstance(answer, _Handing):
            try:
                await self.answer(kind, id_, answer.payload, fds=[answer.fd])
            finally:
                os.close(answer.fd)
        else:
            await self.answer(kind, id_, answer, status=status)
        self._under_way.release()

    async def _handle(self, entry: _Request, kind: int, payload: bytes) -> bytes | _Handing | None:
        if entry.writes and not self._writable:
            raise RefusedError(errno.EROFS, "this client is connected for reading only")
        try:
            return await entry.handle(self, payload)
        except FrameError as error:
            raise Violation(str(error)) from error
        except struct.error as error:
            raise Violation(f"a frame of type {kind} that ends too early: {len(payload)} bytes") from error

    async def reserve(self, payload: bytes) -> bytes:
        base, space, count, flags, at = _where(payload, Flags.TABLE | Flags.HASHES | Flags.PARENTS)
        if flags & Flags.TABLE:
            table, at = _table(payload, at)
            items = Part(payload, at)
            shards = await self._make_table(base, space, table, self._check(Type.RESERVE, items, count, flags, table))
        else:
            items = Part(payload, at)
            known = self._remembered(base, space)
            missing = self._check(Type.RESERVE, items, count, flags, known=known)
            # The request's own, as it waits and others change what is remembered.
            shards = Shards(known)
            if missing:
                self._make(base, space, missing, known, shards)
        # The wait ends in time for the answer to be heard.
        return await self._store.reservations.reserve(
            self._holder, items, count, shards, self.peer.uid, self._timeout_s * 0.75, flags
        )

    def _check(
        self, kind: Type, items: Part, count: int, flags: int = 0, table: Sequence[_Path] = (), *,
        known: Shards | None = None,
    ) -> list[int]:  # fmt: skip
        """The numbers of the items' directories, as the table has them or as names begin, that are not known. Violation
        if the items break a rule."""
        try:
            return self._store.plane.frames.check(kind, items, count, flags=flags, directories=len(table), known=known)
        except FrameError as error:
            raise Violation(str(error)) from error

    def _remembered(self, base: InodeNumber, space: Sequence[bytes]) -> Shards:
        as_of = self._store.blocks.directory_moves, self._store.blocks.directory_removals
        if self._spaces_as_of != as_of:
            self._spaces_as_of = as_of
            self._spaces.clear()
        key = base, b"/".join(space)
        known = self._spaces.get(key)
        if known is None:
            if len(self._spaces) >= _SPACES_MAX:
                del self._spaces[next(iter(self._spaces))]
            known = self._spaces[key] = Shards()
        return known

    def _make(
        self, base: InodeNumber, space: Sequence[bytes], missing: Sequence[int], known: Shards, shards: Shards
    ) -> None:
        """Find the directories of keys with these first digits, made if they are not there, or their errors. KvfsError
        if the namespace has no directory."""
        uid, gid = self.peer.uid, self.peer.gid
        root = self._namespace.make_directories(base, space, _DIRECTORY_MODE, uid, gid).inode
        for number in missing:
            try:
                found = self._namespace.make_directories(root, (b"%02x" % number,), _DIRECTORY_MODE, uid, gid)
            except KvfsError as error:
                shards[number].error = -(error.errno or errno.EIO)
                continue
            # A rebuild may let another directory have the name.
            for shard in (shards[number],) if self._store.rebuilding else (shards[number], known[number]):
                shard.directory, shard.gid = found.inode, self._namespace.group_in(found, gid)

    async def _make_table(
        self, base: InodeNumber, space: _Path, table: Sequence[_Path], numbers: Sequence[int]
    ) -> Shards:
        """Find the directories with these numbers in the table, made if they are not there, or their errors. KvfsError
        if the namespace has no directory."""
        uid, gid, shards = self.peer.uid, self.peer.gid, Shards()
        root = self._namespace.make_directories(base, space, _DIRECTORY_MODE, uid, gid).inode
        for number in numbers:
            shard = shards[number]
            try:
                found = self._namespace.make_directories(root, table[number], _DIRECTORY_MODE, uid, gid)
            except KvfsError as error:
                shard.error = -(error.errno or errno.EIO)
            else:
                shard.directory, shard.gid = found.inode, self._namespace.group_in(found, gid)
            # A path may have hundreds of parts.
            await trio.lowlevel.checkpoint()
        return shards

    async def commit(self, payload: bytes) -> bytes:
        (count,) = _WORD.unpack_from(payload)
        items = Part(payload, _WORD.size)
        if count > ITEMS_MAX:
            raise Violation(f"a commit of {count} items")
        self._check(Type.COMMIT, items, count)
        answers, replaced = await self._store.reservations.commit(self._holder, items, count, self._namespace.make_way)
        if replaced:
            await self._tell_hosts()
        return answers

    async def _tell_hosts(self) -> None:
        """A look at the mount after the answer sees the change: hosts may have cached where a name led. They never
        cache that it led nowhere."""
        with trio.move_on_after(HOSTS_TIMEOUT_S), suppress(KvfsError):
            await self._store.plane.notify_flush()

    async def delete(self, payload: bytes) -> bytes:
        base, space, count, flags, at = _where(payload, Flags.TABLE)
        root = self._find(base, space)
        if flags & Flags.TABLE:
            table, at = _table(payload, at)
            items, shards = Part(payload, at), Shards()
            for number in self._check(Type.DELETE, items, count, flags, table):
                shards[number].directory = 0 if root is None else self._find(root, table[number]) or 0
                await trio.lowlevel.checkpoint()
        else:
            items, shards = Part(payload, at), Shards(self._remembered(base, space))
            for number in self._check(Type.DELETE, items, count, known=shards):
                shards[number].directory = 0 if root is None else self._find(root, (b"%02x" % number,)) or 0
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
                await trio.lowlevel.checkpoint()
        answer = frame.answer()
        if any(answer):
            await self._tell_hosts()
        return answer

    def _delete(self, parent: InodeNumber, name: bytes) -> bool:
        with suppress(KvfsError):
            if self._namespace.unlink_foreign(parent, name):
                return True
            if self._namespace.lookup(parent, name).kind == Kind.FILE:
                self._namespace.unlink(parent, name)
                return True
        return False

    def _find(self, base: InodeNumber, path: Sequence[bytes]) -> InodeNumber | None:
        with suppress(KvfsError):
            return self._namespace.find_directory(base, path)
        return None

    async def list_(self, payload: bytes) -> bytes:
        base, space, count, flags, at = _where(payload, Flags.LONG)
        longer = bool(flags & Flags.LONG)
        after, at = _listed_after(payload, at, _LONG_KEY if longer else _NAME)
        _end(payload, at)
        root = self._find(base, space)
        found: list[bytes] = []
        for byte in range(int(after[:2] or b"0", 16), 256):
            if len(found) >= count or root is None:
                break
            shard = b"%02x" % byte
            directory = self._find(root, (shard,))
            if directory is not None:
                await self._list_shard(directory, shard, after if after[:2] == shard else b"", count, found, longer)
            await trio.lowlevel.checkpoint()
        parts = [_WORD.pack(len(found))]
        for name in found:
            parts.append(_WORD.pack(len(name)) + name + bytes(-len(name) % 8))
        return b"".join(parts)

    async def _list_shard(
        self, directory: InodeNumber, shard: bytes, after: bytes, count: int, found: list[bytes], longer: bool
    ) -> None:
        """Add the keys of one directory to `found`, up to `count` in all, in hex: sealed names that a put could have
        made. With `longer` also those of the directories in it that long keys have. Their order is that of keys."""
        if len(after) > _SHORT_DIGITS:
            within = (
                after[:_SHORT_DIGITS] + _LETTERS[(at := int(after[_SHORT_DIGITS : _SHORT_DIGITS + 1], 16)) : at + 1]
            )
            above = self._find(directory, (within,))
            if above is not None:
                await self._list_long(above, within, after[_SHORT_DIGITS + 1 :], count, found)
            after = within
        while len(found) < count:
            entries = self._store.index.list(directory, after, min(count - len(found), 512))
            for name, number in entries:
                if name[:2] != shard or len(found) >= count:
                    continue
                if _NAME.fullmatch(name):
                    self._list_file(number, name, found)
                elif longer and _LONG.fullmatch(name):
                    await self._list_long(number, name, b"", count, found)
            if not entries:
                return
            after = entries[-1][0]
            await trio.lowlevel.checkpoint()

    async def _list_long(
        self, directory: InodeNumber, name: bytes, after: bytes, count: int, found: list[bytes]
    ) -> None:
        """The same of a directory that long keys have; `after` is a name in it."""
        digits = name[:_SHORT_DIGITS] + _DIGITS[(at := _LETTERS.index(name[_SHORT_DIGITS:])) : at + 1]
        while len(found) < count:
            entries = self._store.index.list(directory, after, min(count - len(found), 512))
            for rest, number in entries:
                if _REST.fullmatch(rest):
                    self._list_file(number, digits + rest, found)
            if not entries:
                return
            after = entries[-1][0]
            await trio.lowlevel.checkpoint()

    def _list_file(self, number: InodeNumber, key: bytes, found: list[bytes]) -> None:
        record = self._store.index.raw(number)
        if record is not None and record[FLAGS_OFFSET] & _SEALED:
            found.append(key)

    async def lookup(self, payload: bytes) -> bytes:
        parent, size = _WORDS.unpack_from(payload)
        name = payload[_WORDS.size : _WORDS.size + size]
        if not 0 < size <= NAME_MAX or len(name) != size or b"/" in name or b"\0" in name or name in (b".", b".."):
            raise Violation(f"a lookup of a name of {size} bytes")
        inode = self._namespace.lookup(InodeNumber(parent), name)
        record = self._store.index.raw(inode.inode)
        assert record is not None
        return record

    async def events(self, payload: bytes) -> bytes | _Handing:
        operation, reserved, number = _EVENTS.unpack(payload)
        if operation == _EVENTS_PATH and not reserved:
            path = self._namespace.find_path(InodeNumber(number))
            if path is None:
                raise RefusedError(errno.ENOENT, f"directory {number}: gone")
            return path[1:]
        if operation != _EVENTS_BEGIN or reserved or number:
            raise Violation(f"events with operation {operation} and inode {number}")
        fd, *place = self._clients.subscribe(self)
        return _Handing(_FEED.pack(*place), _reopen(fd, os.O_RDONLY))

    async def bad_block(self, payload: bytes) -> None:
        number, segment = _WORDS.unpack(payload)
        self._nursery.start_soon(self._clients.check_block, InodeNumber(number), segment)

    async def hits(self, payload: bytes) -> None:
        self._store.plane.uses.touch(_inodes(payload))

    async def touch(self, payload: bytes) -> None:
        self._store.plane.uses.touch(_inodes(payload), found=False)

    async def done(self, payload: bytes) -> None:
        self._store.plane.uses.done(_inodes(payload))

    async def foreign(self, payload: bytes) -> None:
        if self._clients.foreign is not None:
            self._clients.foreign.note(payload)

    async def fresh(self, payload: bytes) -> bytes:
        _end(payload, 0)
        if self._clients.foreign is not None:
            await self._clients.foreign.fresh()
        return b""

    async def foreign_lease(self, payload: bytes) -> bytes:
        if self._clients.foreign is None:
            raise Violation("a lease of other nodes' blocks in a pool that is no pod")
        return await self._clients.foreign.lease(self._lessee, payload)

    async def lease(self, payload: bytes) -> bytes:
        number, milliseconds, reserved = _LEASE.unpack_from(payload)
        inodes = Part(payload, _LEASE.size)
        if not milliseconds or reserved or not inodes.size or inodes.size % 8:
            raise Violation(f"a lease for {milliseconds} ms with {inodes.size} bytes of inodes")
        number, held = self._store.leases.take(self._lessee, number, milliseconds, inodes)
        return _WORD.pack(number) + held

    async def release(self, payload: bytes) -> bytes:
        (number,) = _WORD.unpack(payload)
        return _WORD.pack(self._store.leases.release(self._lessee, number))

    async def report(self, payload: bytes) -> None:
        if len(payload) < 8 * (_TOTALS + 1):
            raise Violation(f"a report of {len(payload)} bytes, at least {8 * (_TOTALS + 1)} are needed")
        totals = struct.unpack_from(f"<{_TOTALS + 1}Q", payload)
        if self._before is None:
            # Totals of a client that was connected before were reported on its earlier connection.
            self._before = (0,) * len(totals) if not totals[_RECONNECTS] else totals
        busy = totals[-1]
        self.reported = [*(max(0, now - before) for now, before in zip(totals[:-1], self._before, strict=False)), busy]


Handler = Callable[[_Connection, bytes], Awaitable[bytes | _Handing | None]]


@dataclass(frozen=True, slots=True)
class _Request:
    handle: Handler
    size_max: int
    answered: bool = True
    writes: bool = False


_TABLE_MAX = _WORD.size + DIRECTORIES_MAX * (_WORD.size + _SPACE_MAX + 1)
_NAMES_MAX = _WHERE.size + _SPACE_MAX + 1 + _TABLE_MAX + ITEMS_MAX * (_RESERVE.size + _WORD.size + 256)
_REQUESTS = {
    int(Type.RESERVE): _Request(_Connection.reserve, _NAMES_MAX, writes=True),
    int(Type.COMMIT): _Request(_Connection.commit, _WORD.size + ITEMS_MAX * _COMMIT.size, writes=True),
    int(Type.DELETE): _Request(_Connection.delete, _NAMES_MAX, writes=True),
    int(Type.LIST): _Request(_Connection.list_, _WHERE.size + _SPACE_MAX + 1 + 8 + 512),
    int(Type.LOOKUP): _Request(_Connection.lookup, _WORDS.size + 256),
    int(Type.EVENTS): _Request(_Connection.events, _EVENTS.size),
    int(Type.BAD_BLOCK): _Request(_Connection.bad_block, _WORDS.size, answered=False),
    int(Type.HITS): _Request(_Connection.hits, 8 * ITEMS_MAX, answered=False),
    int(Type.TOUCH): _Request(_Connection.touch, 8 * ITEMS_MAX, answered=False),
    int(Type.DONE): _Request(_Connection.done, 8 * ITEMS_MAX, answered=False),
    int(Type.FOREIGN): _Request(_Connection.foreign, 8 + ITEMS_MAX * FOREIGN_BLOCK_SIZE, answered=False),
    int(Type.FOREIGN_LEASE): _Request(_Connection.foreign_lease, _LEASE.size + FOREIGN_BLOCK_SIZE * ITEMS_MAX),
    int(Type.FRESH): _Request(_Connection.fresh, 0),
    int(Type.LEASE): _Request(_Connection.lease, _LEASE.size + 8 * ITEMS_MAX),
    int(Type.RELEASE): _Request(_Connection.release, _WORD.size),
    int(Type.REPORT): _Request(_Connection.report, 8 * 64, answered=False),
}


async def _acquire(lock: trio.Lock | trio.Semaphore) -> None:
    """At once if it is free: trio would let all other tasks run first, and a client waits for each such turn."""
    try:
        lock.acquire_nowait()
    except trio.WouldBlock:
        await lock.acquire()


def _inodes(payload: bytes) -> array.array[int]:
    numbers = array.array("Q")
    if len(payload) % numbers.itemsize:
        raise Violation(f"inodes in {len(payload)} bytes")
    numbers.frombytes(payload)
    return numbers


def _message(error: KvfsError) -> bytes:
    return str(error).encode(errors="replace")[:400]


def _reopen(fd: int, flags: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def _where(payload: bytes, allowed: Flags) -> tuple[InodeNumber, list[bytes], int, int, int]:
    """Base, the namespace's parts, count, flags, and where what follows begins."""
    base, space_size, flags, count = _WHERE.unpack_from(payload)
    if count > ITEMS_MAX or flags & ~int(allowed):
        raise Violation(f"a request of {count} items with flags 0x{flags:x}")
    parts, at = _path(payload, _WHERE.size, space_size)
    return InodeNumber(base), parts, count, flags, at


def _path(payload: bytes, at: int, size: int) -> tuple[list[bytes], int]:
    """The parts of a relative path, which may be empty, and where what follows begins."""
    path = payload[at : at + size]
    if size > _SPACE_MAX or len(path) != size:
        raise Violation(f"a path of {size} bytes")
    parts = path.split(b"/") if path else []
    if b"\0" in path or any(part in (b"", b".", b"..") or len(part) > NAME_MAX for part in parts):
        raise Violation(f"the path {path!r}")
    return parts, at + (size + 7 & ~7)


def _table(payload: bytes, at: int) -> tuple[list[list[bytes]], int]:
    """The directories that a request's items are in, and where those begin."""
    (count,) = _WORD.unpack_from(payload, at)
    at += _WORD.size
    if not 1 <= count <= DIRECTORIES_MAX:
        raise Violation(f"a table of {count} directories")
    table = []
    for _ in range(count):
        (size,) = _WORD.unpack_from(payload, at)
        parts, at = _path(payload, at + _WORD.size, size)
        table.append(parts)
    return table, at


def _listed_after(payload: bytes, at: int, pattern: re.Pattern[bytes]) -> tuple[bytes, int]:
    """The key in hex behind which a list begins, which may be empty, and where it ends."""
    (size,) = _WORD.unpack_from(payload, at)
    at += _WORD.size
    name = payload[at : at + size]
    if size and (len(name) != size or not pattern.fullmatch(name)):
        raise Violation(f"a key's name of {size} bytes: {name[:32]!r}")
    return name, at + (size + 7 & ~7)


def _end(payload: bytes, at: int) -> None:
    if at != len(payload):
        raise Violation(f"a request of {len(payload)} bytes whose items end at {at}")
