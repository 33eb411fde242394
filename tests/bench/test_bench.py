"""The bench keeps working: every case runs at toy size on a real mount, and what it reports is complete and sane.

Speed is not asserted here: on a shared machine only the real run, read by a person, says something about it.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT_S = 280
BOTH = ("zram", "files")
# Every case, and the kinds of devices that it is run on.
CASES = {
    "random-read": BOTH,
    "lookup": ("zram",),
    "prompt": ("zram",),
    "large-read": BOTH,
    "block-read": BOTH,
    "idle": BOTH,
    "small-files": BOTH,
    "block-write": BOTH,
    "million": ("zram",),
}
Result = tuple[dict[str, Any], subprocess.CompletedProcess[str], pathlib.Path]
PAIRS = [(case, devices) for case, kinds in CASES.items() for devices in kinds]


def bench(*words: str, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [REPOSITORY / "tools/bench", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=timeout_s, check=False,
    )


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One run with --quick: its document, its output, and the document's file."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs /dev/fuse")
    for program in ("fio", "gcc"):
        if shutil.which(program) is None:
            pytest.skip(f"needs the program {program}")
    path = tmp_path_factory.mktemp("bench") / "result.json"
    process = bench("--quick", "-o", str(path), "--directory", str(path.parent))
    assert path.exists(), process.stderr[-3000:]
    return json.loads(path.read_text()), process, path


def reasons(document: dict[str, Any], case: str, devices: str) -> list[str]:
    return [item["reason"] for item in document["skipped"] if item["case"] == case and item["devices"] == devices]


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_no_case_fails(result: Result) -> None:
    document, process, _ = result
    assert document["version"] == 1
    assert document["failed"] == []
    assert process.returncode == 0, process.stderr[-3000:]


@pytest.mark.parametrize(("case", "devices"), PAIRS)
@pytest.mark.timeout(TIMEOUT_S + 10)
def test_every_case_is_measured_or_says_what_is_missing(result: Result, case: str, devices: str) -> None:
    document = result[0]
    rows = [row for row in document["rows"] if (row["case"], row["devices"]) == (case, devices)]
    if not rows:
        assert reasons(document, case, devices), f"{case} on {devices}: neither measured nor skipped"
        pytest.skip("; ".join(reasons(document, case, devices)))
    for row in rows:
        for part in (row["score"], row["kvfs"], *([row["peer"]] if row["peer"] else [])):
            assert_spread(part, row["what"])
        if row["relation"] != "extra":
            assert row["score"]["min"] >= 0, row
        if row["relation"] in ("faster", "share"):
            assert row["peer"] and 1e-4 < row["score"]["median"] < 1e4, row
        assert (row["met"] is None) == (row["target"] is None), row


def assert_spread(part: dict[str, Any], what: str) -> None:
    samples: Sequence[float] = part["samples"]
    assert samples and all(math.isfinite(value) for value in samples), what
    assert part["min"] <= part["median"] <= part["max"], what


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_ratios_come_first_on_stdout_and_progress_on_stderr(result: Result) -> None:
    document, process, _ = result
    lines = process.stdout.splitlines()
    assert lines[0].startswith("score")
    assert len(lines) > len(document["rows"])
    assert "bench: " in process.stderr and "bench: " not in process.stdout


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_markdown_holds_a_line_for_every_row(result: Result) -> None:
    document, _, path = result
    process = bench("--markdown", str(path), timeout_s=60)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("\n| ") == len(document["rows"]) + 1  # and the head


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_nothing_is_left_behind(result: Result) -> None:
    directory = result[2].parent
    assert [path.name for path in directory.iterdir()] == ["result.json"]
    assert str(directory) not in pathlib.Path("/proc/self/mountinfo").read_text()


@pytest.mark.timeout(TIMEOUT_S + 10)
def test_the_table_goes_between_the_marks_of_a_page(result: Result, tmp_path: pathlib.Path) -> None:
    document, _, path = result
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench -->\nold\n<!-- /bench -->\nafter\n")
    process = bench("--markdown", str(path), "--into", str(page), timeout_s=60)
    assert process.returncode == 0, process.stderr
    text = page.read_text()
    assert text.startswith("before\n<!-- bench -->\n") and text.endswith("\n<!-- /bench -->\nafter\n")
    assert "\nold\n" not in text and text.count("\n| ") == len(document["rows"]) + 1
    page.write_text("no marks\n")
    assert bench("--markdown", str(path), "--into", str(page), timeout_s=60).returncode == 1
    assert page.read_text() == "no marks\n"


@pytest.mark.parametrize(
    "words", [("--only", "no-such-case"), ("--only", ""), ("--devices", "floppy"), ("--rounds", "0"), ("--nonsense",)]
)
def test_a_wrong_command_line_is_one_line_and_status_2(words: tuple[str, ...]) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "kvfs", "bench", *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=60,
        check=False,
    )
    assert process.returncode == 2
    assert len(process.stderr.splitlines()) == 1, process.stderr
    assert process.stdout == ""


def test_the_client_refuses_what_it_cannot_do(tmp_path: pathlib.Path) -> None:
    client = REPOSITORY / "build/bench/bench_client"
    if not client.exists():
        pytest.skip("tools/bench has not built the client")
    (tmp_path / "short").write_bytes(b"x" * 5000)
    (tmp_path / "list").write_text(f"{tmp_path}/short\n")

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([client, *words], capture_output=True, text=True, timeout=60, check=False)

    assert call().returncode == 2
    assert call("stat", "--size", "100", "--dir", str(tmp_path)).returncode == 2
    short = call("blocks", "--list", str(tmp_path / "list"), "--size", "8192")
    assert short.returncode == 1 and "end of file" in short.stderr
    (tmp_path / f"missing-{7:08x}-{0:08x}").touch()
    present = call("stat", "--dir", str(tmp_path), "--seed", "7")
    assert present.returncode == 1 and "should not be" in present.stderr
