"""Leases between an engine's look-up and its load: blocks that a look-up found are not evicted meanwhile.

A look-up claims all that it found (client.claim()): one frame, without a wait for its answer. The claim ends when each
of its blocks has been loaded, or with time. An engine that looks up and never loads costs no more than that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from kvfs.connectors.common import Connection, State
from kvfs.errors import KvfsError


def seconds_of(engine: str, given: object) -> float:
    """The option lease_s, checked. Raises ValueError."""
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given <= 3600:
        raise ValueError(f"kvfs for {engine}: lease_s {given!r}: 0 to 3600 are possible")
    return float(given)


class Leases:
    """The leases of one connection; any thread may call anything, and nothing raises or waits. seconds: 0 is none at
    all."""

    def __init__(self, connection: Connection, seconds: float) -> None:
        self.seconds = seconds
        self._connection = connection

    def take(self, keys: Sequence[bytes]) -> None:
        """Hold what a look-up found."""
        client = self._connection.client if self._connection.state is State.UP else None
        if keys and self.seconds > 0 and client is not None:
            with suppress(KvfsError, OSError):
                client.claim(keys, self.seconds)

    def give_back(self, keys: Sequence[bytes]) -> None:
        """A load of these is over: of each, the oldest lease lets go."""
        client = self._connection.client
        if keys and self.seconds > 0 and client is not None:
            with suppress(KvfsError, OSError):
                client.unclaim(keys)
