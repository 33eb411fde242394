"""Real engines' storage clients, unchanged, against a directory on the mount: hits, misses, damage.

`tools/setup-clients` brings them in; a client that is not there is a named skip. Each runs in its own process,
under a timeout, and reports what it saw.
"""

import json
import os

import pytest
from file_clients import PYTHON, SCRIPTS, SOURCES
from helpers import MIB, run

DEEPSEEK_BLOCK = 1_124_352  # not a multiple of 4 KiB

pytestmark = pytest.mark.timeout(240)


def play(client, script, directory, home, *arguments, environment=None):
    """Run one client's script and return what it saw; home is a directory off the mount for its own files."""
    source = SOURCES / client
    if not PYTHON.exists() or not (source / ".unpacked").exists():
        pytest.skip(f"the client {client} is not installed: run tools/setup-clients")
    result = run(
        PYTHON,
        SCRIPTS / script,
        directory / "kv",
        source,
        *arguments,
        timeout_s=200,
        environment={
            "HOME": os.fspath(home),
            "LMCACHE_TRACK_USAGE": "false",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "2",
            **(environment or {}),
        },
    )
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("size", [2 * MIB, 5 * MIB, DEEPSEEK_BLOCK])
@pytest.mark.parametrize("path", ["c", "python"])
def test_vllm_fs_tier(directory, tmp_path, size, path):
    torch = next(PYTHON.parents[1].glob("lib/python*/site-packages/torch/lib"), "")
    libraries = f"{SOURCES / 'vllm' / 'stubs'}:{torch}" if path == "c" else ""
    if path == "c" and not (SOURCES / "vllm" / "stubs" / "libtorch_cuda.so").exists():
        pytest.skip("vLLM's C lookup needs the stub libraries of tools/setup-clients")
    seen = play("vllm", "vllm_fs_tier.py", directory, tmp_path, str(size), environment={"LD_LIBRARY_PATH": libraries})
    assert seen["has_c"] == (path == "c")
    assert seen["o_direct"], "the probe finds no O_DIRECT"
    assert seen["left_by_probe"] == []
    assert seen["lookup_before"] == [False] * 8
    assert seen["lookup_after"] == [True] * 8
    assert seen["temporaries"] == []
    assert seen["sizes"] == [size] * 8
    assert seen["load"] == {"error": None, "same": [True] * 8}
    assert seen["load_again"] == {"error": None, "same": [True] * 8}
    # A short block: an error, the two before it count, and vLLM removes it for everyone.
    assert seen["truncated"]["error"] == "OSError"
    assert seen["truncated"]["succeeded"] == 2
    assert seen["truncated"]["same"][:2] == [True, True]
    assert not seen["truncated_still_there"]
    assert seen["missing"]["error"] == "FileNotFoundError"
    assert seen["missing"]["succeeded"] == 1
    assert seen["missing"]["same"][0]
    assert seen["lookup_missing"] == [True, False, False] + [True] * 5


@pytest.mark.parametrize("how", ["buffered", "direct"])
def test_lmcache_fs_native(directory, tmp_path, how):
    seen = play("lmcache", "lmcache_fs_native.py", directory, tmp_path, how)
    assert seen["set"]["succeeded"], seen["set"]
    assert seen["exists"]["succeeded"], seen["exists"]
    assert seen["exists"]["hits"] == [True] * 8 + [False]
    assert len(seen["names"]) == 8, "temporary files are left"
    assert seen["sizes"] == [4 * MIB] * 8
    assert seen["get"]["hits"] == [True] * 8
    assert seen["get"]["same"] == [True] * 8
    assert seen["set_again"]["succeeded"], seen["set_again"]
    # One block truncated, one missing: those two are misses, the other six are whole.
    assert seen["get_damaged"]["hits"] == [False, True, False] + [True] * 5
    assert [
        same for same, hit in zip(seen["get_damaged"]["same"], seen["get_damaged"]["hits"], strict=True) if hit
    ] == [True] * 6
    assert seen["exists_damaged"]["hits"] == [True, True, False] + [True] * 5


@pytest.mark.parametrize("how", ["buffered", "direct"])
def test_lmcache_local_disk(directory, tmp_path, how):
    seen = play("lmcache", "lmcache_local_disk.py", directory, tmp_path, how)
    assert seen["names"] == [f"m-x@1@0@{index}@bfloat16.pt" for index in range(5)]
    assert seen["sizes"] == [2 * MIB] * 5
    assert seen["get"] == [True] * 5
    # It ignores the count and serves the stale buffer as a hit: why kvfs never returns a short count.
    assert seen["truncated"] is False
    assert seen["missing"] in (None, "KeyError"), "a missing file is a KeyError or a miss, by path"
    assert seen["batch"] == [True, False]
    assert seen["removed"]
    assert seen["use_odirect"] == (how == "direct")


def test_sglang_hicache_file(directory, tmp_path):
    seen = play("sglang", "sglang_hicache_file.py", directory, tmp_path)
    assert seen["set"] is True
    assert len(seen["names"]) == 4, "temporary files are left"
    assert not [name for name in seen["names"] if not name.endswith(".bin")]
    assert seen["sizes"] == [8 * MIB] * 4
    assert seen["hit_pages"] == 4
    assert seen["get"] == [True] * 4
    assert seen["set_again"] is True
    assert seen["exists"] == [True] * 4 + [False]
    assert seen["missing"] is None
    assert not seen["missing_exists"]
    # A short file raises in get(); SGLang's caller takes it for a miss.
    assert seen["truncated"] == "OSError"
    assert seen["whole"] == [True, True]
