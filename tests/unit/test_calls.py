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
from store_pools import in_store

from kvfs import errors
from kvfs.frontend.calls import Calls
from kvfs.namespace.files import Namespace
from kvfs.plane import Plane
from kvfs.record import Kind
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber
from kvfs.upcalls import Call

UNLINK, RENAME, FLUSH, READDIR, CREATE = 10, 12, 25, 28, 35
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class ListingsDouble:
    """Keeps what was brought for listings. Of those in `gone`, C finds none any more."""

    def __init__(self, answers: list[tuple[int, int, int]]) -> None:
        self.brought: list[list[tuple[bytes, int]]] = []
        self.ends: list[bool] = []
        self.gone: set[bytes] = set()
        self._answers = answers

    def answer(self, number: int, names: Sequence[bytes], inodes: Sequence[int], *, end: bool) -> bool:
        self.brought.append(list(zip(names, inodes, strict=True)))
        self.ends.append(end)
        if names and self.gone >= set(names) and not end:
            return False
        self._answers.append((number, 0, 0))
        return True


class PlaneDouble:
    """Keeps answers, and who takes calls."""

    def __init__(self) -> None:
        self.on_call: Callable[[Call], None] | None = None
        self.answers: list[tuple[int, int, int]] = []
        self.listings = ListingsDouble(self.answers)

    def open_calls(self, on_call: Callable[[Call], None] | None) -> None:
        self.on_call = on_call

    def answer(self, number: int, error: int, inode: int = 0) -> None:
        self.answers.append((number, error, inode))


def call(
    opcode: int, name: bytes = b"", new_name: bytes = b"", *, number: int = 1, inode: int = ROOT_INODE, flags: int = 0
) -> Call:
    return Call(number, opcode, inode, ROOT_INODE, flags, 0o100640, 1000, 1001, name, new_name)


async def answers(namespace: Namespace, plane: PlaneDouble, calls: Sequence[Call]) -> list[tuple[str, int]]:
    """Errno and inode of each, in turn."""
    async with trio.open_nursery() as nursery:
        await nursery.start(Calls(namespace, cast(Plane, plane)).run)
        for number, item in enumerate(calls):
            assert plane.on_call is not None
            plane.on_call(item)
            with trio.fail_after(5 * slowness()):
                while len(plane.answers) <= number:
                    await trio.sleep(0)
        nursery.cancel_scope.cancel()
    assert plane.on_call is None
    assert len(plane.answers) == len(calls)
    return [(errno.errorcode.get(error, "ok"), inode) for _, error, inode in plane.answers]


@in_store
async def test_a_file_is_made_flushed_renamed_and_unlinked(store: Store, namespace: Namespace) -> None:
    first, plane = PlaneDouble(), PlaneDouble()
    ((error, number),) = await answers(namespace, first, [call(CREATE, b"x", flags=NEW, number=7)])
    assert error == "ok" and first.answers[0][0] == 7
    asked = [
        call(FLUSH, inode=number), call(RENAME, b"x", b"y"), call(UNLINK, b"y"), call(UNLINK, b"y"),
        call(RENAME, b"y", b"z"),
    ]  # fmt: skip
    got = await answers(namespace, plane, asked)
    assert got == [("ok", 0), ("ok", 0), ("ok", 0), ("ENOENT", 0), ("ENOENT", 0)]


