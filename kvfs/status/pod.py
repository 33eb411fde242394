"""A pod's part of a status document: its lines in `kvfs status`, `stats` and `top`, and its words for Prometheus.

Pure: documents in, lines and samples out. The document has it as `pod` (kvfs/daemon/pod.py); a pool without one, none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvfs.status.numbers import Json, count_text, items, number, section, table, time_text
from kvfs.units import counted, size_text

_ROWS_MAX = 16
# Of an owner and of the node: those that only grow.
OWNER_COUNTERS = {
    "batches": "Batches of news of a node that were applied here.",
    "size": "Bytes of those.",
    "gaps": "Gaps in a node's news: one or more batches were missed.",
    "asks": "Times that this node asked another to repeat its news.",
    "repeats": "Batches that a node repeated for this one.",
    "duplicates": "Batches of a node that came twice, and were dropped.",
    "damaged": "Batches of a node with a wrong checksum, or bounds that cannot be.",
    "stale": "Batches and signs of life of an earlier start of a node.",
    "reloads": "Times that a node's flash was read.",
    "lost": "Changes that a node could not repeat, so that its flash was read.",
}
OWNER_GAUGES = {
    "alive": "Whether a node gave a sign of life within the last three seconds.",
    "behind": "Changes of a node that are known of and not applied yet.",
    "held_size": "Bytes of a node's news that wait for those before them.",
}
COUNTERS = {
    "batches": "Batches of other nodes' news that were applied.",
    "batches_refused": "Batches that were refused: damaged, or of another node.",
    "records": "Records in batches that were applied.",
    "skipped": "Of those the ones that changed nothing: old, ended, without room.",
    "conflicts": "Blocks of this node that lost their name to another node's later one.",
    "leases": "Leases of this node's blocks that other nodes were given.",
    "touches": "Blocks of this node that other nodes said they use, without a read.",
    "loads": "Times that a node's flash was read to its end.",
    "loaded_names": "Names that were read from flash.",
    "forged": "Messages without a valid seal.",
    "malformed": "Messages that make no sense, or of a newer kvfs.",
    "doubled": "Messages that came by more than one engine.",
}
GAUGES = {
    "slot": "This node's slot.",
    "nodes": "Slots of the pod.",
    "epoch": "This mount's epoch.",
    "tombstones": "Removals of other nodes' blocks that their owners may not have heard of.",
}
FEED_COUNTERS = {
    "collected": "Batches of this node's own news.",
    "collected_size": "Bytes of those.",
    "appended": "Entries appended to engines.",
    "appended_size": "Bytes of those.",
    "dropped": "Own batches that no engine had before they were dropped.",
    "skipped": "Own changes that had no room in the queue.",
    "repeated": "Own batches that were repeated for others.",
    "too_old": "Asks of others for news that are not kept any more.",
}
FEED_GAUGES = {
    "history_batches": "Own batches in memory, to be repeated.",
    "history_size": "Bytes of those.",
    "unsent_batches": "Own batches that no engine has yet.",
}
ASKS = {
    "fresh": "Barriers that passed: all that others held back is here.",
    "not_fresh": "Barriers that failed.",
    "leases_held": "Blocks of other nodes that were leased.",
    "leases_refused": "Blocks of other nodes that were not leased.",
    "leases_unanswered": "Blocks of other nodes whose owner gave no answer.",
}
LINK = {
    "failures": "Calls of an engine that failed.",
    "ups": "Times that an engine could be reached again.",
    "entries": "Entries that came by an engine.",
    "read_size": "Bytes of those.",
    "resets": "Streams of an engine that went back, as after a flush.",
}
MAP_GAUGES = {
    "entries": "Names of other nodes in the pod map, directories included.",
    "directories": "Of those the directories.",
    "dead": "Entries of lives that ended, which wait for the sweep.",
    "gone": "Removals that the map remembers for a while.",
    "entries_max": "Names that the pod map may hold.",
    "capacity": "Places in the pod map.",
    "bytes": "Bytes of memory that the pod map takes when all of it is touched.",
    "shapes": "Shapes in use: sizes, modes and owners of other nodes' blocks.",
    "segments": "Segments of other nodes that have blocks.",
    "news_held": "Own changes that wait to be told.",
}
MAP_COUNTERS = {
    "inserted": "Names that came into the pod map.",
    "replaced": "Names in it that got another place.",
    "removed": "Names in it that were removed.",
    "superseded": "Names in it that a later block ended which could not be entered itself.",
    "forgotten": "Names in it that led to other bytes, and went.",
    "dropped": "Names in it that made room for others.",
    "refused": "Names that had no room in it.",
    "shapes_full": "Names that had no shape left.",
    "displaced": "Names that moved within it.",
    "lives": "Lives of segments that ended.",
    "swept": "Dead entries that the sweep removed.",
    "sweeps": "Whole sweeps.",
    "waiting": "New lives of segments that had to wait for the sweep.",
    "versions_unknown": "Batches of a newer kvfs.",
    "news_added": "Own changes that were noted.",
    "news_merged": "Of those the ones that a later one of the same name took in.",
    "news_vanished": "Of those the ones of blocks that came and went before they were told.",
    "news_lost": "Of those the ones that had no room in the queue.",
    "news_batches": "Own batches that were packed.",
    "news_records": "Records in those.",
    "news_bytes": "Bytes of those.",
    "news_wakes": "Times that the feed was woken for own changes.",
}


class Sample(NamedTuple):
    """kind: "gauge" or "counter"."""

    kind: str
    name: str
    help: str
    labels: Mapping[str, str]
    value: float


def is_seen(owner: Json) -> bool:
    """Whether this node ever heard of a slot's node."""
    return number(owner, "epoch") >= 0 or bool(number(owner, "alive")) or bool(number(owner, "batches"))


