"""`kvfs bench` on a pool, a directory and devices: figures of all, and nothing that stays."""

import json
import os
import signal
import subprocess
import sys

import pytest
from helpers import loop_devices, run, slowness, wait_until

from kvfs.bench.plan import BLOCK_SIZES, DEPTHS

SIDES = ("raw", "libkvfs", "files")


def bench(*words, check=True):
    done = run(
        sys.executable,
        "-m",
        "kvfs",
        "bench",
        *map(str, words),
        "--seconds",
        "3",
        "-o",
        "json",
        timeout_s=200,
        check=check,
    )
    return json.loads(done.stdout)


def checked(document, sides, works):
    """Every cell has measured something, and its latencies are in order."""
    cells = {(cell["work"], cell["side"], cell["block_size"], cell["at_once"]): cell for cell in document["cells"]}
    assert {key[:2] for key in cells} == {(work, side) for work in works for side in sides} | (
        {("look-ups", side) for side in sides if side != "raw"} if len(sides) > 1 else set()
    )
    assert {key[2:] for key in cells if key[0] == "reads"} == {
        (size, depth) for size in BLOCK_SIZES for depth in DEPTHS
    }
    for key, cell in cells.items():
        assert cell["blocks_per_s"] > 0, key
        assert 0 < cell["p50_us"] <= cell["p99_us"], key
    assert set(document["limits"]) == set(works)
    return cells


def test_a_pool_is_measured_by_all_ways_and_nothing_stays(own_pool):
    pool = own_pool(files=2, size="512M")
    (pool.mount / "kept").write_bytes(b"kept" * 4096)
    document = bench(pool.path)
    checked(document, SIDES, ("reads", "stores"))
    assert document["kind"] == "pool"
    assert os.listdir(pool.mount) == ["kept"] and (pool.mount / "kept").read_bytes() == b"kept" * 4096
    found = json.loads(pool.command("status", str(pool.path), "-o", "json").stdout)
    assert found["blocks"] == 1 and found["counters"].get("blocks_bad", 0) == 0
    pool.umount()
    assert json.loads(pool.command("fsck", str(pool.path), "--verify-data", "-o", "json").stdout)["healthy"]


def test_an_interrupt_leaves_nothing(own_pool):
    pool = own_pool(files=2, size="256M")
    words = [sys.executable, "-m", "kvfs", "bench", str(pool.mount), "--seconds", "600"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=pool.environment)
    try:
        wait_until(lambda: any(os.listdir(path) for path in pool.mount.glob(".kvfs-bench.*")), "blocks of the bench")
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60 * slowness())
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and not out and errors.strip().splitlines()[-1].startswith("kvfs: ")
    assert os.listdir(pool.mount) == []


def test_a_directory_is_measured_and_nothing_stays(tmp_path):
    document = bench(tmp_path)
    checked(document, ("raw",), ("reads", "stores"))
    assert document["kind"] == "directory" and os.listdir(tmp_path) == []


def test_devices_are_measured_together_and_alone_and_written_to_only_if_free(tmp_path):
    with loop_devices(tmp_path, 2, "64M") as devices:
        run("mkfs.ext4", "-q", devices[0])
        with open(devices[0], "rb") as file:
            before = file.read(1 << 20)
        document = bench(*devices)
        checked(document, ("raw",), ("reads",))
        assert set(document["devices_alone_bytes_per_s"]) == set(devices)
        refused = bench(*devices, "--write", check=False)
        assert refused["error"].startswith(f"{devices[0]}: holds an ext2/3/4 filesystem; --write would destroy it")
        there = tmp_path / "mounted"
        there.mkdir()
        run("mount", devices[0], there)
        try:
            refused = bench(devices[0], "--write", check=False)
            assert refused["error"] == f"{devices[0]}: in use (mounted, or part of another device)"
        finally:
            run("umount", there)
        with open(devices[0], "rb") as file:
            assert len(before) == len(file.read(1 << 20))
        checked(bench(devices[1], "--write"), ("raw",), ("reads", "stores"))


def test_a_device_of_a_mounted_pool_is_not_written_to(own_pool):
    pool = own_pool(files=2, size="64M")
    refused = bench(pool.path / "devices/0", "--write", check=False)
    assert "in use by another kvfs" in refused["error"] and str(pool.path) in refused["error"]
    assert json.loads(pool.command("status", str(pool.path), "-o", "json").stdout)["pool"]["state"] == "mounted"


def test_a_pool_too_small_for_two_blocks_says_so(own_pool):
    pool = own_pool(files=1, size="24M")
    refused = bench(pool.mount, check=False)
    assert "does not hold two blocks of 2M" in refused["error"]
    assert os.listdir(pool.mount) == []


@pytest.mark.parametrize("words", [["/proc"], ["/dev/null"], ["/no/such/place"]])
def test_what_cannot_be_measured_is_an_error_that_names_it(words):
    refused = bench(*words, check=False)
    assert words[0] in refused["error"]
