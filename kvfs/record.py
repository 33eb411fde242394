"""The inode record: attributes, name, parent and extents of an inode, the same bytes in header, summary and index.

`struct kvfs_inode_record` of native/include/kvfs_format.h, which docs/format.md describes. Python's knowledge of these
bytes is here alone: whole records as Inode, and the fields that bulk work reads in place.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag

from kvfs.errors import FormatError
from kvfs.types import NAME_MAX, PAGE_SIZE, InodeNumber, SegmentIndex

# Names the group that a file belongs to; on a directory it makes the files in it a group.
GROUP_ATTRIBUTE = b"user.kvfs.group"
GROUP_NAME_MAX = 255


class Kind(IntEnum):
    FILE = 1
    DIRECTORY = 2
    SYMLINK = 3


class InodeFlags(IntFlag):
    NONE = 0
    SEALED = 1
    PINNED = 2
    REWRITTEN = 4
    NAMELESS = 8
    ASK = 16
    SLAB = 32
    BORROWED = 64


# Members are looked up here: to call Kind(number) takes a microsecond, and every request unpacks several records.
_KINDS = {int(kind): kind for kind in Kind}
_FLAGS = tuple(InodeFlags(value) for value in range(256))
_SEALED, _NAMELESS = int(InodeFlags.SEALED), int(InodeFlags.NAMELESS)


@dataclass(frozen=True, slots=True)
class Extent:
    """page_count pages of `segment` from `page` on hold a file's pages from file_page on."""

    generation: int
    segment: SegmentIndex
    page: int
    page_count: int
    file_page: int


_RECORD = struct.Struct("<IBBHQQQQQIIIIqqqIIIIIIQQ")
RECORD_EXTENT = struct.Struct("<QIIII")
RECORD_SIZE = _RECORD.size
assert RECORD_SIZE == 128 and RECORD_EXTENT.size == 24
# Unpacking a million records takes seconds. Bulk work reads these fields in place, each with its offset;
# tests/unit/test_record.py compares them with the C struct.
RECORD_HEAD = struct.Struct("<IBBHQQQQQIIII")  # record_size to extent_count
KIND_OFFSET, FLAGS_OFFSET = 4, 5
RECORD_NUMBER, NUMBER_OFFSET = struct.Struct("<Q"), 8
RECORD_NUMBERS = struct.Struct("<QQ")  # inode and parent, from NUMBER_OFFSET on
RECORD_PARENT, PARENT_OFFSET = struct.Struct("<Q"), 16
RECORD_HOME, HOME_OFFSET = struct.Struct("<I8xI"), 48  # segment and extent_count
RECORD_TIMES, TIMES_OFFSET = struct.Struct("<qq"), 64  # mtime_ns and ctime_ns
RECORD_BYTES = struct.Struct("<I")  # record_size
_NO_SEGMENT = SegmentIndex(0)
_NO_SEGMENT = SegmentIndex(0)


