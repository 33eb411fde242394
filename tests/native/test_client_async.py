"""The asynchronous forms: the same calls for trio and asyncio, and what a cancellation leaves behind."""

import asyncio
import contextlib
import gc
import threading
import time
import weakref

import pytest
import trio
from helpers import assert_same, content, slowness, wait_until

import kvfs
from kvfs.client import library
from kvfs.client.events import Stored
from kvfs.errors import ClientError, DeadlineError, InvalidKeyError

COLOURS = ["trio", "asyncio"]


def run(colour, function, *arguments):
    if colour == "trio":
        return trio.run(function, *arguments)
    return asyncio.run(function(*arguments))


async def begun_in(colour, slow):
    """Wait until the call is under way."""
    began = time.monotonic()
    while not slow.begun.is_set():
        assert time.monotonic() - began < 30 * slowness(), "no call has begun"
        await (trio.sleep(0.01) if colour == "trio" else asyncio.sleep(0.01))


async def cancelled_once_begun(colour, slow, function):
    """Await function() until its call is under way, then cancel it. Returns whether it was cancelled."""
    if colour == "trio":
        async with trio.open_nursery() as nursery:
            nursery.start_soon(function)
            await begun_in(colour, slow)
            nursery.cancel_scope.cancel()
        return nursery.cancel_scope.cancelled_caught
    task = asyncio.create_task(function())
    await begun_in(colour, slow)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


class Slow:
    """A test double of libkvfs: kvfs_get begins only when it is told to."""

    def __init__(self, monkeypatch):
        self.real = library.lib
        self.begun, self.go, self.ended = threading.Event(), threading.Event(), threading.Event()
        monkeypatch.setattr(library, "lib", self)

    def kvfs_get(self, *arguments):
        self.begun.set()
        assert self.go.wait(60)
        result = self.real.kvfs_get(*arguments)
        self.ended.set()
        return result

    def __getattr__(self, name):
        return getattr(self.real, name)


class Owner(bytearray):
    """Memory whose end can be seen."""


@pytest.mark.parametrize("colour", COLOURS)
def test_every_call_has_an_asynchronous_form(client, colour):
    async def main():
        view = getattr(client, colour)()
        await view.put((f"key {i:04}", content(1000 + i, i)) for i in range(5000))
        assert await view.exists(["key 0000", b"none"]) == [True, False]
        assert await view.sizes(["key 0007", b"none"]) == [1007, None]
        destination = view.buffer(1007)
        assert await view.get_into([("key 0007", destination), (b"none", bytearray(1))]) == [1007, None]
        assert_same(destination, content(1007, 7), "get_into")
        assert_same(await view.get("key 4999"), content(5999, 4999), "get")
        assert await view.get("none") is None
        assert [key async for key in view.list()] == [f"key {i:04}".encode() for i in range(5000)]
        assert [key async for key in view.list(after="key 4997")] == [b"key 4998", b"key 4999"]
        assert await view.prestage(["key 0001", "none"]) == 1
        assert await view.touch(["key 0001", "none"]) == 1
        async with await view.lease(["key 0001", "none"], 60) as lease:
            assert lease.held == [True, False] and await lease.release() is True and await lease.release() is False
        assert await view.delete(["key 0000", "none"]) == [True, False]
        assert view.statistics().puts == 5000
        assert view.information().connected
        with pytest.raises(InvalidKeyError):
            await view.exists([b""])

    run(colour, main)


@pytest.mark.parametrize("colour", COLOURS)
def test_calls_run_side_by_side_and_the_loop_goes_on(client, colour, monkeypatch):
    client.put([(b"key", b"data")])
    slow = Slow(monkeypatch)

    async def reader(results):
        results.append(bytes(await getattr(client, colour)().get(b"key")))

    async def main():
        results = []
        if colour == "trio":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(reader, results)
                await begun_in(colour, slow)
                assert await client.trio().exists([b"key"]) == [True]
                assert not results
                slow.go.set()
        else:
            task = asyncio.create_task(reader(results))
            await begun_in(colour, slow)
            assert await client.asyncio().exists([b"key"]) == [True]
            assert not results
            slow.go.set()
            await task
        assert results == [b"data"]

    run(colour, main)


