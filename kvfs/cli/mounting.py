"""Verbs that begin and end the serving of a pool: mount, export, keep, umount."""

from __future__ import annotations

import argparse
import errno
import gc
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvfs.cli import arguments, settings
from kvfs.cli.arguments import Verbs
from kvfs.cli.output import emit, emit_line, note
from kvfs.cli.progress import Progress
from kvfs.errors import KvfsError, UsageError, printable
from kvfs.frontend.asking import stopped
from kvfs.frontend.holders import Holder, describe, holders, is_stopped
from kvfs.frontend.read_ahead import DEFAULT as DEFAULT_READ_AHEAD
from kvfs.status import numbers
from kvfs.units import counted, size_text

if TYPE_CHECKING:
    from kvfs.daemon.options import MountOptions
    from kvfs.frontend.mount import Mount, ProcessWatch
    from kvfs.virtiofs.exports import Export

UMOUNT_TIMEOUT_S = 120.0
UMOUNT_STATUS_TIMEOUT_S = 5.0
# Of --lazy, which waits for no open file. Where there is none, a daemon with little to write has ended by then.
LAZY_WAIT_S = 1.0
STARTED_STATUS_TIMEOUT_S = 5.0
# Options that `kvfs export` lacks. A file for both verbs may have them.
MOUNT_ALONE = ("allow-other", "options", "request-timeout", "native-in", "hold", "idmap", "read-ahead")


def add_mount(verbs: Verbs) -> None:
    sub = verbs.add("mount", _mount, "mount a pool; returns once the mount answers")
    sub.add_argument("pool", metavar="POOL", help="the pool's directory")
    sub.add_argument("mountpoint", metavar="MOUNTPOINT", help="a directory")
    _add_daemon_arguments(sub)
    sub.add_argument("--allow-other", action="store_true", help="let other users in")
    sub.add_argument(
        "--options",
        default="",
        metavar="LIST",
        help="mount(8) options, comma separated: ro, noexec, suid, dev, nonempty, ... (default: nosuid,nodev)",
    )
    sub.add_argument(
        "--request-timeout",
        type=arguments.count,
        metavar="S",
        help="have the kernel end the mount if a request waits this long, as with a stopped daemon (default: never)",
    )

    sub.add_argument(
        "--read-ahead",
        type=arguments.read_ahead,
        default=DEFAULT_READ_AHEAD,
        metavar="SIZE|kernel",
        help="have the kernel read so far ahead of buffered reads and mappings, where /sys lets the daemon set it "
        "(default 2M; kernel or 0: leave the kernel's own, 128K)",
    )
    sub.add_argument(
        "--idmap",
        action="store_true",
        help="the mount may be bound with an idmapping, as for pods with hostUsers: false; shares go by files' owners "
        "(default: refused)",
    )
    sub.add_argument(
        "--native-in",
        action="append",
        default=[],
        metavar="DIR",
        help="let native clients in that have nothing but the mount, as in containers, if they connect in this "
        "directory of the pool (/: all); once for each (default: none)",
    )
    sub.add_argument(
        "--hold",
        metavar="SOCKET|systemd",
        help="have kvfs hold, which listens there, or the service manager, by its descriptor store, keep the mount for "
        "the next daemon (default: nobody does)",
    )
    settings.configurable(
        sub,
        checks={**_DAEMON_CHECKS, "options": _mount_options, "native-in": _native_directory, "hold": _holder},
    )


def _mount(args: argparse.Namespace) -> int:
    from kvfs.daemon.options import MountOptions
    from kvfs.virtiofs.exports import parse_exports

    resolved = settings.resolve(args, Path(os.path.abspath(args.pool)))
    if args.show_config:
        settings.show(args, resolved)
        return 0
    return _start(
        args,
        MountOptions(
            pool=Path(os.path.abspath(args.pool)),
            mountpoint=Path(os.path.abspath(args.mountpoint)),
            exports=parse_exports(args.virtiofs),
            allow_other=args.allow_other,
            options=_mount_options(args.options),
            request_timeout_s=args.request_timeout,
            read_ahead=args.read_ahead,
            idmap=args.idmap,
            native_in=tuple(map(_native_directory, args.native_in)),
            hold=_holder(args.hold),
        ),
    )


