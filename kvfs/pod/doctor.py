"""`kvfs pod doctor`, the engine's part: what an engine is, how fast it answers, and whether it may forget.

Each check looks at one thing and changes nothing. Findings have the form of kvfs.doctor's checks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvfs.errors import EngineError
from kvfs.pod.engine import Engine, Information, Names
from kvfs.pod.url import EngineUrl
from kvfs.units import counted, format_size

MINIMUM_VERSION = (6, 2)
PINGS = 50
# A barrier waits for four trips, and has 100 ms.
LATENCY_P99_MS = 10.0
# The lag that nodes show is as wrong as their clocks.
CLOCK_S = 0.5
MEMORY_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Finding:
    """`state` is ok, missing (something to do) or note (good to know)."""

    name: str
    state: str
    found: str
    action: str = ""
    required: bool = False


def examine(url: EngineUrl, names: Names, slots: Sequence[int], *, password_file: Path | None = None) -> list[Finding]:
    """All findings about one engine. An engine that cannot be reached is one."""
    # redis-py comes with this module: not before somebody asks.
    from kvfs.pod.redis_engine import RedisEngine

    try:
        engine = RedisEngine(url, pool_key=names.stream(0), password_file=password_file, client_name="kvfs-doctor")
        try:
            return examine_engine(engine, names, slots)
        finally:
            engine.close()
    except EngineError as error:
        return [
            Finding(
                "engine", "missing", str(error), "blocks of this node go on; other nodes hear nothing of them", True
            )
        ]


def examine_engine(
    engine: Engine,
    names: Names,
    slots: Sequence[int],
    *,
    clock: Callable[[], float] = time.perf_counter,
    wall: Callable[[], float] = time.time,
) -> list[Finding]:
    """All findings about an engine that is connected. EngineError."""
    findings = examine_information(engine.name, engine.information())
    latencies = sorted(_timed(engine.ping, clock) for _ in range(PINGS))
    findings.append(examine_latency(latencies))
    before = wall()
    there = engine.time_s()
    findings.append(examine_clock(there - (before + wall()) / 2))
    findings.append(_examine_streams(engine, names, slots))
    return findings


def examine_information(name: str, found: Information) -> list[Finding]:
    """Version, eviction policy and memory."""
    version = ".".join(map(str, found.version))
    text = f"{name}: {found.product} {version}, {found.mode}"
    minimum = ".".join(map(str, MINIMUM_VERSION))
    is_old = found.product == "redis" and found.version < MINIMUM_VERSION
    findings = [
        Finding("engine", "missing", text, f"Redis {minimum} or newer, or Valkey, is needed", True)
        if is_old
        else Finding("engine", "ok", text)
    ]
    policy = found.eviction_policy or "unknown"
    action = "" if policy == "noeviction" else "maxmemory-policy noeviction: it drops streams that nodes still read"
    if policy.startswith("volatile"):
        action = "maxmemory-policy noeviction: with a volatile one, signs of life may be dropped, and nodes look dead"
    findings.append(Finding("engine eviction", "missing" if action else "ok", policy, action))
    if not found.memory_max:
        findings.append(Finding("engine memory", "note", f"{format_size(found.memory)} used, without a bound"))
    else:
        used = f"{format_size(found.memory)} of {format_size(found.memory_max)} used"
        is_full = found.memory > MEMORY_SHARE * found.memory_max
        action = "a larger maxmemory: a full engine refuses news" if is_full else ""
        findings.append(Finding("engine memory", "missing" if is_full else "ok", used, action))
    return findings


def examine_latency(seconds: Sequence[float]) -> Finding:
    """Of pings, sorted."""
    p50, p99 = (seconds[min(len(seconds) - 1, int(len(seconds) * part))] * 1000 for part in (0.5, 0.99))
    text = f"p50 {p50:.2f} ms, p99 {p99:.2f} ms of {len(seconds)} pings"
    if p99 <= LATENCY_P99_MS:
        return Finding("engine latency", "ok", text)
    return Finding("engine latency", "missing", text, f"a nearer engine: above {LATENCY_P99_MS:g} ms fresh reads fail")


def examine_clock(ahead_s: float) -> Finding:
    text = f"the engine's clock is {abs(ahead_s) * 1000:.0f} ms {'ahead' if ahead_s > 0 else 'behind'}"
    if abs(ahead_s) <= CLOCK_S:
        return Finding("engine clock", "ok", text)
    return Finding("engine clock", "note", text, "set both clocks by NTP: the lag that status shows is as wrong")


def _examine_streams(engine: Engine, names: Names, slots: Sequence[int]) -> Finding:
    streams = [stream for slot in slots for stream in (names.stream(slot), names.inbox(slot))]
    sizes = engine.sizes(streams)
    beats = engine.get([names.beat(slot) for slot in slots])
    silent = [str(slot) for slot, beat in zip(slots, beats, strict=True) if beat is None]
    entries, size = sum(one.entries for one in sizes), sum(one.size for one in sizes)
    text = f"{counted(entries, 'entry')}, {format_size(size)}; {len(slots) - len(silent)} of {len(slots)} nodes live"
    if silent:
        return Finding("engine streams", "note", text, f"no sign of life of slots {', '.join(silent)}")
    return Finding("engine streams", "ok", text)


def _timed(call: Callable[[], None], clock: Callable[[], float]) -> float:
    begin = clock()
    call()
    return clock() - begin
