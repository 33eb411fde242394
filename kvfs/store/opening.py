"""Parts that an open pool stands on: its data plane, and an index that is checked to be of this pool and its last
mount."""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from kvfs.cgroup import LEAST, fitting, memory, memory_limit
from kvfs.checks import check_records
from kvfs.errors import FormatError, KvfsError
from kvfs.index.lmdb import LmdbIndex
from kvfs.names import Names
from kvfs.plane import Plane, PlaneOptions, PlaneTuning
from kvfs.podmap import PodOptions
from kvfs.pool.config import PoolConfig
from kvfs.pool.format import META_EPOCH, META_IN_FLIGHT, META_NUMBER, META_OPENING, META_UUID, META_VERSION
from kvfs.pool.lock import INDEX_NAME, PoolLock
from kvfs.pool.opening import OpenPool
from kvfs.store.segment import Segment
from kvfs.types import COUNTER_BITS, EPOCH_MAX, SegmentIndex
from kvfs.units import told_size

log = logging.getLogger("kvfs.store.pool")

_CHUNK = 1 << 20
# Bytes of the pod map for each entry, at the fill that it allows itself.
MAP_ENTRY_SIZE = 33
# The map has room for blocks of this size in the whole pool, if that is not more than this share of the memory.
_MAP_BLOCK = 1 << 16
_MAP_MEMORY_SHARE = 4
_MAP_ENTRIES_MIN = 1 << 16
# Of changes that wait for the engine's thread.
_NEWS_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions(PlaneTuning):
    records_max: int = 0
    commit_interval_s: float = 1.0
    # The data plane's events that are not the store's: type, inode, value (IDLE, TRANSPORTS_GONE,
    # GUEST, SLOW).
    on_event: Callable[[int, int, int], None] | None = None
    # Called when descriptors lead to other devices than before, or there are others: holders of descriptors ask again.
    on_devices: Callable[[], None] | None = None
    # Shown to others that want the pool meanwhile.
    use: str = "open"
    # Push an owner aside that beats on the devices.
    take_over: bool = False
    # Take a slot of the pod first, where this node has none.
    join: bool = False
    # The descriptor of a journal of names (kvfs/journal.py), the caller's. Its content is taken in, and changes are
    # written there.
    journal: int | None = None
    # The pool's lock, if the caller has it; it stays the caller's.
    lock: PoolLock | None = None
    # Called with a text when opening has to wait for somebody.
    on_wait: Callable[[str], None] | None = None


def own_options(pool: Path, usual: StoreOptions) -> StoreOptions:
    """Options of a command that opens a pool by itself, with as much memory as its cgroup's limit allows. KvfsError:
    that is too little."""
    limit = memory_limit()
    if limit is not None and limit.size < LEAST:
        raise KvfsError(
            f"{pool}: the cgroup's memory limit is {told_size(limit.size)} ({limit.path}); to open a pool needs "
            f"{told_size(LEAST)} at least: raise the limit"
        )
    staging, reads = fitting(limit, usual.staging_size, usual.read_memory_size)
    return replace(usual, staging_size=staging, read_memory_size=reads)


def make_plane(opened: OpenPool, options: StoreOptions, epoch: int, records_max: int) -> Plane:
    """A data plane over the pool's devices."""
    config = opened.config
    members = config.members()
    return Plane(
        PlaneOptions(
            secret=config.secret, mount_epoch=epoch, zone_size=config.geometry.zone_size,
            stripe_unit=config.geometry.stripe_unit, stripe_width=config.geometry.stripe_width,
            segment_count=len(members), records_max=records_max,
            **{field.name: getattr(options, field.name) for field in fields(PlaneTuning)},
        ),
        [device.fd for device in opened.devices],
        [device.zones_offset for device in config.devices],
        members,
    )  # fmt: skip


def pod_options(opened: OpenPool) -> PodOptions | None:
    """This node's part in the pod, if the pool is one."""
    pod = opened.config.pod
    if pod is None:
        return None
    return PodOptions(
        slot=opened.slot, nodes=pod.nodes, lot=pod.lot, entries_max=map_entries(opened.config),
        news_bytes=_NEWS_BYTES, start=secrets.randbits(63) | 1,
    )  # fmt: skip


