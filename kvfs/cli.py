"""The command line: arguments in, one function a verb, text or JSON out.

Data goes to stdout, messages to stderr. Exit status 0: done; 1: failed, with one line that names the object; 2: asked
for in a way that makes no sense, also one line. What a verb does to a pool is in the rooms below; they are imported
when the verb runs, so that `kvfs doctor` and `kvfs --help` work where the data plane does not.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from kvfs.errors import KvfsError, NotFoundError, UsageError, first_error, printable

if TYPE_CHECKING:
    from kvfs.daemon import MountOptions
    from kvfs.frontend.mount import Mount
    from kvfs.frontend.virtiofs import Export

JSON_VERSION = 1
# Anything that takes longer than this says how far it is.
PROGRESS_AFTER_S = 2.0
UMOUNT_TIMEOUT_S = 120.0
UMOUNT_STATUS_TIMEOUT_S = 5.0
_SLOW_MS_MAX = 86_400_000
# What the extra "daemon" of pyproject.toml installs: a client has none of it.
DAEMON_PACKAGES = frozenset({"pyfuse3", "trio", "lmdb", "xxhash"})
# They become another program. The module of each, in kvfs.client, is its first word.
RUN_VERBS = {
    "cufile-run": "run a program whose cuFile reads on kvfs mounts take the native path",
    "preload-run": "run a program whose file reads on kvfs mounts take the native path",
}


class _WrongCommandLine(UsageError):
    """What argparse refuses. Its text begins with the command."""


class _ToldError(KvfsError):
    """A failure after which there is a result all the same: in JSON both are one document, which is printed already."""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line; main() exits with 2."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong:
            message += _guess(wrong[1], re.findall(r"[\w-]+", wrong[2]))
        raise _WrongCommandLine(f"{self.prog}: {message} (try {self.prog} --help)")

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        known, extra = super().parse_known_args(args, namespace)
        for word in extra:
            guess = _guess(word.partition("=")[0], self._option_string_actions)
            if word.startswith("--") and guess:
                self.error(f"unrecognized arguments: {word}{guess}")
        return known, extra


def _guess(word: str, known: Iterable[str]) -> str:
    """What was meant by a mistyped word, if one comes near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:
        return _guarded(lambda: _bench(arguments[1:]), False)

    def command() -> int:
        args = parser().parse_args(arguments)
        return cast(int, args.function(args))

    return _guarded(command, _asks_for_json(arguments))


def _asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether an error is told in JSON too: known before the command line is understood, as that may be the error."""
    if arguments[:1] and arguments[0] in RUN_VERBS:
        return False
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    pairs = itertools.pairwise(words)
    return any(pair in (("-o", "json"), ("--output", "json")) for pair in pairs) or bool(
        {"-ojson", "--output=json"} & set(words)
    )


def _guarded(command: Callable[[], int], as_json: bool) -> int:
    """Turn every failure into one line on stderr and a status, and into a document on stdout if that is asked for.
    KVFS_DEBUG=1 shows the traceback."""
    debug = os.environ.get("KVFS_DEBUG") == "1"

    def fail(error: object, status: int, text: str | None = None) -> int:
        return _fail(error, debug, status, as_json, text)

    try:
        try:
            return command()
        except BaseExceptionGroup as group:
            raise first_error(group) from group
    except UsageError as error:
        return fail(error, 2)
    except KvfsError as error:
        return fail(error, 1)
    except KeyboardInterrupt:
        return fail(InterruptedError(errno.EINTR, "interrupted"), 130, "interrupted")
    except BrokenPipeError:
        # Whoever read our output has seen enough; without this the interpreter complains at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ImportError as error:
        if error.name in DAEMON_PACKAGES:
            needs = "this verb needs what the daemon needs: pip install 'kvfs[daemon]'"
            return fail(error, 1, f"{error.name}: not installed; {needs}")
        return fail(error, 1, f"{error.name or 'kvfs'}: cannot be loaded ({error}); run tools/setup")
    except OSError as error:
        return fail(error, 1, f"{error.filename}: {error.strerror}" if error.filename else None)
    except Exception as error:  # our bug, but the user gets one line
        return fail(error, 1, f"internal error: {type(error).__name__}: {error} (KVFS_DEBUG=1 shows where)")


def _fail(error: object, debug: bool, status: int, as_json: bool, text: str | None) -> int:
    if debug and status != 130:
        import traceback

        traceback.print_exc()
    message = " ".join((text or str(error)).split("\n"))
    if as_json and not isinstance(error, _ToldError):
        _print_json(_error_part(message, error))
    print(printable(message if isinstance(error, _WrongCommandLine) else f"kvfs: {message}"), file=sys.stderr)
    return status


def _error_part(message: str, error: object) -> dict[str, object]:
    number = getattr(error, "errno", None)
    return {"error": message, "errno": number if isinstance(number, int) else None}


# ---- arguments ----


def _size(text: str) -> int:
    from kvfs.units import parse_size

    try:
        return parse_size(text, what="SIZE")
    except (KvfsError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _memory_size(text: str) -> int:
    """A size that this machine's memory can hold."""
    size = _size(text)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        raise argparse.ArgumentTypeError(f"{text!r} is more than this machine's memory, {memory >> 20}M")
    return size


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: not a positive number")
    return int(text)


def _whole(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _slow_ms(text: str) -> int:
    value = _whole(text)
    if value > _SLOW_MS_MAX:
        raise argparse.ArgumentTypeError(f"{text}: at most {_SLOW_MS_MAX} ms, a day")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1e-6 <= value <= 1e12:
        raise argparse.ArgumentTypeError(f"{text!r}: not a positive number")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: not a share from 0 to below 1")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.05 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r}: not a number of seconds from 0.05 to 86400")
    return value