# ---- text ----


def pod_lines(status: Json) -> list[str]:
    """The lines of `kvfs status`."""
    pod = section(status, "pod")
    if not pod:
        return []
    links, fill = items(pod, "engines"), section(pod, "map")
    up = sum(link.get("state") == "up" for link in links)
    limit = number(fill, "entries_max")
    share = f" ({number(fill, 'entries') * 100 / limit:.1f}%)" if limit else ""
    lines = [
        f"slot {number(pod, 'slot'):.0f} of {number(pod, 'nodes'):.0f}, epoch {number(pod, 'epoch'):.0f}; "
        f"engines {up} of {len(links)} up; frozen slots {_frozen(pod)}",
        f"news: {_lag(pod)}; behind {sum(number(owner, 'behind') for owner in items(pod, 'owners')):.0f}, "
        f"gaps {number(pod, 'gaps'):.0f}, repeats {number(pod, 'repeats'):.0f}, "
        f"own {number(pod, 'feed', 'unsent_batches'):.0f} unsent; tombstones {number(pod, 'tombstones'):.0f}",
        f"map: {counted(number(fill, 'entries'), 'name')} of {limit:.0f}{share}, "
        f"of them directories {number(fill, 'directories'):.0f}; dropped {number(fill, 'dropped'):.0f}, "
        f"refused {number(fill, 'refused'):.0f}, forgotten {number(fill, 'forgotten'):.0f}, "
        f"shapes {number(fill, 'shapes'):.0f}, memory at most {size_text(number(fill, 'bytes'))}",
    ]
    return [f"{'   pod: ' if i == 0 else '        '}{line}" for i, line in enumerate(lines)]


def _frozen(pod: Json) -> str:
    slots = pod.get("frozen")
    if not isinstance(slots, (list, tuple)):
        return "unknown while no engine is there"
    shown = ", ".join(str(slot) for slot in slots[:_ROWS_MAX])
    return (shown or "none") + (f", ... ({len(slots)})" if len(slots) > _ROWS_MAX else "")


def _lag(pod: Json) -> str:
    if not any(number(owner, "batches") for owner in items(pod, "owners")):
        return "no news of others yet"
    return f"lag p50 {time_text(number(pod, 'lag_ms_p50') * 1000)}, p99 {time_text(number(pod, 'lag_ms_p99') * 1000)}"


def pod_advice(status: Json) -> list[str]:
    """All that the operator should know or act on."""
    pod = section(status, "pod")
    links, fill, found = items(pod, "engines"), section(pod, "map"), []
    away = [link for link in links if link.get("state") != "up"]
    for link in away:
        rest = "others bring the news" if len(away) < len(links) else "others' news stop; all else goes on"
        found.append(f"engine {link.get('url')} is away: {link.get('error') or 'not reached yet'}; {rest}")
    if number(fill, "dropped") or number(fill, "refused"):
        found.append(
            f"the pod map is full: {counted(number(fill, 'dropped') + number(fill, 'refused'), 'name')} of others had "
            "no room: a miss each; a larger map_size holds more"
        )
    if number(fill, "shapes_full"):
        found.append(
            f"no room for the size of {counted(number(fill, 'shapes_full'), 'name')} of others: a miss each; "
            "blocks have too many sizes"
        )
    newer = [f"{number(owner, 'slot'):.0f}" for owner in items(pod, "owners") if owner.get("state") == "unsupported"]
    if newer:
        found.append(f"slots {', '.join(newer)} run a newer kvfs, whose news are not understood: upgrade this node")
    if number(pod, "feed", "dropped"):
        found.append(
            f"{counted(number(pod, 'feed', 'dropped'), 'batch of this node')} reached no engine: others read flash"
        )
    return found


