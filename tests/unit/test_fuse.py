"""The FUSE handlers: errors become errnos, nothing ever leaves a handler."""

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