def parser() -> argparse.ArgumentParser:
    """The whole command line; completion and manual pages are made from it as well (usage.py)."""
    top = _Parser(prog="kvfs", description="A striped cache of KV blocks, mounted as a filesystem.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=_version())
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)

    def verb(name: str, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("-o", "--output", choices=("text", "json"), default="text", help="how to print the result")
        sub.set_defaults(function=function)
        return sub

    sub = verb("format", _format, "make a pool")
    sub.add_argument("pool", metavar="POOL", help="directory to make")
    sub.add_argument(
        "--device", action="append", default=[], metavar="PATH|URL",
        help="a block device, a file, ng:/dev/ngXnY, or nvme-tcp://HOST:PORT/NQN?nsid=N; once for each",
    )  # fmt: skip
    sub.add_argument("--files", type=_count, metavar="N", help="make N files in the pool's own directory the devices")
    sub.add_argument("--size", type=_size, metavar="SIZE", help="of each of the files (64M, 4G)")
    sub.add_argument(
        "--stripe-width", type=_count, metavar="W", help="devices in one segment (default: all, at most 4)"
    )
    sub.add_argument(
        "--stripe-unit", type=_size, metavar="SIZE", help="bytes on one device before the next begins (default 128K)"
    )
    sub.add_argument(
        "--segment-size", type=_size, metavar="SIZE", help="unit of eviction (default: by the pool's size)"
    )
    sub.add_argument("--force", action="store_true", help="overwrite labels and filesystems on the devices")

    sub = verb("mount", _mount, "mount a pool; returns once the mount answers")
    sub.add_argument("pool", metavar="POOL", help="the pool's directory")
    sub.add_argument("mountpoint", metavar="MOUNTPOINT", help="a directory")
    _add_daemon_arguments(sub)
    sub.add_argument("--allow-other", action="store_true", help="let other users in")
    sub.add_argument(
        "--options", default="", metavar="LIST", help="mount(8) options, comma separated: ro, noexec, suid, dev, ..."
    )
    sub.add_argument(
        "--request-timeout",
        type=_count,
        metavar="S",
        help="have the kernel end the mount if a request waits this long, as with a stopped daemon (default: never)",
    )

    sub = verb("export", _export, "serve a pool to virtual machines or a DPU's host, without a mount here")
    sub.add_argument("pool", metavar="POOL", help="the pool's directory")
    _add_daemon_arguments(sub)
    sub.add_argument(
        "--show-qemu", action="store_true", help="start nothing; print the QEMU command and the guest's mount command"
    )
    sub.add_argument("--show-libvirt", action="store_true", help="start nothing; print libvirt's XML")

    sub = verb("keep", _keep, "stand between QEMU and an export, so that its guest outlives a restart of the daemon")
    sub.add_argument("socket", metavar="SOCKET", help="where the hypervisor connects")
    sub.add_argument("export", metavar="EXPORT", help="a socket of kvfs export or mount --virtiofs")
    sub.add_argument(
        "--timeout", type=_seconds, default=60.0, metavar="S", help="without a daemon for this long the guest gets EIO"
    )

    sub = verb("umount", _umount, "unmount, and wait until the pool is clean; a POOL's exports end as well")
    sub.add_argument("target", metavar="MOUNTPOINT|POOL", help="where it is mounted, or the pool's directory")
    sub.add_argument("--lazy", action="store_true", help="also with files open: the rest follows when they are closed")
    sub.add_argument("--force", action="store_true", help="abort what is under way")

    sub = verb("status", _status, "devices, segments, use, counters, errors and advice")
    sub.add_argument("target", metavar="POOL|MOUNTPOINT", nargs="?", help="default: every mounted pool")

    sub = verb("list", _list, "what lies in a pool: blocks, bytes, hits and ages by directory, and what is pinned")
    sub.add_argument("target", metavar="POOL|MOUNTPOINT", help="the pool's directory, or where it is mounted")
    sub.add_argument(
        "--depth", type=_whole, default=1, metavar="N",
        help="directories so far below the mount, each with all that is below it (default 1)",
    )  # fmt: skip
    sub.add_argument("--pins", action="store_true", help="only what is pinned")

    sub = verb("stats", _stats, "rates and latencies, once or at an interval")
    sub.add_argument("target", metavar="POOL|MOUNTPOINT", help="the pool's directory, or where it is mounted")
    sub.add_argument("--interval", type=_seconds, metavar="S", help="a line every S seconds")
    sub.add_argument("--count", type=_count, metavar="N", help="stop after N lines")
    sub.add_argument("--prometheus", action="store_true", help="Prometheus text format")

    sub = verb("top", _top, "a live view of a pool in the terminal, until interrupted")
    sub.add_argument("target", metavar="POOL|MOUNTPOINT", help="the pool's directory, or where it is mounted")
    sub.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="draw every S seconds (default 1)")
    sub.add_argument("--count", type=_count, metavar="N", help="end after N times")

    sub = verb("metrics", _metrics, "serve the metrics of every mounted pool to Prometheus, until interrupted")
    sub.add_argument("address", metavar="[HOST:]PORT", help="where to listen; without HOST for this machine alone")

    sub = verb("fsck", _fsck, "check an unmounted pool; reports, and acts only with --repair")
    sub.add_argument("pool", metavar="POOL", help="the pool's directory")
    sub.add_argument("--repair", action="store_true", help="repair what can be, drop what cannot")
    sub.add_argument("--verify-data", action="store_true", help="read every block and check it")

    for name, text in (
        ("pin", "keep files, or all below directories, from being evicted"),
        ("unpin", "let them be evicted again"),
    ):
        sub = verb(name, _pin, text)
        sub.add_argument("paths", metavar="PATH", nargs="+", help="in a mount")

    sub = verb("prestage", _prestage, "read files, or all below directories, into the kernel's page cache")
    sub.add_argument("paths", metavar="PATH", nargs="+", help="in a mount")
    sub.add_argument("--threads", type=_count, default=4, metavar="N", help="files read at once (default 4)")

    sub = verb("evict", _evict, "free space now")
    sub.add_argument("target", metavar="POOL|MOUNTPOINT", help="the pool's directory, or where it is mounted")
    amount = sub.add_mutually_exclusive_group(required=True)
    amount.add_argument("--size", type=_size, metavar="SIZE", help="free at least this much")
    amount.add_argument("--all", action="store_true", help="evict every block that is neither pinned nor open")

    sub = verb("discover", _discover, "list the subsystems of an NVMe/TCP enclosure")
    sub.add_argument("address", metavar="HOST:PORT", help="of its discovery controller")

    sub = verb("device", _device, "list a pool's devices, remove or replace one, add more")
    sub.add_argument("action", choices=("list", "add", "remove", "replace"), help="what to do with them")
    sub.add_argument("target", metavar="POOL|MOUNTPOINT", help="the pool's directory, or where it is mounted")
    sub.add_argument(
        "devices", metavar="DEVICE", nargs="*", help="add: PATH...; remove: a device's number or path; replace: OLD NEW"
    )
    sub.add_argument("--drain", action="store_true", help="remove: carry over what is pinned, open or hot before")
    sub.add_argument("--force", action="store_true", help="add, replace: overwrite what the new device holds")

    sub = verb("doctor", _doctor, "what this machine has of what kvfs needs, and what to do")
    sub.add_argument("device", nargs="*", metavar="DEVICE|POOL", help="look at these devices too, or those of a pool")

    sub = verb("import", _import, "write a lost pool.toml again, from the labels of its devices")
    sub.add_argument("pool", metavar="POOL", help="the pool's directory")
    sub.add_argument(
        "--device", action="append", default=[], metavar="PATH", required=True, help="once for each device of the pool"
    )

    _add_replay(verb("replay", _replay, "replay a trace of requests against a directory, as an inference engine would"))

    sub = verbs.add_parser(
        "completion", help="shell completion: source <(kvfs completion); kvfs completion fish | source",
        allow_abbrev=False,
    )  # fmt: skip
    sub.add_argument("shell", nargs="?", choices=("bash", "zsh", "fish"), default="bash", help="default: bash")
    sub.set_defaults(function=_completion)
    for name, text in RUN_VERBS.items():
        sub = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("command", metavar="CMD", nargs=argparse.REMAINDER, help="a program and its arguments")
        sub.set_defaults(function=_run)

    verbs.add_parser("bench", help="measure kvfs against its peers (kvfs bench --help)", add_help=False)

    sub = verbs.add_parser("man", help="manual pages: kvfs man mount | man -l -", allow_abbrev=False)
    page = sub.add_mutually_exclusive_group()
    page.add_argument("--directory", metavar="DIR", help="write every page there")
    sub.set_defaults(function=_man)
    page.add_argument("page", metavar="VERB", nargs="?", choices=tuple(verbs.choices), help="default: kvfs itself")
    return top


