"""The thread that looks at connections (kvfs/connectors/watch.py)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import ModuleType

import pytest
from helpers import wait_until

from kvfs.connectors import watch as module


class Connection:
    """It says no once, and is up again while it says so: its keeper adds it, and then it may be watched."""

    def __init__(self, watch: ModuleType) -> None:
        self._watch, self.looks, self.is_over = watch, 0, False

    def look(self) -> bool:
        self.looks += 1
        if self.looks == 1:
            keeper = threading.Thread(target=self._watch.add, args=(self,))
            keeper.start()
            keeper.join(60)
            assert not keeper.is_alive()
            return False
        return not self.is_over


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setattr(module, "PERIOD_S", 0.001)
    yield module


def test_a_connection_that_is_up_again_while_it_says_no_stays_watched(watch: ModuleType) -> None:
    one = Connection(watch)
    watch.add(one)
    wait_until(lambda: one.looks > 3, "later looks")
    one.is_over = True
    wait_until(lambda: one not in watch._watched, "its end")
    looks = one.looks
    watch.add(one)
    wait_until(lambda: one.looks > looks and one not in watch._watched, "another look, and the end")
