"""A client's calls as coroutines, for trio and for asyncio: each runs in a worker thread of its own.

On cancellation the coroutine ends at once and the call goes on in its thread. The thread holds the memory's owners
until the devices are done with it. The memory may be dropped, but a later reader of it may find bytes still arriving.
"""

from __future__ import annotations

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

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
        return await self._run(functools.partial(self.client.put, list(items), if_absent=if_absent, parents=parents))

    async def fresh(self) -> None:
        await self._run(self.client.fresh)

    async def exists(self, keys: Iterable[Key], *, fresh: bool = False) -> list[bool]:
        return await self._run(functools.partial(self.client.exists, keys, fresh=fresh))

    async def exists_prefix(self, keys: Iterable[Key], *, fresh: bool = False) -> int:
        return await self._run(functools.partial(self.client.exists_prefix, keys, fresh=fresh))

    async def sizes(self, keys: Iterable[Key], *, fresh: bool = False) -> list[int | None]:
        return await self._run(functools.partial(self.client.sizes, keys, fresh=fresh))

    async def get_into(self, items: Iterable[tuple[Key, Pieces]], *, stream: int | None = None) -> list[int | None]:
        return await self._run(functools.partial(self.client.get_into, list(items), stream=stream))

    async def get_ranges(self, items: Iterable[tuple[Key, int, Pieces]]) -> list[int | None]:
        return await self._run(functools.partial(self.client.get_ranges, list(items)))

    async def get(self, key: Key, *, fresh: bool = False) -> memoryview | None:
        return await self._run(functools.partial(self.client.get, key, fresh=fresh))

    async def delete(self, keys: Iterable[Key]) -> list[bool]:
        return await self._run(functools.partial(self.client.delete, keys))

    async def lease(self, keys: Iterable[Key], seconds: float) -> AsyncLease:
        """Cancelled, the call may leave a lease that nobody has: it ends with its deadline."""
        return AsyncLease(self, await self._run(functools.partial(self.client.lease, keys, seconds)))

    async def release(self, lease: Lease) -> bool:
        return await self._run(lease.release)

    async def end(self, lease: Lease) -> None:
        """As the end of `with lease`; a cancellation waits for it."""
        await self._run_to_end(lease.end)

    async def touch(self, keys: Iterable[Key]) -> int:
        return await self._run(functools.partial(self.client.touch, keys))

    async def done(self, keys: Iterable[Key]) -> int:
        return await self._run(functools.partial(self.client.done, keys))

    def list(self, after: Key | None = None) -> AsyncKeys:
        """All keys behind `after`, for `async for`."""
        return AsyncKeys(self, None if after is None else pack([after], paths=self.client.library.paths).data)

    async def page(self, after: bytes | None) -> Sequence[bytes]:
        """Some keys behind `after`; none at the end."""
        return await self._run(functools.partial(self.client.library.list_page, after))

    async def prestage(self, keys: Iterable[Key]) -> int:
        return await self._run(functools.partial(self.client.prestage, keys))

    def buffer(self, size: int) -> memoryview:
        return self.client.buffer(size)

    def statistics(self) -> ClientStatistics:
        return self.client.statistics()

    def information(self) -> ClientInformation:
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
    """The form for asyncio. Threads are those of the loop's default executor."""

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
        return self._lease.held

    async def release(self) -> bool:
        return await self._view.release(self._lease)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._view.end(self._lease)


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
