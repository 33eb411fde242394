"""Labels, segment headers and summaries: what is packed unpacks, and damage is never taken for the truth."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvfs.errors import ChecksumError, FormatError, OtherVersionError, PoolError
from kvfs.pool import format as formats
from kvfs.pool.config import new_config
from kvfs.pool.format import SegmentHeader, Summary
from kvfs.pool.geometry import choose_geometry
from kvfs.record import Inode, Kind, split_records
from kvfs.types import InodeNumber, SegmentIndex

GEOMETRY, _ = choose_geometry([256 << 20] * 3)
CONFIG = new_config(GEOMETRY, [(f"devices/{i}", 256 << 20) for i in range(3)])
MEMBERS = ((0, 4), (2, 1), (1, 7))
HEADER = SegmentHeader((5 << 40) + 9, 5, SegmentIndex(41), 1, MEMBERS)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_label_holds_all_that_pool_toml_says() -> None:
    label = formats.unpack_label(formats.pack_label(CONFIG, 1, 77), "x")
    assert (label.pool_uuid, label.device_uuid) == (CONFIG.uuid, CONFIG.devices[1].uuid)
    assert (label.mount_epoch, label.device_index, label.device_size) == (77, 1, 256 << 20)
    assert label.config("x") == CONFIG


def test_a_label_has_the_documented_bytes() -> None:
    data = formats.pack_label(CONFIG, 1, 77)
    assert len(data) == 65536 and data[:8] == b"KVFSLABL"
    zeroed = data[:16] + bytes(8) + data[24:]
    assert int.from_bytes(data[16:24], "little") == xxhash.xxh3_64_intdigest(zeroed)


@given(st.integers(0, 65536 * 8 - 1))
def test_a_flipped_bit_in_a_label_is_found(bit: int) -> None:
    with pytest.raises((FormatError, PoolError)):
        formats.unpack_label(flipped(formats.pack_label(CONFIG, 0, 1), bit), "x")


def test_a_label_of_a_newer_version_says_so() -> None:
    data = bytearray(formats.pack_label(CONFIG, 0, 1))
    data[8] = 3
    with pytest.raises(OtherVersionError, match="format version is 3"):
        formats.unpack_label(bytes(data), "nvme1: first label")


def test_a_label_with_a_wrong_checksum_names_both() -> None:
    with pytest.raises(ChecksumError, match=r"nvme1.*expected 0x"):
        formats.unpack_label(flipped(formats.pack_label(CONFIG, 0, 1), 8 * 5000), "nvme1")


def test_a_segment_header_reads_back() -> None:
    page = formats.pack_segment_header(CONFIG, HEADER)
    assert len(page) == 4096 and page[:8] == b"KVFSSEGM"
    assert formats.unpack_segment_header(CONFIG, SegmentIndex(41), MEMBERS, page) == HEADER


def test_a_header_of_another_segment_pool_or_layout_is_none() -> None:
    page = formats.pack_segment_header(CONFIG, HEADER)
    other = new_config(GEOMETRY, [(f"devices/{i}", 256 << 20) for i in range(3)])
    assert formats.unpack_segment_header(CONFIG, SegmentIndex(42), MEMBERS, page) is None
    assert formats.unpack_segment_header(CONFIG, SegmentIndex(41), MEMBERS[::-1], page) is None
    assert formats.unpack_segment_header(other, SegmentIndex(41), MEMBERS, page) is None
    assert formats.unpack_segment_header(replace(CONFIG, secret=1), SegmentIndex(41), MEMBERS, page) is None


@given(st.integers(0, 4096 * 8 - 1))
def test_a_flipped_bit_in_a_segment_header_is_found(bit: int) -> None:
    page = flipped(formats.pack_segment_header(CONFIG, HEADER), bit)
    assert formats.unpack_segment_header(CONFIG, SegmentIndex(41), MEMBERS, page) is None


def entries(count: int) -> bytes:
    return b"".join(
        Inode(inode=InodeNumber(i + 2), parent=InodeNumber(1), name=b"%d" % i, kind=Kind.FILE, mode=0).pack()
        for i in range(count)
    )


def summary(count: int = 40) -> Summary:
    return Summary(HEADER.generation, (5 << 40) + 3, SegmentIndex(41), count, 17, True, entries(count))


def test_a_summary_reads_back() -> None:
    data = formats.pack_summary(CONFIG, summary(), 5)
    assert len(data) % 4096 == 0 and data[:8] == b"KVFSSUMM"
    assert formats.unpack_summary(CONFIG, SegmentIndex(41), data) == summary()
    assert formats.unpack_summary(CONFIG, SegmentIndex(40), data) is None


def test_a_compressed_summary_reads_back_and_is_bounded() -> None:
    data = formats.pack_summary(CONFIG, summary().with_compressed(zlib.compress(summary().entries)), 5)
    found = formats.unpack_summary(CONFIG, SegmentIndex(41), data)
    assert found is not None and found.compressed
    assert found.expanded(1 << 20) == summary()
    assert found.expanded(100) is None
    assert replace(found, entries=b"garbage").expanded(1 << 20) is None


@given(st.data())
def test_a_flipped_bit_in_a_summary_is_found(data: st.DataObject) -> None:
    packed = formats.pack_summary(CONFIG, summary(), 5)
    size = formats.summary_size(packed)
    bit = data.draw(st.integers(0, size * 8 - 1))
    assert formats.unpack_summary(CONFIG, SegmentIndex(41), flipped(packed, bit)) is None


@given(st.binary(max_size=3000))
def test_any_bytes_split_into_records_without_a_crash(data: bytes) -> None:
    for at, size in split_records(data):
        assert size >= 128 and at + size <= len(data)


def test_records_split_where_they_were_joined() -> None:
    assert len(list(split_records(entries(33)))) == 33
