"""The shape of a pool: zones, segments, stripe units, and which zones of which devices a segment takes. Pure."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from kvfs.errors import PoolError, UsageError
from kvfs.types import PAGE_SIZE
from kvfs.units import counted, format_size, told_size

LABEL_SIZE = 65536
DEVICES_MAX = 256
STRIPE_WIDTH_MAX = 32
ZONES_OFFSET = 1 << 20
STRIPE_UNIT = 128 << 10
# The data plane takes no smaller stripes: they make more I/Os than a group holds.
STRIPE_UNIT_MIN = 16 << 10
SEGMENT_MIN = 1 << 20
SEGMENT_CAP = 512 << 20
SEGMENTS_WANTED = 256
# Devices of a power of two have one less than that, by their labels. Segments of half the size make up for it where
# they hold some blocks each.
SEGMENTS_ENOUGH = 248
SEGMENT_HALVED_MIN = 16 << 20
SEGMENTS_BEFORE_GROWTH = 16384
SEGMENTS_MAX = 32768
# In a pod each node knows all segments, so it has fewer of its own.
NODE_SEGMENTS_MAX = 8192
POD_SEGMENTS_MAX = 1 << 19
SEGMENTS_MIN = 8
SUMMARY_SHARE = 64
SUMMARY_PAGES_MIN = 2


@dataclass(frozen=True, slots=True)
class Geometry:
    stripe_width: int
    stripe_unit: int
    zone_size: int

    @property
    def segment_size(self) -> int:
        return self.stripe_width * self.zone_size

    @property
    def segment_pages(self) -> int:
        return self.segment_size // PAGE_SIZE

    @property
    def summary_pages(self) -> int:
        return max(SUMMARY_PAGES_MIN, self.segment_pages // SUMMARY_SHARE)

    @property
    def end_page(self) -> int:
        """Runs lie in [1, end_page); behind it the two summary slots."""
        return self.segment_pages - 2 * self.summary_pages

    def summary_page(self, slot: int) -> int:
        return self.end_page + slot * self.summary_pages


def check_geometry(geometry: Geometry, origin: str) -> None:
    """Raise PoolError unless segments of this shape are possible."""
    unit, zone = geometry.stripe_unit, geometry.zone_size
    if unit % PAGE_SIZE or unit < STRIPE_UNIT_MIN:
        raise PoolError(
            f"{origin}: stripe_unit is {unit}; it must be a multiple of {PAGE_SIZE}, at least {STRIPE_UNIT_MIN}"
        )
    if zone & (zone - 1) or zone % unit:
        raise PoolError(
            f"{origin}: zone_size is {zone}; it must be a power of two and a multiple of stripe_unit ({unit})"
        )
    if geometry.end_page < 8 or geometry.segment_pages >= 1 << 32:
        raise PoolError(
            f"{origin}: zone_size is {zone}: segments of {told_size(geometry.segment_size)} are not possible"
        )


def choose_geometry(
    device_sizes: list[int],
    *,
    stripe_width: int | None = None,
    stripe_unit: int | None = None,
    segment_size: int | None = None,
    zones_offset: int = ZONES_OFFSET,
    nodes: int = 1,
) -> tuple[Geometry, list[str]]:
    """The geometry of a new pool over devices of these sizes, and notes about adjustments. UsageError.

    `zones_offset`: the first byte of zones. `nodes`: the number that share the segments.
    """
    notes: list[str] = []
    count = len(device_sizes)
    if not 1 <= count <= DEVICES_MAX:
        raise UsageError(f"{counted(count, 'device')}: 1 to {DEVICES_MAX} are possible")
    width = min(4, count) if stripe_width is None else stripe_width
    if not 1 <= width <= min(count, STRIPE_WIDTH_MAX):
        raise UsageError(
            f"stripe width {width}: 1 to {min(count, STRIPE_WIDTH_MAX)} is possible with {counted(count, 'device')}"
        )
    if segment_size is not None:
        zone = _power_below(segment_size // width)
    else:
        zone = _choose_zone(sum(device_sizes), count * (LABEL_SIZE + zones_offset), width, nodes)
    if segment_size is not None and segment_size != zone * width:
        raise UsageError(
            f"segment size {format_size(segment_size)}: it must be the stripe width ({width}) times a power of two"
        )
    unit = STRIPE_UNIT if stripe_unit is None else stripe_unit
    if unit > zone and stripe_unit is None:
        unit = zone
        notes.append(f"stripe unit reduced to {format_size(unit)}, the zone size")
    if unit > zone:
        raise UsageError(
            f"stripe unit {format_size(unit)} is larger than a zone of {format_size(zone)}; use a smaller unit "
            "or larger segments"
        )
    geometry = Geometry(width, unit, zone)
    try:
        check_geometry(geometry, "geometry")
    except PoolError as error:
        raise UsageError(str(error)) from error
    zone_counts = [zones_on(size, zone, zones_offset) for size in device_sizes]
    for index, zones in enumerate(zone_counts):
        if zones == 0:
            raise UsageError(
                f"device {index} of {format_size(device_sizes[index])} is too small for a zone of {format_size(zone)}"
            )
    segments = len(layout(zone_counts, width))
    if segments < SEGMENTS_MIN:
        raise UsageError(
            f"the devices hold {counted(segments, 'segment')} of {format_size(geometry.segment_size)}; "
            f"at least {SEGMENTS_MIN} are needed"
        )
    if segments < SEGMENTS_ENOUGH * nodes:
        each = f" of each of {nodes} nodes" if nodes > 1 else ""
        notes.append(
            f"{counted(segments, 'segment')} of {format_size(geometry.segment_size)}: with {SEGMENTS_WANTED}{each} "
            "eviction would keep more of what is used"
        )
    return geometry, notes


def _choose_zone(usable: int, labels: int, width: int, nodes: int) -> int:
    """Small pools: some hundreds of segments; then segments of 512 MiB, then at most 32,768 segments. A node of a pod
    has some hundreds as well, and at most 8,192."""
    segment = max(SEGMENT_MIN, _power_below(max(1, usable // (SEGMENTS_WANTED * nodes))))
    if (usable - labels) // segment < SEGMENTS_WANTED * nodes and segment // 2 >= SEGMENT_HALVED_MIN:
        segment //= 2
    segment = min(segment, SEGMENT_CAP)
    most = max(SEGMENTS_MAX, min(NODE_SEGMENTS_MAX * nodes, POD_SEGMENTS_MAX))
    if usable // segment > most // SEGMENTS_MAX * SEGMENTS_BEFORE_GROWTH:
        while usable // segment > most:
            segment *= 2
    return max(_power_below(max(1, segment // width)), STRIPE_UNIT_MIN)


def _power_below(value: int) -> int:
    """The largest power of two that is at most value."""
    return 1 << (max(1, value).bit_length() - 1)


def zones_on(device_size: int, zone_size: int, zones_offset: int = ZONES_OFFSET) -> int:
    return max(0, device_size // PAGE_SIZE * PAGE_SIZE - LABEL_SIZE - zones_offset) // zone_size


def layout(zone_counts: list[int], stripe_width: int) -> list[tuple[tuple[int, int], ...]]:
    """The members, (device, zone), of every segment: a pure function, so that every node and every version finds the
    same.

    Each segment takes the stripe_width devices with the most unused zones, among equals those used longest ago, so
    successive segments rotate.
    """
    # Most unused zones first, then longest ago; a device that was never used was used before all others, in order.
    heap = [(-zones, device - len(zone_counts), device) for device, zones in enumerate(zone_counts)]
    heapq.heapify(heap)
    used = [0] * len(zone_counts)
    segments: list[tuple[tuple[int, int], ...]] = []
    turn = 0
    while True:
        chosen = [heapq.heappop(heap) for _ in range(stripe_width)]
        if chosen[-1][0] == 0:
            return segments
        members = []
        for left, _, device in chosen:
            members.append((device, used[device]))
            used[device] += 1
            heapq.heappush(heap, (left + 1, turn, device))
            turn += 1
        segments.append(tuple(members))
