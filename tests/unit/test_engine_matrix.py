"""tools/engine-matrix with doubles of index, folders, probes and drives: the table, the list it writes, its status."""

from __future__ import annotations

import ast
import datetime
import json
import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY

from engines import environments, index, kvfs_site, matrix, tried
from engines.index import Chosen
from engines.tried import FAILED, NOT_TRIED, PASSED, REFUSED, Row
from kvfs.connectors import tried as listed

DAY = datetime.date(2031, 2, 3)
CHOSEN = [
    Chosen("vllm", "0.33.0", ("newest",)),
    Chosen("vllm", "0.31.0", ("newest", "pinned by a-stack 1.6")),
    Chosen("sglang", "0.5.23", ("newest",)),
    Chosen("sglang", "0.5.9", ("newest",)),
]


def test_the_page_and_the_list_name_the_same_versions_of_the_same_day() -> None:
    """Both are written by one run of tools/engine-matrix --write."""
    date, versions = tried.in_page((REPOSITORY / tried.PAGE).read_text())
    assert date == listed.DATE and versions == listed.VERSIONS


def test_every_test_of_a_drive_is_there() -> None:
    for interface in matrix.INTERFACES:
        for test in interface.drive:
            path, _, name = test.partition("::")
            tree = ast.parse((REPOSITORY / path).read_text())
            assert name.partition("[")[0] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (
                test
            )
    assert {interface.engine for interface in matrix.INTERFACES} == set(index.PROJECTS)


def rows() -> list[Row]:
    return [
        Row("vllm", "0.33.0", ("newest",), PASSED, PASSED, "", 61.4),
        Row("vllm", "0.4.0", ("newest", "pinned by a-stack 1.6"), PASSED, PASSED, "", 5),
        Row("vllm", "0.31.0", ("newest",), PASSED, FAILED, "test_a: wrong bytes", 9),
        Row("a part", "1.0", ("newest",), PASSED, PASSED, "", 1),
        Row("a part", "0.9", ("newest",), REFUSED, NOT_TRIED, "it has no such part", 1),
        Row("a part", "0.8", ("newest",), NOT_TRIED, NOT_TRIED, "the index has no file"),
    ]


def test_the_table_has_a_line_for_each_and_the_reasons_below() -> None:
    assert tried.table(rows()[1:3]).splitlines() == [
        "engine  version  why                            probe   drive   seconds",
        "vllm    0.4.0    newest, pinned by a-stack 1.6  passed  passed  5",
        "vllm    0.31.0   newest                         passed  failed  9",
        "",
        "vllm 0.31.0: test_a: wrong bytes",
    ]


def test_what_passed_is_written_with_the_date_and_read_again(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "kvfs/connectors").mkdir(parents=True)
    page = tmp_path / tried.PAGE
    page.write_text(f"before\n\n{tried.BEGIN}\nold\n{tried.END}\n\nafter\n")
    tried.write(tmp_path, rows(), DAY)
    space: dict[str, object] = {}
    exec((tmp_path / tried.LIST).read_text(), space)
    assert space["DATE"] == "2031-02-03"
    assert space["VERSIONS"] == {"vllm": ("0.4.0", "0.33.0"), "a part": ("1.0",)}
    text = page.read_text()
    assert text.startswith("before\n\n<!--") and text.endswith("-->\n\nafter\n") and "old" not in text
    assert "| vllm | 0.31.0 | newest | passed | failed |\n" in text
    assert "| a part | 0.9 | newest | refused |  |\n" in text
    assert tried.in_page(text) == ("2031-02-03", space["VERSIONS"])
    tried.write(tmp_path, rows(), DAY)
    assert page.read_text() == text


def test_a_run_that_says_too_little_writes_nothing(tmp_path: Path) -> None:
    """No time for one, an engine of which nothing passed, a page without the place for it."""
    late = Row("vllm", "0.32.0", ("newest",), PASSED, NOT_TRIED, "there was no time for its drive")
    with pytest.raises(tried.Refused, match=r"no time for vllm 0\.32\.0; --minutes"):
        tried.write(tmp_path, [*rows(), late], DAY)
    with pytest.raises(tried.Refused, match="no version of nixl has passed"):
        tried.write(tmp_path, [*rows(), Row("nixl", "1.0", (), FAILED, NOT_TRIED)], DAY)
    (tmp_path / "docs").mkdir()
    (tmp_path / tried.PAGE).write_text(tried.BEGIN)
    with pytest.raises(tried.Refused, match="are not there once each"):
        tried.write(tmp_path, rows(), DAY)
    assert not (tmp_path / tried.LIST).exists()


