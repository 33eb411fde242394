"""Options that the command line gives to a daemon."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from pathlib import Path

from kvfs.cgroup import DAEMON_SIZE, LEAST, PART_MIN, fitting, memory_limit
from kvfs.errors import KvfsError, UsageError
from kvfs.frontend.read_ahead import DEFAULT as DEFAULT_READ_AHEAD
from kvfs.hold.service import SYSTEMD
from kvfs.store.opening import StoreOptions
from kvfs.units import kernel_version, told_size
from kvfs.virtiofs.exports import Export

HOLD_KERNEL = (6, 9)  # FUSE_NOTIFY_RESEND
# Timeouts in seconds that the kernel accepts (fuse_init_out.request_timeout): it rounds smaller ones up, and checks at
# that interval.
REQUEST_TIMEOUT_MIN_S, REQUEST_TIMEOUT_MAX_S = 15, 65535


@dataclass(frozen=True, slots=True)
class MountOptions:
    """A `kvfs mount` or `kvfs export` command line. An option of None takes the default of its part; without a mount
    point nothing is mounted."""

    pool: Path
    mountpoint: Path | None = None
    exports: tuple[Export, ...] = ()
    foreground: bool = False
    # Lines of the log: "text" or "json".
    log_format: str = "text"
    allow_other: bool = False
    options: tuple[str, ...] = ()
    staging_size: int | None = None
    read_memory_size: int | None = None
    server_threads: int | None = None
    io_timeout_ms: int | None = None
    # The kernel ends the mount when a request has waited longer.
    request_timeout_s: int | None = None
    # Operations that take longer are logged; 0: none is.
    slow_ms: int = 1000
    force: bool = False
    start_timeout_s: float = 120.0
    # The address at which Prometheus finds the metrics.
    metrics: tuple[str, int] | None = None
    # Directories, by their parts, where native clients are let in that have the mount alone.
    native_in: tuple[tuple[bytes, ...], ...] = ()
    # The keeper of the mount for the next daemon: a holder's socket, or SYSTEMD.
    hold: Path | None = None
    # The mount may be bound with an idmapping, as into a pod of a user namespace.
    idmap: bool = False
    # Bytes that the kernel reads ahead in the mount; 0: as many as it does by itself.
    read_ahead: int = DEFAULT_READ_AHEAD

    @property
    def read_only(self) -> bool:
        """The pool is mounted to be read: neither the mount nor native clients store, change or delete."""
        return "ro" in self.options


def fit_memory(options: MountOptions) -> MountOptions:
    """The same options with the sizes of staging and reads. Defaults are at most a quarter and an eighth of the
    cgroup's limit. KvfsError: the limit holds no daemon of these sizes."""
    limit, usual = memory_limit(), StoreOptions()
    staging, reads = fitting(limit, usual.staging_size, usual.read_memory_size)
    staging = staging if options.staging_size is None else max(options.staging_size, PART_MIN)
    reads = reads if options.read_memory_size is None else max(options.read_memory_size, PART_MIN)
    if limit is not None and DAEMON_SIZE + staging + reads > limit.size:
        raise KvfsError(
            f"{options.pool}: the cgroup's memory limit is {told_size(limit.size)} ({limit.path}); a daemon needs "
            f"{told_size(DAEMON_SIZE)}, {told_size(staging)} of --staging and {told_size(reads)} of --read-memory: "
            f"raise the limit, or lower these two ({told_size(LEAST)} in all is the least)"
        )
    return replace(options, staging_size=staging, read_memory_size=reads)


def own_limit_ms(request_timeout_s: int | None, limit_ms: int) -> int:
    """The deadline of one request in the daemon: a slow request fails by itself before the kernel ends the mount for
    it."""
    return limit_ms if request_timeout_s is None else min(limit_ms, request_timeout_s * 1000 * 2 // 3)


def check_hold(options: MountOptions) -> None:
    """UsageError for options that a mount that outlives its daemon cannot have."""
    if options.hold is None:
        return
    if options.request_timeout_s is not None:
        raise UsageError(
            f"--request-timeout {options.request_timeout_s}: the kernel would end the mount while no daemon serves it; "
            "leave it out with --hold (kvfs hold --timeout, or a unit's StartLimitBurst=, ends a mount that no daemon "
            "comes for)"
        )
    if options.hold == SYSTEMD and not options.foreground:
        raise UsageError("--hold systemd: needs --foreground, as the main process of a unit with Type=notify")
    if kernel_version(platform.release()) < HOLD_KERNEL:
        raise UsageError(f"--hold {options.hold}: Linux 6.9 or newer can do that; this is {platform.release()}")


def check_idmap(options: MountOptions) -> None:
    """UsageError for a kernel without idmapped FUSE mounts, or a mount that lets no user of a pod in."""
    from kvfs.doctor import IDMAP_KERNEL

    if not options.idmap:
        return
    if kernel_version(platform.release()) < IDMAP_KERNEL:
        raise UsageError(f"--idmap: Linux 6.12 or newer can do that; this is {platform.release()}")
    if not options.allow_other:
        raise UsageError("--idmap: users of another user namespace are let in by --allow-other alone: give both")


def check_request_timeout(options: MountOptions) -> None:
    timeout_s, release = options.request_timeout_s, platform.release()
    if timeout_s is None:
        return
    from kvfs.doctor import REQUEST_TIMEOUT_KERNEL

    if not REQUEST_TIMEOUT_MIN_S <= timeout_s <= REQUEST_TIMEOUT_MAX_S:
        raise UsageError(
            f"--request-timeout {timeout_s}: {REQUEST_TIMEOUT_MIN_S} to {REQUEST_TIMEOUT_MAX_S} s are possible"
        )
    if kernel_version(release) < REQUEST_TIMEOUT_KERNEL:
        raise UsageError(f"--request-timeout {timeout_s}: Linux 6.15 or newer can do that; this is {release}")
    io_timeout_ms = options.io_timeout_ms or StoreOptions().io_timeout_ms
    if io_timeout_ms > own_limit_ms(timeout_s, io_timeout_ms):
        raise UsageError(
            f"--request-timeout {timeout_s}: a device may take {io_timeout_ms} ms (--io-timeout), "
            f"so the kernel must wait {-(-io_timeout_ms * 3 // 2000)} s or longer"
        )
