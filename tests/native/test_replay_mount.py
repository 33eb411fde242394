"""kvfs replay on a real mount: by files and by libkvfs, which find each other's blocks."""

import json
import sys

import pytest
from helpers import KIB, run

BLOCK = 64 * KIB


@pytest.fixture
def trace(tmp_path):
    """Forty prompts, each of six blocks: three of the one before, three of its own."""
    path = tmp_path / "trace.jsonl"
    lines = []
    for i in range(40):
        blocks = list(range(3 * i, 3 * i + 6)) if i % 4 else [1000 + i, *range(2000 + 10 * i, 2005 + 10 * i)]
        lines.append(json.dumps({"timestamp": i, "input_length": 3072, "output_length": 1, "hash_ids": blocks}))
    path.write_text("\n".join(lines))
    return path


def replay(trace, target, *more):
    words = ["replay", trace, "--target", target, "--block-size", BLOCK, "--full-speed", "--verify", "-o", "json"]
    return json.loads(run(sys.executable, "-m", "kvfs", *map(str, [*words, *more]), timeout_s=120).stdout)


def test_files_and_libkvfs_hit_what_a_cache_without_limit_would(trace, directory, is_kvfs):
    """One request at a time; then each way finds all of the other's blocks."""
    ways = [(), ("--native",)] if is_kvfs else [(), ()]
    for number, (first, second) in enumerate((ways, ways[::-1])):
        target = directory / f"way{number}"
        target.mkdir()
        made = replay(trace, target, "--threads", 1, *first)
        assert made["engine"] == ("native" if first else "posix")
        assert made["prefix_hit_ratio"] == made["prefix_hit_ratio_unlimited"] > 0
        assert made["blocks"]["failed"] == made["blocks"]["lost"] == made["blocks"]["wrong"] == 0
        again = replay(trace, target, "--threads", 4, *second)
        assert again["prefix_hit_ratio"] == 1
        assert again["blocks"]["stored"] == again["blocks"]["failed"] == again["blocks"]["wrong"] == 0


@pytest.mark.slow
def test_a_full_pool_loses_blocks_and_fails_nothing(trace, own_pool, tmp_path):
    """Four times what the pool holds: no store fails, no byte is wrong, hits are fewer than without a limit."""
    pool = own_pool(files=4, size="16M")
    path = tmp_path / "long.jsonl"
    request = {"input_length": 4096, "output_length": 1}
    path.write_text(
        "".join(
            json.dumps({**request, "timestamp": i, "hash_ids": [i % 300 * 8 + k for k in range(8)]}) + "\n"
            for i in range(600)
        )
    )
    for more in ((), ("--native",)):
        made = replay(path, pool.mount, "--threads", 4, *more)
        assert made["errors"] == {"load": {}, "store": {}, "wrong": 0}
        assert made["blocks"]["failed"] == made["blocks"]["wrong"] == 0
        assert made["prefix_hit_ratio"] < made["prefix_hit_ratio_unlimited"] == 0.5


def test_libkvfs_is_refused_where_no_pool_is_mounted(trace, tmp_path):
    result = run(
        sys.executable,
        "-m",
        "kvfs",
        "replay",
        str(trace),
        "--target",
        str(tmp_path),
        "--native",
        "--block-size",
        "64K",
        check=False,
    )
    assert result.returncode == 1 and result.stderr.startswith("kvfs: ") and str(tmp_path) in result.stderr
