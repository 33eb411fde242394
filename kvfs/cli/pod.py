"""Verbs on a pod, a pool that nodes share: kvfs pod create, join, status, retire, doctor."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvfs.cli import arguments
from kvfs.cli.arguments import Verbs
from kvfs.cli.output import as_json, emit, note, note_lines
from kvfs.cli.pools import expanded, refuse_inside
from kvfs.cli.targets import pool_of
from kvfs.errors import KvfsError, UsageError, printable
from kvfs.units import counted

if TYPE_CHECKING:
    from kvfs.pod.doctor import Finding
    from kvfs.pool.config import PoolConfig
    from kvfs.pool.joining import SlotState
    from kvfs.pool.pod import PodConfig
    from kvfs.status.numbers import Json

_ACTIONS = ("create", "join", "status", "retire", "doctor")
# Options, by their names in the parser's result, and the actions in which they have a meaning.
_CREATE = ("engine", "nodes", "lot", "map_size", "lookup_wait", "password_file", "stripe_width", "stripe_unit",
           "segment_size")  # fmt: skip
_MEANING = {
    "device": ("create", "join"), "force": ("create", "join"), "own_slot": ("join",),
    **dict.fromkeys(_CREATE, ("create",)),
}  # fmt: skip


def add_pod(verbs: Verbs) -> None:
    sub = verbs.add("pod", _pod, "make, join and look at a pool that many nodes share")
    sub.add_argument("action", choices=_ACTIONS, help="what to do")
    sub.add_argument("target", metavar="POOL|MOUNTPOINT", help="the pool's directory on this node, or its mount")
    sub.add_argument("slot", metavar="SLOT", nargs="?", type=arguments.whole, help="retire: the node that is gone")
    sub.add_argument(
        "--device", action="append", default=[], metavar="PATH|URL",
        help="create, join: a device of the pod, as in kvfs format; once for each; required for create",
    )  # fmt: skip
    sub.add_argument(
        "--engine", action="append", default=[], metavar="LIST",
        help="create: engines that carry news, redis://HOST:PORT[,...]; without passwords; required",
    )  # fmt: skip
    sub.add_argument("--nodes", type=arguments.count, metavar="N", help="create: how many nodes may join; required")
    sub.add_argument(
        "--lot",
        type=arguments.count,
        metavar="SEGMENTS",
        help="create: unit of ownership (default: by the pool's size)",
    )
    sub.add_argument(
        "--map-size",
        type=arguments.size,
        metavar="SIZE",
        help="create: memory for the names of others' blocks (default: by the pool's size)",
    )
    sub.add_argument(
        "--lookup-wait",
        type=arguments.whole,
        metavar="MS",
        help="create: a look-up that misses waits so long for news (default 0)",
    )
    sub.add_argument(
        "--password-file", metavar="PATH", help="create: file with the engines' password, on each node (default: none)"
    )
    sub.add_argument(
        "--stripe-width", type=arguments.count, metavar="W", help="create: default and meaning as in kvfs format"
    )
    sub.add_argument(
        "--stripe-unit", type=arguments.size, metavar="SIZE", help="create: default and meaning as in kvfs format"
    )
    sub.add_argument(
        "--segment-size", type=arguments.size, metavar="SIZE", help="create: default and meaning as in kvfs format"
    )
    sub.add_argument(
        "--slot", dest="own_slot", type=arguments.whole, metavar="S", help="join: this one (default: the first free)"
    )
    sub.add_argument(
        "--force", action="store_true",
        help="create: overwrite what the devices hold; join: take the slot of a node that is gone",
    )  # fmt: skip


def _pod(args: argparse.Namespace) -> int:
    for option, actions in _MEANING.items():
        value = getattr(args, option)
        given = value is not None and value is not False and value != []
        if given and args.action not in actions:
            name = {"own_slot": "slot"}.get(option, option).replace("_", "-")
            raise UsageError(f"pod {args.action}: --{name} has no meaning there")
    if (args.slot is not None) != (args.action == "retire"):
        raise UsageError(
            f"pod {args.action}: {'give SLOT' if args.slot is None else f'{args.slot}: one word too many'}"
        )
    verbs: dict[str, arguments.Function] = {
        "create": _create, "join": _join, "status": _status, "retire": _retire, "doctor": _doctor,
    }  # fmt: skip
    return verbs[args.action](args)


# ---- create, join ----


def _create(args: argparse.Namespace) -> int:
    from kvfs.pool.devices import device_address
    from kvfs.pool.joining import join
    from kvfs.pool.lock import locked
    from kvfs.pool.making import FormatRequest, format_devices
    from kvfs.units import format_size

    for option in ("device", "engine", "nodes"):
        if not getattr(args, option):
            raise UsageError(f"pod create: --{option} is missing")
    refuse_inside(args.target, args.device)
    pool = Path(args.target)
    result = format_devices(
        FormatRequest(
            pool=pool,
            devices=tuple(device_address(device) for device in expanded(args.device)),
            stripe_width=args.stripe_width,
            stripe_unit=args.stripe_unit,
            segment_size=args.segment_size,
            force=args.force,
            pod=_asked(args),
        )
    )
    with locked(pool, "joining a pod"):
        node = join(pool, 0, tell=None if as_json(args) else note)
    config = result.config
    assert config.pod is not None
    document = {
        **_part(pool, config),
        "segment_size": config.geometry.segment_size,
        "devices": [{"index": d.index, "path": d.path, "size": d.size} for d in config.devices],
        "slot": node.slot,
        "notes": list(result.notes),
    }
    lines = [
        f"pod {args.target}: {counted(len(config.devices), 'device')}, {counted(config.segment_count, 'segment')} of "
        f"{format_size(config.geometry.segment_size)} in lots of {config.pod.lot}, for "
        f"{counted(config.pod.nodes, 'node')}; this one is slot {node.slot}",
        *note_lines(result.notes),
    ]
    emit(args, document, "\n".join(printable(line) for line in lines))
    return 0


def _asked(args: argparse.Namespace) -> PodConfig:
    from kvfs.pool.pod import PodConfig

    # A URL may hold commas: of sentinels.
    engine = [url for text in args.engine for url in re.split(r",(?=[a-z][a-z0-9+.-]*://)", text)]
    return PodConfig(
        engine=tuple(engine),
        nodes=args.nodes,
        lot=args.lot or 0,
        map_size=args.map_size or 0,
        lookup_wait_ms=args.lookup_wait or 0,
        password_file=os.path.abspath(args.password_file) if args.password_file else "",
    )


def _join(args: argparse.Namespace) -> int:
    from kvfs.pool.config import CONFIG_NAME, load
    from kvfs.pool.devices import device_address
    from kvfs.pool.joining import import_node, join
    from kvfs.pool.lock import locked

    pool = Path(args.target)
    there = (pool / CONFIG_NAME).exists()
    if there and args.device:
        raise UsageError(f"{pool / CONFIG_NAME}: exists; kvfs pod join {pool} without --device takes its devices")
    if not there:
        if not args.device:
            raise UsageError("pod join: give --device PATH (once for each device of the pod)")
        refuse_inside(pool, args.device)
        import_node(pool, [device_address(device) for device in expanded(args.device)])
    with locked(pool, "joining a pod"):
        node = join(pool, args.own_slot, force=args.force, tell=None if as_json(args) else note)
    config = load(pool)
    assert config is not None
    document = {**_part(pool, config), "slot": node.slot, "node": str(node.uuid)}
    emit(args, document, f"pod {printable(str(args.target))}: this node is slot {node.slot}")
    return 0


def _part(pool: Path, config: PoolConfig) -> dict[str, object]:
    assert config.pod is not None
    return {
        "pool": os.path.abspath(pool),
        "uuid": str(config.uuid),
        "revision": config.revision,
        "engine": list(config.pod.engine),
        "nodes": config.pod.nodes,
        "lot": config.pod.lot,
        "segment_count": config.segment_count,
        "retired": list(config.pod.retired),
    }


# ---- status ----


def _status(args: argparse.Namespace) -> int:
    from kvfs.pool.joining import slot_states
    from kvfs.pool.node import load_node

    pool = pool_of(args.target)
    config, states = slot_states(pool)
    own = load_node(pool)
    daemon = _daemon_part(pool)
    document = {
        **_part(pool, config),
        "slot": None if own is None else own.slot,
        "slots": [_slot_part(state, daemon) for state in states],
        "daemon": daemon,
    }
    emit(args, document, lambda: "\n".join(_status_lines(document, states)))
    return 0


def _daemon_part(pool: Path) -> Json | None:
    """The part of the running daemon's status that is about the pod: feed, map, engine. Without a daemon: None."""
    from kvfs.frontend.asking import ControlClient

    try:
        with ControlClient(pool) as client:
            return cast("Json | None", cast("Json", client.call("status")).get("pod"))
    except KvfsError:
        return None


