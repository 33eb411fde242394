"""docs/grafana.json: rows, a description of each panel, and one unit an axis."""

from __future__ import annotations

import json
import re
from typing import Any

from helpers import REPOSITORY

PANELS: list[dict[str, Any]] = json.loads((REPOSITORY / "docs" / "grafana.json").read_text())["panels"]


def unit_of(expression: str) -> str:
    """The unit of what an expression of Prometheus gives, by the names that it has."""
    if " / " in expression:
        return "percentunit"
    if expression.startswith("histogram_quantile(") or "_seconds{" in expression:
        return "s"
    is_rate, is_bytes = "rate(" in expression, re.search(r"_bytes(_total)?\{", expression) is not None
    return ("Bps" if is_bytes else "ops") if is_rate else ("bytes" if is_bytes else "short")


def test_each_axis_has_one_unit() -> None:
    for panel in PANELS:
        for target in panel.get("targets", ()):
            unit = panel["fieldConfig"]["defaults"]["unit"]
            assert unit_of(target["expr"]) == unit, f"{panel['title']}: {target['expr']}"


def test_each_panel_and_each_row_says_what_it_is() -> None:
    assert PANELS[0]["type"] == "row" and sum(panel["type"] == "row" for panel in PANELS) >= 4
    for panel in PANELS:
        assert len(panel["description"].split()) > 4, panel["title"]
        assert panel["type"] == "row" or panel["fieldConfig"]["defaults"]["custom"]["axisLabel"], panel["title"]
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


def test_no_two_panels_lie_on_each_other_and_none_leaves_the_page() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
