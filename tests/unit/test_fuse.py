"""The FUSE handlers: errors become errnos, nothing ever leaves a handler."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Coroutine
from typing import cast

import pyfuse3
import pytest
from store_pools import in_store

from kvfs.errors import ChecksumError
from kvfs.frontend.fuse import Operations, attributes
from kvfs.namespace.files import Namespace
from kvfs.store.store import Store
from kvfs.types import ROOT_INODE, InodeNumber


class Context:
    """pyfuse3.RequestContext cannot be made from Python."""

    uid = 1000
    gid = 1000
    pid = 1
    umask = 0o22


CONTEXT = cast(pyfuse3.RequestContext, Context())


async def refused(handler: Coroutine[object, object, object]) -> str:
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await handler
    return errno.errorcode[caught.value.errno]


@in_store
async def test_refusals_of_the_namespace_become_errnos(store: Store, namespace: Namespace) -> None:
    operations = Operations(namespace)
    assert await refused(operations.lookup(ROOT_INODE, b"none", CONTEXT)) == "ENOENT"
    assert await refused(operations.getattr(99, CONTEXT)) == "ESTALE"
    assert await refused(operations.open(99, os.O_WRONLY, CONTEXT)) == "ESTALE"
    assert await refused(operations.open(99, os.O_RDONLY, CONTEXT)) == "ESTALE"
    assert await refused(operations.link(2, ROOT_INODE, b"second", CONTEXT)) == "EPERM"
    assert await refused(operations.mknod(ROOT_INODE, b"pipe", stat.S_IFIFO | 0o644, 0, CONTEXT)) == "EPERM"
    assert await refused(operations.rmdir(ROOT_INODE, b"none", CONTEXT)) == "ENOENT"
    assert await refused(operations.mkdir(ROOT_INODE, b"n" * 256, 0o755, CONTEXT)) == "ENAMETOOLONG"
    assert await refused(operations.removexattr(ROOT_INODE, b"user.none", CONTEXT)) == "ENODATA"


@in_store
async def test_a_bug_in_a_handler_is_eio_and_logged(
    store: Store, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    operations = Operations(namespace)

    def explode(self: Namespace, number: InodeNumber) -> None:
        raise IndexError("our bug")

    monkeypatch.setattr(Namespace, "look", explode)
    assert await refused(operations.getattr(1, CONTEXT)) == "EIO"
    assert "our bug" in caplog.text and "Traceback" in caplog.text


@in_store
async def test_an_error_of_the_pool_is_logged_with_its_words(
    store: Store, namespace: Namespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    operations = Operations(namespace)

    async def fail(inode: InodeNumber) -> None:
        raise ChecksumError("segment 41 on nvme1: checksum 0x9f31, expected 0x11c0")

    monkeypatch.setattr(store.sealing, "seal", fail)
    with caplog.at_level(logging.WARNING):
        assert await refused(operations.fsync(5, datasync=False)) == "EIO"
    assert "segment 41 on nvme1" in caplog.text


@in_store
async def test_a_full_inodes_refusals_are_its_callers_own_affair(
    store: Store, namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    operations = Operations(namespace)
    with caplog.at_level(logging.WARNING):
        for value in (b"x" * 4096, b"x" * 65536):
            assert await refused(operations.setxattr(ROOT_INODE, b"user.large", value, CONTEXT)) == "ENOSPC"
    assert caplog.text == ""


@in_store
async def test_attributes_keep_nanoseconds(store: Store, namespace: Namespace) -> None:
    inode = namespace.mkdir(ROOT_INODE, b"d", 0o755, 1, 2)
    inode.atime_ns, inode.mtime_ns, inode.ctime_ns, inode.size = 1_234_567_890_123_456_789, 5, 10**18 + 1, 1025
    entry = attributes(inode)
    assert (entry.st_atime_ns, entry.st_mtime_ns, entry.st_ctime_ns) == (1_234_567_890_123_456_789, 5, 10**18 + 1)
    assert entry.st_blocks == 3


@in_store
async def test_statfs_speaks_in_pages(store: Store, namespace: Namespace) -> None:
    operations = Operations(namespace)
    data = await operations.statfs(CONTEXT)
    assert (data.f_bsize, data.f_frsize, data.f_namemax) == (4096, 4096, 255)
    assert data.f_blocks == store.space().size // 4096 and 0 < data.f_bavail == data.f_bfree <= data.f_blocks