def _holder(text: str | None) -> Path | None:
    """The word `systemd` stays as it is; a socket has its whole path. UsageError."""
    from kvfs.hold.service import SYSTEMD

    if text == "":
        raise UsageError("--hold '': the socket of kvfs hold, or systemd, is expected")
    return None if text is None else SYSTEMD if text == str(SYSTEMD) else Path(os.path.abspath(text))


def _mount_options(text: str) -> tuple[str, ...]:
    from kvfs.frontend.mount import check_options

    options = tuple(option for option in text.split(",") if option)
    check_options(options)
    return options


def _native_directory(text: str) -> tuple[bytes, ...]:
    from kvfs.frontend.asked import parse_directory

    return parse_directory(text)


def _metrics_address(text: str) -> tuple[str, int]:
    from kvfs.status.endpoint import parse_address

    return parse_address(text)


def _export_of(text: str) -> Export:
    from kvfs.virtiofs.exports import parse_export

    return parse_export(text)


# Of texts that the command line's parser takes as they are.
_DAEMON_CHECKS: dict[str, settings.Check] = {"metrics": _metrics_address, "virtiofs": _export_of}


def add_export(verbs: Verbs) -> None:
    sub = verbs.add("export", _export, "serve a pool to virtual machines or a DPU's host, without a mount here")
    sub.add_argument("pool", metavar="POOL", help="the pool's directory")
    _add_daemon_arguments(sub)
    sub.add_argument(
        "--show-qemu", action="store_true", help="start nothing; print the QEMU command and the guest's mount command"
    )
    sub.add_argument("--show-libvirt", action="store_true", help="start nothing; print libvirt's XML")
    settings.configurable(sub, others=MOUNT_ALONE, checks=_DAEMON_CHECKS)


def _export(args: argparse.Namespace) -> int:
    from kvfs.daemon.options import MountOptions
    from kvfs.virtiofs.exports import parse_exports

    resolved = settings.resolve(args, Path(os.path.abspath(args.pool)))
    if args.show_config:
        settings.show(args, resolved)
        return 0
    exports = parse_exports(args.virtiofs)
    if args.show_qemu or args.show_libvirt:
        return _show_export(args, exports or _running_exports(Path(args.pool)))
    if not exports:
        raise UsageError("export: give --virtiofs SOCKET (once for each guest)")
    return _start(args, MountOptions(pool=Path(os.path.abspath(args.pool)), exports=exports))


def _start(args: argparse.Namespace, options: MountOptions) -> int:
    gc.disable()  # the modules' objects all stay; the daemon collects garbage once it is ready
    try:
        return _serve(args, options)
    finally:
        gc.enable()


def _serve(args: argparse.Namespace, options: MountOptions) -> int:
    from kvfs.daemon.process import start
    from kvfs.status import prometheus

    if args.metrics is not None:
        prometheus.require()
    pid = start(
        replace(
            options,
            metrics=None if args.metrics is None else _metrics_address(args.metrics),
            foreground=args.foreground,
            log_format=args.log_format,
            staging_size=args.staging,
            read_memory_size=args.read_memory,
            server_threads=args.threads,
            io_timeout_ms=args.io_timeout,
            slow_ms=args.slow_ops,
            start_timeout_s=args.timeout,
            force=args.force,
        )
    )
    mountpoint = {"mountpoint": str(options.mountpoint)} if options.mountpoint is not None else {}
    exports = [_export_part(export) for export in options.exports]
    document = {"pool": str(options.pool), **mountpoint, "exports": exports, "pid": pid}
    if not args.foreground:  # else it has ended by now
        document.update(_started_part(options.pool))
    emit(args, document, "" if args.foreground else lambda: started_text(document))
    return 0