def _add_replay(sub: argparse.ArgumentParser) -> None:
    from kvfs.replay.trace import BLOCK_TOKENS, MODELS

    sub.add_argument("trace", metavar="TRACE", help="JSON lines: timestamp (ms), input_length, hash_ids")
    sub.add_argument("--target", metavar="DIR", required=True, help="where the blocks are; any directory will do")
    sub.add_argument("--native", action="store_true", help="DIR is in a kvfs mount: by libkvfs, not by files")
    size = sub.add_mutually_exclusive_group(required=True)
    size.add_argument("--model", choices=sorted(MODELS), help="what a token takes, bf16, all ranks")
    size.add_argument("--bytes-per-token", type=_count, metavar="N", help=f"a block is {BLOCK_TOKENS} tokens")
    size.add_argument("--block-size", type=_size, metavar="SIZE", help="bytes of a block")
    pace = sub.add_mutually_exclusive_group()
    pace.add_argument("--time-scale", type=_positive, default=1.0, metavar="X", help="X times as fast (default 1)")
    pace.add_argument("--full-speed", action="store_true", help="no request waits for its time")
    sub.add_argument("--threads", type=_count, default=4, metavar="N", help="requests at once (default 4)")
    sub.add_argument(
        "--io-threads", type=_count, default=16, metavar="N",
        help="blocks loaded at once, and as many stored (default 16); with --native those of each request",
    )  # fmt: skip
    sub.add_argument("--skip", type=_whole, default=0, metavar="N", help="leave out the first N requests")
    sub.add_argument("--requests", type=_count, metavar="N", help="replay so many (default: all)")
    sub.add_argument("--warmup", type=_share, default=0.0, metavar="SHARE", help="of the requests, not counted: 0.3")
    sub.add_argument(
        "--prefill-tokens-per-second", type=_positive, default=8000.0, metavar="N",
        help="what the engine computes, for the time to the first token (default 8000)",
    )  # fmt: skip
    sub.add_argument("--memory", type=_memory_size, default=1 << 30, metavar="SIZE", help="of blocks on their way (1G)")
    sub.add_argument("--buffered", action="store_true", help="files without O_DIRECT")
    sub.add_argument("--verify", action="store_true", help="compare every byte that is loaded")
    sub.add_argument("--touch", action="store_true", help="set a file's atime at each load")
    sub.add_argument(
        "--lru", type=_size, default=0, metavar="SIZE", help="keep at most so much in DIR, by an LRU in memory"
    )
    sub.add_argument("--plot", metavar="FILE.svg", help="draw hit ratio and load latency over time")


def _add_daemon_arguments(sub: argparse.ArgumentParser) -> None:
    """What `kvfs mount` and `kvfs export` have in common."""
    sub.add_argument(
        "--virtiofs",
        action="append",
        default=[],
        metavar="SOCKET[,tag=TAG][,queues=N][,memory=TYPE]",
        help="export by virtio-fs: one front end at a time connects to this socket; once for each",
    )
    sub.add_argument(
        "--force", action="store_true", help="take the pool from another machine that uses it; the mount there ends"
    )
    sub.add_argument(
        "--metrics", metavar="[HOST:]PORT", help="serve the pool's metrics to Prometheus (kvfs metrics: of all pools)"
    )
    sub.add_argument("--foreground", action="store_true", help="stay, and log to stderr")
    sub.add_argument("--staging", type=_memory_size, metavar="SIZE", help="memory for blocks being written")
    sub.add_argument("--read-memory", type=_memory_size, metavar="SIZE", help="memory for reads under way")
    sub.add_argument("--threads", type=_count, metavar="N", help="server threads (default: one a core, at most 8)")
    sub.add_argument("--io-timeout", type=_count, metavar="MS", help="deadline of a device's I/O (default 10000)")
    sub.add_argument(
        "--slow-ops", type=_slow_ms, default=1000, metavar="MILLISECONDS",
        help="log the path of what takes longer (default 1000; 0: nothing)",
    )  # fmt: skip
    sub.add_argument(
        "--timeout", type=_seconds, default=120.0, metavar="S", help="give up starting after this long without progress"
    )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"kvfs {version('kvfs')}"
    except PackageNotFoundError:
        return "kvfs (not installed)"


