"""The inode record: every field that Python reads in place lies where the C struct has it."""

from __future__ import annotations

import struct

import pytest
from kvfs._native import ffi, lib

from kvfs import plane, podmap, record, types
from kvfs.frontend import wire
from kvfs.pool import geometry
from kvfs.record import Extent, Inode, InodeFlags, Kind
from kvfs.types import InodeNumber, SegmentIndex

STRUCT = "struct kvfs_inode_record"
# Name in Python: the struct of it, and the fields in C, from its offset on.
IN_PLACE = {
    "RECORD_HEAD": (0, ("record_size", "kind", "flags", "name_size", "inode", "parent", "version", "size",
                        "generation", "segment", "page", "header_pages", "extent_count")),
    "RECORD_NUMBER": (record.NUMBER_OFFSET, ("inode",)),
    "RECORD_NUMBERS": (record.NUMBER_OFFSET, ("inode", "parent")),
    "RECORD_PARENT": (record.PARENT_OFFSET, ("parent",)),
    "RECORD_HOME": (record.HOME_OFFSET, ("segment", "extent_count")),
    "RECORD_TIMES": (record.TIMES_OFFSET, ("mtime_ns", "ctime_ns")),
}  # fmt: skip
INODE = Inode(
    inode=InodeNumber(0x0102030405060708), parent=InodeNumber(0x1112131415161718), name=b"a name", kind=Kind.FILE,
    mode=0o100644, uid=21, gid=22, nlink=23, flags=InodeFlags.SEALED | InodeFlags.REWRITTEN, version=24, size=25 << 12,
    generation=26, segment=SegmentIndex(27), page=28, header_pages=29, mtime_ns=30, ctime_ns=31, atime_ns=32,
    extents=(Extent(26, SegmentIndex(27), 57, 25, 0),), xattrs={b"user.a": b"b"},
)  # fmt: skip


def test_the_record_has_the_size_and_the_fields_of_the_c_struct() -> None:
    assert ffi.sizeof(STRUCT) == record.RECORD_SIZE
    assert record.RECORD_EXTENT.size == ffi.sizeof("struct kvfs_extent")
    assert ffi.offsetof(STRUCT, "kind") == record.KIND_OFFSET
    assert ffi.offsetof(STRUCT, "flags") == record.FLAGS_OFFSET
    packed = INODE.pack()
    seen = ffi.cast(STRUCT + " *", ffi.from_buffer(packed))
    for name in ("inode", "parent", "kind", "mode", "uid", "gid", "nlink", "flags", "version", "size", "generation",
                 "segment", "page", "header_pages", "mtime_ns", "ctime_ns", "atime_ns"):  # fmt: skip
        assert getattr(seen, name) == getattr(INODE, name), name
    assert seen.record_size == len(packed) == INODE.record_size
    assert (seen.name_size, seen.extent_count) == (len(INODE.name), 1)
    assert Inode.unpack(packed) == INODE


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_field_read_in_place_is_the_c_struct_s(name: str) -> None:
    offset, fields = IN_PLACE[name]
    packed = INODE.pack()
    seen = ffi.cast(STRUCT + " *", ffi.from_buffer(packed))
    assert ffi.offsetof(STRUCT, fields[0]) == offset
    reader: struct.Struct = getattr(record, name)
    assert reader.unpack_from(packed, offset) == tuple(getattr(seen, field) for field in fields)


# What another build speaks: a change here is a new version of the protocol (KVFS_WIRE_VERSION).
FRAMES = {
    "FRAME": "<IHHiI", "HELLO": "<8sII", "PATIENCE": "<II", "WELCOME": "<II16sQQQQIIIIII", "WHERE": "<QHHI",
    "RESERVE": "<QII", "COMMIT": "<Qq", "LEASE": "<QII", "EVENTS": "<IIQ", "FEED": "<QQQ", "FOREIGN": "<II",
}  # fmt: skip


def test_frames_are_read_as_c_lays_them_out() -> None:
    assert {name: getattr(wire, name).format for name in FRAMES} == FRAMES
    frame = ffi.new("struct wire_frame *", {"size": 1, "type": 2, "reserved": 3, "status": -4, "id": 5})
    assert wire.FRAME.unpack(bytes(ffi.buffer(frame))) == (1, 2, 3, -4, 5)
    hello = ffi.new("struct wire_hello *", {"version": 6, "flags": 7, "timeout_ms": 8, "reserved": 9})
    assert wire.HELLO.unpack_from(bytes(ffi.buffer(hello)))[1:] == (6, 7)
    assert wire.PATIENCE.unpack_from(bytes(ffi.buffer(hello)), wire.HELLO.size) == (8, 9)
    assert ffi.sizeof("struct wire_foreign_block") == podmap.FOREIGN_BLOCK_SIZE


def test_a_struct_with_a_hole_has_no_layout() -> None:
    with pytest.raises(AssertionError, match="wire_reserved"):
        wire.layout("wire_reserved", slice(1, None, 2))


def test_types_and_flags_of_frames_have_another_build_s_numbers() -> None:
    assert [kind.name for kind in wire.Type] == [
        "HELLO", "DESCRIPTORS", "RESERVE", "COMMIT", "DELETE", "LIST", "LOOKUP", "BAD_BLOCK", "HITS", "REPORT", "CLOSE",
        "LEASE", "RELEASE", "EVENTS", "TOUCH", "FOREIGN", "FOREIGN_LEASE", "FRESH", "DONE",
    ]  # fmt: skip
    assert [int(kind) for kind in wire.Type] == list(range(1, 20))
    assert {flag.name: int(flag) for flag in wire.Flags} == {"TABLE": 1, "HASHES": 2, "LONG": 4, "PARENTS": 8}
    assert wire.VERSIONS == (4, 5) and (wire.EVENTS_BEGIN, wire.EVENTS_PATH) == (1, 2)


def test_constants_and_events_have_c_s_values() -> None:
    for name in ("PAGE_SIZE", "NAME_MAX", "COUNTER_BITS"):
        assert getattr(lib, f"KVFS_{name}") == getattr(types, name), name
    for name in ("LABEL_SIZE", "DEVICES_MAX", "STRIPE_WIDTH_MAX"):
        assert getattr(lib, f"KVFS_{name}") == getattr(geometry, name), name
    for event in plane.EventType:
        assert getattr(lib, f"KVFS_EVENT_{event.name}") == event


def test_kinds_flags_and_open_states_have_c_s_numbers() -> None:
    for kind in Kind:
        assert getattr(lib, f"KVFS_KIND_{kind.name}") == kind
    for flag in InodeFlags:
        assert getattr(lib, f"KVFS_INODE_{flag.name}") == flag
    for state in plane.OpenState:
        assert getattr(lib, f"KVFS_{state.name}") == state