def map_entries(config: PoolConfig) -> int:
    """How many names of other nodes the pod map of this machine holds: as many as pool.toml says, or a usual number."""
    assert config.pod is not None
    size = sum(device.size for device in config.devices)
    usual = max(_MAP_ENTRIES_MIN, min(size // _MAP_BLOCK, memory() // _MAP_MEMORY_SHARE // MAP_ENTRY_SIZE))
    return config.pod.map_size // MAP_ENTRY_SIZE or usual


def open_index(opened: OpenPool, names: Names) -> tuple[LmdbIndex, bool]:
    """The pool's index, and whether it must be rebuilt: missing, unreadable, of another pool, or half rebuilt."""
    path = opened.path / INDEX_NAME
    if path.is_dir():
        index: LmdbIndex | None = None
        try:
            index = LmdbIndex(path, names=names)
            uuid = index.meta_get(META_UUID)
            if uuid == opened.config.uuid.bytes and not index.incomplete:
                check_index(index, opened)
                return index, False
            log.warning("%s: %s; it is made anew", path, "half rebuilt" if uuid else "empty")
        except KvfsError as error:
            log.warning("%s; it is made anew", error)
        except Exception as error:  # whatever LMDB says of a damaged file
            log.warning("index %s: %s; it is made anew", path, error)
        if index is not None:
            index.close()
        shutil.rmtree(path, ignore_errors=True)
    return LmdbIndex(path, durable=False, names=names), True


def check_index(index: LmdbIndex, opened: OpenPool) -> None:
    """FormatError unless the index is of the pool's last mount, and a kvfs can have written all that a mount takes from
    it."""
    known_epoch(index, opened)
    members, end_page = opened.config.members(), opened.config.geometry.end_page
    for segment, data in index.segment_items():
        if segment >= len(members):
            raise FormatError(f"segment {segment} of a pool with {len(members)}")
        state = Segment(SegmentIndex(segment))
        state.unpack_into(data)
        if state.next_page > end_page or state.generation >> COUNTER_BITS > opened.highest:
            raise FormatError(f"segment {segment}: page {state.next_page} of {end_page}, generation "
                              f"{state.generation:#x} at mount {opened.highest}")  # fmt: skip
    meta_number(index, META_VERSION)
    in_flight = index.meta_get(META_IN_FLIGHT) or b""
    if len(in_flight) % 8:
        raise FormatError(f"the versions in flight have {len(in_flight)} bytes")
    for chunk in index.records(_CHUNK):
        check_records(chunk, epoch_max=opened.highest, segment_count=len(members), end_page=end_page, origin="inodes")


def known_epoch(index: LmdbIndex, opened: OpenPool) -> int:
    """The last mount that the index knows. FormatError if the devices know a later one. The later mount had another
    index, of another directory or a copy, and this one knows none of its changes."""
    known = meta_number(index, META_EPOCH)
    if max(known, meta_number(index, META_OPENING)) < opened.epoch:
        raise FormatError(f"it knows mount {known}, the labels mount {opened.epoch}: with another index")
    return known


def index_epoch(opened: OpenPool) -> int:
    """The last mount that the index knows; 0 if there is no index that can say."""
    path = opened.path / INDEX_NAME
    if not (path / "data.mdb").exists():
        return 0
    try:
        index = LmdbIndex(path, read_only=True)
    except KvfsError:
        return 0
    try:
        own = index.meta_get(META_UUID) == opened.config.uuid.bytes and not index.incomplete
        known = known_epoch(index, opened) if own else 0
        if known >= EPOCH_MAX:
            raise FormatError(f"it knows mount {known}; the last possible is {EPOCH_MAX - 1}")
        return known
    except Exception as error:  # whatever LMDB says of a damaged file: open_index says what becomes of it
        log.warning("index %s: %s", path, error)
        return 0
    finally:
        index.close()


def meta_number(index: LmdbIndex, key: bytes) -> int:
    value = index.meta_get(key)
    if value is not None and len(value) != META_NUMBER.size:
        raise FormatError(f"{key.decode()} has {len(value)} bytes; {META_NUMBER.size} are needed")
    return 0 if value is None else int(META_NUMBER.unpack(value)[0])