def _print_json(document: Mapping[str, object]) -> None:
    print(json.dumps({"version": JSON_VERSION, **document}, indent=2))


def _note(text: object) -> None:
    """A line for people, beside the result."""
    print(printable(f"kvfs: {text}"), file=sys.stderr)


def _print_json_line(document: Mapping[str, object]) -> None:
    """Of verbs that go on: whoever reads has it at once."""
    print(json.dumps({"version": JSON_VERSION, **document}), flush=True)


class ProgressPrinter:
    """Says on stderr how far a long step is: nothing in the first two seconds, then at most a line a second."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PROGRESS_AFTER_S
        self._open_line = False

    def __call__(self, step: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next and not (self._open_line and done >= total > 0):
            return
        self._next = now + 1.0
        share = f"{done} of {total} ({done * 100 // total}%)" if total else str(done)
        if sys.stderr.isatty():
            print(f"\r\x1b[Kkvfs: {step}: {share}", end="", file=sys.stderr, flush=True)
            self._open_line = True
        else:
            print(f"kvfs: {step}: {share}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._open_line:
            print(file=sys.stderr)
            self._open_line = False


# ---- verbs ----


def _expanded(devices: list[str]) -> list[str]:
    """Every namespace where a URL names a subsystem or an enclosure."""
    from kvfs.pool import nvme_tcp

    return [one for device in devices for one in (nvme_tcp.expand(device) if nvme_tcp.is_url(device) else [device])]


def _refuse_inside(pool: str | Path, devices: Sequence[str] = ()) -> None:
    """MountError if a pool, or a device that is given to it, lies in a kvfs mount."""
    from kvfs.frontend.mount import refuse_inside
    from kvfs.pool.devices import place_of

    refuse_inside(pool, "a pool")
    for place in map(place_of, devices):
        if isinstance(place, Path):
            refuse_inside(place, "a device of a pool")


def _discover(args: argparse.Namespace) -> int:
    from kvfs.pool import nvme_tcp

    found = nvme_tcp.discover(f"{nvme_tcp.SCHEME}://{args.address}")
    if args.output == "json":
        _print_json({"subsystems": [asdict(subsystem) for subsystem in found]})
        return 0
    for subsystem in found:
        where = f"{subsystem.transport} {subsystem.address}:{subsystem.port}"
        print(printable(f"{where} {subsystem.kind} {subsystem.nqn}"))
    return 0


def _format(args: argparse.Namespace) -> int:
    from kvfs.pool.devices import place_of
    from kvfs.pool.making import FormatRequest, format_devices
    from kvfs.units import format_size

    if args.device and args.files:
        raise UsageError("--files: not together with --device")
    if not args.device and not args.files:
        raise UsageError("format: give --device PATH (once for each device) or --files N --size SIZE")
    if args.files and args.size is None:
        raise UsageError("--files: needs --size SIZE")
    if args.device and args.size is not None:
        raise UsageError("--size: only with --files; a device is used whole")
    _refuse_inside(args.pool, args.device)
    result = format_devices(
        FormatRequest(
            pool=Path(args.pool),
            devices=tuple(place_of(device) for device in _expanded(args.device)),
            files=args.files or 0,
            file_size=args.size or 0,
            stripe_width=args.stripe_width,
            stripe_unit=args.stripe_unit,
            segment_size=args.segment_size,
            force=args.force,
        )
    )
    config = result.config
    geometry = config.geometry
    if args.output == "json":
        _print_json(
            {
                "pool": os.path.abspath(args.pool),
                "uuid": str(config.uuid),
                "segment_count": config.segment_count,
                "segment_size": geometry.segment_size,
                "stripe_width": geometry.stripe_width,
                "stripe_unit": geometry.stripe_unit,
                "devices": [{"index": d.index, "path": d.path, "size": d.size} for d in config.devices],
                "notes": list(result.notes),
            }
        )
        return 0
    for note in result.notes:
        _note(note)
    print(
        f"pool {printable(str(args.pool))}: {len(config.devices)} devices, {config.segment_count} segments of "
        f"{format_size(geometry.segment_size)}, stripe width {geometry.stripe_width}, "
        f"unit {format_size(geometry.stripe_unit)}"
    )
    return 0


def _mount(args: argparse.Namespace) -> int:
    from kvfs.daemon import MountOptions
    from kvfs.frontend.virtiofs import parse_exports

    return _start(
        args,
        MountOptions(
            pool=Path(os.path.abspath(args.pool)),
            mountpoint=Path(os.path.abspath(args.mountpoint)),
            exports=parse_exports(args.virtiofs),
            allow_other=args.allow_other,
            options=tuple(option for option in args.options.split(",") if option),
            request_timeout_s=args.request_timeout,
        ),
    )


def _export(args: argparse.Namespace) -> int:
    from kvfs.daemon import MountOptions
    from kvfs.frontend.virtiofs import parse_exports

    exports = parse_exports(args.virtiofs)
    if args.show_qemu or args.show_libvirt:
        return _show_export(args, exports or _running_exports(Path(args.pool)))
    if not exports:
        raise UsageError("export: give --virtiofs SOCKET (once for each guest)")
    return _start(args, MountOptions(pool=Path(os.path.abspath(args.pool)), exports=exports))


def _start(args: argparse.Namespace, options: MountOptions) -> int:
    from kvfs import metrics
    from kvfs.daemon import start
    from kvfs.frontend.endpoint import parse_address

    if args.metrics is not None:
        metrics.require()
    pid = start(
        replace(
            options,
            metrics=None if args.metrics is None else parse_address(args.metrics),
            foreground=args.foreground,
            staging_size=args.staging,
            read_memory_size=args.read_memory,
            server_threads=args.threads,
            io_timeout_ms=args.io_timeout,
            slow_ms=args.slow_ops,
            start_timeout_s=args.timeout,
            force=args.force,
        )
    )
    if args.output == "json":
        _print_json(
            {
                "pool": str(options.pool),
                **({"mountpoint": str(options.mountpoint)} if options.mountpoint is not None else {}),
                "exports": [_export_part(export) for export in options.exports],
                "pid": pid,
            }
        )
    return 0


def _export_part(export: Export) -> dict[str, object]:
    return {"socket": str(export.socket), "tag": export.tag, "queues": export.queues}


def _running_exports(pool: Path) -> tuple[Export, ...]:
    """Those of the pool's daemon."""
    from kvfs import stats
    from kvfs.frontend.control import ControlClient, NotRunningError
    from kvfs.frontend.virtiofs import Export

    try:
        with ControlClient(pool) as client:
            found = stats.items(cast(stats.Json, client.call("status")), "exports")
    except NotRunningError:
        found = []
    if not found:
        raise UsageError(f"export: {pool} is not exported now: give --virtiofs SOCKET")
    return tuple(
        Export(Path(str(item.get("socket"))), str(item.get("tag")), int(stats.number(item, "queues"))) for item in found
    )


