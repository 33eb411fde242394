"""Verbs on a pool and its devices: format, import, device, discover, doctor, fsck."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvfs.cli import arguments
from kvfs.cli.arguments import Verbs
from kvfs.cli.output import emit, note_lines
from kvfs.cli.progress import Progress, told_by_daemon
from kvfs.cli.targets import pool_of, status_of
from kvfs.errors import KvfsError, UsageError, printable
from kvfs.units import counted, format_size, size_text

if TYPE_CHECKING:
    from kvfs import doctor
    from kvfs.store.fsck import FsckReport


def add_format(verbs: Verbs) -> None:
    sub = verbs.add("format", _format, "make a pool")
    sub.add_argument("pool", metavar="POOL", help="directory to make")
    sub.add_argument(
        "--device", action="append", default=[], metavar="PATH|URL",
        help="a block device, a file, or nvme-tcp://HOST:PORT/NQN?nsid=N; once for each; this or --files is required",
    )  # fmt: skip
    sub.add_argument(
        "--files",
        type=arguments.count,
        metavar="N",
        help="make N files in the pool's own directory the devices; this or --device is required",
    )
    sub.add_argument(
        "--size", type=arguments.size, metavar="SIZE", help="of each of the files (64M, 4G); required with --files"
    )
    sub.add_argument(
        "--stripe-width", type=arguments.count, metavar="W", help="devices in one segment (default: all, at most 4)"
    )
    sub.add_argument(
        "--stripe-unit",
        type=arguments.size,
        metavar="SIZE",
        help="bytes on one device before the next begins (default 128K)",
    )
    sub.add_argument(
        "--segment-size", type=arguments.size, metavar="SIZE", help="unit of eviction (default: by the pool's size)"
    )
    sub.add_argument("--force", action="store_true", help="overwrite labels and filesystems on the devices")
    sub.add_argument("--dry-run", action="store_true", help="check all, and write nothing")


def _format(args: argparse.Namespace) -> int:
    from kvfs.pool.devices import device_address
    from kvfs.pool.making import FormatRequest, format_devices

    if args.device and args.files:
        raise UsageError("--files: not together with --device")
    if not args.device and not args.files:
        raise UsageError("format: give --device PATH (once for each device) or --files N --size SIZE")
    if args.files and args.size is None:
        raise UsageError("--files: needs --size SIZE")
    if args.device and args.size is not None:
        raise UsageError("--size: only with --files; a device is used whole")
    refuse_inside(args.pool, args.device)
    result = format_devices(
        FormatRequest(
            pool=Path(args.pool),
            devices=tuple(device_address(device) for device in expanded(args.device)),
            files=args.files or 0,
            file_size=args.size or 0,
            stripe_width=args.stripe_width,
            stripe_unit=args.stripe_unit,
            segment_size=args.segment_size,
            force=args.force,
            dry_run=args.dry_run,
        )
    )
    config = result.config
    geometry = config.geometry
    size = sum(device.size for device in config.devices)
    document = {
        "pool": os.path.abspath(args.pool),
        "uuid": str(config.uuid),
        "size": size,
        "segment_count": config.segment_count,
        "segment_size": geometry.segment_size,
        "stripe_width": geometry.stripe_width,
        "stripe_unit": geometry.stripe_unit,
        "devices": [{"index": d.index, "path": d.path, "size": d.size} for d in config.devices],
        "notes": list(result.notes),
        **({"dry_run": True} if args.dry_run else {}),
    }
    lines = [
        f"pool {args.pool}: {counted(len(config.devices), 'device')}, {size_text(size)} in all, "
        f"{counted(config.segment_count, 'segment')} of {format_size(geometry.segment_size)}, "
        f"stripe width {geometry.stripe_width}, unit {format_size(geometry.stripe_unit)}",
        *note_lines(result.notes),
    ]
    if args.dry_run:
        lines.append("nothing was written")
    emit(args, document, "\n".join(printable(line) for line in lines))
    return 0


def add_import(verbs: Verbs) -> None:
    sub = verbs.add("import", _import, "write a lost pool.toml again, from the labels of its devices")
    sub.add_argument("pool", metavar="POOL", help="the pool's directory")
    sub.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="PATH",
        required=True,
        help="required, once for each device of the pool",
    )


def _import(args: argparse.Namespace) -> int:
    from kvfs.pool.devices import device_address
    from kvfs.pool.making import import_pool

    refuse_inside(args.pool, args.device)
    config = import_pool(Path(args.pool), [device_address(device) for device in expanded(args.device)])
    document = {"pool": os.path.abspath(args.pool), "uuid": str(config.uuid), "devices": len(config.devices)}
    pool = printable(str(args.pool))
    emit(
        args, document, f"pool {pool}: pool.toml written, {counted(len(config.devices), 'device')}, uuid {config.uuid}"
    )
    return 0


def add_discover(verbs: Verbs) -> None:
    sub = verbs.add("discover", _discover, "list the subsystems of an NVMe/TCP enclosure")
    sub.add_argument("address", metavar="HOST:PORT", help="of its discovery controller")


def _discover(args: argparse.Namespace) -> int:
    from kvfs.pool import nvme_tcp

    found = nvme_tcp.discover(f"{nvme_tcp.SCHEME}://{args.address}")
    lines = [printable(f"{each.transport} {each.address}:{each.port} {each.kind} {each.nqn}") for each in found]
    emit(args, {"subsystems": [asdict(subsystem) for subsystem in found]}, "\n".join(lines))
    return 0


def add_device(verbs: Verbs) -> None:
    sub = verbs.add("device", _device, "list a pool's devices, remove or replace one, add more")
    sub.add_argument("action", choices=("list", "add", "remove", "replace"), help="what to do with them")
    sub.add_argument("target", metavar="POOL|MOUNTPOINT", help="the pool's directory, or where it is mounted")
    sub.add_argument(
        "devices", metavar="DEVICE", nargs="*", help="add: PATH...; remove: a device's number or path; replace: OLD NEW"
    )
    sub.add_argument("--drain", action="store_true", help="remove: carry over what is pinned, open or hot before")
    sub.add_argument("--force", action="store_true", help="add, replace: overwrite what the new device holds")
    sub.add_argument("--dry-run", action="store_true", help="remove, mounted: say what would go with it, and leave it")


def _device(args: argparse.Namespace) -> int:
    pool, count = pool_of(args.target), len(args.devices)
    wanted = {"list": count == 0, "add": count > 0, "remove": count == 1, "replace": count == 2}
    if not wanted[args.action]:
        raise UsageError(f"device {args.action}: {counted(count, 'device')} given (try kvfs device --help)")
    for option, actions in (("drain", ("remove",)), ("dry_run", ("remove",)), ("force", ("add", "replace"))):
        if getattr(args, option) and args.action not in actions:
            raise UsageError(f"device {args.action}: --{option.replace('_', '-')} has no meaning there")
    if args.action == "list":
        return _device_list(args, pool)
    if args.action == "add":
        refuse_inside(pool, args.devices)
        return _device_add(args, pool)
    return _device_change(args, pool)


def _device_list(args: argparse.Namespace, pool: Path) -> int:
    from kvfs.status.text import render_device_list

    document = status_of(pool)
    devices = {"pool": os.path.abspath(pool), "devices": document["devices"]}
    emit(args, devices, lambda: "\n".join(render_device_list(document)))
    return 0


def _device_change(args: argparse.Namespace, pool: Path) -> int:
    """Remove or replace a device: by the pool's daemon, or here if there is none."""
    from kvfs.frontend.asking import ControlClient, NotRunningError

    asked: dict[str, object] = {"device": args.devices[0], "drain": args.drain, "dry_run": args.dry_run}
    if args.action == "replace":
        refuse_inside(pool, args.devices[1:])
        asked = {"device": args.devices[0], "path": _absolute(args.devices[1]), "force": args.force}
    step = "draining" if args.drain else f"{args.action.removesuffix('e')}ing"
    with Progress() as progress:
        try:
            with ControlClient(pool) as client:
                result = client.call(f"device_{args.action}", told_by_daemon(progress, step), **asked)
        except NotRunningError:
            # To open the pool would write: a new epoch, labels, what a crash has left.
            if args.dry_run:
                raise
            from kvfs.daemon.devices import change_device

            result = change_device(pool, args.action, asked, partial(progress, step, size=True))
    document = cast(Mapping[str, object], result)
    if args.dry_run:
        carried = "; those that are pinned, open or were read are carried over" if args.drain else ""
        there = counted(cast(int, document["blocks"]), "block")
        done = f"device {document['device']}: can be removed, with {there}{carried}"
    else:
        by = f" by {document['path']}" if "path" in document else ""
        lost = counted(cast(int, document["lost_blocks"]), "block")
        done = f"device {document['device']}: {args.action}d{by}, {lost} went with it"
    emit(args, document, printable(done))
    return 0


