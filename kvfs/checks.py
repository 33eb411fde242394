"""Bytes as C judges them by themselves: whether records of a device can have been written, and checksums."""

from __future__ import annotations

from array import array
from typing import cast

from kvfs._native import ffi, lib
from kvfs.errors import FormatError
from kvfs.lent import lent


def check_records(records: bytes, *, epoch_max: int, segment_count: int, end_page: int, origin: str) -> int:
    """The number of inode records. FormatError names `origin`, and the first record that no kvfs can have written."""
    limits = ffi.new("struct kvfs_record_limits *", (epoch_max, segment_count, end_page))
    at, why = ffi.new("uint64_t *"), ffi.new("const char **")
    count = lib.kvfs_records_check(limits, records, len(records), at, why)
    if count < 0:
        inode = int.from_bytes(records[at[0] + 8 : at[0] + 16], "little")
        reason = ffi.string(why[0]).decode()
        raise FormatError(f"{origin}: record at {at[0]} of {len(records)}, inode {inode}: {reason}")
    return cast(int, count)


def count_pages(records: bytes, pages: array[int]) -> None:
    """Add the pages of each sealed block, its header's included, to its segments' pages: 64 bits for each segment.
    FormatError."""
    if lib.kvfs_records_pages(records, len(records), lent(pages, "uint64_t[]"), len(pages)) < 0:
        raise FormatError(f"{len(records)} bytes of inode records: one is none, or lies beyond {len(pages)} segments")


def checksum(data: bytes | bytearray, secret: int) -> int:
    """xxh3-64 seeded with the pool's secret: the checksum of all structures on devices."""
    return cast(int, lib.kvfs_checksum(lent(data), len(data), secret))
