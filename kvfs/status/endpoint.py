"""The port of `kvfs mount --metrics` and `kvfs metrics`: GET /metrics for Prometheus, /healthz and /readyz for probes.

/healthz is answered by the process itself: 200 says that it serves. /readyz is 200 if it can be used now, else 503
with the reasons, one a line.

A connection comes from a stranger: few at once, one request each, little memory, and a deadline for the whole exchange.
A new connection is never refused. Where all places are taken, one of the peer that has most goes for it: the oldest
that has not asked yet, else the oldest. So a user who asks is answered at once, however many others are silent.
HTTP/1.0, by RFC 1945.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from kvfs.errors import KvfsError, UsageError, printable
from kvfs.status import prometheus
from kvfs.status.numbers import Json

# The logger's name stays when a module moves.
log = logging.getLogger("kvfs.frontend.endpoint")

CONNECTIONS_MAX = 16
# Connections that the kernel holds until they are taken: one that speaks waits there behind silent ones.
_BACKLOG = 1024
HEAD_MAX = 8192
# For the request, and again for the answer.
TIMEOUT_S = 5.0
DEFAULT_PORT = 9464
_TEXT = "text/plain; charset=utf-8"

Collect = Callable[[], Awaitable[Sequence[Json]]]
# The reasons why the pools cannot be used now; none: they can.
Lacks = Callable[[], Awaitable[Sequence[str]]]


def parse_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, [IPV6]:PORT, :PORT or PORT; without a host it is this machine alone."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if separator else ""
    if not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise UsageError(f"metrics: {text!r} is no HOST:PORT")
    return host or "127.0.0.1", int(port)


async def listen(address: tuple[str, int]) -> list[trio.SocketListener]:
    """Raises KvfsError if the address cannot be listened at."""
    host, port = address
    try:
        return await trio.open_tcp_listeners(port, host=host, backlog=_BACKLOG)
    except OSError as error:
        raise KvfsError(f"metrics: {host}:{port}: {os.strerror(error.errno) if error.errno else error}") from error


@dataclass(slots=True, eq=False)
class _Place:
    """A connection of a peer, who is an address. Its scope ends it."""

    peer: str
    scope: trio.CancelScope
    has_asked: bool = False


class Endpoint:
    """Answers scrapes and probes until cancelled."""

    def __init__(self, collect: Collect, lacks: Lacks) -> None:
        self._collect = collect
        self._lacks = lacks
        # The oldest first.
        self._places: list[_Place] = []
        self._rendering = trio.CapacityLimiter(1)

    async def run(self, listeners: Sequence[trio.SocketListener]) -> None:
        await trio.serve_listeners(self._serve, list(listeners))

    async def _serve(self, stream: trio.SocketStream) -> None:
        try:
            with self._place(_peer(stream)) as place:
                with trio.fail_after(TIMEOUT_S):
                    head = await _head(stream)
                if head is not None:
                    place.has_asked = True
                    with trio.fail_after(TIMEOUT_S):
                        await stream.send_all(await self._answer(head))
                        await stream.send_eof()
        except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            log.debug("a scrape was not finished")
        except Exception:
            log.exception("a scrape failed")
        finally:
            await _close(stream)

    @contextmanager
    def _place(self, peer: str) -> Iterator[_Place]:
        """One of the places, until it is needed for another."""
        if len(self._places) >= CONNECTIONS_MAX:
            last = self._last()
            self._places.remove(last)
            last.scope.cancel()
        with trio.CancelScope() as scope:
            place = _Place(peer, scope)
            self._places.append(place)
            try:
                yield place
            finally:
                if place in self._places:
                    self._places.remove(place)

    def _last(self) -> _Place:
        """The place to give away: of the peer with most of them, the oldest, silent ones before those that asked."""
        most, _ = Counter(place.peer for place in self._places).most_common(1)[0]
        theirs = [place for place in self._places if place.peer == most]
        return min(theirs, key=lambda place: place.has_asked)

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"only GET\n", _TEXT)
        if path == b"/healthz":
            return _response("200 OK", _body(method, ["ok"]), _TEXT)
        if path == b"/readyz":
            lacks = await self._lacks()
            return _response("503 Service Unavailable" if lacks else "200 OK", _body(method, lacks or ["ok"]), _TEXT)
        if path not in (b"/metrics", b"/"):
            return _response("404 Not Found", b"/metrics, /healthz and /readyz are here\n", _TEXT)
        documents = await self._collect()
        # One request at a time, in a thread: the loop that serves the mount goes on.
        text = await trio.to_thread.run_sync(prometheus.render, documents, limiter=self._rendering)
        return _response("200 OK", text if method == b"GET" else b"", prometheus.CONTENT_TYPE)


def _peer(stream: trio.SocketStream) -> str:
    try:
        return str(stream.socket.getpeername()[0])
    except OSError:  # it has gone
        return ""


async def _head(stream: trio.SocketStream) -> bytes | None:
    """The request's head, or None: the client went away, or sent too much."""
    data = b""
    while b"\r\n\r\n" not in data and b"\n\n" not in data:
        piece = await stream.receive_some(HEAD_MAX)
        data += piece
        if not piece or len(data) > HEAD_MAX:
            return None
    return data


async def _close(stream: trio.SocketStream) -> None:
    with trio.CancelScope(shield=True):
        await trio.aclose_forcefully(stream)


def _body(method: bytes, lines: Sequence[str]) -> bytes:
    return b"".join(f"{printable(line)}\n".encode() for line in lines) if method == b"GET" else b""


def _response(status: str, body: bytes, kind: str) -> bytes:
    head = f"HTTP/1.0 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


async def serve(address: tuple[str, int], collect: Collect, lacks: Lacks, ready: Callable[[str], None]) -> None:
    """Serve `kvfs metrics` until interrupted. `ready` is called with the address."""
    listeners = await listen(address)
    host, port = listeners[0].socket.getsockname()[:2]
    ready(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    await Endpoint(collect, lacks).run(listeners)
