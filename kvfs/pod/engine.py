"""The engine of a pod, as the feed sees it: streams, small values with an expiry, and what the server says of itself.

The implementation is kvfs.pod.redis_engine (Redis or Valkey). Nothing about correctness rests on an engine: it may lose
entries, double them, be flushed, or come back as it was yesterday.

Keys of a pool: `kvfs:{<uuid>}:<slot>` is a node's stream, `:in` behind it is what others write to this node alone,
`:beat` its sign of life. The braces keep all keys of a pool on one node of a cluster. Fields of an entry:

- `b`   a batch of news (kvfs.pod.batch)
- `t`   with it: the wall clock in ns when the owner took it, eight bytes, little-endian
- `r`   with it, if it is a repeat
- `c`   a message (kvfs.pod.messages)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

# An entry's place in its stream: milliseconds of the server's clock, and a count. Positions are ordered.
Position: TypeAlias = tuple[int, int]
Fields: TypeAlias = Mapping[bytes, bytes]

BEGINNING: Position = (0, 0)
BATCH, TIME, REPEATED, MESSAGE = b"b", b"t", b"r", b"c"


@dataclass(frozen=True, slots=True)
class Entry:
    stream: str
    position: Position
    fields: Fields


@dataclass(frozen=True, slots=True)
class StreamSize:
    """entries in a stream, and the server's memory for them."""

    entries: int
    size: int


@dataclass(frozen=True, slots=True)
class Information:
    """A server's word on itself. memory_max 0: no bound. cpu_s: since its start, of user and system."""

    product: str  # "redis" or "valkey"
    version: tuple[int, ...]
    mode: str  # "standalone", "sentinel", "cluster"
    role: str
    eviction_policy: str
    memory: int
    memory_max: int
    cpu_s: float
    uptime_s: int
    run_id: str


class Engine(Protocol):
    """One thread at a time uses an engine, except for interrupt() and close(). Every call ends within its deadline.

    Errors: EngineAwayError if it cannot be reached or is too slow; EngineError if it refuses.
    """

    @property
    def name(self) -> str:
        """Its URL, for messages."""
        ...

    def append(self, stream: str, fields: Fields, *, oldest: Position | None = None) -> Position:
        """Append an entry. Entries before `oldest` may be dropped. A call that failed may have appended."""
        ...

    def read(self, after: Mapping[str, Position], *, wait_s: float, count: int) -> list[Entry]:
        """At most `count` entries of each stream that lie behind a position. Waits for one if there is none."""
        ...

    def tails(self, streams: Sequence[str]) -> list[Position]:
        """The position of the last entry of each stream; BEGINNING for an empty one."""
        ...

    def trim(self, stream: str, *, oldest: Position, expire_s: float | None = None) -> None:
        """Drop entries before `oldest`; with expire_s drop the stream if this is not said again in time."""
        ...

    def put(self, key: str, value: bytes, *, expire_s: float | None = None) -> None: ...

    def get(self, keys: Sequence[str]) -> list[bytes | None]: ...

    def remove(self, key: str) -> None: ...

    def ping(self) -> None: ...

    def time_s(self) -> float:
        """The server's wall clock."""
        ...

    def information(self) -> Information: ...

    def sizes(self, streams: Sequence[str]) -> list[StreamSize]: ...

    def interrupt(self) -> None:
        """From any thread: a read() that waits returns soon, and later ones do not wait."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Names:
    """The keys of a pool."""

    uuid: str

    def stream(self, slot: int) -> str:
        return f"kvfs:{{{self.uuid}}}:{slot}"

    def inbox(self, slot: int) -> str:
        return f"{self.stream(slot)}:in"

    def beat(self, slot: int) -> str:
        return f"{self.stream(slot)}:beat"