def _show_export(args: argparse.Namespace, exports: Sequence[Export]) -> int:
    from kvfs.frontend import hypervisor

    if args.output == "json":
        documents = [
            {
                **_export_part(export),
                "qemu": hypervisor.qemu_arguments(export),
                "guest": hypervisor.guest_arguments(export),
                "libvirt": hypervisor.render_libvirt([export]),
            }
            for export in exports
        ]
        _print_json({"exports": documents})
        return 0
    if args.show_qemu:
        print(hypervisor.render_qemu(exports))
    if args.show_libvirt:
        print(hypervisor.render_libvirt(exports))
    return 0


def _keep(args: argparse.Namespace) -> int:
    import logging
    import signal

    from kvfs.frontend.keeper import keep
    from kvfs.frontend.virtiofs import listen, parse_export

    path, export = parse_export(args.socket).socket, parse_export(args.export).socket
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with listen(path) as listener:
        if args.output == "json":
            _print_json_line({"socket": str(path), "export": str(export)})
        try:
            keep(listener, export, args.timeout)
        finally:
            path.unlink(missing_ok=True)
    return 0


def _umount(args: argparse.Namespace) -> int:
    from kvfs.frontend import mount
    from kvfs.frontend.control import not_yours

    present = mount.find_mount(args.target)
    if present is None or not present.is_kvfs:
        pool = Path(mount.resolve(args.target))
        for its in mount.mounts_of(pool):
            _refuse_strangers(its)
        try:
            if (pool / "kvfs.pid").exists():
                return _end_pool(args, pool)
        except PermissionError as error:
            raise not_yours(pool) from error
        if present is None:
            raise mount.MountError(f"{args.target}: not mounted")
        raise mount.MountError(f"{args.target}: not a kvfs mount ({present.type})")
    _refuse_strangers(present)
    pool = Path(present.source)
    exports: list[str] = []
    # One that does not answer can be unmounted all the same.
    with suppress(KvfsError):
        exports = _exports_of(pool)
    watch = _watch_daemon(pool)
    mount.unmount(present.mountpoint, lazy=args.lazy, force=args.force)
    clean = not exports
    if exports:
        _note(
            f"{present.mountpoint}: unmounted; the pool is still exported ({', '.join(exports)}): "
            f"kvfs umount {pool} ends that"
        )
    elif watch is not None and not args.lazy:
        clean = _wait_for_end(watch, args.target)
    if args.output == "json":
        _print_json({"mountpoint": present.mountpoint, "pool": present.source, "clean": clean, "exports": exports})
    return 0


def _refuse_strangers(present: Mount) -> None:
    """MountError if this user may not unmount it."""
    from kvfs.frontend.mount import MountError

    if os.geteuid() not in (0, present.user) and present.user is not None:
        refusal = MountError(
            f"{present.mountpoint}: mounted by user {present.user}: only root and that user may unmount it"
        )
        refusal.errno = errno.EPERM
        raise refusal


def _end_pool(args: argparse.Namespace, pool: Path) -> int:
    """Unmount a pool from wherever it is mounted, and end its exports."""
    from kvfs.frontend import mount
    from kvfs.frontend.control import ControlClient, NotRunningError

    exports = _exports_of(pool)
    watch = _watch_daemon(pool)
    mountpoints = [present.mountpoint for present in mount.mounts_of(pool)]
    for mountpoint in mountpoints:
        mount.unmount(mountpoint, lazy=args.lazy, force=args.force)
    if exports:
        with suppress(NotRunningError), ControlClient(pool) as client:
            client.call("stop")
    elif not mountpoints:
        raise mount.MountError(f"{args.target}: not mounted")
    clean = True
    if watch is not None and not args.lazy:
        clean = _wait_for_end(watch, args.target)
    if args.output == "json":
        _print_json({"mountpoints": mountpoints, "pool": str(pool), "clean": clean, "exports": exports})
    return 0


def _exports_of(pool: Path) -> list[str]:
    """The sockets that the pool's daemon serves."""
    from kvfs import stats
    from kvfs.frontend.control import ControlClient, NotRunningError

    try:
        with ControlClient(pool, timeout_s=UMOUNT_STATUS_TIMEOUT_S) as client:
            document = cast(stats.Json, client.call("status"))
    except NotRunningError:
        return []
    return [str(item.get("socket")) for item in stats.items(document, "exports")]


def _watch_daemon(pool: Path) -> object:
    """The daemon of a pool, held by a pidfd from before the unmount; None if there is none."""
    from kvfs.errors import PoolError
    from kvfs.frontend.mount import ProcessWatch
    from kvfs.guard import open_own

    try:
        with open(open_own(pool / "kvfs.pid", os.O_RDONLY, 0)) as file:
            return ProcessWatch(int(file.read(32)))
    except (PoolError, OSError, ValueError):
        return None


