"""Calls: whatever happens each is answered once, with the errno that the session's handlers would give."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from typing import cast

import pytest
import trio
from helpers import slowness
from test_namespace import StoreDouble

from kvfs import errors
from kvfs.frontend.calls import Calls
from kvfs.namespace.files import Namespace
from kvfs.plane import Call, Plane
from kvfs.record import Kind
from kvfs.types import ROOT_INODE, InodeNumber

UNLINK, RENAME, FLUSH, CREATE = 10, 12, 25, 35
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class PlaneDouble:
    """Keeps answers, and who takes calls."""

    def __init__(self) -> None:
        self.on_call: Callable[[Call], None] | None = None
        self.answers: list[tuple[int, int, int]] = []

    def open_calls(self, on_call: Callable[[Call], None] | None) -> None:
        self.on_call = on_call

    def answer(self, number: int, error: int, inode: int = 0) -> None:
        self.answers.append((number, error, inode))


@pytest.fixture
def store() -> StoreDouble:
    return StoreDouble()


@pytest.fixture
def plane() -> PlaneDouble:
    return PlaneDouble()


def call(
    opcode: int, name: bytes = b"", new_name: bytes = b"", *, number: int = 1, inode: int = ROOT_INODE, flags: int = 0
) -> Call:
    return Call(number, opcode, inode, ROOT_INODE, flags, 0o100640, 1000, 1001, name, new_name)


def answers(store: StoreDouble, plane: PlaneDouble, calls: Sequence[Call]) -> list[tuple[str, int]]:
    """Errno and inode of each, in turn."""

    async def body() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(Calls(Namespace(store), cast(Plane, plane)).run)
            for number, item in enumerate(calls):
                assert plane.on_call is not None
                plane.on_call(item)
                with trio.fail_after(5 * slowness()):
                    while len(plane.answers) <= number:
                        await trio.sleep(0)
            nursery.cancel_scope.cancel()

    trio.run(body)
    assert plane.on_call is None
    assert len(plane.answers) == len(calls)
    return [(errno.errorcode.get(error, "ok"), inode) for _, error, inode in plane.answers]


def test_a_file_is_made_flushed_renamed_and_unlinked(store: StoreDouble, plane: PlaneDouble) -> None:
    got = answers(
        store,
        plane,
        [
            call(CREATE, b"x", flags=NEW, number=7),
            call(FLUSH, inode=2),
            call(RENAME, b"x", b"y"),
            call(UNLINK, b"y"),
            call(UNLINK, b"y"),
            call(RENAME, b"y", b"z"),
        ],
    )
    made = got[0][1]
    assert got == [("ok", made), ("ok", 0), ("ok", 0), ("ok", 0), ("ENOENT", 0), ("ENOENT", 0)]
    assert plane.answers[0][0] == 7


def test_create_of_what_is_there_opens_it_unless_that_was_excluded(store: StoreDouble, plane: PlaneDouble) -> None:
    Namespace(store).mkdir(ROOT_INODE, b"d", 0o755, 0, 0)
    (_, made), *others = answers(
        store,
        plane,
        [
            call(CREATE, b"x", flags=NEW),
            call(CREATE, b"x", flags=NEW),
            call(CREATE, b"x", flags=os.O_WRONLY),
            call(CREATE, b"d", flags=os.O_WRONLY),
            call(CREATE, b"n" * 256, flags=NEW),
        ],
    )
    assert others == [("EEXIST", 0), ("ok", made), ("EISDIR", 0), ("ENAMETOOLONG", 0)]
    inode = store.index.get(InodeNumber(made))
    assert inode is not None and (inode.kind, inode.mode, inode.uid, inode.gid) == (Kind.FILE, 0o100640, 1000, 1001)


def test_an_error_of_the_pool_is_logged_with_its_words(
    store: StoreDouble, plane: PlaneDouble, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(number: InodeNumber, done: Callable[[errors.KvfsError | None], None]) -> None:
        done(errors.ChecksumError("segment 41 on nvme1: checksum 0x9f31, expected 0x11c0"))

    monkeypatch.setattr(store, "seal_soon", fail)
    with caplog.at_level(logging.WARNING):
        assert answers(store, plane, [call(FLUSH, inode=5)]) == [("EIO", 0)]
    assert "segment 41 on nvme1" in caplog.text and "flush" in caplog.text


@pytest.mark.parametrize("late", (False, True))
def test_a_bug_is_eio_and_logged(
    store: StoreDouble,
    plane: PlaneDouble,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    late: bool,
) -> None:
    def explode(self: Namespace, *arguments: object, **words: object) -> None:
        raise IndexError("our bug")

    first = call(CREATE, b"x", flags=NEW)
    monkeypatch.setattr(Namespace, "open_for_write" if late else "unlink", explode)
    second = call(CREATE, b"x", flags=os.O_WRONLY) if late else call(UNLINK, b"x")
    assert [error for error, _ in answers(store, plane, [first, second])] == ["ok", "EIO"]
    assert "our bug" in caplog.text and "Traceback" in caplog.text
