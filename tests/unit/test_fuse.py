"""The FUSE handlers: errors become errnos, nothing ever leaves a handler, listings resume at any cookie."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Coroutine
from typing import TypeVar, cast

import pyfuse3
import pytest
import trio
from test_namespace import StoreDouble

from kvfs.errors import ChecksumError
from kvfs.frontend.fuse import Operations, attributes
from kvfs.namespace.files import Namespace
from kvfs.types import ROOT_INODE, InodeNumber


class Context:
    """pyfuse3.RequestContext cannot be made from Python."""

    uid = 1000
    gid = 1000
    pid = 1
    umask = 0o22


R = TypeVar("R")
CONTEXT = cast(pyfuse3.RequestContext, Context())


@pytest.fixture
def store() -> StoreDouble:
    return StoreDouble()


@pytest.fixture
def operations(store: StoreDouble) -> Operations:
    return Operations(Namespace(store))


def call(handler: Coroutine[object, object, R]) -> R:
    async def body() -> R:
        return await handler

    return trio.run(body)


def refused(handler: Coroutine[object, object, object]) -> str:
    with pytest.raises(pyfuse3.FUSEError) as caught:
        call(handler)
    return errno.errorcode[caught.value.errno]


def test_refusals_of_the_namespace_become_errnos(operations: Operations) -> None:
    assert refused(operations.lookup(ROOT_INODE, b"none", CONTEXT)) == "ENOENT"
    assert refused(operations.getattr(99, CONTEXT)) == "ESTALE"
    assert refused(operations.open(99, os.O_WRONLY, CONTEXT)) == "ESTALE"
    assert refused(operations.open(99, os.O_RDONLY, CONTEXT)) == "ESTALE"
    assert refused(operations.link(2, ROOT_INODE, b"second", CONTEXT)) == "EPERM"
    assert refused(operations.mknod(ROOT_INODE, b"pipe", stat.S_IFIFO | 0o644, 0, CONTEXT)) == "EPERM"
    assert refused(operations.rmdir(ROOT_INODE, b"none", CONTEXT)) == "ENOENT"
    assert refused(operations.mkdir(ROOT_INODE, b"n" * 256, 0o755, CONTEXT)) == "ENAMETOOLONG"
    assert refused(operations.removexattr(ROOT_INODE, b"user.none", CONTEXT)) == "ENODATA"


def test_a_bug_in_a_handler_is_eio_and_logged(
    operations: Operations, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(self: Namespace, number: InodeNumber) -> None:
        raise IndexError("our bug")

    monkeypatch.setattr(Namespace, "look", explode)
    assert refused(operations.getattr(1, CONTEXT)) == "EIO"
    assert "our bug" in caplog.text and "Traceback" in caplog.text


def test_an_error_of_the_pool_is_logged_with_its_words(
    operations: Operations, store: StoreDouble, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(inode: InodeNumber) -> None:
        raise ChecksumError("segment 41 on nvme1: checksum 0x9f31, expected 0x11c0")

    monkeypatch.setattr(store, "seal", fail)
    with caplog.at_level(logging.WARNING):
        assert refused(operations.fsync(5, datasync=False)) == "EIO"
    assert "segment 41 on nvme1" in caplog.text


def test_a_full_inodes_refusals_are_its_callers_own_affair(
    operations: Operations, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for value in (b"x" * 4096, b"x" * 65536):
            assert refused(operations.setxattr(ROOT_INODE, b"user.large", value, CONTEXT)) == "ENOSPC"
    assert caplog.text == ""


def test_attributes_keep_nanoseconds(operations: Operations, store: StoreDouble) -> None:
    inode = Namespace(store).mkdir(ROOT_INODE, b"d", 0o755, 1, 2)
    inode.atime_ns, inode.mtime_ns, inode.ctime_ns, inode.size = 1_234_567_890_123_456_789, 5, 10**18 + 1, 1025
    entry = attributes(inode)
    assert (entry.st_atime_ns, entry.st_mtime_ns, entry.st_ctime_ns) == (1_234_567_890_123_456_789, 5, 10**18 + 1)
    assert entry.st_blocks == 3


def test_statfs_speaks_in_pages(operations: Operations) -> None:
    data = call(operations.statfs(CONTEXT))
    assert (data.f_bsize, data.f_frsize, data.f_namemax) == (4096, 4096, 255)
    assert data.f_blocks == (1 << 30) // 4096 and data.f_bavail == data.f_bfree == data.f_blocks


class Listing:
    """Stands in for the kernel's buffer: takes a few entries a reply."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, operations: Operations, directory: int) -> None:
        self.operations, self.directory, self.room = operations, directory, 0
        self.batch: list[tuple[bytes, int, int]] = []
        monkeypatch.setattr(pyfuse3, "readdir_reply", self._reply)

    def _reply(self, token: object, name: bytes, entry: pyfuse3.EntryAttributes, cookie: int) -> bool:
        if len(self.batch) == self.room:
            return False
        self.batch.append((name, stat.S_IFMT(entry.st_mode), cookie))
        return True

    def read(self, cookie: int, room: int) -> list[tuple[bytes, int, int]]:
        self.batch, self.room = [], room
        call(self.operations.readdir(self.directory, cookie, pyfuse3.ReaddirToken()))
        return self.batch


def test_listings_resume_at_every_cookie(operations: Operations, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(20):
        call(operations.mkdir(ROOT_INODE, b"%02d" % index, 0o755, CONTEXT))
    call(operations.symlink(ROOT_INODE, b"link", b"target", CONTEXT))
    listing = Listing(monkeypatch, operations, call(operations.opendir(ROOT_INODE, CONTEXT)))
    everything = listing.read(0, 100)
    assert [name for name, _, _ in everything] == [*(b"%02d" % index for index in range(20)), b"link"]
    assert everything[0][1] == stat.S_IFDIR and everything[-1][1] == stat.S_IFLNK
    for position, (_, _, cookie) in enumerate(everything):
        assert listing.read(cookie, 7) == everything[position + 1 : position + 8]
    call(operations.releasedir(ROOT_INODE))


def test_a_listing_survives_the_removal_of_what_it_has_listed(
    operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(30):
        call(operations.mkdir(ROOT_INODE, b"%02d" % index, 0o755, CONTEXT))
    listing = Listing(monkeypatch, operations, ROOT_INODE)
    seen: list[bytes] = []
    cookie = 0
    while batch := listing.read(cookie, 4):
        for name, _, _ in batch:
            seen.append(name)
            call(operations.rmdir(ROOT_INODE, name, CONTEXT))
        cookie = batch[-1][2]
    assert seen == [b"%02d" % index for index in range(30)]


def test_a_cookie_nobody_knows_is_refused(operations: Operations, monkeypatch: pytest.MonkeyPatch) -> None:
    Listing(monkeypatch, operations, ROOT_INODE)
    assert refused(operations.readdir(ROOT_INODE, 12345, pyfuse3.ReaddirToken())) == "ESTALE"
