"""Summaries of segments: what they say, as bytes. segments.py decides when one is written, and where."""

from __future__ import annotations

import logging
import zlib

import trio

from kvfs.index.interface import Index
from kvfs.pool.config import PoolConfig
from kvfs.pool.format import Summary, pack_summary
from kvfs.types import PAGE_SIZE, ROOT_INODE, InodeNumber, SegmentIndex

log = logging.getLogger("kvfs.store.segments")

_YIELD_EVERY = 256


class Summaries:
    def __init__(self, config: PoolConfig, index: Index, epoch: int) -> None:
        self._config, self._index, self._epoch = config, index, epoch
        self.too_large = 0

    async def collect(self, segment: SegmentIndex) -> tuple[bytes, int]:
        """A summary's entries: the records of the live blocks whose header is here, then of the directories above."""
        parts: list[bytes] = []
        parents: set[InodeNumber] = set()
        seen = {ROOT_INODE}
        count = 0
        inodes = self._index.segment_inodes(segment)
        for at in range(0, len(inodes), _YIELD_EVERY):
            if at:
                await trio.lowlevel.checkpoint()
            records, found, above = self._index.live_records(inodes[at : at + _YIELD_EVERY], segment)
            parts.append(records)
            parents |= above
            count += found
        while parents := parents - seen:
            seen |= parents
            records, found, parents = self._index.live_records(sorted(parents), None)
            parts.append(records)
            count += found
        return b"".join(parts), count

    def pack_small(self, summary: Summary) -> bytes:
        """One that fits in its slot."""
        return pack_summary(self._config, summary, self._epoch)

    async def pack(self, summary: Summary) -> bytes:
        """Compressed where it does not fit in its slot, without entries where that does not help."""
        limit = self._config.geometry.summary_pages * PAGE_SIZE
        data = self.pack_small(summary)
        if len(data) > limit:
            packed = await trio.to_thread.run_sync(zlib.compress, summary.entries, 1)
            data = self.pack_small(summary.with_compressed(packed))
        if len(data) > limit:
            if not self.too_large:
                log.warning("segment %d: a summary of %d blocks needs %d bytes, its slot has %d: its block headers "
                            "describe it", summary.segment, summary.entry_count, len(data), limit)  # fmt: skip
            self.too_large += 1
            data = self.pack_small(summary.with_nothing())
        return data