def _started_part(pool: Path) -> dict[str, object]:
    """Facts about the pool that is served now. A daemon that gives none in time is no failure: it has started."""
    from kvfs.daemon.reporter import LOG_NAME
    from kvfs.frontend.asking import ControlClient

    part: dict[str, object] = {"log": str(pool / LOG_NAME)}
    with suppress(KvfsError), ControlClient(pool, timeout_s=STARTED_STATUS_TIMEOUT_S) as client:
        status = cast(numbers.Json, client.call("status"))
        states = [str(device.get("state")) for device in numbers.items(status, "devices")]
        part.update(
            devices=len(states) - states.count("removed"),
            devices_away=sum(state.startswith(("failed", "returning")) for state in states),
            size=int(numbers.number(status, "space", "size")),
            free=int(numbers.number(status, "space", "free")),
            blocks=int(numbers.number(status, "blocks")),
            rings=str(status.get("rings")),
        )
    return part


def started_text(document: numbers.Json) -> str:
    """The line of `kvfs mount` or `kvfs export`: with the source, the place and the transport."""
    sockets = [str(export.get("socket")) for export in numbers.items(document, "exports")]
    where = f"{document['mountpoint']}: pool {document['pool']}" if "mountpoint" in document else f"{document['pool']}"
    said = [where + (f" exported at {' and '.join(sockets)}" if sockets else "")]
    if "devices" in document:
        away = numbers.number(document, "devices_away")
        said += [
            counted(numbers.number(document, "devices"), "device") + (f" ({away:.0f} away)" if away else ""),
            f"{size_text(numbers.number(document, 'free'))} free of {size_text(numbers.number(document, 'size'))}",
            f"I/O by {document['rings']}",
            f"{document['blocks']:,} {'block' if document['blocks'] == 1 else 'blocks'}",
        ]
    return printable(", ".join([*said, f"pid {document['pid']}", f"log {document['log']}"]))


def _add_daemon_arguments(sub: argparse.ArgumentParser) -> None:
    """Options that `kvfs mount` and `kvfs export` share."""
    sub.add_argument(
        "--virtiofs",
        action="append",
        default=[],
        metavar="SOCKET[,tag=TAG][,queues=N][,memory=TYPE]",
        help="export by virtio-fs: one front end at a time connects to this socket; once for each (default: none)",
    )
    sub.add_argument(
        "--force", action="store_true", help="take the pool from another machine that uses it; the mount there ends"
    )
    sub.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        help="serve the pool's metrics to Prometheus; kvfs metrics: of all pools (default: to nobody)",
    )
    sub.add_argument("--foreground", action="store_true", help="stay, and log to stderr")
    sub.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="lines of the log: text, or a JSON object each (default: text)",
    )
    sub.add_argument(
        "--staging",
        type=arguments.memory_size,
        metavar="SIZE",
        help="memory for blocks being written (default 256M; in a cgroup at most a quarter of its limit)",
    )
    sub.add_argument(
        "--read-memory",
        type=arguments.memory_size,
        metavar="SIZE",
        help="memory for reads under way (default 128M; in a cgroup at most an eighth of its limit)",
    )
    sub.add_argument(
        "--threads", type=arguments.count, metavar="N", help="server threads (default: one a core, at most 8)"
    )
    sub.add_argument(
        "--io-timeout", type=arguments.count, metavar="MS", help="deadline of a device's I/O (default 10000)"
    )
    sub.add_argument(
        "--slow-ops", type=arguments.slow_ms, default=1000, metavar="MILLISECONDS",
        help="log the path of what takes longer (default 1000; 0: nothing)",
    )  # fmt: skip
    sub.add_argument(
        "--timeout",
        type=arguments.seconds,
        default=120.0,
        metavar="S",
        help="give up starting after this long without progress (default 120)",
    )


def _export_part(export: Export) -> dict[str, object]:
    return {"socket": str(export.socket), "tag": export.tag, "queues": export.queues}


