"""Headers and summaries of segments, read from the devices and checked."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence

from kvfs.checks import check_records
from kvfs.errors import FormatError, KvfsError
from kvfs.plane import Plane
from kvfs.pool.config import PoolConfig
from kvfs.pool.format import SegmentHeader, Summary, summary_size, unpack_segment_header, unpack_summary
from kvfs.types import COUNTER_BITS, PAGE_SIZE, SegmentIndex

log = logging.getLogger("kvfs.store.segments")

# The most bytes that a compressed summary may unpack to.
_SUMMARY_EXPANSION_MAX = 64


class SegmentReader:
    """Reads segments of a pool. Nothing on the devices is believed."""

    def __init__(
        self, config: PoolConfig, members: Sequence[tuple[tuple[int, int], ...]], plane: Plane, epoch: int,
        on_impossible: Callable[[int, str], None],
    ) -> None:  # fmt: skip
        """on_impossible: called for structures under a valid checksum that no kvfs can have written."""
        self._config, self._geometry, self._members = config, config.geometry, members
        self._plane, self._epoch, self._on_impossible = plane, epoch, on_impossible

    async def summary(
        self, number: SegmentIndex, generation: int | None, epoch_max: int | None = None
    ) -> Summary | None:
        """The newest valid summary on the device, of this generation; with None, of the newest generation there.
        Summaries are by mounts up to epoch_max; with None, up to this one. Its entries are records that are sound, as
        many as it says."""
        epoch_max = self._epoch if epoch_max is None else epoch_max
        valid: list[Summary] = []
        for slot in (0, 1):
            page = self._geometry.summary_page(slot)
            try:
                data = await self._plane.store_read(number, page, PAGE_SIZE)
                size = summary_size(data)
                if size > self._geometry.summary_pages * PAGE_SIZE:
                    continue
                if size > PAGE_SIZE:
                    data = await self._plane.store_read(number, page, -(-size // PAGE_SIZE) * PAGE_SIZE)
            except KvfsError as error:
                log.warning("segment %d: summary slot %d: %s", number, slot, error)
                continue
            try:
                found = unpack_summary(self._config, number, data)
                if found is not None and found.sequence >> COUNTER_BITS > epoch_max:
                    raise FormatError(f"segment {number}: its summary is of mount {found.sequence >> COUNTER_BITS}, "
                                      "which has not been")  # fmt: skip
                if found is not None and generation in (None, found.generation):
                    valid.append(found)
            except FormatError as error:
                self._on_impossible(number, f"{error}; it is left out")
        for found in sorted(valid, key=lambda summary: (summary.generation, summary.sequence), reverse=True):
            try:
                return self._checked(found, epoch_max)
            except FormatError as error:
                self._on_impossible(number, f"{error}; it is left out")
        return None

    def _checked(self, summary: Summary, epoch_max: int) -> Summary:
        """Uncompressed, its entries what they must be. FormatError."""
        where = f"segment {summary.segment}: its summary"
        if summary.compressed:
            limit = self._geometry.summary_pages * PAGE_SIZE * _SUMMARY_EXPANSION_MAX
            expanded = summary.expanded(limit)
            if expanded is None:
                raise FormatError(f"{where}: its entries do not unpack to at most {limit} bytes")
            summary = expanded
        count = check_records(summary.entries, epoch_max=epoch_max, segment_count=len(self._members),
                              end_page=self._geometry.end_page, origin=where)  # fmt: skip
        if count != summary.entry_count:
            raise FormatError(f"{where}: {count} entries, but it says {summary.entry_count}")
        return summary

    async def headers(
        self, numbers: Sequence[int], epoch_max: int | None = None
    ) -> tuple[dict[int, SegmentHeader | None], set[int]]:
        """The segments' headers, None where there is no valid one of a mount up to epoch_max (None: this one). Also the
        segments where no header was ever written."""
        epoch_max = self._epoch if epoch_max is None else epoch_max
        found: dict[int, SegmentHeader | None] = {}
        blank: set[int] = set()
        nothing = bytes(PAGE_SIZE)
        async for number, page in self.pages(numbers, 0):
            try:
                header = unpack_segment_header(self._config, SegmentIndex(number), self._members[number], page)
                if header is not None and header.owner_epoch > epoch_max:
                    raise FormatError(f"segment {number}: its header is of mount {header.owner_epoch}, "
                                      "which has not been")  # fmt: skip
            except FormatError as error:
                self._on_impossible(number, f"{error}; it counts as damaged")
                header = None
            found[number] = header
            if found[number] is None and page == nothing:
                blank.add(number)
        return found, blank

    async def pages(self, numbers: Sequence[int], page: int) -> AsyncIterator[tuple[int, memoryview]]:
        """This page of each of the segments."""
        for at in range(0, len(numbers), 512):
            some = numbers[at : at + 512]
            data = memoryview(await self._plane.store_read_pages(some, page))
            for i, number in enumerate(some):
                yield number, data[i * PAGE_SIZE : (i + 1) * PAGE_SIZE]