def _wait_for_end(watch: object, mountpoint: str) -> bool:
    from kvfs.errors import DeadlineError
    from kvfs.frontend.mount import ProcessWatch

    assert isinstance(watch, ProcessWatch)
    progress, started = ProgressPrinter(), time.monotonic()
    while not watch.wait(0.5):
        waited = time.monotonic() - started
        progress("writing what is not on the devices yet: seconds", int(waited), 0)
        if waited > UMOUNT_TIMEOUT_S:
            raise DeadlineError(
                f"{mountpoint}: unmounted, but the daemon (pid {watch.pid}) has not ended after {waited:.0f} s"
            )
    progress.close()
    return True


def _pool_of(target: str) -> Path:
    """The pool that a mount point or a pool's own path means."""
    from kvfs.frontend import mount

    present = mount.find_mount(target)
    if present is not None and present.is_kvfs:
        return Path(present.source)
    if present is None and not os.path.lexists(target):
        raise NotFoundError(f"{target}: no such pool or mount point")
    return Path(target)


def _pools_mounted() -> list[Path]:
    from kvfs.frontend import mount

    return sorted({Path(present.source) for present in mount.mounts() if present.is_kvfs})


def _status_of(pool: Path, timeout_s: float = 15.0) -> Mapping[str, object]:
    from kvfs.frontend.control import ControlClient, NotRunningError
    from kvfs.frontend.mount import mounts_of
    from kvfs.frontend.status import offline_status

    try:
        with ControlClient(pool, timeout_s) as client:
            return cast(Mapping[str, object], client.call("status"))
    except NotRunningError:
        document = offline_status(pool)
        dead = [present.mountpoint for present in mounts_of(pool)]
        notes = [f"{mountpoint}: its daemon is gone; kvfs mount or kvfs umount clears it" for mountpoint in dead]
        return {**document, "advice": [*notes, *cast(list[str], document["advice"])]}


def _status(args: argparse.Namespace) -> int:
    from kvfs import stats
    from kvfs.frontend.control import NotAllowedError

    if args.target is not None:
        document = _status_of(_pool_of(args.target))
        if args.output == "json":
            _print_json(document)
        else:
            print(stats.render_status(document))
        return 0
    documents, failures = [], []
    for pool in _pools_mounted():
        try:
            documents.append(_status_of(pool))
        except KvfsError as error:
            # One that cannot be asked does not hide the others.
            _note(error)
            failures.append(error)
    if args.output == "json":
        errors = [{"error": str(error), "errno": error.errno} for error in failures]
        _print_json({"pools": documents, **({"errors": errors} if errors else {})})
    elif documents:
        print("\n\n".join(stats.render_status(document) for document in documents))
    elif not failures:
        print("no pool is mounted", file=sys.stderr)
    # Pools of other users are no failure beside one's own.
    others = [error for error in failures if not isinstance(error, NotAllowedError)]
    return 1 if others or (failures and not documents) else 0


def _stats(args: argparse.Namespace) -> int:
    from kvfs import metrics, stats
    from kvfs.frontend.control import ControlClient

    if args.prometheus and args.output == "json":
        raise UsageError("--prometheus: not together with -o json")
    with ControlClient(_pool_of(args.target)) as client:
        now = cast(stats.Json, client.call("status"))
        if args.prometheus:
            print(metrics.render([now]).decode(), end="")
            return 0
        if args.interval is None:
            change = stats.difference(now, None)
            if args.output == "json":
                _print_json(change)
            else:
                print(stats.render_stats(change))
            return 0
        line = 0
        while args.count is None or line < args.count:
            before = now
            time.sleep(args.interval)
            now = cast(stats.Json, client.call("status"))
            change = stats.difference(now, before)
            if args.output == "json":
                _print_json_line(change)
            else:
                if line % 20 == 0:
                    print(stats.render_stats_header())
                print(stats.render_stats_line(change), flush=True)
            line += 1
    return 0


def _top(args: argparse.Namespace) -> int:
    import signal

    from kvfs import stats, top
    from kvfs.frontend.control import ControlClient

    as_json = args.output == "json"
    if not as_json and not sys.stdout.isatty():
        raise UsageError("top: stdout is no terminal; -o json prints a line for each interval")
    if not as_json:
        top.require()
    with ControlClient(_pool_of(args.target)) as client:

        def status() -> stats.Json:
            document = cast(stats.Json, client.call("status"))
            # The number of clients is no counter.
            return {**document, "native_clients": stats.number(document, "counters", "native_clients")}

        def survey() -> stats.Json:
            return cast(stats.Json, client.call("list", lambda _: None))

        # Its only way out: also where what started it ignores interrupts, as a script's background does.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            if not as_json:
                top.run(status, survey, args.interval, args.count)
                return 0
            for change, found in top.looks(status, survey, args.interval, args.count):
                _print_json_line({**change, **found})
    return 0


