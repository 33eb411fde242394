"""The verb that follows a pool's changes: events."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterable
from contextlib import ExitStack, suppress
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
    sub.add_argument("--rank", default=0, metavar="N", type=arguments.whole, help="data-parallel rank (default 0)")
    sub.add_argument(
        "--schema", choices=("vllm", "mooncake"), default="vllm",
        help="vLLM's KV cache events, or Mooncake's events of objects, for SGLang's keys (default: vllm)",
    )  # fmt: skip
    sub.add_argument("--medium", default="STORAGE", metavar="NAME", type=str.strip, help="of blocks (default: STORAGE)")
    sub.add_argument(
        "--hashes", choices=("vllm", "vllm-int", "sglang", "keys"), default="vllm-int",
        help="keys are vLLM's, hash and group; hashes as bytes, or as integers; or SGLang's; or whole keys are hashes "
        "(default: vllm-int)",
    )  # fmt: skip
    sub.add_argument("--arrays", action="store_true", help="events as arrays, for older routers (default: maps)")
    sub.add_argument("--tenant", default="default", metavar="NAME", help="of Mooncake's objects (default: default)")
    sub.add_argument(
        "--clear", action="store_true", help="begin with the event that clears all blocks (default: only removals)"
    )
    sub.add_argument(
        "--pod", metavar="NAME=ENDPOINT,REPLAY", nargs="+", action="extend", type=str.strip,
        help="other nodes' kvfs events --zmq --hashes keys --replay: all nodes' blocks as one (default: own blocks)",
    )  # fmt: skip
    sub.add_argument("--node", metavar="NAME", help="of this node, with --pod (default: the host's name)")
    sub.add_argument(
        "--tokens-from", metavar="ENDPOINT[,REPLAY]", nargs="+", action="extend", type=str.strip,
        help="engines whose KV events have blocks' tokens; tell blocks with them (default: hashes alone)",
    )  # fmt: skip
    sub.add_argument("--tokens-memory", metavar="SIZE", type=arguments.size, help="for tokens (default 256M)")
    sub.add_argument(
        "--tokens-blocks", metavar="N", type=arguments.count,
        help="blocks whose tokens are kept, the oldest go first (default 1000000)",
    )  # fmt: skip
    sub.add_argument(
        "--chunk", metavar="N", type=arguments.count,
        help="an engine's blocks in one of kvfs, where its events do not say so (default 1)",
    )  # fmt: skip


_OF_ZMQ = ("replay", "topic", "arrays", "rank", "clear", "tokens_from")
_OF_TOKENS = ("tokens_memory", "tokens_blocks", "chunk")


def _events(args: argparse.Namespace) -> int:
    if not args.tokens_from:
        _refuse(args, _OF_TOKENS, "--tokens-from")
    if args.zmq is None:
        _refuse(args, _OF_ZMQ, "--zmq")
    elif args.count is not None or as_json(args) or args.keys:
        raise UsageError("events: --zmq publishes keys, without end and without output: no --count, --keys, -o json")
    elif args.schema == "mooncake" and (args.tokens_from or args.clear or args.arrays):
        raise UsageError("events: --schema mooncake has neither --tokens-from, --clear nor --arrays")
    elif args.tokens_from and args.hashes == "keys":
        raise UsageError("events: --tokens-from knows blocks by vLLM's hashes: no --hashes keys")
    elif args.clear and args.hashes == "keys":
        raise UsageError("events: --clear with --hashes keys: to a node of a pod it begins the telling of all blocks")
    if not args.pod:
        _refuse(args, ("node",), "--pod")
    args.signals.until_ended()
    if args.zmq is not None:
        _publish(args)
    elif args.pod:
        _print_pod(args)
    else:
        _print(args)
    return 0


def _refuse(args: argparse.Namespace, names: Iterable[str], of: str) -> None:
    for name in names:
        if getattr(args, name):
            raise UsageError(f"events: --{name.replace('_', '-')} is of {of}")


def _print(args: argparse.Namespace) -> None:
    from kvfs.client.client import events

    with events(args.target, args.namespace, keys=args.keys) as subscription:
        for number, event in enumerate(subscription, 1):
            document = _document(event)
            emit_line(args, document, lambda document=document: _line(document))  # type: ignore[misc]
            if number == args.count:
                return


class _Enough(Exception):
    pass


class _Printer:
    """Prints a pod's events, so many at most."""

    is_replaying = is_asked_for_all = False
    unread_size = 0

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._left = args, args.count

    def send(self, events: Iterable[object], now: object) -> None:
        for event in events:
            assert isinstance(event, dict)
            emit_line(self._args, event, lambda event=event: f"{event['event']:8} {event['node']:16} {event['key']}")  # type: ignore[misc]
            if self._left is not None and (left := self._left - 1) >= 0:
                self._left = left
                if not left:
                    raise _Enough

    def serve_replay(self) -> None:
        pass


def _print_pod(args: argparse.Namespace) -> None:
    from kvfs.client.client import connect
    from kvfs.client.event_schemas import PlainSchema
    from kvfs.client.pod_telling import Nodes, PodTelling

    with (
        Nodes(args.pod) as nodes,
        connect(args.target, args.namespace, read_only=True, gpu=None) as client,
        suppress(_Enough),
    ):
        name = args.node or socket.gethostname()
        PodTelling(client, _Printer(args), PlainSchema(), note, nodes=nodes, name=name, each=True).run()


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
    from kvfs.client.event_schemas import MooncakeSchema, Schema, VllmSchema
    from kvfs.client.pod_telling import Nodes, PodTelling
    from kvfs.client.publisher import Publisher
    from kvfs.client.telling import Telling
    from kvfs.client.tokens import TokenFeed

    schema: Schema = VllmSchema(
        args.medium, args.hashes != "keys", args.hashes in ("vllm-int", "sglang"), args.arrays, args.hashes == "sglang"
    )
    if args.schema == "mooncake":
        schema = MooncakeSchema(args.tenant)
    with ExitStack() as stack:
        tokens = None
        if args.tokens_from:
            tokens = stack.enter_context(
                TokenFeed(
                    args.tokens_from,
                    size_max=args.tokens_memory or 256 << 20,
                    count_max=args.tokens_blocks or 1_000_000,
                    span=args.chunk or 1,
                )
            )
        publisher = stack.enter_context(
            Publisher(
                args.zmq,
                replay=args.replay,
                topic=args.topic,
                rank=args.rank,
                told=note,
                answers_all=args.hashes == "keys",
            )
        )
        client = stack.enter_context(connect(args.target, args.namespace, read_only=True, gpu=None))
        print(f"events of {printable(args.target)} at {printable(args.zmq)}", flush=True)
        if not args.pod:
            Telling(client, publisher, schema, note, tokens=tokens, clear=args.clear).run()
            return
        nodes = stack.enter_context(Nodes(args.pod))
        name = args.node or socket.gethostname()
        PodTelling(client, publisher, schema, note, tokens=tokens, clear=args.clear, nodes=nodes, name=name).run()