def _running_exports(pool: Path) -> tuple[Export, ...]:
    """The exports of the pool's daemon."""
    from kvfs.frontend.asking import ControlClient, NotRunningError
    from kvfs.virtiofs.exports import Export

    try:
        with ControlClient(pool) as client:
            found = numbers.items(cast(numbers.Json, client.call("status")), "exports")
    except NotRunningError:
        found = []
    if not found:
        raise UsageError(f"export: {pool} is not exported now: give --virtiofs SOCKET")
    return tuple(
        Export(Path(str(item.get("socket"))), str(item.get("tag")), int(numbers.number(item, "queues")))
        for item in found
    )


def _show_export(args: argparse.Namespace, exports: Sequence[Export]) -> int:
    from kvfs.virtiofs import hypervisor

    documents = [
        {
            **_export_part(export),
            "qemu": hypervisor.qemu_arguments(export),
            "guest": hypervisor.guest_arguments(export),
            "libvirt": hypervisor.render_libvirt([export]),
        }
        for export in exports
    ]
    texts = [
        *([hypervisor.render_qemu(exports)] if args.show_qemu else []),
        *([hypervisor.render_libvirt(exports)] if args.show_libvirt else []),
    ]
    emit(args, {"exports": documents}, "\n".join(texts))
    return 0


def add_keep(verbs: Verbs) -> None:
    sub = verbs.add(
        "keep", _keep, "stand between QEMU and an export, so that its guest outlives a restart of the daemon"
    )
    sub.add_argument("socket", metavar="SOCKET", help="where the hypervisor connects")
    sub.add_argument("export", metavar="EXPORT", help="a socket of kvfs export or mount --virtiofs")
    sub.add_argument(
        "--timeout",
        type=arguments.seconds,
        default=60.0,
        metavar="S",
        help="without a daemon for this long the guest gets EIO (default 60)",
    )


def _keep(args: argparse.Namespace) -> int:
    import logging

    from kvfs.virtiofs.exports import listen, parse_export
    from kvfs.virtiofs.relay import keep

    path, export = parse_export(args.socket).socket, parse_export(args.export).socket
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    args.signals.until_ended()
    args.signals.outlive_terminal()  # a guest needs it
    with listen(path) as listener:
        try:
            emit_line(args, {"socket": str(path), "export": str(export)})  # who has read it may end this at once
            keep(listener, export, args.timeout)
        finally:
            path.unlink(missing_ok=True)
    return 0


def add_umount(verbs: Verbs) -> None:
    sub = verbs.add("umount", _umount, "unmount, and wait until the pool is clean; a POOL's exports end as well")
    sub.add_argument("target", metavar="MOUNTPOINT|POOL", help="where it is mounted, or the pool's directory")
    sub.add_argument("--lazy", action="store_true", help="also with files open: the rest follows when they are closed")
    sub.add_argument("--force", action="store_true", help="abort what is under way")


