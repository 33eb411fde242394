"""The blocks that vLLM's tier sends to its publisher: stored or loaded ones, and later their removal.

Keys that something happened to are looked up again. After a gap all sent keys are, some in each step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from kvfs.connectors.changes import Changes
from kvfs.connectors.common import Connection

# Keys that are looked up in one step: about a millisecond.
_LOOKUPS = 4096
# Keys that something happened to and that wait for their look-up; beyond it all sent keys are looked up again.
_CHANGED_MAX = 65_536
# Requests whose loads wait to be told. A request that is aborted meanwhile is never scheduled.
_REQUESTS = 1024


class TierEvents:
    """For take_events() of the tier. All methods are called by one thread at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._told: set[bytes] = set()
        self._new: list[bytes] = []
        self._loaded: dict[str, list[bytes]] = {}
        self._clearing = False
        self._changed: set[bytes] = set()
        self._all_changed = False
        self._rest: list[bytes] = []  # of all sent keys, after a gap, those that wait for their look-up
        self._lock = threading.Lock()
        self._changes = Changes(connection, self._note)

    def stored(self, keys: Iterable[bytes]) -> None:
        """Each is sent once until its removal: some routers count."""
        if not self._clearing:
            self._new += [key for key in keys if key not in self._told]
            self._told.update(self._new)

    def loaded(self, request: str, keys: Iterable[bytes]) -> None:
        """They are sent once the request is scheduled: before that vLLM may not have their tokens."""
        self._loaded.setdefault(request, []).extend(keys)
        if len(self._loaded) > _REQUESTS:
            del self._loaded[next(iter(self._loaded))]

    def scheduled(self, requests: Iterable[str]) -> None:
        self._clearing = False
        if self._loaded:
            for request in requests:
                self.stored(self._loaded.pop(request, ()))

    def cleared(self) -> None:
        """vLLM empties its own tiers, and tells routers that all is gone, these too. They are sent again when they are
        loaded. A store that ends before the next step is not told: vLLM has forgotten its tokens."""
        self._new.clear()
        self._loaded.clear()
        self._told.clear()
        self._clearing = True

    def take(self) -> Iterable[tuple[list[bytes], bool]]:
        """Lists of keys, and whether they were removed."""
        if self._new:
            new, self._new = self._new, []
            yield new, False
        if self._connection.client is None:
            return  # kvfs is away: nobody knows
        keys = self._suspects()
        if keys:
            gone = [key for key, found in zip(keys, self._connection.exists(keys), strict=True) if not found]
            if gone and self._connection.client is not None:
                self._told.difference_update(gone)
                yield gone, True

    def _suspects(self) -> list[bytes]:
        """Keys that were told and may be gone; the rest waits for the next step."""
        with self._lock:
            # Another gap meanwhile begins it anew at its end: else some keys would never have their turn.
            if self._all_changed and not self._rest:
                self._rest = list(self._told)
                self._changed.clear()
                self._all_changed = False
            changed, self._changed = self._changed, set()
        keys = [key for key in changed if key in self._told]
        room = max(1, _LOOKUPS // 2) if self._rest else _LOOKUPS
        if len(keys) > room:
            self._note(keys[room:], False)
            del keys[room:]
        while self._rest and len(keys) < _LOOKUPS:
            key = self._rest.pop()
            if key in self._told:
                keys.append(key)
        return keys

    def close(self) -> None:
        self._changes.close()

    def _note(self, keys: Sequence[bytes], everything: bool) -> None:
        with self._lock:
            self._changed.update(keys)
            self._all_changed |= everything
            if len(self._changed) > _CHANGED_MAX:
                self._changed.clear()
                self._all_changed = True
