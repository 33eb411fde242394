"""`kvfs pod doctor`: the engines of a pod, and then the rest of it: memory for the map, node pages, clocks.

Each check looks at one thing and changes nothing. Engines are looked at by kvfs.pod.doctor, whose findings these are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvfs.cgroup import memory
from kvfs.errors import KvfsError, MissingFeatureError
from kvfs.pod.doctor import Finding, examine
from kvfs.pod.engine import Names
from kvfs.pod.url import parse_urls
from kvfs.pool.config import PoolConfig
from kvfs.pool.joining import SlotState, slot_states
from kvfs.pool.node import load_node
from kvfs.store.opening import MAP_ENTRY_SIZE, map_entries
from kvfs.units import counted, size_text

# The map beside all else that a node of a GPU cluster keeps in memory.
MAP_MEMORY_SHARE = 0.5
# A page is written once a second, and was watched for some seconds.
PAGE_CLOCK_S = 5.0
_SHOWN_MAX = 16


def examine_pod(pool: Path) -> list[Finding]:
    """All findings about a pod, from this node. UsageError: it is none. MissingFeatureError: redis-py is missing."""
    config, states = slot_states(pool)
    return [
        *examine_engines(config),
        examine_map(config, memory()),
        *examine_pages(config, states, _own_slot(pool)),
        examine_node_clocks(states, time.time()),
    ]


def examine_engines(config: PoolConfig) -> list[Finding]:
    pod = config.pod
    assert pod is not None
    names, slots = Names(str(config.uuid)), range(pod.nodes)
    password = Path(pod.password_file) if pod.password_file else None
    urls, findings = parse_urls(pod.engine), []
    for index, url in enumerate(urls):
        try:
            found = examine(url, names, slots, password_file=password)
        except ImportError as error:
            raise MissingFeatureError("a pod needs redis-py: pip install 'kvfs[pod]'") from error
        except KvfsError as error:
            found = [Finding("engine", "missing", f"{url}: {error}", "", True)]
        if len(urls) > 1:
            found = [replace(one, name=one.name.replace("engine", f"engine {index}", 1)) for one in found]
        findings += found
    return findings


def examine_map(config: PoolConfig, memory: int) -> Finding:
    """Its memory, against this machine's."""
    entries = map_entries(config)
    size = entries * MAP_ENTRY_SIZE
    text = f"others' names {entries:,}, {size_text(size)} of this machine's {size_text(memory)}"
    if size > MAP_MEMORY_SHARE * memory:
        action = "a smaller map_size in pool.toml, or more memory: the map is touched all over once it has some names"
        return Finding("pod map", "missing", text, action)
    return Finding("pod map", "ok", text)


def examine_pages(config: PoolConfig, states: Sequence[SlotState], own: int | None) -> list[Finding]:
    """Node pages: nodes that beat, and nodes that are not on all devices."""
    count = {state: [one.slot for one in states if one.state == state] for state in
             ("beating", "left", "frozen", "retired", "free")}  # fmt: skip
    text = ", ".join(f"{len(slots)} {state}" for state, slots in count.items() if slots)
    action = f"slots {_shown(count['frozen'])} are frozen: mount them, or retire those that are gone for good"
    findings = [Finding("nodes", "note", text, action) if count["frozen"] else Finding("nodes", "ok", text)]
    if own is None:
        findings.append(Finding("this node", "missing", "has no slot", "kvfs pod join, or kvfs mount, takes one"))
    elif own in count["retired"]:
        text = f"slot {own} was retired"
        findings.append(Finding("this node", "missing", text, "a new pool directory takes another slot", True))
    else:
        findings.append(Finding("this node", "ok", f"slot {own}, {states[own].state}"))
    wanted = sum(not device.removed for device in config.devices)
    short = [one.slot for one in states if one.page is not None and one.devices < wanted]
    text = counted(wanted, "device")
    if not short:
        return [*findings, Finding("node pages", "ok", f"on all {text}")]
    action = "a device is away, or a node does not reach it: its blocks are misses there"
    return [*findings, Finding("node pages", "note", f"slots {_shown(short)}: not on all {text}", action)]


def examine_node_clocks(states: Sequence[SlotState], now: float) -> Finding:
    """The times in the pages of nodes that beat, against this node's clock."""
    off = {
        state.slot: state.page.written_ns / 1e9 - now
        for state in states
        if state.state == "beating" and state.page is not None
    }
    wrong = {slot: seconds for slot, seconds in off.items() if abs(seconds) > PAGE_CLOCK_S}
    if wrong:
        text = ", ".join(f"slot {slot} {seconds:+.0f} s" for slot, seconds in list(wrong.items())[:_SHOWN_MAX])
        return Finding("node clocks", "note", text, "set clocks by NTP: lags and times of files are as wrong")
    return Finding("node clocks", "ok", f"{counted(len(off), 'node')} within {PAGE_CLOCK_S:.0f} s")


def _own_slot(pool: Path) -> int | None:
    node = load_node(pool)
    return None if node is None else node.slot


def _shown(slots: Sequence[int]) -> str:
    return ", ".join(map(str, slots[:_SHOWN_MAX])) + (", ..." if len(slots) > _SHOWN_MAX else "")
