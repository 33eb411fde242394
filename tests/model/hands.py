"""Drives one store in this process as a kernel does, and lets C, Python, or C with an empty memory change its names.

The kernel's end of a socketpair stands for /dev/fuse; the session behind the plane is pyfuse3's own, and so are Calls
and Namespace. A crash is the end of a store without seal, commit or close. Nothing here mounts.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, cast
from unittest import mock

import trio
import trio.testing
from helpers import slowness
from store_pools import LAZY, rebuilt
from test_reservations import Writer

from kvfs.frames import Next, Shards
from kvfs.frontend.calls import Calls
from kvfs.frontend.clients import _Connection
from kvfs.frontend.fuse import Session
from kvfs.lent import Part
from kvfs.names import Leave
from kvfs.namespace.files import Namespace
from kvfs.plane import EventType
from kvfs.record import Inode
from kvfs.store import blocks
from kvfs.store.segment import _STATE
from kvfs.store.segment import State as SegmentState
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber
from kvfs.upcalls import Call

IN, OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
ENTRY_SIZE = 128
ATTRIBUTES = ("ino", "size", "blocks", "atime", "mtime", "ctime", "atimensec", "mtimensec", "ctimensec", "mode",
              "nlink", "uid", "gid", "rdev", "blksize", "flags")  # fmt: skip
LOOKUP, GETATTR, SETATTR, SYMLINK, MKDIR, UNLINK, RMDIR, RENAME, OPEN, READ, WRITE, RELEASE, FSYNC = (
    1, 3, 4, 6, 9, 10, 11, 12, 14, 15, 16, 18, 20)  # fmt: skip
SETXATTR, REMOVEXATTR, FLUSH, INIT, CREATE, RENAME2 = 21, 24, 25, 26, 35, 45
SET_MODE, SET_UID, SET_GID, SET_SIZE, SET_ATIME, SET_MTIME, SET_MTIME_NOW = 1, 2, 4, 8, 16, 32, 256
# enum kvfs_fault: the end of a write is told only when the fault is over.
HOLD, NO_FAULT, WRITES = 6, 0, 2
# A directory's times change once in 4 ms (native/src/content/names_changes.c).
TIME_STEP_S = 0.0042
# Times before a history that nobody has set: of the pool's folder.
LONG_BEFORE_NS = 10**18
DEADLINE_S = 30.0
# Beyond the numbers that a machine gives.
PROCESSES = 1 << 23
# Of one WRITE: a socket takes no more.
WRITE_SIZE = 64 << 10


class Side(StrEnum):
    """The code that changes names."""

    C = "C"
    PYTHON = "Python"  # C's threads are held off: Python brings, seals, and has C change names
    BARE = "C with an empty memory"  # nothing that is as the index has it stays in memory


# Changes that C or Python makes, by opcode. Native clients' are put and delete.
KINDS = {CREATE: "create", UNLINK: "unlink", RENAME: "rename", RENAME2: "rename", FLUSH: "seal"}


class CountedCalls(Calls):
    """Calls, and how many came of each kind."""

    python: collections.Counter[str]

    def take(self, call: Call) -> None:
        self.python[KINDS[call.opcode]] += 1
        super().take(call)


class Answered:
    """How many changes of each kind C has made, and how many came to Python.

    A request that was refused before counts for neither."""

    def __init__(self) -> None:
        self.c: collections.Counter[str] = collections.Counter()
        self.python: collections.Counter[str] = collections.Counter()

    def __str__(self) -> str:
        return f"C {dict(self.c)}, Python {dict(self.python)}"


class Refused(OSError):
    """The kernel's answer to a request is an error."""


State = dict[str, Any]