@dataclass(slots=True)
class Inode:
    """One inode: attributes, name and place. Mutable: a caller that changes one puts it back into the index."""

    inode: InodeNumber
    parent: InodeNumber
    name: bytes
    kind: Kind
    mode: int
    uid: int = 0
    gid: int = 0
    nlink: int = 1
    flags: InodeFlags = InodeFlags.NONE
    version: int = 0
    size: int = 0
    generation: int = 0
    segment: SegmentIndex = _NO_SEGMENT
    page: int = 0
    header_pages: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    atime_ns: int = 0
    extents: tuple[Extent, ...] = ()
    xattrs: dict[bytes, bytes] = field(default_factory=dict)

    def pack(self) -> bytes:
        """The inode record: RECORD_SIZE bytes, name, extents, xattrs, each part 8-byte aligned."""
        name = self.name.ljust(len(self.name) + 7 & ~7, b"\0")
        extents = (
            b""
            if not self.extents
            else b"".join(
                RECORD_EXTENT.pack(e.generation, e.segment, e.page, e.page_count, e.file_page) for e in self.extents
            )
        )
        xattrs = (
            b""
            if not self.xattrs
            else b"".join(struct.pack("<HI", len(key), len(value)) + key + value for key, value in self.xattrs.items())
        )
        size = RECORD_SIZE + len(name) + len(extents) + (len(xattrs) + 7 & ~7)
        head = _RECORD.pack(
            size,
            self.kind,
            self.flags,
            len(self.name),
            self.inode,
            self.parent,
            self.version,
            self.size,
            self.generation,
            self.segment,
            self.page,
            self.header_pages,
            len(self.extents),
            self.mtime_ns,
            self.ctime_ns,
            self.atime_ns,
            self.mode,
            self.uid,
            self.gid,
            self.nlink,
            len(xattrs),
            0,
            0,
            0,
        )
        return (head + name + extents + xattrs).ljust(size, b"\0")

    @property
    def record_size(self) -> int:
        """Bytes of pack()."""
        xattrs = sum(6 + len(key) + len(value) for key, value in self.xattrs.items()) if self.xattrs else 0
        return RECORD_SIZE + (len(self.name) + 7 & ~7) + len(self.extents) * RECORD_EXTENT.size + (xattrs + 7 & ~7)

    @classmethod
    def unpack(cls, data: bytes | memoryview, offset: int = 0) -> Inode:
        """Read the record at `offset`. Raises FormatError on anything a writer of this format cannot have written."""
        if len(data) - offset < RECORD_SIZE:
            raise FormatError(f"inode record at {offset}: {len(data) - offset} bytes left, {RECORD_SIZE} needed")
        (
            record_size, kind, flags, name_size, inode, parent, version, size, generation, segment, page, header_pages,
            extent_count, mtime_ns, ctime_ns, atime_ns, mode, uid, gid, nlink, xattr_size, _, _, _,
        ) = _RECORD.unpack_from(data, offset)  # fmt: skip
        name_at = offset + RECORD_SIZE
        extents_at = name_at + (name_size + 7 & ~7)
        xattrs_at = extents_at + extent_count * RECORD_EXTENT.size
        end = xattrs_at + (xattr_size + 7 & ~7)
        if record_size != end - offset or end > len(data) or name_size > NAME_MAX or kind not in _KINDS:
            raise FormatError(
                f"inode record at {offset}: record_size {record_size}, name_size {name_size}, extents {extent_count}, "
                f"xattr_size {xattr_size}, kind {kind} do not fit together in {len(data)} bytes"
            )
        extents: tuple[Extent, ...] = ()
        if extent_count:
            extents = tuple(
                Extent(g, SegmentIndex(s), p, c, f)
                for g, s, p, c, f in RECORD_EXTENT.iter_unpack(data[extents_at:xattrs_at])
            )
        xattrs: dict[bytes, bytes] = {}
        at, xattrs_end = xattrs_at, xattrs_at + xattr_size
        while at < xattrs_end:
            if at + 6 > xattrs_end:
                raise FormatError(f"inode {inode}: xattr at {at - offset} is cut off")
            key_size, value_size = struct.unpack_from("<HI", data, at)
            at += 6
            if at + key_size + value_size > xattrs_end:
                raise FormatError(f"inode {inode}: xattr at {at - offset}: {key_size} + {value_size} bytes are cut off")
            xattrs[bytes(data[at : at + key_size])] = bytes(data[at + key_size : at + key_size + value_size])
            at += key_size + value_size
        return cls(
            inode, parent, bytes(data[name_at : name_at + name_size]), _KINDS[kind], mode, uid, gid, nlink,
            _FLAGS[flags], version, size, generation, segment, page, header_pages, mtime_ns, ctime_ns, atime_ns,
            extents, xattrs,
        )  # fmt: skip

    @property
    def sealed(self) -> bool:
        return bool(self.flags._value_ & _SEALED)

    @property
    def nameless(self) -> bool:
        return bool(self.flags._value_ & _NAMELESS)

    @property
    def group(self) -> bytes:
        """The group that its extended attribute names; empty if none. A value too long for a name names none."""
        name = self.xattrs.get(GROUP_ATTRIBUTE, b"") if self.xattrs else b""
        return name if len(name) <= GROUP_NAME_MAX else b""

    @property
    def data_pages(self) -> int:
        return (self.size + PAGE_SIZE - 1) // PAGE_SIZE

    def all_extents(self) -> tuple[Extent, ...]:
        """The data's extents, the implied one included. Empty for an empty file."""
        if self.extents or not self.sealed or self.size == 0:
            return self.extents
        return (Extent(self.generation, self.segment, self.page + self.header_pages, self.data_pages, 0),)

    def copy(self) -> Inode:
        return Inode(
            self.inode, self.parent, self.name, self.kind, self.mode, self.uid, self.gid, self.nlink, self.flags,
            self.version, self.size, self.generation, self.segment, self.page, self.header_pages, self.mtime_ns,
            self.ctime_ns, self.atime_ns, self.extents, dict(self.xattrs),
        )  # fmt: skip


def segments_of(inode: Inode) -> set[int]:
    """The segments that hold the inode's header or data."""
    if not inode.sealed:
        return {extent.segment for extent in inode.extents}
    found: set[int] = {inode.segment}
    if inode.extents:
        found.update(extent.segment for extent in inode.extents)
    return found


def split_records(data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """(offset, size) of each of the concatenated records; stops before bytes that cannot be a record."""
    at, end = 0, len(data)
    while at + RECORD_SIZE <= end:
        (size,) = RECORD_BYTES.unpack_from(data, at)
        if size < RECORD_SIZE or size % 8 or at + size > end:
            return
        yield at, size
        at += size
