"""Verbs that say what a pool does and what it holds: status, list, stats, top, metrics."""

from __future__ import annotations

import argparse
import sys
import time
from typing import cast

from kvfs.cli import arguments
from kvfs.cli.arguments import Verbs
from kvfs.cli.output import as_json, emit, emit_line, note
from kvfs.cli.targets import place_of, pool_of, pools_mounted, status_of
from kvfs.errors import KvfsError, UsageError, first_error
from kvfs.status import numbers
from kvfs.status.change import difference
from kvfs.status.legend import explain
from kvfs.status.numbers import Json
from kvfs.status.overview import render_overview
from kvfs.status.text import render_list, render_stats, render_stats_header, render_stats_line, render_status


def add_status(verbs: Verbs) -> None:
    sub = verbs.add("status", _status, "devices, segments, use, counters, errors and advice")
    sub.add_argument("target", metavar="POOL|MOUNTPOINT", nargs="?", help="default: a line for each mounted pool")
    explain(sub, "status")


def _status(args: argparse.Namespace) -> int:
    from kvfs.frontend.asking import NotAllowedError

    if args.target is not None:
        document = status_of(pool_of(args.target))
        emit(args, document, lambda: render_status(document))
        return 0
    documents, failures = [], []
    for pool in pools_mounted():
        try:
            documents.append(status_of(pool))
        except KvfsError as error:
            # A pool that cannot be asked does not hide the others.
            note(error)
            failures.append(error)
    errors = [{"error": str(error), "errno": error.errno} for error in failures]
    document = {"pools": documents, **({"errors": errors} if errors else {})}
    emit(args, document, lambda: render_overview(documents))
    if not documents and not failures and not as_json(args):
        print("no pool is mounted", file=sys.stderr)
    # Pools of other users are no failure where this user has a pool too.
    others = [error for error in failures if not isinstance(error, NotAllowedError)]
    return 1 if others or (failures and not documents) else 0


def add_list(verbs: Verbs) -> None:
    sub = verbs.add("list", _list, "what lies in a pool: blocks, bytes, hits and ages by directory, and what is pinned")
    sub.add_argument(
        "target", metavar="POOL|MOUNTPOINT|DIR", help="the pool's directory, where it is mounted, or a directory there"
    )
    rows = sub.add_mutually_exclusive_group()
    rows.add_argument(
        "--depth", type=arguments.whole, default=1, metavar="N",
        help="directories so far below, each with all that is below it; 0: one sum, as du(1) (default 1)",
    )  # fmt: skip
    rows.add_argument(
        "--namespaces", action="store_true",
        help="a row for each namespace of engines, however deep, as of a model or a revision (default: by --depth)",
    )  # fmt: skip
    sub.add_argument("--pins", action="store_true", help="only what is pinned")
    sub.add_argument("--fresh", action="store_true", help="count anew; else an answer may be five seconds old")
    explain(sub, "list")


def _list(args: argparse.Namespace) -> int:
    from kvfs.frontend.asking import ControlClient

    pool, path = place_of(args.target)
    with ControlClient(pool) as client:
        asked = {"depth": None if args.namespaces else args.depth, "path": path, "fresh": args.fresh}
        document = cast(Json, client.call("list", lambda _: None, **asked))
    wanted = document if not args.pins else {"pins": document["pins"]}
    emit(args, wanted, lambda: render_list(document, pins_only=args.pins))
    return 0


def add_stats(verbs: Verbs) -> None:
    sub = verbs.add("stats", _stats, "rates and latencies, once or at an interval")
    sub.add_argument("target", metavar="POOL|MOUNTPOINT", help="the pool's directory, or where it is mounted")
    sub.add_argument(
        "--interval",
        type=arguments.seconds,
        metavar="S",
        help="a line every S seconds (default: once, since the mount)",
    )
    sub.add_argument("--count", type=arguments.count, metavar="N", help="stop after N lines (default: never)")
    sub.add_argument("--prometheus", action="store_true", help="Prometheus text format")
    explain(sub, "stats")