def _device_add(args: argparse.Namespace, pool: Path) -> int:
    from kvfs.pool.devices import device_address
    from kvfs.pool.making import add_devices

    before, after = add_devices(pool, [device_address(device) for device in expanded(args.devices)], force=args.force)
    document = {"pool": os.path.abspath(pool), "devices": len(after.devices), "segments": after.segment_count}
    text = (
        f"pool {printable(str(pool))}: "
        f"{counted(len(after.devices) - len(before.devices), 'device')} added, "
        f"{counted(after.segment_count - before.segment_count, 'segment')} more, {after.segment_count} now"
    )
    emit(args, document, text)
    return 0


def _absolute(device: str) -> str:
    from kvfs.pool.devices import device_address

    place = device_address(device)
    return os.path.abspath(place) if isinstance(place, Path) else place


def expanded(devices: list[str]) -> list[str]:
    """The namespaces that a URL means: all of them where it names a subsystem or an enclosure."""
    from kvfs.pool import nvme_tcp

    return [one for device in devices for one in (nvme_tcp.expand(device) if nvme_tcp.is_url(device) else [device])]


def refuse_inside(pool: str | Path, devices: Sequence[str] = ()) -> None:
    """Raises MountError if a pool, or a device that is given to it, lies in a kvfs mount."""
    from kvfs.frontend.mount import refuse_inside
    from kvfs.pool.devices import device_address

    refuse_inside(pool, "a pool")
    for place in map(device_address, devices):
        if isinstance(place, Path):
            refuse_inside(place, "a device of a pool")


