"""Pages of directories' names, as the data plane answers listings from them (native/src/fuse/listing.c)."""

from __future__ import annotations

import array
import errno
from collections.abc import Sequence
from typing import Any

from kvfs._native import ffi, lib
from kvfs.lent import lent


class Listings:
    """Answers of READDIR and READDIRPLUS, which come as calls."""

    def __init__(self, plane: Any) -> None:
        """plane: struct kvfs_plane *, which is not freed before this object's last call."""
        self._plane = plane

    def answer(self, call: int, names: Sequence[bytes], inodes: Sequence[int], *, end: bool) -> bool:
        """Answer a call by names in byte order and their inodes; `end`: no more come behind them. False: all are gone
        by now, and the call needs an answer by those behind."""
        numbers, sizes = array.array("Q", inodes), bytes(map(len, names))
        kept = lent(numbers, "uint64_t[]"), lent(sizes, "uint8_t[]"), lent(b"".join(names))
        page = ffi.new("struct kvfs_listed *", (*kept, len(sizes), end))
        done = lib.kvfs_answer(self._plane, call, 0, 0, page)
        return bool(done != -errno.EAGAIN)
