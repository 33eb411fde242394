"""`tools/bench --results [PATTERN]`: the lab book, results.json, one record a measurement.

A record has a `section` and says `what` was measured; `figures` are by name, as they were written down. Dates, commits,
commands and notes follow where they are known. docs/performance.md repeats the latest figures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Result:
    section: str
    what: str
    page: str = "results"  # "experiments": tried, or read by hand
    date: str = ""
    written: str = ""  # of a figure without a date: the day on which it was written down
    commit: str = ""
    command: str = ""
    figures: dict[str, str] = field(default_factory=dict)
    note: str = ""

    def text(self) -> str:
        """Everything that a pattern may match."""
        run = f"run {self.figures['run']}" if "run" in self.figures else ""
        figures = " ".join(f"{name} {figure}" for name, figure in self.figures.items())
        return "\n".join((self.section, self.what, self.date, self.commit, self.command, run, figures, self.note))


def load(path: Path = RESULTS) -> list[Result]:
    """Return all records, in the order of the file."""
    return [Result(**record) for record in json.loads(path.read_text())]


def render(results: Iterable[Result], pattern: str = "") -> str:
    """Return the records that match a regular expression, whatever the case of its letters, below their sections.

    Raises re.error.
    """
    wanted = re.compile(pattern, re.IGNORECASE)
    lines: list[str] = []
    section = ""
    for result in results:
        if not wanted.search(result.text()):
            continue
        if result.section != section:
            section = result.section
            lines += [*([""] if lines else []), f"== {section}"]
        lines.append(f"{result.what}")
        when = result.date or (result.written and f"written down {result.written}")
        origin = ", ".join(filter(None, (when, result.commit and f"build {result.commit}")))
        lines += [f"    {name}: {figure}" for name, figure in result.figures.items()]
        lines += [f"    {origin}"] if origin else []
        lines += [f"    $ {line}" for line in result.command.splitlines()]
        lines += [f"    {result.note}"] if result.note else []
    return "\n".join(lines)
