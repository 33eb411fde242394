"""Traces of prefix blocks: read from a file, or invented with a seed.

A trace is a list of requests, each the ids of the blocks of its prompt in order, as in Mooncake's traces. An id stands
for a block and all before it, so a block is of use only if those before it are there.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from kvfs.errors import UsageError

Trace = list[list[int]]

_IDS_MAX = 1 << 48


def load(path: Path) -> Trace:
    """A JSONL file with `hash_ids` in every line. Raises UsageError with file and line."""
    trace: Trace = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    ids = json.loads(line)["hash_ids"]
                    if not all(type(i) is int and 0 <= i < _IDS_MAX for i in ids) or len(set(ids)) != len(ids):
                        raise ValueError("hash_ids must be different whole numbers")
                except (ValueError, KeyError, TypeError) as error:
                    raise UsageError(f"{path}: line {number}: not a request with hash_ids: {error}") from error
                trace.append(ids)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error
    if not any(trace):
        raise UsageError(f"{path}: no blocks in {len(trace)} requests")
    return trace


def invent(shape: str, seed: int = 1, requests: int = 6000) -> Trace:
    """A trace of one of the SHAPES."""
    try:
        sessions = SHAPES[shape]
    except KeyError:
        raise UsageError(f"no such trace: {shape}; there are {', '.join(SHAPES)}") from None
    return _Inventor(seed).play(sessions, requests)


class _Inventor:
    """Sessions that begin at random times and say when they come again, in seconds."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._ids: dict[tuple[int, int], int] = {}
        self._fresh = 0

    def play(self, begin: Callable[[_Inventor], Iterator[tuple[float, list[int]]]], requests: int) -> Trace:
        trace: Trace = []
        # From the start on there are as many sessions as later: one that ends is followed by another.
        waiting: list[tuple[float, int, Iterator[tuple[float, list[int]]]]] = []
        for number in range(_SESSIONS):
            heapq.heappush(waiting, (self.random.uniform(0, 600), number, begin(self)))
        while len(trace) < requests:
            now, number, session = heapq.heappop(waiting)
            step = next(session, None)
            if step is None:
                heapq.heappush(waiting, (now + self.random.expovariate(1 / 60), number, begin(self)))
                continue
            pause, contents = step
            trace.append(self.chain(contents))
            heapq.heappush(waiting, (now + pause, number, session))
        return trace

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


_SESSIONS = 150
SHAPES = {"chats": _chats, "agents": _agents, "rag": _rag, "mixed": _mixed}
