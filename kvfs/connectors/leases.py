"""Leases between an engine's look-up and its load: blocks that a look-up found are not evicted meanwhile.

A look-up takes one lease on all that it found. It goes back when each of its blocks has been loaded, or with time. An
engine that looks up and never loads costs nothing more than that time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from kvfs.client.leases import Lease
from kvfs.connectors.common import Connection, State
from kvfs.errors import KvfsError

# A daemon that refuses, or does not answer, is left alone so long: look-ups do not wait for it again and again.
PAUSE_S = 5.0


def seconds_of(engine: str, given: object) -> float:
    """The option lease_s, checked. Raises ValueError."""
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given <= 3600:
        raise ValueError(f"kvfs for {engine}: lease_s {given!r}: 0 to 3600 are possible")
    return float(given)


class _Grant:
    """One look-up's lease, and the keys that it waits for."""

    __slots__ = ("deadline", "keys", "lease")

    def __init__(self, lease: Lease, keys: set[bytes], deadline: float) -> None:
        self.lease, self.keys, self.deadline = lease, keys, deadline


class Leases:
    """Those of one connection; any thread may call anything, and nothing raises. seconds: 0 is none at all."""

    def __init__(self, connection: Connection, seconds: float) -> None:
        self.seconds = seconds
        self.taken = self.refused = 0
        self._connection = connection
        self._lock = threading.Lock()
        self._grants: deque[_Grant] = deque()
        self._of_key: dict[bytes, deque[_Grant]] = {}
        self._paused_until = 0.0

    def take(self, keys: Sequence[bytes]) -> None:
        """Hold what a look-up found. Asks the daemon, once; not one that is known to be away."""
        client = self._connection.client if self._connection.state is State.UP else None
        now = time.monotonic()
        if not keys or self.seconds <= 0 or client is None or now < self._paused_until:
            return
        try:
            lease = client.lease(keys, self.seconds)
        except (KvfsError, OSError):
            self._paused_until = time.monotonic() + PAUSE_S
            self.refused += len(keys)
            return
        held = {key for key, is_held in zip(keys, lease.held, strict=True) if is_held}
        self.taken += len(held)
        self.refused += len(keys) - len(held)
        grant = _Grant(lease, held, now + self.seconds)
        with self._lock:
            self._forget_old(now)
            if held:
                self._grants.append(grant)
                for key in held:
                    self._of_key.setdefault(key, deque()).append(grant)

    def give_back(self, keys: Sequence[bytes]) -> None:
        """A load of these is over: of each, the oldest lease lets go. A lease that waits for no other is released."""
        done: list[_Grant] = []
        with self._lock:
            for key in keys:
                grants = self._of_key.get(key)
                if grants is None:
                    continue
                grant = grants.popleft()
                if not grants:
                    del self._of_key[key]
                grant.keys.discard(key)
                if not grant.keys:
                    done.append(grant)
            for grant in done:
                self._grants.remove(grant)
        self._release(done)

    def close(self) -> None:
        with self._lock:
            grants = list(self._grants)
            self._grants.clear()
            self._of_key.clear()
        self._release(grants)

    def _forget_old(self, now: float) -> None:
        """Those whose time is over: the daemon has dropped them by itself."""
        while self._grants and self._grants[0].deadline <= now:
            grant = self._grants.popleft()
            for key in grant.keys:
                grants = self._of_key[key]
                grants.remove(grant)
                if not grants:
                    del self._of_key[key]

    def _release(self, grants: Sequence[_Grant]) -> None:
        now = time.monotonic()
        for grant in grants:
            if grant.deadline <= now or now < self._paused_until:
                continue
            try:
                grant.lease.release()
            except (KvfsError, OSError):
                self._paused_until = time.monotonic() + PAUSE_S