def _news_of(slot: int, daemon: Json | None) -> Json | None:
    """Another node's news, as this node's daemon knows them."""
    owners = cast("Sequence[Json]", (daemon or {}).get("owners", ()))
    return next((owner for owner in owners if owner.get("slot") == slot), None)


def _slot_part(state: SlotState, daemon: Json | None) -> dict[str, object]:
    part: dict[str, object] = {
        "slot": state.slot, "state": state.state, "frozen": state.frozen, "lots": state.lots,
        "segments": state.segments, "devices": state.devices,
    }  # fmt: skip
    page = state.page
    if page is not None:
        part |= {
            "node": str(page.node), "host": page.host, "pid": page.pid, "pool": page.pool, "use": page.use,
            "epoch": page.epoch, "written_s": page.written_ns / 1e9,
        }  # fmt: skip
    news = _news_of(state.slot, daemon)
    if news is not None:
        part["news"] = news
    return part


def _status_lines(document: Json, states: Sequence[SlotState]) -> list[str]:
    from kvfs.status.numbers import table
    from kvfs.status.pod import pod_advice, pod_lines

    own, daemon = document["slot"], cast("Json | None", document["daemon"])
    lines = [
        f"pod {document['uuid']}: {counted(cast(int, document['nodes']), 'slot')}, "
        f"{counted(cast(int, document['segment_count']), 'segment')} in lots of "
        f"{document['lot']}; this node is {'not joined' if own is None else f'slot {own}'}",
        *(f"engine {url}" for url in cast(list[str], document["engine"])),
        *(line.strip() for line in pod_lines({"pod": daemon})),
        *(f"advice: {line}" for line in pod_advice({"pod": daemon})),
    ]
    if daemon is None:
        lines.append("this node is not mounted: of news and map nothing is known")
    rows = [["slot", "state", "lots", "segments", "epoch", "news", "lag p99", "node"]]
    for state in states:
        page, news = state.page, _news_of(state.slot, daemon)
        node = "" if page is None else f"{page.host} pid {page.pid} {page.use} ({page.node})"
        epoch = "-" if page is None else str(page.epoch)
        rows.append([
            str(state.slot), state.state, str(state.lots), str(state.segments), epoch,
            *_news_cells(state.slot == own, news), node,
        ])  # fmt: skip
    lines += table(rows, left=len(rows[0]))
    frozen = sum(state.lots for state in states if state.frozen)
    if frozen:
        lines.append(f"frozen: {counted(frozen, 'lot')}, which all nodes read and none writes")
    return [printable(line) for line in lines]


