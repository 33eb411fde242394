"""Where things lie on a pool's devices, by docs/format.md, for tests that damage them.

Reads and writes the devices with O_DIRECT, so that it works beside a running daemon. Knows the format from kvfs's own
packers for labels, segment headers and summaries; block headers, which only the data plane writes, are read here.
"""

from __future__ import annotations

import mmap
import os
import pathlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from kvfs.pool.config import parse
from kvfs.pool.format import Summary, unpack_segment_header, unpack_summary
from kvfs.pool.geometry import LABEL_SIZE, layout
from kvfs.record import Inode
from kvfs.types import SegmentIndex

PAGE = 4096
MAGIC_BLOCK = 0x4B434C425346564B
MAGIC_EXTENT = 0x4E5458455346564B
# struct kvfs_block_header: magic, version, flags, checksum, key (2), epoch, header_pages, leaf_count, record_offset,
# ancestors_offset, ancestors_size, sums_offset, leaves_offset, run_pages
_BLOCK = struct.Struct("<QIIQQQQIIIIIIII")
_EXTENT = struct.Struct("<QIIQQQQIIII")


@dataclass(frozen=True)
class Block:
    """A block header found on the devices, and the inode record in it."""

    segment: int
    page: int
    header_pages: int
    run_pages: int
    inode: Inode

    def data_pages(self) -> list[tuple[int, int, int]]:
        """(segment, page, file page) of each page of its data."""
        return [
            (extent.segment, extent.page + i, extent.file_page + i)
            for extent in self.inode.all_extents()
            for i in range(extent.page_count)
        ]


class Image:
    """A pool's devices as bytes."""

    def __init__(self, pool: pathlib.Path, text: str | None = None) -> None:
        self.pool = pool
        self.config = parse((pool / "pool.toml").read_text() if text is None else text, str(pool))
        self.geometry = self.config.geometry
        self.paths = [pool / device.path for device in self.config.devices]
        self.members = layout([device.zone_count for device in self.config.devices], self.geometry.stripe_width)

    # ---- bytes ----

    def place(self, segment: int, page: int) -> tuple[int, int]:
        """The device, and the offset on it, of a segment's page."""
        unit = self.geometry.stripe_unit
        index, inside = divmod(page * PAGE, unit)
        row, member = divmod(index, self.geometry.stripe_width)
        device, zone = self.members[segment][member]
        return device, self.config.devices[device].zones_offset + zone * self.geometry.zone_size + row * unit + inside

    def read_device(self, device: int, offset: int, size: int) -> bytes:
        descriptor = os.open(self.paths[device], os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, size) as memory:
                assert os.preadv(descriptor, [memory], offset) == size
                return bytes(memory)
        finally:
            os.close(descriptor)

    def write_device(self, device: int, offset: int, data: bytes) -> None:
        descriptor = os.open(self.paths[device], os.O_WRONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, len(data)) as memory:
                memory[:] = data
                assert os.pwritev(descriptor, [memory], offset) == len(data)
        finally:
            os.close(descriptor)

    def read(self, segment: int, page: int, count: int = 1) -> bytes:
        return b"".join(self.read_device(*self.place(segment, page + i), PAGE) for i in range(count))

    def write(self, segment: int, page: int, data: bytes) -> None:
        for i in range(0, len(data), PAGE):
            self.write_device(*self.place(segment, page + i // PAGE), data[i : i + PAGE])

    def segment_bytes(self, segment: int) -> bytes:
        """A whole segment, read a stripe unit at a time."""
        unit = self.geometry.stripe_unit
        return b"".join(
            self.read_device(*self.place(segment, at // PAGE), unit)
            for at in range(0, self.geometry.segment_size, unit)
        )

    # ---- labels ----

    def label_offset(self, device: int, copy: int) -> int:
        return 0 if copy == 0 else self.config.devices[device].size - LABEL_SIZE

    def read_label(self, device: int, copy: int) -> bytes:
        return self.read_device(device, self.label_offset(device, copy), LABEL_SIZE)

    def write_label(self, device: int, copy: int, data: bytes) -> None:
        assert len(data) == LABEL_SIZE
        self.write_device(device, self.label_offset(device, copy), data)

    # ---- segments ----

    def generation(self, segment: int) -> int | None:
        """Of the segment's header; None if it has no valid one."""
        header = unpack_segment_header(self.config, SegmentIndex(segment), self.members[segment], self.read(segment, 0))
        return None if header is None else header.generation

    def used_segments(self) -> list[int]:
        return [segment for segment in range(len(self.members)) if self.generation(segment) is not None]

    def summary(self, segment: int, slot: int) -> Summary | None:
        page = self.geometry.summary_page(slot)
        return unpack_summary(self.config, SegmentIndex(segment), self.read(segment, page, self.geometry.summary_pages))

    def newest_summary(self, segment: int) -> int | None:
        """The slot that holds the valid summary of the segment's generation; None without one."""
        generation = self.generation(segment)
        found = {}
        for slot in (0, 1):
            summary = self.summary(segment, slot)
            if summary is not None and summary.generation == generation:
                found[slot] = summary.sequence
        return max(found, key=lambda slot: found[slot], default=None)

    def blocks(self) -> list[Block]:
        """Every block header of the segments' present generations, those of dead blocks included."""
        return [block for segment in self.used_segments() for block in self._blocks_of(segment)]

    def _blocks_of(self, segment: int) -> Iterator[Block]:
        generation, data = self.generation(segment), self.segment_bytes(segment)
        page = 1
        while page < self.geometry.end_page:
            here = data[page * PAGE : (page + 1) * PAGE]
            magic = int.from_bytes(here[:8], "little")
            step = 0
            if magic == MAGIC_BLOCK:
                fields = _BLOCK.unpack_from(here)
                header_pages, record_offset, run_pages = fields[7], fields[9], fields[14]
                inode = Inode.unpack(
                    data[page * PAGE : (page + header_pages) * PAGE][record_offset:][
                        : self._record(data, page * PAGE + record_offset)
                    ]
                )
                if inode.generation == generation and inode.segment == segment:
                    yield Block(segment, page, header_pages, run_pages, inode)
                    step = run_pages
            elif magic == MAGIC_EXTENT:
                fields = _EXTENT.unpack_from(here)
                step = fields[9] if fields[5] == generation else 0
            page += max(1, step)

    @staticmethod
    def _record(data: bytes, at: int) -> int:
        return int.from_bytes(data[at : at + 4], "little")

    def block_of(self, inode: int) -> Block:
        """The newest block of this inode."""
        found = [block for block in self.blocks() if block.inode.inode == inode]
        assert found, f"no block header of inode {inode} on the devices"
        return max(found, key=lambda block: block.inode.version)


def with_checksum(label: bytes) -> bytes:
    """A label with its (unseeded) checksum made right again."""
    data = bytearray(label)
    data[16:24] = bytes(8)
    data[16:24] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data)))
    return bytes(data)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
