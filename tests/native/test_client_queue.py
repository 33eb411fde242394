"""Queues: batches that run beside their submitter, through a real daemon."""

import asyncio
import contextlib
import errno
import gc
import os
import pathlib
import select
import signal
import threading
import time
import weakref

import pytest
from helpers import KIB, MIB, assert_same, content, in_child, slowness, wait_until

import kvfs
from kvfs.client import library
from kvfs.errors import (
    ClientError,
    DeadlineError,
    ForkError,
    InvalidBufferError,
    InvalidKeyError,
    NotMountedError,
    SmallBufferError,
)


@pytest.fixture
def queue(client):
    with client.queue() as opened:
        yield opened


def drained(queue, count, timeout_s=60):
    """The next completions, by id."""
    completions = {}
    began = time.monotonic()
    while len(completions) < count:
        left = began + timeout_s * slowness() - time.monotonic()
        assert left > 0, f"{len(completions)} of {count} completions"
        if select.select([queue], [], [], left)[0]:
            completions |= {completion.id: completion for completion in queue.drain()}
    assert len(completions) == count
    return completions


def readable(queue):
    return bool(select.select([queue], [], [], 0)[0])


def test_what_is_put_is_read(client, queue):
    blocks = {f"key {i}".encode(): content(30_000 * i + i, i) for i in range(8)}
    assert queue.drain() == [] and not readable(queue)
    number = queue.put(blocks.items())
    done = drained(queue, 1)[number]
    assert (done.results, done.error, done.failed) == ([True] * 8, None, {})
    assert not readable(queue)
    destinations = {key: [bytearray(5000), bytearray(len(data))] for key, data in blocks.items()}
    part = bytearray(100)
    numbers = [
        queue.get([*destinations.items(), (b"none", bytearray(1))]),
        queue.get_ranges([(b"key 5", 1000, part), (b"key 0", 0, bytearray(3))]),
        queue.exists([b"key 1", "none"]),
    ]
    assert numbers == [2, 3, 4]
    done = drained(queue, 3)
    assert done[2].results == [len(data) for data in blocks.values()] + [None]
    for key, data in blocks.items():
        assert_same(b"".join(destinations[key])[: len(data)], data, repr(key))
    assert done[3].results == [100, 0]
    assert part == blocks[b"key 5"][1000:1100]
    assert done[4].results == [True, False]
    number = queue.delete([b"key 1", b"none"])
    assert drained(queue, 1)[number].results == [True, False]
    assert client.exists([b"key 1"]) == [False]
    for call in (queue.get, queue.get_ranges, queue.put, queue.exists, queue.delete):
        number = call([])
        assert drained(queue, 1)[number].results == []


def test_exists_is_answered_when_it_returns(client, queue):
    client.put([(b"key", b"data")])
    number = queue.exists([b"key"])
    assert readable(queue)
    (done,) = queue.drain()
    assert (done.id, done.results, done.error) == (number, [True], None)


def test_a_large_destination_short_ones_and_errors(client, queue):
    client.put([(b"key", content(1000)), (b"kez", content(10))])
    number = queue.get([(b"key", bytearray(999)), (b"kez", bytearray(999))])
    done = drained(queue, 1)[number]
    assert done.results == [None, 10]
    assert isinstance(done.error, SmallBufferError)
    assert "the block has 1000 bytes, its destination 999" in str(done.error)
    memory = bytearray(1000)
    number = queue.get([(b"key", memory), (b"kez", memory)])
    done = drained(queue, 1)[number]
    assert done.results == [None, None]
    assert isinstance(done.error, ClientError) and done.error.errno == errno.EINVAL and "overlap" in str(done.error)
    for call, error in (
        (lambda: queue.get([(b"", memory)]), InvalidKeyError),
        (lambda: queue.put([(b"k" * 5000, memory)]), InvalidKeyError),
        (lambda: queue.put([(b"key", b"1"), ("key", b"2")]), InvalidKeyError),
        (lambda: queue.exists(b"key"), InvalidKeyError),
        (lambda: queue.delete("key"), InvalidKeyError),
        (lambda: queue.get([(b"key", b"read-only")]), InvalidBufferError),
        (lambda: queue.get([b"key"]), TypeError),
        (lambda: queue.get_ranges([(b"key", -1, memory)]), ValueError),
        (lambda: queue.put([(b"key", b"1")], parents=[b"a", b"b"]), ValueError),
    ):
        with pytest.raises(error):
            call()
    assert not queue.drain()
    for depth in (0, 257):
        with pytest.raises(ValueError, match="1 to 256"):
            client.queue(depth=depth)


