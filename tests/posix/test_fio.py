"""fio against the mount: its engines, its depths, its own verification of every byte.

Each job is small. Asserted is that fio ends well, counts no error, and moved the requested bytes. Where it verifies, it
must also have read back and checked all that was written.
"""

import json

import pytest
from helpers import MIB, repeated, requires_program, run, slow

pytestmark = pytest.mark.timeout(90)

# With --ioengine's own name first: sync engines, then the asynchronous ones NIXL, Mooncake and UCM use.
SIZE = repeated(16) * MIB
SYNCHRONOUS = ["sync", "psync", "vsync", "pvsync"]


def fio(directory, name, **options):
    """Run one job and return its part of fio's JSON; fail on any error that fio counts."""
    requires_program("fio")
    words = {
        "name": name,
        "directory": directory,
        "size": SIZE,
        "bs": "64k",
        "randseed": 20_011,
        "output-format": "json",
        "output": directory / f"{name}.json",
        "group_reporting": 1,
        "thread": 1,
        "fallocate": "none",
        "end_fsync": 1,
        "verify_state_save": 0,
    } | options
    result = run("fio", *(f"--{key}={value}" for key, value in words.items()), timeout_s=140, check=False)
    text = (directory / f"{name}.json").read_text()
    assert result.returncode == 0, f"fio: {result.stderr}{result.stdout}{text[:2000]}"
    # fio prints its notes before the JSON.
    parsed = json.loads(text[text.index("{") :])
    [job] = parsed["jobs"]
    assert job["error"] == 0, job
    assert job.get("total_err", 0) == 0, job
    return job


def assert_verified(job, size):
    """Demand that fio read back, to check it, everything that it wrote."""
    assert job["write"]["io_bytes"] == size
    assert job["read"]["io_bytes"] == size, "fio did not verify what it wrote"


@pytest.mark.parametrize("engine", SYNCHRONOUS)
def test_synchronous_engines_write_and_verify(directory, engine):
    job = fio(directory, engine, ioengine=engine, rw="write", verify="crc32c", do_verify=1, verify_fatal=1)
    assert_verified(job, SIZE)


@pytest.mark.parametrize("direct", [0, 1], ids=["buffered", "direct"])
@pytest.mark.parametrize("pattern", [slow("write"), "randwrite"])
@pytest.mark.parametrize("engine", ["psync", slow("libaio"), "io_uring"])
def test_written_blocks_verify(directory, engine, pattern, direct):
    job = fio(
        directory,
        f"{engine}-{pattern}",
        ioengine=engine,
        rw=pattern,
        direct=direct,
        iodepth=16,
        verify="crc32c",
        do_verify=1,
        verify_fatal=1,
        bs="4k" if pattern == "randwrite" else "1m",
    )
    assert_verified(job, SIZE)


def test_parts_of_chunks_written_beside_fsync_verify(directory):
    """Writes that load what an fsync has just sealed, 32 at once: none undoes another that was acknowledged."""
    for turn in range(3):
        job = fio(
            directory,
            f"beside-{turn}",
            ioengine="io_uring",
            rw="randwrite",
            direct=1,
            iodepth=32,
            fsync=4,
            bs="12k",
            size=4 * MIB,
            verify="crc32c",
            do_verify=1,
            verify_fatal=1,
            randseed=20_011 + turn,
        )
        assert_verified(job, 4 * MIB // 12288 * 12288)


@pytest.mark.slow
@pytest.mark.parametrize("direct", [0, 1], ids=["buffered", "direct"])
@pytest.mark.parametrize("engine", ["libaio", "io_uring"])
def test_256_reads_in_flight_are_all_answered(directory, engine, direct):
    """NIXL submits 64 at a time to a depth of 256."""
    fio(
        directory,
        "lay",
        ioengine="psync",
        rw="write",
        bs="1m",
        size=2 * SIZE,
        verify="crc32c",
        do_verify=0,
        filename="block",
        verify_interval=4096,
    )
    job = fio(
        directory,
        "read",
        ioengine=engine,
        rw="randread",
        bs="4k",
        size=2 * SIZE,
        iodepth=256,
        iodepth_batch_submit=64,
        direct=direct,
        filename="block",
        verify="crc32c",
        verify_interval=4096,
        verify_fatal=1,
    )
    assert job["read"]["io_bytes"] == 2 * SIZE
    assert job["read"]["total_ios"] == 2 * SIZE // 4096
    assert job["read"]["short_ios"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("direct", [0, 1], ids=["buffered", "direct"])
@pytest.mark.parametrize("engine", ["libaio", "io_uring"])
def test_256_writes_in_flight_within_the_size_verify(directory, engine, direct):
    with open(directory / "slab", "wb") as file:
        file.truncate(2 * SIZE)
    job = fio(
        directory,
        "slab-write",
        ioengine=engine,
        rw="randwrite",
        bs="16k",
        size=2 * SIZE,
        iodepth=256,
        iodepth_batch_submit=64,
        direct=direct,
        filename="slab",
        verify="crc32c",
        do_verify=1,
        verify_fatal=1,
    )
    assert_verified(job, 2 * SIZE)


@pytest.mark.parametrize("engine", ["psync", "libaio", "io_uring"])
def test_mixed_random_reads_and_writes_count_no_error(directory, engine):
    job = fio(
        directory,
        "mixed",
        ioengine=engine,
        rw="randrw",
        rwmixread=70,
        bs="16k",
        size=2 * SIZE,
        iodepth=32,
        numjobs=2,
        direct=0,
    )
    assert job["read"]["io_bytes"] + job["write"]["io_bytes"] == 4 * SIZE
    assert job["read"]["short_ios"] == 0
    assert job["write"]["short_ios"] == 0


@pytest.mark.parametrize("pattern", ["write", "randwrite"])
def test_mapped_writes_verify(directory, pattern):
    job = fio(
        directory,
        "mapped",
        ioengine="mmap",
        rw=pattern,
        bs="16k",
        verify="crc32c",
        do_verify=1,
        verify_fatal=1,
        thread=0,
    )
    assert_verified(job, SIZE)


def test_four_jobs_verify_their_own_files_at_once(directory):
    job = fio(
        directory,
        "parallel",
        ioengine="psync",
        rw="randwrite",
        bs="8k",
        size=SIZE // 2,
        numjobs=4,
        verify="crc32c",
        do_verify=1,
        verify_fatal=1,
    )
    assert_verified(job, 2 * SIZE)


def test_blocks_of_two_mib_go_and_come_by_o_direct(directory):
    """An engine's store: many files, each one whole write, each read back whole."""
    job = fio(
        directory,
        "blocks",
        ioengine="psync",
        rw="write",
        bs="2m",
        filesize=2 * MIB,
        nrfiles=2 * SIZE // MIB,
        size=4 * SIZE,
        direct=1,
        file_service_type="sequential",
        verify="crc32c",
        do_verify=1,
        verify_fatal=1,
        openfiles=8,
    )
    assert_verified(job, 4 * SIZE)
