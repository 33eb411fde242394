"""Requests that a kernel sends again to the next daemon: what was done is answered, and not done again.

The kernel's end of a socketpair stands for /dev/fuse, the test for pyfuse3's session. A kill is that of
test_inheritance.py. Bit 63 in a request's number says that it was sent before.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from errno import EEXIST, EIO, ENOENT, ENOTEMPTY
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from helpers import slowness
from pyfuse3 import FUSEError, RequestContext
from store_pools import LAZY, crashed_store, make_pool

from kvfs import journal
from kvfs.errors import NotFoundError
from kvfs.frontend.calls import Calls
from kvfs.frontend.fuse import Operations
from kvfs.namespace.files import Namespace
from kvfs.naming import Act, Given, Naming
from kvfs.store.blocks import Blocks
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE

_IN, _OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
INIT, MKDIR, UNLINK, RMDIR, RENAME, SYMLINK, SETXATTR, FLUSH, CREATE, WRITE = 26, 9, 10, 11, 12, 6, 21, 25, 35, 16
RESENT = 1 << 63
MODE = struct.Struct("<II")
NODE = struct.Struct("<Q")


@dataclass
class Kernel:
    """A kernel and a session before one store."""

    store: Store
    fuse: trio.socket.SocketType
    session: trio.socket.SocketType

    async def ask(self, opcode: int, node: int, body: bytes, unique: int) -> None:
        await self.fuse.send(_IN.pack(_IN.size + len(body), opcode, unique, node, 0, 0, 7, 0, 0) + body)

    async def answer(self, unique: int) -> tuple[int, bytes]:
        while True:
            data = await self.fuse.recv(1 << 20)
            _, error, of = _OUT.unpack_from(data)
            if of == unique:
                return -error, data[_OUT.size :]

    async def answered(self, opcode: int, node: int, body: bytes, unique: int) -> tuple[int, bytes]:
        await self.ask(opcode, node, body, unique)
        return await self.answer(unique)

    async def forwarded(self, opcode: int) -> tuple[int, RequestContext]:
        """The number of a request that the session has, and who asks in the eyes of pyfuse3."""
        while True:
            head = _IN.unpack_from(await self.session.recv(1 << 20))
            if head[1] == opcode:
                return head[2], cast(RequestContext, SimpleNamespace(uid=0, gid=0, pid=head[6], umask=0))

    async def session_reply(self, number: int, body: bytes = b"") -> None:
        await self.session.send(_OUT.pack(_OUT.size + len(body), 0, number) + body)

    @property
    def unanswered(self) -> int:
        fill = self.store.plane.names.journal_fill()
        assert fill is not None
        return fill.unanswered

    async def none_unanswered(self) -> None:
        """An answer is out a moment before its request is forgotten."""
        with trio.fail_after(20 * slowness()):
            while self.unanswered:
                await trio.sleep(0.001)


def ends() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def serve(pool: Path, fd: int, work: Callable[[Kernel], Awaitable[None]]) -> None:
    """Until a kill."""

    async def life(store: Store) -> None:
        kernel, device = ends()
        with kernel, trio.fail_after(60 * slowness()):
            store.plane.fuse_add(device.detach())
            session = socket.socket(fileno=store.plane.session_open())
            with session:
                for end in (kernel, session):
                    end.setblocking(False)
                there = Kernel(
                    store, trio.socket.from_stdlib_socket(kernel), trio.socket.from_stdlib_socket(session)
                )  # fmt: skip
                init = struct.pack("<IIII", 7, 45, 1 << 17, 0) + bytes(48)
                assert (await there.answered(INIT, 0, init, 2))[0] == 0
                async with trio.open_nursery() as nursery:
                    await nursery.start(Calls(Namespace(store), store.plane).run)
                    await work(there)
                    nursery.cancel_scope.cancel()

    crashed_store(pool, life, replace(LAZY, journal=fd))


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return make_pool(tmp_path / "pool")


@pytest.fixture
def kept() -> Iterator[int]:
    fd = journal.make(1 << 20)
    yield fd
    os.close(fd)


def rename_body(old: bytes, new: bytes, directory: int = ROOT_INODE) -> bytes:
    return NODE.pack(directory) + old + b"\0" + new + b"\0"


async def make_file(kernel: Kernel, name: bytes, unique: int) -> tuple[int, int]:
    """Inode and handle of a file with some bytes."""
    body = struct.pack("<IIII", os.O_RDWR | os.O_CREAT, 0o100644, 0, 0) + name + b"\0"
    error, answer = await kernel.answered(CREATE, ROOT_INODE, body, unique)
    assert error == 0
    (node,), (fh,) = NODE.unpack_from(answer), NODE.unpack_from(answer, 128)
    data = b"x" * 4096
    body = struct.pack("<QQIIQII", fh, 0, len(data), 0, 0, 0, 0) + data
    assert (await kernel.answered(WRITE, node, body, unique + 2))[0] == 0
    return node, fh


def flush_body(fh: int) -> bytes:
    return struct.pack("<QIIQ", fh, 0, 0, 0)


def of_requests(fd: int) -> list[set[int]]:
    """The requests of each step that has done one."""
    steps = journal.read(fd).steps
    assert all(entry.transport == 1 for step in steps for entry in step if entry.unique)
    assert not any(entry.unique for step in steps for entry in step[:-1])
    return [{step[-1].unique} for step in steps if step[-1].unique]


def test_a_rename_or_removal_that_was_done_is_answered_and_not_done_to_another(pool: Path, kept: int) -> None:
    """As where the answer was lost: `a` became `b`, and then somebody made another `a`."""

    async def first(kernel: Kernel) -> None:
        for i, name in enumerate((b"a", b"c")):
            node, fh = await make_file(kernel, name, 10 + 10 * i)
            assert (await kernel.answered(FLUSH, node, flush_body(fh), 14 + 10 * i))[0] == 0
        assert (await kernel.answered(RENAME, ROOT_INODE, rename_body(b"a", b"b"), 30))[0] == 0
        assert (await kernel.answered(UNLINK, ROOT_INODE, b"c\0", 32))[0] == 0
        await kernel.none_unanswered()
        assert of_requests(kept) == [{14}, {24}, {30}, {32}]
        for i, name in enumerate((b"a", b"c")):
            node, fh = await make_file(kernel, name, 40 + 10 * i)
            assert (await kernel.answered(FLUSH, node, flush_body(fh), 44 + 10 * i))[0] == 0

    async def second(kernel: Kernel) -> None:
        assert kernel.unanswered == 6
        assert (await kernel.answered(RENAME, ROOT_INODE, rename_body(b"a", b"b"), 30 | RESENT))[0] == 0
        assert (await kernel.answered(UNLINK, ROOT_INODE, b"c\0", 32 | RESENT))[0] == 0
        # Of a handle that this daemon does not have: its seal was done.
        assert (await kernel.answered(FLUSH, 1, flush_body(1), 44 | RESENT))[0] == 0
        names = Namespace(kernel.store)
        assert [name for name, _ in names.list_entries(ROOT_INODE, b"", 10)] == [b"a", b"b", b"c"]
        assert len({names.lookup(ROOT_INODE, name).inode for name in (b"a", b"b", b"c")}) == 3
        # One that was not known is done.
        assert (await kernel.answered(UNLINK, ROOT_INODE, b"c\0", 60 | RESENT))[0] == 0
        assert (await kernel.answered(UNLINK, ROOT_INODE, b"c\0", 62 | RESENT))[0] == ENOENT
        # And one that has no mark is another request, whatever its number.
        assert (await kernel.answered(UNLINK, ROOT_INODE, b"c\0", 14))[0] == ENOENT
        kernel.store.plane.names.journal_settled()
        await kernel.none_unanswered()
        assert (await kernel.answered(UNLINK, ROOT_INODE, b"c\0", 24 | RESENT))[0] == ENOENT

    serve(pool, kept, first)
    serve(pool, kept, second)


def test_the_session_s_changes_are_their_requests(pool: Path, kept: int) -> None:
    """MKDIR, SYMLINK, RMDIR and SETXATTR go by pyfuse3, whose handlers do not know the request's number."""
    entry = bytes(128)

    async def first(kernel: Kernel) -> None:
        handlers = Operations(Namespace(kernel.store))
        await kernel.ask(MKDIR, ROOT_INODE, MODE.pack(0o755, 0) + b"d\0", 10)
        number, ctx = await kernel.forwarded(MKDIR)
        made = (await handlers.mkdir(ROOT_INODE, b"d", 0o755, ctx)).st_ino
        assert kernel.unanswered == 1
        await kernel.session_reply(number, NODE.pack(made) + entry[8:])
        assert (await kernel.answer(10))[0] == 0
        await kernel.none_unanswered()
        await kernel.ask(MKDIR, ROOT_INODE, MODE.pack(0o755, 0) + b"e\0", 12)
        number, ctx = await kernel.forwarded(MKDIR)
        other = (await handlers.mkdir(ROOT_INODE, b"e", 0o755, ctx)).st_ino
        await kernel.session_reply(number, NODE.pack(other) + entry[8:])
        await kernel.ask(RMDIR, ROOT_INODE, b"e\0", 14)
        number, ctx = await kernel.forwarded(RMDIR)
        await handlers.rmdir(ROOT_INODE, b"e", ctx)
        await kernel.session_reply(number)
        await kernel.ask(SYMLINK, ROOT_INODE, b"link\0target\0", 16)
        number, ctx = await kernel.forwarded(SYMLINK)
        await handlers.symlink(ROOT_INODE, b"link", b"target", ctx)
        await kernel.ask(SETXATTR, made, MODE.pack(1, 1) + b"user.a\0x", 18)  # XATTR_CREATE
        number, ctx = await kernel.forwarded(SETXATTR)
        await handlers.setxattr(made, b"user.a", b"x", ctx)
        # This one was not done yet.
        await kernel.ask(MKDIR, ROOT_INODE, MODE.pack(0o755, 0) + b"f\0", 20)
        await kernel.forwarded(MKDIR)
        assert of_requests(kept) == [{10}, {12}, {14}, {16}, {18}]
        Namespace(kernel.store).mkdir(ROOT_INODE, b"e", 0o755, 0, 0)  # by somebody else, for no request
        assert len(of_requests(kept)) == 5

    async def second(kernel: Kernel) -> None:
        names = Namespace(kernel.store)
        error, answer = await kernel.answered(MKDIR, ROOT_INODE, MODE.pack(0o755, 0) + b"d\0", 10 | RESENT)
        assert error == 0 and NODE.unpack_from(answer)[0] == names.lookup(ROOT_INODE, b"d").inode
        assert len(answer) == 128 and struct.unpack_from("<I", answer, 40 + 60)[0] == 0o040755
        assert (await kernel.answered(RMDIR, ROOT_INODE, b"e\0", 14 | RESENT))[0] == 0
        error, answer = await kernel.answered(SYMLINK, ROOT_INODE, b"link\0target\0", 16 | RESENT)
        assert error == 0 and NODE.unpack_from(answer)[0] == names.lookup(ROOT_INODE, b"link").inode
        assert (await kernel.answered(SETXATTR, 1, MODE.pack(1, 1) + b"user.a\0x", 18 | RESENT))[0] == 0
        assert names.getxattr(names.lookup(ROOT_INODE, b"d").inode, b"user.a") == b"x"
        assert {name for name, _ in names.list_entries(ROOT_INODE, b"", 10)} == {b"d", b"e", b"link"}
        await kernel.ask(MKDIR, ROOT_INODE, MODE.pack(0o755, 0) + b"f\0", 20 | RESENT)
        number, ctx = await kernel.forwarded(MKDIR)
        await Operations(names).mkdir(ROOT_INODE, b"f", 0o755, ctx)
        await kernel.session_reply(number, NODE.pack(names.lookup(ROOT_INODE, b"f").inode) + entry[8:])
        assert (await kernel.answer(20 | RESENT))[0] == 0

    serve(pool, kept, first)
    serve(pool, kept, second)