def add_doctor(verbs: Verbs) -> None:
    sub = verbs.add("doctor", _doctor, "what this machine has of what kvfs needs, and what to do")
    sub.add_argument("device", nargs="*", metavar="DEVICE|POOL", help="look at these devices too, or those of a pool")


def _doctor(args: argparse.Namespace) -> int:
    from kvfs import doctor

    checks = doctor.examine(args.device)
    checks += [check for place in args.device if Path(place).is_dir() for check in _held_mount(Path(place))]
    status = 1 if any(check.fatal for check in checks) else 0
    document = {"checks": [asdict(check) for check in checks], "mount_can_work": status == 0}
    emit(args, document, lambda: doctor.render(checks))
    return status


def _held_mount(pool: Path) -> list[doctor.Check]:
    from kvfs import doctor
    from kvfs.daemon.holding import known_versions

    try:
        return list(doctor.held_mount(status_of(pool), known_versions()))
    except KvfsError as error:
        return [doctor.Check("held mount", "note", f"{pool}: its daemon cannot be asked: {error}")]


def add_fsck(verbs: Verbs) -> None:
    sub = verbs.add("fsck", _fsck, "check an unmounted pool; reports, and acts only with --repair")
    sub.add_argument("pool", metavar="POOL", help="the pool's directory")
    sub.add_argument("--repair", action="store_true", help="repair what can be, drop what cannot")
    sub.add_argument(
        "--dry-run", action="store_true", help="with --repair: say what it would act on, and change nothing"
    )
    sub.add_argument("--verify-data", action="store_true", help="read every block and check it")


def _fsck(args: argparse.Namespace) -> int:
    from kvfs.store.fsck import fsck

    if args.dry_run and not args.repair:
        raise UsageError("--dry-run: only with --repair; without it fsck changes nothing")
    acts = args.repair and not args.dry_run
    with Progress() as progress:
        report = fsck(Path(args.pool), repair=acts, verify_data=args.verify_data, progress=progress)
    document = {"pool": os.path.abspath(args.pool), "healthy": report.healthy, **asdict(report)}
    emit(args, document, lambda: _fsck_text(args, report))
    return 0 if report.healthy else 1


def _fsck_text(args: argparse.Namespace, report: FsckReport) -> str:

    lines = []
    for finding in report.findings:
        damaged = "would act on" if args.dry_run else "DAMAGED"
        mark = "repaired" if finding.repaired else "note" if finding.harmless else damaged
        lines.append(printable(f"{mark}: {finding.what}: {finding.message}"))
    if report.findings_left_out:
        lines.append(f"left out: {counted(report.findings_left_out, 'finding')} more")
    verified = f", {size_text(report.verified_bytes)} read and right" if args.verify_data else ""
    lines.append(
        f"pool {printable(str(args.pool))}: {counted(report.blocks, 'block')} of {size_text(report.bytes)} in "
        f"{counted(report.segments, 'segment')}, {counted(report.directories, 'directory')}{verified}"
    )
    if not report.damaged:
        lines.append("nothing is damaged")
    else:
        left = report.damaged - report.repaired
        acts = "" if not left or (args.repair and not args.dry_run) else "; --repair acts"
        lines.append(f"{counted(report.damaged, 'thing damaged')}, {report.repaired} repaired{acts}")
    return "\n".join(lines)
