"""Room in the block table: a part of its records stays free, as some segments do, so that a new name finds one.

A record is taken by each name. Blocks give theirs back when they are evicted, empty files among them, and the evictor
keeps as many free as is said here. Directories, symbolic links and files that are being made stay: of these one user
may have a share (native/src/content/shares.c). Directories are not evicted when they are empty: an engine makes its
own at its start, and its first store may come a day later. To find none would be an error there, not a miss.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from kvfs.errors import NoSpaceError
from kvfs.plane import Plane

# One record in so many is kept free. In half a second, after which the evictor looks at the latest, clients make fewer
# names than the smallest table of a pool has free: 65,536.
_FREE_SHARE = 32
# A name waits so long for a record.
WAIT_S = 10.0
_POLL_S = 0.5


class TableRoom:
    """One trio thread. The evictor works while records are short, and says what came of it."""

    def __init__(self, plane: Plane, want: Callable[[], None]) -> None:
        """`want`: called to wake the evictor."""
        self._plane, self._want = plane, want
        self.most = plane.table_statistics()["records_max"]
        # Below low the evictor works, up to high.
        self.low = self.most // _FREE_SHARE
        self.high = self.low + self.low // 4
        # Set by the evictor: it can take no block now.
        self.exhausted = False
        self._gained = trio.Event()

    def left(self) -> int:
        """Records that are free."""
        return max(0, self.most - self._plane.table_statistics()["records"])

    def kept(self) -> int:
        """Records that eviction cannot take."""
        table = self._plane.table_statistics()
        return max(0, table["records"] - table["blocks"])

    def is_short(self) -> bool:
        return self.left() < self.low

    def wake(self) -> None:
        """Some have become free, or the evictor gave up."""
        self._gained.set()
        self._gained = trio.Event()

    async def wait(self, timeout_s: float = WAIT_S) -> None:
        """Return when a record is free; at once where one is. NoSpaceError: after timeout_s, and WAIT_S at most."""
        if self.left():
            return
        timeout_s = max(0.0, min(timeout_s, WAIT_S))
        with trio.move_on_after(timeout_s):
            while not self.left() and not self.exhausted:
                self._want()
                with trio.move_on_after(_POLL_S):
                    await self._gained.wait()
        if not self.left():
            raise NoSpaceError(
                f"the table of names is full: of {self.most} records {self.kept()} are directories, links and files "
                "that are being made, and "
                + ("no block can be evicted" if self.exhausted else f"none has become free in {timeout_s:.3g} s")
            )