def _umount(args: argparse.Namespace) -> int:
    from kvfs.frontend import mount
    from kvfs.frontend.asking import not_yours
    from kvfs.pool.directory import LOCK_NAME

    present = mount.find_mount(args.target)
    if present is None or not present.is_kvfs:
        pool = Path(mount.resolve(args.target))
        for its in mount.mounts_of(pool):
            _refuse_strangers(its)
        try:
            if (pool / "kvfs.pid").exists() or mount.mounts_of(pool):
                return _end_pool(args, pool)
        except PermissionError as error:
            raise not_yours(pool) from error
        if present is None:
            raise mount.MountError(f"{args.target}: not mounted")
        raise mount.MountError(f"{args.target}: not a kvfs mount ({present.type})")
    _refuse_strangers(present)
    pool = Path(present.source)
    exports: list[str] = []
    # A pool that does not answer can be unmounted all the same.
    with suppress(KvfsError):
        exports, _ = _serving(pool)
    watch = _watch_daemon(pool)
    try:
        mount.unmount(present.mountpoint, lazy=args.lazy, force=args.force)
    except mount.MountError as error:
        if error.errno == errno.EBUSY and watch is not None and is_stopped(watch.pid):
            raise _kept_by_waiting(present.mountpoint, watch.pid) from error
        raise
    # Of a daemon that is dead nobody can keep anything.
    kept = holders(present.device, present.source) if watch is not None and not watch.wait(0) else []
    if watch is not None and not watch.pid and not kept and not exports:
        kept = _kept_by_daemon(pool)
    # Where only the mount is seen, as in an engine's container, the daemon's end is not.
    seen = os.path.lexists(pool / LOCK_NAME)
    clean = not exports and not kept and seen
    here, ends = f"{present.mountpoint}: unmounted", f"kvfs umount {pool} ends that"
    if not seen:
        note(f"{here}; whether the pool is clean is not known: its directory, {pool}, is not seen here")
    if exports:
        note(f"{here}; the pool is still exported ({', '.join(exports)}): {ends}")
    if kept:
        note(f"{here}; the pool is still mounted: {describe(kept)}: {ends}")
    if args.lazy and watch is not None and seen and not exports:
        clean = _has_ended(watch, here)
        if clean:  # whoever kept it has gone, as a process that had a copy of all mounts for a moment
            kept = []
    elif clean and watch is not None:
        clean = _wait_for_end(watch, args.target)
    document = {"mountpoint": present.mountpoint, "pool": present.source, "clean": clean, "exports": exports}
    emit(args, {**document, "held_by": _held_by(kept)})
    return 0


def _kept_by_waiting(mountpoint: str, pid: int) -> KvfsError:
    """The error for a mount whose daemon stands still: even a df that waits for its answer keeps it."""
    keeps = "an open file keeps it, or somebody who waits for an answer"
    failure = KvfsError(f"{mountpoint}: busy: {keeps}; {stopped(pid)}; or use --lazy")
    failure.errno = errno.EBUSY
    return failure


def _held_by(kept: Sequence[Holder]) -> list[dict[str, object]]:
    return [{"mountpoint": holder.mountpoint, "pid": holder.pid or None, "program": holder.program} for holder in kept]


def _kept_by_daemon(pool: Path) -> list[Holder]:
    """A daemon in a pid namespace that we do not see has its mount still, if an unmount here did not reach it."""
    from kvfs.frontend.asking import ControlClient

    try:
        with ControlClient(pool, timeout_s=UMOUNT_STATUS_TIMEOUT_S) as client:
            document = cast(numbers.Json, client.call("status"))
    except KvfsError:  # it ends
        return []
    return [Holder(str(item.get("mountpoint")), 0) for item in numbers.items(document, "mounts")]


def _refuse_strangers(present: Mount) -> None:
    """Raises MountError if this user may not unmount it."""
    from kvfs.frontend.mount import MountError

    if os.geteuid() not in (0, present.user) and present.user is not None:
        refusal = MountError(
            f"{present.mountpoint}: mounted by user {present.user}: only root and that user may unmount it"
        )
        refusal.errno = errno.EPERM
        raise refusal