def test_a_change_that_python_makes_for_a_call_is_its_request_s(pool: Path, kept: int) -> None:
    async def first(kernel: Kernel) -> None:
        for i, name in enumerate((b"a", b"b")):
            node, fh = await make_file(kernel, name, 10 + 10 * i)
            assert (await kernel.answered(FLUSH, node, flush_body(fh), 14 + 10 * i))[0] == 0
        # Over a name that there is Python renames.
        assert (await kernel.answered(RENAME, ROOT_INODE, rename_body(b"a", b"b"), 30))[0] == 0
        assert (await kernel.answered(RENAME, ROOT_INODE, rename_body(b"a", b"b"), 32))[0] == ENOENT
        # Below a pin Python seals.
        node, fh = await make_file(kernel, b"c", 40)
        await kernel.store.blocks.pin(ROOT_INODE)
        assert (await kernel.answered(FLUSH, node, flush_body(fh), 44))[0] == 0
        await kernel.none_unanswered()
        assert of_requests(kept) == [{14}, {24}, {30}, {44}]

    serve(pool, kept, first)


def test_a_file_whose_create_is_sent_again_is_made_anew(pool: Path, kept: int) -> None:
    """Nothing of it was sealed, so it is not there."""

    async def first(kernel: Kernel) -> None:
        await make_file(kernel, b"a", 10)

    async def second(kernel: Kernel) -> None:
        body = struct.pack("<IIII", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o100644, 0, 0) + b"a\0"
        assert (await kernel.answered(CREATE, ROOT_INODE, body, 10 | RESENT))[0] == 0
        assert (await kernel.answered(CREATE, ROOT_INODE, body, 20))[0] == EEXIST

    serve(pool, kept, first)
    serve(pool, kept, second)


