"""Prometheus: a pool's status document as metrics, by the prometheus-client package (pip install 'kvfs[metrics]').

Pure but for the import: documents in, text out. endpoint.py serves it. docs/operations.md has a scrape
configuration, docs/grafana.json a dashboard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvfs.errors import MissingFeatureError
from kvfs.status.holder import holder_samples
from kvfs.status.numbers import Json, buckets_of, items, number, section
from kvfs.status.pod import samples

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_DEVICE_STATES = ("online", "slow", "failed", "removed", "returning")
# Below 1 us and above 16 s nothing is worth a time series.
_BUCKETS = range(10, 35)

_SPACE = {
    "size": "Bytes that the pool's segments hold.",
    "used": "Bytes of live blocks and slabs.",
    "free": "Bytes that are not in use.",
    "pinned": "Bytes that pins keep from eviction.",
    "slabs": "Bytes of slabs.",
}
# Numbers that may go down. All other counters are of kind counter.
GAUGES = {
    "forwarded_in_flight": "Requests that wait for the daemon's Python part.",
    "staged_bytes": "Bytes of files being written that are in memory.",
    "staging_size": "Bytes of memory for files being written.",
    "staged_files": "Files being written.",
    "open_handles": "Open files of all mounts and guests.",
    "staging_short": "1: writes waited for that memory in the last 10 s, or were refused.",
    "parked": "Writes that wait for memory.",
    "jobs_in_flight": "Jobs of the data plane under way.",
    "zombies": "I/Os that missed their deadline and have not come back.",
    "open_bytes": "Bytes of open and leased blocks and of files being written: what eviction must keep.",
    "index_bytes": "Bytes of the index.",
    "index_pending": "Changes that the index has not committed yet.",
    "native_clients": "Native clients that are connected.",
    "native_busy": "Buffers of native clients that devices may still write into.",
    "reservations_open": "Places that native clients have reserved and not committed.",
    "reserved_bytes": "Bytes of those.",
    "leases_open": "Leases of native clients in force.",
    "leased_clients": "Native clients that have any.",
    "parents_known": "Blocks whose parent in their chain is known.",
    "ghosts": "Evicted blocks that are remembered.",
    "leased_blocks": "Blocks that leases keep from eviction.",
    "leased_bytes": "Bytes of those.",
}
COUNTERS = {
    "blocks_found": "Blocks asked for and found: opened for reading, or read by native clients.",
    "blocks_missed": "Names asked for that were not there, by files and by native clients.",
    "requests": "FUSE requests, of mounts and guests.",
    "forwarded": "Requests that the daemon's Python part answered.",
    "handed": "Events, completions and calls that the daemon's Python part took.",
    "flushes_sealed": "Files that a close sealed without the daemon's Python part.",
    "staging_waits": "Writes that waited for memory of files being written.",
    "staging_refusals": "Writes that were refused for want of it.",
    "forward_timeouts": "Of those the ones that were not answered in time, and failed.",
    "lookups": "LOOKUP requests: of names that the kernel did not know.",
    "lookup_misses": "LOOKUP requests for names that were not there.",
    "names_missed": "Names asked for that were not there, but for those that were then made.",
    "opens": "Files opened for reading.",
    "opens_found": "Sealed blocks opened for reading.",
    "uses": "Uses of blocks that count for eviction: not those of walks.",
    "ring_requests": "Requests that came by FUSE over io_uring.",
    "slow_requests": "Requests that took longer than kvfs mount --slow-ops.",
    "stale_opens": "Opens of blocks that had just gone.",
    "reads": "READ requests.",
    "read_bytes": "Bytes that reads returned.",
    "writes": "WRITE requests.",
    "write_bytes": "Bytes that writes took.",
    "checksum_errors": "Blocks that were not what had been written.",
    "read_errors": "Reads that failed.",
    "spins": "Rounds of server threads that found a request without sleeping.",
    "sleeps": "Times that server threads slept.",
    "wakeups": "Times that a server thread was woken by another.",
    "blocks_written": "Blocks written to devices.",
    "blocks_copied": "Blocks copied to another segment.",
    "written_bytes": "Bytes written to devices for blocks.",
    "evicted_segments": "Segments evicted.",
    "evicted_blocks": "Blocks evicted.",
    "evicted_bytes": "Bytes of blocks evicted.",
    "carried_blocks": "Blocks that eviction carried over to other segments.",
    "carried_bytes": "Bytes of those.",
    "orphans": "Blocks whose parent in their chain went.",
    "ghosts_returned": "Evicted blocks that were stored again while they were remembered.",
    "bad_blocks": "Blocks dropped because their content was damaged.",
    "sealed_blocks": "Files sealed into blocks.",
    "seal_retries": "Seals that had to be written once more, elsewhere.",
    "summaries_written": "Segment summaries written.",
    "commit_failures": "Commits of the index that failed.",
    "native_lookups": "Names that native clients looked at.",
    "native_hits": "Blocks that native clients read whole.",
    "native_misses": "Keys that native clients asked for and that were not there, or could not be read.",
    "native_gets": "Reads of native clients.",
    "native_get_bytes": "Bytes that native clients read.",
    "native_bounced_bytes": "Of those the bytes that had to be copied once.",
    "native_retries": "Reads that native clients repeated.",
    "native_timeouts": "Reads of native clients that devices did not answer in time.",
    "native_checksum_errors": "Blocks that native clients could not verify.",
    "native_puts": "Blocks that native clients stored.",
    "native_put_bytes": "Bytes of those.",
    "native_deletes": "Blocks that native clients deleted.",
    "native_prestaged": "Blocks that native clients read ahead.",
    "native_prestage_used": "Of those the ones that were then asked for.",
    "native_prestage_wasted": "Of those the ones that were not.",
    "native_reconnects": "Times that native clients connected again.",
    "reservations_committed": "Reserved places that became blocks.",
    "reservations_superseded": "Reserved places whose name a newer file had taken.",
    "reservations_reclaimed": "Reserved places taken back.",
    "leases_granted": "Blocks that native clients were given in leases.",
    "leases_refused": "Blocks that they were not given: no such block, or no room.",
    "leases_expired": "Leases that were not released by their deadline.",
}
_NAMES = {
    "size": "Names that the pool has room for.",
    "used": "Names: of blocks, directories, links and files that are being made.",
    "kept": "Names that eviction cannot take: all but those of blocks.",
}
_DEVICE = {
    "reads": "Reads of a device.",
    "read_bytes": "Bytes read from a device.",
    "writes": "Writes to a device.",
    "write_bytes": "Bytes written to a device.",
    "errors": "I/Os of a device that failed.",
    "timeouts": "I/Os of a device that missed their deadline.",
    "read_ns": "Time that reads of a device took, in nanoseconds.",
    "write_ns": "Time that writes to a device took, in nanoseconds.",
}
_EXPORT = {
    "connections": "Front ends that connected.",
    "requests": "Requests of a guest.",
    "bytes_read": "Bytes that a guest read.",
    "bytes_written": "Bytes that a guest wrote.",
    "zero_copy_bytes": "Bytes read by devices straight into the guest's memory.",
    "copied_bytes": "Bytes copied into the guest's memory.",
    "protocol_errors": "Messages of a front end that break the protocol.",
    "descriptor_errors": "Requests of a guest that break the protocol.",
    "io_errors": "Requests of a guest that failed at a device.",
}
_EXPORT_GAUGES = {
    "connected": "Whether a front end is connected.",
    "queues_running": "Queues that a guest uses.",
}


def require() -> Any:
    """The package's families; MissingFeatureError without it."""
    try:
        from prometheus_client import metrics_core
    except ImportError as error:
        raise MissingFeatureError("the package prometheus-client is missing: pip install 'kvfs[metrics]'") from error
    return metrics_core


