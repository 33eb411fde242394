"""Keys whose block an engine could not load: the next store of each replaces the block.

Engines store what is absent, and an existing block counts as stored. A block that never loads, damaged or of another
size, would then stay. Every prompt that begins with it would be computed anew.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

# A key that is forgotten costs a prefix, one that is remembered some hundred bytes.
COUNT_MAX = 65_536


class Spoiled:
    """A bounded set of keys; the oldest go first. Any thread may call anything."""

    def __init__(self, count_max: int = COUNT_MAX) -> None:
        self._count_max = count_max
        self._lock = threading.Lock()
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > self._count_max:
                self._keys.popitem(last=False)

    def discard(self, keys: Iterable[bytes]) -> None:
        """They were stored, or loaded."""
        if self._keys:
            with self._lock:
                for key in keys:
                    self._keys.pop(key, None)

    def any_of(self, keys: Iterable[bytes]) -> bool:
        return bool(self._keys) and any(key in self._keys for key in keys)