@pytest.mark.parametrize("colour", COLOURS)
def test_a_cancelled_call_keeps_its_memory_until_the_device_is_done(client, colour, monkeypatch):
    client.put([(b"key", content(100_000))])
    slow = Slow(monkeypatch)
    kept, dropped = Owner(100_000), Owner(100_000)
    alive = weakref.ref(dropped)

    async def main(second):
        view = getattr(client, colour)()
        items = [(b"key", kept), (b"key", second)]
        del second
        assert await cancelled_once_begun(colour, slow, lambda: view.get_into(items))
        assert not slow.ended.is_set()
        items.clear()
        gc.collect()
        assert alive() is not None, "the device is not done with it"
        with pytest.raises(BufferError):
            kept.extend(b"resized")
        assert bytes(kept) == bytes(100_000)
        slow.go.set()
        assert slow.ended.wait(30)

    coroutine_arguments = [dropped]
    del dropped
    run(colour, main, coroutine_arguments.pop())
    assert_same(bytes(kept), content(100_000), "what came after the cancellation")

    def gone():
        gc.collect()
        return alive() is None

    wait_until(gone, "the end of the memory that was dropped")
    kept.extend(b"resized")


@pytest.mark.parametrize("colour", COLOURS)
def test_a_view_closes_its_client_also_when_it_is_cancelled(directory, colour, monkeypatch):
    client = kvfs.connect(directory, gpu=None)
    client.put([(b"key", b"data")])
    slow = Slow(monkeypatch)

    async def use():
        async with getattr(client, colour)() as view:
            try:
                await view.get(b"key")
            finally:
                threading.Timer(0.3, slow.go.set).start()  # it was cancelled, and is closed before its call has ended

    async def main():
        assert await cancelled_once_begun(colour, slow, use)
        assert slow.ended.is_set(), "close waits for the call that was left behind"

    run(colour, main)
    with pytest.raises(ClientError, match="closed"):
        client.exists([b"key"])


def test_close_waits_for_calls_under_way_and_gives_up_in_the_end(directory, monkeypatch):
    client = kvfs.connect(directory, gpu=None)
    client.put([(b"key", b"data")])
    slow = Slow(monkeypatch)
    destination = bytearray(4)
    reader = threading.Thread(target=client.get_into, args=([(b"key", destination)],))
    reader.start()
    assert slow.begun.wait(10 * slowness())
    with pytest.raises(DeadlineError, match=r"calls under way 0\.1 s after close\(\): 1"):
        client.close(timeout_s=0.1)
    with pytest.raises(ClientError, match="closed"):
        client.exists([b"key"])
    threading.Timer(0.2, slow.go.set).start()
    client.close()
    reader.join(10 * slowness())
    assert destination == b"data"
    client.close()


@pytest.mark.parametrize("colour", COLOURS)
def test_events_come_in_order_and_a_cancelled_wait_loses_none(client, colour):
    keys = [f"event {i:02}".encode() for i in range(20)]

    async def one(events, found):
        found.append(await anext(events))

    async def cancelled(events, found):
        """A wait whose thread is left behind, and finds what is stored after the cancellation."""
        if colour == "trio":
            with trio.move_on_after(0.05):
                await one(events, found)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await one(events, found)

    async def main():
        view, found = getattr(client, colour)(), []
        async with view.events() as events:
            assert await events.next_event(0) is None
            for key in keys:
                await cancelled(events, found)
                await view.put([(key, b"data")])
            while len(found) < len(keys):
                await one(events, found)
            assert [event.key for event in found] == keys and all(isinstance(event, Stored) for event in found)
            assert await events.next_event(0) is None
        with pytest.raises(ClientError, match="closed"):
            await events.next_event(0)

    run(colour, main)