def render(statuses: Sequence[Json]) -> bytes:
    """The text of these pools' metrics, each with HELP and TYPE."""
    require()
    from prometheus_client import generate_latest

    return bytes(generate_latest(_Collector(statuses)))


class _Collector:
    """The collector that generate_latest() asks in place of a registry. Families are made once, with the samples of
    every pool."""

    def __init__(self, statuses: Sequence[Json]) -> None:
        self._statuses = statuses
        self._core = require()
        self._families: dict[str, Any] = {}

    def collect(self) -> Iterator[Any]:
        for status in self._statuses:
            self._add(status)
        yield from self._families.values()

    def _gauge(self, name: str, help_: str, labels: dict[str, str], value: float) -> None:
        self._family(self._core.GaugeMetricFamily, name, help_, labels).add_metric(list(labels.values()), value)

    def _counter(self, name: str, help_: str, labels: dict[str, str], value: float) -> None:
        self._family(self._core.CounterMetricFamily, name, help_, labels).add_metric(list(labels.values()), value)

    def _histogram(self, name: str, help_: str, labels: dict[str, str], latency: Json) -> None:
        buckets, below, told = buckets_of(latency), 0, []
        for index, here in enumerate(buckets):
            below += here
            if index in _BUCKETS:
                told.append((f"{(1 << index) / 1e9:.9g}", below))
        family = self._family(self._core.HistogramMetricFamily, name, help_, labels)
        family.add_metric(list(labels.values()), [*told, ("+Inf", below)], number(latency, "total_ns") / 1e9)

    def _family(self, kind: Any, name: str, help_: str, labels: dict[str, str]) -> Any:
        if name not in self._families:
            self._families[name] = kind(name, help_, labels=list(labels))
        return self._families[name]

    def _add(self, status: Json) -> None:
        pool = {"pool": str(section(status, "pool").get("path"))}
        counters = section(status, "counters")
        self._gauge("kvfs_up", "Whether a daemon serves the pool.", pool, float(bool(counters)))
        for key, help_ in _SPACE.items():
            if key in section(status, "space"):
                self._gauge(f"kvfs_space_{key}_bytes", help_, pool, number(status, "space", key))
        for state in ("free", "open", "closed", "evicting", "lost"):
            if state in section(status, "segments"):
                self._gauge("kvfs_segments", "Segments by state.", {**pool, "state": state},
                            number(status, "segments", state))  # fmt: skip
        for key, help_ in _NAMES.items():
            if key in section(status, "names"):
                self._gauge(f"kvfs_names_{key}", help_, pool, number(status, "names", key))
        for user in items(status, "users"):
            self._gauge("kvfs_user_names", "Names of a user that are not evicted; of those with many.",
                        {**pool, "user": str(user.get("name"))}, number(user, "names"))  # fmt: skip
        if "blocks" in status:
            self._gauge("kvfs_blocks", "Blocks: sealed files with a name.", pool, number(status, "blocks"))
        for key in counters:
            if key in GAUGES:
                self._gauge(f"kvfs_{key}", GAUGES[key], pool, number(counters, key))
            else:
                # A counter that has no words yet is told all the same; a test holds that there is none.
                self._counter(f"kvfs_{key}", COUNTERS.get(key, "See kvfs status."), pool, number(counters, key))
        latencies = section(status, "latency")
        for operation in latencies:
            self._histogram("kvfs_latency_seconds", "Time of requests, from their arrival to the reply.",
                            {**pool, "operation": operation}, section(latencies, operation))  # fmt: skip
        if "limit" in section(status, "memory"):
            self._gauge("kvfs_memory_limit_bytes", "Bytes that the daemon's cgroup may have; 0: it has no limit.", pool,
                        number(status, "memory", "limit"))  # fmt: skip
        for kind, name, help_, labels, value in (*samples(status), *holder_samples(status)):
            (self._gauge if kind == "gauge" else self._counter)(name, help_, {**pool, **labels}, value)
        for device in items(status, "devices"):
            self._add_device({**pool, "device": str(device.get("path"))}, device)
        for export in items(status, "exports"):
            labels = {**pool, "socket": str(export.get("socket")), "tag": str(export.get("tag"))}
            for key, help_ in _EXPORT_GAUGES.items():
                self._gauge(f"kvfs_virtiofs_{key}", help_, labels, number(export, key))
            for key, help_ in _EXPORT.items():
                self._counter(f"kvfs_virtiofs_{key}", help_, labels, number(export, key))

    def _add_device(self, labels: dict[str, str], device: Json) -> None:
        for key, help_ in _DEVICE.items():
            if key in device:
                self._counter(f"kvfs_device_{key}", help_, labels, number(device, key))
        for state in _DEVICE_STATES:
            self._gauge("kvfs_device_state", "1 at the state that the device is in.", {**labels, "state": state},
                        float(str(device.get("state")).startswith(state)))  # fmt: skip
        latencies = section(device, "latency")
        for operation in latencies:
            self._histogram("kvfs_device_latency_seconds", "Time of a device's single I/Os.",
                            {**labels, "operation": operation}, section(latencies, operation))  # fmt: skip
