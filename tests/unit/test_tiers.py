"""No test falls out of all tiers: each is in a lane of tools/test, and what is left out is said."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY


def lanes(*words: str) -> dict[str, list[str]]:
    """The output of `tools/test WORDS --lanes`: the paths of each lane, and the options of pytest."""
    said = subprocess.run([REPOSITORY / "tools/test", *words, "--lanes"], capture_output=True, text=True, check=True)
    return {name: rest.split() for name, _, rest in (line.partition(": ") for line in said.stdout.splitlines())}


def paths_of(*words: str) -> list[Path]:
    return [Path(path) for given in lanes(*words).values() for path in given if not path.startswith("-")]


@pytest.mark.parametrize("words", [(), ("--all",)])
def test_each_file_of_tests_is_in_one_lane_of_each_tier(words: tuple[str, ...]) -> None:
    paths = [*paths_of(*words), *paths_of("--engines")]
    for file in (REPOSITORY / "tests").rglob("test_*.py"):
        place = file.relative_to(REPOSITORY)
        assert sum(place.is_relative_to(path) for path in paths) == 1, place


def test_the_tier_of_engines_has_a_lane_for_each_file_of_connectors_and_nothing_else() -> None:
    files = sorted((REPOSITORY / "tests/connectors").glob("test_*.py"))
    assert files and sorted(paths_of("--engines")) == [file.relative_to(REPOSITORY) for file in files]
    assert all("--run-slow" in given for given in lanes("--engines").values())
    # It begins by making the environments, and the other tiers say that they have not run it.
    script = (REPOSITORY / "tools/test").read_text()
    assert "tools/setup-engines ||" in script and "tools/test --engines runs them" in script


def test_a_lane_of_another_tier_is_no_lane_of_the_engines() -> None:
    said = subprocess.run(
        [REPOSITORY / "tools/test", "--engines", "environments", "unit"], capture_output=True, text=True
    )
    assert said.returncode == 2 and "unit is no lane; there are: " in said.stderr and "environments" in said.stderr


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by their names alone: a run of all of them would end with an error."""
    names = sorted(file.name for file in (REPOSITORY / "tests").rglob("test_*.py"))
    assert len(names) == len(set(names)), names


def test_the_slow_ones_run_with_all_in_every_lane() -> None:
    assert all("--run-slow" in given for given in lanes("--all").values())
    assert not any("--run-slow" in given for given in lanes().values())


def test_what_takes_hours_has_a_short_case_with_all_and_reads_how_long() -> None:
    """Each variable by which --long makes a test long is one that a test, or the script itself, reads."""
    script = (REPOSITORY / "tools/test").read_text()
    named = {path for given in lanes("--long").values() for path in given if not path.startswith("-")}
    assert named and all((REPOSITORY / path).exists() for path in named)
    short = paths_of("--all")
    assert all(any(Path(path).is_relative_to(place) for place in short) for path in named)
    texts = [file.read_text() for path in named for file in [*(REPOSITORY / path).glob("*.py"), REPOSITORY / path]
             if file.is_file()]  # fmt: skip
    texts.append((REPOSITORY / "tests/helpers.py").read_text())
    for name in re.findall(r"(KVFS_[A-Z_]+)=\$\{", script):
        assert any(f'"{name}"' in text for text in texts) or f"${name}" in script or f"({name}" in script, name


def test_the_lanes_that_do_io_run_once_more_where_io_uring_is_denied() -> None:
    """Each has a lane with all its files, whose filter takes another way of denying with each fourth of them."""
    script = (REPOSITORY / "tools/test").read_text()
    given = dict(re.findall(r'\[(native|faults)\]="([^"]*)"', re.findall(r"\ndeclare -A denied=\((.*)\)", script)[0]))
    own = lanes("--all")
    for name in ("native", "faults"):
        assert sorted(given[name].split()) == sorted(path for path in own[name] if path != "--run-slow")
        assert f"tests_denied {name}" in script and f"lane_denied-{name}()" in script
    (left_out,) = re.findall(r"build_or_measure='(.*)'", script)
    assert left_out.split("|") == ["test_wheel", "test_bench", "test_compare", "test_takeover_builds"]
    (ordinary,) = re.findall(r"all \|\| lanes=\((.*)\)", script.replace("$tier != all ]", "all"))
    there = set(ordinary.split())
    assert {"denied-native", "denied-faults", "denied-sanitized", "native", "faults", "sanitized"} <= there
    assert " denied-whole " in re.findall(r"long \] \|\| \{ lanes=\((.*?)\)", script)[0]


def test_ci_runs_everything() -> None:
    lines = (REPOSITORY / ".ci/run").read_text().splitlines()
    assert "tools/test --all" in lines and lines[-1] == "tools/test --engines"


@pytest.mark.parametrize(("words", "passed", "left_out"), [
    ((".",), 1, 1), ((".", "--run-slow"), 2, 0), (("test_both.py",), 2, 0), (("test_both.py::test_slow",), 1, 0),
    (("test_quick.py", "."), 1, 1),
])  # fmt: skip
def test_slow_tests_run_when_asked_for_and_are_counted_when_not(
    tmp_path: Path, words: tuple[str, ...], passed: int, left_out: int
) -> None:
    (tmp_path / "conftest.py").write_text((REPOSITORY / "tests/conftest.py").read_text())
    (tmp_path / "test_both.py").write_text(
        "import pytest\n\n@pytest.mark.slow\ndef test_slow():\n    pass\n\ndef test_quick():\n    pass\n"
    )
    (tmp_path / "test_quick.py").write_text("")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *words]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": str(REPOSITORY / "tests"), "PATH": "/usr/bin:/bin"}).stdout  # fmt: skip
    assert f" {passed} passed" in said, said
    assert (f"SLOW: {left_out} tests left out" in said) == bool(left_out), said
