"""One operation of vLLM's tiering manager on kvfs's tier: vllm_bench.py MOUNT OPERATION BATCHES BLOCK_KIB.

OPERATION: store, lookup or load of BATCHES batches of 128 blocks, from and into vLLM's shared region; or ahead, a load
that a kv.prefetch came before. Loads are compared. Prints the seconds of each batch as JSON: of a store and a load
until the manager knows that they are over.
"""

import json
import sys
import time

from vllm_player import ANSWERS, Player, key_of

BATCH = 128


def main(mount, operation, batches, block_kib):
    size = int(block_kib) << 10
    tier = {"type": "KvfsTier", "module_path": "kvfs.connectors.vllm", "mount": mount}
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": (5 if operation == "ahead" else 2) * BATCH * size,
        "secondary_tiers": [tier],
    }
    player = Player({"kv_connector_extra_config": extra, "block_size": size})
    # A region that was never written is made page by page while it is loaded into, and an engine's was.
    player.memory[:] = bytes(len(player.memory))
    seconds = []
    for batch in range(int(batches)):
        numbers = list(range(batch * BATCH, (batch + 1) * BATCH))
        keys = [key_of(number) for number in numbers]
        context = player.request(numbers)
        if operation == "store":
            prepared = player.manager.prepare_store(keys, context)
            assert len(prepared.keys_to_store) == BATCH
            for number, chunk in zip(numbers, prepared.store_spec.block_ids, strict=True):
                player.chunk(chunk)[:] = player.content(number)
            begun = time.perf_counter()
            player.manager.complete_store(prepared.keys_to_store, context)
        else:
            if operation == "ahead":
                player.do_hint([["kv.prefetch", {"block_hashes": player.do_hashes(numbers)}]])
                while not all(player.do_near(numbers)):
                    player.step()
                    time.sleep(0.001)
            begun = time.perf_counter()
            found = [player.tier.lookup(key, context) for key in keys] if operation == "lookup" else None
            if operation in ("load", "ahead"):
                for key in keys:
                    player.manager.lookup(key, context)
        if operation == "lookup":
            seconds.append(time.perf_counter() - begun)
            assert all(answer.name == "HIT" for answer in found)
            player.manager.on_request_finished(context)
            player.settle()
            continue
        player.manager.on_request_finished(context)
        player.settle()
        seconds.append(time.perf_counter() - begun)
        if operation in ("load", "ahead"):
            again = player.request(numbers)
            for number, key in zip(numbers, keys, strict=True):
                (chunk,) = player.manager.prepare_load([key], again).block_ids
                assert player.chunk(chunk) == player.content(number), "other bytes"
                player.manager.complete_load([key], again)
            player.manager.on_request_finished(again)
            player.settle()
    player.do_shutdown()
    print(json.dumps(seconds), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
