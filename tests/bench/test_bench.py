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

from benches import cases
from benches.common import Row

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT_S = 3000
END_S = 120
# Every case, and the kind of devices that it is run on here; it is toy size on either.
CASES = {
    "random-read": "files",
    "lookup": "zram",
    "rings": "zram",
    "prompt": "zram",
    "large-read": "zram",
    "block-read": "zram",
    "idle": "zram",
    "small-files": "zram",
    "block-write": "zram",
    "slab": "files",
    "native-read": "zram",
    "native-exists": "zram",
    "native-latency": "zram",
    "native-ranges": "zram",
    "native-queue": "files",
    "native-put": "zram",
    "native-processes": "zram",
    "virtiofs": "zram",
    "vhost": "zram",
    "nvme": "zram",
    "take-over": "files",
    "replay": "files",
    "million": "zram",
}
Process = subprocess.CompletedProcess[str]
Result = tuple[dict[str, Any], list[Process], list[pathlib.Path]]


def bench(*words: str, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """One that takes too long is asked to end: killed, it would leave filesystems mounted."""
    command = [REPOSITORY / "tools/bench", *words]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.communicate(timeout=END_S)
            finally:
                process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run with --quick for each kind of devices: what they told together, their processes, their documents."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs /dev/fuse")
    for program in ("fio", "gcc"):
        if shutil.which(program) is None:
            pytest.skip(f"needs the program {program}")
    together: dict[str, Any] = {"rows": [], "skipped": [], "failed": []}
    processes, paths = [], []
    for devices in ("zram", "files"):
        path = tmp_path_factory.mktemp(f"bench-{devices}") / "result.json"
        chosen = ",".join(case for case, kind in CASES.items() if kind == devices)
        words = ("--quick", "--devices", devices, "--only", chosen, "-o", str(path), "--directory", str(path.parent))
        processes.append(bench(*words))
        paths.append(path)
        assert path.exists(), processes[-1].stderr[-3000:]
        document = json.loads(path.read_text())
        assert document["version"] == 1
        for part in together:
            together[part] += document[part]
    return together, processes, paths


def reasons(document: dict[str, Any], case: str, devices: str) -> list[str]:
    return [item["reason"] for item in document["skipped"] if item["case"] == case and item["devices"] == devices]


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + END_S + 10)
def test_no_case_fails(result: Result) -> None:
    document, processes, _ = result
    assert document["failed"] == []
    for process in processes:
        assert process.returncode == 0, process.stderr[-3000:]


def test_every_case_of_the_bench_is_run_here() -> None:
    assert set(CASES) == set(cases.CASES)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "devices"), CASES.items())
@pytest.mark.timeout(TIMEOUT_S + END_S + 10)
def test_every_case_is_measured_or_says_what_is_missing(result: Result, case: str, devices: str) -> None:
    document = result[0]
    rows = [row for row in document["rows"] if (row["case"], row["devices"]) == (case, devices)]
    if not rows:
        assert reasons(document, case, devices), f"{case} on {devices}: neither measured nor skipped"
        pytest.skip("; ".join(reasons(document, case, devices)))
    for row in rows:
        for part in (row["score"], row["kvfs"], *([row["peer"]] if row["peer"] else [])):
            assert_spread(part, row["what"])
        if row["relation"] not in ("extra", "cost"):  # differences: at toy size they are noise
            assert row["score"]["min"] >= 0, row
        if row["relation"] in ("faster", "share"):
            assert row["peer"] and 1e-4 < row["score"]["median"] < 1e4, row
        assert (row["met"] is None) == (row["target"] is None), row


def assert_spread(part: dict[str, Any], what: str) -> None:
    samples: Sequence[float] = part["samples"]
    assert samples and all(math.isfinite(value) for value in samples), what
    assert part["min"] <= part["median"] <= part["max"], what


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + END_S + 10)
def test_ratios_come_first_on_stdout_and_progress_on_stderr(result: Result) -> None:
    document, processes, _ = result
    lines = [line for process in processes for line in process.stdout.splitlines()]
    assert lines[0].startswith("score")
    assert len(lines) > len(document["rows"])
    for process in processes:
        assert "bench: " in process.stderr and "bench: " not in process.stdout


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + END_S + 10)
def test_markdown_holds_a_line_for_every_row(result: Result) -> None:
    document, _, paths = result
    rows = 0
    for path in paths:
        process = bench("--markdown", str(path), timeout_s=60)
        assert process.returncode == 0, process.stderr
        rows += process.stdout.count("\n| ") - 1  # and the head
    assert rows == len(document["rows"])


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + END_S + 10)
def test_nothing_is_left_behind(result: Result) -> None:
    for path in result[2]:
        assert [each.name for each in path.parent.iterdir()] == ["result.json"]
        assert str(path.parent) not in pathlib.Path("/proc/self/mountinfo").read_text()


@pytest.mark.parametrize(
    ("relation", "kvfs", "peer", "target", "score", "met"),
    [
        ("faster", 2.0, 6.0, 2.5, 3.0, True),
        ("faster", 6.0, 2.0, 2.5, 1 / 3, False),
        ("share", 8.0, 10.0, 0.75, 0.8, True),
        ("share", 7.0, 10.0, 0.75, 0.7, False),
        ("cost", 1.1, 1.0, 1.2, 1.1, True),
        ("cost", 1.3, 1.0, 1.2, 1.3, False),
        ("extra", 19.0, 10.0, 10.0, 9.0, True),
        ("extra", 21.0, 10.0, 10.0, 11.0, False),
    ],
)
def test_a_score_is_held_against_its_target(
    relation: str, kvfs: float, peer: float, target: float, score: float, met: bool
) -> None:
    row = Row("case", "zram", "what", "unit", [kvfs], "peer", [peer], relation, target)
    assert row.scores() == pytest.approx([score])
    assert row.met() is met
    assert row.document()["at_most"] is (relation in ("cost", "extra"))


@pytest.mark.parametrize(
    "words", [("--only", "no-such-case"), ("--only", ""), ("--devices", "floppy"), ("--rounds", "0"), ("--nonsense",)]
)
def test_a_wrong_command_line_is_one_line_and_status_2(words: tuple[str, ...]) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "kvfs", "bench", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
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


def test_the_native_client_refuses_what_it_cannot_do(tmp_path: pathlib.Path) -> None:
    client = REPOSITORY / "build/bench/native_client"
    if not client.exists():
        pytest.skip("tools/bench has not built the native client")

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([client, *words], capture_output=True, text=True, timeout=60, check=False)

    assert call().returncode == 2
    assert call("nonsense", "--mount", str(tmp_path)).returncode == 2
    assert call("get").returncode == 2
    assert call("get", "--mount", str(tmp_path), "--count", "1", "--processes", "2").returncode == 2
    assert call("get", "--mount", str(tmp_path), "--processes", "65", "--count", "65").returncode == 1
    # One process that fails ends them all, those that wait for it too.
    stranger = call("get", "--mount", str(tmp_path), "--count", "4", "--processes", "4")
    assert stranger.returncode == 1 and f"connect to {tmp_path}" in stranger.stderr


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + END_S + 10)
def test_exists_is_measured_among_the_blocks_of_the_pool(result: Result) -> None:
    document = result[0]
    rows = [row["what"] for row in document["rows"] if row["case"] in ("native-exists", "million")]
    if not rows:
        pytest.skip("; ".join(reasons(document, "native-exists", "zram")))
    for kind in ("C, hits", "C, misses", "Python, hits", "Python, misses"):
        assert sum(what.startswith("exists for 4,096 keys") and what.endswith(kind) for what in rows) == 2, kind
