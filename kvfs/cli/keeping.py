"""Verbs on blocks, by their paths or by their number of bytes: pin, unpin, prestage, evict, rm."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvfs.cli import arguments
from kvfs.cli.arguments import Verbs
from kvfs.cli.output import ToldError, as_json, emit, note
from kvfs.cli.progress import Progress, told_by_daemon
from kvfs.cli.targets import in_a_mount, place_of, pool_of
from kvfs.errors import KvfsError, UsageError
from kvfs.status.text import render_evicted, render_removed, told_filled
from kvfs.units import counted, size_text, told_size

if TYPE_CHECKING:
    from kvfs.frontend.asking import ControlClient


def add_pins(verbs: Verbs) -> None:
    for name, help_text in (
        ("pin", "keep files, or all below directories, from being evicted"),
        ("unpin", "let them be evicted again"),
    ):
        sub = verbs.add(name, _pin, help_text)
        sub.add_argument("paths", metavar="PATH", nargs="+", help="in a mount")


def _pin(args: argparse.Namespace) -> int:
    wanted = b"1" if args.verb == "pin" else b"0"
    _check_paths(args.paths)
    for path in args.paths:
        try:
            os.setxattr(path, "user.kvfs.pin", wanted)
        except OSError as error:
            raise _about(path, error) from error
    stays = [] if args.verb == "pin" else [_still_pinned(path) for path in args.paths]
    emit(args, {"paths": args.paths, "pinned": args.verb == "pin", **({"stays": stays} if stays else {})})
    for found in [] if as_json(args) else stays:
        above, below = cast(list[str], found["above"]), cast(list[str], found["below"])
        if above:
            note(f"{found['path']}: stays pinned by {above[-1]}, which it lies in")
        if below:
            more = f" and {len(below) - 3} more" if len(below) > 3 else ""
            note(f"{found['path']}: stays pinned below it: {', '.join(below[:3])}{more}")
    return 0


def _check_paths(paths: Sequence[str]) -> None:
    from kvfs.frontend import mount

    for path in paths:
        if not os.path.lexists(path):
            raise KvfsError(f"{path}: no such file or directory")
        if not in_a_mount(path, mount.mounts()):
            raise KvfsError(f"{path}: not in a kvfs mount")


def _about(path: str, error: OSError) -> KvfsError:
    failure = KvfsError(f"{path}: {error.strerror}")
    failure.errno = error.errno or errno.EIO
    return failure


def _still_pinned(path: str) -> dict[str, object]:
    """The pins that still hold for a path: those of directories above it, and those below it, as far as this user may
    ask the daemon."""
    from kvfs.frontend import mount
    from kvfs.frontend.asking import ControlClient

    present = mount.mount_of(path)
    assert present is not None
    top = Path(present.mountpoint)
    real = Path(os.path.realpath(path))
    above = [str(parent) for parent in real.parents if parent.is_relative_to(top) and _is_pinned(parent)]
    below: list[str] = []
    with suppress(KvfsError), ControlClient(Path(present.source)) as client:
        pins = cast(Mapping[str, list[Mapping[str, str]]], client.call("pins"))["pins"]
        paths = [top / pin["path"].lstrip("/") for pin in pins]
        below = sorted(str(pin) for pin in paths if pin != real and pin.is_relative_to(real))
    return {"path": path, "above": above[::-1], "below": below}


def _is_pinned(path: Path) -> bool:
    try:
        return os.getxattr(path, "user.kvfs.pin") == b"1"
    except OSError:
        return False


def add_prestage(verbs: Verbs) -> None:
    sub = verbs.add("prestage", _prestage, "read files, or all below directories, into the kernel's page cache")
    sub.add_argument("paths", metavar="PATH", nargs="+", help="in a mount")
    sub.add_argument("--threads", type=arguments.count, default=4, metavar="N", help="files read at once (default 4)")


def _prestage(args: argparse.Namespace) -> int:
    from kvfs.prestage import prestage

    _check_paths(args.paths)
    with Progress() as progress:
        done = prestage(args.paths, args.threads, lambda step, done, total: progress(step, done, total, size=True))
    emit(args, asdict(done), f"{counted(done.blocks, 'block')} of {size_text(done.bytes)} in the page cache")
    if done.missed and not as_json(args):
        note(f"{counted(done.missed, 'block')} gone, or not to be read")
    return 0


def add_evict(verbs: Verbs) -> None:
    sub = verbs.add("evict", _evict, "free space now")
    sub.add_argument("target", metavar="POOL|MOUNTPOINT", help="the pool's directory, or where it is mounted")
    sub.add_argument("--dry-run", action="store_true", help="say what may go and what stays, and evict nothing")
    amount = sub.add_mutually_exclusive_group(required=True)
    amount.add_argument(
        "--size", type=arguments.size, metavar="SIZE", help="free at least this much; this or --all is required"
    )
    amount.add_argument(
        "--all",
        action="store_true",
        help="evict every block that is neither pinned nor open; this or --size is required",
    )


def _evict(args: argparse.Namespace) -> int:
    from kvfs.frontend.asking import ControlClient

    with ControlClient(pool_of(args.target)) as client, Progress() as progress:
        tell = told_by_daemon(progress, "looking at what may go" if args.dry_run else "evicting")
        result = client.call("evict", tell, size=args.size, all=args.all, dry_run=args.dry_run)
    document = cast(Mapping[str, object], result)
    failure, evicted = None, cast(int, document.get("evicted_bytes", 0))
    if args.dry_run:
        may_go = cast(int, document.get("evictable_bytes", 0))
        if args.size is not None and may_go < args.size:
            failure = ToldError(f"{args.target}: {size_text(may_go)} of {told_size(args.size)} may go")
    elif args.size is not None and evicted < args.size:
        failure = ToldError(f"{args.target}: {size_text(evicted)} of {told_size(args.size)} could be evicted")
    emit(args, document, render_evicted(document), failure)
    return 0


def add_rm(verbs: Verbs) -> None:
    sub = verbs.add("rm", _rm, "forget namespaces: all blocks and directories below them, pinned ones too")
    sub.add_argument(
        "target",
        metavar="POOL|MOUNTPOINT|DIR",
        help="the pool's directory, where it is mounted, or what is to go there",
    )
    sub.add_argument("namespaces", metavar="NAMESPACE", nargs="*", help="directories below (default: DIR itself)")
    sub.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")
    sub.add_argument("--all", action="store_true", help="of a pool or mount point: all that is in it")
    sub.add_argument("-f", "--force", action="store_true", help="what is not there is no failure")


def _rm(args: argparse.Namespace) -> int:
    from kvfs.frontend.asking import ControlClient

    pool, paths = _places(args)
    results: list[Mapping[str, object]] = []
    failures: list[str] = []
    with ControlClient(pool) as client, Progress() as progress:

        def tell(document: Mapping[str, object]) -> None:
            done = document.get("done", 0)
            progress("counting" if args.dry_run else "removing", done if isinstance(done, int) else 0)

        for path in paths:
            try:
                results.append(_rm_one(client, tell, path, args))
            except KvfsError as error:
                if error.errno != errno.ENOENT:
                    raise
                if not args.force:
                    failures.append(str(error))
        wanted = {"dry_run": True, "places": results} if args.dry_run else {"places": results}
        failures += [filled for result in results if (filled := told_filled(result))]
        failure = ToldError("; ".join(failures)) if failures else None
        emit(args, wanted, lambda: "\n".join(map(render_removed, results)), failure)
    return 0


def _places(args: argparse.Namespace) -> tuple[Path, list[str]]:
    """The pool, and what is to go, from its root on. A link at the end is meant itself, as rm(1) does."""
    target = args.target
    if os.path.islink(target) and not target.endswith("/"):
        target = os.path.join(os.path.realpath(os.path.dirname(target) or "."), os.path.basename(target))
        pool, above = place_of(os.path.dirname(target))
        base = f"{above.rstrip('/')}/{os.path.basename(target)}"
    else:
        pool, base = place_of(target)
    wrong = [space for space in args.namespaces if not space.strip("/") or {".", ".."} & set(space.split("/"))]
    if wrong:
        raise UsageError(f"rm: {wrong[0]!r}: a namespace is expected, as models/r1")
    paths = [f"{base.rstrip('/')}/{space.strip('/')}" for space in args.namespaces] or [base]
    if args.all and paths != ["/"]:
        raise UsageError("rm: --all is of a pool or mount point, without a namespace")
    if paths == ["/"] and not args.all:
        raise UsageError(f"rm: {args.target} is a whole pool: name a namespace in it, or say --all")
    return pool, paths


def _rm_one(
    client: ControlClient, tell: Callable[[Mapping[str, object]], None], path: str, args: argparse.Namespace
) -> Mapping[str, object]:
    if not args.dry_run:
        return cast(Mapping[str, object], client.call("rm", tell, path=path, whole=args.all))
    found = cast(Mapping[str, object], client.call("list", tell, depth=0, path=path, fresh=True))
    total = cast(Mapping[str, object], found["total"])
    return {"path": path, "blocks": total["blocks"], "bytes": total["bytes"], "pins": found["pins"]}
