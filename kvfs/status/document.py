"""The status document: the answer of `kvfs status`, `kvfs stats` and the control socket on a pool, mounted or not.

Gathers numbers that other rooms have, and computes none. docs/operations.md tells what to look for in them.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import time
from pathlib import Path

from kvfs.errors import KvfsError, PoolError
from kvfs.frontend.clients import Clients
from kvfs.plane import OPERATIONS
from kvfs.pool.config import DeviceConfig, PoolConfig, load
from kvfs.pool.directory import check_owner
from kvfs.pool.lock import is_locked
from kvfs.pool.opening import check_device, device_path, discover, open_device
from kvfs.status.numbers import STATUS_VERSION
from kvfs.store.shares import name_of
from kvfs.store.store import Store
from kvfs.types import PAGE_SIZE

_IDLE = "not mounted"


def _pool_part(pool: Path, config: PoolConfig, state: str) -> dict[str, object]:
    return {"path": os.path.abspath(pool), "uuid": str(config.uuid), "created": config.created, "state": state}


def _layout_part(config: PoolConfig) -> dict[str, object]:
    geometry = config.geometry
    return {
        "count": config.segment_count,
        "size": geometry.segment_size,
        "zone_size": geometry.zone_size,
        "stripe_width": geometry.stripe_width,
        "stripe_unit": geometry.stripe_unit,
    }


def offline_status(pool: Path) -> dict[str, object]:
    """A pool that is not mounted: its devices, checked, and its layout. Changes nothing. Raises PoolError if it is no
    pool."""
    if not pool.is_dir():
        raise PoolError(f"{pool}: {'not a directory' if pool.exists() else 'no such pool'}")
    check_owner(pool)
    config = load(pool)
    notes: list[str] = []
    if config is None:
        if not (pool / "devices").is_dir():
            raise PoolError(f"{pool}: not a kvfs pool (no pool.toml)")
        config = discover(pool)
        notes.append("pool.toml is missing; the next mount writes it again from the labels")
    state = _IDLE
    if is_locked(pool):
        state = "in use, without a mount"
    devices: list[dict[str, object]] = []
    for described in config.devices:
        path = device_path(pool, described)
        entry: dict[str, object] = {"index": described.index, "path": str(path), "size": described.size}
        devices.append(entry)
        if described.removed:
            entry["state"] = "removed"
            continue
        try:
            device = open_device(path, exclusive=False, writable=False)
            try:
                _, found = check_device(config, device, described, str(pool / "pool.toml"))
            finally:
                device.close()
            entry["state"] = "online"
            notes += found
        except KvfsError as error:
            entry["state"] = "failed"
            notes.append(str(error))
    return {
        "version": STATUS_VERSION,
        "time_s": time.time(),
        "pool": _pool_part(pool, config, state),
        "mounts": [],
        "exports": [],
        "segments": _layout_part(config),
        "devices": devices,
        "advice": notes or ([f"kvfs mount {shlex.quote(str(pool))} MOUNTPOINT serves it"] if state == _IDLE else []),
    }


def live_status(
    store: Store,
    counters: dict[str, int],
    pool: Path,
    mounts: list[str],
    exports: list[dict[str, object]],
    started_s: float,
) -> dict[str, object]:
    """A pool that is mounted or exported, from its running parts."""
    config, plane, numbers = store.config, store.plane, store.statistics()
    space, segments, now = numbers.space, numbers.segments, time.time()
    state = "mounted" if mounts else "exported" if exports else "mounted elsewhere"
    devices = [_device_part(store, pool, described) for described in config.devices]
    if numbers.rebuilding:
        state += ", rebuilding its index ({} of {} segments)".format(*numbers.rebuilt)
    if any(service.state.away and not config.devices[i].removed for i, service in enumerate(store.service.all)):
        state += ", degraded"
    return {
        "version": STATUS_VERSION,
        "time_s": now,
        "pool": {
            **_pool_part(pool, config, state),
            "pid": os.getpid(),
            "epoch": numbers.epoch,
            "uptime_s": now - started_s,
        },
        "mounts": [{"mountpoint": mountpoint, "idmap": plane.held.idmap()} for mountpoint in mounts],
        "exports": exports,
        "space": {
            "size": space.size,
            "used": space.used,
            "free": max(space.size - space.used, 0),
            "pinned": space.pinned,
            "slabs": space.slabs,
        },
        "names": {"size": space.inodes_max, "used": space.inodes, "kept": space.inodes_kept},
        "share": store.shares.size,
        "staging_share": store.shares.staging_size,
        "users": [{"name": name_of(user.user), **dataclasses.asdict(user)} for user in store.shares.statistics()],
        "segments": {
            **_layout_part(config),
            "free": segments.free,
            "open": segments.open,
            "closed": segments.closed,
            "evicting": segments.evicting,
            "lost": segments.lost,
        },
        "blocks": numbers.blocks,
        "found_ages": plane.found_ages(),
        "devices": devices,
        "counters": counters,
        "latency": {operation: plane.latency(operation) for operation in OPERATIONS},
        "advice": [*numbers.notes, *_takes_no_writes(store), *filter(None, [store.slabs.refused])],
    }


def _takes_no_writes(store: Store) -> list[str]:
    why = store.service.writes_nothing()
    return [*([] if why is None else [why]), *store.service.full()]


def _device_part(store: Store, pool: Path, described: DeviceConfig) -> dict[str, object]:
    """One device of a pool in use. Lost blocks count for each device that they lie on."""
    index = described.index
    service, plane = store.service.all[index], store.plane
    counts, latency = plane.device_statistics(index), plane.device_latency(index)
    return {
        "index": index,
        "path": str(device_path(pool, described)),
        "size": described.size,
        "state": str(service.state) + (", draining" if service.draining else ""),
        "reason": service.reason,
        "since_s": service.since_s,
        "segments": len(store.service.segments_of(index)),
        **counts,
        "latency": {
            kind: {"count": sum(buckets), "total_ns": counts[f"{kind}_ns"], "buckets": buckets}
            for kind, buckets in latency.items()
        },
    }


def _asked(plane: dict[str, int], native: dict[str, int]) -> dict[str, int]:
    """The counters, with lookups, hits and misses of files and clients together."""
    return {
        **plane,
        "blocks_found": plane["opens_found"] + native["native_hits"],
        "blocks_missed": plane["names_missed"] + native["native_misses"],
    }


def live_counters(store: Store, clients: Clients) -> dict[str, int]:
    """The counters of the data plane, of the store and of native clients, by name."""
    numbers = store.statistics()
    eviction, segments, reservations, leases = numbers.eviction, numbers.segments, numbers.reservations, numbers.leases
    native, chains = clients.counters(), store.plane.uses.chains()
    return {
        **_asked(store.plane.statistics(), native),
        "evicted_segments": eviction.segments,
        "evicted_blocks": eviction.blocks,
        "evicted_bytes": eviction.bytes,
        "carried_blocks": eviction.carried_blocks,
        "carried_bytes": eviction.carried_pages * PAGE_SIZE,
        "parents_known": chains.parents,
        "orphans": chains.orphans,
        "ghosts": chains.ghosts,
        "ghosts_returned": chains.returned,
        "bad_blocks": numbers.bad_blocks,
        "sealed_blocks": numbers.sealed,
        "seal_retries": numbers.seal_retries,
        "summaries_written": segments.summaries_written,
        "index_bytes": numbers.index_bytes,
        "index_pending": numbers.index_pending,
        "commit_failures": numbers.commit_failures,
        **native,
        "reservations_open": reservations.open,
        "reserved_bytes": reservations.reserved_bytes,
        "reservations_committed": reservations.committed,
        "reservations_superseded": reservations.superseded,
        "reservations_reclaimed": reservations.reclaimed,
        "leases_open": leases.open,
        "leased_clients": leases.clients,
        "leased_blocks": leases.blocks,
        "leased_bytes": leases.bytes,
        "leases_granted": leases.granted,
        "leases_refused": leases.refused,
        "leases_expired": leases.expired,
    }
