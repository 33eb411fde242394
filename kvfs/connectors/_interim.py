"""TEMPORARY, till the branches are merged: calls that kvfs.Client will have; common.py alone imports it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kvfs.client.client import Client as _Client
from kvfs.errors import KvfsError, PutError


class Client(_Client):  # for the type checker alone
    put: Any
    get_into: Any
    exists_prefix: Any
    touch: Any
    queue: Any


@dataclass(slots=True)
class Completion:
    id: int
    results: list[Any]
    error: Exception | None = None
    failed: dict[bytes, KvfsError] = field(default_factory=dict)


class Queue:
    def __init__(self, client: Any) -> None:
        self._client = client
        self._pool = ThreadPoolExecutor(4)
        self._lock = threading.Lock()
        self._done: list[Completion] = []
        self._next = 0
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def get(self, items: Iterable[Any]) -> int:
        items = list(items)
        return self._start(lambda: self._client.get_into(items), len(items))

    def put(self, items: Iterable[Any], *, if_absent: bool = False, parents: Sequence[Any] | None = None) -> int:
        items = list(items)
        return self._start(lambda: self._client.put(items, if_absent=if_absent, parents=parents), len(items))

    def exists(self, keys: Any) -> int:
        return self._start(lambda: self._client.exists(keys), len(keys))

    def delete(self, keys: Any) -> int:
        return self._start(lambda: self._client.delete(keys), len(keys))

    def drain(self) -> list[Completion]:
        with self._lock:
            done, self._done = self._done, []
            if done:
                os.eventfd_read(self._fd)
        return done

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)

    def _start(self, call: Any, count: int) -> int:
        with self._lock:
            self._next += 1
            number = self._next
        self._pool.submit(self._run, number, call, count)
        return number

    def _run(self, number: int, call: Any, count: int) -> None:
        completion = Completion(number, [])
        try:
            completion.results = call()
        except PutError as error:
            completion.results, completion.failed = [False] * count, dict(error.failed)
        except Exception as error:
            completion.error = error
        with self._lock:
            self._done.append(completion)
            os.eventfd_write(self._fd, 1)


def complete(client: Any) -> Any:
    """The client, with the missing methods."""
    if hasattr(client, "queue"):
        return client
    put, get_into = client.put, client.get_into

    def put_if_absent(items: Any, *, if_absent: bool = False, parents: Any = None) -> list[bool]:
        items = list(items)
        there = client.exists([key for key, _ in items]) if if_absent else [False] * len(items)
        put([(key, _one(memory)) for (key, memory), is_there in zip(items, there, strict=True) if not is_there])
        return [not is_there for is_there in there]

    def get_pieces(items: Any, **kwargs: Any) -> Any:
        items = list(items)
        plain = [(key, _one(memory)) for key, memory in items]
        results = get_into(plain, **kwargs)
        for (_, whole), (_, memory) in zip(plain, items, strict=True):
            at = 0
            for piece in memory if isinstance(memory, (list, tuple)) else ():
                view = memoryview(piece).cast("B")
                view[:] = whole[at : at + view.nbytes]
                at += view.nbytes
        return results

    client.put, client.get_into = put_if_absent, get_pieces
    client.exists_prefix = lambda keys: [*client.exists(keys), False].index(False)
    client.touch = lambda keys: sum(client.exists(keys))
    client.queue = lambda *, depth=64: Queue(client)
    return client


def _one(memory: Any) -> Any:
    return bytearray(b"".join(memory)) if isinstance(memory, (list, tuple)) else memory