def _news_cells(is_own: bool, news: Json | None) -> list[str]:
    from kvfs.status.numbers import number, time_text

    if news is None:
        return ["this node" if is_own else "-", "-"]
    behind = f", {number(news, 'behind'):.0f} behind" if number(news, "behind") else ""
    lag = time_text(number(news, "lag_ms_p99") * 1000) if number(news, "batches") else "-"
    return [f"{news.get('state')}{behind}", lag]


# ---- retire, doctor ----


def _retire(args: argparse.Namespace) -> int:
    from kvfs.pool.joining import retire

    pool = pool_of(args.target)
    config = retire(pool, args.slot, tell=None if as_json(args) else note)
    emit(args, {**_part(pool, config), "slot": args.slot}, f"slot {args.slot}: retired; its lots stay frozen")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from kvfs.cli.pod_doctor import examine_pod

    pool = pool_of(args.target)
    findings = examine_pod(pool)
    status = 1 if any(one.required and one.state == "missing" for one in findings) else 0
    emit(args, {"checks": [asdict(one) for one in findings]}, lambda: "\n".join(_check_lines(findings)))
    return status


def _check_lines(checks: Sequence[Finding]) -> list[str]:
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        lines.append(printable(f"{check.name.ljust(width)}  {check.state.ljust(7)}  {check.found}"))
        if check.action:
            lines.append(printable(f"{'':{width}}           -> {check.action}"))
    return lines
