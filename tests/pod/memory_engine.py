"""An engine in memory: a double for simulation, never for a pool. Seeded, it does what a bad engine and network may.

It loses, doubles and delays entries for each reader by itself, and forgets what it acknowledged. It is flushed and
trimmed, cut off from some nodes, and comes back as it was. Time is given from outside; no call waits.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvfs.errors import EngineAwayError
from kvfs.pod.engine import BEGINNING, Engine, Entry, Fields, Information, Position, StreamSize


@dataclass(slots=True)
class Faults:
    """Probabilities, of an entry for a reader except for `forget` and `unsure`, which are of a call."""

    lose: float = 0.0
    double: float = 0.0
    late: float = 0.0
    late_max_s: float = 1.0
    # An append is acknowledged and forgotten; a call fails although it was done.
    forget: float = 0.0
    unsure: float = 0.0


@dataclass
class MemoryServer:
    """The server that the engines of all nodes share."""

    name: str
    clock: Callable[[], float]
    random: random.Random
    faults: Faults = field(default_factory=Faults)
    cut: set[int] = field(default_factory=set)
    away: bool = False
    clock_behind_s: float = 0.0
    streams: dict[str, list[tuple[Position, Fields]]] = field(default_factory=dict)
    values: dict[str, tuple[bytes, float]] = field(default_factory=dict)

    def flush(self) -> None:
        self.streams.clear()
        self.values.clear()

    def snapshot(self) -> dict[str, list[tuple[Position, Fields]]]:
        return {name: list(entries) for name, entries in self.streams.items()}

    def restore(self, snapshot: Mapping[str, list[tuple[Position, Fields]]]) -> None:
        self.streams = {name: list(entries) for name, entries in snapshot.items()}
        self.values.clear()

    def trim_all(self, keep: int) -> None:
        for entries in self.streams.values():
            del entries[: max(0, len(entries) - keep)]

    def engine(self, node: int) -> MemoryEngine:
        return MemoryEngine(self, node)


class MemoryEngine:
    """One connection of a node. See Engine."""

    def __init__(self, server: MemoryServer, node: int) -> None:
        self._server, self._node = server, node
        self._late: list[tuple[float, int, Entry]] = []
        self._order = 0

    @property
    def name(self) -> str:
        return self._server.name

    def append(self, stream: str, fields: Fields, *, oldest: Position | None = None) -> Position:
        server = self._check()
        entries = server.streams.setdefault(stream, [])
        position = (int((server.clock() - server.clock_behind_s) * 1000), 0)
        if entries and position <= entries[-1][0]:
            position = (entries[-1][0][0], entries[-1][0][1] + 1)
        faults = server.faults
        if not faults.forget or server.random.random() >= faults.forget:
            entries.append((position, dict(fields)))
        if oldest is not None and entries and entries[0][0] < oldest:
            del entries[: bisect_left(entries, oldest, key=lambda entry: entry[0])]
        self._unsure()
        return position

    def read(self, after: Mapping[str, Position], *, wait_s: float, count: int) -> list[Entry]:
        server = self._check()
        now, faults = server.clock(), server.faults
        dice = server.random.random
        faulty = faults.lose or faults.double or faults.late
        found: list[Entry] = []
        for stream, position in after.items():
            entries = server.streams.get(stream)
            if not entries or entries[-1][0] <= position:
                continue
            first = bisect_right(entries, position, key=lambda entry: entry[0])
            for place, fields in entries[first : first + count]:
                entry = Entry(stream, place, fields)
                if not faulty:
                    found.append(entry)
                    continue
                if dice() < faults.lose:
                    continue
                late = dice() < faults.late
                if not late:
                    found.append(entry)
                if late or dice() < faults.double:
                    self._order += 1
                    self._late.append((now + dice() * faults.late_max_s, self._order, entry))
        if self._late:
            found += [entry for when, _, entry in sorted(self._late, key=lambda late: late[:2]) if when <= now]
            self._late = [late for late in self._late if late[0] > now]
        return found

    @property
    def late_count(self) -> int:
        return len(self._late)

    def tails(self, streams: Sequence[str]) -> list[Position]:
        server = self._check()
        return [entries[-1][0] if (entries := server.streams.get(name)) else BEGINNING for name in streams]

    def trim(self, stream: str, *, oldest: Position, expire_s: float | None = None) -> None:
        server = self._check()
        if stream in server.streams:
            server.streams[stream] = [entry for entry in server.streams[stream] if entry[0] >= oldest]

    def put(self, key: str, value: bytes, *, expire_s: float | None = None) -> None:
        server = self._check()
        server.values[key] = (value, server.clock() + expire_s if expire_s is not None else float("inf"))
        self._unsure()

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        server = self._check()
        now = server.clock()
        found = [server.values.get(key) for key in keys]
        return [value[0] if value is not None and value[1] > now else None for value in found]

    def remove(self, key: str) -> None:
        self._check().values.pop(key, None)

    def ping(self) -> None:
        self._check()

    def time_s(self) -> float:
        return self._check().clock()

    def information(self) -> Information:
        self._check()
        return Information("memory", (1,), "standalone", "master", "noeviction", 0, 0, 0.0, 0, self.name)

    def sizes(self, streams: Sequence[str]) -> list[StreamSize]:
        found = [self._check().streams.get(name, []) for name in streams]
        return [
            StreamSize(len(entries), sum(len(value) for _, fields in entries for value in fields.values()))
            for entries in found
        ]

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        self._late.clear()

    def _check(self) -> MemoryServer:
        if self._server.away or self._node in self._server.cut:
            raise EngineAwayError(f"engine {self.name}: away for node {self._node}")
        return self._server

    def _unsure(self) -> None:
        if self._server.faults.unsure and self._server.random.random() < self._server.faults.unsure:
            raise EngineAwayError(f"engine {self.name}: no answer for node {self._node}")


def _is_engine(engine: MemoryEngine) -> Engine:
    return engine
