"""Blocks that a hint of vLLM's names and no request has asked for yet: they are read into vLLM's own memory.

A router knows blocks by 64 bits of their hashes, and kvfs has no look-up by those. So a thread lists the namespace at
the first such hint, and follows kvfs's events from then on.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import kvfs
from kvfs.client.events import Removed, Stored
from kvfs.connectors.common import Connection
from kvfs.connectors.vllm_hints import Hint, hash_of
from kvfs.errors import KvfsError

_WAIT_S, _CLOSE_S = 0.5, 2.0
# Some 200 bytes each. In a larger namespace those are found that were stored last.
HASHES_MAX = 262_144
# Keys of one hash: a key for each group of layers, and those of others whose hashes end alike.
_KEYS_A_HASH = 64
# Hints that wait for their turn, and their hashes: more than that the index knows none.
_HINTS_MAX, _WAITING_MAX = 256, HASHES_MAX
# Of one step of vLLM's: keys that it is asked for, and hashes that are taken for them: some milliseconds.
_STEP_KEYS, _STEP_HASHES = 256, 1024


class Index:
    """Keys of the namespace by hash_of(). Any thread may ask."""

    def __init__(self, connection: Connection) -> None:
        self.is_whole = False  # it has been listed, and events tell the rest
        self._connection = connection
        self._keys: OrderedDict[int, tuple[bytes, ...]] = OrderedDict()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._listen, name="kvfs-index", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there is no thread to be had: a later hint tries again
            return
        self._thread = thread

    def find(self, number: int) -> tuple[bytes, ...]:
        """One key for each group of layers."""
        with self._lock:
            return self._keys.get(number, ())

    def add(self, key: bytes) -> None:
        number = hash_of(key)
        with self._lock:
            there = self._keys.get(number, ())
            if key not in there:
                self._keys[number] = (*there, key)[-_KEYS_A_HASH:]
                if len(self._keys) > HASHES_MAX:
                    self._keys.popitem(last=False)

    def remove(self, key: bytes) -> None:
        number = hash_of(key)
        with self._lock:
            left = tuple(other for other in self._keys.pop(number, ()) if other != key)
            if left:
                self._keys[number] = left

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self._connection.options.timeout_s + _CLOSE_S)

    def _listen(self) -> None:
        while not self._stop.is_set():
            try:
                with kvfs.events(self._connection.options.mount, self._connection.space) as events:
                    while not self._stop.is_set():
                        if not self.is_whole:
                            self._list()
                        event = events.next_event(_WAIT_S)
                        if isinstance(event, Stored | Removed):
                            if event.key is not None:
                                (self.add if isinstance(event, Stored) else self.remove)(event.key)
                        elif event is not None:
                            self.is_whole = False
            except (KvfsError, OSError):
                self.is_whole = False
                self._stop.wait(_WAIT_S)

    def _list(self) -> None:
        client = self._connection.client
        if client is None:
            return
        with self._lock:
            self._keys.clear()
        for key in client.list():
            if self._stop.is_set():
                return
            self.add(key)
        self.is_whole = True


@dataclass(slots=True)
class _Wanted:
    hashes: deque[int]
    until: float
    load_filter: Any


class Ahead:
    """Blocks that hints want to be read, in their order: `room` of them at most that no request has used yet.

    Called by one thread at a time.
    """

    def __init__(self, connection: Connection, room: int) -> None:
        self._index = Index(connection)
        self._room = room
        self._wanted: deque[_Wanted] = deque()
        self._waiting = 0  # hashes in them
        self._there: OrderedDict[bytes, float] = OrderedDict()  # and until when each is waited for
        self._soonest = float("inf")  # none of these times is before it

    def want(self, hint: Hint, load_filter: Any) -> int:
        """Returns how many hashes are refused."""
        assert hint.hashes is not None
        if len(self._wanted) >= _HINTS_MAX or self._waiting + len(hint.hashes) > _WAITING_MAX:
            return len(hint.hashes)
        self._index.start()
        self._waiting += len(hint.hashes)
        self._wanted.append(_Wanted(deque(hint.hashes), time.monotonic() + hint.seconds, load_filter))
        return 0

    def has_work(self) -> bool:
        return bool(self._wanted) and self._index.is_whole

    def take(self) -> tuple[list[bytes], float, Any, int]:
        """Keys of one hint for this step, until when they are wanted, whence; and how many hashes are refused."""
        keys: list[bytes] = []
        refused, now = 0, time.monotonic()
        while self._wanted and self._wanted[0].until <= now:
            refused += self._forget(self._wanted.popleft())
        if not self.has_work():
            return keys, now, None, refused
        if len(self._there) >= self._room:
            self._give_up(now)
        wanted, taken = self._wanted[0], 0
        while wanted.hashes and len(keys) < _STEP_KEYS and taken < _STEP_HASHES:
            if len(self._there) + len(keys) >= self._room:
                if not keys:
                    refused += self._forget(wanted)
                break  # some of these may be in vLLM's memory, and take no room: the next step knows
            found = self._index.find(wanted.hashes.popleft())
            taken += 1
            refused += not found
            keys += [key for key in found if key not in self._there]
        self._waiting -= taken
        if not wanted.hashes:
            self._wanted.popleft()
        return keys, wanted.until, wanted.load_filter, refused

    def _forget(self, wanted: _Wanted) -> int:
        """Returns how many hashes it had."""
        count = len(wanted.hashes)
        wanted.hashes.clear()
        self._waiting -= count
        return count

    def _give_up(self, now: float) -> None:
        """Blocks that nobody used in time leave their room, wherever they are among those that have more time."""
        if self._soonest <= now:
            self._there = OrderedDict((key, until) for key, until in self._there.items() if until > now)
            self._soonest = min(self._there.values(), default=float("inf"))

    def started(self, keys: Sequence[bytes], until: float) -> None:
        self._there.update(dict.fromkeys(keys, until))
        self._soonest = min(self._soonest, until)

    def failed(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._there.pop(key, None)

    def used(self, keys: Iterable[bytes]) -> int:
        """A request had these; returns how many of them were read ahead for it."""
        if not self._there:
            return 0
        return sum(self._there.pop(key, None) is not None for key in keys)

    def close(self) -> None:
        self._index.close()
