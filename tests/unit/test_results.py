"""The lab book of measurements, and the page that repeats its latest figures."""

from __future__ import annotations

import re
import subprocess
from datetime import date

import pytest
from helpers import REPOSITORY

from benches import results


@pytest.fixture(scope="module")
def records() -> list[results.Result]:
    return results.load()


def test_every_record_says_what_was_measured_and_what_came_out(records: list[results.Result]) -> None:
    for record in records:
        assert record.section and record.what and record.page in ("results", "experiments"), record
        assert record.figures or record.note or record.command, record
        assert date.fromisoformat(re.sub(r"before (\S+) .*", r"\1", record.date or record.written)), record
        assert re.fullmatch(r"|[0-9a-f]{7,40}", record.commit), record


def test_the_page_has_no_figure_that_the_records_do_not_have(records: list[results.Result]) -> None:
    """A row's figures are those of one record: its cells, its date and its run."""
    page = (REPOSITORY / "docs/performance.md").read_text()
    rows = re.findall(r"^\| (?!measured|run|[A-Z]{1,2} \||-)(.*) \|$", page, re.M)
    assert len(rows) > 100
    texts = [" ".join([*record.figures.values(), record.date]) for record in records]
    for row in rows:
        _, _, *figures, origin = [cell.strip() for cell in row.split("|")]
        wanted = [part for cell in figures for part in re.split(r" \(io_uring\)", cell) if part]
        day = re.match(r"[^,]*", origin)
        assert day and wanted, row
        assert any(all(part in text for part in [*wanted, day.group()]) for text in texts), row


def test_each_run_of_the_page_has_its_command() -> None:
    page = (REPOSITORY / "docs/performance.md").read_text()
    named = set(re.findall(r"^\| .*, ([A-Z]{1,2}) \|$", page, re.M))
    explained = set(re.findall(r"^\| ([A-Z]{1,2}) \| .*`", page, re.M))
    assert named and named == explained


def test_a_pattern_chooses_records() -> None:
    two = [
        results.Result("slabs", "reads", date="2026-01-02", command="a\nb", figures={"ratio": "0.9x", "run": "Q"}),
        results.Result("puts", "64 KiB", written="2026-01-03", commit="abcdef0", note="Slower."),
    ]
    slab = "== slabs\nreads\n    ratio: 0.9x\n    run: Q\n    2026-01-02\n    $ a\n    $ b"
    put = "== puts\n64 KiB\n    written down 2026-01-03, build abcdef0\n    Slower."
    assert results.render(two) == f"{slab}\n\n{put}"
    assert results.render(two, "run q") == results.render(two, "SLABS") == slab
    assert results.render(two, "slower") == results.render(two, "abcdef0") == put
    assert results.render(two, "neither") == ""


def test_the_command_prints_them_without_building_anything() -> None:
    def bench(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(REPOSITORY / "tools/bench"), "--results", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={"PATH": "/bin"})

    found = bench("prefix hits, conversation trace, pool of 5 %")
    assert found.returncode == 0 and "== Results" in found.stdout and "kvfs: 0.211" in found.stdout, found.stderr
    assert bench("no such measurement").returncode == 1
    wrong = bench("(")
    assert wrong.returncode == 2 and "--results" in wrong.stderr
