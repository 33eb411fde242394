"""Traces of prefix blocks: read from a file, or invented with a seed.

A prompt is the ids of its blocks in order, as in Mooncake's traces. An id stands for a block and all before it, so a
block is of use only if those before it are there.
"""

from __future__ import annotations

import gzip
import heapq
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from kvfs.errors import UsageError

Prompts = list[list[int]]

_IDS_MAX = 1 << 48


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their times, which are seconds. sessions: of each request, numbered as they begin; None
    where the trace does not say."""

    prompts: Prompts
    times_s: list[float]
    sessions: list[int] | None


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
    return Trace(prompts, _spread(stamps), None if sessions[0] is None else _numbered(sessions))


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
    return Trace(prompts, [time_s for time_s, _, _ in order], None if sessions is None else _numbered(sessions))


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


def _numbered(sessions: Sequence[object]) -> list[int]:
    numbers: dict[object, int] = {}
    return [numbers.setdefault(session, len(numbers)) for session in sessions]


def invent(shape: str, seed: int = 1, requests: int = 6000, at_once: int = 150) -> Trace:
    """A trace of one of the SHAPES. at_once: its sessions at any time."""
    try:
        begin = SHAPES[shape]
    except KeyError:
        raise UsageError(f"no such trace: {shape}; there are {', '.join(SHAPES)}") from None
    return _Inventor(seed).play(begin, requests, at_once)


class _Inventor:
    """Sessions that begin at random times and say when they come again, in seconds."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._ids: dict[tuple[int, int], int] = {}
        self._fresh = 0

    def play(
        self, begin: Callable[[_Inventor], Iterator[tuple[float, list[int]]]], requests: int, at_once: int
    ) -> Trace:
        prompts: Prompts = []
        times: list[float] = []
        sessions: list[int] = []
        # From the start on there are as many sessions as later: one that ends is followed by another.
        waiting: list[tuple[float, int, Iterator[tuple[float, list[int]]]]] = []
        for place in range(at_once):
            heapq.heappush(waiting, (self.random.uniform(0, 600), place, begin(self)))
        last, begun = list(range(at_once)), at_once  # by place: the number of its session
        while len(prompts) < requests:
            now, place, session = heapq.heappop(waiting)
            step = next(session, None)
            if step is None:
                heapq.heappush(waiting, (now + self.random.expovariate(1 / 60), place, begin(self)))
                last[place], begun = begun, begun + 1
                continue
            pause, contents = step
            prompts.append(self.chain(contents))
            times.append(now)
            sessions.append(last[place])
            heapq.heappush(waiting, (now + pause, place, session))
        return Trace(prompts, times, _numbered(sessions))

    def chain(self, contents: list[int]) -> list[int]:
        """Ids of blocks with these contents, one after another."""
        ids, parent = [], -1
        for content in contents:
            parent = self._ids.setdefault((parent, content), len(self._ids))
            ids.append(parent)
        return ids

    def fresh(self, count: int) -> list[int]:
        """Contents that nothing else has."""
        self._fresh += count
        return list(range(-self._fresh, count - self._fresh))

    def length(self, median: float, spread: float = 0.8) -> int:
        return max(1, min(250, round(self.random.lognormvariate(0, spread) * median)))


def _chats(of: _Inventor) -> Iterator[tuple[float, list[int]]]:
    """Turns of people, a minute or two apart. Each prompt is the earlier one and some more, and a last block that is
    not full and so never the same again."""
    prompt = [of.random.randrange(5) * 10 + i for i in range(2)] + of.fresh(of.length(8))
    while True:
        yield of.random.expovariate(1 / 100) + 10, prompt + of.fresh(1)
        if of.random.random() < 0.35:
            return
        prompt = prompt + of.fresh(of.length(3))


def _agents(of: _Inventor) -> Iterator[tuple[float, list[int]]]:
    """Tool loops: a large system prompt that many share, then step upon step within seconds; some wait for a person."""
    kind = of.random.randrange(8)
    prompt = [1000 + 100 * kind + i for i in range(8 + 3 * kind)] + of.fresh(of.length(4))
    for _ in range(of.length(12)):
        pause = of.random.expovariate(1 / 8) if of.random.random() < 0.93 else of.random.expovariate(1 / 200)
        yield pause + 1, prompt + of.fresh(1)
        prompt = prompt + of.fresh(of.length(2, 0.5))


def _rag(of: _Inventor) -> Iterator[tuple[float, list[int]]]:
    """Questions about documents, of which few are asked for often; the order of the documents is part of the prefix."""
    prompt = [5000]
    for _ in range(of.random.choice((1, 1, 2))):
        document = min(1499, int(of.random.paretovariate(0.6)) - 1)
        prompt += [10_000 + 100 * document + i for i in range(3 + document * 7 % 12)]
    yield of.random.expovariate(1 / 30), prompt + of.fresh(2)


def _scan(of: _Inventor) -> Iterator[tuple[float, list[int]]]:
    """A batch of long prompts, each seen once."""
    for _ in range(of.length(10)):
        yield 1, of.fresh(of.length(40))


def _mixed(of: _Inventor) -> Iterator[tuple[float, list[int]]]:
    kinds = (_chats, _agents, _rag, _scan)
    yield from of.random.choices(kinds, (6, 2, 10, 0.3))[0](of)


SHAPES = {"chats": _chats, "agents": _agents, "rag": _rag, "mixed": _mixed}
