"""A client's calls as coroutines, for trio and for asyncio: each runs in its own worker thread.

On cancellation the coroutine ends at once and the call goes on in its thread. The thread holds the memory's owners
until the devices are done with it. The memory may be dropped, but a later reader of it may find bytes still arriving.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

from kvfs.client.events import Event, Events
from kvfs.client.keys import Key, pack
from kvfs.client.leases import Lease
from kvfs.client.library import ClientInformation, ClientStatistics, Library
from kvfs.client.memory import Memory, Pieces

R = TypeVar("R")


class BlockingClient(Protocol):
    """The calls of Client (client.py), as far as they have an asynchronous form."""

    library: Library

    def put(
        self,
        items: Iterable[tuple[Key, Memory | Sequence[Memory]]],
        *,
        if_absent: bool = False,
        parents: Sequence[Key | None] | None = None,
    ) -> list[bool]: ...

    def fresh(self) -> None: ...

    def exists(self, keys: Iterable[Key], *, fresh: bool = False) -> list[bool]: ...

    def exists_prefix(self, keys: Iterable[Key], *, fresh: bool = False) -> int: ...

    def sizes(self, keys: Iterable[Key], *, fresh: bool = False) -> list[int | None]: ...

    def get_into(self, items: Iterable[tuple[Key, Pieces]], *, stream: int | None = None) -> list[int | None]: ...

    def get_ranges(self, items: Iterable[tuple[Key, int, Pieces]]) -> list[int | None]: ...

    def get(self, key: Key, *, fresh: bool = False) -> memoryview | None: ...

    def delete(self, keys: Iterable[Key]) -> list[bool]: ...

    def lease(self, keys: Iterable[Key], seconds: float) -> Lease: ...

    def touch(self, keys: Iterable[Key]) -> int: ...

    def done(self, keys: Iterable[Key]) -> int: ...

    def prestage(self, keys: Iterable[Key]) -> int: ...

    def buffer(self, size: int) -> memoryview: ...

    def events(self, *, keys: bool = True) -> Events: ...

    def statistics(self) -> ClientStatistics: ...

    def information(self) -> ClientInformation: ...

    def close(self) -> None: ...


class AsyncClient(ABC):
    """The result of client.trio() and client.asyncio(). Client says what the calls mean and raise. `async with` closes
    the client at the end, in a thread, also when cancelled."""

    def __init__(self, client: BlockingClient) -> None:
        self.client = client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the client; waits for calls that were cancelled and still run."""
        await self._run_to_end(self.client.close)

    async def put(
        self,
        items: Iterable[tuple[Key, Memory | Sequence[Memory]]],
        *,
        if_absent: bool = False,
        parents: Sequence[Key | None] | None = None,
    ) -> list[bool]:
        """As Client.put()."""
        return await self._run(functools.partial(self.client.put, list(items), if_absent=if_absent, parents=parents))

    async def fresh(self) -> None:
        """As Client.fresh()."""
        await self._run(self.client.fresh)

    async def exists(self, keys: Iterable[Key], *, fresh: bool = False) -> list[bool]:
        """As Client.exists()."""
        return await self._run(functools.partial(self.client.exists, keys, fresh=fresh))

    async def exists_prefix(self, keys: Iterable[Key], *, fresh: bool = False) -> int:
        """As Client.exists_prefix()."""
        return await self._run(functools.partial(self.client.exists_prefix, keys, fresh=fresh))

    async def sizes(self, keys: Iterable[Key], *, fresh: bool = False) -> list[int | None]:
        """As Client.sizes()."""
        return await self._run(functools.partial(self.client.sizes, keys, fresh=fresh))

    async def get_into(self, items: Iterable[tuple[Key, Pieces]], *, stream: int | None = None) -> list[int | None]:
        """As Client.get_into()."""
        return await self._run(functools.partial(self.client.get_into, list(items), stream=stream))

    async def get_ranges(self, items: Iterable[tuple[Key, int, Pieces]]) -> list[int | None]:
        """As Client.get_ranges()."""
        return await self._run(functools.partial(self.client.get_ranges, list(items)))

    async def get(self, key: Key, *, fresh: bool = False) -> memoryview | None:
        """As Client.get()."""
        return await self._run(functools.partial(self.client.get, key, fresh=fresh))

    async def delete(self, keys: Iterable[Key]) -> list[bool]:
        """As Client.delete()."""
        return await self._run(functools.partial(self.client.delete, keys))

    async def lease(self, keys: Iterable[Key], seconds: float) -> AsyncLease:
        """Cancelled, the call may leave a lease without an owner: it ends with its deadline."""
        return AsyncLease(self, await self._run(functools.partial(self.client.lease, keys, seconds)))

    async def release(self, lease: Lease) -> bool:
        """As Lease.release()."""
        return await self._run(lease.release)

    async def end_of(self, call: Callable[[], None]) -> None:
        """Run the end of one of the client's parts in a thread; a cancellation waits for it."""
        await self._run_to_end(call)

    async def touch(self, keys: Iterable[Key]) -> int:
        """As Client.touch()."""
        return await self._run(functools.partial(self.client.touch, keys))

    async def done(self, keys: Iterable[Key]) -> int:
        """As Client.done()."""
        return await self._run(functools.partial(self.client.done, keys))

    def list(self, after: Key | None = None) -> AsyncKeys:
        """All keys behind `after`, for `async for`."""
        return AsyncKeys(self, None if after is None else pack([after], paths=self.client.library.paths).data)

    async def page(self, after: bytes | None) -> Sequence[bytes]:
        """Some keys behind `after`; none at the end."""
        return await self._run(functools.partial(self.client.library.list_page, after))

    async def prestage(self, keys: Iterable[Key]) -> int:
        """As Client.prestage()."""
        return await self._run(functools.partial(self.client.prestage, keys))

    def buffer(self, size: int) -> memoryview:
        """As Client.buffer(); it waits for nothing."""
        return self.client.buffer(size)

    def events(self, *, keys: bool = True) -> AsyncEvents:
        """Subscribe as Client.events() does; it waits for nothing. While a caller waits for an event, the subscription
        takes a thread. Close it before the client."""
        return AsyncEvents(self, self.client.events(keys=keys))

    async def run(self, call: Callable[[], R]) -> R:
        """Run a call of the client's parts in a thread, which a cancellation leaves behind."""
        return await self._run(call)

    def statistics(self) -> ClientStatistics:
        """As Client.statistics(); it waits for nothing."""
        return self.client.statistics()

    def information(self) -> ClientInformation:
        """As Client.information(); it waits for nothing."""
        return self.client.information()

    @abstractmethod
    async def _run(self, call: Callable[[], R]) -> R:
        """In a thread that a cancellation leaves behind."""

    @abstractmethod
    async def _run_to_end(self, call: Callable[[], None]) -> None:
        """In a thread whose end a cancellation waits for."""