def test_what_failed_after_a_change_is_not_done(pool: Path, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def first(kernel: Kernel) -> None:
        def fail(*_: object) -> None:
            raise NotFoundError("after a change")

        await kernel.ask(MKDIR, ROOT_INODE, MODE.pack(0o755, 0) + b"d\0", 10)
        _, ctx = await kernel.forwarded(MKDIR)
        with monkeypatch.context() as patch, pytest.raises(FUSEError):
            patch.setattr(Blocks, "_changed", fail)
            await Operations(Namespace(kernel.store)).mkdir(ROOT_INODE, b"d", 0o755, ctx)
        assert of_requests(kept) == []

    async def second(kernel: Kernel) -> None:
        await kernel.ask(MKDIR, ROOT_INODE, MODE.pack(0o755, 0) + b"d\0", 10 | RESENT)
        await kernel.forwarded(MKDIR)
        assert Namespace(kernel.store).lookup(ROOT_INODE, b"d").inode

    serve(pool, kept, first)
    serve(pool, kept, second)


def test_what_a_removal_changes_on_its_way_is_not_its_end(
    pool: Path, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a pod, where a directory becomes the other nodes' alone, and its removal fails. A double stands for C."""

    async def first(kernel: Kernel) -> None:
        names, go = Namespace(kernel.store), Naming.go
        made = names.mkdir(ROOT_INODE, b"d", 0o755, 0, 0)

        def changed(naming: Naming) -> int:
            another = Naming(kernel.store.plane._plane, Act.MKDIR, made.inode, b"theirs", given=Given(0o755))
            assert go(another) == 0
            another.end()
            return -ENOTEMPTY

        await kernel.ask(RMDIR, ROOT_INODE, b"d\0", 10)
        _, ctx = await kernel.forwarded(RMDIR)
        with monkeypatch.context() as patch, pytest.raises(FUSEError) as raised:
            patch.setattr(Naming, "go", changed)
            await Operations(names).rmdir(ROOT_INODE, b"d", ctx)
        assert raised.value.errno == ENOTEMPTY
        assert names.lookup(made.inode, b"theirs").inode
        assert of_requests(kept) == []

    serve(pool, kept, first)


async def fill(kernel: Kernel) -> int:
    """Directories until the journal is full, and how many."""
    names = Namespace(kernel.store)
    count = 0
    while not names.names.journal_is_full():
        names.mkdir(ROOT_INODE, b"fill%d" % count, 0o755, 0, 0)
        count += 1
    return count


@pytest.mark.parametrize("comes", [True, False])
def test_changes_wait_for_the_commit_of_a_full_journal(
    pool: Path, comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one they are EIO, and nothing is missing from the journal."""
    monkeypatch.setattr("kvfs.frontend.fuse.JOURNAL_WAIT_S", 20.0 * slowness() if comes else 0.1)
    fd = journal.make(journal.SIZE_MIN)

    async def first(kernel: Kernel) -> None:
        for i, name in enumerate((b"a", b"c")):
            node, fh = await make_file(kernel, name, 10 + 10 * i)
            assert (await kernel.answered(FLUSH, node, flush_body(fh), 14 + 10 * i))[0] == 0
        names, made = Namespace(kernel.store), await fill(kernel)
        await kernel.ask(RENAME, ROOT_INODE, rename_body(b"a", b"b"), 30)
        await kernel.ask(UNLINK, ROOT_INODE, b"c\0", 32)
        if comes:
            await trio.sleep(0.1)
            assert {names.lookup(ROOT_INODE, name).name for name in (b"a", b"c")} == {b"a", b"c"}  # they wait
            await kernel.store.blocks.commit()
        else:
            await kernel.ask(MKDIR, ROOT_INODE, MODE.pack(0o755, 0) + b"m\0", 34)
            _, ctx = await kernel.forwarded(MKDIR)
            with pytest.raises(FUSEError) as refused:
                await Operations(names).mkdir(ROOT_INODE, b"m", 0o755, ctx)
            assert refused.value.errno == EIO
        found = [_OUT.unpack_from(await kernel.fuse.recv(1 << 20)) for _ in range(2)]
        assert {unique: -error for _, error, unique in found} == dict.fromkeys((30, 32), 0 if comes else EIO)
        told = names.names.journal_fill()
        assert made > 50 and told is not None and told.lost == 0

    try:
        serve(pool, fd, first)
    finally:
        os.close(fd)
