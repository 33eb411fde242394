"""Other nodes' blocks on the devices, read into the pod map: at a start, and when their news were lost.

The summaries of their segments, and the block headers that no summary covers. A segment that is damaged, or on a device
that is away, is a miss. Nothing of it is written, and nothing here decides what lives.
"""

from __future__ import annotations

import logging
import struct

import trio

from kvfs.errors import KvfsError
from kvfs.index.interface import Index
from kvfs.plane import Plane
from kvfs.podmap import PodMap, PodMapError, Tombstone
from kvfs.store.segments import Segments
from kvfs.types import EPOCH_MAX, SegmentIndex

log = logging.getLogger(__name__)

_SCAN_CAPACITY = 4 << 20
# Segments that are read at the same time.
_READERS = 4
# A life that waits for the sweep of the map is tried so often.
_LIFE_TRIES = 8
_SWEEP_BUCKETS = 1 << 20
_TOMBSTONE_PREFIX = b"tomb:"
# The name's key and the owner: a name may have been removed of several.
_TOMBSTONE_KEY = struct.Struct(">QQI")
_TOMBSTONE_VALUE = struct.Struct("<Q")
# Of one owner; beyond it the oldest are forgotten, and their names may come back with it.
_TOMBSTONES_MAX = 1 << 20


class ForeignLoader:
    """Reads segments of other nodes. One trio thread."""

    def __init__(self, segments: Segments, plane: Plane, podmap: PodMap) -> None:
        self._segments, self._plane, self._map = segments, plane, podmap
        self._lock = trio.Lock()
        self.loads = 0
        self.blocks = 0
        # Slots whose node once wrote something, as their segments tell.
        self.used: set[int] = set()

    async def load(self, slot: int) -> bool:
        """Read all that the node of this slot has. False if something could not be read: it may be tried again."""
        async with self._lock:
            numbers = self._segments.config.segments_of(slot)
            began = trio.current_time()
            self._map.repeat_begin(slot)
            headers, blank = await self._segments.reader.headers(numbers, EPOCH_MAX)
            used = [(number, header.generation) for number in numbers if (header := headers[number]) is not None]
            whole = all(headers[number] is not None or number in blank for number in numbers)
            if used:
                self.used.add(slot)
            found = 0
            queue = iter(used)

            async def work() -> None:
                nonlocal whole, found
                for number, generation in queue:
                    try:
                        found += await self._load_segment(SegmentIndex(number), generation)
                    except KvfsError as error:
                        whole = False
                        log.warning("segment %d of slot %d: %s; its blocks are misses", number, slot, error)

            async with trio.open_nursery() as nursery:
                for _ in range(min(_READERS, len(used))):
                    nursery.start_soon(work)
            # Names that are not on the devices any more are gone; of a segment that could not be read nobody can say.
            lost = await trio.to_thread.run_sync(self._map.repeat_end, slot) if whole else 0
            self.loads += 1
            self.blocks += found
            log.info("slot %d: %d names read from %d segments in %.2f s, %d dropped", slot, found, len(used),
                     trio.current_time() - began, lost)  # fmt: skip
            return whole

    async def _load_segment(self, number: SegmentIndex, generation: int) -> int:
        if not await self._live(number, generation):
            return 0
        summary = await self._segments.reader.summary(number, generation, EPOCH_MAX)
        found, page = 0, 1
        if summary is not None:
            found = await self._take(number, generation, summary.entries)
            page = summary.covered_page
        end, capacity = self._segments.geometry.end_page, _SCAN_CAPACITY
        while page < end:
            result = await self._plane.store_scan(number, generation, EPOCH_MAX, page, end, capacity)
            found += await self._take(number, generation, result.records)
            if not result.full:
                break
            if result.next_page == page:
                capacity *= 4
            page = result.next_page
        return found

    async def _live(self, number: SegmentIndex, generation: int) -> bool:
        for _ in range(_LIFE_TRIES):
            if self._map.life(number, generation, ended=False):
                return True
            await trio.to_thread.run_sync(self._map.sweep, _SWEEP_BUCKETS)
        return False

    async def _take(self, number: SegmentIndex, generation: int, records: bytes) -> int:
        if not records:
            return 0
        try:
            return await trio.to_thread.run_sync(self._map.load, number, generation, records)
        except PodMapError as error:
            log.warning("%s; they are left out", error)
            return 0


class Tombstones:
    """Names of other nodes that were removed here. Their owners may be away, and would bring them back when they
    return: the node that removed them says so again. One trio thread."""

    def __init__(self, index: Index, podmap: PodMap) -> None:
        self._index, self._map = index, podmap
        self._by_slot: dict[int, dict[bytes, Tombstone]] = {}
        for key, value in index.meta_items(_TOMBSTONE_PREFIX):
            low, high, slot = _TOMBSTONE_KEY.unpack(key[len(_TOMBSTONE_PREFIX) :])
            (version,) = _TOMBSTONE_VALUE.unpack(value)
            self._by_slot.setdefault(slot, {})[key] = Tombstone(low, high, version, slot)

    def __len__(self) -> int:
        return sum(len(some) for some in self._by_slot.values())

    def take(self) -> None:
        """Remember the last moment's."""
        for found in self._map.tombstones():
            key = _TOMBSTONE_PREFIX + _TOMBSTONE_KEY.pack(found.key_low, found.key_high, found.slot)
            some = self._by_slot.setdefault(found.slot, {})
            if key not in some and len(some) >= _TOMBSTONES_MAX:
                self._forget(some, next(iter(some)))
            some[key] = found
            self._index.meta_put(key, _TOMBSTONE_VALUE.pack(found.version))

    def tell(self, slot: int) -> None:
        """Repeat one owner's."""
        self._map.tell_gone(list(self._by_slot.get(slot, {}).values()))

    def forget(self, slot: int) -> None:
        """Their owner has heard of all."""
        some = self._by_slot.pop(slot, {})
        for key in list(some):
            self._forget(some, key)

    def _forget(self, some: dict[bytes, Tombstone], key: bytes) -> None:
        del some[key]
        self._index.meta_put(key, None)
