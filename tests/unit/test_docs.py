"""The pages: sentences that are short, links that lead somewhere, files and variables that are there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
WORDS_MOST, COLUMNS_MOST, README_LINES_MOST = 28, 160, 100
# Entries of the changelog were written under an older limit.
CHANGELOG_WORDS_MOST = 40
# Files of pools, of machines and of other projects.
FOREIGN = {"pool.toml", "mount.toml", "node.toml", "prometheus.yml", "configuration.toml", "config.yaml"}
SOURCE = r"[\w@./-]+\.(?:py|cc|c|h|md|svg|json|map|toml|yaml|yml|sh)"
_SENTENCE_END = re.compile(r"(?<=[.!?])[*)\"]*\s+(?=[*(\[\"`]*(?:[A-Z0-9`]|kvfs|lib))")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def _tracked() -> list[str]:
    """Every file of the repository, also one that is not committed yet; of an sdist, all that lies there."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode == 0:
        return [name for name in found.stdout.splitlines() if (ROOT / name).exists()]
    return [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]


FILES = _tracked()


def _prose(text: str) -> Iterator[str]:
    """Paragraphs and list items, without tables, code and headings."""
    part: list[str] = []
    fenced = False
    for line in [*text.splitlines(), ""]:
        if line.startswith("```"):
            fenced = not fenced
        outside = fenced or not line.strip() or line.startswith(("    ", "|", "#", "<", "```"))
        if part and (outside or re.match(r"\s*([-*]|\d+\.) ", line)):
            yield " ".join(part)
            part = []
        if not outside:
            part.append(line.strip())


def _sentences(text: str) -> Iterator[str]:
    for part in _prose(text):
        part = re.sub(r"^([-*]|\d+\.) ", "", part)
        part = re.sub(r"`[^`]*`", "`x`", part)
        part = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", part)
        yield from _SENTENCE_END.split(part)


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_sentences_are_short(page: Path) -> None:
    sentences = list(_sentences(page.read_text()))
    most = CHANGELOG_WORDS_MOST if page.name == "changelog.md" else WORDS_MOST
    assert [f"{len(s.split())}: {s}" for s in sentences if len(s.split()) > most] == []


@pages
def test_lines_fit(page: Path) -> None:
    long = [line for line in page.read_text().splitlines() if len(line) > COLUMNS_MOST and not line.startswith("|")]
    assert long == []


@pages
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{target}: nothing is there"
        assert not anchor or anchor in _anchors(there), f"{target}: no such heading"


@pages
def test_every_file_that_is_named_is_there(page: Path) -> None:
    text = page.read_text()
    if page.name == "changelog.md":  # names of its own time
        return
    for name in re.findall(rf"`({SOURCE})(?:`|::)", text):
        known = name in FOREIGN or name.startswith("/") or any(f"/{file}".endswith(f"/{name}") for file in FILES)
        assert known, f"{name}: no such file"
    for name in re.findall(r"(?<![\w/.-])((?:tests|tools|docs|kvfs|native)/[\w@./-]*[\w])", text):
        if name.startswith(("kvfs/lib", "docs/bench", "native/test/run")):  # made, or made up
            continue
        there = (ROOT / name).exists() or any(f"/{file}".startswith(f"/{name}") for file in FILES)
        assert there, f"{name}: no such file or directory"
    for name, test in re.findall(rf"`({SOURCE})::(\w+)`", text):
        assert re.search(rf"\b{test}\(", (ROOT / name).read_text()), f"{name}: no {test}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < README_LINES_MOST


def test_every_variable_is_in_the_page_on_debugging() -> None:
    """Those that code reads: quoted in Python and C, with a dollar in shell and units."""
    pattern = re.compile(r"[\"'](KVFS_[A-Z0-9_]+)[\"']|\$\{?(KVFS_[A-Z0-9_]+)")
    texts = [
        (ROOT / file).read_text(errors="replace")
        for file in FILES
        if file.endswith((".py", ".c", ".cc", ".h", ".service", ".sh")) or file.startswith(("tools/", "tests/tell"))
    ]
    used = {quoted or expanded for text in texts for quoted, expanded in pattern.findall(text)}
    named = set(re.findall(r"`(KVFS_[A-Z0-9_]+)", (ROOT / "docs/debugging.md").read_text()))
    assert used - named == set(), "not in docs/debugging.md"
    assert named - used == set(), "in docs/debugging.md alone"


def test_the_diagram_is_what_its_script_draws() -> None:
    drawn = subprocess.run([sys.executable, str(ROOT / "tools/diagram")], capture_output=True, text=True, check=True)
    assert drawn.stdout == (ROOT / "docs/kvfs.svg").read_text()