class TrioClient(AsyncClient):
    """The form for trio. Threads are trio's own, under its default limit."""

    async def _run(self, call: Callable[[], R]) -> R:
        import trio  # here, not above: a client whose program is asyncio's need not have it

        return await trio.to_thread.run_sync(call, abandon_on_cancel=True)

    async def _run_to_end(self, call: Callable[[], None]) -> None:
        import trio

        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(call)


class AsyncioClient(AsyncClient):
    """The form for asyncio. Threads come from the loop's default executor."""

    async def _run(self, call: Callable[[], R]) -> R:
        return await asyncio.to_thread(call)

    async def _run_to_end(self, call: Callable[[], None]) -> None:
        running = asyncio.ensure_future(asyncio.to_thread(call))
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.shield(running)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        running.result()


class AsyncLease:
    """A Lease (leases.py) of an asynchronous client: `async with await client.lease(keys, seconds) as lease:`."""

    def __init__(self, view: AsyncClient, lease: Lease) -> None:
        self._view, self._lease = view, lease

    @property
    def held(self) -> list[bool]:
        """As Lease.held: of each key, whether it is kept."""
        return self._lease.held

    async def release(self) -> bool:
        """As Lease.release()."""
        return await self._view.release(self._lease)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._view.end_of(self._lease.end)


class AsyncEvents:
    """Events (events.py) of an asynchronous client: `async with client.events() as events: async for event in events:`.
    One task at a time may wait."""

    # A thread that a cancellation leaves behind waits on for so long at most.
    _TURN_S = 1.0

    def __init__(self, view: AsyncClient, events: Events) -> None:
        self._view, self._events = view, events
        # A thread that is left behind may find an event: the next that waits has it.
        self._found: deque[Event] = deque()
        self._waits = threading.Lock()

    async def next_event(self, timeout_s: float = 0.0) -> Event | None:
        """As Events.next_event(). A cancellation loses no event."""
        until = time.monotonic() + timeout_s
        while not self._found:
            left_s = until - time.monotonic()
            await self._view.run(functools.partial(self._fetch, max(0.0, min(left_s, self._TURN_S))))
            if not self._found and left_s <= 0:
                return None
        return self._found.popleft()

    def _fetch(self, timeout_s: float) -> None:
        with self._waits:
            if not self._found:
                event = self._events.next_event(timeout_s)
                if event is not None:
                    self._found.append(event)

    async def aclose(self) -> None:
        """End the subscription; a thread that waits ends within a second."""
        await self._view.end_of(self._events.close)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """The next event, however long it takes."""
        while (event := await self.next_event(self._TURN_S)) is None:
            pass
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncKeys:
    """Keys in byte order, fetched page by page: an asynchronous iterator that needs no closing."""

    def __init__(self, view: AsyncClient, after: bytes | None) -> None:
        self._view = view
        self._last = after
        self._page: Iterator[bytes] = iter(())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        key = next(self._page, None)
        if key is None:
            page = await self._view.page(self._last)
            if not page:
                raise StopAsyncIteration
            self._page, self._last = iter(page), page[-1]
            key = next(self._page)
        return key
