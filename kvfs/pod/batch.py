"""The header of a batch of news: the feed reads it, and knows nothing of the bytes behind it.

The bytes are made and applied by the data plane (native/include/kvfs_pod.h). A batch covers the numbers
[number, end). Each record has a number; a batch without records has one too, else its loss could not be seen.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAGIC = int.from_bytes(b"KVFSNEWS", "little")
VERSION = 1
HEADER = struct.Struct("<QIIQQQHHHHII")
assert HEADER.size == 56


@dataclass(frozen=True, slots=True)
class Header:
    version: int
    start: int
    number: int
    end: int
    slot: int


def span(record_count: int) -> int:
    """How many numbers a batch takes."""
    return max(1, record_count)


def read_header(data: bytes) -> Header | None:
    """The header; None for bytes that are no batch of news, or cut short.

    Of another version than VERSION only `version` has a meaning.
    """
    if len(data) < HEADER.size:
        return None
    magic, version, size, _, start, number, slot, _, _, _, record_count, _ = HEADER.unpack_from(data)
    if magic != MAGIC or size != len(data):
        return None
    return Header(version, start, number, number + span(record_count), slot)
