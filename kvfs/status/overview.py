"""All mounted pools as a table, a line for each: `kvfs status` without a pool."""

from __future__ import annotations

from collections.abc import Sequence

from kvfs.errors import printable
from kvfs.status.numbers import Json, asked_and_found, items, number, section, table
from kvfs.status.text import advice
from kvfs.units import size_text

_HEADS = ("pool", "mounted at", "state", "size", "used", "blocks", "found", "advice")


def render_overview(documents: Sequence[Json]) -> str:
    """Columns of status documents; an empty text for no pool."""
    if not documents:
        return ""
    return "\n".join(table([list(_HEADS), *map(_row, documents)], left=3))


def _row(document: Json) -> list[str]:
    pool, size, used = section(document, "pool"), number(document, "space", "size"), number(document, "space", "used")
    places = [str(item.get("mountpoint")) for item in items(document, "mounts")]
    places += [str(item.get("socket")) for item in items(document, "exports")]
    _, share = asked_and_found(section(document, "counters"))
    notes = len(advice(document))
    return [
        printable(str(pool.get("path"))),
        printable(", ".join(places)) or "-",
        str(pool.get("state")),
        size_text(size),
        f"{used * 100 / size:.0f}%" if size else "-",
        f"{number(document, 'blocks'):.0f}",
        "-" if share is None else f"{share * 100:.1f}%",
        f"{notes}: kvfs status {printable(str(pool.get('path')))}" if notes else "none",
    ]
