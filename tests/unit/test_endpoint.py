"""The Prometheus endpoint, and strangers who hold its connections."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio

from kvfs.status import endpoint, prometheus

MANY = 40  # more than twice the places
LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def _rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "render", lambda documents: b"kvfs_up 1\n")


@asynccontextmanager
async def serving(collect=None, lacks=None) -> AsyncIterator[int]:
    async def nothing():
        return []

    listeners = await endpoint.listen(("127.0.0.1", 0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(endpoint.Endpoint(collect or nothing, lacks or nothing).run, listeners)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def connected(port: int, address: str = "127.0.0.1") -> trio.SocketStream:
    ours = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    await ours.bind((address, 0))
    await ours.connect(("127.0.0.1", port))
    return trio.SocketStream(ours)


async def scraped(stream: trio.SocketStream, path: str = "/metrics", method: str = "GET") -> bytes:
    """The whole answer; empty if the endpoint has hung up."""
    answer = b""
    try:
        await stream.send_all(f"{method} {path} HTTP/1.1\r\n\r\n".encode())
        async for piece in stream:
            answer += piece
    except trio.BrokenResourceError:
        return b""
    return answer


def run(test) -> None:
    async def body() -> None:
        with trio.fail_after(LIMIT_S):
            await test()

    trio.run(body)


def test_a_scrape_is_answered_beside_many_silent_connections() -> None:
    async def test() -> None:
        async with serving() as port, AsyncExitStack() as stack:
            for _ in range(MANY):
                await stack.enter_async_context(await connected(port))
            async with await connected(port) as stream:
                assert b"200 OK" in await scraped(stream)

    run(test)


def test_a_scrape_is_answered_beside_many_that_asked_and_wait() -> None:
    """A daemon that does not answer holds up those who have asked, and none of those who come later."""

    async def test() -> None:
        asked, goes_on = 0, trio.Event()

        async def collect():
            nonlocal asked
            asked += 1
            if asked <= endpoint.CONNECTIONS_MAX:
                await goes_on.wait()
            return []

        async with serving(collect) as port, AsyncExitStack() as stack:
            for i in range(endpoint.CONNECTIONS_MAX):
                stream = await stack.enter_async_context(await connected(port))
                await stream.send_all(b"GET /metrics HTTP/1.1\r\n\r\n")
                while asked <= i:
                    await trio.sleep(0.001)
            async with await connected(port) as stream:
                assert b"200 OK" in await scraped(stream)

    run(test)


def test_the_oldest_silent_one_of_the_peer_with_most_goes() -> None:
    async def test() -> None:
        async with serving() as port, AsyncExitStack() as stack:
            alone = await stack.enter_async_context(await connected(port, "127.0.0.2"))
            others = [
                await stack.enter_async_context(await connected(port)) for _ in range(endpoint.CONNECTIONS_MAX)
            ]  # one more than there are places left
            assert await others[0].receive_some(1) == b""  # hung up on
            assert b"200 OK" in await scraped(alone)
            assert b"200 OK" in await scraped(others[1])

    run(test)


def test_silence_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "TIMEOUT_S", 0.05)

    async def test() -> None:
        async with serving() as port, await connected(port) as stream:
            assert await stream.receive_some(1) == b""

    run(test)


def test_probes_are_answered_with_a_status_and_the_reasons() -> None:
    reasons: list[str] = []

    async def lacks():
        return reasons

    async def answer(port: int, path: str, method: str = "GET") -> tuple[bytes, bytes]:
        async with await connected(port) as stream:
            head, _, body = (await scraped(stream, path, method)).partition(b"\r\n\r\n")
            return head.partition(b"\r\n")[0], body

    async def test() -> None:
        async with serving(lacks=lacks) as port:
            assert await answer(port, "/readyz?verbose") == (b"HTTP/1.0 200 OK", b"ok\n")
            reasons.extend(["/mnt/kv: not mounted", "one\nline"])
            assert await answer(port, "/healthz") == (b"HTTP/1.0 200 OK", b"ok\n")
            unready = b"HTTP/1.0 503 Service Unavailable"
            assert await answer(port, "/readyz") == (unready, b"/mnt/kv: not mounted\none\\nline\n")
            assert await answer(port, "/readyz", "HEAD") == (unready, b"")
            assert await answer(port, "/ready") == (
                b"HTTP/1.0 404 Not Found", b"/metrics, /healthz and /readyz are here\n"
            )  # fmt: skip

    run(test)
