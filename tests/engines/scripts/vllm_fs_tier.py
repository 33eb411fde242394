"""vLLM's fs tier against a directory: vllm_fs_tier.py DIRECTORY SOURCE BLOCK_SIZE.

SOURCE holds vLLM's unzipped wheel. Only the module under test is loaded: importing vLLM itself needs a GPU
build's world. Prints what it saw as one JSON line; the test judges.
"""

import importlib.util
import json
import mmap
import os
import pathlib
import sys
import types

BLOCKS = 8


def load(source):
    package = types.ModuleType("vllm")
    package.__path__ = [f"{source}/vllm"]
    sys.modules["vllm"] = package
    spec = importlib.util.spec_from_file_location("fs_tier_io", f"{source}/vllm/v1/kv_offload/tiering/fs/io.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(directory, source, size):
    tier = load(source)
    os.makedirs(directory, exist_ok=True)
    seen = {"has_c": tier._HAS_FSIO_C, "o_direct": tier.probe_o_direct(directory)}
    seen["left_by_probe"] = os.listdir(directory)
    stored, loaded = mmap.mmap(-1, BLOCKS * size), mmap.mmap(-1, BLOCKS * size)
    for index in range(BLOCKS):
        stored[index * size : (index + 1) * size] = (b"%08d" % index) * (size // 8) + bytes(size % 8)
    offsets = [index * size for index in range(BLOCKS)]
    # Its reads need the exact block in page-aligned memory; with an odd size it runs buffered.
    direct = seen["o_direct"] and size % mmap.PAGESIZE == 0
    paths = [f"{directory}/m_abc_r0/{index:03x}/00_g0/{index:064x}.bin" for index in range(BLOCKS)]

    def lookup():
        if not tier._HAS_FSIO_C:
            return [os.access(path, os.F_OK) for path in paths]
        from vllm.fs_io_C import batch_lookup

        return list(batch_lookup(paths))

    def attempt():
        loaded[:] = bytes(len(loaded))
        try:
            tier.batch_load_block(paths, memoryview(loaded), offsets, size, direct)
        except OSError as error:
            return {
                "error": type(error).__name__,
                "succeeded": getattr(error, "num_succeeded", None),
                "same": [loaded[o : o + size] == stored[o : o + size] for o in offsets],
            }
        return {"error": None, "same": [loaded[o : o + size] == stored[o : o + size] for o in offsets]}

    seen["lookup_before"] = lookup()
    tier.batch_store_block(paths, memoryview(stored), offsets, size, direct)
    seen["lookup_after"] = lookup()
    seen["temporaries"] = [str(path) for path in pathlib.Path(directory).rglob("*.tmp")]
    seen["sizes"] = [os.path.getsize(path) for path in paths]
    seen["load"] = attempt()
    tier.batch_store_block(paths, memoryview(stored), offsets, size, direct)  # again: already there
    seen["load_again"] = attempt()
    os.truncate(paths[2], 4096)
    seen["truncated"] = attempt()
    seen["truncated_still_there"] = os.path.exists(paths[2])
    os.unlink(paths[1])
    seen["missing"] = attempt()
    seen["lookup_missing"] = lookup()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