@in_store
async def test_create_of_what_is_there_opens_it_unless_that_was_excluded(store: Store, namespace: Namespace) -> None:
    plane = PlaneDouble()
    namespace.mkdir(ROOT_INODE, b"d", 0o755, 0, 0)
    (_, made), *others = await answers(
        namespace,
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


@in_store
async def test_an_error_of_the_pool_is_logged_with_its_words(
    store: Store, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plane = PlaneDouble()

    def fail(number: InodeNumber, done: Callable[[errors.KvfsError | None], None]) -> None:
        done(errors.ChecksumError("segment 41 on nvme1: checksum 0x9f31, expected 0x11c0"))

    monkeypatch.setattr(store.sealing, "seal_soon", fail)
    with caplog.at_level(logging.WARNING):
        assert await answers(namespace, plane, [call(FLUSH, inode=5)]) == [("EIO", 0)]
    assert "segment 41 on nvme1" in caplog.text and "flush" in caplog.text


@pytest.mark.parametrize("late", (False, True))
@in_store
async def test_a_bug_is_eio_and_logged(
    store: Store, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, late: bool
) -> None:
    plane = PlaneDouble()

    def explode(self: Namespace, *arguments: object, **words: object) -> None:
        raise IndexError("our bug")

    first = call(CREATE, b"x", flags=NEW)
    monkeypatch.setattr(Namespace, "open_for_write" if late else "unlink", explode)
    second = call(CREATE, b"x", flags=os.O_WRONLY) if late else call(UNLINK, b"x")
    assert [error for error, _ in await answers(namespace, plane, [first, second])] == ["ok", "EIO"]
    assert "our bug" in caplog.text and "Traceback" in caplog.text


# ---- listings ----


async def listed(
    namespace: Namespace, plane: PlaneDouble, asked: Sequence[tuple[int, bytes]], remove: Sequence[bytes] = ()
) -> list[tuple[str, list[tuple[bytes, int]]]]:
    """Errno of each, by cookie and last name, and all names that were brought for it. After the first the names in
    `remove` go."""
    found: list[tuple[str, list[tuple[bytes, int]]]] = []
    plane.answers.clear()

    async with trio.open_nursery() as nursery:
        await nursery.start(Calls(namespace, cast(Plane, plane)).run)
        for cookie, name in asked:
            plane.listings.brought.clear()
            assert plane.on_call is not None
            plane.on_call(Call(1, READDIR, ROOT_INODE, cookie, 0, 0, 1000, 1001, name, b""))
            error = plane.answers.pop()[1]
            found.append((errno.errorcode.get(error, "ok"), [item for page in plane.listings.brought for item in page]))
            for gone in remove if len(found) == 1 else ():
                namespace.rmdir(ROOT_INODE, gone)
        nursery.cancel_scope.cancel()
    return found


def made(namespace: Namespace, count: int) -> list[tuple[bytes, int]]:
    return [
        (b"%04d" % index, namespace.mkdir(ROOT_INODE, b"%04d" % index, 0o755, 1, 1).inode) for index in range(count)
    ]


@in_store
async def test_listings_resume_at_every_cookie_and_behind_every_name(store: Store, namespace: Namespace) -> None:
    plane = PlaneDouble()
    everything = made(namespace, 20)
    (first,) = await listed(namespace, plane, [(0, b"")])
    assert first == ("ok", everything) and plane.listings.ends == [True]
    for position, (name, cookie) in enumerate(everything):
        assert (
            await listed(namespace, plane, [(cookie, b""), (cookie, name)]) == [("ok", everything[position + 1 :])] * 2
        )
    assert await listed(namespace, plane, [(12345, b"0012x")]) == [("ok", everything[13:])], (
        "a name that C knows is believed"
    )


@in_store
async def test_a_listing_goes_on_behind_what_it_has_listed_and_is_gone(store: Store, namespace: Namespace) -> None:
    plane = PlaneDouble()
    everything = made(namespace, 30)
    gone = [name for name, _ in everything[:20]]
    asked = [(0, b""), *((number, b"") for _, number in everything[:20])]
    assert await listed(namespace, plane, asked, gone) == [("ok", everything), *[("ok", everything[20:])] * 20]


@in_store
async def test_a_page_of_which_all_is_gone_by_now_is_followed_by_the_next(store: Store, namespace: Namespace) -> None:
    plane = PlaneDouble()
    everything = made(namespace, 1500)
    plane.listings.gone = {name for name, _ in everything[:1024]}
    assert await listed(namespace, plane, [(0, b"")]) == [("ok", everything)] and plane.listings.ends == [False, True]


@in_store
async def test_a_cookie_that_nobody_knows_is_refused(store: Store, namespace: Namespace) -> None:
    plane = PlaneDouble()
    inside = namespace.mkdir(namespace.mkdir(ROOT_INODE, b"d", 0o755, 1, 1).inode, b"x", 0o755, 1, 1)
    assert await listed(namespace, plane, [(12345, b""), (inside.inode, b"")]) == [("ESTALE", []), ("ESTALE", [])]