class Hand:
    """One pool, the requests that are made of it, and what is found in it afterwards."""

    store: Store
    namespace: Namespace

    def __init__(self, pool: Path, side: Side, journal: int | None = None) -> None:
        self.pool, self.side, self.journal = pool, side, journal
        self.answered = Answered()
        self.unique = 2
        # Who asks. Chains of blocks depend on the time between two stores of a process: each operation is another's.
        self.process = PROCESSES
        # When each operation began; the first is that of the history.
        self.began: list[int] = []
        self.handles: dict[str, tuple[int, int]] = {}
        self._answers: dict[int, tuple[int, bytes]] = {}
        self._writer: Writer | None = None
        # A FLUSH whose block's write does not end.
        self._sealing: int | None = None

    # ---- lives ----

    def live(self, work: Callable[[Hand], Awaitable[None]], *, crash: bool = False) -> None:
        """Open the store, work, and close it, or end as by a kill."""
        options = replace(LAZY, journal=self.journal, on_event=self._on_event)
        self.handles.clear()
        # A replaced block lingers until settle(), however long that takes.
        with mock.patch.object(blocks, "_LINGER_S", 0.0):
            trio.run(self._live, work, crash, options)

    async def _live(self, work: Callable[[Hand], Awaitable[None]], crash: bool, options: Any) -> None:
        with trio.fail_after(DEADLINE_S * slowness()):
            async with Store.open(self.pool, options) as store:
                await rebuilt(store)
                self.store, self.namespace = store, Namespace(store)
                self._namespace = self.namespace  # as a client's connection has it
                self._writer = None
                await self._serve(work)
                if crash:
                    store._close_cleanly = trio.lowlevel.checkpoint  # type: ignore[method-assign]

    async def _serve(self, work: Callable[[Hand], Awaitable[None]]) -> None:
        store, (kernel, device) = self.store, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kernel.setblocking(False)
        self.fuse = trio.socket.from_stdlib_socket(kernel)
        store.plane.fuse_add(device.detach())
        session = Session(self.namespace, store.plane.session_open())
        calls = CountedCalls(self.namespace, store.plane)
        calls.python = self.answered.python
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.run)
                await nursery.start(calls.run)
                self._hold_off()
                await self.request(INIT, 0, struct.pack("<IIII", 7, 45, 1 << 17, 0) + bytes(48))
                await work(self)
                session.stop()
                nursery.cancel_scope.cancel()
        finally:
            session.close()
            self.fuse.close()

    def _hold_off(self) -> None:
        names = self.store.plane.names
        if self.side == Side.PYTHON:
            names.leave(Leave.CLOSED, True)
        elif self.side == Side.BARE:
            names.limit(0, 0)
            names.forget()

    def _on_event(self, kind: int, inode: int, value: int) -> None:
        if kind == EventType.IDLE:
            self.namespace.idle(InodeNumber(inode))

    # ---- requests ----

    async def send(self, opcode: int, node: int, body: bytes = b"", user: int = 0) -> int:
        self.unique += 2
        await self.fuse.send(
            IN.pack(IN.size + len(body), opcode, self.unique, node, user, user, self.process, 0, 0) + body
        )
        return self.unique

    async def receive(self, unique: int) -> bytes:
        await self.arrived(unique, float("inf"))
        error, answer = self._answers.pop(unique)
        if error:
            raise Refused(error, errno.errorcode.get(error, str(error)))
        return answer

    async def arrived(self, unique: int, timeout_s: float) -> bool:
        """Whether the answer is there, or comes in time."""
        with trio.move_on_after(timeout_s):
            while unique not in self._answers:
                data = await self.fuse.recv(1 << 21)
                _, error, of = OUT.unpack_from(data)
                self._answers[of] = -error, data[OUT.size :]
        return unique in self._answers

    async def request(self, opcode: int, node: int, body: bytes = b"", user: int = 0) -> bytes:
        with self.counted(opcode):
            return await self.receive(await self.send(opcode, node, body, user))

    @contextmanager
    def counted(self, opcode: int) -> Iterator[None]:
        """Count a request that succeeds for C, unless it comes to Python."""
        kind = KINDS.get(opcode, "")
        python, sealed = self.answered.python[kind], self.sealed_by_c
        yield
        by_c = self.sealed_by_c > sealed if kind == "seal" else kind and self.answered.python[kind] == python
        self.answered.c[kind] += bool(by_c)

    @property
    def sealed_by_c(self) -> int:
        return self.store.plane.statistics()["flushes_sealed"]

    async def quiet(self) -> None:
        """Return when nothing goes on in the background that the last requests have begun."""
        plane, segments = self.store.plane, self.store.segments
        while True:
            await self.request(
                GETATTR, ROOT_INODE, bytes(16)
            )  # the one thread of the transport has ended what was before
            await trio.testing.wait_all_tasks_blocked()
            if self._sealing is not None or not (plane.jobs or segments.runs_in_flight()):
                return
            await trio.sleep(0.0005)

    # ---- paths ----

    async def node(self, path: str) -> int:
        """The inode that the path leads to, by LOOKUPs."""
        number = int(ROOT_INODE)
        for name in path.strip("/").split("/"):
            if name:
                (number,) = struct.unpack_from("<Q", await self.request(LOOKUP, number, name.encode() + b"\0"))
        return number

    async def where(self, path: str) -> tuple[int, bytes]:
        """The directory of a path, and its last name."""
        above, _, name = path.rpartition("/")
        return await self.node(above), name.encode() + b"\0"

    def open_as(self, label: str) -> tuple[int, int]:
        if label not in self.handles:
            raise Refused(errno.EBADF, f"no handle {label}")
        return self.handles[label]

    # ---- operations: each is done by its name ----

    async def create(self, path: str, mode: int = 0o644, flags: int = os.O_RDWR, user: int = 0) -> None:
        """The handle has the path's name."""
        parent, name = await self.where(path)
        body = struct.pack("<IIII", flags | os.O_CREAT, 0o100000 | mode, 0, 0) + name
        answer = await self.request(CREATE, parent, body, user)
        (node,), (fh,) = struct.unpack_from("<Q", answer), struct.unpack_from("<Q", answer, ENTRY_SIZE)
        self.handles[path] = node, fh

    async def open(self, path: str, label: str, flags: int = os.O_RDONLY) -> None:
        node = await self.node(path)
        (fh,) = struct.unpack_from("<Q", await self.request(OPEN, node, struct.pack("<II", flags, 0)))
        self.handles[label] = node, fh

    async def write(self, label: str, offset: int, size: int, letter: str = "x") -> None:
        node, fh = self.open_as(label)
        for at in range(offset, offset + size, WRITE_SIZE):
            data = letter.encode() * min(WRITE_SIZE, offset + size - at)
            await self.request(WRITE, node, struct.pack("<QQIIQII", fh, at, len(data), 0, 0, 0, 0) + data)

    async def read(self, label: str, offset: int, size: int) -> bytes:
        node, fh = self.open_as(label)
        return await self.request(READ, node, struct.pack("<QQIIQII", fh, offset, size, 0, 0, 0, 0))

    async def seal(self, label: str) -> None:
        """FLUSH: the close(2) of a handle that goes on."""
        node, fh = self.open_as(label)
        await self.request(FLUSH, node, struct.pack("<QIIQ", fh, 0, 0, 0))

    async def release(self, label: str) -> None:
        node, fh = self.open_as(label)
        del self.handles[label]
        await self.request(RELEASE, node, struct.pack("<QIIQ", fh, 0, 0, 0))

    async def close(self, label: str) -> None:
        """As close(2) of the last descriptor does."""
        await self.seal(label)
        await self.release(label)

    async def fsync(self, label: str) -> None:
        node, fh = self.open_as(label)
        await self.request(FSYNC, node, struct.pack("<QII", fh, 0, 0))

    async def store_file(self, path: str, size: int, letter: str = "x", user: int = 0) -> None:
        await self.create(path, user=user)
        if size:
            await self.write(path, 0, size, letter)
        await self.close(path)

    async def unlink(self, path: str) -> None:
        await self.request(UNLINK, *await self.where(path))

    async def rename(self, old: str, new: str, flags: int = 0) -> None:
        parent, name = await self.where(old)
        new_parent, new_name = await self.where(new)
        if flags:
            await self.request(RENAME2, parent, struct.pack("<QII", new_parent, flags, 0) + name + new_name)
        else:
            await self.request(RENAME, parent, struct.pack("<Q", new_parent) + name + new_name)

    async def mkdir(self, path: str, mode: int = 0o755) -> None:
        parent, name = await self.where(path)
        await self.request(MKDIR, parent, struct.pack("<II", mode, 0) + name)

    async def rmdir(self, path: str) -> None:
        await self.request(RMDIR, *await self.where(path))

    async def symlink(self, path: str, target: str) -> None:
        parent, name = await self.where(path)
        await self.request(SYMLINK, parent, name + target.encode() + b"\0")

    async def set(self, path: str, **changes: int) -> None:
        """chmod(2), chown(2), utimensat(2), truncate(2): mode, uid, gid, size, atime_ns, mtime_ns; mtime_ns -1: now."""
        await self._set(await self.node(path), changes)

    async def set_open(self, label: str, **changes: int) -> None:
        """As set(), of what a handle leads to, which may have no name."""
        await self._set(self.open_as(label)[0], changes)

    async def _set(self, node: int, changes: dict[str, int]) -> None:
        bits = {"mode": SET_MODE, "uid": SET_UID, "gid": SET_GID, "size": SET_SIZE, "atime_ns": SET_ATIME,
                "mtime_ns": SET_MTIME}  # fmt: skip
        valid = sum(bits[name] for name in changes)
        mtime = changes.get("mtime_ns", 0)
        if mtime < 0:
            valid |= SET_MTIME_NOW
            mtime = time.time_ns()
        atime = changes.get("atime_ns", 0)
        await self.request(SETATTR, node, struct.pack(
            "<IIQQQQQQIIIIIIII", valid, 0, 0, changes.get("size", 0), 0, atime // 10**9, mtime // 10**9, 0,
            atime % 10**9, mtime % 10**9, 0, changes.get("mode", 0), 0, changes.get("uid", 0), changes.get("gid", 0), 0,
        ))  # fmt: skip

    async def set_attribute(self, path: str, name: str, value: str) -> None:
        data = value.encode()
        body = struct.pack("<II", len(data), 0) + name.encode() + b"\0" + data
        await self.request(SETXATTR, await self.node(path), body)

    async def remove_attribute(self, path: str, name: str) -> None:
        await self.request(REMOVEXATTR, await self.node(path), name.encode() + b"\0")

    async def pin(self, path: str, on: bool = True) -> None:
        await self.set_attribute(path, "user.kvfs.pin", "1" if on else "0")

    # ---- a seal that takes its time ----

    async def begin_seal(self, label: str) -> None:
        """FLUSH, whose block's write does not end until end_seal(): what comes between comes during the seal."""
        node, fh = self.open_as(label)
        await self.quiet()  # no segment is being prepared, whose header would be held
        self._fault(HOLD)
        self._sealed_before = self.sealed_by_c
        self._sealing = await self.send(FLUSH, node, struct.pack("<QIIQ", fh, 0, 0, 0))
        while not self.store.blocks.versions.all_in_flight() and not await self.arrived(self._sealing, 0.0005):
            pass

    async def end_seal(self) -> bool:
        """Whether there was something to seal."""
        if self._sealing is None:
            raise Refused(errno.EINVAL, "no seal")
        under_way = not await self.arrived(self._sealing, 0)
        assert under_way == bool(self.store.blocks.versions.all_in_flight())
        self._fault(NO_FAULT)
        unique, self._sealing = self._sealing, None
        await self.receive(unique)
        self.answered.c["seal"] += self.sealed_by_c > self._sealed_before
        return under_way

    def _fault(self, fault: int) -> None:
        for device in range(len(self.store.devices)):
            self.store.plane.fault_set(device, fault, WRITES, 1, 0)

    # ---- native clients ----

    @property
    def writer(self) -> Writer:
        if self._writer is None:
            self._writer = Writer(self.store)
        return self._writer

    async def put(self, path: str, size: int, letter: str = "x") -> int:
        """Reserve, write and commit one block; the error, or 0."""
        parent, name = await self.where(path)
        asked = []

        def make_way(block: Inode) -> Inode | None:
            asked.append(block)
            return self.namespace.make_way(block)

        self.writer.namespace.make_way = make_way  # type: ignore[method-assign]
        (place,) = await self.writer.reserve([name[:-1]], size, parent)
        if isinstance(place, int):
            return place
        await self.writer.write(place, letter.encode())
        (error,) = await self.writer.commit(place)
        (self.answered.python if asked else self.answered.c)["put"] += not error
        return error

    async def delete(self, path: str) -> bool:
        """As Clients does: what C leaves is removed by the namespace (kvfs/frontend/clients.py)."""
        parent, name = await self.where(path)
        shards = Shards()
        for number in range(256):
            shards[number].directory = parent
        item = struct.pack("<II", len(name) - 1, 0) + name[:-1] + bytes(-(len(name) - 1) % 8)
        frame = self.store.plane.frames.delete(Part(item), 1, shards, 0)
        by_c = True
        while (found := frame.go()) != Next.DONE:
            self.store.segments.take_notes()
            if found == Next.NAMES:
                by_c = False
                directory, left = frame.name()
                frame.item(_Connection._delete(cast(Any, self), InodeNumber(directory), left))
        self.store.segments.take_notes()
        self.store.blocks.tell_hosts()
        deleted = bool(frame.answer()[0])
        (self.answered.c if by_c else self.answered.python)["delete"] += deleted
        return deleted

    # ---- the store's own work ----

    async def evict(self, *paths: str) -> int:
        """The evictor's step, of these blocks in the segment of the first. Returns how many went."""
        inodes = [self.store.index.get(InodeNumber(await self.node(path))) for path in paths]
        blocks = [inode for inode in inodes if inode is not None and inode.sealed]
        if not blocks:
            return 0
        home = self.store.segments.all[blocks[0].segment]
        return self.store.blocks.evict(home, [block.inode for block in blocks]).blocks

    async def commit(self) -> None:
        await self.store.blocks.commit()
        if self.side == Side.BARE:
            self.store.plane.names.forget()

    async def settle(self) -> None:
        """A turn of the store's commits, summaries and housekeeping."""
        await self.store._commit_and_flush()
        await self.store.pins.count()
        if self.side == Side.BARE:
            self.store.plane.names.forget()

    async def tell(self) -> None:
        """Hosts hear of evictions."""
        self.store.blocks.tell_hosts()

    # ---- what is found ----

    def time_of(self, time_ns: int) -> str | int:
        """As the operation that it is of; a time that somebody has set is itself."""
        if self.began and time_ns >= self.began[0]:
            number = max(i for i, began in enumerate(self.began) if began <= time_ns)
            return f"operation {number}"
        return time_ns if time_ns < LONG_BEFORE_NS else "before"

    async def behind(self, path: str) -> str | None:
        """The path of the block before it in its chain."""
        number = self.store.plane.uses.parent(await self.node(path))
        return next((path for path, inode in self.walk().items() if inode.inode == number), None)

    def record(self, inode: Inode) -> State:
        """All that a record says."""
        return {
            "inode": inode.inode, "parent": inode.parent, "name": inode.name, "kind": inode.kind.name,
            "mode": oct(inode.mode), "uid": inode.uid, "gid": inode.gid, "nlink": inode.nlink,
            "flags": str(inode.flags), "version": inode.version,
            "size": inode.size, "generation": inode.generation, "segment": inode.segment,
            "page": inode.page, "header_pages": inode.header_pages, "mtime": self.time_of(inode.mtime_ns),
            "ctime": self.time_of(inode.ctime_ns), "atime": self.time_of(inode.atime_ns), "extents": inode.extents,
            "xattrs": tuple(sorted(inode.xattrs.items())),
        }  # fmt: skip

    async def attributes(self, number: int) -> State:
        """The attributes as the block table and the file being written have them."""
        try:
            answer = await self.request(GETATTR, number, bytes(16))
        except Refused as error:
            return {"errno": error.errno}
        found = dict(zip(ATTRIBUTES, ATTR.unpack_from(answer, 16), strict=True))
        for name in ("atime", "mtime", "ctime"):
            found[name] = self.time_of(found[name] * 10**9 + found.pop(f"{name}nsec"))  # type: ignore[assignment]
        return found

    def walk(self) -> dict[str, Inode]:
        """All that has a name, by path, and the root."""
        found: dict[str, Inode] = {}
        index = self.store.index

        def below(number: InodeNumber, path: str) -> None:
            inode = index.get(number)
            assert inode is not None, path
            found[path or "/"] = inode
            if inode.kind.name == "DIRECTORY":
                for name, child in index.list(number, b"", 10_000):
                    below(child, f"{path}/{name.decode()}")

        below(ROOT_INODE, "")
        return found

    async def look(self) -> State:
        """Records, block table, accounts, places and pins, flat. Keys say what a value is of."""
        await self.quiet()
        store = self.store
        store._take_notes()
        await self.quiet()
        names, plane = store.plane.names, store.plane
        state: State = {}

        def add(of: str, values: State) -> None:
            state.update({f"{of}: {key}": value for key, value in values.items()})

        tree = self.walk()
        nameless = {
            f"nameless {n}": i for n in names.volatile() if (i := store.index.get(InodeNumber(n))) and i.nameless
        }
        for path, inode in {**tree, **nameless}.items():
            add(f"record of {path}", self.record(inode))
            add(f"table of {path}", await self.attributes(inode.inode))
            add(f"table of {path}", {
                "open": plane.inode_is_open(inode.inode), "use": plane.uses.of([inode.inode]),
            })  # fmt: skip
            if path in tree and path != "/":
                state[f"table of {path}: leads to"] = plane.table_find_name(inode.parent, inode.name)
            if inode.kind.name == "FILE" and inode.sealed:
                looks = store.blocks.look(store.segments.all[inode.segment], [inode.inode])
                state[f"look at {path}"] = [look._replace(orphan=False) for look in looks]
        add("pool", {
            "last version": names.last_version, "in flight": len(store.blocks.versions.all_in_flight()),
            "tick": store.segments.tick, "dirty": tuple(sorted(plane.dirty_files())), "lead": names.lead(),
            "pinned": tuple(store.pins.numbers()), "pinned pages": store.pins.pages,
            "volatile": tuple(sorted(names.volatile())),
        })  # fmt: skip
        add("table", {key: value for key, value in plane.table_statistics().items() if key in ("records", "blocks")})
        for user in plane.users():
            add(f"user {user.user}", {**dataclasses.asdict(user), "held": store.shares.held(user.user)})
        for segment in store.segments.all:
            if segment.next_page > 1 or segment.live_pages or segment.in_flight:
                add(f"segment {segment.index}", {
                    "state": segment.state.name, "generation": segment.generation, "next page": segment.next_page,
                    "live": segment.live_pages, "in flight": segment.in_flight, "lent": segment.lent,
                    "held": segment.held, "dirty": segment.dirty, "copy stale": segment.copy_stale,
                })  # fmt: skip
        return state

    def look_at_index(self) -> State:
        """The last commit."""
        index: Any = self.store.index
        cursor = index._read.cursor(index._inodes_db)
        records = cast("Iterator[bytes]", cursor.iternext(keys=False, values=True) if cursor.first() else ())
        state: State = {}
        for record in records:
            inode = Inode.unpack(record)
            state.update({f"index, inode {inode.inode}: {k}": v for k, v in self.record(inode).items()})
        state.update({f"index, {name!r} in {parent}": number for parent, name, number in index.dentries()})
        state["index: members"] = tuple(sorted(index.memberships()))
        state["index: pins"] = tuple(index.meta_items(b"pin:"))
        state["index: segments"] = tuple(item for item in index.segment_items() if not _is_opened_ahead(item[1]))
        return state


def _is_opened_ahead(packed: bytes) -> bool:
    """Whether nothing is in the segment yet: the commit of a moment may have one more of these, or not."""
    _, state, _, _, page, _, live, _ = _STATE.unpack(packed)
    return state == SegmentState.OPEN and page == 1 and not live


def differences(states: Sequence[State]) -> list[str]:
    """Keys whose values are not the same in all."""
    keys = sorted(set().union(*states))
    missing = "nothing"
    return [
        f"{key}: {', '.join(str(state.get(key, missing)) for state in states)}"
        for key in keys
        if len({repr(state.get(key, missing)) for state in states}) > 1
    ]
