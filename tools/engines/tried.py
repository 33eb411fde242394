"""The outcome of tools/engine-matrix: its table, and the list that connectors and docs name, with the date."""

from __future__ import annotations

import datetime
import re
import runpy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.index import key_of

PASSED, FAILED, REFUSED, NOT_TRIED = "passed", "failed", "refused", "not tried"
LIST = "kvfs/connectors/tried.py"
PAGE = "docs/engines.md"
BEGIN, END = "<!-- engine-matrix: begin -->", "<!-- engine-matrix: end -->"
REASON_MOST = 600  # characters
_COLUMNS = ("engine", "version", "why", "probe", "drive")


class Refused(Exception):
    """The list is not written: the run does not say enough."""


@dataclass
class Row:
    """One version of an engine, or of a part of it. detail: what failed, or why it was not tried."""

    interface: str
    version: str
    why: tuple[str, ...]
    probe: str
    drive: str
    detail: str = ""
    seconds: float = 0.0


def table(rows: Iterable[Row]) -> str:
    """For a terminal: a line for each row, and the reasons below."""
    rows = list(rows)
    lines = [(*_COLUMNS, "seconds")]
    lines += [
        (row.interface, row.version, ", ".join(row.why), row.probe, row.drive, f"{row.seconds:.0f}") for row in rows
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    padded = ([f"{word:{width}}" for word, width in zip(line, widths, strict=True)] for line in lines)
    text = "\n".join("  ".join(words).rstrip() for words in padded)
    reasons = [f"{row.interface} {row.version}: {row.detail[:REASON_MOST]}" for row in rows if row.detail]
    return "\n".join([text, *(["", *reasons] if reasons else [])])


def passed(rows: Iterable[Row]) -> dict[str, tuple[str, ...]]:
    """By interface, in its order, the versions that passed probe and drive, the oldest first."""
    found: dict[str, list[str]] = {}
    for row in rows:
        versions = found.setdefault(row.interface, [])
        if (row.probe, row.drive) == (PASSED, PASSED):
            versions.append(row.version)
    return {interface: tuple(sorted(versions, key=key_of)) for interface, versions in found.items()}


def module(versions: dict[str, tuple[str, ...]], date: datetime.date) -> str:
    """kvfs/connectors/tried.py."""
    lines = [
        '"""Versions of each engine that kvfs passed with. `tools/engine-matrix --write` writes this file.',
        "",
        "One line for each engine: native/shims/nixl/Makefile takes NIXL's out of here.",
        '"""',
        "",
        f'DATE = "{date.isoformat()}"',
        "VERSIONS: dict[str, tuple[str, ...]] = {",
    ]
    for interface, those in versions.items():
        words = ", ".join(f'"{version}"' for version in those)
        lines.append(f'    "{interface}": ({words}{"," if len(those) == 1 else ""}),')
    return "\n".join([*lines, "}", ""])


def markdown(rows: Sequence[Row], date: datetime.date) -> str:
    """The table of docs/engines.md, between its marks."""
    lines = [
        BEGIN,
        f"`tools/engine-matrix` wrote this table on {date.isoformat()}:",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|" + "---|" * len(_COLUMNS),
    ]
    for row in rows:
        drive = "" if row.drive == NOT_TRIED else row.drive
        lines.append(f"| {row.interface} | {row.version} | {', '.join(row.why)} | {row.probe} | {drive} |")
    return "\n".join([*lines, END])


def in_page(page: str) -> tuple[str, dict[str, tuple[str, ...]]]:
    """The date in a page's table, and by engine the versions that it says have passed, the oldest first."""
    part = page[page.index(BEGIN) : page.index(END)]
    date = re.search(r"on (\d{4}-\d\d-\d\d):", part)
    assert date is not None, f"no date between {BEGIN} and {END}"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"]
    rows = [Row(cell[0], cell[1], (cell[2],), cell[3], cell[4]) for cell in cells[2:]]
    return date[1], passed(rows)


def listed(repository: Path) -> dict[str, tuple[str, ...]]:
    """The list as it is; nothing where there is none yet."""
    path = repository / LIST
    return dict(runpy.run_path(str(path))["VERSIONS"]) if path.exists() else {}


def write(repository: Path, rows: Sequence[Row], date: datetime.date) -> None:
    """Write the list and the table. Raises Refused where the list would lose what it had. Then a version was left out
    for want of time, one of the list was not tried, or no version of an engine has passed."""
    late = [row for row in rows if "there was no time" in row.detail]
    if late:
        raise Refused(f"{LIST} is not written: there was no time for {late[0].interface} {late[0].version}; --minutes")
    versions, before = passed(rows), listed(repository)
    not_tried = [row for row in rows if row.probe == NOT_TRIED or (row.probe, row.drive) == (PASSED, NOT_TRIED)]
    if lost := [row for row in not_tried if row.version in before.get(row.interface, ())]:
        named = f"{lost[0].interface} {lost[0].version}"
        raise Refused(f"{LIST} is not written: {named} is in it, and was not tried: {lost[0].detail[:REASON_MOST]}")
    if without := [interface for interface, those in versions.items() if not those]:
        raise Refused(f"{LIST} is not written: no version of {without[0]} has passed")
    page = repository / PAGE
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise Refused(f"{page}: {BEGIN} and {END} are not there once each")
    (repository / LIST).write_text(module(versions, date))
    page.write_text(text[: text.index(BEGIN)] + markdown(rows, date) + text[text.index(END) + len(END) :])