def _stats(args: argparse.Namespace) -> int:
    from kvfs.frontend.asking import ControlClient

    if args.prometheus and as_json(args):
        raise UsageError("--prometheus: not together with -o json")
    with ControlClient(pool_of(args.target)) as client:
        now = cast(Json, client.call("status"))
        if args.prometheus:
            from kvfs.status import prometheus

            print(prometheus.render([now]).decode(), end="")
            return 0
        if args.interval is None:
            change = difference(now, None)
            emit(args, change, lambda: render_stats(change))
            return 0
        line = 0
        args.signals.until_ended()
        while args.count is None or line < args.count:
            before = now
            time.sleep(args.interval)
            now = cast(Json, client.call("status"))
            change = difference(now, before)
            heads = [render_stats_header(change)] if line % 20 == 0 else []
            emit_line(args, change, "\n".join([*heads, render_stats_line(change)]))
            line += 1
    return 0


def add_top(verbs: Verbs) -> None:
    sub = verbs.add("top", _top, "a live view of a pool in the terminal, until interrupted")
    sub.add_argument("target", metavar="POOL|MOUNTPOINT", help="the pool's directory, or where it is mounted")
    sub.add_argument(
        "--interval", type=arguments.seconds, default=1.0, metavar="S", help="draw every S seconds (default 1)"
    )
    sub.add_argument("--count", type=arguments.count, metavar="N", help="end after N intervals (default: never)")
    explain(sub, "top")


def _top(args: argparse.Namespace) -> int:
    from kvfs.frontend.asking import ControlClient
    from kvfs.status import top

    if not as_json(args) and not sys.stdout.isatty():
        raise UsageError("top: stdout is no terminal; -o json prints a line for each interval")
    if not as_json(args):
        top.require()
    with ControlClient(pool_of(args.target)) as client:

        def status() -> Json:
            document = cast(Json, client.call("status"))
            # The number of clients is a gauge, no counter.
            return {**document, "native_clients": numbers.number(document, "counters", "native_clients")}

        def survey() -> Json:
            return cast(Json, client.call("list", lambda _: None))

        args.signals.until_ended()
        if not as_json(args):
            top.run(status, survey, args.interval, args.count)
            return 0
        for change, found in top.looks(status, survey, args.interval, args.count):
            emit_line(args, {**change, **found})
    return 0


def add_metrics(verbs: Verbs) -> None:
    sub = verbs.add("metrics", _metrics, "serve the metrics of every mounted pool to Prometheus, until interrupted")
    sub.add_argument("address", metavar="[HOST:]PORT", help="where to listen; without HOST for this machine alone")


def _metrics(args: argparse.Namespace) -> int:
    import trio

    from kvfs.status import endpoint, prometheus

    address = endpoint.parse_address(args.address)
    prometheus.require()
    # One request at a time: while a daemon does not answer, scrapes wait for one thread instead of taking a thread
    # each.
    looking = trio.CapacityLimiter(1)

    def look() -> list[Json]:
        found = []
        for pool in pools_mounted():
            try:
                found.append(status_of(pool, timeout_s=2.0))
            except KvfsError as error:
                found.append({"pool": {"path": str(pool)}})
                note(error)
        return found

    async def collect() -> list[Json]:
        return await trio.to_thread.run_sync(look, limiter=looking, abandon_on_cancel=True)

    async def lacks() -> list[str]:
        pools = [numbers.section(document, "pool") for document in await collect()]
        silent = [f"{pool.get('path')}: its daemon does not answer" for pool in pools if "pid" not in pool]
        return silent if pools else ["no pool is mounted"]

    def ready(where: str) -> None:
        emit_line(args, {"address": where}, f"metrics at http://{where}/metrics")

    args.signals.until_ended()
    try:
        trio.run(endpoint.serve, address, collect, lacks, ready)
    except BaseExceptionGroup as group:
        raise first_error(group) from None
    return 0
