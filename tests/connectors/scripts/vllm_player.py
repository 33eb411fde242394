"""vLLM's own tiering manager with kvfs behind it, on command: a program for the environment of vLLM.

Real are OffloadingSpecFactory, TieringOffloadingSpec, SecondaryTierFactory, TieringOffloadingManager, its primary tier
and SharedOffloadRegion. A test double are the configuration of the model, and the GPU: blocks are made of their number.
One process is one engine after the other. Commands are lines of JSON on standard input, {"do": name, ...}; each has one
line of answer.
"""

import contextlib
import gc
import hashlib
import json
import os
import queue
import random
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

# The answers go where nothing else can write.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.stdout.reconfigure(line_buffering=True)  # vLLM's log

from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash  # noqa: E402
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope  # noqa: E402
from vllm.v1.kv_offload.base import (  # noqa: E402
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    get_offload_block_hash,
)
from vllm.v1.kv_offload.config import (  # noqa: E402
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory  # noqa: E402

os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "1"
DEADLINE_S = 60
TOKENS = 16


def make_spec(settings):
    """As OffloadingConnector makes it, of the configuration line that the test gives."""
    layers = tuple(f"model.layers.{i}.self_attn" for i in range(2))
    extra = settings["kv_connector_extra_config"]
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(TOKENS, layers, 0),),
        worker_kv_bytes_per_block=settings.get("block_size", 1 << 20),
        enable_kv_cache_events=settings.get("events", False),
        extra_config=extra,
        engine_id=f"kvfs-test-{uuid.uuid4().hex[:12]}",
        model=OffloadingModelConfig(settings.get("model", "team/tiny-llama"), "bfloat16"),
        cache=OffloadingCacheConfig(TOKENS, 1),
        parallel=OffloadingParallelConfig(0, 1, settings.get("tp", 1), 1, 1, 1, 0, 1, None, False),
        kv_cache_layout=settings.get("layout", "LBHNC"),
    )
    return OffloadingSpecFactory.create_spec(config)


def key_of(number):
    return hashlib.sha256(b"token block %d" % number).digest() + bytes(4)