def _end_pool(args: argparse.Namespace, pool: Path) -> int:
    """Unmount a pool from wherever it is mounted here, and end its daemon. So its exports end, and its mounts in other
    namespaces."""
    from kvfs.frontend import mount
    from kvfs.frontend.asking import ControlClient, NotRunningError

    exports, device = _serving(pool)
    watch = _watch_daemon(pool)
    present = mount.mounts_of(pool)
    mountpoints = [its.mountpoint for its in present]
    for mountpoint in mountpoints:
        mount.unmount(mountpoint, lazy=args.lazy, force=args.force)
    kept = [] if device is None else holders(device, str(pool))
    if kept and not args.lazy:
        note(f"{pool}: also mounted: {describe(kept)}: it ends there too, files that are open get 10 s")
    # It may be mounted elsewhere, where nobody here can look. With --lazy files stay open.
    if exports or not (args.lazy and mountpoints):
        try:
            with ControlClient(pool, timeout_s=UMOUNT_STATUS_TIMEOUT_S if mountpoints else None) as client:
                client.call("stop")
        except NotRunningError:
            if not mountpoints and not exports and watch is None:
                raise mount.MountError(f"{args.target}: not mounted") from None
        except KvfsError:
            if not mountpoints:
                raise  # else it ends already, and its end is waited for
    clean = True
    if watch is not None:
        clean = _has_ended(watch, f"{pool}: unmounted") if args.lazy else _wait_for_end(watch, args.target)
    emit(args, {"mountpoints": mountpoints, "pool": str(pool), "clean": clean, "exports": exports})
    return 0


def _serving(pool: Path) -> tuple[list[str], str | None]:
    """The sockets that the pool's daemon serves, and the number of its mount."""
    from kvfs.frontend.asking import ControlClient, NotRunningError

    try:
        with ControlClient(pool, timeout_s=UMOUNT_STATUS_TIMEOUT_S) as client:
            document = cast(numbers.Json, client.call("status"))
    except NotRunningError:
        return [], None
    device = document.get("mount_device")
    exports = [str(item.get("socket")) for item in numbers.items(document, "exports")]
    return exports, device if isinstance(device, str) else None


class _LockWatch:
    """Waits until a pool's lock is free: its holder is in a pid namespace that we do not see."""

    pid = 0

    def __init__(self, pool: Path) -> None:
        self._pool = pool

    def wait(self, timeout_s: float) -> bool:
        from kvfs.pool.lock import is_locked

        until = time.monotonic() + timeout_s
        while is_locked(self._pool):
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(0.1, left_s))
        return True


def _watch_daemon(pool: Path) -> ProcessWatch | _LockWatch | None:
    """The daemon of a pool, from before the unmount; None if there is none. It listens at the control socket, whatever
    its pid namespace. The pool's lock tells of one that listens no more, or that an old kernel does not show."""
    from kvfs.frontend.asking import ControlClient
    from kvfs.frontend.mount import ProcessWatch

    with suppress(KvfsError), ControlClient(pool, timeout_s=UMOUNT_STATUS_TIMEOUT_S) as client:
        descriptor = client.peer_descriptor()
        return _LockWatch(pool) if descriptor is None else ProcessWatch(client.peer_pid(), descriptor)
    from kvfs.pool import lock, owner

    with suppress(KvfsError, OSError, OverflowError):
        holder = lock.lock_holder(pool)
        if holder is None or not owner.serves(holder):
            return None
        if owner.life(holder, owner.this_process()) is owner.Life.UNKNOWN:
            return _LockWatch(pool)
        return ProcessWatch(holder.pid)
    return None


def _has_ended(watch: ProcessWatch | _LockWatch, here: str) -> bool:
    """Of --lazy: whether all is on the devices by now."""
    if watch.wait(LAZY_WAIT_S):
        return True
    which = f" (pid {watch.pid})" if watch.pid else ""
    note(f"{here}; the daemon{which} goes on until files that are open are closed, and all is written")
    return False


def _wait_for_end(watch: ProcessWatch | _LockWatch, mountpoint: str) -> bool:
    from kvfs.errors import DeadlineError

    started = time.monotonic()
    with Progress() as progress:
        while not watch.wait(0.5):
            waited = time.monotonic() - started
            if is_stopped(watch.pid):
                raise DeadlineError(
                    f"{mountpoint}: unmounted, but {stopped(watch.pid)}, to write what is left, and to end"
                )
            progress("waiting for the daemon to write what is left, and to end", 0)
            if waited > UMOUNT_TIMEOUT_S:
                raise DeadlineError(
                    f"{mountpoint}: unmounted, but the daemon (pid {watch.pid}) has not ended after {waited:.0f} s"
                )
    return True
