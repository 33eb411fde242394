"""Traces of prefix blocks that are invented with a seed, for users without a trace.

A prompt is the ids of its blocks in order, as in Mooncake's traces. An id stands for a block and all before it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from kvfs.errors import UsageError

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their times, which are seconds. sessions: of each request, numbered as they begin; None
    where the trace does not say."""

    prompts: Prompts
    times_s: list[float]
    sessions: list[int] | None


def numbered(sessions: Sequence[object]) -> list[int]:
    """Sessions by the order in which they begin."""
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
        return Trace(prompts, times, numbered(sessions))

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