def test_a_version_of_the_list_that_was_not_tried_is_not_dropped(tmp_path: Path) -> None:
    """Its folder could not be had, or its drive was not begun. One that failed is dropped, and so is an old one."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "kvfs/connectors").mkdir(parents=True)
    page, path = tmp_path / tried.PAGE, tmp_path / tried.LIST
    page.write_text(f"{tried.BEGIN}\n{tried.END}\n")
    before = tried.module({"vllm": ("0.2.0", "0.3.0", "0.31.0", "0.33.0"), "a part": ("0.8", "0.9", "1.0")}, DAY)
    path.write_text(before)
    with pytest.raises(tried.Refused, match=r"a part 0.8 is in it, and was not tried: the index has no file"):
        tried.write(tmp_path, rows(), DAY)
    no_drive = Row("vllm", "0.3.0", ("newest",), PASSED, NOT_TRIED, "")
    with pytest.raises(tried.Refused, match=r"vllm 0.3.0 is in it"):
        tried.write(tmp_path, [*rows()[:-1], no_drive], DAY)
    failed = Row("vllm", "0.3.0", ("newest",), FAILED, NOT_TRIED, "it lacks a name")
    assert path.read_text() == before
    tried.write(tmp_path, [*rows()[:-1], failed], DAY)
    assert tried.listed(tmp_path) == {"vllm": ("0.4.0", "0.33.0"), "a part": ("1.0",)}


def test_the_list_is_as_the_tool_writes_it() -> None:
    written = (REPOSITORY / tried.LIST).read_text()
    assert tried.module(listed.VERSIONS, datetime.date.fromisoformat(listed.DATE)) == written


# ---- the run ----


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders that are there but for SGLang 0.5.9, probes and drives that pass."""
    monkeypatch.setenv("KVFS_ENGINES", str(tmp_path / "engines"))
    monkeypatch.setattr(index, "choose", lambda: CHOSEN)
    monkeypatch.setattr(environments, "is_there", lambda name, version: version != "0.5.9")
    monkeypatch.setattr(index, "project", lambda name: index.Project(name, "0.5.23", frozenset({"0.5.23"}), ()))
    monkeypatch.setattr(kvfs_site, "install_kvfs", lambda: None)
    monkeypatch.setattr(matrix, "probed", lambda interface, version, timeout_s: (PASSED, ""))
    monkeypatch.setattr(matrix, "driven", lambda interface, version, timeout_s: (PASSED, ""))
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["engine-matrix", *words])
    return matrix.main()


