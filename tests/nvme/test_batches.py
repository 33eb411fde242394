"""Batches that a slow device needs several deadlines for: nothing is a miss for being behind others.

The device is an enclosure's: every command takes its time there, one after the other, whatever this machine does.
"""

import concurrent.futures
import contextlib
import mmap
import os
import signal
import time

import pytest
from enclosure import Enclosure
from helpers import MIB, Pool, slowness, wait_until
from load import content, files, urls

import kvfs

pytestmark = pytest.mark.timeout(300)

NQN = "nqn.2026-11.test:a"
COUNT, SIZE = 16, 8 * MIB
# All of a batch takes so many deadlines.
DEADLINES = 4
# The enclosure's `slow` is so many bytes a nanosecond by its factor.
SPEED = 2


@contextlib.contextmanager
def slow_pool(*extra):
    """A pool on two namespaces, and a function that makes them slow and returns their enclosure."""
    deadline_s = 1.0 * slowness()
    factor = int(deadline_s * DEADLINES * 1e9 / (COUNT * SIZE / SPEED))
    with files(2, 384 * MIB) as paths, Enclosure({NQN: paths}) as enclosure:
        with Pool(devices=urls(enclosure.port, NQN, 2), mount_args=("--allow-other", *extra)) as pool:

            def slow_down():
                enclosure.control(f"fault slow factor={factor} queue=io")
                return enclosure

            yield pool, deadline_s, slow_down
            enclosure.control("clear")


def batch():
    return [(b"block-%d" % number, content(number, SIZE)) for number in range(COUNT)]


def test_a_batch_of_several_deadlines_arrives_and_small_blocks_before_it():
    blocks = batch()
    with slow_pool() as (pool, deadline_s, slow_down):
        with kvfs.connect(pool.mount, namespace="n", timeout_s=60) as writer:
            writer.put(blocks)
            writer.put([(b"small-%d" % number, content(number, 4096)) for number in range(8)])
        slow_down()
        with kvfs.connect(pool.mount, namespace="n", timeout_s=deadline_s) as client, client.queue(depth=64) as queue:
            memory = memoryview(mmap.mmap(-1, COUNT * SIZE))
            parts = [memory[number * SIZE : (number + 1) * SIZE] for number in range(COUNT)]
            small = memoryview(mmap.mmap(-1, 8 * 4096))
            large_id = queue.get([(key, part) for (key, _), part in zip(blocks, parts, strict=True)])
            small_id = queue.get([(b"small-%d" % n, small[n * 4096 : (n + 1) * 4096]) for n in range(8)])
            done = []
            wait_until(lambda: done.extend(queue.drain()) or len(done) == 2, "both batches", timeout_s=120)
            assert [one.id for one in done] == [small_id, large_id], "the small blocks waited for the large ones"
            assert [one.results for one in done] == [[4096] * 8, [SIZE] * COUNT]
            assert all(part == data for part, (_, data) in zip(parts, blocks, strict=True))
            assert client.statistics().timeouts == 0


@pytest.mark.slow
def test_several_clients_at_one_time():
    blocks = batch()
    with slow_pool() as (pool, deadline_s, slow_down):
        with kvfs.connect(pool.mount, namespace="n", timeout_s=60) as writer:
            writer.put(blocks)
        slow_down()

        def load(which):
            with kvfs.connect(pool.mount, namespace="n", timeout_s=deadline_s, depth=64) as client:
                memory = memoryview(mmap.mmap(-1, COUNT // 4 * SIZE))
                keys = [key for key, _ in blocks[which::4]]
                got = client.get_into([(key, memory[i * SIZE : (i + 1) * SIZE]) for i, key in enumerate(keys)])
                return got, client.statistics().timeouts

        with concurrent.futures.ThreadPoolExecutor(4) as pool_of_threads:
            assert list(pool_of_threads.map(load, range(4))) == [([SIZE] * (COUNT // 4), 0)] * 4


@pytest.mark.slow
def test_a_put_of_several_deadlines_is_stored():
    data = content(0, COUNT // 2 * SIZE)  # of two deadlines, in one block
    with slow_pool() as (pool, deadline_s, slow_down):
        slow_down()
        with kvfs.connect(pool.mount, namespace="n", timeout_s=deadline_s, depth=64) as client:
            client.put([(b"block", data)])
            assert client.exists([b"block"]) == [True]


def test_reads_of_the_mount_that_wait_for_each_other():
    data = [content(number, SIZE) for number in range(COUNT)]
    with slow_pool("--io-timeout", str(int(1000 * slowness()))) as (pool, _, slow_down):
        for number in range(COUNT):
            (pool.mount / f"f{number}").write_bytes(data[number])
        pool.umount()
        pool.start()  # nothing is in the page cache
        slow_down()

        def load(number):
            descriptor = os.open(pool.mount / f"f{number}", os.O_RDONLY | os.O_DIRECT)
            memory = mmap.mmap(-1, SIZE)
            done = os.preadv(descriptor, [memory], 0)
            os.close(descriptor)
            return done == SIZE and memory[:] == data[number]

        with concurrent.futures.ThreadPoolExecutor(COUNT) as pool_of_threads:
            assert list(pool_of_threads.map(load, range(COUNT))) == [True] * COUNT


def test_a_device_that_hangs_in_the_middle_ends_the_rest_at_once():
    blocks = batch()
    with slow_pool() as (pool, deadline_s, slow_down):
        with kvfs.connect(pool.mount, namespace="n", timeout_s=60) as writer:
            writer.put(blocks)
        enclosure = slow_down()
        with kvfs.connect(pool.mount, namespace="n", timeout_s=deadline_s, depth=64) as client:
            memory = memoryview(mmap.mmap(-1, COUNT * SIZE))
            parts = [(key, memory[number * SIZE : (number + 1) * SIZE]) for number, (key, _) in enumerate(blocks)]
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                got = thread.submit(client.get_into, parts)
                wait_until(lambda: memory[0] or memory[SIZE], "the first bytes")
                os.kill(enclosure.pid, signal.SIGSTOP)
                try:
                    stopped = time.monotonic()
                    results = got.result(timeout=60 * slowness())
                    assert None in results
                    assert time.monotonic() - stopped < 3 * deadline_s
                finally:
                    os.kill(enclosure.pid, signal.SIGCONT)
            assert all(result in (None, SIZE) for result in results)
            assert all(
                part == data
                for (_, part), (_, data), result in zip(parts, blocks, results, strict=True)
                if result is not None
            )
            wait_until(lambda: client.get_into(parts) == [SIZE] * COUNT, "all of it, once it goes on", timeout_s=180)