def test_gpu_memory_is_refused(queue):
    class Tensor:
        @property
        def __cuda_array_interface__(self):
            return {"data": (4096, False), "shape": (16,), "typestr": "|u1", "version": 3}

    for call in (
        lambda: queue.get([(b"key", Tensor())]),
        lambda: queue.get([(b"key", [bytearray(1), Tensor()])]),
        lambda: queue.get_ranges([(b"key", 0, Tensor())]),
        lambda: queue.put([(b"key", Tensor())]),
    ):
        with pytest.raises(InvalidBufferError, match="GPU memory"):
            call()


def test_one_thread_keeps_many_single_blocks_in_flight_and_makes_no_thread(client):
    count, size = 300, 64 * KIB
    blocks = {f"{i}".encode(): content(size, i) for i in range(count)}
    client.put(blocks.items())
    memory = client.buffer(count * size)
    with client.queue(depth=64) as queue:
        threads = _threads()
        numbers = {
            queue.get([(key, memory[i * size : (i + 1) * size])]): (i, data)
            for i, (key, data) in enumerate(blocks.items())
        }
        wait_until(lambda: _threads() <= threads, "no more threads than before")
        for number, done in drained(queue, count).items():
            i, data = numbers[number]
            assert done.results == [size] and done.error is None
            assert_same(memory[i * size : (i + 1) * size], data, f"block {i}")


