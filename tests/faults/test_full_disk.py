"""A pool of sparse files that is larger than the disk below them, and finds it full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import helpers
import pytest
from helpers import Pool, content, requires_fuse, requires_root, run

BLOCK = 1 << 20


def put(path: Path, data: bytes) -> None:
    """Acknowledged by fsync when this returns."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
    try:
        assert os.write(fd, data) == len(data)
        os.fsync(fd)
    finally:
        os.close(fd)


@pytest.mark.timeout(180)
def test_a_full_disk_refuses_new_blocks_and_keeps_those_that_are_stored(tmp_path: Path) -> None:
    requires_root()
    requires_fuse()
    disk = tmp_path / "disk"
    disk.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=64M,mode=0755", "none", disk)
    try:
        with Pool(files=2, size="128M", base=os.fspath(disk)) as pool:
            stored: list[int] = []
            refused: list[int] = []
            for i in range(200):
                try:
                    put(pool.mount / f"block{i}", content(BLOCK, i))
                    stored.append(i)
                except OSError as error:
                    refused.append(error.errno or 0)
                    if len(refused) == 5:
                        break
            assert stored, "nothing was stored"
            assert refused == [errno.ENOSPC] * 5
            status = pool.status()
            assert [device["state"] for device in status["devices"]] == ["online", "online"]
            assert any("the disk below it is full (ENOSPC)" in text for text in status["advice"])
            assert "the disk below it is full (ENOSPC)" in (pool.path / "kvfs.log").read_text()
            for i in stored:
                helpers.assert_same((pool.mount / f"block{i}").read_bytes(), content(BLOCK, i), f"block {i}")
            run("mount", "-o", "remount,size=512M", disk)
            put(pool.mount / "more", content(BLOCK, "more"))
            pool.umount()
            assert "nothing is damaged" in pool.command("fsck", str(pool.path), "--verify-data").stdout
            pool.start()
            for i in stored:
                helpers.assert_same((pool.mount / f"block{i}").read_bytes(), content(BLOCK, i), f"block {i}")
    finally:
        run("umount", "--lazy", disk)
