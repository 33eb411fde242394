"""Leases of a client: blocks that are not evicted between a look-up and a read."""

from __future__ import annotations

import math
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self

from kvfs.errors import ClientError, DeadlineError

_MILLISECONDS_MAX = 0xFFFFFFFF


class Releaser(Protocol):
    def release(self, lease: int) -> bool: ...


class Lease:
    """Made by client.lease(). `held`: for each key whether its block is kept. Any thread may release it.

    `with client.lease(keys, seconds) as lease:` releases it at the end. Without a release it ends by itself.
    """

    def __init__(self, library: Releaser, number: int, held: list[bool]) -> None:
        self._library, self._number = library, number
        self.held = held

    def __repr__(self) -> str:
        return f"<kvfs lease {self._number} of {sum(self.held)} of {len(self.held)} blocks>"

    def release(self) -> bool:
        """Its blocks may be evicted again. Returns whether they were kept until now: False after the deadline, after
        the daemon has ended, and the second time.

        Raises DeadlineError: the daemon gives no answer. Then the lease ends by itself, at its deadline.
        """
        held = self._number != 0 and self._library.release(self._number)
        self._number = 0
        return held

    def end(self) -> None:
        """As release(); a lease that cannot be released is left to its deadline."""
        with suppress(ClientError, DeadlineError):
            self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def milliseconds_of(seconds: float) -> int:
    """ValueError unless it is above 0."""
    if not seconds > 0:
        raise ValueError(f"a lease of {seconds:g} s: it must be more than 0")
    return max(1, min(_MILLISECONDS_MAX, math.ceil(min(seconds, _MILLISECONDS_MAX) * 1000)))
