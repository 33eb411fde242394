"""A guest that outlives daemons brings their numbers to the next: none of them is another's."""

from __future__ import annotations

import errno
import os
import struct

import front_end
import pytest
from helpers import Pool, relayed

OPEN, READ, WRITE, RELEASE, FLUSH = 14, 15, 16, 18, 25
RELEASEDIR, SETATTR = 29, 4


@pytest.fixture
def pool(own_pool) -> Pool:
    """A pool that is not mounted yet."""
    return own_pool(files=2, size="128M", started=False)


def export(pool: Pool) -> None:
    pool.command("export", str(pool.path), "--virtiofs", f"{pool.base / 'guest.sock'},tag=kv")


def test_a_handle_of_an_earlier_daemon_closes_nothing(pool):
    export(pool)
    with relayed(pool) as kept, front_end.Guest(kept) as guest:

        def create(name: bytes) -> tuple[int, int]:
            error, body = guest.ask(
                front_end.CREATE, 1, struct.pack("<IIII", os.O_RDWR | os.O_CREAT, 0o100644, 0, 0) + name + b"\0"
            )
            assert error == 0
            return struct.unpack_from("<Q", body, 0)[0], struct.unpack_from("<Q", body, 128)[0]

        def write(inode: int, fh: int, offset: int, data: bytes) -> int:
            return guest.ask(WRITE, inode, struct.pack("<QQIIQII", fh, offset, len(data), 0, 0, 0, 0) + data)[0]

        def read(inode: int, fh: int, size: int) -> tuple[int, bytes]:
            return guest.ask(READ, inode, struct.pack("<QQIIQII", fh, 0, size, 0, 0, 0, 0))

        def flush(inode: int, fh: int) -> int:
            return guest.ask(FLUSH, inode, struct.pack("<QIIQ", fh, 0, 0, 0))[0]

        def release(inode: int, fh: int, opcode: int = RELEASE) -> None:
            assert guest.ask(opcode, inode, struct.pack("<QIIQ", fh, 0, 0, 0))[0] == 0

        old, old_fh = create(b"old")
        error, body = guest.ask(front_end.OPENDIR, 1, bytes(8))
        (old_directory,) = struct.unpack_from("<Q", body)
        assert error == 0 and write(old, old_fh, 0, b"old") == 0 and flush(old, old_fh) == 0
        pool.kill()
        export(pool)
        # The guest's kernel knows nothing of this, and has its descriptors still.
        new, new_fh = create(b"new")
        error, body = guest.ask(front_end.OPENDIR, 1, bytes(8))
        (new_directory,) = struct.unpack_from("<Q", body)
        assert write(new, new_fh, 0, b"ne") == 0
        assert not {old_fh, old_directory} & {new_fh, new_directory}
        release(old, old_fh)
        release(1, old_directory, RELEASEDIR)
        assert pool.status()["counters"]["open_handles"] == 2
        assert read(old, old_fh, 100) == (0, b"old")
        assert write(old, old_fh, 0, b"x") == write(new, old_fh, 0, b"x") == -errno.EBADF
        # ftruncate(2): FATTR_SIZE and FATTR_FH.
        cut = struct.pack("<IIQQ64x", 1 << 3 | 1 << 6, 0, old_fh, 1)
        assert guest.ask(SETATTR, old, cut)[0] == -errno.EBADF
        assert write(new, new_fh, 2, b"w") == 0 and flush(new, new_fh) == 0
        release(new, new_fh)
        release(1, new_directory, RELEASEDIR)
        assert pool.status()["counters"]["open_handles"] == 0
        assert read(new, new_fh, 100) == (0, b"new") and read(old, 0, 100) == (0, b"old")
    pool.command("umount", str(pool.path))
