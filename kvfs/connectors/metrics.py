"""A connector's counters in the Prometheus registry of the engine's own process, if prometheus_client is installed.

kvfs_connector_<counter>_total{engine, namespace}: the fields of common.Counters. Plain prometheus counters, which the
engine's multi-process mode knows too.
"""

from __future__ import annotations

import threading
from dataclasses import fields
from typing import Protocol

from kvfs.connectors.common import Counters

_TEXTS = {
    "lookups": "Keys looked up",
    "hits": "Keys that a look-up found",
    "loaded": "Blocks loaded",
    "loaded_bytes": "Bytes loaded",
    "failed_loads": "Loads that were misses",
    "stored": "Blocks stored",
    "stored_bytes": "Bytes stored",
    "present": "Stores of blocks that were there already",
    "failed_stores": "Blocks that could not be stored",
    "dropped": "Stores dropped while kvfs was away",
    "lost": "Times that kvfs went away",
}


class _Child(Protocol):
    def inc(self, amount: float) -> None: ...


class _Counter(Protocol):
    def labels(self, engine: str, namespace: str) -> _Child: ...


_made: dict[str, _Counter] = {}
_lock = threading.Lock()


class Exporter:
    """Of one connector. update() adds what was counted since the last one; any thread may call it."""

    def __init__(self, engine: str, namespace: str) -> None:
        self._lock = threading.Lock()
        self._before = Counters()
        self._children = {name: counter.labels(engine, namespace) for name, counter in _counters().items()}

    def update(self, counters: Counters) -> None:
        if not self._children:
            return
        with self._lock:
            now = counters.copy()
            new, self._before = now.since(self._before), now
        for field in fields(new):
            amount = getattr(new, field.name)
            if amount and field.name in self._children:
                self._children[field.name].inc(amount)


def _counters() -> dict[str, _Counter]:
    """One of each a process, for all its connectors."""
    with _lock:
        if not _made:
            try:
                from prometheus_client import Counter
            except ImportError:
                return {}
            for name, text in _TEXTS.items():
                _made[name] = Counter(f"kvfs_connector_{name}", text, ["engine", "namespace"])
        return _made
