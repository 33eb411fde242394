"""`kvfs bench` without a device: what is measured, how percentiles are read, and the sentence of the limit."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs import cli
from kvfs.bench.engine import BUCKETS, Measured, bucket_from_ns
from kvfs.bench.limit import Limit, Seen, growth, limit, rate, raw_limit
from kvfs.bench.plan import BLOCK_SIZES, DEPTHS, ROUNDS, Cell, Side, Work, plan, prepare_s, store_limit
from kvfs.bench.report import Outcome, document, misses_note, render
from kvfs.bench.targets import DevicesTarget, DirectoryTarget, target_of
from kvfs.errors import KvfsError, UsageError

GB = 1e9
MIB2 = 2 << 20


# ---- the plan ----


def test_each_work_is_done_by_each_side_and_the_time_is_shared() -> None:
    made = plan(tuple(Side), tuple(Work), 60.0)
    cells = [cell for row in made.rows for cell in row]
    assert len(cells) == len(set(cells)) == 2 * 2 * 3 * 3 + 2 * 3
    assert made.runs == ROUNDS * len(cells) and made.runs * made.cell_s == pytest.approx(60.0)
    assert {(cell.block_size, cell.depth) for cell in cells if cell.work is Work.READS} == set(
        itertools.product(BLOCK_SIZES, DEPTHS)
    )
    assert not [cell for cell in cells if (cell.work, cell.side) == (Work.LOOKUPS, Side.RAW)]
    # A row has the cells that are compared.
    assert all(len({(cell.work, cell.block_size, cell.depth) for cell in row}) == 1 for row in made.rows)


def test_without_kvfs_only_raw_work_is_planned() -> None:
    made = plan((Side.RAW,), (Work.READS,), 6.0)
    assert {(cell.work, cell.side) for row in made.rows for cell in row} == {(Work.READS, Side.RAW)}
    assert made.cell_s == pytest.approx(0.5)


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("work", Work)
@pytest.mark.parametrize("depth", DEPTHS)
def test_so_many_blocks_are_under_way_as_the_depth_says(work: Work, side: Side, depth: int) -> None:
    cell = Cell(work, side, MIB2, depth)
    assert cell.threads * cell.batch == depth and cell.threads <= 32
    assert cell.batch == (min(depth, 8) if (work, side) == (Work.STORES, Side.NATIVE) else 1)


def test_stores_are_bounded_by_the_room() -> None:
    assert store_limit(8 << 30) == 512 << 20  # beside it as many to read: an eighth
    assert store_limit(1 << 50) == 1 << 30
    assert prepare_s(60) == 3 and prepare_s(3) == 0.5


# ---- latencies ----


def test_buckets_meet_and_percentiles_lie_in_them() -> None:
    starts = [bucket_from_ns(bucket) for bucket in range(8)] + [bucket_from_ns(bucket) for bucket in range(24, BUCKETS)]
    assert starts == sorted(starts) and starts[:9] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    measured = Measured()
    assert measured.percentile_ns(50) == 0
    bucket = next(bucket for bucket in range(24, BUCKETS) if bucket_from_ns(bucket) >= 1e5)
    measured.histogram[bucket] = 99
    measured.histogram[bucket + 40] = 1
    assert (
        bucket_from_ns(bucket) < measured.percentile_ns(50) < measured.percentile_ns(99) <= bucket_from_ns(bucket + 1)
    )
    assert measured.percentile_ns(99.9) >= bucket_from_ns(bucket + 40)


def test_rounds_of_a_cell_add_up() -> None:
    measured = Measured()
    measured.add(Measured(10, 1, 2.0, 3.0, 2.0, 1.0))
    measured.add(Measured(20, 0, 1.0, 1.0, 1.0, 0.5))
    assert (measured.blocks, measured.misses, measured.seconds, measured.blocks_per_s) == (30, 1, 3.0, 10.0)


# ---- the sentence ----


def seen(*rates: float, busy: float = 0.3, own: float = 0.3, thread: float = 0.2) -> list[Seen]:
    return [Seen(depth, value * GB, busy, own, thread) for depth, value in zip(DEPTHS, rates, strict=True)]


def reads(ours: list[Seen], raw: list[Seen]) -> Limit:
    return limit("reads", "libkvfs", MIB2, ours, raw, 4)


def test_near_what_they_give_raw_the_devices_are_the_limit() -> None:
    assert reads(seen(0.5, 2.1, 2.134), seen(0.6, 2.2, 2.2)) == Limit(
        "devices",
        "the devices: libkvfs reads 0.97 of what they give raw (2.13 of 2.20 GB/s in blocks of 2M, 32 at once)",
    )


def test_devices_that_give_more_with_more_at_once_are_told_of() -> None:
    found = reads(seen(0.5, 2.1, 3.0), seen(0.6, 2.2, 3.2))
    assert found.cause == "devices" and found.text.endswith("; 32 at once give 45% more than 8, so more may give more")


def test_exactly_at_the_bound_the_devices_are_the_limit() -> None:
    assert reads(seen(1, 1, 1.7), seen(1, 2, 2)).cause == "devices"
    assert reads(seen(1, 1, 1.69), seen(1, 2, 2)).cause != "devices"


def test_busy_cores_are_the_limit() -> None:
    found = reads(seen(0.5, 1.0, 1.0, busy=0.95, own=0.9), seen(1, 2, 2))
    assert found.cause == "cpu" and found.text.startswith("the CPU: 4 cores are 95% busy; libkvfs reads 0.50 of what")
    found = reads(seen(0.5, 1.0, 1.0, busy=1.02, own=0.1), seen(1, 2, 2))
    assert "4 cores are 100% busy, with other processes most of it (10% are kvfs's); " in found.text


def test_one_busy_thread_is_the_limit() -> None:
    found = reads(seen(0.5, 1.0, 1.0, thread=0.98), seen(1, 2, 2))
    assert found.cause == "cpu" and "one thread uses 98% of a core" in found.text


def test_latency_is_the_limit_where_more_at_once_still_help() -> None:
    found = reads(seen(0.2, 0.8, 1.2), seen(1, 2, 2))
    assert found.cause == "latency" and found.text.startswith("latency: 32 at once give 50% more than 8, so more may")


def test_else_it_is_kvfs() -> None:
    found = reads(seen(0.5, 1.0, 1.05), seen(1, 2, 2))
    assert found.cause == "kvfs" and "more at once do not help (+5%), and the cores are 30% busy" in found.text


def test_without_kvfs_the_devices_or_latency_or_the_cpu() -> None:
    assert raw_limit("reads", MIB2, seen(1, 2, 2.1), 4) == Limit(
        "devices", "the devices: 2.10 GB/s of reads in blocks of 2M; 32 at once give no more than 8 (+5%)"
    )
    assert raw_limit("reads", MIB2, seen(1, 2, 3), 4).cause == "latency"
    assert raw_limit("stores", MIB2, seen(1, 2, 3, busy=0.9, own=0.5), 1).text.startswith(
        "the CPU: 1 core is 90% busy, at 3"
    )


def test_nothing_measured_is_no_limit() -> None:
    assert reads(seen(0, 0, 0), seen(1, 2, 2)).cause == "none"
    assert raw_limit("reads", MIB2, seen(0, 0, 0), 4).cause == "none"
    assert growth([]) == 0


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.000"), (0.0123, "0.012"), (2.1, "2.10"), (12.34, "12.3"), (123.4, "123")]
)
def test_rates_have_three_digits(value: float, text: str) -> None:
    assert rate(value * GB) == text


# ---- the report ----


def outcome(sides: tuple[Side, ...], works: tuple[Work, ...]) -> Outcome:
    made = Outcome("pool", "pool /srv/pool at /mnt/kv, 1.00T", 4, 60.0)
    for row in plan(sides, works, 60.0).rows:
        for cell in row:
            measured = Measured(1000 * cell.depth, 0, 1.0, 1.0, 1.0, 0.2)
            measured.histogram[140] = 1000
            made.cells[cell] = measured
    return made


def test_the_report_has_a_line_for_each_row_and_ends_with_the_limits() -> None:
    made = outcome(tuple(Side), tuple(Work))
    lines = render(made).splitlines()
    assert (
        sum(line.startswith("blocks of 64K") for line in lines)
        == sum(line.startswith("blocks of 2M") for line in lines)
        == 6
    )
    assert lines[-2].startswith(
        "Limit of reads: the devices: libkvfs reads 1.00 of what they give raw (67.1 of 67.1 GB/s"
    )
    assert lines[-1].startswith("Limit of stores: ") and lines[-1].endswith(".")
    assert max(map(len, lines[:-2])) <= 120
    assert lines[0] == "pool /srv/pool at /mnt/kv, 1.00T: 1 min 0 s, 4 cores"
    written = document(made)
    assert set(written) == {"kind", "target", "cores", "seconds", "cells", "limits", "notes"}
    assert set(written["limits"]) == {"reads", "stores"}  # type: ignore[call-overload]


def test_a_slow_device_is_named() -> None:
    made = outcome((Side.RAW,), (Work.READS,))
    made.alone = {"/dev/a": 2.0 * GB, "/dev/b": 1.9 * GB, "/dev/c": 1.0 * GB}
    lines = render(made).splitlines()
    assert "  /dev/b  1.90 GB/s" in lines and "  /dev/c  1.00 GB/s  0.50 of the fastest" in lines


def test_misses_are_told_of_where_they_count() -> None:
    cell = Cell(Work.READS, Side.NATIVE, MIB2, 1)
    assert misses_note({cell: Measured(1000, 10)}) == []
    assert misses_note({cell: Measured(900, 100)})[0].startswith("10% of what was read had been evicted")


# ---- what can be measured ----


def test_targets_that_make_no_sense_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(64))
    directory = str(tmp_path)
    assert isinstance(target_of([directory], write=False), DirectoryTarget)
    assert isinstance(target_of([str(file)], write=False), DevicesTarget)
    with pytest.raises(UsageError, match="--write: of devices alone"):
        target_of([directory], write=True)
    with pytest.raises(UsageError, match="a directory; several can be measured together only"):
        target_of([str(file), directory], write=False)
    with pytest.raises(UsageError, match="block devices and files can be measured"):
        target_of(["nvme-tcp://10.0.0.1:4420/nqn.x?nsid=1"], write=False)
    with pytest.raises(KvfsError, match=r"file: 64; at least 2M"), target_of([str(file)], write=False):
        pass
    (tmp_path / "pool.toml").touch()
    with pytest.raises(KvfsError, match=r"not mounted: kvfs mount .* MOUNTPOINT first"):
        target_of([directory], write=False)
    assert cli.main(["bench", str(file), "--seconds", "1"]) == 2
    assert "at least 3 are needed" in capsys.readouterr().err


def test_a_client_s_installation_can_measure_a_pool() -> None:
    """It has none of the daemon's packages."""
    code = "import sys; sys.modules |= dict.fromkeys(['trio', 'lmdb', 'xxhash', 'pyfuse3']); import kvfs.bench.targets"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_file_that_holds_something_is_not_written_to(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(4 << 20))
    before = file.read_bytes()
    with (
        pytest.raises(KvfsError, match=r"file: holds .*; --write would destroy it"),
        target_of([str(file)], write=True),
    ):
        pass
    assert file.read_bytes() == before
