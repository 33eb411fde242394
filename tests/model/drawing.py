"""Draws histories for history.py, and finds the shortest part of one that fails."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence

from history import Operation

DIRECTORIES = ("", "", "d/", "e/", "d/f/")
NAMES = ("a", "b", "c", "t.tmp")
SIZES = (0, 1, 100, 4096, 5000, 70_000, 150_000)
LABELS = ("h0", "h1")
TIMES_NS = (-1, 5_000_000_007, 6_000_000_000)
ALICE = 41_002
DURING_MOST = 4


class Drawing:
    """One history. Most of what it asks for is there; what is not is refused, and so must it be by all."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.open: list[str] = []
        self.there: list[str] = []  # paths that were made, by and large

    def draw(self, count: int) -> list[Operation]:
        history: list[Operation] = [("mkdir", "d"), ("mkdir", "e")]
        while len(history) < count:
            history += self._next()
        return history

    def _path(self) -> str:
        """Mostly of something that is there."""
        if self.there and self.random.random() < 0.6:
            return self.random.choice(self.there)
        return self.random.choice(DIRECTORIES) + self.random.choice(NAMES)

    def _follow(self, operation: Operation) -> Operation:
        name, *arguments = operation
        if name in ("unlink", "delete", "evict", "rename") and arguments[0] in self.there:
            self.there.remove(arguments[0])
        made = arguments[1] if name == "rename" else arguments[0] if name in ("store_file", "create", "put") else ""
        if "/" in made or made in NAMES:
            self.there = [*(path for path in self.there if path != made), made]
        return operation

    def _directory(self) -> str:
        return self.random.choice(("d", "e", "d/f", "g"))

    def _label(self) -> str:
        return self.random.choice(self.open) if self.open else "none"

    def _opened(self, label: str, *operation: object) -> Operation:
        if label not in self.open:
            self.open.append(label)
        return tuple(operation)

    def _closed(self, operation: str) -> Operation:
        label = self._label()
        if label in self.open:
            self.open.remove(label)
        return (operation, label)

    def _next(self) -> list[Operation]:
        choose, path, other, size = self.random.choice, self._path(), self._path(), self.random.choice(SIZES)
        made: dict[str, tuple[int, Callable[[], Operation]]] = {
            "store": (14, lambda: ("store_file", path, size, choose("xyz"))),
            "create": (7, lambda: self._opened(path, "create", path, choose((0o644, 0o4755)), os.O_RDWR,
                                               choose((0, 0, ALICE)))),
            "write": (8, lambda: ("write", self._label(), choose((0, 100, 9000)), max(1, size), choose("xyz"))),
            "close": (8, lambda: self._closed("close")),
            "seal": (4, lambda: ("seal", self._label())),
            "release": (2, lambda: self._closed("release")),
            "read": (2, lambda: ("read", self._label(), 0, 5000)),
            "open": (4, lambda: self._opened(label := choose(LABELS), "open", path, label)),
            "rewrite": (3, lambda: self._opened(label := choose(LABELS), "open", path, label,
                                                choose((os.O_RDWR, os.O_RDWR | os.O_TRUNC)))),
            "fsync": (1, lambda: ("fsync", self._label())),
            "truncate": (2, lambda: ("set", path, {"size": size})),
            "put": (5, lambda: ("put", path, max(1, size), choose("xyz"))),
            "settle": (3, lambda: ("settle",)),
            "restart": (1, lambda: self._ended("restart")),
            "crash": (2, lambda: self._ended("crash")),
            "during": (6, lambda: ("during",)),
            **self._changes(path, other),
        }  # fmt: skip
        operation = self._one_of(made)
        return self._during() if operation == ("during",) else [operation]

    def _changes(self, path: str, other: str) -> dict[str, tuple[int, Callable[[], Operation]]]:
        """Operations that need no device: they may come during a seal."""
        choose = self.random.choice
        return {
            "rename": (15, lambda: ("rename", path, other, choose((0, 0, 0, 1)))),
            "unlink": (8, lambda: ("unlink", path)),
            "mkdir": (3, lambda: ("mkdir", self._directory(), choose((0o755, 0o2775)))),
            "rmdir": (2, lambda: ("rmdir", self._directory())),
            "rename of a directory": (2, lambda: ("rename", self._directory(), self._directory())),
            "symlink": (2, lambda: ("symlink", path, "nowhere")),
            "chmod": (3, lambda: ("set", choose((path, self._directory())), {"mode": choose((0o600, 0o4711))})),
            "touch": (3, lambda: ("set", path, {"mtime_ns": choose(TIMES_NS)})),
            "chown": (2, lambda: ("set", path, {"uid": ALICE, "gid": 7})),
            "set attribute": (2, lambda: ("set_attribute", path, "user.x", choose(("1", "y" * 100)))),
            "group": (1, lambda: ("set_attribute", path, "user.kvfs.group", choose("gh"))),
            "remove attribute": (1, lambda: ("remove_attribute", path, "user.x")),
            "pin": (2, lambda: ("pin", choose((path, self._directory())))),
            "unpin": (3, lambda: ("pin", choose((path, self._directory())), False)),
            "delete": (4, lambda: ("delete", path)),
            "evict": (5, lambda: ("evict", path)),
            "tell": (1, lambda: ("tell",)),
            "commit": (4, lambda: ("commit",)),
        }  # fmt: skip

    def _one_of(self, made: dict[str, tuple[int, Callable[[], Operation]]]) -> Operation:
        (make,) = self.random.choices([make for _, make in made.values()], [weight for weight, _ in made.values()])
        return self._follow(make())

    def _during(self) -> list[Operation]:
        """A file that is written and sealed, and changes before the seal ends: mostly of itself."""
        path = self._path()
        changes = [self._one_of(self._changes(path, self._path())) for _ in range(self.random.randrange(DURING_MOST))]
        self._follow(("create", path))
        begin = [self._opened(path, "create", path), ("write", path, 0, self.random.choice((10, 9000)))]
        return [*begin, ("begin_seal", path), *changes, ("end_seal",)]

    def _ended(self, how: str) -> Operation:
        self.open.clear()
        return (how,)


def shortest(history: Sequence[Operation], fails: Callable[[Sequence[Operation]], bool]) -> list[Operation]:
    """A part of the history that fails, and does not if any operation more is left out. A seal keeps its two ends."""
    left, at = list(history), 0
    while at < len(left):
        name = left[at][0]
        gone = {at}
        if name == "begin_seal":
            gone.add(next(i for i in range(at, len(left)) if left[i][0] == "end_seal"))
        shorter = [operation for i, operation in enumerate(left) if i not in gone]
        if name != "end_seal" and fails(shorter):
            left = shorter
        else:
            at += 1
    return left
