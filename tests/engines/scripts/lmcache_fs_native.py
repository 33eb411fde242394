"""LMCache's fs_native connector against a directory: lmcache_fs_native.py DIRECTORY SOURCE buffered|direct.

Prints what it saw as one JSON line; the test judges.
"""

import json
import mmap
import os
import select
import sys
import time

sys.path.insert(0, sys.argv[2])

from lmcache.lmcache_fs import LMCacheFSClient

BLOCKS, SIZE = 8, 4 << 20


def main(directory, direct):
    os.makedirs(directory, exist_ok=True)
    client = LMCacheFSClient(directory, 4, "", direct, 0)
    keys = [f"meta-llama/Llama-3.1-8B@00000000@0@{index:064x}" for index in range(BLOCKS)]
    stored, loaded = mmap.mmap(-1, BLOCKS * SIZE), mmap.mmap(-1, BLOCKS * SIZE)
    for index in range(BLOCKS):
        stored[index * SIZE : (index + 1) * SIZE] = (b"%08d" % index) * (SIZE // 8)

    def pieces(memory):
        view = memoryview(memory)
        return [view[index * SIZE : (index + 1) * SIZE] for index in range(BLOCKS)]

    def completion():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            select.select([client.event_fd()], [], [], 1)
            done = client.drain_completions()
            if done:
                [(_identity, succeeded, message, hits)] = done
                return {"succeeded": succeeded, "message": message, "hits": hits}
        raise TimeoutError("no completion from LMCache within 60 s")

    def get():
        loaded[:] = bytes(len(loaded))
        client.submit_batch_get(keys, pieces(loaded))
        return completion() | {"same": [a == b for a, b in zip(pieces(loaded), pieces(stored), strict=True)]}

    seen = {}
    client.submit_batch_set(keys, pieces(stored))
    seen["set"] = completion()
    client.submit_batch_exists([*keys, "x@00000000@0@ff"])
    seen["exists"] = completion()
    names = sorted(os.listdir(directory))
    seen["names"] = names
    seen["sizes"] = [os.path.getsize(os.path.join(directory, name)) for name in names]
    seen["get"] = get()
    client.submit_batch_set(keys, pieces(stored))  # rename onto existing names
    seen["set_again"] = completion()
    os.unlink(os.path.join(directory, names[2]))
    os.truncate(os.path.join(directory, names[0]), 4096)
    seen["get_damaged"] = get()
    client.submit_batch_exists(keys)
    seen["exists_damaged"] = completion()
    client.close()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[3] == "direct")
