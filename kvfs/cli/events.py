"""The verb that follows a pool's changes: events."""

from __future__ import annotations

import argparse
import os
from datetime import datetime

from kvfs.cli import arguments
from kvfs.cli.arguments import Verbs
from kvfs.cli.output import as_json, emit_line, note
from kvfs.errors import UsageError, printable
from kvfs.units import counted


def add_events(verbs: Verbs) -> None:
    sub = verbs.add(
        "events", _events, "what is stored and removed, evictions included, until interrupted; or to routers, by ZeroMQ"
    )
    sub.add_argument("target", metavar="MOUNTPOINT", help="where the pool is mounted, a directory below, or the pool")
    sub.add_argument("namespace", metavar="NAMESPACE", nargs="?", default="", help="a directory below (default: all)")
    sub.add_argument("--keys", action="store_true", help="only blocks of clients, not other files")
    sub.add_argument("--count", type=arguments.count, metavar="N", help="end after N events (default: never)")
    sub.add_argument(
        "--zmq",
        metavar="ENDPOINT",
        type=str.strip,
        help="publish them as vLLM does, tcp://*:5557 (default: print them)",
    )
    sub.add_argument(
        "--replay", metavar="ENDPOINT", type=str.strip, help="where routers ask for lost messages (default: nowhere)"
    )
    sub.add_argument("--topic", default="", metavar="TOPIC", type=str.strip, help="of messages (default: empty)")
    sub.add_argument("--medium", default="STORAGE", metavar="NAME", type=str.strip, help="of blocks (default STORAGE)")
    sub.add_argument("--rank", default=0, metavar="N", type=arguments.whole, help="data-parallel rank (default 0)")
    sub.add_argument(
        "--hashes", choices=("vllm", "vllm-int", "keys"), default="vllm",
        help="keys are vLLM's, hash and group (default vllm); the same, hashes as integers; or whole keys are hashes",
    )  # fmt: skip
    sub.add_argument("--arrays", action="store_true", help="events as arrays, for older routers")


def _events(args: argparse.Namespace) -> int:
    if args.zmq is None:
        given = [name for name in ("replay", "topic", "arrays", "rank") if getattr(args, name)]
        if given:
            raise UsageError(f"events: --{given[0]} is of --zmq")
    elif args.count is not None or as_json(args) or args.keys:
        raise UsageError("events: --zmq publishes keys, without end and without output: no --count, --keys, -o json")
    args.signals.until_ended()
    _print(args) if args.zmq is None else _publish(args)
    return 0


def _print(args: argparse.Namespace) -> None:
    from kvfs.client.client import events

    with events(args.target, args.namespace, keys=args.keys) as subscription:
        for number, event in enumerate(subscription, 1):
            document = _document(event)
            emit_line(args, document, lambda document=document: _line(document))  # type: ignore[misc]
            if number == args.count:
                return


def _document(event: object) -> dict[str, object]:
    from kvfs.client.events import Gap, Removed, Reset, Stored

    if isinstance(event, Gap):
        return {"event": "gap", "number": event.number, "lost": event.lost}
    if isinstance(event, Reset):
        return {"event": "reset", "path": os.fsdecode(event.path), "reason": event.reason.name.lower()}
    assert isinstance(event, (Stored, Removed))
    return {
        "event": type(event).__name__.lower(), "number": event.number, "time_ns": event.time_ns, "size": event.size,
        "reason": event.reason.name.lower(), "path": os.fsdecode(event.path),
        "key": None if event.key is None else event.key.hex(),
    }  # fmt: skip


def _line(document: dict[str, object]) -> str:
    kind = document["event"]
    if kind == "gap":
        return f"gap      {counted(int(str(document['lost'])), 'change')} lost, the last is {document['number']}"
    path = printable(str(document["path"]))
    if kind == "reset":
        return f"reset    {document['reason']:8} anything may have changed below /{path}"
    time_ns = document["time_ns"]
    assert isinstance(time_ns, int)
    when = datetime.fromtimestamp(time_ns // 1_000_000_000).strftime("%H:%M:%S") + f".{time_ns // 1000 % 1_000_000:06}"
    return f"{kind:8} {document['reason']:8} {when} {document['number']:>8} {document['size']:>10} {path}"


def _publish(args: argparse.Namespace) -> None:
    from kvfs.client.client import connect
    from kvfs.client.publisher import Publisher, Schema, publish

    schema = Schema(args.medium, args.hashes != "keys", args.hashes == "vllm-int", args.arrays)
    with Publisher(args.zmq, replay=args.replay, topic=args.topic, rank=args.rank) as publisher:
        with connect(args.target, args.namespace, read_only=True, gpu=None) as client:
            print(f"events of {printable(args.target)} at {printable(args.zmq)}", flush=True)
            publish(client, publisher, schema, note)