def _metrics(args: argparse.Namespace) -> int:
    import signal

    import trio

    from kvfs import metrics, stats
    from kvfs.frontend import endpoint

    address = endpoint.parse_address(args.address)
    metrics.require()
    # One look at a time: a daemon that does not answer holds up those that look, and no thread for each of them.
    looking = trio.CapacityLimiter(1)

    def look() -> list[stats.Json]:
        found = []
        for pool in _pools_mounted():
            try:
                found.append(_status_of(pool, timeout_s=2.0))
            except KvfsError as error:
                found.append({"pool": {"path": str(pool)}})
                _note(error)
        return found

    async def collect() -> list[stats.Json]:
        return await trio.to_thread.run_sync(look, limiter=looking, abandon_on_cancel=True)

    def ready(where: str) -> None:
        if args.output == "json":
            _print_json_line({"address": where})
        else:
            print(f"metrics at http://{where}/metrics", flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        trio.run(endpoint.serve, address, collect, ready)
    except BaseExceptionGroup as group:
        raise first_error(group) from None
    return 0


def _fsck(args: argparse.Namespace) -> int:
    from kvfs.stats import size_text
    from kvfs.store.fsck import fsck

    progress = ProgressPrinter()
    try:
        report = fsck(Path(args.pool), repair=args.repair, verify_data=args.verify_data, progress=progress)
    finally:
        progress.close()
    status = 0 if report.healthy else 1
    if args.output == "json":
        _print_json({"pool": os.path.abspath(args.pool), "healthy": report.healthy, **asdict(report)})
        return status
    for finding in report.findings:
        mark = "repaired" if finding.repaired else "note" if finding.harmless else "DAMAGED"
        print(printable(f"{mark}: {finding.what}: {finding.message}"))
    if report.findings_left_out:
        print(f"{report.findings_left_out} more findings are left out")
    verified = f", {size_text(report.verified_bytes)} read and right" if args.verify_data else ""
    print(
        f"pool {printable(str(args.pool))}: {report.blocks} blocks of {size_text(report.bytes)} in "
        f"{report.segments} segments, {report.directories} directories{verified}"
    )
    if not report.damaged:
        print("nothing is damaged")
    else:
        left = report.damaged - report.repaired
        print(
            f"{report.damaged} things damaged, {report.repaired} repaired"
            + ("" if not left or args.repair else "; --repair acts")
        )
    return status


def _pin(args: argparse.Namespace) -> int:
    from kvfs.frontend import mount

    wanted = b"1" if args.verb == "pin" else b"0"
    for path in args.paths:
        if not os.path.lexists(path):
            raise KvfsError(f"{path}: no such file or directory")
        if not _in_a_mount(path, mount.mounts()):
            raise KvfsError(f"{path}: not in a kvfs mount")
    for path in args.paths:
        try:
            os.setxattr(path, "user.kvfs.pin", wanted)
        except OSError as error:
            raise _about(path, error) from error
    stays = [] if args.verb == "pin" else [_still_pinned(path) for path in args.paths]
    if args.output == "json":
        _print_json({"paths": args.paths, "pinned": args.verb == "pin", **({"stays": stays} if stays else {})})
        return 0
    for found in stays:
        above, below = cast(list[str], found["above"]), cast(list[str], found["below"])
        if above:
            _note(f"{found['path']}: stays pinned by {above[-1]}, which it lies in")
        if below:
            more = f" and {len(below) - 3} more" if len(below) > 3 else ""
            _note(f"{found['path']}: stays pinned below it: {', '.join(below[:3])}{more}")
    return 0


def _about(path: str, error: OSError) -> KvfsError:
    failure = KvfsError(f"{path}: {error.strerror}")
    failure.errno = error.errno or errno.EIO
    return failure


def _still_pinned(path: str) -> dict[str, object]:
    """The pins that hold for a path still, of directories that it lies in; and those below it, as far as this user may
    ask the daemon."""
    from kvfs.frontend import mount
    from kvfs.frontend.control import ControlClient

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


def _prestage(args: argparse.Namespace) -> int:
    from kvfs.frontend import mount
    from kvfs.prestage import prestage
    from kvfs.stats import size_text

    for path in args.paths:
        if not os.path.lexists(path):
            raise KvfsError(f"{path}: no such file or directory")
        if not _in_a_mount(path, mount.mounts()):
            raise KvfsError(f"{path}: not in a kvfs mount")
    printer = ProgressPrinter()
    done = prestage(args.paths, args.threads, lambda bytes_: printer("read, bytes", bytes_, 0))
    printer.close()
    if args.output == "json":
        _print_json(asdict(done))
    else:
        print(f"{done.blocks} blocks of {size_text(done.bytes)} in the page cache")
        if done.missed:
            _note(f"{done.missed} blocks were gone, or could not be read")
    return 0


def _list(args: argparse.Namespace) -> int:
    from kvfs import stats
    from kvfs.frontend.control import ControlClient

    pool = _pool_of(args.target)
    with ControlClient(pool) as client:
        document = cast(stats.Json, client.call("list", lambda _: None, depth=args.depth))
    if args.output == "json":
        _print_json(document if not args.pins else {"pins": document["pins"]})
    else:
        print(stats.render_list(document, pins_only=args.pins))
    return 0


def _in_a_mount(path: str, mounts: Sequence[object]) -> bool:
    from kvfs.frontend.mount import Mount, mount_of

    best = mount_of(path, cast(Sequence[Mount], mounts))
    return best is not None and best.is_kvfs


def _evict(args: argparse.Namespace) -> int:
    from kvfs import stats
    from kvfs.frontend.control import ControlClient

    printer = ProgressPrinter()

    def progress(document: Mapping[str, object]) -> None:
        printer("evicting, bytes", int(cast(int, document.get("freed", 0))), int(cast(int, document.get("wanted", 0))))

    with ControlClient(_pool_of(args.target), timeout_s=120.0) as client:
        result = client.call("evict", progress, size=args.size, all=args.all)
    printer.close()
    document = cast(Mapping[str, object], result)
    failure = None
    if args.size is not None and cast(int, document.get("evicted_bytes", 0)) < args.size:
        failure = _ToldError(f"{args.target}: {document.get('evicted_bytes')} of {args.size} bytes could be evicted")
    _tell(args.output == "json", document, stats.render_evicted(document), failure)
    return 0


def _tell(as_json: bool, document: Mapping[str, object], text: str, failure: _ToldError | None) -> None:
    """Print a result, as JSON or as text, and raise the failure that came with it."""
    if as_json:
        _print_json({**document, **({} if failure is None else _error_part(str(failure), failure))})
    else:
        print(text)
    if failure is not None:
        raise failure


def _device(args: argparse.Namespace) -> int:
    from kvfs import stats
    from kvfs.frontend.control import ControlClient, NotRunningError

    pool, count = _pool_of(args.target), len(args.devices)
    wanted = {"list": count == 0, "add": count > 0, "remove": count == 1, "replace": count == 2}
    if not wanted[args.action]:
        raise UsageError(f"device {args.action}: {count} devices given (try kvfs device --help)")
    if (args.drain and args.action != "remove") or (args.force and args.action not in ("add", "replace")):
        raise UsageError(f"device {args.action}: {'--drain' if args.drain else '--force'} has no meaning there")
    if args.action == "list":
        document = _status_of(pool)
        if args.output == "json":
            _print_json({"pool": os.path.abspath(pool), "devices": document["devices"]})
        else:
            print("\n".join(stats.render_device_list(document)))
        return 0
    if args.action == "add":
        _refuse_inside(pool, args.devices)
        return _device_add(args, pool)
    arguments: dict[str, object] = {"device": args.devices[0], "drain": args.drain}
    if args.action == "replace":
        _refuse_inside(pool, args.devices[1:])
        arguments = {"device": args.devices[0], "path": _absolute(args.devices[1]), "force": args.force}
    printer = ProgressPrinter()
    started = time.monotonic()
    try:
        with ControlClient(pool, timeout_s=120.0) as client:
            result = client.call(
                f"device_{args.action}", lambda _: printer("seconds", int(time.monotonic() - started), 0), **arguments
            )
    except NotRunningError:
        from kvfs.daemon import change_device

        result = change_device(pool, args.action, arguments)
    printer.close()
    document = cast(Mapping[str, object], result)
    if args.output == "json":
        _print_json(document)
    else:
        by = f" by {document['path']}" if "path" in document else ""
        done = f"device {document['device']}: {args.action}d{by}, {document['lost_blocks']} blocks went with it"
        print(printable(done))
    return 0


def _absolute(device: str) -> str:
    from kvfs.pool.devices import place_of

    place = place_of(device)
    return os.path.abspath(place) if isinstance(place, Path) else place


def _device_add(args: argparse.Namespace, pool: Path) -> int:
    from kvfs.pool.devices import place_of
    from kvfs.pool.making import add_devices

    before, after = add_devices(pool, [place_of(device) for device in _expanded(args.devices)], force=args.force)
    if args.output == "json":
        _print_json({"pool": os.path.abspath(pool), "devices": len(after.devices), "segments": after.segment_count})
    else:
        print(
            f"pool {printable(str(pool))}: {len(after.devices) - len(before.devices)} devices added, "
            f"{after.segment_count - before.segment_count} segments more, {after.segment_count} now"
        )
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from kvfs import doctor

    checks = doctor.examine(args.device)
    status = 1 if any(check.fatal for check in checks) else 0
    if args.output == "json":
        _print_json({"checks": [asdict(check) for check in checks], "mount_can_work": status == 0})
    else:
        print(doctor.render(checks))
    return status


def _import(args: argparse.Namespace) -> int:
    from kvfs.pool.devices import place_of
    from kvfs.pool.making import import_pool

    _refuse_inside(args.pool, args.device)
    config = import_pool(Path(args.pool), [place_of(device) for device in _expanded(args.device)])
    if args.output == "json":
        _print_json({"pool": os.path.abspath(args.pool), "uuid": str(config.uuid), "devices": len(config.devices)})
    else:
        print(f"pool {printable(str(args.pool))}: pool.toml written, {len(config.devices)} devices, uuid {config.uuid}")
    return 0


def _replay(args: argparse.Namespace) -> int:
    from kvfs.replay.trace import BLOCK_TOKENS, MODELS, read_trace

    trace = read_trace(Path(args.trace))
    requests = trace[args.skip :][: args.requests]
    if not requests:
        raise UsageError(f"--skip: {args.trace} has {len(trace)} requests, {args.skip} are to be left out")
    for name, count, most in (("--threads", args.threads, 256), ("--io-threads", args.io_threads, 1024)):
        if count > most:
            raise UsageError(f"{name}: {count}; {most} at most")
    plot = None if args.plot is None else Path(args.plot)
    if plot is not None and plot.suffix != ".svg":
        raise UsageError(f"--plot: {plot}: an SVG is drawn, so FILE.svg is expected")

    from kvfs.replay import engine, report
    from kvfs.replay.plot import render as render_plot

    tokens = MODELS[args.model] if args.model else args.bytes_per_token
    settings = engine.Settings(
        target=Path(args.target),
        block_size=args.block_size or tokens * BLOCK_TOKENS,
        native=args.native,
        threads=args.threads,
        io_threads=args.io_threads,
        memory=args.memory,
        speed=None if args.full_speed else args.time_scale,
        buffered=args.buffered,
        verify=args.verify,
        touch=args.touch,
        lru_bytes=args.lru,
    )
    printer = ProgressPrinter()
    outcome = engine.replay(settings, trace, requests, lambda done, total: printer("requests", done, total))
    printer.close()
    document = report.document(
        settings, args.trace, trace[: args.skip], requests, outcome,
        prefill_tokens_per_s=args.prefill_tokens_per_second, warmup=args.warmup,
    )  # fmt: skip
    if plot is not None:
        try:
            plot.write_text(render_plot({args.target: document}, f"replay of {args.trace}"))
        except OSError as error:
            raise KvfsError(f"{plot}: {error.strerror}") from error
    wrong = sum(record.wrong for record in outcome.records if record is not None)
    failure = _ToldError(f"replay: {wrong} blocks of {args.target} were not what was stored") if wrong else None
    _tell(args.output == "json", document, report.render(document), failure)
    return 130 if outcome.interrupted else 0


def _completion(args: argparse.Namespace) -> int:
    from kvfs import usage

    print(usage.COMPLETIONS[args.shell](parser()))
    return 0


def _man(args: argparse.Namespace) -> int:
    from kvfs import __version__, usage

    pages = usage.pages(parser(), f"kvfs {__version__}")
    if args.directory is None:
        print(pages[f"kvfs-{args.page}" if args.page else "kvfs"], end="")
        return 0
    directory = Path(args.directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (directory / f"{name}.1").write_text(text)
    return 0


def _run(args: argparse.Namespace) -> int:
    import importlib

    module = importlib.import_module(f"kvfs.client.{args.verb.partition('-')[0]}")
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    return cast(int, module.run(command))


def _bench(arguments: Sequence[str]) -> int:
    import importlib

    try:
        bench = importlib.import_module("kvfs.bench")
    except ModuleNotFoundError as error:
        if error.name != "kvfs.bench":
            raise
        raise KvfsError("bench: not part of this installation") from error
    return cast(int, bench.main(list(arguments)) or 0)
