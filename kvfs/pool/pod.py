"""The [pod] table of pool.toml: the nodes that share a pool, and which of them writes a segment. Pure.

A lot is a run of segments. Lots go round: the node of slot 0 has the first, slot 1 the second. docs/format.md has the
keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfs.errors import PoolError, UsageError
from kvfs.pool.geometry import LABEL_SIZE, SEGMENTS_MIN, ZONES_OFFSET
from kvfs.types import PAGE_SIZE, SLOT_BITS
from kvfs.units import counted

NODES_MAX = 1 << SLOT_BITS
LOT_MAX = 64
# With fewer lots a node, one enclosure's loss would not be shared evenly.
LOTS_WANTED = 64
ENGINES_MAX = 8
MAP_SIZE_MIN = 1 << 20
MAP_SIZE_MAX = 1 << 48
LOOKUP_WAIT_MAX_MS = 10_000
# The news of a block has 24 bits for its page.
POD_SEGMENT_PAGES_MAX = 1 << 24
# The pages of nodes begin behind the first label.
NODE_PAGES_OFFSET = LABEL_SIZE


@dataclass(frozen=True, slots=True)
class PodConfig:
    # URLs of the engines that carry news.
    engine: tuple[str, ...]
    # Slots 0 to nodes - 1.
    nodes: int
    # Segments in a lot, a power of two.
    lot: int
    # Bytes of the pod map; 0: the daemon's default.
    map_size: int = 0
    # A look-up that misses waits so long for news.
    lookup_wait_ms: int = 0
    # Path, which may differ by node, of a file with the engines' password.
    password_file: str = ""
    # Slots whose nodes are gone for good. They only become more.
    retired: tuple[int, ...] = ()

    def owner(self, segment: int) -> int:
        """The slot of the node that writes a segment."""
        return segment // self.lot % self.nodes

    def segments_of(self, slot: int, segment_count: int) -> list[int]:
        """The segments of a slot in a pool of this number."""
        step = self.lot * self.nodes
        return [
            segment for first in range(slot * self.lot, segment_count, step)
            for segment in range(first, min(first + self.lot, segment_count))
        ]  # fmt: skip

    def lots_of(self, slot: int, segment_count: int) -> int:
        """The number of lots of a slot. The last may be short."""
        return len(range(slot * self.lot, segment_count, self.lot * self.nodes))


def zones_offset(nodes: int) -> int:
    """The first byte of zones on the devices of a pod: a page for each slot lies before them."""
    end = NODE_PAGES_OFFSET + nodes * PAGE_SIZE
    return -(-end // ZONES_OFFSET) * ZONES_OFFSET


def choose_lot(segment_count: int, nodes: int) -> int:
    """The default size of a lot, in segments."""
    lot = max(1, min(LOT_MAX, segment_count // (LOTS_WANTED * nodes)))
    return 1 << (lot.bit_length() - 1)


def check_room(pod: PodConfig, segment_count: int, origin: str) -> None:
    """Raise UsageError unless each node has the segments that it needs."""
    # The last slot has the fewest.
    fewest = len(pod.segments_of(pod.nodes - 1, segment_count))
    if fewest < SEGMENTS_MIN:
        raise UsageError(
            f"{origin}: {counted(segment_count, 'segment')} in lots of {pod.lot} give slot {pod.nodes - 1} of "
            f"{pod.nodes} {counted(fewest, 'segment')}; a node needs at least {SEGMENTS_MIN}: use more or larger "
            "devices, smaller segments or lots, or fewer nodes"
        )


def check_pod(pod: PodConfig, origin: str) -> None:
    """Raise PoolError, which names the key, unless the table makes sense by itself."""
    if not 1 <= pod.nodes <= NODES_MAX:
        raise PoolError(f"{origin}: pod.nodes is {pod.nodes}; 1 to {NODES_MAX} is possible")
    if not 1 <= pod.lot <= LOT_MAX or pod.lot & (pod.lot - 1):
        raise PoolError(f"{origin}: pod.lot is {pod.lot}; a power of two from 1 to {LOT_MAX} is possible")
    if pod.map_size and not MAP_SIZE_MIN <= pod.map_size <= MAP_SIZE_MAX:
        raise PoolError(f"{origin}: pod.map_size is {pod.map_size}; {MAP_SIZE_MIN} to {MAP_SIZE_MAX} is possible")
    if not 0 <= pod.lookup_wait_ms <= LOOKUP_WAIT_MAX_MS:
        raise PoolError(f"{origin}: pod.lookup_wait_ms is {pod.lookup_wait_ms}; 0 to {LOOKUP_WAIT_MAX_MS} is possible")
    if not 1 <= len(pod.engine) <= ENGINES_MAX:
        raise PoolError(f"{origin}: pod.engine: 1 to {ENGINES_MAX} URLs are needed, not {len(pod.engine)}")
    from kvfs.pod.url import parse_urls  # a pool of one node has no use for that room

    try:
        parse_urls(pod.engine)
    except UsageError as error:
        raise PoolError(f"{origin}: pod.engine: {error}") from error
    slots = pod.retired
    if list(slots) != sorted(set(slots)) or (slots and not 0 <= slots[0] <= slots[-1] < pod.nodes):
        raise PoolError(f"{origin}: pod.retired is {list(slots)}; slots from 0 to {pod.nodes - 1} are possible")


def refuse_change(pod: PodConfig | None, action: str) -> None:
    """Raise UsageError in a pod: other nodes would not learn that its devices change."""
    if pod is not None:
        raise UsageError(f"device {action}: not possible in a pod yet; its devices stay those of kvfs pod create")


def same_but(found: PodConfig | None, expected: PodConfig | None) -> Sequence[tuple[str, object, object]]:
    """The keys that must agree between two descriptions of a pool, with both values.

    `password_file` is a path, and differs by node. Of `retired` the union holds: two nodes may retire at once.
    """
    if found is None or expected is None:
        return []
    return [
        (f"pod.{key}", getattr(found, key), getattr(expected, key))
        for key in ("engine", "nodes", "lot", "map_size", "lookup_wait_ms")
    ]
