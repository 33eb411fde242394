"""Hidden entries of the index: blocks with a part on a device that is away."""

from __future__ import annotations

from kvfs.record import (
    FLAGS_OFFSET,
    HOME_OFFSET,
    KIND_OFFSET,
    NUMBER_OFFSET,
    RECORD_HOME,
    RECORD_NUMBER,
    Inode,
    InodeFlags,
    Kind,
    segments_of,
)


class Hidden:
    """lost: segments on devices that are away. shown: inodes that are not hidden all the same."""

    def __init__(self) -> None:
        self.lost: frozenset[int] = frozenset()
        self.shown: set[int] = set()

    def hides(self, record: bytes) -> bool:
        if record[KIND_OFFSET] != Kind.FILE or not record[FLAGS_OFFSET] & InodeFlags.SEALED:
            return False
        home, extent_count = RECORD_HOME.unpack_from(record, HOME_OFFSET)
        if home not in self.lost and (not extent_count or self.lost.isdisjoint(segments_of(Inode.unpack(record)))):
            return False
        return not self.shown or RECORD_NUMBER.unpack_from(record, NUMBER_OFFSET)[0] not in self.shown