def owner_rows(pod: Json, seconds: float = 0.0) -> list[list[str]]:
    """A row for each slot that was heard of, the slowest first; with seconds of a difference() also news a second."""
    rows = [["slot", "state", "lag p50", "lag p99", "behind", "gaps", "repeats", *(["news B/s"] if seconds else [])]]
    owners = sorted(filter(is_seen, items(pod, "owners")), key=lambda one: -number(one, "lag_ms_p99"))
    for owner in owners[:_ROWS_MAX]:
        lags = [time_text(number(owner, key) * 1000) for key in ("lag_ms_p50", "lag_ms_p99")]
        state = str(owner.get("state")) + ("" if number(owner, "alive") else ", not alive")
        counts = [f"{number(owner, key):.0f}" for key in ("behind", "gaps", "repeats")]
        rate = [size_text(number(owner, "size") / seconds)] if seconds else []
        rows.append([f"{number(owner, 'slot'):.0f}", state, *lags, *counts, *rate])
    return rows


def pod_table(status: Json, seconds: float = 0.0) -> list[str]:
    rows = owner_rows(section(status, "pod"), seconds)
    return table(rows) if len(rows) > 1 else []


def stats_heads(status: Json) -> list[str]:
    return ["news/s", "lag p99", "map%"] if section(status, "pod") else []


def stats_cells(change: Json, seconds: float) -> list[str]:
    """Of one line of `kvfs stats --interval`."""
    pod = section(change, "pod")
    if not pod:
        return []
    limit = number(pod, "map", "entries_max")
    return [
        count_text(number(pod, "records") / seconds),
        time_text(number(pod, "lag_ms_p99") * 1000),
        f"{number(pod, 'map', 'entries') * 100 / limit:.1f}" if limit else "-",
    ]


def pod_difference(now: Json, before: Json) -> dict[str, object]:
    """Counters of `now` less `before`'s; gauges and lags as they are now."""
    olds = {old.get("slot"): old for old in items(before, "owners")}
    owners = [_less(owner, olds.get(owner.get("slot"), {}), OWNER_COUNTERS) for owner in items(now, "owners")]
    return {
        **_less(now, before, COUNTERS),
        "owners": owners,
        "feed": _less(section(now, "feed"), section(before, "feed"), FEED_COUNTERS),
        "map": _less(section(now, "map"), section(before, "map"), MAP_COUNTERS),
        "asks": _less(section(now, "asks"), section(before, "asks"), ASKS),
    }


def _less(now: Json, before: Json, counters: Mapping[str, str]) -> dict[str, object]:
    return {key: number(now, key) - number(before, key) if key in counters else value for key, value in now.items()}


# ---- Prometheus ----


def samples(status: Json) -> Iterator[Sample]:
    """All of a pod: kvfs_pod_*. Slots that were never heard of have none."""
    pod = section(status, "pod")
    if not pod:
        return
    yield from _samples("kvfs_pod_", pod, GAUGES, COUNTERS)
    yield from _samples("kvfs_pod_feed_", section(pod, "feed"), FEED_GAUGES, FEED_COUNTERS)
    yield from _samples("kvfs_pod_", section(pod, "asks"), {}, ASKS)
    yield from _samples("kvfs_pod_map_", section(pod, "map"), MAP_GAUGES, MAP_COUNTERS)
    frozen = pod.get("frozen")
    if isinstance(frozen, (list, tuple)):
        help_ = "Slots with blocks and without a living node: they are read by all and written by none."
        yield Sample("gauge", "kvfs_pod_frozen_slots", help_, {}, len(frozen))
    for link in items(pod, "engines"):
        labels = {"engine": str(link.get("url"))}
        up = float(link.get("state") == "up")
        yield Sample("gauge", "kvfs_pod_engine_up", "Whether this node reaches an engine.", labels, up)
        for key, help_ in LINK.items():
            yield Sample("counter", f"kvfs_pod_engine_{_name(key)}", help_, labels, number(link, key))
    for owner in filter(is_seen, items(pod, "owners")):
        labels = {"slot": f"{number(owner, 'slot'):.0f}"}
        yield from _samples("kvfs_pod_owner_", owner, OWNER_GAUGES, OWNER_COUNTERS, labels)
        for name, quantile in (("lag_ms_p50", "0.5"), ("lag_ms_p99", "0.99")):
            yield Sample(
                "gauge", "kvfs_pod_owner_lag_seconds", "Time from a node's change to its application here, since the "
                "mount.", {**labels, "quantile": quantile}, number(owner, name) / 1000,
            )  # fmt: skip


def _samples(
    prefix: str, document: Json, gauges: Mapping[str, str], counters: Mapping[str, str],
    labels: Mapping[str, str] | None = None,
) -> Iterator[Sample]:  # fmt: skip
    for key, help_ in gauges.items():
        yield Sample("gauge", prefix + _name(key), help_, labels or {}, number(document, key))
    for key, help_ in counters.items():
        yield Sample("counter", prefix + _name(key), help_, labels or {}, number(document, key))


def _name(key: str) -> str:
    """Sizes are bytes."""
    return key.removesuffix("size") + "bytes" if key == "size" or key.endswith("_size") else key