def test_a_folder_that_cannot_be_had_is_not_tried_and_no_failure(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert [(row["interface"], row["version"], row["probe"], row["drive"]) for row in said] == [
        ("vllm", "0.33.0", PASSED, PASSED),
        ("vllm", "0.31.0", PASSED, PASSED),
        ("sglang", "0.5.23", PASSED, PASSED),
        ("sglang", "0.5.9", NOT_TRIED, NOT_TRIED),
        ("sglang linker", "0.5.23", PASSED, PASSED),
        ("sglang linker", "0.5.9", NOT_TRIED, NOT_TRIED),
    ]
    assert said[3]["detail"] == "the index has no sglang 0.5.9"
    assert run(monkeypatch) == 0 and "sglang 0.5.9: the index has no" in capsys.readouterr().out


def test_what_a_connector_does_without_is_told_and_no_failure(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "probed", lambda interface, version, timeout_s: (PASSED, "it does without a._m"))
    assert run(monkeypatch, "--only", "vllm==0.31.0") == 0
    assert "vllm 0.31.0: it does without a._m" in capsys.readouterr().out


def test_a_version_that_fails_is_the_status_and_one_that_is_refused_is_not(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def probed(interface: matrix.Interface, version: str, timeout_s: float) -> tuple[str, str]:
        return (REFUSED, "no such part") if interface.name == "sglang linker" else (PASSED, "")

    monkeypatch.setattr(matrix, "probed", probed)
    assert run(monkeypatch, "--probe") == 0
    assert "sglang linker 0.5.23: no such part" in capsys.readouterr().out
    monkeypatch.setattr(matrix, "driven", lambda interface, version, timeout_s: (FAILED, "test_a: wrong bytes"))
    assert run(monkeypatch, "--only", "vllm==0.31.0") == 1
    said = capsys.readouterr().out
    assert "vllm 0.31.0: test_a: wrong bytes" in said and "0.33.0" not in said and "sglang" not in said


def test_a_new_version_that_fails_is_no_failure_of_those_that_are_known(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "probed", lambda interface, version, timeout_s: (FAILED, "no such part"))
    monkeypatch.setattr(matrix, "VERSIONS", {"vllm": ("0.31.0",)})
    assert run(monkeypatch, "--probe", "--known", "--only", "vllm==0.33.0") == 0
    assert "vllm 0.33.0 failed, and is not in the list" in capsys.readouterr().err
    assert run(monkeypatch, "--probe", "--only", "vllm==0.33.0") == 1
    assert run(monkeypatch, "--probe", "--known", "--only", "vllm") == 1


def test_without_time_nothing_is_begun_and_the_list_stays(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--minutes", "0", "--write") == 1
    said = capsys.readouterr()
    assert said.out.count("there was no time for its probe") == 4 and "was no time to make its folder" in said.out
    assert "tried.py is not written" in said.err


def test_where_the_index_is_away_the_versions_are_those_of_the_last_time(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def away() -> list[Chosen]:
        raise index.Bad("the index is away")

    assert matrix.versions() == CHOSEN
    monkeypatch.setattr(index, "choose", away)
    assert matrix.versions() == CHOSEN and run(monkeypatch, "--plan") == 0
    assert "vllm 0.31.0: newest, pinned by a-stack 1.6\n" in capsys.readouterr().out
    saved = environments.directory() / matrix.SAVED
    for bad in ("", "null", "[1]", [{"engine": "vllm", "version": "../..", "why": []}], [{"engine": "no"}]):
        saved.write_text(bad if isinstance(bad, str) else json.dumps(bad))
        with pytest.raises(index.Bad):
            matrix.versions()
    saved.unlink()
    assert run(monkeypatch) == matrix.NOTHING_TRIED


# ---- one version ----


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The engine's Python, a script of the test's."""
    monkeypatch.setattr(environments, "place", lambda name, version: tmp_path)
    (tmp_path / "bin").mkdir()
    path = tmp_path / "bin/python"
    path.touch(0o755)
    return path


@pytest.mark.parametrize(
    ("output", "name", "outcome"),
    [
        ("echo noise; echo '{\"missing\": []}'", "vllm", (PASSED, "")),
        ('echo \'{"missing": ["a", "b"]}\'', "vllm", (FAILED, "a; b")),
        ('echo \'{"missing": ["import kvfs.connectors.x"]}\'', "vllm", (FAILED, "import kvfs.connectors.x")),
        (
            'echo \'{"missing": ["import kvfs.connectors.x"]}\'',
            "sglang linker",
            (REFUSED, "import kvfs.connectors.x"),
        ),
        ('echo \'{"missing": ["a"]}\'', "sglang linker", (FAILED, "a")),
        ('echo \'{"missing": [], "without": ["a", "b"]}\'', "vllm", (PASSED, "it does without a; b")),
        ("echo Segmentation fault; exit 3", "vllm", (FAILED, "the probe ended with 3: Segmentation fault")),
        ("true", "vllm", (FAILED, "the probe ended with 0: ")),
    ],
)
def test_a_probe_says_what_is_missing(python: Path, output: str, name: str, outcome: tuple[str, str]) -> None:
    python.write_text(f"#!/bin/sh\n{output}\n")
    interface = next(each for each in matrix.INTERFACES if each.name == name)
    assert matrix.probed(interface, "1.0", 60) == outcome


def test_a_probe_that_does_not_end_is_ended(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "END_TIMEOUT_S", 0.1)
    python.write_text("#!/bin/sh\nsleep 600\n")
    assert matrix.probed(matrix.INTERFACES[0], "1.0", 1) == (FAILED, "the probe had not ended after 1 s")


def test_a_drive_passes_if_each_of_its_tests_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = tmp_path / "drive_it.py"
    tests.write_text(
        "import os, pytest\n"
        "def test_good(): assert os.environ['KVFS_ENGINE_VERSIONS'] == 'vllm==1.0'\n"
        "def test_bad(): assert False, 'wrong bytes'\n"
        "def test_skipped(): pytest.skip('NOT RUN: no folder')\n"
    )
    monkeypatch.setattr(matrix, "REPOSITORY", tmp_path)
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--run-slow', action='store_true')\n"
    )

    def driven(*names: str) -> tuple[str, str]:
        interface = matrix.Interface("vllm", "vllm", tuple(f"drive_it.py::{name}" for name in names))
        return matrix.driven(interface, "1.0", 120)

    assert driven("test_good") == (PASSED, "")
    outcome, detail = driven("test_good", "test_bad")
    assert outcome == FAILED and "test_bad: AssertionError: wrong bytes" in detail
    assert driven("test_good", "test_skipped") == (FAILED, "test_skipped: NOT RUN: no folder")
    assert driven("test_gone")[0] == FAILED
    assert (tmp_path / "build/matrix/vllm-1.0.log").exists()


def test_a_drive_that_the_clock_cuts_is_not_tried_and_one_that_hangs_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "drive_it.py").write_text("import time\ndef test_long(): time.sleep(600)\n")
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--run-slow', action='store_true')\n"
    )
    monkeypatch.setattr(matrix, "REPOSITORY", tmp_path)
    monkeypatch.setattr(matrix, "END_TIMEOUT_S", 0.1)
    interface = matrix.Interface("vllm", "vllm", ("drive_it.py::test_long",))
    assert matrix.driven(interface, "1.0", 1) == (
        NOT_TRIED, "there was no time for the end of its drive, cut after 1 s",
    )  # fmt: skip
    monkeypatch.setattr(matrix, "DRIVE_TIMEOUT_S", 1)
    outcome, detail = matrix.driven(interface, "1.0", 1)
    assert outcome == FAILED and detail.startswith("the drive had not ended after 1 s")
