"""The keys of a connection's namespace that something happened to: a thread waits for kvfs's events of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import kvfs
from kvfs.connectors.common import Connection
from kvfs.errors import KvfsError

WAIT_S = 0.5
_CLOSE_S = 5.0
_MANY = 512


class Changes:
    """Calls note(keys, everything) in its own thread. keys: they were stored or removed. everything: others may have
    been, too, after a gap, a reset, or at the begin. It calls at least every WAIT_S, then with no keys. The block table
    says which exist now."""

    def __init__(self, connection: Connection, note: Callable[[Sequence[bytes], bool], None]) -> None:
        self._connection, self._note = connection, note
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvfs-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with kvfs.events(self._connection.options.mount, self._connection.space) as events:
                    self._note((), True)  # whatever happened before
                    while not self._stop.is_set():
                        keys, everything = [], False
                        event = events.next_event(WAIT_S)
                        while event is not None:
                            key = getattr(event, "key", None)  # a gap or a reset has none
                            if key is not None:
                                keys.append(key)
                            else:
                                everything = True
                            event = events.next_event() if len(keys) < _MANY else None
                        self._note(keys, everything)
            except (KvfsError, OSError):
                self._stop.wait(WAIT_S)