def _threads():
    """How many there are, but io_uring's."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            names.append(pathlib.Path(f"/proc/self/task/{thread}/comm").read_text())
    return sum(not name.startswith("iou-") for name in names)


def test_puts_and_deletes_of_a_key_keep_their_order(client, queue):
    for i in range(30):
        queue.put([(b"key", content(1000 + i, i)), (f"other {i}", b"x")])
        if i % 3 == 2:
            queue.delete([b"key"])
    completions = drained(queue, 40)
    assert list(completions) == sorted(completions)
    assert all(done.error is None and all(done.results) for done in completions.values())
    assert client.exists([b"key"]) == [False]
    queue.put([(b"key", b"first")])
    queue.put([(b"key", b"second")])
    drained(queue, 2)
    assert bytes(client.get(b"key")) == b"second"
    assert len(list(client.list())) == 31


def test_memory_is_held_until_its_completion(client, queue):
    class Owner(bytearray):
        pass

    client.put([(b"key", content(MIB))])
    destination = Owner(MIB)
    watch = weakref.ref(destination)
    queue.get([(b"key", destination)])
    del destination
    gc.collect()
    assert watch() is not None
    completions = drained(queue, 1)
    assert next(iter(completions.values())).results == [MIB]
    gc.collect()
    assert watch() is None


def test_a_destination_is_exported_while_it_is_read_into(client, queue):
    client.put([(b"key", content(4096))])
    destination = bytearray(4096)
    queue.get([(b"key", destination)])
    with pytest.raises(BufferError):
        destination.append(1)
    drained(queue, 1)
    gc.collect()
    destination.append(1)


def test_many_submitters_and_drainers(client):
    blocks = {f"{i}": content(5000 + i, i) for i in range(40)}
    client.put(blocks.items())
    with client.queue(depth=16) as queue:
        numbers, seen, lock = set(), set(), threading.Lock()

        def submit():
            for key, data in blocks.items():
                number = queue.get([(key, bytearray(len(data)))])
                with lock:
                    numbers.add(number)

        def drain():
            while True:
                for done in queue.drain():
                    assert done.error is None and done.results[0] is not None
                    with lock:
                        seen.add(done.id)
                with lock:
                    if len(seen) == 4 * len(blocks):
                        return
                select.select([queue], [], [], 0.05)

        threads = [threading.Thread(target=target) for target in [submit] * 4 + [drain] * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert seen == numbers


def test_an_event_loop_waits_for_it(client):
    client.put([(b"key", content(5000))])

    async def main():
        with client.queue() as queue:
            loop, done = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(queue.fileno(), done.set)
            number = queue.get([(b"key", bytearray(5000))])
            async with asyncio.timeout(60):
                await done.wait()
            loop.remove_reader(queue.fileno())
            return number, queue.drain()

    number, (done,) = asyncio.run(main())
    assert (done.id, done.results) == (number, [5000])


def test_too_much_is_refused_and_nothing_is_lost(client, queue):
    client.put([(b"key", b"data")])
    count = 0
    with pytest.raises(ClientError, match="4096 batches") as caught:
        while True:
            queue.exists([b"key"])
            count += 1
    assert caught.value.errno == errno.EAGAIN
    assert count == 4096
    assert [done.id for done in queue.drain()] == list(range(1, 4097))
    queue.exists([b"key"])


# ---- its end ----


def test_close_lets_what_runs_end_and_cancels_the_rest(client):
    client.put((f"{i}", content(MIB, i)) for i in range(40))
    memory = client.buffer(40 * MIB)
    queue = client.queue(depth=2)
    queue.get([(f"{i}", memory[i * MIB : (i + 1) * MIB]) for i in range(40)])
    queue.close()
    queue.close()
    for call in (queue.drain, queue.fileno, lambda: queue.exists([b"key"]), lambda: queue.get([(b"0", memory)])):
        with pytest.raises(ClientError, match="is closed"):
            call()
    assert client.library.held == 0
    assert client.get_into([("3", memory[:MIB])]) == [MIB]
    assert_same(memory[:MIB], content(MIB, 3), "afterwards")


def test_a_client_closes_its_queues(directory):
    descriptors, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    client = kvfs.connect(directory, "llama", gpu=None)
    client.put([(b"key", content(MIB))])
    queues = [client.queue() for _ in range(3)]
    for queue in queues:
        queue.get([(b"key", bytearray(MIB))])
    client.close()
    with pytest.raises(ClientError, match="is closed"):
        queues[0].drain()
    for queue in queues:
        queue.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    wait_until(lambda: len(os.listdir("/proc/self/task")) <= threads, "the end of its threads")


def test_a_queue_keeps_its_client(directory):
    queue = kvfs.connect(directory, "llama", gpu=None).queue()
    gc.collect()
    number = queue.put([(b"key", b"data")])
    assert drained(queue, 1)[number].results == [True]
    queue.close()
    with pytest.warns(ResourceWarning, match="Client of .* was not closed"):
        del queue
        gc.collect()


def test_a_queue_that_was_not_closed_is_warned_of(client):
    queue = client.queue()
    queue.exists([b"key"])
    with pytest.warns(ResourceWarning, match="kvfs.client.Queue of .* was not closed"):
        del queue
        gc.collect()


def test_after_a_fork(client, queue):
    client.put([(b"key", b"data")])

    def child():
        for call in (queue.drain, lambda: queue.exists([b"key"]), lambda: queue.put([(b"k", b"v")]), client.queue):
            with pytest.raises(ForkError):
                call()
        queue.close()
        return True

    assert in_child(child)
    number = queue.exists([b"key"])
    assert drained(queue, 1)[number].results == [True]


# ---- the daemon's end ----


def test_the_daemon_is_killed_while_puts_wait(own_pool):
    pool = own_pool(files=2, size="256M")
    data = content(MIB)
    with kvfs.connect(pool.mount, "llama", gpu=None, timeout_s=20) as client, client.queue() as queue:
        client.put([(b"here", data)])
        numbers = [queue.put([(f"{i} {k}", data) for k in range(4)]) for i in range(40)]
        pool.kill()
        completions = drained(queue, 40, timeout_s=120)
        assert set(completions) == set(numbers)
        for done in completions.values():
            assert all(done.results) if done.error is None else isinstance(done.error, NotMountedError)
            assert len(done.failed) == done.results.count(False)
        assert completions[numbers[-1]].error is not None
        destination = bytearray(MIB)
        number = queue.get([(b"here", destination)])
        assert drained(queue, 1)[number].results == [MIB]
        assert_same(destination, data, "a read without a daemon")
        pool.start()
        number = queue.put([(b"again", data)])
        assert drained(queue, 1)[number].results == [True]
        number = queue.get([(b"again", destination)])
        assert drained(queue, 1)[number].results == [MIB]


def test_a_daemon_that_hangs_holds_up_no_submitter(own_pool):
    pool = own_pool(files=2, size="128M")
    with kvfs.connect(pool.mount, "llama", gpu=None, timeout_s=1) as client, client.queue() as queue:
        client.put([(b"key", content(100_000))])
        os.kill(pool.pid(), signal.SIGSTOP)
        try:
            started = time.monotonic()
            put = queue.put([(b"new", b"data")])
            delete = queue.delete([b"key"])
            exists = queue.exists([b"key"])
            destination = bytearray(100_000)
            get = queue.get([(b"key", destination)])
            assert time.monotonic() - started < 0.9 * slowness()
            completions = drained(queue, 4)
        finally:
            os.kill(pool.pid(), signal.SIGCONT)
        assert isinstance(completions[put].error, DeadlineError)
        assert completions[put].results == [False]
        assert completions[delete].error is not None
        assert completions[exists].results == [True]
        assert completions[get].results == [100_000]


def test_a_closed_queue_keeps_memory_that_a_device_owns(client, monkeypatch):
    """libkvfs says so of the memory of a batch that nobody drained."""
    client.put([(b"key", content(1000))])
    queue = client.queue()
    destination = bytearray(1000)
    number = queue.get([(b"key", destination)])
    wait_until(lambda: readable(queue), "its completion")

    class Owing:
        def __getattr__(self, name):
            return getattr(real, name)

        def kvfs_busy(self, handle, pointer, size):
            return int(owes)

    real, owes = library.lib, True
    monkeypatch.setattr(library, "lib", Owing())
    queue.close()
    assert client.library.held == 1, number
    owes = False
    assert client.library.held == 0
