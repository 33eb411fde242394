"""tools/compare keeps working: this tree against its own commit, at toy size. Which is faster is not asserted."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from benches.compare import CASES, ONE_POOL, main

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT_S = 1800  # most of it builds the commit


def git(*words: str | pathlib.Path) -> str:
    command = ["git", "-C", str(REPOSITORY), *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """HEAD's digits; its tree is built for the test, and goes with it if it was not there before."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs /dev/fuse")
    for program in ("git", "fio", "gcc"):
        if shutil.which(program) is None:
            pytest.skip(f"needs the program {program}")
    if not (REPOSITORY / ".git").exists():
        pytest.skip("needs a clone, this is none")
    digits = git("rev-parse", "HEAD")
    tree = REPOSITORY / "build/compare" / digits[:12]
    before = tree.exists()
    yield digits
    if tree.exists() and not before:
        git("worktree", "remove", "--force", tree)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 30)
def test_a_commit_is_held_against_this_tree_in_pairs(head: str, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "compare.json"
    cases = ["read-4k", "get", "store", "replay-native"]
    words = [head, "--quick", "--rounds", "2", "--cases", ",".join(cases), "-o", output, "--directory", tmp_path]
    command = [REPOSITORY / "tools/compare", *words]
    process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    document = json.loads(output.read_text())
    assert document["failed"] == [] and document["skipped"] == []
    old, new = document["builds"]
    assert (old["name"], old["commit"]) == ("old", head[:12])
    assert new["name"] == "new" and new["commit"].removesuffix("-dirty") == head[:12]
    assert [case["case"] for case in document["cases"]] == cases
    for case in document["cases"]:
        assert [pair["first"] for pair in case["pairs"]] == ["old", "new"]
        assert [pair["pool"] for pair in case["pairs"]] == [0, 1]  # each pair on pools of its own
        assert case["ratio"]["low"] <= case["ratio"]["median"] <= case["ratio"]["high"]
        assert case["old"]["us"] > 0 and case["new"]["us"] > 0
        assert (case["calls"] is not None) == (case["wide"] and not case["figures"])
    replay = document["cases"][-1]
    assert list(replay["figures"]) == ["hits", "load p99 ms", "store p99 ms", "copies a store"]
    for said in replay["figures"].values():
        assert said["old"] >= 0 and said["new"] >= 0
    first = process.stdout.splitlines()
    assert first[0].startswith(f"old {head[:12]}, new {head[:12]}") and len(first) == 2 + len(cases) + 4
    assert [path.name for path in tmp_path.iterdir()] == ["compare.json"]
    assert str(tmp_path) not in pathlib.Path("/proc/self/mountinfo").read_text()


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 30)
def test_both_clients_read_one_pool(head: str, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "compare.json"
    words = [head, "--one-pool", "--quick", "--rounds", "2", "--pools", "2", "-o", output, "--directory", tmp_path]
    command = [REPOSITORY / "tools/compare", *words]
    process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    document = json.loads(output.read_text())
    assert document["failed"] == [] and document["skipped"] == []
    assert [case["case"] for case in document["cases"]] == list(ONE_POOL)
    assert process.stderr.count("making") == 2
    refused = subprocess.run(
        [*command, "--cases", "store"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert refused.returncode == 2 and "store" in refused.stderr


@pytest.mark.parametrize(
    "words",
    [("HEAD", "--cases", "no-such-case"), ("HEAD", "--rounds", "0"), ("HEAD", "--pools", "0"), ("--cases",), ()],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(words)
    except SystemExit as error:  # argparse's own
        status = int(str(error.code))
    said = capsys.readouterr()
    assert status == 2 and len(said.err.splitlines()) == 1 and said.out == ""


def test_a_commit_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-commit"]) == 1
    assert "no-such-commit: no such commit" in capsys.readouterr().err


def test_stores_come_after_reads_of_the_same_pool() -> None:
    """They evict what is read."""
    for kind in ("files", "zram", "nvme"):
        stores = [case.settles for case in CASES.values() if case.kind == kind]
        assert stores == sorted(stores)
