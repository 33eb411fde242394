"""Traces of prefix blocks, read from files and mixed; invented ones are kvfs/replay/invent.py's.

A prompt is the ids of its blocks in order, as in Mooncake's traces. An id stands for a block and all before it, so a
block is of use only if those before it are there.
"""

from __future__ import annotations

import gzip
import heapq
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvfs.errors import UsageError
from kvfs.replay.invent import Prompts, Trace, numbered

_IDS_MAX = 1 << 48


def load(path: Path, session_blocks: int = 0) -> Trace:
    """A JSONL file with `hash_ids` in every line, and perhaps `timestamp` (milliseconds) and `session_id`; `.gz` is
    unpacked. Raises UsageError with file and line.

    Requests of one timestamp are spread evenly over the time until the next, since recorders round. Without timestamps
    requests are a second apart. session_blocks: of a trace without sessions, prompts whose first so many blocks are
    the same are one.
    """
    prompts: Prompts = []
    stamps: list[float | None] = []
    sessions: list[object] = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    request = json.loads(line)
                    prompts.append(_ids(request["hash_ids"]))
                    stamps.append(_later(request.get("timestamp"), stamps))
                    sessions.append(_session(request.get("session_id"), sessions))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise UsageError(f"{path}: line {number}: not a request with hash_ids: {error}") from error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error
    if not any(prompts):
        raise UsageError(f"{path}: no blocks in {len(prompts)} requests")
    if session_blocks and sessions[0] is None:
        sessions = [tuple(prompt[:session_blocks]) for prompt in prompts]
    return Trace(prompts, _spread(stamps), None if sessions[0] is None else numbered(sessions))


def mix(traces: Sequence[Trace]) -> Trace:
    """Several traces at once, as if one pool served them all. Each lasts as long as the longest. Blocks and sessions
    are each trace's own."""
    if len(traces) == 1:
        return traces[0]
    longest_s = max(trace.times_s[-1] - trace.times_s[0] for trace in traces) or 1.0

    def timed(index: int, trace: Trace) -> Iterator[tuple[float, int, int]]:
        begin, lasts_s = trace.times_s[0], (trace.times_s[-1] - trace.times_s[0]) or 1.0
        return ((longest_s * (time_s - begin) / lasts_s, index, i) for i, time_s in enumerate(trace.times_s))

    order = list(heapq.merge(*(timed(index, trace) for index, trace in enumerate(traces))))
    prompts = [[block * len(traces) + index for block in traces[index].prompts[i]] for _, index, i in order]
    sessions: list[object] | None = None
    if all(trace.sessions is not None for trace in traces):
        sessions = [(index, (traces[index].sessions or ())[i]) for _, index, i in order]
    return Trace(prompts, [time_s for time_s, _, _ in order], None if sessions is None else numbered(sessions))


def _ids(ids: list[int]) -> list[int]:
    if not all(type(i) is int and 0 <= i < _IDS_MAX for i in ids) or len(set(ids)) != len(ids):
        raise ValueError("hash_ids must be different whole numbers")
    return ids


def _later(stamp: object, before: Sequence[float | None]) -> float | None:
    last = before[-1] if before else None
    if before and (stamp is None) != (last is None):
        raise ValueError("every request has a timestamp, or no request has one")
    if stamp is None:
        return None
    if not isinstance(stamp, (int, float)) or not (last or 0) <= stamp < 1e15:
        raise ValueError(f"timestamp {stamp}: milliseconds are expected, in order")
    return float(stamp)


def _session(session: object, before: Sequence[object]) -> object:
    if before and (session is None) != (before[-1] is None):
        raise ValueError("every request has a session_id, or no request has one")
    if not isinstance(session, (int, str, type(None))):
        raise ValueError("session_id is a number or a string")
    return session


def _spread(stamps: Sequence[float | None]) -> list[float]:
    """Seconds from the stamps."""
    times = [float(index * 1000) if stamp is None else stamp for index, stamp in enumerate(stamps)]
    starts = [index for index, time in enumerate(times) if not index or time != times[index - 1]]
    spread: list[float] = []
    for start, end in zip(starts, [*starts[1:], len(times)], strict=True):
        # After the last stamp comes no other: a millisecond apart.
        step = (times[end] - times[start]) / (end - start) if end < len(times) else 1
        spread += [(times[start] + i * step) / 1000 for i in range(end - start)]
    return spread