class Player:
    def __init__(self, settings):
        started = time.monotonic()
        self.manager = make_spec(settings).get_manager()
        self.started_s = time.monotonic() - started
        self.tier = self.manager.secondary_tiers[0]
        self.view = self.manager.primary_tier.get_kv_memoryview()
        self.memory = self.view.cast("B")
        self.size = self.view.strides[0]
        self.requests = 0

    def content(self, number):
        return random.Random(number).randbytes(self.size)

    def chunk(self, chunk):
        return self.memory[int(chunk) * self.size : (int(chunk) + 1) * self.size]

    def request(self, numbers, hint=None, actions=()):
        """actions: types and payloads of an envelope of hints."""
        self.requests += 1
        made = [KvHintAction(str(index), of_type, "1.0", payload) for index, (of_type, payload) in enumerate(actions)]
        context = ReqContext(
            f"request-{self.requests}",
            kv_transfer_params=hint and {"kvfs": hint},
            kv_hints=KvHintsEnvelope("0.1", "message", made) if made else None,
        )
        for number in numbers:
            context.set_offload_key_position(key_of(number), (number + 1) * TOKENS)
        self.manager.on_new_request(context)
        return context

    def step(self, *new_requests):
        self.manager.on_schedule_end(ScheduleEndContext(new_requests, ()))

    def settle(self):
        """Step until nothing is under way; returns how many steps that took."""
        deadline = time.monotonic() + DEADLINE_S
        steps = 0
        while steps == 0 or self.manager.has_pending_work():
            assert time.monotonic() < deadline, "jobs that do not end"
            self.step()
            steps += 1
            time.sleep(0.001)
        return steps

    # ---- commands ----

    def do_ready(self):
        return {"seconds": self.started_s, "size": self.size, "chunks": len(self.view)}

    def do_store(self, numbers, hint=None, actions=()):
        """As after the prefill of one request: from the "GPU" to the primary tier, and from there to kvfs."""
        context = self.request(numbers, hint, actions)
        prepared = self.manager.prepare_store([key_of(number) for number in numbers], context)
        if prepared is None:
            return None
        by_key = {key_of(number): number for number in numbers}
        for key, chunk in zip(prepared.keys_to_store, prepared.store_spec.block_ids, strict=True):
            self.chunk(chunk)[:] = self.content(by_key[key])
        if prepared.keys_to_store:
            self.manager.complete_store(prepared.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.settle()
        return len(prepared.keys_to_store)

    def do_load(self, numbers):
        """As a request that finds its blocks: look up all, load, compare. "same", "miss" or "wrong" for each."""
        context = self.request(numbers)
        first = [self.manager.lookup(key_of(number), context) for number in numbers]
        assert LookupResult.RETRY not in first
        self.settle()
        answers = []
        for number in numbers:
            key = key_of(number)
            if self.manager.lookup(key, context) is not LookupResult.HIT:
                answers.append("miss")
                continue
            (chunk,) = self.manager.prepare_load([key], context).block_ids
            answers.append("same" if self.chunk(chunk) == self.content(number) else "wrong")
            self.manager.complete_load([key], context)
        self.manager.touch([key_of(number) for number in numbers], context)
        self.step(context.req_id)
        self.manager.on_request_finished(context)
        self.settle()
        return answers

    def do_lookup(self, numbers):
        """The tier's own answers, in one step."""
        context = self.request(numbers)
        answers = [self.tier.lookup(key_of(number), context) for number in numbers]
        assert set(answers) <= {LookupResult.HIT, LookupResult.MISS}
        self.manager.on_request_finished(context)
        self.step()
        return [answer is LookupResult.HIT for answer in answers]

    def do_lookup_between(self, numbers):
        """The same between two steps, by another thread, as vLLM 0.33 asks for a peer."""
        context = self.request(numbers)
        with ThreadPoolExecutor(1) as others, getattr(self.manager, "lock", contextlib.nullcontext()):
            answers = others.submit(lambda: [self.tier.lookup(key_of(number), context) for number in numbers]).result()
        self.manager.on_request_finished(context)
        return [answer is LookupResult.HIT for answer in answers]

    def do_crowd(self, rounds):
        """Store, look up and load again and again, while another thread drains the tier and a third one looks up."""
        tier, arrived, over = self.tier, queue.SimpleQueue(), threading.Event()
        drain = tier.get_finished_jobs
        context = self.request(range(64))

        def poll():
            while not over.is_set():
                for result in drain():
                    arrived.put(result)

        def ask():
            while not over.is_set():
                for number in range(64):
                    tier.lookup(key_of(number), context)
                tier.get_stats(), tier.has_pending_work(), list(tier.take_events())

        def polled():
            with contextlib.suppress(queue.Empty):
                while True:
                    yield arrived.get_nowait()

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        tier.get_finished_jobs = polled
        answers = []
        try:
            with ThreadPoolExecutor(2) as others:
                calls = [others.submit(poll), others.submit(ask)]
                try:
                    for index in range(rounds):
                        numbers = range(index % 8 * 4, index % 8 * 4 + 4)
                        self.do_forget()
                        self.do_store(numbers)
                        self.do_forget()
                        answers += self.do_load(numbers)
                finally:
                    over.set()
                for call in calls:
                    call.result()
        finally:
            tier.get_finished_jobs = drain
            sys.setswitchinterval(before)
        self.manager.on_request_finished(context)
        return answers

    def do_time_lookups(self, numbers):
        """Microseconds of processor time a key, the best of some steps, of the whole prompt in one step."""
        keys = [key_of(number) for number in numbers]
        best = float("inf")
        for _ in range(5):
            context = self.request(numbers)
            begun = time.process_time()
            for key in keys:
                self.tier.lookup(key, context)
            best = min(best, time.process_time() - begun)
            self.manager.on_request_finished(context)
            self.step()
        return best / len(keys) * 1e6

    def do_forget(self):
        """The primary tier loses everything."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):
            self.manager.on_reset_flushed()

    def do_state(self):
        return self.tier._connection.state.value

    def do_space(self):
        return self.tier._connection.space

    def do_keys(self, numbers):
        return [key_of(number).hex() for number in numbers]

    def do_hashes(self, numbers):
        """As a router knows the blocks."""
        return [maybe_convert_block_hash(get_offload_block_hash(key_of(number))) for number in numbers]

    def do_hint(self, actions):
        """A request that has hints and no blocks of its own comes, and ends."""
        context = self.request((), actions=actions)
        self.manager.on_request_finished(context)
        self.step()

    def do_step(self):
        self.step()

    def do_near(self, numbers):
        """Those in the primary tier."""
        context = self.request(())
        near = [self.manager.primary_tier.lookup(key_of(number), context) is LookupResult.HIT for number in numbers]
        self.manager.on_request_finished(context)
        return near

    def do_stats(self):
        stats = self.manager.get_stats()
        return {
            name: sum(v for v in values.values() if not isinstance(v, list)) for name, values in stats._values.items()
        }

    def do_events(self):
        told = [event for event in self.manager.take_events() if event.medium is self.tier.medium]
        return [
            [
                [key.hex() for key in event.keys],
                event.removed,
                [event.locality.value, event.ownership, event.removal_expected],
            ]
            for event in told
        ]

    def do_parents(self, numbers):
        """As a store would say it of these keys."""
        context = self.request(numbers)
        chain = self.tier._chain(context)
        parents = [chain.parent(key_of(number)) for number in numbers]
        self.manager.on_request_finished(context)
        return [None if parent is None else parent.hex() for parent in parents]

    def do_start_load(self, numbers):
        """Begin a load and do not wait for its end."""
        context = self.request(numbers)
        for number in numbers:
            self.manager.lookup(key_of(number), context)
        self.step()

    def do_shutdown(self):
        self.memory.release()
        self.view = None
        gc.collect()
        path = self.manager.primary_tier._mmap_region.mmap_path
        self.manager.shutdown()
        return {"region": os.path.exists(path), "mapped": any(path in line for line in open("/proc/self/maps"))}


def main():
    """open makes an engine, shutdown ends it; after that another may be opened."""
    player = None
    for line in sys.stdin:
        command = json.loads(line)
        what = command.pop("do")
        if what == "open":
            assert player is None
            try:
                player = Player(**command)
            except ValueError as error:
                print(json.dumps({"refused": str(error)}), file=ANSWERS, flush=True)
                continue
            answer = player.do_ready()
        else:
            answer = getattr(player, f"do_{what}")(**command)
            if what == "shutdown":
                player = None
        print(json.dumps(answer), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
