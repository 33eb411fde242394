"""Calls: requests of kernels that the data plane hands over as they are (struct kvfs_call)."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvfs._native import ffi

FUSE_FLUSH, FUSE_READDIR, FUSE_READDIRPLUS = 25, 28, 44  # linux/fuse.h


class Call(NamedTuple):
    """struct kvfs_call: a request that Python answers by answer(), perhaps later."""

    id: int
    opcode: int
    inode: int
    new_parent: int
    flags: int
    mode: int
    uid: int
    gid: int
    name: bytes
    new_name: bytes


def call_of(c: Any) -> Call:
    return Call(
        c.id, c.opcode, c.inode, c.new_parent, c.flags, c.mode, c.uid, c.gid, ffi.unpack(c.name, c.name_size),
        ffi.unpack(c.new_name, c.new_name_size),
    )  # fmt: skip
