"""The order in which Plane.take() hands on what came, by a double of the data plane."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from kvfs._native import ffi

import kvfs.plane
from kvfs.plane import Plane
from kvfs.upcalls import FUSE_FLUSH, FUSE_READDIR, Call

CREATE = 35


class LibDouble:
    """Has calls, and neither events nor completions."""

    def __init__(self, opcodes: list[int]) -> None:
        self.opcodes = deque(opcodes)

    def kvfs_take_events(self, *_: object) -> int:
        return 0

    def kvfs_take_completions(self, *_: object) -> int:
        return 0

    def kvfs_take_calls(self, _: object, out: Any, count: int) -> int:
        taken = 0
        while self.opcodes and taken < count:
            out[taken].opcode = self.opcodes.popleft()
            taken += 1
        return taken


def test_a_flush_does_not_wait_for_listings_and_a_create_for_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest may have thousands of listings under way."""
    taken: list[int] = []
    plane = Plane.__new__(Plane)
    plane._plane, plane._done, plane._flushes, plane._listings = None, deque(), deque(), deque()
    plane._events, plane._completions = ffi.new("struct kvfs_event[1]"), ffi.new("struct kvfs_completion[1]")
    plane._calls = ffi.new("struct kvfs_call[16]")

    def on_call(call: Call) -> None:
        taken.append(call.opcode)

    plane.on_call = on_call
    double = LibDouble([*[FUSE_READDIR] * 100, FUSE_FLUSH, CREATE])
    monkeypatch.setattr(kvfs.plane, "lib", double)
    plane.take(lambda event: None)
    assert taken[:2] == [CREATE, FUSE_FLUSH] and taken[2:] == [FUSE_READDIR] * 4
    double.opcodes.append(FUSE_FLUSH)
    plane.take(lambda event: None)
    assert taken[6:] == [FUSE_FLUSH, *[FUSE_READDIR] * 4]
    for _ in range(23):
        plane.take(lambda event: None)
    assert taken.count(FUSE_READDIR) == 100
